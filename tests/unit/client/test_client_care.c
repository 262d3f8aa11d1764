/* SPDX-License-Identifier: Apache-2.0 */
/* touch, pin, unpin, erase, explain, stats. */
#include "tests/lib/check.h"
#include "tests/unit/client/fake_daemon.h"

#include "proto/status.h"

#include <stdlib.h>
#include <string.h>

enum { BT = FAKE_BLOCK_TOKENS };

static unsigned requests(struct fake_daemon *f, uint16_t type) {
    unsigned n;

    fake_lock(f);
    n = f->n_requests[type];
    fake_unlock(f);
    return n;
}

static void test_keys(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[3 * BT];
    uint8_t keys[3 * 32];
    uint64_t erased = 99;

    fake_prompt(x->f, x->space, tokens, 3 * BT, keys, 2);
    assert_int_equal(cistern_touch(x->space, keys, 3), CISTERN_OK); /* an absent key is no error */
    assert_int_equal(cistern_pin(x->space, keys, 2, 1000), CISTERN_OK);
    assert_int_equal(cistern_pin(x->space, keys, 3, 1000), CISTERN_E_NOT_FOUND);
    assert_int_equal(cistern_unpin(x->space, keys, 3), CISTERN_OK);
    assert_int_equal(cistern_erase(x->space, keys, 3, &erased), CISTERN_OK);
    assert_int_equal(erased, 2);
    assert_int_equal(cistern_erase(x->space, keys, 3, NULL), CISTERN_OK);
    assert_int_equal(cistern_touch(x->space, NULL, 0), CISTERN_OK);
    assert_int_equal(requests(x->f, CST_MSG_TOUCH), 1);
    assert_int_equal(cistern_touch(x->space, NULL, 1), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_pin(NULL, keys, 1, 1), CISTERN_E_BAD_HANDLE);
}

struct seen {
    unsigned all, keys;
    uint64_t ttl_ms;
};

static bool look(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    struct seen *seen = f->hook_arg;

    if (p->type == CST_MSG_ERASE) {
        const Cistern__V1__Erase *m = fake_unpack(f, p);

        seen->all += m->all;
        seen->keys += (unsigned)(m->keys.len / 32);
    } else if (p->type == CST_MSG_PIN) {
        const Cistern__V1__Pin *m = fake_unpack(f, p);

        seen->ttl_ms = m->ttl_ms;
    }
    return false;
}

static void test_what_is_sent(void **state) {
    enum { N = 9000 };
    struct fake_fixture *x = *state;
    struct seen seen = { .all = 0 };
    uint8_t *keys = calloc(N, 32);

    assert_non_null(keys);
    fake_set_hook(x->f, look, &seen);
    assert_int_equal(cistern_erase(x->space, keys, N, NULL), CISTERN_OK);
    assert_int_equal(requests(x->f, CST_MSG_ERASE), 3); /* what fits a packet each */
    assert_int_equal(cistern_pin(x->space, keys, 0, 7), CISTERN_OK);
    assert_int_equal(requests(x->f, CST_MSG_PIN), 0);
    fake_lock(x->f);
    assert_int_equal(seen.keys, N);
    assert_int_equal(seen.all, 0); /* never by accident */
    fake_unlock(x->f);
    assert_int_equal(cistern_erase(x->space, NULL, 0, NULL), CISTERN_OK);
    (void)cistern_pin(x->space, keys, 1, 7);
    fake_lock(x->f);
    assert_int_equal(seen.all, 1);
    assert_int_equal(seen.ttl_ms, 7);
    fake_unlock(x->f);
    free(keys);
}

/* ---- lies ---- */

enum lie { SHORT, LONG, REFUSED_KEY, ERROR };

struct lie_row {
    const char *name;
    enum lie lie;
    int32_t expected;
};

static const struct lie_row lie_rows[] = {
    { "statuses cut short", SHORT, CISTERN_E_CORRUPT },
    { "too many statuses", LONG, CISTERN_E_CORRUPT },
    { "one key refused", REFUSED_KEY, CISTERN_E_QUOTA },
    { "an error", ERROR, CISTERN_E_DENIED },
};

static bool tell_lie(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    const struct lie_row *row = f->hook_arg;
    Cistern__V1__KeysReply reply = CISTERN__V1__KEYS_REPLY__INIT;
    uint8_t statuses[6] = { 0 };

    if (p->type != CST_MSG_PIN)
        return false;
    cst_store16(statuses + 2, row->lie == REFUSED_KEY ? CST_STATUS_QUOTA : CST_STATUS_OK);
    reply.statuses = (ProtobufCBinaryData){ row->lie == SHORT  ? 3
                                            : row->lie == LONG ? 6
                                                               : 4,
                                            statuses };
    if (row->lie == ERROR)
        fake_error(f, c, p, CST_STATUS_DENIED);
    else
        fake_reply(f, c, p, &reply.base);
    return true;
}

static void test_lie(void **state) {
    const struct lie_row *row = *state;
    uint8_t keys[2 * 32] = { 0 };
    void *fixture;
    struct fake_fixture *x;

    fake_setup(&fixture);
    x = fixture;
    fake_set_hook(x->f, tell_lie, (void *)(uintptr_t)row);
    assert_int_equal(cistern_pin(x->space, keys, 2, 1), row->expected);
    fake_teardown(&fixture);
}

/* ---- sentences ---- */

static void test_explain(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[2 * BT + 3] = { 0 };
    char text[80], small[8];

    assert_int_equal(cistern_explain(x->space, tokens, CST_COUNT(tokens), text, sizeof(text)),
                     CISTERN_OK);
    assert_string_equal(text, "2 keys and 3 ids are not stored");
    assert_int_equal(cistern_explain(x->space, tokens, 2, small, sizeof(small)), CISTERN_OK);
    assert_string_equal(small, "0 keys ");
    assert_int_equal(cistern_explain(x->space, NULL, 0, text, sizeof(text)), CISTERN_OK);
    assert_int_equal(cistern_explain(x->space, tokens, 1, NULL, 0), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_explain(x->space, NULL, 1, text, sizeof(text)),
                     CISTERN_E_BAD_ARGUMENT);
}

static void test_stats(void **state) {
    struct fake_fixture *x = *state;
    char json[2048], small[40];

    assert_int_equal(cistern_stats(x->client, NULL, json, sizeof(json)), CISTERN_OK);
    assert_int_equal(strncmp(json, "{\"blocks\":0,\"tail_blocks\":0,", 28), 0);
    assert_non_null(strstr(json, "\"leases\":0,"));
    assert_int_equal(json[strlen(json) - 1], '}');
    assert_int_equal(cistern_stats(x->client, x->space, json, sizeof(json)), CISTERN_OK);
    assert_int_equal(strncmp(json, "{\"blocks\":5,", 12), 0); /* the fake answers the handle */
    assert_int_equal(cistern_stats(x->client, NULL, small, sizeof(small)), CISTERN_E_TOO_LARGE);
    assert_int_equal(cistern_stats(NULL, NULL, json, sizeof(json)), CISTERN_E_BAD_HANDLE);
    assert_int_equal(cistern_stats(x->client, NULL, NULL, 0), CISTERN_E_BAD_ARGUMENT);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_keys, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_what_is_sent, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_explain, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_stats, fake_setup, fake_teardown),
    };

    return cst_run_rows(lie_rows, test_lie) + cmocka_run_group_tests(tests, NULL, NULL);
}
