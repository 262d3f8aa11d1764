/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store with real workers: jobs run on two threads while the loop thread goes on. Random
 * traffic in a memory that evicts; every byte that is served is checked. What it is for shows under
 * the thread sanitizer.
 */
#include "tests/lib/check.h"
#include "tests/lib/thread_jobs.h"

#include "store/prefix_trie.h"
#include "tests/unit/store/store_world.h"

#include <stdlib.h>
#include <string.h>

enum { KEYS = 120, PUTS = 12, FETCHES = 24, STEPS = 30000 };

struct traffic {
    struct world *w;
    struct cst_space *s;
    struct cst_seeded_random rng;
    uint8_t keys[KEYS * 32];
    struct world_put puts[PUTS];
    struct world_fetch fetches[FETCHES];
    unsigned fetched[FETCHES]; /* key */
    unsigned read, stored;
};

/* Blocks form a heap: i hangs under (i - 1) / 4. */
static const uint8_t *parent_key(const struct traffic *t, unsigned i) {
    static const uint8_t root[32] = { 7 };

    return i ? t->keys + 32UL * ((i - 1) / 4) : root;
}

static void step_put(struct traffic *t, unsigned i, struct world_put *p) {
    const uint32_t tokens[WORLD_TOKENS] = { i };
    uint32_t busy_ms;

    if (p->put.state)
        return; /* under way */
    t->stored += p->told && p->status == 0;
    *p = (struct world_put){ .put = CST_PUT_NULL(world_put_done) };
    if (cst_put_begin(t->s, parent_key(t, i), i == 0, t->keys + 32UL * i, tokens, WORLD_TOKENS,
                      &p->put, &busy_ms))
        return;
    world_fill(p->bytes, t->keys + 32UL * i, 0);
    cst_put_commit(&p->put, p->bytes, NULL);
}

static void step_fetch(struct traffic *t, unsigned i, unsigned slot) {
    struct world_fetch *f = &t->fetches[slot];

    if (f->status == CST_STORE_E_PENDING && !f->told)
        return;
    if (f->status == 0 && f->fetch.block) {
        assert_true(world_bytes_are(&f->fetch.loc, t->keys + 32UL * t->fetched[slot], 1));
        t->read++;
    }
    cst_fetch_release(&f->fetch);
    *f = (struct world_fetch){ .fetch = CST_FETCH_NULL(world_fetch_ready) };
    t->fetched[slot] = i;
    f->status = cst_fetch_start(t->s, t->keys + 32UL * i, CST_FETCH_DECODED, &f->fetch);
}

static bool too_little(const struct traffic *t) {
    const struct cst_space_stats *s = &t->s->stats;

    return t->read <= 1000 || t->stored <= 100 || s->encodes <= 10 || s->decodes <= 10;
}

static void jobs_run_beside_the_loop(void **state) {
    static struct traffic t;
    struct thread_jobs pool;

    t.w = world_new(&(struct world_options){ .seed = 1, .memory = 8 * WORLD_SLAB });
    thread_jobs_start(&pool);
    t.w->store->env.jobs = &pool.jobs;
    t.s = world_space(t.w, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    cst_seeded_random_init(&t.rng, 3);
    for (uint32_t i = 0; i < KEYS; i++) {
        const uint32_t tokens[WORLD_TOKENS] = { i };

        world_key(t.keys + 32UL * i, parent_key(&t, i), tokens, WORLD_TOKENS);
    }
    /* how much comes to pass in so many steps depends on the machine: more, where it is busy */
    for (unsigned step = 0; step < STEPS || (too_little(&t) && step < 50 * STEPS); step++) {
        uint64_t r = cst_seeded_random_next(&t.rng);
        unsigned i = (unsigned)(r >> 8) % KEYS;
        uint64_t n;

        if (r % 8 < 4)
            step_put(&t, i, &t.puts[(r >> 32) % PUTS]);
        else if (r % 8 < 7)
            step_fetch(&t, i, (unsigned)((r >> 32) % FETCHES));
        else if (r >> 60 == 0)
            (void)cst_space_erase(t.s, t.keys + 32UL * i, &n);
        else
            cst_store_tick(t.w->store);
        thread_jobs_drain(&pool, step % 64 == 0);
        if (step % 64 == 0) /* no job reads it now; packing that found no room rests a second */
            t.w->clock.ns += 64 * CST_NS_PER_MS;
    }
    thread_jobs_drain(&pool, true);
    for (unsigned slot = 0; slot < FETCHES; slot++)
        cst_fetch_release(&t.fetches[slot].fetch);
    thread_jobs_drain(&pool, true);
    world_check(t.w);
    assert_false(too_little(&t));
    (void)cst_space_clear(t.s);
    (void)cst_space_unref(t.s);
    thread_jobs_drain(&pool, true);
    thread_jobs_stop(&pool);
    world_free(t.w);
    assert_int_equal(world_slabs, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(jobs_run_beside_the_loop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
