/* SPDX-License-Identifier: Apache-2.0 */
/* The capped buffer: content equals what was appended, the cap holds, a refusal changes nothing. */
#include "tests/lib/check.h"

#include "base/buf.h"
#include "base/fault.h"

#include <errno.h>
#include <string.h>

static void appends_in_order(void **state) {
    struct cst_buf b = CST_BUF_NULL(1000);
    uint8_t expected[1000];

    for (unsigned i = 0; i < sizeof(expected); i++) {
        expected[i] = (uint8_t)(i * 7);
        assert_int_equal(cst_buf_append(&b, &expected[i], 1), 0);
    }
    assert_int_equal(b.len, sizeof(expected));
    assert_memory_equal(b.data, expected, sizeof(expected));
    cst_buf_deinit(&b);
    assert_null(b.data);
    cst_buf_deinit(&b);
}

static void refuses_past_the_cap(void **state) {
    struct cst_buf b = CST_BUF_NULL(100);
    uint8_t bytes[64] = { 1, 2, 3 };

    assert_int_equal(cst_buf_append(&b, bytes, 64), 0);
    assert_int_equal(cst_buf_append(&b, bytes, 37), CST_BUF_E_FULL);
    assert_int_equal(b.len, 64);
    assert_int_equal(cst_buf_append(&b, bytes, SIZE_MAX), CST_BUF_E_FULL);
    assert_int_equal(cst_buf_append(&b, bytes, 36), 0);
    assert_int_equal(b.len, 100);
    assert_int_equal(b.cap, 100);
    assert_int_equal(cst_buf_append(&b, bytes, 1), CST_BUF_E_FULL);
    assert_int_equal(cst_buf_append(&b, bytes, 0), 0);
    assert_memory_equal(b.data, bytes, 64);
    cst_buf_deinit(&b);
}

static void survives_no_memory(void **state) {
    struct cst_buf b = CST_BUF_NULL(4096);
    uint8_t bytes[128] = { 9 };

    assert_int_equal(cst_buf_append(&b, bytes, 60), 0);
    cst_fault_join();
    cst_fault_arm(CST_FAULT_ALLOC, 1, 1);
    assert_int_equal(cst_buf_append(&b, bytes, 128), -ENOMEM);
    assert_int_equal(b.len, 60);
    assert_int_equal(cst_buf_append(&b, bytes, 128), 0);
    cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
    cst_fault_leave();
    assert_int_equal(b.len, 188);
    assert_memory_equal(b.data + 60, bytes, 128);
    cst_buf_deinit(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(appends_in_order),
        cmocka_unit_test(refuses_past_the_cap),
        cmocka_unit_test(survives_no_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
