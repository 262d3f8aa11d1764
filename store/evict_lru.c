/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Least recently used: one queue in the order of use. Owns nothing. Loop thread only.
 * The yardstick of the other policies.
 */
#include "store/evict.h"

static void lru_insert(struct cst_evict *e, struct cst_evict_entry *entry, enum cst_evict_how how) {
    cst_evict_enqueue(e, entry, 0, entry->order);
}

static void lru_remove(struct cst_evict *e, struct cst_evict_entry *entry, bool evicted) {
    cst_evict_dequeue(e, entry);
}

static struct cst_evict_entry *lru_victim(struct cst_evict *e,
                                          const struct cst_evict_entry *after) {
    return cst_evict_entry(after ? cst_treap_next(&after->node) : e->queues[0].first);
}

const struct cst_evict_ops cst_evict_lru = {
    .name = "lru",
    .insert = lru_insert,
    .remove = lru_remove,
    .victim = lru_victim,
};
