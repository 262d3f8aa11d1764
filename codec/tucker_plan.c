/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan of a frame: which segments make cells, what each cell's candidates cost and leave, and
 * which ones the budget affords. Invariants: 1. costs are the bytes that the streams will have, to
 * the byte, each rounded up to where the next stream starts; 2. no stream of a candidate is as long
 * as its segment; 3. members lie by tensor, then in the order of their streams.
 *
 * A segment that can't be in a cell (holes that aren't zero, values that aren't finite, channels
 * without any deviation, keys that can't be turned back) is coded without loss, and so are its
 * bytes left out of the budget, on both sides.
 */
#include "codec/carve.h"
#include "codec/codec.h"
#include "codec/coded.h"
#include "codec/fixed_math.h"
#include "codec/frame_layout.h"
#include "codec/heads.h"
#include "codec/linalg.h"
#include "codec/outliers.h"
#include "codec/tucker.h"

#include "base/macros.h"

#include <math.h>
#include <string.h>

const struct cst_tucker_recipe *cst_tucker_recipe(uint32_t preset) {
    static const struct cst_tucker_recipe jolt = {
        4, { 0, 2, 4, 8 }, .weight_k = 1, .weight_v = 1
    };
    /* Errors of keys change what a model predicts more than those of values: docs/decisions/013. */
    static const struct cst_tucker_recipe flash = {
        4, { 0, 2, 4, 8 }, .lloyd = true, .sketch = true, .weight_k = 4, .weight_v = 1
    };
    static const struct cst_tucker_recipe plus = { 7,
                                                   { 0, 2, 3, 4, 5, 6, 8 },
                                                   .lloyd = true,
                                                   .means = true,
                                                   .level = true,
                                                   .weight_k = 1,
                                                   .weight_v = 1 };

    return preset == CST_PRESET_JOLT_PLUS ? &plus : preset == CST_PRESET_FLASHJOLT ? &flash : &jolt;
}

uint64_t cst_tucker_stream_size(const struct cst_tucker *t, const struct cst_tucker_cell *cell,
                                uint32_t member, const struct cst_point *p) {
    const struct cst_tucker_member *m = &t->member[cell->first + member];
    uint64_t channels = (uint64_t)m->heads * cell->dims, tokens = t->tokens;
    uint64_t n = sizeof(struct cst_coded_header) + m->sink_bytes +
                 sizeof(struct cst_tucker_header) + 2 * (uint64_t)m->heads * p->rank_t * p->rank_d +
                 (m->mean ? 2 * channels : 0);

    n += m->outlier_bytes;
    if (member == 0)
        n += 2 * (tokens * p->rank_t + (uint64_t)cell->dims * p->rank_d);
    if (p->bits)
        n += tokens * (2 * (uint64_t)m->heads + cst_align_up(channels, 8) / 8 * p->bits);
    return n;
}

/* ---- loading ---------------------------------------------------------------------------------
 */

/* Of largest values from 2^-30 to 2^40, so that Gram matrices stay within fp32. */
enum { EXPONENT_MIN = -40, EXPONENT_MAX = 29 };

/* What statistics need, in w->b: a segment has at least 16 tokens of 2 bytes a channel. */
struct sums {
    double *mean, *deviation, *energy;
    float *zero;
};

/* The means; the other sums are 0. */
static void find_means(struct sums *s, uint8_t *b, const float *rows, uint32_t tokens, size_t n,
                       const struct cst_codec_ops *ops) {
    double *d = (void *)b;

    *s = (struct sums){ d, d + n, d + 2 * n, (void *)(d + 3 * n) };
    memset(b, 0, n * (3 * sizeof(double) + sizeof(float)));
    for (uint32_t t = 0; t < tokens; t++)
        ops->add(s->mean, rows + t * n, n);
    for (uint32_t c = 0; c < n; c++)
        s->mean[c] /= tokens;
}

/* What the rows have around their means, given what they have around 0; value by value where the
 * difference would be all rounding. */
static double deviation_of(const struct sums *s, double energy, const float *rows, uint32_t tokens,
                           size_t n, const struct cst_codec_ops *ops) {
    double means = 0, sum = 0;

    for (uint32_t c = 0; c < n; c++)
        means += s->mean[c] * s->mean[c];
    if (energy - tokens * means > 0x1p-20 * energy)
        return energy - tokens * means;
    for (uint32_t t = 0; t < tokens; t++)
        ops->moments(s->deviation, s->energy, s->mean, rows + t * n, s->zero, n);
    for (uint32_t c = 0; c < n; c++)
        sum += s->deviation[c];
    return sum;
}

/* Whether the bits that means save, log2(energy / deviation) / 2 a value, exceed their own. */
static bool means_pay(double energy, double deviation, uint32_t tokens) {
    return energy > deviation * cst_fixed_exp(22.180709777918249 / tokens);
}

/* What the plan wants to know of a segment's rows. false: no deviation. */
static bool judge(struct cst_tucker_member *m, const struct sums *sums, const float *rows,
                  uint32_t channels, uint32_t tokens, const struct cst_tucker_recipe *recipe,
                  const struct cst_codec_ops *ops) {
    double energy = cst_head_energy(rows, (size_t)channels * tokens);

    m->deviation = deviation_of(sums, energy, rows, tokens, channels, ops);
    m->mean = recipe->means && means_pay(energy, m->deviation, tokens);
    m->energy = m->mean ? m->deviation : energy;
    m->weight = recipe->level ? (float)(1 / sqrt(m->energy / tokens)) : 1;
    return m->deviation > 0;
}

static void take_means(float *x, float *mean, const struct sums *sums, uint32_t tokens,
                       uint32_t channels) {
    for (uint32_t c = 0; c < channels; c++)
        mean[c] = (float)sums->mean[c];
    for (uint32_t t = 0; t < tokens; t++, x += channels) {
        for (uint32_t c = 0; c < channels; c++)
            x[c] -= mean[c];
    }
}

static bool load(struct cst_tucker_member *m, float *x, float *mean, const uint8_t *seg,
                 const struct cst_stage_segment *s, const struct cst_tucker_recipe *recipe,
                 const struct cst_codec_work *w) {
    struct cst_coded_header head = { .flags = s->rotated ? CST_CODED_UNROTATED : 0 };
    uint32_t tokens = s->tokens - s->sinks, channels = cst_view_channels(s->view);
    struct sums sums;

    if (!tokens || !cst_coded_load_to(&head, x, channels, seg, s, w) ||
        head.exponent < EXPONENT_MIN || head.exponent > EXPONENT_MAX)
        return false;
    m->exponent = head.exponent;
    find_means(&sums, w->b, x, tokens, channels, w->ops);
    if (!judge(m, &sums, x, channels, tokens, recipe, w->ops))
        return false;
    if (m->mean)
        take_means(x, mean, &sums, tokens, channels);
    return true;
}

void cst_tucker_load_again(const struct cst_tucker_member *m, float *x, float *mean,
                           const uint8_t *seg, const struct cst_stage_segment *s,
                           const struct cst_codec_work *w) {
    uint32_t tokens = s->tokens - s->sinks, channels = cst_view_channels(s->view);
    struct sums sums;

    cst_coded_load_again(x, channels, seg, s, w);
    if (!m->mean)
        return;
    find_means(&sums, w->b, x, tokens, channels, w->ops);
    take_means(x, mean, &sums, tokens, channels);
}

/* ---- candidates ------------------------------------------------------------------------------
 */

/* Candidates that leave more of the energy of the deviation from the means are of no use: what has
 * no better one is coded without loss. */
static const double MOST_LEFT = 0.25;

/* The ranks that are tried are a quarter apart: finer ones gain nothing that can be measured, and
 * many candidates that are nearly alike let a block that is coded again take another one. */
static uint32_t next_rank(uint32_t rank, uint32_t most) {
    uint32_t next = rank + 1 + rank / 4;

    return rank < most && next > most ? most : next;
}

struct planner {
    struct cst_tucker *t;
    const struct cst_codec_work *w;
    struct cst_tucker_cell *cell;
    struct cst_tucker_basis basis;
    uint32_t n_channels; /* of the cell so far */
    double weight;       /* of the cell's error */
    double most;         /* error of a candidate */
};

/* The cost of a candidate; 0 where a stream would be as long as its segment. */
static uint64_t cost_of(const struct planner *p, const struct cst_point *c) {
    uint64_t sum = 0;

    for (uint32_t i = 0; i < p->cell->n; i++) {
        uint64_t n = cst_tucker_stream_size(p->t, p->cell, i, c);

        if (n >= p->t->member[p->cell->first + i].length)
            return 0;
        sum += cst_align_up(n, CST_STREAM_ALIGN);
    }
    return sum;
}

static void try_ranks(const struct planner *p, uint32_t rank_t, uint32_t rank_d) {
    const struct cst_tucker_recipe *r = p->t->recipe;
    size_t at = (size_t)rank_t * (p->cell->dims + 1) + rank_d;
    double left = 1 - p->basis.captured[at] / p->basis.energy;

    left = CST_MAX(left, 0) * p->weight;
    for (uint32_t i = 0; i < r->n_bits; i++) {
        struct cst_point c = { .error = left * cst_codebook_distortion(r->lloyd, r->bits[i]),
                               .rank_t = (uint16_t)rank_t,
                               .rank_d = (uint16_t)rank_d,
                               .bits = r->bits[i] };

        c.cost = c.error <= p->most ? cost_of(p, &c) : 0;
        if (c.cost)
            cst_hull_bins_add(p->t->bins, &c);
    }
}

static void make_hull(const struct planner *p, struct cst_hull *hull) {
    uint64_t most = 0;
    uint32_t dims = p->cell->dims;

    for (uint32_t i = 0; i < p->cell->n; i++)
        most += cst_align_up(p->t->member[p->cell->first + i].length, CST_STREAM_ALIGN);
    cst_hull_bins_init(p->t->bins, cost_of(p, &(struct cst_point){ .bits = 0 }), most);
    try_ranks(p, 0, 0);
    for (uint32_t i = 1; i <= p->basis.rank; i = next_rank(i, p->basis.rank)) {
        for (uint32_t j = 1; j <= dims; j = next_rank(j, dims))
            try_ranks(p, i, j);
    }
    cst_hull_make(hull, p->t->bins);
}

/* ---- cells -----------------------------------------------------------------------------------
 */

/* Directions that a sketch is for: as in the FlashJoLT paragraph, by the ratio asked for, but 48
 * instead of 32, of which values of flat spectra would take more. */
static uint32_t sketch_columns(float ratio, uint32_t tokens) {
    uint32_t least = ratio >= 5 ? 64 : 48;

    return CST_MIN(CST_MAX(least, (tokens + 31) / 32), 512);
}

static float ratio_of(const struct cst_encode_params *params) {
    return params->ratio > 0 ? params->ratio : CST_TUCKER_RATIO;
}

static uint32_t most_directions(const struct planner *p) {
    const struct cst_tucker *t = p->t;
    uint64_t most = t->member[p->cell->first].length / (2 * (uint64_t)t->tokens);

    most = CST_MIN(most, CST_MIN(t->tokens, p->cell->heads * p->cell->dims));
    most = CST_MIN(most, t->rank_max);
    if (t->recipe->sketch)
        most = CST_MIN(most, sketch_columns(ratio_of(p->w->params), t->tokens));
    return (uint32_t)most;
}

static uint8_t *keep_halves(const struct planner *p, const float *x, size_t n) {
    uint8_t *halves = p->t->pool;

    p->w->ops->from_f32[CST_DTYPE_F16](halves, x, n);
    p->t->pool += cst_align_up(2 * n, CST_CARVE_ALIGN);
    return halves;
}

/* Keeps the directions, which all candidates share. */
static void keep_basis(const struct planner *p) {
    const struct cst_tucker_basis *b = &p->basis;
    struct cst_tucker_cell *cell = p->cell;
    size_t n = (size_t)b->rank * cell->heads * cell->dims;

    cell->most = b->rank;
    cell->token = keep_halves(p, b->token, (size_t)b->rank * p->t->tokens);
    cell->dim = keep_halves(p, b->dim, (size_t)cell->dims * cell->dims);
    if (!p->t->keeps_cores)
        return;
    cell->core_scale = cst_tucker_scale(b->core, n, p->w->ops);
    for (size_t i = 0; i < n; i++)
        b->core[i] /= cell->core_scale;
    cell->core = keep_halves(p, b->core, n);
}

/* Of short blocks, and of few channels, the whole spectrum is less work than the products of a
 * sketch. */
static bool is_sketched(const struct planner *p) {
    uint32_t side = CST_MIN(p->t->tokens, p->cell->heads * p->cell->dims);

    return p->t->recipe->sketch && side > 4 * (p->basis.rank + CST_TUCKER_OVERSAMPLE);
}

static void close_cell(struct planner *p) {
    struct cst_tucker *t = p->t;
    struct cst_tucker_shape shape = { .tokens = t->tokens, .n_parts = 0, .part = t->part };

    if (!p->cell)
        return;
    shape.dims = p->cell->dims;
    shape.n_parts = p->cell->n;
    shape.heads = p->cell->heads;
    p->basis = (struct cst_tucker_basis){ .rank = most_directions(p),
                                          .dim = t->dim,
                                          .token = t->token,
                                          .core = t->kept,
                                          .captured = t->captured };
    p->most = 0;
    for (uint32_t i = 0; i < shape.n_parts; i++) {
        const struct cst_tucker_member *m = &t->member[p->cell->first + i];

        t->part[i] = (struct cst_tucker_part){ m->heads, m->weight };
        p->most += m->deviation * (double)m->weight * (double)m->weight;
        p->basis.energy += m->energy * (double)m->weight * (double)m->weight;
    }
    p->cell->sketched = is_sketched(p);
    p->weight = p->cell->tensor == CST_TENSOR_K ? t->recipe->weight_k : t->recipe->weight_v;
    if (t->recipe->level)
        p->weight *= shape.n_parts;
    t->hull[t->n_cells].n = t->hull[t->n_cells].n_other = 0;
    /* Of keys it matters which directions are taken; of values nearly all are. */
    if (!cst_tucker_basis_make(&p->basis, &shape, t->x, p->cell->sketched,
                               p->cell->sketched && p->cell->tensor == CST_TENSOR_V, &t->scratch)) {
        p->most *= MOST_LEFT * p->weight / p->basis.energy;
        keep_basis(p);
        make_hull(p, &t->hull[t->n_cells]);
    }
    t->n_cells++;
    p->cell = NULL;
}

/* In short blocks token directions that many layers share are worse than the bytes they save. */
static uint32_t group_of(const struct cst_codec_work *w, uint32_t layer) {
    uint32_t layers = w->params->group_layers;

    if (!layers)
        layers = w->desc->block_tokens < CST_TUCKER_LONG ? 1 : CST_TUCKER_LAYERS;
    return layer / layers;
}

/* Closes the cell so far where a segment can't be in it. */
static void leave_cell(struct planner *p, const struct cst_stage_segment *s) {
    uint64_t values = (uint64_t)(p->n_channels + cst_view_channels(s->view)) * s->view->tokens;

    if (p->cell && (p->cell->tensor != s->tensor || p->cell->dims != s->view->dims ||
                    group_of(p->w, p->cell->layer) != group_of(p->w, s->layer) ||
                    values > CST_TUCKER_CELL_MAX))
        close_cell(p);
    if (!p->cell)
        p->n_channels = 0;
}

static void join_cell(struct planner *p, const struct cst_stage_segment *s,
                      const struct cst_tucker_member *m) {
    struct cst_tucker *t = p->t;

    if (!p->cell) {
        p->cell = &t->cell[t->n_cells];
        *p->cell = (struct cst_tucker_cell){ .first = t->n_members,
                                             .dims = s->view->dims,
                                             .layer = s->layer,
                                             .tensor = s->tensor,
                                             .missed = 1 };
    }
    t->member[t->n_members++] = *m;
    p->n_channels += cst_view_channels(s->view);
    p->cell->heads += m->heads;
    p->cell->n++;
}

static void add_segment(struct planner *p, const struct cst_segment *seg,
                        const struct cst_encode_params *params) {
    struct cst_tucker *t = p->t;
    const uint8_t *src = t->block + seg->offset;
    struct cst_view view;
    struct cst_stage_segment s =
        cst_stage_segment(&view, p->w->desc, seg, params->tokens, params->first_position);
    struct cst_tucker_member m = { .offset = seg->offset, .length = seg->length };

    if (!s.view || cst_is_zero(src, seg->length))
        return;
    leave_cell(p, &s);
    if (!load(&m, t->x + (size_t)p->n_channels * t->tokens, t->scratch.y, src, &s, t->recipe, p->w))
        return;
    m.heads = view.heads;
    m.sink_bytes = cst_coded_shape(&s, 8).sink_bytes;
    m.outlier_bytes = cst_outliers_size(&s, p->w);
    join_cell(p, &s, &m);
    t->budget +=
        (uint64_t)((double)((uint64_t)params->tokens * cst_view_channels(&view) * view.esize) /
                   (double)ratio_of(params));
}

static void find_cells(struct planner *p) {
    for (uint8_t tensor = CST_TENSOR_K; tensor <= CST_TENSOR_V; tensor++) {
        for (uint32_t k = 0; k < p->w->desc->n_segments; k++) {
            const struct cst_segment *seg = &p->w->desc->segments[p->w->order[k]];

            if (seg->tensor == tensor)
                add_segment(p, seg, p->w->params);
        }
        close_cell(p);
    }
}

void cst_tucker_plan(const uint8_t *block, uint32_t tokens, uint32_t first_position,
                     const struct cst_codec_work *w) {
    struct cst_tucker *t = cst_tucker_init(w);
    struct planner p = { .t = t, .w = w };
    uint64_t fixed = sizeof(struct cst_frame_header) +
                     cst_layout_streams(w->desc) * sizeof(struct cst_stream_entry);
    uint32_t sinks = first_position < CST_SINK_TOKENS ? CST_SINK_TOKENS - first_position : 0;

    t->recipe = cst_tucker_recipe(w->params->preset);
    t->block = block;
    t->tokens = tokens - CST_MIN(sinks, tokens);
    find_cells(&p);
    t->budget -= CST_MIN(t->budget, fixed);
    t->over_budget = t->n_cells && !cst_allocate(t->choice, t->hull, t->n_cells, t->budget);
    for (uint32_t c = 0; c < t->n_cells; c++)
        t->planned += t->hull[c].n ? cst_hull_at(&t->hull[c], t->choice[c])->cost : 0;
}
