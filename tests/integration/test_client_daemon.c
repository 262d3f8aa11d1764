/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcistern over a real daemon: blocks come back bit for bit by every way there is, prompts are
 * found, retired slabs are let go, threads don't mix, and a killed daemon is a miss.
 *
 * Every block's bytes say which block it is: word i of block `key` is a hash of (key, i).
 */
#include "tests/lib/check.h"
#include "tests/lib/spawn.h"

#include "base/random.h"

#include <cistern/cistern.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    BT = 16, /* tokens of a block */
    HEADS = 4,
    DIM = 32,
    TENSOR = BT * HEADS * DIM * 2,
    BLOCK = 2 * TENSOR,
    N = 64, /* blocks of a prompt */
};

static struct cst_spawned daemon_ = CST_SPAWNED_NULL;

/* ---- blocks and prompts ---- */

static void fill(uint8_t *block, const uint8_t *key) {
    struct cst_seeded_random rng;
    uint64_t seed;

    memcpy(&seed, key, sizeof(seed));
    cst_seeded_random_init(&rng, seed);
    for (size_t i = 0; i < BLOCK; i += 8) {
        /* four bf16 values between 0.5 and 2: what a model would hold, and it shrinks */
        uint64_t v = (cst_seeded_random_next(&rng) & UINT64_C(0x00ff00ff00ff00ff)) |
                     UINT64_C(0x3f003f003f003f00);

        memcpy(block + i, &v, sizeof(v));
    }
}

static bool is_block(const void *data, const uint8_t *key) {
    uint8_t expected[BLOCK];

    fill(expected, key);
    return memcmp(data, expected, BLOCK) == 0;
}

struct prompt {
    uint32_t tokens[N * BT];
    uint8_t keys[N * 32], blocks[N][BLOCK];
    const void *sources[N];
    void *targets[N];
    size_t sizes[N];
    int32_t statuses[N];
};

/* NULL on failure: threads don't assert, for only the test's own may leave it. */
static struct prompt *prompt_make(cistern_space *space, uint32_t number) {
    struct prompt *p = calloc(1, sizeof(*p));
    size_t n;

    if (!p)
        return NULL;
    for (uint32_t i = 0; i < N * BT; i++)
        p->tokens[i] = number * 1000000 + i;
    if (cistern_key_chain(space, NULL, p->tokens, N * BT, p->keys, N, &n)) {
        free(p);
        return NULL;
    }
    for (size_t i = 0; i < N; i++) {
        fill(p->blocks[i], p->keys + 32 * i);
        p->sources[i] = p->targets[i] = p->blocks[i];
        p->sizes[i] = BLOCK;
    }
    return p;
}

static struct prompt *prompt_new(cistern_space *space, uint32_t number) {
    struct prompt *p = prompt_make(space, number);

    assert_non_null(p);
    return p;
}

static int32_t put(cistern_space *space, struct prompt *p) {
    return cistern_put_from(space, NULL, p->keys, p->tokens, N * BT, N, p->sources, p->statuses);
}

static void put_all(cistern_space *space, struct prompt *p) {
    assert_int_equal(put(space, p), CISTERN_OK);
    for (size_t i = 0; i < N; i++)
        assert_true(p->statuses[i] == CISTERN_OK || p->statuses[i] == CISTERN_E_PRESENT);
}

/* ---- client ---- */

static cistern_client *connect_client(uint32_t flags) {
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;
    cistern_client *c = NULL;

    options.socket_path = daemon_.socket;
    options.flags = flags;
    if (cistern_client_open(&c, &options))
        fail_msg("client_open: %s", cistern_last_error());
    return c;
}

static cistern_space *open_space(cistern_client *c, const char *model) {
    static const cistern_layer layer = { .kv_heads = HEADS, .head_dim_k = DIM, .head_dim_v = DIM };
    cistern_segment segments[2];
    cistern_descriptor d = { .size = sizeof(d),
                             .block_tokens = BT,
                             .block_bytes = BLOCK,
                             .engine = "test",
                             .n_layers = 1,
                             .n_segments = 2,
                             .layers = &layer,
                             .segments = segments };
    cistern_space *space = NULL;

    for (uint32_t i = 0; i < 2; i++)
        segments[i] = (cistern_segment){ .tensor = i,
                                         .dtype = CISTERN_DTYPE_BF16,
                                         .offset = (uint64_t)i * TENSOR,
                                         .length = TENSOR,
                                         .token_stride = HEADS * DIM * 2,
                                         .head_stride = DIM * 2,
                                         .dim_stride = 2 };
    memcpy(d.content_id, model, strlen(model));
    if (cistern_space_open(c, &d, NULL, &space))
        fail_msg("space_open: %s", cistern_last_error());
    return space;
}

static size_t mapped_slabs(void) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    size_t n = 0;

    assert_non_null(maps);
    while (fgets(line, sizeof(line), maps))
        n += strstr(line, "memfd:") && strstr(line, "r--s");
    (void)fclose(maps);
    return n;
}

/* Of one space, or (NULL) of the namespace. */
static uint64_t counter(cistern_client *c, cistern_space *space, const char *name) {
    char json[4096], field[64];
    const char *at;

    assert_int_equal(cistern_stats(c, space, json, sizeof(json)), CISTERN_OK);
    (void)snprintf(field, sizeof(field), "\"%s\":", name);
    at = strstr(json, field);
    assert_non_null(at);
    return strtoull(at + strlen(field), NULL, 10);
}

/* ---- tests ---- */

static void test_every_way_back(void **state) {
    cistern_client *c = connect_client(0);
    cistern_space *space = open_space(c, "every way");
    struct prompt *p = prompt_new(space, 1);
    cistern_match match = { .size = sizeof(match) };
    cistern_lease *leases[N];

    put_all(space, p);
    assert_int_equal(cistern_lookup(space, p->tokens, N * BT, NULL, &match), CISTERN_OK);
    assert_int_equal(match.blocks, N);
    assert_int_equal(cistern_lookup(space, p->tokens, 3 * BT + 5, NULL, &match), CISTERN_OK);
    assert_int_equal(match.blocks, 3);
    assert_int_equal(match.partial_tokens, 5);
    assert_int_equal(match.partial_stored, BT);
    assert_memory_equal(match.partial_key, p->keys + 3 * 32, 32);
    assert_int_equal(cistern_acquire(space, p->keys, N, NULL, leases, p->statuses), CISTERN_OK);
    for (size_t i = 0; i < N; i++) {
        const void *data;
        size_t size;

        assert_int_equal(p->statuses[i], CISTERN_OK);
        assert_int_equal(cistern_lease_data(leases[i], &data, &size, NULL), CISTERN_OK);
        assert_int_equal(size, BLOCK);
        assert_true(is_block(data, p->keys + 32 * i));
    }
    cistern_release(c, leases, N);
    memset(p->blocks, 0, sizeof(p->blocks));
    assert_int_equal(cistern_get_into(space, p->keys, N, p->targets, p->sizes, p->statuses),
                     CISTERN_OK);
    for (size_t i = 0; i < N; i++)
        assert_true(is_block(p->blocks[i], p->keys + 32 * i));
    assert_int_equal(counter(c, NULL, "leases"), 0);
    assert_int_equal(counter(c, NULL, "reserved"), 0);
    free(p);
    cistern_client_close(c);
}

/* Frames that the daemon encoded decode here to the same bytes. */
static void test_packed(void **state) {
    cistern_client *c = connect_client(0);
    cistern_space *space = open_space(c, "packed");
    struct prompt *p = prompt_new(space, 1);
    cistern_acquire_options options = { .size = sizeof(options), .mode = 1 };
    cistern_lease *leases[N];
    uint8_t block[BLOCK];
    unsigned frames = 0;

    put_all(space, p);
    while (counter(c, space, "packed_bytes") == 0)
        (void)usleep(1000); /* the daemon encodes behind our back */
    assert_int_equal(cistern_acquire(space, p->keys, N, &options, leases, p->statuses), CISTERN_OK);
    for (size_t i = 0; i < N; i++) {
        cistern_lease_info info = { .size = sizeof(info) };
        const void *data;
        size_t size;

        assert_int_equal(p->statuses[i], CISTERN_OK);
        assert_int_equal(cistern_lease_data(leases[i], &data, &size, &info), CISTERN_OK);
        assert_true(info.packed ? size < BLOCK : size == BLOCK);
        frames += info.packed;
        memset(block, 0, sizeof(block));
        assert_int_equal(cistern_lease_decode(leases[i], block, sizeof(block)), CISTERN_OK);
        assert_true(is_block(block, p->keys + 32 * i));
    }
    assert_true(frames > 0);
    cistern_release(c, leases, N);
    free(p);
    cistern_client_close(c);
}

/* More keys than a packet holds, through staging. */
static void test_long_list(void **state) {
    enum { KEYS = 6000 };
    cistern_client *c = connect_client(0);
    cistern_space *space = open_space(c, "long list");
    struct prompt *p = prompt_new(space, 1);
    uint8_t *keys = calloc(KEYS, 32), *tiers = calloc(KEYS, 1);
    size_t present = 0;

    assert_true(keys && tiers);
    put_all(space, p);
    memcpy(keys, p->keys, sizeof(p->keys));
    assert_int_equal(cistern_lookup_keys(space, keys, KEYS, tiers, &present), CISTERN_OK);
    assert_int_equal(present, N);
    for (size_t i = 0; i < KEYS; i++)
        assert_int_equal(tiers[i] != CISTERN_TIER_NONE, i < N);
    free(keys);
    free(tiers);
    free(p);
    cistern_client_close(c);
}

/* Far more than the memory, again and again: slabs come and go, and none stays mapped for ever. */
static void test_pressure(void **state) {
    enum { PROMPTS = 40 };
    cistern_client *c = connect_client(0);

    for (uint32_t i = 0; i < PROMPTS; i++) {
        char model[32];
        cistern_space *space;
        struct prompt *p;
        cistern_lease *leases[N];

        (void)snprintf(model, sizeof(model), "pressure %u", i);
        space = open_space(c, model);
        p = prompt_new(space, i);
        assert_int_equal(put(space, p), CISTERN_OK);
        assert_int_equal(cistern_acquire(space, p->keys, N, NULL, leases, p->statuses), CISTERN_OK);
        for (size_t k = 0; k < N; k++) {
            const void *data;
            size_t size;

            if (p->statuses[k])
                continue;
            assert_int_equal(cistern_lease_data(leases[k], &data, &size, NULL), CISTERN_OK);
            assert_true(is_block(data, p->keys + 32 * k));
        }
        cistern_release(c, leases, N);
        cistern_space_close(space);
        free(p);
    }
    assert_int_equal(cistern_client_ping(c), CISTERN_OK);
    assert_true(mapped_slabs() < PROMPTS);
    assert_true(counter(c, NULL, "evicted_blocks") > 0);
    assert_int_equal(counter(c, NULL, "leases"), 0);
    cistern_client_close(c);
}

/* ---- threads ---- */

struct worker {
    cistern_client *client;
    cistern_space *space;
    pthread_t thread;
    uint32_t number;
    bool ok;
};

static bool work_once(struct worker *w, struct prompt *p) {
    cistern_match match = { .size = sizeof(match) };
    size_t from = (w->number * 5) % 16;

    if (put(w->space, p) || cistern_lookup(w->space, p->tokens, N * BT, NULL, &match))
        return false;
    memset(p->blocks, 0, sizeof(p->blocks));
    if (cistern_get_into(w->space, p->keys + 32 * from, N - from, p->targets, p->sizes,
                         p->statuses))
        return false;
    for (size_t i = 0; i < N - from; i++)
        if (!p->statuses[i] && !is_block(p->blocks[i], p->keys + 32 * (from + i)))
            return false;
    for (size_t i = 0; i < N; i++)
        fill(p->blocks[i], p->keys + 32 * i);
    return true;
}

/* Two threads share each prompt, so they write and read the same blocks at once. */
static void *work(void *arg) {
    struct worker *w = arg;

    w->ok = true;
    for (uint32_t i = 0; w->ok && i < 6; i++) {
        struct prompt *p = prompt_make(w->space, 10 * i + w->number / 2);

        w->ok = p && work_once(w, p);
        if (!w->ok)
            (void)fprintf(stderr, "thread %u: %s\n", w->number, cistern_last_error());
        free(p);
    }
    return NULL;
}

static void run_threads(uint32_t flags) {
    enum { THREADS = 6 };
    cistern_client *c = connect_client(flags);
    cistern_space *space = open_space(c, "threads");
    struct worker workers[THREADS];

    for (uint32_t i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){ .client = c, .space = space, .number = i };
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (uint32_t i = 0; i < THREADS; i++) /* all: they use this function's variables */
        assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
    for (uint32_t i = 0; i < THREADS; i++)
        assert_true(workers[i].ok);
    assert_int_equal(counter(c, NULL, "leases"), 0);
    assert_int_equal(counter(c, NULL, "reserved"), 0);
    cistern_client_close(c);
}

static void test_threads(void **state) {
    run_threads(0);
}

static void test_threads_beside_the_library_thread(void **state) {
    run_threads(CISTERN_CLIENT_ASYNC);
}

/* ---- kill -9 of the daemon ---- */

static void test_killed_daemon(void **state) {
    cistern_client *c = connect_client(0);
    cistern_space *space = open_space(c, "killed");
    struct prompt *p = prompt_new(space, 1);
    cistern_match match = { .size = sizeof(match) };
    cistern_lease *lease;
    const void *data;
    size_t size;
    uint64_t before, after;

    assert_int_equal(cistern_client_info(c, &before, NULL), CISTERN_OK);
    put_all(space, p);
    assert_int_equal(cistern_acquire(space, p->keys, 1, NULL, &lease, p->statuses), CISTERN_OK);
    assert_int_equal(p->statuses[0], CISTERN_OK);
    cst_spawn_kill(&daemon_);
    assert_int_equal(cistern_lookup(space, p->tokens, N * BT, NULL, &match), CISTERN_OK);
    assert_int_equal(match.blocks, 0);
    assert_int_equal(put(space, p), CISTERN_E_DISCONNECTED);
    assert_int_equal(cistern_lease_data(lease, &data, &size, NULL), CISTERN_OK);
    assert_true(is_block(data, p->keys));
    assert_int_equal(cst_spawn_start(&daemon_, cst_spawn_program(), NULL), 0);
    while (cistern_client_ping(c))
        (void)usleep(1000);
    assert_int_equal(cistern_client_info(c, &after, NULL), CISTERN_OK);
    assert_true(after != before);
    put_all(space, p); /* the space has reopened by itself */
    assert_int_equal(cistern_lookup(space, p->tokens, N * BT, NULL, &match), CISTERN_OK);
    assert_int_equal(match.blocks, N);
    assert_true(is_block(data, p->keys)); /* the old mapping, still */
    cistern_release(c, &lease, 1);
    free(p);
    cistern_client_close(c);
}

struct survivor {
    cistern_client *client;
    cistern_space *space;
    pthread_t thread;
    _Atomic bool *stop;
    _Atomic unsigned served;
    unsigned wrong; /* blocks */
    bool failed;    /* for want of memory */
};

static void count_blocks(struct survivor *s, const struct prompt *p) {
    for (size_t k = 0; k < N; k++) {
        bool right = p->statuses[k] || is_block(p->blocks[k], p->keys + 32 * k);

        s->served += !p->statuses[k];
        s->wrong += !right;
        if (!right)
            (void)fprintf(stderr, "block %zu of a prompt that begins with %u is another\n", k,
                          (unsigned)p->tokens[0]);
    }
}

/* Puts and gets without a pause. Any call may find the daemon gone; no byte may be wrong. */
static void *survive(void *arg) {
    struct survivor *s = arg;

    for (uint32_t i = 0; !*s->stop; i++) {
        struct prompt *p = prompt_make(s->space, 100 + i % 4);

        if (!p) {
            s->failed = true;
            break;
        }
        (void)put(s->space, p);
        memset(p->blocks, 0, sizeof(p->blocks));
        if (!cistern_get_into(s->space, p->keys, N, p->targets, p->sizes, p->statuses))
            count_blocks(s, p);
        free(p);
    }
    return NULL;
}

static unsigned served(const struct survivor *all, size_t n) {
    unsigned sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += all[i].served;
    return sum;
}

static void test_killed_under_load(void **state) {
    enum { THREADS = 4, KILLS = 8 };
    _Atomic bool enough = false;
    cistern_client *c = connect_client(CISTERN_CLIENT_ASYNC);
    cistern_space *space = open_space(c, "under load");
    struct survivor all[THREADS];
    int started = 0;

    for (uint32_t i = 0; i < THREADS; i++) {
        memset(&all[i], 0, sizeof(all[i]));
        all[i].client = c;
        all[i].space = space;
        all[i].stop = &enough;
        assert_int_equal(pthread_create(&all[i].thread, NULL, survive, &all[i]), 0);
    }
    for (int i = 0; i < KILLS && !started; i++) {
        unsigned before = served(all, THREADS);

        while (served(all, THREADS) == before) /* they carry on; then anywhere in their calls */
            (void)usleep(1000);
        cst_spawn_kill(&daemon_);
        started = cst_spawn_start(&daemon_, cst_spawn_program(), NULL);
    }
    enough = true;
    for (uint32_t i = 0; i < THREADS; i++) /* all: they use this function's variables */
        assert_int_equal(pthread_join(all[i].thread, NULL), 0);
    assert_int_equal(started, 0);
    for (uint32_t i = 0; i < THREADS; i++)
        assert_true(!all[i].wrong && !all[i].failed);
    while (cistern_client_ping(c))
        (void)usleep(1000);
    assert_int_equal(counter(c, NULL, "leases"), 0);
    assert_int_equal(counter(c, NULL, "reserved"), 0);
    cistern_client_close(c);
}

static int start(void **state) {
    static const char *const small[] = { "--memory", "96MiB", "--slab", "2MiB", NULL };

    return cst_spawn_start(&daemon_, cst_spawn_program(), small);
}

static int stop(void **state) {
    int rc = cst_spawn_stop(&daemon_);

    if (rc)
        (void)fprintf(stderr, "cisternd ended with %d\n", rc);
    return rc;
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_way_back),
        cmocka_unit_test(test_packed),
        cmocka_unit_test(test_long_list),
        cmocka_unit_test(test_pressure),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_threads_beside_the_library_thread),
        cmocka_unit_test(test_killed_daemon),
        cmocka_unit_test(test_killed_under_load),
    };
    int failed;

    if (!cst_spawn_program())
        return cst_skip("no cisternd in the build tree");
    failed = cmocka_run_group_tests(tests, start, stop);
    cst_spawn_cleanup(&daemon_);
    return failed;
}
