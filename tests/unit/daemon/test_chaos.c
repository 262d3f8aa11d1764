/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tens of thousands of seeded random requests from several clients that come and go: every message,
 * every field, values that mean something and values that don't. The daemon answers each, serves a
 * careful client after it, and holds nothing once all are gone. CST_SEED repeats a run.
 */
#include "tests/unit/daemon/serverbox.h"

#include "base/random.h"
#include "proto/key.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CLIENTS = 4, REQUESTS = 30000, CHAIN = 40, SLOTS = 64, BULK_MAX = 8192 };

static struct cst_box box;
static struct cst_seeded_random dice;

static uint64_t roll(uint64_t n) {
    return cst_seeded_random_next(&dice) % n;
}

struct client {
    struct cst_raw raw;
    struct cst_raw_staging staging;
    bool connected;
    uint64_t slots[SLOTS]; /* the last ones that were given */
    size_t n_slots;
};
static struct client clients[CLIENTS];
static unsigned succeeded[128]; /* requests, by type */

/* What most requests are about: one chain of blocks, and its tokens. */
static uint8_t root[32], keys[CHAIN * 32];
static uint32_t tokens[CHAIN * BOX_TOKENS];

/* ---- random values ---- */

static uint64_t random_number(void) {
    static const uint64_t edges[] = { 0, 1, 2, 3, 16, 255, 4096, UINT32_MAX, UINT64_MAX };

    if (roll(4) == 0)
        return edges[roll(CST_COUNT(edges))];
    return roll(roll(2) ? 2 : 6);
}

static size_t random_bytes(uint8_t *out) {
    size_t n = roll(300);

    for (size_t i = 0; i < n; i++)
        out[i] = (uint8_t)roll(256);
    return n;
}

/* Runs of the chain, single keys in any order, the root, noise. */
static size_t random_keys(uint8_t *out) {
    size_t first = roll(CHAIN), n = 1 + roll(CHAIN - first);

    if (roll(8) == 0)
        return random_bytes(out);
    if (roll(4) == 0) {
        for (size_t i = 0; i < n; i++)
            memcpy(out + 32 * i, roll(9) ? keys + 32 * roll(CHAIN) : root, 32);
        return 32 * n;
    }
    if (roll(3) == 0)
        first = 0;
    memcpy(out, keys + 32 * first, 32 * n);
    return 32 * n;
}

static size_t random_ids(const struct client *c, const char *name, uint8_t *out) {
    size_t n = roll(6), size = strcmp(name, "slabs") ? 8 : 4;

    for (size_t i = 0; i < n; i++) {
        uint64_t id = !strcmp(name, "slots") && c->n_slots && roll(8)
                          ? c->slots[roll(CST_MIN(c->n_slots, (size_t)SLOTS))]
                          : roll(40);

        memcpy(out + size * i, &id, size); /* little-endian machines run this test */
    }
    return size * n;
}

static size_t random_field(const struct client *c, const char *name, uint8_t *out) {
    if (!strcmp(name, "keys"))
        return random_keys(out);
    if (!strcmp(name, "parent"))
        return roll(3) ? (memcpy(out, roll(2) ? root : keys + 32 * roll(CHAIN), 32), 32u)
                       : random_bytes(out);
    if (!strcmp(name, "descriptor") && roll(8))
        return cst_box_descriptor(out, BULK_MAX, (uint8_t)roll(3));
    if (!strcmp(name, "tokens") || !strcmp(name, "tail")) {
        size_t first = roll(CHAIN * BOX_TOKENS), n = roll(CHAIN * BOX_TOKENS - first + 1);

        n = strcmp(name, "tail") ? n : CST_MIN(n, (size_t)BOX_TOKENS);
        memcpy(out, tokens + first, 4 * n);
        return 4 * n;
    }
    if (!strcmp(name, "slots") || !strcmp(name, "leases") || !strcmp(name, "release") ||
        !strcmp(name, "slabs"))
        return random_ids(c, name, out);
    return roll(2) ? 0 : random_bytes(out);
}

/* ---- random messages ---- */

struct scratch {
    uint8_t message[512], bulk[8][BULK_MAX];
    Cistern__V1__ListRef refs[4];
    size_t n_bulk, n_refs;
};

static void fill_field(const struct client *c, const ProtobufCFieldDescriptor *field,
                       struct scratch *s) {
    void *member = s->message + field->offset;
    uint64_t number = random_number();

    switch (field->type) {
    case PROTOBUF_C_TYPE_UINT32:
        memcpy(member, &(uint32_t){ (uint32_t)number }, 4);
        break;
    case PROTOBUF_C_TYPE_UINT64:
        memcpy(member, &number, 8);
        break;
    case PROTOBUF_C_TYPE_BYTES: {
        uint8_t *bulk = s->bulk[s->n_bulk++];
        ProtobufCBinaryData data = { .len = random_field(c, field->name, bulk), .data = bulk };

        memcpy(member, &data, sizeof(data));
        break;
    }
    case PROTOBUF_C_TYPE_MESSAGE: /* a list in staging, rarely */
        if (roll(10) == 0) {
            Cistern__V1__ListRef *ref = &s->refs[s->n_refs++];

            cistern__v1__list_ref__init(ref);
            ref->offset = roll(2) ? roll(5 << 20) : random_number();
            ref->length = roll(2) ? 32 * roll(70000) : random_number();
            memcpy(member, &ref, sizeof(ref));
        }
        break;
    default:
        break; /* strings stay empty: a purge by name would need luck */
    }
}

/* A Reserve that would be right, so that slots exist. */
static void make_good_reserve(Cistern__V1__Reserve *m) {
    size_t first = roll(CHAIN), n = 1 + roll(CST_MIN((size_t)4, CHAIN - first));

    m->space = 1;
    m->parent = (ProtobufCBinaryData){ .len = 32, .data = first ? keys + 32 * (first - 1) : root };
    m->keys = (ProtobufCBinaryData){ .len = 32 * n, .data = keys + 32 * first };
    m->tokens = (ProtobufCBinaryData){ .len = 4 * n * BOX_TOKENS,
                                       .data = (void *)(tokens + first * BOX_TOKENS) };
}

static void remember_slots(struct client *c) {
    const Cistern__V1__ReserveReply *reply = c->raw.reply;
    const struct cst_slot_record *records = (const void *)reply->slots.data;

    for (size_t i = 0; i < reply->slots.len / sizeof(*records); i++)
        if (!cst_load16(&records[i].status))
            c->slots[c->n_slots++ % SLOTS] = cst_load64(&records[i].slot);
}

/* Chaos that only fails proves little. */
static void check_success(void) {
#define R(NAME, number, request, reply)                                                            \
    if (number != CST_MSG_HELLO && number != CST_MSG_STAGING_GET && /* once, when connecting */    \
        number != CST_MSG_SIDEDATA_GET && number != CST_MSG_SIDEDATA_PUT) /* there are none */     \
        assert_true(succeeded[number] > 10);
#include "proto/message.def"
}

/* ---- clients ---- */

static void disconnect(struct client *c) {
    if (c->staging.base)
        cst_raw_staging_unmap(&c->staging);
    cst_raw_close(&c->raw);
    c->connected = false;
}

static void connect_client(struct client *c) {
    memset(&c->staging, 0, sizeof(c->staging));
    c->n_slots = 0;
    cst_raw_connect(&c->raw, &box);
    assert_int_equal(cst_raw_open(&c->raw, 1, CST_KIND_TOKENS, NULL), 1);
    while (
        cst_raw_staging(&c->raw, &c->staging)) /* the last client's slab is still being unmapped */
        ;
    c->connected = true;
}

static void send_random(struct client *c) {
    static const uint16_t types[] = {
#define R(NAME, number, request, reply) number,
#include "proto/message.def"
    };
    static struct scratch s;
    uint16_t type = types[roll(CST_COUNT(types))];
    const ProtobufCMessageDescriptor *desc = cst_message_descriptor(type, false);
    int status;

    s.n_bulk = s.n_refs = 0;
    assert_true(desc->sizeof_message <= sizeof(s.message));
    desc->message_init((void *)s.message);
    if (type == CST_MSG_RESERVE && roll(4))
        make_good_reserve((void *)s.message);
    else
        for (unsigned i = 0; i < desc->n_fields; i++)
            fill_field(c, &desc->fields[i], &s);
    if (roll(500) == 0) { /* dies before it hears */
        cst_raw_send(&c->raw, type, (void *)s.message);
        disconnect(c);
        return;
    }
    c->raw.n_pushes = 0;
    status = cst_raw_call(&c->raw, type, (void *)s.message);
    assert_int_not_equal(status, CST_STATUS_INTERNAL);
    assert_int_not_equal(status, -1);
    succeeded[type] += !status;
    if (!status && type == CST_MSG_RESERVE)
        remember_slots(c);
}

static uint64_t seed(void) {
    const char *given = getenv("CST_SEED");
    uint64_t s = given ? strtoull(given, NULL, 0) : 1;

    print_message("CST_SEED=%llu\n", (unsigned long long)s);
    return s;
}

static void small(struct cst_config *config) {
    config->memory = 64 << 20;
    config->staging = 1 << 20;
    config->staging_total = config->staging_per_uid = 32 << 20;
}

static void check_empty(struct cst_server *server, void *arg) {
    for (int r = 0; r < CST_RESOURCES; r++)
        assert_int_equal(server->total.used[r], 0);
    assert_int_equal(server->shares.count, 0);
}

static void careful_client(void) {
    struct cst_raw raw;
    struct cst_raw_staging staging;
    uint8_t parent[32], chain[3 * 32];
    uint32_t ids[3 * BOX_TOKENS];
    uint16_t statuses[3];
    uint32_t space;

    cst_raw_connect(&raw, &box);
    space = cst_raw_open(&raw, 1, CST_KIND_TOKENS, parent);
    assert_int_equal(cst_raw_staging(&raw, &staging), 0);
    cst_box_chain(parent, 70000, 3, chain, ids);
    assert_int_equal(cst_raw_put(&raw, space, &staging, parent, 70000, 3, statuses), 0);
    for (int i = 0; i < 3; i++)
        assert_true(statuses[i] == CST_STATUS_OK || statuses[i] == CST_STATUS_PENDING);
    cst_raw_staging_unmap(&staging);
    cst_raw_close(&raw);
}

static void random_requests_are_survived(void **state) {
    uint8_t descriptor[1024], fingerprint[32];

    cst_seeded_random_init(&dice, seed());
    cst_box_start(&box, small);
    cst_descriptor_fingerprint(descriptor, cst_box_descriptor(descriptor, sizeof(descriptor), 1),
                               fingerprint);
    cst_key_root(fingerprint, NULL, 0, root);
    cst_box_chain(root, 1, CHAIN, keys, tokens);
    for (int i = 0; i < REQUESTS; i++) {
        struct client *c = &clients[roll(CLIENTS)];

        if (!c->connected)
            connect_client(c);
        else if (roll(300) == 0)
            disconnect(c);
        else
            send_random(c);
    }
    for (int i = 0; i < CLIENTS; i++)
        if (clients[i].connected)
            disconnect(&clients[i]);
    check_success();
    careful_client();
    cst_box_settle(&box);
    cst_box_call(&box, check_empty, NULL);
    cst_box_stop(&box);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_requests_are_survived),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
