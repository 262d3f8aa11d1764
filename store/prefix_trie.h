/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prefix trie of one space: nodes are blocks, found by key, or among the visible children of a
 * node by tokens. It only knows structure; what a block is worth and where its bytes are is
 * block.h's. Loop thread only.
 */
#pragma once

#include "store/block.h"

/* Any block that is not dead, or NULL. */
struct cst_block *cst_trie_find(const struct cst_space *space, const uint8_t key[32]);
struct cst_block *cst_trie_root(const struct cst_space *space, const uint8_t key[32]);

/* A hint: cst_trie_find() of this key comes after a few others; soon: very few, and it was told
 * before. */
void cst_trie_expect(const struct cst_space *space, const uint8_t key[32], bool soon);

/* Heap bytes that the next cst_trie_add() or root_add() needs, hash table growth included. */
size_t cst_trie_need(const struct cst_space *space, uint32_t n_tokens, bool root);

/* A root without children; a hidden child of parent (flat: NULL). The key is not there yet.
 * 0 or -ENOMEM. */
int cst_trie_root_add(struct cst_block **out, struct cst_space *space, const uint8_t key[32]);
int cst_trie_add(struct cst_block **out, struct cst_space *space, struct cst_block *parent,
                 const uint8_t key[32], const uint32_t *tokens, uint32_t n_tokens);

/* Moves the node from the parent's hidden children to its visible ones. */
void cst_trie_show(struct cst_block *b);

/* Takes a node without children out of the trie. A root that loses its last child goes too. */
void cst_trie_cut(struct cst_block *b);

/* Any child, hidden ones first; NULL: a leaf. */
struct cst_block *cst_trie_child(const struct cst_block *b);

/* The next node of a walk through the subtree of top (top first); NULL: the end. */
const struct cst_block *cst_trie_next(const struct cst_block *top, const struct cst_block *at);

/*
 * The visible child that shares the longest prefix with tokens (at least one token); of several the
 * one nearest to memory, among a few neighbours. NULL: none. *shared: how many tokens.
 */
struct cst_block *cst_trie_match(const struct cst_block *parent, const uint32_t *tokens, uint32_t n,
                                 uint32_t *shared);

/* The longest visible sibling, shorter than the (visible) block, whose tokens start b's, that is
 * not superseded yet. NULL: none. */
struct cst_block *cst_trie_shorter(const struct cst_block *b);

/* Blocks in creation order: the first with seq > after, or NULL. */
struct cst_block *cst_trie_after(const struct cst_space *space, uint64_t after);
