/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A memory that overflows to disk: whatever the order in which jobs and operations of the disk end,
 * and however late, blocks wait for each other and none is lost or written twice. What fails once
 * is written the next time.
 */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "base/macros.h"
#include "store/cold.h"
#include "store/prefix_trie.h"
#include "tests/unit/store/store_world.h"

#include <string.h>

enum { CHAINS = 24, LENGTH = 48, N = CHAINS * LENGTH, SEEDS = 40 };

struct lab {
    struct world *world;
    struct cst_space *space;
    struct cst_seeded_random order;
    unsigned slowness; /* of the disk: one turn in so many is its */
    uint8_t keys[N * 32];
};

static uint64_t any(struct lab *l, uint64_t n) {
    return cst_seeded_random_next(&l->order) % n;
}

/* Memory for an eighth of the blocks, a disk for all of them. */
static void lab_init(struct lab *l, uint64_t seed) {
    struct world_options options = {
        .seed = seed, .index = 1 << 20, .manual_jobs = true, .policy = "lru"
    };
    const struct cst_disk_options disk = { .seg = { .bytes = 16 << 20,
                                                    .segment_bytes = 256 << 10,
                                                    .buffer_bytes = 32 << 10,
                                                    .crypt = CST_SEG_CRYPT_OFF },
                                           .read_bytes = 256 << 10 };

    cst_seeded_random_init(&l->order, seed);
    l->slowness = 2 + (unsigned)any(l, 200);
    options.memory = (2 << 20) + any(l, 1 << 20);
    l->world = world_new(&options);
    world_disk_open(l->world, 32 << 20, 1, disk);
    world_recover(l->world);
    l->space = world_space(l->world, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
}

static void lab_end(struct lab *l) {
    world_settle(l->world);
    (void)cst_space_unref(l->space);
    world_settle(l->world);
    world_free(l->world);
}

/* A writer that stores one block after another, each as soon as the last one is told. */
static void store_block(struct lab *l, const uint8_t *parent, bool is_root, uint32_t id,
                        uint8_t key[32]) {
    struct world_put put = { .put = CST_PUT_NULL(world_put_done) };
    uint32_t tokens[WORLD_TOKENS], busy_ms;

    for (unsigned t = 0; t < WORLD_TOKENS; t++)
        tokens[t] = id;
    world_key(key, parent, tokens, WORLD_TOKENS);
    world_fill(put.bytes, key, 0);
    assert_int_equal(
        cst_put_begin(l->space, parent, is_root, key, tokens, WORLD_TOKENS, &put.put, &busy_ms), 0);
    cst_put_commit(&put.put, put.bytes, NULL);
    for (unsigned i = 0; !put.told && i < 1000000; i++)
        world_get_on(l->world, &l->order, l->slowness);
    assert_int_equal(put.told, 1);
    assert_int_equal(put.status, 0);
}

static void nothing_is_lost_in_any_order(void **state) {
    static const uint8_t root[32] = { 7 };

    (void)state;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        struct lab l = { 0 };

        lab_init(&l, seed);
        for (uint32_t i = 0; i < N; i++)
            store_block(&l, i % LENGTH ? l.keys + 32UL * (i - 1) : root, i % LENGTH == 0, i,
                        l.keys + 32UL * i);
        world_settle(l.world);
        assert_int_equal(l.space->stats.evicted_blocks, 0);
        assert_true(l.space->stats.encodes <= N);
        assert_true(l.space->stats.cold_blocks > N / 2);
        assert_int_equal(l.space->stats.spilled_blocks, l.space->stats.cold_blocks);
        for (uint32_t i = 0; i < CHAINS; i++)
            assert_int_equal(world_present(l.space, l.keys + 32UL * LENGTH * i, LENGTH), LENGTH);
        lab_end(&l);
    }
}

/* ---- what fails ---- */

enum { FEW = 64 }; /* in two segments */

enum failing { A_WRITE, AN_ALLOCATION, ROOM, N_FAILING };

static void arm(struct world *w, enum failing what, uint64_t nth) {
    if (what != AN_ALLOCATION)
        cst_aio_fault_arm(w->aio, what == ROOM ? CST_AIO_FAULT_FULL : CST_AIO_FAULT_EIO, nth,
                          nth ? 1 : 0);
    else
        cst_fault_arm(CST_FAULT_ALLOC, nth, nth ? 1 : 0);
}

static uint64_t seen(const struct world *w, enum failing what) {
    return what == AN_ALLOCATION ? cst_fault_seen(CST_FAULT_ALLOC) : cst_aio_fault_seen(w->aio);
}

/* Blocks that were on disk; a tier that can't make a segment evicts one of them instead. */
static unsigned written(struct cst_space *s, const uint8_t *keys) {
    unsigned n = 0;

    for (unsigned i = 0; i < FEW; i++) {
        struct cst_block *b = cst_trie_find(s, keys + 32UL * i);

        n += cst_block_is_cold(b) || b->written;
    }
    return n;
}

/* A chain is written while the nth thing fails, and then once more; or a clean stop does both.
 * False: there were fewer things. */
static bool fails_at(enum failing what, uint64_t nth, bool stops) {
    static const uint8_t root[32] = { 7 };
    uint8_t keys[FEW * 32];
    struct cst_space *s;
    struct world *w = world_with(&(struct world_options){ .seed = 1, .memory = 4 << 20 }, &s);
    struct cst_block *last;
    uint64_t total;
    bool hit;

    world_disk_open(w, 4 << 20, 1,
                    (struct cst_disk_options){ .seg = { .bytes = 2 << 20,
                                                        .segment_bytes = 256 << 10,
                                                        .buffer_bytes = 1 << 20,
                                                        .crypt = CST_SEG_CRYPT_OFF } });
    world_recover(w);
    assert_int_equal(cst_cold_open_space(s), 0);
    world_store_chain(w, s, root, 100, FEW, keys);
    world_pack(w);
    last = cst_trie_find(s, keys + 32UL * (FEW - 1));
    arm(w, what, nth);
    if (stops)
        for (unsigned i = 0; cst_store_drain(w->store, i < 100, &total); i++)
            world_settle(w);
    else
        (void)cst_cold_spill(last); /* with all above it */
    world_settle(w);
    hit = seen(w, what) >= nth;
    arm(w, what, 0);
    for (unsigned i = 0; !stops && i < FEW; i++) {
        (void)cst_cold_spill(last);
        world_settle(w);
    }
    assert_int_equal(written(s, keys), FEW);
    world_end(w, s);
    return hit;
}

/* ... also where it costs the writes of all that stood behind it. */
static void what_fails_once_is_written_the_next_time(void **state) {
    uint64_t nth;

    (void)state;
    cst_fault_join();
    for (unsigned i = 0; i < 2 * N_FAILING; i++) {
        for (nth = 1; fails_at(i / 2, nth, i % 2); nth++)
            ;
        assert_true(nth > 4); /* a header, a space, heads, payloads */
    }
    cst_fault_leave();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_fails_once_is_written_the_next_time),
        cmocka_unit_test(nothing_is_lost_in_any_order),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
