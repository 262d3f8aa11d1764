/* SPDX-License-Identifier: Apache-2.0 */
/* Submissions, completions, the eventfd, and the library thread beside blocking calls. */
#include "tests/lib/check.h"
#include "tests/unit/client/fake_daemon.h"

#include "proto/status.h"

#include <poll.h>
#include <string.h>

enum { BT = FAKE_BLOCK_TOKENS, N = 8, QUEUE_MAX = 1024 };

struct fixture {
    struct fake_daemon *f;
    cistern_client *client;
    cistern_space *space;
    uint32_t tokens[N * BT];
    uint8_t keys[N * 32], blocks[N][FAKE_BLOCK_BYTES], copies[N][FAKE_BLOCK_BYTES];
    const void *sources[N];
    void *targets[N];
    size_t sizes[N];
    int32_t statuses[N];
};

static int setup(void **state) {
    static struct fixture x;

    memset(&x, 0, sizeof(x));
    x.f = fake_new();
    x.client = fake_client(x.f, CISTERN_CLIENT_ASYNC);
    x.space = fake_space(x.client, CISTERN_KIND_TOKENS);
    fake_prompt(x.f, x.space, x.tokens, N * BT, x.keys, 0);
    for (size_t i = 0; i < N; i++) {
        for (size_t k = 0; k < FAKE_BLOCK_BYTES; k++)
            x.blocks[i][k] = fake_byte(x.keys + 32 * i, k);
        x.sources[i] = x.blocks[i];
        x.targets[i] = x.copies[i];
        x.sizes[i] = FAKE_BLOCK_BYTES;
    }
    *state = &x;
    return 0;
}

static int teardown(void **state) {
    struct fixture *x = *state;

    cistern_client_close(x->client);
    x->f = fake_free(x->f);
    return 0;
}

static bool is_readable(cistern_client *c, int timeout_ms) {
    struct pollfd p = { .fd = cistern_client_event_fd(c), .events = POLLIN };

    assert_true(p.fd >= 0);
    return poll(&p, 1, timeout_ms) == 1;
}

static cistern_completion drain_one(cistern_client *c) {
    cistern_completion done;

    assert_true(is_readable(c, -1));
    assert_int_equal(cistern_client_drain(c, &done, 1), 1);
    return done;
}

static void test_put_and_get(void **state) {
    struct fixture *x = *state;
    uint64_t put, get;
    cistern_completion done;

    assert_false(is_readable(x->client, 0));
    assert_int_equal(cistern_submit_put_from(x->space, NULL, x->keys, x->tokens, N * BT, N,
                                             x->sources, x->statuses, &put),
                     CISTERN_OK);
    done = drain_one(x->client);
    assert_int_equal(done.ticket, put);
    assert_int_equal(done.status, CISTERN_OK);
    assert_int_equal(done.n, N);
    for (size_t i = 0; i < N; i++)
        assert_int_equal(x->statuses[i], CISTERN_OK);
    assert_false(is_readable(x->client, 0));
    assert_int_equal(
        cistern_submit_get_into(x->space, x->keys, N, x->targets, x->sizes, x->statuses, &get),
        CISTERN_OK);
    assert_true(get > put);
    done = drain_one(x->client);
    assert_int_equal(done.ticket, get);
    assert_int_equal(done.status, CISTERN_OK);
    assert_memory_equal(x->copies, x->blocks, sizeof(x->blocks));
}

/* Completions come in the order of submission; the fd is readable while any is left. */
static void test_order(void **state) {
    enum { JOBS = 50 };
    struct fixture *x = *state;
    static uint8_t tiers[JOBS][N];
    uint64_t tickets[JOBS];
    cistern_completion done[7];
    size_t n = 0;

    fake_lock(x->f);
    fake_store(x->f, x->keys + 32, x->keys, x->tokens, BT);
    fake_unlock(x->f);
    for (size_t i = 0; i < JOBS; i++)
        assert_int_equal(cistern_submit_lookup_each(x->space, x->keys, N, tiers[i], &tickets[i]),
                         CISTERN_OK);
    while (n < JOBS) {
        int32_t got;

        assert_true(is_readable(x->client, -1));
        got = cistern_client_drain(x->client, done, CST_COUNT(done));
        assert_true(got > 0);
        for (int32_t i = 0; i < got; i++, n++) {
            assert_int_equal(done[i].ticket, tickets[n]);
            assert_int_equal(done[i].status, CISTERN_OK);
            assert_int_equal(tiers[n][0], CISTERN_TIER_NONE);
            assert_int_equal(tiers[n][1], CISTERN_TIER_PACKED);
        }
    }
    assert_false(is_readable(x->client, 0));
    assert_int_equal(cistern_client_drain(x->client, done, 7), 0);
}

/* Nobody drains: the queue is bounded, and what was taken is completed all the same. */
static void test_bounded(void **state) {
    struct fixture *x = *state;
    static uint8_t tiers[N];
    static cistern_completion done[QUEUE_MAX];
    uint64_t ticket;
    int32_t n = 0;

    for (int i = 0; i < QUEUE_MAX; i++)
        assert_int_equal(cistern_submit_lookup_each(x->space, x->keys, N, tiers, &ticket),
                         CISTERN_OK);
    assert_int_equal(cistern_submit_lookup_each(x->space, x->keys, N, tiers, &ticket),
                     CISTERN_E_BUSY);
    while (n < QUEUE_MAX) {
        assert_true(is_readable(x->client, -1));
        n += cistern_client_drain(x->client, done, QUEUE_MAX);
    }
    assert_int_equal(cistern_submit_lookup_each(x->space, x->keys, N, tiers, &ticket), CISTERN_OK);
    (void)drain_one(x->client);
}

/* Blocking calls and pushes go on while the thread owns the socket. */
static void test_beside_blocking_calls(void **state) {
    struct fixture *x = *state;
    uint64_t ticket;
    cistern_lease *lease;
    int32_t status;
    unsigned drained = 0;

    fake_lock(x->f);
    fake_store(x->f, x->keys, x->keys, x->tokens, BT);
    fake_unlock(x->f);
    for (unsigned i = 0; i < 200; i++) {
        cistern_completion done;

        assert_int_equal(cistern_submit_get_into(x->space, x->keys, 1, x->targets, x->sizes,
                                                 x->statuses, &ticket),
                         CISTERN_OK);
        assert_int_equal(cistern_client_ping(x->client), CISTERN_OK);
        assert_int_equal(cistern_acquire(x->space, x->keys, 1, NULL, &lease, &status), CISTERN_OK);
        assert_int_equal(status, CISTERN_OK);
        cistern_release(x->client, &lease, 1);
        done = drain_one(x->client);
        assert_int_equal(done.status, CISTERN_OK);
        drained++;
    }
    assert_int_equal(drained, 200);
}

/* A retired slab is answered without a call: the thread reads. */
static void test_retire_while_idle(void **state) {
    struct fixture *x = *state;
    Cistern__V1__SlabRetire message = CISTERN__V1__SLAB_RETIRE__INIT;
    cistern_lease *lease;
    int32_t status;

    message.slab = FAKE_SLAB;
    fake_lock(x->f);
    fake_store(x->f, x->keys, x->keys, x->tokens, BT);
    fake_unlock(x->f);
    assert_int_equal(cistern_acquire(x->space, x->keys, 1, NULL, &lease, &status), CISTERN_OK);
    cistern_release(x->client, &lease, 1);
    fake_lock(x->f);
    fake_push(x->f, CST_MSG_SLAB_RETIRE, &message.base);
    fake_unlock(x->f);
    fake_wait(x->f, CST_MSG_SLAB_DROPPED, 1);
}

/* The daemon goes and comes back: submissions fail, then work again. */
static void test_new_daemon(void **state) {
    struct fixture *x = *state;
    uint64_t ticket;
    cistern_completion done;

    fake_stop(x->f);
    assert_int_equal(cistern_submit_put_from(x->space, NULL, x->keys, x->tokens, N * BT, N,
                                             x->sources, x->statuses, &ticket),
                     CISTERN_OK);
    done = drain_one(x->client);
    assert_int_equal(done.status, CISTERN_E_DISCONNECTED);
    fake_start(x->f);
    do {
        assert_int_equal(cistern_submit_put_from(x->space, NULL, x->keys, x->tokens, N * BT, N,
                                                 x->sources, x->statuses, &ticket),
                         CISTERN_OK);
        done = drain_one(x->client);
    } while (done.status == CISTERN_E_DISCONNECTED);
    assert_int_equal(done.status, CISTERN_OK);
    test_retire_while_idle(state);
}

/* Closing with submissions in the queue ends them. */
static void test_close_with_a_queue(void **state) {
    struct fake_daemon *f = fake_new();
    cistern_client *c = fake_client(f, CISTERN_CLIENT_ASYNC);
    cistern_space *space = fake_space(c, CISTERN_KIND_TOKENS);
    static uint8_t keys[32], tiers[1];
    uint64_t ticket;

    for (int i = 0; i < 500; i++)
        assert_int_equal(cistern_submit_lookup_each(space, keys, 1, tiers, &ticket), CISTERN_OK);
    cistern_client_close(c);
    fake_free(f);
}

/* Keeps the first LookupEach until the space is closed. */
struct kept {
    struct cst_packet lookup;
    bool is_there;
};

static bool keep_first_lookup(struct fake_daemon *f, struct fake_connection *c,
                              const struct cst_packet *packet) {
    struct kept *kept = f->hook_arg;

    if (packet->type == CST_MSG_SPACE_CLOSE)
        fake_error(f, c, &kept->lookup, CST_STATUS_BUSY);
    if (packet->type != CST_MSG_LOOKUP_EACH || kept->is_there)
        return false;
    kept->lookup = *packet;
    return kept->is_there = true;
}

/* The daemon may give the number of a closed space to the next one: what still waits for the closed
 * one must not reach it. */
static void test_close_overtakes_a_submission(void **state) {
    struct fixture *x = *state;
    cistern_space *space = fake_space(x->client, CISTERN_KIND_FLAT);
    struct kept kept = { .is_there = false };
    uint8_t tiers[2];
    uint64_t ticket;

    fake_set_hook(x->f, keep_first_lookup, &kept);
    for (int i = 0; i < 2; i++)
        assert_int_equal(cistern_submit_lookup_each(space, x->keys, 1, &tiers[i], &ticket),
                         CISTERN_OK);
    fake_wait(x->f, CST_MSG_LOOKUP_EACH, 1);
    cistern_space_close(space);
    assert_int_equal(drain_one(x->client).status, CISTERN_E_BUSY);
    assert_int_equal(drain_one(x->client).status, CISTERN_E_BAD_HANDLE);
    fake_lock(x->f);
    assert_int_equal(x->f->n_requests[CST_MSG_LOOKUP_EACH], 1);
    fake_unlock(x->f);
}

static void test_without_the_flag(void **state) {
    struct fake_daemon *f = fake_new();
    cistern_client *c = fake_client(f, 0);
    cistern_space *space = fake_space(c, CISTERN_KIND_TOKENS);
    uint8_t keys[32] = { 0 }, tiers[1];
    cistern_completion done;
    uint64_t ticket;

    assert_int_equal(cistern_client_event_fd(c), CISTERN_E_BAD_STATE);
    assert_int_equal(cistern_client_drain(c, &done, 1), CISTERN_E_BAD_STATE);
    assert_int_equal(cistern_submit_lookup_each(space, keys, 1, tiers, &ticket),
                     CISTERN_E_BAD_STATE);
    assert_int_equal(cistern_client_event_fd(NULL), CISTERN_E_BAD_HANDLE);
    assert_int_equal(cistern_submit_lookup_each(NULL, keys, 1, tiers, &ticket),
                     CISTERN_E_BAD_HANDLE);
    cistern_client_close(c);
    fake_free(f);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_put_and_get, setup, teardown),
        cmocka_unit_test_setup_teardown(test_order, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bounded, setup, teardown),
        cmocka_unit_test_setup_teardown(test_beside_blocking_calls, setup, teardown),
        cmocka_unit_test_setup_teardown(test_retire_while_idle, setup, teardown),
        cmocka_unit_test_setup_teardown(test_new_daemon, setup, teardown),
        cmocka_unit_test_setup_teardown(test_close_overtakes_a_submission, setup, teardown),
        cmocka_unit_test(test_close_with_a_queue),
        cmocka_unit_test(test_without_the_flag),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
