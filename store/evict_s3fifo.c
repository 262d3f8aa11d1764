/* SPDX-License-Identifier: Apache-2.0 */
/*
 * S3-FIFO (Yang et al., SOSP 2023): a small queue that new entries go through, a main queue for
 * those that were used again before they came to its end, and the ghosts of those that were not. A
 * ghost that comes back goes to the main queue at once; there an entry whose turn it is goes round
 * once more for each use.
 *
 * Invariant: a place in a queue is when its entry arrived there, so one that was out (in use, or
 * with others above it) comes back to where it was. Differences from the paper: the capacity is
 * whatever is in now (see evict_arc.c), ghosts are as many as entries were born, and a victim takes
 * a bounded number of rounds. Loop thread only.
 */
#include "store/evict.h"

enum { SMALL = 0, MAIN = 1, SMALL_SHARE = 10, HITS_MAX = 3, ROUNDS = 64 };

static void s3fifo_born(struct cst_evict *e, struct cst_evict_entry *entry) {
    entry->frequent = cst_evict_ghost_take(e, entry->hash, NULL) >= 0;
    entry->uses = 0;
    entry->place = ++e->arrivals;
}

static void s3fifo_insert(struct cst_evict *e, struct cst_evict_entry *entry,
                          enum cst_evict_how how) {
    cst_evict_enqueue(e, entry, entry->frequent ? MAIN : SMALL, entry->place);
}

static void s3fifo_remove(struct cst_evict *e, struct cst_evict_entry *entry, bool evicted) {
    if (evicted && entry->list == SMALL)
        cst_evict_ghost_make(e, entry, 0, e->born);
    cst_evict_dequeue(e, entry);
}

/* To the end of the main queue. */
static void go_round(struct cst_evict *e, struct cst_evict_entry *entry) {
    cst_evict_dequeue(e, entry);
    entry->frequent = true;
    cst_evict_enqueue(e, entry, MAIN, ++e->arrivals);
}

static unsigned hits(const struct cst_evict_entry *entry) {
    return CST_MIN(CST_MAX(entry->uses, 1) - 1, HITS_MAX);
}

static unsigned next_queue(const struct cst_evict *e) {
    return !e->n[MAIN] || e->n[SMALL] * SMALL_SHARE > e->n[SMALL] + e->n[MAIN] ? SMALL : MAIN;
}

static struct cst_evict_entry *s3fifo_victim(struct cst_evict *e,
                                             const struct cst_evict_entry *after) {
    struct cst_treap_node *next;

    if (!after)
        e->target = next_queue(e);
    for (unsigned i = 0; !after && i < ROUNDS; i++) {
        struct cst_evict_entry *entry = cst_evict_entry(e->queues[e->target].first);

        if (!entry || hits(entry) <= (e->target == SMALL ? 1 : 0))
            break;
        entry->uses = (uint8_t)(e->target == SMALL ? 1 : hits(entry));
        go_round(e, entry);
        e->target = next_queue(e);
    }
    if (!after)
        return cst_evict_entry(e->queues[e->target].first);
    next = cst_treap_next(&after->node);
    return cst_evict_entry(next || after->list != e->target ? next : e->queues[!e->target].first);
}

const struct cst_evict_ops cst_evict_s3fifo = {
    .name = "s3fifo",
    .born = s3fifo_born,
    .insert = s3fifo_insert,
    .remove = s3fifo_remove,
    .victim = s3fifo_victim,
};
