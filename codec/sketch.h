/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sign sketch of what Lloyd-Max codes leave of a head (TurboQuant-prod: Zandieh et al.,
 * "TurboQuant", algorithm 2; QJL: "QJL: 1-Bit Quantized JL Transform"), so that inner products with
 * decoded heads are unbiased. S is orthogonal here, a Hadamard transform behind fixed signs, for
 * which the factor is sqrt(pi / (2 d)) |r| on average and the variance (pi / 2 - 1) / d |r|^2
 * |y|^2, below the pi / (2 d) |r|^2 |y|^2 of Gaussian rows. A head keeps its own factor,
 * |r|^2 / |S r|_1: a residual of one large value is flat behind S, and the average would miss it
 * by up to a fourth.
 *
 * A code of b bits is b - 1 bits of a level, below the sign. Pure; any thread.
 */
#pragma once

#include "codec/heads.h"

/* Codes of b bits of a transformed head, book of b - 1 bits; x is overwritten. norm is what the
 * levels are multiplied by; it is rounded by the caller between the two: codes first, then signs
 * of x - level * norm. */
float cst_sketch_codes(uint8_t *codes, const float *x, uint32_t dims,
                       const struct cst_codebook *book, const struct cst_codec_ops *ops);

/* Adds the signs, and returns what they are to be multiplied by. */
float cst_sketch_signs(uint8_t *codes, float *x, uint32_t dims, const struct cst_codebook *book,
                       float norm, const struct cst_codec_ops *ops);

/* The head itself from codes of `bits` bits and the levels of one bit less, plus `mean` as in
 * cst_head_decode(). */
void cst_sketch_decode(float *x, const uint8_t *codes, uint32_t dims, unsigned bits, float norm,
                       float size, const float *mean, const struct cst_codec_ops *ops);
