/* SPDX-License-Identifier: Apache-2.0 */
/* The hash map against a naive model (a flag per key), through growth, removal and iteration. */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "base/hashmap.h"
#include "base/random.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { KEYS = 20000, STEPS = 200000 };

struct entry {
    struct cst_hnode node;
    uint32_t key;
    bool in; /* the model */
    unsigned visits;
};

struct world {
    struct cst_hashmap map;
    struct entry *entries;
    struct cst_seeded_random rng;
    size_t count;
    uint64_t hash_mask; /* few bits: long chains and equal hashes */
};

static uint64_t hash_of(const struct world *w, uint32_t key) {
    return cst_hash_u64(77, key) & w->hash_mask;
}

static bool eq(const struct cst_hnode *node, const void *key) {
    return cst_container_of(node, struct entry, node)->key == *(const uint32_t *)key;
}

static void check_key(struct world *w, uint32_t key) {
    struct cst_hnode *found;

    cst_hashmap_prefetch(&w->map, hash_of(w, key), key % 2); /* a hint changes nothing */
    found = cst_hashmap_find(&w->map, hash_of(w, key), eq, &key);

    assert_ptr_equal(found, w->entries[key].in ? &w->entries[key].node : NULL);
}

static void flip(struct world *w, uint32_t key) {
    struct entry *e = &w->entries[key];

    if (e->in) {
        cst_hashmap_remove(&w->map, &e->node);
        w->count--;
    } else {
        assert_int_equal(cst_hashmap_insert(&w->map, &e->node, hash_of(w, key)), 0);
        w->count++;
    }
    e->in = !e->in;
    assert_int_equal(w->map.count, w->count);
}

static struct world setup(uint64_t hash_mask) {
    struct world w = { .map = CST_HASHMAP_NULL, .hash_mask = hash_mask };

    w.entries = calloc(KEYS, sizeof(*w.entries));
    assert_non_null(w.entries);
    for (uint32_t i = 0; i < KEYS; i++)
        w.entries[i].key = i;
    cst_seeded_random_init(&w.rng, 42);
    return w;
}

static void visit(struct cst_hnode *node, void *arg) {
    struct world *w = arg;
    struct entry *e = cst_container_of(node, struct entry, node);

    e->visits++;
    if (e->key % 3 == 0) /* removing the visited node is allowed */
        flip(w, e->key);
}

static void for_each_visits_all_once(struct world *w) {
    for (uint32_t i = 0; i < KEYS; i++)
        w->entries[i].visits = 0;
    for (uint32_t i = 0; i < KEYS; i++)
        if (w->entries[i].in)
            w->entries[i].visits = 1000;
    cst_hashmap_for_each(&w->map, visit, w);
    for (uint32_t i = 0; i < KEYS; i++) {
        assert_true(w->entries[i].visits == 0 || w->entries[i].visits == 1001);
        check_key(w, i);
    }
}

static void random_operations(uint64_t hash_mask, uint32_t keys, unsigned steps) {
    struct world w = setup(hash_mask);
    bool resizing_seen = false;

    for (unsigned step = 0; step < steps; step++) {
        uint32_t key = (uint32_t)(cst_seeded_random_next(&w.rng) % keys);

        flip(&w, key);
        check_key(&w, (uint32_t)(cst_seeded_random_next(&w.rng) % keys));
        if (w.map.buckets[1] && !resizing_seen) { /* in the middle of a resize */
            resizing_seen = true;
            for_each_visits_all_once(&w);
        }
    }
    assert_true(resizing_seen);
    for_each_visits_all_once(&w);
    cst_hashmap_deinit(&w.map);
    assert_int_equal(cst_hashmap_bytes(&w.map), 0);
    cst_hashmap_deinit(&w.map);
    free(w.entries);
}

static void equals_the_model(void **state) {
    random_operations(UINT64_MAX, KEYS, STEPS);
}

static void equals_the_model_with_colliding_hashes(void **state) {
    random_operations(63, 1000, 20000);
}

static void growth_is_spread_over_inserts(void **state) {
    struct world w = setup(UINT64_MAX);

    for (uint32_t key = 0; key < KEYS; key++) {
        size_t moved = w.map.buckets[1] ? w.map.move : 0;
        const void *old = w.map.buckets[1];
        size_t bytes = cst_hashmap_bytes(&w.map), growth = cst_hashmap_growth(&w.map);

        flip(&w, key);
        assert_true(cst_hashmap_bytes(&w.map) <= bytes + growth);
        assert_true(!growth || cst_hashmap_bytes(&w.map) == bytes + growth);
        if (old && w.map.buckets[1] == old)
            assert_in_range(w.map.move - moved, 0, 4);
        /* never more than 1 entry a bucket in the long run, never more than 2 tables of room */
        assert_true(w.map.count <= w.map.mask[0] + 1 || w.map.buckets[1]);
        assert_true(cst_hashmap_bytes(&w.map) <= (64 + 3 * w.map.count) * sizeof(void *));
    }
    for (uint32_t key = 0; key < KEYS; key++)
        check_key(&w, key);
    cst_hashmap_deinit(&w.map);
    free(w.entries);
}

/* What is expected is there with the next growth, and nothing is moved after that. */
static void an_expected_size_comes_at_once(void **state) {
    struct world w = setup(UINT64_MAX);
    size_t bytes;

    for (uint32_t key = 0; key < 63; key++)
        flip(&w, key);
    cst_hashmap_expect(&w.map, 1000);
    assert_int_equal(cst_hashmap_bytes(&w.map), 64 * sizeof(void *));
    assert_int_equal(cst_hashmap_growth(&w.map), 0);
    flip(&w, 63);
    assert_int_equal(cst_hashmap_growth(&w.map), 1024 * sizeof(void *));
    flip(&w, 64);
    bytes = cst_hashmap_bytes(&w.map);
    assert_int_equal(bytes, (64 + 1024) * sizeof(void *));
    for (uint32_t key = 65; key < 1024; key++)
        flip(&w, key);
    assert_int_equal(cst_hashmap_bytes(&w.map), 1024 * sizeof(void *));
    cst_hashmap_expect(&w.map, 10); /* less than there are */
    assert_int_equal(cst_hashmap_growth(&w.map), 2048 * sizeof(void *));
    for (uint32_t key = 0; key < 1024; key++)
        check_key(&w, key);
    for_each_visits_all_once(&w);
    cst_hashmap_deinit(&w.map);
    free(w.entries);
}

static void a_failed_insert_changes_nothing(void **state) {
    struct world w = setup(UINT64_MAX);
    unsigned failures = 0;

    cst_fault_join();
    for (uint32_t key = 0; key < 1000; key++) {
        struct entry *e = &w.entries[key];

        cst_fault_arm(CST_FAULT_ALLOC, 1, 1);
        if (cst_hashmap_insert(&w.map, &e->node, hash_of(&w, key))) {
            failures++;
            check_key(&w, key);
            assert_int_equal(w.map.count, key);
            assert_int_equal(cst_hashmap_insert(&w.map, &e->node, hash_of(&w, key)), 0);
        }
        e->in = true;
        check_key(&w, key / 2);
    }
    cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
    cst_fault_leave();
    assert_int_equal(failures, 5); /* tables of 64, 128, 256, 512 and 1024 buckets */
    cst_hashmap_deinit(&w.map);
    free(w.entries);
}

static void an_empty_map_finds_nothing(void **state) {
    struct cst_hashmap map = CST_HASHMAP_NULL;
    uint32_t key = 1;

    assert_null(cst_hashmap_find(&map, 1, eq, &key));
    cst_hashmap_for_each(&map, visit, NULL);
    assert_int_equal(cst_hashmap_bytes(&map), 0);
    cst_hashmap_deinit(&map);
}

/* Every bit of key and seed moves about half of the output bits, on average over inputs. */
static void hash_key_mixes_every_bit(void **state) {
    const uint64_t seed[4] = { UINT64_C(0x243f6a8885a308d3), UINT64_C(0x13198a2e03707344),
                               UINT64_C(0xa4093822299f31d0), UINT64_C(0x082efa98ec4e6c89) };
    struct cst_seeded_random rng;
    enum { TRIALS = 64 };

    cst_seeded_random_init(&rng, 5);
    for (unsigned bit = 0; bit < 512; bit++) {
        unsigned flipped = 0;

        for (unsigned i = 0; i < TRIALS; i++) {
            uint64_t seed2[4];
            uint8_t key[32], key2[32];

            assert_int_equal(rng.random.fill(&rng.random, key, sizeof(key)), 0);
            memcpy(key2, key, sizeof(key));
            memcpy(seed2, seed, sizeof(seed));
            if (bit < 256)
                key2[bit / 8] ^= (uint8_t)(1u << bit % 8);
            else
                seed2[(bit - 256) / 64] ^= UINT64_C(1) << bit % 64;
            flipped +=
                (unsigned)__builtin_popcountll(cst_hash_key(seed, key) ^ cst_hash_key(seed2, key2));
        }
        /* mean 32 a trial, deviation 4 / sqrt(64) = 0.5 */
        assert_in_range(flipped, 28 * TRIALS, 36 * TRIALS);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_the_model),
        cmocka_unit_test(equals_the_model_with_colliding_hashes),
        cmocka_unit_test(growth_is_spread_over_inserts),
        cmocka_unit_test(an_expected_size_comes_at_once),
        cmocka_unit_test(a_failed_insert_changes_nothing),
        cmocka_unit_test(an_empty_map_finds_nothing),
        cmocka_unit_test(hash_key_mixes_every_bit),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
