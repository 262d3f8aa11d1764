/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the slow check of all copies: one at a time, slab after slab, in slab order, so that a
 * flipped bit is found even in a block that nobody asks for. Invariants: 1. at most one scrub job;
 * 2. the copy it reads is pinned. Loop thread, but for the job.
 */
#include "base/crc32c.h"
#include "store/core.h"

enum { SLABS_A_SLICE = 64, SLOTS_A_SLICE = 1024 };

static void scrub_run(struct cst_job *job) {
    struct cst_scrub *s = cst_container_of(job, struct cst_scrub, job);

    s->crc = cst_crc32c(0, s->data, s->length);
}

static void scrub_done(struct cst_job *job) {
    struct cst_scrub *s = cst_container_of(job, struct cst_scrub, job);
    struct cst_block *b = s->block;
    struct cst_space *space = b->space;

    cst_store_enter(space);
    cst_copy_unpin(s->copy);
    s->block = NULL;
    if (b->dead)
        cst_block_reap(b);
    else if (s->crc != s->copy->crc)
        (void)cst_block_remove(b, CST_GONE_CORRUPT);
    else
        cst_block_settle(b, CST_EVICT_WARM);
    cst_room_serve(space);
    cst_store_leave(space);
}

static void check(struct cst_scrub *s, const struct cst_slab_slots *slab, struct cst_block *b) {
    s->block = b;
    s->copy = slab->slab.packed ? &b->packed : &b->hot;
    s->data = cst_slot_data(slab, s->copy->slot);
    s->length = s->copy->length;
    s->job = (struct cst_job){ .run = scrub_run, .done = scrub_done };
    cst_copy_pin(s->copy);
    cst_block_settle(b, CST_EVICT_WARM);
    cst_store_submit(b->space, &s->job, CST_JOB_BACKGROUND);
}

void cst_scrub_slice(struct cst_store *store) {
    struct cst_scrub *s = &store->scrub;
    unsigned slots = 0;

    for (unsigned i = 0; !s->block && i < SLABS_A_SLICE; i++) {
        struct cst_slab *slab = cst_store_slab(store, s->slab);
        struct cst_slab_slots *in = slab && !slab->retired ? cst_slab_slots(slab) : NULL;

        while (in && s->slot < in->n_slots) {
            struct cst_block *b = in->owners[s->slot];

            if (slots++ >= SLOTS_A_SLICE)
                return;
            s->slot++;
            if (b && !b->dead) {
                check(s, in, b);
                return;
            }
        }
        s->slab = s->slab < store->last_slab ? s->slab + 1 : 1;
        s->slot = 0;
    }
}
