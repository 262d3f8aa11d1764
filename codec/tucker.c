/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams of TUCKER. Decoding is two dense products for each segment, which leave the backbone of
 * every token in the plane, and then for each token the codes on top of it, transformed back.
 * Invariants: 1. factors are those of the last stream with FACTORS of the same tensor, whose shape
 * and ranks every stream of the cell repeats; 2. nothing is read beyond what parts_of() accounts
 * for, and no rank exceeds what the scratch holds. No state but in w->dense; one thread each.
 */
#include "codec/tucker.h"
#include "codec/coded.h"
#include "codec/heads.h"
#include "codec/linalg.h"
#include "codec/lloyd_table.h"
#include "codec/preset.h"

#include "base/macros.h"

#include <math.h>
#include <string.h>

enum { FLAGS = CST_CODED_UNROTATED | CST_CODED_MEAN | CST_CODED_FACTORS | CST_CODED_LLOYD };

/* What a stream says of itself, and where its parts lie, in bytes from its start. */
struct parts {
    struct cst_coded_shape shape;
    uint32_t heads, dims, rank_t, rank_d;
    float scale;
    uint64_t ranks, token, dim, core, means, norms, codes, end;
};

static struct parts parts_at(const struct cst_stage_segment *s, const struct cst_coded_header *head,
                             uint32_t rank_t, uint32_t rank_d) {
    struct parts p = { .shape = cst_coded_shape(s, head->bits),
                       .heads = s->view->heads,
                       .dims = s->view->dims,
                       .rank_t = rank_t,
                       .rank_d = rank_d };
    bool factors = head->flags & CST_CODED_FACTORS;

    p.ranks = sizeof(*head) + p.shape.sink_bytes;
    p.token = p.ranks + sizeof(struct cst_tucker_header);
    p.dim = p.token + (factors ? 2 * (uint64_t)p.shape.coded * rank_t : 0);
    p.core = p.dim + (factors ? 2 * (uint64_t)p.dims * rank_d : 0);
    p.means = p.core + 2 * (uint64_t)p.heads * rank_t * rank_d;
    p.norms = p.means + (head->flags & CST_CODED_MEAN ? 2 * (uint64_t)p.shape.channels : 0);
    p.codes = p.norms + (head->bits ? 2 * (uint64_t)p.shape.coded * p.heads : 0);
    p.end = p.codes + p.shape.coded * p.shape.row_bytes;
    return p;
}

/* Reads the heads of a stream. */
static bool parse(struct parts *p, struct cst_coded_header *head, const struct cst_stage_segment *s,
                  const uint8_t *src, size_t len) {
    struct cst_tucker_header ranks;
    uint32_t rank_t, rank_d;
    size_t at;

    if (len < sizeof(*head))
        return false;
    memcpy(head, src, sizeof(*head));
    at = sizeof(*head) + cst_coded_shape(s, 8).sink_bytes;
    if (head->bits > 8 || head->flags & ~FLAGS || head->group || len < at + sizeof(ranks))
        return false;
    memcpy(&ranks, src + at, sizeof(ranks));
    rank_t = cst_load16(&ranks.rank_t);
    rank_d = cst_load16(&ranks.rank_d);
    *p = parts_at(s, head, rank_t, rank_d);
    p->scale = cst_f32_from_bits(cst_load32(&ranks.scale));
    return rank_t <= p->shape.coded && rank_d <= p->dims && len == p->end && p->scale > 0 &&
           p->scale <= 0x1p80f;
}

/* The cell that a stream belongs to: its own from now on, or the one before it. */
static const struct cst_tucker_factors *factors_of(struct cst_tucker *t, const struct parts *p,
                                                   const struct cst_coded_header *head,
                                                   const struct cst_stage_segment *s,
                                                   const uint8_t *src) {
    struct cst_tucker_factors *f = &t->factors[s->tensor == CST_TENSOR_V];

    if (head->flags & CST_CODED_FACTORS)
        *f = (struct cst_tucker_factors){ src + p->token, src + p->dim, p->shape.coded,
                                          p->dims,        p->rank_t,    p->rank_d };
    return f->token && f->tokens == p->shape.coded && f->dims == p->dims &&
                   f->rank_t == p->rank_t && f->rank_d == p->rank_d && f->rank_t <= t->rank_max
               ? f
               : NULL;
}

/* ---- decode ----------------------------------------------------------------------------------
 */

/* The backbone of all tokens, added to what is there, or in its place. */
static bool decode_backbone(const struct cst_tucker *t, const struct parts *p,
                            const struct cst_tucker_factors *f, const uint8_t *src, float *rows,
                            bool add, const struct cst_codec_ops *ops) {
    float *token = t->scratch.y, *wide = t->scratch.z, *core = t->x;
    uint32_t channels = p->shape.channels, n = p->rank_t * p->rank_d;

    if (!ops->halves(token, f->token, 1, (size_t)p->shape.coded * p->rank_t) ||
        !ops->halves(t->dim, f->dim, 1, (size_t)p->rank_d * p->dims))
        return false;
    for (uint32_t h = 0; h < p->heads; h++) {
        if (!ops->halves(core, src + p->core + 2 * (size_t)h * n, p->scale, n))
            return false;
        cst_gemm(false, false, p->rank_t, p->dims, p->rank_d, 1, core, p->rank_d, t->dim, p->dims,
                 0, wide + (size_t)h * p->dims, channels);
    }
    cst_gemm(false, false, p->shape.coded, channels, p->rank_t, 1, token, p->rank_t, wide, channels,
             add ? 1 : 0, rows, p->shape.padded);
    return true;
}

/* Means plus the backbone, of all tokens. */
static bool decode_rows(const struct cst_tucker *t, const struct parts *p,
                        const struct cst_coded_header *head, const struct cst_tucker_factors *f,
                        const uint8_t *src, const struct cst_coded_rows *rows,
                        const struct cst_codec_ops *ops) {
    bool mean = head->flags & CST_CODED_MEAN, fill = mean || !p->rank_t;
    float *row = rows->x;

    memset(rows->a, 0, p->shape.padded * sizeof(float));
    if (mean &&
        !ops->halves(rows->a, src + p->means, cst_coded_unit(head->exponent), p->shape.channels))
        return false;
    for (uint32_t i = 0; fill && i < p->shape.coded; i++, row += p->shape.padded)
        memcpy(row, rows->a, p->shape.padded * sizeof(float));
    return !p->rank_t || decode_backbone(t, p, f, src, rows->x, fill, ops);
}

/* Coded token i on top of its backbone, to rows->a. Tokens go up from 0; norms are read for as many
 * as fit into a row. */
static bool decode_codes(const struct cst_coded_rows *rows, const struct parts *p, uint32_t i,
                         const uint8_t *src, const struct cst_coded_header *head,
                         const float *level, const struct cst_codec_ops *ops) {
    uint32_t at_once = p->shape.padded / p->heads, n = CST_MIN(at_once, p->shape.coded - i);
    const float *norm = rows->b + i % at_once * p->heads;
    const float *under = rows->x + (size_t)i * p->shape.padded;

    if (i % at_once == 0 && !ops->halves(rows->b, src + p->norms + 2 * (size_t)i * p->heads,
                                         cst_coded_unit(head->exponent), (size_t)n * p->heads))
        return false;
    ops->unpack(rows->codes, src + p->codes + i * p->shape.row_bytes, p->shape.padded, head->bits);
    for (uint32_t h = 0, c = 0; h < p->heads; h++, c += p->dims)
        cst_head_decode(rows->a + c, rows->codes + c, p->dims, level, head->bits, norm[h],
                        under + c, ops);
    return true;
}

static bool decode_tokens(uint8_t *seg, const struct cst_stage_segment *s, const struct parts *p,
                          const struct cst_coded_header *head, const uint8_t *src,
                          const struct cst_coded_rows *rows, const struct cst_codec_work *w) {
    const float *level = NULL;
    float uniform[256];

    if (head->bits && head->flags & CST_CODED_LLOYD) {
        level = cst_lloyd_levels(head->bits);
    } else if (head->bits) {
        memset(uniform, 0, sizeof(uniform));
        cst_uniform_levels(uniform, head->bits);
        level = uniform;
    }
    for (uint32_t i = 0; i < p->shape.coded; i++) {
        float *row = rows->x + (size_t)i * p->shape.padded;

        if (level && !decode_codes(rows, p, i, src, head, level, w->ops))
            return false;
        cst_coded_store(seg, s, s->sinks + i, level ? rows->a : row, head, w);
    }
    return true;
}

bool cst_tucker_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                       size_t len, const struct cst_codec_work *w) {
    struct cst_coded_rows rows = cst_coded_rows(s, w);
    const struct cst_tucker_factors *f;
    struct cst_coded_header head;
    struct parts p;

    if (!parse(&p, &head, s, src, len) || !cst_coded_open(&head, seg, s, FLAGS, src, len, w))
        return false;
    f = factors_of(w->dense, &p, &head, s, src);
    return f && decode_rows(w->dense, &p, &head, f, src, &rows, w->ops) &&
           decode_tokens(seg, s, &p, &head, src, &rows, w);
}

bool cst_tucker_skip(const struct cst_stage_segment *s, const uint8_t *src, size_t len,
                     const struct cst_codec_work *w) {
    struct cst_coded_header head;
    struct parts p;

    return s->view && parse(&p, &head, s, src, len) && factors_of(w->dense, &p, &head, s, src);
}

/* ---- encode ----------------------------------------------------------------------------------
 */

/* The cell of a segment of the block, and which of its members it is. */
static bool find_member(const struct cst_tucker *t, uint64_t offset, uint32_t *cell,
                        uint32_t *member) {
    for (uint32_t c = 0; c < t->n_cells; c++) {
        for (uint32_t i = 0; i < t->cell[c].n; i++) {
            if (t->member[t->cell[c].first + i].offset == offset) {
                *cell = c;
                *member = i;
                return true;
            }
        }
    }
    return false;
}

static void put_codes(uint8_t *dst, const struct parts *p, const uint8_t *codes, unsigned bits,
                      uint8_t *row) {
    bool whole = p->shape.padded == p->shape.channels;

    memset(row, 0, p->shape.padded);
    for (uint32_t i = 0; i < p->shape.coded; i++, codes += p->shape.channels) {
        if (!whole)
            memcpy(row, codes, p->shape.channels);
        cst_coded_pack(dst + p->codes + i * p->shape.row_bytes, whole ? codes : row,
                       p->shape.padded, bits);
    }
}

/* Everything behind the factors, from where the cell's arrays have it. */
static bool put_member(uint8_t *dst, const struct parts *p, const struct cst_coded_header *head,
                       const struct cst_tucker *t, const struct cst_tucker_cell *cell,
                       uint32_t member, uint8_t *row) {
    const struct cst_tucker_open *o = &t->open[cell->tensor];
    size_t before = 0, n = (size_t)p->rank_t * p->rank_d; /* heads of the members before */
    bool ok = true;

    for (uint32_t i = 0; i < member; i++)
        before += t->member[cell->first + i].heads;
    memcpy(dst + p->core, o->core + 2 * before * n, 2 * p->heads * n);
    for (uint32_t c = 0; head->flags & CST_CODED_MEAN && c < p->shape.channels; c++)
        ok &= cst_coded_put(dst + p->means + 2 * (size_t)c, o->mean[before * p->dims + c],
                            head->exponent);
    if (head->bits) {
        size_t rows = before * p->shape.coded;

        memcpy(dst + p->norms, o->norms + 2 * rows, 2 * (size_t)p->heads * p->shape.coded);
        put_codes(dst, p, o->codes + rows * p->dims, head->bits, row);
    }
    return ok;
}

size_t cst_tucker_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                         const struct cst_codec_work *w, float *error) {
    struct cst_tucker *t = w->dense;
    struct cst_tucker_header ranks = { 0 };
    const struct cst_tucker_open *o;
    struct cst_coded_header head = { 0 };
    uint32_t cell, member;
    struct parts p;

    if (!find_member(t, (uint64_t)(seg - t->block), &cell, &member) ||
        (member == 0 && !cst_tucker_fit(t, cell, w)))
        return 0;
    o = &t->open[t->cell[cell].tensor];
    if (o->cell != cell)
        return 0;
    head.flags =
        (uint8_t)((s->rotated ? CST_CODED_UNROTATED : 0) | (member == 0 ? CST_CODED_FACTORS : 0) |
                  (t->recipe->lloyd ? CST_CODED_LLOYD : 0) |
                  (t->member[t->cell[cell].first + member].mean ? CST_CODED_MEAN : 0));
    head.bits = o->choice.bits;
    head.exponent = t->member[t->cell[cell].first + member].exponent;
    cst_store32(&head.rope, s->rotated ? cst_rope_id(s->rotated) : 0);
    cst_store16(&ranks.rank_t, o->choice.rank_t);
    cst_store16(&ranks.rank_d, o->choice.rank_d);
    cst_store32(&ranks.scale, cst_f32_bits(o->choice.rank_t ? o->scale[member] : 1));
    p = parts_at(s, &head, o->choice.rank_t, o->choice.rank_d);
    memcpy(dst, &head, sizeof(head));
    cst_stage_save_sinks(dst + sizeof(head), seg, s);
    memcpy(dst + p.ranks, &ranks, sizeof(ranks));
    if (member == 0) {
        memcpy(dst + p.token, o->token, p.dim - p.token);
        memcpy(dst + p.dim, o->dim, p.core - p.dim);
    }
    if (!put_member(dst, &p, &head, t, &t->cell[cell], member, cst_coded_rows(s, w).codes) ||
        !cst_stage_finish(cst_tucker_decode, dst, p.end, seg, s, w, error)) {
        if (member == 0)
            t->open[t->cell[cell].tensor].cell = UINT32_MAX;
        return 0;
    }
    return p.end;
}
