/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store in a glass: manual clock, seeded randomness, jobs that the test steps, slabs on the heap
 * (so that the address sanitizer sees their ends), and self-identifying block bytes. With a disk
 * tier, if the test opens one: on a simulated disk that fails when the test wants it to.
 */
#pragma once

#include "base/clock.h"
#include "base/random.h"
#include "store/core.h"
#include "store/store.h"
#include "tests/lib/test_jobs.h"

enum { WORLD_TOKENS = 16, WORLD_BLOCK = 4096, WORLD_SLAB = 8 * WORLD_BLOCK };

struct world {
    struct cst_manual_clock clock;
    struct cst_seeded_random random;
    struct test_jobs jobs;
    struct cst_store *store;
    struct cst_sim_disk *disk; /* NULL: no disk tier */
    struct cst_aio *aio;       /* faults around it */
    size_t retired;            /* slab_retire() calls */
    size_t events[CST_EVENT_DETACHED + 1];
    uint8_t last_event_key[32];
    /* Told of every event, after it is counted. */
    void (*hook)(void *arg, struct cst_space *space, enum cst_event what, const uint8_t key[32]);
    void *hook_arg;
};

struct world_options {
    uint64_t seed, memory, index, max_age_ns, pin_bytes, side_bytes, learn_wait_ns;
    uint32_t spaces_max, workers;
    const char *policy;
    bool manual_jobs;
};

/* Fails the test when it can't. */
struct world *world_new(const struct world_options *options);
/* With a lossless space of tokens, which world_end() gives back. */
struct world *world_with(const struct world_options *options, struct cst_space **s);
/* Drains jobs and frees the store, and its disk. */
void world_free(struct world *w);
/* The same, and checks that nothing is left. */
void world_end(struct world *w, struct cst_space *s);
/* Runs jobs, and what the disk has to do, until nothing is left. */
void world_settle(struct world *w);

/* Opens a disk tier on a new disk of so many bytes (options.aio is set here); world_recover() ends
 * its start. */
void world_disk_open(struct world *w, uint64_t capacity, uint64_t seed,
                     struct cst_disk_options options);
void world_recover(struct world *w);
/* One turn of a loop: what has ended is told, what that submits begins. Returns how many have. */
size_t world_turn(struct world *w);
/* One thing happens, any one: a job runs, its end is told, or, one time in `slowness`, the disk
 * gets on. */
void world_get_on(struct world *w, struct cst_seeded_random *order, unsigned slowness);

/* Heap slabs of all worlds that exist now. */
extern _Atomic size_t world_slabs;
extern const struct cst_mem_ops world_mem;

/* A heap descriptor: one layer, 64-dimensional rows of 16-bit floats, K and V. `variant` changes
 * the content id. */
struct cst_descriptor *world_descriptor(unsigned variant);
struct cst_descriptor *world_descriptor_free(struct cst_descriptor *d);
struct cst_space *world_space(struct world *w, const char *ns, unsigned variant, enum cst_kind kind,
                              enum cst_class klass);

/* A key for (parent, tokens), any 32 bytes that differ will do. */
void world_key(uint8_t out[32], const uint8_t parent[32], const uint32_t *tokens, uint32_t n);
void world_key_n(uint8_t out[32], uint64_t n);

/* The bytes of a block with this key; generation tells writers of one key apart. */
void world_fill(uint8_t out[WORLD_BLOCK], const uint8_t key[32], uint32_t generation);
/* Do the fetched bytes belong to the key (any generation < n), and is their checksum right? */
bool world_bytes_are(const struct cst_location *loc, const uint8_t key[32], uint32_t n_generations);

/* A put that remembers how it ended. */
struct world_put {
    struct cst_put put;
    int status, told;
    uint8_t bytes[WORLD_BLOCK];
};
struct world_fetch {
    struct cst_fetch fetch;
    int status, told;
};
void world_put_done(struct cst_put *put, int status);
void world_fetch_ready(struct cst_fetch *fetch, int status);

/* Begin + commit + settle in one; returns begin's status or the one of the commit. */
int world_store(struct world *w, struct cst_space *space, const uint8_t *parent, bool is_root,
                const uint8_t key[32], const uint32_t *tokens, uint32_t n);
/* A chain of n full blocks of one-valued tokens from first_token on; keys: n x 32. */
void world_store_chain(struct world *w, struct cst_space *space, const uint8_t root[32],
                       uint32_t first_token, size_t n, uint8_t *keys);

/* Starts a fetch and runs jobs until it is answered: the answer is in f->status. */
void world_fetch(struct world *w, struct cst_space *space, const uint8_t key[32],
                 enum cst_fetch_mode mode, struct world_fetch *f);
/* How many of the chain's n keys are present from the start. */
size_t world_present(struct cst_space *space, const uint8_t *keys, size_t n);
/* Encodes whatever can be encoded. */
void world_pack(struct world *w);
/* Drops the hot copy of a packed block. */
void world_cool(struct cst_space *space, const uint8_t key[32]);

/* Walks everything and compares with the counters; fails the test on the first difference. */
void world_check(const struct world *w);
