/* SPDX-License-Identifier: Apache-2.0 */
/* The life of puts and fetches, each rule of store.h once. Random sequences: test_store_model.c. */
#include "tests/lib/check.h"

#include "store/prefix_trie.h"
#include "tests/unit/store/store_world.h"

#include <errno.h>
#include <string.h>

static const uint8_t root[32] = { 7 };

struct tokens {
    uint32_t ids[WORLD_TOKENS];
};

/* n blocks of a chain with all-equal tokens first, first + 1, ... */
static void chain(uint8_t *keys, struct tokens *tokens, size_t n, uint32_t first) {
    for (size_t i = 0; i < n; i++) {
        for (unsigned t = 0; t < WORLD_TOKENS; t++)
            tokens[i].ids[t] = first + (uint32_t)i;
        world_key(keys + 32 * i, i ? keys + 32 * (i - 1) : root, tokens[i].ids, WORLD_TOKENS);
    }
}

static int begin(struct cst_space *s, const uint8_t *keys, const struct tokens *tokens, size_t i,
                 struct world_put *p) {
    uint32_t busy_ms;

    *p = (struct world_put){ .put = CST_PUT_NULL(world_put_done), .status = -1 };
    return cst_put_begin(s, i ? keys + 32 * (i - 1) : root, i == 0, keys + 32 * i, tokens[i].ids,
                         WORLD_TOKENS, &p->put, &busy_ms);
}

static void commit(struct world_put *p, const uint8_t *key) {
    world_fill(p->bytes, key, 0);
    cst_put_commit(&p->put, p->bytes, NULL);
}

static const struct world_options plain = { .seed = 1 };

static void stored_blocks_are_found_and_read(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    struct cst_space_stats stats;
    uint8_t keys[5 * 32], tiers[5];
    struct cst_lookup found;
    struct world_fetch f;

    world_store_chain(w, s, root, 100, 5, keys);
    cst_space_lookup(s, keys, 5, root, NULL, 0, tiers, &found);
    assert_int_equal(found.present, 5);
    assert_int_equal(found.cost_ns, 0);
    for (unsigned i = 0; i < 5; i++) {
        assert_int_equal(tiers[i], CST_TIER_HOT);
        world_fetch(w, s, keys + 32 * i, CST_FETCH_DECODED, &f);
        assert_int_equal(f.status, 0);
        assert_int_equal(f.told, 0);
        assert_true(world_bytes_are(&f.fetch.loc, keys + 32 * i, 1));
        assert_int_equal(f.fetch.loc.tokens, WORLD_TOKENS);
        cst_fetch_release(&f.fetch);
        cst_fetch_release(&f.fetch);
    }
    cst_space_stats(s, &stats);
    assert_int_equal(stats.blocks, 5);
    assert_int_equal(stats.stored_bytes, 5 * WORLD_BLOCK);
    assert_int_equal(stats.served_blocks, 5);
    assert_int_equal(stats.served_bytes, 5 * WORLD_BLOCK);
    assert_int_equal(stats.served_tokens, 5 * WORLD_TOKENS);
    assert_int_equal(stats.hot_bytes, 5 * WORLD_BLOCK);
    assert_int_equal(stats.lookups, 1);
    assert_int_equal(stats.hit_keys, 5);
    assert_int_equal(stats.leases, 0);
    assert_int_equal(w->events[CST_EVENT_STORED], 5);
    world_end(w, s);
}

static void absent_blocks_are_absent(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    uint8_t keys[2 * 32];
    struct tokens tokens[2];
    struct world_fetch f;
    struct world_put p;
    uint64_t n;

    chain(keys, tokens, 2, 1);
    assert_int_equal(world_present(s, keys, 2), 0);
    world_fetch(w, s, keys, CST_FETCH_DECODED, &f);
    assert_int_equal(f.status, CST_STORE_E_NOT_FOUND);
    cst_fetch_release(&f.fetch);
    assert_int_equal(cst_space_erase(s, keys, &n), CST_STORE_E_NOT_FOUND);
    assert_int_equal(cst_space_touch(s, keys), CST_STORE_E_NOT_FOUND);
    assert_int_equal(cst_space_pin(s, keys, 0), CST_STORE_E_NOT_FOUND);
    assert_int_equal(begin(s, keys, tokens, 1, &p), CST_STORE_E_PARENT_MISSING);
    assert_int_equal(begin(s, keys, tokens, 0, &p), 0); /* open is not present */
    assert_int_equal(world_present(s, keys, 2), 0);
    cst_put_abort(&p.put);
    cst_put_abort(&p.put);
    assert_int_equal(p.told, 0);
    assert_int_equal(s->map.count + s->roots.count, 0);
    world_end(w, s);
}

static void a_packed_block_comes_back_exact(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    struct cst_space_stats stats;
    struct cst_lookup found;
    uint8_t key[32], tier;
    struct world_fetch f, g, h;

    world_store_chain(w, s, root, 100, 1, key);
    world_pack(w);
    cst_space_stats(s, &stats);
    assert_int_equal(stats.encodes, 1);
    assert_in_range(stats.packed_bytes, 1, WORLD_BLOCK * 3 / 4);
    world_cool(s, key);
    cst_space_lookup(s, key, 1, root, NULL, 0, &tier, &found);
    assert_int_equal(tier, CST_TIER_PACKED);
    assert_true(found.cost_ns > 0);
    f = g = h = (struct world_fetch){ .fetch = CST_FETCH_NULL(world_fetch_ready) };
    assert_int_equal(cst_fetch_start(s, key, CST_FETCH_DECODED, &f.fetch), CST_STORE_E_PENDING);
    assert_int_equal(cst_fetch_start(s, key, CST_FETCH_DECODED, &g.fetch), CST_STORE_E_PENDING);
    assert_int_equal(cst_fetch_start(s, key, CST_FETCH_DECODED, &h.fetch), CST_STORE_E_PENDING);
    cst_fetch_release(&h.fetch); /* cancelled: never told */
    world_settle(w);
    assert_true(f.told == 1 && g.told == 1 && h.told == 0 && !f.status && !g.status);
    assert_true(world_bytes_are(&f.fetch.loc, key, 1));
    assert_ptr_equal(f.fetch.loc.slab, g.fetch.loc.slab);
    assert_int_equal(f.fetch.loc.offset, g.fetch.loc.offset);
    assert_int_equal(f.fetch.loc.tier, CST_TIER_PACKED);
    cst_space_stats(s, &stats);
    assert_int_equal(stats.decodes, 1);
    assert_int_equal(stats.merged_fetches, 2);
    assert_int_equal(stats.leases, 2);
    cst_fetch_release(&f.fetch);
    cst_fetch_release(&g.fetch);
    world_end(w, s);
}

static void mode_packed_leases_the_frame(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    struct cst_descriptor *d = world_descriptor(1);
    struct cst_frame_info info;
    uint8_t key[32];
    struct world_fetch f;

    world_store_chain(w, s, root, 100, 1, key);
    world_fetch(w, s, key, CST_FETCH_PACKED, &f); /* no frame yet */
    assert_int_equal(f.status, 0);
    assert_true(world_bytes_are(&f.fetch.loc, key, 1));
    cst_fetch_release(&f.fetch);
    world_pack(w);
    world_fetch(w, s, key, CST_FETCH_PACKED, &f);
    assert_int_equal(f.status, 0);
    assert_true(f.fetch.loc.packed && f.fetch.loc.slab->packed);
    assert_int_equal(f.fetch.loc.tier, CST_TIER_PACKED); /* these bytes; the block is hot, too */
    assert_int_equal(f.fetch.loc.preset, CST_PRESET_LOSSLESS);
    assert_int_equal(cst_frame_inspect(f.fetch.loc.slab->mem.base + f.fetch.loc.offset,
                                       f.fetch.loc.length, &info),
                     0);
    assert_int_equal(info.tokens, WORLD_TOKENS);
    cst_fetch_release(&f.fetch);
    (void)world_descriptor_free(d);
    world_end(w, s);
}

/* ---- orders of commits ---- */

static const struct order {
    const char *name;
    unsigned commit[3]; /* which block of the chain is committed first, second, third */
    int status[3];      /* of these commits */
    size_t present[3];  /* after each */
} orders[] = {
    { "012", { 0, 1, 2 }, { 0, 0, 0 }, { 1, 2, 3 } },
    { "021", { 0, 2, 1 }, { 0, CST_STORE_E_PENDING, 0 }, { 1, 1, 3 } },
    { "102", { 1, 0, 2 }, { CST_STORE_E_PENDING, 0, 0 }, { 0, 2, 3 } },
    { "120", { 1, 2, 0 }, { CST_STORE_E_PENDING, CST_STORE_E_PENDING, 0 }, { 0, 0, 3 } },
    { "201", { 2, 0, 1 }, { CST_STORE_E_PENDING, 0, 0 }, { 0, 1, 3 } },
    { "210", { 2, 1, 0 }, { CST_STORE_E_PENDING, CST_STORE_E_PENDING, 0 }, { 0, 0, 3 } },
};

static void visible_after_the_parent(void **state) {
    const struct order *o = *state;
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    struct tokens tokens[3];
    struct world_put puts[3];
    uint8_t keys[3 * 32];

    chain(keys, tokens, 3, 1);
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(begin(s, keys, tokens, i, &puts[i]), 0);
    for (size_t i = 0; i < 3; i++) {
        struct world_put *p = &puts[o->commit[i]];

        commit(p, keys + 32 * o->commit[i]);
        assert_int_equal(p->told, 0);
        world_settle(w);
        assert_int_equal(p->told, 1);
        assert_int_equal(p->status, o->status[i]);
        assert_int_equal(world_present(s, keys, 3), o->present[i]);
        world_check(w);
    }
    world_end(w, s);
}

/* `gone` of three open puts ends without bytes, before or after the others commit. */
static const struct loss {
    const char *name;
    unsigned gone;
    bool last;
    int status[3]; /* of the others */
    size_t present;
} losses[] = {
    { "top first", 0, false, { 0, CST_STORE_E_PARENT_MISSING, CST_STORE_E_PARENT_MISSING }, 0 },
    { "top last", 0, true, { 0, CST_STORE_E_PENDING, CST_STORE_E_PENDING }, 0 },
    { "middle first", 1, false, { 0, 0, CST_STORE_E_PARENT_MISSING }, 1 },
    { "middle last", 1, true, { 0, 0, CST_STORE_E_PENDING }, 1 },
    { "bottom first", 2, false, { 0, 0, 0 }, 2 },
};

static void lost_with_the_parent(void **state) {
    const struct loss *l = *state;
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    struct tokens tokens[3];
    struct world_put puts[3];
    uint8_t keys[3 * 32];

    chain(keys, tokens, 3, 1);
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(begin(s, keys, tokens, i, &puts[i]), 0);
    if (!l->last)
        cst_put_abort(&puts[l->gone].put);
    for (size_t i = 0; i < 3; i++) {
        if (i == l->gone)
            continue;
        commit(&puts[i], keys + 32 * i);
        world_settle(w);
        assert_int_equal(puts[i].told, 1);
        assert_int_equal(puts[i].status, l->status[i]);
    }
    if (l->last)
        cst_put_abort(&puts[l->gone].put);
    assert_int_equal(puts[l->gone].told, 0);
    assert_int_equal(world_present(s, keys, 3), l->present);
    assert_int_equal(s->map.count, l->present); /* nothing hidden stays behind */
    world_end(w, s);
}

static void an_aborted_commit_still_answers(void **state) {
    struct world *w = world_new(&(struct world_options){ .seed = 1, .manual_jobs = true });
    struct cst_space *s = world_space(w, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    struct tokens tokens[1];
    struct world_put p;
    uint8_t key[32];

    chain(key, tokens, 1, 1);
    for (unsigned steps = 0; steps < 6; steps++) { /* jobs run before the abort */
        assert_int_equal(begin(s, key, tokens, 0, &p), 0);
        commit(&p, key);
        for (unsigned i = 0; i < steps / 2; i++)
            if (!test_jobs_done(&w->jobs, 0))
                (void)test_jobs_run(&w->jobs, 0);
        if (p.told)
            break;
        cst_put_abort(&p.put);
        world_settle(w);
        assert_int_equal(p.told, 1);
        assert_int_equal(p.status, -ECANCELED);
        assert_int_equal(s->map.count, 0);
    }
    world_end(w, s);
}

/* ---- several writers of one key ---- */

static void a_writer_has_the_key_for_a_while(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    struct tokens tokens[1];
    struct world_put first, second;
    uint8_t key[32];
    uint32_t busy_ms;

    chain(key, tokens, 1, 1);
    assert_int_equal(begin(s, key, tokens, 0, &first), 0);
    w->clock.ns += 1500 * CST_NS_PER_MS + 1;
    second = (struct world_put){ .put = CST_PUT_NULL(world_put_done) };
    assert_int_equal(
        cst_put_begin(s, root, true, key, tokens[0].ids, WORLD_TOKENS, &second.put, &busy_ms),
        CST_STORE_E_KEY_BUSY);
    assert_int_equal(busy_ms, 3500); /* rounded up */
    w->clock.ns += 3500 * CST_NS_PER_MS;
    assert_int_equal(begin(s, key, tokens, 0, &second), 0);
    world_fill(second.bytes, key, 1);
    cst_put_commit(&second.put, second.bytes, NULL); /* the second one is faster */
    world_settle(w);
    assert_int_equal(second.status, 0);
    assert_int_equal(begin(s, key, tokens, 0, &second), CST_STORE_E_PRESENT);
    commit(&first, key);
    world_settle(w);
    assert_int_equal(first.status, CST_STORE_E_PRESENT);
    world_end(w, s);
}

static void an_aborted_writer_leaves_the_other_one(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    struct tokens tokens[2];
    struct world_put first, second, child;
    uint8_t keys[2 * 32];

    chain(keys, tokens, 2, 1);
    assert_int_equal(begin(s, keys, tokens, 0, &first), 0);
    assert_int_equal(begin(s, keys, tokens, 1, &child), 0);
    w->clock.ns += 5 * CST_NS_PER_S;
    assert_int_equal(begin(s, keys, tokens, 0, &second), 0);
    commit(&child, keys + 32);
    cst_put_abort(&first.put); /* the child still has hope */
    world_settle(w);
    assert_int_equal(child.status, CST_STORE_E_PENDING);
    commit(&second, keys);
    world_settle(w);
    assert_int_equal(second.status, 0);
    assert_int_equal(world_present(s, keys, 2), 2);
    world_end(w, s);
}

/* ---- tails ---- */

static int store_tail(struct world *w, struct cst_space *s, const uint8_t *parent, bool is_root,
                      uint32_t n, uint8_t key[32]) {
    static const uint32_t ids[WORLD_TOKENS] = { 1, 2,  3,  4,  5,  6,  7,  8,
                                                9, 10, 11, 12, 13, 14, 15, 16 };

    world_key(key, parent, ids, n);
    return world_store(w, s, parent, is_root, key, ids, n);
}

static void match(struct cst_space *s, const uint32_t *tail, uint32_t n, struct cst_lookup *out) {
    cst_space_lookup(s, NULL, 0, root, tail, n, NULL, out);
}

static void a_match_may_end_inside_a_block(void **state) {
    static const uint32_t a[WORLD_TOKENS] = { 1, 2, 3 }, b[WORLD_TOKENS] = { 1, 2, 9 },
                          c[4] = { 5, 6, 7, 8 }, other[3] = { 1, 2, 4 }, none[2] = { 4, 1 };
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    uint8_t ka[32], kb[32], kc[32], kd[32];
    struct cst_lookup found;

    world_key(ka, root, a, WORLD_TOKENS);
    world_key(kb, root, b, WORLD_TOKENS);
    world_key(kc, root, c, 4);
    world_key(kd, ka, c, 4);
    match(s, a, 3, &found); /* no such root */
    assert_int_equal(found.partial_tokens, 0);
    assert_int_equal(world_store(w, s, root, true, ka, a, WORLD_TOKENS), 0);
    assert_int_equal(world_store(w, s, root, true, kb, b, WORLD_TOKENS), 0);
    assert_int_equal(world_store(w, s, root, true, kc, c, 4), 0);
    assert_int_equal(world_store(w, s, ka, false, kd, c, 4), 0);
    match(s, b, 3, &found);
    assert_int_equal(found.partial_tokens, 3);
    assert_memory_equal(found.partial_key, kb, 32);
    assert_int_equal(found.partial_stored, WORLD_TOKENS);
    assert_int_equal(found.partial_tier, CST_TIER_HOT);
    match(s, other, 3, &found);
    assert_int_equal(found.partial_tokens, 2);
    match(s, none, 2, &found);
    assert_int_equal(found.partial_tokens, 0);
    match(s, c, 4, &found);
    assert_int_equal(found.partial_tokens, 4);
    assert_int_equal(found.partial_stored, 4);
    /* after a run of one: the children of the last key */
    cst_space_lookup(s, ka, 1, root, c, 3, NULL, &found);
    assert_int_equal(found.present, 1);
    assert_int_equal(found.partial_tokens, 3);
    assert_memory_equal(found.partial_key, kd, 32);
    /* after a run that is broken: the tail stands elsewhere */
    memcpy(kb, kd, 32);
    kb[0] ^= 1;
    cst_space_lookup(s, kb, 1, root, c, 4, NULL, &found);
    assert_int_equal(found.present + found.partial_tokens, 0);
    world_end(w, s);
}

/* Of equal matches the one nearest to memory. */
static void equal_matches_prefer_hot_blocks(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    uint8_t keys[3][32];
    uint32_t ids[3][WORLD_TOKENS] = { { 1, 2, 1 }, { 1, 2, 2 }, { 1, 2, 3 } };
    struct cst_lookup found;

    for (unsigned i = 0; i < 3; i++) {
        world_key(keys[i], root, ids[i], WORLD_TOKENS);
        assert_int_equal(world_store(w, s, root, true, keys[i], ids[i], WORLD_TOKENS), 0);
    }
    world_pack(w);
    for (unsigned hot = 0; hot < 3; hot++) {
        struct world_fetch f;

        for (unsigned i = 0; i < 3; i++)
            if (cst_trie_find(s, keys[i])->hot.slab && i != hot)
                world_cool(s, keys[i]);
        world_fetch(w, s, keys[hot], CST_FETCH_DECODED, &f);
        cst_fetch_release(&f.fetch);
        match(s, (uint32_t[]){ 1, 2 }, 2, &found);
        assert_int_equal(found.partial_tokens, 2);
        assert_int_equal(found.partial_tier, CST_TIER_HOT);
        assert_memory_equal(found.partial_key, keys[hot], 32);
    }
    world_end(w, s);
}

static void a_longer_tail_supersedes(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    struct cst_space_stats stats;
    uint8_t k3[32], k5[32], k9[32], full[32];
    struct world_fetch f;

    assert_int_equal(store_tail(w, s, root, true, 3, k3), 0);
    assert_int_equal(store_tail(w, s, root, true, 5, k5), 0);
    assert_null(cst_trie_find(s, k3));
    world_fetch(w, s, k5, CST_FETCH_DECODED, &f); /* leased: stays until released */
    assert_int_equal(f.status, 0);
    assert_int_equal(store_tail(w, s, root, true, 9, k9), 0);
    assert_non_null(cst_trie_find(s, k5));
    assert_true(world_bytes_are(&f.fetch.loc, k5, 1));
    assert_int_equal(cst_space_pin(s, k9, 0), 0); /* pinned: stays until unpinned */
    cst_fetch_release(&f.fetch);
    assert_null(cst_trie_find(s, k5));
    assert_int_equal(store_tail(w, s, root, true, WORLD_TOKENS, full), 0);
    assert_non_null(cst_trie_find(s, k9));
    assert_int_equal(cst_space_unpin(s, k9), 0);
    assert_null(cst_trie_find(s, k9));
    cst_space_stats(s, &stats);
    assert_int_equal(stats.blocks, 1);
    assert_int_equal(stats.tail_blocks, 0);
    assert_int_equal(store_tail(w, s, root, true, 4, k3), 0); /* a shorter one later is fine */
    cst_space_stats(s, &stats);
    assert_int_equal(stats.blocks, 2);
    world_end(w, s);
}

static void a_tail_has_no_children(void **state) {
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    uint8_t tail[32], child[32];

    assert_int_equal(store_tail(w, s, root, true, 3, tail), 0);
    assert_int_equal(store_tail(w, s, tail, false, 3, child), CST_STORE_E_PARENT_MISSING);
    world_end(w, s);
}

static void flat_blocks_have_no_parents(void **state) {
    struct world *w = world_new(&(struct world_options){ .seed = 1 });
    struct cst_space *s = world_space(w, "a", 1, CST_KIND_FLAT, CST_CLASS_LOSSLESS);
    uint8_t keys[3 * 32], tiers[3];
    struct world_fetch f;

    for (unsigned i = 0; i < 3; i++)
        world_key_n(keys + 32 * i, i);
    assert_int_equal(world_store(w, s, NULL, false, keys, NULL, 0), 0);
    assert_int_equal(world_store(w, s, NULL, false, keys + 64, NULL, 0), 0);
    assert_int_equal(world_store(w, s, NULL, false, keys + 64, NULL, 0), CST_STORE_E_PRESENT);
    assert_int_equal(cst_space_lookup_each(s, keys, 3, tiers), 2);
    assert_int_equal(tiers[0], CST_TIER_HOT);
    assert_int_equal(tiers[1], CST_TIER_NONE);
    assert_int_equal(tiers[2], CST_TIER_HOT);
    world_fetch(w, s, keys + 64, CST_FETCH_DECODED, &f);
    assert_int_equal(f.fetch.loc.tokens, WORLD_TOKENS);
    assert_true(world_bytes_are(&f.fetch.loc, keys + 64, 1));
    cst_fetch_release(&f.fetch);
    world_end(w, s);
}

/* ---- surprisal ---- */

static const struct surprisal {
    const char *name;
    uint16_t half[WORLD_TOKENS];
    float sum; /* < 0: unknown */
} surprisals[] = {
    { "zero", { 0 }, 0 },
    { "one and two bits", { 0x3c00, 0x4000 }, 3 },
    { "largest", { 0x7bff }, 65504 },
    { "smallest", { 0x0001 }, 5.9604645e-8F },
    { "not a number", { 0x3c00, 0x7e00 }, -1 },
    { "infinite", { 0x7c00 }, -1 },
    { "negative", { 0xbc00 }, -1 },
};

static void surprisals_are_summed(void **state) {
    const struct surprisal *row = *state;
    struct cst_space *s;
    struct world *w = world_with(&plain, &s);
    struct tokens tokens[1];
    struct cst_block_info info;
    struct world_put p;
    uint8_t key[32];
    uint64_t next;

    chain(key, tokens, 1, 1);
    assert_int_equal(begin(s, key, tokens, 0, &p), 0);
    world_fill(p.bytes, key, 0);
    cst_put_commit(&p.put, p.bytes, row->half);
    world_settle(w);
    assert_int_equal(cst_space_blocks(s, 0, &info, 1, &next), 1);
    assert_true(row->sum < 0 ? info.surprisal < 0 : info.surprisal == row->sum);
    world_end(w, s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stored_blocks_are_found_and_read),
        cmocka_unit_test(absent_blocks_are_absent),
        cmocka_unit_test(a_packed_block_comes_back_exact),
        cmocka_unit_test(mode_packed_leases_the_frame),
        cmocka_unit_test(an_aborted_commit_still_answers),
        cmocka_unit_test(a_writer_has_the_key_for_a_while),
        cmocka_unit_test(an_aborted_writer_leaves_the_other_one),
        cmocka_unit_test(a_match_may_end_inside_a_block),
        cmocka_unit_test(equal_matches_prefer_hot_blocks),
        cmocka_unit_test(a_longer_tail_supersedes),
        cmocka_unit_test(a_tail_has_no_children),
        cmocka_unit_test(flat_blocks_have_no_parents),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) +
           cst_run_rows(orders, visible_after_the_parent) +
           cst_run_rows(losses, lost_with_the_parent) +
           cst_run_rows(surprisals, surprisals_are_summed);
}
