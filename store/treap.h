/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Intrusive ordered set: a treap with parent pointers. Expected O(log n) for every call whatever
 * the order of inserts, as long as priorities are unknown to whoever chooses the keys. No
 * recursion, no allocation. The set owns nothing. One thread at a time.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cst_treap_node {
    struct cst_treap_node *left, *right, *up;
    uint64_t priority;
};

struct cst_treap {
    struct cst_treap_node *root;
};

/* < 0, 0, > 0: node stands before, at, after key. */
typedef int (*cst_treap_cmp)(const struct cst_treap_node *node, const void *key);

/* key: the node's own. Equal keys are allowed; the new node goes before them. */
void cst_treap_insert(struct cst_treap *treap, struct cst_treap_node *node, uint64_t priority,
                      cst_treap_cmp cmp, const void *key);
/* The same without a search, for a key that goes next to that of `at`: after it, if `at` has no
 * right child (the last node has none); before it, if it has no left one. */
void cst_treap_insert_beside(struct cst_treap *treap, struct cst_treap_node *node,
                             uint64_t priority, struct cst_treap_node *at, bool after);
/* The node must be in this treap. */
void cst_treap_remove(struct cst_treap *treap, struct cst_treap_node *node);

/* The last node at or before key, the first one at or after it; NULL: none. */
struct cst_treap_node *cst_treap_floor(const struct cst_treap *treap, cst_treap_cmp cmp,
                                       const void *key);
struct cst_treap_node *cst_treap_ceil(const struct cst_treap *treap, cst_treap_cmp cmp,
                                      const void *key);
struct cst_treap_node *cst_treap_first(const struct cst_treap *treap);
struct cst_treap_node *cst_treap_next(const struct cst_treap_node *node);
struct cst_treap_node *cst_treap_prev(const struct cst_treap_node *node);
