/* SPDX-License-Identifier: Apache-2.0 */
/* The logger: what reaches stderr, the rate limit under a hand-moved clock, forged lines. */
#include "tests/lib/check.h"

#include "base/clock.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct cst_manual_clock manual;
static int saved_stderr, file;
static char text[1 << 20];

static int setup(void **state) {
    cst_manual_clock_init(&manual, CST_NS_PER_S);
    cst_log_set_clock(&manual.clock);
    cst_log_set_level(CST_LOG_INFO);
    saved_stderr = dup(STDERR_FILENO);
    file = memfd_create("log", MFD_CLOEXEC);
    return file < 0 || dup2(file, STDERR_FILENO) < 0;
}

static int teardown(void **state) {
    (void)dup2(saved_stderr, STDERR_FILENO);
    (void)close(saved_stderr);
    (void)close(file);
    return 0;
}

static const char *logged(void) {
    ssize_t n = pread(file, text, sizeof(text) - 1, 0);

    assert_true(n >= 0);
    text[n] = '\0';
    assert_int_equal(ftruncate(file, 0), 0);
    assert_int_equal(lseek(file, 0, SEEK_SET), 0);
    return text;
}

static unsigned lines_in(const char *s) {
    unsigned n = 0;

    for (; *s; s++)
        n += *s == '\n';
    return n;
}

static void levels(void **state) {
    cst_log(CST_LOG_INFO, "plain %d", 5);
    cst_log(CST_LOG_DEBUG, "hidden");
    assert_string_equal(logged(), "plain 5\n");
    cst_log_set_level(CST_LOG_ERROR);
    cst_log(CST_LOG_WARNING, "hidden");
    cst_log(CST_LOG_ERROR, "shown");
    assert_string_equal(logged(), "shown\n");
}

static void one_line_a_call(void **state) {
    char big[5000];

    cst_log(CST_LOG_INFO, "name=%s", "a\nERROR forged\r\x1b[2J");
    assert_string_equal(logged(), "name=a?ERROR forged??[2J\n");
    memset(big, 'x', sizeof(big) - 1);
    big[sizeof(big) - 1] = '\0';
    cst_log(CST_LOG_INFO, "%s", big);
    assert_int_equal(lines_in(logged()), 1);
    assert_in_range(strlen(text), 900, 1024);
}

static void the_rate_is_limited(void **state) {
    for (int i = 0; i < 1000; i++)
        cst_log(CST_LOG_INFO, "line %d", i);
    assert_int_equal(lines_in(logged()), CST_LOG_BURST);
    manual.ns += CST_NS_PER_S - 1;
    cst_log(CST_LOG_INFO, "still too early");
    assert_string_equal(logged(), "");
    manual.ns += 1;
    cst_log(CST_LOG_INFO, "next");
    cst_log(CST_LOG_INFO, "after");
    assert_string_equal(logged(), "next (801 lines dropped)\nafter\n");
}

static void ids_hide_the_key(void **state) {
    uint8_t key[32] = { 1 }, other[32] = { 2 };
    struct cst_log_id a = cst_log_id(key), b = cst_log_id(key), c = cst_log_id(other);

    assert_int_equal(strlen(a.text), 16);
    assert_int_equal(strspn(a.text, "0123456789abcdef"), 16);
    assert_string_equal(a.text, b.text);
    assert_string_not_equal(a.text, c.text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(levels, setup, teardown),
        cmocka_unit_test_setup_teardown(one_line_a_call, setup, teardown),
        cmocka_unit_test_setup_teardown(the_rate_is_limited, setup, teardown),
        cmocka_unit_test(ids_hide_the_key),
    };

    (void)unsetenv("JOURNAL_STREAM");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
