/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Power is lost at write n, for every n of a workload; every I/O fails in every way once. After
 * each: what is found has the right bytes or is a miss, and a store that failed is never seen.
 * CST_LONG=n runs n times the release numbers, else a tenth of them.
 */
#include "tests/unit/store/seg_world.h"

#include "tests/lib/check.h"

#include <string.h>

static struct seg_world *world(uint64_t seed) {
    struct seg_world *w = seg_world_new(seed, seed & 1 ? CST_SEG_CRYPT_AES : CST_SEG_CRYPT_OFF);

    seg_world_key(w);
    for (uint32_t i = 0; i < SEG_ITEMS; i++)
        w->items[i].value = (float)(i % 7);
    return w;
}

/* Chains of 5 of many sizes in two spaces, some dropped; more than the tier holds. */
static void work(struct seg_world *w, uint32_t from, uint32_t to) {
    static const uint64_t sizes[] = { 500, 3000, 9000, 20000, 60000 };

    for (uint32_t i = from; i < to; i++) {
        int parent = i % 5 && w->items[i - 1].begun ? (int)i - 1 : -1;
        int r = seg_world_store(w, i, parent, i / 5 % 2, sizes[i * 7 % 5]);

        if (r == CST_SEG_E_BUSY || i % 4 == 0)
            seg_world_settle(w);
        if (i % 11 == 10 && w->items[i - 4].live)
            seg_world_drop(w, i - 4, i & 1);
        if (i % 9 == 8 && w->items[i - 6].live)
            (void)seg_world_read(w, i - 6);
    }
    seg_world_settle(w);
}

/* As much as there is of: start, work, clean stop, start, work. True: all of it. */
static bool run(struct seg_world *w, bool clean) {
    if (seg_world_start(w)) {
        seg_world_stop(w, false);
        return false;
    }
    seg_world_settle(w);
    work(w, 0, 70);
    if (clean) {
        seg_world_settle(w);
        (void)cst_seg_close(w->seg);
    }
    seg_world_stop(w, false);
    if (cst_sim_disk_is_off(w->disk) || seg_world_start(w))
        return false;
    work(w, 70, 100);
    (void)seg_world_read_all(w);
    seg_world_stop(w, false);
    return true;
}

static void check(struct seg_world *w) {
    size_t n;

    assert_int_equal(seg_world_start(w), 0);
    n = seg_world_live(w);
    assert_true(seg_world_read_all(w) <= n); /* each has the right bytes: seg_world_read() */
    seg_world_stop(w, false);
}

static void test_power(void **state) {
    unsigned cuts = cst_rounds(200);
    uint64_t writes;
    struct seg_world *w = world(0);

    (void)state;
    assert_true(run(w, true));
    writes = cst_sim_disk_writes(w->disk);
    seg_world_free(w);
    for (unsigned i = 0; i < cuts; i++) {
        uint64_t n = 1 + (uint64_t)i * 7919 % writes; /* all of them, in time */
        size_t n_live;
        enum cst_sim_loss loss = (enum cst_sim_loss)(i % 3);

        w = world(i);
        cst_sim_disk_power_off_at(w->disk, n, loss);
        (void)run(w, i % 2);
        seg_world_stop(w, false);
        cst_sim_disk_power_on(w->disk);
        check(w);
        /* and it goes on from there */
        assert_int_equal(seg_world_start(w), 0);
        work(w, 100, 120);
        (void)seg_world_read_all(w); /* what was torn is gone now */
        n_live = seg_world_live(w);
        assert_int_equal(seg_world_read_all(w), n_live);
        seg_world_free(w);
    }
}

/* A failed store must not be seen, in this run or the next one. */
static void check_failed(struct seg_world *w, const bool *failed) {
    for (uint32_t i = 0; i < SEG_ITEMS; i++)
        if (failed[i] && w->items[i].live && !w->items[i].acked)
            fail_msg("item %u, whose store failed, was found", i);
}

static void test_faults(void **state) {
    unsigned n_faults = cst_rounds(2000);
    struct seg_world *w = world(0);
    uint64_t n_calls;
    size_t n_failed = 0;

    (void)state;
    w->with_faults = true;
    assert_int_equal(seg_world_start(w), 0);
    cst_aio_fault_arm(w->aio, CST_AIO_FAULT_NONE, 0, 0);
    work(w, 0, 70);
    n_calls = cst_aio_fault_seen(w->aio) + 60;
    seg_world_free(w);
    for (unsigned i = 0; i < n_faults; i++) {
        enum cst_aio_fault fault = (enum cst_aio_fault)(1 + i % (CST_AIO_FAULTS - 1));
        uint64_t nth = 1 + (uint64_t)i * 7919 % n_calls;
        bool failed[SEG_ITEMS];

        w = world(i);
        w->with_faults = true;
        assert_int_equal(cst_aio_new_sim(&w->aio, w->disk), 0);
        assert_int_equal(cst_aio_new_fault(&w->aio, w->aio, i), 0);
        cst_aio_fault_arm(w->aio, fault, nth, 1 + i % 3);
        if (!seg_world_start(w)) {
            seg_world_settle(w);
            work(w, 0, 70);
            (void)seg_world_read_all(w);
            if (i % 2)
                (void)cst_seg_close(w->seg);
        }
        for (uint32_t k = 0; k < SEG_ITEMS; k++)
            failed[k] = w->items[k].failed && w->items[k].status != CST_SEG_E_PARENT;
        for (uint32_t k = 0; k < SEG_ITEMS; k++)
            n_failed += failed[k];
        seg_world_stop(w, false);
        w->with_faults = false;
        if (seg_world_start(w)) {
            /* a lie about the superblock or the keys: that is for the operator to see */
            assert_true(fault >= CST_AIO_FAULT_CORRUPT && strlen(w->message) > 20);
            seg_world_free(w);
            continue;
        }
        (void)seg_world_read_all(w);
        check_failed(w, failed);
        seg_world_free(w);
    }
    assert_true(n_failed > n_faults / 10);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_power),
        cmocka_unit_test(test_faults),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
