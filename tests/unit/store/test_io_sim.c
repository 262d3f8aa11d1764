/* SPDX-License-Identifier: Apache-2.0 */
/* Files in memory: what survives a power loss, by kind of loss, and a disk that is full. */
#include "tests/lib/check.h"

#include "base/mem.h"
#include "store/io.h"

#include <string.h>

enum { PAGE = CST_AIO_ALIGN, SECTORS = PAGE / 512 };

static _Alignas(CST_AIO_ALIGN) uint8_t page[4 * PAGE];

struct bench {
    struct cst_sim_disk *disk;
    struct cst_aio *aio;
    struct cst_aio_file *file;
};

static void bench_open(struct bench *b, uint64_t seed) {
    *b = (struct bench){ NULL, NULL, NULL };
    assert_int_equal(cst_sim_disk_new(&b->disk, 1 << 20, seed), 0);
    assert_int_equal(cst_aio_new_sim(&b->aio, b->disk), 0);
    assert_int_equal(cst_aio_open(b->aio, "f", CST_AIO_CREATE, &b->file), 0);
    assert_int_equal(cst_aio_sync_directory(b->aio), 0);
}

static void bench_close(struct bench *b) {
    (void)cst_aio_close(b->file);
    (void)cst_aio_free(b->aio);
    (void)cst_sim_disk_free(b->disk);
}

static int put(struct bench *b, int value, uint64_t at) {
    memset(page, value, PAGE);
    return cst_aio_now(b->file, CST_AIO_WRITE, page, at * PAGE, PAGE);
}

static void power_cycle(struct bench *b) {
    assert_true(cst_sim_disk_is_off(b->disk));
    assert_true(cst_aio_now(b->file, CST_AIO_READ, page, 0, PAGE) < 0);
    cst_sim_disk_power_on(b->disk);
}

/* Page 0 is synced as 1, then written as 2; page 1 is written as 3 while the power goes. */
static void lose(struct bench *b, enum cst_sim_loss loss, uint64_t seed) {
    bench_open(b, seed);
    assert_int_equal(put(b, 1, 0), 0);
    assert_int_equal(put(b, 1, 1), 0);
    assert_int_equal(cst_aio_now(b->file, CST_AIO_SYNC, NULL, 0, 0), 0);
    cst_sim_disk_power_off_at(b->disk, 2, loss);
    assert_int_equal(put(b, 2, 0), 0);
    assert_true(put(b, 3, 1) < 0);
    assert_true(put(b, 4, 0) < 0);
    power_cycle(b);
    assert_int_equal(cst_aio_now(b->file, CST_AIO_READ, page, 0, 2 * PAGE), 0);
}

static void keep(void **state) {
    struct bench b;

    lose(&b, CST_SIM_KEEP, 1);
    for (size_t i = 0; i < PAGE; i++)
        assert_true(page[i] == 2 && page[PAGE + i] == 1);
    bench_close(&b);
}

static void drop(void **state) {
    struct bench b;

    lose(&b, CST_SIM_DROP, 1);
    for (size_t i = 0; i < (size_t)2 * PAGE; i++)
        assert_int_equal(page[i], 1);
    bench_close(&b);
}

/* Every sector is old or new, both occur, and other seeds tear elsewhere. */
static void tear(void **state) {
    unsigned fresh = 0, total = 0, different = 0;
    uint8_t first[2 * PAGE];

    for (uint64_t seed = 1; seed <= 32; seed++) {
        struct bench b;

        lose(&b, CST_SIM_TEAR, seed);
        for (size_t s = 0; s < (size_t)2 * SECTORS; s++) {
            uint8_t after = s < SECTORS ? 2 : 3, v = page[s * 512];

            for (size_t i = 1; i < 512; i++)
                assert_int_equal(page[s * 512 + i], v);
            assert_true(v == 1 || v == after);
            fresh += v == after;
            total++;
        }
        if (seed == 1)
            memcpy(first, page, sizeof(first));
        different += memcmp(first, page, sizeof(first)) != 0;
        bench_close(&b);
    }
    assert_true(fresh > total / 3 && fresh < total / 3 * 2);
    assert_true(different > 16);
}

static void names(void **state) {
    struct bench b;
    struct cst_aio_file *g;

    bench_open(&b, 1);
    assert_int_equal(cst_aio_rename(b.aio, "f", "g"), 0);
    cst_sim_disk_power_off_at(b.disk, 1, CST_SIM_DROP);
    assert_true(put(&b, 1, 0) < 0);
    cst_sim_disk_power_on(b.disk);
    assert_int_equal(cst_aio_open(b.aio, "g", 0, &g), CST_AIO_E_ABSENT);
    assert_int_equal(cst_aio_rename(b.aio, "f", "g"), 0);
    assert_int_equal(cst_aio_sync_directory(b.aio), 0);
    cst_sim_disk_power_off_at(b.disk, 1, CST_SIM_DROP);
    assert_true(cst_aio_unlink(b.aio, "g") < 0);
    cst_sim_disk_power_on(b.disk);
    assert_int_equal(cst_aio_open(b.aio, "g", 0, &g), 0);
    assert_int_equal(cst_aio_open(b.aio, "f", 0, &g), CST_AIO_E_ABSENT);
    (void)cst_aio_close(g);
    bench_close(&b);
}

/* The n-th change for every n of a fixed piece of work: after each loss what was synced is there.
 */
static void sweep(void **state) {
    for (unsigned n = 1, done = 0; !done; n++) {
        struct bench b;
        unsigned synced = 0, r = 0;

        bench_open(&b, n);
        cst_sim_disk_power_off_at(b.disk, n, CST_SIM_TEAR);
        for (unsigned i = 1; i <= 5 && !r; i++) {
            r = put(&b, (int)i, i) || put(&b, (int)i, 0) ||
                cst_aio_now(b.file, CST_AIO_SYNC, NULL, 0, 0);
            synced = r ? synced : i;
        }
        done = !r;
        if (r)
            power_cycle(&b);
        for (unsigned i = 1; i <= synced; i++) {
            assert_int_equal(cst_aio_now(b.file, CST_AIO_READ, page, (uint64_t)i * PAGE, PAGE), 0);
            assert_int_equal(page[0], i);
            assert_int_equal(page[PAGE - 1], i);
        }
        assert_true(n < 20);
        assert_int_equal(done ? 16 : n, n); /* 15 changes */
        bench_close(&b);
    }
}

static void full(void **state) {
    struct bench b;
    uint64_t space;

    bench_open(&b, 1);
    assert_int_equal(cst_aio_now(b.file, CST_AIO_ALLOCATE, NULL, 0, (1 << 20) - PAGE), 0);
    assert_int_equal(cst_aio_space(b.aio, &space), 0);
    assert_int_equal(space, PAGE);
    assert_int_equal(put(&b, 1, 3), 0);
    assert_int_equal(put(&b, 1, 256), CST_AIO_E_FULL);
    assert_int_equal(cst_aio_now(b.file, CST_AIO_ALLOCATE, NULL, 0, (1 << 20) + PAGE),
                     CST_AIO_E_FULL);
    assert_int_equal(cst_aio_resize(b.file, 0), 0);
    assert_int_equal(put(&b, 1, 255), 0);
    bench_close(&b);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(keep),  cmocka_unit_test(drop),  cmocka_unit_test(tear),
        cmocka_unit_test(names), cmocka_unit_test(sweep), cmocka_unit_test(full),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
