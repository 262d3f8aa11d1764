/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Learning, one tensor of one layer at a time: its tokens as rows of one matrix less their means;
 * products of these with themselves and with what predicts them; bases from their eigenvectors;
 * then the tokens as the codec will reconstruct them, which later layers are predicted from.
 *
 * Invariants: 1. row i of every matrix is the same token, sinks left out; 2. what goes on is
 * rounded as side data hold it, so a reader computes with the same numbers. No state; any thread.
 *
 * Deviations, and whether a predictor pays, come from cross-validation over four runs of rows: a
 * basis fitted to tokens finds less left over in them than in others (at 750 tokens the difference
 * costs 2 % of the bytes). Runs and not random rows: neighbours are alike, and only other documents
 * show what tables are worth on text that they haven't seen.
 */
#include "codec/learn.h"
#include "codec/carve.h"
#include "codec/codec.h"
#include "codec/dtype.h"
#include "codec/linalg.h"
#include "codec/outliers.h"
#include "codec/rope.h"
#include "codec/side_format.h"
#include "codec/stage.h"

#include "base/macros.h"

#include <math.h>
#include <string.h>

enum {
    WIDE = CST_SIDE_WIDTH_MAX,
    TOKENS_PER_INPUT = 16, /* fewer and the fit follows the noise */
    TOKENS_PER_MORE = 8,   /* of predictors with more inputs, where the first ones pay */
    CHUNK = 256,           /* rows that are reconstructed at a time */
    FOLDS = 4,
    NEAR = CST_SIDE_FROM_K | CST_SIDE_FROM_V,
    ALL = NEAR | CST_SIDE_FROM_K2 | CST_SIDE_FROM_V2
};
static const float DEFAULT_STEP = 0.4f;
static const double RIDGE = 1e-3;     /* of the mean diagonal */
static const double WORTH_BITS = .01; /* a channel that a predictor must save */
/* Of the bits: what as many inputs as the tensor has channels must save, since decoding multiplies
 * each input by each channel. */
static const double PRICE = .07;

/* Products of a group's values x and its inputs a, over some rows. */
struct products {
    float *aa; /* [inputs][inputs], upper triangle */
    float *ax; /* [inputs][WIDE] */
    float *xx; /* [WIDE][WIDE], upper triangle */
};

/* What a predictor reads. */
struct inputs {
    uint8_t sources;
    uint32_t rank; /* 0: channels */
};

struct learner {
    const struct cst_descriptor *desc;
    const struct cst_learn_block *blocks;
    size_t n_blocks;
    const struct cst_learn_params *params;
    const struct cst_codec_ops *ops;
    struct cst_side_plan plan;
    uint32_t rows; /* tokens */
    /* Matrices of a row for each token. `state` holds what was reconstructed of the last layers,
     * `coords` the first coordinates of that, column_of() each. */
    uint32_t most;   /* channels of the widest tensor */
    uint32_t inputs; /* most that a predictor may have */
    uint32_t rank;   /* coordinates that are kept of a source; 0: never used */
    float *x;        /* [rows][most] */
    float *state;    /* [rows][SOURCES * most] */
    float *coords;   /* [rows][SOURCES * rank] */
    float *chunk;    /* [CHUNK][most] */
    float *r, *z;    /* [CHUNK][WIDE] residual, coefficients */
    struct cst_rope_table *rope;
    double *sums;  /* [most] */
    float *energy; /* [2][block_tokens] */
    struct products fold[FOLDS], all, rest;
    struct inputs held;              /* that `all` is of, of the last group */
    double *normal;                  /* [inputs][inputs] */
    double *rhs;                     /* [inputs][WIDE] */
    float *covariance, *vectors, *t; /* [WIDE][WIDE] */
    float *values;                   /* [WIDE] */
    float *eigen;
    struct cst_side_tensor *tensor; /* [2 * n_layers] */
    /* of the tensor under way */
    float *mean, *klt_sigma, *klt_rows, *res_sigma, *res_rows, *try_sigma, *predictor;
    double bits_klt, bits_deep; /* summed over channels */
    uint64_t judged;            /* channels */
    /* output */
    uint8_t *dst;
    size_t at, cap;
    struct cst_side_entry *entries;
    uint32_t n_entries;
    struct cst_learn_report report;
};

/* ---- workspace ------------------------------------------------------------------------------- */

static void carve_products(const struct learner *l, struct cst_carve *c, struct products *p) {
    p->aa = cst_carve_floats(c, (uint64_t)l->inputs * l->inputs);
    p->ax = cst_carve_floats(c, (uint64_t)l->inputs * WIDE);
    p->xx = cst_carve_floats(c, (uint64_t)WIDE * WIDE);
}

static void carve_all(struct learner *l, struct cst_carve *c, uint64_t rows) {
    uint32_t pairs = 0;
    void *rope;

    for (uint32_t i = 0; i < l->desc->n_layers; i++)
        pairs = CST_MAX(pairs, l->desc->layers[i].rope_dims / 2);
    l->plan = cst_side_plan(l->desc);
    l->most = cst_side_most(l->desc);
    l->inputs = l->plan.inputs;
    l->rank = l->most > l->plan.width ? CST_MIN(l->inputs / 2, (uint32_t)CST_SIDE_RANK_MAX) : 0;
    l->x = cst_carve_floats(c, rows * l->most);
    l->state = cst_carve_floats(c, l->inputs ? CST_SIDE_SOURCES * rows * l->most : 0);
    l->coords = cst_carve_floats(c, CST_SIDE_SOURCES * rows * l->rank);
    l->chunk = cst_carve_floats(c, (uint64_t)CHUNK * l->most);
    l->r = cst_carve_floats(c, (uint64_t)CHUNK * WIDE);
    l->z = cst_carve_floats(c, (uint64_t)CHUNK * WIDE);
    l->sums = cst_carve(c, l->most, sizeof(double));
    l->energy = cst_carve_floats(c, 2 * (uint64_t)l->desc->block_tokens);
    rope = cst_carve(c, cst_rope_work_size(l->desc->block_tokens, pairs), 1);
    if (c->base)
        l->rope = cst_rope_table_init(rope, l->desc->block_tokens, pairs);
    for (int i = 0; i < FOLDS; i++)
        carve_products(l, c, &l->fold[i]);
    carve_products(l, c, &l->all);
    carve_products(l, c, &l->rest);
    l->normal = cst_carve(c, (uint64_t)l->inputs * l->inputs, sizeof(double));
    l->rhs = cst_carve(c, (uint64_t)l->inputs * WIDE, sizeof(double));
    l->covariance = cst_carve_floats(c, (uint64_t)WIDE * WIDE);
    l->vectors = cst_carve_floats(c, (uint64_t)WIDE * WIDE);
    l->t = cst_carve_floats(c, (uint64_t)WIDE * WIDE);
    l->values = cst_carve_floats(c, WIDE);
    l->eigen = cst_carve_floats(c, cst_eigen_work(WIDE));
    l->tensor = cst_carve(c, 2 * (uint64_t)l->desc->n_layers, sizeof(*l->tensor));
    l->entries = cst_carve(c, 4 * (uint64_t)l->desc->n_layers, sizeof(*l->entries));
    l->mean = cst_carve_floats(c, l->most);
    l->klt_sigma = cst_carve_floats(c, l->most);
    l->klt_rows = cst_carve_floats(c, (uint64_t)l->most * WIDE);
    l->res_sigma = cst_carve_floats(c, l->most);
    l->try_sigma = cst_carve_floats(c, l->most);
    l->res_rows = cst_carve_floats(c, (uint64_t)l->most * WIDE);
    l->predictor = cst_carve_floats(c, (uint64_t)l->most * l->inputs);
}

size_t cst_learn_work_size(const struct cst_descriptor *desc, uint32_t tokens) {
    struct learner l = { .desc = desc };
    struct cst_carve c = { NULL, 0 };

    carve_all(&l, &c, CST_MIN(tokens, (uint32_t)CST_LEARN_TOKENS_MAX));
    return c.at;
}

size_t cst_learn_bound(const struct cst_descriptor *desc) {
    return cst_side_plan(desc).bytes;
}

/* ---- tokens ---------------------------------------------------------------------------------- */

static uint32_t sinks_of(const struct cst_learn_block *b) {
    uint32_t sinks = b->first_position < CST_SINK_TOKENS ? CST_SINK_TOKENS - b->first_position : 0;

    return CST_MIN(sinks, b->tokens);
}

static void count_rows(struct learner *l) {
    uint64_t rows = 0;

    for (size_t i = 0; i < l->n_blocks; i++)
        rows += l->blocks[i].tokens - sinks_of(&l->blocks[i]);
    l->rows = (uint32_t)CST_MIN(rows, (uint64_t)CST_LEARN_TOKENS_MAX);
}

static const struct cst_segment *segment_of(const struct cst_descriptor *desc, uint32_t layer,
                                            uint8_t tensor) {
    for (uint32_t i = 0; i < desc->n_segments; i++) {
        if (desc->segments[i].layer == layer && desc->segments[i].tensor == tensor)
            return &desc->segments[i];
    }
    return NULL;
}

/* Rows of one block; values that can't be averaged become zeros, and outliers are another token's.
 * Their number. */
static uint32_t load_block(struct learner *l, float *x, uint32_t channels,
                           const struct cst_learn_block *b, const struct cst_segment *seg,
                           uint32_t room) {
    struct cst_view view;
    struct cst_stage_segment s =
        cst_stage_segment(&view, l->desc, seg, b->tokens, b->first_position);
    const uint8_t *src = b->bytes + seg->offset;
    struct cst_outlier_rows rows = {
        .x = x, .stride = channels, .channels = channels, .mean = l->mean, .energy = l->energy
    };
    struct cst_outliers outliers;
    uint32_t n = 0;

    if (s.rotated)
        cst_rope_prepare(l->rope, s.rotated, b->first_position, b->tokens);
    for (uint32_t t = s.sinks; t < b->tokens && n < room; t++, n++, x += channels) {
        cst_stage_load_row(x, src, &view, t, l->ops);
        if (s.rotated)
            cst_rope_turn(l->rope, s.rotated, x, view.heads, view.dims, t, -1, l->ops);
        if (l->ops->largest(x, channels) > cst_f32_bits(0x1p40f))
            memset(x, 0, channels * sizeof(*x));
    }
    rows.n = n;
    cst_outliers_find(&outliers, &rows, cst_outlier_excess(&view));
    return n;
}

/* All rows of a tensor less their mean; false when it has no view or no deviation. */
static bool load_tensor(struct learner *l, struct cst_side_tensor *t, uint32_t layer,
                        uint8_t tensor) {
    const struct cst_segment *seg = segment_of(l->desc, layer, tensor);
    uint32_t channels = cst_side_channels(l->desc, layer, tensor), at = 0;
    struct cst_view view;
    double squares = 0;

    if (!channels || !seg || !cst_view_init(&view, l->desc, seg))
        return false;
    for (size_t i = 0; i < l->n_blocks && at < l->rows; i++)
        at +=
            load_block(l, l->x + (size_t)at * channels, channels, &l->blocks[i], seg, l->rows - at);
    memset(l->sums, 0, channels * sizeof(*l->sums));
    for (uint32_t i = 0; i < l->rows; i++)
        l->ops->add(l->sums, l->x + (size_t)i * channels, channels);
    for (uint32_t c = 0; c < channels; c++)
        l->mean[c] = (float)(l->sums[c] / l->rows);
    for (uint32_t i = 0; i < l->rows; i++) {
        float *row = l->x + (size_t)i * channels;

        for (uint32_t c = 0; c < channels; c++) {
            row[c] -= l->mean[c];
            squares += (double)row[c] * (double)row[c];
        }
    }
    t->rms = (float)sqrt(squares / l->rows / channels);
    t->width = cst_side_width(view.heads, view.dims, l->plan.width);
    t->mean = l->mean;
    t->channels = t->rms >= 0x1p-60f ? channels : 0;
    return t->channels > 0;
}

/* ---- products -------------------------------------------------------------------------------- */

static bool are_same(struct inputs a, struct inputs b) {
    return a.sources == b.sources && a.rank == b.rank;
}

/* One group of the tensor under way, and its inputs as columns of a matrix. */
struct group {
    uint32_t at, w; /* channels */
    uint32_t inputs;
    const float *from; /* state or coords */
    uint32_t stride;
    struct cst_side_span span[CST_SIDE_SOURCES];
    int spans;
    bool again; /* the same inputs as those of the group before */
};

/* Where what bit i of a tensor's sources means lies in `state` or `coords`. */
static uint32_t column_of(uint32_t layer, uint8_t tensor, int i, uint32_t width) {
    uint32_t back = (uint32_t)i / 2 + !(tensor == CST_TENSOR_V && i % 2 == 0);

    return (2 * ((layer - back) % CST_SIDE_DEPTH) + (uint32_t)i % 2) * width;
}

static struct group group_of(const struct learner *l, const struct cst_side_tensor *t,
                             uint32_t layer, uint8_t tensor, struct inputs in, uint32_t g) {
    struct cst_side_span own = cst_side_group(t->channels, t->width, g);
    uint32_t width = in.rank ? l->rank : l->most;
    struct group out = { .at = own.at,
                         .w = own.n,
                         .from = in.rank ? l->coords : l->state,
                         .stride = CST_SIDE_SOURCES * width,
                         .again = in.rank && g > 0 };

    for (int i = 0; i < CST_SIDE_SOURCES; i++) {
        const struct cst_side_tensor *from = cst_side_source(l->tensor, layer, tensor, i);
        struct cst_side_span seen;

        if (!(in.sources >> i & 1) || !from)
            continue;
        if (in.rank)
            seen = (struct cst_side_span){ 0, CST_MIN(in.rank, from->channels) };
        else
            seen = cst_side_seen(from->channels, from->width, t->channels, t->width, g);
        seen.at += column_of(layer, tensor, i, width);
        out.inputs += seen.n;
        out.span[out.spans++] = seen;
    }
    return out;
}

/* Products over rows first .. end - 1; those of inputs are there already if `again`. */
static void multiply(const struct learner *l, struct products *p, const struct group *g,
                     uint32_t channels, uint32_t first, uint32_t end) {
    const float *x = l->x + (size_t)first * channels + g->at;
    const float *from = g->from + (size_t)first * g->stride;
    uint32_t n = end - first, lda = g->stride, at = 0;

    cst_gram(n, g->w, 1, x, channels, 0, p->xx, WIDE);
    for (int i = 0; i < g->spans; at += g->span[i++].n) {
        const float *a = from + g->span[i].at;
        uint32_t to = at;

        cst_gemm(true, false, g->span[i].n, g->w, n, 1, a, lda, x, channels, 0,
                 p->ax + (size_t)at * WIDE, WIDE);
        if (g->again)
            continue;
        cst_gram(n, g->span[i].n, 1, a, lda, 0, p->aa + (size_t)at * (l->inputs + 1), l->inputs);
        for (int k = i + 1; k < g->spans; k++) {
            to += g->span[k - 1].n;
            cst_gemm(true, false, g->span[i].n, g->span[k].n, n, 1, a, lda, from + g->span[k].at,
                     lda, 0, p->aa + (size_t)at * l->inputs + to, l->inputs);
        }
    }
    cst_symmetrize(g->w, p->xx, WIDE);
    cst_symmetrize(g->inputs, p->aa, l->inputs);
}

/* to += sign * from */
static void accumulate(const struct learner *l, struct products *to, const struct products *from,
                       const struct group *g, float sign) {
    for (uint32_t i = 0; i < g->w; i++) {
        for (uint32_t j = 0; j < g->w; j++)
            to->xx[i * WIDE + j] += sign * from->xx[i * WIDE + j];
    }
    for (uint32_t i = 0; i < g->inputs; i++) {
        for (uint32_t j = 0; j < g->inputs; j++)
            to->aa[i * l->inputs + j] += sign * from->aa[i * l->inputs + j];
        for (uint32_t j = 0; j < g->w; j++)
            to->ax[i * WIDE + j] += sign * from->ax[i * WIDE + j];
    }
}

static void copy(const struct learner *l, struct products *to, const struct products *from) {
    memcpy(to->xx, from->xx, (size_t)WIDE * WIDE * sizeof(float));
    memcpy(to->aa, from->aa, (size_t)l->inputs * l->inputs * sizeof(float));
    memcpy(to->ax, from->ax, (size_t)l->inputs * WIDE * sizeof(float));
}

static uint32_t fold_at(const struct learner *l, uint32_t f) {
    return (uint32_t)((uint64_t)l->rows * f / FOLDS);
}

/* Products of each fold and of all rows. */
static void multiply_folds(struct learner *l, const struct group *g, uint32_t channels) {
    for (uint32_t f = 0; f < FOLDS; f++) {
        multiply(l, &l->fold[f], g, channels, fold_at(l, f), fold_at(l, f + 1));
        if (f == 0)
            copy(l, &l->all, &l->fold[0]);
        else
            accumulate(l, &l->all, &l->fold[f], g, 1);
    }
}

/* ---- fits ------------------------------------------------------------------------------------ */

/* W = (AA + ridge) ^ -1 AX, to `w` with rows of g->w; false: not solvable. */
static bool fit(const struct learner *l, float *w, const struct products *p, const struct group *g,
                uint32_t rows) {
    double mean = 0, ridge = RIDGE;
    uint32_t n = g->inputs;

    for (uint32_t i = 0; i < n; i++)
        mean += (double)p->aa[i * (l->inputs + 1)] / n;
    /* the fewer tokens an input has, the less its weight is believed */
    if (rows < 2 * TOKENS_PER_INPUT * n)
        ridge *= 2.0 * TOKENS_PER_INPUT * n / rows;
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t j = i; j < n; j++)
            l->normal[(size_t)i * n + j] = (double)p->aa[i * l->inputs + j];
        l->normal[(size_t)i * n + i] += mean * ridge;
        for (uint32_t j = 0; j < g->w; j++)
            l->rhs[(size_t)i * g->w + j] = (double)p->ax[i * WIDE + j];
    }
    if (!(mean > 0) || cst_solve(n, g->w, l->normal, n, l->rhs, g->w))
        return false;
    for (size_t i = 0; i < (size_t)n * g->w; i++)
        w[i] = (float)l->rhs[i];
    return true;
}

/* XX - (AX)^T W - W^T AX + W^T AA W over rows, to `out`. Uses l->rhs as floats. */
static void residual(const struct learner *l, float *out, const struct products *p,
                     const struct group *g, const float *w, uint32_t rows) {
    float *aw = (void *)l->rhs, scale = 1 / (float)rows;

    for (uint32_t i = 0; i < g->w; i++)
        memcpy(out + i * WIDE, p->xx + i * WIDE, g->w * sizeof(*out));
    if (w) {
        cst_gemm(false, false, g->inputs, g->w, g->inputs, 1, p->aa, l->inputs, w, g->w, 0, aw,
                 WIDE);
        for (uint32_t i = 0; i < g->inputs; i++) {
            for (uint32_t j = 0; j < g->w; j++)
                aw[i * WIDE + j] -= 2 * p->ax[i * WIDE + j];
        }
        /* W^T (AA W - 2 AX), then its symmetric part */
        cst_gemm(true, false, g->w, g->w, g->inputs, 1, w, g->w, aw, WIDE, 1, out, WIDE);
    }
    for (uint32_t i = 0; i < g->w; i++) {
        for (uint32_t j = i; j < g->w; j++) {
            float s = (out[i * WIDE + j] + out[j * WIDE + i]) / 2 * scale;

            out[i * WIDE + j] = s;
            out[j * WIDE + i] = s;
        }
    }
}

/* Eigenvectors of l->covariance as rows, the largest eigenvalue first, to l->vectors. */
static bool basis(const struct learner *l, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        memcpy(l->t + i * WIDE, l->covariance + i * WIDE, n * sizeof(float));
    if (cst_eigen(n, l->t, WIDE, l->values, l->eigen))
        return false;
    for (uint32_t i = 0; i < n; i++)
        memcpy(l->vectors + i * WIDE, l->t + (n - 1 - i) * WIDE, n * sizeof(float));
    return true;
}

/* variance[i] += share * that of coefficient i of l->vectors, of values with the covariance. */
static void project(const struct learner *l, float *variance, uint32_t n, float share) {
    cst_gemm(false, false, n, n, n, 1, l->vectors, WIDE, l->covariance, WIDE, 0, l->t, WIDE);
    for (uint32_t i = 0; i < n; i++) {
        double found = 0;

        for (uint32_t j = 0; j < n; j++)
            found += (double)l->t[i * WIDE + j] * (double)l->vectors[i * WIDE + j];
        variance[i] += (float)CST_MAX(found, 0.0) * share;
    }
}

/* ---- rounding as the bytes will hold them ---------------------------------------------------- */

static void round_halves(float *x, size_t n, float unit) {
    for (size_t i = 0; i < n; i++)
        x[i] = cst_f16_to_f32(cst_f32_to_f16(x[i] / unit)) * unit;
}

/* A power of two that brings the largest element to 2^14. */
static float unit_of(const float *x, size_t n) {
    float most = 0;
    int exponent;

    for (size_t i = 0; i < n; i++)
        most = CST_MAX(most, fabsf(x[i]));
    if (!(most > 0))
        return 1;
    (void)frexpf(most, &exponent);
    return ldexpf(1, CST_MAX(exponent - 15, -60));
}

/* ---- one tensor ------------------------------------------------------------------------------ */

/* Where group g's matrices start. */
static size_t basis_at(const struct cst_side_tensor *t, uint32_t g) {
    return (size_t)g * t->width * t->width;
}

static void put_basis(const struct learner *l, float *rows, const struct group *g, size_t at) {
    for (uint32_t i = 0; i < g->w; i++)
        memcpy(rows + at + (size_t)i * g->w, l->vectors + i * WIDE, g->w * sizeof(*rows));
    round_halves(rows + at, (size_t)g->w * g->w, 1);
}

static double step_of(const struct learner *l, const struct cst_side_tensor *t) {
    float step = l->params->step > 0 ? l->params->step : DEFAULT_STEP;

    return (double)step * (double)t->rms * (double)t->weight;
}

/* Deviations of a group's coefficients in rows that their basis and predictor weren't fitted to;
 * false: no fit. */
static bool validate_group(struct learner *l, const struct group *g, uint32_t channels,
                           float *sigma) {
    float *w = g->inputs ? l->predictor : NULL;

    memset(sigma, 0, g->w * sizeof(*sigma));
    multiply_folds(l, g, channels);
    for (uint32_t f = 0; f < FOLDS; f++) {
        uint32_t n = fold_at(l, f + 1) - fold_at(l, f);

        copy(l, &l->rest, &l->all);
        accumulate(l, &l->rest, &l->fold[f], g, -1);
        if (w && !fit(l, w, &l->rest, g, l->rows - n))
            return false;
        residual(l, l->covariance, &l->rest, g, w, l->rows - n);
        if (!basis(l, g->w))
            return false;
        residual(l, l->covariance, &l->fold[f], g, w, n);
        project(l, sigma, g->w, (float)n / (float)l->rows);
    }
    for (uint32_t i = 0; i < g->w; i++)
        sigma[i] = sqrtf(sigma[i]);
    return true;
}

/* Bits of all channels, beyond those of the noise; infinite: not possible, or more inputs than the
 * plan or the tokens allow. The deviations of coefficients to sigma. */
static double validate(struct learner *l, const struct cst_side_tensor *t, uint32_t layer,
                       uint8_t tensor, struct inputs in, float *sigma) {
    double step = step_of(l, t), noise = step * step / 12, bits = 0;
    bool more = in.rank || in.sources & ~NEAR;
    uint32_t tokens = more ? TOKENS_PER_MORE : TOKENS_PER_INPUT;

    l->held = in;
    for (uint32_t i = 0; i < cst_side_groups(t->channels, t->width); i++) {
        struct group g = group_of(l, t, layer, tensor, in, i);

        if (g.inputs > l->inputs || l->rows < (uint64_t)tokens * g.inputs ||
            !validate_group(l, &g, t->channels, sigma + g.at))
            return INFINITY;
    }
    for (uint32_t c = 0; c < t->channels; c++)
        bits += log(1 + (double)sigma[c] * (double)sigma[c] / noise) / (2 * log(2));
    return bits;
}

/* The best inputs so far: those whose bits, and what their products cost, are least. */
struct choice {
    double worth; /* bits that must be undercut */
    double bits, cost;
};

static void try_inputs(struct learner *l, struct cst_side_tensor *t, uint32_t layer, uint8_t tensor,
                       struct inputs in, struct choice *best) {
    double bits, cost;

    for (int i = 0; i < CST_SIDE_SOURCES; i++) {
        if (!cst_side_source(l->tensor, layer, tensor, i))
            in.sources &= (uint8_t) ~(1 << i);
    }
    if (!in.sources || are_same(in, (struct inputs){ t->sources, t->rank }))
        return;
    bits = validate(l, t, layer, tensor, in, l->try_sigma);
    cost = bits * (1 + PRICE * group_of(l, t, layer, tensor, in, 0).inputs / t->channels);
    if (bits >= best->worth || cost >= best->cost)
        return;
    best->bits = bits;
    best->cost = cost;
    t->sources = in.sources;
    t->rank = in.rank;
    memcpy(l->res_sigma, l->try_sigma, t->channels * sizeof(float));
}

/* As many coordinates of each source as plan and tokens allow. */
static uint32_t rank_for(const struct learner *l, uint32_t layer, uint8_t tensor, uint8_t sources) {
    uint32_t most = CST_MIN(l->inputs, l->rows / TOKENS_PER_MORE), n = 0;

    for (int i = 0; i < CST_SIDE_SOURCES; i++)
        n += sources >> i & 1 && cst_side_source(l->tensor, layer, tensor, i);
    return CST_MIN(l->rank, n ? most / n : 0);
}

/* What to predict from, and the deviations with and without it. Of two layers before, the keys of
 * the further one are worth more than its values: they alone are tried, too. */
static bool choose_inputs(struct learner *l, struct cst_side_tensor *t, uint32_t layer,
                          uint8_t tensor) {
    const struct inputs more[] = { { NEAR | CST_SIDE_FROM_K2, 0 },
                                   { ALL, 0 },
                                   { NEAR, rank_for(l, layer, tensor, NEAR) },
                                   { ALL, rank_for(l, layer, tensor, ALL) } };
    double klt = validate(l, t, layer, tensor, (struct inputs){ 0, 0 }, l->klt_sigma);
    struct choice best = { .worth = klt - WORTH_BITS * t->channels, .bits = klt, .cost = klt };

    t->sources = 0;
    t->rank = 0;
    if (isfinite(klt) && !l->params->no_predictors && l->inputs) {
        try_inputs(l, t, layer, tensor, (struct inputs){ NEAR, 0 }, &best);
        for (uint8_t one = 1; one <= 2 && t->sources != NEAR; one++) /* too few tokens for both */
            try_inputs(l, t, layer, tensor, (struct inputs){ one, 0 }, &best);
        for (size_t i = 0; i < (l->rank ? CST_COUNT(more) : 2); i++)
            try_inputs(l, t, layer, tensor, more[i], &best);
    }
    l->bits_klt += klt;
    l->bits_deep += best.bits;
    l->judged += t->channels;
    return isfinite(klt);
}

/* Bases, and a predictor from t->sources, on all rows. */
static bool fit_tensor(struct learner *l, struct cst_side_tensor *t, uint32_t layer,
                       uint8_t tensor) {
    uint32_t groups = cst_side_groups(t->channels, t->width);
    size_t at = 0;
    float unit;

    for (uint32_t i = 0; i < groups; i++) {
        struct group g = group_of(l, t, layer, tensor, (struct inputs){ t->sources, t->rank }, i);

        if (groups > 1 || !are_same(l->held, (struct inputs){ t->sources, t->rank }))
            multiply(l, &l->all, &g, t->channels, 0, l->rows);
        residual(l, l->covariance, &l->all, &g, NULL, l->rows);
        if (!basis(l, g.w))
            return false;
        put_basis(l, l->klt_rows, &g, basis_at(t, i));
        if (!g.inputs)
            continue;
        if (!fit(l, l->predictor + at, &l->all, &g, l->rows))
            return false;
        residual(l, l->covariance, &l->all, &g, l->predictor + at, l->rows);
        if (!basis(l, g.w))
            return false;
        put_basis(l, l->res_rows, &g, basis_at(t, i));
        at += (size_t)g.inputs * g.w;
    }
    unit = unit_of(l->predictor, at);
    round_halves(l->predictor, at, unit);
    t->klt = (struct cst_side_basis){ l->klt_sigma, l->klt_rows };
    t->residual = (struct cst_side_basis){ l->res_sigma, l->res_rows };
    t->predictor = l->predictor;
    return true;
}

static void quantize_rows(float *z, size_t n, float step) {
    for (size_t i = 0; i < n; i++)
        z[i] = truncf(z[i] / step + copysignf(0.5f, z[i])) * step;
}

/* The rows as they will be decoded, to this tensor's half of `state`. */
static void reconstruct(struct learner *l, const struct cst_side_tensor *t, uint32_t layer,
                        uint8_t tensor) {
    uint32_t groups = cst_side_groups(t->channels, t->width), lda = CST_SIDE_SOURCES * l->most;
    uint32_t slot = 2 * (layer % CST_SIDE_DEPTH) + tensor;
    float step = (float)step_of(l, t);

    for (uint32_t first = 0; first < l->rows; first += CHUNK) {
        uint32_t n = CST_MIN((uint32_t)CHUNK, l->rows - first);
        const float *w = l->predictor, *x = l->x + (size_t)first * t->channels;
        float *state = l->state + (size_t)first * lda + slot * l->most;

        for (uint32_t i = 0; i < groups; i++) {
            struct group g =
                group_of(l, t, layer, tensor, (struct inputs){ t->sources, t->rank }, i);
            const float *rows = (g.inputs ? l->res_rows : l->klt_rows) + basis_at(t, i);
            float *p = l->chunk + g.at;

            for (uint32_t r = 0; r < n; r++)
                memset(p + (size_t)r * t->channels, 0, g.w * sizeof(*p));
            for (int s = 0; s < g.spans; w += (size_t)g.span[s++].n * g.w)
                cst_gemm(false, false, n, g.w, g.span[s].n, 1,
                         g.from + (size_t)first * g.stride + g.span[s].at, g.stride, w, g.w, 1, p,
                         t->channels);
            for (uint32_t r = 0; r < n; r++) {
                for (uint32_t c = 0; c < g.w; c++)
                    l->r[r * g.w + c] =
                        x[(size_t)r * t->channels + g.at + c] - p[(size_t)r * t->channels + c];
            }
            cst_gemm(false, true, n, g.w, g.w, 1, l->r, g.w, rows, g.w, 0, l->z, g.w);
            quantize_rows(l->z, (size_t)n * g.w, step);
            cst_gemm(false, false, n, g.w, g.w, 1, l->z, g.w, rows, g.w, 1, p, t->channels);
        }
        for (uint32_t r = 0; r < n; r++)
            memcpy(state + (size_t)r * lda, l->chunk + (size_t)r * t->channels,
                   t->channels * sizeof(float));
    }
}

/* The first coordinates of what was reconstructed, to this tensor's columns of `coords`. */
static void find_coordinates(struct learner *l, const struct cst_side_tensor *t, uint32_t layer,
                             uint8_t tensor) {
    uint32_t slot = 2 * (layer % CST_SIDE_DEPTH) + tensor;
    uint32_t lda = CST_SIDE_SOURCES * l->most, ldc = CST_SIDE_SOURCES * l->rank;
    uint16_t group[CST_SIDE_RANK_MAX];
    uint32_t n = cst_side_pick(group, t, l->rank);

    for (uint32_t g = 0; g < cst_side_groups(t->channels, t->width); g++) {
        struct cst_side_span span = cst_side_group(t->channels, t->width, g);

        for (uint32_t first = 0; first < l->rows; first += CHUNK) {
            uint32_t rows = CST_MIN((uint32_t)CHUNK, l->rows - first);
            float *to = l->coords + (size_t)first * ldc + slot * l->rank;

            cst_gemm(false, true, rows, span.n, span.n, 1,
                     l->state + (size_t)first * lda + slot * l->most + span.at, lda,
                     t->klt.rows + basis_at(t, g), span.n, 0, l->z, span.n);
            for (uint32_t i = 0, k = 0; i < n; i++) {
                if (group[i] != g)
                    continue;
                for (uint32_t r = 0; r < rows; r++)
                    to[(size_t)r * ldc + i] = l->z[r * span.n + k];
                k++;
            }
        }
    }
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static uint8_t *section_start(struct learner *l, uint8_t kind, uint32_t layer, uint8_t tensor) {
    struct cst_side_entry *e = &l->entries[l->n_entries++];
    size_t at = cst_align_up(l->at, CST_SIDE_ALIGN);

    memset(l->dst + l->at, 0, at - l->at);
    l->at = at;
    *e = (struct cst_side_entry){ .kind = kind, .tensor = tensor };
    cst_store16(&e->layer, (uint16_t)layer);
    cst_store32(&e->offset, (uint32_t)at);
    return l->dst + at;
}

static void section_end(struct learner *l, const uint8_t *end) {
    struct cst_side_entry *e = &l->entries[l->n_entries - 1];

    cst_store32(&e->length, (uint32_t)(end - (l->dst + l->at)));
    l->at = (size_t)(end - l->dst);
}

static uint8_t *put_floats(uint8_t *dst, const float *x, size_t n) {
    for (size_t i = 0; i < n; i++, dst += 4)
        cst_store32(dst, cst_f32_bits(x[i]));
    return dst;
}

static uint8_t *put_halves(uint8_t *dst, const float *x, size_t n, float unit) {
    for (size_t i = 0; i < n; i++, dst += 2)
        cst_store16(dst, cst_f32_to_f16(x[i] / unit));
    return dst;
}

static size_t basis_size(const struct cst_side_tensor *t) {
    size_t n = 0;

    for (uint32_t g = 0; g < cst_side_groups(t->channels, t->width); g++) {
        size_t w = cst_side_group(t->channels, t->width, g).n;

        n += w * w;
    }
    return n;
}

/* Group by group the learner's matrices hold all inputs; with a rank the bytes hold all channels of
 * one input after the other. */
static uint8_t *put_matrices(uint8_t *dst, const struct learner *l, const struct cst_side_tensor *t,
                             uint32_t inputs, float unit) {
    for (uint32_t i = 0; i < inputs; i++) {
        const float *matrix = l->predictor;

        for (uint32_t g = 0; g < cst_side_groups(t->channels, t->width); g++) {
            size_t w = cst_side_group(t->channels, t->width, g).n;

            dst = put_halves(dst, matrix + i * w, w, unit);
            matrix += inputs * w;
        }
    }
    return dst;
}

static void put_predictor(struct learner *l, const struct cst_side_tensor *t, uint32_t layer,
                          uint8_t tensor) {
    uint8_t kind = t->rank || t->sources & ~NEAR ? CST_SIDE_PREDICTOR2 : CST_SIDE_PREDICTOR;
    struct cst_side_predictor head = { .sources = t->sources };
    uint8_t *p = section_start(l, kind, layer, tensor);
    struct group group = { 0 };
    size_t n = 0;
    float unit;

    for (uint32_t g = 0; g < cst_side_groups(t->channels, t->width); g++) {
        group = group_of(l, t, layer, tensor, (struct inputs){ t->sources, t->rank }, g);
        n += (size_t)group.inputs * group.w;
    }
    unit = unit_of(t->predictor, n);
    cst_store16(&head.rank, (uint16_t)t->rank);
    cst_store32(&head.scale, cst_f32_bits(unit));
    memcpy(p, &head, sizeof(head));
    p = put_floats(p + sizeof(head), t->residual.sigma, t->channels);
    p = put_halves(p, t->residual.rows, basis_size(t), 1);
    section_end(l, t->rank ? put_matrices(p, l, t, group.inputs, unit)
                           : put_halves(p, t->predictor, n, unit));
}

static void put_tensor(struct learner *l, const struct cst_side_tensor *t, uint32_t layer,
                       uint8_t tensor) {
    struct cst_side_klt klt;
    uint8_t *p = section_start(l, CST_SIDE_KLT, layer, tensor);

    cst_store32(&klt.channels, t->channels);
    cst_store32(&klt.width, t->width);
    cst_store32(&klt.rms, cst_f32_bits(t->rms));
    cst_store32(&klt.weight, cst_f32_bits(t->weight));
    memcpy(p, &klt, sizeof(klt));
    p = put_floats(p + sizeof(klt), t->mean, t->channels);
    p = put_floats(p, t->klt.sigma, t->channels);
    section_end(l, put_halves(p, t->klt.rows, basis_size(t), 1));
    if (t->sources)
        put_predictor(l, t, layer, tensor);
}

/* The directory in front, now that its length is known. */
static void put_front(struct learner *l, size_t reserved) {
    struct cst_side_header h = { .magic = CST_SIDE_MAGIC };
    size_t front = sizeof(h) + l->n_entries * sizeof(struct cst_side_entry);

    memmove(l->dst + front, l->dst + reserved, l->at - reserved);
    l->at -= reserved - front;
    for (uint32_t i = 0; i < l->n_entries; i++)
        cst_store32(&l->entries[i].offset,
                    cst_load32(&l->entries[i].offset) - (uint32_t)(reserved - front));
    cst_store16(&h.format, CST_SIDE_FORMAT);
    cst_store16(&h.version, (uint16_t)l->params->version);
    cst_store32(&h.bytes, (uint32_t)l->at);
    cst_store32(&h.model, cst_side_model(l->desc));
    cst_store32(&h.n_sections, l->n_entries);
    cst_store32(&h.tokens, l->rows);
    cst_store32(&h.step, cst_f32_bits(l->params->step > 0 ? l->params->step : DEFAULT_STEP));
    memcpy(l->dst, &h, sizeof(h));
    memcpy(l->dst + sizeof(h), l->entries, l->n_entries * sizeof(*l->entries));
}

/* ---- all of them ----------------------------------------------------------------------------- */

static int learn_tensor(struct learner *l, uint32_t layer, uint8_t tensor) {
    struct cst_side_tensor *t = &l->tensor[2 * layer + tensor];
    const struct cst_side_tensor *before = cst_side_tensor(l->params->before, layer, tensor);

    t->weight = before ? before->weight : 1;
    if (!load_tensor(l, t, layer, tensor))
        return 0;
    if (!choose_inputs(l, t, layer, tensor) || !fit_tensor(l, t, layer, tensor)) {
        t->channels = 0;
        return 0;
    }
    l->report.tensors++;
    l->report.predicted += t->sources != 0;
    if (!l->params->no_predictors && l->inputs)
        reconstruct(l, t, layer, tensor);
    if (!l->params->no_predictors && l->rank)
        find_coordinates(l, t, layer, tensor);
    put_tensor(l, t, layer, tensor);
    return 0;
}

static bool is_stopped(const struct learner *l) {
    return l->params->stop && atomic_load_explicit(l->params->stop, memory_order_relaxed);
}

int cst_learn(void *dst, size_t cap, const struct cst_descriptor *desc,
              const struct cst_learn_block *blocks, size_t n_blocks,
              const struct cst_learn_params *params, void *work, size_t work_len, size_t *len,
              struct cst_learn_report *report) {
    struct learner l = { .desc = desc,
                         .blocks = blocks,
                         .n_blocks = n_blocks,
                         .params = params,
                         .ops = cst_codec_ops(),
                         .plan = cst_side_plan(desc),
                         .dst = dst };
    size_t reserved =
        sizeof(struct cst_side_header) + 4 * (size_t)desc->n_layers * sizeof(struct cst_side_entry);
    struct cst_carve c = { work, 0 };

    if (!l.plan.width)
        return CST_LEARN_E_SHAPE;
    count_rows(&l);
    if (l.rows < CST_LEARN_TOKENS_MIN)
        return CST_LEARN_E_FEW;
    if (cap < l.plan.bytes || (uintptr_t)work % CST_CARVE_ALIGN ||
        work_len < cst_learn_work_size(desc, l.rows))
        return CST_LEARN_E_SMALL;
    carve_all(&l, &c, l.rows);
    memset(l.tensor, 0, 2 * (size_t)desc->n_layers * sizeof(*l.tensor));
    l.at = reserved;
    for (uint32_t layer = 0; layer < desc->n_layers; layer++) {
        for (uint8_t tensor = 0; tensor < 2; tensor++) {
            if (is_stopped(&l))
                return CST_LEARN_E_STOPPED;
            learn_tensor(&l, layer, tensor);
        }
    }
    if (!l.report.tensors)
        return CST_LEARN_E_SHAPE;
    put_front(&l, reserved);
    *len = l.at;
    l.report.tokens = l.rows;
    l.report.bits_klt = (float)(l.bits_klt / (double)l.judged);
    l.report.bits_deep = (float)(l.bits_deep / (double)l.judged);
    if (report)
        *report = l.report;
    return 0;
}
