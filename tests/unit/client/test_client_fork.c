/* SPDX-License-Identifier: Apache-2.0 */
/* fork(): the child's handles answer FORKED, its copy of the socket is closed, its memory stays. */
#include "tests/lib/check.h"
#include "tests/unit/client/fake_daemon.h"

#include "client/client.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BT = FAKE_BLOCK_TOKENS };

/* Every function that takes a handle. The number of the first wrong answer, 0 if none. */
static int check_child(cistern_client *c, cistern_space *space, cistern_lease *lease,
                       cistern_slot *slot, int fd, uint8_t byte) {
    uint32_t tokens[BT] = { 0 };
    uint8_t keys[32] = { 0 }, tiers[1];
    cistern_match match = { .size = sizeof(match) };
    cistern_lease *leases[1];
    cistern_slot *slots[1];
    cistern_space *other;
    int32_t statuses[1];
    char text[64];
    uint64_t epoch;
    const void *data;
    void *room = keys;
    const void *source = keys;
    size_t size = 0, n;
    int32_t answers[] = {
        cistern_client_ping(c),
        cistern_client_info(c, &epoch, NULL),
        cistern_space_open(c, fake_descriptor(), NULL, &other),
        cistern_key_root(space, keys),
        cistern_key_chain(space, NULL, tokens, BT, keys, 1, &n),
        cistern_lookup(space, tokens, BT, NULL, &match),
        cistern_lookup_keys(space, keys, 1, NULL, &n),
        cistern_lookup_each(space, keys, 1, tiers),
        cistern_acquire(space, keys, 1, NULL, leases, statuses),
        cistern_lease_data(lease, &data, &size, NULL),
        cistern_lease_decode(lease, keys, 32),
        cistern_get_into(space, keys, 1, &room, &size, statuses),
        cistern_reserve(space, NULL, keys, tokens, BT, 1, slots, statuses),
        cistern_slot_data(slot, &room, &size),
        cistern_commit(space, &slot, 1, NULL, statuses),
        cistern_put_from(space, NULL, keys, tokens, BT, 1, &source, statuses),
        cistern_touch(space, keys, 1),
        cistern_pin(space, keys, 1, 1),
        cistern_unpin(space, keys, 1),
        cistern_erase(space, keys, 1, NULL),
        cistern_explain(space, tokens, BT, text, sizeof(text)),
        cistern_stats(c, NULL, text, sizeof(text)),
    };

    for (size_t i = 0; i < CST_COUNT(answers); i++)
        if (answers[i] != CISTERN_E_FORKED)
            return (int)i + 1;
    if (fcntl(fd, F_GETFD) != -1)
        return 100; /* the socket is open in the child */
    if (lease->data[7] != byte)
        return 101; /* the mapping is not what it was */
    cistern_release(c, &lease, 1);
    cistern_abort(space, &slot, 1);
    cistern_space_close(space);
    cistern_client_close(c);
    return 0;
}

static void expect_child(pid_t child) {
    int status;

    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_child(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[2 * BT];
    uint8_t keys[2 * 32];
    cistern_lease *lease;
    cistern_slot *slot;
    int32_t status;
    const void *data;
    size_t size;
    pid_t child;

    fake_prompt(x->f, x->space, tokens, 2 * BT, keys, 1);
    assert_int_equal(cistern_acquire(x->space, keys, 1, NULL, &lease, &status), CISTERN_OK);
    assert_int_equal(cistern_reserve(x->space, keys, keys + 32, tokens + BT, BT, 1, &slot, &status),
                     CISTERN_OK);
    child = fork();
    if (child == 0)
        _exit(
            check_child(x->client, x->space, lease, slot, x->client->conn.fd, fake_byte(keys, 7)));
    expect_child(child);
    assert_int_equal(cistern_lease_data(lease, &data, &size, NULL), CISTERN_OK); /* the parent's */
    assert_int_equal(((const uint8_t *)data)[5], fake_byte(keys, 5));
    assert_int_equal(cistern_client_ping(x->client), CISTERN_OK);
    fake_lock(x->f);
    assert_int_equal(x->f->n_leases, 1); /* the child gave nothing back */
    fake_unlock(x->f);
}

/* A child that lives on does not keep the parent's connection open. */
static void test_daemon_sees_the_end(void **state) {
    struct fake_daemon *f = fake_new();
    cistern_client *c = fake_client(f, 0);
    int gate[2];
    char byte;
    pid_t child;

    assert_int_equal(pipe2(gate, O_CLOEXEC), 0);
    child = fork();
    if (child == 0) {
        cst_close(gate[1]);
        (void)!read(gate[0], &byte, 1); /* until the parent closes its end */
        _exit(0);
    }
    assert_true(child > 0);
    cistern_client_close(c);
    fake_lock(f);
    while (f->connections[0].fd >= 0) {
        fake_unlock(f);
        (void)usleep(1000);
        fake_lock(f);
    }
    fake_unlock(f);
    gate[0] = cst_close(gate[0]);
    gate[1] = cst_close(gate[1]);
    expect_child(child);
    fake_free(f);
}

/* The child opens its own client. */
static void test_child_opens_again(void **state) {
    struct fake_fixture *x = *state;
    pid_t child = fork();

    if (child == 0) {
        cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;
        cistern_client *own = NULL;

        options.socket_path = x->f->path;
        if (cistern_client_ping(x->client) != CISTERN_E_FORKED)
            _exit(1);
        if (cistern_client_open(&own, &options) || cistern_client_ping(own))
            _exit(2);
        cistern_client_close(own);
        cistern_client_close(x->client);
        _exit(0);
    }
    expect_child(child);
}

static void *call_all_the_time(void *arg) {
    struct fake_fixture *x = arg;

    while (cistern_client_ping(x->client) == CISTERN_OK)
        continue;
    return NULL;
}

/* Forks while other threads are anywhere in a call: the child always gets its answer. */
static void test_fork_under_load(void **state) {
    enum { CALLERS = 3, FORKS = 60 };
    struct fake_fixture *x = *state;
    pthread_t callers[CALLERS];

    for (int i = 0; i < CALLERS; i++)
        assert_int_equal(pthread_create(&callers[i], NULL, call_all_the_time, x), 0);
    for (int i = 0; i < FORKS; i++) {
        pid_t child = fork();

        if (child == 0) {
            (void)alarm(20);
            if (cistern_client_ping(x->client) != CISTERN_E_FORKED)
                _exit(1);
            cistern_client_close(x->client);
            _exit(0);
        }
        expect_child(child);
    }
    fake_stop(x->f); /* ends the callers */
    for (int i = 0; i < CALLERS; i++)
        assert_int_equal(pthread_join(callers[i], NULL), 0);
    fake_start(x->f);
}

static void test_async_client(void **state) {
    struct fake_daemon *f = fake_new();
    cistern_client *c = fake_client(f, CISTERN_CLIENT_ASYNC);
    cistern_space *space = fake_space(c, CISTERN_KIND_FLAT);
    static uint8_t key[32], tiers[1];
    uint64_t ticket;
    pid_t child = fork();

    if (child == 0) {
        cistern_completion done;

        if (cistern_submit_lookup_each(space, key, 1, tiers, &ticket) != CISTERN_E_FORKED ||
            cistern_client_drain(c, &done, 1) != CISTERN_E_FORKED ||
            cistern_client_event_fd(c) != CISTERN_E_FORKED)
            _exit(1);
        cistern_client_close(c);
        _exit(0);
    }
    expect_child(child);
    assert_int_equal(cistern_client_ping(c), CISTERN_OK);
    cistern_client_close(c);
    fake_free(f);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_child, fake_setup, fake_teardown),
        cmocka_unit_test(test_daemon_sees_the_end),
        cmocka_unit_test_setup_teardown(test_child_opens_again, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_fork_under_load, fake_setup, fake_teardown),
        cmocka_unit_test(test_async_client),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
