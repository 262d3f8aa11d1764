/* SPDX-License-Identifier: Apache-2.0 */
/* Slots: reserve, fill, commit, abort; long chains; losses; lies. */
#include "tests/lib/check.h"
#include "tests/unit/client/fake_daemon.h"

#include "client/client.h"
#include "proto/status.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BT = FAKE_BLOCK_TOKENS, RESERVE_MS = 500 /* StagingGet is answered within it */ };

static void fill(cistern_slot *slot, const uint8_t *key) {
    void *data;
    size_t size;

    assert_int_equal(cistern_slot_data(slot, &data, &size), CISTERN_OK);
    assert_int_equal(size, FAKE_BLOCK_BYTES);
    for (size_t i = 0; i < size; i++)
        ((uint8_t *)data)[i] = fake_byte(key, i);
}

static void check_stored(struct fake_daemon *f, const uint8_t *key) {
    const struct fake_block *block;

    fake_lock(f);
    block = fake_find(f, key);
    assert_non_null(block);
    for (size_t i = 0; i < FAKE_BLOCK_BYTES; i++)
        assert_int_equal(f->slab[(size_t)(block - f->blocks) * FAKE_BLOCK_BYTES + i],
                         fake_byte(key, i));
    fake_unlock(f);
}

static size_t slots_in_use(struct fake_daemon *f) {
    size_t n = 0;

    fake_lock(f);
    for (size_t c = 0; c < FAKE_CONNECTIONS; c++)
        for (size_t i = 0; i < FAKE_BLOCKS; i++)
            n += f->connections[c].slots[i].used;
    fake_unlock(f);
    return n;
}

/* ---- the usual way ---- */

static void test_store(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[3 * BT + 5];
    uint8_t keys[4 * 32];
    cistern_slot *slots[4];
    int32_t statuses[4];

    fake_prompt(x->f, x->space, tokens, CST_COUNT(tokens), keys, 1);
    assert_int_equal(
        cistern_reserve(x->space, NULL, keys, tokens, CST_COUNT(tokens), 4, slots, statuses),
        CISTERN_OK);
    assert_int_equal(statuses[0], CISTERN_E_PRESENT);
    assert_null(slots[0]);
    for (size_t i = 1; i < 4; i++) {
        assert_int_equal(statuses[i], CISTERN_OK);
        fill(slots[i], keys + 32 * i);
    }
    assert_int_equal(cistern_commit(x->space, slots, 4, NULL, statuses), CISTERN_OK);
    assert_int_equal(statuses[0], CISTERN_E_BAD_HANDLE); /* the NULL entry */
    for (size_t i = 1; i < 4; i++) {
        assert_int_equal(statuses[i], CISTERN_OK);
        check_stored(x->f, keys + 32 * i);
    }
    fake_lock(x->f);
    assert_int_equal(fake_find(x->f, keys + 3 * 32)->n_tokens, 5);
    fake_unlock(x->f);
    assert_int_equal(cistern_commit(x->space, slots, 4, NULL, statuses), CISTERN_OK);
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(statuses[i], CISTERN_E_BAD_HANDLE); /* handles end with the commit */
}

static void test_chain_from_the_middle(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[4 * BT];
    uint8_t keys[4 * 32];
    cistern_slot *slots[2];
    int32_t statuses[2];

    fake_prompt(x->f, x->space, tokens, 4 * BT, keys, 2);
    assert_int_equal(cistern_reserve(x->space, keys + 32, keys + 64, tokens + 2 * BT, 2 * BT, 2,
                                     slots, statuses),
                     CISTERN_OK);
    assert_int_equal(statuses[0], CISTERN_OK);
    cistern_abort(x->space, slots, 2);
    assert_int_equal(slots_in_use(x->f), 0);
    fake_lock(x->f);
    assert_int_equal(x->f->n_aborted, 2);
    assert_null(fake_find(x->f, keys + 64));
    fake_unlock(x->f);
    cistern_abort(x->space, slots, 2); /* handles that ended are skipped */
}

/* Surprisals follow their slots, also around an entry that is skipped. */
static void test_surprisals(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[2 * BT + 5];
    uint16_t surprisals[2 * BT + 5];
    uint8_t keys[3 * 32];
    cistern_slot *slots[4] = { NULL };
    int32_t statuses[4];
    cistern_commit_options options = { .size = sizeof(options),
                                       .surprisals = surprisals,
                                       .n_surprisals = CST_COUNT(surprisals) };

    for (size_t i = 0; i < CST_COUNT(surprisals); i++)
        surprisals[i] = (uint16_t)(100 + i);
    fake_prompt(x->f, x->space, tokens, CST_COUNT(tokens), keys, 0);
    assert_int_equal(
        cistern_reserve(x->space, NULL, keys, tokens, CST_COUNT(tokens), 3, slots, statuses),
        CISTERN_OK);
    slots[3] = slots[2];
    slots[2] = NULL;
    assert_int_equal(cistern_commit(x->space, slots, 4, &options, statuses), CISTERN_OK);
    assert_int_equal(statuses[0], CISTERN_OK);
    assert_int_equal(statuses[2], CISTERN_E_BAD_HANDLE);
    assert_int_equal(statuses[3], CISTERN_OK);
    fake_lock(x->f);
    assert_int_equal(x->f->n_requests[CST_MSG_COMMIT], 2);
    assert_int_equal(x->f->n_surprisals, 5); /* of the second request: the tail */
    assert_memory_equal(x->f->surprisals, surprisals + 2 * BT, 10);
    fake_unlock(x->f);
}

static bool refuse_commits(struct fake_daemon *f, struct fake_connection *c,
                           const struct cst_packet *p) {
    if (p->type == CST_MSG_COMMIT)
        fake_error(f, c, p, CST_STATUS_BUSY);
    return p->type == CST_MSG_COMMIT;
}

/* The handles end, so the daemon's slots must, too: nobody could name them any more. */
static void test_a_refused_commit_leaves_no_slots(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[3 * BT];
    uint8_t keys[3 * 32];
    cistern_slot *slots[3];
    int32_t statuses[3];

    fake_prompt(x->f, x->space, tokens, 3 * BT, keys, 0);
    assert_int_equal(cistern_reserve(x->space, NULL, keys, tokens, 3 * BT, 3, slots, statuses),
                     CISTERN_OK);
    fake_set_hook(x->f, refuse_commits, NULL);
    assert_int_equal(cistern_commit(x->space, slots, 3, NULL, statuses), CISTERN_E_BUSY);
    fake_wait(x->f, CST_MSG_ABORT, 1);
    fake_lock(x->f);
    assert_int_equal(x->f->n_aborted, 3);
    fake_unlock(x->f);
}

static void test_wrong_surprisals(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[BT];
    uint16_t surprisals[BT] = { 0 };
    uint8_t keys[32];
    cistern_slot *slot;
    int32_t status;
    cistern_commit_options options = { .size = sizeof(options),
                                       .surprisals = surprisals,
                                       .n_surprisals = BT - 1 };

    fake_prompt(x->f, x->space, tokens, BT, keys, 0);
    assert_int_equal(cistern_reserve(x->space, NULL, keys, tokens, BT, 1, &slot, &status),
                     CISTERN_OK);
    assert_int_equal(cistern_commit(x->space, &slot, 1, &options, &status), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(slots_in_use(x->f), 0); /* the handle ended all the same */
}

static void test_the_same_slot_twice(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[BT];
    uint8_t keys[32];
    cistern_slot *slots[2];
    int32_t statuses[2];
    void *data;
    size_t size;

    fake_prompt(x->f, x->space, tokens, BT, keys, 0);
    assert_int_equal(cistern_reserve(x->space, NULL, keys, tokens, BT, 1, slots, statuses),
                     CISTERN_OK);
    slots[1] = slots[0];
    assert_int_equal(cistern_commit(x->space, slots, 2, NULL, statuses), CISTERN_OK);
    assert_int_equal(statuses[0], CISTERN_OK);
    assert_int_equal(statuses[1], CISTERN_E_BAD_HANDLE);
    assert_int_equal(cistern_slot_data(slots[0], &data, &size), CISTERN_E_BAD_HANDLE);
}

/* Keys and ids that don't fit a packet travel in staging, above the slots. */
static void test_long_chain(void **state) {
    enum { N = 2000 };
    struct fake_fixture *x = *state;
    uint32_t *tokens = calloc((size_t)N * BT, sizeof(*tokens));
    uint8_t *keys = calloc(N + 1, 32);
    cistern_slot **slots = calloc(N, sizeof(*slots));
    int32_t *statuses = calloc(N, sizeof(*statuses));

    assert_true(tokens && keys && slots && statuses);
    fake_prompt(x->f, x->space, tokens, (size_t)N * BT, keys, 0);
    assert_int_equal(
        cistern_reserve(x->space, NULL, keys, tokens, (size_t)N * BT, N, slots, statuses),
        CISTERN_OK);
    for (size_t i = 0; i < N; i++)
        assert_int_equal(statuses[i], i < x->f->staging_places ? CISTERN_OK : CISTERN_E_BUSY);
    for (size_t i = 0; i < x->f->staging_places; i++)
        fill(slots[i], keys + 32 * i);
    fake_lock(x->f);
    assert_int_equal(x->f->n_requests[CST_MSG_RESERVE], 1);
    fake_unlock(x->f);
    assert_int_equal(cistern_commit(x->space, slots, N, NULL, statuses), CISTERN_OK);
    for (size_t i = 0; i < x->f->staging_places; i++)
        check_stored(x->f, keys + 32 * i);
    free(tokens);
    free(keys);
    free(slots);
    free(statuses);
}

static void test_flat(void **state) {
    struct fake_fixture *x = *state;
    cistern_space *flat = fake_space(x->client, CISTERN_KIND_FLAT);
    uint8_t keys[2 * 32];
    cistern_slot *slots[2];
    int32_t statuses[2];
    uint32_t token = 1;

    assert_int_equal(cistern_key_from_bytes("a", 1, keys), CISTERN_OK);
    assert_int_equal(cistern_key_from_bytes("b", 1, keys + 32), CISTERN_OK);
    assert_int_equal(cistern_reserve(flat, NULL, keys, &token, 1, 2, slots, statuses),
                     CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_reserve(flat, NULL, keys, NULL, 0, 2, slots, statuses), CISTERN_OK);
    fill(slots[0], keys);
    fill(slots[1], keys + 32);
    assert_int_equal(cistern_commit(flat, slots, 2, NULL, statuses), CISTERN_OK);
    check_stored(x->f, keys);
    check_stored(x->f, keys + 32);
}

static void test_arguments(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[2 * BT] = { 0 };
    uint8_t keys[2 * 32] = { 0 };
    cistern_slot *slots[2];
    int32_t statuses[2];
    void *data;
    size_t size;

    assert_int_equal(cistern_reserve(NULL, NULL, keys, tokens, BT, 1, slots, statuses),
                     CISTERN_E_BAD_HANDLE);
    assert_int_equal(cistern_reserve(x->space, NULL, NULL, tokens, BT, 1, slots, statuses),
                     CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_reserve(x->space, NULL, keys, NULL, BT, 1, slots, statuses),
                     CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_reserve(x->space, NULL, keys, tokens, BT, 2, slots, statuses),
                     CISTERN_E_BAD_ARGUMENT); /* ids for one block only */
    assert_int_equal(cistern_reserve(x->space, NULL, keys, tokens, 2 * BT, 1, slots, statuses),
                     CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_reserve(x->space, NULL, NULL, NULL, 0, 0, NULL, NULL), CISTERN_OK);
    assert_int_equal(cistern_slot_data(NULL, &data, &size), CISTERN_E_BAD_HANDLE);
    cistern_abort(NULL, slots, 1);
    cistern_abort(x->space, NULL, 1);
}

/* ---- losses ---- */

static size_t mapped_stagings(void) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    size_t n = 0;

    assert_non_null(maps);
    while (fgets(line, sizeof(line), maps))
        n += strstr(line, "memfd:staging") != NULL;
    (void)fclose(maps);
    return n;
}

static void test_lost_between_reserve_and_commit(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[2 * BT];
    uint8_t keys[2 * 32];
    cistern_slot *old[2], *now[2], *mixed[2];
    int32_t statuses[2];

    fake_prompt(x->f, x->space, tokens, 2 * BT, keys, 0);
    assert_int_equal(cistern_reserve(x->space, NULL, keys, tokens, 2 * BT, 2, old, statuses),
                     CISTERN_OK);
    fake_stop(x->f);
    fake_start(x->f);
    (void)cistern_client_ping(x->client);
    while (cistern_client_ping(x->client))
        (void)usleep(1000);
    assert_int_equal(cistern_reserve(x->space, NULL, keys, tokens, 2 * BT, 2, now, statuses),
                     CISTERN_OK);
    fill(old[0], keys); /* still writable, known to nobody */
    fill(now[1], keys + 32);
    mixed[0] = old[0];
    mixed[1] = now[1];
    assert_int_equal(cistern_commit(x->space, mixed, 2, NULL, statuses), CISTERN_OK);
    assert_int_equal(statuses[0], CISTERN_E_DISCONNECTED);
    assert_int_equal(statuses[1], CISTERN_OK);
    check_stored(x->f, keys + 32);
    cistern_abort(x->space, now, 1);
    assert_int_equal(mapped_stagings(), 2 + 1); /* old and new here, new in the fake daemon */
    assert_int_equal(cistern_commit(x->space, old + 1, 1, NULL, statuses), CISTERN_E_DISCONNECTED);
    assert_int_equal(mapped_stagings(), 1 + 1); /* the last slot of the old one is gone */
}

static void test_without_a_daemon(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[BT];
    uint8_t keys[32];
    cistern_slot *slot;
    int32_t status;

    fake_prompt(x->f, x->space, tokens, BT, keys, 0);
    fake_stop(x->f);
    for (int i = 0; i < 3; i++)
        assert_int_equal(cistern_reserve(x->space, NULL, keys, tokens, BT, 1, &slot, &status),
                         CISTERN_E_DISCONNECTED);
    fake_start(x->f);
}

/* ---- answers that come too late ---- */

struct late {
    uint16_t type;
    struct cst_packet packet;
    uint8_t payload[4096];
    struct fake_connection *connection;
};

static bool keep(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    struct late *late = f->hook_arg;

    if (p->type != late->type || late->connection)
        return false;
    late->packet = *p;
    memcpy(late->payload, p->payload, p->length);
    late->packet.payload = late->payload;
    late->connection = c;
    return true;
}

static void answer_late(struct fake_daemon *f, const struct late *late) {
    fake_lock(f);
    fake_answer(f, late->connection, &late->packet);
    fake_unlock(f);
}

static void test_late_reserve(void **state) {
    struct fake_daemon *f = fake_new();
    cistern_client *c = fake_client(f, 0);
    cistern_space *space = fake_space(c, CISTERN_KIND_TOKENS);
    struct late late = { .type = CST_MSG_RESERVE };
    uint32_t tokens[2 * BT];
    uint8_t keys[2 * 32];
    cistern_slot *slots[2];
    int32_t statuses[2];

    fake_prompt(f, space, tokens, 2 * BT, keys, 0);
    fake_set_hook(f, keep, &late);
    fake_set_timeout(c, RESERVE_MS);
    assert_int_equal(cistern_reserve(space, NULL, keys, tokens, 2 * BT, 2, slots, statuses),
                     CISTERN_E_TIMEOUT);
    fake_set_timeout(c, FAKE_PATIENT_MS);
    fake_wait(f, late.type, 1);
    answer_late(f, &late);
    assert_int_equal(slots_in_use(f), 2);
    assert_int_equal(cistern_client_ping(c), CISTERN_OK); /* reads the late answer */
    fake_wait(f, CST_MSG_ABORT, 1);
    assert_int_equal(slots_in_use(f), 0);
    cistern_client_close(c);
    fake_free(f);
}

/* The staging descriptor comes once: the late answer is kept, not lost. */
static void test_late_staging(void **state) {
    struct fake_daemon *f = fake_new();
    cistern_client *c = fake_client(f, 0);
    cistern_space *space = fake_space(c, CISTERN_KIND_TOKENS);
    struct late late = { .type = CST_MSG_STAGING_GET };
    uint32_t tokens[BT];
    uint8_t keys[32];
    cistern_slot *slot;
    int32_t status;

    fake_prompt(f, space, tokens, BT, keys, 0);
    fake_set_hook(f, keep, &late);
    fake_set_timeout(c, FAKE_SHORT_MS);
    assert_int_equal(cistern_reserve(space, NULL, keys, tokens, BT, 1, &slot, &status),
                     CISTERN_E_TIMEOUT);
    fake_set_timeout(c, FAKE_PATIENT_MS);
    fake_wait(f, late.type, 1);
    answer_late(f, &late);
    assert_int_equal(cistern_client_ping(c), CISTERN_OK);
    assert_int_equal(cistern_reserve(space, NULL, keys, tokens, BT, 1, &slot, &status), CISTERN_OK);
    fill(slot, keys);
    fake_lock(f);
    assert_int_equal(f->n_requests[CST_MSG_STAGING_GET], 1);
    fake_unlock(f);
    cistern_client_close(c);
    fake_free(f);
}

/* ---- lies ---- */

enum lie {
    SHORT_RECORDS,
    OFFSET_IN_LISTS,
    OFFSET_PAST_END,
    OFFSET_WRAPS,
    WRONG_LENGTH,
    ERROR_REPLY,
    HANG_UP,
    COMMIT_SHORT,
    COMMIT_ERROR,
    COMMIT_HANG_UP,
    STAGING_SMALL,
    STAGING_NO_FD,
    STAGING_LISTS_PAST_END,
    STAGING_NOT_SEALED,
};

struct lie_row {
    const char *name;
    enum lie lie;
    int32_t reserve, commit;
};

static const struct lie_row lie_rows[] = {
    { "records cut short", SHORT_RECORDS, CISTERN_E_CORRUPT, 0 },
    { "slot among the lists", OFFSET_IN_LISTS, CISTERN_E_CORRUPT, 0 },
    { "slot past the end", OFFSET_PAST_END, CISTERN_E_CORRUPT, 0 },
    { "slot offset that wraps", OFFSET_WRAPS, CISTERN_E_CORRUPT, 0 },
    { "not a block's length", WRONG_LENGTH, CISTERN_E_CORRUPT, 0 },
    { "an error", ERROR_REPLY, CISTERN_E_QUOTA, 0 },
    { "the end", HANG_UP, CISTERN_E_DISCONNECTED, 0 },
    { "commit statuses cut short", COMMIT_SHORT, CISTERN_OK, CISTERN_E_CORRUPT },
    { "commit error", COMMIT_ERROR, CISTERN_OK, CISTERN_E_INTERNAL },
    { "the end at commit", COMMIT_HANG_UP, CISTERN_OK, CISTERN_E_DISCONNECTED },
    { "staging shorter than said", STAGING_SMALL, CISTERN_E_SYSTEM, 0 },
    { "staging without descriptor", STAGING_NO_FD, CISTERN_E_CORRUPT, 0 },
    { "lists past the end of staging", STAGING_LISTS_PAST_END, CISTERN_E_CORRUPT, 0 },
    { "staging that can shrink", STAGING_NOT_SEALED, CISTERN_E_SYSTEM, 0 },
};

static bool lie_at_reserve(struct fake_daemon *f, struct fake_connection *c,
                           const struct cst_packet *p, enum lie lie) {
    Cistern__V1__ReserveReply reply = CISTERN__V1__RESERVE_REPLY__INIT;
    struct cst_slot_record r = { 0 };
    uint64_t lists = (uint64_t)f->staging_places * FAKE_BLOCK_BYTES;

    if (lie > HANG_UP)
        return false;
    cst_store64(&r.slot, 77);
    cst_store64(&r.length, FAKE_BLOCK_BYTES - (lie == WRONG_LENGTH));
    if (lie == OFFSET_IN_LISTS)
        cst_store64(&r.offset, lists - FAKE_BLOCK_BYTES + 1);
    else if (lie == OFFSET_PAST_END)
        cst_store64(&r.offset, lists + f->lists_bytes);
    else if (lie == OFFSET_WRAPS)
        cst_store64(&r.offset, UINT64_MAX - 1);
    reply.slots = (ProtobufCBinaryData){ sizeof(r) - (lie == SHORT_RECORDS), (uint8_t *)&r };
    if (lie == ERROR_REPLY)
        fake_error(f, c, p, CST_STATUS_QUOTA);
    else if (lie == HANG_UP)
        (void)shutdown(c->fd, SHUT_RDWR);
    else
        fake_reply(f, c, p, &reply.base);
    return true;
}

static bool lie_at_commit(struct fake_daemon *f, struct fake_connection *c,
                          const struct cst_packet *p, enum lie lie) {
    Cistern__V1__CommitReply reply = CISTERN__V1__COMMIT_REPLY__INIT;
    uint8_t status = 0;

    reply.statuses = (ProtobufCBinaryData){ 1, &status };
    if (lie == COMMIT_SHORT)
        fake_reply(f, c, p, &reply.base);
    else if (lie == COMMIT_ERROR)
        fake_error(f, c, p, CST_STATUS_BAD_MESSAGE);
    else
        (void)shutdown(c->fd, SHUT_RDWR);
    return true;
}

static bool lie_about_staging(struct fake_daemon *f, struct fake_connection *c,
                              const struct cst_packet *p, enum lie lie) {
    Cistern__V1__StagingGetReply reply = CISTERN__V1__STAGING_GET_REPLY__INIT;
    int fd = memfd_create("staging", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    assert_true(fd >= 0 && !ftruncate(fd, 8 * FAKE_BLOCK_BYTES));
    if (lie != STAGING_NOT_SEALED)
        assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    reply.size = 8 * FAKE_BLOCK_BYTES + (lie == STAGING_SMALL);
    reply.lists = lie == STAGING_LISTS_PAST_END ? reply.size + 1 : reply.size / 2;
    fake_reply_fds(f, c, p, &reply.base, &fd, lie != STAGING_NO_FD);
    cst_close(fd);
    return true;
}

static bool tell_lie(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    const struct lie_row *row = f->hook_arg;

    if (p->type == CST_MSG_RESERVE)
        return lie_at_reserve(f, c, p, row->lie);
    if (p->type == CST_MSG_COMMIT)
        return lie_at_commit(f, c, p, row->lie);
    if (p->type == CST_MSG_STAGING_GET && row->lie >= STAGING_SMALL)
        return lie_about_staging(f, c, p, row->lie);
    return false;
}

static void test_lie(void **state) {
    struct lie_row row = **(struct lie_row **)state;
    struct fake_daemon *f = fake_new();
    cistern_client *c = fake_client(f, 0);
    cistern_space *space = fake_space(c, CISTERN_KIND_TOKENS);
    uint32_t tokens[BT];
    uint8_t keys[32];
    cistern_slot *slot = NULL;
    int32_t status = 0;

    fake_prompt(f, space, tokens, BT, keys, 0);
    fake_set_hook(f, tell_lie, &row);
    assert_int_equal(cistern_reserve(space, NULL, keys, tokens, BT, 1, &slot, &status),
                     row.reserve);
    if (!row.reserve) {
        fill(slot, keys);
        assert_int_equal(cistern_commit(space, &slot, 1, NULL, &status), row.commit);
        assert_int_equal(status, row.commit);
    }
    fake_set_hook(f, NULL, NULL);
    if (row.lie <= WRONG_LENGTH && row.lie != SHORT_RECORDS)
        fake_wait(f, CST_MSG_ABORT, 1); /* what was given is given back */
    cistern_client_close(c);
    fake_free(f);
}

/* Never answers a Ping, and hangs up behind the staging slab. */
static bool hang_up_behind_staging(struct fake_daemon *f, struct fake_connection *c,
                                   const struct cst_packet *packet) {
    if (packet->type != CST_MSG_STAGING_GET)
        return packet->type == CST_MSG_PING;
    fake_answer(f, c, packet);
    (void)shutdown(c->fd, SHUT_RDWR);
    return true;
}

static void *ping(void *arg) {
    return (void *)(intptr_t)cistern_client_ping(arg);
}

/* The thread that reads sees the end before the one that asked for staging wakes up. */
static void test_lost_behind_staging(void **state) {
    enum { ROUNDS = 30 };
    struct fake_fixture *x = *state;
    uint32_t tokens[BT];
    uint8_t keys[32];
    cistern_slot *slot;
    int32_t status;

    fake_prompt(x->f, x->space, tokens, BT, keys, 0);
    fake_set_hook(x->f, hang_up_behind_staging, NULL);
    for (unsigned round = 1; round <= ROUNDS; round++) {
        pthread_t reader;
        void *end;

        while (cistern_touch(x->space, keys, 1) != CISTERN_OK)
            continue;
        assert_int_equal(pthread_create(&reader, NULL, ping, x->client), 0);
        fake_wait(x->f, CST_MSG_PING, 1 + round); /* after the one of opening */
        assert_int_equal(cistern_reserve(x->space, NULL, keys, tokens, BT, 1, &slot, &status),
                         CISTERN_E_DISCONNECTED);
        assert_int_equal(pthread_join(reader, &end), 0);
        assert_int_equal((intptr_t)end, CISTERN_E_DISCONNECTED);
    }
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_store, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_chain_from_the_middle, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_surprisals, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_a_refused_commit_leaves_no_slots, fake_setup,
                                        fake_teardown),
        cmocka_unit_test_setup_teardown(test_wrong_surprisals, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_the_same_slot_twice, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_long_chain, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_flat, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_arguments, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_lost_between_reserve_and_commit, fake_setup,
                                        fake_teardown),
        cmocka_unit_test_setup_teardown(test_without_a_daemon, fake_setup, fake_teardown),
        cmocka_unit_test(test_late_reserve),
        cmocka_unit_test(test_late_staging),
        cmocka_unit_test_setup_teardown(test_lost_behind_staging, fake_setup, fake_teardown),
    };

    return cst_run_rows(lie_rows, test_lie) + cmocka_run_group_tests(tests, NULL, NULL);
}
