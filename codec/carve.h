/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lays out memory that a caller gives: the same calls without a base tell how much it must be, so
 * the two can't differ. No state; any thread.
 */
#pragma once

#include "base/macros.h"

#include <stddef.h>
#include <stdint.h>

enum { CST_CARVE_ALIGN = 64 };

struct cst_carve {
    uint8_t *base; /* at a multiple of CST_CARVE_ALIGN; NULL: only counts */
    size_t at;
};

/* n elements of so many bytes, aligned; NULL where it only counts. */
static inline void *cst_carve(struct cst_carve *c, uint64_t n, size_t size) {
    void *p = c->base ? c->base + c->at : NULL;

    c->at += cst_align_up(n * size, CST_CARVE_ALIGN);
    return p;
}

static inline float *cst_carve_floats(struct cst_carve *c, uint64_t n) {
    return cst_carve(c, n, sizeof(float));
}
