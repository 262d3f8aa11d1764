/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A cell between its plan and its streams. The residual that the plan's directions leave is
 * quantized first; then means, core and token factors are fitted to what the codes leave of the
 * cell. That takes up part of the quantizer's error, and it is what keeps a block that is coded
 * again and again from wandering: what was decoded is codes plus a tensor of just these ranks, so
 * the next round finds the same codes and then the same factors.
 * Without it every round's noise leans into the directions, and errors double within ten rounds.
 *
 * Factors are rounded one after the other, each fitted to the rounded ones before it. No state; any
 * thread.
 */
#include "codec/codec.h"
#include "codec/coded.h"
#include "codec/heads.h"
#include "codec/linalg.h"
#include "codec/tucker.h"

#include "base/macros.h"

#include <math.h>
#include <string.h>

enum {
    SKETCH_SURE = 40, /* directions of a sketch that are good enough as they are */
    SAMPLE = 8,       /* one row of so many is looked at to see whether a cell was coded before */
    ROUNDS = 24,      /* of codes and factors, of a cell that was, at most */
};
/* Of the largest square in a Gram matrix, what squares are raised by. */
static const double RIDGE = 0x1p-24;
/* Rounds end where codes miss what new ones do, no less than in the round before, or nothing. */
static const float MAYBE = 0.8f, WORTH = 0.9f, NOTHING = 0.02f;

struct fit {
    struct cst_tucker *t;
    const struct cst_codec_work *w;
    const struct cst_tucker_cell *cell;
    const struct cst_tucker_member *member;
    struct cst_tucker_shape shape;
    struct cst_tucker_open *open;
    uint32_t rank_t, rank_d;
    float *left;            /* of the cell: less the backbone, then less the codes */
    double error, expected; /* of the codes: squares, of a sample of rows */
};

static size_t part_size(const struct fit *f, uint32_t i) {
    return (size_t)f->shape.tokens * f->member[i].heads * f->shape.dims;
}

static void load_halves(float *x, const uint8_t *src, float scale, size_t n,
                        const struct cst_codec_ops *ops) {
    (void)ops->halves(x, src, scale, n);
}

/* Rounded to fp16 and back; what is stored. */
static void round_halves(uint8_t *dst, float *x, size_t n, const struct cst_codec_ops *ops) {
    ops->from_f32[CST_DTYPE_F16](dst, x, n);
    load_halves(x, dst, 1, n, ops);
}

static void load_cell(const struct fit *f) {
    const struct cst_descriptor *desc = f->w->desc;
    float *x = f->t->x, *mean = f->open->mean;
    uint32_t at = 0;

    for (uint32_t i = 0; i < f->cell->n; i++) {
        const struct cst_tucker_member *m = &f->member[i];
        struct cst_stage_segment s;
        struct cst_view view;

        while (desc->segments[at].offset != m->offset)
            at = (at + 1) % desc->n_segments;
        s = cst_stage_segment(&view, desc, &desc->segments[at], f->w->params->tokens,
                              f->w->params->first_position);
        cst_tucker_load_again(m, x, mean, f->t->block + m->offset, &s, f->w);
        x += part_size(f, i);
        mean += (size_t)m->heads * f->shape.dims;
    }
}

/* ---- the residual ----------------------------------------------------------------------------
 */

/* left = the backbone: the token directions times scratch.z */
static void make_backbone(const struct fit *f) {
    struct cst_tucker *t = f->t;
    uint32_t dims = f->shape.dims;
    const float *z = t->scratch.z;
    float *left = f->left;

    if (!f->rank_t)
        memset(left, 0, cst_tucker_size(&f->shape) * sizeof(float));
    for (uint32_t i = 0; f->rank_t && i < f->cell->n; i++) {
        uint32_t channels = f->member[i].heads * dims;

        cst_gemm(true, false, f->shape.tokens, channels, f->rank_t, 1, t->token, f->shape.tokens, z,
                 channels, 0, left, channels);
        z += (size_t)f->rank_t * channels;
        left += part_size(f, i);
    }
}

/* Adds what the codes of a row miss, and what they miss of normal values. */
static void judge_row(struct fit *f, const float *left, const float *q, double weight) {
    float error = 0, energy = 0;

    for (uint32_t d = 0; d < f->shape.dims; d++) {
        error += (left[d] - q[d]) * (left[d] - q[d]);
        energy += left[d] * left[d];
    }
    f->error += weight * (double)error;
    f->expected += weight * (double)energy;
}

/* Codes and norms of what the backbone in `left` leaves; left = the cell less what they stand for.
 */
static bool quantize(struct fit *f) {
    const struct cst_codec_ops *ops = f->w->ops;
    uint32_t dims = f->shape.dims;
    uint8_t *codes = f->open->codes, *norm = f->open->norms;
    float *left = f->left, *q = f->t->scratch.values;
    const float *x = f->t->x;
    struct cst_codebook book;

    f->error = f->expected = 0;
    if (f->t->recipe->lloyd)
        cst_codebook_lloyd(&book, f->open->choice.bits);
    else
        cst_codebook_uniform(&book, f->open->choice.bits);
    for (uint32_t i = 0; i < f->cell->n; i++) {
        int exponent = f->member[i].exponent;
        double weight = (double)f->member[i].weight * (double)f->member[i].weight;

        for (uint32_t row = 0; row < f->shape.tokens * f->member[i].heads; row++, norm += 2) {
            float length;

            for (uint32_t d = 0; d < dims; d++)
                q[d] = left[d] = x[d] - left[d];
            cst_head_transform(q, dims, ops);
            if (!cst_coded_put(norm, cst_head_encode(codes, q, dims, &book, ops), exponent))
                return false;
            length = cst_f16_to_f32(cst_load16((const void *)norm)) * cst_coded_unit(exponent);
            cst_head_decode(q, codes, dims, book.level, book.bits, length, NULL, ops);
            if (row % SAMPLE == 0)
                judge_row(f, left, q, weight);
            for (uint32_t d = 0; d < dims; d++)
                *left++ = *x++ - q[d];
            codes += dims;
        }
    }
    f->expected *= cst_codebook_distortion(f->t->recipe->lloyd, book.bits);
    return true;
}

/* What codes miss of the residual, over what they miss of normal values. */
static float missed(const struct fit *f) {
    return f->expected > 0 ? (float)(f->error / f->expected) : 1;
}

/* ---- means -----------------------------------------------------------------------------------
 */

/* Moves the means of what the codes leave to the means that are stored. */
static void fit_means(const struct fit *f) {
    float *left = f->left, *x = f->t->x, *mean = f->open->mean;

    for (uint32_t i = 0; i < f->cell->n; i++) {
        uint32_t channels = f->member[i].heads * f->shape.dims;
        float unit = cst_coded_unit(f->member[i].exponent);

        for (uint32_t c = 0; c < channels && f->member[i].mean; c++) {
            double sum = 0;
            float was = mean[c];

            for (uint32_t t = 0; t < f->shape.tokens; t++)
                sum += (double)left[(size_t)t * channels + c];
            mean[c] = was + (float)(sum / f->shape.tokens);
            mean[c] = cst_f16_to_f32(cst_f32_to_f16(mean[c] / unit)) * unit;
            for (uint32_t t = 0; t < f->shape.tokens; t++) {
                left[(size_t)t * channels + c] -= mean[c] - was;
                x[(size_t)t * channels + c] -= mean[c] - was;
            }
        }
        mean += channels;
        left += part_size(f, i);
        x += part_size(f, i);
    }
}

/* ---- factors ---------------------------------------------------------------------------------
 */

/* What the token directions keep of `from`: to t->kept. */
static void keep(const struct fit *f, const float *from) {
    cst_tucker_across_tokens(f->t->kept, f->t->token, f->rank_t, &f->shape, from);
}

/* to = t->kept in the directions of the dimensions, a core */
static void turn(const struct fit *f, float *to) {
    const struct cst_tucker *t = f->t;
    uint32_t dims = f->shape.dims;

    cst_gemm(false, true, f->rank_t * f->shape.heads, f->rank_d, dims, 1, t->kept, dims, t->dim,
             dims, 0, to, f->rank_d);
}

/* scratch.z = a core, back from the directions of the dimensions */
static void turn_back(const struct fit *f, const float *core) {
    const struct cst_tucker *t = f->t;
    uint32_t dims = f->shape.dims;

    cst_gemm(false, false, f->rank_t * f->shape.heads, dims, f->rank_d, 1, core, f->rank_d, t->dim,
             dims, 0, t->scratch.z, dims);
}

/* scratch.z = t->kept, of which the directions of the dimensions keep a part, too */
static void keep_dims(const struct fit *f) {
    const struct cst_tucker *t = f->t;
    uint32_t dims = f->shape.dims;
    size_t rows = (size_t)f->rank_t * f->shape.heads;

    if (f->rank_d == dims) {
        memcpy(t->scratch.z, t->kept, rows * dims * sizeof(float));
        return;
    }
    cst_gram(f->rank_d, dims, 1, t->dim, dims, 0, t->scratch.gram, dims);
    cst_symmetrize(dims, t->scratch.gram, dims);
    cst_gemm(false, false, (uint32_t)rows, dims, dims, 1, t->kept, dims, t->scratch.gram, dims, 0,
             t->scratch.z, dims);
}

/* One step of orthogonal iteration of the directions of the dimensions, from t->kept. All of them
 * stay. */
static bool move_dims(const struct fit *f) {
    struct cst_tucker *t = f->t;
    uint32_t dims = f->shape.dims;
    float *moved = t->scratch.z;
    const float *kept = t->kept;

    if (f->rank_d == dims)
        return true;
    for (uint32_t i = 0; i < f->cell->n; i++) {
        uint32_t rows = f->rank_t * f->member[i].heads;
        float weight = f->member[i].weight;

        cst_gram(rows, dims, weight * weight, kept, dims, i ? 1 : 0, t->scratch.gram, dims);
        kept += (size_t)rows * dims;
    }
    cst_symmetrize(dims, t->scratch.gram, dims);
    cst_gemm(false, false, f->rank_d, dims, dims, 1, t->dim, dims, t->scratch.gram, dims, 0, moved,
             dims);
    memcpy(t->dim, moved, (size_t)f->rank_d * dims * sizeof(float));
    return !cst_orthonormalize(dims, f->rank_d, t->dim, dims, t->scratch.eigen);
}

/* The same of the token directions, from t->kept of the cell. */
static bool move_tokens(const struct fit *f) {
    struct cst_tucker *t = f->t;

    keep_dims(f);
    cst_tucker_onto_tokens(t->token, t->scratch.z, f->rank_t, &f->shape, t->x);
    return !cst_orthonormalize(f->shape.tokens, f->rank_t, t->token, f->shape.tokens,
                               t->scratch.eigen);
}

/* Token factors of least error with the backbone's other half, scratch.z, given. What is nearly
 * nothing of it, or hardly a direction of its own, gets next to nothing. */
static bool fit_tokens(const struct fit *f) {
    struct cst_tucker *t = f->t;
    uint32_t rank = f->rank_t, tokens = f->shape.tokens;
    double *gram = (void *)t->scratch.eigen, *token = gram + (size_t)rank * rank, most = 0;
    const float *z = t->scratch.z;

    for (uint32_t i = 0; i < f->cell->n; i++) {
        uint32_t channels = f->member[i].heads * f->shape.dims;
        float weight = f->member[i].weight;

        cst_gram_rows(rank, channels, weight * weight, z, channels, i ? 1 : 0, t->scratch.gram,
                      rank);
        z += (size_t)rank * channels;
    }
    cst_tucker_onto_tokens(t->token, t->scratch.z, rank, &f->shape, f->left);
    for (size_t i = 0; i < (size_t)rank * rank; i++)
        gram[i] = (double)t->scratch.gram[i];
    for (size_t i = 0; i < (size_t)rank * tokens; i++)
        token[i] = (double)t->token[i];
    for (uint32_t i = 0; i < rank; i++)
        most = fmax(most, gram[(size_t)i * rank + i]);
    for (uint32_t i = 0; i < rank; i++)
        gram[(size_t)i * rank + i] += most > 0 ? most * RIDGE : 1;
    if (cst_solve(rank, tokens, gram, rank, token, tokens))
        return false;
    for (size_t i = 0; i < (size_t)rank * tokens; i++)
        t->token[i] = (float)token[i];
    return true;
}

/* Stores directions of tokens by token. */
static void put_tokens(const struct fit *f) {
    uint32_t tokens = f->shape.tokens, rank = f->rank_t;
    uint16_t *half = (void *)f->t->scratch.eigen;

    round_halves((void *)half, f->t->token, (size_t)rank * tokens, f->w->ops);
    for (uint32_t i = 0; i < tokens; i++) {
        for (uint32_t r = 0; r < rank; r++)
            memcpy(f->open->token + 2 * ((size_t)i * rank + r), half + (size_t)r * tokens + i, 2);
    }
}

/* core: part by part, [rank_t][heads][rank_d], becomes what is stored; that is
 * [heads][rank_t][rank_d]. */
static void put_core(const struct fit *f, float *core) {
    uint8_t *out = f->open->core;

    for (uint32_t i = 0; i < f->cell->n; i++) {
        uint32_t heads = f->member[i].heads;
        size_t n = (size_t)heads * f->rank_t * f->rank_d;
        float scale = cst_tucker_scale(core, n, f->w->ops);

        f->open->scale[i] = scale;
        for (uint32_t h = 0; h < heads; h++) {
            for (uint32_t r = 0; r < f->rank_t; r++) {
                float *row = core + ((size_t)r * heads + h) * f->rank_d;

                for (uint32_t j = 0; j < f->rank_d; j++)
                    row[j] /= scale;
                round_halves(out, row, f->rank_d, f->w->ops);
                for (uint32_t j = 0; j < f->rank_d; j++)
                    row[j] *= scale;
                out += 2 * f->rank_d;
            }
        }
        core += n;
    }
}

/* Of what the codes leave. scratch.z is what the token directions are multiplied by then. */
static bool fit_factors(const struct fit *f) {
    struct cst_tucker *t = f->t;

    keep(f, f->left);
    if (!move_dims(f))
        return false;
    round_halves(f->open->dim, t->dim, (size_t)f->rank_d * f->shape.dims, f->w->ops);
    turn(f, t->core);
    put_core(f, t->core);
    turn_back(f, t->core);
    if (!fit_tokens(f))
        return false;
    put_tokens(f);
    return true;
}

/* Where cores weren't kept. A sketch's token directions aren't orthonormal. */
static bool find_core(const struct fit *f) {
    struct cst_tucker *t = f->t;

    if (cst_orthonormalize(t->tokens, f->rank_t, t->token, t->tokens, t->scratch.eigen))
        return false;
    keep(f, t->x);
    return true;
}

/* scratch.z is what the token directions are multiplied by to give the backbone. Where the plan's
 * directions are best together with those of dimensions that weren't chosen, or are the last ones
 * of a sketch, a step of orthogonal iteration with the ranks chosen first. */
static bool fit_basis(const struct fit *f) {
    if (!f->rank_t)
        return true;
    if (!f->cell->core && !find_core(f))
        return false;
    if (f->rank_d < f->shape.dims || (f->cell->sketched && f->rank_t > SKETCH_SURE)) {
        if (!move_dims(f) || !move_tokens(f))
            return false;
        keep(f, f->t->x);
    }
    keep_dims(f);
    return true;
}

static bool code_residual(struct fit *f) {
    if (f->open->choice.bits) {
        make_backbone(f);
        return quantize(f);
    }
    memcpy(f->left, f->t->x, cst_tucker_size(&f->shape) * sizeof(float));
    return true;
}

/* The plan's directions, as many as were chosen. */
static void load_basis(const struct fit *f) {
    const struct cst_tucker_cell *cell = f->cell;
    const uint8_t *core = cell->core;
    struct cst_tucker *t = f->t;
    float *kept = t->kept;

    load_halves(t->token, cell->token, 1, (size_t)f->rank_t * t->tokens, f->w->ops);
    load_halves(t->dim, cell->dim, 1, (size_t)f->rank_d * cell->dims, f->w->ops);
    for (uint32_t i = 0; core && i < cell->n; i++) {
        size_t channels = (size_t)f->member[i].heads * cell->dims;

        load_halves(kept, core, cell->core_scale, f->rank_t * channels, f->w->ops);
        core += 2 * cell->most * channels;
        kept += f->rank_t * channels;
    }
}

/* Codes, and then what is fitted to the rest. More than one round where the first one finds what
 * may be codes: each brings the factors nearer to those that were on top of them. */
static bool code_cell(struct fit *f) {
    float now = 1, was;

    if (!fit_basis(f))
        return false;
    for (int i = 0; i < ROUNDS; i++) {
        if (!code_residual(f))
            return false;
        fit_means(f);
        if (f->rank_t && !fit_factors(f))
            return false;
        was = now;
        now = missed(f);
        if (now > MAYBE || now > WORTH * was || now < NOTHING)
            break;
    }
    return true;
}

float cst_tucker_scale(const float *x, size_t n, const struct cst_codec_ops *ops) {
    float most = cst_f32_from_bits(ops->largest(x, n));
    int exponent;

    (void)frexpf(most, &exponent);
    exponent = CST_MAX(exponent - 14, CST_CODED_EXPONENT_MIN);
    return most > 0 ? cst_coded_unit(exponent) : 1;
}

/* Everything but the choice. */
static void start(struct fit *f, struct cst_tucker *t, uint32_t cell,
                  const struct cst_point *choice, const struct cst_codec_work *w) {
    *f = (struct fit){
        .t = t, .w = w, .cell = &t->cell[cell], .rank_t = choice->rank_t, .rank_d = choice->rank_d
    };
    f->member = &t->member[f->cell->first];
    f->open = &t->open[f->cell->tensor];
    f->open->cell = UINT32_MAX;
    f->open->choice = *choice;
    for (uint32_t i = 0; i < f->cell->n; i++)
        t->part[i] = (struct cst_tucker_part){ f->member[i].heads, f->member[i].weight };
    f->shape =
        (struct cst_tucker_shape){ t->tokens, f->cell->dims, f->cell->heads, f->cell->n, t->part };
    f->left = t->scratch.y;
    load_basis(f);
    load_cell(f);
}

bool cst_tucker_fit(struct cst_tucker *t, uint32_t cell, const struct cst_codec_work *w) {
    struct fit f;

    if (!t->hull[cell].n)
        return false;
    start(&f, t, cell, cst_hull_at(&t->hull[cell], t->choice[cell]), w);
    if (!code_cell(&f))
        return false;
    f.open->cell = cell;
    t->cell[cell].missed = missed(&f);
    return true;
}

float cst_tucker_missed(struct cst_tucker *t, uint32_t cell, const struct cst_point *choice,
                        const struct cst_codec_work *w) {
    struct fit f;

    start(&f, t, cell, choice, w);
    return code_cell(&f) ? missed(&f) : 1;
}
