/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Outliers of a segment. Invariants: 1. sums are taken in one fixed order, so all machines find
 * the same ones; 2. means are taken twice, the second time without those found the first time, or
 * a few that point the same way would hide each other; 3. lists rise and hold coded tokens only.
 * No state but the lists; any thread.
 */
#include "codec/outliers.h"

#include "base/le.h"
#include "base/macros.h"

#include <math.h>
#include <string.h>

enum { LANES = 4 }; /* what every processor has */
typedef float lanes __attribute__((vector_size(4 * LANES)));

static float *row_of(const struct cst_outlier_rows *r, uint32_t i) {
    return r->x + i * r->stride;
}

/* ---- encode ---------------------------------------------------------------------------------- */

static bool is_taken(const struct cst_outliers *o, uint32_t t) {
    for (uint32_t k = 0; k < o->n; k++) {
        if (o->token[k] == t)
            return true;
    }
    return false;
}

/* Means of 2 LANES channels from c on. */
static void find_means_at(const struct cst_outlier_rows *r, const struct cst_outliers *but,
                          uint32_t c) {
    const float rows = (float)(r->n - but->n);
    lanes a, b, sum_a = { 0 }, sum_b = { 0 };

    for (uint32_t i = 0, k = 0; i < r->n; i++) {
        if (k < but->n && but->token[k] == r->sinks + i) {
            k++;
            continue;
        }
        memcpy(&a, row_of(r, i) + c, sizeof(a));
        memcpy(&b, row_of(r, i) + c + LANES, sizeof(b));
        sum_a += a;
        sum_b += b;
    }
    sum_a /= rows;
    sum_b /= rows;
    memcpy(r->mean + c, &sum_a, sizeof(a));
    memcpy(r->mean + c + LANES, &sum_b, sizeof(b));
}

static void find_means(const struct cst_outlier_rows *r, const struct cst_outliers *but) {
    uint32_t c = 0;

    for (; c + 2 * LANES <= r->channels; c += 2 * LANES)
        find_means_at(r, but, c);
    for (; c < r->channels; c++) {
        float sum = 0;

        for (uint32_t i = 0; i < r->n; i++)
            sum += is_taken(but, r->sinks + i) ? 0 : row_of(r, i)[c];
        r->mean[c] = sum / (float)(r->n - but->n);
    }
}

/* By 2 LANES sums in turn, and one for what is left. */
static float energy_of(const float *x, const float *mean, uint32_t n) {
    lanes a, b, sum_a = { 0 }, sum_b = { 0 };
    uint32_t i = 0;
    float all = 0;

    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        memcpy(&a, x + i, sizeof(a));
        memcpy(&b, mean + i, sizeof(b));
        sum_a += (a - b) * (a - b);
        memcpy(&a, x + i + LANES, sizeof(a));
        memcpy(&b, mean + i + LANES, sizeof(b));
        sum_b += (a - b) * (a - b);
    }
    for (; i < n; i++)
        all += (x[i] - mean[i]) * (x[i] - mean[i]);
    sum_a += sum_b;
    for (uint32_t k = 0; k < LANES; k++)
        all += sum_a[k];
    return all;
}

/* The value that half of them don't exceed; reorders them. */
static float median(float *x, uint32_t n) {
    int first = 0, last = (int)n - 1, half = last / 2;

    while (first < last) {
        float pivot = x[first + (last - first) / 2];
        int i = first, j = last;

        while (i <= j) {
            float was = x[i];

            if (x[i] < pivot) {
                i++;
            } else if (x[j] > pivot) {
                j--;
            } else {
                x[i++] = x[j];
                x[j--] = was;
            }
        }
        if (half <= j)
            last = j;
        else if (half >= i)
            first = i;
        else
            break;
    }
    return x[half];
}

/* One round; what was found before is left out of the means. */
static void search(struct cst_outliers *o, const struct cst_outlier_rows *r, float excess) {
    float *sorted = r->energy + r->n, most = 0, limit;

    find_means(r, o);
    o->n = 0;
    for (uint32_t i = 0; i < r->n; i++) {
        r->energy[i] = sorted[i] = energy_of(row_of(r, i), r->mean, r->channels);
        if (!isfinite(sorted[i]))
            return;
        most = CST_MAX(most, sorted[i]);
    }
    limit = excess * median(sorted, r->n);
    if (limit <= 0 || most <= limit)
        return;
    for (uint32_t i = 0; i < r->n; i++) {
        if (r->energy[i] <= limit)
            continue;
        if (o->n == r->n / CST_OUTLIERS_SHARE) {
            o->n = 0;
            return;
        }
        o->token[o->n++] = (uint16_t)(r->sinks + i);
    }
}

/* Another row in the place of each. */
static void stand_in(const struct cst_outlier_rows *r, const struct cst_outliers *o) {
    for (uint32_t k = 0; k < o->n; k++) {
        uint32_t i = o->token[k] - r->sinks, from = i;

        while (from > 0 && is_taken(o, r->sinks + from))
            from--;
        while (is_taken(o, r->sinks + from))
            from++;
        memcpy(row_of(r, i), row_of(r, from), r->channels * sizeof(float));
    }
}

void cst_outliers_find(struct cst_outliers *o, const struct cst_outlier_rows *r, float excess) {
    o->n = 0;
    if (r->n >= CST_OUTLIERS_SHARE)
        search(o, r, excess);
    if (o->n)
        search(o, r, excess);
    stand_in(r, o);
}

static struct cst_outlier_rows rows_of(float *x, size_t stride, const struct cst_stage_segment *s,
                                       const struct cst_codec_work *w) {
    return (struct cst_outlier_rows){ .x = x,
                                      .stride = stride,
                                      .n = s->tokens - s->sinks,
                                      .channels = cst_view_channels(s->view),
                                      .sinks = s->sinks,
                                      .mean = (void *)w->b,
                                      .energy = w->energy };
}

void cst_outliers_take(float *x, size_t stride, float excess, const struct cst_stage_segment *s,
                       const struct cst_codec_work *w) {
    const struct cst_outlier_rows rows = rows_of(x, stride, s, w);

    cst_outliers_find(&w->outliers[s->index], &rows, excess);
}

void cst_outliers_stand_in(float *x, size_t stride, const struct cst_stage_segment *s,
                           const struct cst_codec_work *w) {
    const struct cst_outlier_rows rows = rows_of(x, stride, s, w);

    stand_in(&rows, &w->outliers[s->index]);
}

/* ---- streams --------------------------------------------------------------------------------- */

static size_t row_size(const struct cst_stage_segment *s) {
    return (size_t)cst_view_channels(s->view) * s->view->esize;
}

size_t cst_outliers_size(const struct cst_stage_segment *s, const struct cst_codec_work *w) {
    return w->outliers[s->index].n * (sizeof(struct cst_le16) + row_size(s));
}

void cst_outliers_save(uint8_t *dst, uint8_t *decoded, const uint8_t *seg,
                       const struct cst_stage_segment *s, const struct cst_codec_work *w) {
    const struct cst_outliers *o = &w->outliers[s->index];
    uint8_t *row = dst + o->n * sizeof(struct cst_le16);

    for (uint32_t k = 0; k < o->n; k++, row += row_size(s)) {
        cst_store16(dst + k * sizeof(struct cst_le16), o->token[k]);
        cst_view_get_row(s->view, row, seg, o->token[k]);
        cst_view_put_row(s->view, decoded, row, o->token[k]);
    }
}

bool cst_outliers_open(const struct cst_stage_segment *s, uint32_t n, const uint8_t *src,
                       size_t *len, const struct cst_codec_work *w) {
    struct cst_outliers *o = &w->outliers[s->index];
    uint32_t least = s->sinks;

    o->n = 0;
    if (n == 0)
        return true;
    if (!s->view || n > (s->tokens - s->sinks) / CST_OUTLIERS_SHARE)
        return false;
    o->n = (uint16_t)n;
    if (*len < cst_outliers_size(s, w))
        return false;
    *len -= cst_outliers_size(s, w);
    for (uint32_t k = 0; k < n; k++) {
        o->token[k] = cst_load16(src + *len + k * sizeof(struct cst_le16));
        if (o->token[k] < least || o->token[k] >= s->tokens)
            return false;
        least = o->token[k] + 1u;
    }
    return true;
}

void cst_outliers_restore(uint8_t *seg, const uint8_t *src, const struct cst_stage_segment *s,
                          const struct cst_codec_work *w) {
    const struct cst_outliers *o = &w->outliers[s->index];
    const uint8_t *row = src + o->n * sizeof(struct cst_le16);

    for (uint32_t k = 0; k < o->n; k++, row += row_size(s))
        cst_view_put_row(s->view, seg, row, o->token[k]);
}
