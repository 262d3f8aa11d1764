/* SPDX-License-Identifier: Apache-2.0 */
/* What a start does with a directory, or a key, that isn't as it should be: it starts, or it
 * refuses with a sentence that says what to do, and never changes what it doesn't understand. On a
 * real directory, through the pool of threads. */
#include "base/crc32c.h"
#include "base/mem.h"
#include "store/seg_core.h"
#include "tests/lib/test_jobs.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { SEGMENT = 256 << 10 };

struct place {
    char dir[64], run[64], key[80]; /* the directory; one on a tmpfs; a key file */
    const char *runtime[2];
    struct cst_aio *aio;
    struct cst_seg *seg;
    struct cst_seg_options options;
    struct test_jobs jobs;
    char message[256], notes[2048];
    size_t n_found;
    bool recovered;
    struct cst_seg_ref ref;
};

static char owner[1];

static int found(void *arg, const struct cst_seg_record *record, struct cst_seg_ref ref,
                 void **out) {
    struct place *p = arg;

    (void)record;
    p->n_found++;
    p->ref = ref;
    *out = owner;
    return 0;
}

static void gone(void *arg, void *out, enum cst_seg_gone why) {
    (void)arg;
    (void)out;
    (void)why;
}

static void note(void *arg, const char *sentence) {
    struct place *p = arg;

    (void)snprintf(p->notes + strlen(p->notes), sizeof(p->notes) - strlen(p->notes), "%s\n",
                   sentence);
}

static void recovered(void *arg, int status) {
    struct place *p = arg;

    assert_int_equal(status, 0);
    p->recovered = true;
}

static void settle(struct place *p) {
    while (cst_seg_busy(p->seg)) {
        (void)test_jobs_drain(&p->jobs);
        if (cst_seg_busy(p->seg))
            (void)cst_aio_wait(p->aio, 1000);
    }
}

static int start(struct place *p) {
    const struct cst_aio_options aio = { .directory = p->dir, .kind = CST_AIO_THREADS };
    struct cst_seg_env env = { .clock = &cst_clock_monotonic,
                               .random = &cst_random_system,
                               .jobs = &p->jobs.jobs,
                               .user = { .found = found, .gone = gone, .note = note, .arg = p } };
    char why[128];
    int r;

    p->n_found = 0;
    p->notes[0] = p->message[0] = 0;
    p->recovered = false;
    test_jobs_init(&p->jobs, true);
    assert_int_equal(cst_aio_new(&p->aio, &aio, why, sizeof(why)), 0);
    env.aio = p->aio;
    r = cst_seg_open(&p->seg, &p->options, &env, p->message, sizeof(p->message));
    if (r) {
        p->aio = cst_aio_free(p->aio);
        return r;
    }
    cst_seg_recover(p->seg, recovered, p);
    settle(p);
    assert_true(p->recovered);
    return 0;
}

static void stop(struct place *p) {
    if (p->seg) {
        settle(p);
        assert_int_equal(cst_seg_close(p->seg), 0);
    }
    p->seg = cst_seg_free(p->seg);
    p->aio = cst_aio_free(p->aio);
}

static void store_done(struct cst_seg_store *store, int status) {
    assert_int_equal(status, 0);
    store->hits = 99;
}

static int put(struct place *p, const char *ns, uint8_t n) {
    uint8_t key[32] = { n }, payload[5000];
    struct cst_seg_space *space;
    struct cst_seg_store store = { .done = store_done, .payload = payload, .owner = owner };
    int r;

    assert_int_equal(
        cst_seg_space_open(p->seg, ns, CST_KIND_FLAT, CST_CLASS_LOSSLESS, "abc", 3, &space), 0);
    memset(payload, n, sizeof(payload));
    store.record =
        (struct cst_seg_record){ .type = CST_SEG_BLOCK,
                                 .space = space,
                                 .key = key,
                                 .payload_bytes = sizeof(payload),
                                 .payload_crc = cst_crc32c(0, payload, sizeof(payload)) };
    r = cst_seg_store(p->seg, &store);
    settle(p);
    assert_true(r || store.hits == 99);
    p->ref = store.ref;
    (void)cst_seg_space_unref(space);
    return r;
}

static void write_file(const char *dir, const char *name, const void *data, size_t n) {
    char path[160];
    int fd;

    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0 && write(fd, data, n) == (ssize_t)n);
    (void)close(fd);
}

/* Changes n bytes of a file; the checksum after them in a structure of `of` bytes is made right. */
static void patch(struct place *p, const char *name, size_t at, const void *data, size_t n,
                  size_t of) {
    char path[160];
    uint8_t s[512];
    int fd;

    (void)snprintf(path, sizeof(path), "%s/%s", p->dir, name);
    fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0 && pread(fd, s, of, 0) == (ssize_t)of);
    memcpy(s + at, data, n);
    cst_seg_crc_set(s, of);
    assert_true(pwrite(fd, s, of, 0) == (ssize_t)of);
    (void)close(fd);
}

static bool exists(const struct place *p, const char *name) {
    char path[160];

    (void)snprintf(path, sizeof(path), "%s/%s", p->dir, name);
    return !access(path, F_OK);
}

static void remove_named(const char *dir, const char *name) {
    char path[160];

    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    assert_int_equal(unlink(path), 0);
}

static void remove_all(const char *dir) {
    char command[160];

    (void)snprintf(command, sizeof(command), "rm -rf %s", dir);
    assert_int_equal(system(command), 0);
}

static struct place *place_new(enum cst_seg_crypt crypt) {
    struct place *p = cst_calloc(1, sizeof(*p));

    assert_non_null(p);
    (void)snprintf(p->dir, sizeof(p->dir), "/tmp/seg-open-XXXXXX");
    (void)snprintf(p->run, sizeof(p->run), "/dev/shm/seg-open-XXXXXX");
    assert_true(mkdtemp(p->dir) && mkdtemp(p->run));
    (void)snprintf(p->key, sizeof(p->key), "%s/key", p->run);
    p->runtime[0] = p->run;
    p->options = (struct cst_seg_options){ .bytes = 4 * SEGMENT,
                                           .segment_bytes = SEGMENT,
                                           .lock_ms = 1,
                                           .crypt = crypt,
                                           .runtime = p->runtime };
    return p;
}

static void place_free(struct place *p) {
    stop(p);
    remove_all(p->dir);
    remove_all(p->run);
    cst_free(p);
}

/* It has one record in a directory that was left cleanly. */
static struct place *place_used(enum cst_seg_crypt crypt) {
    struct place *p = place_new(crypt);

    assert_int_equal(start(p), 0);
    assert_int_equal(put(p, "uid-1", 1), 0);
    stop(p);
    return p;
}

static void refused(struct place *p, const char *part) {
    int r = start(p);

    if (r != CST_SEG_E_REFUSED)
        fail_msg("%d instead of \"%s\"", r, part);
    if (!strstr(p->message, part))
        fail_msg("\"%s\" doesn't say \"%s\"", p->message, part);
}

/* ---- directories ---- */

static void test_directory(void **state) {
    struct place *p = place_used(CST_SEG_CRYPT_OFF), other;
    char path[160];

    (void)state;
    assert_int_equal(start(p), 0);
    assert_int_equal(p->n_found, 1);
    other = *p; /* a second daemon */
    other.seg = NULL;
    other.aio = NULL;
    refused(&other, "another daemon");
    stop(p);
    /* nothing in it was touched: it is still warm */
    assert_int_equal(start(p), 0);
    assert_int_equal(p->n_found, 1);
    place_free(p);

    p = place_new(CST_SEG_CRYPT_OFF);
    write_file(p->dir, "thesis.tex", "x", 1);
    refused(p, "other files");
    assert_true(exists(p, "thesis.tex"));
    place_free(p);

    p = place_new(CST_SEG_CRYPT_OFF); /* a new file system is fine */
    (void)snprintf(path, sizeof(path), "%s/lost+found", p->dir);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(start(p), 0);
    place_free(p);

    p = place_new(CST_SEG_CRYPT_OFF);
    p->options.bytes = SEGMENT;
    refused(p, "two at least");
    place_free(p);
}

static void test_not_writable(void **state) {
    struct place *p = place_new(CST_SEG_CRYPT_OFF);
    uid_t uid = geteuid();

    (void)state;
    if (uid) {
        assert_int_equal(chmod(p->dir, 0500), 0);
    } else {
        assert_int_equal(chmod(p->dir, 0755), 0);
        assert_int_equal(seteuid(65534), 0);
    }
    refused(p, "isn't writable");
    assert_int_equal(seteuid(uid), 0);
    assert_int_equal(chmod(p->dir, 0700), 0);
    place_free(p);
}

static void test_formats(void **state) {
    static const uint8_t two[4] = { 2 }, bit[4] = { 4 };
    struct place *p = place_used(CST_SEG_CRYPT_OFF);
    struct cst_seg_stats stats;

    (void)state;
    patch(p, CST_DISK_SUPER_NAME, 8, two, 4, sizeof(struct cst_disk_super));
    refused(p, "format 2");
    patch(p, CST_DISK_SUPER_NAME, 8, "\1\0\0\0", 4, sizeof(struct cst_disk_super));
    patch(p, CST_DISK_SUPER_NAME, 20, bit, 4, sizeof(struct cst_disk_super)); /* incompat */
    refused(p, "start the daemon that wrote it");
    patch(p, CST_DISK_SUPER_NAME, 20, "\0\0\0\0", 4, sizeof(struct cst_disk_super));
    patch(p, CST_DISK_SUPER_NAME, 12, bit, 4, sizeof(struct cst_disk_super)); /* compat */
    assert_int_equal(start(p), 0);
    assert_int_equal(p->n_found, 1);
    stop(p);
    patch(p, CST_DISK_SUPER_NAME, 16, bit, 4, sizeof(struct cst_disk_super)); /* ro_compat */
    assert_int_equal(start(p), 0);
    assert_int_equal(p->n_found, 1);
    assert_int_equal(put(p, "uid-1", 2), CST_SEG_E_OFF);
    stop(p);
    patch(p, CST_DISK_SUPER_NAME, 16, "\0\0\0\0", 4, sizeof(struct cst_disk_super));
    /* one segment of a newer format is left alone, the rest goes on */
    patch(p, "seg-00000000", 8, two, 4, sizeof(struct cst_disk_segment));
    assert_int_equal(start(p), 0);
    cst_seg_stats(p->seg, &stats);
    assert_int_equal(stats.segments_foreign, 1);
    assert_non_null(strstr(p->notes, "left alone"));
    assert_int_equal(put(p, "uid-1", 2), 0);
    stop(p);
    patch(p, "seg-00000000", 8, "\1\0\0\0", 4, sizeof(struct cst_disk_segment));
    assert_int_equal(start(p), 0);
    assert_int_equal(p->n_found, 2); /* it was */
    place_free(p);
}

static void test_half_copied(void **state) {
    struct place *p = place_used(CST_SEG_CRYPT_OFF);
    char path[160];

    (void)state;
    (void)snprintf(path, sizeof(path), "%s/seg-00000000", p->dir);
    assert_int_equal(truncate(path, 9000), 0); /* its end is missing: footer and record */
    assert_int_equal(start(p), 0);
    assert_non_null(strstr(p->notes, "1 files of the disk tier are not as long as a segment"));
    assert_int_equal(put(p, "uid-1", 2), 0);
    stop(p);
    (void)snprintf(path, sizeof(path), "%s/seg-00000001", p->dir);
    assert_int_equal(truncate(path, 3 * SEGMENT), 0); /* grown by hand */
    p->notes[0] = 0;
    assert_int_equal(start(p), 0);
    assert_non_null(strstr(p->notes, "are not as long as a segment"));
    stop(p);
    remove_named(p->dir, "seg-00000001");
    p->notes[0] = 0;
    assert_int_equal(start(p), 0);
    assert_non_null(strstr(p->notes, "1 segments of the disk tier have no file any more"));
    assert_int_equal(put(p, "uid-1", 3), 0);
    stop(p);
    write_file(p->dir, "seg-00000002", "what is this", 12); /* not one of ours */
    assert_int_equal(start(p), 0);
    stop(p);
    write_file(p->dir, CST_DISK_SUPER_NAME, "damaged", 7);
    refused(p, "damaged");
    remove_named(p->dir, CST_DISK_SUPER_NAME);
    refused(p, "half copied");
    assert_true(exists(p, "seg-00000000"));
    place_free(p);
}

static void test_shrinks(void **state) {
    struct place *p = place_new(CST_SEG_CRYPT_OFF);
    struct cst_seg_stats stats;

    (void)state;
    p->options.bytes = 8 * SEGMENT;
    assert_int_equal(start(p), 0);
    for (uint8_t i = 0; i < 250; i++)
        assert_true(put(p, "uid-1", i) == 0 || i > 100);
    cst_seg_stats(p->seg, &stats);
    assert_int_equal(stats.segments, 8);
    stop(p);
    p->options.bytes = 3 * SEGMENT;
    assert_int_equal(start(p), 0);
    for (unsigned i = 0; i < 20; i++) {
        cst_seg_tick(p->seg);
        settle(p);
    }
    cst_seg_stats(p->seg, &stats);
    assert_int_equal(stats.segments, 3);
    assert_int_equal(put(p, "uid-1", 251), 0);
    place_free(p);
}

/* ---- keys ---- */

static void test_ephemeral(void **state) {
    struct place *p = place_used(CST_SEG_CRYPT_AES);
    char command[160];

    (void)state;
    assert_int_equal(start(p), 0);
    assert_int_equal(p->n_found, 1); /* warm over restarts */
    stop(p);
    (void)snprintf(command, sizeof(command), "rm %s/root-*", p->run); /* a reboot */
    assert_int_equal(system(command), 0);
    assert_int_equal(start(p), 0);
    assert_int_equal(p->n_found, 0);
    assert_non_null(strstr(p->notes, "ephemeral key is gone"));
    assert_int_equal(put(p, "uid-1", 2), 0);
    stop(p);
    assert_int_equal(start(p), 0);
    assert_int_equal(p->n_found, 1);
    stop(p);
    p->runtime[0] = "/"; /* no tmpfs: in memory only */
    assert_int_equal(start(p), 0);
    assert_int_equal(p->n_found, 0);
    assert_non_null(strstr(p->notes, "kept in memory"));
    place_free(p);
}

static void test_key_file(void **state) {
    struct place *p = place_new(CST_SEG_CRYPT_AES);

    (void)state;
    p->options.key_file = p->key;
    refused(p, "doesn't exist");
    write_file(p->run, "key", "short", 5);
    refused(p, "32 bytes or 64 hexadecimal");
    write_file(p->run, "key", "0123456789abcdef0123456789abcdef", 32);
    assert_int_equal(chmod(p->key, 0644), 0);
    refused(p, "chmod 0600");
    assert_int_equal(chmod(p->key, 0600), 0);
    assert_int_equal(start(p), 0);
    assert_int_equal(put(p, "uid-1", 1), 0);
    stop(p);
    /* the same key in hexadecimal */
    write_file(p->run, "key", "3031323334353637383961626364656630313233343536373839616263646566\n",
               65);
    assert_int_equal(start(p), 0);
    assert_int_equal(p->n_found, 1);
    stop(p);
    write_file(p->run, "key", "0123456789abcdef0123456789abcdeX", 32);
    refused(p, "another key file");
    p->options.key_file = NULL;
    refused(p, "with a key file");
    p->options.key_file = p->key;
    write_file(p->run, "key", "0123456789abcdef0123456789abcdef", 32);
    assert_int_equal(start(p), 0); /* nothing was lost by all that */
    assert_int_equal(p->n_found, 1);
    stop(p);
    remove_named(p->dir, CST_DISK_KEYS_NAME);
    refused(p, "keys is missing");
    write_file(p->dir, CST_DISK_KEYS_NAME, "garbage", 7);
    refused(p, "keys is damaged");
    place_free(p);
}

/* From an ephemeral key to a key file: what is on disk stays. */
static void test_key_change(void **state) {
    struct place *p = place_used(CST_SEG_CRYPT_AES);

    (void)state;
    write_file(p->run, "key", "0123456789abcdef0123456789abcdef", 32);
    p->options.key_file = p->key;
    assert_int_equal(start(p), 0);
    assert_int_equal(p->n_found, 1);
    stop(p);
    assert_int_equal(start(p), 0);
    assert_int_equal(p->n_found, 1);
    stop(p);
    p->options.crypt = CST_SEG_CRYPT_OFF;
    assert_int_equal(start(p), 0);
    assert_int_equal(p->n_found, 0);
    assert_non_null(strstr(p->notes, "are free"));
    place_free(p);
}

static void test_purge(void **state) {
    (void)state;
    for (unsigned c = 0; c < 3; c++) { /* ephemeral, key file, off */
        struct place *p = place_new(c == 2 ? CST_SEG_CRYPT_OFF : CST_SEG_CRYPT_AES);
        uint8_t old_keys[4096], copy[SEGMENT];
        enum cst_seg_erasure how;
        char path[160];
        ssize_t n;
        int fd;

        if (c == 1) {
            write_file(p->run, "key", "0123456789abcdef0123456789abcdef", 32);
            p->options.key_file = p->key;
        }
        assert_int_equal(start(p), 0);
        assert_int_equal(put(p, "uid-1", 1), 0);
        assert_int_equal(put(p, "uid-2", 2), 0);
        (void)snprintf(path, sizeof(path), "%s/%s", p->dir, CST_DISK_KEYS_NAME);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        n = fd < 0 ? 0 : read(fd, old_keys, sizeof(old_keys)); /* somebody kept a copy of it all */
        (void)close(fd);
        (void)snprintf(path, sizeof(path), "%s/seg-00000000", p->dir);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        assert_true(fd >= 0 && read(fd, copy, sizeof(copy)) == sizeof(copy));
        (void)close(fd);
        assert_int_equal(cst_seg_purge(p->seg, "uid-1", &how), 0);
        assert_int_equal(how, c ? CST_SEG_UNLINKED : CST_SEG_ERASED);
        stop(p);
        assert_int_equal(start(p), 0);
        assert_int_equal(p->n_found, 1); /* the other namespace's */
        stop(p);
        if (c < 2) { /* and puts the copy back */
            write_file(p->dir, CST_DISK_KEYS_NAME, old_keys, (size_t)n);
            write_file(p->dir, "seg-00000000", copy, sizeof(copy));
            remove_named(p->dir, CST_DISK_CHECKPOINT_NAME);
            assert_int_equal(start(p), 0);
            assert_int_equal(p->n_found, c ? 2 : 0); /* erased means erased */
        }
        place_free(p);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_directory), cmocka_unit_test(test_not_writable),
        cmocka_unit_test(test_formats),   cmocka_unit_test(test_half_copied),
        cmocka_unit_test(test_shrinks),   cmocka_unit_test(test_ephemeral),
        cmocka_unit_test(test_key_file),  cmocka_unit_test(test_key_change),
        cmocka_unit_test(test_purge),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
