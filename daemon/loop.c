/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the epoll instance and one timerfd.
 *
 * Invariants
 *   1. An io with fd >= 0 is registered in the epoll set, and only then.
 *   2. Stopping an io takes its events out of the turn under way: no handler runs on a dead object.
 *   3. timers is sorted by time; the timerfd is armed for the first of them or earlier.
 *   4. Deferred work that defers again runs in the next turn, which then does not sleep.
 *
 * A timerfd instead of epoll_wait()'s timeout: a timeout needs the time before each wait, and the
 * daemon's cheapest request is a microsecond. Levels, not edges: one packet is read per event, so
 * no client starves another and no call is spent to learn that a queue is empty.
 */
#include "daemon/loop.h"

#include "base/err.h"
#include "base/macros.h"

#include <assert.h>
#include <errno.h>
#include <sys/timerfd.h>
#include <unistd.h>

static void arm(struct cst_loop *loop, uint64_t now_ns) {
    const struct cst_list *first = cst_list_first(&loop->timers);
    struct itimerspec spec = { 0 };
    uint64_t at, delay;

    if (!first)
        return;
    at = cst_list_entry(first, struct cst_timer, link)->at_ns;
    if (loop->armed_ns && loop->armed_ns <= at)
        return;
    delay = at > now_ns ? at - now_ns : 1;
    spec.it_value.tv_sec = (time_t)(delay / CST_NS_PER_S);
    spec.it_value.tv_nsec = (long)(delay % CST_NS_PER_S);
    if (!timerfd_settime(loop->timer_io.fd, 0, &spec, NULL))
        loop->armed_ns = at;
}

static void fire_due(struct cst_io *io, uint32_t events) {
    struct cst_loop *loop = cst_container_of(io, struct cst_loop, timer_io);
    uint64_t now = cst_now_ns(loop->clock), ticks;
    struct cst_list *first;

    if (read(io->fd, &ticks, sizeof(ticks)) < 0)
        return; /* a timer moved since: the wake-up is stale */
    loop->armed_ns = 0;
    while ((first = cst_list_first(&loop->timers))) {
        struct cst_timer *timer = cst_list_entry(first, struct cst_timer, link);

        if (timer->at_ns > now)
            break;
        cst_list_unlink(&timer->link);
        timer->fire(timer);
    }
    arm(loop, now);
}

int cst_loop_init(struct cst_loop *loop, const struct cst_clock *clock) {
    int fd, r;

    *loop = (struct cst_loop){ .clock = clock, .timer_io = CST_IO_NULL(fire_due) };
    cst_list_init(&loop->timers);
    cst_list_init(&loop->deferred);
    loop->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (loop->epoll < 0)
        return cst_err(-errno);
    fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    r = fd < 0 ? cst_err(-errno) : cst_io_start(loop, &loop->timer_io, fd, EPOLLIN);
    if (r) {
        cst_close(fd);
        loop->epoll = cst_close(loop->epoll);
    }
    return r;
}

void cst_loop_deinit(struct cst_loop *loop) {
    if (!loop->clock || loop->epoll < 0)
        return;
    cst_close(loop->timer_io.fd);
    loop->timer_io.fd = -1;
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
    uint64_t now = cst_now_ns(loop->clock);
    struct cst_list *at = &loop->timers;

    cst_list_unlink(&timer->link);
    timer->at_ns = now + delay_ns;
    while (at->prev != &loop->timers &&
           cst_list_entry(at->prev, struct cst_timer, link)->at_ns > timer->at_ns)
        at = at->prev;
    cst_list_insert(at, &timer->link);
    arm(loop, now);
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
    int timeout = cst_list_is_empty(&loop->deferred) ? -1 : 0;
    int n = epoll_wait(loop->epoll, loop->events, CST_LOOP_EVENTS, timeout);

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
