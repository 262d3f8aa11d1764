/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns an engine, its directory and an item for each frame that may be in the tier. Invariants:
 * 1. frame number n is item n % n_items, which is dropped before it is used again; 2. random bytes
 * and time are the same for every engine. Why not the store above it: what is measured is the way
 * between memory and disk.
 */
#include "bench/spill_engine.h"

#include "base/crc32c.h"
#include "base/mem.h"
#include "bench/bench_pool.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct item {
    struct cst_seg_store store;
    struct cst_seg_read read;
    struct spill_engine *engine;
    struct cst_seg_ref ref;
    size_t number; /* of the frame */
    uint8_t key[32];
    bool live;
};

struct spill_engine {
    char dir[256];
    const struct spill_frames *frames;
    struct cst_seeded_random random;
    struct cst_aio *aio;
    struct cst_seg *seg;
    struct cst_seg_space *space;
    struct bench_pool *pool;
    struct item *items; /* owned */
    size_t n_items, next, open, failed;
    bool recovered;
};

int spill_frames_init(struct spill_frames *f) {
    struct cst_seeded_random random;

    f->frames = cst_map(SPILL_BATCH * SPILL_FRAME);
    f->buffers = cst_map(SPILL_BATCH * SPILL_BUFFER);
    if (!f->frames || !f->buffers)
        return -ENOMEM;
    cst_seeded_random_init(&random, 1);
    for (size_t i = 0; i < SPILL_BATCH; i++) {
        (void)random.random.fill(&random.random, f->frames + i * SPILL_FRAME, SPILL_FRAME);
        f->crc[i] = cst_crc32c(0, f->frames + i * SPILL_FRAME, SPILL_FRAME);
    }
    return 0;
}

void spill_frames_deinit(struct spill_frames *f) {
    f->frames = cst_unmap(f->frames, SPILL_BATCH * SPILL_FRAME);
    f->buffers = cst_unmap(f->buffers, SPILL_BATCH * SPILL_BUFFER);
}

/* ---- the engine's user ---- */

static int found(void *arg, const struct cst_seg_record *r, struct cst_seg_ref ref, void **owner) {
    return CST_SEG_E_GONE;
}

static void moved(void *arg, void *owner, struct cst_seg_ref ref) {
    ((struct item *)owner)->ref = ref;
}

static void gone(void *arg, void *owner, enum cst_seg_gone why) {
    ((struct item *)owner)->live = false;
}

/* The oldest goes first. */
static float value(void *arg, void *owner, bool *has_children) {
    const struct item *item = owner;

    *has_children = false;
    return (float)(1.0 / (double)(item->engine->next - item->number));
}

static void recovered(void *arg, int status) {
    ((struct spill_engine *)arg)->recovered = true;
}

static uint64_t no_time(void) {
    return 1;
}

static void turn(struct spill_engine *e) {
    struct pollfd fds[2] = { { .fd = cst_aio_fd(e->aio), .events = POLLIN },
                             { .fd = bench_pool_fd(e->pool), .events = POLLIN } };

    cst_aio_kick(e->aio);
    if (poll(fds, 2, 100) < 0)
        return;
    bench_pool_reap(e->pool);
    if (fds[0].revents)
        (void)cst_aio_reap(e->aio);
}

/* ---- frames ---- */

static void stored(struct cst_seg_store *store, int status) {
    struct item *item = cst_container_of(store, struct item, store);

    item->engine->open--;
    item->engine->failed += status != 0;
    item->live = !status;
    item->ref = cst_seg_store_ref(store);
}

static int store_one(struct spill_engine *e) {
    struct item *item = &e->items[e->next % e->n_items];
    size_t frame = e->next % SPILL_BATCH;
    int r;

    if (item->live)
        cst_seg_drop(e->seg, item->ref, false);
    *item = (struct item){ .engine = e, .number = e->next };
    memcpy(item->key, &e->next, sizeof(e->next));
    item->store = (struct cst_seg_store){
        .done = stored,
        .payload = e->frames->frames + frame * SPILL_FRAME,
        .owner = item,
        .record = { .type = CST_SEG_BLOCK,
                    .space = e->space,
                    .key = item->key,
                    .payload_bytes = SPILL_FRAME,
                    .payload_crc = e->frames->crc[frame],
                    .block_crc = e->frames->crc[frame] },
    };
    r = cst_seg_store(e->seg, &item->store);
    if (!r) {
        e->next++;
        e->open++;
    }
    return r;
}

int spill_engine_write(struct spill_engine *e, size_t n) {
    size_t end = e->next + n;

    while (e->next < end || e->open) {
        int r = e->next < end ? store_one(e) : CST_SEG_E_BUSY;

        if (!r)
            continue;
        if (r != CST_SEG_E_BUSY && r != CST_SEG_E_FULL)
            return r < 0 ? r : -EIO;
        if (!e->open && r == CST_SEG_E_FULL)
            cst_seg_tick(e->seg);
        turn(e);
    }
    return e->failed ? -EIO : 0;
}

void spill_engine_settle(struct spill_engine *e) {
    while (cst_seg_busy(e->seg))
        turn(e);
}

static void was_read(struct cst_seg_read *read, int status) {
    struct item *item = cst_container_of(read, struct item, read);

    item->engine->open--;
    item->engine->failed += status != 0;
}

int spill_engine_read(struct spill_engine *e) {
    for (size_t i = 0; i < SPILL_BATCH; i++) {
        struct item *item = &e->items[(e->next - SPILL_BATCH + i) % e->n_items];

        item->read = (struct cst_seg_read){ .done = was_read,
                                            .ref = item->ref,
                                            .key = item->key,
                                            .buffer = e->frames->buffers + i * SPILL_BUFFER };
        e->open++;
        cst_seg_read(e->seg, &item->read);
    }
    while (e->open)
        turn(e);
    return e->failed ? -EIO : 0;
}

/* ---- life ---- */

static int open_seg(struct spill_engine *e, enum cst_aio_kind kind, enum cst_seg_crypt crypt) {
    const struct cst_aio_options io = { .directory = e->dir,
                                        .kind = kind,
                                        .read_depth = SPILL_READ_DEPTH,
                                        .write_depth = SPILL_WRITE_DEPTH };
    const struct cst_seg_options options = { .bytes = SPILL_TIER, .crypt = crypt };
    struct cst_seg_env env = {
        .clock = &cst_clock_monotonic,
        .unix_s = no_time,
        .random = &e->random.random,
        .jobs = bench_pool_jobs(e->pool),
        .user = { .found = found, .value = value, .moved = moved, .gone = gone, .arg = e }
    };
    char message[256] = "";
    int r = cst_aio_new(&e->aio, &io, message, sizeof(message));

    env.aio = e->aio;
    if (!r)
        r = cst_seg_open(&e->seg, &options, &env, message, sizeof(message));
    if (r) {
        (void)fprintf(stderr, "spill: %s\n", message);
        return r < 0 ? r : -EIO;
    }
    (void)cst_aio_register(e->aio, e->frames->buffers, SPILL_BATCH * SPILL_BUFFER);
    cst_seg_recover(e->seg, recovered, e);
    while (!e->recovered)
        turn(e);
    r = cst_seg_space_open(e->seg, "bench", CST_KIND_FLAT, CST_CLASS_LOSSLESS, "bench", 5,
                           &e->space);
    return r < 0 ? r : r ? -EIO : 0;
}

static int set_up(struct spill_engine *e, enum cst_aio_kind kind, enum cst_seg_crypt crypt) {
    const char *at = getenv("CISTERN_BENCH_DIR");
    int r;

    (void)snprintf(e->dir, sizeof(e->dir), "%s/cistern-bench-XXXXXX", at ? at : ".");
    if (!mkdtemp(e->dir))
        return -errno;
    e->n_items = 2 * SPILL_TIER / SPILL_FRAME;
    e->items = calloc(e->n_items, sizeof(*e->items));
    if (!e->items)
        return -ENOMEM;
    cst_seeded_random_init(&e->random, 2);
    r = bench_pool_new(&e->pool);
    return r ? r : open_seg(e, kind, crypt);
}

int spill_engine_new(struct spill_engine **out, const struct spill_frames *frames,
                     enum cst_aio_kind kind, enum cst_seg_crypt crypt) {
    struct spill_engine *e = calloc(1, sizeof(*e));
    int r;

    if (!e)
        return -ENOMEM;
    e->frames = frames;
    r = set_up(e, kind, crypt);
    if (r)
        e = spill_engine_free(e);
    *out = e;
    return r;
}

static void remove_dir(const char *path) {
    DIR *dir = opendir(path);
    struct dirent *entry;

    while (dir && (entry = readdir(dir)))
        (void)unlinkat(dirfd(dir), entry->d_name, 0);
    if (dir)
        (void)closedir(dir);
    (void)rmdir(path);
}

struct spill_engine *spill_engine_free(struct spill_engine *e) {
    if (!e)
        return NULL;
    if (e->seg)
        spill_engine_settle(e);
    e->space = cst_seg_space_unref(e->space);
    e->seg = cst_seg_free(e->seg);
    e->aio = cst_aio_free(e->aio);
    e->pool = bench_pool_free(e->pool);
    free(e->items);
    remove_dir(e->dir);
    free(e);
    return NULL;
}

const char *spill_engine_dir(const struct spill_engine *e) {
    return e->dir;
}
