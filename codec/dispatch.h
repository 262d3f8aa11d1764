/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The inner loops that exist once per instruction set. Every set gives the same bytes; tests
 * compare each with the portable one.
 */
#pragma once

#include "codec/huffman.h"
#include "codec/rans.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cst_codec_ops {
    const char *name;

    /* n entries of the decoder's table: a code put before what the entries at `from` hold. */
    void (*huff_prepend)(uint64_t *to, const uint64_t *from, size_t n, unsigned symbol,
                         unsigned length);

    /* Advances four lanes, whose outputs may follow one another, as far as whole rounds fit. */
    void (*huff_lanes)(struct cst_huff_lane lane[CST_HUFF_LANES], const uint64_t *entry);

    /* n 16-bit floats x = sign, exponent, mantissa: the top byte of x rotated left by one goes to
     * or comes from hi, the other byte to or from lo. */
    void (*split)(uint8_t *hi, uint8_t *lo, const uint8_t *src, size_t n);
    void (*merge)(uint8_t *dst, const uint8_t *hi, const uint8_t *lo, size_t n);

    /* [enum cst_dtype], none for opaque. n values to fp32; n values q[i] * scale rounded to nearest
     * even. */
    void (*to_f32[4])(float *x, const uint8_t *src, size_t n);
    void (*dequant[4])(uint8_t *dst, const int8_t *q, float scale, size_t n);

    /* The largest of n magnitudes as bits of a float; above 0x7f7fffff when one isn't finite. */
    uint32_t (*largest)(const float *x, size_t n);

    /* q[i] = x[i] / scale rounded half away from zero, at most 127 in magnitude. */
    void (*quantize)(int8_t *q, const float *x, float scale, size_t n);

    /* n codes of `bits` bits, 1 .. 8, packed from the lowest bit of the first byte up; n is a
     * multiple of 8. */
    void (*unpack)(uint8_t *codes, const uint8_t *src, size_t n, unsigned bits);

    /* n fp16 values times unit; false when one of them is not finite. */
    bool (*halves)(float *x, const uint8_t *src, float unit, size_t n);

    /* x[i] = q[i] * step[i]; and q[i] = x[i] * inverse[i] rounded half away from zero, where that
     * is below 2^30 */
    void (*from_steps)(float *x, const int32_t *q, const float *step, size_t n);
    void (*to_steps)(int32_t *q, const float *x, const float *inverse, size_t n);

    /* x[i] = codes[i] * scale[i] + zero[i], or with one scale and zero */
    void (*affine)(float *x, const uint8_t *codes, const float *scale, const float *zero, size_t n);
    void (*affine_group)(float *x, const uint8_t *codes, float scale, float zero, size_t n);

    /* The Walsh-Hadamard transform of n = 2^k values, unscaled: sums and differences of values 1,
     * then 2, 4, ... apart. */
    void (*hadamard)(float *x, size_t n);

    /* The transform of level[codes[i]] * scale, plus mean[i] where mean is not NULL. There are
     * 2^bits levels, of which at least 16 floats can be read. */
    void (*hadamard_levels)(float *x, const uint8_t *codes, const float *level, unsigned bits,
                            float scale, const float *mean, size_t n);

    /* A row of packed codes by hadamard_levels(): heads of n = 2^k values, each with a scale.
     * `codes` is room for them, padded to a multiple of 8. */
    void (*hadamard_row)(float *x, uint8_t *codes, const uint8_t *packed, const float *level,
                         unsigned bits, const float *scale, const float *mean, size_t n,
                         uint32_t heads);

    /* Turns n pairs (a, b) to (a c - b s, b c + a s), s = sine * direction: the pairs are
     * (x[2i], x[2i + 1]) or (x[i], x[n + i]). */
    void (*turn_pairs)(float *x, const float *cosine, const float *sine, float direction, size_t n);
    void (*turn_halves)(float *x, const float *cosine, const float *sine, float direction,
                        size_t n);

    /* [enum cst_dtype], none for opaque. n finite values rounded to nearest even. */
    void (*from_f32[4])(uint8_t *dst, const float *x, size_t n);

    /* How many of the 2^bits - 1 rising midpoints aren't above x[i] * scale. */
    void (*nearest)(uint8_t *codes, const float *x, float scale, const float *midpoint,
                    unsigned bits, size_t n);

    /* codes[i] = (x[i] - zero[i]) / scale[i], 0 where scale[i] isn't above 0, within least .. most,
     * rounded half up. */
    void (*to_codes)(uint8_t *codes, const float *x, const float *scale, const float *zero,
                     float least, float most, size_t n);

    /* low[i] and high[i] widened to hold x[i], none of them a NaN. */
    void (*widen)(float *low, float *high, const float *x, size_t n);

    /* sum[i] += x[i] */
    void (*add)(double *sum, const float *x, size_t n);
    /* cst_rans_rows_portable() */
    uint32_t (*rans_rows)(struct cst_rans_reader *r, const struct cst_rans_rows *rows,
                          uint32_t row);

    /* cst_rans_put_portable() */
    uint8_t *(*rans_put)(uint8_t *end, uint32_t state[CST_RANS_LANES], unsigned lanes,
                         const int32_t *q, uint32_t tokens, const struct cst_rans_table *table,
                         unsigned shift);
    /* The smallest and the largest of n > 0 integers. */
    void (*int_range)(int32_t *least, int32_t *most, const int32_t *q, size_t n);
    /* q[i] = q[i] * 2^shift - 2^(shift - 1) + the next shift (1 .. 6) bits, from bit `bit` < 8 of
     * src on; n is a multiple of 8, and 8 bytes behind the bits can be read. */
    void (*low_bits)(int32_t *q, const uint8_t *src, unsigned bit, size_t n, unsigned shift);

    /* Transposes: q[c * stride + t] = src[t * pitch + c]; and back, offset[c] added modulo 256. */
    void (*bytes_to_rows)(int32_t *q, size_t stride, const uint8_t *src, size_t pitch,
                          uint32_t tokens, uint32_t channels);
    void (*rows_to_bytes)(uint8_t *dst, size_t pitch, const int32_t *q, size_t stride,
                          uint32_t tokens, const int32_t *offset, uint32_t channels);

    /* square[i] += (x[i] - mean[i])^2, error[i] += (x[i] - y[i])^2 */
    void (*moments)(double *square, double *error, const double *mean, const float *x,
                    const float *y, size_t n);
};

/* The best for this machine; and each one, NULL where the machine can't run it. */
const struct cst_codec_ops *cst_codec_ops(void);
const struct cst_codec_ops *cst_codec_ops_portable(void);
const struct cst_codec_ops *cst_codec_ops_avx2(void);
const struct cst_codec_ops *cst_codec_ops_avx512(void);

/* For the tables only. */
void cst_huff_lanes_portable(struct cst_huff_lane lane[CST_HUFF_LANES], const uint64_t *entry);
void cst_huff_prepend_portable(uint64_t *to, const uint64_t *from, size_t n, unsigned symbol,
                               unsigned length);
extern const struct cst_codec_ops cst_codec_avx2_table, cst_codec_avx512_table;
