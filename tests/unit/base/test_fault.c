/* SPDX-License-Identifier: Apache-2.0 */
/* Fault points and the allocator behind them: exactly the armed calls of joined threads fail. */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "base/mem.h"

#include <pthread.h>
#include <string.h>

static int teardown(void **state) {
    for (int p = 0; p < CST_FAULT_POINTS; p++)
        cst_fault_arm((enum cst_fault_point)p, 0, 0);
    cst_fault_leave();
    return 0;
}

static void fails_exactly_the_armed_calls(void **state) {
    cst_fault_join();
    for (uint64_t nth = 1; nth < 6; nth++) {
        for (uint64_t count = 0; count < 4; count++) {
            cst_fault_arm(CST_FAULT_MAP, nth, count);
            for (uint64_t call = 1; call < 12; call++)
                assert_int_equal(cst_fault_hit(CST_FAULT_MAP), call >= nth && call < nth + count);
            assert_int_equal(cst_fault_seen(CST_FAULT_MAP), 11);
        }
    }
    cst_fault_arm(CST_FAULT_MAP, 2, UINT64_MAX); /* from the second on, for ever */
    assert_false(cst_fault_hit(CST_FAULT_MAP));
    for (int i = 0; i < 100; i++)
        assert_true(cst_fault_hit(CST_FAULT_MAP));
}

static void points_are_independent(void **state) {
    cst_fault_join();
    cst_fault_arm(CST_FAULT_SEND, 1, 1);
    assert_false(cst_fault_hit(CST_FAULT_MAP));
    assert_false(cst_fault_hit(CST_FAULT_ALLOC));
    assert_int_equal(cst_fault_seen(CST_FAULT_MAP), 0);
    assert_true(cst_fault_hit(CST_FAULT_SEND));
}

static void *allocate_elsewhere(void *arg) {
    void *p = cst_malloc(1);

    *(int *)arg = p != NULL;
    cst_free(p);
    return NULL;
}

static void other_threads_are_spared(void **state) {
    pthread_t thread;
    int allocated = 0;

    cst_fault_join();
    cst_fault_arm(CST_FAULT_ALLOC, 1, 1);
    assert_int_equal(pthread_create(&thread, NULL, allocate_elsewhere, &allocated), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_true(allocated);
    assert_int_equal(cst_fault_seen(CST_FAULT_ALLOC), 0);
    assert_null(cst_malloc(1));
}

static void every_allocator_call_can_fail(void **state) {
    void *p = cst_malloc(8);

    assert_non_null(p);
    cst_fault_join();
    cst_fault_arm(CST_FAULT_ALLOC, 1, 5);
    assert_null(cst_malloc(1));
    assert_null(cst_calloc(1, 1));
    assert_null(cst_realloc(p, 100));
    assert_null(cst_memdup("ab", 2));
    assert_null(cst_strdup("ab"));
    assert_int_equal(cst_fault_seen(CST_FAULT_ALLOC), 5);
    assert_null(cst_free(p));
}

static void allocates(void **state) {
    char *s = cst_strdup("seven"), *copy = cst_memdup("abc", 3), *none = cst_malloc(0);
    uint64_t *zeros = cst_calloc(100, sizeof(*zeros));

    assert_string_equal(s, "seven");
    assert_memory_equal(copy, "abc", 3);
    assert_non_null(none);
    for (int i = 0; i < 100; i++)
        assert_int_equal(zeros[i], 0);
    assert_null(cst_calloc(SIZE_MAX / 4, 8)); /* the product overflows */
    assert_null(cst_free(NULL));
    cst_free(s);
    cst_free(copy);
    cst_free(none);
    cst_freep(&zeros);
    assert_null(zeros);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(fails_exactly_the_armed_calls, teardown),
        cmocka_unit_test_teardown(points_are_independent, teardown),
        cmocka_unit_test_teardown(other_threads_are_spared, teardown),
        cmocka_unit_test_teardown(every_allocator_call_can_fail, teardown),
        cmocka_unit_test(allocates),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
