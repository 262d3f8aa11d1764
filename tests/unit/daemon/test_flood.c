/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A hostile crowd makes a real daemon keep as much as it can: blocks, leases, slots, staging,
 * handles, holds, subscriptions, unread replies. It stays within its memory + 64 MiB, and a
 * well-behaved client is served all the while and afterwards.
 */
#include "tests/lib/spawn.h"
#include "tests/unit/daemon/serverbox.h"

#include "base/random.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CROWD = 120, MEMORY_MIB = 96, SLACK_MIB = 64, BLOCKS = 12000 };

static struct cst_spawned daemon_ = CST_SPAWNED_NULL;
static struct sockaddr_un addr = { .sun_family = AF_UNIX };
static struct cst_raw crowd[CROWD];
static uint32_t spaces[CROWD];
static uint8_t root[32];
static uint8_t *keys; /* of the stored blocks */

static uint64_t status_kib(const char *field) {
    char path[64], line[256];
    uint64_t kib = 0;
    FILE *f;

    (void)snprintf(path, sizeof(path), "/proc/%d/status", (int)daemon_.pid);
    f = fopen(path, "re");
    assert_non_null(f);
    while (fgets(line, sizeof(line), f))
        if (!strncmp(line, field, strlen(field)))
            kib = strtoull(line + strlen(field) + 1, NULL, 10);
    fclose(f);
    return kib;
}

static void check_memory(const char *after) {
    uint64_t kib = status_kib("VmHWM");

    print_message("%-24s %6.1f MiB\n", after, (double)kib / 1024);
    assert_true(kib > 0 && kib <= (MEMORY_MIB + SLACK_MIB) * 1024);
}

static void connect_one(size_t i, uint8_t model) {
    cst_raw_connect_to(&crowd[i], &addr, sizeof(addr));
    spaces[i] = cst_raw_open(&crowd[i], model, CST_KIND_TOKENS, root);
}

/* Blocks that don't compress, so that every tier is full. */
static void fill_blocks(struct cst_raw *raw, uint32_t space) {
    enum { BATCH = 60 };
    struct cst_raw_staging staging;
    struct cst_seeded_random random;
    uint32_t *tokens = calloc(BLOCKS, BOX_TOKENS * 4);

    assert_non_null(tokens);
    cst_box_chain(root, 1, BLOCKS, keys, tokens);
    cst_seeded_random_init(&random, 1);
    assert_int_equal(cst_raw_staging(raw, &staging), 0);
    for (size_t first = 0; first + BATCH <= BLOCKS; first += BATCH) {
        Cistern__V1__Reserve reserve = CISTERN__V1__RESERVE__INIT;
        Cistern__V1__Commit commit = CISTERN__V1__COMMIT__INIT;
        const struct cst_slot_record *records;
        uint64_t slots[BATCH];
        size_t n = 0;

        reserve.space = space;
        reserve.parent = cst_raw_bytes(first ? keys + 32 * (first - 1) : root, 32);
        reserve.keys = cst_raw_bytes(keys + 32 * first, 32 * BATCH);
        reserve.tokens = cst_raw_bytes(tokens + first * BOX_TOKENS, 4 * BATCH * BOX_TOKENS);
        assert_int_equal(cst_raw_call(raw, CST_MSG_RESERVE, &reserve.base), 0);
        records = (const void *)((const Cistern__V1__ReserveReply *)raw->reply)->slots.data;
        for (size_t i = 0; i < BATCH && !cst_load16(&records[i].status); i++) {
            uint8_t *block = staging.base + cst_load64(&records[i].offset);

            for (size_t at = 0; at < BOX_BLOCK; at += 8)
                cst_store64(block + at, cst_seeded_random_next(&random));
            slots[n++] = cst_load64(&records[i].slot);
        }
        if (!n)
            break; /* full, and its own chain can't make room */
        commit.slots = cst_raw_bytes(slots, 8 * n);
        assert_int_equal(cst_raw_call(raw, CST_MSG_COMMIT, &commit.base), 0);
    }
    cst_raw_staging_unmap(&staging);
    free(tokens);
}

static void take_leases(struct cst_raw *raw, uint32_t space) {
    Cistern__V1__Acquire acquire = CISTERN__V1__ACQUIRE__INIT;

    acquire.space = space;
    acquire.keys = cst_raw_bytes(keys, 32 * CST_ACQUIRE_KEYS_MAX);
    for (uint64_t round = 0; round < 3; round++) {
        acquire.lease = 1 + round * CST_ACQUIRE_KEYS_MAX;
        assert_int_equal(cst_raw_call(raw, CST_MSG_ACQUIRE, &acquire.base), 0);
    }
}

static void take_slabs(struct cst_raw *raw) {
    Cistern__V1__SlabGet get = CISTERN__V1__SLAB_GET__INIT;
    struct cst_le32 ids[16];

    get.slabs = cst_raw_bytes(ids, sizeof(ids));
    for (uint32_t first = 1; first < 400; first += 16) {
        for (uint32_t i = 0; i < 16; i++)
            cst_store32(&ids[i], first + i);
        assert_int_equal(cst_raw_call(raw, CST_MSG_SLAB_GET, &get.base), 0);
    }
}

static void take_handles(struct cst_raw *raw, uint8_t model) {
    Cistern__V1__SpaceOpen open = CISTERN__V1__SPACE_OPEN__INIT;
    Cistern__V1__Subscribe subscribe = CISTERN__V1__SUBSCRIBE__INIT;
    uint8_t descriptor[1024];
    int status = 0;

    open.descriptor =
        cst_raw_bytes(descriptor, cst_box_descriptor(descriptor, sizeof(descriptor), model));
    for (int i = 0; i < 200 && !status; i++) {
        status = cst_raw_call(raw, CST_MSG_SPACE_OPEN, &open.base);
        if (!status) {
            subscribe.space = ((const Cistern__V1__SpaceOpenReply *)raw->reply)->space;
            (void)cst_raw_call(raw, CST_MSG_SUBSCRIBE, &subscribe.base);
        }
    }
    assert_true(!status || status == CST_STATUS_QUOTA || status == -1);
}

/* Asks for the largest replies and reads none; the daemon may hang up. */
static void flood(struct cst_raw *raw) {
    static uint8_t payload[120000];
    Cistern__V1__Ping ping = CISTERN__V1__PING__INIT;
    size_t n;

    ping.payload = cst_raw_bytes(payload, sizeof(payload));
    n = cst_packet_pack(raw->out, CST_PACKET_MAX, CST_MSG_PING, 0, 1, &ping.base);
    for (int i = 0; i < 20; i++)
        if (send(raw->fd, raw->out, n, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EAGAIN)
            return;
}

static void a_hostile_crowd_gets_no_more_memory(void **state) {
    Cistern__V1__Lookup lookup = CISTERN__V1__LOOKUP__INIT;
    struct cst_raw good;

    cst_raw_connect_to(&good, &addr, sizeof(addr));
    lookup.space = cst_raw_open(&good, 1, CST_KIND_TOKENS, root);
    lookup.keys = cst_raw_bytes(keys, 32);
    for (size_t i = 0; i < CROWD; i++)
        connect_one(i, 1);
    check_memory("connections");
    fill_blocks(&crowd[0], spaces[0]);
    check_memory("blocks");
    for (size_t i = 1; i < CROWD; i++)
        take_leases(&crowd[i], spaces[i]);
    check_memory("leases");
    for (size_t i = 0; i < CROWD; i++)
        take_slabs(&crowd[i]);
    check_memory("slabs");
    for (size_t i = 1; i < CROWD; i++) {
        struct cst_raw_staging staging;
        int status = cst_raw_staging(&crowd[i], &staging);

        assert_true(!status || status == CST_STATUS_QUOTA);
        if (!status)
            cst_raw_staging_unmap(&staging); /* the daemon keeps it */
    }
    check_memory("staging");
    for (size_t i = 0; i < CROWD; i++)
        take_handles(&crowd[i], (uint8_t)(i + 2));
    check_memory("handles");
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < CROWD; i++)
            flood(&crowd[i]);
        assert_int_equal(cst_raw_call(&good, CST_MSG_LOOKUP, &lookup.base), 0);
    }
    check_memory("unread replies");
    for (size_t i = 0; i < CROWD; i++)
        cst_raw_close(&crowd[i]);
    assert_int_equal(cst_raw_call(&good, CST_MSG_LOOKUP, &lookup.base), 0);
    cst_raw_close(&good);
    check_memory("the end");
}

static void the_daemon_is_empty_again(void **state) {
    Cistern__V1__Status status = CISTERN__V1__STATUS__INIT;
    const Cistern__V1__StatusReply *reply;
    struct cst_raw raw;

    cst_raw_connect_to(&raw, &addr, sizeof(addr));
    assert_int_equal(cst_raw_hello(&raw), 0);
    do { /* the crowd's ends are noticed one by one */
        assert_int_equal(cst_raw_call(&raw, CST_MSG_STATUS, &status.base), 0);
        reply = raw.reply;
    } while (reply->clients > 1 || reply->staging_bytes);
    assert_int_equal(reply->leases, 0);
    assert_int_equal(reply->reserved, 0);
    assert_true(reply->memory_used <= reply->memory_limit);
    cst_raw_close(&raw);
    assert_int_equal(cst_spawn_stop(&daemon_), 0);
}

int main(void) {
    /* One uid may take all: the limits in total are what is measured. */
    static const char *const args[] = {
        "--memory", "96MiB", "--leases-per-uid", "65536", "--connections-per-uid", "1024", "--slab",
        "1MiB",     NULL
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_hostile_crowd_gets_no_more_memory),
        cmocka_unit_test(the_daemon_is_empty_again),
    };
    const char *program = cst_spawn_program();
    int failed;

    keys = calloc(BLOCKS, 32);
    if (!program || !keys || cst_spawn_start(&daemon_, program, args))
        return 1;
    (void)snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", daemon_.socket);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    cst_spawn_cleanup(&daemon_);
    free(keys);
    return failed;
}
