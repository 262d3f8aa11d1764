/* SPDX-License-Identifier: Apache-2.0 */
/* Sign sketches. Invariant: decode's float steps are single operations in a fixed order. No state;
 * any thread. */
#include "codec/sketch.h"
#include "codec/lloyd_table.h"

#include <math.h>

/* The norm of least error, which leaves the smallest residual. */
float cst_sketch_codes(uint8_t *codes, const float *x, uint32_t dims,
                       const struct cst_codebook *book, const struct cst_codec_ops *ops) {
    double energy = 0, product = 0, square = 0;

    for (uint32_t j = 0; j < dims; j++)
        energy += (double)x[j] * (double)x[j];
    ops->nearest(codes, x, energy > 0 ? (float)sqrt(dims / energy) : 0, book->midpoint, book->bits,
                 dims);
    for (uint32_t j = 0; j < dims; j++) {
        product += (double)x[j] * (double)book->level[codes[j]];
        square += book->square[codes[j]];
    }
    return (float)(product / square);
}

float cst_sketch_signs(uint8_t *codes, float *x, uint32_t dims, const struct cst_codebook *book,
                       float norm, const struct cst_codec_ops *ops) {
    double energy = 0, sum = 0;

    for (uint32_t j = 0; j < dims; j++) {
        x[j] -= book->level[codes[j]] * norm;
        energy += (double)x[j] * (double)x[j];
    }
    cst_head_signs(x, dims, 0);
    cst_head_transform(x, dims, ops);
    for (uint32_t j = 0; j < dims; j++) {
        codes[j] |= (uint8_t)((x[j] < 0) << book->bits);
        sum += fabs((double)x[j]);
    }
    return sum > 0 ? (float)(energy / sum) : 0;
}

void cst_sketch_decode(float *x, const uint8_t *codes, uint32_t dims, unsigned bits, float norm,
                       float size, const float *mean, const struct cst_codec_ops *ops) {
    const float *level = cst_lloyd_levels(bits - 1);

    for (uint32_t j = 0; j < dims; j++)
        x[j] = codes[j] >> (bits - 1) ? -size : size;
    cst_head_transform(x, dims, ops);
    cst_head_signs(x, dims, 0);
    for (uint32_t j = 0; j < dims; j++)
        x[j] += level[codes[j] & ((1u << (bits - 1)) - 1)] * norm;
    cst_head_transform(x, dims, ops);
    for (uint32_t j = 0; mean && j < dims; j++)
        x[j] += mean[j];
}
