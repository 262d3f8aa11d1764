/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lookup.over_echo: "how much of this prompt is stored?" for 2,048 keys, one packet each way,
 * against an echo of the very same bytes. Both processes on one core. The worst of three prompts
 * that share 0, 1,000 and all blocks with the stored one.
 *
 * lookup.partial_over_echo: the call that also finds the match inside the next block (two packets
 * each way) against two echoes.
 */
#include "bench/benches.h"

#include "bench/bench_fixture.h"
#include "bench/echo.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_TOKENS = 64, BLOCKS = 2048, PARTIAL_TOKENS = 20 };

struct query {
    cistern_space *space;
    const struct cst_prompt *prompt;
    size_t run;      /* leading blocks that are stored */
    uint32_t inside; /* tokens that match inside the next block */
};

static int run_keys(void *arg, unsigned ops) {
    struct query *q = arg;
    size_t n = 0;

    while (ops--) {
        int32_t status = cistern_lookup_keys(q->space, q->prompt->keys, q->prompt->n, NULL, &n);

        if (status != CISTERN_OK || n != q->run)
            return status != CISTERN_OK ? cst_ok(status, "lookup") : -EIO;
    }
    return 0;
}

static int run_partial(void *arg, unsigned ops) {
    struct query *q = arg;
    cistern_match m = { .size = sizeof(m) };

    while (ops--) {
        int32_t status =
            cistern_lookup(q->space, q->prompt->tokens, q->prompt->n_tokens, q->prompt->keys, &m);

        if (status != CISTERN_OK || m.blocks != q->run || m.partial_tokens != q->inside)
            return status != CISTERN_OK ? cst_ok(status, "lookup") : -EIO;
    }
    return 0;
}

/* Records the packets of one operation through a tap, then measures against their echo. */
static int against_echo(struct cst_compared *out, size_t *exchanges, const struct cst_fixture *f,
                        cst_side_fn run, const struct query *q) {
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;
    struct cst_recording *recording = calloc(1, sizeof(*recording));
    struct cst_echo echo = { .fd = -1 };
    struct query tapped = *q;
    cistern_client *client = NULL;
    struct cst_tap *tap = NULL;
    char path[128];
    int r;

    if (!recording)
        return -ENOMEM;
    (void)snprintf(path, sizeof(path), "%s/tap", f->daemon.dir);
    (void)unlink(path);
    r = cst_tap_new(&tap, path, f->daemon.socket);
    options.socket_path = path;
    if (!r)
        r = cst_ok(cistern_client_open(&client, &options), "connect");
    if (!r)
        r = cst_fixture_space(&tapped.space, client, BLOCK_TOKENS, 4096);
    if (!r)
        r = run(&tapped, 1);
    if (!r) {
        cst_tap_record(tap, recording);
        r = run(&tapped, 1);
        cst_tap_record(tap, NULL);
    }
    cistern_client_close(client);
    (void)cst_tap_free(tap);
    if (!r)
        r = cst_echo_open(&echo, recording);
    if (!r)
        r = cst_compare(out, (struct cst_side){ run, (void *)(uintptr_t)q },
                        (struct cst_side){ cst_echo_run, &echo });
    *exchanges = recording->n;
    cst_echo_close(&echo);
    free(recording);
    return r;
}

/* The stored prompt up to `run` blocks, then `inside` more tokens of it, then others. */
static int branch(struct cst_prompt *out, cistern_space *space, const struct cst_prompt *stored,
                  size_t run, size_t inside) {
    size_t n = 0;
    int r = cst_prompt_init(out, space, BLOCKS, 99);

    if (r)
        return r;
    memcpy(out->tokens, stored->tokens, (run * BLOCK_TOKENS + inside) * sizeof(*out->tokens));
    if (run < BLOCKS) /* differ for sure */
        out->tokens[run * BLOCK_TOKENS + inside] = stored->tokens[run * BLOCK_TOKENS + inside] + 1;
    return cst_ok(cistern_key_chain(space, NULL, out->tokens, out->n_tokens, out->keys, BLOCKS, &n),
                  "keys");
}

static int measure(const char *name, const struct cst_fixture *f, cistern_space *space,
                   const struct cst_prompt *stored, bool partial, const size_t *runs,
                   size_t n_runs) {
    struct cst_compared m, worst = { .a = 0, .b = 1 };
    size_t exchanges = 0, worst_run = 0;
    int r = 0;

    for (size_t i = 0; i < n_runs && !r; i++) {
        size_t inside = partial ? PARTIAL_TOKENS : 0;
        struct cst_prompt prompt = { 0 };
        struct query q = { space, &prompt, runs[i], (uint32_t)inside };

        r = branch(&prompt, space, stored, runs[i], inside);
        if (!r)
            r = against_echo(&m, &exchanges, f, partial ? run_partial : run_keys, &q);
        if (!r && m.a / m.b > worst.a / worst.b) {
            worst = m;
            worst_run = runs[i];
        }
        cst_prompt_deinit(&prompt);
    }
    if (!r)
        cst_report(&(struct cst_figure){ .name = name,
                                         .value = worst.a / worst.b,
                                         .unit = "ratio",
                                         .sense = CST_AT_MOST,
                                         .target = 1.25 },
                   "\"ours_us\": %.2f, \"echo_us\": %.2f, \"round_trips\": %zu, \"keys\": %d, "
                   "\"worst_run\": %zu, \"pairs\": [%.3f, %.3f]",
                   worst.a * 1e6, worst.b * 1e6, exchanges, BLOCKS, worst_run, worst.low,
                   worst.high);
    return r;
}

int cst_bench_lookup(void) {
    static const size_t runs[] = { 0, 1000, 2048 };
    struct cst_fixture f = CST_FIXTURE_NULL;
    struct cst_prompt stored = { 0 };
    cistern_space *space = NULL;
    int r = cst_fixture_init(&f);

    if (!r)
        r = cst_fixture_space(&space, f.client, BLOCK_TOKENS, 4096);
    if (!r)
        r = cst_prompt_init(&stored, space, BLOCKS, 1);
    if (!r)
        r = cst_prompt_store(space, &stored, 0, BLOCKS, NULL);
    if (!r) {
        cst_fixture_settle(&f);
        r = measure("lookup.over_echo", &f, space, &stored, false, runs, CST_COUNT(runs));
    }
    if (!r) /* a whole hit has no block left to match inside */
        r = measure("lookup.partial_over_echo", &f, space, &stored, true, runs, 2);
    cst_prompt_deinit(&stored);
    cst_fixture_deinit(&f);
    return r;
}
