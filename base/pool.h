/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of objects that are small, of few sizes and very many: close together in huge pages, so
 * that a million of them costs hundreds of page faults instead of as many as there are pages of 4
 * KiB, and their addresses fit into the TLB. What becomes free serves objects of other sizes as
 * soon as 64 KiB of it are free, and goes back to the system in pieces of CST_POOL_PAGE.
 * One thread at a time.
 */
#pragma once

#include "base/list.h"

#include <stddef.h>

enum {
    CST_POOL_PAGE = 2 << 20,
    CST_POOL_MAX = 8192, /* of an object */
    CST_POOL_GRAIN = 64, /* objects are aligned to it, and so are their sizes */
};

struct cst_pool {
    struct cst_list open[CST_POOL_MAX / CST_POOL_GRAIN + 1]; /* spans with a free place, by size */
    struct cst_list free;                                    /* spans without objects */
    size_t n_free, n_used;                                   /* spans without, with objects */
};

void cst_pool_init(struct cst_pool *pool);
/* All objects have been freed. */
void cst_pool_deinit(struct cst_pool *pool);

/* Bytes that an object of n takes. */
static inline size_t cst_pool_bytes(size_t n) {
    return cst_align_up(n, CST_POOL_GRAIN);
}

/* n zeroed bytes, at most CST_POOL_MAX; NULL: no memory. free takes NULL, and returns it. */
void *cst_pool_alloc(struct cst_pool *pool, size_t n);
void *cst_pool_free(struct cst_pool *pool, void *object);

/* Memory that a pool can be given ahead of time, as much as n pages, which is already there: any
 * thread. NULL: there is none. */
void *cst_pool_memory(size_t n_pages);
/* Takes it. */
void cst_pool_give(struct cst_pool *pool, void *memory, size_t n_pages);
/* Bytes that objects can take without asking the system. */
size_t cst_pool_ahead(const struct cst_pool *pool);
/* Gives back what has no objects. */
void cst_pool_trim(struct cst_pool *pool);
