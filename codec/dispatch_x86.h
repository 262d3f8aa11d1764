/* SPDX-License-Identifier: Apache-2.0 */
/* The AVX2 loops, for the tables of this and of later instruction sets. */
#pragma once

#include "codec/dispatch.h"

void cst_avx2_huff_prepend(uint64_t *to, const uint64_t *from, size_t n, unsigned symbol,
                           unsigned length);
void cst_avx2_huff_lanes(struct cst_huff_lane lane[CST_HUFF_LANES], const uint64_t *entry);
void cst_avx2_split(uint8_t *hi, uint8_t *lo, const uint8_t *src, size_t n);
void cst_avx2_merge(uint8_t *dst, const uint8_t *hi, const uint8_t *lo, size_t n);
void cst_avx2_from_f32(float *x, const uint8_t *src, size_t n);
void cst_avx2_from_f16(float *x, const uint8_t *src, size_t n);
void cst_avx2_from_bf16(float *x, const uint8_t *src, size_t n);
void cst_avx2_dequant_f32(uint8_t *dst, const int8_t *q, float scale, size_t n);
void cst_avx2_dequant_f16(uint8_t *dst, const int8_t *q, float scale, size_t n);
void cst_avx2_dequant_bf16(uint8_t *dst, const int8_t *q, float scale, size_t n);
uint32_t cst_avx2_largest(const float *x, size_t n);
void cst_avx2_quantize(int8_t *q, const float *x, float scale, size_t n);
void cst_avx2_unpack(uint8_t *codes, const uint8_t *src, size_t n, unsigned bits);
bool cst_avx2_halves(float *x, const uint8_t *src, float unit, size_t n);
void cst_avx2_from_steps(float *x, const int32_t *q, const float *step, size_t n);
void cst_avx2_to_steps(int32_t *q, const float *x, const float *inverse, size_t n);
void cst_avx2_affine(float *x, const uint8_t *codes, const float *scale, const float *zero,
                     size_t n);
void cst_avx2_affine_group(float *x, const uint8_t *codes, float scale, float zero, size_t n);
void cst_avx2_hadamard(float *x, size_t n);
void cst_avx2_hadamard_levels(float *x, const uint8_t *codes, const float *level, unsigned bits,
                              float scale, const float *mean, size_t n);
void cst_avx2_hadamard_row(float *x, uint8_t *codes, const uint8_t *packed, const float *level,
                           unsigned bits, const float *scale, const float *mean, size_t n,
                           uint32_t heads);
void cst_avx2_turn_pairs(float *x, const float *cosine, const float *sine, float direction,
                         size_t n);
void cst_avx2_turn_halves(float *x, const float *cosine, const float *sine, float direction,
                          size_t n);
void cst_avx2_to_f32_bytes(uint8_t *dst, const float *x, size_t n);
void cst_avx2_to_f16_bytes(uint8_t *dst, const float *x, size_t n);
void cst_avx2_to_bf16_bytes(uint8_t *dst, const float *x, size_t n);
void cst_avx2_add(double *sum, const float *x, size_t n);
void cst_avx2_moments(double *square, double *error, const double *mean, const float *x,
                      const float *y, size_t n);
void cst_avx2_nearest(uint8_t *codes, const float *x, float scale, const float *midpoint,
                      unsigned bits, size_t n);
void cst_avx2_to_codes(uint8_t *codes, const float *x, const float *scale, const float *zero,
                       float least, float most, size_t n);
void cst_avx2_widen(float *low, float *high, const float *x, size_t n);
uint32_t cst_avx2_rans_rows(struct cst_rans_reader *r, const struct cst_rans_rows *rows,
                            uint32_t row);
uint32_t cst_avx512_rans_rows(struct cst_rans_reader *r, const struct cst_rans_rows *rows,
                              uint32_t row);
uint8_t *cst_avx512_rans_put(uint8_t *end, uint32_t state[CST_RANS_LANES], unsigned lanes,
                             const int32_t *q, uint32_t tokens, const struct cst_rans_table *table,
                             unsigned shift);
void cst_avx2_int_range(int32_t *least, int32_t *most, const int32_t *q, size_t n);
void cst_avx2_low_bits(int32_t *q, const uint8_t *src, unsigned bit, size_t n, unsigned shift);
void cst_avx2_bytes_to_rows(int32_t *q, size_t stride, const uint8_t *src, size_t pitch,
                            uint32_t tokens, uint32_t channels);
void cst_avx2_rows_to_bytes(uint8_t *dst, size_t pitch, const int32_t *q, size_t stride,
                            uint32_t tokens, const int32_t *offset, uint32_t channels);
