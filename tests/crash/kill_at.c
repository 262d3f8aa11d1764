/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into the daemon by the crash tests: kill -9 at a marked point of what it does to its
 * disk. $CST_KILL_AT: WHAT WHEN N, such as "head half 7": the seventh write of a record's head ends
 * in the middle, and with it the process.
 *
 * WHAT: payload, head, segment, index, footer, keys, checkpoint, super (a write that begins so, see
 * docs/disk-format.md), read, sync, allocate, discard, rename, unlink. WHEN: before, half (of a
 * write; else as before) or after, when the kernel has done it and the daemon does not know yet.
 *
 * Invariants: 1. without $CST_KILL_AT every call goes through unchanged; 2. the marks are those of
 * the format, found in the bytes themselves: the daemon has no code for this test. Any thread.
 */
#include "base/macros.h"

#include <dlfcn.h>
#include <liburing.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum what {
    NOTHING,
    PAYLOAD,
    HEAD,
    SEGMENT,
    INDEX,
    FOOTER,
    KEYS,
    CHECKPOINT,
    SUPER,
    READ,
    SYNC,
    ALLOCATE,
    DISCARD,
    RENAME,
    UNLINK,
};

enum when { BEFORE, HALF, AFTER };

enum { SECTOR = 512 };

static const char *const whats[] = {
    [NOTHING] = "nothing", [PAYLOAD] = "payload", [HEAD] = "head",     [SEGMENT] = "segment",
    [INDEX] = "index",     [FOOTER] = "footer",   [KEYS] = "keys",     [CHECKPOINT] = "checkpoint",
    [SUPER] = "super",     [READ] = "read",       [SYNC] = "sync",     [ALLOCATE] = "allocate",
    [DISCARD] = "discard", [RENAME] = "rename",   [UNLINK] = "unlink",
};
static const char *const whens[] = { [BEFORE] = "before", [HALF] = "half", [AFTER] = "after" };

/* How a write that is no payload begins. */
static const struct magic {
    enum what what;
    const char *text;
} magics[] = {
    { HEAD, "CREC" },       { SEGMENT, "CSTSEGMT" },    { INDEX, "CIDX" },
    { FOOTER, "CSTFOOTR" }, { CHECKPOINT, "CSTCHECK" }, { KEYS, "CSTKEYS1" },
    { SUPER, "CSTSTORE" },
};

static enum what mark; /* constant after the start */
static enum when when;
static atomic_int left;

static int find(const char *const *names, size_t n, const char *name) {
    for (size_t i = 0; i < n; i++)
        if (!strcmp(names[i], name))
            return (int)i;
    (void)fprintf(stderr, "kill_at: what is %s?\n", name);
    _exit(2);
}

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("CST_KILL_AT");
    char a[16], b[16];
    int n;

    if (!text)
        return;
    if (sscanf(text, "%15s %15s %d", a, b, &n) != 3) {
        (void)fputs("kill_at: CST_KILL_AT is WHAT WHEN N\n", stderr);
        _exit(2);
    }
    mark = (enum what)find(whats, CST_COUNT(whats), a);
    when = (enum when)find(whens, CST_COUNT(whens), b);
    left = n;
}

_Noreturn static void die(void) {
    (void)kill(getpid(), SIGKILL);
    for (;;)
        (void)pause();
}

/* Whether this is the one; if it is to end before, it ends here. */
static bool is_now(enum what what) {
    if (what == NOTHING || what != mark || atomic_fetch_sub(&left, 1) != 1)
        return false;
    if (when == BEFORE)
        die();
    return true;
}

static enum what what_is(const void *data, size_t n) {
    for (size_t i = 0; i < CST_COUNT(magics); i++)
        if (n >= strlen(magics[i].text) && !memcmp(data, magics[i].text, strlen(magics[i].text)))
            return magics[i].what;
    return PAYLOAD;
}

static size_t half_of(size_t n) {
    return n / 2 / SECTOR * SECTOR;
}

/* ---- system calls ---- */

static void resolve(void *real, size_t size, const char *name) {
    void *at = dlsym(RTLD_NEXT, name);

    memcpy(real, &at, size);
}

#define REAL(name)                                                                                 \
    static __typeof__(name) *real;                                                                 \
    resolve(&real, sizeof(real), #name)

/* What ends `now` ends here, after the call. */
#define CALL(type, now, ...)                                                                       \
    bool last = now;                                                                               \
    type r = real(__VA_ARGS__);                                                                    \
    if (last)                                                                                      \
        die();                                                                                     \
    return r

CST_EXPORT ssize_t pwrite64(int fd, const void *data, size_t n, __off64_t offset) {
    REAL(pwrite64);
    bool last = is_now(what_is(data, n));
    ssize_t r = real(fd, data, last && when == HALF ? half_of(n) : n, offset);

    if (last)
        die();
    return r;
}

CST_EXPORT ssize_t pread64(int fd, void *data, size_t n, __off64_t offset) {
    REAL(pread64);
    CALL(ssize_t, is_now(READ), fd, data, n, offset);
}

CST_EXPORT int fdatasync(int fd) {
    REAL(fdatasync);
    CALL(int, is_now(SYNC), fd);
}

CST_EXPORT int fallocate64(int fd, int mode, __off64_t offset, __off64_t length) {
    REAL(fallocate64);
    CALL(int, is_now(mode & FALLOC_FL_PUNCH_HOLE ? DISCARD : ALLOCATE), fd, mode, offset, length);
}

CST_EXPORT int renameat(int from_dir, const char *from, int to_dir, const char *to) {
    REAL(renameat);
    CALL(int, is_now(RENAME), from_dir, from, to_dir, to);
}

CST_EXPORT int unlinkat(int dir, const char *name, int flags) {
    REAL(unlinkat);
    CALL(int, is_now(UNLINK), dir, name, flags);
}

/* ---- io_uring ---- */

static enum what what_is_entry(const struct io_uring_sqe *sqe) {
    switch (sqe->opcode) {
    case IORING_OP_READ:
    case IORING_OP_READ_FIXED:
        return READ;
    case IORING_OP_WRITE:
    case IORING_OP_WRITE_FIXED:
        return what_is((const void *)(uintptr_t)sqe->addr, sqe->len); /* NOLINT */
    case IORING_OP_FSYNC:
        return SYNC;
    case IORING_OP_FALLOCATE:
        return sqe->len & FALLOC_FL_PUNCH_HOLE ? DISCARD : ALLOCATE;
    default:
        return NOTHING;
    }
}

/* Until this operation has ended. Nothing is taken from the ring, so each wait is for one more. */
static void await(struct io_uring *ring, uint64_t user_data) {
    struct io_uring_cqe *all[256], *one;

    for (unsigned n = 1;; n++) {
        if (io_uring_wait_cqe_nr(ring, &one, n))
            return;
        n = io_uring_peek_batch_cqe(ring, all, CST_COUNT(all));
        for (unsigned i = 0; i < n; i++)
            if (all[i]->user_data == user_data)
                return;
    }
}

CST_EXPORT int io_uring_submit(struct io_uring *ring) {
    REAL(io_uring_submit);
    bool last = false;
    uint64_t user_data = 0;
    int r;

    for (unsigned i = ring->sq.sqe_head; mark != NOTHING && i != ring->sq.sqe_tail; i++) {
        struct io_uring_sqe *sqe = &ring->sq.sqes[i & ring->sq.ring_mask];

        if (!is_now(what_is_entry(sqe)))
            continue;
        last = true;
        user_data = sqe->user_data;
        if (when == HALF &&
            (sqe->opcode == IORING_OP_WRITE || sqe->opcode == IORING_OP_WRITE_FIXED))
            sqe->len = (unsigned)half_of(sqe->len);
    }
    r = real(ring);
    if (last) {
        await(ring, user_data);
        die();
    }
    return r;
}
