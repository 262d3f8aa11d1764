/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stage LLOYD (TurboQuant without its sign sketch): each head of a token is transformed by Hadamard
 * matrices, which makes its values about normal whatever the channels were, and coded with the
 * Lloyd-Max levels of a normal variable. Its norm is chosen so that the decoded head has the length
 * of the original.
 *
 * Heads whose size isn't a power of two are cut into blocks that are, the largest first: 80 = 64
 * + 16. The mean of each channel is taken off first where that saves more than the 16 bits that it
 * takes: halving the energy is worth half a bit a value.
 */
#include "codec/coded.h"
#include "codec/fixed_math.h"
#include "codec/lloyd_table.h"

#include <math.h>
#include <string.h>

enum { FLAGS = CST_CODED_UNROTATED | CST_CODED_MEAN };

/* Where the parts of a stream lie, in bytes from its start. */
struct parts {
    struct cst_coded_shape shape;
    uint32_t heads, dims;
    uint64_t means, norms, codes, end;
};

static struct parts parts_of(const struct cst_stage_segment *s,
                             const struct cst_coded_header *head) {
    struct parts p = { .shape = cst_coded_shape(s, head->bits),
                       .heads = s->view->heads,
                       .dims = s->view->dims };

    p.means = sizeof(*head) + p.shape.sink_bytes;
    p.norms = p.means + (head->flags & CST_CODED_MEAN ? 2 * (uint64_t)p.shape.channels : 0);
    p.codes = p.norms + 2 * (uint64_t)p.shape.coded * p.heads;
    p.end = p.codes + p.shape.coded * p.shape.row_bytes;
    return p;
}

/* The next block of a head of which n dimensions are left. */
static uint32_t block_size(uint32_t n) {
    return 1u << (31 - __builtin_clz(n));
}

/* 1 / sqrt(n) of a power of two */
static float block_unit(uint32_t n) {
    int log2 = __builtin_ctz(n);

    return cst_coded_unit(-(log2 / 2)) * (log2 % 2 ? 0x1.6a09e6p-1f : 1.0f);
}

/* ---- encode ---------------------------------------------------------------------------------- */

/* Channel means, rounded as they are stored, to `mean`. `b` is scratch. */
static bool find_means(float *mean, uint8_t *b, const float *x, const struct parts *p, int exponent,
                       const struct cst_codec_ops *ops) {
    double *sum = (void *)b;

    memset(sum, 0, p->shape.channels * sizeof(*sum));
    for (uint32_t t = 0; t < p->shape.coded; t++)
        ops->add(sum, x + (size_t)t * p->shape.padded, p->shape.channels);
    for (uint32_t c = 0; c < p->shape.channels; c++) {
        uint8_t half[2];

        if (!cst_coded_put(half, (float)(sum[c] / p->shape.coded), exponent))
            return false;
        mean[c] = cst_f16_to_f32(cst_load16(half)) * cst_coded_unit(exponent);
    }
    return true;
}

/* Whether the bits that means save, log2(energy / deviation) / 2 a value, exceed their own. */
static bool means_pay(const float *mean, const float *x, const struct parts *p) {
    double energy = 0, deviation = 0;

    for (uint32_t t = 0; t < p->shape.coded; t++, x += p->shape.padded) {
        for (uint32_t c = 0; c < p->shape.channels; c++) {
            double v = (double)x[c], d = v - (double)mean[c];

            energy += v * v;
            deviation += d * d;
        }
    }
    /* 2^(2 * 16 / tokens) */
    return energy > deviation * cst_fixed_exp(22.180709777918249 / p->shape.coded);
}

static void take_means(uint8_t *dst, float *x, const float *mean, const struct parts *p,
                       int exponent) {
    for (uint32_t c = 0; c < p->shape.channels; c++)
        (void)cst_coded_put(dst + p->means + 2 * (size_t)c, mean[c], exponent);
    for (uint32_t t = 0; t < p->shape.coded; t++, x += p->shape.padded) {
        for (uint32_t c = 0; c < p->shape.channels; c++)
            x[c] -= mean[c];
    }
}

static void transform(float *x, uint32_t dims, const struct cst_codec_ops *ops) {
    for (uint32_t at = 0, n; at < dims; at += n) {
        float unit;

        n = block_size(dims - at);
        unit = block_unit(n);
        ops->hadamard(x + at, n);
        for (uint32_t i = at; i < at + n; i++)
            x[i] *= unit;
    }
}

/* The code of the level nearest to x: how many midpoints lie below it. */
static uint8_t nearest(float x, const float *midpoint, unsigned bits) {
    unsigned code = 0;

    for (unsigned step = 1u << (bits - 1); step; step /= 2)
        code += x > midpoint[code + step - 1] ? step : 0;
    return (uint8_t)code;
}

struct codebook {
    unsigned bits;
    const float *level;
    float midpoint[255];
};

static void codebook_init(struct codebook *b, unsigned bits) {
    b->bits = bits;
    b->level = cst_lloyd_levels(bits);
    for (unsigned i = 0; i + 1 < 1u << bits; i++)
        b->midpoint[i] = (b->level[i] + b->level[i + 1]) * 0.5f;
}

/* One transformed head; false when its norm is too large for fp16. */
static bool encode_head(uint8_t *codes, uint8_t *norm, const float *x, uint32_t dims,
                        const struct codebook *book, int exponent) {
    double energy = 0, decoded = 0;
    float scale;

    for (uint32_t i = 0; i < dims; i++)
        energy += (double)x[i] * (double)x[i];
    scale = energy > 0 ? (float)sqrt(dims / energy) : 0;
    for (uint32_t i = 0; i < dims; i++) {
        codes[i] = nearest(x[i] * scale, book->midpoint, book->bits);
        decoded += (double)book->level[codes[i]] * (double)book->level[codes[i]];
    }
    return cst_coded_put(norm, (float)sqrt(energy / decoded), exponent);
}

static bool encode_rows(uint8_t *dst, const struct parts *p, const struct cst_coded_header *head,
                        const struct cst_coded_rows *rows, const struct cst_codec_ops *ops) {
    struct codebook book;
    float *x = rows->x;

    codebook_init(&book, head->bits);
    memset(rows->codes, 0, p->shape.padded);
    for (uint32_t t = 0; t < p->shape.coded; t++, x += p->shape.padded) {
        for (uint32_t h = 0; h < p->heads; h++) {
            uint8_t *norm = dst + p->norms + 2 * ((size_t)t * p->heads + h);

            transform(x + h * p->dims, p->dims, ops);
            if (!encode_head(rows->codes + h * p->dims, norm, x + h * p->dims, p->dims, &book,
                             head->exponent))
                return false;
        }
        cst_coded_pack(dst + p->codes + t * p->shape.row_bytes, rows->codes, p->shape.padded,
                       head->bits);
    }
    return true;
}

size_t cst_lloyd_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                        unsigned bits, bool means, const struct cst_codec_work *w, float *error) {
    struct cst_coded_header head = { .bits = (uint8_t)bits,
                                     .flags = s->rotated ? CST_CODED_UNROTATED : 0 };
    struct cst_coded_rows rows = cst_coded_rows(s, w);
    struct parts p = parts_of(s, &head);

    if (p.end >= s->length || !cst_coded_load(&head, seg, s, w))
        return 0;
    if (means && p.end + 2 * (uint64_t)p.shape.channels < s->length &&
        find_means(rows.a, w->b, rows.x, &p, head.exponent, w->ops) &&
        means_pay(rows.a, rows.x, &p)) {
        head.flags |= CST_CODED_MEAN;
        p = parts_of(s, &head);
        take_means(dst, rows.x, rows.a, &p, head.exponent);
    }
    if (!encode_rows(dst, &p, &head, &rows, w->ops))
        return 0;
    memcpy(dst, &head, sizeof(head));
    cst_stage_save_sinks(dst + sizeof(head), seg, s);
    return cst_stage_finish(cst_lloyd_decode, dst, p.end, seg, s, w, error);
}

/* ---- decode ---------------------------------------------------------------------------------- */

/* One token's heads; mean may be NULL. */
static void decode_row(const struct cst_coded_rows *rows, const struct parts *p, const float *norm,
                       const float *mean, unsigned bits, const struct cst_codec_ops *ops) {
    const float *level = cst_lloyd_levels(bits);

    for (uint32_t h = 0, c = 0; h < p->heads; h++) {
        for (uint32_t end = c + p->dims, n; c < end; c += n) {
            n = block_size(end - c);
            ops->hadamard_levels(rows->x + c, rows->codes + c, level, bits, norm[h] * block_unit(n),
                                 mean ? mean + c : NULL, n);
        }
    }
}

bool cst_lloyd_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                      size_t len, const struct cst_codec_work *w) {
    struct cst_coded_rows rows = cst_coded_rows(s, w);
    struct cst_coded_header head;
    struct parts p;
    uint32_t at_once; /* tokens whose norms fit into a row */
    float unit;

    if (!cst_coded_open(&head, seg, s, FLAGS, src, len, w) || head.group)
        return false;
    p = parts_of(s, &head);
    unit = cst_coded_unit(head.exponent);
    if (len != p.end || (head.flags & CST_CODED_MEAN &&
                         !w->ops->halves(rows.a, src + p.means, unit, p.shape.channels)))
        return false;
    at_once = p.shape.padded / p.heads;
    for (uint32_t t = 0; t < p.shape.coded; t++) {
        uint32_t n = CST_MIN(at_once, p.shape.coded - t);

        if (t % at_once == 0 && !w->ops->halves(rows.b, src + p.norms + 2 * (size_t)t * p.heads,
                                                unit, (size_t)n * p.heads))
            return false;
        w->ops->unpack(rows.codes, src + p.codes + t * p.shape.row_bytes, p.shape.padded,
                       head.bits);
        decode_row(&rows, &p, rows.b + t % at_once * p.heads,
                   head.flags & CST_CODED_MEAN ? rows.a : NULL, head.bits, w->ops);
        cst_coded_store(seg, s, s->sinks + t, rows.x, &head, w);
    }
    return true;
}
