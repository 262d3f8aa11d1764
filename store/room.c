/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where room comes from: slots for copies, bytes for the index.
 *
 * A hot slot is, in this order: a free one; one of a new slab, if memory allows or an empty slab
 * elsewhere can be given back for it; that of a hot copy whose block is packed too (with a disk,
 * and memory for the index about to end, only after slabs that hold nothing else were emptied);
 * that of the policy's victim among this space's idle leaves, unless another space has a slab that
 * was not used for longer: then that one is emptied. When the best victim has no hot copy, the put
 * waits until one of the others is packed in its place. Packed slots likewise, but hot slabs that
 * hold nothing else than packed blocks go before any block does, and slabs of other size classes
 * are emptied, too, so that a class which is no longer used does not keep its memory.
 *
 * Invariants
 *   1. slabs (made and being made) + index + heap of large encodes + side data + workspaces of jobs
 *      <= options.memory; workspaces count up to an eighth of it.
 *   2. Nothing is taken from a block that is leased, pinned, waited for, not stored, or above one
 *      that is: only idle leaves, or whole subtrees of such, are evicted.
 *   3. WAIT is only answered while a job of this space is under way whose end serves the space, or
 *      work of the disk's engine for which cst_cold_serve() follows, so nobody waits for nothing;
 *      else the answer is FULL.
 *   4. A call evicts a bounded number of blocks, or empties whole slabs: those only for a slab that
 *      can be made then.
 * Loop thread only.
 */
#include "store/core.h"
#include "store/prefix_trie.h"

#include <assert.h>

enum {
    SLABS_TRIED = 8,      /* candidates that are looked into */
    SLABS_SCANNED = 256,  /* and passed over */
    SUBTREE_NODES = 4096, /* a slab whose blocks have more below them stays */
    PACKED_EVICTIONS = 64,
    SLAB_BLOCKS_MIN = 8,
    PAGE = 4096,
    HELD_AT_EASE = 64 << 20, /* bytes of retired slabs that clients still map */
};

static struct cst_slab_slots *lru_slab(struct cst_list *link) {
    return cst_container_of(link, struct cst_slab_slots, lru);
}

/* ---- slabs ---- */

/* Room that slabs leave for the index to grow without taking one back. */
static uint64_t headroom(const struct cst_store *store) {
    uint64_t left = store->options.index - CST_MIN(store->options.index, store->index_bytes);

    return CST_MIN(store->options.memory / 64, left);
}

static uint64_t used_bytes(const struct cst_store *store) {
    return store->slab_bytes + store->index_bytes + store->encode_bytes + store->side_bytes +
           store->work_bytes;
}

bool cst_room_has(const struct cst_store *store, uint64_t bytes) {
    uint64_t used = used_bytes(store);

    return used <= store->options.memory && store->options.memory - used >= bytes;
}

uint64_t cst_room_left(const struct cst_store *store) {
    uint64_t used = used_bytes(store);
    uint64_t memory = store->options.memory - CST_MIN(store->options.memory, used);
    uint64_t index = store->options.index - CST_MIN(store->options.index, store->index_bytes);

    return CST_MIN(memory, index);
}

static bool give_back_one(struct cst_store *store) {
    struct cst_list *it = cst_list_first(&store->empty);

    if (it)
        cst_slab_retire(cst_list_entry(it, struct cst_slab_slots, empty));
    return it;
}

/* Is there another copy of the block that is as good as the one in this slab? Bytes that were
 * decoded from a lossy frame are not: encoded again they would lose twice. */
static bool is_spare(const struct cst_slab_slots *s, const struct cst_block *b) {
    if (s->slab.packed && b->decode)
        return false; /* which may still wait for a slot, and reads this copy then */
    if (cst_block_is_cold(b))
        return true;
    return s->slab.packed ? cst_block_is_original(b) : b->packed.slab != NULL;
}

/* What may be lost for a slab: nothing; what can't be saved on disk, now or when it is packed; all
 * that nobody uses. */
enum loss { LOSE_NOTHING, LOSE_UNSAVABLE, LOSE_ANY };

/* Can everything in the slab go? No slot is leased or busy. What can be saved on disk is, first. */
static bool can_empty(const struct cst_slab_slots *s, enum loss loss) {
    unsigned budget = SUBTREE_NODES;

    for (uint32_t i = 0; i < s->n_slots; i++) {
        struct cst_block *b = s->owners[i];

        if (!b || is_spare(s, b))
            continue;
        if (!cst_block_subtree_idle(b, &budget) || cst_cold_spill(b) || loss == LOSE_NOTHING ||
            (loss == LOSE_UNSAVABLE && cst_cold_wants_frame(b)))
            return false;
    }
    return true;
}

/* Drops copies of blocks that have a spare one, and the other blocks with what is below them. */
static void empty_slab(struct cst_slab_slots *s) {
    for (uint32_t i = 0; i < s->n_slots; i++) {
        struct cst_block *b = s->owners[i];

        if (!b)
            continue;
        if (!is_spare(s, b)) {
            (void)cst_block_remove(b, CST_GONE_EVICTED);
            continue;
        }
        if (s->slab.packed)
            cst_block_drop_packed(b);
        else
            cst_block_drop_hot(b);
        cst_block_settle(b, CST_EVICT_WARM);
    }
    assert(!s->used);
    cst_slab_retire(s);
}

/* Empties the least recently used slab that was used before `before`. Those that would be in `own`
 * if they had free slots don't count: what they hold goes block by block. One that clients map only
 * comes free when they drop it: while they hold much already it is taken only if any may be. */
static bool empty_older(struct cst_space *space, const struct cst_list *own, uint64_t before,
                        enum loss loss) {
    struct cst_list *head = &space->store->slabs, *it = head->next;
    unsigned tried = 0;

    for (unsigned i = 0; i < SLABS_SCANNED && tried < SLABS_TRIED && it != head; i++) {
        struct cst_slab_slots *s = lru_slab(it);

        it = it->next;
        if (s->touched >= before)
            return false;
        if (s->leases || s->busy || cst_slab_free_list(s) == own)
            continue;
        if (loss != LOSE_ANY && s->slab.holders &&
            space->store->held_bytes + s->slab.mem.size > HELD_AT_EASE)
            continue;
        tried++;
        if (can_empty(s, loss)) {
            struct cst_space *owner = s->slab.space;

            empty_slab(s);
            if (owner != space)
                cst_space_reap(owner);
            return true;
        }
    }
    return false;
}

/* Gives back a hot slab whose blocks are all packed, but not the last one of a space in use. */
static bool empty_clean(struct cst_store *store) {
    struct cst_list *head = &store->slabs, *it = head->next;

    for (unsigned i = 0; i < SLABS_SCANNED && it != head; i++, it = it->next) {
        struct cst_slab_slots *s = lru_slab(it);

        if (s->slab.packed || s->clean != s->used ||
            (s->slab.space->n_hot_slabs == 1 && s->slab.space->refs))
            continue;
        empty_slab(s);
        return true;
    }
    return false;
}

/* ---- victims ---- */

/* The best victim that has a copy of the tier (packed: of the class) which nothing is using. */
static struct cst_block *victim(struct cst_space *space, bool packed, uint32_t klass) {
    const struct cst_evict_ops *ops = space->evict.ops;
    struct cst_evict_entry *e = ops->victim(&space->evict, NULL);

    for (unsigned i = 0; e && i < CST_VICTIMS_SCANNED; i++, e = ops->victim(&space->evict, e)) {
        struct cst_block *b = cst_container_of(e, struct cst_block, evict);
        const struct cst_copy *copy = packed ? &b->packed : &b->hot;

        if (copy->slab && !copy->busy && (!packed || copy->slab->klass == klass))
            return b;
    }
    return NULL;
}

/* ---- index ---- */

static bool forget(struct cst_space *space) {
    bool any = cst_evict_forget(&space->evict);

    if (any)
        cst_space_index_ghosts(space);
    return any;
}

static bool evict_for_index(struct cst_space *space) {
    struct cst_evict_entry *e;
    struct cst_list *it;

    if (forget(space))
        return true;
    it = cst_list_first(&space->cold);
    if (it) {
        (void)cst_block_remove(cst_list_entry(it, struct cst_block, file), CST_GONE_EVICTED);
        return true;
    }
    e = space->evict.ops->victim(&space->evict, NULL);
    if (e)
        (void)cst_block_remove(cst_container_of(e, struct cst_block, evict), CST_GONE_EVICTED);
    return e;
}

/* Own ghosts and leaves first, then those of whoever comes first. */
static bool evict_any_for_index(struct cst_space *space) {
    struct cst_list *head = &space->store->spaces, *it;

    if (evict_for_index(space))
        return true;
    for (it = head->next; it != head; it = it->next) {
        struct cst_space *other = cst_list_entry(it, struct cst_space, link);

        if (other != space && evict_for_index(other)) {
            cst_space_reap(other);
            return true;
        }
    }
    return false;
}

int cst_room_heap(struct cst_space *space, uint64_t bytes) {
    struct cst_store *store = space->store;

    while (!cst_room_has(store, bytes))
        if (!forget(space) && !give_back_one(store) && !empty_clean(store) &&
            !empty_older(space, NULL, UINT64_MAX, LOSE_ANY))
            return CST_STORE_E_BUSY;
    return 0;
}

int cst_room_index(struct cst_space *space, size_t bytes) {
    struct cst_store *store = space->store;

    while (store->index_bytes + bytes > store->options.index)
        if (!evict_any_for_index(space))
            return CST_STORE_E_LIMIT;
    return cst_room_heap(space, bytes);
}

/* ---- slots ---- */

static uint64_t slab_size(const struct cst_space *space) {
    uint64_t blocks = SLAB_BLOCKS_MIN * cst_space_slot_bytes(space);

    return cst_align_up(CST_MAX(space->store->options.slab_bytes, blocks), PAGE);
}

/* Would memory that others give back become a slab of this space? Not when a slab could not be made
 * lately, nor when one is larger than all there is. */
static bool may_grow(const struct cst_space *space) {
    const struct cst_store *store = space->store;

    return cst_store_now(store) >= store->slabs_after_ns &&
           slab_size(space) + store->index_bytes + headroom(store) <= store->options.memory;
}

/* Starts a new slab if memory allows, after giving back empty ones. */
static bool grow(struct cst_space *space, bool packed, uint32_t klass, uint64_t slot_bytes) {
    struct cst_store *store = space->store;
    uint64_t size = slab_size(space);
    uint64_t index = cst_slab_index_bytes(store, size / slot_bytes);

    if (!may_grow(space))
        return false;
    while (!cst_room_has(store, size + CST_MAX(index, headroom(store))))
        if (!give_back_one(store))
            return false;
    return !cst_room_index(space, index) && !cst_slab_make(space, packed, klass, slot_bytes, size);
}

static bool is_best_victim(const struct cst_block *b) {
    struct cst_evict *e = b ? &b->space->evict : NULL;

    return b && e->ops->victim(e, NULL) == &b->evict;
}

static bool take_free(struct cst_list *slabs, struct cst_slab_slots **slab, uint32_t *slot) {
    struct cst_list *it = cst_list_first(slabs);

    if (!it)
        return false;
    *slab = cst_list_entry(it, struct cst_slab_slots, free);
    *slot = cst_slab_take(*slab);
    return true;
}

static bool drop_clean(struct cst_space *space) {
    struct cst_list *it = cst_list_first(&space->clean);
    struct cst_block *b = it ? cst_list_entry(it, struct cst_block, file) : NULL;

    if (b) {
        cst_block_drop_hot(b);
        cst_block_settle(b, CST_EVICT_WARM);
    }
    return b;
}

/* With a disk, slabs are emptied before the index needs their memory: when it does, blocks that are
 * still on their way to disk are lost. */
static bool is_short(const struct cst_store *store) {
    return cst_cold_takes(store) && !cst_room_has(store, headroom(store) / 2);
}

static bool empty_spare(struct cst_space *space) {
    return give_back_one(space->store) || empty_clean(space->store) ||
           empty_older(space, &space->hot_free, UINT64_MAX, LOSE_NOTHING);
}

int cst_room_hot(struct cst_space *space, struct cst_slab_slots **slab, uint32_t *slot) {
    while (!take_free(&space->hot_free, slab, slot)) {
        bool tight = is_short(space->store);
        struct cst_block *own;

        if (space->making_hot || grow(space, false, 0, cst_space_slot_bytes(space)))
            return CST_ROOM_WAIT;
        if (tight && empty_spare(space))
            continue;
        /* Before a clean copy gives its slot, although that costs nothing: the put would go on and
         * take memory for the index, which by now comes from slabs, of blocks that are on their way
         * to disk. When these have arrived, a slab can be emptied at no cost. */
        if (tight && (cst_encode_kick(space) || space->spills))
            return CST_ROOM_WAIT;
        if (drop_clean(space))
            continue;
        own = victim(space, false, 0);
        if (own && cst_cold_spill(own))
            return CST_ROOM_WAIT;
        /* Rather than a block that was used later than others, or that could go to disk if it were
         * packed: copies that can be dropped are made, at the cost of those. */
        if ((!is_best_victim(own) || (own && cst_cold_wants_frame(own))) && cst_encode_kick(space))
            return CST_ROOM_WAIT;
        if (may_grow(space) &&
            empty_older(space, &space->hot_free, own ? own->evict.order : UINT64_MAX,
                        own ? LOSE_UNSAVABLE : LOSE_ANY))
            continue;
        if (!own)
            return space->spills ? CST_ROOM_WAIT : CST_ROOM_FULL;
        cst_block_evict(own);
    }
    return 0;
}

int cst_room_hot_free(struct cst_space *space, struct cst_slab_slots **slab, uint32_t *slot) {
    if (take_free(&space->hot_free, slab, slot))
        return 0;
    if (space->making_hot || grow(space, false, 0, cst_space_slot_bytes(space)))
        return CST_ROOM_WAIT;
    return CST_ROOM_FULL;
}

/* Packing ahead of need is not worth a block of anybody: only when the space's hot slots are used
 * up do others go for it. */
static bool is_pressed(const struct cst_space *space) {
    return cst_list_is_empty(&space->hot_free);
}

bool cst_room_packed_is_likely(const struct cst_space *space) {
    return is_pressed(space) || !cst_list_is_empty(&space->packed_free[space->packed_class]) ||
           !cst_list_is_empty(&space->store->empty) || cst_room_has(space->store, slab_size(space));
}

int cst_room_packed_free(struct cst_space *space, uint64_t bytes, struct cst_slab_slots **slab,
                         uint32_t *slot) {
    uint32_t klass = cst_packed_class(bytes);

    if (take_free(&space->packed_free[klass], slab, slot))
        return 0;
    if (space->making_packed || grow(space, true, klass, cst_packed_class_bytes(klass)))
        return CST_ROOM_WAIT;
    return CST_ROOM_FULL;
}

int cst_room_packed(struct cst_space *space, uint64_t bytes, uint64_t used, bool refused,
                    struct cst_slab_slots **slab, uint32_t *slot) {
    uint32_t klass = cst_packed_class(bytes);
    struct cst_list *free = &space->packed_free[klass];

    space->packed_class = klass;
    for (unsigned i = 0; !take_free(free, slab, slot);) {
        struct cst_block *own;

        if (space->making_packed || grow(space, true, klass, cst_packed_class_bytes(klass)))
            return CST_ROOM_WAIT;
        if (may_grow(space) && empty_clean(space->store))
            continue;
        if (!is_pressed(space))
            return CST_ROOM_FULL;
        own = victim(space, true, klass);
        if (own && cst_cold_spill(own))
            return CST_ROOM_WAIT;
        if (may_grow(space) &&
            empty_older(space, free, own ? own->evict.order : used, LOSE_UNSAVABLE))
            continue;
        if (own && !refused && cst_cold_wants_frame(own))
            return CST_ROOM_FULL; /* the new frame may go to disk, and this one later */
        if (!own || i++ >= PACKED_EVICTIONS)
            return space->spills ? CST_ROOM_WAIT : CST_ROOM_FULL;
        cst_block_evict(own);
    }
    return 0;
}

/* ---- waiting ---- */

void cst_room_serve(struct cst_space *space) {
    struct cst_decode *d;
    struct cst_list *it;
    struct cst_slab_slots *slab;
    uint32_t slot;
    int r = 0;

    cst_encode_serve(space); /* first: an encode that ends here is nothing to wait for below */
    while (r != CST_ROOM_WAIT && (d = cst_decode_waiting(space))) {
        r = cst_room_hot(space, &slab, &slot);
        if (!r)
            cst_decode_run(d, slab, slot);
        else if (r == CST_ROOM_FULL)
            cst_decode_refuse(d, CST_STORE_E_BUSY);
    }
    while (r != CST_ROOM_WAIT && (it = cst_list_first(&space->wait_puts))) {
        struct cst_put *put = cst_list_entry(it, struct cst_put, queue);

        r = cst_room_hot(space, &slab, &slot);
        if (!r)
            cst_put_start(put, slab, slot);
        else if (r == CST_ROOM_FULL)
            cst_put_finish(put, CST_STORE_E_BUSY);
    }
    cst_cold_keep_serve(space);
}

static void give_back(struct cst_list *slabs) {
    struct cst_list *it, *tmp;

    cst_list_for_each_safe (it, tmp, slabs) {
        struct cst_slab_slots *s = cst_list_entry(it, struct cst_slab_slots, free);

        if (!s->used)
            cst_slab_retire(s);
    }
}

void cst_room_give_back(struct cst_space *space) {
    give_back(&space->hot_free);
    for (unsigned i = 0; i < CST_PACKED_CLASSES; i++)
        give_back(&space->packed_free[i]);
}
