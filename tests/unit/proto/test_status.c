/* SPDX-License-Identifier: Apache-2.0 */
/* Statuses: numbers pinned by a second list, texts, the C API's constants, errno translation. */
#include "tests/lib/check.h"

#include "client/include/cistern/cistern.h"
#include "proto/status.h"

#include <errno.h>
#include <string.h>

/* Numbers as released: a row may be added here, never changed. */
static const struct {
    const char *name;
    int number;
} pinned[] = {
    { "OK", 0 },
    { "NOT_FOUND", 1 },
    { "PENDING", 2 },
    { "PARENT_MISSING", 3 },
    { "PRESENT", 4 },
    { "KEY_BUSY", 5 },
    { "KEY_MISMATCH", 6 },
    { "BAD_MAGIC", 20 },
    { "BAD_VERSION", 21 },
    { "BAD_LENGTH", 22 },
    { "BAD_TYPE", 23 },
    { "BAD_MESSAGE", 24 },
    { "BAD_ARGUMENT", 25 },
    { "BAD_DESCRIPTOR", 26 },
    { "BAD_HANDLE", 27 },
    { "BAD_STATE", 28 },
    { "BAD_FDS", 29 },
    { "DENIED", 30 },
    { "UNSUPPORTED", 31 },
    { "TOO_LARGE", 32 },
    { "BUSY", 40 },
    { "QUOTA", 41 },
    { "NO_MEMORY", 42 },
    { "DRAINING", 60 },
    { "INTERNAL", 61 },
    { "DISCONNECTED", 80 },
    { "FORKED", 81 },
    { "TIMEOUT", 82 },
    { "UNTRUSTED_SERVER", 83 },
    { "CORRUPT", 84 },
    { "SYSTEM", 85 },
    { "ENGINE", 86 },
};

static void numbers_are_pinned(void **state) {
    size_t n = 0;

    for (size_t i = 0; i < CST_COUNT(pinned); i++)
        assert_string_equal(cst_status_name(pinned[i].number), pinned[i].name);
    for (int i = 0; i < 1000; i++)
        n += strcmp(cst_status_name(i), "UNKNOWN") != 0;
    assert_int_equal(n, CST_COUNT(pinned));
}

static void texts_are_sentences(void **state) {
    for (size_t i = 0; i < CST_COUNT(pinned); i++) {
        const char *text = cst_status_text(pinned[i].number);

        assert_string_not_equal(text, "unknown status");
        for (size_t k = 0; k < i; k++)
            assert_string_not_equal(text, cst_status_text(pinned[k].number));
    }
    assert_string_equal(cst_status_text(-1), "unknown status");
    assert_string_equal(cst_status_text(7), "unknown status");
    assert_string_equal(cst_status_name(19), "UNKNOWN");
}

static void public_constants_agree(void **state) {
    assert_int_equal(CISTERN_OK, CST_STATUS_OK);
#define SAME(NAME) assert_int_equal(-CISTERN_E_##NAME, CST_STATUS_##NAME)
    SAME(NOT_FOUND);
    SAME(PENDING);
    SAME(PARENT_MISSING);
    SAME(PRESENT);
    SAME(KEY_BUSY);
    SAME(KEY_MISMATCH);
    SAME(BAD_VERSION);
    SAME(BAD_ARGUMENT);
    SAME(BAD_DESCRIPTOR);
    SAME(BAD_HANDLE);
    SAME(BAD_STATE);
    SAME(DENIED);
    SAME(UNSUPPORTED);
    SAME(TOO_LARGE);
    SAME(BUSY);
    SAME(QUOTA);
    SAME(NO_MEMORY);
    SAME(DRAINING);
    SAME(INTERNAL);
    SAME(DISCONNECTED);
    SAME(FORKED);
    SAME(TIMEOUT);
    SAME(UNTRUSTED_SERVER);
    SAME(CORRUPT);
    SAME(SYSTEM);
    SAME(ENGINE);
}

static void errno_becomes_status(void **state) {
    assert_int_equal(cst_status_from_errno(0), CST_STATUS_OK);
    assert_int_equal(cst_status_from_errno(-ENOMEM), CST_STATUS_NO_MEMORY);
    assert_int_equal(cst_status_from_errno(-EMFILE), CST_STATUS_BUSY);
    assert_int_equal(cst_status_from_errno(-ENFILE), CST_STATUS_BUSY);
    assert_int_equal(cst_status_from_errno(-EMSGSIZE), CST_STATUS_TOO_LARGE);
    assert_int_equal(cst_status_from_errno(-EIO), CST_STATUS_INTERNAL);
    assert_int_equal(cst_status_from_errno(5), CST_STATUS_INTERNAL); /* an unhandled condition */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_are_pinned),
        cmocka_unit_test(texts_are_sentences),
        cmocka_unit_test(public_constants_agree),
        cmocka_unit_test(errno_becomes_status),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
