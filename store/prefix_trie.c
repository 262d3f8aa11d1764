/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the nodes of a space's trie and their index by key.
 *
 * Invariants
 *   1. Every node but roots is in space->map and space->by_age, whose last one is space->newest;
 *      roots are in space->roots.
 *   2. A node is in its parent's treap of children exactly while it is visible, else in the
 *      parent's hidden list; n_children counts both. Flat blocks and roots have no parent.
 *   3. Children are ordered by their token ids, a prefix before what it starts. So whatever shares
 *      the longest prefix with some tokens stands next to where these would be inserted, and all
 *      that share as much stand around it.
 *   4. A root exists only while it has children or somebody holds it.
 *   5. seq grows from parent to child: a parent is created before its children.
 * No recursion anywhere: chains are as deep as clients like. Loop thread only.
 */
#include "store/prefix_trie.h"

#include "base/err.h"
#include "store/core.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

enum { MATCH_NEIGHBOURS = 8 };
_Static_assert(sizeof(struct cst_block) +
                       CST_BLOCK_TOKENS_MAX * (sizeof(uint32_t) + sizeof(uint16_t)) <=
                   CST_POOL_MAX,
               "every node fits the pool");

size_t cst_block_bytes(uint32_t n_tokens) {
    return cst_pool_bytes(sizeof(struct cst_block) +
                          n_tokens * (sizeof(uint32_t) + sizeof(uint16_t)));
}

uint16_t *cst_block_surprisals(struct cst_block *b) {
    return (uint16_t *)(void *)((char *)b + offsetof(struct cst_block, tokens) +
                                b->n_tokens * sizeof(uint32_t));
}

static bool key_is(const struct cst_hnode *node, const void *key) {
    return !memcmp(cst_container_of(node, struct cst_block, by_key)->key, key, CST_KEY_SIZE);
}

static struct cst_block *find(const struct cst_space *space, const struct cst_hashmap *map,
                              const uint8_t key[32]) {
    struct cst_hnode *node =
        cst_hashmap_find(map, cst_hash_key(space->store->seed, key), key_is, key);

    return node ? cst_container_of(node, struct cst_block, by_key) : NULL;
}

struct cst_block *cst_trie_find(const struct cst_space *space, const uint8_t key[32]) {
    return find(space, &space->map, key);
}

struct cst_block *cst_trie_root(const struct cst_space *space, const uint8_t key[32]) {
    return find(space, &space->roots, key);
}

void cst_trie_expect(const struct cst_space *space, const uint8_t key[32], bool soon) {
    cst_hashmap_prefetch(&space->map, cst_hash_key(space->store->seed, key), soon);
}

size_t cst_trie_need(const struct cst_space *space, uint32_t n_tokens, bool root) {
    size_t need = cst_block_bytes(n_tokens) + cst_hashmap_growth(&space->map);

    return root ? need + cst_block_bytes(0) + cst_hashmap_growth(&space->roots) : need;
}

static struct cst_block *sibling_block(const struct cst_treap_node *node) {
    return cst_container_of(node, struct cst_block, sibling);
}

struct token_list {
    const uint32_t *ids;
    uint32_t n;
};

static uint32_t shared_tokens(const uint32_t *a, uint32_t n_a, const uint32_t *b, uint32_t n_b) {
    uint32_t n = CST_MIN(n_a, n_b), i = 0;

    while (i < n && a[i] == b[i])
        i++;
    return i;
}

static int by_tokens(const struct cst_treap_node *node, const void *key) {
    const struct cst_block *b = sibling_block(node);
    const struct token_list *t = key;
    uint32_t i = shared_tokens(b->tokens, b->n_tokens, t->ids, t->n);

    if (i < b->n_tokens && i < t->n)
        return b->tokens[i] < t->ids[i] ? -1 : 1;
    return b->n_tokens < t->n ? -1 : b->n_tokens > t->n;
}

static int by_seq(const struct cst_treap_node *node, const void *key) {
    uint64_t a = cst_container_of(node, struct cst_block, by_age)->seq, b = *(const uint64_t *)key;

    return a < b ? -1 : a > b;
}

static struct cst_block *node_new(struct cst_space *space, const uint8_t key[32],
                                  const uint32_t *tokens, uint32_t n_tokens) {
    struct cst_block *b = cst_pool_alloc(&space->store->nodes, cst_block_bytes(n_tokens));

    if (!b)
        return NULL;
    memcpy(b->key, key, CST_KEY_SIZE);
    b->space = space;
    b->n_tokens = n_tokens;
    b->surprisal = -1;
    b->cold = CST_SEG_REF_NONE;
    if (n_tokens)
        memcpy(b->tokens, tokens, n_tokens * sizeof(*tokens));
    cst_list_init(&b->hidden_link);
    cst_list_init(&b->hidden);
    cst_list_init(&b->file);
    cst_list_init(&b->puts);
    cst_list_init(&b->waiters);
    cst_list_init(&b->pin_link);
    cst_list_init(&b->evict.link);
    return b;
}

int cst_trie_root_add(struct cst_block **out, struct cst_space *space, const uint8_t key[32]) {
    struct cst_block *b = node_new(space, key, NULL, 0);

    if (!b ||
        cst_map_insert(space, &space->roots, &b->by_key, cst_hash_key(space->store->seed, key))) {
        cst_pool_free(&space->store->nodes, b);
        return cst_err(-ENOMEM);
    }
    b->root = b->visible = true;
    cst_space_index_add(space, (int64_t)cst_block_bytes(0));
    *out = b;
    return 0;
}

/* seq only grows: behind the newest there is nothing to search for. */
static void add_newest(struct cst_space *space, struct cst_block *b) {
    uint64_t priority = cst_hash_u64(space->store->seed[1], b->seq);

    if (space->newest)
        cst_treap_insert_beside(&space->by_age, &b->by_age, priority, space->newest, true);
    else
        cst_treap_insert(&space->by_age, &b->by_age, priority, by_seq, &b->seq);
    space->newest = &b->by_age;
}

int cst_trie_add(struct cst_block **out, struct cst_space *space, struct cst_block *parent,
                 const uint8_t key[32], const uint32_t *tokens, uint32_t n_tokens) {
    struct cst_block *b = node_new(space, key, tokens, n_tokens);

    if (!b ||
        cst_map_insert(space, &space->map, &b->by_key, cst_hash_key(space->store->seed, key))) {
        cst_pool_free(&space->store->nodes, b);
        return cst_err(-ENOMEM);
    }
    b->seq = ++space->last_seq;
    b->evict.hash = b->by_key.hash;
    add_newest(space, b);
    b->parent = parent;
    if (parent) {
        b->depth = parent->root ? 0 : parent->depth + 1;
        parent->n_children++;
        cst_list_append(&parent->hidden, &b->hidden_link);
    }
    cst_space_index_add(space, (int64_t)cst_block_bytes(n_tokens));
    *out = b;
    return 0;
}

void cst_trie_show(struct cst_block *b) {
    assert(!b->visible && !b->dead);
    b->visible = true;
    cst_list_unlink(&b->hidden_link);
    if (b->parent)
        cst_treap_insert(&b->parent->children, &b->sibling,
                         cst_hash_u64(b->space->store->seed[2], b->by_key.hash), by_tokens,
                         &(struct token_list){ b->tokens, b->n_tokens });
}

static void root_cut(struct cst_block *root) {
    assert(!root->pins);
    cst_hashmap_remove(&root->space->roots, &root->by_key);
    cst_space_index_add(root->space, -(int64_t)cst_block_bytes(0));
    cst_pool_free(&root->space->store->nodes, root);
}

void cst_trie_cut(struct cst_block *b) {
    struct cst_block *parent = b->parent;

    assert(!b->n_children && !b->dead);
    if (b->root) {
        root_cut(b);
        return;
    }
    b->dead = true;
    if (b->visible && parent)
        cst_treap_remove(&parent->children, &b->sibling);
    cst_list_unlink(&b->hidden_link);
    cst_hashmap_remove(&b->space->map, &b->by_key);
    if (b->space->newest == &b->by_age)
        b->space->newest = cst_treap_prev(&b->by_age);
    cst_treap_remove(&b->space->by_age, &b->by_age);
    b->parent = NULL;
    if (parent && !--parent->n_children && parent->root && !parent->holds)
        root_cut(parent);
}

struct cst_block *cst_trie_child(const struct cst_block *b) {
    if (!cst_list_is_empty(&b->hidden))
        return cst_list_entry(b->hidden.next, struct cst_block, hidden_link);
    return b->children.root ? sibling_block(cst_treap_first(&b->children)) : NULL;
}

/* The sibling after b, hidden ones first as in cst_trie_child(). */
static const struct cst_block *sibling_after(const struct cst_block *b) {
    const struct cst_treap_node *node = NULL;

    if (b->visible)
        node = cst_treap_next(&b->sibling);
    else if (b->hidden_link.next != &b->parent->hidden)
        return cst_list_entry(b->hidden_link.next, struct cst_block, hidden_link);
    else
        node = cst_treap_first(&b->parent->children);
    return node ? sibling_block(node) : NULL;
}

const struct cst_block *cst_trie_next(const struct cst_block *top, const struct cst_block *at) {
    const struct cst_block *next = cst_trie_child(at);

    while (!next && at != top) {
        next = sibling_after(at);
        at = at->parent;
    }
    return next;
}

/* Of what shares as many tokens as best, the one nearest to memory among a few to one side. */
static struct cst_block *nearer(struct cst_block *best, const struct token_list *t, uint32_t shared,
                                struct cst_treap_node *(*step)(const struct cst_treap_node *)) {
    struct cst_treap_node *node = &best->sibling;

    for (unsigned i = 0; i < MATCH_NEIGHBOURS && (node = step(node)); i++) {
        struct cst_block *b = sibling_block(node);

        if (shared_tokens(b->tokens, b->n_tokens, t->ids, t->n) != shared)
            break;
        if (cst_block_tier(b) < cst_block_tier(best))
            best = b;
    }
    return best;
}

struct cst_block *cst_trie_match(const struct cst_block *parent, const uint32_t *tokens, uint32_t n,
                                 uint32_t *shared) {
    const struct token_list t = { tokens, n };
    struct cst_treap_node *sides[2];
    struct cst_block *best = NULL, *first;

    sides[0] = cst_treap_ceil(&parent->children, by_tokens, &t);
    sides[1] = cst_treap_floor(&parent->children, by_tokens, &t);
    *shared = 0;
    for (unsigned i = 0; i < 2; i++) {
        struct cst_block *b = sides[i] ? sibling_block(sides[i]) : NULL;
        uint32_t len = b ? shared_tokens(b->tokens, b->n_tokens, tokens, n) : 0;

        if (len > *shared || (len && len == *shared && cst_block_tier(b) < cst_block_tier(best))) {
            best = b;
            *shared = len;
        }
    }
    if (!best)
        return NULL;
    first = best;
    best = nearer(first, &t, *shared, cst_treap_next);
    first = nearer(first, &t, *shared, cst_treap_prev);
    return cst_block_tier(first) < cst_block_tier(best) ? first : best;
}

struct cst_block *cst_trie_shorter(const struct cst_block *b) {
    struct token_list t = { b->tokens, b->n_tokens };

    while (t.n > 1) {
        struct cst_treap_node *node;
        struct cst_block *s;
        uint32_t shared;

        t.n--;
        node = cst_treap_floor(&b->parent->children, by_tokens, &t);
        s = node ? sibling_block(node) : NULL;
        shared = s ? shared_tokens(s->tokens, s->n_tokens, t.ids, t.n) : 0;
        if (!shared)
            return NULL;
        if (shared == s->n_tokens && !s->superseded)
            return s;
        t.n = shared == s->n_tokens ? shared : shared + 1;
    }
    return NULL;
}

struct cst_block *cst_trie_after(const struct cst_space *space, uint64_t after) {
    uint64_t seq = after + 1;
    struct cst_treap_node *node = cst_treap_ceil(&space->by_age, by_seq, &seq);

    return node ? cst_container_of(node, struct cst_block, by_age) : NULL;
}
