/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is worth least goes first: worth = r * sqrt(uses * cost) / (age + PAUSE).
 *
 * cost is what it takes to compute a byte of the entry again; it grows with the position, and the
 * square root stands for what deeper blocks have against them: the longer a prefix, the fewer
 * prompts share it. uses counts what ghosts remember, too, and r favours what came back at all.
 * 1 / (age + PAUSE) is how likely the next use is: of what people come back to, most comes back
 * within minutes, so younger ages tell little apart (hyperbolic caching, Blankstein et al., ATC
 * 2017, with Marconi's value of a prefix, Pan et al., arXiv 2411.19379).
 *
 * Entries of about the same numerator, a quarter of an octave wide, are one queue in the order of
 * use: the worst of all is the worst of at most 32 first ones, exactly up to that width, without
 * samples and whatever the number of entries. The clock is the last use that was seen, so nothing
 * gets worse while nobody asks for anything.
 *
 * Invariant: bit i of filled is set exactly while queues[i] has entries. Loop thread only.
 */
#include "store/evict.h"

#include <string.h>

enum {
    PAUSE_S = 150,
    FEW = 64,          /* fewer entries than a prompt has blocks are kept by recency alone */
    GHOSTS = 4,        /* for each entry: what comes back only after long must be known again; */
    GHOSTS_MIN = 8192, /* in a small cache everything does */
    OFFSET = 8,        /* the queue of numerator 1 */
    TWICE = 127 * 2,   /* the class of 1.0F before the offset */
};

static const float AGAIN = 1.35F * 1.35F; /* r squared */

/* The class of x = numerator squared: two in an octave, from the exponent and the first bit of the
 * fraction. */
static unsigned class_of(float x) {
    uint32_t bits;
    int64_t klass;

    if (!(x > 0))
        return 0;
    memcpy(&bits, &x, sizeof(bits));
    klass = (int64_t)(bits >> 22) - TWICE + OFFSET;
    return (unsigned)CST_MAX(0, CST_MIN(klass, CST_EVICT_QUEUES - 1));
}

/* 2^16 over the numerator of each class, in its middle. */
static const uint32_t per_worth[CST_EVICT_QUEUES] = {
    234469, 198162, 165794, 140122, 117234, 99081, 82897, 70061, 58617, 49541, 41449,
    35030,  29309,  24770,  20724,  17515,  14654, 12385, 10362, 8758,  7327,  6193,
    5181,   4379,   3664,   3096,   2591,   2189,  1832,  1548,  1295,  1095,
};

static float worth(const struct cst_evict_entry *entry) {
    float x = (float)CST_MAX(entry->uses, 1) * entry->cost;

    return entry->uses > 1 ? x * AGAIN : x;
}

static void cost_born(struct cst_evict *e, struct cst_evict_entry *entry) {
    entry->uses = 0;
    (void)cst_evict_ghost_take(e, entry->hash, &entry->uses);
}

static void cost_insert(struct cst_evict *e, struct cst_evict_entry *entry,
                        enum cst_evict_how how) {
    unsigned list = e->born < FEW ? OFFSET : class_of(worth(entry));

    e->now_s = CST_MAX(e->now_s, entry->used_s);
    cst_evict_enqueue(e, entry, list, entry->order);
    e->filled |= 1U << list;
}

static void cost_remove(struct cst_evict *e, struct cst_evict_entry *entry, bool evicted) {
    if (evicted)
        cst_evict_ghost_make(e, entry, 0, CST_MAX(GHOSTS_MIN, GHOSTS * e->born));
    cst_evict_dequeue(e, entry);
    if (!e->n[entry->list])
        e->filled &= ~(1U << entry->list);
}

static uint64_t badness(const struct cst_evict *e, const struct cst_evict_entry *entry) {
    uint32_t age = e->now_s - CST_MIN(e->now_s, entry->used_s); /* a use while in may be newer */

    return ((uint64_t)age + PAUSE_S) * per_worth[entry->list];
}

static struct cst_evict_entry *worst_of(struct cst_evict *e, bool walk) {
    struct cst_evict_entry *best = NULL;
    uint64_t worst = 0;

    for (uint32_t left = e->filled; left; left &= left - 1) {
        unsigned list = (unsigned)__builtin_ctz(left);
        struct cst_evict_entry *entry =
            cst_evict_entry(walk ? e->cursor[list] : e->queues[list].first);
        uint64_t bad = entry ? badness(e, entry) : 0;

        if (bad > worst || (bad == worst && best && entry && entry->order < best->order)) {
            best = entry;
            worst = bad;
        }
    }
    return best;
}

static struct cst_evict_entry *cost_victim(struct cst_evict *e,
                                           const struct cst_evict_entry *after) {
    if (!after) {
        e->walking = false;
        return worst_of(e, false);
    }
    for (uint32_t left = e->walking ? 0 : e->filled; left; left &= left - 1)
        e->cursor[__builtin_ctz(left)] = e->queues[__builtin_ctz(left)].first;
    e->walking = true;
    e->cursor[after->list] = cst_treap_next(&after->node);
    return worst_of(e, true);
}

const struct cst_evict_ops cst_evict_cost = {
    .name = "cost",
    .born = cost_born,
    .insert = cost_insert,
    .remove = cost_remove,
    .victim = cost_victim,
};
