/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns slabs and which of their slots are free.
 * Invariants: 1. a slab is in its space's free list exactly while it has free slots, and in
 * store->empty exactly while it has no used ones; 2. store->slab_bytes counts a slab from
 * cst_slab_make() until it is retired, held_bytes from then until its last holder drops it; 3. a
 * slab belongs to one space from birth to death: its memory is never handed to another; 4. owners[]
 * names the block of each used slot that has finished bytes.
 * Threads: loop only; making (prefaulting) and dropping (unmapping) the memory are jobs, since both
 * take milliseconds.
 */
#include "store/slab.h"

#include "base/err.h"
#include "base/mem.h"
#include "store/core.h"

#include <assert.h>
#include <errno.h>

uint64_t cst_packed_class_bytes(uint32_t klass) {
    return (uint64_t)(CST_PACKED_MIN / 8) * (8 + klass % 8) << klass / 8;
}

uint32_t cst_packed_class(uint64_t n) {
    uint32_t octave = 0, eighth = 0;

    while (cst_packed_class_bytes(8 * (octave + 1)) <= n)
        octave++;
    while (cst_packed_class_bytes(8 * octave + eighth) < n)
        eighth++;
    return 8 * octave + eighth;
}

static size_t meta_bytes(uint64_t n_slots) {
    return sizeof(struct cst_slab_slots) +
           n_slots * (sizeof(struct cst_block *) + sizeof(uint32_t));
}

size_t cst_slab_index_bytes(const struct cst_store *store, uint64_t n_slots) {
    return meta_bytes(n_slots) + cst_hashmap_growth(&store->slab_map);
}

struct cst_list *cst_slab_free_list(const struct cst_slab_slots *s) {
    struct cst_space *space = s->slab.space;

    return s->slab.packed ? &space->packed_free[s->klass] : &space->hot_free;
}

static void make_run(struct cst_job *job) {
    struct cst_slab_slots *s = cst_container_of(job, struct cst_slab_slots, job);

    struct cst_mem_slab mem = CST_MEM_SLAB_NULL;

    s->made = s->slab.space->store->env.mem->slab_make(&mem, s->slab.mem.size, CST_SLAB_READ_ONLY);
    if (!s->made)
        s->slab.mem = mem;
}

/* The struct goes; its memory is not there or was dropped. */
static void forget(struct cst_slab_slots *s) {
    struct cst_space *space = s->slab.space;

    space->n_slabs--;
    cst_space_index_add(space, -(int64_t)meta_bytes(s->n_slots));
    cst_free(s);
}

/* The slab joins (1) or leaves (-1) its space's account. */
static void count(const struct cst_slab_slots *s, int sign) {
    struct cst_space *space = s->slab.space;
    uint64_t bytes = sign > 0 ? s->slab.mem.size : -s->slab.mem.size;

    if (s->slab.packed) {
        space->stats.packed_slab_bytes += bytes;
    } else {
        space->stats.hot_slab_bytes += bytes;
        space->n_hot_slabs += (size_t)sign;
    }
}

static void add(struct cst_slab_slots *s) {
    struct cst_store *store = s->slab.space->store;

    s->touched = store->uses;
    cst_list_append(&store->slabs, &s->lru);
    cst_list_append(&store->empty, &s->empty);
    cst_list_append(cst_slab_free_list(s), &s->free);
    count(s, 1);
}

/* The machine is out of memory or files, whatever the limits say. */
static void back_off(struct cst_store *store, int status) {
    if (store->env.slab_failed)
        store->env.slab_failed(store->env.arg, status);
    store->slabs_after_ns = cst_store_now(store) + CST_NS_PER_S;
}

static void make_done(struct cst_job *job) {
    struct cst_slab_slots *s = cst_container_of(job, struct cst_slab_slots, job);
    struct cst_space *space = s->slab.space;
    struct cst_store *store = space->store;
    uint64_t size = s->slab.mem.size;

    cst_store_enter(space);
    *(s->slab.packed ? &space->making_packed : &space->making_hot) = false;
    if (!s->made)
        s->made = cst_map_insert(space, &store->slab_map, &s->by_id,
                                 cst_hash_u64(store->seed[0], s->slab.id));
    if (s->made) {
        store->env.mem->slab_drop(&s->slab.mem); /* the map may be what failed */
        store->slab_bytes -= size;
        back_off(store, s->made);
        forget(s);
    } else {
        add(s);
    }
    cst_room_serve(space);
    cst_store_leave(space);
}

int cst_slab_make(struct cst_space *space, bool packed, uint32_t klass, uint64_t slot_bytes,
                  uint64_t size) {
    uint32_t n = (uint32_t)(size / slot_bytes);
    size_t meta = meta_bytes(n);
    struct cst_slab_slots *s = cst_calloc(1, meta);

    if (!s) {
        back_off(space->store, -ENOMEM);
        return cst_err(-ENOMEM);
    }
    s->slab = (struct cst_slab){
        .id = ++space->store->last_slab, .packed = packed, .space = space, .mem = CST_MEM_SLAB_NULL
    };
    s->slab.mem.size = size;
    s->klass = klass;
    s->slot_bytes = slot_bytes;
    s->n_slots = n;
    s->stack = (uint32_t *)(void *)((char *)s + offsetof(struct cst_slab_slots, owners) +
                                    n * sizeof(struct cst_block *));
    for (uint32_t i = 0; i < n; i++)
        s->stack[i] = n - 1 - i;
    cst_list_init(&s->lru);
    cst_list_init(&s->free);
    cst_list_init(&s->empty);
    s->job = (struct cst_job){ .run = make_run, .done = make_done };
    space->n_slabs++;
    space->store->slab_bytes += size;
    cst_space_index_add(space, (int64_t)meta);
    *(packed ? &space->making_packed : &space->making_hot) = true;
    cst_store_submit(space, &s->job, packed ? CST_JOB_BACKGROUND : CST_JOB_FETCH);
    return 0;
}

uint32_t cst_slab_take(struct cst_slab_slots *s) {
    uint32_t slot;

    assert(s->used < s->n_slots && !s->slab.retired);
    slot = s->stack[s->n_slots - ++s->used];
    if (s->used == 1)
        cst_list_unlink(&s->empty);
    if (s->used == s->n_slots)
        cst_list_unlink(&s->free);
    return slot;
}

void cst_slab_give(struct cst_slab_slots *s, uint32_t slot) {
    assert(s->used && slot < s->n_slots);
    s->owners[slot] = NULL;
    s->stack[s->n_slots - s->used--] = slot;
    if (s->used + 1 == s->n_slots)
        cst_list_append(cst_slab_free_list(s), &s->free);
    if (!s->used) {
        cst_list_append(&s->slab.space->store->empty, &s->empty);
        cst_list_unlink(&s->free); /* fill the others first */
        cst_list_append(cst_slab_free_list(s), &s->free);
    }
}

static void drop_run(struct cst_job *job) {
    struct cst_slab_slots *s = cst_container_of(job, struct cst_slab_slots, job);

    s->slab.space->store->env.mem->slab_drop(&s->slab.mem);
}

static void drop_done(struct cst_job *job) {
    struct cst_slab_slots *s = cst_container_of(job, struct cst_slab_slots, job);
    struct cst_space *space = s->slab.space;

    cst_store_enter(space);
    forget(s);
    cst_store_leave(space);
}

static void drop(struct cst_slab_slots *s) {
    struct cst_space *space = s->slab.space;

    cst_hashmap_remove(&space->store->slab_map, &s->by_id);
    s->job = (struct cst_job){ .run = drop_run, .done = drop_done };
    cst_store_submit(space, &s->job, CST_JOB_FETCH);
}

void cst_slab_retire(struct cst_slab_slots *s) {
    struct cst_space *space = s->slab.space;
    struct cst_store *store = space->store;

    assert(!s->used && !s->leases && !s->busy && !s->slab.retired);
    cst_list_unlink(&s->lru);
    cst_list_unlink(&s->free);
    cst_list_unlink(&s->empty);
    count(s, -1);
    s->slab.retired = true;
    store->slab_bytes -= s->slab.mem.size;
    if (!s->slab.holders) {
        drop(s);
        return;
    }
    store->held_bytes += s->slab.mem.size;
    space->stats.held_bytes += s->slab.mem.size;
    cst_list_append(&store->retired, &s->lru);
    s->slab.holders++; /* the callback may end the last one */
    if (store->env.slab_retire)
        store->env.slab_retire(store->env.arg, &s->slab);
    cst_slab_unhold(&s->slab);
}

void cst_slab_free(struct cst_slab_slots *s) {
    struct cst_store *store = s->slab.space->store;

    if (s->slab.retired) {
        store->held_bytes -= s->slab.mem.size;
        s->slab.space->stats.held_bytes -= s->slab.mem.size;
    } else {
        store->slab_bytes -= s->slab.mem.size;
        count(s, -1);
    }
    cst_hashmap_remove(&store->slab_map, &s->by_id);
    cst_list_unlink(&s->lru);
    cst_list_unlink(&s->free);
    cst_list_unlink(&s->empty);
    store->env.mem->slab_drop(&s->slab.mem);
    forget(s);
}

void cst_slab_touch(struct cst_slab_slots *s, uint64_t now) {
    s->touched = now;
    cst_list_unlink(&s->lru);
    cst_list_append(&s->slab.space->store->slabs, &s->lru);
}

void cst_slab_hold(struct cst_slab *slab) {
    slab->holders++;
}

void cst_slab_unhold(struct cst_slab *slab) {
    struct cst_slab_slots *s = cst_slab_slots(slab);
    struct cst_space *space = slab->space;

    assert(slab->holders);
    if (--slab->holders || !slab->retired)
        return;
    cst_list_unlink(&s->lru);
    space->store->held_bytes -= slab->mem.size;
    space->stats.held_bytes -= slab->mem.size;
    drop(s);
}

static bool id_is(const struct cst_hnode *node, const void *key) {
    return cst_container_of(node, struct cst_slab_slots, by_id)->slab.id == *(const uint32_t *)key;
}

struct cst_slab *cst_store_slab(struct cst_store *store, uint32_t id) {
    struct cst_hnode *node =
        cst_hashmap_find(&store->slab_map, cst_hash_u64(store->seed[0], id), id_is, &id);

    return node ? &cst_container_of(node, struct cst_slab_slots, by_id)->slab : NULL;
}
