/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Canonical rows and what lies around the codes. Invariants: 1. all float steps are single
 * operations in a fixed order, so decoded values are the same on every machine; 2. exponents stop
 * at 2^80, so no sum of decoded parameters overflows and no NaN appears; 3. the exponent keeps the
 * largest value at 2^10 to 2^11 fp16 units: 5 bits of room above for norms, 24 below before
 * precision is lost.
 */
#include "codec/coded.h"
#include "codec/outliers.h"

#include <string.h>

enum { HEADROOM = 10 };

struct cst_coded_shape cst_coded_shape(const struct cst_stage_segment *s, unsigned bits) {
    uint32_t channels = cst_view_channels(s->view);
    uint32_t padded = (uint32_t)cst_align_up(channels, 8);

    return (struct cst_coded_shape){
        .channels = channels,
        .padded = padded,
        .coded = s->tokens - s->sinks,
        .sink_bytes = (size_t)s->sinks * channels * s->view->esize,
        .row_bytes = (size_t)padded / 8 * bits,
    };
}

size_t cst_coded_plane_size(const struct cst_view *view) {
    return (cst_align_up(view->tokens, 16) + 3) * cst_align_up(cst_view_channels(view), 8) *
           sizeof(float);
}

struct cst_coded_rows cst_coded_rows(const struct cst_stage_segment *s,
                                     const struct cst_codec_work *w) {
    size_t padded = cst_align_up(cst_view_channels(s->view), 8);
    float *end = w->plane + s->view->tokens * padded;

    return (struct cst_coded_rows){
        .x = w->plane, .a = end, .b = end + padded, .codes = (uint8_t *)(end + 2 * padded)
    };
}

static bool can_turn(const struct cst_stage_segment *s, const struct cst_codec_work *w) {
    return s->rotated && w->rope && cst_rope_known(s->rotated, s->view->dims);
}

/* The exponent of fp16 parameters for values up to a magnitude, given as its bits. */
static bool choose_exponent(int8_t *exponent, uint32_t largest) {
    int e = (int)(largest >> 23) - 127 - HEADROOM;

    if (largest == 0)
        e = 0;
    if (e > CST_CODED_EXPONENT_MAX)
        return false; /* not finite either */
    *exponent = (int8_t)CST_MAX(e, CST_CODED_EXPONENT_MIN);
    return true;
}

/* The magnitude of the largest value, as its bits. */
static uint32_t largest_of(const float *row, size_t stride, const struct cst_coded_shape *shape,
                           const struct cst_codec_ops *ops) {
    uint32_t largest = 0;

    for (uint32_t t = 0; t < shape->coded; t++, row += stride) {
        uint32_t most = ops->largest(row, shape->channels);

        largest = CST_MAX(largest, most);
    }
    return largest;
}

static void load_rows(float *row, size_t stride, bool turn, const uint8_t *seg,
                      const struct cst_stage_segment *s, const struct cst_codec_work *w) {
    if (turn)
        cst_rope_prepare(w->rope, s->rotated, s->position, s->tokens);
    for (uint32_t t = s->sinks; t < s->tokens; t++, row += stride) {
        cst_stage_load_row(row, seg, s->view, t, w->ops);
        if (turn)
            cst_rope_turn(w->rope, s->rotated, row, s->view->heads, s->view->dims, t, -1, w->ops);
    }
}

bool cst_coded_load_to(struct cst_coded_header *head, float *rows, size_t stride,
                       const uint8_t *seg, const struct cst_stage_segment *s,
                       const struct cst_codec_work *w) {
    struct cst_coded_shape shape = cst_coded_shape(s, 8);
    struct cst_runs runs = cst_view_runs(s->view, s->tokens);
    bool turn = head->flags & CST_CODED_UNROTATED;

    if (!cst_runs_holes_are_zero(&runs, seg, s->length) || (turn && !can_turn(s, w)))
        return false;
    if (turn)
        cst_store32(&head->rope, cst_rope_id(s->rotated));
    load_rows(rows, stride, turn, seg, s, w);
    cst_outliers_take(rows, stride, cst_outlier_excess(s->view), s, w);
    return choose_exponent(&head->exponent, largest_of(rows, stride, &shape, w->ops));
}

bool cst_coded_load(struct cst_coded_header *head, const uint8_t *seg,
                    const struct cst_stage_segment *s, const struct cst_codec_work *w) {
    return cst_coded_load_to(head, w->plane, cst_coded_shape(s, 8).padded, seg, s, w);
}

void cst_coded_load_again(float *rows, size_t stride, const uint8_t *seg,
                          const struct cst_stage_segment *s, const struct cst_codec_work *w) {
    load_rows(rows, stride, s->rotated != NULL, seg, s, w);
    cst_outliers_stand_in(rows, stride, s, w);
}

bool cst_coded_open(struct cst_coded_header *head, uint8_t *seg, const struct cst_stage_segment *s,
                    uint8_t allowed, const uint8_t *src, size_t len,
                    const struct cst_codec_work *w) {
    struct cst_runs runs = cst_view_runs(s->view, s->tokens);
    bool turn;

    if (len < sizeof(*head) + cst_coded_shape(s, 8).sink_bytes)
        return false;
    memcpy(head, src, sizeof(*head));
    turn = head->flags & CST_CODED_UNROTATED;
    if (head->flags & ~allowed || head->bits > 8 || head->exponent < CST_CODED_EXPONENT_MIN ||
        head->exponent > CST_CODED_EXPONENT_MAX)
        return false;
    if (turn ? !can_turn(s, w) || cst_load32(&head->rope) != cst_rope_id(s->rotated)
             : cst_load32(&head->rope) != 0)
        return false;
    if (turn)
        cst_rope_prepare(w->rope, s->rotated, s->position, s->tokens);
    cst_runs_zero_holes(&runs, seg, s->length);
    cst_stage_restore_sinks(seg, src + sizeof(*head), s);
    return true;
}

void cst_coded_store(uint8_t *seg, const struct cst_stage_segment *s, uint32_t t, float *row,
                     const struct cst_coded_header *head, const struct cst_codec_work *w) {
    if (head->flags & CST_CODED_UNROTATED)
        cst_rope_turn(w->rope, s->rotated, row, s->view->heads, s->view->dims, t, 1, w->ops);
    cst_stage_store_row(seg, s->view, t, row, w);
}

void cst_coded_pack(uint8_t *dst, const uint8_t *codes, size_t n, unsigned bits) {
    for (size_t i = 0; bits == 4 && i < n; i += 2)
        *dst++ = (uint8_t)(codes[i] | codes[i + 1] << 4);
    for (size_t i = 0; bits != 4 && i < n; i += 8) {
        uint64_t u = 0;

        for (unsigned k = 0; k < 8; k++)
            u |= (uint64_t)codes[i + k] << k * bits;
        for (unsigned b = 0; b < bits; b++)
            *dst++ = (uint8_t)(u >> 8 * b);
    }
}
