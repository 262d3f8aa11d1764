/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stage POLAR (PolarQuant, Han et al. 2025, arXiv 2502.02617): each head, keys turned back, is
 * Hadamard transformed; 16 values after the other become 8 + 4 + 2 + 1 angles, of pairs, of pairs
 * of their lengths, and so on, and one length. Angles of the first level are about uniform and take
 * 4 bits; the others lie between 0 and pi / 2, gather around pi / 4 for independent normal values,
 * and take 2. 62 bits for 16 values, the length's included.
 *
 * The code of an angle is that of the direction with the largest inner product, which needs no
 * inverse tangent. Research: LLOYD errs less at the same size.
 */
#include "codec/coded.h"
#include "codec/heads.h"

#include <math.h>
#include <string.h>

enum { FLAGS = CST_CODED_UNROTATED, BLOCK = 16, BITS = 46 /* of a block's angles */, STEPS = 15 };

/* Cosines of the angles of a code, first level: 2 pi (k + 1/2) / 16; sines are those 12 codes on.
 */
static const float circle[16] = {
    0.98078525f, 0.8314696f,   0.5555702f,   0.19509032f, -0.19509032f, -0.5555702f,
    -0.8314696f, -0.98078525f, -0.98078525f, -0.8314696f, -0.5555702f,  -0.19509032f,
    0.19509032f, 0.5555702f,   0.8314696f,   0.98078525f,
};
/* Of the other levels: the best four for an angle of density sin(2 x)^(2^(level - 1) - 1); sines
 * are these from the last one down. */
static const float quarter[3][4] = { { 0.9523438f, 0.805634f, 0.5924136f, 0.3050268f },
                                     { 0.9104246f, 0.7810479f, 0.6244711f, 0.413675f },
                                     { 0.8656486f, 0.7609979f, 0.6487543f, 0.5006521f } };

/* Where the parts of a stream lie, in bytes from its start. */
struct parts {
    struct cst_coded_shape shape;
    uint32_t blocks; /* of a token */
    size_t row_bytes;
    uint64_t lengths, codes, end;
};

static struct parts parts_of(const struct cst_stage_segment *s) {
    struct parts p = { .shape = cst_coded_shape(s, 8) };

    p.blocks = p.shape.channels / BLOCK;
    p.row_bytes = ((size_t)p.blocks * BITS + 7) / 8;
    p.lengths = sizeof(struct cst_coded_header) + p.shape.sink_bytes;
    p.codes = p.lengths + 2 * (uint64_t)p.shape.coded * p.blocks;
    p.end = p.codes + p.shape.coded * p.row_bytes;
    return p;
}

static float cosine(int level, unsigned code) {
    return level == 0 ? circle[code] : quarter[level - 1][code];
}

static float sine(int level, unsigned code) {
    return level == 0 ? circle[(code + 12) % 16] : quarter[level - 1][3 - code];
}

static void put_bits(uint8_t *dst, size_t at, uint64_t bits, unsigned n) {
    for (unsigned i = 0; i < n; i++)
        dst[(at + i) / 8] |= (uint8_t)((bits >> i & 1) << (at + i) % 8);
}

static uint64_t get_bits(const uint8_t *src, size_t at, unsigned n) {
    uint64_t bits = 0;

    for (unsigned i = 0; i < n; i += 8 - (at + i) % 8)
        bits |= (uint64_t)(src[(at + i) / 8] >> (at + i) % 8) << i;
    return bits & ((UINT64_C(1) << n) - 1);
}

static unsigned nearest(int level, float a, float b) {
    unsigned best = 0;
    float most = a * cosine(level, 0) + b * sine(level, 0);

    for (unsigned code = 1; code < (level == 0 ? 16 : 4); code++) {
        float product = a * cosine(level, code) + b * sine(level, code);

        if (product > most) {
            most = product;
            best = code;
        }
    }
    return best;
}

/* Codes of a block, the first level's first, from the lowest bit up; its length in *length. */
static uint64_t encode_block(float *length, const float *values) {
    float x[BLOCK];
    uint64_t bits = 0;
    unsigned at = 0;

    memcpy(x, values, sizeof(x));
    for (int level = 0, n = BLOCK / 2; n > 0; level++, n /= 2) {
        for (int i = 0; i < n; i++) {
            float a = x[2 * i], b = x[2 * i + 1];

            bits |= (uint64_t)nearest(level, a, b) << at;
            at += level == 0 ? 4 : 2;
            x[i] = sqrtf(a * a + b * b);
        }
    }
    *length = x[0];
    return bits;
}

static void decode_block(float *x, float length, uint64_t bits) {
    unsigned at = BITS;

    x[0] = length;
    for (int level = 3, n = 1; level >= 0; level--, n *= 2) {
        for (int i = n - 1; i >= 0; i--) {
            unsigned take = level == 0 ? 4 : 2, code;
            float r = x[i];

            at -= take;
            code = bits >> at & ((1u << take) - 1);
            x[2 * i] = r * cosine(level, code);
            x[2 * i + 1] = r * sine(level, code);
        }
    }
}

static bool encode_rows(uint8_t *dst, const struct parts *p, const struct cst_coded_header *head,
                        const struct cst_coded_rows *rows, uint32_t dims,
                        const struct cst_codec_ops *ops) {
    float *x = rows->x;

    memset(dst + p->codes, 0, p->end - p->codes);
    for (uint32_t t = 0; t < p->shape.coded; t++, x += p->shape.padded) {
        for (uint32_t c = 0; c < p->shape.channels; c += dims)
            cst_head_transform(x + c, dims, ops);
        for (uint32_t i = 0; i < p->blocks; i++) {
            float length;
            uint64_t bits = encode_block(&length, x + (size_t)i * BLOCK);

            put_bits(dst + p->codes + t * p->row_bytes, (size_t)i * BITS, bits, BITS);
            if (!cst_coded_put(dst + p->lengths + 2 * ((size_t)t * p->blocks + i), length,
                               head->exponent))
                return false;
        }
    }
    return true;
}

size_t cst_polar_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                        const struct cst_codec_work *w, float *error) {
    struct cst_coded_header head = { .flags = s->rotated ? CST_CODED_UNROTATED : 0 };
    struct cst_coded_rows rows = cst_coded_rows(s, w);
    struct parts p = parts_of(s);

    if (s->view->dims % BLOCK || p.end >= s->length || !cst_coded_load(&head, seg, s, w) ||
        !encode_rows(dst, &p, &head, &rows, s->view->dims, w->ops))
        return 0;
    memcpy(dst, &head, sizeof(head));
    cst_stage_save_sinks(dst + sizeof(head), seg, s);
    return cst_stage_finish(cst_polar_decode, dst, p.end, seg, s, w, error);
}

bool cst_polar_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                      size_t len, const struct cst_codec_work *w) {
    struct cst_coded_rows rows = cst_coded_rows(s, w);
    struct parts p = parts_of(s);
    struct cst_coded_header head;

    if (s->view->dims % BLOCK || len != p.end ||
        !cst_coded_open(&head, seg, s, FLAGS, src, len, w) || head.bits || head.group)
        return false;
    for (uint32_t t = 0; t < p.shape.coded; t++) {
        const uint8_t *codes = src + p.codes + t * p.row_bytes;

        if (!w->ops->halves(rows.a, src + p.lengths + 2 * (size_t)t * p.blocks,
                            cst_coded_unit(head.exponent), p.blocks))
            return false;
        for (uint32_t i = 0; i < p.blocks; i++)
            decode_block(rows.x + (size_t)i * BLOCK, rows.a[i],
                         get_bits(codes, (size_t)i * BITS, BITS));
        for (uint32_t c = 0; c < p.shape.channels; c += s->view->dims)
            cst_head_transform(rows.x + c, s->view->dims, w->ops);
        cst_coded_store(seg, s, s->sinks + t, rows.x, &head, w);
    }
    return true;
}
