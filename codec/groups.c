/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stage GROUPS: x = code * scale + zero, with fp16 parameters for each group of consecutive
 * channels of a token (values, and int4) or consecutive tokens of a channel (KIVI's keys, whose
 * large channels would spoil their neighbours). Without zeros the codes are symmetric around
 * 2^(bits - 1), of which code 0 is not used.
 */
#include "codec/coded.h"

#include <string.h>

enum { FLAGS = CST_CODED_UNROTATED | CST_CODED_ZEROS | CST_CODED_BY_CHANNEL };

/* Where the parts of a stream lie, in bytes from its start. */
struct parts {
    struct cst_coded_shape shape;
    uint32_t length;  /* of a group */
    uint32_t per_row; /* groups that one token meets */
    uint32_t tokens;  /* that share these groups' parameters */
    uint64_t scales, zeros, codes, end;
};

static struct parts parts_of(const struct cst_stage_segment *s,
                             const struct cst_coded_header *head) {
    struct parts p = { .shape = cst_coded_shape(s, head->bits), .length = 1u << head->group };
    bool by_channel = head->flags & CST_CODED_BY_CHANNEL;
    uint64_t size;

    p.tokens = by_channel ? p.length : 1;
    p.per_row = by_channel ? p.shape.channels : (p.shape.channels + p.length - 1) / p.length;
    size = (uint64_t)((p.shape.coded + p.tokens - 1) / p.tokens) * p.per_row * 2;
    p.scales = sizeof(*head) + p.shape.sink_bytes;
    p.zeros = p.scales + size;
    p.codes = head->flags & CST_CODED_ZEROS ? p.zeros + size : p.zeros;
    p.end = p.codes + p.shape.coded * p.shape.row_bytes;
    return p;
}

/* Spreads the parameters of a token's groups, in the first per_row places, over the channels. */
static void spread(float *x, const struct parts *p) {
    for (uint32_t g = p->per_row; g-- > 0;) {
        uint32_t end = CST_MIN((g + 1) * p->length, p->shape.channels);
        float value = x[g];

        for (uint32_t c = g * p->length; c < end; c++)
            x[c] = value;
    }
}

/* The per_row scales and zeros of the groups that coded token n meets. */
static bool get_parameters(const struct cst_coded_rows *rows, const struct parts *p,
                           const struct cst_coded_header *head, const uint8_t *src, uint32_t n,
                           const struct cst_codec_ops *ops) {
    size_t at = (size_t)(n / p->tokens) * p->per_row * 2;
    float unit = cst_coded_unit(head->exponent), middle = (float)(1u << (head->bits - 1));

    if (!ops->halves(rows->a, src + p->scales + at, unit, p->per_row))
        return false;
    if (!(head->flags & CST_CODED_ZEROS)) {
        for (uint32_t i = 0; i < p->per_row; i++)
            rows->b[i] = -middle * rows->a[i];
    } else if (!ops->halves(rows->b, src + p->zeros + at, unit, p->per_row)) {
        return false;
    }
    return true;
}

/* ---- encode ---------------------------------------------------------------------------------- */

/* Lowest and highest value of each channel over `tokens` rows. */
static void find_channel_ranges(float *low, float *high, const float *x, uint32_t tokens,
                                const struct parts *p, const struct cst_codec_ops *ops) {
    memcpy(low, x, p->shape.channels * sizeof(*x));
    memcpy(high, x, p->shape.channels * sizeof(*x));
    for (uint32_t t = 1; t < tokens; t++)
        ops->widen(low, high, x + (size_t)t * p->shape.padded, p->shape.channels);
}

/* The same of n consecutive values. */
static void find_range(float *low, float *high, const float *x, uint32_t n,
                       const struct cst_codec_ops *ops) {
    float least[8], most[8];

    for (uint32_t i = 0; i < 8; i++)
        least[i] = most[i] = x[0];
    for (uint32_t i = 0; i < n; i += 8)
        ops->widen(least, most, x + i, CST_MIN(8, n - i));
    *low = least[0];
    *high = most[0];
    for (uint32_t i = 1; i < 8; i++) {
        *low = CST_MIN(*low, least[i]);
        *high = CST_MAX(*high, most[i]);
    }
}

static void find_group_ranges(float *low, float *high, const float *x, const struct parts *p,
                              const struct cst_codec_ops *ops) {
    for (uint32_t g = 0; g < p->per_row; g++) {
        uint32_t first = g * p->length;

        find_range(&low[g], &high[g], x + first, CST_MIN(p->length, p->shape.channels - first),
                   ops);
    }
}

static bool put_parameters(uint8_t *dst, const struct parts *p, const struct cst_coded_header *head,
                           uint32_t n, const float *low, const float *high) {
    size_t at = (size_t)(n / p->tokens) * p->per_row * 2;
    float top = (float)((1u << head->bits) - 1), side = (float)((1u << (head->bits - 1)) - 1);
    bool ok = true;

    for (uint32_t i = 0; i < p->per_row; i++) {
        float scale = (high[i] - low[i]) / top;

        if (head->flags & CST_CODED_ZEROS)
            ok &= cst_coded_put(dst + p->zeros + at + 2 * (size_t)i, low[i], head->exponent);
        else
            scale = CST_MAX(high[i], -low[i]) / side;
        ok &= cst_coded_put(dst + p->scales + at + 2 * (size_t)i, scale, head->exponent);
    }
    return ok;
}

/* Stores the parameters of the groups that start with coded token n, and reads them back. */
static bool encode_parameters(uint8_t *dst, const struct parts *p,
                              const struct cst_coded_header *head,
                              const struct cst_coded_rows *rows, const float *x, uint32_t n,
                              const struct cst_codec_ops *ops) {
    bool by_channel = head->flags & CST_CODED_BY_CHANNEL;

    if (by_channel)
        find_channel_ranges(rows->a, rows->b, x, CST_MIN(p->tokens, p->shape.coded - n), p, ops);
    else
        find_group_ranges(rows->a, rows->b, x, p, ops);
    if (!put_parameters(dst, p, head, n, rows->a, rows->b) ||
        !get_parameters(rows, p, head, dst, n, ops))
        return false;
    if (!by_channel) {
        spread(rows->a, p);
        spread(rows->b, p);
    }
    return true;
}

static bool encode_rows(uint8_t *dst, const struct parts *p, const struct cst_coded_header *head,
                        const struct cst_coded_rows *rows, const struct cst_codec_ops *ops) {
    float least = head->flags & CST_CODED_ZEROS ? 0 : 1, most = (float)((1u << head->bits) - 1);
    const float *x = rows->x;

    memset(rows->codes, 0, p->shape.padded);
    for (uint32_t n = 0; n < p->shape.coded; n++, x += p->shape.padded) {
        if (n % p->tokens == 0 && !encode_parameters(dst, p, head, rows, x, n, ops))
            return false;
        ops->to_codes(rows->codes, x, rows->a, rows->b, least, most, p->shape.channels);
        cst_coded_pack(dst + p->codes + n * p->shape.row_bytes, rows->codes, p->shape.padded,
                       head->bits);
    }
    return true;
}

size_t cst_groups_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                         const struct cst_groups_params *params, const struct cst_codec_work *w,
                         float *error) {
    struct cst_coded_header head = { .flags = params->flags,
                                     .bits = params->bits,
                                     .group = params->group };
    struct cst_coded_rows rows = cst_coded_rows(s, w);
    struct parts p = parts_of(s, &head);

    if (p.end >= s->length || !cst_coded_load(&head, seg, s, w) ||
        !encode_rows(dst, &p, &head, &rows, w->ops))
        return 0;
    memcpy(dst, &head, sizeof(head));
    cst_stage_save_sinks(dst + sizeof(head), seg, s);
    return cst_stage_finish(cst_groups_decode, dst, p.end, seg, s, w, error);
}

/* ---- decode ---------------------------------------------------------------------------------- */

static void decode_row(const struct cst_coded_rows *rows, const struct parts *p,
                       const struct cst_coded_header *head, const struct cst_codec_ops *ops) {
    if (head->flags & CST_CODED_BY_CHANNEL) {
        ops->affine(rows->x, rows->codes, rows->a, rows->b, p->shape.channels);
        return;
    }
    for (uint32_t g = 0; g < p->per_row; g++) {
        uint32_t at = g * p->length;

        ops->affine_group(rows->x + at, rows->codes + at, rows->a[g], rows->b[g],
                          CST_MIN(p->length, p->shape.channels - at));
    }
}

bool cst_groups_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                       size_t len, const struct cst_codec_work *w) {
    struct cst_coded_rows rows = cst_coded_rows(s, w);
    struct cst_coded_header head;
    struct parts p;

    if (!cst_coded_open(&head, seg, s, FLAGS, src, len, w) || head.bits < 2 ||
        head.group < CST_GROUP_LOG2_MIN || head.group > CST_GROUP_LOG2_MAX)
        return false;
    p = parts_of(s, &head);
    if (len != p.end)
        return false;
    for (uint32_t n = 0; n < p.shape.coded; n++) {
        if (n % p.tokens == 0 && !get_parameters(&rows, &p, &head, src, n, w->ops))
            return false;
        w->ops->unpack(rows.codes, src + p.codes + n * p.shape.row_bytes, p.shape.padded,
                       head.bits);
        decode_row(&rows, &p, &head, w->ops);
        cst_coded_store(seg, s, s->sinks + n, rows.x, &head, w);
    }
    return true;
}
