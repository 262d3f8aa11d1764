/* SPDX-License-Identifier: Apache-2.0 */
/* Side data from a file, parsed for a model. One thread. */
#pragma once

#include "codec/side.h"

#include <stddef.h>
#include <stdint.h>

struct cst_codec_side {
    struct cst_side side;
    uint8_t *bytes, *memory; /* owned */
};
#define CST_CODEC_SIDE_NULL ((struct cst_codec_side){ 0 })

/* 0 or a negative errno; has printed what is wrong. parse copies the bytes. deinit also after a
 * failure. */
int cst_codec_side_parse(struct cst_codec_side *out, const void *bytes, size_t len,
                         const struct cst_descriptor *desc);
int cst_codec_side_read(struct cst_codec_side *out, const char *path,
                        const struct cst_descriptor *desc);
void cst_codec_side_deinit(struct cst_codec_side *s);
