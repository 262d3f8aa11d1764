/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What becomes of frames on disk whose side data can't be had in this run though nothing is
 * damaged: they are misses, and stay for the next start; and of frames whose version goes while
 * they are written.
 */
#include "tests/unit/store/side_lab.h"

static uint32_t n_parts(const struct lab *l) {
    uint32_t n = 0;

    for (const struct cst_list *it = l->space->sides.next; it != &l->space->sides; it = it->next)
        n += cst_side_parts(
            cst_container_of((struct cst_list *)(uintptr_t)it, struct cst_side_data, link)
                ->side.len);
    return n;
}

/* Starts that can't have side data, though the disk is fine: misses, and the next start has all. */
static void what_cannot_be_had_now_stays_on_disk(void **state) {
    static const struct {
        const char *name, *note;
        uint64_t memory, side_bytes, n_eio;
        uint32_t errors_max;
        unsigned found;
    } rows[] = {
        { "one read fails once", NULL, 0, 0, 1, 0, BLOCKS },
        { "one read fails", "couldn't be read", 0, 0, 2, 0, BLOCKS_OLD },
        { "all reads fail", "couldn't be read", 0, 0, 1000, 0, 0 },
        { "the tier goes off", "couldn't be read", 0, 0, 1000, 1, 0 },
        { "a small side_data", "raise side_data", 0, 64 << 10, 0, 0, 0 },
        { "little memory", "raise memory", 600 << 10, 0, 0, 0, 0 },
    };

    (void)state;
    for (size_t i = 0; i < CST_COUNT(rows); i++) {
        struct lab l = lab_new(16 << 20);
        uint64_t n;

        print_message("%s\n", rows[i].name);
        assert_int_equal(start(&l), 0);
        fill_lab(&l);
        l = restarted(&l);
        n = l.n_ops - n_parts(&l) + 1; /* the first part is read then */
        stop(&l, true);
        l.memory = rows[i].memory;
        l.side_bytes = rows[i].side_bytes;
        l.errors_max = rows[i].errors_max;
        l.eio_at = rows[i].n_eio ? n : 0;
        l.n_eio = rows[i].n_eio;
        l.n_notes = 0;
        assert_int_equal(start(&l), 0);
        assert_int_equal(l.n_notes, rows[i].errors_max ? 2 : rows[i].note != NULL);
        assert_true(!rows[i].note || strstr(l.note, rows[i].note));
        l.space = open_space(&l, "a", CST_CLASS_COLD);
        assert_int_equal(l.space->stats.corrupt_blocks, 0);
        assert_int_equal(l.space->stats.cold_blocks, rows[i].found);
        tick(&l, 1);
        l.memory = l.side_bytes = l.eio_at = l.n_eio = l.errors_max = 0;
        l = restarted(&l);
        assert_int_equal(l.space->stats.cold_blocks, BLOCKS);
        assert_int_equal(check_blocks(&l, 0, BLOCKS), BLOCKS);
        lab_end(&l);
    }
}

/* What is kept is moved, side data at least, and an erase ends it. */
static void what_is_kept_is_moved_and_erased(void **state) {
    (void)state;
    for (unsigned how = 0; how < 3; how++) {
        struct lab l = lab_new(16 << 20);
        struct cst_seg_stats stats;
        uint64_t n;
        enum cst_purge result;

        assert_int_equal(start(&l), 0);
        fill_lab(&l);
        stop(&l, true);
        l.side_bytes = 64 << 10;
        assert_int_equal(start(&l), 0);
        l.space = open_space(&l, "a", CST_CLASS_COLD);
        assert_true(l.store->cold->kept_bytes > 0);
        if (how == 0)
            empty_segment(&l, 0); /* its records are few enough to be moved, all of them */
        if (how == 1)
            assert_int_equal(cst_space_erase(l.space, keys, &n), CST_STORE_E_NOT_FOUND);
        if (how == 2)
            (void)cst_namespace_purge(cst_space_namespace(l.space), &result);
        settle(&l);
        assert_int_equal(l.store->cold->kept_bytes > 0, how == 0);
        assert_true(cst_store_disk_stats(l.store, &stats));
        assert_int_equal(stats.moved > 0, how == 0);
        l.side_bytes = 0;
        l = restarted(&l);
        n = check_blocks(&l, 0, BLOCKS);
        assert_int_equal(n, how ? 0 : BLOCKS);
        lab_end(&l);
    }
}

/* A version is given up while a frame that needs it is on its way: the frame goes, too. */
static void a_frame_on_its_way_goes_with_its_version(void **state) {
    struct lab l = lab_new(16 << 20);
    struct cst_block *b;

    (void)state;
    assert_int_equal(start(&l), 0);
    fill_lab(&l);
    b = block(&l, 0);
    for (unsigned i = 0; i < 20 && !b->spill; i++) {
        (void)cst_cold_spill(b);
        if (!b->spill)
            settle(&l);
    }
    assert_non_null(b->spill);
    assert_true(cst_side_disk_give_up(l.space));
    settle(&l);
    assert_false(cst_block_is_cold(b));
    (void)cst_cold_spill(b); /* and is written again, with it */
    for (unsigned i = 0; i < 20 && !cst_block_is_cold(b); i++) {
        settle(&l);
        (void)cst_cold_spill(b);
    }
    assert_true(cst_block_is_cold(b));
    assert_int_equal(b->cold_side->disk->n_stored, b->cold_side->disk->n_parts);
    lab_end(&l);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_cannot_be_had_now_stays_on_disk),
        cmocka_unit_test(what_is_kept_is_moved_and_erased),
        cmocka_unit_test(a_frame_on_its_way_goes_with_its_version),
    };

    reference();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
