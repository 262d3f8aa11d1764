/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state of one llama.cpp sequence as a blob (sequence state version 3), cut into blocks and
 * joined from blocks.
 *
 *   blob   u32 magic, i32 seq, u32 n_stream; then per stream
 *          u32 n_cells                                 0: nothing more in this stream
 *          n_cells x { i32 pos, u32 1, i32 seq }
 *          u32 v_trans, u32 n_layers
 *          per layer  K: i32 type, u64 row bytes, n_cells rows
 *          per layer  V: i32 type, u64 row bytes, n_cells rows              v_trans 0
 *                     V: i32 type, u32 element bytes, u32 width,
 *                        width rows of n_cells elements                     v_trans 1
 *          (models that keep no V write no V part at all)
 *   block  per layer K: block_tokens rows; V: block_tokens rows, or width rows of block_tokens
 *          elements. What a tail block lacks is zero.
 *
 * A blob comes from an engine whose version nobody promised: everything in it is checked before it
 * is used. Positions must be 0, 1, 2, ...; cells may lie in any order, blocks come out in order.
 * Nothing here keeps state between calls; any thread.
 */
#pragma once

#include "base/layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CST_STATE_MAGIC UINT32_C(0xaf143cd8)

enum {
    CST_STATE_E_TRUNCATED = 1, /* ends in the middle of something */
    CST_STATE_E_FOREIGN,       /* not this format, or more in it than one plain KV cache */
    CST_STATE_E_HOLE,          /* positions are not 0, 1, 2, ... */
    CST_STATE_E_MIXED,         /* layers of different types, or transposed rows of blocks */
    CST_STATE_E_LIMIT,         /* a count or size beyond the limits below */
    CST_STATE_CONDITIONS
};
enum {
    CST_STATE_STREAMS_MAX = 1024,
    CST_STATE_CELLS_MAX = 1 << 24,
    CST_STATE_ROW_MAX = 1 << 22, /* bytes of one tensor of one layer per token */
};

/* The types of ggml that are more than opaque rows to us. Numbers are ggml's. */
enum { CST_GGML_F32 = 0, CST_GGML_F16 = 1, CST_GGML_BF16 = 30 };

/* How the states of one context look; equal layouts exchange blocks. */
struct cst_state_layout {
    uint32_t n_stream, n_layers;
    bool v_trans, has_v;
    int32_t type_k, type_v;
    uint32_t k_row[CST_LAYERS_MAX], v_row[CST_LAYERS_MAX]; /* bytes per token */
};

/* A parsed blob; borrows the blob. */
struct cst_state {
    struct cst_state_layout layout; /* n_layers 0 in a blob without cells: not known */
    const uint8_t *blob;
    uint32_t n_cells;
    uint32_t *order; /* cell of each position; NULL: the identity */
    uint64_t k_at[CST_LAYERS_MAX], v_at[CST_LAYERS_MAX]; /* where the data starts in the blob */
};

/* 0, CST_STATE_E_* or -ENOMEM. deinit also after a failure; safe twice. */
int cst_state_parse(struct cst_state *out, const void *blob, size_t size);
void cst_state_deinit(struct cst_state *s);
const char *cst_state_text(int condition);

bool cst_state_layout_equal(const struct cst_state_layout *a, const struct cst_state_layout *b);

/* Bytes of an element of a ggml type that is not packed in groups; 0 for all others. */
uint32_t cst_state_element(int32_t type);

/* Where a layer's K and V lie in a block. */
uint64_t cst_state_block_size(const struct cst_state_layout *l, uint32_t block_tokens);
uint64_t cst_state_k_offset(const struct cst_state_layout *l, uint32_t layer,
                            uint32_t block_tokens);
uint64_t cst_state_v_offset(const struct cst_state_layout *l, uint32_t layer,
                            uint32_t block_tokens);

/* Copies tokens [first, first + n), n <= block_tokens, of s into a block and zeroes the rest of it.
 * first + n <= n_cells. */
void cst_state_cut(const struct cst_state *s, uint32_t first, uint32_t n, uint32_t block_tokens,
                   void *block);

/* A blob of n_tokens positions: its size, everything but the KV itself, and the first n tokens of a
 * block at positions [first, first + n). */
uint64_t cst_state_size(const struct cst_state_layout *l, uint32_t n_tokens);
void cst_state_join_begin(const struct cst_state_layout *l, uint32_t n_tokens, int32_t seq,
                          void *blob);
void cst_state_join_block(const struct cst_state_layout *l, uint32_t n_tokens, uint32_t first,
                          uint32_t n, uint32_t block_tokens, const void *block, void *blob);
