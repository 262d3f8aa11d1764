/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spill.*: the disk tier's engine against a bare io_uring probe in the same directory: frames of
 * 1.5 MiB written one after the other, and read back in batches, with the same depths; the two take
 * turns. Both overwrite blocks that were written before: the first write to a new file is slower.
 * Figures with _aes encrypt. cores_per_gbs is the processor time of the whole process for a GB,
 * less what the checksum or the cipher alone takes for the same bytes.
 *
 * The directory is $CISTERN_BENCH_DIR, else the current one: /tmp may be memory.
 */
#include "base/crc32c.h"
#include "base/random.h"
#include "bench/bench.h"
#include "bench/bench_pool.h"
#include "bench/benches.h"
#include "bench/spill_probe.h"
#include "store/seg.h"

#include <dirent.h>
#include <errno.h>
#include <openssl/evp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

enum { BATCH = 64, ROUNDS = 15, WRITE_DEPTH = 4, READ_DEPTH = 16, CHUNKS = 2 };
#define FRAME ((size_t)3 << 19)
#define TIER ((uint64_t)1 << 30)

struct item {
    struct cst_seg_store store;
    struct cst_seg_read read;
    struct spill *spill;
    struct cst_seg_ref ref;
    uint8_t key[32];
    bool live;
};

struct spill {
    char dir[256];
    struct cst_aio *aio;
    struct cst_seg *seg;
    struct cst_seg_space *space;
    struct bench_pool *pool;
    struct spill_probe *probe;
    struct item *items; /* the last BATCH of them are read */
    size_t n_items, next;
    uint8_t *frames, *buffers;
    uint32_t crc[BATCH];
    size_t open, failed;
    bool recovered;
};

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
    return (float)(1.0 / (1 + (double)(item->spill->next - (size_t)(item - item->spill->items))));
}

static void recovered(void *arg, int status) {
    ((struct spill *)arg)->recovered = true;
}

static void turn(struct spill *s) {
    struct pollfd fds[2] = { { .fd = cst_aio_fd(s->aio), .events = POLLIN },
                             { .fd = bench_pool_fd(s->pool), .events = POLLIN } };

    cst_aio_kick(s->aio);
    if (poll(fds, 2, 100) < 0)
        return;
    bench_pool_reap(s->pool);
    if (fds[0].revents)
        (void)cst_aio_reap(s->aio);
}

/* ---- the two sides ---- */

static void stored(struct cst_seg_store *store, int status) {
    struct item *item = cst_container_of(store, struct item, store);

    item->spill->open--;
    item->spill->failed += status != 0;
    item->live = !status;
    item->ref = cst_seg_store_ref(store);
}

static int store_one(struct spill *s) {
    struct item *item = &s->items[s->next % s->n_items];
    size_t frame = s->next % BATCH;
    int r;

    if (item->live)
        cst_seg_drop(s->seg, item->ref, false);
    *item = (struct item){ .spill = s };
    memcpy(item->key, &s->next, sizeof(s->next));
    item->store = (struct cst_seg_store){
        .done = stored,
        .payload = s->frames + frame * FRAME,
        .owner = item,
        .record = { .type = CST_SEG_BLOCK,
                    .space = s->space,
                    .key = item->key,
                    .payload_bytes = FRAME,
                    .payload_crc = s->crc[frame],
                    .block_crc = s->crc[frame] },
    };
    r = cst_seg_store(s->seg, &item->store);
    if (!r) {
        s->next++;
        s->open++;
    }
    return r;
}

static int write_ours(struct spill *s, size_t n) {
    size_t end = s->next + n;

    while (s->next < end || s->open) {
        int r = s->next < end ? store_one(s) : CST_SEG_E_BUSY;

        if (!r)
            continue;
        if (r != CST_SEG_E_BUSY && r != CST_SEG_E_FULL)
            return r < 0 ? r : -EIO;
        if (!s->open && r == CST_SEG_E_FULL)
            cst_seg_tick(s->seg);
        turn(s);
    }
    return s->failed ? -EIO : 0;
}

static void was_read(struct cst_seg_read *read, int status) {
    struct item *item = cst_container_of(read, struct item, read);

    item->spill->open--;
    item->spill->failed += status != 0;
}

static int read_ours(struct spill *s) {
    for (size_t i = 0; i < BATCH; i++) {
        struct item *item = &s->items[(s->next - BATCH + i) % s->n_items];

        item->read = (struct cst_seg_read){ .done = was_read,
                                            .ref = item->ref,
                                            .key = item->key,
                                            .buffer = s->buffers + i * CHUNKS * FRAME };
        s->open++;
        cst_seg_read(s->seg, &item->read);
    }
    while (s->open)
        turn(s);
    return s->failed ? -EIO : 0;
}

/* ---- set-up ---- */

static void *map(size_t n) {
    void *p =
        mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

    return p == MAP_FAILED ? NULL : p;
}

static int make_frames(struct spill *s) {
    struct cst_seeded_random random;

    s->frames = map(BATCH * FRAME);
    s->buffers = map(BATCH * CHUNKS * FRAME);
    s->n_items = 4 * TIER / FRAME;
    s->items = calloc(s->n_items, sizeof(*s->items));
    if (!s->frames || !s->buffers || !s->items)
        return -ENOMEM;
    cst_seeded_random_init(&random, 1);
    for (size_t i = 0; i < BATCH; i++) {
        (void)random.random.fill(&random.random, s->frames + i * FRAME, FRAME);
        s->crc[i] = cst_crc32c(0, s->frames + i * FRAME, FRAME);
    }
    return 0;
}

static int open_engine(struct spill *s, enum cst_aio_kind kind, enum cst_seg_crypt crypt) {
    const struct cst_aio_options io = {
        .directory = s->dir, .kind = kind, .read_depth = READ_DEPTH, .write_depth = WRITE_DEPTH
    };
    const struct cst_seg_options options = { .bytes = TIER, .crypt = crypt };
    struct cst_seg_env env = {
        .clock = &cst_clock_monotonic,
        .random = &cst_random_system,
        .jobs = bench_pool_jobs(s->pool),
        .user = { .found = found, .value = value, .moved = moved, .gone = gone, .arg = s }
    };
    char message[256] = "";
    int r = cst_aio_new(&s->aio, &io, message, sizeof(message));

    env.aio = s->aio;
    if (!r)
        r = cst_seg_open(&s->seg, &options, &env, message, sizeof(message));
    if (r) {
        (void)fprintf(stderr, "spill: %s\n", message);
        return r < 0 ? r : -EIO;
    }
    (void)cst_aio_register(s->aio, s->buffers, BATCH * CHUNKS * FRAME);
    cst_seg_recover(s->seg, recovered, s);
    while (!s->recovered)
        turn(s);
    r = cst_seg_space_open(s->seg, "bench", CST_KIND_FLAT, CST_CLASS_LOSSLESS, "bench", 5,
                           &s->space);
    return r < 0 ? r : r ? -EIO : 0;
}

static void remove_dir(const char *path) {
    DIR *dir = opendir(path);
    struct dirent *e;
    char name[600];

    while (dir && (e = readdir(dir))) {
        (void)snprintf(name, sizeof(name), "%s/%s", path, e->d_name);
        (void)unlink(name);
    }
    if (dir)
        (void)closedir(dir);
    (void)rmdir(path);
}

static void spill_close(struct spill *s) {
    while (s->seg && cst_seg_busy(s->seg))
        turn(s);
    s->space = cst_seg_space_unref(s->space);
    s->seg = cst_seg_free(s->seg);
    s->aio = cst_aio_free(s->aio);
    s->pool = bench_pool_free(s->pool);
    s->probe = spill_probe_free(s->probe);
    if (s->frames)
        (void)munmap(s->frames, BATCH * FRAME);
    if (s->buffers)
        (void)munmap(s->buffers, BATCH * CHUNKS * FRAME);
    free(s->items);
    remove_dir(s->dir);
}

static int spill_open(struct spill *s, enum cst_aio_kind kind, enum cst_seg_crypt crypt) {
    const char *at = getenv("CISTERN_BENCH_DIR");
    int r;

    memset(s, 0, sizeof(*s));
    (void)snprintf(s->dir, sizeof(s->dir), "%s/cistern-bench-XXXXXX", at ? at : ".");
    if (!mkdtemp(s->dir))
        return -errno;
    r = make_frames(s);
    if (!r)
        r = bench_pool_new(&s->pool);
    if (!r)
        r = open_engine(s, kind, crypt);
    if (!r)
        r = write_ours(s, TIER / FRAME + BATCH); /* the whole tier once */
    return r;
}

/* ---- measuring ---- */

static double cpu_seconds(void) {
    struct rusage u;

    (void)getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

struct rates {
    double write, read, probe_write, probe_read; /* median GB/s */
    double write_ratio, read_ratio;              /* median of the rounds' */
    double write_cpu, read_cpu;                  /* core seconds per GB */
};

static int measure(struct spill *s, struct rates *out) {
    double w[ROUNDS], r[ROUNDS], pw[ROUNDS], pr[ROUNDS], wr[ROUNDS], rr[ROUNDS];
    double gb = (double)(BATCH * FRAME) * 1e-9, wcpu = 0, rcpu = 0;
    int status = 0;

    for (size_t i = 0; i < ROUNDS && !status; i++) {
        double t0 = cst_seconds(), c0 = cpu_seconds(), t1, c1, t2;

        status = write_ours(s, BATCH);
        t1 = cst_seconds();
        c1 = cpu_seconds();
        wcpu += c1 - c0;
        w[i] = gb / (t1 - t0);
        if (!status)
            status = read_ours(s);
        t2 = cst_seconds();
        rcpu += cpu_seconds() - c1;
        r[i] = gb / (t2 - t1);
        if (!status)
            status = spill_probe_run(s->probe, true, BATCH, &pw[i]);
        if (!status)
            status = spill_probe_run(s->probe, false, BATCH, &pr[i]);
        pw[i] = gb / pw[i];
        pr[i] = gb / pr[i];
        wr[i] = w[i] / pw[i];
        rr[i] = r[i] / pr[i];
    }
    if (status)
        return status;
    *out = (struct rates){ .write = cst_quantile(w, ROUNDS, 0.5),
                           .read = cst_quantile(r, ROUNDS, 0.5),
                           .probe_write = cst_quantile(pw, ROUNDS, 0.5),
                           .probe_read = cst_quantile(pr, ROUNDS, 0.5),
                           .write_ratio = cst_quantile(wr, ROUNDS, 0.5),
                           .read_ratio = cst_quantile(rr, ROUNDS, 0.5),
                           .write_cpu = wcpu / ROUNDS / gb,
                           .read_cpu = rcpu / ROUNDS / gb };
    return 0;
}

/* Core seconds per GB of what can't be saved: one pass of the checksum or the cipher. */
static double check_cost(const struct spill *s, enum cst_seg_crypt crypt, bool decrypt) {
    EVP_CIPHER_CTX *ctx = EVP_CIPHER_CTX_new();
    uint8_t key[32] = { 1 }, iv[12] = { 2 }, tag[16];
    double start = cpu_seconds();
    int n;

    for (size_t i = 0; i < BATCH; i++) {
        const uint8_t *frame = s->frames + i * FRAME;

        if (crypt == CST_SEG_CRYPT_OFF) {
            if (cst_crc32c(0, frame, FRAME) != s->crc[i])
                return 0;
        } else if (decrypt) {
            EVP_DecryptInit_ex(ctx, EVP_aes_256_gcm(), NULL, key, iv);
            EVP_DecryptUpdate(ctx, s->buffers, &n, frame, (int)FRAME);
        } else {
            EVP_EncryptInit_ex(ctx, EVP_aes_256_gcm(), NULL, key, iv);
            EVP_EncryptUpdate(ctx, s->buffers, &n, frame, (int)FRAME);
            EVP_EncryptFinal_ex(ctx, tag, &n);
        }
    }
    EVP_CIPHER_CTX_free(ctx);
    return (cpu_seconds() - start) / ((double)(BATCH * FRAME) * 1e-9);
}

static void report(const char *what, const char *suffix, double value, enum cst_sense sense,
                   double target, const struct rates *r) {
    char name[64];

    (void)snprintf(name, sizeof(name), "spill.%s%s", what, suffix);
    cst_report(&(struct cst_figure){ .name = name,
                                     .value = value,
                                     .unit = sense == CST_AT_MOST ? "cores" : "ratio",
                                     .sense = sense,
                                     .target = target },
               "\"write_gbs\": %.2f, \"probe_write_gbs\": %.2f, \"read_gbs\": %.2f, "
               "\"probe_read_gbs\": %.2f, \"write_cpu_s_per_gb\": %.3f, \"read_cpu_s_per_gb\": "
               "%.3f",
               r->write, r->probe_write, r->read, r->probe_read, r->write_cpu, r->read_cpu);
}

static int one_backend(enum cst_aio_kind kind, enum cst_seg_crypt crypt, struct rates *out,
                       double *excess) {
    struct spill s;
    int r = spill_open(&s, kind, crypt);

    if (!r)
        r = spill_probe_new(&s.probe, s.dir, FRAME, READ_DEPTH, WRITE_DEPTH, TIER);
    if (!r)
        r = measure(&s, out);
    if (!r)
        *excess = CST_MAX(out->write_cpu - check_cost(&s, crypt, false),
                          out->read_cpu - check_cost(&s, crypt, true));
    spill_close(&s);
    return r;
}

static int one_crypt(enum cst_seg_crypt crypt, const char *suffix) {
    struct rates ours, threads;
    double excess, other;
    int r = one_backend(CST_AIO_URING, crypt, &ours, &excess);

    if (!r)
        r = one_backend(CST_AIO_THREADS, crypt, &threads, &other);
    if (r)
        return r;
    report("write_over_probe", suffix, ours.write_ratio, CST_AT_LEAST, 0.9, &ours);
    report("read_over_probe", suffix, ours.read_ratio, CST_AT_LEAST, 0.9, &ours);
    /* over the probe's rates of their own rounds: the disk's pace changes in between */
    report("threads_over_uring", suffix,
           CST_MIN(threads.write_ratio / ours.write_ratio, threads.read_ratio / ours.read_ratio),
           CST_AT_LEAST, 0.7, &threads);
    report("cores_per_gbs", suffix, excess, CST_AT_MOST, 0.15, &ours);
    return 0;
}

int cst_bench_spill(void) {
    int r = spill_probe_allowed();

    if (r) {
        cst_report_skipped("spill", "io_uring is refused here, so there is no probe");
        return 0;
    }
    cst_unpin();
    r = one_crypt(CST_SEG_CRYPT_OFF, "");
    return r ? r : one_crypt(CST_SEG_CRYPT_AES, "_aes");
}
