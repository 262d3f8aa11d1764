/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the epoll instance and one timerfd.
 *
 * Invariants
 *   1. An io with fd >= 0 is registered in the epoll set, and only then.
 *   2. Stopping an io takes its events out of the turn under way: no handler runs on a dead object.
 *   3. timers is sorted by time; no timer fires early.
 *   4. Deferred work that defers again runs in the next turn, which then does not sleep.
 *   5. A sleep ends when the first timer is due: the alarm is set for then or earlier.
 *
 * Time is the kernel's coarse clock, read once a turn without a system call (5 ns; the precise one
 * takes 25): its tick of a few milliseconds is all that timeouts need. epoll_wait() sleeps without
 * a timeout of its own, since that one is set up and taken down in each of them, for 400 ns of the
 * 8 us that a small packet takes there and back. The alarm is set once per timer instead, and
 * never read, since only its edge is waited for. For the rest: levels, not edges: one packet is
 * read per event, so no client starves another and no call is spent to learn that a queue is empty.
 */
#include "daemon/loop.h"

#include "base/err.h"
#include "base/macros.h"

#include <assert.h>
#include <errno.h>
#include <sys/timerfd.h>
#include <time.h>

static uint64_t to_ns(const struct timespec *t) {
    return (uint64_t)t->tv_sec * CST_NS_PER_S + (uint64_t)t->tv_nsec;
}

static uint64_t coarse_now(void) {
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return to_ns(&t);
}

/* Fires what is due; true if something was. */
static bool run_timers(struct cst_loop *loop) {
    struct cst_list *first = cst_list_first(&loop->timers);
    uint64_t now = first ? coarse_now() : 0;
    bool fired = false;

    for (; first; first = cst_list_first(&loop->timers)) {
        struct cst_timer *timer = cst_list_entry(first, struct cst_timer, link);

        if (timer->at_ns > now)
            break;
        fired = true;
        cst_list_unlink(&timer->link);
        timer->fire(timer);
    }
    return fired;
}

static void alarm_went_off(struct cst_io *io, uint32_t events) {
    cst_container_of(io, struct cst_loop, alarm)->alarm_ns = 0;
}

/* A tick later than the timer: then the coarse clock, which is up to a tick behind, says so too. */
static void set_alarm(struct cst_loop *loop) {
    const struct cst_list *first = cst_list_first(&loop->timers);
    uint64_t at = first ? cst_list_entry(first, struct cst_timer, link)->at_ns + loop->tick_ns : 0;
    struct itimerspec spec = { .it_value = { .tv_sec = (time_t)(at / CST_NS_PER_S),
                                             .tv_nsec = (long)(at % CST_NS_PER_S) } };

    if (!at || (loop->alarm_ns && loop->alarm_ns <= at))
        return;
    if (!timerfd_settime(loop->alarm.fd, TFD_TIMER_ABSTIME, &spec, NULL))
        loop->alarm_ns = at;
}

int cst_loop_init(struct cst_loop *loop) {
    struct timespec tick = { 0 };
    int fd, r;

    *loop = (struct cst_loop){ .epoll = -1, .alarm = CST_IO_NULL(alarm_went_off) };
    cst_list_init(&loop->timers);
    cst_list_init(&loop->deferred);
    (void)clock_getres(CLOCK_MONOTONIC_COARSE, &tick);
    loop->tick_ns = to_ns(&tick);
    loop->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (loop->epoll < 0)
        return cst_err(-errno);
    fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    r = fd < 0 ? cst_err(-errno) : cst_io_start(loop, &loop->alarm, fd, EPOLLIN | EPOLLET);
    if (r) {
        cst_close(fd);
        loop->epoll = cst_close(loop->epoll);
    }
    return r;
}

void cst_loop_deinit(struct cst_loop *loop) {
    if (!loop->tick_ns)
        return;
    loop->alarm.fd = cst_close(loop->alarm.fd);
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
    /* what a timer did may be what the caller of the turn waits for */
    bool sleep = !run_timers(loop) && cst_list_is_empty(&loop->deferred);
    int n;

    if (sleep)
        set_alarm(loop);
    n = epoll_wait(loop->epoll, loop->events, CST_LOOP_EVENTS, sleep ? -1 : 0);
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
