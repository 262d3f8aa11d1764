/* SPDX-License-Identifier: Apache-2.0 */
/* libcrypto that runs out of memory in the middle: stores fail, later, and nothing else does. */
#include "tests/unit/store/seg_world.h"

#include "tests/lib/check.h"

#include <openssl/crypto.h>
#include <stdbool.h>
#include <stdlib.h>

static bool refuses;

static void *take(size_t n, const char *file, int line) {
    return refuses ? NULL : malloc(n);
}

static void *resize(void *p, size_t n, const char *file, int line) {
    return refuses ? NULL : realloc(p, n);
}

static void give(void *p, const char *file, int line) {
    free(p);
}

/* Small ones are sealed within cst_seg_store(), large ones by a job. */
static void test_a_seal_that_fails_is_told_later(void **state) {
    static const uint64_t sizes[] = { 500, 40000 };

    for (unsigned i = 0; i < CST_COUNT(sizes); i++) {
        struct seg_world *w = seg_world_new(7 + i, CST_SEG_CRYPT_AES);

        assert_int_equal(seg_world_start(w), 0);
        seg_world_settle(w);
        assert_int_equal(seg_world_put(w, 0, -1, 0, sizes[i]), 0); /* so the space is written */
        assert_int_equal(seg_world_put(w, 1, 0, 0, 700), 0);
        w->with_faults = true;
        refuses = true;
        assert_int_equal(seg_world_store(w, 2, 1, 0, sizes[i]), 0);
        assert_true(w->items[2].open); /* not told yet */
        seg_world_settle(w);
        refuses = false;
        assert_false(w->items[2].open);
        assert_true(w->items[2].failed && w->items[2].status < 0);
        assert_int_equal(seg_world_put(w, 3, 1, 0, sizes[i]), 0); /* in another segment */
        assert_int_equal(seg_world_read_all(w), 3);
        seg_world_free(w);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_a_seal_that_fails_is_told_later) };

    if (CRYPTO_set_mem_functions(take, resize, give) != 1)
        return cst_skip("libcrypto has allocated before main()");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
