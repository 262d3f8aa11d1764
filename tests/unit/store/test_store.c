/* SPDX-License-Identifier: Apache-2.0 */
/* The life of puts and fetches, each rule of store.h once. */
#include "tests/lib/check.h"

#include "tests/unit/store/store_world.h"

#include <errno.h>
#include <string.h>

static uint8_t root[32] = { 7 };

static void fetch_now(struct world *w, struct cst_space *s, const uint8_t *key,
                      enum cst_fetch_mode mode, struct world_fetch *f) {
    *f = (struct world_fetch){ .fetch = CST_FETCH_NULL(world_fetch_ready) };
    f->status = cst_fetch_start(s, key, mode, &f->fetch);
    if (f->status == CST_STORE_E_PENDING) {
        world_settle(w);
        assert_int_equal(f->told, 1);
    }
}

static void stored_blocks_are_found_and_read(void **state) {
    struct world *w = world_new(&(struct world_options){ .seed = 1 });
    struct cst_space *s = world_space(w, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    uint8_t keys[5 * 32], tiers[5];
    struct cst_lookup found;
    struct world_fetch f;

    world_store_chain(w, s, root, 100, 5, keys);
    cst_space_lookup(s, keys, 5, root, NULL, 0, tiers, &found);
    assert_int_equal(found.present, 5);
    for (unsigned i = 0; i < 5; i++) {
        assert_int_equal(tiers[i], CST_TIER_HOT);
        fetch_now(w, s, keys + 32 * i, CST_FETCH_DECODED, &f);
        assert_int_equal(f.status, 0);
        assert_true(world_bytes_are(&f.fetch.loc, keys + 32 * i, 1));
        assert_int_equal(f.fetch.loc.tokens, WORLD_TOKENS);
        cst_fetch_release(&f.fetch);
        cst_fetch_release(&f.fetch);
    }
    assert_null(cst_space_unref(s));
    world_check(w);
    world_free(w);
    assert_int_equal(world_slabs, 0);
}

static void a_packed_block_comes_back_exact(void **state) {
    struct world *w = world_new(&(struct world_options){ .seed = 1 });
    struct cst_space *s = world_space(w, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    struct cst_space_stats stats;
    uint8_t keys[32];
    struct world_fetch f, g;
    struct cst_block *b;

    world_store_chain(w, s, root, 100, 1, keys);
    cst_store_tick(w->store);
    world_settle(w);
    cst_space_stats(s, &stats);
    assert_int_equal(stats.encodes, 1);
    assert_in_range(stats.packed_bytes, 1, WORLD_BLOCK * 3 / 4);
    b = (struct cst_block *)(void *)((char *)cst_list_first(&s->clean) -
                                     offsetof(struct cst_block, file));
    cst_block_drop_hot(b);
    cst_block_settle(b, CST_EVICT_WARM);
    f = g = (struct world_fetch){ .fetch = CST_FETCH_NULL(world_fetch_ready) };
    assert_int_equal(cst_fetch_start(s, keys, CST_FETCH_DECODED, &f.fetch), CST_STORE_E_PENDING);
    assert_int_equal(cst_fetch_start(s, keys, CST_FETCH_DECODED, &g.fetch), CST_STORE_E_PENDING);
    world_settle(w);
    assert_true(f.told == 1 && g.told == 1 && !f.status && !g.status);
    assert_true(world_bytes_are(&f.fetch.loc, keys, 1));
    assert_ptr_equal(f.fetch.loc.slab, g.fetch.loc.slab);
    assert_int_equal(f.fetch.loc.offset, g.fetch.loc.offset);
    assert_int_equal(f.fetch.loc.tier, CST_TIER_PACKED);
    cst_space_stats(s, &stats);
    assert_int_equal(stats.decodes, 1);
    assert_int_equal(stats.merged_fetches, 1);
    cst_fetch_release(&f.fetch);
    cst_fetch_release(&g.fetch);
    fetch_now(w, s, keys, CST_FETCH_PACKED, &f);
    assert_true(f.status == 0 && f.fetch.loc.packed && f.fetch.loc.preset == CST_PRESET_LOSSLESS);
    cst_fetch_release(&f.fetch);
    cst_space_unref(s);
    world_check(w);
    world_free(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stored_blocks_are_found_and_read),
        cmocka_unit_test(a_packed_block_comes_back_exact),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
