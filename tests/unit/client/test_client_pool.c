/* SPDX-License-Identifier: Apache-2.0 */
/* Objects from chunks: distinct, aligned, reused, zero when new. */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "client/client_pool.h"

#include <string.h>

struct object {
    struct cst_list link;
    char payload[37];
};

enum { N = 1000 };

static void test_objects_are_distinct(void **state) {
    static struct object *objects[N];
    struct cst_pool pool;

    cst_pool_init(&pool, sizeof(struct object));
    for (int i = 0; i < N; i++) {
        static const char zero[sizeof(objects[0]->payload)];

        objects[i] = cst_pool_get(&pool);
        assert_non_null(objects[i]);
        assert_int_equal((uintptr_t)objects[i] % 16, 0);
        assert_memory_equal(objects[i]->payload, zero, sizeof(zero));
        memset(objects[i]->payload, i % 128, sizeof(objects[i]->payload));
    }
    for (int i = 0; i < N; i++)
        for (size_t k = 0; k < sizeof(objects[i]->payload); k++)
            assert_int_equal(objects[i]->payload[k], i % 128);
    cst_pool_deinit(&pool);
    cst_pool_deinit(&pool);
}

/* In a steady state nothing is allocated. */
static void test_reuse(void **state) {
    struct cst_pool pool;
    struct object *first;

    cst_pool_init(&pool, sizeof(struct object));
    first = cst_pool_get(&pool);
    cst_pool_put(&pool, first);
    cst_fault_join();
    cst_fault_arm(CST_FAULT_ALLOC, 1, UINT64_MAX);
    for (int i = 0; i < N; i++) {
        struct object *o = cst_pool_get(&pool);

        assert_ptr_equal(o, first);
        cst_pool_put(&pool, o);
    }
    assert_int_equal(cst_fault_seen(CST_FAULT_ALLOC), 0);
    while (cst_pool_get(&pool)) /* the rest of the chunk, then out of memory */
        continue;
    assert_int_equal(cst_fault_seen(CST_FAULT_ALLOC), 1);
    cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
    assert_non_null(cst_pool_get(&pool));
    cst_pool_deinit(&pool);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_objects_are_distinct),
        cmocka_unit_test(test_reuse),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
