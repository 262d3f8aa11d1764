/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the epoll instance.
 *
 * Invariants
 *   1. An io with fd >= 0 is registered in the epoll set, and only then.
 *   2. Stopping an io takes its events out of the turn under way: no handler runs on a dead object.
 *   3. timers is sorted by time; no timer fires early.
 *   4. Deferred work that defers again runs in the next turn, which then does not sleep.
 *
 * Time is the kernel's coarse clock, read once a turn without a system call (5 ns; the precise one
 * takes 25): its tick of a few milliseconds is all that timeouts need, and a busy loop makes no
 * call but epoll_wait() and what its handlers do. Levels, not edges: one packet is read per event,
 * so no client starves another and no call is spent to learn that a queue is empty.
 */
#include "daemon/loop.h"

#include "base/err.h"
#include "base/macros.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <time.h>

static uint64_t to_ns(const struct timespec *t) {
    return (uint64_t)t->tv_sec * CST_NS_PER_S + (uint64_t)t->tv_nsec;
}

static uint64_t coarse_now(void) {
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return to_ns(&t);
}

/* Fires what is due. Returns how long epoll_wait() may sleep: not at all after a timer has fired,
 * for its work may be what the caller of the turn waits for. */
static int run_timers(struct cst_loop *loop) {
    struct cst_list *first = cst_list_first(&loop->timers);
    uint64_t now = first ? coarse_now() : 0, ms;
    bool fired = false;

    for (; first; first = cst_list_first(&loop->timers)) {
        struct cst_timer *timer = cst_list_entry(first, struct cst_timer, link);

        if (timer->at_ns > now) {
            ms = (timer->at_ns - now + CST_NS_PER_MS - 1) / CST_NS_PER_MS;
            return fired ? 0 : (int)CST_MIN(ms, (uint64_t)INT_MAX);
        }
        fired = true;
        cst_list_unlink(&timer->link);
        timer->fire(timer);
    }
    return fired ? 0 : -1;
}

int cst_loop_init(struct cst_loop *loop) {
    struct timespec tick = { 0 };

    *loop = (struct cst_loop){ .epoll = -1 };
    cst_list_init(&loop->timers);
    cst_list_init(&loop->deferred);
    (void)clock_getres(CLOCK_MONOTONIC_COARSE, &tick);
    loop->tick_ns = to_ns(&tick);
    loop->epoll = epoll_create1(EPOLL_CLOEXEC);
    return loop->epoll < 0 ? cst_err(-errno) : 0;
}

void cst_loop_deinit(struct cst_loop *loop) {
    if (loop->tick_ns)
        loop->epoll = cst_close(loop->epoll);
}

int cst_io_start(struct cst_loop *loop, struct cst_io *io, int fd, uint32_t events) {
    struct epoll_event event = { .events = events, .data.ptr = io };

    assert(io->fd < 0 && fd >= 0);
    if (epoll_ctl(loop->epoll, EPOLL_CTL_ADD, fd, &event))
        return cst_err(-errno);
    io->fd = fd;
    io->events = events;
    return 0;
}

void cst_io_set(struct cst_loop *loop, struct cst_io *io, uint32_t events) {
    struct epoll_event event = { .events = events, .data.ptr = io };

    if (io->fd < 0 || io->events == events)
        return;
    io->events = events;
    /* Can't fail for a registered descriptor: nothing is allocated. */
    (void)epoll_ctl(loop->epoll, EPOLL_CTL_MOD, io->fd, &event);
}

void cst_io_stop(struct cst_loop *loop, struct cst_io *io) {
    if (io->fd < 0)
        return;
    (void)epoll_ctl(loop->epoll, EPOLL_CTL_DEL, io->fd, NULL);
    io->fd = -1;
    for (int i = 0; i < loop->n_events; i++)
        if (loop->events[i].data.ptr == io)
            loop->events[i].data.ptr = NULL;
}

void cst_timer_init(struct cst_timer *timer, void (*fire)(struct cst_timer *timer)) {
    *timer = (struct cst_timer){ .fire = fire };
    cst_list_init(&timer->link);
}

void cst_timer_set(struct cst_loop *loop, struct cst_timer *timer, uint64_t delay_ns) {
    struct cst_list *at = &loop->timers;

    cst_list_unlink(&timer->link);
    timer->at_ns = coarse_now() + loop->tick_ns + delay_ns; /* the clock is up to a tick behind */
    while (at->prev != &loop->timers &&
           cst_list_entry(at->prev, struct cst_timer, link)->at_ns > timer->at_ns)
        at = at->prev;
    cst_list_insert(at, &timer->link);
}

void cst_timer_stop(struct cst_timer *timer) {
    cst_list_unlink(&timer->link);
}

bool cst_timer_is_set(const struct cst_timer *timer) {
    return !cst_list_is_empty(&timer->link);
}

void cst_deferred_init(struct cst_deferred *deferred, void (*run)(struct cst_deferred *deferred)) {
    *deferred = (struct cst_deferred){ .run = run };
    cst_list_init(&deferred->link);
}

void cst_defer(struct cst_loop *loop, struct cst_deferred *deferred) {
    if (cst_list_is_empty(&deferred->link))
        cst_list_append(&loop->deferred, &deferred->link);
}

void cst_deferred_stop(struct cst_deferred *deferred) {
    cst_list_unlink(&deferred->link);
}

static void run_deferred(struct cst_loop *loop) {
    struct cst_list batch, *first;

    if (cst_list_is_empty(&loop->deferred))
        return;
    cst_list_init(&batch);
    cst_list_insert(&loop->deferred, &batch); /* the batch is what stands before this mark */
    while ((first = loop->deferred.next) != &batch) {
        struct cst_deferred *deferred = cst_list_entry(first, struct cst_deferred, link);

        cst_list_unlink(first);
        deferred->run(deferred);
    }
    cst_list_unlink(&batch);
}

int cst_loop_turn(struct cst_loop *loop) {
    int timeout = run_timers(loop);
    int n = epoll_wait(loop->epoll, loop->events, CST_LOOP_EVENTS,
                       cst_list_is_empty(&loop->deferred) ? timeout : 0);

    if (n < 0)
        return errno == EINTR ? 0 : cst_err(-errno);
    loop->n_events = n;
    for (int i = 0; i < n; i++) {
        struct cst_io *io = loop->events[i].data.ptr;

        if (io)
            io->ready(io, loop->events[i].events);
    }
    loop->n_events = 0;
    run_deferred(loop);
    return 0;
}

int cst_loop_run(struct cst_loop *loop) {
    int r = 0;

    while (!loop->stopped && !r)
        r = cst_loop_turn(loop);
    return r;
}

void cst_loop_stop(struct cst_loop *loop) {
    loop->stopped = true;
}
