/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Eviction policies behind one table. A policy orders the entries that may be evicted (the store
 * gives it the idle leaves of one space); it knows nothing of blocks, so that a simulator can run
 * the same code on traces. Loop thread only.
 *
 * An entry leaves with remove() while it is in use and comes back with insert().
 */
#pragma once

#include "base/hashmap.h"
#include "base/list.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CST_EVICT_LISTS = 2 };

/* Embedded in whatever is evicted. */
struct cst_evict_entry {
    struct cst_list link;
    uint64_t hash; /* names the entry among the ghosts */
    uint8_t list;  /* where it is while in; the policy's */
    bool in;       /* in the policy now */
    bool frequent; /* used again since it was new */
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
    void (*insert)(struct cst_evict *e, struct cst_evict_entry *entry, enum cst_evict_how how);
    /* evicted: it was the victim and may leave a ghost; else it is in use, or gone by itself. */
    void (*remove)(struct cst_evict *e, struct cst_evict_entry *entry, bool evicted);
    /* The best victim (after NULL), then the next best. NULL: no more. */
    struct cst_evict_entry *(*victim)(struct cst_evict *e, const struct cst_evict_entry *after);
    /* Forgets the oldest ghost. False: there is none. */
    bool (*forget)(struct cst_evict *e);
};

struct cst_evict {
    const struct cst_evict_ops *ops;
    struct cst_list lists[CST_EVICT_LISTS]; /* oldest first */
    size_t n[CST_EVICT_LISTS];
    struct cst_list ghosts[CST_EVICT_LISTS]; /* oldest first */
    size_t n_ghosts[CST_EVICT_LISTS];
    struct cst_hashmap ghost_map;
    size_t target; /* arc: how many entries the first list should have */
    size_t room;   /* heap bytes that ghosts may take more; its owner keeps it up to date */
};

/* Must not move afterwards. */
void cst_evict_init(struct cst_evict *e, const struct cst_evict_ops *ops);
/* Entries must be out. Safe twice. */
void cst_evict_deinit(struct cst_evict *e);

/* Heap bytes of the ghosts. */
size_t cst_evict_bytes(const struct cst_evict *e);

/* NULL: unknown name. */
const struct cst_evict_ops *cst_evict_by_name(const char *name);

extern const struct cst_evict_ops cst_evict_lru;
extern const struct cst_evict_ops cst_evict_arc;

/* What the policies share. */
void cst_evict_link(struct cst_evict *e, struct cst_evict_entry *entry, unsigned list, bool oldest);
void cst_evict_unlink(struct cst_evict *e, struct cst_evict_entry *entry);
/* Walks list `first` and then the other one, each from its oldest entry. */
struct cst_evict_entry *cst_evict_walk(struct cst_evict *e, unsigned first,
                                       const struct cst_evict_entry *after);
