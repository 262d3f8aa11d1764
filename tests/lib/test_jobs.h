/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Job runners for tests, on the test's own thread. Inline: run() happens inside submit(), done()
 * when the test says so. Manual: the test decides when each job runs and when it is done, in any
 * order.
 */
#pragma once

#include "base/job.h"

#include <stdbool.h>
#include <stddef.h>

struct test_jobs {
    struct cst_jobs jobs; /* first: pass &t.jobs */
    struct cst_list waiting, ran;
    size_t n_waiting, n_ran, n_done; /* done: ever */
    bool run_inline;
};

/* Must not move afterwards. */
void test_jobs_init(struct test_jobs *t, bool run_inline);

/* run() of the i-th waiting job (i is taken modulo their number); false: none waits. */
bool test_jobs_run(struct test_jobs *t, size_t i);
/* done() of the i-th job that ran; false: none. */
bool test_jobs_done(struct test_jobs *t, size_t i);
/* Everything, and what that submits, until nothing is left. Returns how many were done. */
size_t test_jobs_drain(struct test_jobs *t);
