/* SPDX-License-Identifier: Apache-2.0 */
/* get_into and put_from: rounds, other writers, full staging, failures in the middle. */
#include "tests/lib/check.h"
#include "tests/unit/client/fake_daemon.h"

#include "proto/status.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { BT = FAKE_BLOCK_TOKENS, N = 150 };

/* A prompt of N blocks, its bytes, and room to read them back. */
struct prompt {
    uint32_t tokens[N * BT];
    uint8_t keys[N * 32], blocks[N][FAKE_BLOCK_BYTES], copies[N][FAKE_BLOCK_BYTES];
    const void *sources[N];
    void *targets[N];
    size_t sizes[N];
    int32_t statuses[N];
};

static struct prompt p;

static void prepare(struct fake_fixture *x, size_t stored) {
    memset(&p, 0, sizeof(p));
    fake_prompt(x->f, x->space, p.tokens, CST_COUNT(p.tokens), p.keys, stored);
    for (size_t i = 0; i < N; i++) {
        for (size_t k = 0; k < FAKE_BLOCK_BYTES; k++)
            p.blocks[i][k] = fake_byte(p.keys + 32 * i, k);
        p.sources[i] = p.blocks[i];
        p.targets[i] = p.copies[i];
        p.sizes[i] = FAKE_BLOCK_BYTES;
    }
}

static int32_t put(struct fake_fixture *x, size_t n) {
    return cistern_put_from(x->space, NULL, p.keys, p.tokens, n * BT, n, p.sources, p.statuses);
}

static void check_stored(struct fake_daemon *f, size_t from, size_t to) {
    fake_lock(f);
    for (size_t i = from; i < to; i++) {
        const struct fake_block *b = fake_find(f, p.keys + 32 * i);

        assert_non_null(b);
        assert_memory_equal(f->slab + (size_t)(b - f->blocks) * FAKE_BLOCK_BYTES, p.blocks[i],
                            FAKE_BLOCK_BYTES);
    }
    fake_unlock(f);
}

static unsigned requests(struct fake_daemon *f, uint16_t type) {
    unsigned n;

    fake_lock(f);
    n = f->n_requests[type];
    fake_unlock(f);
    return n;
}

/* ---- get ---- */

static void test_get(void **state) {
    struct fake_fixture *x = *state;

    prepare(x, 100);
    p.sizes[1] = 10; /* shorter copies less */
    p.sizes[2] = 0;
    assert_int_equal(cistern_get_into(x->space, p.keys, N, p.targets, p.sizes, p.statuses),
                     CISTERN_OK);
    for (size_t i = 0; i < N; i++) {
        static const uint8_t zero[FAKE_BLOCK_BYTES];
        size_t n = i < 100 ? p.sizes[i] : 0;

        assert_int_equal(p.statuses[i], i < 100 ? CISTERN_OK : CISTERN_E_NOT_FOUND);
        assert_memory_equal(p.copies[i], p.blocks[i], n);
        assert_memory_equal(p.copies[i] + n, zero, FAKE_BLOCK_BYTES - n);
    }
    fake_lock(x->f);
    assert_int_equal(x->f->n_leases, 0);
    fake_unlock(x->f);
    assert_int_equal(requests(x->f, CST_MSG_ACQUIRE), 3); /* rounds of 64 */
    assert_int_equal(requests(x->f, CST_MSG_RELEASE), 0); /* they rode along; the last had none */
}

static bool hang_up_at_second(struct fake_daemon *f, struct fake_connection *c,
                              const struct cst_packet *packet) {
    if (packet->type != CST_MSG_ACQUIRE || f->n_requests[CST_MSG_ACQUIRE] < 1)
        return false;
    (void)shutdown(c->fd, SHUT_RDWR);
    return true;
}

static void test_get_lost(void **state) {
    struct fake_fixture *x = *state;

    prepare(x, N);
    fake_set_hook(x->f, hang_up_at_second, NULL);
    assert_int_equal(cistern_get_into(x->space, p.keys, N, p.targets, p.sizes, p.statuses),
                     CISTERN_E_DISCONNECTED);
}

/* ---- put ---- */

/* 150 blocks through 32 places of staging. */
static void test_put_in_rounds(void **state) {
    struct fake_fixture *x = *state;

    prepare(x, 20);
    assert_int_equal(put(x, N), CISTERN_OK);
    for (size_t i = 0; i < N; i++)
        assert_int_equal(p.statuses[i], i < 20 ? CISTERN_E_PRESENT : CISTERN_OK);
    check_stored(x->f, 0, N);
    assert_int_equal(put(x, N), CISTERN_OK);
    for (size_t i = 0; i < N; i++)
        assert_int_equal(p.statuses[i], CISTERN_E_PRESENT);
}

static void test_put_flat(void **state) {
    struct fake_fixture *x = *state;
    cistern_space *flat = fake_space(x->client, CISTERN_KIND_FLAT);

    prepare(x, 0);
    assert_int_equal(cistern_put_from(flat, NULL, p.keys, NULL, 0, N, p.sources, p.statuses),
                     CISTERN_OK);
    for (size_t i = 0; i < N; i++)
        assert_int_equal(p.statuses[i], CISTERN_OK);
    check_stored(x->f, 0, N);
}

/* What the hook does to the key at `at` of the prompt, the first `times` times. */
struct spoiler {
    size_t at;
    int status;
    unsigned times, busy_ms;
};

/* Answers a Reserve truthfully but for one key; keys behind it get slots (flat) or hang under it.
 */
static bool spoil(struct fake_daemon *f, struct fake_connection *c,
                  const struct cst_packet *packet) {
    struct spoiler *s = f->hook_arg;
    const Cistern__V1__Reserve *m;
    Cistern__V1__ReserveReply reply = CISTERN__V1__RESERVE_REPLY__INIT;
    struct cst_slot_record records[N] = { 0 };
    size_t n, hit;

    if (packet->type != CST_MSG_RESERVE || !s->times)
        return false;
    m = fake_unpack(f, packet);
    n = m->keys.len / 32;
    for (hit = 0; hit < n && memcmp(m->keys.data + 32 * hit, p.keys + 32 * s->at, 32) != 0; hit++)
        continue;
    if (hit == n)
        return false;
    s->times--;
    for (size_t i = 0; i < n; i++)
        cst_store16(&records[i].status, i < hit ? CST_STATUS_PRESENT : CST_STATUS_BUSY);
    cst_store16(&records[hit].status, (uint16_t)s->status);
    cst_store32(&records[hit].busy_ms, s->busy_ms);
    reply.slots = (ProtobufCBinaryData){ n * sizeof(records[0]), (uint8_t *)records };
    fake_reply(f, c, packet, &reply.base);
    return true;
}

struct spoil_row {
    const char *name;
    struct spoiler spoiler;
    size_t stored;             /* blocks there before */
    int32_t before, at, after; /* statuses around the spoiled block */
};

static const struct spoil_row spoil_rows[] = {
    { "busy for a while",
      { 5, CST_STATUS_BUSY, 3, 0 },
      5,
      CISTERN_E_PRESENT,
      CISTERN_OK,
      CISTERN_OK },
    { "busy for ever",
      { 5, CST_STATUS_BUSY, ~0u, 0 },
      5,
      CISTERN_E_PRESENT,
      CISTERN_E_BUSY,
      CISTERN_E_BUSY },
    { "another writer for a while",
      { 5, CST_STATUS_KEY_BUSY, 4, 2 },
      5,
      CISTERN_E_PRESENT,
      CISTERN_OK,
      CISTERN_OK },
    { "another writer for ever",
      { 5, CST_STATUS_KEY_BUSY, ~0u, 1 },
      5,
      CISTERN_E_PRESENT,
      CISTERN_E_KEY_BUSY,
      CISTERN_E_BUSY },
    { "parent missing",
      { 0, CST_STATUS_PARENT_MISSING, 1, 0 },
      0,
      0,
      CISTERN_E_PARENT_MISSING,
      CISTERN_E_PARENT_MISSING },
    { "mismatch",
      { 5, CST_STATUS_KEY_MISMATCH, 1, 0 },
      5,
      CISTERN_E_PRESENT,
      CISTERN_E_KEY_MISMATCH,
      CISTERN_E_PARENT_MISSING },
};

static void test_spoiled(void **state) {
    const struct spoil_row *row = *state;
    struct spoiler spoiler = row->spoiler;
    void *fixture;
    struct fake_fixture *x;

    fake_setup(&fixture);
    x = fixture;
    prepare(x, row->stored);
    fake_set_hook(x->f, spoil, &spoiler);
    assert_int_equal(put(x, N), CISTERN_OK);
    for (size_t i = 0; i < N; i++)
        assert_int_equal(p.statuses[i], i < spoiler.at    ? row->before
                                        : i == spoiler.at ? row->at
                                                          : row->after);
    if (row->after == CISTERN_OK)
        check_stored(x->f, 0, N);
    fake_teardown(&fixture);
}

/* Slots behind a block that another writer has are not filled: nothing hangs in the air. */
static bool busy_inside(struct fake_daemon *f, struct fake_connection *c,
                        const struct cst_packet *packet) {
    uint8_t *fourth = p.keys + 3 * 32;
    Cistern__V1__ReserveReply reply = CISTERN__V1__RESERVE_REPLY__INIT;
    struct cst_slot_record records[6] = { 0 };
    int *times = f->hook_arg;

    if (packet->type != CST_MSG_RESERVE || (*times)++)
        return false;
    for (size_t i = 0; i < 6; i++) {
        bool other = i == 3;

        cst_store16(&records[i].status, other ? CST_STATUS_KEY_BUSY : CST_STATUS_OK);
        cst_store64(&records[i].length, FAKE_BLOCK_BYTES);
        cst_store64(&records[i].offset, i * FAKE_BLOCK_BYTES);
        cst_store64(&records[i].slot, 1000 + i);
        if (other)
            continue;
        c->slots[i] = (struct fake_slot){ .used = true, .id = 1000 + i, .n_tokens = BT };
        memcpy(c->slots[i].key, p.keys + 32 * i, 32);
    }
    fake_store(f, fourth, p.keys + 64, p.tokens + 3 * BT, BT); /* the other writer commits */
    reply.slots = (ProtobufCBinaryData){ sizeof(records), (uint8_t *)records };
    fake_reply(f, c, packet, &reply.base);
    return true;
}

static void test_other_writer_in_the_middle(void **state) {
    struct fake_fixture *x = *state;
    int times = 0;

    prepare(x, 0);
    fake_set_hook(x->f, busy_inside, &times);
    assert_int_equal(put(x, 6), CISTERN_OK);
    for (size_t i = 0; i < 6; i++)
        assert_int_equal(p.statuses[i], i == 3 ? CISTERN_E_PRESENT : CISTERN_OK);
    check_stored(x->f, 0, 6);
    fake_lock(x->f);
    assert_int_equal(x->f->n_aborted, 2); /* 4 and 5, asked for again */
    fake_unlock(x->f);
}

static void test_put_lost(void **state) {
    struct fake_fixture *x = *state;

    prepare(x, 0);
    fake_stop(x->f);
    assert_int_equal(put(x, N), CISTERN_E_DISCONNECTED);
    fake_start(x->f);
}

static void test_arguments(void **state) {
    struct fake_fixture *x = *state;

    prepare(x, 0);
    assert_int_equal(cistern_get_into(NULL, p.keys, 1, p.targets, p.sizes, p.statuses),
                     CISTERN_E_BAD_HANDLE);
    assert_int_equal(cistern_get_into(x->space, p.keys, 1, NULL, p.sizes, p.statuses),
                     CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_get_into(x->space, NULL, 0, NULL, NULL, NULL), CISTERN_OK);
    assert_int_equal(
        cistern_put_from(x->space, NULL, p.keys, p.tokens, BT, 2, p.sources, p.statuses),
        CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_put_from(x->space, NULL, NULL, NULL, 0, 0, NULL, NULL), CISTERN_OK);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_get, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_get_lost, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_put_in_rounds, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_put_flat, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_other_writer_in_the_middle, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_put_lost, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_arguments, fake_setup, fake_teardown),
    };

    return cst_run_rows(spoil_rows, test_spoiled) + cmocka_run_group_tests(tests, NULL, NULL);
}
