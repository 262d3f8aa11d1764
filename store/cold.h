/* SPDX-License-Identifier: Apache-2.0 */
/* What cold.c and cold_life.c share. Loop thread only. */
#pragma once

#include "store/core.h"

enum { CST_COLD_UNIT = 64 << 10 }; /* the arena's grain */

struct cst_cold {
    struct cst_store *store;
    struct cst_seg *seg;
    struct cst_aio *aio; /* the caller's */
    uint8_t *arena, *units;
    size_t n_units, held;
    bool registered;
    struct cst_list wait_reads; /* for a buffer */
    bool recovering, closing;
    bool drain_over;               /* the engine takes no more */
    uint64_t drain_start;          /* blocks not on disk when the drain began */
    struct cst_block *last;        /* recovered last: mostly the parent of the next one */
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
    uint64_t bytes, started_ns;
};

struct cst_cold_spill {
    struct cst_seg_store store;
    struct cst_block *block;
    struct cst_copy *copy; /* NULL: */
    uint8_t *frame;        /* heap, owned */
    uint8_t parent[CST_KEY_SIZE];
};

uint64_t cst_cold_unix(void); /* seconds since 1970 */

/* The block has this record. */
void cst_cold_set(struct cst_block *b, struct cst_seg_ref ref, uint64_t bytes, uint8_t preset);

/* struct cst_seg_user */
float cst_cold_value(void *arg, void *owner, bool *has_children);
void cst_cold_moved(void *arg, void *owner, struct cst_seg_ref ref);
void cst_cold_gone(void *arg, void *owner, enum cst_seg_gone why);
uint64_t cst_cold_pinned_until(void *arg, void *owner);
