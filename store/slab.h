/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slabs of slots: the shared memory that copies of blocks live in. A hot slab has one slot per
 * block; a packed slab has slots of one size class. Loop thread only, but for the job that makes
 * the memory and jobs that were given a slot.
 */
#pragma once

#include "base/hashmap.h"
#include "store/store.h"

struct cst_block;

/* Slot sizes: 64-byte aligned; classes are eighths of powers of two, so at most 12.5 % apart. */
enum { CST_SLOT_ALIGN = 64, CST_PACKED_MIN = 512, CST_PACKED_CLASSES = 8 * 20 };

struct cst_slab_slots {
    struct cst_slab slab; /* what the daemon sees */
    struct cst_hnode by_id;
    struct cst_list lru;   /* store->slabs: the least recently used first; or store->retired */
    struct cst_list free;  /* of its space and class: slabs with free slots */
    struct cst_list empty; /* store->empty: no used slots */
    struct cst_job job;    /* makes the memory, or drops it */
    int made;              /* its result */
    uint32_t klass;        /* packed: size class */
    uint64_t slot_bytes;
    uint32_t n_slots, used;
    uint32_t leases;    /* held by fetches */
    uint32_t busy;      /* slots that jobs read or write */
    uint32_t clean;     /* hot: copies that can be dropped at once */
    uint32_t recode_at; /* packed: the slot that recode.c looks at next */
    uint64_t touched;
    uint32_t *stack;            /* free slots: the first n_slots - used entries */
    struct cst_block *owners[]; /* NULL: free, or still being filled */
};

/* Bytes of a packed slot of this class, and the smallest class whose slots hold n bytes. */
uint64_t cst_packed_class_bytes(uint32_t klass);
uint32_t cst_packed_class(uint64_t n);

/* Heap bytes that one more slab takes. */
size_t cst_slab_index_bytes(const struct cst_store *store, uint64_t n_slots);

/*
 * Starts making a slab of the space. Its bytes count from now on. When the memory is there, or when
 * it failed, the waiting work of the space goes on. 0 or -ENOMEM.
 */
int cst_slab_make(struct cst_space *space, bool packed, uint32_t klass, uint64_t slot_bytes,
                  uint64_t size);

/* Where slabs with free slots for the same use as this one are: of its space, hot or its class. */
struct cst_list *cst_slab_free_list(const struct cst_slab_slots *s);

/* Takes a free slot of a slab that has one. It has no owner yet. */
uint32_t cst_slab_take(struct cst_slab_slots *s);
/* Gives the slot back; its owner is forgotten. */
void cst_slab_give(struct cst_slab_slots *s, uint32_t slot);

/* The slab is empty: gives its memory back now (by a job: unmapping takes milliseconds), or when
 * its last holder drops it. */
void cst_slab_retire(struct cst_slab_slots *s);
/* At the end of the store: drops the memory whoever holds it. */
void cst_slab_free(struct cst_slab_slots *s);

/* A block in it is used now. */
void cst_slab_touch(struct cst_slab_slots *s, uint64_t now);

static inline struct cst_slab_slots *cst_slab_slots(const struct cst_slab *slab) {
    return cst_container_of(slab, struct cst_slab_slots, slab);
}

static inline uint64_t cst_slot_offset(const struct cst_slab_slots *s, uint32_t slot) {
    return s->slot_bytes * slot;
}

static inline uint8_t *cst_slot_data(const struct cst_slab_slots *s, uint32_t slot) {
    return s->slab.mem.base + cst_slot_offset(s, slot);
}
