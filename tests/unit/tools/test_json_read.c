/* SPDX-License-Identifier: Apache-2.0 */
/* Looking values up in JSON: what RFC 8259 allows is found, what it doesn't is not. */
#include "tools/json_read.h"

#include "base/macros.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static struct cst_json_text text_of(const char *text) {
    return (struct cst_json_text){ text, strlen(text) };
}

static const struct {
    const char *text, *path;
    double value; /* NAN: there is none */
} reals[] = {
    { "{\"a\": 1}", "a", 1 },
    { " {\n\"b\" : [1, {\"a\": 7}, \"}\"] ,\t\"a\":-2.5e1 } ", "a", -25 },
    { "{\"x\": {\"a\": 3, \"y\": {\"a\": 4}}, \"a\": 5}", "x.y.a", 4 },
    { "{\"x\": {\"a\": 3, \"y\": {\"a\": 4}}, \"a\": 5}", "a", 5 },
    { "{\"q\": \"\\\"a\\\": 9\", \"a\": 6}", "a", 6 },
    { "{\"a\": 1, \"a\": 2}", "a", 1 },
    { "{\"a\": [1, [2, 3], {\"b\": 4}, 5]}", "a.0", 1 },
    { "{\"a\": [1, [2, 3], {\"b\": 4}, 5]}", "a.1.1", 3 },
    { "{\"a\": [1, [2, 3], {\"b\": 4}, 5]}", "a.2.b", 4 },
    { "{\"a\": [1, [2, 3], {\"b\": 4}, 5]}", "a.3", 5 },
    { "{\"a\": [1, [2, 3], {\"b\": 4}, 5]}", "a.4", NAN },
    { "{\"a\": [1, 2]}", "a.-1", NAN },
    { "{\"a\": [1, 2]}", "a.b", NAN },
    { "{\"a\": []}", "a.0", NAN },
    { "{\"ab\": 1}", "a", NAN },
    { "{\"a\": \"1\"}", "a", NAN },
    { "{\"a\": true}", "a", NAN },
    { "{\"a\": 1x}", "a", NAN },
    { "{\"a\": }", "a", NAN },
    { "{\"a\": 1", "b", NAN },
    { "{\"b\": [1, 2}, \"a\": 1}", "a.b", NAN },
    { "{\"b\": \"no end", "a", NAN },
    { "[\"a\", 1]", "a", NAN },
    { "{\"a\" 1}", "a", NAN },
    { "{,\"a\": 1}", "a", NAN },
    { "", "a", NAN },
};

static void finds_numbers(void **state) {
    (void)state;
    for (size_t i = 0; i < CST_COUNT(reals); i++) {
        double v = 77;
        bool found = cst_json_get_real(text_of(reals[i].text), reals[i].path, &v);

        if (found != !isnan(reals[i].value) || v != (found ? reals[i].value : 77))
            fail_msg("%s in %s", reals[i].path, reals[i].text);
    }
}

static void takes_only_counts_as_counts(void **state) {
    static const char *const no[] = { "{\"n\": -1}", "{\"n\": 1.5}", "{\"n\": 4294967296}",
                                      "{\"n\": nan}", "{\"n\": \"3\"}" };
    uint32_t n = 7;

    (void)state;
    for (size_t i = 0; i < CST_COUNT(no); i++)
        assert_false(cst_json_get_count(text_of(no[i]), "n", &n));
    assert_int_equal(n, 7);
    assert_true(cst_json_get_count(text_of("{\"n\": 4294967295}"), "n", &n));
    assert_int_equal(n, UINT32_MAX);
}

static void copies_strings_that_fit(void **state) {
    char out[4] = "old";

    (void)state;
    assert_false(cst_json_get_string(text_of("{\"s\": \"four\"}"), "s", out, sizeof(out)));
    assert_false(cst_json_get_string(text_of("{\"s\": \"\\n\"}"), "s", out, sizeof(out)));
    assert_false(cst_json_get_string(text_of("{\"s\": 12}"), "s", out, sizeof(out)));
    assert_string_equal(out, "old");
    assert_true(cst_json_get_string(text_of("{\"s\": \"abc\"}"), "s", out, sizeof(out)));
    assert_string_equal(out, "abc");
    assert_true(cst_json_get_string(text_of("{\"s\": \"\"}"), "s", out, sizeof(out)));
    assert_string_equal(out, "");
}

/* Any beginning of a text ends before its end; the sanitizers watch. */
static void stops_at_the_end(void **state) {
    static const char text[] = "{\"a\": {\"b\": [\"x\\\"\", 1.5e3]}, \"c\": \"d\", \"e\": 12}";
    char heap[sizeof(text)], out[8];
    double v;

    (void)state;
    for (size_t n = 0; n < sizeof(text) - 1; n++) {
        memset(heap, '9', sizeof(heap));
        memcpy(heap, text, n);
        (void)cst_json_get_real((struct cst_json_text){ heap, n }, "a.b", &v);
        assert_false(cst_json_get_string((struct cst_json_text){ heap, n }, "e", out, 8));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_numbers),
        cmocka_unit_test(takes_only_counts_as_counts),
        cmocka_unit_test(copies_strings_that_fit),
        cmocka_unit_test(stops_at_the_end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
