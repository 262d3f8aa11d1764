/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Least recently used: one list, the oldest first. Owns nothing. Loop thread only.
 * The yardstick of the other policies.
 */
#include "store/evict.h"

static void lru_insert(struct cst_evict *e, struct cst_evict_entry *entry, enum cst_evict_how how) {
    if (how == CST_EVICT_USED)
        entry->frequent = true;
    cst_evict_link(e, entry, 0, how == CST_EVICT_COLD);
}

static void lru_remove(struct cst_evict *e, struct cst_evict_entry *entry, bool evicted) {
    cst_evict_unlink(e, entry);
}

static struct cst_evict_entry *lru_victim(struct cst_evict *e,
                                          const struct cst_evict_entry *after) {
    return cst_evict_walk(e, 0, after);
}

static bool lru_forget(struct cst_evict *e) {
    return false;
}

const struct cst_evict_ops cst_evict_lru = {
    .name = "lru",
    .insert = lru_insert,
    .remove = lru_remove,
    .victim = lru_victim,
    .forget = lru_forget,
};
