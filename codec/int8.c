/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stage INT8: q = round(x / scale) in -127..127, one fp16 scale for each 64 consecutive channels of
 * a token, so each token stands alone. The stream is the sinks' values as they are, the scales,
 * the q, all of it [token][channel] whatever the memory layout. x = q * scale is exact in fp32 and
 * rounded once, so every decoder gives the same bits.
 *
 * A segment with values that are not finite, or too large for an fp16 scale, or with an error that
 * has nothing to be compared with, is refused; its block keeps it without loss.
 */
#include "codec/coded.h"
#include "codec/outliers.h"

#include <math.h>
#include <string.h>

enum { GROUP = 64 };

/* Where the parts of a stream lie, in bytes from its start. */
struct parts {
    uint32_t channels, groups; /* of a token */
    uint64_t scales, values, end;
};

static struct parts parts_of(const struct cst_stage_segment *s) {
    struct parts p = { .channels = cst_view_channels(s->view) };
    uint64_t coded = s->tokens - s->sinks;

    p.groups = (p.channels + GROUP - 1) / GROUP;
    p.scales = (uint64_t)s->sinks * p.channels * s->view->esize;
    p.values = p.scales + coded * p.groups * 2;
    p.end = p.values + coded * p.channels;
    return p;
}

/* false: a value or the scale is not finite. */
static bool encode_group(uint8_t *scale_out, uint8_t *q, const float *x, uint32_t n,
                         const struct cst_codec_ops *ops) {
    float largest = cst_f32_from_bits(ops->largest(x, n)), scale;
    uint16_t half = cst_f32_to_f16(largest / 127);

    scale = cst_f16_to_f32(half);
    if (!isfinite(largest) || !isfinite(scale))
        return false;
    cst_store16(scale_out, half);
    if (scale > 0)
        ops->quantize((int8_t *)q, x, scale, n);
    else
        memset(q, 0, n);
    return true;
}

static bool encode_tokens(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                          const struct parts *p, const struct cst_codec_work *w) {
    struct cst_coded_shape shape = cst_coded_shape(s, 8);
    const float *x = w->plane;

    for (uint32_t i = 0; i < shape.coded; i++)
        cst_stage_load_row(w->plane + (size_t)i * shape.padded, seg, s->view, s->sinks + i, w->ops);
    cst_outliers_take(w->plane, shape.padded, cst_outlier_excess(s->view), s, w);
    for (uint64_t i = 0; i < shape.coded; i++, x += shape.padded) {
        uint8_t *scale = dst + p->scales + i * p->groups * 2;
        uint8_t *q = dst + p->values + i * p->channels;

        for (uint32_t c = 0; c < p->channels; c += GROUP, scale += 2) {
            if (!encode_group(scale, q + c, x + c, CST_MIN(GROUP, p->channels - c), w->ops))
                return false;
        }
    }
    return true;
}

size_t cst_int8_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                       const struct cst_codec_work *w, float *error) {
    struct parts p = parts_of(s);
    struct cst_runs runs = cst_view_runs(s->view, s->tokens);

    if (p.end >= s->length || !cst_runs_holes_are_zero(&runs, seg, s->length))
        return 0;
    cst_stage_save_sinks(dst, seg, s);
    if (!encode_tokens(dst, seg, s, &p, w))
        return 0;
    return cst_stage_finish(cst_int8_decode, dst, p.end, seg, s, w, error);
}

bool cst_int8_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                     size_t len, const struct cst_codec_work *w) {
    const struct cst_view *v = s->view;
    struct parts p = parts_of(s);
    struct cst_runs runs = cst_view_runs(v, s->tokens);
    bool in_place = cst_view_has_rows(v);

    if (len != p.end)
        return false;
    cst_runs_zero_holes(&runs, seg, s->length);
    cst_stage_restore_sinks(seg, src, s);
    for (uint32_t t = s->sinks; t < s->tokens; t++) {
        uint64_t coded = t - s->sinks;
        const uint8_t *scales = src + p.scales + coded * p.groups * 2;
        const int8_t *q = (const int8_t *)(src + p.values + coded * p.channels);
        uint8_t *row = in_place ? seg + t * v->token_stride : w->b;

        for (uint32_t c = 0; c < p.channels; c += GROUP, scales += 2) {
            float scale = cst_f16_to_f32(cst_load16(scales));

            if (!isfinite(scale))
                return false;
            w->ops->dequant[v->dtype](row + (uint64_t)c * v->esize, q + c, scale,
                                      CST_MIN(GROUP, p.channels - c));
        }
        if (!in_place)
            cst_view_put_row(v, seg, row, t);
    }
    return true;
}
