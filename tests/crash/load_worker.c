/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A worker for the crash tests: puts and gets blocks through libcistern for ever and checks every
 * byte it reads. usage: load_worker SOCKET SEED [PROMPTS]
 *
 * Invariants: 1. A block's bytes are a function of its key (splitmix64), so any mix-up shows; what
 * is aborted holds other bytes, so that a store that failed is never seen unnoticed. 2. A lost
 * daemon, a full one, a key that somebody else writes: all of that is no failure. A wrong byte is:
 * exit 1. 3. One byte on stdout for each operation: 'p' a put that the daemon answered, 'g' read
 * and checked, 'm' missed or aborted, 'x' no answer. The reader counts them.
 *
 * One thread. Leases are kept over one more operation, and checked again before they are given
 * back: memory that was leased must stay as it was, even after the daemon died.
 */
#include <cistern/cistern.h>

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { TOKENS = 16, DIM = 256, BLOCK = 2 * TOKENS * DIM * 2, BLOCKS_MAX = 4, PROMPTS = 1500 };

struct worker {
    cistern_client *client;
    cistern_space *space;
    uint64_t random, prompts;
    cistern_lease *held[BLOCKS_MAX];
    uint8_t held_keys[BLOCKS_MAX * CISTERN_KEY_SIZE];
    size_t n_held;
};

struct prompt {
    uint32_t tokens[BLOCKS_MAX * TOKENS];
    uint8_t keys[BLOCKS_MAX * CISTERN_KEY_SIZE];
    size_t n; /* blocks */
};

static uint64_t next(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static void fail(const char *what, int32_t status) {
    (void)fprintf(stderr, "load_worker: %s: %" PRId32 " %s\n", what, status, cistern_last_error());
    exit(1);
}

static void say(char c) {
    if (write(STDOUT_FILENO, &c, 1) != 1)
        exit(0); /* nobody listens any more */
}

static void fill(const uint8_t *key, uint64_t *words) {
    uint64_t state;

    memcpy(&state, key, sizeof(state));
    for (size_t i = 0; i < BLOCK / sizeof(*words); i++)
        words[i] = next(&state);
}

static void check(const uint8_t *key, const uint64_t *words) {
    uint64_t state;

    memcpy(&state, key, sizeof(state));
    for (size_t i = 0; i < BLOCK / sizeof(*words); i++)
        if (words[i] != next(&state))
            fail("a wrong byte", CISTERN_E_CORRUPT);
}

/* Prompts form a small forest, so that workers meet each other's blocks. */
static void draw_prompt(struct worker *w, struct prompt *p) {
    uint64_t seed = next(&w->random) % w->prompts;
    size_t n;
    int32_t r;

    p->n = 1 + next(&w->random) % BLOCKS_MAX;
    for (size_t i = 0; i < p->n * TOKENS; i++) {
        uint64_t state = (i / TOKENS < 2 ? seed / 4 : seed) * 1000 + i;

        p->tokens[i] = (uint32_t)(next(&state) % 50000);
    }
    r = cistern_key_chain(w->space, NULL, p->tokens, p->n * TOKENS, p->keys, BLOCKS_MAX, &n);
    if (r || n != p->n)
        fail("key_chain", r);
}

/* Waits a little when there is no daemon: it is being restarted. */
static void pause_a_little(void) {
    struct timespec t = { .tv_nsec = 2 * 1000 * 1000 };

    (void)nanosleep(&t, NULL);
}

static void give_back(struct worker *w) {
    for (size_t i = 0; i < w->n_held; i++) {
        const void *data;
        size_t size;

        if (cistern_lease_data(w->held[i], &data, &size, NULL) || size != BLOCK)
            fail("a lease changed its size", 0);
        check(w->held_keys + i * CISTERN_KEY_SIZE, data);
    }
    cistern_release(w->client, w->held, w->n_held);
    w->n_held = 0;
}

static void get(struct worker *w) {
    cistern_lease *leases[BLOCKS_MAX];
    int32_t statuses[BLOCKS_MAX], r;
    cistern_match match = { .size = sizeof(match) };
    struct prompt p;

    draw_prompt(w, &p);
    r = cistern_lookup(w->space, p.tokens, p.n * TOKENS, p.keys, &match);
    if (r == 0 && match.blocks > p.n)
        fail("more blocks than asked for", r);
    if (r || !match.blocks) {
        say(r ? 'x' : 'm');
        if (r)
            pause_a_little();
        return;
    }
    r = cistern_acquire(w->space, p.keys, match.blocks, NULL, leases, statuses);
    if (r) {
        say('x');
        return;
    }
    give_back(w);
    for (size_t i = 0; i < match.blocks; i++) {
        const void *data;
        size_t size;

        if (statuses[i])
            continue;
        if (cistern_lease_data(leases[i], &data, &size, NULL) || size != BLOCK)
            fail("a lease of a wrong size", 0);
        check(p.keys + i * CISTERN_KEY_SIZE, data);
        memcpy(w->held_keys + w->n_held * CISTERN_KEY_SIZE, p.keys + i * CISTERN_KEY_SIZE,
               CISTERN_KEY_SIZE);
        w->held[w->n_held++] = leases[i];
    }
    say(w->n_held ? 'g' : 'm');
}

static void put(struct worker *w) {
    cistern_slot *slots[BLOCKS_MAX];
    int32_t statuses[BLOCKS_MAX], r;
    bool keep = next(&w->random) % 8;
    struct prompt p;

    draw_prompt(w, &p);
    r = cistern_reserve(w->space, NULL, p.keys, p.tokens, p.n * TOKENS, p.n, slots, statuses);
    if (r) {
        say('x');
        pause_a_little();
        return;
    }
    for (size_t i = 0; i < p.n; i++) {
        void *data;
        size_t size;

        if (statuses[i])
            continue;
        if (cistern_slot_data(slots[i], &data, &size) || size != BLOCK)
            fail("a slot of a wrong size", 0);
        if (keep)
            fill(p.keys + i * CISTERN_KEY_SIZE, data);
        else
            memset(data, 0x5a, size);
    }
    if (!keep) {
        cistern_abort(w->space, slots, p.n);
        say('m');
        return;
    }
    r = cistern_commit(w->space, slots, p.n, NULL, statuses);
    say(r ? 'x' : 'p');
}

static void open_space(struct worker *w, const char *path) {
    static const cistern_layer layer = { .kv_heads = 1, .head_dim_k = DIM, .head_dim_v = DIM };
    static const cistern_segment segments[] = {
        { .tensor = CISTERN_TENSOR_K,
          .dtype = CISTERN_DTYPE_F16,
          .length = BLOCK / 2,
          .token_stride = DIM * 2,
          .head_stride = DIM * 2,
          .dim_stride = 2 },
        { .tensor = CISTERN_TENSOR_V,
          .dtype = CISTERN_DTYPE_F16,
          .offset = BLOCK / 2,
          .length = BLOCK / 2,
          .token_stride = DIM * 2,
          .head_stride = DIM * 2,
          .dim_stride = 2 },
    };
    cistern_descriptor descriptor = {
        .size = sizeof(descriptor),
        .block_tokens = TOKENS,
        .block_bytes = BLOCK,
        .content_id = { 7 },
        .engine = "load",
        .n_layers = 1,
        .n_segments = 2,
        .layers = &layer,
        .segments = segments,
    };
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;
    int32_t r;

    options.socket_path = path;
    options.name = "load";
    r = cistern_client_open(&w->client, &options);
    if (r)
        fail("client_open", r);
    r = cistern_space_open(w->client, &descriptor, NULL, &w->space);
    if (r)
        fail("space_open", r);
}

int main(int argc, char **argv) {
    struct worker w = { 0 };

    if (argc < 3 || argc > 4) {
        (void)fputs("usage: load_worker SOCKET SEED [PROMPTS]\n", stderr);
        return 2;
    }
    w.random = strtoull(argv[2], NULL, 10);
    w.prompts = argc == 4 ? strtoull(argv[3], NULL, 10) : PROMPTS;
    open_space(&w, argv[1]);
    for (;;)
        if (next(&w.random) % 2)
            put(&w);
        else
            get(&w);
}
