/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the private daemon of a benchmark. Everything goes through libcistern's public functions,
 * as in a user's program. One thread.
 */
#include "bench/bench_fixture.h"

#include "base/random.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int cst_ok(int32_t status, const char *what) {
    if (status == CISTERN_OK)
        return 0;
    (void)fprintf(stderr, "%s: %s (%s)\n", what, cistern_status_text(status), cistern_last_error());
    return -EIO;
}

int cst_fixture_init(struct cst_fixture *f) {
    const char *const args[] = { "--memory", "1GiB", NULL };
    const char *program = cst_spawn_program();
    int r = program ? cst_spawn_start(&f->daemon, program, args) : -ENOENT;

    if (r) {
        (void)fprintf(stderr, "cannot start cisternd: %s\n", strerror(-r));
        return r;
    }
    r = cst_pin();
    if (!r)
        r = cst_pin_process(f->daemon.pid);
    if (!r) {
        cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;

        options.socket_path = f->daemon.socket;
        r = cst_ok(cistern_client_open(&f->client, &options), "connect");
    }
    return r;
}

void cst_fixture_deinit(struct cst_fixture *f) {
    cistern_client_close(f->client);
    f->client = NULL;
    (void)cst_spawn_stop(&f->daemon);
    cst_spawn_cleanup(&f->daemon);
}

static unsigned long long cpu_ticks(pid_t pid) {
    unsigned long long user = 0, system = 0;
    char path[64], text[1024] = "";
    FILE *f;

    (void)snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    f = fopen(path, "re");
    if (f) {
        const char *after_name = fgets(text, sizeof(text), f) ? strrchr(text, ')') : NULL;

        if (after_name)
            (void)sscanf(after_name + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu",
                         &user, &system);
        (void)fclose(f);
    }
    return user + system;
}

void cst_fixture_settle(const struct cst_fixture *f) {
    const struct timespec wait = { .tv_nsec = 200 * 1000 * 1000 };
    unsigned long long last;

    do {
        last = cpu_ticks(f->daemon.pid);
        (void)nanosleep(&wait, NULL);
    } while (cpu_ticks(f->daemon.pid) > last);
}

int cst_fixture_space(cistern_space **out, cistern_client *client, uint32_t block_tokens,
                      uint64_t block_bytes) {
    const cistern_layer layer = { 0 };
    const cistern_segment segment = {
        .tensor = CISTERN_TENSOR_OPAQUE,
        .dtype = CISTERN_DTYPE_OPAQUE,
        .length = block_bytes,
        .token_stride = block_bytes / block_tokens,
    };
    const cistern_descriptor descriptor = {
        .size = sizeof(descriptor),
        .content_id = { 1 },
        .block_tokens = block_tokens,
        .block_bytes = block_bytes,
        .engine = "bench",
        .tp_size = 1,
        .n_layers = 1,
        .n_segments = 1,
        .layers = &layer,
        .segments = &segment,
    };

    return cst_ok(cistern_space_open(client, &descriptor, NULL, out), "space");
}

int cst_prompt_init(struct cst_prompt *p, cistern_space *space, size_t blocks, uint64_t seed) {
    size_t per_block = cistern_space_block_tokens(space);
    struct cst_seeded_random rng;
    size_t n = 0;
    int r;

    *p = (struct cst_prompt){ .n_tokens = blocks * per_block, .n = blocks };
    p->tokens = calloc(p->n_tokens, sizeof(*p->tokens));
    p->keys = calloc(blocks, CISTERN_KEY_SIZE);
    if (!p->tokens || !p->keys)
        return -ENOMEM;
    cst_seeded_random_init(&rng, seed);
    for (size_t i = 0; i < p->n_tokens; i++)
        p->tokens[i] = (uint32_t)(cst_seeded_random_next(&rng) % 128000);
    r = cst_ok(cistern_key_chain(space, NULL, p->tokens, p->n_tokens, p->keys, blocks, &n), "keys");
    return r ? r : n == blocks ? 0 : -EIO;
}

void cst_prompt_deinit(struct cst_prompt *p) {
    free(p->tokens);
    free(p->keys);
    *p = (struct cst_prompt){ 0 };
}

int cst_prompt_store(cistern_space *space, const struct cst_prompt *p, size_t first, size_t n,
                     const void *const *blocks) {
    size_t per_block = cistern_space_block_tokens(space), size = cistern_space_block_bytes(space);
    const void **all = calloc(n, sizeof(*all));
    int32_t *statuses = calloc(n, sizeof(*statuses));
    void *same = blocks ? NULL : calloc(1, size);
    int r = all && statuses && (blocks || same) ? 0 : -ENOMEM;

    for (size_t i = 0; i < n && !r; i++)
        all[i] = blocks ? blocks[i] : same;
    if (!r)
        r = cst_ok(cistern_put_from(space, first ? p->keys + (first - 1) * CISTERN_KEY_SIZE : NULL,
                                    p->keys + first * CISTERN_KEY_SIZE,
                                    p->tokens + first * per_block, n * per_block, n, all, statuses),
                   "put");
    for (size_t i = 0; i < n && !r; i++)
        r = cst_ok(statuses[i], "put of a block");
    free(all);
    free(statuses);
    free(same);
    return r;
}
