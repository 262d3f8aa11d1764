/* SPDX-License-Identifier: Apache-2.0 */
/* Links only the shipped libraries: each function of cistern/llama.h is exported, refuses what is
 * missing, and its sentence is found in libcistern's cistern_last_error(). */
#include "tests/lib/check.h"

#include <cistern/llama.h>
#include <string.h>

static void every_function_is_there_and_says_what_is_wrong(void **unused) {
    const cistern_llama_facts facts = { .size = sizeof(facts) };
    const int32_t tokens[] = { 1, 2, 3 };
    cistern_llama *glue = NULL;
    size_t n = 7;

    (void)unused;
    assert_int_equal(cistern_llama_open(NULL, NULL, &facts, &glue), CISTERN_E_BAD_ARGUMENT);
    assert_non_null(strstr(cistern_last_error(), "context"));
    assert_null(glue);
    assert_int_equal(cistern_llama_restore(NULL, 0, tokens, 3, &n), CISTERN_E_BAD_ARGUMENT);
    assert_non_null(strstr(cistern_last_error(), "adapter"));
    assert_int_equal(cistern_llama_store(NULL, 0, tokens, 3, &n), CISTERN_E_BAD_ARGUMENT);
    assert_null(cistern_llama_space(NULL));
    cistern_llama_close(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_function_is_there_and_says_what_is_wrong),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
