/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns encodes: the background way from a hot copy to a packed one.
 *
 *   dirty -> ENCODE (job: check, encode into a buffer) -> waiting for a slot -> MOVE (job: into
 *   the slot) -> packed
 *
 * Invariants: 1. at most CST_ENCODES_MAX at a time, waiting ones included, each with at most
 * CST_ENCODE_FREE bytes of heap that no memory limit counts: larger ones are part of the store's
 * memory and only begin when there is room; 2. the hot copy is pinned while it is read; 3. a block
 * of an exact space gets exact presets only; 4. a block that doesn't shrink by a sixteenth stays as
 * it is: packing it would only cost a decode; 5. only committed bytes are encoded, never what a
 * lossy frame gave back. Loop thread, but for the jobs, which touch the copy, the buffer and the
 * slot.
 */
#include "base/crc32c.h"
#include "base/err.h"
#include "base/macros.h"
#include "base/mem.h"
#include "codec/codec.h"
#include "store/choice.h"
#include "store/core.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

struct encode {
    struct cst_job job;
    struct cst_list link; /* space->wait_encodes */
    struct cst_block *block;
    struct cst_slab_slots *slab;
    uint32_t slot;
    const uint8_t *source;
    uint8_t *frame; /* owned */
    size_t len;
    uint32_t crc;
    struct cst_choices choices;
    uint32_t used;              /* the choice that was made */
    bool missed;                /* an earlier one exceeded the bound */
    struct cst_side_data *side; /* a reference; NULL: none */
    struct cst_frame_info info;
    int result; /* 0, CST_STORE_E_CORRUPT, negative */
};

static int encode_as(struct encode *e, const struct cst_encode_params *choice, size_t cap,
                     uint8_t *work, size_t work_len) {
    const struct cst_block *b = e->block;
    const struct cst_descriptor *desc = b->space->desc;
    struct cst_encode_params params = *choice;

    /* A flat block's place is unknown: it may be the first one. */
    params.tokens = b->space->kind == CST_KIND_FLAT ? desc->block_tokens : b->n_tokens;
    params.first_position = b->depth * desc->block_tokens;
    return cst_frame_encode(e->frame, cap, e->source, desc, &params, work, work_len, &e->len,
                            &e->info);
}

static int encode(struct encode *e) {
    const struct cst_block *b = e->block; /* pinned */
    const struct cst_descriptor *desc = b->space->desc;
    size_t cap = cst_frame_bound(desc), work_len = 0;
    cst_auto(cst_freep) uint8_t *heap = NULL;
    uint8_t *work;
    int r = CST_CODEC_E_PRESET;

    if (cst_crc32c(0, e->source, b->hot.length) != b->hot.crc)
        return CST_STORE_E_CORRUPT;
    for (unsigned i = 0; i < e->choices.n; i++)
        work_len = CST_MAX(work_len, cst_codec_work_size(desc, e->choices.try[i].preset));
    e->frame = cst_malloc(cap);
    heap = cst_malloc(work_len + CST_SLOT_ALIGN);
    if (!e->frame || !heap)
        return cst_err(-ENOMEM);
    work = heap + (-(uintptr_t)heap & (CST_SLOT_ALIGN - 1));
    for (e->used = 0; e->used < e->choices.n; e->used++) {
        r = encode_as(e, &e->choices.try[e->used], cap, work, work_len);
        if (r != CST_CODEC_E_BOUND && r != CST_CODEC_E_PRESET && r != CST_CODEC_E_SIDE)
            break;
        e->missed |= r == CST_CODEC_E_BOUND;
    }
    if (r)
        e->len = cap; /* no preset takes it: it doesn't shrink */
    else
        e->crc = cst_crc32c(0, e->frame, e->len);
    return 0;
}

/* The encode is over; e is gone. Called between enter and leave. */
static void end(struct encode *e) {
    struct cst_block *b = e->block;
    struct cst_space *space = b->space;

    cst_list_unlink(&e->link);
    e->side = cst_side_unref(e->side);
    b->encoding = false;
    space->encodes--;
    space->store->encodes--;
    space->store->encode_bytes -= space->encode_bytes;
    if (b->dead)
        cst_block_reap(b);
    else
        cst_block_settle(b, CST_EVICT_WARM);
    cst_free(e->frame);
    cst_free(e);
}

static void back_off(struct cst_space *space) {
    space->encode_failed_ns = cst_store_now(space->store);
    space->encode_fails += space->encode_fails < 6;
}

static bool shrinks(const struct encode *e) {
    uint64_t block = e->block->space->desc->block_bytes;

    return cst_packed_class_bytes(cst_packed_class(e->len)) <= block - block / 16;
}

static void encode_job(struct cst_job *job) {
    struct encode *e = cst_container_of(job, struct encode, job);

    e->result = encode(e);
}

static void encode_done(struct cst_job *job) {
    struct encode *e = cst_container_of(job, struct encode, job);
    struct cst_block *b = e->block;
    struct cst_space *space = b->space;

    cst_store_enter(space);
    cst_copy_unpin(&b->hot);
    if (!b->dead && e->result == CST_STORE_E_CORRUPT)
        (void)cst_block_remove(b, CST_GONE_CORRUPT);
    else if (e->result < 0)
        back_off(space);
    else if (!e->result && !b->dead)
        b->unpackable = !shrinks(e);
    if (b->dead || e->result || b->unpackable)
        end(e);
    else
        cst_list_append(&space->wait_encodes, &e->link);
    cst_room_serve(space);
    cst_encode_kick_all(space->store);
    cst_store_leave(space);
}

static void move_job(struct cst_job *job) {
    struct encode *e = cst_container_of(job, struct encode, job);

    memcpy(cst_slot_data(e->slab, e->slot), e->frame, e->len);
    e->frame = cst_free(e->frame);
}

static void move_done(struct cst_job *job) {
    struct encode *e = cst_container_of(job, struct encode, job);
    struct cst_block *b = e->block;
    struct cst_space *space = b->space;

    cst_store_enter(space);
    e->slab->busy--;
    if (b->dead) {
        cst_slab_give(e->slab, e->slot);
    } else {
        assert(space->klass != CST_CLASS_LOSSLESS || cst_preset_is_exact(e->info.preset));
        cst_copy_set(&b->packed, b, e->slab, e->slot, (uint32_t)e->len, e->crc);
        b->preset = (uint8_t)e->info.preset;
        b->error = e->info.error;
        if (e->info.side_version)
            b->side = cst_steal(&e->side);
        cst_learn_note(space, &e->info, e->missed);
        space->stats.encodes++;
        space->stats.fallbacks += e->missed;
        space->encode_fails = 0;
    }
    end(e);
    cst_room_serve(space);
    cst_encode_kick_all(space->store);
    cst_store_leave(space);
}

void cst_encode_serve(struct cst_space *space) {
    struct cst_list *it;

    while ((it = cst_list_first(&space->wait_encodes))) {
        struct encode *e = cst_list_entry(it, struct encode, link);
        int r = e->block->dead ? CST_ROOM_FULL
                               : cst_room_packed(space, e->len, e->block->used, &e->slab, &e->slot);

        if (r == CST_ROOM_WAIT)
            return;
        if (r) {
            if (!e->block->dead) /* that one asked for no room */
                back_off(space);
            end(e);
            continue;
        }
        cst_list_unlink(&e->link);
        e->slab->busy++;
        e->job = (struct cst_job){ .run = move_job, .done = move_done };
        cst_store_submit(space, &e->job, CST_JOB_BACKGROUND);
    }
}

static bool start(struct cst_space *space) {
    struct cst_block *b = cst_list_entry(space->dirty.next, struct cst_block, file);
    struct encode *e = cst_calloc(1, sizeof(*e));

    if (!e) {
        back_off(space);
        return false;
    }
    assert(b->hot.crc == b->crc);
    cst_list_init(&e->link);
    e->block = b;
    e->source = cst_slot_data(b->hot.slab, b->hot.slot);
    e->side = cst_side_newest(space) ? cst_side_ref(cst_side_newest(space)) : NULL;
    cst_choices(&e->choices, space->klass, cst_store_preset(space->store, space->klass),
                e->side ? &e->side->side : NULL);
    b->encoding = true;
    cst_copy_pin(&b->hot);
    cst_block_settle(b, CST_EVICT_WARM);
    space->encodes++;
    space->store->encodes++;
    space->store->encode_bytes += space->encode_bytes;
    e->job = (struct cst_job){ .run = encode_job, .done = encode_done };
    cst_store_submit(space, &e->job, CST_JOB_BACKGROUND);
    return true;
}

/* After n failures in a row nothing is tried for 2^(n-1) s, or 1 s when a slot is wanted. */
static bool is_backing_off(const struct cst_space *space, bool wanted) {
    uint64_t since = cst_store_now(space->store) - space->encode_failed_ns;
    unsigned n = space->encode_fails;

    return n && since < CST_NS_PER_S << (wanted ? 0 : n - 1);
}

static bool may_start(const struct cst_space *space, bool wanted) {
    const struct cst_store *store = space->store;

    size_t most = space->desc->block_bytes > CST_ENCODES_MAX_BLOCK ? 1 : CST_ENCODES_MAX;

    return store->encodes < most && !cst_list_is_empty(&space->dirty) &&
           !is_backing_off(space, wanted) && cst_room_has(store, space->encode_bytes) &&
           cst_room_packed_is_likely(space) && (wanted || !cst_learn_waits(space));
}

bool cst_encode_kick(struct cst_space *space) {
    if (may_start(space, true))
        (void)start(space);
    return space->encodes;
}

/* Spaces take turns. */
void cst_encode_kick_all(struct cst_store *store) {
    struct cst_list *it, *stop = NULL;

    while (store->encodes < CST_ENCODES_MAX && (it = cst_list_first(&store->dirty_spaces)) &&
           it != stop) {
        struct cst_space *space = cst_list_entry(it, struct cst_space, dirty_link);

        cst_list_unlink(it);
        cst_list_append(&store->dirty_spaces, it);
        if (may_start(space, false) && start(space))
            stop = NULL;
        else if (!stop)
            stop = it;
    }
}
