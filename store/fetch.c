/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the leases: who reads which copy.
 * Invariants: 1. a leased fetch counts once in its copy, its slab, its space and the store; 2. a
 * waiting fetch is in its block's waiters, a finished one in store->finished_fetches until it is
 * told or released; a fetch that succeeded late holds its lease before it is told.
 * Loop thread only. The way of a hot block allocates nothing and does no system call.
 */
#include "store/core.h"
#include "store/prefix_trie.h"

#include <assert.h>

enum { IDLE, WAITING, LEASED_HOT, LEASED_PACKED, FAILED };

static void fill(struct cst_location *loc, const struct cst_block *b, const struct cst_copy *copy,
                 bool packed) {
    loc->slab = &copy->slab->slab;
    loc->offset = cst_slot_offset(copy->slab, copy->slot);
    loc->length = copy->length;
    loc->crc32c = copy->crc;
    loc->tokens = b->space->kind == CST_KIND_FLAT ? b->space->desc->block_tokens : b->n_tokens;
    loc->tier = packed ? CST_TIER_PACKED : CST_TIER_HOT;
    loc->preset = packed ? b->preset : 0;
    loc->packed = packed;
}

void cst_fetch_lease(struct cst_fetch *fetch, struct cst_block *b, bool packed) {
    struct cst_copy *copy = packed ? &b->packed : &b->hot;
    struct cst_space_stats *s = &b->space->stats;

    fill(&fetch->loc, b, copy, packed);
    cst_list_unlink(&fetch->link);
    fetch->block = b;
    fetch->state = packed ? LEASED_PACKED : LEASED_HOT;
    copy->leases++;
    copy->slab->leases++;
    b->space->store->leases++;
    s->leases++;
    s->served_blocks++;
    s->served_bytes += fetch->loc.length;
    s->served_tokens += fetch->loc.tokens;
    s->prefetch_used += b->prefetched;
    b->prefetched = false;
    b->hits += b->hits < UINT16_MAX;
    cst_block_use(b);
    cst_block_settle(b, CST_EVICT_USED);
}

static int wait_for(struct cst_fetch *fetch, struct cst_block *b) {
    int r = 0;

    fetch->block = b;
    fetch->state = WAITING;
    cst_list_append(&b->waiters, &fetch->link);
    cst_block_settle(b, CST_EVICT_WARM);
    if (b->decode || b->read)
        b->space->stats.merged_fetches++;
    if (b->read)
        r = cst_cold_hurry(b);
    else if (!b->decode)
        r = b->packed.slab ? cst_decode_start(b) : cst_cold_fetch(b);
    if (!r)
        return CST_STORE_E_PENDING;
    cst_fetch_release(fetch);
    return r;
}

int cst_fetch_start(struct cst_space *space, const uint8_t key[32], enum cst_fetch_mode mode,
                    struct cst_fetch *fetch) {
    struct cst_block *b = cst_trie_find(space, key);

    fetch->state = IDLE;
    fetch->mode = (uint8_t)mode;
    cst_list_init(&fetch->link);
    space->stats.acquires++;
    if (!b || !b->visible || cst_block_is_expired(b))
        return CST_STORE_E_NOT_FOUND;
    if (mode == CST_FETCH_PACKED && b->packed.slab)
        cst_fetch_lease(fetch, b, true);
    else if (b->hot.slab)
        cst_fetch_lease(fetch, b, false);
    else
        return wait_for(fetch, b);
    return 0;
}

static void lease_end(struct cst_fetch *fetch) {
    struct cst_block *b = fetch->block;
    struct cst_space *space = b->space;
    struct cst_copy *copy = fetch->state == LEASED_PACKED ? &b->packed : &b->hot;

    assert(copy->leases && copy->slab->leases);
    copy->leases--;
    copy->slab->leases--;
    space->store->leases--;
    space->stats.leases--;
    if (b->dead)
        cst_block_reap(b);
    else
        cst_block_settle(b, CST_EVICT_USED);
    if (!cst_list_is_empty(&space->wait_puts) || !cst_list_is_empty(&space->wait_decodes))
        cst_room_serve(space);
    cst_space_reap(space);
}

void cst_fetch_release(struct cst_fetch *fetch) {
    struct cst_block *b = fetch->block;

    if (fetch->state == IDLE)
        return;
    cst_list_unlink(&fetch->link);
    if (fetch->state == WAITING) {
        if (cst_list_is_empty(&b->waiters))
            cst_decode_orphan(b);
        cst_block_settle(b, CST_EVICT_WARM);
    } else if (fetch->state != FAILED) {
        lease_end(fetch);
    }
    fetch->state = IDLE;
    fetch->block = NULL;
}

void cst_fetch_finish(struct cst_fetch *fetch, int status) {
    struct cst_store *store = fetch->block->space->store;

    cst_list_unlink(&fetch->link);
    if (status) {
        fetch->block->space->stats.busy += status == CST_STORE_E_BUSY;
        fetch->state = FAILED;
        fetch->block = NULL;
    }
    fetch->status = status;
    cst_list_append(&store->finished_fetches, &fetch->link);
    cst_store_finish(store);
}

void cst_fetch_tell(struct cst_fetch *fetch) {
    cst_list_unlink(&fetch->link);
    if (fetch->state == FAILED)
        fetch->state = IDLE;
    fetch->ready(fetch, fetch->status);
}
