/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the threads that run a test's jobs.
 * Invariants: 1. a job is in one list at a time, todo or done, under the lock, or with the thread
 * that runs it; 2. done() only ever runs on the test's own thread.
 */
#include "tests/lib/thread_jobs.h"

#include "tests/lib/check.h"

static void submit(struct cst_jobs *jobs, struct cst_job *job, enum cst_job_priority priority) {
    struct thread_jobs *p = cst_container_of(jobs, struct thread_jobs, jobs);

    p->open++;
    pthread_mutex_lock(&p->lock);
    if (priority == CST_JOB_FETCH)
        cst_list_prepend(&p->todo, &job->link);
    else
        cst_list_append(&p->todo, &job->link);
    pthread_cond_signal(&p->more);
    pthread_mutex_unlock(&p->lock);
}

static void *work(void *arg) {
    struct thread_jobs *p = arg;

    pthread_mutex_lock(&p->lock);
    while (!p->stop || !cst_list_is_empty(&p->todo)) {
        struct cst_list *it = cst_list_first(&p->todo);
        struct cst_job *job;

        if (!it) {
            pthread_cond_wait(&p->more, &p->lock);
            continue;
        }
        cst_list_unlink(it);
        pthread_mutex_unlock(&p->lock);
        job = cst_list_entry(it, struct cst_job, link);
        job->run(job);
        pthread_mutex_lock(&p->lock);
        cst_list_append(&p->done, it);
        pthread_cond_signal(&p->less);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

void thread_jobs_start(struct thread_jobs *p) {
    *p = (struct thread_jobs){ .jobs = { submit } };
    assert_int_equal(pthread_mutex_init(&p->lock, NULL), 0);
    assert_int_equal(pthread_cond_init(&p->more, NULL), 0);
    assert_int_equal(pthread_cond_init(&p->less, NULL), 0);
    cst_list_init(&p->todo);
    cst_list_init(&p->done);
    for (unsigned i = 0; i < THREAD_JOBS; i++)
        assert_int_equal(pthread_create(&p->threads[i], NULL, work, p), 0);
}

size_t thread_jobs_drain(struct thread_jobs *p, bool wait) {
    for (size_t n = 0;; n++) {
        struct cst_list *it;
        struct cst_job *job;

        pthread_mutex_lock(&p->lock);
        while (wait && p->open && cst_list_is_empty(&p->done))
            pthread_cond_wait(&p->less, &p->lock);
        it = cst_list_first(&p->done);
        if (it)
            cst_list_unlink(it);
        pthread_mutex_unlock(&p->lock);
        if (!it)
            return n;
        p->open--;
        job = cst_list_entry(it, struct cst_job, link);
        job->done(job);
    }
}

void thread_jobs_stop(struct thread_jobs *p) {
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->more);
    pthread_mutex_unlock(&p->lock);
    for (unsigned i = 0; i < THREAD_JOBS; i++)
        assert_int_equal(pthread_join(p->threads[i], NULL), 0);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->more);
    pthread_cond_destroy(&p->less);
}
