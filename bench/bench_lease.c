/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lease.over_echo: take the lease of a hot block and give back the one before, in one packet each
 * way, against an echo of the same bytes on the same core; beside it, in the detail, against an
 * echo whose client would wait for ever. lease.syscalls: what else than send,
 * receive and poll both processes call for it. shm.import_us: what the first lease in a slab costs
 * more than the next one (descriptor passing, mmap, first touch).
 */
#include "bench/benches.h"

#include "bench/bench_fixture.h"
#include "bench/echo.h"
#include "bench/syscalls.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

enum { BLOCK_TOKENS = 64, BLOCK_BYTES = 1 << 20, BLOCKS = 4, IMPORTS = 51 };

struct holder {
    cistern_client *client;
    cistern_space *space;
    const uint8_t *key;
    cistern_lease *held;
};

/* Acquires the block; the lease of the last call is released in the same packet. */
static int run_lease(void *arg, unsigned ops) {
    struct holder *h = arg;

    while (ops--) {
        const cistern_acquire_options options = {
            .size = sizeof(options),
            .n_release = h->held ? 1 : 0,
            .release = &h->held,
        };
        cistern_lease *lease = NULL;
        int32_t status = CISTERN_OK;
        int r = cst_ok(cistern_acquire(h->space, h->key, 1, &options, &lease, &status), "acquire");

        if (!r)
            r = cst_ok(status, "acquire of a block");
        h->held = lease;
        if (r)
            return r;
    }
    return 0;
}

static void holder_deinit(struct holder *h) {
    if (h->held)
        cistern_release(h->client, &h->held, 1);
    cistern_client_close(h->client);
    *h = (struct holder){ 0 };
}

static int holder_init(struct holder *h, const char *socket, const uint8_t *key) {
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;
    int r;

    *h = (struct holder){ .key = key };
    options.socket_path = socket;
    r = cst_ok(cistern_client_open(&h->client, &options), "connect");
    return r ? r : cst_fixture_space(&h->space, h->client, BLOCK_TOKENS, BLOCK_BYTES);
}

/* The packets of one operation in the steady state. */
static int record(struct cst_recording *out, const struct cst_fixture *f, const uint8_t *key) {
    struct holder h = { 0 };
    struct cst_tap *tap = NULL;
    char path[128];
    int r;

    (void)snprintf(path, sizeof(path), "%s/tap", f->daemon.dir);
    r = cst_tap_new(&tap, path, f->daemon.socket);
    if (!r)
        r = holder_init(&h, path, key);
    if (!r)
        r = run_lease(&h, 8);
    if (!r) {
        cst_tap_record(tap, out);
        r = run_lease(&h, 1);
        cst_tap_record(tap, NULL);
    }
    holder_deinit(&h);
    (void)cst_tap_free(tap);
    return r;
}

static int over_echo(const struct cst_fixture *f, const uint8_t *key) {
    struct cst_recording *recording = calloc(1, sizeof(*recording));
    struct cst_echo echo = { .fd = -1 };
    struct holder h = { 0 };
    struct cst_compared m, endless;
    int r = recording ? record(recording, f, key) : -ENOMEM;

    if (!r)
        r = cst_echo_open(&echo, recording);
    if (!r)
        r = holder_init(&h, f->daemon.socket, key);
    if (!r)
        r = cst_compare(&m, (struct cst_side){ run_lease, &h },
                        (struct cst_side){ cst_echo_run, &echo });
    echo.endless = true;
    if (!r)
        r = cst_compare(&endless, (struct cst_side){ run_lease, &h },
                        (struct cst_side){ cst_echo_run, &echo });
    if (!r)
        cst_report(&(struct cst_figure){ .name = "lease.over_echo",
                                         .value = m.a / m.b,
                                         .unit = "ratio",
                                         .sense = CST_AT_MOST,
                                         .target = 1.15 },
                   "\"ours_us\": %.2f, \"echo_us\": %.2f, \"round_trips\": %zu, "
                   "\"request_bytes\": %zu, \"reply_bytes\": %zu, \"pairs\": [%.3f, %.3f], "
                   "\"over_endless_echo\": %.3f",
                   m.a * 1e6, m.b * 1e6, recording->n, recording->exchanges[0].request_len,
                   recording->exchanges[0].reply_len, m.low, m.high, endless.a / endless.b);
    holder_deinit(&h);
    cst_echo_close(&echo);
    free(recording);
    return r;
}

static int other_syscalls(const struct cst_fixture *f, const uint8_t *key) {
    struct cst_syscalls counted;
    struct holder h = { 0 };
    int r = holder_init(&h, f->daemon.socket, key);

    if (!r)
        r = run_lease(&h, 8);
    if (!r)
        r = cst_count_syscalls(&counted, f->daemon.pid, run_lease, &h);
    if (r == -ENOENT || r == -EPERM) {
        cst_report_skipped("lease.syscalls", r == -ENOENT ? "strace is not installed"
                                                          : "tracing is not allowed here");
        r = 0;
    } else if (!r) {
        cst_report(&(struct cst_figure){ .name = "lease.syscalls",
                                         .value = counted.other,
                                         .unit = "calls",
                                         .sense = CST_AT_MOST,
                                         .target = 0 },
                   "\"send_receive_poll\": %.2f, \"others\": \"%s\"", counted.wanted,
                   counted.names);
    }
    holder_deinit(&h);
    return r;
}

int cst_bench_lease(void) {
    struct cst_fixture f = CST_FIXTURE_NULL;
    struct cst_prompt prompt = { 0 };
    cistern_space *space = NULL;
    int r = cst_fixture_init(&f);

    if (!r)
        r = cst_fixture_space(&space, f.client, BLOCK_TOKENS, BLOCK_BYTES);
    if (!r)
        r = cst_prompt_init(&prompt, space, BLOCKS, 1);
    if (!r)
        r = cst_prompt_store(space, &prompt, 0, BLOCKS, NULL);
    if (!r) {
        cst_fixture_settle(&f);
        r = over_echo(&f, prompt.keys);
    }
    if (!r)
        r = other_syscalls(&f, prompt.keys);
    cst_prompt_deinit(&prompt);
    cst_fixture_deinit(&f);
    return r;
}

/* Seconds from the call until the block's first byte is read. */
static int first_byte(double *seconds, struct holder *h) {
    double start = cst_seconds();
    const void *data;
    size_t size;
    int r = run_lease(h, 1);

    if (!r)
        r = cst_ok(cistern_lease_data(h->held, &data, &size, NULL), "data");
    if (!r)
        (void)*(const volatile uint8_t *)data;
    *seconds = cst_seconds() - start;
    return r;
}

int cst_bench_shm(void) {
    double import[IMPORTS], first = 0, next = 0;
    struct cst_fixture f = CST_FIXTURE_NULL;
    struct cst_prompt prompt = { 0 };
    cistern_space *space = NULL;
    int r = cst_fixture_init(&f);

    if (!r)
        r = cst_fixture_space(&space, f.client, BLOCK_TOKENS, BLOCK_BYTES);
    if (!r)
        r = cst_prompt_init(&prompt, space, BLOCKS, 1);
    if (!r)
        r = cst_prompt_store(space, &prompt, 0, BLOCKS, NULL);
    if (!r)
        cst_fixture_settle(&f);
    for (size_t i = 0; i < IMPORTS && !r; i++) {
        struct holder h = { 0 };

        r = holder_init(&h, f.daemon.socket, prompt.keys);
        if (!r)
            r = first_byte(&first, &h);
        if (!r)
            r = first_byte(&next, &h);
        import[i] = first - next;
        holder_deinit(&h);
    }
    if (!r)
        cst_report(&(struct cst_figure){ .name = "shm.import_us",
                                         .value = cst_quantile(import, IMPORTS, 0.5) * 1e6,
                                         .unit = "us",
                                         .sense = CST_NO_TARGET },
                   "\"p99_us\": %.1f, \"imports\": %d", cst_quantile(import, IMPORTS, 0.99) * 1e6,
                   IMPORTS);
    cst_prompt_deinit(&prompt);
    cst_fixture_deinit(&f);
    return r;
}
