/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the chunks. Invariants: 1. an object is either on the free list or its taker's; 2. chunks
 * only grow in number: no object moves or vanishes before deinit. The caller's lock.
 */
#include "client/client_pool.h"

#include "base/mem.h"

enum { CHUNK_OBJECTS = 64 };

struct cst_pool_chunk {
    struct cst_pool_chunk *next;
    _Alignas(16) unsigned char objects[];
};

void cst_pool_init(struct cst_pool *pool, size_t size) {
    *pool = (struct cst_pool){ .size = cst_align_up(size, 16) };
    cst_list_init(&pool->free);
}

void cst_pool_deinit(struct cst_pool *pool) {
    while (pool->chunks) {
        struct cst_pool_chunk *next = pool->chunks->next;

        pool->chunks = cst_free(pool->chunks);
        pool->chunks = next;
    }
    cst_list_init(&pool->free);
}

void *cst_pool_get(struct cst_pool *pool) {
    struct cst_list *object = cst_list_first(&pool->free);
    struct cst_pool_chunk *chunk;

    if (object) {
        cst_list_unlink(object);
        return object;
    }
    chunk = cst_calloc(1, sizeof(*chunk) + CHUNK_OBJECTS * pool->size);
    if (!chunk)
        return NULL;
    chunk->next = pool->chunks;
    pool->chunks = chunk;
    for (size_t i = CHUNK_OBJECTS; i-- > 1;)
        cst_pool_put(pool, chunk->objects + i * pool->size);
    return chunk->objects;
}

void cst_pool_put(struct cst_pool *pool, void *object) {
    cst_list_prepend(&pool->free, object);
}
