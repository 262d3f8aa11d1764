/* SPDX-License-Identifier: Apache-2.0 */
/* Helpers of every test. Owns nothing, one thread: a test program's main thread. */
#include "tests/lib/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cst_skip(const char *missing, ...) {
    va_list ap;

    va_start(ap, missing);
    (void)fputs("skipped: ", stdout);
    (void)vprintf(missing, ap);
    (void)fputs("\n", stdout);
    va_end(ap);
    return CST_EXIT_SKIP;
}

int cst_check_rows(const char *group, const void *rows, size_t size, size_t n,
                   CMUnitTestFunction fn) {
    struct CMUnitTest *tests = calloc(n, sizeof(*tests));
    int failed;

    if (!tests)
        return 1;
    for (size_t i = 0; i < n; i++) {
        const char *row = (const char *)rows + i * size;

        memcpy(&tests[i].name, row, sizeof(tests[i].name));
        tests[i].test_func = fn;
        tests[i].initial_state = (void *)(uintptr_t)row;
    }
    failed = _cmocka_run_group_tests(group, tests, n, NULL, NULL);
    free(tests);
    return failed;
}

unsigned cst_long(void) {
    const char *times = getenv("CST_LONG");

    return times ? (unsigned)strtoul(times, NULL, 10) : 0;
}

unsigned cst_rounds(unsigned release) {
    return cst_long() ? cst_long() * release : release / 10;
}

static int digit(char c) {
    const char *all = "0123456789abcdef";
    const char *at = c ? strchr(all, c) : NULL;

    return at ? (int)(at - all) : -1;
}

void cst_unhex(uint8_t *out, size_t n, const char *hex) {
    assert_int_equal(strlen(hex), 2 * n);
    for (size_t i = 0; i < n; i++) {
        int high = digit(hex[2 * i]), low = digit(hex[2 * i + 1]);

        assert_true(high >= 0 && low >= 0);
        out[i] = (uint8_t)(high << 4 | low);
    }
}
