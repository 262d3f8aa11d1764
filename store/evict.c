/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the eviction policies share: the lists, and the table of policies by name.
 * Invariants: 1. entry->in exactly while it is linked in lists[entry->list]; 2. n[i] counts
 * lists[i]. Loop thread only.
 */
#include "store/evict.h"

#include <assert.h>
#include <string.h>

static const struct cst_evict_ops *const policies[] = { &cst_evict_lru, &cst_evict_arc };

const struct cst_evict_ops *cst_evict_by_name(const char *name) {
    for (size_t i = 0; i < CST_COUNT(policies); i++)
        if (!strcmp(policies[i]->name, name))
            return policies[i];
    return NULL;
}

void cst_evict_init(struct cst_evict *e, const struct cst_evict_ops *ops) {
    *e = (struct cst_evict){ .ops = ops };
    for (unsigned i = 0; i < CST_EVICT_LISTS; i++) {
        cst_list_init(&e->lists[i]);
        cst_list_init(&e->ghosts[i]);
    }
}

void cst_evict_deinit(struct cst_evict *e) {
    if (!e->ops)
        return;
    assert(!e->n[0] && !e->n[1]);
    while (e->ops->forget(e))
        ;
    cst_hashmap_deinit(&e->ghost_map);
    e->ops = NULL;
}

void cst_evict_link(struct cst_evict *e, struct cst_evict_entry *entry, unsigned list,
                    bool oldest) {
    assert(!entry->in);
    if (oldest)
        cst_list_prepend(&e->lists[list], &entry->link);
    else
        cst_list_append(&e->lists[list], &entry->link);
    entry->list = (uint8_t)list;
    entry->in = true;
    e->n[list]++;
}

void cst_evict_unlink(struct cst_evict *e, struct cst_evict_entry *entry) {
    assert(entry->in);
    cst_list_unlink(&entry->link);
    entry->in = false;
    e->n[entry->list]--;
}

struct cst_evict_entry *cst_evict_walk(struct cst_evict *e, unsigned first,
                                       const struct cst_evict_entry *after) {
    unsigned list = after ? after->list : first;
    struct cst_list *next = after ? after->link.next : e->lists[first].next;

    if (next == &e->lists[list] && list == first) {
        list = !first;
        next = e->lists[list].next;
    }
    return next == &e->lists[list] ? NULL : cst_list_entry(next, struct cst_evict_entry, link);
}
