/* SPDX-License-Identifier: Apache-2.0 */
/* The worker pool: every job runs once elsewhere and ends once here; who goes first. */
#include "tests/lib/check.h"

#include "daemon/worker.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>

static struct cst_loop loop;
static struct cst_workers *workers;

static int teardown(void **state) {
    workers = cst_workers_free(workers);
    cst_loop_deinit(&loop);
    return 0;
}

static void start(unsigned n, void (*thread_start)(void)) {
    assert_int_equal(cst_loop_init(&loop), 0);
    assert_int_equal(cst_workers_new(&workers, &loop, n, thread_start), 0);
}

struct job {
    struct cst_job job;
    pthread_t ran_on;
    int runs, dones;
    sem_t *gate;    /* run() waits for it */
    sem_t *started; /* run() posts it first */
    int order;      /* of run() */
};

static _Atomic int next_order;
static int n_done;

static void run(struct cst_job *job) {
    struct job *j = cst_container_of(job, struct job, job);

    if (j->started)
        (void)sem_post(j->started);
    while (j->gate && sem_wait(j->gate))
        ;
    j->ran_on = pthread_self();
    j->order = atomic_fetch_add(&next_order, 1);
    j->runs++;
}

static void done(struct cst_job *job) {
    struct job *j = cst_container_of(job, struct job, job);

    assert_int_equal(j->runs, 1);
    j->dones++;
    n_done++;
}

static void submit(struct job *j, enum cst_job_priority priority) {
    struct cst_jobs *jobs = cst_workers_jobs(workers);

    j->job = (struct cst_job){ .run = run, .done = done };
    jobs->submit(jobs, &j->job, priority);
}

static void turn_until(int n) {
    while (n_done < n)
        assert_int_equal(cst_loop_turn(&loop), 0);
}

static void each_job_runs_and_ends_once(void **state) {
    enum { N = 500 };
    static struct job jobs[N];

    n_done = 0;
    start(3, NULL);
    for (int i = 0; i < N; i++)
        submit(&jobs[i], i % 3 ? CST_JOB_FETCH : CST_JOB_BACKGROUND);
    turn_until(N);
    for (int i = 0; i < N; i++) {
        assert_int_equal(jobs[i].runs, 1);
        assert_int_equal(jobs[i].dones, 1);
        assert_false(pthread_equal(jobs[i].ran_on, pthread_self()));
    }
}

/* One worker is held; what waits behind it starts with the fetches. */
static void fetches_go_first(void **state) {
    struct job held = { 0 }, jobs[6] = { 0 };
    sem_t gate, started;

    n_done = 0;
    (void)sem_init(&gate, 0, 0);
    (void)sem_init(&started, 0, 0);
    start(1, NULL);
    held.gate = &gate;
    held.started = &started;
    submit(&held, CST_JOB_FETCH);
    while (sem_wait(&started))
        ;
    for (int i = 0; i < 6; i++)
        submit(&jobs[i], i < 3 ? CST_JOB_BACKGROUND : CST_JOB_FETCH);
    (void)sem_post(&gate);
    turn_until(7);
    for (int i = 0; i < 3; i++)
        for (int k = 3; k < 6; k++)
            assert_true(jobs[k].order < jobs[i].order);
}

/* Two workers, three background jobs that hang: a fetch still gets through. */
static void background_work_leaves_a_worker(void **state) {
    struct job hanging[3] = { 0 }, fetch = { 0 };
    sem_t gate, started;

    n_done = 0;
    (void)sem_init(&gate, 0, 0);
    (void)sem_init(&started, 0, 0);
    start(2, NULL);
    for (int i = 0; i < 3; i++) {
        hanging[i].gate = &gate;
        hanging[i].started = &started;
        submit(&hanging[i], CST_JOB_BACKGROUND);
    }
    while (sem_wait(&started))
        ;
    submit(&fetch, CST_JOB_FETCH);
    turn_until(1);
    assert_int_equal(fetch.dones, 1);
    for (int i = 0; i < 3; i++)
        (void)sem_post(&gate);
    turn_until(4);
}

static _Atomic int started_threads;

static void count_thread(void) {
    atomic_fetch_add(&started_threads, 1);
}

static void threads_begin_with_their_hook(void **state) {
    struct job jobs[4] = { 0 };
    sem_t gate, started;

    n_done = 0;
    (void)sem_init(&gate, 0, 0);
    (void)sem_init(&started, 0, 0);
    start(4, count_thread);
    for (int i = 0; i < 4; i++) { /* holds all four: each has begun */
        jobs[i].gate = &gate;
        jobs[i].started = &started;
        submit(&jobs[i], CST_JOB_FETCH);
    }
    for (int i = 0; i < 4; i++)
        while (sem_wait(&started))
            ;
    assert_in_range(atomic_load(&started_threads), 4, 5); /* the one for long jobs, perhaps */
    for (int i = 0; i < 4; i++)
        (void)sem_post(&gate);
    turn_until(4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(each_job_runs_and_ends_once, teardown),
        cmocka_unit_test_teardown(fetches_go_first, teardown),
        cmocka_unit_test_teardown(background_work_leaves_a_worker, teardown),
        cmocka_unit_test_teardown(threads_begin_with_their_hook, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
