/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The worker seam. A job is self-contained work: run() is called once on some worker thread and
 * touches only what the job owns or pins; done() is called once on the loop thread afterwards.
 * The daemon gives a thread pool (daemon/worker.h); tests run jobs inline or step by step.
 */
#pragma once

#include "base/list.h"

struct cst_job {
    struct cst_list link; /* the pool's, from submit to done */
    void (*run)(struct cst_job *job);
    void (*done)(struct cst_job *job);
};

enum cst_job_priority {
    CST_JOB_FETCH,      /* somebody waits: commit copies, decodes */
    CST_JOB_BACKGROUND, /* nobody waits: encode, scrub, prefault */
    CST_JOB_LONG,       /* takes seconds: learning; runs beside the others, one at a time */
    CST_JOB_PRIORITIES
};

/* submit() never fails: the pool links the job, it allocates nothing. */
struct cst_jobs {
    void (*submit)(struct cst_jobs *jobs, struct cst_job *job, enum cst_job_priority priority);
};
