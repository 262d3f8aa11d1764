/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns what a block is worth: its copies, whether it may be evicted, its visibility, its end.
 *
 * Invariants
 *   1. b->evict.in exactly while cst_block_is_idle(b).
 *   2. A hot copy is in space->clean exactly while a packed or cold copy exists and nothing reads
 *      the hot one; in space->dirty while there is no other copy and a packed one should be made;
 *      slab->clean counts the former. A leaf at rest is in space->cold.
 *   3. A visible block's parent is visible (promise 1 of store.h): publish() goes down, remove()
 *      takes the subtree along, leaves first.
 *   4. A dead block is out of the trie and lives in space->dead until its last lease and job end.
 *   5. b->n_warm counts children that are not at rest. A block is at rest while it is on disk only,
 *      nobody waits for it or pins it, and all below it is at rest: so what is above a lease, a put
 *      or a copy in memory is never taken away.
 * Loop thread only.
 */
#include "store/block.h"

#include "store/core.h"
#include "store/prefix_trie.h"

#include <assert.h>
#include <math.h>
#include <string.h>

void cst_block_born(struct cst_block *b) {
    struct cst_evict *e = &b->space->evict;

    e->born = b->space->stats.blocks;
    if (e->ops->born)
        e->ops->born(e, &b->evict);
}

void cst_block_use(struct cst_block *b) {
    struct cst_store *store = b->space->store;
    struct cst_slab_slots *slab = b->hot.slab ? b->hot.slab : b->packed.slab;

    cst_evict_use(&b->evict, ++store->uses, store->now_s);
    b->space->used = b->evict.order;
    b->written = false;
    b->spill_fails = 0;
    if (slab)
        cst_slab_touch(slab, b->evict.order);
}

bool cst_block_is_expired(const struct cst_block *b) {
    const struct cst_store *store = b->space->store;
    uint64_t age = store->options.max_age_ns;

    return age && cst_store_now(store) - b->born_ns >= age;
}

static float half_to_float(uint16_t h) {
    uint32_t exponent = h >> 10 & 31, mantissa = h & 1023;
    float f = exponent ? ldexpf((float)(mantissa | 1024), (int)exponent - 25)
                       : ldexpf((float)mantissa, -24);

    if (exponent == 31)
        f = mantissa ? NAN : INFINITY;
    return h >> 15 ? -f : f;
}

void cst_block_set_surprisals(struct cst_block *b, const uint16_t *surprisals) {
    uint16_t *own = cst_block_surprisals(b);
    float sum = 0;

    if (b->has_surprisals)
        return;
    memcpy(own, surprisals, b->n_tokens * sizeof(*own)); /* first: a client may still write them */
    for (uint32_t i = 0; i < b->n_tokens; i++) {
        float bits = half_to_float(own[i]);

        if (!(bits >= 0) || isinf(bits))
            return;
        sum += bits;
    }
    b->surprisal = sum;
    b->has_surprisals = true;
}

/* ---- what may be evicted ---- */

bool cst_block_is_idle(const struct cst_block *b) {
    return b->stored && !b->dead && cst_block_in_memory(b) && !b->n_warm &&
           !cst_block_is_leased(b) && !b->pins && !b->holds && cst_list_is_empty(&b->puts) &&
           cst_list_is_empty(&b->waiters);
}

static bool is_at_rest(const struct cst_block *b) {
    return b->stored && !b->dead && !cst_block_in_memory(b) && !b->n_warm && !b->pins &&
           !b->holds && !b->read && !b->decode && cst_list_is_empty(&b->puts) &&
           cst_list_is_empty(&b->waiters);
}

bool cst_block_subtree_idle(const struct cst_block *top, unsigned *budget) {
    for (const struct cst_block *b = top; b; b = cst_trie_next(top, b)) {
        if (!*budget || !b->stored || cst_block_is_leased(b) || b->pins || b->holds ||
            !cst_list_is_empty(&b->puts) || !cst_list_is_empty(&b->waiters))
            return false;
        --*budget;
    }
    return true;
}

/* What it takes to compute the block again, for each byte that it holds: 1 for a full first block
 * with a hot copy. A token at position p attends to all before it; where that outweighs the rest
 * depends on the model, 16,384 is the order of it. Text that a model finds likely comes back more
 * often than other text: that may weigh up to half as much again, or as much less. */
static float cost(const struct cst_block *b) {
    const struct cst_descriptor *desc = b->space->desc;
    uint32_t tokens = b->space->kind == CST_KIND_TOKENS ? b->n_tokens : desc->block_tokens;
    float position = (float)b->depth * (float)desc->block_tokens / 16384;
    float share = (float)tokens / (float)CST_MAX(desc->block_tokens, 1);
    float bytes = b->hot.slab ? 1 : (float)b->packed.length / (float)desc->block_bytes;
    float prior = 1;

    if (b->surprisal >= 0)
        prior = fmaxf(2.0F / 3, fminf(1.5F, 3 * (float)tokens / fmaxf(b->surprisal, 1)));
    return prior * share * (1 + position) / fmaxf(bytes, 1e-3F);
}

static enum cst_filed filed_as(const struct cst_block *b) {
    if (b->dead)
        return CST_FILED_NOT;
    if (!b->hot.slab)
        return is_at_rest(b) && !b->n_children ? CST_FILED_COLD : CST_FILED_NOT;
    if (b->packed.slab || cst_block_is_cold(b))
        return b->hot.leases || b->hot.busy ? CST_FILED_NOT : CST_FILED_CLEAN;
    if (b->encoding || b->spill || b->unpackable || !cst_block_is_original(b))
        return CST_FILED_NOT; /* spill: its frame is on its way to disk */
    return CST_FILED_DIRTY;
}

static void file(struct cst_block *b) {
    struct cst_space *space = b->space;
    enum cst_filed as = filed_as(b);

    if (as == b->filed)
        return;
    cst_list_unlink(&b->file);
    if (b->filed == CST_FILED_CLEAN)
        b->hot.slab->clean--;
    if (as == CST_FILED_CLEAN) {
        b->hot.slab->clean++;
        cst_list_append(&space->clean, &b->file);
    } else if (as == CST_FILED_DIRTY) {
        cst_list_append(&space->dirty, &b->file);
    } else if (as == CST_FILED_COLD) {
        cst_list_append(&space->cold, &b->file);
    }
    b->filed = (uint8_t)as;
    if (cst_list_is_empty(&space->dirty))
        cst_list_unlink(&space->dirty_link);
    else if (cst_list_is_empty(&space->dirty_link))
        cst_list_append(&space->store->dirty_spaces, &space->dirty_link);
}

/* True: the parent has to be settled, too. */
static bool count_warm(struct cst_block *b) {
    bool warm = !is_at_rest(b);

    if (!b->parent || warm == b->counted_warm)
        return false;
    b->counted_warm = warm;
    b->parent->n_warm += warm ? 1 : UINT32_MAX;
    return b->parent->n_warm == (warm ? 1 : 0);
}

/* One block; true: its parent's turn is next. */
static bool settle_one(struct cst_block *b, enum cst_evict_how how) {
    struct cst_evict *e = &b->space->evict;
    bool idle = cst_block_is_idle(b);

    if (b->root)
        return false;
    if (b->superseded && !b->n_children && (idle || is_at_rest(b))) {
        (void)cst_block_remove(b, CST_GONE_EVICTED);
        return false;
    }
    if (idle && !b->evict.in) {
        b->evict.cost = cost(b);
        e->ops->insert(e, &b->evict, how);
    } else if (!idle && b->evict.in) {
        e->ops->remove(e, &b->evict, false);
    }
    file(b);
    cst_space_index_ghosts(b->space);
    return count_warm(b);
}

void cst_block_settle(struct cst_block *b, enum cst_evict_how how) {
    while (settle_one(b, how)) {
        b = b->parent;
        how = CST_EVICT_WARM;
    }
}

/* ---- copies ---- */

void cst_copy_set(struct cst_copy *copy, struct cst_block *b, struct cst_slab_slots *slab,
                  uint32_t slot, uint32_t length, uint32_t crc) {
    assert(!copy->slab && slab->slab.space == b->space);
    b->space->in_memory += !cst_block_in_memory(b);
    *copy = (struct cst_copy){ .slab = slab, .slot = slot, .length = length, .crc = crc };
    slab->owners[slot] = b;
    if (slab->slab.packed) {
        b->space->packed_copies++;
        b->space->stats.packed_bytes += length;
    } else {
        b->space->hot_copies++;
    }
}

static void copy_clear(struct cst_copy *copy, struct cst_block *b) {
    assert(copy->slab && !copy->leases && !copy->busy);
    if (copy->slab->slab.packed) {
        b->side = cst_side_unref(b->side);
        b->space->packed_copies--;
        b->space->stats.packed_bytes -= copy->length;
    } else {
        b->space->hot_copies--;
    }
    cst_slab_give(copy->slab, copy->slot);
    *copy = (struct cst_copy){ .slab = NULL };
    b->space->in_memory -= !cst_block_in_memory(b);
    b->prefetched &= cst_block_in_memory(b);
}

void cst_block_drop_hot(struct cst_block *b) {
    if (b->filed == CST_FILED_CLEAN) {
        cst_list_unlink(&b->file);
        b->hot.slab->clean--;
        b->filed = CST_FILED_NOT;
    }
    copy_clear(&b->hot, b);
    if (!b->dead)
        cst_store_event(b->space, CST_EVENT_MOVED, b, cst_block_tier(b));
}

void cst_block_drop_packed(struct cst_block *b) {
    copy_clear(&b->packed, b);
}

void cst_block_evict(struct cst_block *b) {
    if (!cst_block_is_cold(b)) {
        (void)cst_block_remove(b, CST_GONE_EVICTED);
        return;
    }
    if (b->packed.slab && !b->packed.busy)
        cst_block_drop_packed(b);
    if (b->hot.slab && !b->hot.busy)
        cst_block_drop_hot(b);
    b->space->stats.cooled_blocks += !cst_block_in_memory(b);
    cst_block_settle(b, CST_EVICT_COLD);
}

void cst_copy_pin(struct cst_copy *copy) {
    copy->busy++;
    copy->slab->busy++;
}

void cst_copy_unpin(struct cst_copy *copy) {
    assert(copy->busy && copy->slab->busy);
    copy->busy--;
    copy->slab->busy--;
}

/* ---- the end ---- */

void cst_block_reap(struct cst_block *b) {
    struct cst_space *space = b->space;

    if (!b->dead)
        return;
    if (b->hot.slab && !b->hot.leases && !b->hot.busy)
        cst_block_drop_hot(b);
    if (b->packed.slab && !b->packed.leases && !b->packed.busy)
        cst_block_drop_packed(b);
    if (b->hot.slab || b->packed.slab || cst_block_is_busy(b))
        return;
    cst_list_unlink(&b->file);
    space->n_dead--;
    cst_space_index_add(space, -(int64_t)cst_block_bytes(b->n_tokens));
    cst_pool_free(&space->store->nodes, b);
}

static void count_gone(struct cst_block *b, enum cst_gone why) {
    static const enum cst_event events[] = {
        [CST_GONE_EVICTED] = CST_EVENT_EVICTED,   [CST_GONE_ERASED] = CST_EVENT_ERASED,
        [CST_GONE_EXPIRED] = CST_EVENT_EVICTED,   [CST_GONE_CORRUPT] = CST_EVENT_DETACHED,
        [CST_GONE_DETACHED] = CST_EVENT_DETACHED, [CST_GONE_ABORTED] = CST_EVENT_DETACHED,
    };
    struct cst_space_stats *s = &b->space->stats;

    if (!b->stored)
        return;
    s->blocks--;
    s->tail_blocks -= cst_block_is_tail(b);
    s->evicted_blocks += why == CST_GONE_EVICTED;
    s->expired_blocks += why == CST_GONE_EXPIRED;
    s->corrupt_blocks += why == CST_GONE_CORRUPT;
    s->detached_blocks += why == CST_GONE_DETACHED || why == CST_GONE_ABORTED;
    cst_store_event(b->space, events[why], b, cst_block_tier(b));
}

static void end_waiting(struct cst_block *b, enum cst_gone why) {
    struct cst_list *it;

    while ((it = cst_list_first(&b->puts)))
        cst_put_orphan(cst_list_entry(it, struct cst_put, link));
    while ((it = cst_list_first(&b->waiters)))
        cst_fetch_finish(cst_list_entry(it, struct cst_fetch, link),
                         why == CST_GONE_CORRUPT ? CST_STORE_E_CORRUPT : CST_STORE_E_NOT_FOUND);
    cst_decode_orphan(b);
}

/* Removes a leaf. */
static void leaf_remove(struct cst_block *b, enum cst_gone why) {
    struct cst_space *space = b->space;
    struct cst_block *parent = b->parent;
    bool as_old = parent && parent->evict.order <= b->evict.order;

    b->superseded = false; /* settling must not come back here */
    if (b->pinned_until)
        cst_block_unpin(b);
    if (b->evict.in) {
        space->evict.room = cst_room_left(space->store);
        space->evict.born = space->stats.blocks;
        space->evict.ops->remove(&space->evict, &b->evict, why == CST_GONE_EVICTED);
        cst_space_index_ghosts(space);
    }
    count_gone(b, why);
    cst_cold_drop(b, why == CST_GONE_ERASED);
    end_waiting(b, why);
    if (b->counted_warm)
        b->parent->n_warm--;
    b->counted_warm = false;
    if (parent && parent->root && parent->n_children == 1 && !parent->holds)
        parent = NULL; /* goes with it */
    cst_trie_cut(b);
    file(b);
    cst_list_append(&space->dead, &b->file);
    space->n_dead++;
    cst_block_reap(b);
    if (parent)
        cst_block_settle(parent, as_old ? CST_EVICT_COLD : CST_EVICT_WARM);
    cst_space_index_ghosts(space);
}

uint64_t cst_block_remove(struct cst_block *top, enum cst_gone why) {
    struct cst_block *b = top;
    uint64_t n = 0;

    assert(!top->root);
    for (;;) {
        struct cst_block *child = cst_trie_child(b), *parent = b->parent;

        if (child) {
            b = child;
            continue;
        }
        n += b->stored;
        if (b == top)
            break;
        leaf_remove(b, CST_GONE_DETACHED);
        b = parent;
    }
    leaf_remove(top, why);
    return n;
}

/* ---- visibility ---- */

/* A longer block makes shorter ones with the same tokens useless: its first tokens serve as well.
 */
static void supersede(struct cst_block *b) {
    struct cst_block *shorter;

    while (b->parent && (shorter = cst_trie_shorter(b))) {
        shorter->superseded = true;
        cst_block_settle(shorter, CST_EVICT_COLD);
    }
}

static void show(struct cst_block *b) {
    cst_trie_show(b);
    cst_store_event(b->space, CST_EVENT_STORED, b, cst_block_tier(b));
    supersede(b);
}

int cst_block_publish(struct cst_block *top) {
    struct cst_list *todo = &top->space->store->showing, *it, *tmp;

    assert(top->stored && !top->visible && cst_list_is_empty(todo));
    if (top->parent && !top->parent->visible)
        return CST_STORE_E_PENDING;
    cst_list_unlink(&top->hidden_link);
    cst_list_append(todo, &top->hidden_link);
    while ((it = cst_list_first(todo))) {
        struct cst_block *b = cst_list_entry(it, struct cst_block, hidden_link);

        show(b);
        cst_list_for_each_safe (it, tmp, &b->hidden) {
            struct cst_block *child = cst_list_entry(it, struct cst_block, hidden_link);

            if (child->stored) {
                cst_list_unlink(it);
                cst_list_append(todo, it);
            }
        }
    }
    return 0;
}
