/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Objects of one size from chunks: taking and giving back one costs no heap call after the first
 * few. Memory goes back at deinit only, so a stale handle points to an object of its own kind that
 * says whether it is in use. The caller's lock guards it.
 */
#pragma once

#include "base/list.h"

#include <stddef.h>

struct cst_pool {
    struct cst_list free; /* links lie at the start of each free object */
    struct cst_pool_chunk *chunks;
    size_t size; /* of an object; it starts with a struct cst_list that the owner may use */
};

void cst_pool_init(struct cst_pool *pool, size_t size);
void cst_pool_deinit(struct cst_pool *pool); /* safe twice; every object is gone */

/* Uninitialised after the first use: the object keeps what its last owner left. A new one is zero.
 * NULL when out of memory. */
void *cst_pool_get(struct cst_pool *pool);
void cst_pool_put(struct cst_pool *pool, void *object);
