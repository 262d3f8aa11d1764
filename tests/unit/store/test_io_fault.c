/* SPDX-License-Identifier: Apache-2.0 */
/* The wrapper that fails on request: every fault of every kind of operation does what io.h says. */
#include "tests/lib/check.h"

#include "store/io.h"

#include <string.h>

enum { PAGE = CST_AIO_ALIGN, ALL = 8 * PAGE, LEN = 4 * PAGE };

static _Alignas(CST_AIO_ALIGN) uint8_t data[ALL], back[ALL];

enum outcome { WELL, FAILS, FULL };

struct row {
    const char *name;
    enum cst_aio_fault fault;
    enum cst_aio_code code;
    enum outcome outcome;
    int changed; /* bits of the transferred bytes that differ from what was asked; -1: many */
};

static const struct row rows[] = {
    { "write EIO", CST_AIO_FAULT_EIO, CST_AIO_WRITE, FAILS, -1 },
    { "write late EIO", CST_AIO_FAULT_LATE_EIO, CST_AIO_WRITE, FAILS, 0 },
    { "write full", CST_AIO_FAULT_FULL, CST_AIO_WRITE, FULL, -1 },
    { "write short", CST_AIO_FAULT_SHORT, CST_AIO_WRITE, FULL, -1 },
    { "write short once", CST_AIO_FAULT_SHORT_ONCE, CST_AIO_WRITE, WELL, 0 },
    { "write EAGAIN", CST_AIO_FAULT_EAGAIN, CST_AIO_WRITE, WELL, 0 },
    { "write cancelled", CST_AIO_FAULT_CANCEL, CST_AIO_WRITE, FAILS, -1 },
    { "write corrupt", CST_AIO_FAULT_CORRUPT, CST_AIO_WRITE, WELL, 1 },
    { "write lost", CST_AIO_FAULT_LOSE, CST_AIO_WRITE, WELL, -1 },
    { "write misplaced", CST_AIO_FAULT_MISPLACE, CST_AIO_WRITE, WELL, -1 },
    { "write delayed", CST_AIO_FAULT_DELAY, CST_AIO_WRITE, WELL, 0 },
    { "read EIO", CST_AIO_FAULT_EIO, CST_AIO_READ, FAILS, -1 },
    { "read late EIO", CST_AIO_FAULT_LATE_EIO, CST_AIO_READ, FAILS, 0 },
    { "read full", CST_AIO_FAULT_FULL, CST_AIO_READ, FAILS, -1 },
    { "read short", CST_AIO_FAULT_SHORT, CST_AIO_READ, FAILS, -1 },
    { "read short once", CST_AIO_FAULT_SHORT_ONCE, CST_AIO_READ, WELL, 0 },
    { "read EAGAIN", CST_AIO_FAULT_EAGAIN, CST_AIO_READ, WELL, 0 },
    { "read corrupt", CST_AIO_FAULT_CORRUPT, CST_AIO_READ, WELL, 1 },
    { "read lost", CST_AIO_FAULT_LOSE, CST_AIO_READ, WELL, -1 },
    { "read misplaced", CST_AIO_FAULT_MISPLACE, CST_AIO_READ, WELL, -1 },
    { "read delayed", CST_AIO_FAULT_DELAY, CST_AIO_READ, WELL, 0 },
    { "read reordered", CST_AIO_FAULT_REORDER, CST_AIO_READ, WELL, 0 },
};

struct bench {
    struct cst_sim_disk *disk;
    struct cst_aio *aio;
    struct cst_aio_file *file;
};

static void bench_open(struct bench *b) {
    struct cst_aio *inner;

    assert_int_equal(cst_sim_disk_new(&b->disk, 1 << 20, 1), 0);
    assert_int_equal(cst_aio_new_sim(&inner, b->disk), 0);
    assert_int_equal(cst_aio_new_fault(&b->aio, inner, 3), 0);
    assert_int_equal(cst_aio_open(b->aio, "f", CST_AIO_CREATE, &b->file), 0);
    for (size_t i = 0; i < ALL; i++)
        data[i] = (uint8_t)(i / 64 * 7 + i);
    assert_int_equal(cst_aio_now(b->file, CST_AIO_WRITE, data, 0, ALL), 0);
}

static void bench_close(struct bench *b) {
    (void)cst_aio_close(b->file);
    (void)cst_aio_free(b->aio);
    (void)cst_sim_disk_free(b->disk);
}

static int differences(const uint8_t *a, const uint8_t *b, size_t n) {
    int bits = 0;

    for (size_t i = 0; i < n; i++)
        bits += __builtin_popcount(a[i] ^ b[i]);
    return bits;
}

static void check_row(void **state) {
    const struct row *row = *state;
    struct cst_aio_stats s;
    struct bench b;
    int r, bits;

    bench_open(&b);
    memset(back, 0xa5, sizeof(back));
    if (row->code == CST_AIO_WRITE)
        for (size_t i = 0; i < LEN; i++)
            data[i] = (uint8_t)~data[i];
    cst_aio_fault_arm(b.aio, row->fault, 1, 1);
    r = cst_aio_now(b.file, row->code, row->code == CST_AIO_WRITE ? data : back, 0, LEN);
    assert_int_equal(r == 0 ? WELL : r == CST_AIO_E_FULL ? FULL : FAILS, row->outcome);
    assert_int_equal(cst_aio_fault_seen(b.aio), 1);
    cst_aio_fault_arm(b.aio, CST_AIO_FAULT_NONE, 0, 0);
    if (row->code == CST_AIO_WRITE)
        assert_int_equal(cst_aio_now(b.file, CST_AIO_READ, back, 0, LEN), 0);
    bits = differences(data, back, LEN);
    if (row->changed >= 0)
        assert_int_equal(bits, row->changed);
    else
        assert_true(bits > 100);
    cst_aio_stats(b.aio, &s);
    assert_int_equal(s.errors, row->outcome != WELL);
    bench_close(&b);
}

/* ---- order ---- */

static char order[16];

struct lettered {
    struct cst_aio_op op;
    char letter;
};

static void lettered_done(struct cst_aio_op *op, int res) {
    assert_int_equal(res, 0);
    order[strlen(order)] = cst_container_of(op, struct lettered, op)->letter;
}

static void run_four(struct bench *b, enum cst_aio_fault fault) {
    struct lettered ops[4];

    memset(order, 0, sizeof(order));
    cst_aio_fault_arm(b->aio, fault, 1, 1);
    for (unsigned i = 0; i < 4; i++) {
        ops[i] = (struct lettered){ .letter = (char)('a' + i) };
        ops[i].op = (struct cst_aio_op){ .done = lettered_done,
                                         .file = b->file,
                                         .code = CST_AIO_READ,
                                         .data = back + i * PAGE,
                                         .length = PAGE };
        cst_aio_submit(b->aio, &ops[i].op);
    }
    cst_aio_drain(b->aio);
}

static void orders(void **state) {
    struct bench b;

    bench_open(&b);
    run_four(&b, CST_AIO_FAULT_NONE);
    assert_string_equal(order, "abcd");
    run_four(&b, CST_AIO_FAULT_REORDER);
    assert_string_equal(order, "bacd");
    run_four(&b, CST_AIO_FAULT_DELAY);
    assert_string_equal(order, "bcda");
    bench_close(&b);
}

static void calls(void **state) {
    struct cst_aio_file *file;
    struct bench b;
    uint64_t size;

    bench_open(&b);
    cst_aio_fault_arm(b.aio, CST_AIO_FAULT_EIO, 2, 1);
    assert_int_equal(cst_aio_size(b.file, &size), 0);
    assert_true(cst_aio_open(b.aio, "g", CST_AIO_CREATE, &file) < 0);
    assert_int_equal(cst_aio_open(b.aio, "g", 0, &file), CST_AIO_E_ABSENT);
    cst_aio_fault_arm(b.aio, CST_AIO_FAULT_FULL, 1, 2);
    assert_int_equal(cst_aio_open(b.aio, "g", CST_AIO_CREATE, &file), CST_AIO_E_FULL);
    assert_int_equal(cst_aio_rename(b.aio, "f", "g"), CST_AIO_E_FULL);
    assert_int_equal(cst_aio_rename(b.aio, "f", "g"), 0);
    bench_close(&b);
}

int main(void) {
    static const struct CMUnitTest tests[] = { cmocka_unit_test(orders), cmocka_unit_test(calls) };

    return cst_run_rows(rows, check_row) + cmocka_run_group_tests(tests, NULL, NULL);
}
