/* SPDX-License-Identifier: Apache-2.0 */
/* What cold.c and cold_life.c share. Loop thread only. */
#pragma once

#include "store/core.h"
#include "store/disk_rate.h"

enum { CST_COLD_UNIT = 64 << 10 }; /* the arena's grain */

struct cst_cold {
    struct cst_store *store;
    struct cst_seg *seg;
    struct cst_aio *aio; /* the caller's */
    uint8_t *arena, *units;
    size_t n_units, held;
    bool registered;
    struct cst_list waiting;    /* spaces, until the engine takes stores again */
    struct cst_list wait_reads; /* for a buffer */
    struct cst_list wait_ahead; /* the same, behind them: for Lookups */
    size_t ahead_units;         /* of the arena, that those have */
    uint64_t ahead_bytes, ahead_max;
    struct cst_disk_rate rate;
    bool recovering, closing;
    struct cst_list kept; /* records for the next life (side_keep.c) */
    uint64_t kept_bytes;  /* of side data in them */
    bool keeping;
    bool drain_over;               /* the engine takes no more */
    uint64_t side_bytes;           /* of versions of side data that have a part of the tier */
    uint64_t namespace_bytes;      /* cap; 0: none */
    uint64_t drain_start;          /* blocks not on disk when the drain began */
    struct cst_block *last;        /* recovered last: mostly the parent of the next one */
    uint64_t expected, told;       /* records that recovery may find, and has found */
    uint64_t start_unix, start_ns; /* both clocks when recovery began: ages count from then */
    void (*recovered)(void *arg, int status);
    void (*note)(void *arg, const char *sentence);
    void *arg, *note_arg;
};

struct cst_cold_read {
    struct cst_seg_read read;
    struct cst_list link;
    struct cst_cold *cold;
    struct cst_block *block;
    uint8_t *buffer;
    void *heap;
    uint64_t bytes;
    struct cst_side_data *side; /* that the frame needs, a reference; NULL: none */
    bool ahead;                 /* for a Lookup: read before anybody asks */
    /* then, while it goes into its slot */
    uint8_t preset;
    struct cst_job job;
    struct cst_slab_slots *slab;
    uint32_t slot, crc;
};

struct cst_cold_spill {
    struct cst_seg_store store;
    struct cst_block *block;
    struct cst_copy *copy; /* NULL: */
    uint8_t *frame;        /* heap, owned */
    uint8_t parent[CST_KEY_SIZE];
    struct cst_side_data *side; /* that it needs, a reference; NULL: none */
    uint64_t version;           /* of it */
};

/* The read begins, when its turn is; by r->ahead: before or behind what Lookups want. */
void cst_cold_queue(struct cst_cold_read *r);
void cst_cold_fail_waiters(struct cst_block *b, int status);
/* A cold block is read before anybody asks for it. False: not now. */
bool cst_cold_ahead(struct cst_block *b);

/* ---- cold_ahead.c ---- */

/* The next one to begin; NULL: none, or there are enough. */
struct cst_cold_read *cst_cold_ahead_next(const struct cst_cold *c);
void cst_cold_ahead_begun(struct cst_cold_read *r);
/* It is over, or a read like others from now on. */
void cst_cold_ahead_end(struct cst_cold_read *r);
/* It has arrived and nobody waits: it is for a slot, served by cst_room_serve(). */
void cst_cold_keep(struct cst_block *b, struct cst_cold_read *r);

/* An operation on disk keeps the space; finish() ends what cst_store_enter() began. */
void cst_cold_begin(struct cst_space *space);
void cst_cold_finish(struct cst_space *space);

/* Recovery has ended. */
void cst_cold_recovered(struct cst_cold *c, int status);

/* The block has this record, which needs this side data (NULL: none). */
void cst_cold_set(struct cst_block *b, struct cst_seg_ref ref, uint64_t bytes, uint8_t preset,
                  struct cst_side_data *side);

/* struct cst_seg_user */
void cst_cold_room(void *arg);
float cst_cold_value(void *arg, void *owner, bool *has_children);
void cst_cold_moved(void *arg, void *owner, struct cst_seg_ref ref);
void cst_cold_gone(void *arg, void *owner, enum cst_seg_gone why);
uint64_t cst_cold_pinned_until(void *arg, void *owner);
