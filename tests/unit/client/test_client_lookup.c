/* SPDX-License-Identifier: Apache-2.0 */
/* How much of a prompt is stored: leading runs, partial matches, long lists, no daemon. */
#include "tests/lib/check.h"
#include "tests/unit/client/fake_daemon.h"

#include <stdlib.h>
#include <string.h>

enum { BT = FAKE_BLOCK_TOKENS };

struct prompt_row {
    const char *name;
    size_t n_tokens, stored;
    bool stored_tail; /* the block after the stored ones, as a tail of `tail` tokens, is there */
    uint32_t tail;
    uint32_t blocks, partial, partial_stored, requests;
};

/* Expected values by hand: blocks = leading run; partial = tokens shared with one more block. */
static const struct prompt_row prompt_rows[] = {
    { "nothing stored, no full block", 5, 0, false, 0, 0, 0, 0, 1 },
    { "nothing stored, two blocks", 2 * BT, 0, false, 0, 0, 0, 0, 2 },
    { "all full blocks stored", 3 * BT, 3, false, 0, 3, 0, 0, 1 },
    { "one of three, nothing inside", 3 * BT, 1, false, 0, 1, 0, 0, 2 },
    { "all stored and a tail of the same length", 2 * BT + 5, 2, true, 5, 2, 5, 5, 1 },
    { "a longer stored tail", 2 * BT + 5, 2, true, 9, 2, 5, 9, 1 },
    { "a shorter stored tail", 2 * BT + 5, 2, true, 3, 2, 3, 3, 1 },
    { "partial match inside a full block", 3 * BT, 1, true, 7, 1, 7, 7, 2 },
    { "partial match at the root", 2 * BT, 0, true, 7, 0, 7, 7, 2 },
};

static void test_prompt(void **state) {
    const struct prompt_row *row = *state;
    uint32_t tokens[8 * BT];
    uint8_t keys[8 * 32], root[32];
    cistern_match match = { .size = sizeof(match) };
    void *fixture;
    struct fake_fixture *x;

    fake_setup(&fixture);
    x = fixture;
    fake_prompt(x->f, x->space, tokens, row->n_tokens, keys, row->stored);
    if (row->stored_tail) {
        uint8_t key[32];
        const uint8_t *parent = row->stored ? keys + 32 * (row->stored - 1) : root;
        uint32_t ids[BT];

        assert_int_equal(cistern_key_root(x->space, root), CISTERN_OK);
        for (uint32_t i = 0; i < row->tail; i++)
            ids[i] = (uint32_t)(1000 + row->stored * BT + i);
        assert_int_equal(cistern_key_block(parent, ids, row->tail, NULL, 0, key), CISTERN_OK);
        fake_lock(x->f);
        fake_store(x->f, key, parent, ids, row->tail);
        fake_unlock(x->f);
    }
    assert_int_equal(cistern_lookup(x->space, tokens, row->n_tokens, NULL, &match), CISTERN_OK);
    assert_int_equal(match.blocks, row->blocks);
    assert_int_equal(match.partial_tokens, row->partial);
    assert_int_equal(match.partial_stored, row->partial_stored);
    assert_int_equal(match.tokens, (size_t)row->blocks * BT + row->partial);
    assert_int_equal(match.worst_tier, row->blocks ? CISTERN_TIER_HOT : CISTERN_TIER_NONE);
    assert_int_equal(match.cost_ns, 1000 * row->blocks);
    fake_lock(x->f);
    assert_int_equal(x->f->n_requests[CST_MSG_LOOKUP], row->requests);
    fake_unlock(x->f);
    fake_teardown(&fixture);
}

static void test_given_keys_are_used(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[2 * BT];
    uint8_t keys[2 * 32], wrong[2 * 32] = { 0 };
    cistern_match match = { .size = sizeof(match) };

    fake_prompt(x->f, x->space, tokens, 2 * BT, keys, 2);
    assert_int_equal(cistern_lookup(x->space, tokens, 2 * BT, keys, &match), CISTERN_OK);
    assert_int_equal(match.blocks, 2);
    assert_int_equal(cistern_lookup(x->space, tokens, 2 * BT, wrong, &match), CISTERN_OK);
    assert_int_equal(match.blocks, 0);
}

/* More keys than a packet holds lie in staging; more than keys_max ask several times. */
static void test_long_lists(void **state) {
    enum { N = 6000, STORED = 300 };
    struct fake_fixture *x = *state;
    uint32_t *tokens = calloc((size_t)N * BT, sizeof(*tokens));
    uint8_t *keys = calloc(N + 1, 32), *tiers = calloc(N, 1);
    size_t present;

    assert_true(tokens && keys && tiers);
    fake_prompt(x->f, x->space, tokens, (size_t)N * BT, keys, STORED);
    assert_int_equal(cistern_lookup_keys(x->space, keys, N, tiers, &present), CISTERN_OK);
    assert_int_equal(present, STORED);
    for (size_t i = 0; i < N; i++)
        assert_int_equal(tiers[i], i < STORED ? CISTERN_TIER_HOT : CISTERN_TIER_NONE);
    fake_lock(x->f);
    assert_int_equal(x->f->n_requests[CST_MSG_LOOKUP], 1);
    assert_int_equal(x->f->n_requests[CST_MSG_STAGING_GET], 1);
    x->f->keys_max = 100;
    fake_unlock(x->f);
    fake_hang_up(x->f); /* the next Hello names the new limit */
    (void)cistern_client_ping(x->client);
    while (cistern_client_ping(x->client))
        continue;
    assert_int_equal(cistern_lookup_keys(x->space, keys, N, tiers, &present), CISTERN_OK);
    assert_int_equal(present, STORED);
    fake_lock(x->f);
    assert_int_equal(x->f->n_requests[CST_MSG_LOOKUP], 1 + STORED / 100 + 1);
    fake_unlock(x->f);
    free(tokens);
    free(keys);
    free(tiers);
}

static void test_each(void **state) {
    enum { N = 5000 };
    struct fake_fixture *x = *state;
    cistern_space *flat = fake_space(x->client, CISTERN_KIND_FLAT);
    static uint8_t keys[N * 32], tiers[N], zero[32];
    uint32_t token = 0;

    for (uint32_t i = 0; i < N; i++)
        assert_int_equal(cistern_key_from_bytes(&i, sizeof(i), keys + 32 * (size_t)i), CISTERN_OK);
    fake_lock(x->f);
    for (size_t i = 0; i < N; i += 17)
        fake_store(x->f, keys + 32 * i, zero, &token, 0);
    fake_unlock(x->f);
    memset(tiers, 9, sizeof(tiers));
    assert_int_equal(cistern_lookup_each(flat, keys, N, tiers), CISTERN_OK);
    for (size_t i = 0; i < N; i++)
        assert_int_equal(tiers[i], i % 17 ? CISTERN_TIER_NONE : CISTERN_TIER_PACKED);
    cistern_space_close(flat);
}

static void test_without_a_daemon(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[2 * BT];
    uint8_t keys[2 * 32], tiers[2] = { 9, 9 };
    cistern_match match = { .size = sizeof(match), .blocks = 9 };
    size_t present = 9;

    fake_prompt(x->f, x->space, tokens, 2 * BT, keys, 2);
    fake_stop(x->f);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(cistern_lookup(x->space, tokens, 2 * BT, NULL, &match), CISTERN_OK);
        assert_int_equal(match.blocks, 0);
        assert_int_equal(match.tokens, 0);
        assert_int_equal(cistern_lookup_keys(x->space, keys, 2, tiers, &present), CISTERN_OK);
        assert_int_equal(present, 0);
        assert_int_equal(cistern_lookup_each(x->space, keys, 2, tiers), CISTERN_OK);
        assert_true(tiers[0] == CISTERN_TIER_NONE && tiers[1] == CISTERN_TIER_NONE);
        assert_true(cistern_last_error()[0] != '\0');
    }
    fake_start(x->f);
}

/* ---- lies ---- */

struct lie_row {
    const char *name;
    bool brief; /* told to cistern_lookup(), else to cistern_lookup_keys() */
    Cistern__V1__LookupReply reply;
    struct cst_tier_run runs[2];
    size_t tiers_size;
};

static const uint8_t any_key[32] = { 1 };

#define KEY                                                                                        \
    { 32, (uint8_t *)(uintptr_t)any_key }
static const struct lie_row lie_rows[] = {
    { "more blocks than asked", true, { .present = 3 }, { { 0 } }, 0 },
    { "tiers that were not asked for", true, { .present = 2 }, { { 1, { { 2 } } } }, 5 },
    { "no tiers", false, { .present = 2 }, { { 0 } }, 0 },
    { "tiers for too few", false, { .present = 2 }, { { 1, { { 1 } } } }, 5 },
    { "tiers for too many", false, { .present = 1 }, { { 1, { { 2 } } } }, 5 },
    { "tier counts that overflow",
      false,
      { .present = 2 },
      { { 1, { { 3 } } }, { 1, { { 255, 255, 255, 255 } } } },
      10 },
    { "partial longer than the tail",
      true,
      { .present = 2, .partial_tokens = 6, .partial_stored = 6, .partial_key = KEY },
      { { 0 } },
      0 },
    { "partial longer than stored",
      true,
      { .present = 2, .partial_tokens = 4, .partial_stored = 3, .partial_key = KEY },
      { { 0 } },
      0 },
    { "partial without a key",
      true,
      { .present = 2, .partial_tokens = 4, .partial_stored = 4 },
      { { 0 } },
      0 },
};

static bool tell_lie(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    const struct lie_row *row = f->hook_arg;
    Cistern__V1__LookupReply reply = row->reply;

    if (p->type != CST_MSG_LOOKUP)
        return false;
    protobuf_c_message_init(&cistern__v1__lookup_reply__descriptor, &reply);
    reply.present = row->reply.present;
    reply.partial_tokens = row->reply.partial_tokens;
    reply.partial_stored = row->reply.partial_stored;
    reply.partial_key = row->reply.partial_key;
    reply.tiers = (ProtobufCBinaryData){ row->tiers_size, (uint8_t *)(uintptr_t)row->runs };
    fake_reply(f, c, p, &reply.base);
    return true;
}

static void test_lie(void **state) {
    const struct lie_row *row = *state;
    uint32_t tokens[2 * BT + 5] = { 0 };
    uint8_t keys[2 * 32] = { 0 }, tiers[2];
    size_t present = 77;
    cistern_match match = { .size = sizeof(match), .blocks = 77 };
    void *fixture;
    struct fake_fixture *x;

    fake_setup(&fixture);
    x = fixture;
    fake_set_hook(x->f, tell_lie, (void *)(uintptr_t)row);
    if (row->brief)
        assert_int_equal(cistern_lookup(x->space, tokens, CST_COUNT(tokens), NULL, &match),
                         CISTERN_E_CORRUPT);
    else
        assert_int_equal(cistern_lookup_keys(x->space, keys, 2, tiers, &present),
                         CISTERN_E_CORRUPT);
    assert_int_equal(match.blocks, 77);
    assert_int_equal(present, 77);
    assert_int_equal(cistern_client_ping(x->client), CISTERN_OK); /* the connection goes on */
    fake_teardown(&fixture);
}

static void test_arguments(void **state) {
    struct fake_fixture *x = *state;
    cistern_space *flat = fake_space(x->client, CISTERN_KIND_FLAT);
    cistern_match match = { .size = sizeof(match) }, unset = { 0 };
    uint32_t token = 1;
    size_t n = 9;

    assert_int_equal(cistern_lookup(NULL, &token, 1, NULL, &match), CISTERN_E_BAD_HANDLE);
    assert_int_equal(cistern_lookup(x->space, NULL, 1, NULL, &match), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_lookup(x->space, &token, 1, NULL, NULL), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_lookup(x->space, &token, 1, NULL, &unset), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_lookup(flat, &token, 1, NULL, &match), CISTERN_E_BAD_STATE);
    assert_int_equal(cistern_lookup(x->space, NULL, 0, NULL, &match), CISTERN_OK);
    assert_int_equal(match.tokens, 0);
    assert_int_equal(cistern_lookup_keys(x->space, NULL, 1, NULL, &n), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_lookup_keys(x->space, NULL, 0, NULL, &n), CISTERN_OK);
    assert_int_equal(n, 0);
    assert_int_equal(cistern_lookup_each(x->space, NULL, 0, NULL), CISTERN_OK);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_given_keys_are_used, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_long_lists, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_each, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_without_a_daemon, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_arguments, fake_setup, fake_teardown),
    };

    return cst_run_rows(prompt_rows, test_prompt) + cst_run_rows(lie_rows, test_lie) +
           cmocka_run_group_tests(tests, NULL, NULL);
}
