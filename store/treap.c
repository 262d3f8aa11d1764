/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the shape of a treap (Seidel and Aragon 1996), never its nodes.
 * Invariants: 1. in-order is key order; 2. no node has a larger priority than its parent;
 * 3. n->left->up == n and n->right->up == n.
 * A treap rather than a balanced tree: random priorities keep it flat in expectation with two
 * rotations of code, and removal needs no search because nodes know their parent.
 */
#include "store/treap.h"

#include <assert.h>

static void hang(struct cst_treap *treap, struct cst_treap_node *up,
                 const struct cst_treap_node *old, struct cst_treap_node *fresh) {
    if (!up)
        treap->root = fresh;
    else if (up->left == old)
        up->left = fresh;
    else
        up->right = fresh;
    if (fresh)
        fresh->up = up;
}

/* Swaps the node with its parent; keeps the order. */
static void rotate_up(struct cst_treap *treap, struct cst_treap_node *n) {
    struct cst_treap_node *p = n->up;

    hang(treap, p->up, p, n);
    if (p->left == n) {
        p->left = n->right;
        if (p->left)
            p->left->up = p;
        n->right = p;
    } else {
        p->right = n->left;
        if (p->right)
            p->right->up = p;
        n->left = p;
    }
    p->up = n;
}

static void attach(struct cst_treap *treap, struct cst_treap_node *node, uint64_t priority,
                   struct cst_treap_node *up, struct cst_treap_node **at) {
    assert(!*at);
    *node = (struct cst_treap_node){ .up = up, .priority = priority };
    *at = node;
    while (node->up && node->up->priority < priority)
        rotate_up(treap, node);
}

void cst_treap_insert(struct cst_treap *treap, struct cst_treap_node *node, uint64_t priority,
                      cst_treap_cmp cmp, const void *key) {
    struct cst_treap_node *up = NULL, **at = &treap->root;

    while (*at) {
        up = *at;
        at = cmp(up, key) < 0 ? &up->right : &up->left;
    }
    attach(treap, node, priority, up, at);
}

void cst_treap_insert_beside(struct cst_treap *treap, struct cst_treap_node *node,
                             uint64_t priority, struct cst_treap_node *at, bool after) {
    attach(treap, node, priority, at, after ? &at->right : &at->left);
}

void cst_treap_remove(struct cst_treap *treap, struct cst_treap_node *node) {
    while (node->left && node->right)
        rotate_up(treap, node->left->priority > node->right->priority ? node->left : node->right);
    assert(node->up || treap->root == node);
    hang(treap, node->up, node, node->left ? node->left : node->right);
    *node = (struct cst_treap_node){ .priority = 0 };
}

struct cst_treap_node *cst_treap_floor(const struct cst_treap *treap, cst_treap_cmp cmp,
                                       const void *key) {
    struct cst_treap_node *n = treap->root, *best = NULL;

    while (n) {
        if (cmp(n, key) <= 0) {
            best = n;
            n = n->right;
        } else {
            n = n->left;
        }
    }
    return best;
}

struct cst_treap_node *cst_treap_ceil(const struct cst_treap *treap, cst_treap_cmp cmp,
                                      const void *key) {
    struct cst_treap_node *n = treap->root, *best = NULL;

    while (n) {
        if (cmp(n, key) >= 0) {
            best = n;
            n = n->left;
        } else {
            n = n->right;
        }
    }
    return best;
}

struct cst_treap_node *cst_treap_first(const struct cst_treap *treap) {
    struct cst_treap_node *n = treap->root;

    while (n && n->left)
        n = n->left;
    return n;
}

struct cst_treap_node *cst_treap_next(const struct cst_treap_node *node) {
    struct cst_treap_node *n = node->right;

    if (n) {
        while (n->left)
            n = n->left;
        return n;
    }
    for (n = node->up; n && n->right == node; n = n->up)
        node = n;
    return n;
}

struct cst_treap_node *cst_treap_prev(const struct cst_treap_node *node) {
    struct cst_treap_node *n = node->left;

    if (n) {
        while (n->right)
            n = n->right;
        return n;
    }
    for (n = node->up; n && n->left == node; n = n->up)
        node = n;
    return n;
}
