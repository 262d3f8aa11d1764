/* SPDX-License-Identifier: Apache-2.0 */
/* Leases: acquire, read, release; pending decodes; slabs that come and go; lies. */
#include "tests/lib/check.h"
#include "tests/unit/client/fake_daemon.h"

#include "base/fault.h"
#include "client/client.h"
#include "codec/codec.h"
#include "proto/status.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

enum { BT = FAKE_BLOCK_TOKENS, READY_MS = 500 };

static void check_block(const cistern_lease *lease, const uint8_t *key) {
    cistern_lease_info info = { .size = sizeof(info) };
    const uint8_t *bytes;
    const void *data;
    size_t size;

    assert_int_equal(cistern_lease_data(lease, &data, &size, &info), CISTERN_OK);
    assert_int_equal(size, FAKE_BLOCK_BYTES);
    assert_int_equal(info.slab, FAKE_SLAB);
    assert_int_equal(info.tier, CISTERN_TIER_HOT);
    assert_int_equal(info.packed, 0);
    bytes = data;
    for (size_t i = 0; i < size; i++)
        assert_int_equal(bytes[i], fake_byte(key, i));
}

static unsigned requests(struct fake_daemon *f, uint16_t type) {
    unsigned n;

    fake_lock(f);
    n = f->n_requests[type];
    fake_unlock(f);
    return n;
}

static unsigned held(struct fake_daemon *f) {
    unsigned n;

    fake_lock(f);
    n = f->n_leases;
    fake_unlock(f);
    return n;
}

/* ---- the usual way ---- */

static void test_acquire(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[4 * BT];
    uint8_t keys[4 * 32];
    cistern_lease *leases[4];
    int32_t statuses[4];

    fake_prompt(x->f, x->space, tokens, 4 * BT, keys, 3);
    assert_int_equal(cistern_acquire(x->space, keys, 4, NULL, leases, statuses), CISTERN_OK);
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(statuses[i], CISTERN_OK);
        check_block(leases[i], keys + 32 * i);
    }
    assert_int_equal(statuses[3], CISTERN_E_NOT_FOUND);
    assert_null(leases[3]);
    assert_int_equal(requests(x->f, CST_MSG_SLAB_GET), 1);
    assert_int_equal(held(x->f), 3);
    cistern_release(x->client, leases, 4); /* NULL entries are skipped */
    assert_int_equal(held(x->f), 0);
    assert_int_equal(requests(x->f, CST_MSG_RELEASE), 1);
    cistern_release(x->client, leases, 4); /* handles that ended are known and skipped */
    assert_int_equal(requests(x->f, CST_MSG_RELEASE), 1);
}

/* Acquire and release in one packet, over and over: one request a round, ids never repeat. */
static void test_release_in_the_same_packet(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[BT];
    uint8_t keys[32];
    cistern_lease *lease = NULL;
    cistern_acquire_options options = { .size = sizeof(options), .release = &lease };
    int32_t status;
    uint64_t last = 0;

    fake_prompt(x->f, x->space, tokens, BT, keys, 1);
    for (int i = 0; i < 300; i++) {
        assert_int_equal(cistern_acquire(x->space, keys, 1, &options, &lease, &status), CISTERN_OK);
        assert_int_equal(status, CISTERN_OK);
        check_block(lease, keys);
        assert_true(lease->id > last);
        last = lease->id;
        assert_int_equal(held(x->f), 1);
        options.n_release = 1;
        if (i == 0) { /* from the second round on nothing is allocated */
            cst_fault_join();
            cst_fault_arm(CST_FAULT_ALLOC, 1, UINT64_MAX);
        }
    }
    assert_int_equal(cst_fault_seen(CST_FAULT_ALLOC), 0);
    cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
    cst_fault_leave();
    assert_int_equal(requests(x->f, CST_MSG_ACQUIRE), 300);
    assert_int_equal(requests(x->f, CST_MSG_RELEASE), 0);
    assert_int_equal(cistern_acquire(x->space, keys, 0, &options, NULL, NULL), CISTERN_OK);
    assert_int_equal(held(x->f), 0);
}

static bool refuse_acquires(struct fake_daemon *f, struct fake_connection *c,
                            const struct cst_packet *packet) {
    if (packet->type == CST_MSG_ACQUIRE)
        fake_error(f, c, packet, CST_STATUS_BUSY);
    return packet->type == CST_MSG_ACQUIRE;
}

/* A daemon that refuses an Acquire has not read what to release: that is told again. */
static void test_release_of_a_refused_acquire(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[BT];
    uint8_t keys[32];
    cistern_lease *lease, *second;
    cistern_acquire_options options = { .size = sizeof(options),
                                        .release = &lease,
                                        .n_release = 1 };
    const void *data;
    size_t size;
    int32_t status;

    fake_prompt(x->f, x->space, tokens, BT, keys, 1);
    assert_int_equal(cistern_acquire(x->space, keys, 1, NULL, &lease, &status), CISTERN_OK);
    fake_set_hook(x->f, refuse_acquires, NULL);
    assert_int_equal(cistern_acquire(x->space, keys, 1, &options, &second, &status),
                     CISTERN_E_BUSY);
    assert_int_equal(cistern_lease_data(lease, &data, &size, NULL), CISTERN_E_BAD_HANDLE);
    assert_int_equal(cistern_client_ping(x->client), CISTERN_OK); /* behind what was told */
    assert_int_equal(held(x->f), 0);
}

/* Reused handles keep nothing of their last owner. */
static void test_more_than_a_packet(void **state) {
    enum { N = 7000 };
    struct fake_fixture *x = *state;
    static uint8_t keys[N * 32];
    static cistern_lease *leases[N], *again[10];
    static int32_t statuses[N];
    cistern_acquire_options options = { .size = sizeof(options),
                                        .release = leases,
                                        .n_release = N };
    uint32_t tokens[10 * BT];
    uint8_t ten[10 * 32];

    fake_prompt(x->f, x->space, tokens, 10 * BT, ten, 10);
    for (size_t i = 0; i < N; i++)
        memcpy(keys + 32 * i, ten + 32 * (i % 10), 32);
    assert_int_equal(cistern_acquire(x->space, keys, N, NULL, leases, statuses), CISTERN_OK);
    assert_int_equal(requests(x->f, CST_MSG_ACQUIRE), 3);
    for (size_t i = 0; i < N; i += 97)
        check_block(leases[i], keys + 32 * i);
    assert_int_equal(held(x->f), N);
    assert_int_equal(cistern_acquire(x->space, ten, 10, &options, again, statuses), CISTERN_OK);
    assert_int_equal(held(x->f), 10);
    for (size_t i = 0; i < 10; i++)
        check_block(again[i], ten + 32 * i);
    cistern_release(x->client, again, 10);
    assert_int_equal(held(x->f), 0);
}

static void test_arguments(void **state) {
    struct fake_fixture *x = *state;
    uint8_t keys[32] = { 0 };
    cistern_lease *lease = NULL;
    cistern_acquire_options options = { .size = sizeof(options), .mode = 2 };
    int32_t status;
    const void *data;
    size_t size;

    assert_int_equal(cistern_acquire(NULL, keys, 1, NULL, &lease, &status), CISTERN_E_BAD_HANDLE);
    assert_int_equal(cistern_acquire(x->space, NULL, 1, NULL, &lease, &status),
                     CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_acquire(x->space, keys, 1, &options, &lease, &status),
                     CISTERN_E_BAD_ARGUMENT);
    options.mode = 0;
    options.layer_first = 1;
    options.layer_count = 2; /* the space has two layers */
    assert_int_equal(cistern_acquire(x->space, keys, 1, &options, &lease, &status),
                     CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_lease_data(NULL, &data, &size, NULL), CISTERN_E_BAD_HANDLE);
    cistern_release(NULL, &lease, 1);
    cistern_release(x->client, NULL, 1);
    assert_int_equal(requests(x->f, CST_MSG_ACQUIRE), 0);
}

/* ---- pending: the block is being decoded ---- */

struct pending {
    int ready; /* how many of the pending leases become ready at once */
    int early; /* 1: Ready before the answer */
    uint64_t first;
    uint32_t status; /* of the Ready */
};

static void ready_record(struct cst_lease_record *r, uint64_t id, uint32_t status, size_t place) {
    *r = (struct cst_lease_record){ .tier = CISTERN_TIER_HOT };
    cst_store16(&r->status, (uint16_t)status);
    cst_store64(&r->lease, id);
    cst_store32(&r->slab, FAKE_SLAB);
    cst_store64(&r->offset, place * FAKE_BLOCK_BYTES);
    cst_store64(&r->length, FAKE_BLOCK_BYTES);
}

static void push_ready(struct fake_daemon *f, const struct pending *pending, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        Cistern__V1__Ready ready = CISTERN__V1__READY__INIT;
        struct cst_lease_record record;

        ready_record(&record, pending->first + i, pending->status, i);
        ready.leases = (ProtobufCBinaryData){ sizeof(record), (uint8_t *)&record };
        fake_push(f, CST_MSG_READY, &ready.base);
    }
}

static bool answer_pending(struct fake_daemon *f, struct fake_connection *c,
                           const struct cst_packet *p) {
    struct pending *pending = f->hook_arg;
    Cistern__V1__AcquireReply reply = CISTERN__V1__ACQUIRE_REPLY__INIT;
    struct cst_lease_record records[4] = { 0 };
    const Cistern__V1__Acquire *m;
    uint32_t n;

    if (p->type != CST_MSG_ACQUIRE)
        return false;
    m = fake_unpack(f, p);
    n = (uint32_t)(m->keys.len / 32);
    pending->first = m->lease;
    if (pending->early)
        push_ready(f, pending, n);
    for (uint32_t i = 0; i < n; i++) {
        cst_store16(&records[i].status, CST_STATUS_PENDING);
        cst_store64(&records[i].lease, pending->first + i);
    }
    f->n_leases += n;
    reply.leases = (ProtobufCBinaryData){ n * sizeof(records[0]), (uint8_t *)records };
    fake_reply(f, c, p, &reply.base);
    if (!pending->early)
        push_ready(f, pending, (uint32_t)pending->ready);
    return true;
}

struct pending_row {
    const char *name;
    struct pending pending;
    int32_t first_three, last; /* expected statuses of four keys */
    unsigned held;
};

static const struct pending_row pending_rows[] = {
    { "all ready after the answer", { .ready = 4 }, CISTERN_OK, CISTERN_OK, 4 },
    { "ready before the answer", { .early = 1 }, CISTERN_OK, CISTERN_OK, 4 },
    { "one never", { .ready = 3 }, CISTERN_OK, CISTERN_E_TIMEOUT, 3 },
    { "decode fails",
      { .ready = 4, .status = CST_STATUS_NOT_FOUND },
      CISTERN_E_NOT_FOUND,
      CISTERN_E_NOT_FOUND,
      4 /* the fake daemon counts them still; a real one ends them with the failure */ },
};

static void test_pending(void **state) {
    const struct pending_row *row = *state;
    struct pending pending = row->pending;
    struct fake_daemon *f = fake_new();
    cistern_client *c = fake_client(f, 0);
    cistern_space *space = fake_space(c, CISTERN_KIND_TOKENS);
    uint32_t tokens[4 * BT];
    uint8_t keys[4 * 32];
    cistern_lease *leases[4];
    int32_t statuses[4];
    cistern_acquire_options options = { .size = sizeof(options) };

    fake_prompt(f, space, tokens, 4 * BT, keys, 4);
    fake_set_hook(f, answer_pending, &pending);
    if (row->last == CISTERN_E_TIMEOUT)
        options.timeout_ms = READY_MS;
    assert_int_equal(cistern_acquire(space, keys, 4, &options, leases, statuses), CISTERN_OK);
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(statuses[i], i < 3 ? row->first_three : row->last);
        if (!statuses[i])
            check_block(leases[i], keys + 32 * i);
        else
            assert_null(leases[i]);
    }
    assert_int_equal(cistern_client_ping(c), CISTERN_OK);
    assert_int_equal(held(f), row->held);
    cistern_client_close(c);
    fake_free(f);
}

/* A Ready after the caller gave up touches nothing. */
static void test_ready_too_late(void **state) {
    struct fake_fixture *x = *state;
    struct pending pending = { .ready = 0 };
    uint32_t tokens[BT];
    uint8_t keys[32];
    cistern_lease *lease, *second;
    int32_t status;
    cistern_acquire_options options = { .size = sizeof(options), .timeout_ms = READY_MS };

    fake_prompt(x->f, x->space, tokens, BT, keys, 1);
    fake_set_hook(x->f, answer_pending, &pending);
    assert_int_equal(cistern_acquire(x->space, keys, 1, &options, &lease, &status), CISTERN_OK);
    assert_int_equal(status, CISTERN_E_TIMEOUT);
    fake_set_hook(x->f, NULL, NULL);
    fake_wait(x->f, CST_MSG_RELEASE, 1);
    fake_lock(x->f);
    assert_int_equal(x->f->released[0], pending.first);
    push_ready(x->f, &pending, 1);
    fake_unlock(x->f);
    assert_int_equal(cistern_acquire(x->space, keys, 1, NULL, &second, &status), CISTERN_OK);
    assert_int_equal(status, CISTERN_OK);
    check_block(second, keys);
    assert_true(second->id > pending.first);
    assert_int_equal(held(x->f), 1);
}

/* Each look at it is more than a timeout later. */
struct running_clock {
    struct cst_clock clock;
    uint64_t ns;
    unsigned looks;
};

static uint64_t look(const struct cst_clock *clock) {
    struct running_clock *c =
        cst_container_of((void *)(uintptr_t)clock, struct running_clock, clock);

    c->looks++;
    return c->ns += 60 * CST_NS_PER_S;
}

static bool swallow_releases(struct fake_daemon *f, struct fake_connection *c,
                             const struct cst_packet *packet) {
    return packet->type == CST_MSG_RELEASE;
}

/* A daemon that hangs costs one timeout, however many packets the leases fill. */
static void test_release_waits_once(void **state) {
    enum { N = FAKE_BLOCKS, ROUNDS = 4 };
    struct running_clock clock = { .clock = { .now_ns = look } };
    struct fake_daemon *f = fake_new();
    cistern_client *c = fake_client(f, 0);
    cistern_space *space = fake_space(c, CISTERN_KIND_TOKENS);
    static uint32_t tokens[N * BT];
    static uint8_t keys[N * 32];
    static cistern_lease *leases[ROUNDS * N];
    static int32_t statuses[N];

    fake_prompt(f, space, tokens, N * BT, keys, N);
    for (size_t i = 0; i < ROUNDS; i++)
        assert_int_equal(cistern_acquire(space, keys, N, NULL, leases + i * N, statuses), 0);
    fake_set_hook(f, swallow_releases, NULL);
    fake_set_timeout(c, FAKE_SHORT_MS);
    c->clock = &clock.clock;
    cistern_release(c, leases, ROUNDS * N);
    assert_in_range(clock.looks, 1, 4);
    c->clock = &cst_clock_monotonic;
    fake_wait(f, CST_MSG_RELEASE, ROUNDS * N / 256); /* all were told */
    cistern_client_close(c);
    fake_free(f);
}

/* ---- slabs ---- */

static void retire(struct fake_daemon *f, uint32_t slab) {
    Cistern__V1__SlabRetire message = CISTERN__V1__SLAB_RETIRE__INIT;

    message.slab = slab;
    fake_lock(f);
    fake_push(f, CST_MSG_SLAB_RETIRE, &message.base);
    fake_unlock(f);
}

static size_t mapped_slabs(void) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    size_t n = 0;

    assert_non_null(maps);
    while (fgets(line, sizeof(line), maps))
        n += strstr(line, "memfd:slab") && strstr(line, "r--s");
    (void)fclose(maps);
    return n;
}

/* ---- descriptors beside a thread that reads without looking for them ---- */

static struct {
    struct fake_connection *connection;
    struct cst_packet packet;
    uint8_t payload[256];
} late; /* the Lookup that is not answered yet */

static bool hold_lookup(struct fake_daemon *f, struct fake_connection *c,
                        const struct cst_packet *packet) {
    if (packet->type != CST_MSG_LOOKUP || late.connection)
        return false;
    late.connection = c;
    late.packet = *packet;
    late.packet.payload = late.payload;
    assert_true(packet->length <= sizeof(late.payload));
    memcpy(late.payload, packet->payload, packet->length);
    return true;
}

static void *look_up(void *arg) {
    struct fake_fixture *x = arg;
    uint32_t tokens[BT];
    cistern_match match = { .size = sizeof(match) };

    for (uint32_t i = 0; i < BT; i++)
        tokens[i] = 1000 + i;
    return (void *)(intptr_t)cistern_lookup(x->space, tokens, BT, NULL, &match);
}

/* Answers it once StagingGet had time to come too early. */
static void *answer_late(void *arg) {
    struct fake_fixture *x = arg;

    (void)usleep(30 * 1000);
    fake_lock(x->f);
    fake_answer(x->f, late.connection, &late.packet);
    fake_unlock(x->f);
    return NULL;
}

/* StagingGet waits for the thread that is in recv(), so its descriptor is not lost. */
static void test_descriptors_beside_a_quick_call(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[BT];
    uint8_t keys[32];
    cistern_slot *slot;
    int32_t status;
    pthread_t quick, answering;
    void *end;

    late.connection = NULL;
    fake_prompt(x->f, x->space, tokens, BT, keys, 0);
    fake_set_hook(x->f, hold_lookup, NULL);
    assert_int_equal(pthread_create(&quick, NULL, look_up, x), 0);
    fake_wait(x->f, CST_MSG_LOOKUP, 1);
    (void)usleep(30 * 1000); /* it reads by now, most likely; either way this must work */
    assert_int_equal(pthread_create(&answering, NULL, answer_late, x), 0);
    assert_int_equal(cistern_reserve(x->space, NULL, keys, tokens, BT, 1, &slot, &status),
                     CISTERN_OK);
    assert_int_equal(status, CISTERN_OK);
    assert_int_equal(pthread_join(answering, NULL), 0);
    assert_int_equal(pthread_join(quick, &end), 0);
    assert_int_equal((intptr_t)end, CISTERN_OK);
}

static void test_retire_unused(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[BT];
    uint8_t keys[32];
    cistern_lease *lease;
    int32_t status;

    fake_prompt(x->f, x->space, tokens, BT, keys, 1);
    assert_int_equal(cistern_acquire(x->space, keys, 1, NULL, &lease, &status), CISTERN_OK);
    assert_int_equal(mapped_slabs(), 1);
    cistern_release(x->client, &lease, 1);
    assert_int_equal(mapped_slabs(), 1); /* kept for the next acquire */
    retire(x->f, FAKE_SLAB);
    retire(x->f, 99); /* not ours: nothing to drop */
    assert_int_equal(cistern_client_ping(x->client), CISTERN_OK);
    assert_int_equal(mapped_slabs(), 0);
    fake_wait(x->f, CST_MSG_SLAB_DROPPED, 1);
    fake_lock(x->f);
    assert_int_equal(x->f->n_dropped, 1);
    fake_unlock(x->f);
    assert_int_equal(cistern_acquire(x->space, keys, 1, NULL, &lease, &status), CISTERN_OK);
    check_block(lease, keys); /* mapped again */
    assert_int_equal(requests(x->f, CST_MSG_SLAB_GET), 2);
}

static void test_retire_while_leased(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[2 * BT];
    uint8_t keys[2 * 32];
    cistern_lease *leases[2];
    int32_t statuses[2];

    fake_prompt(x->f, x->space, tokens, 2 * BT, keys, 2);
    assert_int_equal(cistern_acquire(x->space, keys, 2, NULL, leases, statuses), CISTERN_OK);
    retire(x->f, FAKE_SLAB);
    assert_int_equal(cistern_client_ping(x->client), CISTERN_OK);
    check_block(leases[0], keys);
    cistern_release(x->client, leases, 1);
    assert_int_equal(requests(x->f, CST_MSG_SLAB_DROPPED), 0);
    check_block(leases[1], keys + 32);
    cistern_release(x->client, leases + 1, 1);
    assert_int_equal(mapped_slabs(), 0);
    fake_wait(x->f, CST_MSG_SLAB_DROPPED, 1);
}

static void test_lease_outlives_the_daemon(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[BT];
    uint8_t keys[32];
    cistern_lease *lease, *other;
    int32_t status;

    fake_prompt(x->f, x->space, tokens, BT, keys, 1);
    assert_int_equal(cistern_acquire(x->space, keys, 1, NULL, &lease, &status), CISTERN_OK);
    fake_stop(x->f);
    assert_int_equal(cistern_acquire(x->space, keys, 1, NULL, &other, &status),
                     CISTERN_E_DISCONNECTED);
    check_block(lease, keys);
    fake_start(x->f);
    while (cistern_client_ping(x->client))
        (void)usleep(1000);
    assert_int_equal(cistern_acquire(x->space, keys, 1, NULL, &other, &status), CISTERN_OK);
    check_block(lease, keys);
    check_block(other, keys);
    assert_int_equal(mapped_slabs(), 2); /* the orphan and the new one */
    cistern_release(x->client, &lease, 1);
    assert_int_equal(mapped_slabs(), 1);
    assert_int_equal(requests(x->f, CST_MSG_RELEASE), 0); /* the new daemon never knew it */
    assert_int_equal(held(x->f), 1);
}

static void test_lease_outlives_its_space(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[BT];
    uint8_t keys[32];
    cistern_lease *lease;
    int32_t status;

    fake_prompt(x->f, x->space, tokens, BT, keys, 1);
    assert_int_equal(cistern_acquire(x->space, keys, 1, NULL, &lease, &status), CISTERN_OK);
    cistern_space_close(x->space);
    assert_int_equal(requests(x->f, CST_MSG_SPACE_CLOSE), 1);
    check_block(lease, keys);
    cistern_release(x->client, &lease, 1);
    assert_int_equal(held(x->f), 0);
}

/* ---- lies ---- */

enum lie {
    SHORT_RECORDS,
    NO_RECORDS,
    WRONG_IDS,
    SAME_ID_TWICE,
    OFFSET_PAST_END,
    OFFSET_WRAPS,
    LENGTH_PAST_END,
    WRONG_LENGTH,
    UNKNOWN_SLAB,
    UNKNOWN_STATUS,
    ERROR_REPLY,
    NO_REPLY,
    HANG_UP,
    SLAB_SHORTER_THAN_SAID,
    SLAB_NOT_SEALED,
    SLAB_WITHOUT_FD,
    SLAB_SHORT_RECORD,
    SLAB_ERROR,
};

struct lie_row {
    const char *name;
    enum lie lie;
    int32_t expected, status; /* of the call, of the second key */
};

static const struct lie_row lie_rows[] = {
    { "records cut short", SHORT_RECORDS, CISTERN_E_CORRUPT, 0 },
    { "no records", NO_RECORDS, CISTERN_E_CORRUPT, 0 },
    { "ids that were not asked for", WRONG_IDS, CISTERN_E_CORRUPT, 0 },
    { "one id twice", SAME_ID_TWICE, CISTERN_E_CORRUPT, 0 },
    { "offset past the slab", OFFSET_PAST_END, CISTERN_OK, CISTERN_E_CORRUPT },
    { "offset that wraps", OFFSET_WRAPS, CISTERN_OK, CISTERN_E_CORRUPT },
    { "end past the slab", LENGTH_PAST_END, CISTERN_OK, CISTERN_E_CORRUPT },
    { "not a block's length", WRONG_LENGTH, CISTERN_OK, CISTERN_E_CORRUPT },
    { "a slab that nobody has", UNKNOWN_SLAB, CISTERN_OK, CISTERN_E_NOT_FOUND },
    { "a status that nobody knows", UNKNOWN_STATUS, CISTERN_OK, CISTERN_E_INTERNAL },
    { "an error", ERROR_REPLY, CISTERN_E_BUSY, 0 },
    { "silence", NO_REPLY, CISTERN_E_TIMEOUT, 0 },
    { "the end", HANG_UP, CISTERN_E_DISCONNECTED, 0 },
    { "slab shorter than said", SLAB_SHORTER_THAN_SAID, CISTERN_E_SYSTEM, 0 },
    { "slab that can shrink", SLAB_NOT_SEALED, CISTERN_E_SYSTEM, 0 },
    { "slab without descriptor", SLAB_WITHOUT_FD, CISTERN_E_CORRUPT, 0 },
    { "slab record cut short", SLAB_SHORT_RECORD, CISTERN_E_CORRUPT, 0 },
    { "no slab", SLAB_ERROR, CISTERN_E_QUOTA, 0 },
};

static void lie_about_slab(struct fake_daemon *f, struct fake_connection *c,
                           const struct cst_packet *p, enum lie lie) {
    Cistern__V1__SlabGetReply reply = CISTERN__V1__SLAB_GET_REPLY__INIT;
    struct cst_slab_record record = { 0 };
    int fd = memfd_create("slab", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    assert_true(fd >= 0 && !ftruncate(fd, FAKE_BLOCK_BYTES));
    if (lie != SLAB_NOT_SEALED)
        assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    cst_store32(&record.slab, FAKE_SLAB);
    cst_store64(&record.size,
                lie == SLAB_SHORTER_THAN_SAID ? FAKE_BLOCK_BYTES + 1 : FAKE_BLOCK_BYTES);
    reply.slabs =
        (ProtobufCBinaryData){ sizeof(record) - (lie == SLAB_SHORT_RECORD), (uint8_t *)&record };
    if (lie == SLAB_ERROR)
        fake_error(f, c, p, CST_STATUS_QUOTA);
    else
        fake_reply_fds(f, c, p, &reply.base, &fd, lie != SLAB_WITHOUT_FD);
    cst_close(fd);
}

static void lie_about_leases(struct fake_daemon *f, struct fake_connection *c,
                             const struct cst_packet *p, enum lie lie) {
    const Cistern__V1__Acquire *m = fake_unpack(f, p);
    Cistern__V1__AcquireReply reply = CISTERN__V1__ACQUIRE_REPLY__INIT;
    struct cst_lease_record r[2];
    uint64_t size = (uint64_t)FAKE_BLOCKS * FAKE_BLOCK_BYTES;

    ready_record(&r[0], m->lease, CST_STATUS_OK, 0);
    ready_record(&r[1], m->lease + 1, CST_STATUS_OK, 1);
    reply.leases = (ProtobufCBinaryData){ sizeof(r), (uint8_t *)r };
    f->n_leases += 2;
    if (lie == SHORT_RECORDS)
        reply.leases.len--;
    else if (lie == NO_RECORDS)
        reply.leases.len = 0;
    else if (lie == WRONG_IDS)
        cst_store64(&r[1].lease, m->lease + 1000);
    else if (lie == SAME_ID_TWICE)
        cst_store64(&r[1].lease, m->lease);
    else if (lie == OFFSET_PAST_END)
        cst_store64(&r[1].offset, size + 1);
    else if (lie == OFFSET_WRAPS)
        cst_store64(&r[1].offset, UINT64_MAX - 100);
    else if (lie == LENGTH_PAST_END)
        cst_store64(&r[1].offset, size - FAKE_BLOCK_BYTES + 1);
    else if (lie == WRONG_LENGTH)
        cst_store64(&r[1].length, FAKE_BLOCK_BYTES - 1);
    else if (lie == UNKNOWN_SLAB)
        cst_store32(&r[1].slab, 12345);
    else if (lie == UNKNOWN_STATUS)
        cst_store16(&r[1].status, 9999);
    fake_reply(f, c, p, &reply.base);
}

static bool tell_lie(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    const struct lie_row *row = f->hook_arg;

    if (p->type == CST_MSG_SLAB_GET && row->lie >= SLAB_SHORTER_THAN_SAID) {
        lie_about_slab(f, c, p, row->lie);
        return true;
    }
    if (p->type != CST_MSG_ACQUIRE)
        return false;
    if (row->lie == ERROR_REPLY)
        fake_error(f, c, p, CST_STATUS_BUSY);
    else if (row->lie == HANG_UP)
        (void)shutdown(c->fd, SHUT_RDWR);
    else if (row->lie == NO_REPLY)
        f->n_leases += 2; /* granted, but never told */
    else
        lie_about_leases(f, c, p, row->lie);
    return true;
}

/* Whatever was told: no crash, nothing leaked in the daemon, the connection goes on. */
static void test_lie(void **state) {
    struct lie_row row = **(struct lie_row **)state;
    struct fake_daemon *f = fake_new();
    cistern_client *c = fake_client(f, 0);
    cistern_space *space = fake_space(c, CISTERN_KIND_TOKENS);
    uint32_t tokens[2 * BT];
    uint8_t keys[2 * 32];
    cistern_lease *leases[2] = { NULL };
    int32_t statuses[2] = { 0 };
    unsigned expected = 0;

    fake_prompt(f, space, tokens, 2 * BT, keys, 2);
    fake_set_hook(f, tell_lie, &row);
    if (row.lie == NO_REPLY)
        fake_set_timeout(c, FAKE_SHORT_MS);
    assert_int_equal(cistern_acquire(space, keys, 2, NULL, leases, statuses), row.expected);
    if (row.lie == NO_REPLY)
        fake_set_timeout(c, FAKE_PATIENT_MS);
    if (row.expected == CISTERN_OK) {
        assert_int_equal(statuses[0], CISTERN_OK);
        check_block(leases[0], keys);
        assert_int_equal(statuses[1], row.status);
        assert_null(leases[1]);
        expected = 1;
    }
    fake_set_hook(f, NULL, NULL);
    if (row.lie != HANG_UP) {
        assert_int_equal(cistern_client_ping(c), CISTERN_OK);
        if (row.lie == UNKNOWN_STATUS)
            expected++; /* a key that failed was not granted: nothing to give back */
        assert_int_equal(held(f), expected);
    }
    cistern_client_close(c);
    fake_free(f);
}

/* A block without a frame comes decoded, though packed was asked for: the fake daemon has none. */
static void test_packed_without_a_frame(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[BT];
    uint8_t keys[32], out[FAKE_BLOCK_BYTES];
    cistern_lease *lease;
    cistern_acquire_options options = { .size = sizeof(options), .mode = 1 };
    int32_t status;

    fake_prompt(x->f, x->space, tokens, BT, keys, 1);
    assert_int_equal(cistern_acquire(x->space, keys, 1, &options, &lease, &status), CISTERN_OK);
    assert_int_equal(status, CISTERN_OK);
    check_block(lease, keys);
    assert_int_equal(cistern_lease_decode(lease, out, sizeof(out)), CISTERN_OK);
    for (size_t i = 0; i < sizeof(out); i++)
        assert_int_equal(out[i], fake_byte(keys, i));
}

/* ---- packed ---- */

struct packed {
    uint8_t frame[FAKE_BLOCK_BYTES * 2];
    size_t size;
};

static bool answer_packed(struct fake_daemon *f, struct fake_connection *c,
                          const struct cst_packet *p) {
    const struct packed *packed = f->hook_arg;
    Cistern__V1__AcquireReply reply = CISTERN__V1__ACQUIRE_REPLY__INIT;
    const Cistern__V1__Acquire *m;
    struct cst_lease_record r;

    if (p->type != CST_MSG_ACQUIRE)
        return false;
    m = fake_unpack(f, p);
    if (m->mode != 1)
        return false;
    memcpy(f->slab + 8 * FAKE_BLOCK_BYTES, packed->frame, packed->size);
    ready_record(&r, m->lease, CST_STATUS_OK, 8);
    cst_store64(&r.length, packed->size);
    reply.leases = (ProtobufCBinaryData){ sizeof(r), (uint8_t *)&r };
    fake_reply(f, c, p, &reply.base);
    return true;
}

static void encode(struct packed *packed, const cistern_space *space, const uint8_t *block) {
    const struct cst_descriptor *d = space->descriptor;
    struct cst_encode_params params = { .preset = CST_PRESET_LOSSLESS, .tokens = BT };
    size_t work_size = cst_codec_work_size(d, CST_PRESET_LOSSLESS);
    void *work = aligned_alloc(64, cst_align_up(work_size, 64));

    assert_non_null(work);
    assert_int_equal(cst_frame_encode(packed->frame, sizeof(packed->frame), block, d, &params, work,
                                      work_size, &packed->size, NULL),
                     0);
    free(work);
}

static void test_packed(void **state) {
    struct fake_fixture *x = *state;
    struct packed packed;
    uint32_t tokens[BT];
    uint8_t keys[32], block[FAKE_BLOCK_BYTES], out[FAKE_BLOCK_BYTES];
    cistern_lease *lease, *decoded;
    cistern_acquire_options options = { .size = sizeof(options), .mode = 1 };
    cistern_lease_info info = { .size = sizeof(info) };
    int32_t status;
    const void *data;
    size_t size;

    for (size_t i = 0; i < sizeof(block); i++)
        block[i] = (uint8_t)(i * 7);
    encode(&packed, x->space, block);
    fake_prompt(x->f, x->space, tokens, BT, keys, 1);
    fake_set_hook(x->f, answer_packed, &packed);
    assert_int_equal(cistern_acquire(x->space, keys, 1, &options, &lease, &status), CISTERN_OK);
    assert_int_equal(status, CISTERN_OK);
    assert_int_equal(cistern_lease_data(lease, &data, &size, &info), CISTERN_OK);
    assert_int_equal(size, packed.size);
    assert_int_equal(info.packed, 1);
    for (int i = 0; i < 3; i++) { /* the workspace is used again */
        memset(out, 0, sizeof(out));
        assert_int_equal(cistern_lease_decode(lease, out, sizeof(out)), CISTERN_OK);
        assert_memory_equal(out, block, sizeof(block));
    }
    assert_int_equal(cistern_lease_decode(lease, out, sizeof(out) - 1), CISTERN_E_BAD_ARGUMENT);
    fake_lock(x->f);
    x->f->slab[8 * FAKE_BLOCK_BYTES + packed.size / 2] ^= 1;
    fake_unlock(x->f);
    assert_int_equal(cistern_lease_decode(lease, out, sizeof(out)), CISTERN_E_CORRUPT);
    assert_int_equal(cistern_acquire(x->space, keys, 1, NULL, &decoded, &status), CISTERN_OK);
    check_block(decoded, keys);
    assert_int_equal(cistern_lease_decode(decoded, out, sizeof(out)), CISTERN_OK);
    for (size_t i = 0; i < sizeof(out); i++) /* decoded bytes are copied */
        assert_int_equal(out[i], fake_byte(keys, i));
    cistern_space_close(x->space); /* a lease keeps what it needs of its space */
    assert_int_equal(cistern_lease_decode(lease, out, sizeof(out)), CISTERN_E_CORRUPT);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_acquire, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_release_in_the_same_packet, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_release_of_a_refused_acquire, fake_setup,
                                        fake_teardown),
        cmocka_unit_test_setup_teardown(test_more_than_a_packet, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_arguments, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_ready_too_late, fake_setup, fake_teardown),
        cmocka_unit_test(test_release_waits_once),
        cmocka_unit_test_setup_teardown(test_descriptors_beside_a_quick_call, fake_setup,
                                        fake_teardown),
        cmocka_unit_test_setup_teardown(test_retire_unused, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_retire_while_leased, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_lease_outlives_the_daemon, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_lease_outlives_its_space, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_packed_without_a_frame, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_packed, fake_setup, fake_teardown),
    };

    return cst_run_rows(pending_rows, test_pending) + cst_run_rows(lie_rows, test_lie) +
           cmocka_run_group_tests(tests, NULL, NULL);
}
