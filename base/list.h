/* SPDX-License-Identifier: Apache-2.0 */
/* Intrusive circular doubly linked list. An unlinked node points to itself; unlink is safe twice.
 */
#pragma once

#include "base/macros.h"

#include <stdbool.h>

struct cst_list {
    struct cst_list *next, *prev;
};

#define CST_LIST_INIT(l) ((struct cst_list){ &(l), &(l) })

static inline void cst_list_init(struct cst_list *l) {
    l->next = l->prev = l;
}

static inline bool cst_list_is_empty(const struct cst_list *l) {
    return l->next == l;
}

/* Inserts `node` before `pos`; with pos = head this appends. */
static inline void cst_list_insert(struct cst_list *pos, struct cst_list *node) {
    node->prev = pos->prev;
    node->next = pos;
    pos->prev->next = node;
    pos->prev = node;
}

static inline void cst_list_append(struct cst_list *head, struct cst_list *node) {
    cst_list_insert(head, node);
}

static inline void cst_list_prepend(struct cst_list *head, struct cst_list *node) {
    cst_list_insert(head->next, node);
}

static inline void cst_list_unlink(struct cst_list *node) {
    node->prev->next = node->next;
    node->next->prev = node->prev;
    cst_list_init(node);
}

static inline struct cst_list *cst_list_first(const struct cst_list *head) {
    return cst_list_is_empty(head) ? NULL : head->next;
}

#define cst_list_entry(ptr, type, member) cst_container_of(ptr, type, member)

/* The body may unlink `it`. */
#define cst_list_for_each_safe(it, tmp, head)                                                      \
    for ((it) = (head)->next, (tmp) = (it)->next; (it) != (head); (it) = (tmp), (tmp) = (it)->next)
