/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs on two threads of a test: what they share with the test's own thread shows under the thread
 * sanitizer. done() is called by thread_jobs_drain(). */
#pragma once

#include "base/job.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

enum { THREAD_JOBS = 2 };

struct thread_jobs {
    struct cst_jobs jobs;
    pthread_mutex_t lock;
    pthread_cond_t more, less;
    struct cst_list todo, done; /* under lock */
    size_t open;                /* submitted, not taken back; loop thread */
    bool stop;                  /* under lock */
    pthread_t threads[THREAD_JOBS];
};

/* Must not move afterwards. */
void thread_jobs_start(struct thread_jobs *p);
/* Takes finished jobs back; with wait until none is open. Returns how many. */
size_t thread_jobs_drain(struct thread_jobs *p, bool wait);
/* None is open. */
void thread_jobs_stop(struct thread_jobs *p);
