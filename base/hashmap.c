/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the bucket arrays of a hash map.
 * Invariants: 1. every node is in exactly one chain: table [1], bucket >= move, if a resize is
 * under way and its old bucket was not moved yet, else table [0]; 2. an insert moves at most
 * MOVE_STEP old buckets and a resize starts at load 1 and at least doubles, so the old table is
 * empty long before the next resize; 3. removal moves nothing, so for_each may remove.
 */
#include "base/hashmap.h"

#include "base/err.h"
#include "base/mem.h"

#include <assert.h>
#include <errno.h>

enum {
    FIRST_BUCKETS = 64,
    MOVE_STEP = 4,
    MOVE_AHEAD = 16 /* buckets whose first nodes are being loaded: each is a cache miss */
};

static struct cst_hnode **bucket_of(const struct cst_hashmap *map, uint64_t hash) {
    if (map->buckets[1]) {
        size_t old = hash & map->mask[1];

        if (old >= map->move)
            return &map->buckets[1][old];
    }
    return &map->buckets[0][hash & map->mask[0]];
}

static void move_some(struct cst_hashmap *map, size_t n) {
    while (map->buckets[1] && n--) {
        struct cst_hnode *node = map->buckets[1][map->move];

        if (map->mask[1] - map->move >= MOVE_AHEAD)
            __builtin_prefetch(map->buckets[1][map->move + MOVE_AHEAD], 1);
        map->buckets[1][map->move++] = NULL;
        while (node) {
            struct cst_hnode *next = node->next;
            struct cst_hnode **to = &map->buckets[0][node->hash & map->mask[0]];

            node->next = *to;
            *to = node;
            node = next;
        }
        if (map->move > map->mask[1])
            map->buckets[1] = cst_free(map->buckets[1]);
    }
}

static bool is_full(const struct cst_hashmap *map) {
    return !map->buckets[0] || (map->count > map->mask[0] && !map->buckets[1]);
}

static size_t grown(const struct cst_hashmap *map) {
    size_t n = map->buckets[0] ? 2 * (map->mask[0] + 1) : FIRST_BUCKETS;

    while (n < map->expected && n <= SIZE_MAX / 4 / sizeof(struct cst_hnode *))
        n *= 2;
    return n;
}

static int grow(struct cst_hashmap *map) {
    size_t n = grown(map);
    struct cst_hnode **fresh = cst_calloc(n, sizeof(*fresh));

    if (!fresh)
        return cst_err(-ENOMEM);
    assert(!map->buckets[1]);
    map->buckets[1] = map->buckets[0];
    map->mask[1] = map->mask[0];
    map->move = 0;
    map->buckets[0] = fresh;
    map->mask[0] = n - 1;
    return 0;
}

void cst_hashmap_expect(struct cst_hashmap *map, size_t n) {
    map->expected = n;
}

void cst_hashmap_deinit(struct cst_hashmap *map) {
    cst_free(map->buckets[0]);
    cst_free(map->buckets[1]);
    *map = CST_HASHMAP_NULL;
}

struct cst_hnode *cst_hashmap_find(const struct cst_hashmap *map, uint64_t hash, cst_hash_eq eq,
                                   const void *key) {
    struct cst_hnode *node;

    if (!map->buckets[0])
        return NULL;
    for (node = *bucket_of(map, hash); node; node = node->next)
        if (node->hash == hash && eq(node, key))
            return node;
    return NULL;
}

void cst_hashmap_prefetch(const struct cst_hashmap *map, uint64_t hash, bool node) {
    if (map->buckets[0])
        __builtin_prefetch(node ? (const void *)*bucket_of(map, hash) : bucket_of(map, hash));
}

int cst_hashmap_insert(struct cst_hashmap *map, struct cst_hnode *node, uint64_t hash) {
    struct cst_hnode **bucket;

    move_some(map, MOVE_STEP);
    if (is_full(map)) {
        int r = grow(map);

        if (r)
            return r;
    }
    node->hash = hash;
    bucket = bucket_of(map, hash);
    node->next = *bucket;
    *bucket = node;
    map->count++;
    return 0;
}

void cst_hashmap_remove(struct cst_hashmap *map, struct cst_hnode *node) {
    struct cst_hnode **at = bucket_of(map, node->hash);

    while (*at != node) {
        assert(*at);
        at = &(*at)->next;
    }
    *at = node->next;
    node->next = NULL;
    map->count--;
}

size_t cst_hashmap_bytes(const struct cst_hashmap *map) {
    size_t n = map->buckets[0] ? map->mask[0] + 1 : 0;

    n += map->buckets[1] ? map->mask[1] + 1 : 0;
    return n * sizeof(struct cst_hnode *);
}

size_t cst_hashmap_growth(const struct cst_hashmap *map) {
    return is_full(map) ? grown(map) * sizeof(struct cst_hnode *) : 0;
}

void cst_hashmap_for_each(struct cst_hashmap *map, void (*fn)(struct cst_hnode *node, void *arg),
                          void *arg) {
    for (int t = 0; t < 2; t++) {
        for (size_t i = 0; map->buckets[t] && i <= map->mask[t]; i++) {
            struct cst_hnode *node = map->buckets[t][i], *next;

            for (; node; node = next) {
                next = node->next;
                fn(node, arg);
            }
        }
    }
}

static uint64_t mum(uint64_t a, uint64_t b) {
    __uint128_t m = (__uint128_t)a * b;

    return (uint64_t)m ^ (uint64_t)(m >> 64);
}

uint64_t cst_hash_key(const uint64_t seed[4], const uint8_t key[32]) {
    uint64_t w[4];

    __builtin_memcpy(w, key, sizeof(w));
    return mum(mum(w[0] ^ seed[0], w[1] ^ seed[1]) ^ seed[2],
               mum(w[2] ^ seed[2], w[3] ^ seed[3]) ^ seed[0]);
}

uint64_t cst_hash_u64(uint64_t seed, uint64_t v) {
    return mum(v ^ seed, UINT64_C(0x9e3779b97f4a7c15) ^ (seed >> 32));
}
