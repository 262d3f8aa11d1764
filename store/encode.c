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
 * lossy frame gave back, but for a frame that is made smaller (recode.c), which accounts for what
 * it lost before; its frame is pinned until the new one has taken its place. Loop thread, but for
 * the jobs, which touch the copy, the buffer and the slot.
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
    bool again;       /* from the frame, to make it smaller */
    uint8_t *decoded; /* owned; then the source */
    uint8_t *frame;   /* owned */
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

/* The bytes to encode: those of the hot copy, or of the frame. */
static int take_source(struct encode *e, uint8_t *work, size_t work_len) {
    const struct cst_block *b = e->block;
    const struct cst_copy *copy = e->again ? &b->packed : &b->hot;
    const struct cst_descriptor *desc = b->space->desc;
    struct cst_decode_params params = CST_DECODE_ALL;

    if (cst_crc32c(0, e->source, copy->length) != copy->crc)
        return CST_STORE_E_CORRUPT;
    if (!e->again)
        return 0;
    e->decoded = cst_malloc(desc->block_bytes);
    if (!e->decoded)
        return cst_err(-ENOMEM);
    params.side = b->side ? &b->side->side : NULL;
    if (cst_frame_decode(e->decoded, desc->block_bytes, e->source, copy->length, desc, &params,
                         work, work_len))
        return CST_STORE_E_CORRUPT;
    e->source = e->decoded;
    return 0;
}

static int encode(struct encode *e) {
    const struct cst_block *b = e->block; /* pinned */
    const struct cst_descriptor *desc = b->space->desc;
    size_t cap = cst_frame_bound(desc), work_len = cst_codec_work_size(desc, b->preset);
    cst_auto(cst_freep) uint8_t *heap = NULL;
    uint8_t *work;
    int r;

    for (unsigned i = 0; i < e->choices.n; i++) {
        size_t need = cst_codec_work_size(desc, e->choices.try[i].preset);

        work_len = CST_MAX(work_len, need <= CST_DENSE_MAX ? need : 0);
    }
    e->frame = cst_malloc(cap);
    heap = cst_malloc(work_len + CST_SLOT_ALIGN);
    if (!e->frame || !heap)
        return cst_err(-ENOMEM);
    work = heap + (-(uintptr_t)heap & (CST_SLOT_ALIGN - 1));
    r = take_source(e, work, work_len);
    if (r)
        return r;
    r = CST_CODEC_E_PRESET;
    for (e->used = 0; e->used < e->choices.n; e->used++) {
        r = encode_as(e, &e->choices.try[e->used], cap, work, work_len);
        if (r != CST_CODEC_E_BOUND && r != CST_CODEC_E_PRESET && r != CST_CODEC_E_SIDE &&
            r != CST_CODEC_E_SMALL) /* needs more than CST_DENSE_MAX */
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
    if (e->again)
        cst_copy_unpin(&b->packed);
    b->encoding = false;
    space->encodes--;
    space->store->encodes--;
    space->store->encode_bytes -= space->encode_bytes;
    if (b->dead)
        cst_block_reap(b);
    else
        cst_block_settle(b, CST_EVICT_WARM);
    cst_free(e->decoded);
    cst_free(e->frame);
    cst_free(e);
}

static void back_off(struct cst_space *space) {
    space->encode_failed_ns = cst_store_now(space->store);
    space->encode_fails += space->encode_fails < 6;
}

static bool shrinks(const struct encode *e) {
    uint64_t block = e->block->space->desc->block_bytes;
    uint64_t slot = cst_packed_class_bytes(cst_packed_class(e->len));

    if (e->again) /* two size classes at least */
        return cst_packed_class(e->len) + 2 <= e->block->packed.slab->klass;
    return slot <= block - block / 16;
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
    if (!e->again)
        cst_copy_unpin(&b->hot);
    if (!b->dead && e->result == CST_STORE_E_CORRUPT)
        (void)cst_block_remove(b, CST_GONE_CORRUPT);
    else if (e->result < 0)
        back_off(space);
    else if (!e->result && !b->dead)
        *(e->again ? &b->recoded : &b->unpackable) = !shrinks(e);
    if (b->dead || e->result || (e->again ? b->recoded : b->unpackable))
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

/* The new frame takes the place of the old one, unless that is wanted by others now. */
static bool replace(struct encode *e) {
    struct cst_block *b = e->block;

    b->recoded = true;
    if (b->packed.leases || b->packed.busy > 1)
        return false;
    cst_copy_unpin(&b->packed);
    e->again = false;
    cst_block_drop_packed(b);
    return true;
}

static void move_done(struct cst_job *job) {
    struct encode *e = cst_container_of(job, struct encode, job);
    struct cst_block *b = e->block;
    struct cst_space *space = b->space;
    bool again = e->again;

    cst_store_enter(space);
    e->slab->busy--;
    if (b->dead || (e->again && !replace(e))) {
        cst_slab_give(e->slab, e->slot);
    } else {
        assert(space->klass != CST_CLASS_LOSSLESS || cst_preset_is_exact(e->info.preset));
        cst_copy_set(&b->packed, b, e->slab, e->slot, (uint32_t)e->len, e->crc);
        b->preset = (uint8_t)e->info.preset;
        b->error = e->info.error;
        if (e->info.side_version)
            b->side = cst_steal(&e->side);
        b->recoded = again;
        if (!again)
            cst_learn_note(space, &e->info, e->missed);
        space->stats.encodes += !again;
        space->stats.recodes += again;
        space->stats.fallbacks += e->missed && !again;
        space->encode_fails = 0;
    }
    end(e);
    cst_room_serve(space);
    cst_encode_kick_all(space->store);
    cst_store_leave(space);
}

/* No memory for the frame: it may go straight to disk. 0 is what a slot in memory answers. */
enum { ON_DISK = CST_ROOM_REFUSED + 1 };

static int to_disk(struct encode *e) {
    const struct cst_frame f = {
        .data = e->frame,
        .length = e->len,
        .crc = e->crc,
        .preset = (uint8_t)e->info.preset,
        .error = e->info.error,
        .side = e->info.side_version ? e->side : NULL,
    };
    int r = cst_cold_spill_frame(e->block, &f);

    if (r)
        return r;
    e->frame = NULL;
    e->block->space->stats.encodes++;
    e->block->space->encode_fails = 0;
    return ON_DISK;
}

static int find_slot(struct encode *e, bool refused) {
    struct cst_block *b = e->block;

    return e->again
               ? cst_room_packed_free(b->space, e->len, &e->slab, &e->slot)
               : cst_room_packed(b->space, e->len, b->evict.order, refused, &e->slab, &e->slot);
}

/* False: the others have to wait for memory, too. */
static bool serve(struct encode *e) {
    struct cst_block *b = e->block;
    struct cst_space *space = b->space;
    int r = b->dead ? CST_ROOM_FULL : find_slot(e, false);

    if (r == CST_ROOM_FULL && !b->dead && !e->again) {
        r = to_disk(e);
        if (r == CST_ROOM_WAIT) /* for its parent, which may stand behind it */
            return true;
        if (r == CST_ROOM_REFUSED)
            r = find_slot(e, true);
    }
    if (r == CST_ROOM_WAIT)
        return false;
    if (r) {
        /* these two asked for no room, and one that came before its parent comes again */
        if (r == CST_ROOM_FULL && !b->dead && !e->again &&
            !(b->parent && cst_cold_wants_frame(b->parent)))
            back_off(space);
        end(e);
        return true;
    }
    cst_list_unlink(&e->link);
    e->slab->busy++;
    e->job = (struct cst_job){ .run = move_job, .done = move_done };
    cst_store_submit(space, &e->job, CST_JOB_BACKGROUND);
    return true;
}

void cst_encode_serve(struct cst_space *space) {
    struct cst_list *it, *tmp;
    size_t before;

    do { /* again: one that ended is nothing to wait for any more */
        before = space->encodes;
        cst_list_for_each_safe (it, tmp, &space->wait_encodes)
            if (!serve(cst_list_entry(it, struct encode, link)))
                return;
    } while (space->encodes < before);
}

/* From a copy of the block. NULL: out of memory. */
static struct encode *encode_new(struct cst_block *b, struct cst_copy *copy) {
    struct cst_side_data *newest = cst_side_newest(b->space);
    struct encode *e = cst_calloc(1, sizeof(*e));

    if (!e) {
        back_off(b->space);
        return NULL;
    }
    cst_list_init(&e->link);
    e->block = b;
    e->source = cst_slot_data(copy->slab, copy->slot);
    e->side = newest ? cst_side_ref(newest) : NULL;
    b->encoding = true;
    cst_copy_pin(copy);
    cst_block_settle(b, CST_EVICT_WARM);
    return e;
}

static void submit(struct encode *e) {
    struct cst_space *space = e->block->space;

    space->encodes++;
    space->store->encodes++;
    space->store->encode_bytes += space->encode_bytes;
    e->job = (struct cst_job){ .run = encode_job, .done = encode_done };
    cst_store_submit(space, &e->job, CST_JOB_BACKGROUND);
}

static bool start(struct cst_space *space) {
    struct cst_block *b = cst_list_entry(space->dirty.next, struct cst_block, file);
    struct encode *e = encode_new(b, &b->hot);

    if (!e)
        return false;
    assert(cst_block_is_original(b));
    cst_choices(&e->choices, space->klass, cst_store_preset(space->store, space->klass),
                e->side ? &e->side->side : NULL);
    submit(e);
    return true;
}

void cst_recode_slice(struct cst_store *store) {
    struct cst_block *b = store->encodes ? NULL : cst_recode_next(store);
    struct encode *e = b ? encode_new(b, &b->packed) : NULL;

    if (!e)
        return;
    e->again = true;
    cst_recode_choices(&e->choices, b, e->side ? &e->side->side : NULL);
    submit(e);
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

    return store->encodes < most && !store->draining && !cst_list_is_empty(&space->dirty) &&
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
    cst_recode_slice(store);
}
