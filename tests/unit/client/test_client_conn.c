/* SPDX-License-Identifier: Apache-2.0 */
/* One connection: matching answers, bad answers, losing it, coming back, many threads. */
#include "tests/lib/check.h"
#include "tests/unit/client/fake_daemon.h"

#include "client/client.h"
#include "proto/status.h"

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BT = FAKE_BLOCK_TOKENS };

/* ---- answers to a Ping that is no Ping reply ---- */

enum lie {
    SILENCE,
    OTHER_REQUEST,
    OTHER_TYPE,
    BAD_MAGIC,
    TRUNCATED,
    A_REQUEST,
    EMPTY_ERROR,
    AN_ERROR,
    AN_UNKNOWN_TYPE,
    UNKNOWN_PUSH,
    BROKEN_PUSH,
    GOODBYE,
    HANG_UP,
    NOTHING_BUT_EVENTS,
};

struct lie_row {
    const char *name;
    enum lie lie;
    int32_t expected;
    bool lost; /* the connection is gone afterwards */
};

static const struct lie_row lie_rows[] = {
    { "silence", SILENCE, CISTERN_E_TIMEOUT, false },
    { "another request's answer", OTHER_REQUEST, CISTERN_E_TIMEOUT, false },
    { "another message", OTHER_TYPE, CISTERN_E_CORRUPT, false },
    { "bad magic", BAD_MAGIC, CISTERN_E_DISCONNECTED, true },
    { "truncated", TRUNCATED, CISTERN_E_DISCONNECTED, true },
    { "a request", A_REQUEST, CISTERN_E_DISCONNECTED, true },
    { "an error without a status", EMPTY_ERROR, CISTERN_E_INTERNAL, false },
    { "an error", AN_ERROR, CISTERN_E_QUOTA, false },
    { "unknown type", AN_UNKNOWN_TYPE, CISTERN_E_UNSUPPORTED, false },
    { "unknown push", UNKNOWN_PUSH, CISTERN_E_DISCONNECTED, true },
    { "broken push", BROKEN_PUSH, CISTERN_E_DISCONNECTED, true },
    { "goodbye and the end", GOODBYE, CISTERN_E_DISCONNECTED, true },
    { "the end", HANG_UP, CISTERN_E_DISCONNECTED, true },
    { "events before the answer", NOTHING_BUT_EVENTS, CISTERN_OK, false },
};

static void send_raw(struct fake_connection *c, uint16_t type, uint8_t flags, uint32_t request,
                     const void *payload, size_t n) {
    uint8_t data[256];

    cst_packet_header_fill((struct cst_packet_header *)data, type, flags, request, n);
    memcpy(data + sizeof(struct cst_packet_header), payload, n);
    fake_send(c, data, sizeof(struct cst_packet_header) + n);
}

static bool tell_lie(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    const struct lie_row *row = f->hook_arg;
    Cistern__V1__Goodbye goodbye = CISTERN__V1__GOODBYE__INIT;
    Cistern__V1__Event event = CISTERN__V1__EVENT__INIT;
    char text[] = "maintenance";

    if (p->type != CST_MSG_PING)
        return false;
    switch (row->lie) {
    case SILENCE:
        break;
    case OTHER_REQUEST:
        send_raw(c, p->type, CST_PACKET_REPLY, p->request + 1, "", 0);
        break;
    case OTHER_TYPE:
        send_raw(c, CST_MSG_COMMIT, CST_PACKET_REPLY, p->request, "", 0);
        break;
    case BAD_MAGIC:
        fake_send(c, "0123456789abcdef", 16);
        break;
    case TRUNCATED:
        fake_send(c, "NTSC", 4);
        break;
    case A_REQUEST:
        send_raw(c, p->type, 0, p->request, "", 0);
        break;
    case EMPTY_ERROR:
        send_raw(c, p->type, CST_PACKET_REPLY | CST_PACKET_ERROR, p->request, "", 0);
        break;
    case AN_ERROR:
        fake_error(f, c, p, CST_STATUS_QUOTA);
        break;
    case AN_UNKNOWN_TYPE:
        fake_error(f, c, p, CST_STATUS_BAD_TYPE);
        break;
    case UNKNOWN_PUSH:
        send_raw(c, 120, CST_PACKET_PUSH, 0, "", 0);
        break;
    case BROKEN_PUSH:
        send_raw(c, CST_MSG_READY, CST_PACKET_PUSH, 0, "\xff\xff", 2);
        break;
    case GOODBYE:
        goodbye.status = CST_STATUS_DRAINING;
        goodbye.text = text;
        fake_push(f, CST_MSG_GOODBYE, &goodbye.base);
        (void)shutdown(c->fd, SHUT_RDWR);
        break;
    case HANG_UP:
        (void)shutdown(c->fd, SHUT_RDWR);
        break;
    case NOTHING_BUT_EVENTS:
        for (int i = 0; i < 5; i++)
            fake_push(f, CST_MSG_EVENT, &event.base);
        return false;
    }
    return true;
}

static void test_lie(void **state) {
    struct lie_row row = **(struct lie_row **)state;
    struct fake_daemon *f = fake_new();
    cistern_client *c = fake_client(f, 0);
    unsigned connects;

    fake_set_hook(f, tell_lie, &row);
    if (row.expected == CISTERN_E_TIMEOUT)
        fake_set_timeout(c, FAKE_SHORT_MS);
    assert_int_equal(cistern_client_ping(c), row.expected);
    if (row.expected == CISTERN_E_TIMEOUT)
        fake_set_timeout(c, FAKE_PATIENT_MS);
    if (row.lie == GOODBYE)
        assert_non_null(strstr(cistern_last_error(), "maintenance"));
    fake_set_hook(f, NULL, NULL);
    while (cistern_client_ping(c))
        (void)usleep(1000);
    fake_lock(f);
    connects = f->n_connects;
    fake_unlock(f);
    assert_int_equal(connects, row.lost ? 2 : 1);
    cistern_client_close(c);
    fake_free(f);
}

/* ---- back-off ---- */

static struct cst_manual_clock clock_;

/* Attempts are made at the times that the back-off allows and at no other call. */
static void test_back_off(void **state) {
    static const uint64_t waits_ms[] = { 10, 20, 40, 80, 160, 320, 640, 1280, 2000, 2000 };
    struct fake_daemon *f = fake_new();
    cistern_client *c = fake_client(f, 0);

    cst_manual_clock_init(&clock_, cst_now_ns(&cst_clock_monotonic) + CST_NS_PER_S);
    c->clock = &clock_.clock;
    fake_stop(f);
    assert_int_equal(cistern_client_ping(c), CISTERN_E_DISCONNECTED); /* finds the loss */
    for (size_t i = 0; i < CST_COUNT(waits_ms); i++) {
        uint64_t tried = clock_.ns;

        assert_int_equal(cistern_client_ping(c), CISTERN_E_DISCONNECTED); /* an attempt */
        assert_int_equal(c->conn.retry_at, tried + waits_ms[i] * CST_NS_PER_MS);
        clock_.ns = c->conn.retry_at - 1;
        assert_int_equal(cistern_client_ping(c), CISTERN_E_DISCONNECTED); /* none */
        assert_int_equal(c->conn.retry_at, tried + waits_ms[i] * CST_NS_PER_MS);
        clock_.ns = c->conn.retry_at;
    }
    fake_start(f);
    assert_int_equal(cistern_client_ping(c), CISTERN_OK);
    assert_int_equal(c->conn.backoff_ms, 10);
    cistern_client_close(c);
    fake_free(f);
}

/* ---- another daemon at the same place ---- */

static void test_new_epoch(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[2 * BT];
    uint8_t keys[2 * 32];
    cistern_match match = { .size = sizeof(match) };
    const char *name, *again;
    uint64_t first, second;

    fake_prompt(x->f, x->space, tokens, 2 * BT, keys, 2);
    assert_int_equal(cistern_client_info(x->client, &first, &name), CISTERN_OK);
    fake_stop(x->f);
    fake_start(x->f);
    assert_int_equal(cistern_lookup(x->space, tokens, 2 * BT, NULL, &match), CISTERN_OK);
    assert_int_equal(match.blocks, 0); /* this call finds the loss */
    while (cistern_client_ping(x->client))
        (void)usleep(1000);
    assert_int_equal(cistern_lookup(x->space, tokens, 2 * BT, NULL, &match), CISTERN_OK);
    assert_int_equal(match.blocks, 2); /* the space has reopened by itself */
    assert_int_equal(cistern_client_info(x->client, &second, &again), CISTERN_OK);
    assert_int_equal(second, first + 1);
    assert_ptr_equal(name, again); /* lives as long as the client */
    assert_string_equal(name, "uid-test");
}

/* ---- an answer that comes too late ---- */

struct late {
    struct cst_packet packet;
    struct fake_connection *connection;
};

static bool keep_silent(struct fake_daemon *f, struct fake_connection *c,
                        const struct cst_packet *p) {
    struct late *late = f->hook_arg;

    if (p->type != CST_MSG_PING || late->connection)
        return false;
    late->packet = *p;
    late->connection = c;
    return true;
}

static void test_late_answer(void **state) {
    struct fake_daemon *f = fake_new();
    cistern_client *c = fake_client(f, 0);
    struct late late = { .connection = NULL };

    fake_set_hook(f, keep_silent, &late);
    fake_set_timeout(c, FAKE_SHORT_MS);
    assert_int_equal(cistern_client_ping(c), CISTERN_E_TIMEOUT);
    fake_set_timeout(c, FAKE_PATIENT_MS);
    fake_wait(f, CST_MSG_PING, 1);
    fake_lock(f);
    fake_answer(f, late.connection, &late.packet);
    fake_unlock(f);
    assert_int_equal(cistern_client_ping(c), CISTERN_OK);
    assert_int_equal(cistern_client_ping(c), CISTERN_OK);
    cistern_client_close(c);
    fake_free(f);
}

/* ---- many threads, answers out of order ---- */

enum { THREADS = 8, CALLS = 200 };

struct queued {
    struct cst_packet packet[4];
    size_t n;
};

struct worker {
    struct fake_fixture *x;
    const uint8_t *keys;
    unsigned number;
    bool ok;
    pthread_t thread;
};

static void *work(void *arg) {
    struct worker *w = arg;

    w->ok = true;
    for (unsigned i = 0; w->ok && i < CALLS; i++) {
        size_t n = 1 + (w->number * 7 + i) % 8, present = 0;
        uint8_t tiers[8];
        cistern_lease *leases[8];
        int32_t statuses[8];

        /* The first four blocks are stored: the answer tells the requests apart. */
        w->ok = !cistern_lookup_keys(w->x->space, w->keys, n, NULL, &present) &&
                present == CST_MIN(n, (size_t)4);
        w->ok &= !cistern_lookup_each(w->x->space, w->keys, n, tiers);
        for (size_t k = 0; w->ok && k < n; k++)
            w->ok = tiers[k] == (k < 4 ? CISTERN_TIER_PACKED : CISTERN_TIER_NONE);
        w->ok = w->ok && !cistern_acquire(w->x->space, w->keys, n, NULL, leases, statuses);
        for (size_t k = 0; w->ok && k < n; k++)
            w->ok = statuses[k] == (k < 4 ? CISTERN_OK : CISTERN_E_NOT_FOUND) &&
                    (k >= 4 || leases[k]->data[5] == fake_byte(w->keys + 32 * k, 5));
        if (w->ok)
            cistern_release(w->x->client, leases, n);
    }
    return NULL;
}

static void run_workers(struct fake_fixture *x) {
    struct worker workers[THREADS];
    uint32_t tokens[8 * BT];
    uint8_t keys[8 * 32];
    unsigned held;

    fake_prompt(x->f, x->space, tokens, 8 * BT, keys, 4);
    for (unsigned i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){ .x = x, .keys = keys, .number = i };
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
        assert_true(workers[i].ok);
    }
    fake_lock(x->f);
    held = x->f->n_leases;
    fake_unlock(x->f);
    assert_int_equal(held, 0);
}

static void test_threads(void **state) {
    run_workers(*state);
}

/* The daemon keeps four requests and answers them last first. */
static bool answer_backwards(struct fake_daemon *f, struct fake_connection *c,
                             const struct cst_packet *p) {
    struct queued *q = f->hook_arg;

    if (p->type != CST_MSG_PING)
        return false;
    q->packet[q->n++] = *p;
    if (q->n < 4)
        return true;
    while (q->n)
        fake_answer(f, c, &q->packet[--q->n]);
    return true;
}

static void *ping_once(void *arg) {
    return (void *)(intptr_t)cistern_client_ping(arg);
}

static void test_answers_out_of_order(void **state) {
    struct fake_fixture *x = *state;
    struct queued q = { .n = 0 };
    pthread_t threads[4];

    fake_set_hook(x->f, answer_backwards, &q);
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < 4; i++)
            assert_int_equal(pthread_create(&threads[i], NULL, ping_once, x->client), 0);
        for (int i = 0; i < 4; i++) {
            void *status;

            assert_int_equal(pthread_join(threads[i], &status), 0);
            assert_int_equal((intptr_t)status, CISTERN_OK);
        }
    }
}

/* All who wait learn of the end. */
static bool hang_up_at_the_fourth(struct fake_daemon *f, struct fake_connection *c,
                                  const struct cst_packet *p) {
    struct queued *q = f->hook_arg;

    if (p->type != CST_MSG_PING)
        return false;
    if (++q->n == 4)
        (void)shutdown(c->fd, SHUT_RDWR);
    return true;
}

static void test_all_learn_of_the_end(void **state) {
    struct fake_fixture *x = *state;
    struct queued q = { .n = 0 };
    pthread_t threads[4];

    fake_set_hook(x->f, hang_up_at_the_fourth, &q);
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, ping_once, x->client), 0);
    for (int i = 0; i < 4; i++) {
        void *status;

        assert_int_equal(pthread_join(threads[i], &status), 0);
        assert_int_equal((intptr_t)status, CISTERN_E_DISCONNECTED);
    }
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_back_off),
        cmocka_unit_test_setup_teardown(test_new_epoch, fake_setup, fake_teardown),
        cmocka_unit_test(test_late_answer),
        cmocka_unit_test_setup_teardown(test_threads, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_answers_out_of_order, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_all_learn_of_the_end, fake_setup, fake_teardown),
    };

    return cst_run_rows(lie_rows, test_lie) + cmocka_run_group_tests(tests, NULL, NULL);
}
