/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The worker pool: base/job.h with threads.
 *
 * submit() on the loop thread; run() on a worker; done() on the loop thread, in the order in which
 * jobs finished. Fetch jobs go first; background jobs never take the last free worker when there
 * are two or more, so that a waiting client waits for one job of its own kind at most.
 */
#pragma once

#include "base/job.h"
#include "daemon/loop.h"

struct cst_workers;

/* n >= 1 threads, which call thread_start (may be NULL) first. 0 or a negative errno. */
int cst_workers_new(struct cst_workers **out, struct cst_loop *loop, unsigned n,
                    void (*thread_start)(void));
struct cst_jobs *cst_workers_jobs(struct cst_workers *workers);

/* Jobs that were submitted and are not done. */
size_t cst_workers_open(const struct cst_workers *workers);

/* No job may be open. NULL ok, returns NULL. */
struct cst_workers *cst_workers_free(struct cst_workers *workers);
