/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The event loop: descriptors, timers, deferred work. One thread.
 *
 * A turn is the timers that are due, one epoll_wait(), the handlers of its events, then all
 * deferred work. A handler may stop any io, its own included; it is not called again, not even in
 * the same turn. Timers are coarse: never early, late by some milliseconds.
 */
#pragma once

#include "base/clock.h"
#include "base/list.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/epoll.h>

enum { CST_LOOP_EVENTS = 64 };

struct cst_io {
    int fd; /* borrowed while started; -1 when stopped */
    uint32_t events;
    void (*ready)(struct cst_io *io, uint32_t events);
};
#define CST_IO_NULL(cb) ((struct cst_io){ .fd = -1, .ready = (cb) })

struct cst_timer {
    struct cst_list link;
    uint64_t at_ns;
    void (*fire)(struct cst_timer *timer);
};

struct cst_deferred {
    struct cst_list link;
    void (*run)(struct cst_deferred *deferred);
};

struct cst_loop {
    int epoll;
    uint64_t tick_ns; /* of the coarse clock */
    struct cst_list timers, deferred;
    struct cst_io alarm; /* a timerfd: ends a sleep when a timer is due */
    uint64_t alarm_ns;   /* when it goes off; 0: not set */
    struct epoll_event events[CST_LOOP_EVENTS];
    int n_events; /* of the turn under way */
};

/* 0 or a negative errno; deinit is safe twice and on a zeroed loop. */
int cst_loop_init(struct cst_loop *loop);
void cst_loop_deinit(struct cst_loop *loop);

int cst_io_start(struct cst_loop *loop, struct cst_io *io, int fd, uint32_t events);
/* Changes what a started io waits for; 0 waits for errors and hang-up only. */
void cst_io_set(struct cst_loop *loop, struct cst_io *io, uint32_t events);
/* Before the descriptor is closed. Safe twice. */
void cst_io_stop(struct cst_loop *loop, struct cst_io *io);

void cst_timer_init(struct cst_timer *timer, void (*fire)(struct cst_timer *timer));
/* Fires once, delay_ns from now or later; a second set moves it. */
void cst_timer_set(struct cst_loop *loop, struct cst_timer *timer, uint64_t delay_ns);
void cst_timer_stop(struct cst_timer *timer); /* safe twice */
bool cst_timer_is_set(const struct cst_timer *timer);

void cst_deferred_init(struct cst_deferred *deferred, void (*run)(struct cst_deferred *deferred));
/* Runs once at the end of this turn (or of the next, from deferred work itself). Safe twice. */
void cst_defer(struct cst_loop *loop, struct cst_deferred *deferred);
void cst_deferred_stop(struct cst_deferred *deferred);

/* One turn. 0 or a negative errno. */
int cst_loop_turn(struct cst_loop *loop);
