/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Eviction policies behind one table. A policy orders the entries that may be evicted (the store
 * gives it the idle leaves of one space); it knows nothing of blocks, so that a simulator can run
 * the same code on traces. Loop thread only.
 *
 * An entry is born once; it leaves with remove() while it is in use, or has others above it, and
 * comes back with insert(). Its owner says when it was used, in and out (cst_evict_use()).
 * A victim costs O(1); an entry that comes back between others O(log n).
 */
#pragma once

#include "base/hashmap.h"
#include "base/list.h"
#include "store/treap.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CST_EVICT_LISTS = 2, CST_EVICT_QUEUES = 32 };

/* Embedded in whatever is evicted. */
struct cst_evict_entry {
    union { /* the policy's, while in */
        struct cst_list link;
        struct cst_treap_node node;
    };
    uint64_t place;  /* the policy's: in its queue */
    uint64_t hash;   /* names the entry among the ghosts */
    uint64_t order;  /* of the last use: a later one has a larger number */
    uint32_t used_s; /* when that was, in seconds of any clock */
    float cost;      /* of making it again for each byte it holds; 1: of a first block's */
    uint8_t list;    /* where it is while in; the policy's */
    uint8_t uses;    /* at most UINT8_MAX; those of ghosts, too. The policy may lower it */
    bool in;         /* in the policy now */
    bool frequent;   /* used again since it was new; the policy's */
};

#define CST_EVICT_ENTRY_NULL ((struct cst_evict_entry){ .in = false })

enum cst_evict_how {
    CST_EVICT_NEW,  /* first time */
    CST_EVICT_USED, /* was just used */
    CST_EVICT_WARM, /* may be evicted again (a leaf again, unpinned), used lately */
    CST_EVICT_COLD, /* the same, but its use is as old as that of what is evicted now */
};

struct cst_evict;

struct cst_evict_ops {
    const char *name;
    /* It got its bytes; hash is set. Before its first use and the first insert(). May be NULL. */
    void (*born)(struct cst_evict *e, struct cst_evict_entry *entry);
    void (*insert)(struct cst_evict *e, struct cst_evict_entry *entry, enum cst_evict_how how);
    /* evicted: it was the victim and may leave a ghost; else it is in use, or gone by itself. */
    void (*remove)(struct cst_evict *e, struct cst_evict_entry *entry, bool evicted);
    /* The best victim (after NULL), then the next best; `after` is what the last call returned,
     * with nothing inserted or removed since. NULL: no more. */
    struct cst_evict_entry *(*victim)(struct cst_evict *e, const struct cst_evict_entry *after);
};

/* Entries in the order of their places. */
struct cst_evict_queue {
    struct cst_treap tree;
    struct cst_treap_node *first, *last;
};

struct cst_evict {
    const struct cst_evict_ops *ops;
    struct cst_list lists[CST_EVICT_LISTS];          /* arc: oldest first */
    struct cst_evict_queue queues[CST_EVICT_QUEUES]; /* the others: what goes first stands first */
    size_t n[CST_EVICT_QUEUES];                      /* in each list or queue */
    struct cst_list ghosts[CST_EVICT_LISTS];         /* oldest first */
    size_t n_ghosts[CST_EVICT_LISTS];
    struct cst_hashmap ghost_map;
    size_t target; /* arc: how many entries the first list should have; s3fifo: the first queue */
    size_t room;   /* heap bytes that ghosts may take more; its owner keeps it up to date */
    size_t born;   /* entries there are, in and out; its owner keeps it up to date */
    uint64_t arrivals;
    uint32_t now_s;
    bool walking;                                    /* cost: cursor[] is valid */
    uint32_t filled;                                 /* cost: bit i: queues[i] has entries */
    struct cst_treap_node *cursor[CST_EVICT_QUEUES]; /* cost: what victim() comes to next */
};

/* Must not move afterwards. */
void cst_evict_init(struct cst_evict *e, const struct cst_evict_ops *ops);
/* Entries must be out. Safe twice. */
void cst_evict_deinit(struct cst_evict *e);

/* Heap bytes of the ghosts. */
size_t cst_evict_bytes(const struct cst_evict *e);
/* Forgets the oldest ghost. False: there is none. */
bool cst_evict_forget(struct cst_evict *e);

/* The entry is used now. Uses in the same second count once. */
static inline void cst_evict_use(struct cst_evict_entry *entry, uint64_t order, uint32_t now_s) {
    if ((!entry->uses || entry->used_s != now_s) && entry->uses < UINT8_MAX)
        entry->uses++;
    entry->order = order;
    entry->used_s = now_s;
}

/* NULL: unknown name. */
const struct cst_evict_ops *cst_evict_by_name(const char *name);

extern const struct cst_evict_ops cst_evict_lru;
extern const struct cst_evict_ops cst_evict_s3fifo;
extern const struct cst_evict_ops cst_evict_arc;
extern const struct cst_evict_ops cst_evict_cost;

/* ---- what the policies share ---- */

void cst_evict_link(struct cst_evict *e, struct cst_evict_entry *entry, unsigned list, bool oldest);
void cst_evict_unlink(struct cst_evict *e, struct cst_evict_entry *entry);
/* Walks list `first` and then the other one, each from its oldest entry. */
struct cst_evict_entry *cst_evict_walk(struct cst_evict *e, unsigned first,
                                       const struct cst_evict_entry *after);

/* Into the queue at `place`, after those of the same place, and out. At the ends O(1), else
 * O(log n). */
void cst_evict_enqueue(struct cst_evict *e, struct cst_evict_entry *entry, unsigned queue,
                       uint64_t place);
void cst_evict_dequeue(struct cst_evict *e, struct cst_evict_entry *entry);
/* NULL ok: answers NULL. */
struct cst_evict_entry *cst_evict_entry(struct cst_treap_node *node);

/* A ghost remembers the hash and the uses of what was evicted. A hash has at most one. */
struct cst_evict_ghost {
    struct cst_hnode node;
    struct cst_list link;
    uint8_t list, uses;
};

/* The evicted entry leaves a ghost in ghosts[list]; there are at most `max` in all, the oldest of
 * the longest list goes. Without room or memory for it there is none: the policy only learns less.
 */
void cst_evict_ghost_make(struct cst_evict *e, const struct cst_evict_entry *entry, unsigned list,
                          size_t max);
/* Takes the entry's ghost away. Returns its list, or -1; *uses, if not NULL, is only written then.
 */
int cst_evict_ghost_take(struct cst_evict *e, uint64_t hash, uint8_t *uses);
