/* SPDX-License-Identifier: Apache-2.0 */
/* Digests of GGUF files against SHA-256 itself, and when the remembered digest must not be used. */
#include "tests/lib/check.h"

#include "base/sha256.h"
#include "client/llama/content_id.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[] = "/tmp/cistern-test-ids-XXXXXX";

static const char *in_folder(const char *name) {
    static char path[2][PATH_MAX];
    static unsigned turn;
    char *out = path[turn++ % 2];

    (void)snprintf(out, PATH_MAX, "%s/%s", folder, name);
    return out;
}

static void write_file(const char *name, const char *text) {
    FILE *f = fopen(in_folder(name), "w");

    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static void assert_id(const char *name, const char *text) {
    uint8_t want[32], got[32];

    cst_sha256(text, strlen(text), want);
    assert_int_equal(cst_content_id(in_folder(name), got), 0);
    assert_memory_equal(got, want, 32);
}

static void read_cache(char *out, size_t cap) {
    FILE *f = fopen(in_folder("cistern/ids"), "r");
    size_t n;

    assert_non_null(f);
    n = fread(out, 1, cap - 1, f);
    out[n] = '\0';
    (void)fclose(f);
}

/* Puts another digest on the one line of the cache: whether it comes back shows who answered. */
static void forge_cache(void) {
    char text[4096], *digest;

    read_cache(text, sizeof(text));
    digest = strrchr(text, ' ');
    assert_non_null(digest);
    memset(digest + 1, 'a', 64);
    write_file("cistern/ids", text);
    assert_int_equal(chmod(in_folder("cistern/ids"), 0600), 0);
}

static bool answered_by_cache(const char *name) {
    uint8_t got[32], forged[32];

    memset(forged, 0xaa, sizeof(forged));
    assert_int_equal(cst_content_id(in_folder(name), got), 0);
    return memcmp(got, forged, 32) == 0;
}

static void start_over(void) {
    (void)unlink(in_folder("cistern/ids"));
    write_file("model.gguf", "GGUF one");
    assert_id("model.gguf", "GGUF one");
    forge_cache();
}

static void a_digest_is_remembered(void **unused) {
    struct stat st;

    (void)unused;
    start_over();
    assert_true(answered_by_cache("model.gguf"));
    assert_int_equal(stat(in_folder("cistern/ids"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(stat(in_folder("cistern"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
}

static void a_changed_file_is_hashed_again(void **unused) {
    struct timespec times[2];
    struct stat st;

    (void)unused;
    start_over();
    write_file("model.gguf", "GGUF longer");
    assert_id("model.gguf", "GGUF longer");
    start_over();
    write_file("other.gguf", "GGUF two");
    assert_id("other.gguf", "GGUF two"); /* another inode */
    assert_true(answered_by_cache("model.gguf"));
    start_over();
    assert_int_equal(stat(in_folder("model.gguf"), &st), 0);
    write_file("model.gguf", "GGUF two");
    times[0] = st.st_atim;
    times[1] = st.st_mtim;
    assert_int_equal(utimensat(AT_FDCWD, in_folder("model.gguf"), times, 0), 0);
    assert_id("model.gguf", "GGUF two"); /* same inode, size and modification time */
}

static void a_cache_that_others_can_write_is_not_believed(void **unused) {
    (void)unused;
    start_over();
    assert_int_equal(chmod(in_folder("cistern/ids"), 0622), 0);
    assert_false(answered_by_cache("model.gguf"));
    start_over();
    assert_int_equal(rename(in_folder("cistern/ids"), in_folder("elsewhere")), 0);
    assert_int_equal(symlink(in_folder("elsewhere"), in_folder("cistern/ids")), 0);
    assert_false(answered_by_cache("model.gguf"));
    if (geteuid() == 0) {
        start_over();
        assert_int_equal(chown(in_folder("cistern/ids"), 1, 1), 0);
        assert_false(answered_by_cache("model.gguf"));
    }
}

static void a_broken_cache_is_no_trouble(void **unused) {
    (void)unused;
    start_over();
    write_file("cistern/ids", "nonsense\n\nfe 1 2\n");
    assert_id("model.gguf", "GGUF one");
    assert_id("model.gguf", "GGUF one");
    assert_int_equal(unlink(in_folder("cistern/ids")), 0);
    assert_int_equal(mkdir(in_folder("cistern/ids"), 0700), 0);
    assert_id("model.gguf", "GGUF one");
    assert_int_equal(rmdir(in_folder("cistern/ids")), 0);
    assert_int_equal(unsetenv("XDG_CACHE_HOME"), 0);
    assert_int_equal(setenv("HOME", folder, 1), 0);
    assert_id("model.gguf", "GGUF one");
    assert_int_equal(access(in_folder(".cache/cistern/ids"), R_OK), 0);
    assert_int_equal(unsetenv("HOME"), 0);
    assert_id("model.gguf", "GGUF one");
    assert_int_equal(setenv("XDG_CACHE_HOME", folder, 1), 0);
}

/* Many files: the oldest lines go, the file keeps its limit. */
static void the_cache_stays_small(void **unused) {
    struct stat st;

    (void)unused;
    start_over();
    for (unsigned i = 0; i < 700; i++) {
        char text[32];

        (void)unlink(in_folder("many.gguf"));
        (void)snprintf(text, sizeof(text), "GGUF %u", i);
        write_file("many.gguf", text);
        assert_id("many.gguf", text);
    }
    assert_int_equal(stat(in_folder("cistern/ids"), &st), 0);
    assert_in_range(st.st_size, 60 << 10, 64 << 10);
    assert_false(answered_by_cache("model.gguf"));
}

static void parts_count_together(void **unused) {
    uint8_t digests[2][32], want[32], got[32];
    const char *names[] = { "m-00001-of-00002.gguf", "m-00002-of-00002.gguf" };

    (void)unused;
    write_file(names[0], "GGUF a");
    write_file(names[1], "GGUF b");
    cst_sha256("GGUF a", 6, digests[0]);
    cst_sha256("GGUF b", 6, digests[1]);
    cst_sha256(digests, sizeof(digests), want);
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(cst_content_id(in_folder(names[i]), got), 0);
        assert_memory_equal(got, want, 32);
    }
    assert_int_equal(unlink(in_folder(names[1])), 0);
    assert_int_equal(cst_content_id(in_folder(names[0]), got), -ENOENT);
    write_file("m-00003-of-00002.gguf", "GGUF c"); /* no such numbering: one file */
    assert_id("m-00003-of-00002.gguf", "GGUF c");
    write_file("m-00001-of-00001.gguf", "GGUF d");
    assert_id("m-00001-of-00001.gguf", "GGUF d");
}

static void what_is_no_model_is_refused(void **unused) {
    uint8_t got[32];

    (void)unused;
    write_file("text", "GGU");
    assert_int_equal(cst_content_id(in_folder("text"), got), -EBADMSG);
    write_file("text", "PK model");
    assert_int_equal(cst_content_id(in_folder("text"), got), -EBADMSG);
    write_file("text", "");
    assert_int_equal(cst_content_id(in_folder("text"), got), -EBADMSG);
    assert_int_equal(cst_content_id(folder, got), -EBADMSG);
    assert_int_equal(cst_content_id(in_folder("missing"), got), -ENOENT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_digest_is_remembered),
        cmocka_unit_test(a_changed_file_is_hashed_again),
        cmocka_unit_test(a_cache_that_others_can_write_is_not_believed),
        cmocka_unit_test(a_broken_cache_is_no_trouble),
        cmocka_unit_test(the_cache_stays_small),
        cmocka_unit_test(parts_count_together),
        cmocka_unit_test(what_is_no_model_is_refused),
    };
    char command[PATH_MAX + 16];
    int failed;

    if (!mkdtemp(folder) || setenv("XDG_CACHE_HOME", folder, 1))
        return 1;
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    (void)snprintf(command, sizeof(command), "rm -r '%s'", folder);
    return system(command) ? 1 : failed;
}
