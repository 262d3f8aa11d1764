/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A memory that overflows to disk: whatever the order in which jobs and operations of the disk end,
 * and however late, blocks wait for each other and none is lost or written twice.
 */
#include "tests/lib/check.h"

#include "base/macros.h"
#include "tests/unit/store/store_world.h"

#include <string.h>

enum { CHAINS = 24, LENGTH = 48, N = CHAINS * LENGTH, SEEDS = 40 };

struct lab {
    struct cst_sim_disk *disk;
    struct cst_aio *aio;
    struct world *world;
    struct cst_space *space;
    struct cst_seeded_random order;
    unsigned slowness; /* of the disk: one turn in so many is its */
    uint8_t keys[N * 32];
};

static uint64_t any(struct lab *l, uint64_t n) {
    return cst_seeded_random_next(&l->order) % n;
}

/* One thing happens: a job runs, its end is told, or the disk gets on. */
static void step(struct lab *l) {
    struct test_jobs *jobs = &l->world->jobs;

    if (!any(l, l->slowness)) {
        cst_aio_kick(l->aio);
        (void)cst_aio_reap(l->aio);
    } else if (any(l, 2)) {
        (void)test_jobs_run(jobs, any(l, 64));
    } else {
        (void)test_jobs_done(jobs, any(l, 64));
    }
}

static void settle(struct lab *l) {
    for (unsigned idle = 0; idle < 16; idle++) {
        cst_aio_kick(l->aio);
        if (cst_aio_reap(l->aio) + test_jobs_drain(&l->world->jobs))
            idle = 0;
    }
}

static void recovered(void *arg, int status) {
    *(bool *)arg = !status;
}

/* Memory for an eighth of the blocks, a disk for all of them. */
static void lab_init(struct lab *l, uint64_t seed) {
    struct world_options options = {
        .seed = seed, .index = 1 << 20, .manual_jobs = true, .policy = "lru"
    };
    struct cst_disk_options disk = { .seg = { .bytes = 16 << 20,
                                              .segment_bytes = 256 << 10,
                                              .buffer_bytes = 32 << 10,
                                              .crypt = CST_SEG_CRYPT_OFF },
                                     .read_bytes = 256 << 10 };
    bool ready = false;
    char message[256];

    cst_seeded_random_init(&l->order, seed);
    l->slowness = 2 + (unsigned)any(l, 200);
    options.memory = (2 << 20) + any(l, 1 << 20);
    l->world = world_new(&options);
    assert_int_equal(cst_sim_disk_new(&l->disk, 32 << 20, 1), 0);
    assert_int_equal(cst_aio_new_sim(&l->aio, l->disk), 0);
    disk.aio = l->aio;
    assert_int_equal(cst_store_disk_open(l->world->store, &disk, message, sizeof(message)), 0);
    cst_store_disk_recover(l->world->store, recovered, &ready);
    settle(l);
    assert_true(ready);
    l->space = world_space(l->world, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
}

static void lab_end(struct lab *l) {
    settle(l);
    (void)cst_space_unref(l->space);
    settle(l);
    world_free(l->world);
    (void)cst_aio_free(l->aio);
    (void)cst_sim_disk_free(l->disk);
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
        step(l);
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
        settle(&l);
        assert_int_equal(l.space->stats.evicted_blocks, 0);
        assert_true(l.space->stats.encodes <= N);
        assert_true(l.space->stats.cold_blocks > N / 2);
        assert_int_equal(l.space->stats.spilled_blocks, l.space->stats.cold_blocks);
        for (uint32_t i = 0; i < CHAINS; i++)
            assert_int_equal(world_present(l.space, l.keys + 32UL * LENGTH * i, LENGTH), LENGTH);
        lab_end(&l);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_lost_in_any_order),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
