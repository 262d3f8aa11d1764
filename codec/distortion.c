/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What lossy stages share: rows, sinks, and how far a decoded segment is from the original.
 * Relative to the deviation from the channel mean, not to the energy: most of a key's energy is its
 * mean, which cancels in the softmax. Sums are doubles in one fixed order (tokens within a channel,
 * then channels), so the number is the same everywhere. No state; any thread.
 *
 * Scratch: three doubles and two floats a channel. A segment has at least 16 tokens of 2 bytes
 * a channel, so this fits a buffer of its length.
 */
#include "codec/dtype.h"
#include "codec/stage.h"

#include <math.h>
#include <string.h>

_Static_assert(3 * sizeof(double) + 2 * sizeof(float) <= 2 * CST_BLOCK_TOKENS_MIN, "see above");

void cst_stage_load_row(float *x, const uint8_t *seg, const struct cst_view *v, uint32_t t,
                        const struct cst_codec_ops *ops) {
    uint32_t n = cst_view_channels(v);
    uint8_t *row;

    if (cst_view_has_rows(v)) {
        ops->to_f32[v->dtype](x, seg + t * v->token_stride, n);
        return;
    }
    /* gathered in the upper end of x: with two bytes, conversion
     * reads ahead of what it writes; with four there is none */
    row = (uint8_t *)(x + n) - (size_t)n * v->esize;
    cst_view_get_row(v, row, seg, t);
    if (v->dtype != CST_DTYPE_F32)
        ops->to_f32[v->dtype](x, row, n);
}

void cst_stage_store_row(uint8_t *seg, const struct cst_view *v, uint32_t t, const float *x,
                         const struct cst_codec_work *w) {
    uint32_t n = cst_view_channels(v);

    if (cst_view_has_rows(v)) {
        w->ops->from_f32[v->dtype](seg + t * v->token_stride, x, n);
        return;
    }
    w->ops->from_f32[v->dtype](w->b, x, n);
    cst_view_put_row(v, seg, w->b, t);
}

size_t cst_stage_save_sinks(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s) {
    size_t row = (size_t)cst_view_channels(s->view) * s->view->esize;

    for (uint32_t t = 0; t < s->sinks; t++)
        cst_view_get_row(s->view, dst + t * row, seg, t);
    return s->sinks * row;
}

size_t cst_stage_restore_sinks(uint8_t *seg, const uint8_t *src,
                               const struct cst_stage_segment *s) {
    size_t row = (size_t)cst_view_channels(s->view) * s->view->esize;

    for (uint32_t t = 0; t < s->sinks; t++)
        cst_view_put_row(s->view, seg, src + t * row, t);
    return s->sinks * row;
}

size_t cst_stage_finish(cst_stage_decode_fn *decode, const uint8_t *stream, size_t len,
                        const uint8_t *seg, const struct cst_stage_segment *s,
                        const struct cst_codec_work *w, float *error) {
    double e = INFINITY;

    if (decode(w->a, s, stream, len, w))
        e = cst_distortion(seg, w->a, s->view, s->sinks, s->tokens, &w->outliers[s->index], w);
    if (!isfinite(e))
        return 0;
    *error = (float)e;
    return len;
}

/* The first token from t on that isn't in a list; *k: tokens of the list that lie before t. */
static uint32_t next_token(uint32_t t, const struct cst_outliers *but, uint32_t *k) {
    for (; but && *k < but->n && but->token[*k] <= t; ++*k)
        t += but->token[*k] == t;
    return t;
}

double cst_distortion(const uint8_t *seg, const uint8_t *decoded, const struct cst_view *v,
                      uint32_t first, uint32_t end, const struct cst_outliers *but,
                      const struct cst_codec_work *w) {
    uint32_t n = cst_view_channels(v);
    double *mean = (void *)w->b, *square = mean + n, *error = square + n;
    float *x = (void *)(error + n), *y = x + n;
    double errors = 0, squares = 0;
    uint32_t k = 0, counted = 0;

    if (first >= end)
        return 0;
    memset(w->b, 0, 3 * n * sizeof(*mean));
    for (uint32_t t = next_token(first, but, &k); t < end; t = next_token(t + 1, but, &k)) {
        cst_stage_load_row(x, seg, v, t, w->ops);
        w->ops->add(mean, x, n);
        counted++;
    }
    for (uint32_t c = 0; c < n; c++)
        mean[c] /= counted;
    k = 0;
    for (uint32_t t = next_token(first, but, &k); t < end; t = next_token(t + 1, but, &k)) {
        cst_stage_load_row(x, seg, v, t, w->ops);
        cst_stage_load_row(y, decoded, v, t, w->ops);
        w->ops->moments(square, error, mean, x, y, n);
    }
    for (uint32_t c = 0; c < n; c++) {
        errors += error[c];
        squares += square[c];
    }
    if (errors == 0)
        return 0;
    return squares > 0 && isfinite(squares) && isfinite(errors) ? sqrt(errors / squares) : INFINITY;
}
