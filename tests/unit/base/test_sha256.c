/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256 against the examples of FIPS 180-4, whole and in pieces. */
#include "tests/lib/check.h"

#include "base/sha256.h"

#include <string.h>

struct row {
    const char *name, *message, *digest;
    unsigned repeat;
};

static const struct row rows[] = {
    { "empty", "", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", 1 },
    { "abc", "abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", 1 },
    { "448 bits", "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
      "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1", 1 },
    { "896 bits",
      "abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmno"
      "ijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu",
      "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1", 1 },
    { "a million a", "aaaaaaaaaa",
      "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0", 100000 },
};

static void check_row(void **state) {
    const struct row *row = *state;
    size_t n = strlen(row->message);
    uint8_t expected[CST_SHA256_SIZE], got[CST_SHA256_SIZE];

    cst_unhex(expected, sizeof(expected), row->digest);
    if (row->repeat == 1) {
        cst_sha256(row->message, n, got);
        assert_memory_equal(got, expected, sizeof(got));
    }
    for (size_t split = 0; split <= n; split += 5) {
        struct cst_sha256 h;

        cst_sha256_init(&h);
        for (unsigned i = 0; i < row->repeat; i++) {
            cst_sha256_update(&h, row->message, split);
            cst_sha256_update(&h, row->message + split, n - split);
        }
        cst_sha256_final(&h, got);
        assert_memory_equal(got, expected, sizeof(got));
    }
}

int main(void) {
    return cst_run_rows(rows, check_row);
}
