/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A disk tier in a glass: files in memory that lose power, faults, a manual clock, seeded
 * randomness, and a user whose records say who they are. Every payload that comes back is compared
 * with what its key stands for; anything else fails the test.
 */
#pragma once

#include "base/clock.h"
#include "base/random.h"
#include "store/io.h"
#include "store/seg.h"
#include "tests/lib/test_jobs.h"
#include "tests/lib/thread_jobs.h"

enum { SEG_ITEMS = 512, SEG_TOKENS = 16 };

struct seg_item {
    uint32_t n;
    int parent; /* item, or -1 */
    unsigned space;
    uint8_t key[32], parent_key[32];
    uint32_t tokens[SEG_TOKENS];
    uint16_t surprisals[SEG_TOKENS];
    uint64_t side;
    uint8_t *payload; /* while its store is under way */
    uint64_t bytes;
    struct cst_seg_store store;
    struct cst_seg_ref ref;
    int status;
    bool begun;  /* ever, in any run: it may be found */
    bool open;   /* its store is under way */
    bool live;   /* it has a record */
    bool acked;  /* in this run */
    bool failed; /* its store was begun and failed, and it has no record */
    float value;
    uint64_t pinned_until;
};

struct seg_world {
    struct cst_sim_disk *disk;
    struct cst_aio *aio;
    struct cst_manual_clock clock;
    struct cst_seeded_random random;
    struct test_jobs jobs;
    struct thread_jobs *threads; /* the test's: run the jobs; NULL: jobs run at once */
    struct cst_seg *seg;
    struct cst_seg_options options;
    int key_fd; /* of seg_world_key() */
    char key_path[32];
    struct cst_seg_space *spaces[3];
    struct seg_item items[SEG_ITEMS];
    bool with_faults;
    bool recovered;
    int recover_status;
    char message[256], notes[1024];
    unsigned n_notes;
    size_t n_found, n_gone, n_moved;
    /* Told of each found record. */
    void (*on_found)(struct seg_world *w, const struct cst_seg_record *record);
};

/* 256 KiB segments, 8 of them, no encryption, a disk of 4 MiB. */
struct seg_world *seg_world_new(uint64_t seed, enum cst_seg_crypt crypt);
/* Gives it a key file: what is encrypted is found by the next start. */
void seg_world_key(struct seg_world *w);
void seg_world_free(struct seg_world *w);

/* Opens and recovers; returns cst_seg_open()'s. */
int seg_world_start(struct seg_world *w);
/* Runs until nothing is under way. */
void seg_world_settle(struct seg_world *w);
/* Starts and ends what can be, without waiting. */
void seg_world_turn(struct seg_world *w);
/* Ends the engine and the aio, with or without a clean stop; the disk stays. */
void seg_world_stop(struct seg_world *w, bool clean);

/* What seg_world_store() stores, ready to be changed and stored. */
void seg_world_prepare(struct seg_world *w, uint32_t n, int parent, unsigned space, uint64_t bytes);
/* Stores item n (bytes of payload) below item parent (-1: a root); returns cst_seg_store()'s. */
int seg_world_store(struct seg_world *w, uint32_t n, int parent, unsigned space, uint64_t bytes);
/* The same and settled: how it ended. */
int seg_world_put(struct seg_world *w, uint32_t n, int parent, unsigned space, uint64_t bytes);
/* Reads item n and checks what comes; its status. */
int seg_world_read(struct seg_world *w, uint32_t n);
/* Reads all that are live; returns how many were there. */
size_t seg_world_read_all(struct seg_world *w);
size_t seg_world_live(const struct seg_world *w);
void seg_world_drop(struct seg_world *w, uint32_t n, bool destroy);
/* The payload of the item with this key. */
void seg_world_payload(uint8_t *out, uint32_t n, uint64_t bytes);
