/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the way between the trie's blocks and their records on disk (seg.h): writing blocks out,
 * reading them back, the callbacks of the engine. Recovery and the end of a run: cold_life.c.
 *
 *   in memory -> cst_cold_spill() -> record, b->cold -> memory is taken (cst_block_evict()): at
 * rest at rest -> cst_cold_fetch() -> read into a buffer -> decode into a hot slot
 *
 * Invariants
 *   1. b->cold is the block's record; the engine's owner of it is the block. A dead block has none.
 *   2. A block is written only after, or together with and behind, its parent.
 *   3. b->read, b->spill: at most one of each; the block, its space and the copy that is written
 *      live until their end.
 *   4. A read's buffer is a part of the arena or, if it can't be, heap; it is held until the decode
 *      that it feeds has ended. Reads begin in the order of their fetches.
 *   5. A disk that fails loses blocks (misses), never a request: what can't be read is removed.
 *   6. What waits because the engine is busy is served when it has room again: c->waiting.
 * Loop thread only. Writes are background work: where the engine has no budget or no room for one,
 * the block is evicted as without a disk; where it is only busy, the space waits.
 */
#include "store/cold.h"

#include "base/err.h"
#include "base/mem.h"
#include "store/prefix_trie.h"
#include "store/side_disk.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

enum {
    PATH_MAX_BLOCKS = 64, /* of one chain that are begun at once */
    AHEAD = 64,           /* victims of a space that are written before their memory is needed */
    SPILL_TRIES = 3,      /* of a block, until it is used again: each that fails costs a segment */
};

/* ---- accounts ---- */

void cst_cold_begin(struct cst_space *space) {
    space->n_jobs++;
    space->store->jobs++;
    space->ns->disk_ops++;
}

void cst_cold_finish(struct cst_space *space) {
    space->ns->disk_ops--;
    cst_store_leave(space);
}

void cst_cold_set(struct cst_block *b, struct cst_seg_ref ref, uint64_t bytes, uint8_t preset,
                  struct cst_side_data *side) {
    struct cst_space_stats *s = &b->space->stats;

    assert(!cst_block_is_cold(b));
    b->cold = ref;
    b->cold_bytes = (uint32_t)bytes;
    b->cold_preset = preset;
    b->cold_side = side ? cst_side_ref(side) : NULL;
    b->written = true;
    s->cold_blocks++;
    s->cold_bytes += bytes;
}

static void clear(struct cst_block *b) {
    b->cold = CST_SEG_REF_NONE;
    b->cold_side = cst_side_unref(b->cold_side);
    b->space->stats.cold_blocks--;
    b->space->stats.cold_bytes -= b->cold_bytes;
}

void cst_cold_drop(struct cst_block *b, bool destroy) {
    struct cst_cold *c = b->space->store->cold;
    struct cst_seg_ref ref = b->cold;

    if (c && c->last == b)
        c->last = NULL;
    if (!cst_block_is_cold(b))
        return;
    clear(b);
    b->written = false;
    if (cst_side_keep(c, b->space->disk, ref, 0))
        return;
    if (!c->closing) /* a purge discards whole segments */
        cst_seg_drop(c->seg, ref, destroy && !b->space->ns->purging);
}

void cst_cold_drop_kept(struct cst_space *space) {
    struct cst_cold *c = space->store->cold;

    if (c && space->disk && !c->closing)
        cst_side_kept_drop(c, NULL, space->disk, !space->ns->purging);
}

/* ---- buffers of reads ---- */

static uint8_t *arena_take(struct cst_cold *c, size_t bytes) {
    size_t need = (bytes + CST_COLD_UNIT - 1) / CST_COLD_UNIT, run = 0;

    for (size_t i = 0; i < c->n_units; i++) {
        run = c->units[i] ? 0 : run + 1;
        if (run < need)
            continue;
        memset(c->units + i + 1 - need, 1, need);
        return c->arena + (i + 1 - need) * CST_COLD_UNIT;
    }
    return NULL;
}

static bool take_buffer(struct cst_cold *c, struct cst_cold_read *r) {
    r->buffer = arena_take(c, r->bytes);
    if (r->buffer)
        return true;
    if (r->bytes <= c->n_units * CST_COLD_UNIT && c->held)
        return false; /* one comes free */
    r->heap = cst_malloc(r->bytes + CST_AIO_ALIGN);
    if (!r->heap)
        return false;
    r->buffer = (uint8_t *)r->heap + (-(uintptr_t)r->heap & (CST_AIO_ALIGN - 1));
    return true;
}

static void give_buffer(struct cst_cold *c, struct cst_cold_read *r) {
    if (!r->buffer)
        return;
    c->held--;
    if (!r->heap)
        memset(c->units + (size_t)(r->buffer - c->arena) / CST_COLD_UNIT, 0,
               (r->bytes + CST_COLD_UNIT - 1) / CST_COLD_UNIT);
    r->heap = cst_free(r->heap);
}

/* ---- reading ---- */

static void read_done(struct cst_seg_read *read, int status);

/* It has its buffer. */
static void begin_read(struct cst_cold *c, struct cst_cold_read *r) {
    assert(cst_seg_read_bytes(c->seg, r->block->cold) <= r->bytes); /* moves don't change it */
    c->held++;
    cst_list_unlink(&r->link);
    cst_disk_rate_begin(&c->rate, cst_store_now(c->store));
    r->read = (struct cst_seg_read){
        .done = read_done, .ref = r->block->cold, .key = r->block->key, .buffer = r->buffer
    };
    cst_seg_read(c->seg, &r->read);
}

static void serve_reads(struct cst_cold *c) {
    struct cst_cold_read *r;
    struct cst_list *it;

    while ((it = cst_list_first(&c->wait_reads))) {
        r = cst_list_entry(it, struct cst_cold_read, link);
        if (!take_buffer(c, r))
            return; /* with nothing held and no heap: the next read or slice tries again */
        begin_read(c, r);
    }
    while ((r = cst_cold_ahead_next(c)) && (r->buffer = arena_take(c, r->bytes))) {
        cst_cold_ahead_begun(r);
        begin_read(c, r);
    }
}

void cst_cold_queue(struct cst_cold_read *r) {
    cst_list_append(r->ahead ? &r->cold->wait_ahead : &r->cold->wait_reads, &r->link);
    serve_reads(r->cold);
}

void cst_cold_read_end(struct cst_cold_read *r) {
    struct cst_cold *c = r->cold;

    cst_cold_ahead_end(r);
    give_buffer(c, r);
    r->side = cst_side_unref(r->side);
    cst_free(r);
    serve_reads(c);
}

static int read_start(struct cst_block *b, bool ahead) {
    struct cst_cold *c = b->space->store->cold;
    uint64_t bytes = cst_block_is_cold(b) ? cst_seg_read_bytes(c->seg, b->cold) : 0;
    struct cst_cold_read *r;

    assert(!b->read);
    if (!bytes || (b->cold_side && !b->cold_side->published))
        return CST_STORE_E_NOT_FOUND;
    r = cst_calloc(1, sizeof(*r));
    if (!r)
        return cst_err(-ENOMEM);
    r->cold = c;
    r->block = b;
    r->bytes = bytes;
    r->side = b->cold_side ? cst_side_ref(b->cold_side) : NULL;
    r->ahead = ahead;
    c->ahead_bytes += ahead ? bytes : 0;
    b->read = r;
    cst_cold_begin(b->space);
    cst_list_init(&r->link);
    cst_cold_queue(r);
    return 0;
}

uint64_t cst_cold_cost(const struct cst_store *store, uint64_t bytes) {
    return store->cold ? cst_disk_rate_cost(&store->cold->rate, bytes) : 0;
}

int cst_cold_fetch(struct cst_block *b) {
    return read_start(b, false);
}

bool cst_cold_ahead(struct cst_block *b) {
    if (read_start(b, true))
        return false;
    cst_block_settle(b, CST_EVICT_COLD);
    return true;
}

void cst_cold_fail_waiters(struct cst_block *b, int status) {
    struct cst_list *it;

    while ((it = cst_list_first(&b->waiters)))
        cst_fetch_finish(cst_list_entry(it, struct cst_fetch, link), status);
}

/* The read went well; returns whether the buffer is in use on. */
static bool arrived(struct cst_block *b, struct cst_cold_read *r) {
    struct cst_space *space = b->space;
    int status;

    space->stats.cold_reads++;
    if (cst_list_is_empty(&b->waiters)) { /* nobody wants it yet, or any more */
        if (r->ahead)
            cst_cold_keep(b, r);
        return r->ahead;
    }
    space->stats.prefetch_used += r->ahead;
    status = cst_decode_start_cold(b, r, r->read.payload, r->read.payload_bytes);
    if (status)
        cst_cold_fail_waiters(b, status);
    return !status;
}

static void read_done(struct cst_seg_read *read, int status) {
    struct cst_cold_read *r = cst_container_of(read, struct cst_cold_read, read);
    struct cst_block *b = r->block;
    struct cst_space *space = b->space;
    bool in_use = false;

    cst_store_enter(space);
    cst_disk_rate_end(&r->cold->rate, cst_store_now(space->store), status ? 0 : r->bytes);
    b->read = NULL;
    if (b->dead) {
        cst_block_reap(b);
    } else if (status && !cst_block_in_memory(b)) {
        (void)cst_block_remove(b, CST_GONE_CORRUPT); /* b may be freed */
    } else {
        b->holds++; /* it stays over the search for room below */
        if (status)
            cst_cold_fail_waiters(b, CST_STORE_E_CORRUPT);
        else
            in_use = arrived(b, r);
        b->holds--;
        cst_block_settle(b, CST_EVICT_COLD);
    }
    if (!in_use)
        cst_cold_read_end(r);
    cst_room_serve(space);
    cst_cold_finish(space);
}

/* ---- writing ---- */

/* What would be written: the frame, or the block's own bytes if there will be no frame or no time
 * for one. NULL: nothing now. */
static struct cst_copy *source_of(struct cst_block *b) {
    const struct cst_store *store = b->space->store;

    if (b->packed.slab && !(b->side && cst_side_disk_is_out(b->side)))
        return &b->packed;
    if (cst_block_is_original(b) && (b->unpackable || store->draining))
        return &b->hot;
    return NULL;
}

/* It may have been the segment's fault, or the moment's, and each such try costs a segment; or that
 * of a block above, which is written again first. A clean stop comes back to it. */
static void write_failed(struct cst_block *b, int status) {
    bool counts = status < 0 || status == CST_SEG_E_FULL;

    if (counts)
        b->spill_fails++;
    if (counts || status == CST_SEG_E_PARENT)
        b->space->drained = CST_MIN(b->space->drained, b->seq - 1);
}

static void spill_done(struct cst_seg_store *store, int status) {
    struct cst_cold_spill *s = cst_container_of(store, struct cst_cold_spill, store);
    struct cst_block *b = s->block;
    struct cst_space *space = b->space;

    cst_store_enter(space);
    if (s->copy)
        cst_copy_unpin(s->copy);
    b->spill = NULL;
    space->spills--;
    if (!status && (b->dead || (s->side && !cst_side_disk_holds(s->side)))) {
        cst_seg_drop(space->store->cold->seg, cst_seg_store_ref(store), b->dead);
    } else if (!status) {
        cst_cold_set(b, cst_seg_store_ref(store), store->record.payload_bytes, store->record.preset,
                     s->side);
        if (!s->copy && !b->packed.slab)
            b->error = store->record.error; /* the frame was never in memory */
        space->stats.spilled_blocks++;
        space->stats.spilled_bytes += store->record.payload_bytes;
    }
    write_failed(b, status);
    if (b->dead)
        cst_block_reap(b);
    else if (status == CST_SEG_E_CORRUPT)
        (void)cst_block_remove(b, CST_GONE_CORRUPT);
    else
        cst_block_settle(b, CST_EVICT_WARM);
    s->side = cst_side_unref(s->side);
    cst_free(s->frame);
    cst_free(s);
    cst_room_serve(space);
    cst_cold_slice(space->store);
    cst_cold_finish(space);
}

static void fill_record(struct cst_cold_spill *s, struct cst_block *b, const struct cst_frame *f) {
    const struct cst_store *store = b->space->store;
    const struct cst_block *parent = b->parent;

    if (parent)
        memcpy(s->parent, parent->key, sizeof(s->parent));
    s->store.record = (struct cst_seg_record){
        .type = CST_SEG_BLOCK,
        .space = b->space->disk,
        .key = b->key,
        .payload_bytes = f->length,
        .payload_crc = f->crc,
        .parent = parent ? s->parent : NULL,
        .has_parent = parent && !parent->root,
        .position = b->depth,
        .n_tokens = b->n_tokens,
        .tokens = b->tokens,
        .surprisals = b->has_surprisals ? cst_block_surprisals(b) : NULL,
        .preset = f->preset,
        .error = f->error,
        .block_crc = b->crc,
        .born = cst_seg_unix(store->cold->seg) - (cst_store_now(store) - b->born_ns) / CST_NS_PER_S,
    };
    if (f->side) {
        s->version = f->side->side.version;
        s->store.record.n_side = 1;
        s->store.record.side = &s->version;
    }
    if (s->store.record.has_parent)
        s->store.parent = parent->spill ? cst_seg_store_ref(&parent->spill->store) : parent->cold;
}

/* 0, or a condition of cst_seg_store(): nothing was begun. copy NULL: the frame is taken. */
static int spill_begin(struct cst_block *b, struct cst_copy *copy, const struct cst_frame *frame,
                       uint32_t hits) {
    int r = frame->side ? cst_side_disk_ready(frame->side) : 0;
    struct cst_cold_spill *s = r ? NULL : cst_calloc(1, sizeof(*s));

    if (r)
        return r;
    if (!s)
        return CST_SEG_E_BUSY;
    s->block = b;
    s->copy = copy;
    s->store = (struct cst_seg_store){
        .done = spill_done, .payload = frame->data, .owner = b, .hits = CST_MAX(hits, b->hits)
    };
    fill_record(s, b, frame);
    r = cst_seg_store(b->space->store->cold->seg, &s->store);
    if (r) {
        b->unspillable |= r == CST_SEG_E_TOO_BIG;
        cst_free(s);
        return r < 0 ? CST_SEG_E_BUSY : r; /* no memory: later */
    }
    s->side = frame->side ? cst_side_ref(frame->side) : NULL;
    b->spill = s;
    b->space->spills++;
    cst_cold_begin(b->space);
    if (copy)
        cst_copy_pin(copy);
    else
        s->frame = frame->data;
    cst_block_settle(b, CST_EVICT_WARM);
    return 0;
}

static int spill_one(struct cst_block *b, uint32_t hits) {
    struct cst_copy *copy = source_of(b);
    bool packed = copy == &b->packed;

    if (!copy)
        return CST_SEG_E_BUSY;
    return spill_begin(b, copy,
                       &(struct cst_frame){ .data = cst_slot_data(copy->slab, copy->slot),
                                            .length = copy->length,
                                            .crc = copy->crc,
                                            .preset = packed ? b->preset : CST_PRESET_NONE,
                                            .error = packed ? b->error : 0,
                                            .side = packed ? b->side : NULL },
                       hits);
}

/* A clean stop has tries of its own. */
static bool is_unfit(const struct cst_block *b) {
    unsigned tries = b->space->store->draining ? 2 * SPILL_TRIES : SPILL_TRIES;

    return b->unspillable || b->spill_fails >= tries;
}

static bool may_spill(const struct cst_block *b) {
    return b->visible && !b->root && !b->dead && !is_unfit(b) && b->space->disk &&
           !b->space->ns->purging;
}

/* What the engine gave up and nobody has used since isn't written again: where the tier is small
 * for the memory above it, that would never end. */
static bool is_given_up(const struct cst_block *b) {
    return b->written && !cst_block_is_cold(b);
}

/* Parents first. True: something of the space is on its way to disk for this block. */
static bool spill_path(struct cst_block *b, int *condition) {
    struct cst_block *path[PATH_MAX_BLOCKS], *at = b;
    size_t n = 0;

    for (; at && !at->root && !at->spill && !cst_block_is_cold(at); at = at->parent) {
        if (!may_spill(at) || !source_of(at))
            return false;
        path[n++ % PATH_MAX_BLOCKS] = at; /* of longer paths the top */
    }
    for (size_t i = 0, most = CST_MIN(n, PATH_MAX_BLOCKS); i < most; i++) {
        *condition = spill_one(path[(n - 1 - i) % PATH_MAX_BLOCKS], b->hits);
        if (*condition)
            return i > 0;
    }
    return true;
}

static bool is_ready(const struct cst_cold *c) {
    return c && !c->recovering && !c->closing;
}

bool cst_cold_takes(const struct cst_store *store) {
    return is_ready(store->cold) && cst_seg_takes(store->cold->seg);
}

/* The engine took nothing now: is there an end to come that serves the space? */
static bool may_wait(struct cst_space *space, int condition) {
    struct cst_cold *c = space->store->cold;

    if (condition != CST_SEG_E_BUSY && condition != CST_SEG_E_FULL)
        return false;
    if (!space->spills && !cst_seg_is_awaited(c->seg))
        return false;
    if (!space->spills && cst_list_is_empty(&space->disk_link))
        cst_list_append(&c->waiting, &space->disk_link);
    return true;
}

bool cst_cold_spill(struct cst_block *b) {
    int condition = 0;

    if (b->spill)
        return true;
    if (!cst_cold_takes(b->space->store) || cst_block_is_cold(b) || is_given_up(b))
        return false;
    return spill_path(b, &condition) || may_wait(b->space, condition);
}

bool cst_cold_wants_frame(struct cst_block *b) {
    if (!cst_cold_takes(b->space->store) || is_given_up(b))
        return false;
    for (; b && !b->root && !b->spill && !cst_block_is_cold(b); b = b->parent) {
        if (!may_spill(b))
            return false;
        if (!source_of(b))
            return !b->packed.slab && cst_block_is_original(b);
    }
    return false;
}

/* What it means for a frame that the engine took nothing. */
static int refusal(struct cst_space *space, int condition) {
    if (may_wait(space, condition))
        return CST_ROOM_WAIT;
    return !condition || condition == CST_SEG_E_BUSY || condition == CST_SEG_E_PARENT ||
                   condition == CST_SEG_E_BUDGET
               ? CST_ROOM_FULL
               : CST_ROOM_REFUSED;
}

int cst_cold_spill_frame(struct cst_block *b, const struct cst_frame *frame) {
    struct cst_block *parent = b->parent;
    int r = 0;

    if (!cst_cold_takes(b->space->store) || cst_block_is_cold(b) || b->spill || b->dead)
        return CST_ROOM_FULL;
    if (is_unfit(b) || is_given_up(b)) /* until it is used */
        return CST_ROOM_REFUSED;
    if (!may_spill(b))
        return CST_ROOM_FULL;
    if (parent && !parent->root && !parent->spill && !cst_block_is_cold(parent) &&
        (!spill_path(parent, &r) || !parent->spill))
        return b->space->spills || parent->encoding ? CST_ROOM_WAIT : refusal(b->space, r);
    r = spill_begin(b, NULL, frame, b->hits);
    return r ? refusal(b->space, r) : 0;
}

/* ---- ahead of need, and at the end ---- */

static bool goes_on(int condition) {
    return !condition || condition == CST_SEG_E_HITS || condition == CST_SEG_E_TOO_BIG ||
           condition == CST_SEG_E_PARENT;
}

static bool spill_victims(struct cst_space *space) {
    const struct cst_evict_ops *ops = space->evict.ops;
    struct cst_evict_entry *e = ops->victim(&space->evict, NULL);
    int condition = 0;

    for (unsigned i = 0; e && i < AHEAD && goes_on(condition); i++) {
        struct cst_block *b = cst_container_of(e, struct cst_block, evict);

        e = ops->victim(&space->evict, e); /* first: settling may move b in its list */
        if (!cst_block_is_cold(b) && !b->spill && !is_given_up(b))
            (void)spill_path(b, &condition);
    }
    return goes_on(condition);
}

/* In the order of creation, which is parents first. */
static bool spill_all(struct cst_space *space) {
    struct cst_block *b;
    int r = 0;

    while (goes_on(r) && (b = cst_trie_after(space, space->drained))) {
        r = may_spill(b) && !cst_block_is_cold(b) && !b->spill && source_of(b)
                ? spill_one(b, b->hits)
                : 0;
        if (goes_on(r))
            space->drained = b->seq;
    }
    space->store->cold->drain_over |= r == CST_SEG_E_OFF || r == CST_SEG_E_FULL;
    return goes_on(r);
}

void cst_cold_slice(struct cst_store *store) {
    struct cst_cold *c = store->cold;
    bool pressed = c && !cst_room_has(store, store->options.memory / 4);
    struct cst_list *it, *tmp;
    int side = 0;

    if (!is_ready(c))
        return;
    serve_reads(c);
    if (!c->drain_over)
        side = cst_side_disk_slice(store);
    c->drain_over |= store->draining && (side == CST_SEG_E_OFF || side == CST_SEG_E_FULL);
    if (store->draining ? c->drain_over : !pressed || !cst_list_is_empty(&c->waiting))
        return; /* who waits comes first */
    cst_list_for_each_safe (it, tmp, &store->spaces) {
        struct cst_space *space = cst_list_entry(it, struct cst_space, link);

        if (space->disk && !(store->draining ? spill_all(space) : spill_victims(space)))
            break;
    }
}

void cst_cold_serve(struct cst_store *store) {
    struct cst_list now = CST_LIST_INIT(now), *it;

    if (!store->cold)
        return;
    while ((it = cst_list_first(&store->cold->waiting))) {
        cst_list_unlink(it);
        cst_list_append(&now, it);
    }
    while ((it = cst_list_first(&now))) {
        struct cst_space *space = cst_list_entry(it, struct cst_space, disk_link);

        cst_list_unlink(it);
        cst_cold_begin(space); /* it stays over the call */
        cst_store_enter(space);
        cst_room_serve(space);
        cst_cold_finish(space);
    }
}

/* ---- callbacks of the engine ---- */

void cst_cold_room(void *arg) {
    struct cst_cold *c = arg;

    if (!cst_list_is_empty(&c->waiting))
        cst_store_kick(c->store);
}

static float block_value(const struct cst_block *b, bool *has_children) {
    double cost = (double)b->n_tokens * (1 + (double)b->depth * b->n_tokens / 16384);
    double idle = (double)(b->space->store->uses - b->evict.order) + 1;

    *has_children = b->n_children > 0;
    return (float)(cost * (1 + b->hits) / idle / (b->cold_bytes + 1));
}

float cst_cold_value(void *arg, void *owner, bool *has_children) {
    if (cst_side_keeps(owner))
        return cst_side_kept_value(owner, has_children);
    if (cst_side_owns(owner))
        return cst_side_value(owner, has_children);
    return block_value(owner, has_children);
}

void cst_cold_moved(void *arg, void *owner, struct cst_seg_ref ref) {
    struct cst_block *b = owner;

    if (cst_side_keeps(owner))
        cst_side_kept_moved(owner, ref);
    else if (cst_side_owns(owner))
        cst_side_moved(owner, ref);
    else
        b->cold = ref;
}

/* The memory of the block, if it has any, serves on; what a lossy frame gave back is never written
 * again. */
void cst_cold_gone(void *arg, void *owner, enum cst_seg_gone why) {
    struct cst_block *b = owner;

    if (cst_side_keeps(owner)) {
        cst_side_kept_gone(owner);
        return;
    }
    if (cst_side_owns(owner)) {
        cst_side_gone(owner);
        return;
    }
    if (b->dead || !cst_block_is_cold(b))
        return;
    clear(b);
    b->written &= why == CST_SEG_GONE_EVICTED; /* else it deserves another write */
    if (cst_block_in_memory(b))
        cst_block_settle(b, CST_EVICT_WARM);
    else
        (void)cst_block_remove(b,
                               why == CST_SEG_GONE_EVICTED ? CST_GONE_EVICTED : CST_GONE_CORRUPT);
}

uint64_t cst_cold_pinned_until(void *arg, void *owner) {
    const struct cst_block *b = owner;
    uint64_t now;

    if (cst_side_owns(owner) || cst_side_keeps(owner))
        return 0;
    if (!b->pinned_until || b->pinned_until == UINT64_MAX)
        return b->pinned_until; /* without the time: asked of every record */
    now = cst_store_now(b->space->store);
    if (b->pinned_until <= now)
        return 0;
    return cst_seg_unix(b->space->store->cold->seg) + (b->pinned_until - now) / CST_NS_PER_S;
}
