/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns decodes: from a packed copy, or a frame that was read from disk, to a hot copy, once for all
 * fetches that wait for the block.
 * Invariants: 1. b->decode is the one decode of a block, waiting for a slot (in
 * space->wait_decodes) or running; 2. a running decode pins the frame (or owns the read's buffer)
 * and its slot; 3. the frame's checksum is checked before it is decoded, an exact block's against
 * the one of its commit. Loop thread, but for the job, which touches the frame, the slot and
 * itself.
 */
#include "base/crc32c.h"
#include "base/err.h"
#include "base/mem.h"
#include "codec/codec.h"
#include "store/cold.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

struct cst_decode {
    struct cst_job job;
    struct cst_list link;
    struct cst_block *block;
    struct cst_slab_slots *slab;
    uint32_t slot;
    bool running, exact;
    struct cst_cold_read *read; /* owned: the frame is in its buffer; NULL: the packed copy */
    const uint8_t *frame;
    size_t length;
    uint8_t preset;
    uint8_t *out;
    uint32_t crc;
    uint64_t ns;
    int result; /* 0, CST_STORE_E_CORRUPT, negative */
};

static int decode(struct cst_decode *d) {
    const struct cst_block *b = d->block; /* pinned: its copy and its space stay as they are */
    const struct cst_descriptor *desc = b->space->desc;
    struct cst_decode_params params = CST_DECODE_ALL;
    size_t work_len = cst_codec_work_size(desc, d->preset);
    cst_auto(cst_freep) uint8_t *heap = NULL;
    const struct cst_side_data *side;
    uint8_t *work;

    if (!d->read && cst_crc32c(0, d->frame, d->length) != b->packed.crc)
        return CST_STORE_E_CORRUPT;
    if (d->preset == CST_PRESET_NONE) {
        memcpy(d->out, d->frame, desc->block_bytes);
        d->crc = cst_crc32c(0, d->out, desc->block_bytes);
        return d->crc != b->crc ? CST_STORE_E_CORRUPT : 0;
    }
    heap = cst_malloc(work_len + CST_SLOT_ALIGN);
    if (!heap)
        return cst_err(-ENOMEM);
    work = heap + (-(uintptr_t)heap & (CST_SLOT_ALIGN - 1));
    side = d->read ? d->read->side : b->side;
    params.side = side ? &side->side : NULL;
    if (cst_frame_decode(d->out, desc->block_bytes, d->frame, d->length, desc, &params, work,
                         work_len))
        return CST_STORE_E_CORRUPT;
    d->crc = cst_crc32c(0, d->out, desc->block_bytes);
    return d->exact && d->crc != b->crc ? CST_STORE_E_CORRUPT : 0;
}

static void decode_job(struct cst_job *job) {
    struct cst_decode *d = cst_container_of(job, struct cst_decode, job);
    const struct cst_store *store = d->block->space->store;
    uint64_t start = cst_store_now(store);

    d->result = decode(d);
    d->ns = cst_store_now(store) - start;
}

static void succeed(struct cst_block *b, const struct cst_decode *d) {
    struct cst_space *space = b->space;
    struct cst_list *it;

    cst_copy_set(&b->hot, b, d->slab, d->slot, (uint32_t)space->desc->block_bytes, d->crc);
    space->stats.decodes++;
    space->decode_ns = space->decode_ns ? (7 * space->decode_ns + d->ns) / 8 : d->ns;
    cst_store_event(space, CST_EVENT_MOVED, b, CST_TIER_HOT);
    while ((it = cst_list_first(&b->waiters))) {
        struct cst_fetch *fetch = cst_list_entry(it, struct cst_fetch, link);

        cst_fetch_lease(fetch, b, false);
        fetch->loc.tier = d->read ? CST_TIER_COLD : CST_TIER_PACKED; /* where it was found */
        cst_fetch_finish(fetch, 0);
    }
    cst_block_settle(b, CST_EVICT_WARM);
}

static void fail(struct cst_block *b, int status) {
    struct cst_list *it;

    if (status == CST_STORE_E_CORRUPT) {
        (void)cst_block_remove(b, CST_GONE_CORRUPT);
        return;
    }
    while ((it = cst_list_first(&b->waiters)))
        cst_fetch_finish(cst_list_entry(it, struct cst_fetch, link), status);
    cst_block_settle(b, CST_EVICT_WARM);
}

static void free_decode(struct cst_decode *d) {
    if (d->read)
        cst_cold_read_end(d->read);
    cst_free(d);
}

static void decode_done(struct cst_job *job) {
    struct cst_decode *d = cst_container_of(job, struct cst_decode, job);
    struct cst_block *b = d->block;
    struct cst_space *space = b->space;

    cst_store_enter(space);
    if (!d->read)
        cst_copy_unpin(&b->packed);
    d->slab->busy--;
    b->decode = NULL;
    if (b->dead || d->result)
        cst_slab_give(d->slab, d->slot);
    if (b->dead)
        cst_block_reap(b);
    else if (d->result)
        fail(b, d->result);
    else
        succeed(b, d);
    free_decode(d);
    cst_room_serve(space);
    cst_store_leave(space);
}

static int add_decode(struct cst_block *b, struct cst_cold_read *read, const uint8_t *frame,
                      size_t length) {
    struct cst_decode *d = cst_calloc(1, sizeof(*d));

    assert(!b->decode);
    if (!d)
        return cst_err(-ENOMEM);
    d->block = b;
    d->read = read;
    d->frame = frame;
    d->length = length;
    d->preset = b->cold_preset;
    b->decode = d;
    cst_list_append(&b->space->wait_decodes, &d->link);
    cst_room_serve(b->space);
    return 0;
}

int cst_decode_start(struct cst_block *b) {
    assert(b->packed.slab);
    return add_decode(b, NULL, NULL, 0);
}

int cst_decode_start_cold(struct cst_block *b, struct cst_cold_read *read, const uint8_t *frame,
                          size_t length) {
    return add_decode(b, read, frame, length);
}

struct cst_decode *cst_decode_waiting(struct cst_space *space) {
    struct cst_list *it = cst_list_first(&space->wait_decodes);

    return it ? cst_list_entry(it, struct cst_decode, link) : NULL;
}

void cst_decode_run(struct cst_decode *d, struct cst_slab_slots *slab, uint32_t slot) {
    struct cst_block *b = d->block;

    cst_list_unlink(&d->link);
    d->slab = slab;
    d->slot = slot;
    d->running = true;
    d->out = cst_slot_data(slab, slot);
    if (!d->read) {
        d->frame = cst_slot_data(b->packed.slab, b->packed.slot);
        d->length = b->packed.length;
        d->preset = b->preset;
        cst_copy_pin(&b->packed);
    }
    d->exact = cst_preset_is_exact(d->preset);
    slab->busy++;
    d->job = (struct cst_job){ .run = decode_job, .done = decode_done };
    cst_store_submit(b->space, &d->job, CST_JOB_FETCH);
}

static void forget(struct cst_decode *d) {
    d->block->decode = NULL;
    cst_list_unlink(&d->link);
    free_decode(d);
}

void cst_decode_refuse(struct cst_decode *d, int status) {
    struct cst_block *b = d->block;

    forget(d);
    fail(b, status);
}

void cst_decode_orphan(struct cst_block *b) {
    if (b->decode && !b->decode->running)
        forget(b->decode);
}
