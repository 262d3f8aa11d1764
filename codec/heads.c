/* SPDX-License-Identifier: Apache-2.0 */
/* Rotated codes of one head. Every step is a single operation in a fixed order. No state; any
 * thread. */
#include "codec/heads.h"
#include "codec/coded.h"
#include "codec/lloyd_table.h"

#include <math.h>

/* Steps of the uniform quantizers of 1 to 8 bits (docs/codec-format.md section 4.7), and their mean
 * squared errors. */
static const float uniform_step[9] = { 0,         1.595769f, 0.995687f, 0.586019f, 0.335201f,
                                       0.188139f, 0.104063f, 0.056868f, 0.030762f };
static const double uniform_distortion[9] = { 1,          0.36338,     0.118846,
                                              0.0374397,  0.0115429,   0.00349521,
                                              0.00104005, 0.000304333, 8.76862e-05 };
static const double lloyd_distortion[9] = { 1,           0.36338,    0.117482,
                                            0.0345478,   0.00950065, 0.00250457,
                                            0.000643854, 1.635e-4,   4.119e-5 };

/* The next block of a head of which n dimensions are left. */
static uint32_t block_size(uint32_t n) {
    return 1u << (31 - __builtin_clz(n));
}

float cst_head_unit(uint32_t n) {
    int log2 = __builtin_ctz(n);

    return cst_coded_unit(-(log2 / 2)) * (log2 % 2 ? 0x1.6a09e6p-1f : 1.0f);
}

static void codebook_finish(struct cst_codebook *b) {
    for (unsigned i = 0; i < 1u << b->bits; i++)
        b->square[i] = (double)b->level[i] * (double)b->level[i];
    for (unsigned i = 0; i + 1 < 1u << b->bits; i++)
        b->midpoint[i] = (b->level[i] + b->level[i + 1]) * 0.5f;
}

double cst_codebook_distortion(bool lloyd, unsigned bits) {
    return lloyd ? lloyd_distortion[bits] : uniform_distortion[bits];
}

void cst_codebook_lloyd(struct cst_codebook *b, unsigned bits) {
    const float *level = cst_lloyd_levels(bits);

    b->bits = bits;
    for (unsigned i = 0; i < 1u << bits; i++)
        b->level[i] = level[i];
    codebook_finish(b);
}

void cst_uniform_levels(float level[256], unsigned bits) {
    for (unsigned i = 0; i < 1u << bits; i++)
        level[i] = ((float)i - (float)(1u << bits) / 2 + 0.5f) * uniform_step[bits];
}

void cst_codebook_uniform(struct cst_codebook *b, unsigned bits) {
    b->bits = bits;
    cst_uniform_levels(b->level, bits);
    codebook_finish(b);
}

void cst_head_transform(float *x, uint32_t dims, const struct cst_codec_ops *ops) {
    for (uint32_t at = 0, n; at < dims; at += n) {
        float unit;

        n = block_size(dims - at);
        unit = cst_head_unit(n);
        ops->hadamard(x + at, n);
        for (uint32_t i = at; i < at + n; i++)
            x[i] *= unit;
    }
}

/* The lowest bits of murmur3's finalizer of first + 1, first + 2, ... */
void cst_head_signs(float *x, uint32_t dims, uint32_t first) {
    for (uint32_t j = 0; j < dims; j++) {
        uint32_t h = first + j + 1;

        h = (h ^ h >> 16) * 0x85ebca6bu;
        h = (h ^ h >> 13) * 0xc2b2ae35u;
        x[j] = (h ^ h >> 16) & 1 ? -x[j] : x[j];
    }
}

void cst_head_spin(float *x, uint32_t dims, const struct cst_codec_ops *ops) {
    uint32_t n = block_size(dims);

    cst_head_signs(x, dims, 0);
    cst_head_transform(x, n, ops);
    if (n == dims)
        return;
    cst_head_signs(x, dims, dims);
    cst_head_transform(x + dims - n, n, ops);
}

void cst_head_spin_back(float *x, uint32_t dims, const struct cst_codec_ops *ops) {
    uint32_t n = block_size(dims);

    if (n < dims) {
        cst_head_transform(x + dims - n, n, ops);
        cst_head_signs(x, dims, dims);
    }
    cst_head_transform(x, n, ops);
    cst_head_signs(x, dims, 0);
}

/* Sums are taken by SUMS in turn, so that no addition waits for the one before. */
enum { SUMS = 8 };

static double total(const double sum[SUMS]) {
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

double cst_head_energy(const float *x, size_t n) {
    double sum[SUMS] = { 0 };
    size_t i = 0;

    for (; i + SUMS <= n; i += SUMS) {
        for (size_t k = 0; k < SUMS; k++)
            sum[k] += (double)x[i + k] * (double)x[i + k];
    }
    for (; i < n; i++)
        sum[0] += (double)x[i] * (double)x[i];
    return total(sum);
}

static double energy_of_codes(const uint8_t *codes, const struct cst_codebook *book, uint32_t n) {
    double sum[SUMS] = { 0 };
    uint32_t i = 0;

    for (; i + SUMS <= n; i += SUMS) {
        for (uint32_t k = 0; k < SUMS; k++)
            sum[k] += book->square[codes[i + k]];
    }
    for (; i < n; i++)
        sum[0] += book->square[codes[i]];
    return total(sum);
}

float cst_head_encode(uint8_t *codes, const float *x, uint32_t dims,
                      const struct cst_codebook *book, const struct cst_codec_ops *ops) {
    double energy = cst_head_energy(x, dims);
    float scale = energy > 0 ? (float)sqrt(dims / energy) : 0;

    ops->nearest(codes, x, scale, book->midpoint, book->bits, dims);
    return (float)sqrt(energy / energy_of_codes(codes, book, dims));
}

void cst_head_decode(float *x, const uint8_t *codes, uint32_t dims, const float *level,
                     unsigned bits, float norm, const float *mean,
                     const struct cst_codec_ops *ops) {
    for (uint32_t at = 0, n; at < dims; at += n) {
        n = block_size(dims - at);
        ops->hadamard_levels(x + at, codes + at, level, bits, norm * cst_head_unit(n),
                             mean ? mean + at : NULL, n);
    }
}
