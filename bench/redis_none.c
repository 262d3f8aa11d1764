/* SPDX-License-Identifier: Apache-2.0 */
/* The redis peer of a build without hiredis: says so. */
#include "bench/redis_peer.h"

#include <errno.h>

int cst_redis_new(struct cst_redis **out, const char *dir, const void *const *values, size_t n,
                  size_t size) {
    return -ENOSYS;
}

struct cst_redis *cst_redis_free(struct cst_redis *redis) {
    return NULL;
}

int cst_redis_run(void *redis, unsigned ops) {
    return -ENOSYS;
}
