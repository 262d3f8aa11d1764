/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hashes GGUF files and remembers the digests; the contract is in content_id.h.
 *
 * Invariants
 *   1. A digest is remembered only if the file's status was the same before and after the reading.
 *   2. The cache is believed only if it is a regular file of this user that nobody else can write.
 *   3. Trouble with the cache is never an error.
 */
#include "client/llama/content_id.h"

#include "base/buf.h"
#include "base/err.h"
#include "base/macros.h"
#include "base/mem.h"
#include "base/sha256.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    CHUNK = 1 << 20,
    CACHE_MAX = 64 << 10, /* bytes; about 400 files */
    LINE = 256,
    HEX = 2 * CST_SHA256_SIZE,
    PARTS_MAX = 999,
};

/* ---- hashing ---- */

static int hash_fd(int fd, uint8_t out[CST_SHA256_SIZE]) {
    cst_auto(cst_freep) uint8_t *chunk = cst_malloc(CHUNK);
    struct cst_sha256 h;
    uint64_t total = 0;
    ssize_t n;

    if (!chunk)
        return cst_err(-ENOMEM);
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    cst_sha256_init(&h);
    for (;;) {
        n = read(fd, chunk, CHUNK);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return cst_err(-errno);
        if (total == 0 && (n < 4 || memcmp(chunk, "GGUF", 4) != 0))
            return cst_err(-EBADMSG);
        if (n == 0)
            break;
        cst_sha256_update(&h, chunk, (size_t)n);
        total += (uint64_t)n;
    }
    cst_sha256_final(&h, out);
    return 0;
}

/* ---- the cache ---- */

/* The start of a file's line: everything that must be unchanged for its digest to hold. */
static void line_start(const struct stat *st, char out[LINE]) {
    (void)snprintf(out, LINE, "%llx %llx %llx %llx.%lx %llx.%lx ", (unsigned long long)st->st_dev,
                   (unsigned long long)st->st_ino, (unsigned long long)st->st_size,
                   (unsigned long long)st->st_mtim.tv_sec, (unsigned long)st->st_mtim.tv_nsec,
                   (unsigned long long)st->st_ctim.tv_sec, (unsigned long)st->st_ctim.tv_nsec);
}

static bool cache_path(char out[PATH_MAX]) {
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n;

    if (xdg && xdg[0] == '/')
        n = snprintf(out, PATH_MAX, "%s/cistern/ids", xdg);
    else if (home && home[0] == '/')
        n = snprintf(out, PATH_MAX, "%s/.cache/cistern/ids", home);
    else
        return false;
    return n > 0 && n < PATH_MAX - 8; /* room for the temporary suffix */
}

/* The cache as a string; NULL when there is none to believe. Free with cst_free(). */
static char *cache_read(const char *path) {
    cst_auto(cst_closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    cst_auto(cst_freep) char *text = NULL;
    struct stat st;
    ssize_t n;

    if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_uid != geteuid() ||
        (st.st_mode & 022) || st.st_size > CACHE_MAX)
        return NULL;
    text = cst_malloc((size_t)st.st_size + 1);
    if (!text)
        return NULL;
    n = read(fd, text, (size_t)st.st_size);
    if (n < 0)
        return NULL;
    text[n] = '\0';
    return cst_steal(&text);
}

static int hex_digit(char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool from_hex(const char *hex, uint8_t out[CST_SHA256_SIZE]) {
    for (size_t i = 0; i < CST_SHA256_SIZE; i++) {
        int high = hex_digit(hex[2 * i]);
        int low = high < 0 ? -1 : hex_digit(hex[2 * i + 1]);

        if (low < 0)
            return false;
        out[i] = (uint8_t)(high << 4 | low);
    }
    return hex[HEX] == '\n';
}

static bool cache_find(const struct stat *st, uint8_t out[CST_SHA256_SIZE]) {
    cst_auto(cst_freep) char *text = NULL;
    char path[PATH_MAX], start[LINE];
    size_t n;

    text = cache_path(path) ? cache_read(path) : NULL;
    line_start(st, start);
    n = strlen(start);
    for (const char *line = text; line && *line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, start, n) == 0)
            return from_hex(line + n, out);
    }
    return false;
}

static void make_folders(char *path) {
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(path, 0700);
        *slash = '/';
    }
}

/* Replaces the cache in one step. */
static void cache_write(const char *path, const void *data, size_t n) {
    char temporary[PATH_MAX];
    ssize_t written;
    int fd;

    (void)snprintf(temporary, sizeof(temporary), "%.*sXXXXXX", PATH_MAX - 8, path);
    fd = mkostemp(temporary, O_CLOEXEC); /* 0600 */
    if (fd < 0)
        return;
    written = write(fd, data, n);
    (void)close(fd);
    if (written != (ssize_t)n || rename(temporary, path) < 0)
        (void)unlink(temporary);
}

/* Old lines first, as many of the newest as fit. */
static void cache_add(const struct stat *st, const uint8_t digest[CST_SHA256_SIZE]) {
    cst_auto(cst_freep) char *text = NULL;
    cst_auto(cst_buf_deinit) struct cst_buf all = CST_BUF_NULL(CACHE_MAX);
    char path[PATH_MAX], line[LINE + HEX + 2];
    const char *old;
    size_t n;

    if (!cache_path(path))
        return;
    make_folders(path);
    line_start(st, line);
    n = strlen(line);
    for (size_t i = 0; i < CST_SHA256_SIZE; i++)
        n += (size_t)snprintf(line + n, sizeof(line) - n, "%02x", digest[i]);
    line[n++] = '\n';
    text = cache_read(path);
    old = text;
    while (old && strlen(old) + n > CACHE_MAX)
        old = strchr(old, '\n') ? strchr(old, '\n') + 1 : NULL;
    if (cst_buf_append(&all, old ? old : "", old ? strlen(old) : 0) == 0 &&
        cst_buf_append(&all, line, n) == 0)
        cache_write(path, all.data, all.len);
}

/* ---- files ---- */

static bool same_file(const struct stat *a, const struct stat *b) {
    char x[LINE], y[LINE];

    line_start(a, x);
    line_start(b, y);
    return strcmp(x, y) == 0;
}

static int file_id(const char *path, uint8_t out[CST_SHA256_SIZE]) {
    cst_auto(cst_closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat before, after;
    int r;

    if (fd < 0 || fstat(fd, &before) < 0)
        return cst_err(-errno);
    if (!S_ISREG(before.st_mode))
        return cst_err(-EBADMSG);
    if (cache_find(&before, out))
        return 0;
    r = hash_fd(fd, out);
    if (r)
        return r;
    if (fstat(fd, &after) < 0)
        return cst_err(-errno);
    if (!same_file(&before, &after))
        return cst_err(-EBUSY);
    cache_add(&after, out);
    return 0;
}

/* Five digits; 0 when there are none. */
static unsigned number_at(const char *s) {
    unsigned v = 0;

    for (int i = 0; i < 5; i++) {
        if (s[i] < '0' || s[i] > '9')
            return 0;
        v = 10 * v + (unsigned)(s[i] - '0');
    }
    return v;
}

/* NAME-00001-of-00003.gguf: the length of NAME and the number of parts; 0 parts: one file. */
static unsigned parts_of(const char *path, size_t *ret_name) {
    enum { PART = 1, OF = 6, PARTS = 10, SUFFIX = 15, TAIL = 20 };
    size_t n = strlen(path);
    const char *tail;
    unsigned part, parts;

    if (n <= TAIL)
        return 0;
    tail = path + n - TAIL;
    if (tail[0] != '-' || memcmp(tail + OF, "-of-", 4) != 0 || strcmp(tail + SUFFIX, ".gguf") != 0)
        return 0;
    part = number_at(tail + PART);
    parts = number_at(tail + PARTS);
    if (part < 1 || part > parts || parts > PARTS_MAX)
        return 0;
    *ret_name = n - TAIL;
    return parts;
}

int cst_content_id(const char *path, uint8_t out[32]) {
    size_t name = 0;
    unsigned parts = parts_of(path, &name);
    struct cst_sha256 h;
    uint8_t digest[CST_SHA256_SIZE];
    char part[PATH_MAX];
    int r;

    if (parts <= 1)
        return file_id(path, out);
    cst_sha256_init(&h);
    for (unsigned i = 1; i <= parts; i++) {
        if (snprintf(part, sizeof(part), "%.*s-%05u-of-%05u.gguf", (int)name, path, i, parts) >=
            (int)sizeof(part))
            return cst_err(-ENAMETOOLONG);
        r = file_id(part, digest);
        if (r)
            return r;
        cst_sha256_update(&h, digest, sizeof(digest));
    }
    cst_sha256_final(&h, out);
    return 0;
}
