/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the library thread of CISTERN_CLIENT_ASYNC, its queue of submissions and the completions.
 *
 * Invariants
 *  1. Submissions not yet drained are at most QUEUE_MAX, so the ring of completions never overflows
 *     and a caller that does not drain gets BUSY.
 *  2. The thread runs submissions one after another through the blocking functions. Between them it
 *     reads what the daemon pushes, unless another thread already reads.
 *  3. The eventfd is readable exactly while completions wait: both change under the lock.
 *
 * Threads: the client's lock guards all; wake_fd gets the thread out of poll.
 */
#include "base/mem.h"
#include "client/client.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>

enum { QUEUE_MAX = 1024 };

enum job_kind { JOB_GET, JOB_PUT, JOB_EACH };

/* Pointers are the submitter's until its completion is drained. */
struct submission {
    enum job_kind kind;
    uint64_t ticket;
    cistern_space *space; /* reference */
    const uint8_t *keys;
    size_t n;
    union {
        struct {
            void *const *blocks;
            const size_t *sizes;
        } get;
        struct {
            uint8_t parent[CISTERN_KEY_SIZE];
            bool has_parent;
            const uint32_t *tokens;
            size_t n_tokens;
            const void *const *blocks;
        } put;
        uint8_t *tiers;
    };
    int32_t *statuses;
};

struct cst_async {
    pthread_t thread;
    pthread_cond_t wake; /* with wake_fd: something to look at */
    int event_fd, wake_fd;
    bool started, stop;
    uint64_t next_ticket;
    struct submission queue[QUEUE_MAX];
    cistern_completion done[QUEUE_MAX];
    size_t queue_at, queued, done_at, n_done;
    size_t running; /* 0 or 1 */
};

/* ---- the thread ---- */

static int32_t run(const struct submission *s) {
    switch (s->kind) {
    case JOB_GET:
        return cistern_get_into(s->space, s->keys, s->n, s->get.blocks, s->get.sizes, s->statuses);
    case JOB_PUT:
        return cistern_put_from(s->space, s->put.has_parent ? s->put.parent : NULL, s->keys,
                                s->put.tokens, s->put.n_tokens, s->n, s->put.blocks, s->statuses);
    default:
        return cistern_lookup_each(s->space, s->keys, s->n, s->tiers);
    }
}

static void complete(cistern_client *c, const struct submission *s, int32_t status) {
    struct cst_async *a = c->async;

    a->running = 0;
    a->done[(a->done_at + a->n_done) % QUEUE_MAX] =
        (cistern_completion){ .ticket = s->ticket, .status = status, .n = (uint32_t)s->n };
    if (!a->n_done++)
        (void)eventfd_write(a->event_fd, 1);
    cst_client_space_unref(s->space);
}

/* Lock held, released while the submission runs. */
static void run_next(cistern_client *c) {
    struct cst_async *a = c->async;
    struct submission s = a->queue[a->queue_at];
    int32_t status;

    a->queue_at = (a->queue_at + 1) % QUEUE_MAX;
    a->queued--;
    a->running = 1;
    (void)pthread_mutex_unlock(&c->lock);
    status = run(&s);
    (void)pthread_mutex_lock(&c->lock);
    complete(c, &s, status);
}

static void wait_for_work(cistern_client *c) {
    struct cst_async *a = c->async;
    eventfd_t seen;

    if (cst_conn_is_unread(&c->conn)) {
        cst_conn_idle(c, a->wake_fd);
        cst_map_flush(c);
    } else {
        (void)pthread_cond_wait(&a->wake, &c->lock);
    }
    (void)eventfd_read(a->wake_fd, &seen);
}

static void *serve(void *arg) {
    cistern_client *c = arg;
    struct cst_async *a = c->async;

    (void)pthread_mutex_lock(&c->lock);
    while (!a->stop) {
        if (a->queued)
            run_next(c);
        else
            wait_for_work(c);
    }
    (void)pthread_mutex_unlock(&c->lock);
    return NULL;
}

void cst_async_wake(cistern_client *c) {
    if (!c->async)
        return;
    (void)eventfd_write(c->async->wake_fd, 1);
    (void)pthread_cond_signal(&c->async->wake);
}

/* ---- start and stop ---- */

/* Signals are the program's threads' business. */
static int start_thread(cistern_client *c) {
    sigset_t all, old;
    int r;

    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &old);
    r = pthread_create(&c->async->thread, NULL, serve, c);
    (void)pthread_sigmask(SIG_SETMASK, &old, NULL);
    return r;
}

int32_t cst_async_start(cistern_client *c) {
    struct cst_async *a = cst_calloc(1, sizeof(*a));
    int r;

    if (!a)
        return cst_client_fail_status(CISTERN_E_NO_MEMORY);
    a->next_ticket = 1;
    a->wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    a->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    a->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    c->async = a;
    if (a->event_fd < 0 || a->wake_fd < 0)
        return cst_client_fail(CISTERN_E_SYSTEM, "eventfd: %s", strerrordesc_np(errno));
    r = start_thread(c);
    if (r)
        return cst_client_fail(CISTERN_E_SYSTEM, "pthread_create: %s", strerrordesc_np(r));
    a->started = true;
    return CISTERN_OK;
}

void cst_async_stop(cistern_client *c) {
    struct cst_async *a = c->async;

    if (!a)
        return;
    if (a->started && !c->forked) {
        (void)pthread_mutex_lock(&c->lock);
        a->stop = true;
        cst_async_wake(c);
        (void)pthread_mutex_unlock(&c->lock);
        (void)pthread_join(a->thread, NULL);
        (void)pthread_cond_destroy(&a->wake);
    }
    cst_close(a->event_fd);
    cst_close(a->wake_fd);
    c->async = cst_free(a);
}

/* ---- public ---- */

static int32_t check_async(const cistern_client *c) {
    if (!c)
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the client is NULL");
    if (!c->async)
        return cst_client_fail(CISTERN_E_BAD_STATE,
                               "the client was opened without CISTERN_CLIENT_ASYNC");
    return cst_check_fork(c);
}

CST_EXPORT int32_t cistern_client_event_fd(cistern_client *client) {
    int32_t status = check_async(client);

    return status ? status : client->async->event_fd;
}

CST_EXPORT int32_t cistern_client_drain(cistern_client *client, cistern_completion *out,
                                        size_t cap) {
    int32_t status = check_async(client), n = 0;
    struct cst_async *a;
    eventfd_t seen;

    if (status)
        return status;
    if (cap && !out)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "out is NULL");
    a = client->async;
    (void)pthread_mutex_lock(&client->lock);
    while (a->n_done && (size_t)n < cap) {
        out[n++] = a->done[a->done_at];
        a->done_at = (a->done_at + 1) % QUEUE_MAX;
        if (!--a->n_done)
            (void)eventfd_read(a->event_fd, &seen);
    }
    (void)pthread_mutex_unlock(&client->lock);
    return n;
}

static int32_t submit(struct submission *s, uint64_t *ticket, bool pointers_ok) {
    cistern_client *c = s->space ? s->space->client : NULL;
    int32_t status = check_async(c);
    struct cst_async *a;

    if (status)
        return status;
    if (!ticket || (s->n && !pointers_ok) || s->n > UINT32_MAX)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "an argument is NULL or n too large");
    a = c->async;
    (void)pthread_mutex_lock(&c->lock);
    if (a->queued + a->running + a->n_done >= QUEUE_MAX) {
        (void)pthread_mutex_unlock(&c->lock);
        return cst_client_fail(CISTERN_E_BUSY, "%d submissions wait; drain completions first",
                               QUEUE_MAX);
    }
    s->ticket = *ticket = a->next_ticket++;
    cst_client_space_ref(s->space);
    a->queue[(a->queue_at + a->queued++) % QUEUE_MAX] = *s;
    cst_async_wake(c);
    (void)pthread_mutex_unlock(&c->lock);
    return CISTERN_OK;
}

CST_EXPORT int32_t cistern_submit_get_into(cistern_space *space, const uint8_t *keys, size_t n,
                                           void *const *blocks, const size_t *sizes,
                                           int32_t *statuses, uint64_t *ticket) {
    struct submission s = { .kind = JOB_GET,
                            .space = space,
                            .keys = keys,
                            .n = n,
                            .get = { .blocks = blocks, .sizes = sizes },
                            .statuses = statuses };

    return submit(&s, ticket, keys && blocks && sizes && statuses);
}

CST_EXPORT int32_t cistern_submit_put_from(cistern_space *space, const uint8_t *parent,
                                           const uint8_t *keys, const uint32_t *tokens,
                                           size_t n_tokens, size_t n, const void *const *blocks,
                                           int32_t *statuses, uint64_t *ticket) {
    struct submission s = {
        .kind = JOB_PUT,
        .space = space,
        .keys = keys,
        .n = n,
        .put = { .tokens = tokens, .n_tokens = n_tokens, .blocks = blocks, .has_parent = parent },
        .statuses = statuses,
    };

    if (parent)
        memcpy(s.put.parent, parent, sizeof(s.put.parent));
    return submit(&s, ticket, keys && blocks && statuses);
}

CST_EXPORT int32_t cistern_submit_lookup_each(cistern_space *space, const uint8_t *keys, size_t n,
                                              uint8_t *tiers, uint64_t *ticket) {
    struct submission s = {
        .kind = JOB_EACH, .space = space, .keys = keys, .n = n, .tiers = tiers
    };

    return submit(&s, ticket, keys && tiers);
}
