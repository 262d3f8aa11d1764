/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads a llama.cpp sequence state: the counts, the types and where each tensor starts.
 *
 * Invariants
 *   1. Every byte is reached through struct reader, which never passes the end of the blob.
 *   2. After success each [k_at, k_at + n_cells * k_row) and [v_at, ...) lies inside the blob, so
 *      the copy functions need no checks.
 *   3. A blob is accepted only if it is used up to its last byte: a memory that writes anything
 *      else beside one plain KV cache (sliding windows, recurrent parts, indexers) is refused here
 *      even when nobody recognized its model.
 *
 * Numbers in a blob are in host order: it never leaves the machine.
 */
#include "client/llama/state.h"

#include "base/err.h"
#include "base/mem.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

struct reader {
    const uint8_t *p;
    size_t left;
    bool truncated;
};

static const uint8_t *skip(struct reader *r, uint64_t n) {
    const uint8_t *p = r->p;

    if (n > r->left) {
        r->truncated = true;
        return NULL;
    }
    r->p += n;
    r->left -= n;
    return p;
}

/* 0 past the end; the caller asks r->truncated before it trusts a value. */
static uint32_t take32(struct reader *r) {
    const uint8_t *p = skip(r, sizeof(uint32_t));
    uint32_t v = 0;

    if (p)
        memcpy(&v, p, sizeof(v));
    return v;
}

static uint64_t take64(struct reader *r) {
    const uint8_t *p = skip(r, sizeof(uint64_t));
    uint64_t v = 0;

    if (p)
        memcpy(&v, p, sizeof(v));
    return v;
}

/* Marks in `order` which cell holds each position; drops `order` when cells are in order already.
 */
static int parse_cells(struct cst_state *s, struct reader *r) {
    struct {
        uint32_t pos, n_seq, seq;
    } cell;
    const uint8_t *p = skip(r, (uint64_t)s->n_cells * sizeof(cell));
    bool sorted = true;

    if (!p)
        return CST_STATE_E_TRUNCATED;
    s->order = cst_malloc(s->n_cells * sizeof(*s->order));
    if (!s->order)
        return cst_err(-ENOMEM);
    memset(s->order, 0xff, s->n_cells * sizeof(*s->order));
    for (uint32_t i = 0; i < s->n_cells; i++) {
        memcpy(&cell, p + i * sizeof(cell), sizeof(cell));
        if (cell.n_seq != 1)
            return CST_STATE_E_FOREIGN;
        if (cell.pos >= s->n_cells || s->order[cell.pos] != UINT32_MAX)
            return CST_STATE_E_HOLE;
        s->order[cell.pos] = i;
        sorted = sorted && cell.pos == i;
    }
    if (sorted)
        s->order = cst_free(s->order);
    return 0;
}

/* Takes the data of one tensor: n_cells x row bytes. */
static int parse_data(struct cst_state *s, struct reader *r, uint64_t row, uint32_t *ret_row,
                      uint64_t *ret_at) {
    if (!r->truncated && (row == 0 || row > CST_STATE_ROW_MAX))
        return CST_STATE_E_LIMIT;
    *ret_row = (uint32_t)row;
    *ret_at = (uint64_t)(r->p - s->blob);
    skip(r, row * s->n_cells);
    return r->truncated ? CST_STATE_E_TRUNCATED : 0;
}

static int parse_k(struct cst_state *s, struct reader *r) {
    struct cst_state_layout *l = &s->layout;
    int res = 0;

    for (uint32_t i = 0; i < l->n_layers && !res; i++) {
        int32_t type = (int32_t)take32(r);

        if (i == 0)
            l->type_k = type;
        if (type != l->type_k && !r->truncated)
            return CST_STATE_E_MIXED;
        res = parse_data(s, r, take64(r), &l->k_row[i], &s->k_at[i]);
    }
    return res;
}

static int parse_v(struct cst_state *s, struct reader *r) {
    struct cst_state_layout *l = &s->layout;
    int res = 0;

    for (uint32_t i = 0; i < l->n_layers && !res; i++) {
        int32_t type = (int32_t)take32(r);
        uint64_t row;

        if (i == 0)
            l->type_v = type;
        if (type != l->type_v && !r->truncated)
            return CST_STATE_E_MIXED;
        if (l->v_trans) {
            uint32_t element = take32(r);

            if (!r->truncated && (element == 0 || element != cst_state_element(type)))
                return CST_STATE_E_MIXED;
            row = (uint64_t)element * take32(r);
        } else {
            row = take64(r);
        }
        res = parse_data(s, r, row, &l->v_row[i], &s->v_at[i]);
    }
    return res;
}

/* The one stream that has cells; empty_after streams without cells follow it. */
static int parse_stream(struct cst_state *s, struct reader *r, uint32_t empty_after) {
    struct cst_state_layout *l = &s->layout;
    uint32_t v_trans;
    int res;

    if (s->n_cells > CST_STATE_CELLS_MAX)
        return CST_STATE_E_LIMIT;
    res = parse_cells(s, r);
    if (res)
        return res;
    v_trans = take32(r);
    l->n_layers = take32(r);
    if (r->truncated)
        return CST_STATE_E_TRUNCATED;
    if (v_trans > 1 || l->n_layers == 0)
        return CST_STATE_E_FOREIGN;
    if (l->n_layers > CST_LAYERS_MAX)
        return CST_STATE_E_LIMIT;
    l->v_trans = v_trans == 1;
    res = parse_k(s, r);
    if (res)
        return res;
    l->has_v = r->left != (uint64_t)empty_after * sizeof(uint32_t);
    return l->has_v ? parse_v(s, r) : 0;
}

int cst_state_parse(struct cst_state *out, const void *blob, size_t size) {
    struct reader r = { .p = blob, .left = size };
    struct cst_state *s = out;
    uint32_t magic, n_stream;
    int res;

    memset(s, 0, sizeof(*s));
    s->blob = blob;
    magic = take32(&r);
    take32(&r); /* the sequence it was saved from */
    n_stream = take32(&r);
    if (r.truncated)
        return CST_STATE_E_TRUNCATED;
    if (magic != CST_STATE_MAGIC || n_stream == 0)
        return CST_STATE_E_FOREIGN;
    if (n_stream > CST_STATE_STREAMS_MAX)
        return CST_STATE_E_LIMIT;
    s->layout.n_stream = n_stream;
    for (uint32_t i = 0; i < n_stream; i++) {
        uint32_t n_cells = take32(&r);

        if (n_cells == 0)
            continue;
        if (s->n_cells)
            return CST_STATE_E_FOREIGN; /* one sequence lives in one stream */
        s->n_cells = n_cells;
        res = parse_stream(s, &r, n_stream - 1 - i);
        if (res)
            return res;
    }
    if (r.truncated)
        return CST_STATE_E_TRUNCATED;
    return r.left ? CST_STATE_E_FOREIGN : 0;
}

void cst_state_deinit(struct cst_state *s) {
    s->order = cst_free(s->order);
}

const char *cst_state_text(int condition) {
    static const char *const texts[CST_STATE_CONDITIONS] = {
        [CST_STATE_E_TRUNCATED] = "the sequence state is truncated",
        [CST_STATE_E_FOREIGN] = "the sequence state is not one plain KV cache of a known format",
        [CST_STATE_E_HOLE] = "the positions of the sequence are not 0, 1, 2, ... without a hole",
        [CST_STATE_E_MIXED] = "the layers of the sequence state have different or unusable types",
        [CST_STATE_E_LIMIT] = "a count or size in the sequence state is beyond all limits",
    };

    assert(condition > 0 && condition < CST_STATE_CONDITIONS);
    return texts[condition];
}
