/* SPDX-License-Identifier: Apache-2.0 */
/* CRC32C against the vectors of RFC 3720 B.4 and a bitwise implementation. */
#include "tests/lib/check.h"

#include "base/crc32c.h"
#include "base/random.h"

#include <string.h>

static uint32_t bitwise(const uint8_t *p, size_t n) {
    uint32_t crc = ~UINT32_C(0);

    while (n--) {
        crc ^= *p++;
        for (int i = 0; i < 8; i++)
            crc = (crc >> 1) ^ (crc & 1 ? UINT32_C(0x82f63b78) : 0);
    }
    return ~crc;
}

static void rfc3720_vectors(void **state) {
    uint8_t zeros[32] = { 0 }, ones[32], up[32], down[32];

    memset(ones, 0xff, sizeof(ones));
    for (unsigned i = 0; i < 32; i++) {
        up[i] = (uint8_t)i;
        down[i] = (uint8_t)(31 - i);
    }
    assert_int_equal(cst_crc32c(0, "123456789", 9), 0xe3069283);
    assert_int_equal(cst_crc32c(0, zeros, 32), 0x8a9136aa);
    assert_int_equal(cst_crc32c(0, ones, 32), 0x62a8ab43);
    assert_int_equal(cst_crc32c(0, up, 32), 0x46dd794e);
    assert_int_equal(cst_crc32c(0, down, 32), 0x113fdb5c);
    assert_int_equal(cst_crc32c(0, "", 0), 0);
}

static void equals_bitwise_at_any_split(void **state) {
    struct cst_seeded_random rng;
    uint8_t bytes[777];

    cst_seeded_random_init(&rng, 3);
    assert_int_equal(rng.random.fill(&rng.random, bytes, sizeof(bytes)), 0);
    for (size_t n = 0; n <= sizeof(bytes); n += 37) {
        size_t split = n ? cst_seeded_random_next(&rng) % n : 0;
        uint32_t part = cst_crc32c(0, bytes, split);

        assert_int_equal(cst_crc32c(0, bytes, n), bitwise(bytes, n));
        assert_int_equal(cst_crc32c(part, bytes + split, n - split), bitwise(bytes, n));
    }
}

/* Of any split of any length: what the whole's bytes give. */
static void test_combine(void **state) {
    uint8_t data[3000];

    (void)state;
    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (uint8_t)(i * i + 13 * i);
    for (size_t n = 0; n < sizeof(data); n += 1 + n / 7) {
        for (size_t at = 0; at <= n; at += 1 + n / 5) {
            uint32_t a = cst_crc32c(0, data, at), b = cst_crc32c(0, data + at, n - at);

            assert_int_equal(cst_crc32c_combine(a, b, n - at), cst_crc32c(0, data, n));
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rfc3720_vectors),
        cmocka_unit_test(equals_bitwise_at_any_split),
        cmocka_unit_test(test_combine),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
