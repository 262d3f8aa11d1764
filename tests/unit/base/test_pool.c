/* SPDX-License-Identifier: Apache-2.0 */
/* The pool against a model that knows what is in each object, through growth and back. */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "base/pool.h"
#include "base/random.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { OBJECTS = 20000, STEPS = 100000, SPAN = 64 << 10 };

struct world {
    struct cst_pool pool;
    struct cst_seeded_random rng;
    struct {
        uint8_t *at; /* NULL: not there; all bytes are `is` */
        size_t n;
        uint8_t is;
    } objects[OBJECTS];
};

static size_t below(struct world *w, size_t n) {
    return cst_seeded_random_next(&w->rng) % n;
}

static void make(struct world *w, unsigned i, size_t n) {
    uint8_t *at = cst_pool_alloc(&w->pool, n);

    assert_non_null(at);
    assert_int_equal((uintptr_t)at % CST_POOL_GRAIN, 0);
    for (size_t k = 0; k < n; k++)
        assert_int_equal(at[k], 0);
    w->objects[i].at = at;
    w->objects[i].n = n;
    w->objects[i].is = (uint8_t)(1 + below(w, 255));
    memset(at, w->objects[i].is, n);
}

static void drop(struct world *w, unsigned i) {
    for (size_t k = 0; k < w->objects[i].n; k++)
        assert_int_equal(w->objects[i].at[k], w->objects[i].is);
    w->objects[i].at = cst_pool_free(&w->pool, w->objects[i].at);
    assert_null(w->objects[i].at);
}

static void equals_the_model(void **state) {
    static const size_t sizes[] = { 1, 64, 65, 520, 616, 2000, CST_POOL_MAX };
    struct world *w = calloc(1, sizeof(*w));

    cst_pool_init(&w->pool);
    cst_seeded_random_init(&w->rng, 1);
    for (unsigned step = 0; step < STEPS; step++) {
        unsigned i = (unsigned)below(w, OBJECTS);

        if (w->objects[i].at)
            drop(w, i);
        else
            make(w, i, sizes[below(w, CST_COUNT(sizes))]);
    }
    for (unsigned i = 0; i < OBJECTS; i++)
        if (w->objects[i].at)
            drop(w, i);
    assert_int_equal(cst_pool_ahead(&w->pool), CST_POOL_PAGE); /* all else was given back */
    cst_pool_trim(&w->pool);
    assert_int_equal(cst_pool_ahead(&w->pool), 0);
    assert_null(cst_pool_free(&w->pool, NULL));
    cst_pool_deinit(&w->pool);
    free(w);
}

/* A million objects take little more memory than their bytes, and other sizes get it next. */
static void wastes_little(void **state) {
    struct world *w = calloc(1, sizeof(*w));
    const size_t each = (SPAN - CST_POOL_GRAIN) / 640, spans = CST_POOL_PAGE / SPAN;

    cst_pool_init(&w->pool);
    cst_seeded_random_init(&w->rng, 2);
    for (unsigned i = 0; i < each * spans; i++)
        make(w, i, 600);
    assert_int_equal(cst_pool_ahead(&w->pool), 0); /* one page, without a place */
    for (unsigned i = 0; i < each; i++)
        drop(w, i);
    assert_int_equal(cst_pool_ahead(&w->pool), SPAN);
    make(w, 0, 2000);
    assert_int_equal(cst_pool_ahead(&w->pool), 0); /* in the span of the others */
    drop(w, 0);
    for (unsigned i = (unsigned)each; i < each * spans; i++)
        drop(w, i);
    cst_pool_deinit(&w->pool);
    free(w);
}

static void takes_memory_ahead(void **state) {
    struct world *w = calloc(1, sizeof(*w));

    cst_pool_init(&w->pool);
    cst_seeded_random_init(&w->rng, 3);
    cst_pool_give(&w->pool, cst_pool_memory(3), 3);
    assert_int_equal(cst_pool_ahead(&w->pool), 3 * CST_POOL_PAGE);
    make(w, 0, 100);
    assert_int_equal(cst_pool_ahead(&w->pool), 3 * CST_POOL_PAGE - SPAN);
    cst_pool_trim(&w->pool); /* the rest of the object's page stays */
    assert_int_equal(cst_pool_ahead(&w->pool), CST_POOL_PAGE - SPAN);
    drop(w, 0);
    cst_pool_deinit(&w->pool);
    free(w);
}

static void a_failed_alloc_changes_nothing(void **state) {
    struct world *w = calloc(1, sizeof(*w));

    cst_pool_init(&w->pool);
    cst_seeded_random_init(&w->rng, 4);
    cst_fault_join();
    for (unsigned nth = 1; nth <= 2; nth++) { /* the object's, the page's */
        cst_fault_arm(CST_FAULT_ALLOC, nth, 1);
        assert_null(cst_pool_alloc(&w->pool, 100));
        assert_int_equal(cst_pool_ahead(&w->pool), 0);
    }
    cst_fault_arm(CST_FAULT_ALLOC, 1, 1);
    assert_null(cst_pool_memory(1));
    cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
    cst_fault_leave();
    make(w, 0, 100);
    drop(w, 0);
    cst_pool_deinit(&w->pool);
    free(w);
}

/* How a process ends that leaves so many objects behind. */
static int end_with(unsigned n) {
    const struct rlimit no_core = { 0 };
    int status = 0;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (!pid) {
        struct cst_pool pool;

        (void)setrlimit(RLIMIT_CORE, &no_core);
        (void)close(STDERR_FILENO); /* where the assertion would speak */
        cst_pool_init(&pool);
        while (n--)
            (void)cst_pool_alloc(&pool, CST_POOL_MAX);
        cst_pool_deinit(&pool);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

/* One, a full span, a full page: what is full is in no list. */
static void what_is_left_behind_ends_the_process(void **state) {
    const unsigned each = (SPAN - CST_POOL_GRAIN) / CST_POOL_MAX,
                   n[] = { 1, each, each * (CST_POOL_PAGE / SPAN) };

    (void)state;
    assert_int_equal(end_with(0), 0);
    for (size_t i = 0; i < CST_COUNT(n); i++) {
        int status = end_with(n[i]);

        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_the_model),
        cmocka_unit_test(wastes_little),
        cmocka_unit_test(takes_memory_ahead),
        cmocka_unit_test(a_failed_alloc_changes_nothing),
        cmocka_unit_test(what_is_left_behind_ends_the_process),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
