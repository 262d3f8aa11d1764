/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where everything of a TUCKER frame lies in w->dense. Sizes depend on the descriptor alone, so
 * they are the largest that any choice of cells needs; cells of several layers stop at
 * CST_TUCKER_CELL_MAX values. No state; any thread.
 */
#include "codec/carve.h"
#include "codec/dtype.h"
#include "codec/linalg.h"
#include "codec/tucker.h"

#include "base/macros.h"

#include <string.h>

struct extent {
    uint32_t tokens, segments, dims; /* the largest head */
    uint64_t channels, heads;        /* of a cell */
    uint64_t pool;                   /* bytes of the factors of all cells */
    uint64_t cores;                  /* of their cores beside them; 0: too many to be kept */
};

/* Bytes of cores: of wide models at short blocks they would be half of the whole room. */
enum { CORES_MAX = 4 << 20 };

/* docs/codec-format.md section 4.7 */
static uint32_t rank_max(uint32_t tokens) {
    return CST_MIN(tokens, CST_MAX(CST_TUCKER_RANK_MIN, tokens / CST_TUCKER_RANK_SHARE));
}

/* Bytes of the factors of a cell whose first segment this is, which they fit into. */
static uint64_t pool_of(const struct cst_view *v, uint64_t length) {
    uint64_t token = CST_MIN(2 * (uint64_t)v->tokens * rank_max(v->tokens), length);

    return cst_align_up(token, CST_CARVE_ALIGN) +
           cst_align_up(2 * (uint64_t)v->dims * v->dims, CST_CARVE_ALIGN);
}

/* Of what the core has of a segment. */
static uint64_t core_of(const struct cst_view *v) {
    return cst_align_up(2 * (uint64_t)cst_view_channels(v) * rank_max(v->tokens), CST_CARVE_ALIGN);
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
        e.cores += core_of(&v);
    }
    e.cores = e.cores <= CORES_MAX ? e.cores : 0;
    e.channels =
        CST_MIN(CST_MAX(channels[0], channels[1]), CST_MAX(widest, CST_TUCKER_CELL_MAX / e.tokens));
    e.channels = CST_MAX(e.channels, widest);
    e.heads = CST_MIN(CST_MAX(heads[0], heads[1]), e.channels);
    return e;
}

static void take_scratch(struct cst_tucker *t, struct cst_carve *c, const struct extent *e) {
    uint64_t side = CST_MAX(e->tokens, e->dims), cell = e->tokens * e->channels;
    uint64_t rank = CST_MIN(rank_max(e->tokens), e->channels);
    uint64_t rows = CST_MIN(rank + CST_TUCKER_OVERSAMPLE, e->tokens);
    uint64_t eigen = cst_eigen_work((uint32_t)rows) + rows * e->tokens;

    eigen = CST_MAX(eigen, cst_eigen_work((uint32_t)side));
    eigen = CST_MAX(eigen, cst_orthonormalize_work((uint32_t)side));
    eigen = CST_MAX(eigen, 2 * rank * (rank + e->tokens)); /* doubles: token factors */
    t->rank_max = (uint32_t)rank;
    t->scratch.gram = cst_carve_floats(c, side * side);
    t->scratch.values = cst_carve_floats(c, side);
    t->scratch.eigen = cst_carve_floats(c, eigen);
    t->scratch.y = cst_carve_floats(c, cell);
    t->scratch.z = cst_carve_floats(c, cell);
    t->x = cst_carve_floats(c, cell);
    t->kept = cst_carve_floats(c, rank * e->channels);
    t->core = cst_carve_floats(c, rank * e->channels);
    t->token = cst_carve_floats(c, (uint64_t)t->rank_max * e->tokens);
    t->dim = cst_carve_floats(c, (uint64_t)e->dims * e->dims);
}

static void take_open(struct cst_tucker_open *o, struct cst_carve *c, const struct extent *e) {
    uint64_t cell = e->tokens * e->channels;

    o->cell = UINT32_MAX;
    o->codes = cst_carve(c, cell, 1);
    o->norms = cst_carve(c, e->tokens * e->heads, 2);
    o->token = cst_carve(c, (uint64_t)e->tokens * rank_max(e->tokens), 2);
    o->dim = cst_carve(c, (uint64_t)e->dims * e->dims, 2);
    o->core = cst_carve(c, cell, 2);
    o->scale = cst_carve_floats(c, e->segments);
    o->mean = cst_carve_floats(c, e->channels);
}

static void lay_out(struct cst_tucker *t, struct cst_carve *c, const struct extent *e) {
    (void)cst_carve(c, 1, sizeof(*t));
    take_scratch(t, c, e);
    t->member = cst_carve(c, e->segments, sizeof(*t->member));
    t->cell = cst_carve(c, e->segments, sizeof(*t->cell));
    t->hull = cst_carve(c, e->segments, sizeof(*t->hull));
    t->choice = cst_carve(c, e->segments, sizeof(*t->choice));
    t->bins = cst_carve(c, 1, sizeof(*t->bins));
    t->part = cst_carve(c, e->segments, sizeof(*t->part));
    t->captured = cst_carve(c, (t->rank_max + 1) * (e->dims + 1), sizeof(double));
    take_open(&t->open[0], c, e);
    take_open(&t->open[1], c, e);
}

size_t cst_tucker_work_size(const struct cst_descriptor *desc) {
    struct extent e = extent_of(desc);
    struct cst_carve c = { NULL, 0 };
    struct cst_tucker t;

    lay_out(&t, &c, &e);
    return c.at + e.pool + e.cores;
}

struct cst_tucker *cst_tucker_init(const struct cst_codec_work *w) {
    struct extent e = extent_of(w->desc);
    struct cst_carve c = { w->dense, 0 };
    struct cst_tucker *t = w->dense;

    memset(t, 0, sizeof(*t));
    lay_out(t, &c, &e);
    t->pool = c.base + c.at;
    t->keeps_cores = e.cores;
    return t;
}
