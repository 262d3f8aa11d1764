/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The staging slab of one connection: where a client writes blocks and long lists. Made by a
 * worker (it takes milliseconds), charged to the uid, passed to the client once.
 *
 *     0                                    lists            size
 *     | slots, handed out in whole pages   | lists of the client |
 *
 * Loop thread only, but for the job.
 */
#pragma once

#include "base/job.h"
#include "daemon/quota.h"
#include "gpu/gpu.h"

#include <stdbool.h>
#include <stdint.h>

struct cst_session;

enum cst_staging_state { CST_STAGING_NONE, CST_STAGING_MAKING, CST_STAGING_READY };

struct cst_staging {
    enum cst_staging_state state;
    bool passed; /* the client has the descriptor */
    int error;   /* why the last try to make it failed; 0: it did not */
    struct cst_mem_slab mem;
    const struct cst_mem_ops *ops;
    uint64_t size, lists;
    struct cst_charge charge;
    struct cst_job job;
    uint64_t *taken; /* a bit per page of the slots' part */
    size_t n_pages, next;
    void (*drop_done)(struct cst_session *session);
};

/* Begins to make a slab of `bytes` (0: the configured size, less when little is left) that holds at
 * least 4 blocks. The session's parked packet is handled when it is there. 0, CST_QUOTA_E_FULL or
 * -ENOMEM. State must be NONE. */
int cst_staging_make(struct cst_session *session, uint64_t bytes, uint64_t block_bytes);

/* Room for n bytes: true and the offset, or false. State must be READY. */
bool cst_staging_take(struct cst_staging *staging, uint64_t n, uint64_t *offset);
void cst_staging_give(struct cst_staging *staging, uint64_t offset, uint64_t n);

/* Gives the memory back on a worker, then calls done on the loop. */
void cst_staging_drop(struct cst_session *session, void (*done)(struct cst_session *session));
