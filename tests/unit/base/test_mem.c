/* SPDX-License-Identifier: Apache-2.0 */
/* Pages of cst_map(): where they lie, what is in them, that all of them are given back. */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "base/mem.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

static const size_t HUGE = 2 << 20;

static void has_zeroed_pages(void **state) {
    const size_t sizes[] = { 1, 4096, 5000, HUGE - 4096, HUGE, HUGE + 1, 3 * HUGE + 12288 };

    for (size_t i = 0; i < CST_COUNT(sizes); i++) {
        size_t pages = (sizes[i] + 4095) / 4096;
        unsigned char resident[4 * 512];
        uint8_t *p = cst_map(sizes[i]);

        assert_non_null(p);
        assert_int_equal((uintptr_t)p % (sizes[i] >= HUGE ? HUGE : 4096), 0);
        for (size_t at = 0; at < sizes[i]; at++)
            assert_int_equal(p[at], 0);
        memset(p, 0xa5, sizes[i]);
        assert_int_equal(mincore(p, pages * 4096, resident), 0);
        assert_null(cst_unmap(p, sizes[i]));
        for (size_t at = 0; at < pages; at++)
            assert_true(mincore(p + at * 4096, 4096, resident) && errno == ENOMEM);
    }
    assert_null(cst_unmap(NULL, 4096));
}

static void fails_where_it_is_told_to(void **state) {
    cst_fault_join();
    cst_fault_arm(CST_FAULT_ALLOC, 1, 1);
    assert_null(cst_map(4096));
    cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
    cst_fault_leave();
}

static void an_array_grows_by_doubling(void **state) {
    uint32_t *x = NULL;
    size_t cap = 0, last;

    for (uint32_t n = 0; n < 5000; n++) {
        last = cap;
        assert_int_equal(cst_grow(&x, &cap, n + 1, sizeof(*x)), 0);
        assert_true(cap > n && (cap == last || cap >= 2 * last));
        x[n] = n;
    }
    for (uint32_t n = 0; n < 5000; n++)
        assert_int_equal(x[n], n);
    last = cap;
    assert_int_equal(cst_grow(&x, &cap, 100000, sizeof(*x)), 0);
    assert_int_equal(cap, 100000);
    assert_int_equal(cst_grow(&x, &cap, SIZE_MAX / 2, sizeof(*x)), -ENOMEM);
    cst_fault_join();
    cst_fault_arm(CST_FAULT_ALLOC, 1, 1);
    assert_int_equal(cst_grow(&x, &cap, 100001, sizeof(*x)), -ENOMEM);
    cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
    cst_fault_leave();
    assert_int_equal(cap, 100000);
    assert_int_equal(x[4999], 4999);
    cst_free(x);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_array_grows_by_doubling),
        cmocka_unit_test(has_zeroed_pages),
        cmocka_unit_test(fails_where_it_is_told_to),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
