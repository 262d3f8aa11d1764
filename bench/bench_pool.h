/* SPDX-License-Identifier: Apache-2.0 */
/* Worker threads for benchmarks of the store: struct cst_jobs over two of them, done() on the
 * caller's thread. */
#pragma once

#include "base/job.h"

#include <stdbool.h>
#include <stddef.h>

struct bench_pool;

int bench_pool_new(struct bench_pool **out);
struct bench_pool *bench_pool_free(struct bench_pool *pool);
struct cst_jobs *bench_pool_jobs(struct bench_pool *pool);
int bench_pool_fd(const struct bench_pool *pool); /* readable while jobs have run */
void bench_pool_reap(struct bench_pool *pool);    /* their done() */
