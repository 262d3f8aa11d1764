/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moves KV between a parsed llama.cpp sequence state and blocks.
 *
 * Rows of tokens (K, and V with flash attention) are contiguous on both sides, one memcpy a run of
 * cells. A transposed V has one row per value dimension, so a block takes `width` short pieces per
 * layer. The reverse way writes each byte of the blob once, straight from the shared block.
 *
 * Sizes were checked by cst_state_parse(), or come from the layout that sized the buffer.
 */
#include "client/llama/state.h"

#include <assert.h>
#include <string.h>

uint32_t cst_state_element(int32_t type) {
    switch (type) {
    case CST_GGML_F32:
        return 4;
    case CST_GGML_F16:
    case CST_GGML_BF16:
        return 2;
    default:
        return 0;
    }
}

bool cst_state_layout_equal(const struct cst_state_layout *a, const struct cst_state_layout *b) {
    return a->n_stream == b->n_stream && a->n_layers == b->n_layers && a->v_trans == b->v_trans &&
           a->has_v == b->has_v && a->type_k == b->type_k && a->type_v == b->type_v &&
           memcmp(a->k_row, b->k_row, a->n_layers * sizeof(a->k_row[0])) == 0 &&
           memcmp(a->v_row, b->v_row, a->n_layers * sizeof(a->v_row[0])) == 0;
}

/* ---- blocks ---- */

uint64_t cst_state_k_offset(const struct cst_state_layout *l, uint32_t layer,
                            uint32_t block_tokens) {
    uint64_t row = 0;

    for (uint32_t i = 0; i < layer; i++)
        row += (uint64_t)l->k_row[i] + l->v_row[i];
    return row * block_tokens;
}

uint64_t cst_state_v_offset(const struct cst_state_layout *l, uint32_t layer,
                            uint32_t block_tokens) {
    return cst_state_k_offset(l, layer, block_tokens) + (uint64_t)l->k_row[layer] * block_tokens;
}

uint64_t cst_state_block_size(const struct cst_state_layout *l, uint32_t block_tokens) {
    return cst_state_k_offset(l, l->n_layers, block_tokens);
}

/* ---- cut ---- */

/* Positions from `first` that lie in consecutive cells: how many of at most n, and the first cell.
 */
static uint32_t run_of(const struct cst_state *s, uint32_t first, uint32_t n, uint32_t *ret_cell) {
    uint32_t len = 1;

    if (!s->order) {
        *ret_cell = first;
        return n;
    }
    *ret_cell = s->order[first];
    while (len < n && s->order[first + len] == *ret_cell + len)
        len++;
    return len;
}

static void cut_rows(const struct cst_state *s, uint64_t at, uint32_t row, uint32_t first,
                     uint32_t n, uint32_t block_tokens, uint8_t *to) {
    uint32_t cell, len;

    for (uint32_t done = 0; done < n; done += len) {
        len = run_of(s, first + done, n - done, &cell);
        memcpy(to + (uint64_t)done * row, s->blob + at + (uint64_t)cell * row, (size_t)len * row);
    }
    memset(to + (uint64_t)n * row, 0, (size_t)(block_tokens - n) * row);
}

static void cut_columns(const struct cst_state *s, uint64_t at, uint32_t row, uint32_t first,
                        uint32_t n, uint32_t block_tokens, uint8_t *to) {
    uint32_t size = cst_state_element(s->layout.type_v), width = row / size, cell, len;

    for (uint32_t done = 0; done < n; done += len) {
        len = run_of(s, first + done, n - done, &cell);
        for (uint32_t j = 0; j < width; j++)
            memcpy(to + ((uint64_t)j * block_tokens + done) * size,
                   s->blob + at + ((uint64_t)j * s->n_cells + cell) * size, (size_t)len * size);
    }
    for (uint32_t j = 0; n < block_tokens && j < width; j++)
        memset(to + ((uint64_t)j * block_tokens + n) * size, 0, (size_t)(block_tokens - n) * size);
}

void cst_state_cut(const struct cst_state *s, uint32_t first, uint32_t n, uint32_t block_tokens,
                   void *block) {
    const struct cst_state_layout *l = &s->layout;
    uint8_t *to = block;

    assert(n <= block_tokens && first <= s->n_cells && n <= s->n_cells - first);
    for (uint32_t i = 0; i < l->n_layers; i++) {
        cut_rows(s, s->k_at[i], l->k_row[i], first, n, block_tokens, to);
        to += (uint64_t)l->k_row[i] * block_tokens;
        if (l->v_trans && l->has_v)
            cut_columns(s, s->v_at[i], l->v_row[i], first, n, block_tokens, to);
        else if (l->has_v)
            cut_rows(s, s->v_at[i], l->v_row[i], first, n, block_tokens, to);
        to += (uint64_t)l->v_row[i] * block_tokens;
    }
}

/* ---- join ---- */

enum {
    HEADER = 12,      /* magic, sequence, streams */
    CELL = 12,        /* position, 1, sequence */
    LAYERS_HEAD = 8,  /* v_trans, layers */
    TENSOR_HEAD = 12, /* type and row bytes, or type, element bytes and width */
};

static uint64_t tensors_at(uint32_t n_tokens) {
    return HEADER + sizeof(uint32_t) + (uint64_t)CELL * n_tokens + LAYERS_HEAD;
}

uint64_t cst_state_size(const struct cst_state_layout *l, uint32_t n_tokens) {
    uint64_t size = tensors_at(n_tokens) + (l->n_stream - 1) * sizeof(uint32_t);

    for (uint32_t i = 0; i < l->n_layers; i++)
        size += (l->has_v ? 2 : 1) * TENSOR_HEAD + ((uint64_t)l->k_row[i] + l->v_row[i]) * n_tokens;
    return size;
}

static uint8_t *put32(uint8_t *to, uint32_t v) {
    memcpy(to, &v, sizeof(v));
    return to + sizeof(v);
}

static uint8_t *put64(uint8_t *to, uint64_t v) {
    memcpy(to, &v, sizeof(v));
    return to + sizeof(v);
}

static uint8_t *put_v_head(const struct cst_state_layout *l, uint32_t layer, uint8_t *to) {
    uint32_t size = cst_state_element(l->type_v);

    to = put32(to, (uint32_t)l->type_v);
    if (!l->v_trans)
        return put64(to, l->v_row[layer]);
    to = put32(to, size);
    return put32(to, l->v_row[layer] / size);
}

void cst_state_join_begin(const struct cst_state_layout *l, uint32_t n_tokens, int32_t seq,
                          void *blob) {
    uint8_t *to = blob;

    to = put32(to, CST_STATE_MAGIC);
    to = put32(to, (uint32_t)seq);
    to = put32(to, l->n_stream);
    to = put32(to, n_tokens);
    for (uint32_t i = 0; i < n_tokens; i++) {
        to = put32(to, i);
        to = put32(to, 1);
        to = put32(to, (uint32_t)seq);
    }
    to = put32(to, l->v_trans);
    to = put32(to, l->n_layers);
    for (uint32_t i = 0; i < l->n_layers; i++) {
        to = put32(to, (uint32_t)l->type_k);
        to = put64(to, l->k_row[i]) + (uint64_t)l->k_row[i] * n_tokens;
    }
    for (uint32_t i = 0; l->has_v && i < l->n_layers; i++)
        to = put_v_head(l, i, to) + (uint64_t)l->v_row[i] * n_tokens;
    for (uint32_t i = 1; i < l->n_stream; i++)
        to = put32(to, 0);
}

void cst_state_join_block(const struct cst_state_layout *l, uint32_t n_tokens, uint32_t first,
                          uint32_t n, uint32_t block_tokens, const void *block, void *blob) {
    uint32_t size = cst_state_element(l->type_v);
    const uint8_t *from = block;
    uint8_t *k = (uint8_t *)blob + tensors_at(n_tokens), *v = k;

    assert(n <= block_tokens && first <= n_tokens && n <= n_tokens - first);
    for (uint32_t i = 0; i < l->n_layers; i++)
        v += TENSOR_HEAD + (uint64_t)l->k_row[i] * n_tokens;
    for (uint32_t i = 0; i < l->n_layers; i++) {
        uint32_t k_row = l->k_row[i], v_row = l->v_row[i];

        k += TENSOR_HEAD;
        memcpy(k + (uint64_t)first * k_row, from, (size_t)n * k_row);
        k += (uint64_t)k_row * n_tokens;
        from += (uint64_t)k_row * block_tokens;
        if (!l->has_v)
            continue;
        v += TENSOR_HEAD;
        if (!l->v_trans)
            memcpy(v + (uint64_t)first * v_row, from, (size_t)n * v_row);
        for (uint32_t j = 0; l->v_trans && j < v_row / size; j++)
            memcpy(v + ((uint64_t)j * n_tokens + first) * size,
                   from + (uint64_t)j * block_tokens * size, (size_t)n * size);
        v += (uint64_t)v_row * n_tokens;
        from += (uint64_t)v_row * block_tokens;
    }
}
