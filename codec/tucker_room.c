/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where everything of a TUCKER frame lies in w->dense. Sizes depend on the descriptor alone, so
 * they are the largest that any choice of cells needs; cells of several layers stop at
 * CST_TUCKER_CELL_MAX values. No state; any thread.
 */
#include "codec/dtype.h"
#include "codec/linalg.h"
#include "codec/tucker.h"

#include "base/macros.h"

#include <string.h>

enum { ALIGN = 64 };

struct extent {
    uint32_t tokens, segments, dims; /* the largest head */
    uint64_t channels, heads;        /* of a cell */
    uint64_t pool;                   /* bytes of the factors of all cells */
};

/* docs/codec-format.md section 4.7 */
static uint32_t rank_max(uint32_t tokens) {
    return CST_MIN(tokens, CST_MAX(CST_TUCKER_RANK_MIN, tokens / CST_TUCKER_RANK_SHARE));
}

/* Bytes of the factors of a cell whose first segment this is: they fit into it. */
static uint64_t pool_of(const struct cst_view *v, uint64_t length) {
    uint64_t token = CST_MIN(2 * (uint64_t)v->tokens * rank_max(v->tokens), length);

    return cst_align_up(token, ALIGN) + cst_align_up(2 * (uint64_t)v->dims * v->dims, ALIGN);
}

static struct extent extent_of(const struct cst_descriptor *desc) {
    struct extent e = { .tokens = desc->block_tokens, .segments = desc->n_segments };
    uint64_t channels[2] = { 0 }, heads[2] = { 0 }, widest = 1;

    e.dims = 1;
    for (uint32_t i = 0; i < desc->n_segments; i++) {
        const struct cst_segment *seg = &desc->segments[i];
        struct cst_view v;

        if (seg->tensor == CST_TENSOR_OPAQUE || !cst_view_init(&v, desc, seg))
            continue;
        channels[seg->tensor] += cst_view_channels(&v);
        heads[seg->tensor] += v.heads;
        widest = CST_MAX(widest, cst_view_channels(&v));
        e.dims = CST_MAX(e.dims, v.dims);
        e.pool += pool_of(&v, seg->length);
    }
    e.channels =
        CST_MIN(CST_MAX(channels[0], channels[1]), CST_MAX(widest, CST_TUCKER_CELL_MAX / e.tokens));
    e.channels = CST_MAX(e.channels, widest);
    e.heads = CST_MIN(CST_MAX(heads[0], heads[1]), e.channels);
    return e;
}

/* Hands out memory; only counts where base is NULL. */
struct arena {
    uint8_t *base;
    size_t used;
};

static void *take(struct arena *a, uint64_t bytes) {
    uint8_t *p = a->base ? a->base + a->used : NULL;

    a->used += cst_align_up(bytes, ALIGN);
    return p;
}

static float *take_floats(struct arena *a, uint64_t n) {
    return take(a, n * sizeof(float));
}

static void take_scratch(struct cst_tucker *t, struct arena *a, const struct extent *e) {
    uint64_t side = CST_MAX(e->tokens, e->dims), cell = e->tokens * e->channels;
    uint64_t rank = CST_MIN(rank_max(e->tokens), e->channels);
    uint64_t rows = CST_MIN(rank + CST_TUCKER_OVERSAMPLE, e->tokens);
    uint64_t eigen = cst_eigen_work((uint32_t)rows) + rows * e->tokens;

    eigen = CST_MAX(eigen, cst_eigen_work((uint32_t)side));
    eigen = CST_MAX(eigen, cst_orthonormalize_work((uint32_t)side));
    t->rank_max = (uint32_t)rank;
    t->scratch.gram = take_floats(a, side * side);
    t->scratch.values = take_floats(a, side);
    t->scratch.eigen = take_floats(a, eigen);
    t->scratch.y = take_floats(a, cell);
    t->scratch.z = take_floats(a, cell);
    t->x = take_floats(a, cell);
    t->kept = take_floats(a, rank * e->channels);
    t->token = take_floats(a, (uint64_t)t->rank_max * e->tokens);
    t->dim = take_floats(a, (uint64_t)e->dims * e->dims);
}

static void take_open(struct cst_tucker_open *o, struct arena *a, const struct extent *e) {
    uint64_t cell = e->tokens * e->channels;

    o->cell = UINT32_MAX;
    o->codes = take(a, cell);
    o->norms = take(a, 2 * e->tokens * e->heads);
    o->token = take(a, 2 * (uint64_t)e->tokens * rank_max(e->tokens));
    o->dim = take(a, 2 * (uint64_t)e->dims * e->dims);
    o->core = take(a, 2 * cell);
    o->scale = take_floats(a, e->segments);
    o->mean = take_floats(a, e->channels);
}

static void lay_out(struct cst_tucker *t, struct arena *a, const struct extent *e) {
    take_scratch(t, a, e);
    t->member = take(a, e->segments * sizeof(*t->member));
    t->cell = take(a, e->segments * sizeof(*t->cell));
    t->hull = take(a, e->segments * sizeof(*t->hull));
    t->choice = take(a, e->segments * sizeof(*t->choice));
    t->bins = take(a, sizeof(*t->bins));
    t->part = take(a, e->segments * sizeof(*t->part));
    t->captured = take(a, (t->rank_max + 1) * (e->dims + 1) * sizeof(double));
    take_open(&t->open[0], a, e);
    take_open(&t->open[1], a, e);
}

size_t cst_tucker_work_size(const struct cst_descriptor *desc) {
    struct extent e = extent_of(desc);
    struct arena a = { .used = cst_align_up(sizeof(struct cst_tucker), ALIGN) };
    struct cst_tucker t;

    lay_out(&t, &a, &e);
    return a.used + e.pool;
}

struct cst_tucker *cst_tucker_init(const struct cst_codec_work *w) {
    struct extent e = extent_of(w->desc);
    struct arena a = { w->dense, cst_align_up(sizeof(struct cst_tucker), ALIGN) };
    struct cst_tucker *t = w->dense;

    memset(t, 0, sizeof(*t));
    lay_out(t, &a, &e);
    t->pool = a.base + a.used;
    return t;
}
