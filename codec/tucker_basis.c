/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The decomposition. Where a cell has fewer channels than tokens the token directions come from the
 * Gram matrix of the channels, which is the smaller one, and are made orthonormal afterwards: a
 * squared spectrum in fp32 leaves nothing of directions 2^-12 below the first one, and those must
 * still be directions. fp32 is enough elsewhere: only leading directions matter, and what is coded
 * behind them takes up their errors. No state; any thread.
 */
#include "codec/tucker_basis.h"
#include "codec/heads.h"
#include "codec/linalg.h"

#include "base/macros.h"
#include "base/random.h"

#include <math.h>
#include <string.h>

enum {
    OVERSAMPLE = CST_TUCKER_OVERSAMPLE,
    HALF_ROWS = 64, /* of so many rows a dimension every second one does */
};

void cst_tucker_flip(float *rows, uint32_t n, uint32_t columns) {
    for (uint32_t i = 0; i < n / 2; i++) {
        float *a = rows + (size_t)i * columns, *b = rows + (size_t)(n - 1 - i) * columns;

        for (uint32_t c = 0; c < columns; c++) {
            float x = a[c];

            a[c] = b[c];
            b[c] = x;
        }
    }
}

void cst_tucker_onto_tokens(float *out, const float *a, uint32_t rows,
                            const struct cst_tucker_shape *s, const float *x) {
    for (uint32_t i = 0; i < s->n_parts; i++) {
        uint32_t channels = s->part[i].heads * s->dims;
        float weight = s->part[i].weight;

        cst_gemm(false, true, rows, s->tokens, channels, weight * weight, a, channels, x, channels,
                 i ? 1 : 0, out, s->tokens);
        a += (size_t)rows * channels;
        x += (size_t)s->tokens * channels;
    }
}

void cst_tucker_across_tokens(float *out, const float *token, uint32_t rows,
                              const struct cst_tucker_shape *s, const float *x) {
    for (uint32_t i = 0; i < s->n_parts; i++) {
        uint32_t channels = s->part[i].heads * s->dims;

        cst_gemm(false, false, rows, channels, s->tokens, 1, token, s->tokens, x, channels, 0, out,
                 channels);
        out += (size_t)rows * channels;
        x += (size_t)s->tokens * channels;
    }
}

/* ---- dimensions ------------------------------------------------------------------------------
 */

static void dim_gram(float *gram, const struct cst_tucker_shape *s, const float *x) {
    for (uint32_t i = 0; i < s->n_parts; i++) {
        uint32_t rows = s->tokens * s->part[i].heads;
        float weight = s->part[i].weight;

        cst_gram(rows, s->dims, weight * weight, x, s->dims, i ? 1 : 0, gram, s->dims);
        x += (size_t)rows * s->dims;
    }
}

/* The same of every second token: the even ones of one head, the odd ones of the next. */
static void half_dim_gram(float *gram, const struct cst_tucker_shape *s, const float *x) {
    for (uint32_t i = 0; i < s->n_parts; i++) {
        uint32_t heads = s->part[i].heads, channels = heads * s->dims;
        float weight = s->part[i].weight;

        for (uint32_t h = 0; h < heads; h++)
            cst_gram((s->tokens + 1 - h % 2) / 2, s->dims, weight * weight,
                     x + (size_t)(h % 2) * channels + (size_t)h * s->dims, 2 * channels,
                     i || h ? 1 : 0, gram, s->dims);
        x += (size_t)s->tokens * channels;
    }
}

static int dim_basis(struct cst_tucker_basis *b, const struct cst_tucker_shape *s, const float *x,
                     bool half, const struct cst_tucker_scratch *w) {
    int r;

    if (half)
        half_dim_gram(b->dim, s, x);
    else
        dim_gram(b->dim, s, x);
    r = cst_eigen(s->dims, b->dim, s->dims, w->values, w->eigen);
    cst_tucker_flip(b->dim, s->dims, s->dims);
    return r;
}

/* ---- tokens ----------------------------------------------------------------------------------
 */

static int tokens_by_tokens(struct cst_tucker_basis *b, const struct cst_tucker_shape *s,
                            const float *x, const struct cst_tucker_scratch *w) {
    int r;

    for (uint32_t i = 0; i < s->n_parts; i++) {
        uint32_t channels = s->part[i].heads * s->dims;

        cst_gram_rows(s->tokens, channels, s->part[i].weight * s->part[i].weight, x, channels,
                      i ? 1 : 0, w->gram, s->tokens);
        x += (size_t)s->tokens * channels;
    }
    r = cst_eigen(s->tokens, w->gram, s->tokens, w->values, w->eigen);
    cst_tucker_flip(w->gram, s->tokens, s->tokens);
    memcpy(b->token, w->gram, (size_t)b->rank * s->tokens * sizeof(float));
    return r;
}

/* Upper triangle of X^T X of the weighted cell, n channels, in blocks of two parts. */
static void channel_gram(float *gram, uint32_t n, const struct cst_tucker_shape *s,
                         const float *x) {
    uint32_t at = 0;

    for (uint32_t i = 0; i < s->n_parts; i++) {
        uint32_t channels = s->part[i].heads * s->dims, to = at + channels;
        const float *other = x + (size_t)s->tokens * channels;
        float weight = s->part[i].weight;

        cst_gram(s->tokens, channels, weight * weight, x, channels, 0, gram + (size_t)at * n + at,
                 n);
        for (uint32_t j = i + 1; j < s->n_parts; j++) {
            uint32_t more = s->part[j].heads * s->dims;

            cst_gemm(true, false, channels, more, s->tokens, weight * s->part[j].weight, x,
                     channels, other, more, 0, gram + (size_t)at * n + to, n);
            other += (size_t)s->tokens * more;
            to += more;
        }
        x += (size_t)s->tokens * channels;
        at += channels;
    }
}

static int tokens_by_channels(struct cst_tucker_basis *b, const struct cst_tucker_shape *s,
                              const float *x, const struct cst_tucker_scratch *w) {
    uint32_t n = s->heads * s->dims, at = 0;
    int r;

    channel_gram(w->gram, n, s, x);
    r = cst_eigen(n, w->gram, n, w->values, w->eigen);
    if (r)
        return r;
    cst_tucker_flip(w->gram, n, n);
    for (uint32_t i = 0; i < s->n_parts; i++) {
        uint32_t channels = s->part[i].heads * s->dims;

        cst_gemm(false, true, b->rank, s->tokens, channels, s->part[i].weight, w->gram + at, n, x,
                 channels, i ? 1 : 0, b->token, s->tokens);
        x += (size_t)s->tokens * channels;
        at += channels;
    }
    return cst_orthonormalize(s->tokens, b->rank, b->token, s->tokens, w->eigen);
}

static void fill_signs(float *x, size_t n, struct cst_seeded_random *random) {
    uint64_t bits = 0;

    for (size_t i = 0; i < n; i++, bits >>= 1) {
        if (i % 64 == 0)
            bits = cst_seeded_random_next(random);
        x[i] = (float)(int)(2 * (bits & 1)) - 1;
    }
}

/* z: `rows` random combinations of the cell's channels, in the directions of the dimensions that
 * `s` has. They are drawn in channels: what comes of them depends on the space that those
 * directions span, not on which way each one points, which an eigensolver is free to choose. So a
 * block that was coded before, nearly what it was then, has the sketch again that it had. room: for
 * so many of them at once. */
static void make_sketch(float *z, uint32_t rows, const struct cst_tucker_shape *s, uint32_t dims,
                        const float *dim, float *room, uint32_t at_once) {
    struct cst_seeded_random random;

    cst_seeded_random_init(&random, 0x4a6f4c54);
    for (uint32_t i = 0, n; i < rows; i += n, z += (size_t)n * s->heads * s->dims) {
        n = CST_MIN(at_once, rows - i);
        fill_signs(room, (size_t)n * s->heads * dims, &random);
        cst_gemm(false, true, n * s->heads, s->dims, dims, 1, room, dims, dim, dims, 0, z, s->dims);
    }
}

/* token: of the combinations in w->z, those of the strongest directions, orthonormal. */
static int sketch_tokens(float *token, uint32_t rows, const struct cst_tucker_shape *s,
                         const struct cst_tucker_scratch *w) {
    cst_tucker_onto_tokens(token, w->z, rows, s, w->y);
    cst_tucker_across_tokens(w->z, token, rows, s, w->y);
    cst_tucker_onto_tokens(token, w->z, rows, s, w->y);
    return cst_orthonormalize(s->tokens, rows, token, s->tokens, w->eigen);
}

/* The cell in the directions of the dimensions that a sketch is made of: the first quarter, the
 * rest has little to say about tokens, or half of them where the spectrum is flat; more of them
 * where the tokens want more. */
static struct cst_tucker_shape strong_part(const struct cst_tucker_shape *s, uint32_t rank,
                                           const float *dim, const float *x, bool flat, float *y) {
    struct cst_tucker_shape strong = *s;
    uint32_t least = (rank + OVERSAMPLE + s->heads - 1) / s->heads;

    strong.dims = CST_MIN(CST_MAX((s->dims + 3) / (flat ? 2 : 4), least), s->dims);
    cst_gemm(false, true, s->tokens * s->heads, strong.dims, s->dims, 1, x, s->dims, dim, s->dims,
             0, y, strong.dims);
    return strong;
}

/* core: the b->rank strongest orthogonal combinations of z's rows, part by part. */
static int strongest(struct cst_tucker_basis *b, const struct cst_tucker_shape *s, const float *z,
                     uint32_t rows, const struct cst_tucker_scratch *w) {
    const float *part = z;
    float *core = b->core;
    int r;

    for (uint32_t i = 0; i < s->n_parts; i++) {
        uint32_t channels = s->part[i].heads * s->dims;
        float weight = s->part[i].weight;

        cst_gram_rows(rows, channels, weight * weight, part, channels, i ? 1 : 0, w->gram, rows);
        part += (size_t)rows * channels;
    }
    r = cst_eigen(rows, w->gram, rows, w->values, w->eigen);
    cst_tucker_flip(w->gram, rows, rows);
    for (uint32_t i = 0; i < s->n_parts; i++) {
        uint32_t channels = s->part[i].heads * s->dims;

        cst_gemm(false, false, b->rank, channels, rows, 1, w->gram, rows, z, channels, 0, core,
                 channels);
        z += (size_t)rows * channels;
        core += (size_t)b->rank * channels;
    }
    return r;
}

/* Squares of row i of the core, by the weights of its parts. */
static double core_energy(const struct cst_tucker_basis *b, const struct cst_tucker_shape *s,
                          uint32_t i) {
    const float *core = b->core;
    double sum = 0;

    for (uint32_t p = 0; p < s->n_parts; p++) {
        uint32_t channels = s->part[p].heads * s->dims;
        double weight = (double)s->part[p].weight * (double)s->part[p].weight;

        sum += weight * cst_head_energy(core + (size_t)i * channels, channels);
        core += (size_t)b->rank * channels;
    }
    return sum;
}

static void multiply(float *x, float factor, size_t n) {
    for (size_t i = 0; i < n; i++)
        x[i] *= factor;
}

/* From the core's orthogonal rows and the cell's products with them, b->token, to the tensor of
 * least error that has these rows: tokens of unit length, lengths in the core. */
static void balance(struct cst_tucker_basis *b, const struct cst_tucker_shape *s) {
    for (uint32_t i = 0; i < b->rank; i++) {
        float *token = b->token + (size_t)i * s->tokens, *core = b->core;
        double length = sqrt(cst_head_energy(token, s->tokens)), energy = core_energy(b, s, i);

        multiply(token, length > 0 ? (float)(1 / length) : 0, s->tokens);
        for (uint32_t p = 0; p < s->n_parts; p++) {
            uint32_t channels = s->part[p].heads * s->dims;

            multiply(core + (size_t)i * channels, energy > 0 ? (float)(length / energy) : 0,
                     channels);
            core += (size_t)b->rank * channels;
        }
    }
}

static int tokens_by_sketch(struct cst_tucker_basis *b, const struct cst_tucker_shape *s,
                            const float *x, bool flat, const struct cst_tucker_scratch *w) {
    struct cst_tucker_shape strong = strong_part(s, b->rank, b->dim, x, flat, w->y);
    uint32_t rows = CST_MIN(b->rank + OVERSAMPLE, CST_MIN(s->tokens, strong.heads * strong.dims));
    float *wide = w->eigen + cst_eigen_work(rows); /* rows x tokens */
    int r;

    b->rank = CST_MIN(b->rank, rows);
    make_sketch(w->z, rows, &strong, s->dims, b->dim, b->core, b->rank);
    r = sketch_tokens(wide, rows, &strong, w);
    if (r)
        return r;
    cst_tucker_across_tokens(w->z, wide, rows, s, x);
    r = strongest(b, s, w->z, rows, w);
    if (r)
        return r;
    cst_tucker_onto_tokens(b->token, b->core, b->rank, s, x);
    balance(b, s);
    return 0;
}

/* ---- energies --------------------------------------------------------------------------------
 */

/* Squares of the core, turned to the directions of the dimensions, summed over heads, then over
 * both ranks. */
static void add_energies(struct cst_tucker_basis *b, const struct cst_tucker_shape *s,
                         float *turned) {
    uint32_t columns = s->dims + 1;

    memset(b->captured, 0, (size_t)(b->rank + 1) * columns * sizeof(double));
    cst_gemm(false, true, b->rank * s->heads, s->dims, s->dims, 1, b->core, s->dims, b->dim,
             s->dims, 0, turned, s->dims);
    for (uint32_t p = 0; p < s->n_parts; p++) {
        double weight = (double)s->part[p].weight * (double)s->part[p].weight;

        for (uint32_t i = 1; i <= b->rank; i++) {
            double *row = b->captured + (size_t)i * columns + 1;

            for (uint32_t h = 0; h < s->part[p].heads; h++, turned += s->dims) {
                for (uint32_t j = 0; j < s->dims; j++)
                    row[j] += weight * (double)turned[j] * (double)turned[j];
            }
        }
    }
    for (uint32_t i = 1; i <= b->rank; i++) {
        double *row = b->captured + (size_t)i * columns, sum = 0;

        for (uint32_t j = 1; j < columns; j++) {
            sum += row[j];
            row[j] = sum + row[(int64_t)j - columns];
        }
    }
}

int cst_tucker_basis_make(struct cst_tucker_basis *b, const struct cst_tucker_shape *s,
                          const float *x, uint32_t sketch, bool flat,
                          const struct cst_tucker_scratch *w) {
    uint64_t rows = (uint64_t)s->tokens * s->heads;
    int r = dim_basis(b, s, x, sketch && rows >= HALF_ROWS * (uint64_t)s->dims, w);

    if (r)
        return r;
    if (sketch)
        r = tokens_by_sketch(b, s, x, flat, w);
    else if (s->heads * s->dims < s->tokens)
        r = tokens_by_channels(b, s, x, w);
    else
        r = tokens_by_tokens(b, s, x, w);
    if (!r && !sketch)
        cst_tucker_across_tokens(b->core, b->token, b->rank, s, x);
    if (!r)
        add_energies(b, s, w->y);
    return r;
}
