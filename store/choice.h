/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which presets the frames of a class may be made with, the wanted one first. No state; any thread.
 */
#pragma once

#include "base/layout.h"
#include "codec/codec.h"

enum { CST_CHOICES_MAX = 12 };

struct cst_choices {
    uint32_t n;
    struct cst_encode_params try[CST_CHOICES_MAX]; /* preset, its parameters and the bound */
};

/* The bound of a class, as in struct cst_encode_params; 0: exact. */
float cst_class_bound(enum cst_class klass);

/* The step of preset deep, as in struct cst_encode_params: what side data are learned for. */
float cst_class_step(enum cst_class klass);

/* wanted: NULL for the best one that the class is safe with. side: what is known of the space, or
 * NULL. The last choices are lossless, then raw: one of them takes any block. */
void cst_choices(struct cst_choices *out, enum cst_class klass,
                 const struct cst_encode_params *wanted, const struct cst_side *side);
