/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The n-th allocation (mapping, packet sent) of the daemon fails, for every n that a client's whole
 * life needs: the daemon says so or ends that connection, nothing is lost, and the next client has
 * its whole life.
 */
#include "tests/unit/daemon/serverbox.h"

#include "base/fault.h"
#include "proto/key.h"

#include <poll.h>
#include <string.h>

enum { N = 3 };

static struct cst_box box;

/* A status with which a daemon in need may answer. */
static bool is_excuse(int status) {
    return status == CST_STATUS_NO_MEMORY || status == CST_STATUS_BUSY ||
           status == CST_STATUS_INTERNAL || status == CST_STATUS_QUOTA;
}

struct life {
    struct cst_raw raw;
    struct cst_raw_staging staging;
    uint32_t space;
    uint8_t root[32], keys[N * 32];
    uint64_t slots[N];
    size_t n_slots;
    uint32_t slab;
    uint32_t first_token; /* every life has blocks of its own */
    bool strict;          /* nothing may fail, but a key may be busy */
    bool busy;
};

/* true: go on. */
static bool call(struct life *l, uint16_t type, const ProtobufCMessage *message) {
    int status = cst_raw_call(&l->raw, type, message);

    if (l->strict)
        assert_int_equal(status, CST_STATUS_OK);
    else
        assert_true(status == CST_STATUS_OK || status == -1 || is_excuse(status));
    return status == CST_STATUS_OK;
}

static bool key_status(struct life *l, int status) {
    bool good = status == CST_STATUS_OK || status == CST_STATUS_PENDING;

    l->busy |= status == CST_STATUS_BUSY;
    if (l->strict)
        assert_true(good || l->busy);
    else /* a failed parent has no children */
        assert_true(good || is_excuse(status) || status == CST_STATUS_PARENT_MISSING ||
                    status == CST_STATUS_NOT_FOUND);
    return good;
}

static bool greet(struct life *l) {
    Cistern__V1__Hello hello = CISTERN__V1__HELLO__INIT;

    hello.version_min = hello.version_max = 1;
    return call(l, CST_MSG_HELLO, &hello.base);
}

static bool open_space(struct life *l) {
    Cistern__V1__SpaceOpen open = CISTERN__V1__SPACE_OPEN__INIT;
    const Cistern__V1__SpaceOpenReply *reply;
    uint8_t descriptor[1024];

    open.descriptor =
        cst_raw_bytes(descriptor, cst_box_descriptor(descriptor, sizeof(descriptor), 1));
    if (!call(l, CST_MSG_SPACE_OPEN, &open.base))
        return false;
    reply = l->raw.reply;
    l->space = reply->space;
    cst_key_root(reply->fingerprint.data, NULL, 0, l->root);
    return true;
}

static bool subscribe(struct life *l) {
    Cistern__V1__Subscribe subscribe = CISTERN__V1__SUBSCRIBE__INIT;

    subscribe.space = l->space;
    return call(l, CST_MSG_SUBSCRIBE, &subscribe.base);
}

static bool get_staging(struct life *l) {
    int status = cst_raw_staging(&l->raw, &l->staging);

    assert_true(status == CST_STATUS_OK || (!l->strict && (status == -1 || is_excuse(status))));
    return status == CST_STATUS_OK;
}

static bool reserve(struct life *l) {
    Cistern__V1__Reserve reserve = CISTERN__V1__RESERVE__INIT;
    const struct cst_slot_record *records;
    uint32_t tokens[N * BOX_TOKENS];

    cst_box_chain(l->root, l->first_token, N, l->keys, tokens);
    reserve.space = l->space;
    reserve.parent = cst_raw_bytes(l->root, 32);
    reserve.keys = cst_raw_bytes(l->keys, sizeof(l->keys));
    reserve.tokens = cst_raw_bytes(tokens, sizeof(tokens));
    if (!call(l, CST_MSG_RESERVE, &reserve.base))
        return false;
    records = (const void *)((const Cistern__V1__ReserveReply *)l->raw.reply)->slots.data;
    for (size_t i = 0; i < N; i++) {
        if (!key_status(l, cst_load16(&records[i].status)))
            continue;
        memset(l->staging.base + cst_load64(&records[i].offset), cst_box_fill(l->keys + 32 * i),
               BOX_BLOCK);
        l->slots[l->n_slots++] = cst_load64(&records[i].slot);
    }
    return true;
}

static bool commit(struct life *l) {
    Cistern__V1__Commit commit = CISTERN__V1__COMMIT__INIT;
    const Cistern__V1__CommitReply *reply;
    uint16_t surprisals[N * BOX_TOKENS] = { 0 };

    commit.slots = cst_raw_bytes(l->slots, 8 * l->n_slots);
    commit.surprisals = cst_raw_bytes(surprisals, 2 * l->n_slots * BOX_TOKENS);
    if (!call(l, CST_MSG_COMMIT, &commit.base))
        return false;
    reply = l->raw.reply;
    for (size_t i = 0; i < l->n_slots; i++)
        (void)key_status(l, cst_load16(reply->statuses.data + 2 * i));
    return true;
}

static bool acquire(struct life *l) {
    Cistern__V1__Acquire acquire = CISTERN__V1__ACQUIRE__INIT;
    const struct cst_lease_record *records;

    acquire.space = l->space;
    acquire.keys = cst_raw_bytes(l->keys, sizeof(l->keys));
    acquire.lease = 1;
    if (!call(l, CST_MSG_ACQUIRE, &acquire.base))
        return false;
    records = (const void *)((const Cistern__V1__AcquireReply *)l->raw.reply)->leases.data;
    for (size_t i = 0; i < N; i++)
        if (key_status(l, cst_load16(&records[i].status)))
            l->slab = cst_load32(&records[i].slab);
    return true;
}

static bool get_slab(struct life *l) {
    Cistern__V1__SlabGet get = CISTERN__V1__SLAB_GET__INIT;
    const struct cst_slab_record *record;

    get.slabs = cst_raw_bytes(&l->slab, 4);
    if (!call(l, CST_MSG_SLAB_GET, &get.base))
        return false;
    record = (const void *)((const Cistern__V1__SlabGetReply *)l->raw.reply)->slabs.data;
    (void)key_status(l, (int)cst_load32(&record->status));
    return true;
}

static bool look_around(struct life *l) {
    Cistern__V1__Spaces spaces = CISTERN__V1__SPACES__INIT;
    Cistern__V1__Explain explain = CISTERN__V1__EXPLAIN__INIT;
    Cistern__V1__Status status = CISTERN__V1__STATUS__INIT;

    explain.space = l->space;
    explain.keys = cst_raw_bytes(l->keys, sizeof(l->keys));
    return call(l, CST_MSG_SPACES, &spaces.base) && call(l, CST_MSG_EXPLAIN, &explain.base) &&
           call(l, CST_MSG_STATUS, &status.base);
}

static bool pin_and_erase(struct life *l) {
    Cistern__V1__Pin pin = CISTERN__V1__PIN__INIT;
    Cistern__V1__Erase erase = CISTERN__V1__ERASE__INIT;

    pin.space = erase.space = l->space;
    pin.keys = cst_raw_bytes(l->keys, sizeof(l->keys));
    pin.ttl_ms = 1000;
    erase.all = 1;
    return call(l, CST_MSG_PIN, &pin.base) && call(l, CST_MSG_ERASE, &erase.base);
}

/* false: a key was busy, so that this was not the whole life. */
static bool live(bool strict) {
    static bool (*const steps[])(struct life *
                                 l) = { greet,  open_space, subscribe, get_staging, reserve,
                                        commit, acquire,    get_slab,  look_around, pin_and_erase };
    static struct life l;

    memset(&l, 0, sizeof(l));
    l.strict = strict;
    l.first_token = strict ? 1000 : 1;
    cst_raw_connect(&l.raw, &box);
    for (size_t i = 0; i < CST_COUNT(steps) && steps[i](&l); i++)
        ;
    if (l.staging.base)
        cst_raw_staging_unmap(&l.staging);
    cst_raw_close(&l.raw);
    return !l.busy;
}

/* A store that could not make a slab answers BUSY for a second, then tries again. */
static void live_whole(void) {
    int tries = 0;

    while (!live(true)) {
        assert_true(++tries < 100);
        (void)poll(NULL, 0, 100);
    }
}

static void check_empty(struct cst_server *server, void *arg) {
    struct cst_store_stats stats;

    cst_store_stats(server->store, &stats);
    assert_int_equal(stats.leases, 0);
    assert_int_equal(stats.reserved, 0);
    assert_int_equal(server->shares.count, 0);
    for (int r = 0; r < CST_RESOURCES; r++)
        assert_int_equal(server->total.used[r], 0);
    assert_true(cst_list_is_empty(&server->users));
    assert_true(cst_list_is_empty(&server->namespaces));
}

/* A new daemon for each n, so that its first allocations count, too. */
static void every_failure_is_survived(enum cst_fault_point point, uint64_t count) {
    uint64_t nth = 0, seen;

    do {
        cst_box_start(&box, NULL);
        cst_fault_arm(point, ++nth, count);
        (void)live(false);
        cst_box_settle(&box);
        seen = cst_fault_seen(point);
        cst_fault_arm(point, 0, 0);
        live_whole();
        cst_box_settle(&box);
        cst_box_call(&box, check_empty, NULL);
        cst_box_stop(&box);
        assert_true(nth < 10000);
    } while (seen >= nth);
    print_message("%d failures\n", (int)nth - 1);
    assert_true(nth > 10);
}

static void one_allocation_fails(void **state) {
    every_failure_is_survived(CST_FAULT_ALLOC, 1);
}

static void all_allocations_fail_from_then_on(void **state) {
    every_failure_is_survived(CST_FAULT_ALLOC, UINT64_MAX);
}

static void one_packet_is_not_sent(void **state) {
    every_failure_is_survived(CST_FAULT_SEND, 1);
}

/* Slabs are few: the loop is short, and the strict life may need a slab that could not be made. */
static void one_mapping_fails(void **state) {
    for (uint64_t nth = 1; nth < 20; nth++) {
        cst_box_start(&box, NULL);
        cst_fault_arm(CST_FAULT_MAP, nth, 1);
        (void)live(false);
        cst_box_settle(&box);
        cst_fault_arm(CST_FAULT_MAP, 0, 0);
        live_whole();
        cst_box_settle(&box);
        cst_box_call(&box, check_empty, NULL);
        cst_box_stop(&box);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_allocation_fails),
        cmocka_unit_test(all_allocations_fail_from_then_on),
        cmocka_unit_test(one_packet_is_not_sent),
        cmocka_unit_test(one_mapping_fails),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
