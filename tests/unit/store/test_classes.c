/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quality classes at the level of the store: one prompt in four spaces that differ by class only.
 * The lossless one gives back every byte, whatever happens in the others; the others stay within
 * their bound, measured here in double precision.
 */
#include "tests/lib/check.h"

#include "store/prefix_trie.h"
#include "tests/unit/store/store_world.h"

#include <math.h>
#include <string.h>

enum { CHAIN = 20, STEPS = 8000, ROWS = WORLD_TOKENS, COLS = 64 };

static const uint8_t root[32] = { 7 };

static double half(const uint8_t *p) {
    unsigned h = p[0] | (unsigned)p[1] << 8, e = h >> 10 & 31, m = h & 1023;
    double v = e ? ldexp(m | 1024, (int)e - 25) : ldexp(m, -24);

    return h >> 15 ? -v : v;
}

/* rms error over rms deviation from the channel mean, the first four tokens of a sequence aside;
 * infinite if these differ at all. */
static double tensor_error(const uint8_t *want, const uint8_t *got, unsigned first_row) {
    double error = 0, deviation = 0;

    if (memcmp(want, got, first_row * COLS * 2UL))
        return INFINITY;
    for (unsigned c = 0; c < COLS; c++) {
        double mean = 0;

        for (unsigned r = first_row; r < ROWS; r++)
            mean += half(want + 2 * (r * COLS + c)) / (ROWS - first_row);
        for (unsigned r = first_row; r < ROWS; r++) {
            double v = half(want + 2 * (r * COLS + c)), g = half(got + 2 * (r * COLS + c));

            error += (g - v) * (g - v);
            deviation += (v - mean) * (v - mean);
        }
    }
    return sqrt(error / deviation);
}

static double block_error(const struct cst_location *loc, const uint8_t key[32], bool first) {
    const uint8_t *got = loc->slab->mem.base + loc->offset;
    uint8_t want[WORLD_BLOCK];
    double k, v;

    world_fill(want, key, 0);
    k = tensor_error(want, got, first ? CST_SINK_TOKENS : 0);
    v = tensor_error(want + WORLD_BLOCK / 2, got + WORLD_BLOCK / 2, first ? CST_SINK_TOKENS : 0);
    return k > v ? k : v;
}

static const double bounds[CST_CLASSES] = { 0, .05, .15, .30 };

struct spaces {
    struct world *w;
    struct cst_space *s[CST_CLASSES];
    uint8_t keys[CHAIN * 32];
};

/* Blocks form a heap: i hangs under (i - 1) / 2. */
static const uint8_t *parent_key(const struct spaces *x, unsigned i) {
    return i ? x->keys + 32UL * ((i - 1) / 2) : root;
}

static unsigned depth(unsigned i) {
    return i ? 1 + depth((i - 1) / 2) : 0;
}

static void check_fetch(struct spaces *x, unsigned klass, unsigned i) {
    struct world_fetch f;

    world_fetch(x->w, x->s[klass], x->keys + 32 * i, CST_FETCH_DECODED, &f);
    if (!f.status) {
        assert_true(block_error(&f.fetch.loc, x->keys + 32 * i, i == 0) <= bounds[klass]);
        if (klass == CST_CLASS_LOSSLESS)
            assert_true(world_bytes_are(&f.fetch.loc, x->keys + 32 * i, 1));
    }
    cst_fetch_release(&f.fetch);
    world_fetch(x->w, x->s[klass], x->keys + 32 * i, CST_FETCH_PACKED, &f);
    if (!f.status && f.fetch.loc.packed) {
        struct cst_frame_info info;

        assert_int_equal(cst_frame_inspect(f.fetch.loc.slab->mem.base + f.fetch.loc.offset,
                                           f.fetch.loc.length, &info),
                         0);
        assert_true(cst_space_presets(x->s[klass]) & 1u << info.preset);
        assert_int_equal(info.preset, f.fetch.loc.preset);
        assert_int_equal(info.first_position, depth(i) * WORLD_TOKENS);
        assert_true((double)info.error <= bounds[klass]);
        assert_true(klass != CST_CLASS_LOSSLESS || cst_preset_is_exact(info.preset));
    }
    cst_fetch_release(&f.fetch);
}

static void fill_keys(struct spaces *x) {
    for (uint32_t i = 0; i < CHAIN; i++) {
        const uint32_t tokens[WORLD_TOKENS] = { i };

        world_key(x->keys + 32 * i, parent_key(x, i), tokens, WORLD_TOKENS);
    }
}

static void store(struct spaces *x, unsigned klass, uint32_t i) {
    const uint32_t tokens[WORLD_TOKENS] = { i };

    (void)world_store(x->w, x->s[klass], parent_key(x, i), i == 0, x->keys + 32 * i, tokens,
                      WORLD_TOKENS);
}

static struct spaces setup(uint64_t memory) {
    struct spaces x = { .w = world_new(&(struct world_options){ .seed = 1, .memory = memory }) };

    fill_keys(&x);
    for (unsigned c = 0; c < CST_CLASSES; c++)
        x.s[c] = world_space(x.w, "a", 1, CST_KIND_TOKENS, (enum cst_class)c);
    return x;
}

static void teardown(struct spaces *x) {
    world_check(x->w);
    for (unsigned c = 0; c < CST_CLASSES; c++)
        (void)cst_space_unref(x->s[c]);
    world_free(x->w);
}

static void each_class_keeps_its_bound(void **state) {
    struct spaces x = setup(0);

    for (unsigned c = 0; c < CST_CLASSES; c++) {
        for (uint32_t i = 0; i < CHAIN; i++)
            store(&x, c, i);
        world_pack(x.w);
        for (uint32_t i = 0; i < CHAIN; i++) {
            struct cst_block *b = cst_trie_find(x.s[c], x.keys + 32 * i);

            assert_int_equal(b->preset, c ? CST_PRESET_TURBOQUANT : CST_PRESET_LOSSLESS);
            assert_true(c ? b->error > 0 : b->error == 0);
            world_cool(x.s[c], b->key);
            check_fetch(&x, c, i);
        }
    }
    teardown(&x);
}

/* When a slab of frames is emptied for others, blocks whose hot bytes came from a lossy frame go
 * with it: encoded again they would lose twice. Those that still have the committed bytes stay. */
static void nothing_is_encoded_twice(void **state) {
    for (unsigned c = 0; c < CST_CLASSES; c++) {
        struct spaces x = setup(5 * WORLD_SLAB); /* three slabs, with the index */
        struct cst_space *other = world_space(x.w, "b", 1, CST_KIND_FLAT, CST_CLASS_LOSSLESS);
        struct world_fetch f;
        uint8_t key[32];

        store(&x, c, 0);
        store(&x, c, 1);
        world_pack(x.w);
        world_cool(x.s[c], x.keys + 32);
        world_fetch(x.w, x.s[c], x.keys + 32, CST_FETCH_DECODED, &f);
        cst_fetch_release(&f.fetch);
        for (unsigned i = 0; i <= WORLD_SLAB / WORLD_BLOCK; i++) {
            world_key_n(key, i);
            assert_int_equal(world_store(x.w, other, NULL, false, key, NULL, 0), 0);
        }
        assert_int_equal(x.s[c]->packed_copies, 0); /* its slab was the oldest */
        assert_int_equal(world_present(x.s[c], x.keys, 1), 1);
        assert_int_equal(world_present(x.s[c], x.keys + 32, 1), c == CST_CLASS_LOSSLESS);
        world_pack(x.w);
        (void)cst_space_unref(other);
        teardown(&x);
    }
}

/* Hardly any deviation beside a large mean: eight bits without a mean can't keep the bound. The
 * block gets a safer preset, and that is counted. */
static void what_a_preset_cannot_hold_gets_a_safer_one(void **state) {
    const struct cst_encode_params int8 = { .preset = CST_PRESET_INT8 };
    struct spaces x = setup(0);
    const uint32_t tokens[WORLD_TOKENS] = { 0 };
    struct cst_space *s = x.s[CST_CLASS_NEAR_LOSSLESS];
    struct world_put p = { .put = CST_PUT_NULL(world_put_done) };
    struct world_fetch f;
    struct cst_block *b;
    const uint8_t *got;
    uint32_t busy_ms;

    cst_store_set_preset(x.w->store, CST_CLASS_NEAR_LOSSLESS, &int8);
    for (size_t i = 0; i < WORLD_BLOCK; i += 2) {
        p.bytes[i] = (uint8_t)(i / 2 * 7 % 3);
        p.bytes[i + 1] = 0x3a;
    }
    assert_int_equal(cst_put_begin(s, root, true, x.keys, tokens, WORLD_TOKENS, &p.put, &busy_ms),
                     0);
    cst_put_commit(&p.put, p.bytes, NULL);
    world_settle(x.w);
    world_pack(x.w);
    b = cst_trie_find(s, x.keys);
    assert_int_equal(b->preset, CST_PRESET_TURBOQUANT);
    assert_int_equal(s->stats.fallbacks, 1);
    world_cool(s, x.keys);
    world_fetch(x.w, s, x.keys, CST_FETCH_DECODED, &f);
    assert_int_equal(f.status, 0);
    got = f.fetch.loc.slab->mem.base + f.fetch.loc.offset;
    assert_true(tensor_error(p.bytes, got, CST_SINK_TOKENS) <= (double)b->error + 1e-6);
    cst_fetch_release(&f.fetch);
    teardown(&x);
}

/* Of each class, whatever the configuration wants. */
static void a_configured_preset_is_used_where_it_is_safe(void **state) {
    static const struct {
        const char *text;
        enum cst_preset made;
    } rows[] = {
        { "kivi4", CST_PRESET_KIVI4 },
        { "int4", CST_PRESET_INT4 },
        { "turboquant:7", CST_PRESET_TURBOQUANT },
        { "lossless", CST_PRESET_LOSSLESS },
        { "turboquant:1", CST_PRESET_TURBOQUANT }, /* misses: the class's own follows */
    };

    for (size_t i = 0; i < CST_COUNT(rows); i++) {
        struct spaces x = setup(0);
        struct cst_space *s = x.s[CST_CLASS_COLD];
        struct cst_encode_params params;
        struct cst_block *b;

        assert_int_equal(cst_preset_parse(&params, rows[i].text), 0);
        cst_store_set_preset(x.w->store, CST_CLASS_COLD, &params);
        store(&x, CST_CLASS_COLD, 0);
        world_pack(x.w);
        b = cst_trie_find(s, x.keys);
        assert_int_equal(b->preset, rows[i].made);
        assert_true((double)b->error <= bounds[CST_CLASS_COLD]);
        assert_int_equal(s->stats.fallbacks, params.bits_k == 1);
        store(&x, CST_CLASS_LOSSLESS, 0);
        world_pack(x.w);
        b = cst_trie_find(x.s[CST_CLASS_LOSSLESS], x.keys);
        assert_int_equal(b->preset, CST_PRESET_LOSSLESS);
        teardown(&x);
    }
}

/* Random puts, losses, packing, cooling and re-opening in a memory that evicts. */
static void exact_bytes_never_come_from_a_lossy_space(void **state) {
    struct spaces x = setup(8 * WORLD_SLAB);
    struct cst_seeded_random rng;
    struct cst_space_stats stats;
    uint64_t n;

    cst_seeded_random_init(&rng, 5);
    for (unsigned step = 0; step < STEPS; step++) {
        uint64_t r = cst_seeded_random_next(&rng);
        unsigned c = (unsigned)(r >> 8) % CST_CLASSES, i = (unsigned)(r >> 16) % CHAIN;
        struct cst_block *b = cst_trie_find(x.s[c], x.keys + 32 * i);

        x.w->clock.ns += CST_NS_PER_S / 4;
        switch (r % 8) {
        case 0 ... 2:
            store(&x, c, i);
            break;
        case 3:
            world_pack(x.w);
            break;
        case 5:
            if ((r >> 32) % 16 == 0)
                (void)cst_space_erase(x.s[c], x.keys + 32 * i, &n);
            break;
        case 6:
            (void)cst_space_unref(x.s[c]);
            x.s[c] = world_space(x.w, "a", 1, CST_KIND_TOKENS, (enum cst_class)c);
            break;
        default:
            if (b && b->filed == CST_FILED_CLEAN)
                world_cool(x.s[c], b->key);
            check_fetch(&x, c, i);
            break;
        }
        if (step % 16 == 0)
            world_check(x.w); /* also: only exact frames in the lossless space */
    }
    cst_namespace_stats(cst_space_namespace(x.s[0]), &stats); /* of spaces that went, too */
    assert_true(stats.decodes > 100);
    assert_true(stats.evicted_blocks > 50);
    teardown(&x);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_class_keeps_its_bound),
        cmocka_unit_test(nothing_is_encoded_twice),
        cmocka_unit_test(what_a_preset_cannot_hold_gets_a_safer_one),
        cmocka_unit_test(a_configured_preset_is_used_where_it_is_safe),
        cmocka_unit_test(exact_bytes_never_come_from_a_lossy_space),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
