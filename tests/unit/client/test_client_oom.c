/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every allocation of every call fails once: the call answers NO_MEMORY (or did not need it), holds
 * nothing afterwards, and the next call works.
 */
#include "tests/lib/check.h"
#include "tests/unit/client/fake_daemon.h"

#include "base/fault.h"
#include "client/client.h"

#include <string.h>

enum { BT = FAKE_BLOCK_TOKENS, N = 100, TRIES_MAX = 400 };

struct world {
    struct fake_daemon *f;
    cistern_client *client; /* NULL: the call opens its own */
    cistern_space *space;
    uint32_t tokens[N * BT];
    uint8_t keys[N * 32], blocks[N][FAKE_BLOCK_BYTES];
    const void *sources[N];
    void *targets[N];
    size_t sizes[N];
    int32_t statuses[N];
};

static struct world w;

static void make_world(size_t stored) {
    memset(&w, 0, sizeof(w));
    w.f = fake_new();
    w.client = fake_client(w.f, 0);
    w.space = fake_space(w.client, CISTERN_KIND_TOKENS);
    fake_prompt(w.f, w.space, w.tokens, N * BT, w.keys, stored);
    for (size_t i = 0; i < N; i++) {
        w.sources[i] = w.targets[i] = w.blocks[i];
        w.sizes[i] = FAKE_BLOCK_BYTES;
    }
}

static void end_world(void) {
    cistern_client_close(w.client);
    w.f = fake_free(w.f);
}

/* ---- the calls ---- */

static int32_t do_open(void) {
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;
    cistern_client *c = NULL;
    int32_t status;

    options.socket_path = w.f->path;
    options.flags = CISTERN_CLIENT_ASYNC;
    status = cistern_client_open(&c, &options);
    cistern_client_close(c);
    return status;
}

static int32_t do_space(void) {
    cistern_space *space = NULL;
    int32_t status = cistern_space_open(w.client, fake_descriptor(), NULL, &space);

    cistern_space_close(space);
    return status;
}

static int32_t do_lookup(void) {
    cistern_match match = { .size = sizeof(match) };

    return cistern_lookup(w.space, w.tokens, N * BT, NULL, &match);
}

static int32_t do_acquire(void) {
    cistern_lease *leases[N];
    int32_t status = cistern_acquire(w.space, w.keys, N, NULL, leases, w.statuses);

    if (!status)
        cistern_release(w.client, leases, N);
    return status;
}

static int32_t do_get(void) {
    return cistern_get_into(w.space, w.keys, N, w.targets, w.sizes, w.statuses);
}

static int32_t do_put(void) {
    return cistern_put_from(w.space, NULL, w.keys, w.tokens, N * BT, N, w.sources, w.statuses);
}

static int32_t do_explain(void) {
    char text[100];

    return cistern_explain(w.space, w.tokens, N * BT, text, sizeof(text));
}

static int32_t do_fingerprint(void) {
    uint8_t out[32];

    return cistern_descriptor_fingerprint(fake_descriptor(), out);
}

struct oom_row {
    const char *name;
    int32_t (*call)(void);
    size_t stored;
    unsigned allocations; /* at least so many in a fresh client */
};

static const struct oom_row rows[] = {
    { "client_open", do_open, 0, 5 }, { "space_open", do_space, 0, 4 },
    { "lookup", do_lookup, 10, 1 },   { "acquire", do_acquire, N, 3 },
    { "get_into", do_get, N, 2 },     { "put_from", do_put, 0, 2 },
    { "explain", do_explain, 0, 1 },  { "fingerprint", do_fingerprint, 0, 2 },
};

/* The world starts anew for each try, so that every allocation of a first call comes. */
static int32_t try_once(const struct oom_row *row, unsigned nth, bool *failed) {
    int32_t status;

    make_world(row->stored);
    cst_fault_join();
    cst_fault_arm(CST_FAULT_ALLOC, nth, 1);
    status = row->call();
    *failed = cst_fault_seen(CST_FAULT_ALLOC) >= nth;
    cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
    cst_fault_leave();
    return status;
}

static void check_clean(const struct oom_row *row) {
    assert_int_equal(cistern_client_ping(w.client), CISTERN_OK); /* what was posted has arrived */
    fake_lock(w.f);
    assert_int_equal(w.f->n_leases, 0);
    for (size_t i = 0; i < FAKE_BLOCKS; i++)
        assert_false(w.f->connections[0].slots[i].used);
    fake_unlock(w.f);
    assert_int_equal(row->call(), CISTERN_OK);
}

static void test_oom(void **state) {
    const struct oom_row *row = *state;
    unsigned nth = 0, refused = 0;
    bool failed = true;

    while (failed) {
        int32_t status = try_once(row, ++nth, &failed);

        assert_true(nth < TRIES_MAX);
        if (status) {
            assert_true(failed);
            assert_int_equal(status, CISTERN_E_NO_MEMORY);
            assert_non_null(strstr(cistern_last_error(), "memory"));
            refused++;
        }
        check_clean(row);
        end_world();
    }
    assert_true(refused >= 1);
    assert_true(nth > row->allocations);
}

int main(void) {
    return cst_run_rows(rows, test_oom);
}
