/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The inner loops that exist once per instruction set. Every set gives the same bytes; tests
 * compare each with the portable one.
 */
#pragma once

#include "codec/huffman.h"

#include <stddef.h>
#include <stdint.h>

struct cst_codec_ops {
    const char *name;

    /* Advances four lanes, whose outputs may follow one another, as far as whole rounds fit. */
    void (*huff_lanes)(struct cst_huff_lane lane[CST_HUFF_LANES], const uint64_t *entry);

    /* n 16-bit floats x = sign, exponent, mantissa: the top byte of x rotated left by one goes to
     * or comes from hi, the other byte to or from lo. */
    void (*split)(uint8_t *hi, uint8_t *lo, const uint8_t *src, size_t n);
    void (*merge)(uint8_t *dst, const uint8_t *hi, const uint8_t *lo, size_t n);

    /* n values q[i] * scale as floats of the dtype, rounded to nearest even. */
    void (*dequant[4])(uint8_t *dst, const int8_t *q, float scale, size_t n); /* [enum cst_dtype] */
};

/* The best for this machine; and each one, NULL where the machine can't run it. */
const struct cst_codec_ops *cst_codec_ops(void);
const struct cst_codec_ops *cst_codec_ops_portable(void);
const struct cst_codec_ops *cst_codec_ops_avx2(void);

/* For the tables only. */
void cst_huff_lanes_portable(struct cst_huff_lane lane[CST_HUFF_LANES], const uint64_t *entry);
extern const struct cst_codec_ops cst_codec_avx2_table;
