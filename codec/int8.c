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
#include "codec/dtype.h"
#include "codec/stage.h"

#include "base/le.h"
#include "base/macros.h"

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

/* One token's values between the segment and a row of channels. */
static void get_row(uint8_t *row, const uint8_t *seg, const struct cst_view *v, uint32_t t) {
    for (uint32_t h = 0; h < v->heads; h++) {
        for (uint32_t d = 0; d < v->dims; d++, row += v->esize)
            memcpy(row, seg + cst_view_at(v, t, h, d), v->esize);
    }
}

static void put_row(uint8_t *seg, const uint8_t *row, const struct cst_view *v, uint32_t t) {
    for (uint32_t h = 0; h < v->heads; h++) {
        for (uint32_t d = 0; d < v->dims; d++, row += v->esize)
            memcpy(seg + cst_view_at(v, t, h, d), row, v->esize);
    }
}

static int8_t quantize(float x, float scale) {
    float y = x / scale;
    int q = (int)y;

    if (fabsf(y - (float)q) >= 0.5f)
        q += y < 0 ? -1 : 1;
    return (int8_t)CST_MAX(-127, CST_MIN(127, q));
}

/* false: a value or the scale is not finite. */
static bool encode_group(uint8_t *scale_out, int8_t *q, const uint8_t *row, uint8_t dtype,
                         uint32_t n) {
    uint32_t esize = cst_dtype_size(dtype);
    float largest = 0, scale;
    uint16_t half;

    for (uint32_t i = 0; i < n; i++) {
        float x = fabsf(cst_dtype_load(dtype, row + i * esize));

        if (!isfinite(x))
            return false;
        largest = CST_MAX(largest, x);
    }
    half = cst_f32_to_f16(largest / 127);
    scale = cst_f16_to_f32(half);
    if (!isfinite(scale))
        return false;
    cst_store16(scale_out, half);
    for (uint32_t i = 0; i < n; i++)
        q[i] = scale > 0 ? quantize(cst_dtype_load(dtype, row + i * esize), scale) : 0;
    return true;
}

size_t cst_int8_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                       const struct cst_codec_work *w, float *error) {
    const struct cst_view *v = s->view;
    struct parts p = parts_of(s);
    struct cst_runs runs = cst_view_runs(v, s->tokens);
    uint8_t *row = w->b;
    double e;

    if (p.end >= s->length || !cst_runs_holes_are_zero(&runs, seg, s->length))
        return 0;
    for (uint32_t t = 0; t < s->sinks; t++)
        get_row(dst + (uint64_t)t * p.channels * v->esize, seg, v, t);
    for (uint32_t t = s->sinks; t < s->tokens; t++) {
        uint64_t coded = t - s->sinks;

        get_row(row, seg, v, t);
        for (uint32_t g = 0; g < p.groups; g++) {
            uint32_t c = g * GROUP, n = CST_MIN(GROUP, p.channels - c);

            if (!encode_group(dst + p.scales + (coded * p.groups + g) * 2,
                              (int8_t *)(dst + p.values + coded * p.channels + c),
                              row + (uint64_t)c * v->esize, v->dtype, n))
                return 0;
        }
    }
    if (!cst_int8_decode(w->a, s, dst, p.end, w))
        return 0;
    e = cst_distortion(seg, w->a, v, s->sinks, s->tokens, (double *)(void *)w->b);
    if (!isfinite(e))
        return 0;
    *error = (float)e;
    return p.end;
}

bool cst_int8_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                     size_t len, const struct cst_codec_work *w) {
    const struct cst_view *v = s->view;
    struct parts p = parts_of(s);
    struct cst_runs runs = cst_view_runs(v, s->tokens);
    uint8_t *row = w->b;

    if (len != p.end)
        return false;
    cst_runs_zero_holes(&runs, seg, s->length);
    for (uint32_t t = 0; t < s->sinks; t++)
        put_row(seg, src + (uint64_t)t * p.channels * v->esize, v, t);
    for (uint32_t t = s->sinks; t < s->tokens; t++) {
        uint64_t coded = t - s->sinks;

        for (uint32_t g = 0; g < p.groups; g++) {
            uint32_t c = g * GROUP, n = CST_MIN(GROUP, p.channels - c);
            const uint8_t *q = src + p.values + coded * p.channels + c;
            float scale = cst_f16_to_f32(cst_load16(src + p.scales + (coded * p.groups + g) * 2));

            if (!isfinite(scale))
                return false;
            w->ops->dequant[v->dtype](row + (uint64_t)c * v->esize, (const int8_t *)q, scale, n);
        }
        put_row(seg, row, v, t);
    }
    return true;
}
