/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recover.*: how long a start takes with 1,000,000 records on disk, and how many of them it finds.
 *   kill_s      seconds from opening the directory until every block is in the trie again, after
 *               kill -9 of the writer
 *   clean_s     the same after a clean stop
 *   found       records found after the clean stop, of those that were there before it
 *   kill_found  records found after the kill, of those whose store had completed
 * Records are one chunk of 4 KiB with 16 token ids, in chains of 1 to 2,000 blocks, encrypted, in
 * two spaces that differ in nothing but their class; no block may be in the other one. They are
 * written by the engine in a process that is killed while it goes on, under memory pressure: blocks
 * come faster than the disk takes them, all places for blocks are taken at every moment, one comes
 * free when its block is on disk, and most wait for a place in the engine's buffer (both counted in
 * the details). Each start is a process of its own, with the store's whole index.
 *
 * The directory is made in $CISTERN_BENCH_DIR, else in the current one: 5 GB.
 */
#include "base/crc32c.h"
#include "base/random.h"
#include "bench/bench.h"
#include "bench/bench_pool.h"
#include "bench/benches.h"
#include "gpu/gpu.h"
#include "proto/key.h"
#include "store/seg.h"
#include "store/store.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    RECORDS = 1000000,
    MORE = 200000, /* stores until the kill at most */
    CHAIN_MAX = 2000,
    TOKENS = 16,
    BLOCK = 2048,
    WINDOW = 4096, /* blocks in the writer's memory */
    BUFFER = 1024, /* of them in the engine's, on their way */
};
static const uint64_t TIER = UINT64_C(6) << 30, MEMORY = UINT64_C(8) << 30;

/* Of the processes in common. */
struct shared {
    _Atomic uint64_t completed, begun, made; /* stores that ended well, that were begun; blocks */
    _Atomic uint64_t turns, full; /* of the writer's; of them without a place for another block */
    double seconds, cpu_s;
    uint64_t found, expected, mixed;
    uint8_t ok[RECORDS + MORE]; /* was it there, when somebody last looked? */
};

struct place {
    const char *dir, *key_file;
    struct shared *shared;
};

/* ---- which records there are ---- */

struct walk {
    struct cst_seeded_random random;
    uint64_t n, chain;
    uint32_t position, left;
};

static void walk_init(struct walk *w) {
    *w = (struct walk){ .n = UINT64_MAX };
    cst_seeded_random_init(&w->random, 5);
}

/* To the next record. */
static void walk_on(struct walk *w) {
    w->n++;
    w->position++;
    if (w->left--)
        return;
    w->chain++;
    w->position = 0;
    w->left = (uint32_t)(cst_seeded_random_next(&w->random) % CHAIN_MAX);
}

static void name(uint8_t out[32], uint64_t n) {
    struct cst_seeded_random random;

    cst_seeded_random_init(&random, n + 1);
    for (unsigned i = 0; i < 32; i += 8) {
        uint64_t v = cst_seeded_random_next(&random);

        memcpy(out + i, &v, sizeof(v));
    }
}

static unsigned class_of(const struct walk *w) {
    return w->chain % 2 ? CST_CLASS_NEAR_LOSSLESS : CST_CLASS_LOSSLESS;
}

static struct cst_layer layer = { .kv_heads = 1, .head_dim_k = 32, .head_dim_v = 32 };
static struct cst_segment segments[2];

static size_t canonical(uint8_t out[CST_DESCRIPTOR_BYTES_MAX]) {
    struct cst_descriptor d = { .content_id = { 1 },
                                .engine = "bench",
                                .block_tokens = TOKENS,
                                .tp_size = 1,
                                .block_bytes = BLOCK,
                                .n_layers = 1,
                                .n_segments = 2,
                                .layers = &layer,
                                .segments = segments };

    for (unsigned i = 0; i < 2; i++)
        segments[i] = (struct cst_segment){ .tensor = (uint8_t)i,
                                            .dtype = CST_DTYPE_F16,
                                            .offset = i * BLOCK / 2,
                                            .length = BLOCK / 2,
                                            .token_stride = BLOCK / 2 / TOKENS,
                                            .head_stride = BLOCK / 2 / TOKENS,
                                            .dim_stride = 2 };
    return cst_descriptor_encode(&d, out, CST_DESCRIPTOR_BYTES_MAX);
}

/* ---- the writer ---- */

struct item {
    struct cst_seg_store store;
    struct writer *writer;
    uint64_t n;
    uint8_t key[32], parent[32];
    uint32_t tokens[TOKENS];
    uint8_t payload[BLOCK];
    bool in_memory;
};

struct writer {
    struct shared *shared;
    struct cst_aio *aio;
    struct bench_pool *pool;
    struct cst_seg *seg;
    struct cst_seg_space *spaces[CST_CLASSES];
    struct item *items;      /* record n: items[n % WINDOW] */
    struct walk at;          /* the last block that came */
    uint64_t oldest;         /* the first one that may still be in memory */
    struct cst_seg_ref last; /* of the last store that was begun */
    bool recovered;
};

static int none_found(void *arg, const struct cst_seg_record *r, struct cst_seg_ref ref,
                      void **owner) {
    return CST_SEG_E_GONE;
}

static void was_lost(void *arg, void *owner, enum cst_seg_gone why) {
}

static void recovered(void *arg, int status) {
    *(bool *)arg = true;
}

static void turn(struct cst_aio *aio, struct bench_pool *pool) {
    struct pollfd fds[2] = { { .fd = cst_aio_fd(aio), .events = POLLIN },
                             { .fd = bench_pool_fd(pool), .events = POLLIN } };

    cst_aio_kick(aio);
    if (poll(fds, 2, 100) < 0)
        return;
    bench_pool_reap(pool);
    if (fds[0].revents)
        (void)cst_aio_reap(aio);
}

static void stored(struct cst_seg_store *store, int status) {
    struct item *item = cst_container_of(store, struct item, store);

    item->in_memory = false;
    if (status)
        return;
    item->writer->shared->ok[item->n] = 1;
    item->writer->shared->completed++;
}

static void fill(struct writer *w, struct item *item, const struct walk *at) {
    *item = (struct item){ .writer = w, .n = at->n, .in_memory = true };
    name(item->key, at->n);
    name(item->parent, at->position ? at->n - 1 : at->chain << 32);
    for (uint32_t i = 0; i < TOKENS; i++)
        item->tokens[i] = (uint32_t)at->n * TOKENS + i;
    for (size_t i = 0; i < BLOCK; i += 32)
        memcpy(item->payload + i, item->key, 32);
    item->store = (struct cst_seg_store){
        .done = stored,
        .payload = item->payload,
        .owner = item,
        .record = { .type = CST_SEG_BLOCK,
                    .space = w->spaces[class_of(at)],
                    .key = item->key,
                    .payload_bytes = BLOCK,
                    .payload_crc = cst_crc32c(0, item->payload, BLOCK),
                    .parent = item->parent,
                    .has_parent = at->position > 0,
                    .position = at->position,
                    .n_tokens = TOKENS,
                    .tokens = item->tokens,
                    .born = (uint64_t)time(NULL) },
    };
    item->store.record.block_crc = item->store.record.payload_crc;
}

/* Blocks come as long as there is a place for them. */
static void take_blocks(struct writer *w) {
    while (w->oldest < w->shared->begun && !w->items[w->oldest % WINDOW].in_memory)
        w->oldest++;
    while (w->shared->made < w->oldest + WINDOW && w->shared->made < RECORDS + MORE) {
        walk_on(&w->at);
        fill(w, &w->items[w->at.n % WINDOW], &w->at);
        w->shared->made++;
    }
}

/* Begins what the engine takes: 0, or why it takes no more. */
static int begin_stores(struct writer *w) {
    int r = 0;

    while (!r && w->shared->begun < w->shared->made) {
        struct item *item = &w->items[w->shared->begun % WINDOW];

        item->store.parent = item->store.record.has_parent ? w->last : CST_SEG_REF_NONE;
        r = cst_seg_store(w->seg, &item->store);
        if (!r) {
            w->last = cst_seg_store_ref(&item->store);
            w->shared->begun++;
        }
    }
    return r;
}

static int write_all(struct writer *w) {
    walk_init(&w->at);
    do {
        int r;

        take_blocks(w);
        r = begin_stores(w);
        if (r && r != CST_SEG_E_BUSY && r != CST_SEG_E_FULL)
            return r < 0 ? r : -EIO;
        w->shared->turns++;
        w->shared->full += w->shared->made == w->oldest + WINDOW;
        cst_seg_tick(w->seg);
        turn(w->aio, w->pool);
    } while (w->shared->completed < RECORDS + MORE);
    return 0;
}

static struct cst_seg_options seg_options(const struct place *p) {
    return (struct cst_seg_options){ .bytes = TIER,
                                     .crypt = CST_SEG_CRYPT_AES,
                                     .key_file = p->key_file };
}

static int writer_run(const struct place *p) {
    const struct cst_aio_options io = { .directory = p->dir };
    struct cst_seg_options options = seg_options(p);
    struct writer w = { .shared = p->shared };
    struct cst_seg_env env = { .clock = &cst_clock_monotonic,
                               .random = &cst_random_system,
                               .user = {
                                   .found = none_found, .gone = was_lost, .arg = &w.recovered } };
    uint8_t bytes[CST_DESCRIPTOR_BYTES_MAX];
    size_t n = canonical(bytes);
    char message[256] = "";
    int r = bench_pool_new(&w.pool);

    options.buffer_bytes = BUFFER * 4096;
    w.items = calloc(WINDOW, sizeof(*w.items));
    if (!r)
        r = w.items && n ? cst_aio_new(&w.aio, &io, message, sizeof(message)) : -ENOMEM;
    env.aio = w.aio;
    env.jobs = w.pool ? bench_pool_jobs(w.pool) : NULL;
    if (!r)
        r = cst_seg_open(&w.seg, &options, &env, message, sizeof(message));
    if (r) {
        (void)fprintf(stderr, "recover: %s\n", message);
        return r < 0 ? r : -EIO;
    }
    cst_seg_recover(w.seg, recovered, &w.recovered);
    while (!w.recovered)
        turn(w.aio, w.pool);
    for (unsigned c = CST_CLASS_LOSSLESS; !r && c <= CST_CLASS_NEAR_LOSSLESS; c++)
        r = cst_seg_space_open(w.seg, "bench", CST_KIND_TOKENS, (enum cst_class)c, bytes,
                               (uint32_t)n, &w.spaces[c]);
    return r ? r : write_all(&w);
}

/* ---- a start ---- */

static void take_space(struct cst_space *space, void *arg) {
    struct cst_space **spaces = arg;

    spaces[cst_space_class(space)] = space;
}

/* Looks for every record that should be there, and remembers which are. */
static void look(struct cst_store *store, struct shared *shared) {
    struct cst_space *spaces[CST_CLASSES] = { NULL };
    struct walk at;

    cst_store_for_each_space(store, NULL, take_space, spaces);
    walk_init(&at);
    shared->found = shared->expected = shared->mixed = 0;
    while (at.n + 1 < RECORDS + MORE) {
        uint8_t key[32];
        unsigned own, other;

        walk_on(&at);
        own = class_of(&at);
        other = own == CST_CLASS_LOSSLESS ? CST_CLASS_NEAR_LOSSLESS : CST_CLASS_LOSSLESS;
        name(key, at.n);
        shared->mixed += spaces[other] && cst_space_has(spaces[other], key);
        if (!shared->ok[at.n])
            continue;
        shared->expected++;
        shared->ok[at.n] = spaces[own] && cst_space_has(spaces[own], key);
        shared->found += shared->ok[at.n];
    }
}

static int stop(struct cst_store *store, struct cst_aio *aio, struct bench_pool *pool) {
    uint64_t total;

    while (cst_store_drain(store, true, &total) || cst_store_jobs(store))
        turn(aio, pool);
    return cst_store_disk_close(store);
}

static double cpu_seconds(void) {
    struct rusage u;

    (void)getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static int start_run(const struct place *p) {
    const struct cst_aio_options io = { .directory = p->dir };
    const struct cst_store_options options = { .memory = MEMORY, .index = MEMORY / 2 };
    struct cst_disk_options disk = { .seg = seg_options(p), .read_bytes = 16 << 20 };
    struct cst_store_env env = { .clock = &cst_clock_monotonic,
                                 .random = &cst_random_system,
                                 .mem = &cst_mem_host };
    struct bench_pool *pool = NULL;
    struct cst_store *store = NULL;
    bool done = false;
    char message[256] = "";
    double start, cpu;
    int r = bench_pool_new(&pool);

    if (r)
        return r;
    env.jobs = bench_pool_jobs(pool);
    start = cst_seconds();
    cpu = cpu_seconds();
    r = cst_aio_new(&disk.aio, &io, message, sizeof(message));
    if (!r)
        r = cst_store_new(&store, &options, &env);
    if (!r)
        r = cst_store_disk_open(store, &disk, message, sizeof(message));
    if (r) {
        (void)fprintf(stderr, "recover: %s\n", message);
        return r < 0 ? r : -EIO;
    }
    cst_store_disk_recover(store, recovered, &done);
    while (!done)
        turn(disk.aio, pool);
    p->shared->seconds = cst_seconds() - start;
    p->shared->cpu_s = cpu_seconds() - cpu;
    look(store, p->shared);
    r = stop(store, disk.aio, pool);
    (void)cst_store_free(store);
    (void)cst_aio_free(disk.aio);
    (void)bench_pool_free(pool);
    return r;
}

/* ---- processes ---- */

static pid_t in_process(int (*run)(const struct place *p), const struct place *p) {
    pid_t pid = fork();

    if (pid)
        return pid < 0 ? -errno : pid;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    _exit(run(p) ? 1 : 0);
}

/* Kills the writer once RECORDS are there and it is at work on more. */
static int write_and_kill(const struct place *p) {
    const struct timespec wait = { .tv_nsec = 2000000 };
    pid_t pid = in_process(writer_run, p);
    int status = 0;

    if (pid < 0)
        return (int)pid;
    while (p->shared->completed < RECORDS && !waitpid(pid, &status, WNOHANG))
        (void)nanosleep(&wait, NULL);
    if (p->shared->completed < RECORDS)
        return -EIO;
    (void)kill(pid, SIGKILL);
    (void)waitpid(pid, &status, 0);
    return 0;
}

static int start(const struct place *p) {
    pid_t pid = in_process(start_run, p);
    int status;

    if (pid < 0)
        return (int)pid;
    if (waitpid(pid, &status, 0) != pid || status)
        return -EIO;
    return p->shared->mixed ? -EBADMSG : 0;
}

static void report(const char *seconds_name, double most, const char *found_name, double least,
                   const struct shared *s, double written_s) {
    const struct cst_figure time = {
        .name = seconds_name, .value = s->seconds, .unit = "s", .sense = CST_AT_MOST, .target = most
    };
    const struct cst_figure found = { .name = found_name,
                                      .value = (double)s->found / (double)s->expected,
                                      .sense = CST_AT_LEAST,
                                      .unit = "",
                                      .target = least };

    cst_report(&time, "\"cpu_s\": %.2f, \"records\": %llu, \"written_in_s\": %.0f", s->cpu_s,
               (unsigned long long)s->found, written_s);
    cst_report(&found,
               "\"found\": %llu, \"of\": %llu, \"on_their_way\": %llu, \"waiting\": %llu, "
               "\"memory_full\": %.3f",
               (unsigned long long)s->found, (unsigned long long)s->expected,
               (unsigned long long)(s->begun - s->completed),
               (unsigned long long)(s->made - s->begun), (double)s->full / (double)s->turns);
}

static int measure(const struct place *p) {
    double begin = cst_seconds(), written;
    int r = write_and_kill(p);

    if (r)
        return r;
    written = cst_seconds() - begin;
    r = start(p);
    if (r)
        return r;
    report("recover.kill_s", 5, "recover.kill_found", .95, p->shared, written);
    r = start(p);
    if (!r)
        report("recover.clean_s", 1, "recover.found", .99, p->shared, written);
    return r;
}

static int make_key(const char *path) {
    uint8_t key[32];
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool ok = fd >= 0 && !cst_random_system.fill(&cst_random_system, key, sizeof(key)) &&
              write(fd, key, sizeof(key)) == sizeof(key);

    if (fd >= 0)
        (void)close(fd);
    return ok ? 0 : -EIO;
}

static void remove_dir(const char *path) {
    DIR *dir = opendir(path);
    struct dirent *e;

    while (dir && (e = readdir(dir)))
        (void)unlinkat(dirfd(dir), e->d_name, 0);
    if (dir)
        (void)closedir(dir);
    (void)rmdir(path);
}

int cst_bench_recover(void) {
    const char *at = getenv("CISTERN_BENCH_DIR");
    char dir[256], key[300];
    struct place p = { .dir = dir, .key_file = key };
    int r;

    cst_unpin();
    (void)snprintf(dir, sizeof(dir), "%s/cistern-bench-XXXXXX", at ? at : ".");
    if (!mkdtemp(dir))
        return -errno;
    (void)snprintf(key, sizeof(key), "%s.key", dir);
    p.shared =
        mmap(NULL, sizeof(*p.shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    r = p.shared == MAP_FAILED ? -errno : make_key(key);
    if (!r)
        r = measure(&p);
    (void)unlink(key);
    remove_dir(dir);
    if (p.shared != MAP_FAILED)
        (void)munmap(p.shared, sizeof(*p.shared));
    return r;
}
