/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames that are made smaller while memory is short: errors add up, bounds hold, exact spaces and
 * frames in use are left alone.
 */
#include "tests/lib/check.h"

#include "store/prefix_trie.h"
#include "tests/unit/store/store_world.h"

#include <math.h>
#include <string.h>

enum { N = 40, COLS = 64 };

static const uint8_t root[32] = { 3 };

struct setup {
    struct world *w;
    struct cst_space *s;
    uint8_t keys[N][32];
    uint64_t others;
};

static double half(const uint8_t *p) {
    unsigned h = p[0] | (unsigned)p[1] << 8, e = h >> 10 & 31, m = h & 1023;
    double v = e ? ldexp(m | 1024, (int)e - 25) : ldexp(m, -24);

    return h >> 15 ? -v : v;
}

/* Of K or V of a first block, without its sinks. */
static double tensor_error(const uint8_t *want, const uint8_t *got) {
    double error = 0, deviation = 0;

    for (unsigned c = 0; c < COLS; c++) {
        double mean = 0;

        for (unsigned t = CST_SINK_TOKENS; t < WORLD_TOKENS; t++)
            mean += half(want + 2 * (t * COLS + c)) / (WORLD_TOKENS - CST_SINK_TOKENS);
        for (unsigned t = CST_SINK_TOKENS; t < WORLD_TOKENS; t++) {
            double v = half(want + 2 * (t * COLS + c)), g = half(got + 2 * (t * COLS + c));

            error += (g - v) * (g - v);
            deviation += (v - mean) * (v - mean);
        }
    }
    return sqrt(error / deviation);
}

static struct setup setup(enum cst_class klass, const char *preset) {
    struct setup x = { .w = world_new(&(struct world_options){ .seed = 1, .side_bytes = 1 }) };
    struct cst_encode_params params;

    assert_int_equal(cst_preset_parse(&params, preset), 0);
    if (klass != CST_CLASS_LOSSLESS)
        cst_store_set_preset(x.w->store, klass, &params);
    x.s = world_space(x.w, "a", 1, CST_KIND_TOKENS, klass);
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t tokens[WORLD_TOKENS] = { i };

        world_key(x.keys[i], root, tokens, WORLD_TOKENS);
        assert_int_equal(world_store(x.w, x.s, root, true, x.keys[i], tokens, WORLD_TOKENS), 0);
    }
    world_pack(x.w);
    for (uint32_t i = 0; i < N; i++)
        world_cool(x.s, x.keys[i]);
    x.others = x.w->store->options.memory / 16 * 15;
    return x;
}

static void short_of_memory(struct setup *x) {
    x->w->store->encode_bytes += x->others;
    world_pack(x->w);
    x->w->store->encode_bytes -= x->others;
}

static void teardown(struct setup *x) {
    world_check(x->w);
    (void)cst_space_unref(x->s);
    world_free(x->w);
}

static double measured(struct setup *x, const uint8_t key[32]) {
    uint8_t want[WORLD_BLOCK];
    struct world_fetch f;
    const uint8_t *got;
    double k, v;

    world_fetch(x->w, x->s, key, CST_FETCH_DECODED, &f);
    assert_int_equal(f.status, 0);
    got = f.fetch.loc.slab->mem.base + f.fetch.loc.offset;
    world_fill(want, key, 0);
    k = tensor_error(want, got);
    v = tensor_error(want + WORLD_BLOCK / 2, got + WORLD_BLOCK / 2);
    cst_fetch_release(&f.fetch);
    return k > v ? k : v;
}

static void fine_frames_are_made_smaller_and_say_what_they_lost(void **state) {
    struct setup x = setup(CST_CLASS_COLD, "turboquant:7");
    uint64_t bytes = x.s->stats.packed_bytes;
    float before[N];

    for (unsigned i = 0; i < N; i++)
        before[i] = cst_trie_find(x.s, x.keys[i])->error;
    world_pack(x.w);
    assert_int_equal(x.s->stats.recodes, 0); /* there is room */
    short_of_memory(&x);
    assert_int_equal(x.s->stats.recodes, N);
    assert_true(x.s->stats.packed_bytes < bytes * 3 / 4); /* 3 bits instead of 7, and sinks */
    for (unsigned i = 0; i < N; i++) {
        const struct cst_block *b = cst_trie_find(x.s, x.keys[i]);

        assert_true(b->error > before[i] && b->error <= .30F);
        assert_true(measured(&x, b->key) <= (double)b->error + 1e-6);
    }
    short_of_memory(&x);
    assert_int_equal(x.s->stats.recodes, N); /* once */
    teardown(&x);
}

/* The class's own presets leave no room for a second step. */
static void what_is_coarse_stays(void **state) {
    static const struct {
        enum cst_class klass;
        const char *preset;
    } rows[] = { { CST_CLASS_LOSSLESS, "lossless" },
                 { CST_CLASS_NEAR_LOSSLESS, "turboquant:6" },
                 { CST_CLASS_SMALL_LOSS, "turboquant:4" },
                 { CST_CLASS_COLD, "turboquant:3" },
                 { CST_CLASS_COLD, "lossless" } };

    for (size_t i = 0; i < CST_COUNT(rows); i++) {
        struct setup x = setup(rows[i].klass, rows[i].preset);
        uint64_t bytes = x.s->stats.packed_bytes;

        short_of_memory(&x);
        assert_int_equal(x.s->stats.recodes, 0);
        assert_int_equal(x.s->stats.packed_bytes, bytes);
        teardown(&x);
    }
}

static void a_frame_in_use_stays(void **state) {
    struct setup x = setup(CST_CLASS_COLD, "turboquant:7");
    struct world_fetch f;
    uint8_t frame[WORLD_BLOCK];

    world_fetch(x.w, x.s, x.keys[5], CST_FETCH_PACKED, &f);
    assert_true(!f.status && f.fetch.loc.packed);
    memcpy(frame, f.fetch.loc.slab->mem.base + f.fetch.loc.offset, f.fetch.loc.length);
    short_of_memory(&x);
    assert_int_equal(x.s->stats.recodes, N - 1);
    assert_memory_equal(frame, f.fetch.loc.slab->mem.base + f.fetch.loc.offset, f.fetch.loc.length);
    cst_fetch_release(&f.fetch);
    short_of_memory(&x);
    assert_int_equal(x.s->stats.recodes, N);
    teardown(&x);
}

/* A block goes away, or is read, while its frame is made smaller: job by job, in any order. */
static void frames_may_go_meanwhile(void **state) {
    struct cst_seeded_random rng;

    cst_seeded_random_init(&rng, 7);
    for (unsigned round = 0; round < 60; round++) {
        struct setup x = setup(CST_CLASS_COLD, "turboquant:7");
        struct world_fetch f[N];
        uint64_t n;

        x.w->jobs.run_inline = false;
        x.w->store->encode_bytes += x.others;
        for (unsigned i = 0; i < N; i++) {
            f[i] = (struct world_fetch){ .fetch = CST_FETCH_NULL(world_fetch_ready) };
            cst_store_tick(x.w->store);
            for (uint64_t steps = cst_seeded_random_next(&rng) % 4; steps; steps--) {
                (void)test_jobs_run(&x.w->jobs, cst_seeded_random_next(&rng) % 3);
                (void)test_jobs_done(&x.w->jobs, cst_seeded_random_next(&rng) % 3);
            }
            if (cst_seeded_random_next(&rng) % 3)
                f[i].status =
                    cst_fetch_start(x.s, x.keys[i], cst_seeded_random_next(&rng) % 2, &f[i].fetch);
            else
                (void)cst_space_erase(x.s, x.keys[(i + round) % N], &n);
            world_check(x.w);
        }
        x.w->store->encode_bytes -= x.others;
        for (unsigned i = 0; i < N; i++)
            cst_fetch_release(&f[i].fetch);
        world_settle(x.w);
        teardown(&x);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fine_frames_are_made_smaller_and_say_what_they_lost),
        cmocka_unit_test(what_is_coarse_stays),
        cmocka_unit_test(a_frame_in_use_stays),
        cmocka_unit_test(frames_may_go_meanwhile),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
