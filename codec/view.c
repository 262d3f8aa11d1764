/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensor views. Invariants of an initialised view: 1. each axis of more than one element steps over
 * all that the axes after it reach, and the last steps over one element, so elements never overlap
 * and memory order is a nest of loops; 2. the last element ends within the segment. Both hold for
 * any strides that a descriptor brings, so that no codec checks again. No state; any thread.
 */
#include "codec/view.h"

#include "codec/dtype.h"

#include <string.h>

/* Outermost first; an axis of one element has no say in the order and comes first. */
static void sort_axes(struct cst_view *v) {
    v->axis[0] = (struct cst_axis){ v->tokens, v->token_stride };
    v->axis[1] = (struct cst_axis){ v->heads, v->head_stride };
    v->axis[2] = (struct cst_axis){ v->dims, v->dim_stride };
    v->token_axis = 0;
    for (int i = 0; i < 3; i++) {
        if (v->axis[i].n == 1)
            v->axis[i].stride = UINT64_MAX;
    }
    for (int i = 1; i < 3; i++) {
        for (int j = i; j > 0 && v->axis[j].stride > v->axis[j - 1].stride; j--) {
            struct cst_axis t = v->axis[j];

            v->axis[j] = v->axis[j - 1];
            v->axis[j - 1] = t;
            if (v->token_axis == j)
                v->token_axis = j - 1;
            else if (v->token_axis == j - 1)
                v->token_axis = j;
        }
    }
}

/* The two invariants; strides and counts up to the segment's length keep the sums from wrapping. */
static bool axes_fit(const struct cst_view *v, uint64_t length) {
    uint64_t span = v->esize;

    if (v->axis[2].stride != v->esize)
        return false;
    for (int i = 2; i >= 0 && v->axis[i].n > 1; i--) {
        if (v->axis[i].stride < span || v->axis[i].stride > length || v->axis[i].n > length)
            return false;
        span += (v->axis[i].n - 1) * v->axis[i].stride;
    }
    return span <= length;
}

bool cst_view_init(struct cst_view *v, const struct cst_descriptor *desc,
                   const struct cst_segment *seg) {
    const struct cst_layer *layer = &desc->layers[seg->layer];

    if (seg->dtype == CST_DTYPE_OPAQUE || seg->dtype >= CST_DTYPES || seg->tensor > CST_TENSOR_V)
        return false;
    *v = (struct cst_view){
        .dtype = seg->dtype,
        .esize = cst_dtype_size(seg->dtype),
        .tokens = desc->block_tokens,
        .heads = layer->kv_heads,
        .dims = seg->tensor == CST_TENSOR_K ? layer->head_dim_k : layer->head_dim_v,
        .token_stride = seg->token_stride,
        .head_stride = seg->head_stride,
        .dim_stride = seg->dim_stride,
    };
    if (v->tokens < 2 || !v->heads || !v->dims)
        return false;
    sort_axes(v);
    return axes_fit(v, seg->length);
}

uint64_t cst_gap_bytes(const struct cst_descriptor *desc) {
    uint64_t bytes = desc->block_bytes;

    for (uint32_t i = 0; i < desc->n_segments; i++)
        bytes -= desc->segments[i].length;
    return bytes;
}

struct cst_runs cst_view_runs(const struct cst_view *v, uint32_t tokens) {
    struct cst_runs r = cst_runs_flat(v->esize);

    for (int i = 2; i >= 0; i--) {
        uint64_t n = i == v->token_axis ? tokens : v->axis[i].n, stride = v->axis[i].stride;

        if (n == 1)
            continue;
        if (r.inner == 1 && stride == r.bytes) {
            r.bytes *= n;
        } else if (r.inner == 1) {
            r.inner = n;
            r.inner_stride = stride;
        } else {
            r.outer = n;
            r.outer_stride = stride;
        }
    }
    return r;
}

/* The loops below with the element's size as a constant, so that each copy is one instruction. */
static inline __attribute__((always_inline)) void
gather(const struct cst_view *v, uint8_t *row, const uint8_t *seg, uint32_t t, size_t esize) {
    for (uint32_t h = 0; h < v->heads; h++) {
        const uint8_t *from = seg + cst_view_at(v, t, h, 0);

        for (uint32_t d = 0; d < v->dims; d++, row += esize, from += v->dim_stride)
            memcpy(row, from, esize);
    }
}

static inline __attribute__((always_inline)) void
scatter(const struct cst_view *v, uint8_t *seg, const uint8_t *row, uint32_t t, size_t esize) {
    for (uint32_t h = 0; h < v->heads; h++) {
        uint8_t *to = seg + cst_view_at(v, t, h, 0);

        for (uint32_t d = 0; d < v->dims; d++, row += esize, to += v->dim_stride)
            memcpy(to, row, esize);
    }
}

void cst_view_get_row(const struct cst_view *v, uint8_t *row, const uint8_t *seg, uint32_t t) {
    if (cst_view_has_rows(v))
        memcpy(row, seg + t * v->token_stride, (size_t)cst_view_channels(v) * v->esize);
    else if (v->esize == 2)
        gather(v, row, seg, t, 2);
    else
        gather(v, row, seg, t, 4);
}

void cst_view_put_row(const struct cst_view *v, uint8_t *seg, const uint8_t *row, uint32_t t) {
    if (cst_view_has_rows(v))
        memcpy(seg + t * v->token_stride, row, (size_t)cst_view_channels(v) * v->esize);
    else if (v->esize == 2)
        scatter(v, seg, row, t, 2);
    else
        scatter(v, seg, row, t, 4);
}

bool cst_is_zero(const uint8_t *p, size_t n) {
    /* each byte equals the one before, and the first is zero */
    return n == 0 || (p[0] == 0 && memcmp(p, p + 1, n - 1) == 0);
}

bool cst_runs_holes_are_zero(const struct cst_runs *r, const uint8_t *seg, uint64_t length) {
    uint64_t end = 0; /* of the run before */

    for (uint64_t i = 0; i < r->outer; i++) {
        for (uint64_t j = 0; j < r->inner; j++) {
            uint64_t at = i * r->outer_stride + j * r->inner_stride;

            if (!cst_is_zero(seg + end, at - end))
                return false;
            end = at + r->bytes;
        }
    }
    return cst_is_zero(seg + end, length - end);
}

void cst_runs_zero_holes(const struct cst_runs *r, uint8_t *seg, uint64_t length) {
    uint64_t end = 0;

    for (uint64_t i = 0; i < r->outer; i++) {
        for (uint64_t j = 0; j < r->inner; j++) {
            uint64_t at = i * r->outer_stride + j * r->inner_stride;

            memset(seg + end, 0, at - end);
            end = at + r->bytes;
        }
    }
    memset(seg + end, 0, length - end);
}

void cst_runs_gather(const struct cst_runs *r, uint8_t *packed, const uint8_t *seg) {
    for (uint64_t i = 0; i < r->outer; i++) {
        for (uint64_t j = 0; j < r->inner; j++) {
            memcpy(packed, seg + i * r->outer_stride + j * r->inner_stride, r->bytes);
            packed += r->bytes;
        }
    }
}
