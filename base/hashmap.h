/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Intrusive hash map with chaining and incremental resize: no insert moves more than a few
 * buckets, so the loop thread never stalls on a large table.
 *
 * The map owns its bucket arrays, never its entries. Hashes come from the caller; for keys that a
 * peer chooses use cst_hash_key() with a secret seed. One thread at a time.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cst_hnode {
    struct cst_hnode *next;
    uint64_t hash;
};

struct cst_hashmap {
    struct cst_hnode **buckets[2]; /* [1] is the old table while a resize is under way */
    size_t mask[2];
    size_t count;
    size_t move;     /* next bucket of [1] to move */
    size_t expected; /* entries that the next growth makes room for, at least */
};

#define CST_HASHMAP_NULL ((struct cst_hashmap){ .count = 0 })

typedef bool (*cst_hash_eq)(const struct cst_hnode *node, const void *key);

/* No allocation until the first insert. deinit is safe twice and leaves entries alone. */
void cst_hashmap_deinit(struct cst_hashmap *map);

struct cst_hnode *cst_hashmap_find(const struct cst_hashmap *map, uint64_t hash, cst_hash_eq eq,
                                   const void *key);

/* Starts loading what a find or insert of this hash will look at: the bucket, or, once that has
 * come, its first node. Only a hint: any hash will do. */
void cst_hashmap_prefetch(const struct cst_hashmap *map, uint64_t hash, bool node);

/* A hint: so many entries there will be. The next growth makes room for them at once, as growing to
 * there step by step would move each of them about once. */
void cst_hashmap_expect(struct cst_hashmap *map, size_t n);

/* The node must not be in a map, and its key not in this one. 0 or -ENOMEM (map unchanged). */
int cst_hashmap_insert(struct cst_hashmap *map, struct cst_hnode *node, uint64_t hash);

/* The node must be in this map. */
void cst_hashmap_remove(struct cst_hashmap *map, struct cst_hnode *node);

/* Heap bytes held by the bucket arrays. */
size_t cst_hashmap_bytes(const struct cst_hashmap *map);

/* Heap bytes that the next insert will add (the old table goes later). */
size_t cst_hashmap_growth(const struct cst_hashmap *map);

/* Calls fn for each node; fn may remove (and free) the node it was given, nothing else. */
void cst_hashmap_for_each(struct cst_hashmap *map, void (*fn)(struct cst_hnode *node, void *arg),
                          void *arg);

/* Keyed mix of a 32-byte key: a peer that doesn't know the seed can't build collisions. */
uint64_t cst_hash_key(const uint64_t seed[4], const uint8_t key[32]);
uint64_t cst_hash_u64(uint64_t seed, uint64_t v);
