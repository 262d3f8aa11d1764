/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Heads as rotated codes: the values of a head of one token, Hadamard transformed, which makes them
 * about normal whatever the channels were, as codes of the levels of a normal variable times one
 * norm. The norm is chosen so that what is decoded has the length of the original.
 *
 * Heads whose size isn't a power of two are cut into blocks that are, the largest first: 80 = 64
 * + 16. Pure; any thread.
 */
#pragma once

#include "codec/dispatch.h"

/* The levels of a quantizer of a normal variable of deviation 1. */
struct cst_codebook {
    unsigned bits;
    float level[256];
    double square[256]; /* of a level */
    float midpoint[255];
};

/* 1 to 8 bits: Lloyd-Max levels, or those one step apart around 0 for the step of least error. */
void cst_codebook_lloyd(struct cst_codebook *book, unsigned bits);
void cst_codebook_uniform(struct cst_codebook *book, unsigned bits);
/* Mean squared error of a normal variable of deviation 1; 0 bits: all of it. */
double cst_codebook_distortion(bool lloyd, unsigned bits);
/* For decoding: the levels alone. */
void cst_uniform_levels(float level[256], unsigned bits);

/* 1 / sqrt(n) of a power of two, which the transform of a block of n values is multiplied by. */
float cst_head_unit(uint32_t n);

/* The transform, of length-preserving scale, in place. */
void cst_head_transform(float *x, uint32_t dims, const struct cst_codec_ops *ops);

/* Changes fixed signs, of a sequence from `first` on. */
void cst_head_signs(float *x, uint32_t dims, uint32_t first);

/*
 * A rotation that looks random to heads of any shape, in place: fixed signs, then the transform of
 * the first n values, n the largest power of two; where some are left, then other signs and the
 * transform of the last n. A transform alone turns what lies along one of its rows, as in models
 * that rotate their cache themselves, into one large value. back: the inverse.
 */
void cst_head_spin(float *x, uint32_t dims, const struct cst_codec_ops *ops);
void cst_head_spin_back(float *x, uint32_t dims, const struct cst_codec_ops *ops);

/* Sum of squares. */
double cst_head_energy(const float *x, size_t n);

/* Codes of a transformed head, and the norm that its levels are to be multiplied by. */
float cst_head_encode(uint8_t *codes, const float *x, uint32_t dims,
                      const struct cst_codebook *book, const struct cst_codec_ops *ops);

/* The head itself, plus what `mean` holds of it if that isn't NULL. x is not mean. */
void cst_head_decode(float *x, const uint8_t *codes, uint32_t dims, const float *level,
                     unsigned bits, float norm, const float *mean, const struct cst_codec_ops *ops);
