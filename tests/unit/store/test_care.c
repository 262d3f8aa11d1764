/* SPDX-License-Identifier: Apache-2.0 */
/* Identity of spaces, erasing, pins, ages, checksums, listing, explaining. */
#include "tests/lib/check.h"

#include "store/prefix_trie.h"
#include "tests/unit/store/store_world.h"

#include <string.h>

static const uint8_t root[32] = { 7 };

static const struct world_options plain = { .seed = 1 };

/* ---- spaces ---- */

static uint64_t n_spaces(const struct world *w) {
    struct cst_store_stats stats;

    cst_store_stats(w->store, &stats);
    return stats.spaces;
}

static void same_identity_is_the_same_space(void **state) {
    struct world *w = world_new(&plain);
    struct cst_space *a = world_space(w, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    struct cst_space *others[] = {
        world_space(w, "b", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS),
        world_space(w, "a", 2, CST_KIND_TOKENS, CST_CLASS_LOSSLESS),
        world_space(w, "a", 1, CST_KIND_FLAT, CST_CLASS_LOSSLESS),
        world_space(w, "a", 1, CST_KIND_TOKENS, CST_CLASS_NEAR_LOSSLESS),
    };
    struct cst_space *again = world_space(w, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    uint8_t key[32];

    assert_ptr_equal(a, again);
    assert_int_equal(n_spaces(w), 5);
    world_store_chain(w, a, root, 5, 1, key);
    for (unsigned i = 0; i < 4; i++) { /* nothing is shared */
        assert_ptr_not_equal(a, others[i]);
        assert_int_equal(world_present(others[i], key, 1), 0);
        assert_null(cst_space_unref(others[i]));
    }
    assert_int_equal(n_spaces(w), 1);
    (void)cst_space_unref(a);
    (void)cst_space_unref(again);
    assert_int_equal(n_spaces(w), 1); /* it has a block */
    again = world_space(w, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    assert_ptr_equal(a, again);
    assert_int_equal(world_present(again, key, 1), 1);
    (void)cst_space_clear(again);
    (void)cst_space_unref(again);
    world_settle(w);
    assert_int_equal(n_spaces(w), 0);
    assert_int_equal(world_slabs, 0);
    world_free(w);
}

static void spaces_of_a_namespace_are_limited(void **state) {
    struct world *w = world_new(&(struct world_options){ .seed = 1, .spaces_max = 2 });
    struct cst_space *a = world_space(w, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    struct cst_space *b = world_space(w, "a", 2, CST_KIND_TOKENS, CST_CLASS_LOSSLESS), *c = NULL;
    struct cst_space *other = world_space(w, "b", 3, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    struct cst_descriptor *d = world_descriptor(3);
    struct cst_namespace *ns = cst_space_namespace(a);
    static const uint8_t fingerprint[32] = { 3 };

    assert_string_equal(cst_namespace_name(ns), "a");
    assert_int_equal(cst_space_open(&c, ns, &d, world_descriptor_free, fingerprint, CST_KIND_TOKENS,
                                    CST_CLASS_LOSSLESS),
                     CST_STORE_E_LIMIT);
    assert_non_null(d); /* still ours */
    (void)cst_space_unref(b);
    assert_int_equal(cst_space_open(&c, ns, &d, world_descriptor_free, fingerprint, CST_KIND_TOKENS,
                                    CST_CLASS_LOSSLESS),
                     0);
    assert_null(d);
    assert_memory_equal(cst_space_fingerprint(c), fingerprint, 32);
    (void)cst_space_unref(c);
    (void)cst_space_unref(other);
    world_end(w, a);
}

static void an_unknown_policy_is_refused(void **state) {
    struct cst_store *store = NULL;

    assert_int_equal(cst_store_new(&store, &(struct cst_store_options){ .policy = "best" },
                                   &(struct cst_store_env){ 0 }),
                     CST_STORE_E_POLICY);
    assert_null(store);
    assert_null(cst_store_free(NULL));
}

/* ---- erasing ---- */

static void erase_takes_the_subtree(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    struct cst_space_stats stats;
    struct world_fetch f;
    uint8_t keys[6 * 32];
    uint64_t n;

    world_store_chain(w, s, root, 5, 6, keys);
    world_fetch(w, s, keys + 32 * 4, CST_FETCH_DECODED, &f);
    assert_int_equal(cst_space_erase(s, keys + 32 * 2, &n), 0);
    assert_int_equal(n, 4);
    assert_int_equal(w->events[CST_EVENT_ERASED], 1);
    assert_int_equal(w->events[CST_EVENT_DETACHED], 3);
    assert_memory_equal(w->last_event_key, keys + 32 * 2, 32); /* leaves first */
    assert_int_equal(world_present(s, keys, 6), 2);
    cst_space_stats(s, &stats);
    assert_int_equal(stats.detached_blocks, 3);
    assert_int_equal(stats.blocks, 2);
    assert_int_equal(stats.leases, 1);
    assert_true(world_bytes_are(&f.fetch.loc, keys + 32 * 4, 1)); /* readable while leased */
    world_check(w);
    cst_fetch_release(&f.fetch);
    assert_int_equal(s->n_dead, 0);
    world_end(w, s);
}

static void erased_blocks_can_be_stored_again(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    struct world_fetch old, fresh;
    uint8_t key[32];
    uint64_t n;

    world_store_chain(w, s, root, 5, 1, key);
    world_fetch(w, s, key, CST_FETCH_DECODED, &old);
    assert_int_equal(cst_space_erase(s, key, &n), 0);
    world_store_chain(w, s, root, 5, 1, key);
    world_fetch(w, s, key, CST_FETCH_DECODED, &fresh);
    assert_int_equal(fresh.status, 0);
    assert_int_not_equal(old.fetch.loc.offset, fresh.fetch.loc.offset);
    assert_true(world_bytes_are(&old.fetch.loc, key, 1));
    assert_true(world_bytes_are(&fresh.fetch.loc, key, 1));
    cst_fetch_release(&old.fetch);
    assert_int_equal(world_present(s, key, 1), 1);
    cst_fetch_release(&fresh.fetch);
    world_end(w, s);
}

static void a_decode_outlives_its_block(void **state) {
    struct world *w = world_new(&(struct world_options){ .seed = 1, .manual_jobs = true });
    struct cst_space *s = world_space(w, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    struct world_fetch f;
    uint8_t key[32];
    uint64_t n;

    for (unsigned steps = 0; steps < 2; steps++) {
        world_store_chain(w, s, root, 5, 1, key);
        world_pack(w);
        world_cool(s, key);
        f = (struct world_fetch){ .fetch = CST_FETCH_NULL(world_fetch_ready) };
        assert_int_equal(cst_fetch_start(s, key, CST_FETCH_DECODED, &f.fetch), CST_STORE_E_PENDING);
        if (steps)
            assert_true(test_jobs_run(&w->jobs, 0));
        assert_int_equal(cst_space_erase(s, key, &n), 0);
        assert_int_equal(f.told, 0); /* never from the call */
        world_settle(w);
        assert_int_equal(f.told, 1);
        assert_int_equal(f.status, CST_STORE_E_NOT_FOUND);
        assert_int_equal(s->n_dead, 0);
        world_check(w);
    }
    world_end(w, s);
}

static void purge_empties_one_namespace(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    struct cst_space *flat = world_space(w, "a", 1, CST_KIND_FLAT, CST_CLASS_LOSSLESS);
    struct cst_space *other = world_space(w, "b", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    struct cst_space_stats stats;
    uint8_t keys[3 * 32], flat_key[32];

    world_store_chain(w, s, root, 5, 3, keys);
    world_store_chain(w, other, root, 5, 3, keys);
    world_key_n(flat_key, 1);
    assert_int_equal(world_store(w, flat, NULL, false, flat_key, NULL, 0), 0);
    assert_int_equal(cst_namespace_purge(cst_space_namespace(s), &(enum cst_purge){ 0 }), 4);
    assert_int_equal(world_present(s, keys, 3), 0);
    assert_int_equal(world_present(other, keys, 3), 3);
    world_settle(w);
    cst_namespace_stats(cst_space_namespace(s), &stats);
    assert_int_equal(stats.hot_slab_bytes + stats.packed_slab_bytes + stats.blocks, 0);
    assert_int_equal(stats.stored_blocks, 4); /* counters stay */
    assert_int_equal(world_slabs, 1);
    (void)cst_space_unref(flat);
    cst_namespace_stats(cst_space_namespace(s), &stats);
    assert_int_equal(stats.stored_blocks, 4); /* of a space that is gone, too */
    (void)cst_space_unref(other);
    world_end(w, s);
}

/* A slab that was leased while its space was purged goes with the lease. */
static void nothing_stays_after_a_purge(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    struct world_fetch f;
    uint8_t key[32];

    world_store_chain(w, s, root, 5, 1, key);
    world_fetch(w, s, key, CST_FETCH_DECODED, &f);
    assert_int_equal(cst_namespace_purge(cst_space_namespace(s), &(enum cst_purge){ 0 }), 1);
    assert_int_equal(world_slabs, 1);
    cst_fetch_release(&f.fetch);
    cst_store_tick(w->store);
    world_settle(w);
    assert_int_equal(world_slabs, 0);
    world_end(w, s);
}

/* ---- pins ---- */

static uint64_t pinned(struct cst_space *s) {
    struct cst_space_stats stats;

    cst_space_stats(s, &stats);
    return stats.pinned_blocks;
}

static void a_pin_is_charged_with_its_ancestors(void **state) {
    struct cst_space *s;
    struct world *w =
        world_with(&(struct world_options){ .seed = 1, .pin_bytes = 4 * WORLD_BLOCK }, &s);
    uint8_t keys[6 * 32];

    world_store_chain(w, s, root, 5, 6, keys);
    assert_int_equal(cst_space_pin(s, keys + 32 * 2, 0), 0);
    assert_int_equal(pinned(s), 3);
    assert_int_equal(cst_space_pin(s, keys + 32 * 2, 0), 0); /* again: nothing new */
    assert_int_equal(cst_space_pin(s, keys + 32, 0), 0);     /* on the way: nothing new */
    assert_int_equal(pinned(s), 3);
    assert_int_equal(cst_space_pin(s, keys + 32 * 4, 0), CST_STORE_E_LIMIT);
    assert_int_equal(pinned(s), 3);
    assert_int_equal(cst_space_pin(s, keys + 32 * 3, 0), 0);
    assert_int_equal(pinned(s), 4);
    world_check(w);
    assert_int_equal(cst_space_unpin(s, keys + 32 * 3), 0);
    assert_int_equal(pinned(s), 3);
    assert_int_equal(cst_space_unpin(s, keys + 32 * 3), CST_STORE_E_NOT_FOUND);
    assert_int_equal(cst_space_unpin(s, keys + 32 * 2), 0);
    assert_int_equal(pinned(s), 2); /* that of block 1 */
    assert_int_equal(cst_space_unpin(s, keys + 32), 0);
    assert_int_equal(pinned(s), 0);
    world_end(w, s);
}

static void a_pin_ends_by_itself(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    uint8_t keys[3 * 32];
    uint64_t n;

    world_store_chain(w, s, root, 5, 3, keys);
    assert_int_equal(cst_space_pin(s, keys, 10 * CST_NS_PER_S), 0);
    assert_int_equal(cst_space_pin(s, keys + 64, 20 * CST_NS_PER_S), 0);
    assert_int_equal(cst_space_pin(s, keys + 32, UINT64_MAX), 0);
    w->clock.ns += 11 * CST_NS_PER_S;
    cst_store_tick(w->store);
    assert_int_equal(pinned(s), 3);
    w->clock.ns += 10 * CST_NS_PER_S;
    cst_store_tick(w->store);
    assert_int_equal(pinned(s), 2);
    assert_int_equal(cst_space_erase(s, keys, &n), 0); /* erasing ends pins */
    assert_int_equal(pinned(s), 0);
    assert_int_equal(cst_space_namespace(s)->pinned_bytes, 0);
    world_end(w, s);
}

/* ---- ages ---- */

static void old_blocks_are_gone(void **state) {
    struct cst_space *s;
    struct world *w =
        world_with(&(struct world_options){ .seed = 1, .max_age_ns = 60 * CST_NS_PER_S }, &s);
    struct cst_space_stats stats;
    struct cst_lookup found;
    struct world_fetch f;
    uint8_t keys[4 * 32], more[4 * 32];
    const uint32_t tail = 7;
    uint64_t n;

    world_store_chain(w, s, root, 5, 2, keys);
    w->clock.ns += 50 * CST_NS_PER_S;
    world_key(more, keys + 32, &tail, 1);
    assert_int_equal(world_store(w, s, keys + 32, false, more, &tail, 1), 0);
    assert_int_equal(world_present(s, keys, 2), 2);
    w->clock.ns += 10 * CST_NS_PER_S; /* no tick yet: but it is not served any more */
    assert_int_equal(world_present(s, keys, 2), 0);
    cst_space_lookup(s, keys, 2, root, &tail, 1, NULL, &found);
    assert_int_equal(found.present + found.partial_tokens, 0);
    world_fetch(w, s, keys, CST_FETCH_DECODED, &f);
    assert_int_equal(f.status, CST_STORE_E_NOT_FOUND);
    assert_int_equal(cst_space_touch(s, keys), CST_STORE_E_NOT_FOUND);
    assert_int_equal(cst_space_erase(s, keys, &n), CST_STORE_E_NOT_FOUND);
    world_key_n(more + 32, 9);
    assert_int_equal(world_store(w, s, keys + 32, false, more + 32, &tail, 1),
                     CST_STORE_E_PARENT_MISSING);
    cst_store_tick(w->store);
    cst_space_stats(s, &stats);
    assert_int_equal(stats.blocks, 0); /* a younger child goes with its parents */
    assert_int_equal(stats.expired_blocks, 1);
    assert_int_equal(stats.detached_blocks, 2);
    world_store_chain(w, s, root, 5, 2, keys);
    w->clock.ns += 60 * CST_NS_PER_S;
    world_store_chain(w, s, root, 5, 2, keys); /* stored anew without a tick */
    assert_int_equal(world_present(s, keys, 2), 2);
    world_end(w, s);
}

/* However many blocks grow too old at once: each tick ends some of them and says that more are
 * left, so that an idle daemon does not go to sleep over them. */
static void ages_end_before_the_daemon_sleeps(void **state) {
    struct cst_space *s;
    struct world *w =
        world_with(&(struct world_options){ .seed = 1, .max_age_ns = 60 * CST_NS_PER_S }, &s);
    const uint32_t n = 2500;
    struct cst_space_stats stats;
    unsigned ticks = 0;
    uint8_t key[32];

    for (uint32_t i = 0; i < n; i++) {
        world_key_n(key, i);
        assert_int_equal(world_store(w, s, root, true, key, &i, 1), 0);
    }
    assert_false(cst_store_tick(w->store));
    w->clock.ns += 60 * CST_NS_PER_S;
    while (cst_store_tick(w->store) && ticks++ < n)
        ;
    assert_in_range(ticks, 1, 10);
    cst_space_stats(s, &stats);
    assert_int_equal(stats.blocks, 0);
    assert_int_equal(stats.expired_blocks, n);
    world_end(w, s);
}

/* ---- checksums ---- */

static void flip(struct cst_copy *c) {
    cst_slot_data(c->slab, c->slot)[c->length / 2] ^= 0x40;
}

static uint64_t corrupt(struct cst_space *s) {
    struct cst_space_stats stats;

    cst_space_stats(s, &stats);
    return stats.corrupt_blocks;
}

static void a_flipped_bit_is_found_before_encoding(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    struct cst_space_stats stats;
    uint8_t keys[3 * 32];

    world_store_chain(w, s, root, 5, 3, keys);
    flip(&cst_trie_find(s, keys + 32)->hot);
    assert_true(cst_encode_kick(s)); /* a tick would scrub, too */
    world_settle(w);
    assert_int_equal(world_present(s, keys, 3), 1); /* with what hung below */
    assert_int_equal(corrupt(s), 1);
    cst_space_stats(s, &stats);
    assert_int_equal(stats.encodes, 1);
    world_end(w, s);
}

/* Any byte of any frame. */
static void a_flipped_bit_is_found_before_decoding(void **state) {
    for (unsigned c = 0; c < CST_CLASSES; c++) {
        struct world *w = world_new(&plain);
        struct cst_space *s = world_space(w, "a", 1, CST_KIND_TOKENS, (enum cst_class)c);
        uint32_t length = UINT32_MAX;
        unsigned n = 0;

        for (uint32_t at = 0; at < length; at += at < 128 ? 1 : 61, n++) {
            uint8_t keys[3 * 32];
            struct world_fetch f;
            struct cst_copy *frame;

            world_store_chain(w, s, root, 5, 3, keys);
            world_pack(w);
            world_cool(s, keys + 32);
            frame = &cst_trie_find(s, keys + 32)->packed;
            length = frame->length;
            cst_slot_data(frame->slab, frame->slot)[at] ^= (uint8_t)(1u << at % 8);
            world_fetch(w, s, keys + 32, CST_FETCH_DECODED, &f);
            assert_int_equal(f.status, CST_STORE_E_CORRUPT);
            assert_int_equal(world_present(s, keys, 3), 1);
            assert_int_equal(corrupt(s), n + 1);
            (void)cst_space_clear(s);
        }
        world_end(w, s);
    }
}

/* Every copy is looked at, also of blocks that nobody asks for. */
static void the_scrubber_finds_every_flipped_bit(void **state) {
    enum { N = 40 };

    for (unsigned packed = 0; packed < 2; packed++) {
        struct cst_space *s;
        struct world *w = world_with(&plain, &s);
        uint8_t keys[N * 32];

        for (uint32_t i = 0; i < N; i++)
            world_store_chain(w, s, root, 5 + i, 1, keys + 32 * i);
        world_pack(w);
        for (unsigned i = 0; i < N; i += 3) {
            struct cst_block *b = cst_trie_find(s, keys + 32 * i);

            flip(packed ? &b->packed : &b->hot);
        }
        for (unsigned i = 0; i < 2 * N + 8; i++) { /* two copies of each, and the way around */
            cst_store_tick(w->store);
            world_settle(w);
        }
        assert_int_equal(corrupt(s), (N + 2) / 3);
        for (unsigned i = 0; i < N; i++)
            assert_int_equal(world_present(s, keys + 32 * i, 1), i % 3 != 0);
        world_end(w, s);
    }
}

/* ---- listing ---- */

static void listing_sees_each_block_once(void **state) {
    enum { N = 20 };
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    uint8_t keys[N * 32];
    struct cst_block_info info[3];
    uint64_t cursor = 0, erased;
    unsigned seen = 0;

    world_store_chain(w, s, root, 5, N, keys);
    do {
        size_t n = cst_space_blocks(s, cursor, info, 3, &cursor);

        for (size_t i = 0; i < n; i++, seen++) {
            assert_memory_equal(info[i].key, keys + 32 * seen, 32);
            assert_memory_equal(info[i].parent, seen ? keys + 32 * (seen - 1) : root, 32);
            assert_int_equal(info[i].depth, seen);
            assert_int_equal(info[i].tokens, WORLD_TOKENS);
            assert_int_equal(info[i].tier, CST_TIER_HOT);
            assert_true(info[i].surprisal < 0);
        }
        if (seen == 6) /* under the cursor */
            assert_int_equal(cst_space_erase(s, keys + 32 * 12, &erased), 0);
    } while (cursor);
    assert_int_equal(seen, 12);
    world_end(w, s);
}

/* ---- explaining ---- */

static void misses_are_explained(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    struct cst_space *lossy = world_space(w, "a", 1, CST_KIND_TOKENS, CST_CLASS_COLD);
    struct cst_space *other = world_space(w, "a", 2, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    struct cst_space *foreign = world_space(w, "b", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    struct cst_explanation e;
    uint8_t keys[4 * 32], more[32];
    const uint32_t tail[2] = { 1, 2 };

    world_store_chain(w, foreign, root, 5, 4, keys);
    cst_space_explain(s, root, keys, 4, NULL, 0, &e); /* another namespace's blocks are no answer */
    assert_int_equal(e.present, 0);
    assert_false(e.has_nearest);
    assert_string_equal(e.field, "");
    assert_string_equal(e.reason, "0 of 4 blocks are stored; block 0 is not there: nothing is "
                                  "stored in this space");
    world_key_n(more, 1);
    assert_int_equal(world_store(w, other, root, true, more, tail, 2), 0);
    cst_space_explain(s, root, keys, 4, NULL, 0, &e);
    assert_true(e.has_nearest);
    assert_int_equal(e.nearest[0], 2);
    assert_string_equal(e.field, "content_id");
    assert_non_null(strstr(e.reason, "the nearest space that holds blocks has another content_id"));
    world_store_chain(w, lossy, root, 5, 4, keys);
    cst_space_explain(s, root, keys, 4, NULL, 0, &e);
    assert_int_equal(e.nearest_present, 4);
    assert_string_equal(e.field, "class");
    assert_non_null(strstr(e.reason, "4 are in a space with another class"));
    world_store_chain(w, s, root, 5, 2, keys);
    keys[32 * 2] ^= 1;
    cst_space_explain(s, root, keys, 4, NULL, 0, &e);
    assert_int_equal(e.present, 2);
    assert_non_null(strstr(e.reason, "2 of 4 blocks are stored; block 2 is not there"));
    cst_space_explain(s, root, keys, 2, tail, 2, &e);
    assert_non_null(strstr(e.reason, "all 2 blocks are stored; 0 of the 2 tokens"));
    /* A prompt shorter than a block has no keys, only ids below the root. */
    world_key_n(more, 2);
    assert_int_equal(world_store(w, s, root, true, more, tail, 2), 0);
    cst_space_explain(s, root, NULL, 0, tail, 2, &e);
    assert_non_null(strstr(e.reason, "all 0 blocks are stored; 2 of the 2 tokens"));
    (void)cst_space_unref(lossy);
    (void)cst_space_unref(other);
    (void)cst_space_unref(foreign);
    world_end(w, s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_identity_is_the_same_space),
        cmocka_unit_test(spaces_of_a_namespace_are_limited),
        cmocka_unit_test(an_unknown_policy_is_refused),
        cmocka_unit_test(erase_takes_the_subtree),
        cmocka_unit_test(erased_blocks_can_be_stored_again),
        cmocka_unit_test(a_decode_outlives_its_block),
        cmocka_unit_test(purge_empties_one_namespace),
        cmocka_unit_test(nothing_stays_after_a_purge),
        cmocka_unit_test(a_pin_is_charged_with_its_ancestors),
        cmocka_unit_test(a_pin_ends_by_itself),
        cmocka_unit_test(old_blocks_are_gone),
        cmocka_unit_test(ages_end_before_the_daemon_sleeps),
        cmocka_unit_test(a_flipped_bit_is_found_before_encoding),
        cmocka_unit_test(a_flipped_bit_is_found_before_decoding),
        cmocka_unit_test(the_scrubber_finds_every_flipped_bit),
        cmocka_unit_test(listing_sees_each_block_once),
        cmocka_unit_test(misses_are_explained),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
