/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns what is read from disk before anybody asks for it, because a Lookup found it there.
 *
 *   Lookup -> queued in c->wait_ahead -> read into a part of the arena -> waits for a slot in
 *   space->wait_keeps -> KEEP (job: into the slot) -> packed, or hot if the record has no frame
 *
 * Invariants
 *   1. b->read is set all the way: a fetch that comes meanwhile joins (cst_cold_hurry()) and is
 *      served from wherever the bytes are.
 *   2. At most ahead_max bytes are on the way, in at most half of the arena; none is begun while a
 *      fetch waits for the disk.
 *   3. Nobody loses memory for it: slots are free ones, or of slabs that memory has room for. What
 *      was read and isn't asked for is the first to go, like everything that was used long ago.
 *   4. The slot of a keep that runs is busy; one that waits for a slot is served by
 *      cst_room_serve(), as an encode that does.
 * Loop thread, but for the job, which touches the buffer and the slot.
 */
#include "base/crc32c.h"
#include "base/err.h"
#include "store/cold.h"
#include "store/prefix_trie.h"

#include <errno.h>
#include <string.h>

static size_t units_of(const struct cst_cold_read *r) {
    return (r->bytes + CST_COLD_UNIT - 1) / CST_COLD_UNIT;
}

/* ---- on the way ---- */

struct cst_cold_read *cst_cold_ahead_next(const struct cst_cold *c) {
    struct cst_list *it = cst_list_first(&c->wait_ahead);
    struct cst_cold_read *r = it ? cst_list_entry(it, struct cst_cold_read, link) : NULL;

    return r && c->ahead_units + units_of(r) <= c->n_units / 2 ? r : NULL;
}

void cst_cold_ahead_begun(struct cst_cold_read *r) {
    r->cold->ahead_units += units_of(r);
    r->block->space->stats.prefetched_blocks++;
}

void cst_cold_ahead_end(struct cst_cold_read *r) {
    if (!r->ahead)
        return;
    r->ahead = false;
    r->cold->ahead_bytes -= r->bytes;
    if (r->buffer)
        r->cold->ahead_units -= units_of(r);
}

/* Is there room that nobody else wants? */
static bool has_room(const struct cst_block *b) {
    const struct cst_space *space = b->space;
    const struct cst_list *slabs = b->cold_preset == CST_PRESET_NONE
                                       ? &space->hot_free
                                       : &space->packed_free[cst_packed_class(b->cold_bytes)];

    return !cst_list_is_empty(slabs) ||
           cst_room_has(space->store, space->store->options.memory / 8);
}

/* False: no more now, neither of this block nor of those behind it. */
static bool ahead(struct cst_cold *c, struct cst_block *b) {
    uint64_t bytes;

    if (cst_block_tier(b) != CST_TIER_COLD || b->read || b->decode)
        return true;
    bytes = cst_seg_read_bytes(c->seg, b->cold);
    return bytes <= c->n_units / 2 * CST_COLD_UNIT && c->ahead_bytes + bytes <= c->ahead_max &&
           has_room(b) && cst_cold_ahead(b);
}

void cst_space_prefetch(struct cst_space *space, const uint8_t *keys, size_t n) {
    struct cst_cold *c = space->store->cold;

    if (!c || !c->ahead_max || c->recovering || c->closing || space->store->draining ||
        space->ns->purging || cst_seg_is_off(c->seg) || space->in_memory == space->stats.blocks)
        return;
    for (size_t i = 0; i < n; i++) {
        struct cst_block *b = cst_trie_find(space, keys + i * CST_KEY_SIZE);

        if (!b || !b->visible || !ahead(c, b))
            return;
    }
}

/* ---- into memory ---- */

/* Whoever joined is served from what there is now. */
static void serve_waiters(struct cst_block *b) {
    struct cst_list *it;

    if (!cst_list_is_empty(&b->waiters) && !b->hot.slab && cst_decode_start(b))
        cst_cold_fail_waiters(b, cst_err(-ENOMEM));
    while (b->hot.slab && (it = cst_list_first(&b->waiters))) {
        struct cst_fetch *fetch = cst_list_entry(it, struct cst_fetch, link);

        cst_fetch_lease(fetch, b, false);
        fetch->loc.tier = CST_TIER_COLD; /* where it was found */
        cst_fetch_finish(fetch, 0);
    }
}

static bool is_raw(const struct cst_cold_read *r) {
    return r->preset == CST_PRESET_NONE;
}

static void keep_job(struct cst_job *job) {
    struct cst_cold_read *r = cst_container_of(job, struct cst_cold_read, job);
    uint8_t *out = cst_slot_data(r->slab, r->slot);

    memcpy(out, r->read.payload, r->read.payload_bytes);
    r->crc = cst_crc32c(0, out, r->read.payload_bytes);
}

static void take_copy(struct cst_block *b, struct cst_cold_read *r) {
    cst_copy_set(is_raw(r) ? &b->hot : &b->packed, b, r->slab, r->slot,
                 (uint32_t)r->read.payload_bytes, r->crc);
    if (!is_raw(r)) {
        b->preset = r->preset;
        b->side = cst_steal(&r->side);
    }
    b->prefetched = cst_list_is_empty(&b->waiters);
    b->space->stats.prefetch_used += !b->prefetched;
    cst_store_event(b->space, CST_EVENT_MOVED, b, cst_block_tier(b));
    b->holds++; /* it stays over the search for room */
    serve_waiters(b);
    b->holds--;
    cst_block_settle(b, CST_EVICT_COLD);
}

static void keep_done(struct cst_job *job) {
    struct cst_cold_read *r = cst_container_of(job, struct cst_cold_read, job);
    struct cst_block *b = r->block;
    struct cst_space *space = b->space;
    bool wrong = is_raw(r) && r->crc != b->crc;

    cst_store_enter(space);
    r->slab->busy--;
    b->read = NULL;
    if (b->dead || wrong)
        cst_slab_give(r->slab, r->slot);
    if (b->dead)
        cst_block_reap(b);
    else if (wrong)
        (void)cst_block_remove(b, CST_GONE_CORRUPT);
    else
        take_copy(b, r);
    cst_cold_read_end(r);
    cst_room_serve(space);
    cst_store_leave(space);
}

/* No room, or the block is gone. */
static void give_up(struct cst_cold_read *r) {
    struct cst_block *b = r->block;

    cst_list_unlink(&r->link);
    b->read = NULL;
    if (b->dead)
        cst_block_reap(b);
    else
        cst_block_settle(b, CST_EVICT_COLD);
    cst_cold_read_end(r);
}

/* False: what comes next has to wait, too. */
static bool serve(struct cst_cold_read *r) {
    struct cst_space *space = r->block->space;
    int status = CST_ROOM_FULL;

    if (!r->block->dead)
        status = is_raw(r) ? cst_room_hot_free(space, &r->slab, &r->slot)
                           : cst_room_packed_free(space, r->read.payload_bytes, &r->slab, &r->slot);
    if (status == CST_ROOM_WAIT)
        return false;
    if (status) {
        give_up(r);
        return true;
    }
    cst_list_unlink(&r->link);
    r->slab->busy++;
    r->job = (struct cst_job){ .run = keep_job, .done = keep_done };
    cst_store_submit(space, &r->job, CST_JOB_BACKGROUND);
    return true;
}

void cst_cold_keep_serve(struct cst_space *space) {
    struct cst_list *it;

    while ((it = cst_list_first(&space->wait_keeps)))
        if (!serve(cst_list_entry(it, struct cst_cold_read, link)))
            return;
}

void cst_cold_keep(struct cst_block *b, struct cst_cold_read *r) {
    b->read = r;
    r->preset = b->cold_preset;
    cst_list_append(&b->space->wait_keeps, &r->link);
}

/* ---- a fetch joins ---- */

int cst_cold_hurry(struct cst_block *b) {
    struct cst_cold_read *r = b->read;
    int status;

    if (!r->ahead)
        return 0;
    if (!r->buffer) { /* not begun: a read like others */
        cst_cold_ahead_end(r);
        cst_list_unlink(&r->link);
        cst_cold_queue(r);
        return 0;
    }
    if (cst_list_is_empty(&r->link)) /* being read, or put into its slot */
        return 0;
    cst_list_unlink(&r->link);
    b->read = NULL;
    b->space->stats.prefetch_used++;
    status = cst_decode_start_cold(b, r, r->read.payload, r->read.payload_bytes);
    if (status)
        cst_cold_read_end(r);
    return status;
}
