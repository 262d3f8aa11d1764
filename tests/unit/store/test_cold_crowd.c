/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many at once, on a disk that is slow, small, capped or failing: whatever the order in which jobs
 * and operations end, nobody waits for something that doesn't come, and what is served is right.
 */
#include "tests/lib/check.h"

#include "base/macros.h"
#include "store/cold.h"
#include "store/seg_core.h"
#include "tests/unit/store/store_world.h"

#include <stdlib.h>
#include <string.h>

enum { SPACES = 3, WRITERS = 6, READERS = 4, LENGTH = 24, KEYS = 2048, STEPS = 15000, SEEDS = 30 };

struct writer {
    struct world_put put;
    unsigned space, n; /* blocks of the chain so far */
    bool open;
    uint8_t root[32], last[32], key[32];
};

struct reader {
    struct world_fetch fetch;
    bool open;
    uint8_t key[32];
};

struct lab {
    struct world *world;
    struct cst_space *spaces[SPACES];
    struct cst_seeded_random order;
    unsigned slowness; /* of the disk: one turn in so many is its */
    unsigned faults;   /* one step in so many brings one; 0: none */
    bool purges;
    unsigned n_writers, n_readers; /* that do anything */
    uint32_t next_id;
    struct writer writers[WRITERS];
    struct reader readers[READERS];
    uint8_t keys[KEYS][32]; /* of blocks that were stored, the latest ones */
    uint8_t spaces_of[KEYS];
    size_t n_keys;
    size_t n_read;
};

static uint64_t any(struct lab *l, uint64_t n) {
    return cst_seeded_random_next(&l->order) % n;
}

/* ---- those who wait ---- */

static void begin_put(struct lab *l, struct writer *w) {
    uint32_t tokens[WORLD_TOKENS], busy_ms;
    const uint8_t *parent = w->n ? w->last : w->root;

    if (!w->n)
        world_key_n(w->root, ++l->next_id);
    for (unsigned t = 0; t < WORLD_TOKENS; t++)
        tokens[t] = l->next_id;
    l->next_id++;
    w->put = (struct world_put){ .put = CST_PUT_NULL(world_put_done) };
    world_key(w->key, parent, tokens, WORLD_TOKENS);
    if (cst_put_begin(l->spaces[w->space], parent, !w->n, w->key, tokens, WORLD_TOKENS, &w->put.put,
                      &busy_ms)) {
        w->n = 0;
        return;
    }
    world_fill(w->put.bytes, w->key, 0);
    w->open = true;
    cst_put_commit(&w->put.put, w->put.bytes, NULL);
}

static void end_put(struct lab *l, struct writer *w) {
    assert_int_equal(w->put.told, 1);
    w->open = false;
    if (w->put.status) {
        w->n = 0;
        return;
    }
    memcpy(w->last, w->key, 32);
    memcpy(l->keys[l->n_keys % KEYS], w->key, 32);
    l->spaces_of[l->n_keys++ % KEYS] = (uint8_t)w->space;
    w->n = (w->n + 1) % LENGTH;
}

static void begin_fetch(struct lab *l, struct reader *r) {
    size_t i;

    if (!l->n_keys)
        return;
    i = any(l, CST_MIN(l->n_keys, (size_t)KEYS));
    memcpy(r->key, l->keys[i], 32);
    r->fetch = (struct world_fetch){ .fetch = CST_FETCH_NULL(world_fetch_ready) };
    r->fetch.status =
        cst_fetch_start(l->spaces[l->spaces_of[i]], r->key, CST_FETCH_DECODED, &r->fetch.fetch);
    r->fetch.told = r->fetch.status != CST_STORE_E_PENDING;
    r->open = true;
}

static void end_fetch(struct lab *l, struct reader *r) {
    assert_int_equal(r->fetch.told, 1);
    if (!r->fetch.status) {
        assert_true(world_bytes_are(&r->fetch.fetch.loc, r->key, 1));
        l->n_read++;
    }
    cst_fetch_release(&r->fetch.fetch);
    r->open = false;
}

static void act(struct lab *l) {
    struct writer *w = &l->writers[any(l, l->n_writers)];
    struct reader *r = &l->readers[any(l, l->n_readers)];

    if (!w->open)
        begin_put(l, w);
    else if (w->put.told)
        end_put(l, w);
    if (any(l, 2))
        return;
    if (!r->open)
        begin_fetch(l, r);
    else if (r->fetch.told)
        end_fetch(l, r);
}

/* ---- time ---- */

static void fault(struct lab *l) {
    cst_aio_fault_arm(l->world->aio, (enum cst_aio_fault)(1 + any(l, CST_AIO_FAULTS - 1)),
                      1 + any(l, 8), 1 + any(l, 6));
}

static void get_on(struct lab *l) {
    world_get_on(l->world, &l->order, l->slowness);
}

static void purge(struct lab *l, unsigned i) {
    enum cst_purge result;

    (void)cst_namespace_purge(cst_space_namespace(l->spaces[i]), &result);
}

static void step(struct lab *l) {
    if (!any(l, 64)) {
        l->world->clock.ns += any(l, 300) * CST_NS_PER_MS;
        cst_store_tick(l->world->store);
    }
    if (l->faults && !any(l, l->faults))
        fault(l);
    if (l->purges && !any(l, 4000))
        purge(l, (unsigned)any(l, SPACES));
    if (!any(l, 4))
        act(l);
    get_on(l);
}

/* All that is under way ends, which is a bounded number of things if nobody asks for more. */
static void settle(struct lab *l) {
    struct test_jobs *jobs = &l->world->jobs;
    size_t n = 0;

    for (unsigned idle = 0; idle < 16; idle++) {
        if (l->world->aio)
            cst_aio_kick(l->world->aio);
        if (l->world->aio && cst_aio_reap(l->world->aio))
            idle = 0;
        while (test_jobs_run(jobs, 0) || test_jobs_done(jobs, 0)) {
            idle = 0;
            assert_true(++n < 20000);
        }
    }
}

static void check_all_are_told(const struct lab *l) {
    for (unsigned i = 0; i < WRITERS; i++)
        if (l->writers[i].open)
            assert_int_equal(l->writers[i].put.told, 1);
    for (unsigned i = 0; i < READERS; i++)
        if (l->readers[i].open)
            assert_int_equal(l->readers[i].fetch.told, 1);
}

static bool is_under_way(const struct lab *l) {
    struct cst_aio_stats aio;

    cst_aio_stats(l->world->aio, &aio);
    return l->world->jobs.n_waiting + l->world->jobs.n_ran + aio.queued + aio.in_flight;
}

/* ... and then nobody waits. */
static void check_nobody_waits(struct lab *l) {
    settle(l);
    world_check(l->world);
    assert_int_equal(cst_store_jobs(l->world->store), 0);
    check_all_are_told(l);
}

/* ---- the lab ---- */

/* picky: a tier that takes only what was asked for, and few writers in one space. */
static void lab_init(struct lab *l, uint64_t seed, bool picky) {
    static const char *const policies[] = { "lru", "cost", "arc", "s3fifo" };
    struct world_options options = { .seed = seed, .manual_jobs = true };
    struct cst_disk_options disk = { .seg = { .segment_bytes = 256 << 10,
                                              .crypt = CST_SEG_CRYPT_OFF } };
    uint64_t capacity;

    cst_seeded_random_init(&l->order, seed);
    l->slowness = 2 + (unsigned)any(l, any(l, 2) ? 200 : 8);
    l->faults = any(l, 2) ? 0 : 50 + (unsigned)any(l, 3000);
    l->purges = !any(l, 4);
    l->n_writers = 1 + (unsigned)any(l, WRITERS);
    l->n_readers = 1 + (unsigned)any(l, READERS);
    options.policy = policies[any(l, 4)];
    options.memory = (1 << 20) + any(l, 2 << 20);
    options.index = (128 << 10) + any(l, 1 << 20);
    disk.seg.bytes = any(l, 2) ? 16 << 20 : (512 << 10) + any(l, 2 << 20);
    disk.seg.buffer_bytes = 16384 << any(l, 4);
    disk.seg.namespace_bytes = any(l, 3) ? 0 : (512 << 10) + any(l, 1 << 20);
    disk.seg.write_rate = any(l, 3) ? 0 : 20000 + any(l, 400000);
    disk.seg.min_hits = picky || !any(l, 3);
    disk.seg.errors_max = any(l, 2) ? 1000 : 1 + (uint32_t)any(l, 6);
    if (picky) {
        l->n_writers = 1 + (unsigned)any(l, 3);
        l->n_readers = 1;
        l->purges = false;
        l->faults = 0;
        l->slowness = 2 + (unsigned)any(l, 6);
        options.memory = (1 << 20) + any(l, 1 << 20);
        disk.seg.bytes = 16 << 20;
        disk.seg.write_rate = disk.seg.namespace_bytes = 0;
    }
    disk.read_bytes = 128 << 10;
    disk.ahead_bytes = any(l, 2) ? 0 : 64 << 10;
    capacity = any(l, 3) ? 32 << 20 : (300 << 10) + any(l, 2 << 20);
    l->world = world_new(&options);
    world_disk_open(l->world, capacity, seed, disk);
    world_recover(l->world);
    l->spaces[0] = world_space(l->world, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    l->spaces[1] = world_space(l->world, "b", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    l->spaces[2] = world_space(l->world, "a", 2, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    for (unsigned i = 0; i < WRITERS; i++)
        l->writers[i].space = picky ? 0 : (unsigned)any(l, SPACES);
}

static void end_all(struct lab *l) {
    for (unsigned i = 0; i < WRITERS; i++)
        if (l->writers[i].open)
            end_put(l, &l->writers[i]);
    for (unsigned i = 0; i < READERS; i++)
        if (l->readers[i].open)
            end_fetch(l, &l->readers[i]);
}

/* A clean stop, with puts and fetches in flight. */
static void stop(struct lab *l) {
    uint64_t total;

    for (unsigned i = 0; cst_store_drain(l->world->store, i < 1000, &total); i++) {
        assert_true(i < 5000);
        l->world->clock.ns += 100 * CST_NS_PER_MS;
        for (unsigned k = 0; k < 20; k++)
            get_on(l);
    }
    check_nobody_waits(l);
    end_all(l);
    settle(l);
    (void)cst_store_disk_close(l->world->store);
}

/* All goes while puts and fetches are in flight. */
static void abandon(struct lab *l) {
    for (unsigned i = 0; i < SPACES; i++)
        purge(l, i);
    for (unsigned i = 0; i < SPACES; i++)
        (void)cst_space_unref(cst_steal(&l->spaces[i]));
    check_nobody_waits(l);
    end_all(l);
}

static void lab_end(struct lab *l) {
    if (any(l, 2))
        stop(l);
    else
        abandon(l);
    for (unsigned i = 0; i < SPACES; i++)
        (void)cst_space_unref(l->spaces[i]);
    settle(l);
    world_free(l->world);
}

/* Returns how many fetches were served. */
static size_t run(uint64_t seed, bool picky) {
    struct lab *l = calloc(1, sizeof(*l));
    size_t n_read;

    assert_non_null(l);
    lab_init(l, seed, picky);
    for (unsigned i = 0; i < STEPS; i++) {
        step(l);
        if (!is_under_way(l))
            check_all_are_told(l);
        if (!any(l, 300))
            check_nobody_waits(l);
    }
    n_read = l->n_read;
    lab_end(l);
    free(l);
    return n_read;
}

static void nobody_waits_for_nothing(void **state) {
    size_t n_read = 0;

    (void)state;
    for (uint64_t seed = 1; seed <= SEEDS; seed++)
        n_read += run(seed, false);
    assert_true(n_read > SEEDS * 100);
}

static void nobody_waits_for_a_picky_tier(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= SEEDS; seed++)
        (void)run(seed, true);
}

/* ---- a tier that takes nothing ---- */

enum tier { TIER_NONE, TIER_OFF, TIER_READ_ONLY };

static void open_tier(struct lab *l, enum tier tier) {
    struct cst_seg *seg;

    world_disk_open(l->world, 32 << 20, 1,
                    (struct cst_disk_options){ .seg = { .bytes = 16 << 20,
                                                        .segment_bytes = 256 << 10,
                                                        .errors_max = 1,
                                                        .crypt = CST_SEG_CRYPT_OFF } });
    seg = l->world->store->cold->seg;
    if (tier == TIER_OFF)
        cst_aio_fault_arm(l->world->aio, CST_AIO_FAULT_EIO, 1, UINT64_MAX);
    seg->read_only = tier == TIER_READ_ONLY; /* as one that a newer daemon has written */
    world_recover(l->world);
    assert_int_equal(seg->off, tier == TIER_OFF);
}

/* The same puts in a store, with such a tier or with none. Returns for how many jobs they waited.
 */
static size_t fill(enum tier tier, struct cst_space_stats *out) {
    struct world_options options = { .seed = 1, .memory = 2 << 20, .index = 1 << 20 };
    struct lab *l = calloc(1, sizeof(*l));
    size_t n_jobs = 0;

    assert_non_null(l);
    options.manual_jobs = true;
    l->world = world_new(&options);
    if (tier != TIER_NONE)
        open_tier(l, tier);
    l->spaces[0] = world_space(l->world, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    for (unsigned i = 0; i < 3000; i++) {
        begin_put(l, &l->writers[0]);
        assert_true(l->writers[0].open);
        for (; !l->writers[0].put.told; n_jobs++)
            assert_true(test_jobs_run(&l->world->jobs, 0) || test_jobs_done(&l->world->jobs, 0));
        end_put(l, &l->writers[0]);
        if (i % 8 == 0)
            cst_store_tick(l->world->store);
    }
    cst_space_stats(l->spaces[0], out);
    check_nobody_waits(l);
    (void)cst_space_unref(l->spaces[0]);
    settle(l);
    world_free(l->world);
    free(l);
    return n_jobs;
}

/* ... changes nothing: neither what is lost nor what is waited for. */
static void a_tier_that_takes_nothing_is_none(void **state) {
    struct cst_space_stats with, without;
    size_t n_jobs = fill(TIER_NONE, &without);

    (void)state;
    for (enum tier tier = TIER_OFF; tier <= TIER_READ_ONLY; tier++) {
        assert_int_equal(fill(tier, &with), n_jobs);
        assert_int_equal(with.stored_blocks, without.stored_blocks);
        assert_int_equal(with.encodes, without.encodes);
        assert_int_equal(with.evicted_blocks, without.evicted_blocks);
        assert_int_equal(with.packed_bytes, without.packed_bytes);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nobody_waits_for_nothing),
        cmocka_unit_test(nobody_waits_for_a_picky_tier),
        cmocka_unit_test(a_tier_that_takes_nothing_is_none),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
