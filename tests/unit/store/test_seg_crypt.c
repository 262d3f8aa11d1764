/* SPDX-License-Identifier: Apache-2.0 */
/* HKDF-SHA256 against RFC 5869 A, AES-256-GCM against the vectors of McGrew and Viega (also in
 * NIST's submission), CRC32C against RFC 3720, and what a seal must refuse. */
#include "base/crc32c.h"
#include "store/seg_crypt.h"
#include "tests/lib/check.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static size_t unhex(uint8_t *out, const char *text) {
    size_t n = strlen(text) / 2;

    for (size_t i = 0; i < n; i++) {
        unsigned high = (unsigned)text[2 * i], low = (unsigned)text[2 * i + 1];

        high = high > '9' ? high - 'a' + 10 : high - '0';
        low = low > '9' ? low - 'a' + 10 : low - '0';
        out[i] = (uint8_t)(high << 4 | low);
    }
    return n;
}

struct hkdf_row {
    const char *key, *salt, *info, *out;
};

static const struct hkdf_row hkdf_rows[] = {
    /* RFC 5869 A.1, A.2, A.3 */
    { "0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b", "000102030405060708090a0b0c",
      "f0f1f2f3f4f5f6f7f8f9",
      "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865" },
    { "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
      "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"
      "404142434445464748494a4b4c4d4e4f",
      "606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f"
      "808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9f"
      "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf",
      "b0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecf"
      "d0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeef"
      "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff",
      "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c"
      "59045a99cac7827271cb41c65e590e09da3275600c2f09b8367793a9aca3db71"
      "cc30c58179ec3e87c14c01d5c1f3434f1d87" },
    { "0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b", "", "",
      "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8" },
};

static void test_hkdf(void **state) {
    (void)state;
    for (size_t i = 0; i < CST_COUNT(hkdf_rows); i++) {
        const struct hkdf_row *row = &hkdf_rows[i];
        uint8_t key[128], salt[128], info[128], out[128], got[128];
        size_t key_n = unhex(key, row->key), salt_n = unhex(salt, row->salt),
               info_n = unhex(info, row->info), n = unhex(out, row->out);

        assert_int_equal(cst_hkdf_sha256(got, n, key, key_n, salt, salt_n, info, info_n), 0);
        assert_memory_equal(got, out, n);
    }
}

/* McGrew and Viega's test case 14 has the nonce 0, which is ours with counter 0: key 0, one block
 * of zeros. */
static void test_gcm(void **state) {
    struct cst_seal seal = { .cipher = CST_DISK_AES_GCM };
    uint8_t data[16] = { 0 }, out[16], tag[16], expected[16], expected_tag[16];
    const struct cst_seal_aad none = { data, 0, NULL, 0 };
    uint32_t crc;

    (void)state;
    unhex(expected, "cea7403d4d606b6e074ec5d3baf39d18");
    unhex(expected_tag, "d0d1c8a799996bf0265b98b5d48ab919");
    assert_int_equal(cst_seal(&seal, 0, none, data, out, sizeof(data), tag, &crc), 0);
    assert_memory_equal(out, expected, 16);
    assert_memory_equal(tag, expected_tag, 16);
    assert_int_equal(crc, cst_crc32c(0, data, sizeof(data)));
    assert_int_equal(cst_unseal(&seal, 0, none, out, sizeof(out), tag), 0);
    assert_memory_equal(out, data, 16);
    /* case 13: nothing at all */
    unhex(expected_tag, "530f8afbc74536b9a963b4f1c4cb738b");
    assert_int_equal(cst_seal(&seal, 0, none, data, out, 0, tag, NULL), 0);
    assert_memory_equal(tag, expected_tag, 16);
}

static void test_crc(void **state) {
    static const char text[] = "123456789";
    struct cst_seal seal = { .cipher = CST_DISK_CRC32C };
    const struct cst_seal_aad aad = { text, 2, text + 2, 2 };
    uint8_t out[5], tag[16];
    static const uint8_t zero[12];

    (void)state;
    assert_int_equal(cst_seal(&seal, 7, aad, text + 4, out, 5, tag, NULL), 0);
    assert_int_equal(cst_load32(tag), 0xe3069283); /* of the whole, RFC 3720 B.4 */
    assert_memory_equal(tag + 4, zero, sizeof(zero));
    assert_memory_equal(out, text + 4, 5);
    tag[9] = 1;
    assert_int_equal(cst_unseal(&seal, 7, aad, out, 5, tag), CST_SEAL_E_TAG);
}

/* What changes in what a message depends on, and which of the two ciphers sees it. */
static void test_refusals(void **state) {
    (void)state;
    for (unsigned c = 0; c < 2; c++) {
        struct cst_seal seal = { .cipher = c ? CST_DISK_AES_GCM : CST_DISK_CRC32C };
        uint8_t a[40], b[32], data[100000], sealed[100000], copy[100000], tag[16];
        const struct cst_seal_aad aad = { a, sizeof(a), b, sizeof(b) };
        uint32_t crc;

        for (size_t i = 0; i < sizeof(data); i++)
            data[i] = (uint8_t)(i * 7 >> 3);
        memset(a, 1, sizeof(a));
        memset(b, 2, sizeof(b));
        memset(seal.key, 3, sizeof(seal.key));
        assert_int_equal(cst_seal(&seal, 5, aad, data, sealed, sizeof(data), tag, &crc), 0);
        assert_int_equal(crc, cst_crc32c(0, data, sizeof(data)));
        memcpy(copy, sealed, sizeof(copy));
        assert_int_equal(cst_unseal(&seal, 5, aad, copy, sizeof(copy), tag), 0);
        assert_memory_equal(copy, data, sizeof(data));
        for (unsigned what = 0; what < 7; what++) {
            struct cst_seal other = seal;
            uint64_t nonce = 5;
            size_t n = sizeof(copy);
            bool seen = c || what >= 2;

            memcpy(copy, sealed, sizeof(copy));
            nonce += what == 0;
            other.key[31] ^= what == 1;
            a[39] ^= what == 2;
            b[0] ^= what == 3;
            copy[n - 1] ^= what == 4;
            n -= what == 5;
            tag[3] ^= what == 6 ? 0x80 : 0;
            assert_int_equal(cst_unseal(&other, nonce, aad, copy, n, tag),
                             seen ? CST_SEAL_E_TAG : 0);
            a[39] ^= what == 2;
            b[0] ^= what == 3;
            tag[3] ^= what == 6 ? 0x80 : 0;
        }
    }
}

/* The key of a segment changes with all that it depends on. */
static void test_segment_key(void **state) {
    uint8_t key[32] = { 1 }, salt[32] = { 2 }, out[5][32];

    (void)state;
    assert_int_equal(cst_seal_segment_key(out[0], key, salt, 3, 4), 0);
    assert_int_equal(cst_seal_segment_key(out[1], key, salt, 3, 5), 0);
    assert_int_equal(cst_seal_segment_key(out[2], key, salt, 4, 4), 0);
    salt[31] = 1;
    assert_int_equal(cst_seal_segment_key(out[3], key, salt, 3, 4), 0);
    salt[31] = 0;
    key[31] = 1;
    assert_int_equal(cst_seal_segment_key(out[4], key, salt, 3, 4), 0);
    for (size_t i = 0; i < 5; i++)
        for (size_t k = 0; k < i; k++)
            assert_memory_not_equal(out[i], out[k], 32);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hkdf),        cmocka_unit_test(test_gcm),
        cmocka_unit_test(test_crc),         cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_segment_key),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
