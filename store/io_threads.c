/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The I/O backend that works everywhere: a pool of threads with pread() and pwrite().
 * Invariants: 1. an operation is in `todo`, with one thread, or in `finished`; 2. the lock guards
 * both lists and `stop` and is never held during a system call of an operation. Threads touch an
 * operation's own fields, its data and its file's descriptor, nothing else of the aio.
 */
#include "base/err.h"
#include "base/mem.h"
#include "store/io_impl.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { THREADS = 8, THREADS_MAX = 64 };

struct pool {
    struct cst_aio_posix posix;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct cst_list todo, finished;
    bool stop;
    unsigned n;
    pthread_t threads[THREADS_MAX];
};

static struct pool *pool_of(struct cst_aio *aio) {
    return cst_container_of(aio, struct pool, posix.aio);
}

static int64_t perform(const struct cst_aio_op *op) {
    int fd = op->file->fd;
    int64_t n;

    switch (op->code) {
    case CST_AIO_READ:
        n = pread(fd, op->data, op->length, (off_t)op->offset);
        break;
    case CST_AIO_WRITE:
        n = pwrite(fd, op->data, op->length, (off_t)op->offset);
        break;
    case CST_AIO_SYNC:
        n = fdatasync(fd);
        break;
    default:
        n = fallocate(fd, cst_files_fallocate_mode(op->code), (off_t)op->offset, (off_t)op->length);
        break;
    }
    return n < 0 ? -errno : n;
}

static void *work(void *arg) {
    struct pool *p = arg;
    struct cst_list *it;

    (void)prctl(PR_SET_NAME, "cistern-io");
    (void)pthread_mutex_lock(&p->lock);
    for (;;) {
        it = cst_list_first(&p->todo);
        if (it) {
            struct cst_aio_op *op = cst_list_entry(it, struct cst_aio_op, link);
            bool first;

            cst_list_unlink(it);
            (void)pthread_mutex_unlock(&p->lock);
            op->res = perform(op);
            (void)pthread_mutex_lock(&p->lock);
            first = cst_list_is_empty(&p->finished);
            cst_list_append(&p->finished, &op->link);
            if (first)
                cst_aio_signal(&p->posix.aio);
        } else if (p->stop) {
            break;
        } else {
            (void)pthread_cond_wait(&p->wake, &p->lock);
        }
    }
    (void)pthread_mutex_unlock(&p->lock);
    return NULL;
}

static void pool_start(struct cst_aio *aio, struct cst_aio_op *op) {
    struct pool *p = pool_of(aio);

    (void)pthread_mutex_lock(&p->lock);
    cst_list_append(&p->todo, &op->link);
    (void)pthread_cond_signal(&p->wake);
    (void)pthread_mutex_unlock(&p->lock);
}

static void pool_collect(struct cst_aio *aio) {
    struct pool *p = pool_of(aio);
    struct cst_list batch = CST_LIST_INIT(batch), *it;

    (void)pthread_mutex_lock(&p->lock);
    while ((it = cst_list_first(&p->finished))) {
        cst_list_unlink(it);
        cst_list_append(&batch, it);
    }
    (void)pthread_mutex_unlock(&p->lock);
    while ((it = cst_list_first(&batch))) {
        struct cst_aio_op *op = cst_list_entry(it, struct cst_aio_op, link);

        cst_list_unlink(it);
        cst_aio_ended(aio, op, op->res);
    }
}

static void pool_free(struct cst_aio *aio) {
    struct pool *p = pool_of(aio);

    (void)pthread_mutex_lock(&p->lock);
    p->stop = true;
    (void)pthread_cond_broadcast(&p->wake);
    (void)pthread_mutex_unlock(&p->lock);
    for (unsigned i = 0; i < p->n; i++)
        (void)pthread_join(p->threads[i], NULL);
    (void)pthread_cond_destroy(&p->wake);
    (void)pthread_mutex_destroy(&p->lock);
    cst_files_deinit(&p->posix);
    cst_aio_deinit(aio);
    cst_free(p);
}

static const struct cst_aio_backend pool_backend = {
    .name = "threads",
    .free = pool_free,
    .start = pool_start,
    .collect = pool_collect,
    .open = cst_files_open,
    .close = cst_files_close,
    .size = cst_files_size,
    .resize = cst_files_resize,
    .lock = cst_files_lock,
    .undirect = cst_files_undirect,
    .unlink = cst_files_unlink,
    .rename = cst_files_rename,
    .sync_directory = cst_files_sync_directory,
    .list = cst_files_list,
    .space = cst_files_space,
};

/* Signals belong to the thread that made the pool. */
static int start_thread(struct pool *p) {
    sigset_t all, old;
    int r;

    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &old);
    r = pthread_create(&p->threads[p->n], NULL, work, p);
    (void)pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (r)
        return cst_err(-r);
    p->n++;
    return 0;
}

int cst_aio_new_threads(struct cst_aio **out, const struct cst_aio_options *options) {
    unsigned n = CST_MIN(options->threads ? options->threads : THREADS, THREADS_MAX);
    struct pool *p = cst_calloc(1, sizeof(*p));
    int r;

    if (!p)
        return cst_err(-ENOMEM);
    cst_list_init(&p->todo);
    cst_list_init(&p->finished);
    (void)pthread_mutex_init(&p->lock, NULL);
    (void)pthread_cond_init(&p->wake, NULL);
    p->posix.directory = -1;
    r = cst_aio_init(&p->posix.aio, &pool_backend, options->read_depth, options->write_depth);
    if (!r)
        r = cst_files_init(&p->posix, options);
    for (unsigned i = 0; i < n && !r; i++)
        r = start_thread(p);
    if (r && p->n) /* fewer threads are slower, no reason to do without a disk */
        r = 0;
    if (r) {
        pool_free(&p->posix.aio);
        return r;
    }
    *out = &p->posix.aio;
    return 0;
}
