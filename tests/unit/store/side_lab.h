/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store with frames that need side data, on a disk in memory whose operations can be made to
 * fail. One lab at a time in a test program; call reference() before the first.
 */
#pragma once

#include "tests/lib/check.h"

#include "base/crc32c.h"
#include "base/fault.h"
#include "base/mem.h"
#include "proto/key.h"
#include "store/cold.h"
#include "store/prefix_trie.h"
#include "store/seg_core.h"
#include "store/side_disk.h"
#include "tests/lib/thread_jobs.h"
#include "tests/unit/store/store_world.h"

#include <stdio.h>
#include <string.h>

enum {
    HEADS = 4,
    DIM = 64,
    TOKENS = 16,
    BLOCK = TOKENS * HEADS * DIM * 2 * 2,
    BLOCKS_OLD = 40, /* their frames need version 1 */
    BLOCKS_NEW = 12, /* version 2 */
    BLOCKS = BLOCKS_OLD + BLOCKS_NEW,
    SEGMENT = 256 << 10,
};

struct lab {
    struct cst_sim_disk *disk;
    struct cst_aio *aio;
    struct cst_manual_clock clock;
    struct cst_seeded_random random;
    struct test_jobs jobs;
    struct thread_jobs *threads; /* NULL: jobs run at once */
    struct cst_store *store;
    struct cst_space *space;
    uint64_t memory, disk_bytes, side_bytes;
    uint64_t eio_at, n_eio, n_ops; /* in recovery */
    uint32_t errors_max;
    bool recovered, jobs_first;
    uint64_t fail_at, n_allocated; /* in recovery */
    unsigned n_notes;
    char note[256];
};

static const uint8_t root[32] = { 7 };
static uint8_t keys[BLOCKS * 32];      /* two chains: old, new */
static uint8_t decoded[BLOCKS][BLOCK]; /* of their frames */

/* ---- the daemon's part ---- */

static inline size_t end_jobs(struct lab *l) {
    return l->threads ? thread_jobs_drain(l->threads, true) : test_jobs_drain(&l->jobs);
}

/* Jobs before operations, or after them: neither may matter. */
static inline void settle(struct lab *l) {
    for (unsigned idle = 0; idle < 20; idle++) {
        size_t n = l->jobs_first ? end_jobs(l) : 0;

        cst_aio_kick(l->aio);
        n += cst_aio_reap(l->aio);
        n += l->jobs_first ? 0 : end_jobs(l);
        idle = n ? 0 : idle;
    }
}

static inline void tick(struct lab *l, uint64_t s) {
    l->clock.ns += s * CST_NS_PER_S;
    (void)cst_store_tick(l->store);
    settle(l);
}

static inline void note(void *arg, const char *sentence) {
    struct lab *l = arg;

    l->n_notes++;
    (void)snprintf(l->note, sizeof(l->note), "%s", sentence);
}

static inline void recovered(void *arg, int status) {
    struct lab *l = arg;

    l->recovered = !status;
}

static inline int start(struct lab *l) {
    const struct cst_store_options options = { .memory = l->memory ? l->memory : 64 << 20,
                                               .side_bytes = l->side_bytes,
                                               .slab_bytes = 8 * BLOCK };
    const struct cst_store_env env = { .clock = &l->clock.clock,
                                       .random = &l->random.random,
                                       .jobs = l->threads ? &l->threads->jobs : &l->jobs.jobs,
                                       .mem = &world_mem };
    struct cst_encode_params klt = { .preset = CST_PRESET_KLT };
    char message[256];
    int r;

    test_jobs_init(&l->jobs, true);
    assert_int_equal(cst_aio_new_sim(&l->aio, l->disk), 0);
    assert_int_equal(cst_aio_new_fault(&l->aio, l->aio, 1), 0);
    assert_int_equal(cst_store_new(&l->store, &options, &env), 0);
    cst_store_set_preset(l->store, CST_CLASS_COLD, &klt);
    r = cst_store_disk_open(l->store,
                            &(struct cst_disk_options){ .seg = { .bytes = l->disk_bytes,
                                                                 .segment_bytes = SEGMENT,
                                                                 .buffer_bytes = 1 << 20,
                                                                 .lock_ms = 1,
                                                                 .errors_max = l->errors_max,
                                                                 .crypt = CST_SEG_CRYPT_OFF },
                                                        .aio = l->aio,
                                                        .read_bytes = 1 << 20,
                                                        .ahead_bytes = 512 << 10,
                                                        .note = note,
                                                        .note_arg = l },
                            message, sizeof(message));
    if (r)
        return r;
    l->recovered = false;
    if (l->fail_at) {
        cst_fault_join();
        cst_fault_arm(CST_FAULT_ALLOC, l->fail_at, 1);
    }
    cst_aio_fault_arm(l->aio, CST_AIO_FAULT_EIO, l->eio_at, l->n_eio);
    cst_store_disk_recover(l->store, recovered, l);
    settle(l);
    l->n_ops = cst_aio_fault_seen(l->aio);
    cst_aio_fault_arm(l->aio, CST_AIO_FAULT_NONE, 0, 0);
    if (l->fail_at) {
        l->n_allocated = cst_fault_seen(CST_FAULT_ALLOC);
        cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
        cst_fault_leave();
    }
    return l->recovered ? 0 : -1;
}

/* clean: as far as the disk goes along. */
static inline void stop(struct lab *l, bool clean) {
    uint64_t total;

    l->space = cst_space_unref(l->space);
    settle(l);
    for (unsigned i = 0; clean && i < 1000 && cst_store_drain(l->store, true, &total); i++) {
        l->clock.ns += CST_NS_PER_S / 10;
        settle(l);
    }
    settle(l);
    assert_int_equal(cst_store_jobs(l->store), 0);
    if (clean)
        (void)cst_store_disk_close(l->store);
    l->store = cst_store_free(l->store);
    l->aio = cst_aio_free(l->aio);
}

static inline struct lab lab_new(uint64_t disk_bytes) {
    struct lab l = { .disk_bytes = disk_bytes };

    cst_manual_clock_init(&l.clock, 1000);
    cst_seeded_random_init(&l.random, 1);
    assert_int_equal(cst_sim_disk_new(&l.disk, disk_bytes + (8 << 20), 1), 0);
    return l;
}

static inline void lab_end(struct lab *l) {
    stop(l, false);
    l->disk = cst_sim_disk_free(l->disk);
}

/* ---- a model ---- */

static inline struct cst_descriptor *descriptor(void) {
    struct cst_descriptor *d = cst_calloc(1, sizeof(*d));

    d->content_id[0] = 1;
    memcpy(d->engine, "test", 5);
    d->block_tokens = TOKENS;
    d->tp_size = 1;
    d->block_bytes = BLOCK;
    d->n_layers = 1;
    d->n_segments = 2;
    d->layers = cst_calloc(1, sizeof(*d->layers));
    d->segments = cst_calloc(2, sizeof(*d->segments));
    d->layers[0] = (struct cst_layer){ .kv_heads = HEADS, .head_dim_k = DIM, .head_dim_v = DIM };
    for (unsigned i = 0; i < 2; i++)
        d->segments[i] = (struct cst_segment){ .tensor = (uint8_t)i,
                                               .dtype = CST_DTYPE_F16,
                                               .offset = i * (BLOCK / 2),
                                               .length = BLOCK / 2,
                                               .token_stride = HEADS * DIM * 2,
                                               .head_stride = DIM * 2,
                                               .dim_stride = 2 };
    return d;
}

/* Its fingerprint is what recovery makes of the canonical bytes: then it is the space on disk. */
static inline struct cst_space *open_space(struct lab *l, const char *name, enum cst_class klass) {
    struct cst_descriptor *d = descriptor();
    uint8_t canonical[4096], fingerprint[32];
    size_t n = cst_descriptor_encode(d, canonical, sizeof(canonical));
    struct cst_namespace *ns;
    struct cst_space *space;
    char text[128];

    assert_null(cst_descriptor_check(d, text, sizeof(text)));
    cst_descriptor_fingerprint(canonical, n, fingerprint);
    assert_int_equal(cst_namespace_get(l->store, name, &ns), 0);
    assert_int_equal(
        cst_space_open(&space, ns, &d, cst_descriptor_free, fingerprint, CST_KIND_TOKENS, klass),
        0);
    return space;
}

/* Numbers that are alike across channels, so that a basis pays. */
static inline void fill(uint8_t out[BLOCK], const uint8_t key[32]) {
    struct cst_seeded_random r;
    uint16_t *to = (uint16_t *)(void *)out;
    uint64_t seed;

    memcpy(&seed, key, sizeof(seed));
    cst_seeded_random_init(&r, seed);
    for (unsigned row = 0; row < BLOCK / 2 / DIM; row++) {
        uint64_t common = cst_seeded_random_next(&r) & 0x3c0;

        for (unsigned i = 0; i < DIM; i++)
            *to++ = (uint16_t)(0x3800 | common | (cst_seeded_random_next(&r) & 0x3f));
    }
}

struct one_put {
    struct cst_put put;
    int status, told;
};

static inline void put_done(struct cst_put *put, int status) {
    struct one_put *p = cst_container_of(put, struct one_put, put);

    p->status = status;
    p->told++;
}

static inline void store_block(struct lab *l, struct cst_space *space, const uint8_t *parent,
                               bool is_root, uint32_t id, uint8_t key[32]) {
    struct one_put p = { .put = CST_PUT_NULL(put_done) };
    static uint8_t bytes[BLOCK];
    uint32_t tokens[TOKENS], busy;

    for (unsigned i = 0; i < TOKENS; i++)
        tokens[i] = id;
    world_key(key, parent, tokens, TOKENS);
    assert_int_equal(cst_put_begin(space, parent, is_root, key, tokens, TOKENS, &p.put, &busy), 0);
    fill(bytes, key);
    cst_put_commit(&p.put, bytes, NULL);
    settle(l);
    assert_int_equal(p.told, 1);
    assert_int_equal(p.status, 0);
}

static inline void store_chain(struct lab *l, struct cst_space *space, uint32_t first, unsigned n,
                               uint8_t *out) {
    for (unsigned i = 0; i < n; i++)
        store_block(l, space, i ? out + 32 * (i - 1) : root, i == 0, first + i, out + 32 * i);
}

struct one_fetch {
    struct cst_fetch fetch;
    int status;
};

static inline void fetch_ready(struct cst_fetch *fetch, int status) {
    cst_container_of(fetch, struct one_fetch, fetch)->status = status;
}

/* The block's bytes into out; false: a miss. */
static inline bool fetch(struct lab *l, struct cst_space *space, const uint8_t *key,
                         uint8_t out[BLOCK]) {
    struct one_fetch f = { .fetch = CST_FETCH_NULL(fetch_ready) };

    f.status = cst_fetch_start(space, key, CST_FETCH_DECODED, &f.fetch);
    if (f.status == CST_STORE_E_PENDING)
        settle(l);
    if (!f.status)
        memcpy(out, f.fetch.loc.slab->mem.base + f.fetch.loc.offset, BLOCK);
    assert_true(!f.status || f.status == CST_STORE_E_NOT_FOUND || f.status == CST_STORE_E_CORRUPT ||
                f.status < 0);
    cst_fetch_release(&f.fetch);
    return !f.status;
}

struct one_side {
    struct cst_side_put put;
    int status;
};

static inline void side_told(struct cst_side_put *put, int status) {
    cst_container_of(put, struct one_side, put)->status = status;
}

static inline int put_weights(struct lab *l, struct cst_space *space, float weight) {
    const float weights[2] = { weight, weight };
    struct one_side p = { .put.done = side_told, .status = -1 };
    int r = cst_space_side_put(space, CST_SIDE_PUT_WEIGHTS, (const uint8_t *)weights,
                               sizeof(weights), &p.put);

    settle(l);
    return r ? r : p.status;
}

static inline struct cst_block *block(const struct lab *l, unsigned i) {
    return cst_trie_find(l->space, keys + 32UL * i);
}

/* Old blocks with version 1, new ones with version 2, all packed. */
static inline void fill_lab(struct lab *l) {
    l->space = open_space(l, "a", CST_CLASS_COLD);
    store_chain(l, l->space, 100, BLOCKS_OLD, keys);
    for (unsigned i = 0; i < 100 && l->space->stats.encodes < BLOCKS_OLD; i++)
        tick(l, 1);
    assert_int_equal(put_weights(l, l->space, .5F), 0);
    store_chain(l, l->space, 1000, BLOCKS_NEW, keys + 32UL * BLOCKS_OLD);
    for (unsigned i = 0; i < 100 && l->space->stats.encodes < BLOCKS; i++)
        tick(l, 1);
    for (unsigned i = 0; i < BLOCKS; i++) {
        const struct cst_block *b = block(l, i);

        assert_true(b && b->packed.slab && b->side);
        assert_int_equal(b->side->side.version, i < BLOCKS_OLD ? 1 : 2);
    }
}

/* What the frames decode to; once. */
static inline void learn_decoded(struct lab *l) {
    for (unsigned i = 0; i < BLOCKS; i++) {
        struct cst_block *b = block(l, i);

        if (b->hot.slab) {
            cst_block_drop_hot(b);
            cst_block_settle(b, CST_EVICT_WARM);
        }
        assert_true(fetch(l, l->space, b->key, decoded[i]));
    }
}

/* How many are there; all of these are right. */
static inline unsigned check_blocks(struct lab *l, unsigned first, unsigned n) {
    static uint8_t bytes[BLOCK], want[BLOCK];
    unsigned found = 0;

    for (unsigned i = first; i < first + n; i++) {
        if (!fetch(l, l->space, keys + 32UL * i, bytes))
            continue;
        fill(want, keys + 32UL * i);
        assert_true(!memcmp(bytes, decoded[i], BLOCK) || !memcmp(bytes, want, BLOCK));
        found++;
    }
    return found;
}

static inline void reference(void) {
    struct lab l = lab_new(16 << 20);

    assert_int_equal(start(&l), 0);
    fill_lab(&l);
    learn_decoded(&l);
    assert_true(cst_side_newest(l.space)->side.len > CST_SIDE_PART); /* more than one part */
    lab_end(&l);
}

static inline struct lab restarted(struct lab *l) {
    stop(l, true);
    assert_int_equal(start(l), 0);
    l->space = open_space(l, "a", CST_CLASS_COLD);
    return *l;
}

/* The engine's next victim is this one. */
static inline void empty_segment(struct lab *l, uint32_t id) {
    struct cst_seg *seg = l->store->cold->seg;
    bool retired[64];

    for (uint32_t i = 0; i < seg->n_segments; i++) {
        retired[i] = seg->segments[i].retired;
        seg->segments[i].retired = i != id;
    }
    assert_true(cst_seg_evict_start(seg, NULL));
    for (uint32_t i = 0; i < seg->n_segments; i++)
        seg->segments[i].retired = retired[i];
    settle(l);
}
