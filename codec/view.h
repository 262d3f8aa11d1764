/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensor view of one segment: where its elements lie, in memory order (for exact codecs, which
 * only want long runs) and by (token, head, dimension) (for those that know what a channel is).
 *
 * Bytes of the segment that belong to no element of the tokens asked for are holes: gaps between
 * rows, and the missing tokens of a tail block.
 */
#pragma once

#include "base/layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cst_axis {
    uint64_t n, stride;
};

struct cst_view {
    uint8_t dtype;
    uint32_t esize; /* bytes of an element */
    uint32_t tokens, heads, dims;
    uint64_t token_stride, head_stride, dim_stride;
    struct cst_axis axis[3]; /* memory order, outermost first */
    int token_axis;          /* which of them counts tokens */
};

/* false: opaque, or strides that overlap, overrun the segment or leave no axis contiguous. */
bool cst_view_init(struct cst_view *v, const struct cst_descriptor *desc,
                   const struct cst_segment *seg);

/* Byte offset of an element in the segment. */
static inline uint64_t cst_view_at(const struct cst_view *v, uint32_t t, uint32_t h, uint32_t d) {
    return t * v->token_stride + h * v->head_stride + d * v->dim_stride;
}

/* Values that one token has in this segment. */
static inline uint32_t cst_view_channels(const struct cst_view *v) {
    return v->heads * v->dims;
}

/* Contiguous pieces of a segment in rising order: run (i, j) of outer x inner at
 * i * outer_stride + j * inner_stride, each of `bytes` bytes. */
struct cst_runs {
    uint64_t bytes;
    uint64_t outer, inner;
    uint64_t outer_stride, inner_stride;
};

/* The elements of the first `tokens` >= 1 tokens. */
struct cst_runs cst_view_runs(const struct cst_view *v, uint32_t tokens);

/* The segment as one piece. */
static inline struct cst_runs cst_runs_flat(uint64_t length) {
    return (struct cst_runs){ .bytes = length, .outer = 1, .inner = 1 };
}

static inline uint64_t cst_runs_total(const struct cst_runs *r) {
    return r->outer * r->inner * r->bytes;
}

bool cst_runs_holes_are_zero(const struct cst_runs *r, const uint8_t *seg, uint64_t length);
void cst_runs_zero_holes(const struct cst_runs *r, uint8_t *seg, uint64_t length);

/* Copies the runs, packed, out of the segment. */
void cst_runs_gather(const struct cst_runs *r, uint8_t *packed, const uint8_t *seg);

/* Whether a token's values lie together in channel order: head by head, dimension by dimension. */
static inline bool cst_view_has_rows(const struct cst_view *v) {
    return (v->dims == 1 || v->dim_stride == v->esize) &&
           (v->heads == 1 || v->head_stride == (uint64_t)v->dims * v->esize);
}

/* Copies one token's values between the segment and a row in channel order. */
void cst_view_get_row(const struct cst_view *v, uint8_t *row, const uint8_t *seg, uint32_t t);
void cst_view_put_row(const struct cst_view *v, uint8_t *seg, const uint8_t *row, uint32_t t);

/* Bytes of a block that lie in no segment. */
uint64_t cst_gap_bytes(const struct cst_descriptor *desc);

bool cst_is_zero(const uint8_t *p, size_t n);
