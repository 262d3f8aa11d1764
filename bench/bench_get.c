/* SPDX-License-Identifier: Apache-2.0 */
/*
 * get.*: 64 hot blocks of 1 MiB, leased, copied into a private buffer that is warm, and given
 * back. Probes: one memcpy of the same 64 MiB between warm private buffers; redis over its unix
 * socket (MGET of the same values); the same values as files in tmpfs, read into the same buffer.
 * get.zero_copy_us: the same without the copy, which is how an engine reads.
 *
 * put.over_memcpy: the way in (reserve, fill staging, commit), over the same memcpy.
 */
#include "bench/benches.h"

#include "bench/bench_fixture.h"
#include "bench/redis_peer.h"

#include "base/random.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 64, BLOCK_TOKENS = 64, BLOCK_BYTES = 1 << 20 };

struct world {
    struct cst_fixture f;
    cistern_space *space;
    struct cst_prompt prompt;
    uint8_t *src, *dst; /* private, touched */
    const void *blocks[BLOCKS];
    char files[64]; /* a folder in tmpfs */
};

static int world_init(struct world *w) {
    struct cst_seeded_random rng;
    int r;

    *w = (struct world){ .f = CST_FIXTURE_NULL };
    w->src = malloc((size_t)BLOCKS * BLOCK_BYTES);
    w->dst = calloc(BLOCKS, BLOCK_BYTES);
    if (!w->src || !w->dst)
        return -ENOMEM;
    cst_seeded_random_init(&rng, 7);
    (void)rng.random.fill(&rng.random, w->src, (size_t)BLOCKS * BLOCK_BYTES);
    memset(w->dst, 1, (size_t)BLOCKS * BLOCK_BYTES);
    for (size_t i = 0; i < BLOCKS; i++)
        w->blocks[i] = w->src + i * BLOCK_BYTES;
    r = cst_fixture_init(&w->f);
    if (!r)
        r = cst_fixture_space(&w->space, w->f.client, BLOCK_TOKENS, BLOCK_BYTES);
    return r ? r : cst_prompt_init(&w->prompt, w->space, BLOCKS, 1);
}

static void remove_files(struct world *w) {
    char path[96];

    for (size_t i = 0; i < BLOCKS && w->files[0]; i++) {
        (void)snprintf(path, sizeof(path), "%s/%zu", w->files, i);
        (void)unlink(path);
    }
    if (w->files[0])
        (void)rmdir(w->files);
}

static void world_deinit(struct world *w) {
    remove_files(w);
    cst_prompt_deinit(&w->prompt);
    cst_fixture_deinit(&w->f);
    free(w->src);
    free(w->dst);
}

static int lease_all(struct world *w, bool copy) {
    cistern_lease *leases[BLOCKS];
    int32_t statuses[BLOCKS];
    int r = cst_ok(cistern_acquire(w->space, w->prompt.keys, BLOCKS, NULL, leases, statuses),
                   "acquire");

    if (r)
        return r;
    for (size_t i = 0; i < BLOCKS && !r; i++) {
        const void *data;
        size_t size;

        r = cst_ok(statuses[i], "acquire of a block");
        if (!r)
            r = cst_ok(cistern_lease_data(leases[i], &data, &size, NULL), "data");
        if (!r && copy)
            memcpy(w->dst + i * BLOCK_BYTES, data, size);
    }
    cistern_release(w->f.client, leases, BLOCKS);
    return r;
}

static int run_get(void *arg, unsigned ops) {
    int r = 0;

    while (ops-- && !r)
        r = lease_all(arg, true);
    return r;
}

/* One more get into a buffer that holds something else: are they the bytes that were stored? */
static int check_get(struct world *w) {
    int r;

    memset(w->dst, 1, (size_t)BLOCKS * BLOCK_BYTES);
    r = run_get(w, 1);
    return r ? r : memcmp(w->dst, w->src, (size_t)BLOCKS * BLOCK_BYTES) ? -EILSEQ : 0;
}

static int run_zero_copy(void *arg, unsigned ops) {
    int r = 0;

    while (ops-- && !r)
        r = lease_all(arg, false);
    return r;
}

static int run_memcpy(void *arg, unsigned ops) {
    struct world *w = arg;

    while (ops--) {
        memcpy(w->dst, w->src, (size_t)BLOCKS * BLOCK_BYTES);
        __asm__ volatile("" ::: "memory");
    }
    return 0;
}

static int write_files(struct world *w) {
    char path[96];

    (void)snprintf(w->files, sizeof(w->files), "/dev/shm/cistern-bench-XXXXXX");
    if (!mkdtemp(w->files)) {
        w->files[0] = '\0';
        return -errno;
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        cst_auto(cst_closep) int fd = -1;

        (void)snprintf(path, sizeof(path), "%s/%zu", w->files, i);
        fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0 || write(fd, w->blocks[i], BLOCK_BYTES) != BLOCK_BYTES)
            return -EIO;
    }
    return 0;
}

static int run_files(void *arg, unsigned ops) {
    struct world *w = arg;
    char path[96];

    while (ops--) {
        for (size_t i = 0; i < BLOCKS; i++) {
            cst_auto(cst_closep) int fd = -1;

            (void)snprintf(path, sizeof(path), "%s/%zu", w->files, i);
            fd = open(path, O_RDONLY | O_CLOEXEC);
            if (fd < 0 || read(fd, w->dst + i * BLOCK_BYTES, BLOCK_BYTES) != BLOCK_BYTES)
                return -EIO;
        }
    }
    return 0;
}

static void report_ratio(const char *name, double value, enum cst_sense sense, double target,
                         const char *peer, const struct cst_compared *m) {
    cst_report(
        &(struct cst_figure){
            .name = name, .value = value, .unit = "ratio", .sense = sense, .target = target },
        "\"ours_us\": %.0f, \"%s_us\": %.0f, \"mib\": %d, \"pairs\": [%.3f, %.3f]", m->a * 1e6,
        peer, m->b * 1e6, BLOCKS, m->low, m->high);
}

static int beside_redis(struct world *w) {
    struct cst_redis *redis = NULL;
    struct cst_compared m;
    int r = cst_redis_new(&redis, w->f.daemon.dir, w->blocks, BLOCKS, BLOCK_BYTES);

    if (r == -ENOENT || r == -ENOSYS) {
        cst_report_skipped("get.redis_over_us", r == -ENOSYS ? "built without libhiredis-dev"
                                                             : "redis-server is not installed");
        return 0;
    }
    if (!r)
        r = cst_compare(&m, (struct cst_side){ run_get, w },
                        (struct cst_side){ cst_redis_run, redis });
    if (!r)
        report_ratio("get.redis_over_us", m.b / m.a, CST_AT_LEAST, 3, "redis", &m);
    (void)cst_redis_free(redis);
    return r;
}

static int measure_get(struct world *w) {
    const struct cst_side ours = { run_get, w };
    struct cst_compared m;
    int r = cst_compare(&m, ours, (struct cst_side){ run_memcpy, w });

    if (!r)
        report_ratio("get.over_memcpy", m.a / m.b, CST_AT_MOST, 1.3, "memcpy", &m);
    if (!r)
        r = check_get(w);
    if (!r)
        r = beside_redis(w);
    if (!r)
        r = write_files(w);
    if (!r)
        r = cst_compare(&m, ours, (struct cst_side){ run_files, w });
    if (!r)
        report_ratio("get.tmpfs_over_us", m.b / m.a, CST_AT_LEAST, 1.0, "tmpfs", &m);
    if (!r)
        r = cst_compare(&m, (struct cst_side){ run_zero_copy, w },
                        (struct cst_side){ run_memcpy, w });
    if (!r)
        cst_report(&(struct cst_figure){ .name = "get.zero_copy_us",
                                         .value = m.a * 1e6,
                                         .unit = "us",
                                         .sense = CST_NO_TARGET },
                   "\"memcpy_us\": %.0f, \"blocks\": %d", m.b * 1e6, BLOCKS);
    return r;
}

int cst_bench_get(void) {
    struct world w;
    int r = world_init(&w);

    if (!r)
        r = cst_prompt_store(w.space, &w.prompt, 0, BLOCKS, w.blocks);
    if (!r) {
        cst_fixture_settle(&w.f);
        r = measure_get(&w);
    }
    world_deinit(&w);
    return r;
}

/* Stores all blocks; the erase that makes room for the next round is not timed. */
static int timed_put(struct world *w, double *seconds) {
    double start = cst_seconds();
    int r = cst_prompt_store(w->space, &w->prompt, 0, BLOCKS, w->blocks);

    *seconds = cst_seconds() - start;
    if (!r)
        r = cst_ok(cistern_erase(w->space, NULL, 0, NULL), "erase");
    cst_fixture_settle(&w->f);
    return r;
}

int cst_bench_put(void) {
    double ours[CST_PAIRS], copies[CST_PAIRS], start, median, copy;
    struct world w;
    int r = world_init(&w);

    for (int warm = 0; warm < 2 && !r; warm++)
        r = timed_put(&w, ours);
    for (size_t i = 0; i < CST_PAIRS && !r; i++) {
        r = timed_put(&w, &ours[i]);
        start = cst_seconds();
        (void)run_memcpy(&w, 1);
        copies[i] = cst_seconds() - start;
    }
    if (!r) {
        median = cst_quantile(ours, CST_PAIRS, 0.5);
        copy = cst_quantile(copies, CST_PAIRS, 0.5);
        cst_report(&(struct cst_figure){ .name = "put.over_memcpy",
                                         .value = median / copy,
                                         .unit = "ratio",
                                         .sense = CST_NO_TARGET },
                   "\"ours_us\": %.0f, \"memcpy_us\": %.0f, \"mib\": %d", median * 1e6, copy * 1e6,
                   BLOCKS);
    }
    world_deinit(&w);
    return r;
}
