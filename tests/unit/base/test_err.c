/* SPDX-License-Identifier: Apache-2.0 */
/* The error channels: what is traced, what passes untouched, what is folded. */
#include "tests/lib/check.h"

#include "base/err.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

static void only_negative_values_are_traced(void **state) {
    char trace[256];
    size_t n;

    assert_int_equal(cst_err(0), 0);
    assert_int_equal(cst_err(7), 7);
    assert_int_equal(cst_err_trace(trace, sizeof(trace)), 0);
    assert_string_equal(trace, "");
    assert_int_equal(cst_err(-ENOMEM), -ENOMEM);
    n = cst_err_trace(trace, sizeof(trace));
    assert_int_equal(n, strlen(trace));
    assert_non_null(strstr(trace, "test_err.c:"));
    assert_non_null(strstr(trace, "only_negative_values_are_traced: Cannot allocate memory"));
    assert_int_equal(cst_err_trace(trace, sizeof(trace)), 0);
}

static void conditions_fold_into_a_fatal_error(void **state) {
    char trace[256];

    assert_int_equal(cst_fold(0), 0);
    assert_int_equal(cst_fold(-EIO), -EIO);
    assert_int_equal(cst_err_trace(trace, sizeof(trace)), 0);
    assert_int_equal(cst_fold(1), -ENOTRECOVERABLE);
    assert_true(cst_err_trace(trace, sizeof(trace)) > 0);
}

static void keeps_the_newest_in_any_space(void **state) {
    char trace[1024];

    for (int i = 0; i < 100; i++)
        cst_err(i < 99 ? -EIO : -EPIPE);
    assert_true(cst_err_trace(trace, sizeof(trace)) > 0);
    assert_non_null(strstr(trace, "Broken pipe"));
    cst_err(-100000); /* no such errno */
    assert_true(cst_err_trace(trace, sizeof(trace)) > 0);
    for (size_t cap = 0; cap < 80; cap++) {
        memset(trace, 'x', sizeof(trace));
        cst_err(-EIO);
        cst_err(-EIO);
        size_t n = cst_err_trace(trace, cap);

        assert_true(cap ? n < cap && !trace[n] : !n);
        assert_int_equal(trace[cap], 'x');
    }
}

static void *raise_elsewhere(void *arg) {
    cst_err(-EIO);
    return NULL;
}

static void a_trace_belongs_to_its_thread(void **state) {
    pthread_t thread;
    char trace[64];

    assert_int_equal(pthread_create(&thread, NULL, raise_elsewhere, NULL), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(cst_err_trace(trace, sizeof(trace)), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_negative_values_are_traced),
        cmocka_unit_test(conditions_fold_into_a_fatal_error),
        cmocka_unit_test(keeps_the_newest_in_any_space),
        cmocka_unit_test(a_trace_belongs_to_its_thread),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
