/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Side data of a space: learned from the first blocks, put by others, kept as long as they are
 * needed, counted; and when encoding waits for them.
 */
#include "tests/lib/check.h"

#include "codec/learn.h"
#include "store/choice.h"
#include "store/prefix_trie.h"
#include "tests/unit/store/store_world.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 72, FEW = 20, SLICES = 4 };

static const uint8_t root[32] = { 9 };

struct setup {
    struct world *w;
    struct cst_space *s;
    uint8_t keys[4 * BLOCKS * 32];
};

static struct setup setup(const struct world_options *options, enum cst_class klass) {
    struct setup x = { .w = world_new(options) };

    x.s = world_space(x.w, "a", 1, CST_KIND_TOKENS, klass);
    return x;
}

static void teardown(struct setup *x) {
    world_check(x->w);
    (void)cst_space_unref(x->s);
    world_free(x->w);
}

static void store(struct setup *x, uint32_t first, size_t n) {
    world_store_chain(x->w, x->s, root, first, n, x->keys + 32UL * first);
}

/* Blocks are looked at a few a slice. */
static void tick(struct world *w, unsigned n) {
    for (unsigned i = 0; i < n; i++) {
        cst_store_tick(w->store);
        world_settle(w);
    }
}

static void wait_s(struct setup *x, uint64_t s) {
    x->w->clock.ns += s * CST_NS_PER_S;
    tick(x->w, SLICES);
    world_pack(x->w);
}

static size_t n_sides(const struct cst_space *s) {
    struct cst_side_info info[CST_SIDES_MAX];

    return cst_space_sides(s, info, CST_SIDES_MAX);
}

/* ---- learning ---- */

static const struct world_options waiting = { .seed = 1, .learn_wait_ns = 10 * CST_NS_PER_S };

static void encoding_waits_for_what_is_learned(void **state) {
    struct setup x = setup(&waiting, CST_CLASS_SMALL_LOSS);
    struct cst_side_info info;
    struct world_fetch f;

    store(&x, 0, BLOCKS);
    wait_s(&x, 1);
    assert_int_equal(x.s->stats.encodes, 0);
    assert_null(cst_space_side_bytes(x.s, 0, &info));
    wait_s(&x, 10);
    assert_int_equal(x.s->stats.sides_learned, 1);
    assert_non_null(cst_space_side_bytes(x.s, 0, &info));
    assert_int_equal(info.version, 1);
    assert_true(x.s->stats.side_bytes >= info.size);
    assert_int_equal(x.s->stats.encodes, BLOCKS);
    for (unsigned i = 0; i < BLOCKS; i += 7) {
        const struct cst_block *b = cst_trie_find(x.s, x.keys + 32 * i);

        assert_true(b->error > 0 && b->error <= .15F);
        world_cool(x.s, b->key);
        world_fetch(x.w, x.s, b->key, CST_FETCH_DECODED, &f);
        assert_int_equal(f.status, 0);
        cst_fetch_release(&f.fetch);
    }
    teardown(&x);
}

/* What the store learns by slices is what the oldest blocks give at once. */
static void slices_learn_from_the_oldest_blocks(void **state) {
    struct setup x = setup(&waiting, CST_CLASS_SMALL_LOSS);
    struct cst_learn_params params = { .version = 1, .step = cst_class_step(CST_CLASS_SMALL_LOSS) };
    struct cst_learn_block in[BLOCKS];
    uint32_t tokens = BLOCKS * WORLD_TOKENS;
    size_t cap = cst_learn_bound(x.s->desc), work_len, len;
    uint8_t *bytes = malloc(cap);
    struct cst_side_info info;
    void *work = NULL;

    store(&x, 0, BLOCKS);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        const struct cst_block *b = cst_trie_find(x.s, x.keys + 32 * i);

        in[i] = (struct cst_learn_block){ cst_slot_data(b->hot.slab, b->hot.slot), WORLD_TOKENS,
                                          i * WORLD_TOKENS };
    }
    work_len = cst_learn_work_size(x.s->desc, tokens);
    assert_int_equal(posix_memalign(&work, 64, work_len), 0);
    assert_int_equal(
        cst_learn(bytes, cap, x.s->desc, in, BLOCKS, &params, work, work_len, &len, NULL), 0);
    x.w->clock.ns += 11 * CST_NS_PER_S;
    tick(x.w, 1);
    assert_int_equal(n_sides(x.s), 0); /* more blocks than a slice looks at */
    assert_int_equal(x.s->stats.encodes, 0);
    wait_s(&x, 0);
    assert_int_equal(x.s->stats.encodes, BLOCKS);
    assert_non_null(cst_space_side_bytes(x.s, 0, &info));
    assert_int_equal(info.size, len);
    assert_memory_equal(cst_space_side_bytes(x.s, 0, &info), bytes, len);
    free(bytes);
    free(work);
    teardown(&x);
}

/* Between two slices: they are erased; everything ends. */
static void blocks_may_go_while_they_are_gathered(void **state) {
    for (unsigned ticks = 1; ticks < SLICES; ticks++) {
        struct setup x = setup(&waiting, CST_CLASS_SMALL_LOSS);

        store(&x, 0, BLOCKS);
        x.w->clock.ns += 11 * CST_NS_PER_S;
        for (unsigned i = 0; i < ticks; i++)
            cst_store_tick(x.w->store);
        (void)cst_space_clear(x.s);
        if (ticks % 2)
            wait_s(&x, 1);
        teardown(&x);
    }
}

/* Too few blocks to learn from: after the wait they are encoded with a preset that needs nothing.
 */
static void a_short_prompt_is_encoded_without(void **state) {
    struct setup x = setup(&waiting, CST_CLASS_SMALL_LOSS);

    store(&x, 0, FEW);
    wait_s(&x, 1);
    assert_int_equal(x.s->stats.encodes, 0);
    wait_s(&x, 10);
    assert_int_equal(x.s->stats.encodes, FEW);
    assert_int_equal(n_sides(x.s), 0);
    teardown(&x);
}

static void exact_spaces_never_wait(void **state) {
    struct setup x = setup(&waiting, CST_CLASS_LOSSLESS);

    store(&x, 0, FEW);
    wait_s(&x, 1);
    assert_int_equal(x.s->stats.encodes, FEW);
    teardown(&x);
}

static void store_loose(struct setup *x, struct cst_space *s, uint32_t i) {
    const uint32_t tokens[WORLD_TOKENS] = { i };
    uint8_t key[32];

    world_key(key, root, tokens, WORLD_TOKENS);
    assert_int_equal(world_store(x->w, s, root, true, key, tokens, WORLD_TOKENS), 0);
    cst_store_tick(x->w->store);
    world_settle(x->w);
}

/* 8,192 tokens are enough: they come at once, or there would be no end of waiting. */
static void learning_does_not_wait_for_a_pause(void **state) {
    struct world_options options = waiting;
    struct setup x;

    options.memory = 128 << 20;
    x = setup(&options, CST_CLASS_SMALL_LOSS);
    for (uint32_t i = 0; i < 511; i++)
        store_loose(&x, x.s, i);
    assert_int_equal(x.s->stats.encodes, 0);
    for (uint32_t i = 511; n_sides(x.s) == 0 && i < 511 + 3 * 512 / 64; i++)
        store_loose(&x, x.s, i);
    assert_int_equal(n_sides(x.s), 1);
    store_loose(&x, x.s, 4096);
    assert_true(x.s->stats.encodes > 0);
    teardown(&x);
}

/* Memory for learning from half of the tokens, which is no whole number of blocks. */
static void learning_takes_as_many_tokens_as_memory_allows(void **state) {
    enum { ODD = 41 };
    struct world_options options = waiting;
    struct setup x = setup(&options, CST_CLASS_SMALL_LOSS);
    struct cst_side_info info;

    options.memory = 2 * (cst_learn_bound(x.s->desc) + cst_side_memory(x.s->desc) +
                          cst_learn_work_size(x.s->desc, ODD * WORLD_TOKENS - 1));
    teardown(&x);
    x = setup(&options, CST_CLASS_SMALL_LOSS);
    store(&x, 0, ODD);
    wait_s(&x, 11);
    assert_int_equal(x.s->stats.sides_learned, 1);
    assert_non_null(cst_space_side_bytes(x.s, 0, &info));
    assert_int_equal(cst_side_newest(x.s)->side.tokens,
                     ODD / 2 * WORLD_TOKENS - 4); /* but for the sinks */
    teardown(&x);
}

/* Others use most of it before the wait is over. */
static void under_pressure_nothing_waits(void **state) {
    struct setup x = setup(&waiting, CST_CLASS_SMALL_LOSS);
    uint64_t others = x.w->store->options.memory / 16 * 15;

    store_loose(&x, x.s, 0);
    assert_int_equal(x.s->stats.encodes, 0);
    x.w->store->encode_bytes += others;
    for (uint32_t i = 1; i < FEW; i++)
        store_loose(&x, x.s, i);
    assert_int_equal(n_sides(x.s), 0);
    assert_int_equal(x.s->stats.encodes, FEW);
    x.w->store->encode_bytes -= others;
    teardown(&x);
}

static void nobody_learns_where_it_is_not_allowed(void **state) {
    struct world_options options = waiting;
    struct setup x;

    options.side_bytes = 1;
    x = setup(&options, CST_CLASS_SMALL_LOSS);
    store(&x, 0, BLOCKS);
    wait_s(&x, 11);
    assert_int_equal(n_sides(x.s), 0);
    assert_int_equal(x.s->stats.encodes, BLOCKS);
    store(&x, BLOCKS, FEW);
    wait_s(&x, 1); /* no second wait */
    assert_int_equal(x.s->stats.encodes, BLOCKS + FEW);
    teardown(&x);
}

static void note(struct setup *x, unsigned n, uint64_t bytes, float error, bool missed) {
    const struct cst_frame_info info = {
        .side_version = 1, .tokens = WORLD_TOKENS, .frame_bytes = bytes, .error = error
    };

    for (unsigned i = 0; i < n; i++)
        cst_learn_note(x->s, &info, missed);
}

static struct setup learned(void);

/* Frames that get larger or worse than they were at first, or miss the bound, ask for a new
 * version; such as always come do not. */
static void drift_is_learned_from(void **state) {
    static const struct {
        uint64_t bytes;
        float error;
        bool missed;
        unsigned learned;
    } rows[] = { { 1000, .1F, false, 1 },  { 1100, .11F, false, 1 }, { 1300, .1F, false, 2 },
                 { 1000, .13F, false, 2 }, { 1000, .1F, true, 2 },   { 800, .05F, false, 1 } };

    for (size_t i = 0; i < CST_COUNT(rows); i++) {
        struct setup x = learned();

        x.s->drift = (struct cst_drift){ 0 };
        note(&x, 64, 1000, .1F, false);
        wait_s(&x, 61);
        assert_int_equal(x.s->stats.sides_learned, 1);
        note(&x, 64, rows[i].bytes, rows[i].error, rows[i].missed);
        wait_s(&x, 61);
        assert_int_equal(x.s->stats.sides_learned, rows[i].learned);
        assert_int_equal(cst_side_newest(x.s)->side.version, rows[i].learned);
        wait_s(&x, 61); /* and no more */
        assert_int_equal(x.s->stats.sides_learned, rows[i].learned);
        teardown(&x);
    }
}

/* ---- puts ---- */

struct side_put {
    struct cst_side_put put;
    int status, told;
};

static void told(struct cst_side_put *put, int status) {
    struct side_put *p = cst_container_of(put, struct side_put, put);

    p->status = status;
    p->told++;
}

static int put_side(struct setup *x, enum cst_side_put_kind kind, const void *bytes, size_t size,
                    struct side_put *p) {
    int r;

    *p = (struct side_put){ .put.done = told };
    r = cst_space_side_put(x->s, kind, bytes, size, &p->put);
    if (r)
        return r;
    world_settle(x->w);
    assert_int_equal(p->told, 1);
    return p->status;
}

static struct setup learned(void) {
    struct setup x = setup(&(struct world_options){ .seed = 2 }, CST_CLASS_SMALL_LOSS);

    store(&x, 0, BLOCKS);
    wait_s(&x, 0);
    assert_int_equal(n_sides(x.s), 1);
    assert_int_equal(x.s->stats.encodes, BLOCKS);
    return x;
}

static void versions_stay_while_frames_need_them(void **state) {
    struct setup x = learned();
    const float weights[2] = { .5F, .75F };
    struct cst_side_data *first = cst_side_newest(x.s);
    uint64_t bytes = x.s->stats.side_bytes, n, frames = first->refs;
    struct side_put p;

    assert_int_equal(put_side(&x, CST_SIDE_PUT_WEIGHTS, weights, sizeof(weights), &p), 0);
    assert_int_equal(p.put.version, 2);
    assert_int_equal(n_sides(x.s), frames ? 2 : 1);
    assert_true(cst_side_newest(x.s)->side.tensor[1].weight == .75F);
    assert_true(cst_side_newest(x.s)->side.tensor[0].weight == .5F);
    store(&x, BLOCKS, FEW);
    world_pack(x.w);
    for (unsigned i = 0; i < BLOCKS + FEW; i += 9) { /* both versions decode */
        const struct cst_block *b = cst_trie_find(x.s, x.keys + 32 * i);
        struct world_fetch f;

        assert_true(!b->side || b->side->side.version == (i < BLOCKS ? 1 : 2));
        world_cool(x.s, b->key);
        world_fetch(x.w, x.s, b->key, CST_FETCH_DECODED, &f);
        assert_int_equal(f.status, 0);
        cst_fetch_release(&f.fetch);
    }
    assert_int_equal(cst_space_erase(x.s, x.keys, &n), 0);
    assert_int_equal(n_sides(x.s), 1);
    assert_true(x.s->stats.side_bytes <= bytes);
    teardown(&x);
}

static void the_same_bytes_are_no_new_version(void **state) {
    struct setup x = learned();
    struct cst_side_info info;
    const uint8_t *bytes = cst_space_side_bytes(x.s, 0, &info);
    uint8_t *copy = malloc(info.size);
    struct side_put p;

    memcpy(copy, bytes, info.size);
    assert_int_equal(put_side(&x, CST_SIDE_PUT_TABLES, copy, info.size, &p), 0);
    assert_int_equal(p.put.version, 1);
    assert_int_equal(n_sides(x.s), 1);
    free(copy);
    teardown(&x);
}

static void nonsense_is_refused(void **state) {
    struct setup x = learned();
    struct cst_side_info info;
    const uint8_t *bytes = cst_space_side_bytes(x.s, 0, &info);
    uint8_t *copy = malloc(info.size);
    const float bad[][2] = { { 0, 1 }, { 1, -1 }, { NAN, 1 }, { 1, INFINITY } };
    uint64_t before = x.w->store->side_bytes;
    struct side_put p;

    for (size_t i = 0; i < CST_COUNT(bad); i++)
        assert_int_equal(put_side(&x, CST_SIDE_PUT_WEIGHTS, bad[i], sizeof(bad[i]), &p),
                         CST_STORE_E_BAD_SIDE);
    assert_int_equal(put_side(&x, CST_SIDE_PUT_WEIGHTS, bad[0], 4, &p), CST_STORE_E_BAD_SIDE);
    for (size_t at = 0; at < info.size; at += info.size / 50 + 1) { /* a flipped bit anywhere */
        memcpy(copy, bytes, info.size);
        copy[at] ^= 0x40;
        assert_int_equal(put_side(&x, CST_SIDE_PUT_TABLES, copy, info.size, &p),
                         CST_STORE_E_BAD_SIDE);
    }
    assert_int_equal(put_side(&x, CST_SIDE_PUT_TABLES, bytes, info.size / 2, &p),
                     CST_STORE_E_BAD_SIDE);
    assert_int_equal(n_sides(x.s), 1);
    assert_int_equal(x.w->store->side_bytes, before);
    assert_int_equal(put_side(&x, CST_SIDE_PUT_TABLES, copy, 65UL << 20, &p), CST_STORE_E_LIMIT);
    free(copy);
    teardown(&x);
}

static void weights_need_tables(void **state) {
    struct setup x = setup(&(struct world_options){ .seed = 3 }, CST_CLASS_SMALL_LOSS);
    const float weights[2] = { 1, 1 };
    struct side_put p;

    assert_int_equal(put_side(&x, CST_SIDE_PUT_WEIGHTS, weights, sizeof(weights), &p),
                     CST_STORE_E_NOT_FOUND);
    teardown(&x);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(encoding_waits_for_what_is_learned),
        cmocka_unit_test(slices_learn_from_the_oldest_blocks),
        cmocka_unit_test(blocks_may_go_while_they_are_gathered),
        cmocka_unit_test(a_short_prompt_is_encoded_without),
        cmocka_unit_test(exact_spaces_never_wait),
        cmocka_unit_test(learning_does_not_wait_for_a_pause),
        cmocka_unit_test(learning_takes_as_many_tokens_as_memory_allows),
        cmocka_unit_test(under_pressure_nothing_waits),
        cmocka_unit_test(nobody_learns_where_it_is_not_allowed),
        cmocka_unit_test(drift_is_learned_from),
        cmocka_unit_test(versions_stay_while_frames_need_them),
        cmocka_unit_test(the_same_bytes_are_no_new_version),
        cmocka_unit_test(nonsense_is_refused),
        cmocka_unit_test(weights_need_tables),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
