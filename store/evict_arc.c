/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ARC (Megiddo and Modha 2003): one list of entries used once, one of entries used again, and the
 * ghosts of what was evicted from each. A new entry whose ghost is known says which list was too
 * short, and `target`, the length that the first list should have, moves. A scan of once-used
 * entries so never pushes out what is used again and again.
 *
 * Invariant: there are never more ghosts than entries were in at the last eviction, so they stay a
 * small part of the index.
 * Differences from the paper: the capacity is whatever is in now, since the store evicts when it
 * needs room, not at a count; entries in use are out of the lists and come back as used.
 * Loop thread only.
 */
#include "store/evict.h"

enum { ONCE = 0, AGAIN = 1 };

/* The ghost list `list` (sizes from before the hit) was too short: its list gets more room. */
static void adapt(struct cst_evict *e, int list, const size_t ghosts[2]) {
    size_t all = e->n[ONCE] + e->n[AGAIN] + 1;
    size_t step = CST_MAX(1, ghosts[!list] / ghosts[list]);

    if (list == ONCE)
        e->target = CST_MIN(all, e->target + step);
    else
        e->target -= CST_MIN(e->target, step);
}

static void arc_insert(struct cst_evict *e, struct cst_evict_entry *entry, enum cst_evict_how how) {
    if (how == CST_EVICT_NEW) {
        const size_t ghosts[2] = { e->n_ghosts[ONCE], e->n_ghosts[AGAIN] };
        int list = cst_evict_ghost_take(e, entry->hash, NULL);

        if (list >= 0)
            adapt(e, list, ghosts);
        entry->frequent = list >= 0;
    } else if (how == CST_EVICT_USED) {
        entry->frequent = true;
    }
    cst_evict_link(e, entry, entry->frequent ? AGAIN : ONCE, how == CST_EVICT_COLD);
}

static void arc_remove(struct cst_evict *e, struct cst_evict_entry *entry, bool evicted) {
    if (evicted)
        cst_evict_ghost_make(e, entry, entry->list, e->n[ONCE] + e->n[AGAIN]);
    cst_evict_unlink(e, entry);
}

static struct cst_evict_entry *arc_victim(struct cst_evict *e,
                                          const struct cst_evict_entry *after) {
    bool once = e->n[ONCE] && (e->n[ONCE] > e->target || !e->n[AGAIN]);

    return cst_evict_walk(e, once ? ONCE : AGAIN, after);
}

const struct cst_evict_ops cst_evict_arc = {
    .name = "arc",
    .insert = arc_insert,
    .remove = arc_remove,
    .victim = arc_victim,
};
