/* SPDX-License-Identifier: Apache-2.0 */
/* redis as a peer: a private server on a unix socket, no persistence, values set once. */
#pragma once

#include "bench/bench.h"

struct cst_redis;

/* -ENOENT: no redis-server; -ENOSYS: built without hiredis. */
int cst_redis_new(struct cst_redis **out, const char *dir, const void *const *values, size_t n,
                  size_t size);
struct cst_redis *cst_redis_free(struct cst_redis *redis); /* NULL ok; returns NULL */

/* A side for cst_compare(): one MGET of all values. */
int cst_redis_run(void *redis, unsigned ops);
