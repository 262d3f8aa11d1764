/* SPDX-License-Identifier: Apache-2.0 */
/* Little-endian loads and stores: bytes in the written order, at any alignment. */
#include "tests/lib/check.h"

#include "base/le.h"

static void bytes_are_little_endian(void **state) {
    const uint8_t expected[] = { 0xff, 1, 2, 3, 4, 5, 6, 7, 8, 0xff };
    uint8_t b[10];

    memset(b, 0xff, sizeof(b));
    cst_store64(b + 1, UINT64_C(0x0807060504030201));
    assert_memory_equal(b, expected, sizeof(b));
    assert_int_equal(cst_load64(b + 1), UINT64_C(0x0807060504030201));
    assert_int_equal(cst_load32(b + 1), 0x04030201);
    assert_int_equal(cst_load32(b + 2), 0x05040302);
    assert_int_equal(cst_load16(b + 8), 0xff08);
    cst_store32(b + 2, UINT32_C(0xa0b0c0d0));
    cst_store16(b + 7, 0x1234);
    assert_int_equal(b[2], 0xd0);
    assert_int_equal(b[5], 0xa0);
    assert_int_equal(b[7], 0x34);
    assert_int_equal(b[8], 0x12);
    assert_int_equal(b[1], 1);
    assert_int_equal(b[6], 6);
    assert_int_equal(b[9], 0xff);
}

_Static_assert(sizeof(struct cst_le64) == 8 && _Alignof(struct cst_le64) == 1, "no padding");
_Static_assert(sizeof(struct cst_le32) == 4 && _Alignof(struct cst_le32) == 1, "no padding");
_Static_assert(sizeof(struct cst_le16) == 2 && _Alignof(struct cst_le16) == 1, "no padding");

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_little_endian),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
