/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fetches of blocks that are on disk only: when their reads begin, in which order, into what
 * memory, and who is told when; what a Lookup may read ahead of them.
 */
#include "tests/lib/check.h"

#include "base/macros.h"
#include "store/cold.h"
#include "store/prefix_trie.h"
#include "tests/unit/store/store_world.h"

#include <string.h>

enum { N = 12 };

struct lab {
    struct world *world;
    struct cst_space *space;
    uint8_t keys[N * 32];
};

static const uint8_t root[32] = { 7 };

static struct cst_block *block(const struct lab *l, unsigned i) {
    return cst_trie_find(l->space, l->keys + 32UL * i);
}

/* A chain of N blocks, all of them packed, written and out of memory. */
static struct lab lab_new(uint64_t read_bytes, uint64_t ahead_bytes) {
    const struct world_options options = { .seed = 1, .memory = 4 << 20 };
    struct lab l = { .world = world_new(&options) };
    const struct cst_disk_options disk = { .seg = { .bytes = 2 << 20,
                                                    .segment_bytes = 256 << 10,
                                                    .buffer_bytes = 1 << 20,
                                                    .errors_max = 4,
                                                    .crypt = CST_SEG_CRYPT_OFF },
                                           .read_bytes = read_bytes,
                                           .ahead_bytes = ahead_bytes };

    world_disk_open(l.world, 4 << 20, 3, disk);
    world_recover(l.world);
    l.space = world_space(l.world, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    world_store_chain(l.world, l.space, root, 100, N, l.keys);
    world_pack(l.world);
    assert_true(cst_cold_spill(block(&l, N - 1))); /* with all above it */
    world_settle(l.world);
    for (unsigned i = N; i--;)
        cst_block_evict(block(&l, i));
    assert_int_equal(l.space->in_memory, 0);
    assert_int_equal(l.space->stats.cold_blocks, N);
    return l;
}

static void lab_end(struct lab *l) {
    world_settle(l->world);
    (void)cst_space_unref(l->space);
    world_settle(l->world);
    world_free(l->world);
}

static size_t queued(const struct lab *l) {
    struct cst_aio_stats s;

    cst_aio_stats(l->world->aio, &s);
    return s.queued + s.in_flight;
}

static void start_all(struct lab *l, struct world_fetch f[N]) {
    for (unsigned i = 0; i < N; i++) {
        f[i] = (struct world_fetch){ .fetch = CST_FETCH_NULL(world_fetch_ready) };
        assert_int_equal(
            cst_fetch_start(l->space, l->keys + 32UL * i, CST_FETCH_DECODED, &f[i].fetch),
            CST_STORE_E_PENDING);
    }
}

static void end_all(struct world_fetch f[N], const struct lab *l) {
    for (unsigned i = 0; i < N; i++) {
        assert_int_equal(f[i].told, 1);
        assert_int_equal(f[i].status, 0);
        assert_true(world_bytes_are(&f[i].fetch.loc, l->keys + 32UL * i, 1));
        cst_fetch_release(&f[i].fetch);
    }
}

/* Before anything is waited for, all reads of a prefix are in the queue of the disk, in the order
 * of the chain, each into its own part of the registered memory. */
static void reads_of_a_prefix_begin_at_once(void **state) {
    struct lab l = lab_new(2 << 20, 0);
    const struct cst_cold *c = l.world->store->cold;
    struct world_fetch f[N];
    const uint8_t *last = NULL;

    start_all(&l, f);
    assert_int_equal(queued(&l), N);
    for (unsigned i = 0; i < N; i++) {
        const struct cst_cold_read *r = block(&l, i)->read;

        assert_true(r && !r->heap && r->buffer > last);
        assert_true(r->buffer >= c->arena &&
                    r->buffer + r->bytes <= c->arena + c->n_units * CST_COLD_UNIT);
        last = r->buffer;
    }
    world_settle(l.world);
    end_all(f, &l);
    lab_end(&l);
}

/* With memory for three reads, as many are under way, and the next ones follow in order. */
static void reads_wait_for_memory_in_order(void **state) {
    struct lab l = lab_new(3 * CST_COLD_UNIT, 0);
    struct world_fetch f[N];
    unsigned told = 0;

    start_all(&l, f);
    assert_int_equal(queued(&l), 3);
    for (unsigned turns = 0; told < N && turns < 1000; turns++) {
        (void)world_turn(l.world);
        for (; told < N && f[told].told; told++)
            ;
        for (unsigned i = told; i < N; i++)
            assert_false(f[i].told);
    }
    end_all(f, &l);
    lab_end(&l);
}

/* The slowest read of all holds up nobody: each block is decoded and told when it has come. */
static void each_block_is_told_when_it_has_come(void **state) {
    for (unsigned late = 0; late < N; late += 5) {
        struct lab l = lab_new(2 << 20, 0);
        struct world_fetch f[N];
        unsigned told = 0;

        cst_aio_fault_arm(l.world->aio, CST_AIO_FAULT_DELAY, 1 + late,
                          1); /* ends after all others */
        start_all(&l, f);
        for (unsigned turns = 0; !f[late].told && turns < 1000; turns++) {
            told = 0;
            for (unsigned i = 0; i < N; i++)
                told += f[i].told;
            cst_aio_kick(l.world->aio);
            if (!test_jobs_run(&l.world->jobs, 0) && !test_jobs_done(&l.world->jobs, 0))
                (void)cst_aio_reap(l.world->aio);
        }
        assert_int_equal(told, N - 1);
        world_settle(l.world);
        end_all(f, &l);
        lab_end(&l);
    }
}

/* ---- ahead of fetches ---- */

static void prefetch(struct lab *l) {
    cst_space_prefetch(l->space, l->keys, N);
}

/* At most half of the memory for reads, nothing while a fetch waits, and fetches go first. */
static void what_is_read_ahead_stays_behind_fetches(void **state) {
    struct lab l = lab_new(8 * CST_COLD_UNIT, 1 << 20);
    struct world_fetch f[N];

    prefetch(&l);
    assert_int_equal(queued(&l), 4);
    start_all(&l, f); /* 4 join, 8 come behind them: 4 have memory */
    assert_int_equal(queued(&l), 8);
    assert_true(cst_list_is_empty(&l.world->store->cold->wait_ahead));
    world_settle(l.world);
    end_all(f, &l);
    assert_int_equal(l.space->stats.cold_reads, N);
    assert_int_equal(l.space->stats.prefetched_blocks, 4);
    assert_int_equal(l.space->stats.prefetch_used, 4);
    assert_int_equal(l.world->store->cold->ahead_bytes, 0);
    assert_int_equal(l.world->store->cold->ahead_units, 0);
    lab_end(&l);
}

/* A fetch may join at any moment of a block's way: each turn of the loop is tried. */
static void a_fetch_joins_at_any_moment(void **state) {
    for (unsigned turns = 0, over = 0; !over; turns++) {
        struct lab l = lab_new(2 << 20, 1 << 20);
        struct world_fetch f = { .fetch = CST_FETCH_NULL(world_fetch_ready) };
        int r;

        prefetch(&l);
        for (unsigned i = 0; i < turns; i++) {
            cst_aio_kick(l.world->aio);
            if (!test_jobs_run(&l.world->jobs, 0) && !test_jobs_done(&l.world->jobs, 0) &&
                !cst_aio_reap(l.world->aio))
                over = 1;
        }
        r = cst_fetch_start(l.space, l.keys + 32UL * 3, CST_FETCH_DECODED, &f.fetch);
        assert_int_equal(r, CST_STORE_E_PENDING); /* packed at best */
        world_settle(l.world);
        assert_int_equal(f.told, 1);
        assert_int_equal(f.status, 0);
        assert_true(world_bytes_are(&f.fetch.loc, l.keys + 32UL * 3, 1));
        cst_fetch_release(&f.fetch);
        assert_int_equal(l.space->stats.cold_reads, N);
        assert_int_equal(l.space->stats.prefetch_used, 1);
        for (unsigned i = 0; i < N; i++)
            assert_int_equal(cst_block_tier(block(&l, i)), i == 3 ? CST_TIER_HOT : CST_TIER_PACKED);
        world_check(l.world);
        lab_end(&l);
    }
}

/* A tier that is off is left alone; its blocks stay until somebody asks for them. */
static void nothing_is_read_ahead_from_a_tier_that_is_off(void **state) {
    struct lab l = lab_new(2 << 20, 1 << 20);
    struct world_fetch f = { .fetch = CST_FETCH_NULL(world_fetch_ready) };

    cst_aio_fault_arm(l.world->aio, CST_AIO_FAULT_EIO, 1, 1000);
    for (unsigned i = N; i-- > N - 4;) {
        f = (struct world_fetch){ .fetch = CST_FETCH_NULL(world_fetch_ready) };
        (void)cst_fetch_start(l.space, l.keys + 32UL * i, CST_FETCH_DECODED, &f.fetch);
        world_settle(l.world);
        assert_true(f.told && f.status);
        cst_fetch_release(&f.fetch);
    }
    assert_true(cst_seg_is_off(l.world->store->cold->seg));
    prefetch(&l);
    world_settle(l.world);
    assert_int_equal(l.space->stats.prefetched_blocks, 0);
    assert_int_equal(world_present(l.space, l.keys, N), N - 4);
    lab_end(&l);
}

/* What fails on its way is a miss, as for a fetch; what is erased meanwhile is gone for good. */
static void what_comes_to_nothing_leaves_no_trace(void **state) {
    for (unsigned erased = 0; erased < 2; erased++) {
        struct lab l = lab_new(2 << 20, 1 << 20);
        uint64_t n = 0;

        if (!erased)
            cst_aio_fault_arm(l.world->aio, CST_AIO_FAULT_CORRUPT, N, 1);
        prefetch(&l);
        for (unsigned i = 0; erased && i < 2; i++)
            (void)world_turn(l.world);
        if (erased)
            assert_int_equal(cst_space_erase(l.space, l.keys + 32UL * 4, &n), 0);
        world_settle(l.world);
        assert_int_equal(world_present(l.space, l.keys, N), erased ? 4 : N - 1);
        assert_int_equal(l.world->store->cold->ahead_bytes, 0);
        world_check(l.world);
        lab_end(&l);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_of_a_prefix_begin_at_once),
        cmocka_unit_test(reads_wait_for_memory_in_order),
        cmocka_unit_test(each_block_is_told_when_it_has_come),
        cmocka_unit_test(what_is_read_ahead_stays_behind_fetches),
        cmocka_unit_test(a_fetch_joins_at_any_moment),
        cmocka_unit_test(nothing_is_read_ahead_from_a_tier_that_is_off),
        cmocka_unit_test(what_comes_to_nothing_leaves_no_trace),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
