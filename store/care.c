/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Touch, pins, erasing, ages.
 * Invariants: 1. b->pins = its own pin (pinned_until != 0) + children with pins, so every block
 * with pins is in the budget once, whoever needs it; 2. a block with a pin of its own is in
 * ns->pinned. Parents are older than children, so the oldest block of a space is always the top of
 * its subtree and ages are enforced from there. Loop thread only.
 */
#include "store/core.h"
#include "store/prefix_trie.h"

#include <assert.h>

enum { EXPIRED_A_SLICE = 1024, PINS_A_SLICE = 64 };

static struct cst_block *find_stored(struct cst_space *space, const uint8_t key[32]) {
    struct cst_block *b = cst_trie_find(space, key);

    return b && b->stored && !cst_block_is_expired(b) ? b : NULL;
}

int cst_space_touch(struct cst_space *space, const uint8_t key[32]) {
    struct cst_block *b = find_stored(space, key);

    if (!b || !b->visible)
        return CST_STORE_E_NOT_FOUND;
    cst_block_use(b);
    if (b->evict.in) {
        space->evict.ops->remove(&space->evict, &b->evict, false);
        cst_block_settle(b, CST_EVICT_USED);
    }
    return 0;
}

/* ---- pins ---- */

static bool within_budget(const struct cst_block *b) {
    const struct cst_namespace *ns = b->space->ns;
    uint64_t bytes = ns->pinned_bytes, limit = b->space->store->options.pin_bytes;

    for (; b && !b->root && !b->pins; b = b->parent) {
        bytes += b->space->desc->block_bytes;
        if (bytes > limit)
            return false;
    }
    return true;
}

static void pin_path(struct cst_block *b) {
    for (; b && !b->root && !b->pins++; b = b->parent) {
        b->space->ns->pinned_bytes += b->space->desc->block_bytes;
        b->space->stats.pinned_blocks++;
        cst_block_settle(b, CST_EVICT_WARM);
    }
}

void cst_block_unpin(struct cst_block *b) {
    b->pinned_until = 0;
    cst_list_unlink(&b->pin_link);
    while (b && !b->root && !--b->pins) {
        struct cst_block *parent = b->parent;

        b->space->ns->pinned_bytes -= b->space->desc->block_bytes;
        b->space->stats.pinned_blocks--;
        cst_block_settle(b, CST_EVICT_WARM);
        b = parent;
    }
}

int cst_space_pin(struct cst_space *space, const uint8_t key[32], uint64_t ttl_ns) {
    struct cst_block *b = find_stored(space, key);
    uint64_t now = cst_store_now(space->store);

    if (!b || !b->visible)
        return CST_STORE_E_NOT_FOUND;
    if (!b->pinned_until) {
        if (!within_budget(b))
            return CST_STORE_E_LIMIT;
        pin_path(b);
        cst_list_append(&space->ns->pinned, &b->pin_link);
    }
    b->pinned_until = ttl_ns && ttl_ns < UINT64_MAX - now ? now + ttl_ns : UINT64_MAX;
    return 0;
}

int cst_space_unpin(struct cst_space *space, const uint8_t key[32]) {
    struct cst_block *b = find_stored(space, key);

    if (!b || !b->pinned_until)
        return CST_STORE_E_NOT_FOUND;
    cst_block_unpin(b);
    return 0;
}

/* ---- erasing ---- */

int cst_space_erase(struct cst_space *space, const uint8_t key[32], uint64_t *n_erased) {
    struct cst_block *b = find_stored(space, key);

    *n_erased = 0;
    cst_cold_drop_kept(space);
    if (!b)
        return CST_STORE_E_NOT_FOUND;
    *n_erased = cst_block_remove(b, CST_GONE_ERASED);
    return 0;
}

uint64_t cst_space_remove_all(struct cst_space *space, enum cst_gone why) {
    struct cst_block *b;
    uint64_t n = 0;

    while ((b = cst_trie_after(space, 0)))
        n += cst_block_remove(b, why);
    return n;
}

uint64_t cst_space_clear(struct cst_space *space) {
    uint64_t n = cst_space_remove_all(space, CST_GONE_ERASED);

    cst_cold_drop_kept(space);
    cst_room_give_back(space);
    return n;
}

/* ---- periodic ---- */

static unsigned expire(struct cst_space *space, unsigned left) {
    struct cst_block *b;

    while (left && (b = cst_trie_after(space, 0)) && cst_block_is_expired(b)) {
        (void)cst_block_remove(b, CST_GONE_EXPIRED);
        left--;
    }
    return left;
}

static void end_pins(struct cst_namespace *ns) {
    uint64_t now = cst_store_now(ns->store);
    struct cst_list *it, *last = ns->pinned.prev;
    bool more = !cst_list_is_empty(&ns->pinned);

    for (unsigned i = 0; more && i < PINS_A_SLICE; i++) {
        struct cst_block *b;

        it = ns->pinned.next;
        more = it != last;
        b = cst_list_entry(it, struct cst_block, pin_link);
        cst_list_unlink(it);
        cst_list_append(&ns->pinned, it);
        if (b->pinned_until <= now)
            cst_block_unpin(b);
    }
}

bool cst_care_slice(struct cst_store *store) {
    unsigned left = EXPIRED_A_SLICE;
    struct cst_list *it, *tmp;

    cst_list_for_each_safe (it, tmp, &store->spaces) {
        struct cst_space *space = cst_list_entry(it, struct cst_space, link);

        if (store->options.max_age_ns)
            left = expire(space, left);
        if (!space->map.count)
            cst_room_give_back(space); /* an erased space leaves no bytes behind */
        cst_space_reap(space);
    }
    cst_list_for_each_safe (it, tmp, &store->namespaces)
        end_pins(cst_list_entry(it, struct cst_namespace, link));
    return !left;
}
