/* SPDX-License-Identifier: Apache-2.0 */
/* The engine of the disk tier on files in memory: stores, reads, restarts, eviction, refusals. */
#include "base/mem.h"
#include "store/seg_format.h"
#include "tests/unit/store/seg_world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static const enum cst_seg_crypt crypts[] = { CST_SEG_CRYPT_OFF, CST_SEG_CRYPT_AES };

static void test_round_trip(void **state) {
    (void)state;
    for (unsigned c = 0; c < 2; c++) {
        struct seg_world *w = seg_world_new(1, crypts[c]);
        static const uint64_t sizes[] = { 1, 100, 3000, 4096, 5000, 40000, 130000 };

        assert_int_equal(seg_world_start(w), 0);
        seg_world_settle(w);
        for (uint32_t i = 0; i < CST_COUNT(sizes); i++)
            assert_int_equal(seg_world_put(w, i, (int)i - 1, 0, sizes[i]), 0);
        assert_int_equal(seg_world_read_all(w), CST_COUNT(sizes));
        seg_world_drop(w, 6, false);
        assert_int_equal(seg_world_read(w, 6), CST_SEG_E_GONE);
        seg_world_free(w);
    }
}

/* Chains of both kinds of class, many stores under way at once. */
static void fill(struct seg_world *w, uint32_t n, uint64_t bytes) {
    for (uint32_t i = 0; i < n; i++) {
        int parent = i % 8 ? (int)i - 1 : -1;
        int r = seg_world_store(w, i, parent, i / 8 % 2, bytes + i);

        for (unsigned k = 0; r == CST_SEG_E_BUSY && k < 20; k++) {
            seg_world_settle(w);
            r = seg_world_store(w, i, parent, i / 8 % 2, bytes + i);
        }
        assert_true(!r || r == CST_SEG_E_PARENT);
    }
    seg_world_settle(w);
}

static void test_restart(void **state) {
    (void)state;
    for (unsigned k = 0; k < 2; k++) {
        bool clean = k & 1;
        struct seg_world *w = seg_world_new(2, CST_SEG_CRYPT_OFF);
        struct cst_seg_stats stats;

        assert_int_equal(seg_world_start(w), 0);
        seg_world_settle(w);
        fill(w, 100, 3000);
        assert_int_equal(seg_world_live(w), 100);
        w->items[17].pinned_until = 1800000000;
        seg_world_drop(w, 99, false);
        seg_world_drop(w, 96, true); /* its children are the user's business */
        seg_world_settle(w);
        seg_world_stop(w, clean);
        assert_int_equal(seg_world_start(w), 0);
        cst_seg_stats(w->seg, &stats);
        assert_int_equal(stats.recovered_clean, clean);
        /* without a checkpoint what was only dropped comes back; 96 was destroyed with its chain */
        if (clean) {
            assert_int_equal(w->n_found, 96);
            assert_int_equal(w->items[17].pinned_until, 1800000000);
        }
        assert_true(w->n_found >= 96);
        assert_int_equal(w->items[96].live && seg_world_read(w, 96) == 0, 0);
        assert_true(seg_world_read_all(w) >= 96);
        /* and goes on */
        assert_int_equal(seg_world_put(w, 200, 3, 0, 5000), 0);
        assert_int_equal(seg_world_read(w, 200), 0);
        seg_world_free(w);
    }
}

static void test_eviction(void **state) {
    struct seg_world *w = seg_world_new(3, CST_SEG_CRYPT_OFF);
    struct cst_seg_stats stats;

    (void)state;
    for (uint32_t i = 0; i < SEG_ITEMS; i++)
        w->items[i].value = i % 10 ? 1 : 10; /* roots of chains of 8 and others */
    assert_int_equal(seg_world_start(w), 0);
    seg_world_settle(w);
    fill(w, 400, 9000);
    cst_seg_stats(w->seg, &stats);
    assert_true(w->n_gone > 200);
    assert_true(stats.moved_bytes + stats.overhead_bytes <= stats.stored_bytes / 10 + (256 << 10));
    assert_int_equal(seg_world_read_all(w), seg_world_live(w));
    assert_true(stats.segments <= 8);
    seg_world_stop(w, false);
    assert_int_equal(seg_world_start(w), 0);
    assert_true(w->n_found > 50);
    assert_int_equal(seg_world_read_all(w), seg_world_live(w));
    seg_world_free(w);
}

static void test_parents_first(void **state) {
    struct seg_world *w = seg_world_new(4, CST_SEG_CRYPT_OFF);

    (void)state;
    assert_int_equal(seg_world_start(w), 0);
    seg_world_settle(w);
    assert_int_equal(seg_world_put(w, 0, -1, 0, 3000), 0);
    seg_world_drop(w, 0, false);
    assert_int_equal(seg_world_store(w, 1, 0, 0, 3000), CST_SEG_E_PARENT);
    assert_int_equal(seg_world_put(w, 6, -1, 0, 60000), 0);
    assert_int_equal(seg_world_store(w, 1, 6, 0, 3000), 0);
    assert_int_equal(seg_world_store(w, 2, 1, 0, 3000), 0); /* while 1 is under way */
    seg_world_settle(w);
    assert_int_equal(w->items[2].status, 0);
    /* the parent goes while its child is on its way */
    assert_int_equal(seg_world_store(w, 3, 2, 0, 3000), 0);
    seg_world_drop(w, 2, false);
    seg_world_settle(w);
    assert_int_equal(w->items[3].status, CST_SEG_E_PARENT);
    /* a payload that isn't what its checksum says leaves a void, and what follows is there */
    assert_int_equal(seg_world_store(w, 4, -1, 0, 50000), 0);
    w->items[4].payload[33] ^= 1;
    assert_int_equal(seg_world_store(w, 5, -1, 0, 50000), 0);
    seg_world_settle(w);
    assert_int_equal(w->items[5].status, 0);
    seg_world_stop(w, false);
    w->items[4].begun = w->items[4].status == CST_SEG_E_CORRUPT ? false : true;
    assert_int_equal(seg_world_start(w), 0);
    assert_int_equal(w->items[5].live, 1);
    assert_int_equal(seg_world_read(w, 5), 0);
    seg_world_free(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_restart),
        cmocka_unit_test(test_eviction),
        cmocka_unit_test(test_parents_first),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
