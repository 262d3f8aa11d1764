/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns what all backends of the I/O table have in common: depths, queues, judging results, telling.
 *
 *   submit -> queue[lane] -> start (in flight) -> ended -> again, or judged -> done()
 *
 * Invariants
 *   1. in_flight[lane] counts operations that a backend has and those in `ended`; it stays within
 *      depth[lane], so a backend never holds more than the sum of both.
 *   2. done() runs only from deliver(), so never while somebody waits in cst_aio_now(); the event
 *      descriptor is readable while `ended`, `judged` or a backend's own list holds something.
 *   3. An operation's result is judged here and nowhere else: backends report what the kernel said.
 * One thread: its owner's. Reads and the rest have queues of their own, so that a fetch never waits
 * behind a spill; so have short writes.
 */
#include "store/io.h"

#include "base/err.h"
#include "base/mem.h"
#include "store/io_impl.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { READ_DEPTH = 16, WRITE_DEPTH = 4, DEPTH_MAX = 1024 };

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

/* ---- an aio ---- */

int cst_aio_init(struct cst_aio *aio, const struct cst_aio_backend *backend, unsigned read_depth,
                 unsigned write_depth) {
    aio->backend = backend;
    for (unsigned i = 0; i < CST_COUNT(aio->queue); i++)
        cst_list_init(&aio->queue[i]);
    cst_list_init(&aio->ended);
    cst_list_init(&aio->judged);
    aio->depth[CST_AIO_READS] = CST_MIN(read_depth ? read_depth : READ_DEPTH, DEPTH_MAX);
    aio->depth[CST_AIO_WRITES] = CST_MIN(write_depth ? write_depth : WRITE_DEPTH, DEPTH_MAX);
    aio->depth[CST_AIO_SHORT_WRITES] = aio->depth[CST_AIO_WRITES];
    aio->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return aio->event_fd < 0 ? cst_err(-errno) : 0;
}

void cst_aio_deinit(struct cst_aio *aio) {
    aio->event_fd = cst_close(aio->event_fd);
}

int cst_aio_new(struct cst_aio **out, const struct cst_aio_options *options, char *why,
                size_t cap) {
    int r = CST_AIO_E_REFUSED;

    if (cap)
        why[0] = '\0';
    if (options->kind == CST_AIO_AUTO && SANITIZED)
        (void)snprintf(why, cap, "a sanitizer does not see what io_uring writes");
    else if (options->kind != CST_AIO_THREADS)
        r = cst_aio_new_uring(out, options, why, cap);
    else
        (void)snprintf(why, cap, "threads were asked for");
    if (r == CST_AIO_E_REFUSED && options->kind != CST_AIO_URING)
        r = cst_aio_new_threads(out, options);
    return r;
}

static unsigned in_flight(const struct cst_aio *aio) {
    unsigned n = 0;

    for (unsigned i = 0; i < CST_AIO_LANES; i++)
        n += aio->in_flight[i];
    return n;
}

struct cst_aio *cst_aio_free(struct cst_aio *aio) {
    if (!aio)
        return NULL;
    assert(!aio->files && !in_flight(aio));
    for (unsigned i = 0; i < CST_AIO_LANES; i++)
        assert(cst_list_is_empty(&aio->queue[i]));
    aio->backend->free(aio);
    return NULL;
}

const char *cst_aio_name(const struct cst_aio *aio) {
    return aio->backend->name;
}

void cst_aio_stats(const struct cst_aio *aio, struct cst_aio_stats *out) {
    *out = aio->stats;
    out->in_flight = in_flight(aio);
}

bool cst_aio_register(struct cst_aio *aio, void *base, size_t length) {
    unsigned i = 0;

    while (i < CST_AIO_REGIONS_MAX && aio->regions[i].base)
        i++;
    if (i == CST_AIO_REGIONS_MAX)
        return false;
    aio->regions[i] = (struct cst_aio_region){ .base = base, .length = length };
    if (aio->backend->add_region && aio->backend->add_region(aio, i))
        return aio->regions[i].registered = true;
    aio->regions[i].base = NULL;
    return false;
}

void cst_aio_unregister(struct cst_aio *aio, void *base) {
    for (unsigned i = 0; i < CST_AIO_REGIONS_MAX; i++) {
        struct cst_aio_region *region = &aio->regions[i];

        if (region->base != base || !base)
            continue;
        aio->backend->drop_region(aio, i);
        *region = (struct cst_aio_region){ .base = NULL };
    }
}

int cst_aio_region_of(const struct cst_aio *aio, const struct cst_aio_op *op) {
    const char *data = op->data;

    for (int i = 0; i < CST_AIO_REGIONS_MAX; i++) {
        const struct cst_aio_region *r = &aio->regions[i];

        if (r->registered && data >= r->base && data + op->length <= r->base + r->length)
            return i;
    }
    return -1;
}

/* ---- operations ---- */

int cst_aio_errno(int error) {
    switch (error) {
    case ENOENT:
        return CST_AIO_E_ABSENT;
    case EEXIST:
        return CST_AIO_E_EXISTS;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        return CST_AIO_E_FULL;
    default:
        return cst_err(-error);
    }
}

void cst_aio_signal(const struct cst_aio *aio) {
    uint64_t one = 1;

    if (write(aio->event_fd, &one, sizeof(one)) < 0)
        assert(errno == EAGAIN); /* the counter is full: it is readable anyway */
}

void cst_aio_ended(struct cst_aio *aio, struct cst_aio_op *op, int64_t res) {
    if (cst_list_is_empty(&aio->ended))
        cst_aio_signal(aio);
    op->res = res;
    cst_list_init(&op->link);
    cst_list_append(&aio->ended, &op->link);
}

static bool transfers(const struct cst_aio_op *op) {
    return op->code == CST_AIO_READ || op->code == CST_AIO_WRITE;
}

void cst_aio_submit(struct cst_aio *aio, struct cst_aio_op *op) {
    assert(op->done && op->file && op->file->aio == aio);
    assert(!transfers(op) || (op->length && op->length <= CST_AIO_LENGTH_MAX));
    assert(!transfers(op) || !op->file->aligned ||
           (op->offset | op->length | (uintptr_t)op->data) % CST_AIO_ALIGN == 0);
    op->tries = 0;
    cst_list_init(&op->link);
    cst_list_append(&aio->queue[cst_aio_lane(op)], &op->link);
    aio->stats.queued++;
}

static void start(struct cst_aio *aio, struct cst_aio_op *op) {
    cst_list_unlink(&op->link);
    op->tries++;
    aio->in_flight[cst_aio_lane(op)]++;
    aio->backend->start(aio, op);
}

void cst_aio_kick(struct cst_aio *aio) {
    bool any = false;

    for (unsigned lane = 0; lane < CST_COUNT(aio->queue); lane++) {
        struct cst_list *it;

        while (aio->in_flight[lane] < aio->depth[lane] &&
               (it = cst_list_first(&aio->queue[lane]))) {
            aio->stats.queued--;
            start(aio, cst_list_entry(it, struct cst_aio_op, link));
            any = true;
        }
    }
    if (any && aio->backend->flush)
        aio->backend->flush(aio);
}

int cst_aio_fd(const struct cst_aio *aio) {
    return aio->event_fd;
}

/* The file system took O_DIRECT at open and refuses its transfers. */
static bool refuses_direct(const struct cst_aio *aio, struct cst_aio_op *op) {
    return op->res == -EINVAL && transfers(op) && op->file->direct && aio->backend->undirect &&
           aio->backend->undirect(op->file);
}

static bool again(const struct cst_aio *aio, struct cst_aio_op *op) {
    if (refuses_direct(aio, op))
        return true;
    if (op->tries >= CST_AIO_TRIES)
        return false;
    return op->res == -EINTR || op->res == -EAGAIN ||
           (transfers(op) && op->res >= 0 && (uint64_t)op->res < op->length);
}

/* A file system without fallocate(): the file at least gets its size. */
static int allocate_nothing(const struct cst_aio_op *op) {
    uint64_t size, end = op->offset + op->length;
    int r = cst_aio_size(op->file, &size);

    return r || size >= end ? r : cst_aio_resize(op->file, end);
}

static int judge(const struct cst_aio_op *op) {
    if (op->res == -EOPNOTSUPP && op->code == CST_AIO_DISCARD)
        return 0;
    if (op->res == -EOPNOTSUPP && op->code == CST_AIO_ALLOCATE)
        return allocate_nothing(op);
    if (op->res < 0)
        return cst_aio_errno((int)-op->res);
    if (!transfers(op) || (uint64_t)op->res == op->length)
        return 0;
    return op->code == CST_AIO_WRITE ? CST_AIO_E_FULL : cst_err(-EIO);
}

static void count(struct cst_aio_stats *s, const struct cst_aio_op *op, int res) {
    s->errors += res != 0;
    if (res || !transfers(op))
        return;
    *(op->code == CST_AIO_READ ? &s->reads : &s->writes) += 1;
    *(op->code == CST_AIO_READ ? &s->read_bytes : &s->write_bytes) += op->length;
}

struct now {
    struct cst_aio_op op;
    int res;
    bool over;
};

static void now_done(struct cst_aio_op *op, int res) {
    struct now *now = cst_container_of(op, struct now, op);

    now->res = res;
    now->over = true;
}

/* Judges what has ended. Only cst_aio_now() is told at once. */
static void settle(struct cst_aio *aio) {
    struct cst_list batch = CST_LIST_INIT(batch), *it;
    bool retried = false;

    while ((it = cst_list_first(&aio->ended))) {
        cst_list_unlink(it);
        cst_list_append(&batch, it);
    }
    while ((it = cst_list_first(&batch))) {
        struct cst_aio_op *op = cst_list_entry(it, struct cst_aio_op, link);

        cst_list_unlink(it);
        aio->in_flight[cst_aio_lane(op)]--;
        if (again(aio, op)) {
            aio->stats.retries++;
            start(aio, op);
            retried = true;
            continue;
        }
        op->res = judge(op);
        count(&aio->stats, op, (int)op->res);
        if (op->done == now_done)
            now_done(op, (int)op->res);
        else
            cst_list_append(&aio->judged, it);
    }
    if (retried && aio->backend->flush)
        aio->backend->flush(aio);
}

/* Only what is there by now: what done() causes is told by the next call. */
static size_t deliver(struct cst_aio *aio) {
    struct cst_list batch = CST_LIST_INIT(batch), *it;
    size_t n = 0;

    while ((it = cst_list_first(&aio->judged))) {
        cst_list_unlink(it);
        cst_list_append(&batch, it);
    }
    for (; (it = cst_list_first(&batch)); n++) {
        struct cst_aio_op *op = cst_list_entry(it, struct cst_aio_op, link);

        cst_list_unlink(it);
        op->done(op, (int)op->res);
    }
    return n;
}

static void collect(struct cst_aio *aio) {
    uint64_t events;

    if (read(aio->event_fd, &events, sizeof(events)) < 0)
        assert(errno == EAGAIN);
    if (aio->backend->collect)
        aio->backend->collect(aio);
    settle(aio);
}

size_t cst_aio_reap(struct cst_aio *aio) {
    size_t n;

    collect(aio);
    n = deliver(aio);
    cst_aio_kick(aio);
    return n;
}

static bool is_idle(const struct cst_aio *aio) {
    for (unsigned i = 0; i < CST_AIO_LANES; i++)
        if (!cst_list_is_empty(&aio->queue[i]))
            return false;
    return !in_flight(aio) && cst_list_is_empty(&aio->judged);
}

size_t cst_aio_wait(struct cst_aio *aio, int timeout_ms) {
    struct pollfd p = { .fd = aio->event_fd, .events = POLLIN };
    size_t n = 0;

    cst_aio_kick(aio);
    while (!n && !is_idle(aio)) {
        int r = poll(&p, 1, timeout_ms);

        if (r == 0)
            break;
        if (r < 0 && errno != EINTR)
            break;
        n = cst_aio_reap(aio);
    }
    return n;
}

void cst_aio_drain(struct cst_aio *aio) {
    while (!is_idle(aio))
        (void)cst_aio_wait(aio, -1);
}

int cst_aio_now(struct cst_aio_file *file, enum cst_aio_code code, void *data, uint64_t offset,
                uint64_t length) {
    struct now now = { .op = { .done = now_done,
                               .file = file,
                               .code = (uint8_t)code,
                               .data = data,
                               .offset = offset,
                               .length = length } };

    struct cst_aio *aio = file->aio;
    struct pollfd p = { .fd = aio->event_fd, .events = POLLIN };

    cst_aio_submit(aio, &now.op);
    while (cst_aio_kick(aio), !now.over) {
        (void)poll(&p, 1, -1);
        collect(aio);
    }
    if (!cst_list_is_empty(&aio->judged))
        cst_aio_signal(aio);
    return now.res;
}

/* ---- files ---- */

int cst_aio_open(struct cst_aio *aio, const char *name, unsigned flags, struct cst_aio_file **out) {
    int r =
        strchr(name, '/') || !*name ? cst_err(-EINVAL) : aio->backend->open(aio, name, flags, out);

    if (r)
        return r;
    (*out)->aio = aio;
    (*out)->aligned = !(flags & CST_AIO_BUFFERED);
    aio->files++;
    return 0;
}

struct cst_aio_file *cst_aio_close(struct cst_aio_file *file) {
    if (!file)
        return NULL;
    assert(file->aio->files);
    file->aio->files--;
    file->aio->backend->close(file);
    return NULL;
}

bool cst_aio_is_direct(const struct cst_aio_file *file) {
    return file->direct;
}

int cst_aio_size(struct cst_aio_file *file, uint64_t *out) {
    return file->aio->backend->size(file, out);
}

int cst_aio_resize(struct cst_aio_file *file, uint64_t size) {
    return file->aio->backend->resize(file, size);
}

int cst_aio_lock(struct cst_aio_file *file) {
    return file->aio->backend->lock(file);
}

int cst_aio_unlink(struct cst_aio *aio, const char *name) {
    return aio->backend->unlink(aio, name);
}

int cst_aio_rename(struct cst_aio *aio, const char *from, const char *to) {
    return aio->backend->rename(aio, from, to);
}

int cst_aio_sync_directory(struct cst_aio *aio) {
    return aio->backend->sync_directory(aio);
}

int cst_aio_list(struct cst_aio *aio, int (*fn)(void *arg, const char *name), void *arg) {
    return aio->backend->list(aio, fn, arg);
}

int cst_aio_space(struct cst_aio *aio, uint64_t *out) {
    return aio->backend->space(aio, out);
}
