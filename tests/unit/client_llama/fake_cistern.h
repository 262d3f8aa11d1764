/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of cistern.h that the glue calls, over an array in this process, with switches for what
 * goes wrong. Linked instead of libcistern.
 */
#pragma once

#include <cistern/cistern.h>

struct cistern_client {
    int unused;
};
extern struct cistern_client fake_client;

struct fake_store {
    int32_t fail_open, fail_lookup, fail_acquire, fail_reserve,
        fail_commit;    /* statuses; 0: works */
    size_t lost_from;   /* acquire finds no block from this index of its call on; 0: finds all */
    size_t slots_max;   /* reserve gives at most so many slots a call, then BUSY; 0: no limit */
    size_t busy_key;    /* this index of a reserve call is KEY_BUSY; 0: none */
    size_t pending_key; /* commit answers PENDING for this index of its call; 0: none */
    size_t wrong_size;  /* leases and slots are so many bytes shorter */
    /* what happened */
    size_t leases, slots;                 /* held now */
    size_t acquires, reserves, commits;   /* calls */
    size_t spaces;                        /* open now */
    const cistern_descriptor *descriptor; /* of the last cistern_space_open(), copied */
    cistern_space_options options;
};
extern struct fake_store fake_store;

void fake_store_reset(void); /* forgets all blocks and switches */
size_t fake_store_blocks(void);
