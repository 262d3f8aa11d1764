/* SPDX-License-Identifier: Apache-2.0 */
/* The clock seam: the manual clock says what it was told, the system's never goes back. */
#include "tests/lib/check.h"

#include "base/clock.h"

#include <time.h>

static void manual_says_what_it_was_told(void **state) {
    struct cst_manual_clock m;

    cst_manual_clock_init(&m, 5);
    assert_int_equal(cst_now_ns(&m.clock), 5);
    m.ns += 3 * CST_NS_PER_S;
    assert_int_equal(cst_now_ns(&m.clock), UINT64_C(3000000005));
}

static void monotonic_is_the_kernels(void **state) {
    struct timespec before, after;
    uint64_t now;

    (void)clock_gettime(CLOCK_MONOTONIC, &before);
    now = cst_now_ns(&cst_clock_monotonic);
    (void)clock_gettime(CLOCK_MONOTONIC, &after);
    assert_true(now >= (uint64_t)before.tv_sec * 1000000000 + (uint64_t)before.tv_nsec);
    assert_true(now <= (uint64_t)after.tv_sec * 1000000000 + (uint64_t)after.tv_nsec);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(manual_says_what_it_was_told),
        cmocka_unit_test(monotonic_is_the_kernels),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
