/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the memory of nodes that is made ahead of time. The first touch of a node's memory takes as
 * long as all else that a start does for its block; so while very many are to come, another thread
 * touches it.
 * Invariants: 1. at most one job, counted in store->jobs; 2. what is ahead is never more than two
 * pieces, and gone once no more nodes are to come. Loop thread, but for the job.
 */
#include "store/core.h"

enum {
    PAGES = 16, /* of a piece: more than is used up until the job's end is seen */
    PIECE = PAGES * CST_POOL_PAGE
};

static void make(struct cst_job *job) {
    cst_container_of(job, struct cst_nodes_ahead, job)->memory = cst_pool_memory(PAGES);
}

static void made(struct cst_job *job) {
    struct cst_nodes_ahead *a = cst_container_of(job, struct cst_nodes_ahead, job);
    struct cst_store *store = cst_container_of(a, struct cst_store, ahead);

    if (a->memory)
        cst_pool_give(&store->nodes, a->memory, PAGES);
    a->busy = false;
    store->jobs--;
    if (!a->bytes)
        cst_pool_trim(&store->nodes);
}

void cst_nodes_ahead(struct cst_store *store, uint64_t bytes) {
    struct cst_nodes_ahead *a = &store->ahead;
    uint64_t have = cst_pool_ahead(&store->nodes);

    a->bytes = bytes;
    if (!bytes)
        cst_pool_trim(&store->nodes);
    if (a->busy || have > PIECE || CST_MIN(bytes, cst_room_left(store)) < have + PIECE)
        return;
    a->busy = true;
    a->job = (struct cst_job){ .run = make, .done = made };
    store->jobs++;
    store->env.jobs->submit(store->env.jobs, &a->job, CST_JOB_BACKGROUND);
}
