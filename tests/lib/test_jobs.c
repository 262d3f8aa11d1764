/* SPDX-License-Identifier: Apache-2.0 */
/* Job runners of tests. Owns the order of jobs, not the jobs; one thread. */
#include "tests/lib/test_jobs.h"

static void submit(struct cst_jobs *jobs, struct cst_job *job, enum cst_job_priority priority) {
    struct test_jobs *t = cst_container_of(jobs, struct test_jobs, jobs);

    if (t->run_inline) {
        cst_list_append(&t->ran, &job->link);
        t->n_ran++;
        job->run(job);
    } else {
        cst_list_append(&t->waiting, &job->link);
        t->n_waiting++;
    }
}

void test_jobs_init(struct test_jobs *t, bool run_inline) {
    *t = (struct test_jobs){ .jobs = { submit }, .run_inline = run_inline };
    cst_list_init(&t->waiting);
    cst_list_init(&t->ran);
}

static struct cst_job *take(struct cst_list *from, size_t *n, size_t i) {
    struct cst_list *it = from->next;

    if (!*n)
        return NULL;
    for (i %= *n; i; i--)
        it = it->next;
    cst_list_unlink(it);
    --*n;
    return cst_list_entry(it, struct cst_job, link);
}

bool test_jobs_run(struct test_jobs *t, size_t i) {
    struct cst_job *job = take(&t->waiting, &t->n_waiting, i);

    if (!job)
        return false;
    cst_list_append(&t->ran, &job->link);
    t->n_ran++;
    job->run(job);
    return true;
}

bool test_jobs_done(struct test_jobs *t, size_t i) {
    struct cst_job *job = take(&t->ran, &t->n_ran, i);

    if (job) {
        t->n_done++;
        job->done(job);
    }
    return job;
}

size_t test_jobs_drain(struct test_jobs *t) {
    size_t n = 0;

    for (;;) {
        if (test_jobs_run(t, 0))
            continue;
        if (!test_jobs_done(t, 0))
            return n;
        n++;
    }
}
