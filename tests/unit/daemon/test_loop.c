/* SPDX-License-Identifier: Apache-2.0 */
/* The event loop: descriptors that stop each other, timers in order, work at the end of a turn. */
#include "tests/lib/check.h"

#include "daemon/loop.h"

#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static struct cst_loop loop;
static char trace[256]; /* what ran, in order */

static void note(char c) {
    size_t n = strlen(trace);

    assert_true(n + 1 < sizeof(trace));
    trace[n] = c;
    trace[n + 1] = '\0';
}

static int setup(void **state) {
    trace[0] = '\0';
    assert_int_equal(cst_loop_init(&loop), 0);
    return 0;
}

static int teardown(void **state) {
    cst_loop_deinit(&loop);
    cst_loop_deinit(&loop);
    return 0;
}

/* ---- descriptors ---- */

struct peer {
    struct cst_io io;
    struct peer *other;
};

static void stop_both(struct cst_io *io, uint32_t events) {
    struct peer *p = cst_container_of(io, struct peer, io);

    note('r');
    assert_true(events & EPOLLIN);
    cst_io_stop(&loop, &p->other->io);
    cst_io_stop(&loop, &p->io);
}

/* Both are readable in one turn; whoever runs first stops the other, which must not run. */
static void a_stopped_io_is_not_called(void **state) {
    struct peer a = { .io = CST_IO_NULL(stop_both) }, b = { .io = CST_IO_NULL(stop_both) };
    int fds[2] = { eventfd(1, EFD_CLOEXEC), eventfd(1, EFD_CLOEXEC) };

    a.other = &b;
    b.other = &a;
    assert_int_equal(cst_io_start(&loop, &a.io, fds[0], EPOLLIN), 0);
    assert_int_equal(cst_io_start(&loop, &b.io, fds[1], EPOLLIN), 0);
    assert_int_equal(cst_loop_turn(&loop), 0);
    assert_string_equal(trace, "r");
    assert_int_equal(a.io.fd, -1);
    assert_int_equal(b.io.fd, -1);
    cst_io_stop(&loop, &a.io);
    close(fds[0]);
    close(fds[1]);
}

static void read_it(struct cst_io *io, uint32_t events) {
    uint64_t count;

    note('x');
    assert_int_equal(read(io->fd, &count, sizeof(count)), sizeof(count));
}

static void defer_r(struct cst_deferred *deferred) {
    note('d');
}

static void an_io_that_waits_for_nothing_is_silent(void **state) {
    struct cst_io io = CST_IO_NULL(read_it);
    struct cst_deferred once;
    int fd = eventfd(1, EFD_CLOEXEC);

    cst_deferred_init(&once, defer_r);
    assert_int_equal(cst_io_start(&loop, &io, fd, EPOLLIN), 0);
    cst_io_set(&loop, &io, 0);
    cst_defer(&loop, &once); /* so that the turn does not sleep */
    assert_int_equal(cst_loop_turn(&loop), 0);
    assert_string_equal(trace, "d");
    cst_io_set(&loop, &io, EPOLLIN);
    assert_int_equal(cst_loop_turn(&loop), 0);
    assert_string_equal(trace, "dx");
    cst_io_stop(&loop, &io);
    close(fd);
}

static void a_closed_descriptor_does_not_start(void **state) {
    struct cst_io io = CST_IO_NULL(read_it);
    int fd = eventfd(0, EFD_CLOEXEC);

    close(fd);
    assert_true(cst_io_start(&loop, &io, fd, EPOLLIN) < 0);
    assert_int_equal(io.fd, -1);
}

/* ---- timers ---- */

struct letter {
    struct cst_timer timer;
    char c;
    struct letter *stops;
    uint64_t again_ns;
};

static void fire(struct cst_timer *timer) {
    struct letter *l = cst_container_of(timer, struct letter, timer);

    note(l->c);
    if (l->stops)
        cst_timer_stop(&l->stops->timer);
    if (l->again_ns) {
        cst_timer_set(&loop, timer, l->again_ns);
        l->again_ns = 0;
    }
}

static void init_letters(struct letter *l, size_t n) {
    for (size_t i = 0; i < n; i++) {
        l[i] = (struct letter){ .c = (char)('a' + i) };
        cst_timer_init(&l[i].timer, fire);
    }
}

static void run_until(size_t n) {
    while (strlen(trace) < n)
        assert_int_equal(cst_loop_turn(&loop), 0);
}

static void timers_fire_in_the_order_of_time(void **state) {
    struct letter l[5];

    init_letters(l, 5);
    cst_timer_set(&loop, &l[0].timer, 30 * CST_NS_PER_MS);
    cst_timer_set(&loop, &l[1].timer, 10 * CST_NS_PER_MS);
    cst_timer_set(&loop, &l[2].timer, 20 * CST_NS_PER_MS);
    cst_timer_set(&loop, &l[3].timer, 0);
    cst_timer_set(&loop, &l[4].timer, 15 * CST_NS_PER_MS);
    cst_timer_set(&loop, &l[4].timer, 40 * CST_NS_PER_MS); /* moved behind all */
    run_until(5);
    assert_string_equal(trace, "dbcae");
    for (int i = 0; i < 5; i++)
        assert_false(cst_timer_is_set(&l[i].timer));
}

static void a_timer_may_stop_another_and_set_itself(void **state) {
    struct letter l[3];

    init_letters(l, 3);
    l[0].stops = &l[1];
    l[0].again_ns = 2 * CST_NS_PER_MS;
    cst_timer_set(&loop, &l[0].timer, CST_NS_PER_MS);
    cst_timer_set(&loop, &l[1].timer, CST_NS_PER_MS);
    cst_timer_set(&loop, &l[2].timer, 20 * CST_NS_PER_MS);
    run_until(3);
    assert_string_equal(trace, "aac");
}

static void no_timer_fires_early(void **state) {
    struct letter l;
    uint64_t start = cst_now_ns(&cst_clock_monotonic);

    init_letters(&l, 1);
    cst_timer_set(&loop, &l.timer, 5 * CST_NS_PER_MS);
    run_until(1);
    assert_true(cst_now_ns(&cst_clock_monotonic) - start >= 5 * CST_NS_PER_MS);
}

/* ---- deferred work ---- */

struct work {
    struct cst_deferred deferred;
    struct work *next, *stops;
    char c;
    bool again;
};

static void do_work(struct cst_deferred *deferred) {
    struct work *w = cst_container_of(deferred, struct work, deferred);

    note(w->c);
    if (w->next)
        cst_defer(&loop, &w->next->deferred);
    if (w->stops)
        cst_deferred_stop(&w->stops->deferred);
    if (w->again) {
        w->again = false;
        cst_defer(&loop, deferred);
    }
}

static void work_runs_once_at_the_end_of_the_turn(void **state) {
    struct work a = { .c = 'a' }, b = { .c = 'b' }, c = { .c = 'c' }, d = { .c = 'd' };

    cst_deferred_init(&a.deferred, do_work);
    cst_deferred_init(&b.deferred, do_work);
    cst_deferred_init(&c.deferred, do_work);
    cst_deferred_init(&d.deferred, do_work);
    a.next = &c; /* defers work: next turn */
    a.again = true;
    a.stops = &d; /* which is in the same batch */
    cst_defer(&loop, &a.deferred);
    cst_defer(&loop, &b.deferred);
    cst_defer(&loop, &a.deferred); /* safe twice */
    cst_defer(&loop, &d.deferred);
    assert_int_equal(cst_loop_turn(&loop), 0);
    assert_string_equal(trace, "ab");
    a.next = NULL;
    assert_int_equal(cst_loop_turn(&loop), 0);
    assert_string_equal(trace, "abca");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_stopped_io_is_not_called, setup, teardown),
        cmocka_unit_test_setup_teardown(an_io_that_waits_for_nothing_is_silent, setup, teardown),
        cmocka_unit_test_setup_teardown(a_closed_descriptor_does_not_start, setup, teardown),
        cmocka_unit_test_setup_teardown(timers_fire_in_the_order_of_time, setup, teardown),
        cmocka_unit_test_setup_teardown(a_timer_may_stop_another_and_set_itself, setup, teardown),
        cmocka_unit_test_setup_teardown(no_timer_fires_early, setup, teardown),
        cmocka_unit_test_setup_teardown(work_runs_once_at_the_end_of_the_turn, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
