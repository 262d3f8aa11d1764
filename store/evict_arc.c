/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ARC (Megiddo and Modha 2003): one list of entries used once, one of entries used again, and the
 * ghosts of what was evicted from each. A new entry whose ghost is known says which list was too
 * short, and `target`, the length that the first list should have, moves. A scan of once-used
 * entries so never pushes out what is used again and again.
 *
 * Owns the ghosts. Invariants: 1. a hash has at most one ghost; 2. there are never more ghosts than
 * entries were in at the last eviction, so they stay a small part of the index.
 * Differences from the paper: the capacity is whatever is in now, since the store evicts when it
 * needs room, not at a count; entries in use are out of the lists and come back as used.
 * Loop thread only.
 */
#include "store/evict.h"

#include "base/mem.h"

enum { ONCE = 0, AGAIN = 1 };

struct ghost {
    struct cst_hnode node;
    struct cst_list link;
    uint8_t list;
};

static bool same(const struct cst_hnode *node, const void *key) {
    return true; /* the hash is the name, and find() has compared it */
}

static void ghost_free(struct cst_evict *e, struct ghost *g) {
    cst_hashmap_remove(&e->ghost_map, &g->node);
    cst_list_unlink(&g->link);
    e->n_ghosts[g->list]--;
    cst_free(g);
}

/* Takes the ghost away and answers its list, or -1. */
static int ghost_take(struct cst_evict *e, uint64_t hash) {
    struct cst_hnode *node = cst_hashmap_find(&e->ghost_map, hash, same, NULL);
    struct ghost *g = node ? cst_container_of(node, struct ghost, node) : NULL;
    int list = g ? g->list : -1;

    if (g)
        ghost_free(e, g);
    return list;
}

static bool arc_forget(struct cst_evict *e) {
    unsigned list = e->n_ghosts[ONCE] >= e->n_ghosts[AGAIN] ? ONCE : AGAIN;
    struct cst_list *oldest = cst_list_first(&e->ghosts[list]);

    if (oldest)
        ghost_free(e, cst_list_entry(oldest, struct ghost, link));
    return oldest;
}

/* Without room or memory for it there is no ghost: the policy only learns less. */
static void ghost_make(struct cst_evict *e, const struct cst_evict_entry *entry) {
    size_t room = e->n[ONCE] + e->n[AGAIN];
    struct ghost *g;

    (void)ghost_take(e, entry->hash);
    while (e->n_ghosts[ONCE] + e->n_ghosts[AGAIN] >= room)
        if (!arc_forget(e))
            return;
    if (sizeof(*g) + cst_hashmap_growth(&e->ghost_map) > e->room)
        return;
    g = cst_calloc(1, sizeof(*g));
    if (!g)
        return;
    if (cst_hashmap_insert(&e->ghost_map, &g->node, entry->hash)) {
        cst_free(g);
        return;
    }
    g->list = entry->list;
    cst_list_append(&e->ghosts[g->list], &g->link);
    e->n_ghosts[g->list]++;
}

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
        int list = ghost_take(e, entry->hash);

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
        ghost_make(e, entry);
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
    .forget = arc_forget,
};

size_t cst_evict_bytes(const struct cst_evict *e) {
    return (e->n_ghosts[ONCE] + e->n_ghosts[AGAIN]) * sizeof(struct ghost) +
           cst_hashmap_bytes(&e->ghost_map);
}
