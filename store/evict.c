/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the eviction policies share: the lists, the ghosts, and the table of policies by name.
 * Owns the ghosts. Invariants: 1. entry->in exactly while it is in lists[entry->list], or in
 * queues[entry->list]; 2. n[i] counts them, n_ghosts[i] ghosts[i]; 3. a hash has at most one ghost.
 * Queues are treaps with known ends: nearly everything comes and goes there, without a search; but
 * a block whose last child was evicted can be anywhere in the order of use. Loop thread only.
 */
#include "store/evict.h"

#include "base/mem.h"

#include <assert.h>
#include <string.h>

enum { STEPS = 100000 }; /* of a search, from each end */

static const struct cst_evict_ops *const policies[] = { &cst_evict_lru, &cst_evict_s3fifo,
                                                        &cst_evict_arc, &cst_evict_cost };

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
    for (unsigned i = 0; i < CST_EVICT_QUEUES; i++)
        assert(!e->n[i]);
    while (cst_evict_forget(e))
        ;
    cst_hashmap_deinit(&e->ghost_map);
    e->ops = NULL;
}

/* ---- lists ---- */

static void joined(struct cst_evict *e, struct cst_evict_entry *entry, unsigned list) {
    assert(!entry->in);
    entry->list = (uint8_t)list;
    entry->in = true;
    e->n[list]++;
}

static void left(struct cst_evict *e, struct cst_evict_entry *entry) {
    assert(entry->in && e->n[entry->list]);
    entry->in = false;
    e->n[entry->list]--;
}

void cst_evict_link(struct cst_evict *e, struct cst_evict_entry *entry, unsigned list,
                    bool oldest) {
    joined(e, entry, list);
    if (oldest)
        cst_list_prepend(&e->lists[list], &entry->link);
    else
        cst_list_append(&e->lists[list], &entry->link);
}

void cst_evict_unlink(struct cst_evict *e, struct cst_evict_entry *entry) {
    left(e, entry);
    cst_list_unlink(&entry->link);
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

/* ---- queues ---- */

struct cst_evict_entry *cst_evict_entry(struct cst_treap_node *node) {
    return node ? cst_container_of(node, struct cst_evict_entry, node) : NULL;
}

static int later(const struct cst_treap_node *node, const void *key) {
    const struct cst_evict_entry *entry = cst_container_of(node, struct cst_evict_entry, node);
    const uint64_t *place = key;

    return entry->place > *place ? 1 : -1;
}

void cst_evict_enqueue(struct cst_evict *e, struct cst_evict_entry *entry, unsigned queue,
                       uint64_t place) {
    struct cst_evict_queue *q = &e->queues[queue];
    uint64_t priority = cst_hash_u64(entry->hash, place);

    joined(e, entry, queue);
    entry->place = place;
    if (!q->last) {
        cst_treap_insert(&q->tree, &entry->node, priority, later, &place);
        q->first = q->last = &entry->node;
    } else if (place >= cst_evict_entry(q->last)->place) {
        cst_treap_insert_beside(&q->tree, &entry->node, priority, q->last, true);
        q->last = &entry->node;
    } else if (place < cst_evict_entry(q->first)->place) {
        cst_treap_insert_beside(&q->tree, &entry->node, priority, q->first, false);
        q->first = &entry->node;
    } else {
        cst_treap_insert(&q->tree, &entry->node, priority, later, &place);
    }
}

void cst_evict_dequeue(struct cst_evict *e, struct cst_evict_entry *entry) {
    struct cst_evict_queue *q = &e->queues[entry->list];

    left(e, entry);
    if (q->first == &entry->node)
        q->first = cst_treap_next(&entry->node);
    if (q->last == &entry->node)
        q->last = cst_treap_prev(&entry->node);
    cst_treap_remove(&q->tree, &entry->node);
}

/* ---- ghosts ---- */

static bool same(const struct cst_hnode *node, const void *key) {
    return true; /* the hash is the name, and find() has compared it */
}

static void ghost_unlink(struct cst_evict *e, struct cst_evict_ghost *g) {
    cst_hashmap_remove(&e->ghost_map, &g->node);
    cst_list_unlink(&g->link);
    e->n_ghosts[g->list]--;
}

int cst_evict_ghost_take(struct cst_evict *e, uint64_t hash, uint8_t *uses) {
    struct cst_hnode *node = cst_hashmap_find(&e->ghost_map, hash, same, NULL);
    struct cst_evict_ghost *g = node ? cst_container_of(node, struct cst_evict_ghost, node) : NULL;
    int list = g ? g->list : -1;

    if (!g)
        return -1;
    if (uses)
        *uses = g->uses;
    ghost_unlink(e, g);
    cst_free(g);
    return list;
}

static struct cst_evict_ghost *oldest_ghost(const struct cst_evict *e) {
    unsigned list = e->n_ghosts[0] >= e->n_ghosts[1] ? 0 : 1;
    struct cst_list *oldest = cst_list_first(&e->ghosts[list]);

    return oldest ? cst_list_entry(oldest, struct cst_evict_ghost, link) : NULL;
}

bool cst_evict_forget(struct cst_evict *e) {
    struct cst_evict_ghost *g = oldest_ghost(e);

    if (!g)
        return false;
    ghost_unlink(e, g);
    cst_free(g);
    return true;
}

void cst_evict_ghost_make(struct cst_evict *e, const struct cst_evict_entry *entry, unsigned list,
                          size_t max) {
    struct cst_evict_ghost *g = NULL;

    if (!e->ops->born) /* which took it already */
        (void)cst_evict_ghost_take(e, entry->hash, NULL);
    while (e->n_ghosts[0] + e->n_ghosts[1] >= max) {
        g = cst_free(g);
        g = oldest_ghost(e);
        if (!g)
            return;
        ghost_unlink(e, g);
    }
    if (!g && sizeof(*g) + cst_hashmap_growth(&e->ghost_map) > e->room)
        return;
    if (!g)
        g = cst_calloc(1, sizeof(*g));
    if (!g)
        return;
    if (cst_hashmap_insert(&e->ghost_map, &g->node, entry->hash)) {
        cst_free(g);
        return;
    }
    g->list = (uint8_t)list;
    g->uses = entry->uses;
    cst_list_append(&e->ghosts[list], &g->link);
    e->n_ghosts[list]++;
}

size_t cst_evict_bytes(const struct cst_evict *e) {
    return (e->n_ghosts[0] + e->n_ghosts[1]) * sizeof(struct cst_evict_ghost) +
           cst_hashmap_bytes(&e->ghost_map);
}
