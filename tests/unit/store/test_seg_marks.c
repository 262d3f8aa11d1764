/* SPDX-License-Identifier: Apache-2.0 */
/* What was dropped, destroyed or pinned, after a kill: checkpoints made in slices, voids. */
#include "tests/unit/store/seg_world.h"

#include "tests/lib/check.h"

#include "base/fault.h"

#include <string.h>

enum { N = 300, CHAIN = 10 };

/* Chains of ten; every third record is pinned. */
static struct seg_world *filled(uint64_t seed, enum cst_seg_crypt crypt, uint64_t bytes) {
    struct seg_world *w = seg_world_new(seed, crypt);

    w->options.bytes = 12 * (256 << 10);
    assert_int_equal(seg_world_start(w), 0);
    for (uint32_t i = 0; i < N; i++) {
        int parent = i % CHAIN ? (int)i - 1 : -1;

        w->items[i].pinned_until = i % 3 ? 0 : 2000000000 + i;
        assert_int_equal(seg_world_put(w, i, parent, i % 20 < 10, bytes), 0);
    }
    return w;
}

/* A minute later a tick begins a checkpoint; in the middle of it records are dropped and stored. */
static void test_checkpoints_are_made_in_slices(void **state) {
    for (uint32_t slice = 1; slice < 400; slice = 3 * slice + 1) {
        struct seg_world *w = filled(slice, CST_SEG_CRYPT_OFF, 3000);
        unsigned ticks = 1;

        w->options.slice_slots = slice;
        seg_world_stop(w, true);
        assert_int_equal(seg_world_start(w), 0);
        for (uint32_t i = 9; i < N; i += 20) /* ends of chains */
            seg_world_drop(w, i, false);
        w->clock.ns += 61 * CST_NS_PER_S;
        for (; cst_seg_tick(w->seg); ticks++) {
            uint32_t late = (19 + 20 * ticks) % N;

            if (w->items[late].live)
                seg_world_drop(w, late, false);
            if (N + ticks < SEG_ITEMS)
                assert_int_equal(seg_world_put(w, N + ticks, -1, 0, 700), 0);
        }
        assert_true(ticks >= N / CST_MAX(slice, 2U));
        seg_world_settle(w);
        seg_world_stop(w, false); /* a kill */
        assert_int_equal(seg_world_start(w), 0);
        for (uint32_t i = 0; i < N; i++) {
            const struct seg_item *item = &w->items[i];
            bool early = i % 20 == 9, late = i % 20 == 19;

            assert_true(late || item->live == !early);
            if (item->live)
                assert_int_equal(item->pinned_until, i % 3 ? 0 : 2000000000 + i);
        }
        assert_int_equal(seg_world_read_all(w), w->n_found);
        seg_world_free(w);
    }
}

/* Segments come and go while it is made: with each tick some are evicted and filled again. */
static void test_a_checkpoint_of_what_changes_lies_about_nothing(void **state) {
    struct seg_world *w = filled(5, CST_SEG_CRYPT_OFF, 5000);
    size_t live;

    w->options.slice_slots = 5;
    seg_world_stop(w, true);
    assert_int_equal(seg_world_start(w), 0);
    seg_world_drop(w, 299, false);
    w->clock.ns += 61 * CST_NS_PER_S;
    for (uint32_t i = N; cst_seg_tick(w->seg); i = i + 1 < SEG_ITEMS ? i + 1 : N)
        for (unsigned k = 0; k < 4; k++) {
            if (w->items[i].live)
                seg_world_drop(w, i, false);
            (void)seg_world_put(w, i, -1, 0, 30000);
        }
    assert_true(w->n_gone > 50);
    seg_world_settle(w);
    live = seg_world_live(w);
    seg_world_stop(w, false);
    w->options.bytes += 512 << 10; /* so that the start evicts nothing */
    assert_int_equal(seg_world_start(w), 0);
    assert_int_equal(seg_world_read_all(w), w->n_found);
    assert_true(w->n_found >= live && live > 20);
    seg_world_free(w);
}

/* Destroyed records of a segment without an index: all others are found behind the kill. */
static void test_a_scan_goes_on_behind_what_was_destroyed(void **state) {
    static const uint64_t sizes[] = { 700, 6000 }; /* one chunk, and several */

    for (unsigned s = 0; s < 2 * CST_COUNT(sizes); s++) {
        struct seg_world *w = seg_world_new(3, s < 2 ? CST_SEG_CRYPT_OFF : CST_SEG_CRYPT_AES);
        struct cst_seg_stats stats;

        seg_world_key(w);
        assert_int_equal(seg_world_start(w), 0);
        for (uint32_t i = 0; i < 20; i++)
            assert_int_equal(seg_world_put(w, i, -1, 0, sizes[s % 2]), 0);
        for (uint32_t i = 0; i < 20; i += 4)
            seg_world_drop(w, i, true);
        seg_world_settle(w);
        for (unsigned again = 0; again < 2; again++) { /* the second time by another run */
            seg_world_stop(w, false);
            assert_int_equal(seg_world_start(w), 0);
            assert_int_equal(w->n_found, 15 - again);
            assert_int_equal(seg_world_read_all(w), 15 - again);
            cst_seg_stats(w->seg, &stats);
            assert_int_equal(stats.corrupt, 0);
            if (!again)
                seg_world_drop(w, 1, true);
            seg_world_settle(w);
        }
        seg_world_free(w);
    }
}

static uint64_t writes_of_a_tick(struct seg_world *w) {
    uint64_t before = cst_sim_disk_writes(w->disk);

    w->clock.ns += CST_NS_PER_S;
    (void)cst_seg_tick(w->seg);
    return cst_sim_disk_writes(w->disk) - before;
}

/* What was destroyed is said within a second, and when that fails, with the second after it. */
static void test_a_checkpoint_that_failed_is_made_again(void **state) {
    static const enum cst_aio_fault faults[] = { CST_AIO_FAULT_EIO, CST_AIO_FAULT_FULL };

    for (unsigned i = 0; i < CST_COUNT(faults); i++) {
        struct seg_world *w = seg_world_new(4, CST_SEG_CRYPT_OFF);
        struct cst_seg_stats stats;

        w->with_faults = true;
        assert_int_equal(seg_world_start(w), 0);
        assert_int_equal(seg_world_put(w, 0, -1, 0, 3000), 0);
        seg_world_drop(w, 0, true);
        seg_world_settle(w);
        for (uint64_t at = 1; at <= 4; at++) { /* create, resize, write, rename */
            cst_aio_fault_arm(w->aio, faults[i], at, 1);
            (void)writes_of_a_tick(w);
            assert_true(cst_aio_fault_seen(w->aio) >= at);
        }
        cst_aio_fault_arm(w->aio, CST_AIO_FAULT_EIO, 0, 0);
        assert_true(writes_of_a_tick(w) > 0);
        assert_int_equal(writes_of_a_tick(w), 0);
        cst_seg_stats(w->seg, &stats);
        assert_int_equal(stats.errors, faults[i] == CST_AIO_FAULT_FULL ? 0 : 4);
        assert_int_equal(strstr(w->notes, "file system is full") != NULL,
                         faults[i] == CST_AIO_FAULT_FULL);
        seg_world_free(w);
    }
}

/* Wherever memory fails in it: no error of the device, and the checkpoint is made a second later.
 */
static void test_a_checkpoint_without_memory_is_made_again(void **state) {
    uint64_t failed = 0;

    (void)state;
    cst_fault_join();
    for (uint64_t at = 1; failed == at - 1; at++) {
        struct seg_world *w = seg_world_new(4, CST_SEG_CRYPT_OFF);
        struct cst_seg_stats stats;

        assert_int_equal(seg_world_start(w), 0);
        assert_int_equal(seg_world_put(w, 0, -1, 0, 3000), 0);
        seg_world_drop(w, 0, true);
        seg_world_settle(w);
        cst_fault_arm(CST_FAULT_ALLOC, at, 1);
        (void)writes_of_a_tick(w);
        failed += cst_fault_seen(CST_FAULT_ALLOC) >= at;
        cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
        assert_true(failed < at || writes_of_a_tick(w) > 0);
        assert_int_equal(writes_of_a_tick(w), 0);
        cst_seg_stats(w->seg, &stats);
        assert_int_equal(stats.errors, 0);
        seg_world_free(w);
    }
    cst_fault_leave();
    assert_true(failed > 1);
}

/* A start says that the last stop isn't a clean one any more, and leaves the marks alone. */
static void test_a_start_writes_no_marks(void **state) {
    struct seg_world *w = filled(6, CST_SEG_CRYPT_OFF, 700);
    struct cst_seg_stats stats;

    for (uint32_t i = 9; i < N; i += 20) /* ends of chains */
        seg_world_drop(w, i, false);
    for (unsigned run = 0; run < 3; run++) { /* the first one has had a clean stop */
        uint64_t before;

        seg_world_stop(w, !run);
        before = cst_sim_disk_writes(w->disk);
        assert_int_equal(seg_world_start(w), 0);
        assert_int_equal(cst_sim_disk_writes(w->disk) - before, run ? 0 : 1);
        cst_seg_stats(w->seg, &stats);
        assert_int_equal(stats.recovered_clean, !run);
        assert_int_equal(w->n_found, N - N / 20);
        for (uint32_t i = 0; i < N; i++)
            if (w->items[i].live)
                assert_int_equal(w->items[i].pinned_until, i % 3 ? 0 : 2000000000 + i);
    }
    seg_world_free(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_checkpoints_are_made_in_slices),
        cmocka_unit_test(test_a_checkpoint_of_what_changes_lies_about_nothing),
        cmocka_unit_test(test_a_scan_goes_on_behind_what_was_destroyed),
        cmocka_unit_test(test_a_checkpoint_that_failed_is_made_again),
        cmocka_unit_test(test_a_checkpoint_without_memory_is_made_again),
        cmocka_unit_test(test_a_start_writes_no_marks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
