/* SPDX-License-Identifier: Apache-2.0 */
/* The time of reads, against what a pencil says. */
#include "store/disk_rate.h"

#include "tests/lib/check.h"

#define MIB (UINT64_C(1) << 20)
#define MS UINT64_C(1000000)

static void a_guess_comes_first(void **state) {
    struct cst_disk_rate m = { 0 };

    assert_int_equal(cst_disk_rate_cost(&m, 0), 0);
    assert_int_equal(cst_disk_rate_cost(&m, 1500000), 1500000);
}

static void one_at_a_time_costs_its_latency(void **state) {
    struct cst_disk_rate m = { 0 };
    uint64_t now = 77;

    for (unsigned i = 0; i < 10; i++) {
        cst_disk_rate_begin(&m, now += 500 * MS); /* idle time counts for nothing */
        cst_disk_rate_end(&m, now += 2 * MS, MIB);
    }
    assert_int_equal(cst_disk_rate_cost(&m, 3 * MIB), 6 * MS);
}

static void a_batch_counts_once(void **state) {
    struct cst_disk_rate m = { 0 };

    for (unsigned i = 0; i < 8; i++)
        cst_disk_rate_begin(&m, 1000 * MS);
    for (unsigned i = 0; i < 8; i++) /* arriving at once, or bit by bit */
        cst_disk_rate_end(&m, 1000 * MS + (i < 4 ? 6 : 10) * MS, MIB);
    assert_int_equal(cst_disk_rate_cost(&m, 8 * MIB), 10 * MS);
}

static void a_failure_takes_its_time(void **state) {
    struct cst_disk_rate m = { 0 };

    cst_disk_rate_begin(&m, 0);
    cst_disk_rate_begin(&m, 0);
    cst_disk_rate_end(&m, 3 * MS, 0);
    cst_disk_rate_end(&m, 4 * MS, MIB);
    assert_int_equal(cst_disk_rate_cost(&m, MIB), 4 * MS);
}

/* A disk that becomes ten times as slow: after w windows more, at least 1 - 2^-w of the way. */
static void the_past_fades(void **state) {
    struct cst_disk_rate m = { 0 };
    uint64_t now = 0, window = CST_DISK_RATE_WINDOW / MIB;

    for (unsigned i = 0; i < 1000; i++) {
        cst_disk_rate_begin(&m, now);
        cst_disk_rate_end(&m, now += MS, MIB);
    }
    for (unsigned w = 1; w <= 6; w++) {
        for (unsigned i = 0; i < 2 * window; i++) {
            cst_disk_rate_begin(&m, now);
            cst_disk_rate_end(&m, now += 10 * MS, MIB);
        }
        assert_true(cst_disk_rate_cost(&m, MIB) >= 10 * MS - (9 * MS >> w));
        assert_true(cst_disk_rate_cost(&m, MIB) <= 10 * MS);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_guess_comes_first), cmocka_unit_test(one_at_a_time_costs_its_latency),
        cmocka_unit_test(a_batch_counts_once), cmocka_unit_test(a_failure_takes_its_time),
        cmocka_unit_test(the_past_fades),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
