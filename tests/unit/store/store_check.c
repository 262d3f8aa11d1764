/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store against itself: every invariant that its files write down, every counter against a
 * count. Slow on purpose: linear in everything. Owns nothing; reads the store's insides.
 */
#include "store/prefix_trie.h"
#include "tests/lib/check.h"
#include "tests/unit/store/store_world.h"

struct sums {
    uint64_t blocks, tails, hot, packed, packed_bytes, pinned, leases, index, children;
    uint64_t clean, dirty;
};

static size_t length(const struct cst_list *head) {
    size_t n = 0;

    for (const struct cst_list *it = head->next; it != head; it = it->next) {
        assert_ptr_equal(it->next->prev, it);
        n++;
    }
    return n;
}

static void check_copy(const struct cst_block *b, const struct cst_copy *c, bool packed,
                       struct sums *sums) {
    if (!c->slab) {
        assert_true(!c->leases && !c->busy);
        return;
    }
    assert_ptr_equal(c->slab->owners[c->slot], b);
    assert_ptr_equal(c->slab->slab.space, b->space);
    assert_int_equal(c->slab->slab.packed, packed);
    assert_false(c->slab->slab.retired);
    assert_true(c->length <= c->slab->slot_bytes);
    sums->leases += c->leases;
    *(packed ? &sums->packed : &sums->hot) += 1;
    if (packed)
        sums->packed_bytes += c->length;
    else
        assert_int_equal(c->length, b->space->desc->block_bytes);
    if (packed && b->space->klass == CST_CLASS_LOSSLESS)
        assert_true(cst_preset_is_exact(b->preset));
}

static void check_children(const struct cst_block *b, struct sums *sums) {
    const struct cst_treap_node *node = cst_treap_first(&b->children);
    size_t n = length(&b->hidden), pinned = b->pinned_until != 0;
    const struct cst_block *last = NULL;

    for (const struct cst_list *it = b->hidden.next; it != &b->hidden; it = it->next) {
        const struct cst_block *child = cst_list_entry(it, struct cst_block, hidden_link);

        assert_true(child->parent == b && !child->visible && !child->pins);
        assert_true(child->seq > b->seq);
    }
    for (; node; node = cst_treap_next(node), n++) {
        const struct cst_block *child = cst_container_of(node, struct cst_block, sibling);
        uint32_t i = 0;

        assert_true(child->parent == b && child->visible && b->visible);
        assert_true(!node->up || node->up->priority >= node->priority);
        while (last && i < last->n_tokens && i < child->n_tokens &&
               last->tokens[i] == child->tokens[i])
            i++;
        assert_true(!last || i == last->n_tokens || last->tokens[i] < child->tokens[i]);
        pinned += child->pins != 0;
        last = child;
    }
    assert_int_equal(b->n_children, n);
    assert_true(b->root || b->pins == pinned);
    sums->children += n;
}

static void check_block(const struct cst_block *b, struct sums *sums) {
    const struct cst_space *space = b->space;
    bool other = b->packed.slab || cst_block_is_cold(b); /* than the hot copy */

    assert_true(!b->dead && !b->root && !b->holds);
    assert_int_equal(b->evict.in, cst_block_is_idle(b));
    assert_int_equal(b->stored, b->hot.slab || other);
    assert_true(b->stored || !cst_list_is_empty(&b->puts));
    assert_true(!b->visible || b->stored);
    assert_true(!b->parent || b->visible == (b->stored && b->parent->visible));
    assert_true(!b->superseded || cst_block_is_leased(b) || b->pins ||
                !cst_list_is_empty(&b->waiters));
    assert_true(cst_list_is_empty(&b->waiters) || b->decode || b->read);
    assert_ptr_equal(cst_trie_find(space, b->key), b);
    if (space->kind == CST_KIND_FLAT)
        assert_true(!b->parent && !b->n_tokens);
    else
        assert_int_equal(b->depth, b->parent->root ? 0 : b->parent->depth + 1);
    if (b->filed == CST_FILED_CLEAN)
        assert_true(b->hot.slab && other && !b->hot.leases && !b->hot.busy);
    else if (b->hot.slab && other)
        assert_true(b->hot.leases || b->hot.busy);
    if (b->filed == CST_FILED_DIRTY)
        assert_true(b->hot.slab && !other && !b->encoding);
    sums->clean += b->filed == CST_FILED_CLEAN;
    sums->dirty += b->filed == CST_FILED_DIRTY;
    sums->blocks += b->stored;
    sums->tails += b->stored && cst_block_is_tail(b);
    sums->pinned += b->pins != 0;
    sums->index += cst_block_bytes(b->n_tokens);
    check_copy(b, &b->hot, false, sums);
    check_copy(b, &b->packed, true, sums);
    check_children(b, sums);
}

static void check_root(struct cst_hnode *node, void *arg) {
    const struct cst_block *b = cst_container_of(node, struct cst_block, by_key);
    struct sums *sums = arg;

    assert_true(b->root && b->visible && b->n_children && !b->holds && !b->evict.in);
    sums->index += cst_block_bytes(0);
    check_children(b, sums);
}

static void check_space(struct cst_space *space) {
    struct sums sums = { .blocks = 0 };
    const struct cst_space_stats *s = &space->stats;
    const struct cst_treap_node *last = NULL;
    size_t n = 0;

    for (const struct cst_treap_node *node = cst_treap_first(&space->by_age); node;
         node = cst_treap_next(node), n++) {
        check_block(cst_container_of(node, struct cst_block, by_age), &sums);
        last = node;
    }
    assert_ptr_equal(last, space->newest);
    assert_int_equal(n, space->map.count);
    cst_hashmap_for_each(&space->roots, check_root, &sums);
    assert_int_equal(sums.children, space->kind == CST_KIND_FLAT ? 0 : n);
    for (const struct cst_list *it = space->dead.next; it != &space->dead; it = it->next) {
        const struct cst_block *b = cst_list_entry(it, struct cst_block, file);

        assert_true(b->dead && (cst_block_is_leased(b) || cst_block_is_busy(b)));
        sums.index += cst_block_bytes(b->n_tokens);
        check_copy(b, &b->hot, false, &sums);
        check_copy(b, &b->packed, true, &sums);
    }
    assert_int_equal(length(&space->dead), space->n_dead);
    assert_int_equal(length(&space->clean), sums.clean);
    assert_int_equal(length(&space->dirty), sums.dirty);
    assert_int_equal(cst_list_is_empty(&space->dirty_link), !sums.dirty);
    assert_int_equal(s->blocks, sums.blocks);
    assert_int_equal(s->tail_blocks, sums.tails);
    assert_int_equal(s->pinned_blocks, sums.pinned);
    assert_int_equal(s->leases, sums.leases);
    assert_int_equal(s->packed_bytes, sums.packed_bytes);
    assert_int_equal(space->hot_copies, sums.hot);
    assert_int_equal(space->packed_copies, sums.packed);
    sums.index += sizeof(*space) + sizeof(*space->desc) +
                  space->desc->n_layers * sizeof(struct cst_layer) +
                  space->desc->n_segments * sizeof(struct cst_segment);
    sums.index += cst_hashmap_bytes(&space->map) + cst_hashmap_bytes(&space->roots) +
                  cst_evict_bytes(&space->evict);
    for (const struct cst_list *it = space->store->slabs.next; it != &space->store->slabs;
         it = it->next) {
        const struct cst_slab_slots *slab = cst_list_entry(it, struct cst_slab_slots, lru);

        if (slab->slab.space == space)
            sums.index += sizeof(*slab) + slab->n_slots * (sizeof(void *) + sizeof(uint32_t));
    }
    if (space->n_jobs || s->held_bytes) /* slabs that are made, dropped or held */
        assert_true(s->index_bytes >= sums.index);
    else
        assert_int_equal(s->index_bytes, sums.index);
}

static uint64_t check_slab(const struct cst_slab_slots *slab, uint64_t *leases) {
    uint32_t used = 0, clean = 0, held = 0;

    assert_ptr_equal(cst_store_slab(slab->slab.space->store, slab->slab.id), &slab->slab);
    for (uint32_t i = 0; i < slab->n_slots; i++) {
        const struct cst_block *b = slab->owners[i];
        const struct cst_copy *c = b ? slab->slab.packed ? &b->packed : &b->hot : NULL;

        if (!b)
            continue;
        assert_true(c->slab == slab && c->slot == i);
        used++;
        held += c->leases;
        clean += !slab->slab.packed && b->filed == CST_FILED_CLEAN;
    }
    assert_true(used <= slab->used && slab->used - used <= slab->busy);
    assert_int_equal(held, slab->leases);
    assert_int_equal(clean, slab->clean);
    assert_int_equal(cst_list_is_empty(&slab->free), slab->used == slab->n_slots);
    assert_int_equal(cst_list_is_empty(&slab->empty), slab->used != 0);
    *leases += held;
    return slab->slab.mem.size;
}

void world_check(const struct world *w) {
    struct cst_store *store = w->store;
    uint64_t slabs = 0, held = 0, index = cst_hashmap_bytes(&store->slab_map), leases = 0;
    uint64_t reserved = 0, touched = 0;

    for (const struct cst_list *it = store->slabs.next; it != &store->slabs; it = it->next) {
        const struct cst_slab_slots *slab = cst_list_entry(it, struct cst_slab_slots, lru);

        slabs += check_slab(slab, &leases);
        assert_true(slab->touched >= touched);
        touched = slab->touched;
    }
    for (const struct cst_list *it = store->retired.next; it != &store->retired; it = it->next)
        held += cst_list_entry(it, struct cst_slab_slots, lru)->slab.mem.size;
    for (const struct cst_list *it = store->spaces.next; it != &store->spaces; it = it->next) {
        struct cst_space *space = cst_list_entry(it, struct cst_space, link);

        check_space(space);
        index += space->stats.index_bytes;
        reserved += space->stats.reserved;
        slabs += (uint64_t)WORLD_SLAB * ((unsigned)space->making_hot + space->making_packed);
    }
    assert_int_equal(store->slab_bytes, slabs);
    assert_int_equal(store->held_bytes, held);
    assert_int_equal(store->index_bytes, index);
    assert_int_equal(store->leases, leases);
    assert_int_equal(store->reserved, reserved);
    assert_true(store->slab_bytes + store->index_bytes + store->encode_bytes + store->side_bytes <=
                store->options.memory);
    assert_true(store->index_bytes <= store->options.index);
    assert_true(cst_list_is_empty(&store->showing) && !store->entered);
}
