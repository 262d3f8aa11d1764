/* SPDX-License-Identifier: Apache-2.0 */
/* The seeded generator against published splitmix64 outputs; the system source fills all bytes. */
#include "tests/lib/check.h"

#include "base/le.h"
#include "base/random.h"

#include <string.h>

static void splitmix64_vectors(void **state) {
    const uint64_t expected[] = { UINT64_C(6457827717110365317), UINT64_C(3203168211198807973),
                                  UINT64_C(9817491932198370423), UINT64_C(4593380528125082431),
                                  UINT64_C(16408922859458223821) };
    struct cst_seeded_random rng;

    cst_seeded_random_init(&rng, 1234567);
    for (size_t i = 0; i < CST_COUNT(expected); i++)
        assert_int_equal(cst_seeded_random_next(&rng), expected[i]);
}

static void seeded_fill_writes_exactly_n(void **state) {
    struct cst_seeded_random rng;
    uint8_t b[32];

    for (size_t n = 0; n <= 17; n++) {
        memset(b, 0xee, sizeof(b));
        cst_seeded_random_init(&rng, 1234567);
        assert_int_equal(rng.random.fill(&rng.random, b, n), 0);
        assert_int_equal(b[n], 0xee);
        if (n >= 8)
            assert_true(cst_load64(b) == UINT64_C(6457827717110365317));
    }
}

static void system_fill_covers_the_buffer(void **state) {
    uint8_t b[4096], seen[4096] = { 0 };

    /* each byte is non-zero in one of 16 draws, except with probability 4096 / 256^16 */
    for (int i = 0; i < 16; i++) {
        memset(b, 0, sizeof(b));
        assert_int_equal(cst_random_system.fill(&cst_random_system, b, sizeof(b)), 0);
        for (size_t k = 0; k < sizeof(b); k++)
            seen[k] |= b[k];
    }
    for (size_t k = 0; k < sizeof(b); k++)
        assert_int_not_equal(seen[k], 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(splitmix64_vectors),
        cmocka_unit_test(seeded_fill_writes_exactly_n),
        cmocka_unit_test(system_fill_covers_the_buffer),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
