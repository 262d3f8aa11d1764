/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each request with arguments that are wrong, foreign, too many or too early, and what the right
 * ones do at their edges. After each the connection answers.
 */
#include "tests/unit/daemon/serverbox.h"

#include "proto/key.h"

#include <stdlib.h>
#include <string.h>

static struct cst_box box;
static struct cst_raw raw; /* the client of each test */
static struct cst_raw_staging staging;
static uint32_t space;
static uint8_t root[32];

static int start(void **state) {
    cst_box_start(&box, NULL);
    cst_raw_connect(&raw, &box);
    space = cst_raw_open(&raw, 1, CST_KIND_TOKENS, root);
    assert_int_equal(cst_raw_staging(&raw, &staging), 0);
    return 0;
}

static int stop(void **state) {
    Cistern__V1__Ping ping = CISTERN__V1__PING__INIT;

    assert_int_equal(cst_raw_call(&raw, CST_MSG_PING, &ping.base), CST_STATUS_OK);
    cst_raw_staging_unmap(&staging);
    cst_raw_close(&raw);
    cst_box_settle(&box);
    cst_box_stop(&box);
    return 0;
}

/* ---- helpers: one request each ---- */

static int reserve(struct cst_raw *client, uint32_t handle, const uint8_t *parent,
                   const uint8_t *keys, size_t n, const uint32_t *tokens, size_t n_tokens) {
    Cistern__V1__Reserve m = CISTERN__V1__RESERVE__INIT;

    m.space = handle;
    if (parent)
        m.parent = cst_raw_bytes(parent, 32);
    m.keys = cst_raw_bytes(keys, 32 * n);
    m.tokens = cst_raw_bytes(tokens, 4 * n_tokens);
    return cst_raw_call(client, CST_MSG_RESERVE, &m.base);
}

static uint16_t slot_status(size_t i, uint64_t *slot) {
    const Cistern__V1__ReserveReply *reply = raw.reply;
    const struct cst_slot_record *records = (const void *)reply->slots.data;

    assert_true(reply->slots.len >= (i + 1) * sizeof(*records));
    if (slot)
        *slot = cst_load64(&records[i].slot);
    return cst_load16(&records[i].status);
}

/* Commit's status, or the first key's. */
static int commit(struct cst_raw *client, const uint64_t *slots, size_t n, const void *surprisals,
                  size_t n_surprisals) {
    Cistern__V1__Commit m = CISTERN__V1__COMMIT__INIT;
    const Cistern__V1__CommitReply *reply;
    int status;

    m.slots = cst_raw_bytes(slots, 8 * n);
    m.surprisals = cst_raw_bytes(surprisals, 2 * n_surprisals);
    status = cst_raw_call(client, CST_MSG_COMMIT, &m.base);
    if (status)
        return status;
    reply = client->reply;
    assert_int_equal(reply->statuses.len, 2 * n);
    return n ? cst_load16(reply->statuses.data) : 0;
}

static void abort_slot(struct cst_raw *client, uint64_t slot) {
    Cistern__V1__Abort m = CISTERN__V1__ABORT__INIT;

    m.slots = cst_raw_bytes(&slot, 8);
    assert_int_equal(cst_raw_call(client, CST_MSG_ABORT, &m.base), 0);
}

static int lookup(const void *keys, size_t len, const Cistern__V1__ListRef *ref) {
    Cistern__V1__Lookup m = CISTERN__V1__LOOKUP__INIT;

    m.space = space;
    m.keys = cst_raw_bytes(keys, len);
    m.keys_ref = (Cistern__V1__ListRef *)(uintptr_t)ref;
    return cst_raw_call(&raw, CST_MSG_LOOKUP, &m.base);
}

static uint32_t present(void) {
    const Cistern__V1__LookupReply *reply = raw.reply;

    return reply->present;
}

/* ---- handles ---- */

static void forged_handles_are_refused(void **state) {
    static const uint32_t forged[] = { 0, 2, 7, 8, 9, 1000, UINT32_MAX };

    for (size_t i = 0; i < CST_COUNT(forged); i++) {
        Cistern__V1__Lookup m = CISTERN__V1__LOOKUP__INIT;
        Cistern__V1__Acquire acquire = CISTERN__V1__ACQUIRE__INIT;
        Cistern__V1__Erase erase = CISTERN__V1__ERASE__INIT;

        m.space = acquire.space = erase.space = forged[i];
        assert_int_equal(cst_raw_call(&raw, CST_MSG_LOOKUP, &m.base), CST_STATUS_BAD_HANDLE);
        assert_int_equal(cst_raw_call(&raw, CST_MSG_ACQUIRE, &acquire.base), CST_STATUS_BAD_HANDLE);
        assert_int_equal(cst_raw_call(&raw, CST_MSG_ERASE, &erase.base), CST_STATUS_BAD_HANDLE);
    }
}

static void a_closed_space_is_gone_but_its_slots_live(void **state) {
    Cistern__V1__SpaceClose m = CISTERN__V1__SPACE_CLOSE__INIT;
    uint8_t key[32];
    uint32_t tokens[BOX_TOKENS];
    uint64_t slot;

    cst_box_chain(root, 5, 1, key, tokens);
    assert_int_equal(reserve(&raw, space, root, key, 1, tokens, BOX_TOKENS), 0);
    assert_int_equal(slot_status(0, &slot), CST_STATUS_OK);
    m.space = space;
    assert_int_equal(cst_raw_call(&raw, CST_MSG_SPACE_CLOSE, &m.base), 0);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_SPACE_CLOSE, &m.base), CST_STATUS_BAD_HANDLE);
    assert_int_equal(lookup(key, 32, NULL), CST_STATUS_BAD_HANDLE);
    assert_int_equal(commit(&raw, &slot, 1, NULL, 0), CST_STATUS_OK);
}

struct open_row {
    const char *name;
    uint32_t kind, scope, quality_class;
    size_t salt, cut; /* bytes of salt; bytes missing from the descriptor */
    int status;
};

static const struct open_row open_rows[] = {
    { "as it should be", 0, 0, 0, 64, 0, CST_STATUS_OK },
    { "flat", 1, 0, 0, 0, 0, CST_STATUS_OK },
    { "unknown kind", 2, 0, 0, 0, 0, CST_STATUS_BAD_ARGUMENT },
    { "unknown scope", 0, 2, 0, 0, 0, CST_STATUS_BAD_ARGUMENT },
    { "no public namespace", 0, 1, 0, 0, 0, CST_STATUS_UNSUPPORTED },
    { "unknown class", 0, 0, 4, 0, 0, CST_STATUS_BAD_ARGUMENT },
    { "a laxer class than configured", 0, 0, 1, 0, 0, CST_STATUS_DENIED },
    { "long salt", 0, 0, 0, 65, 0, CST_STATUS_BAD_ARGUMENT },
    { "truncated descriptor", 0, 0, 0, 0, 1, CST_STATUS_BAD_DESCRIPTOR },
    { "no descriptor", 0, 0, 0, 0, 1000, CST_STATUS_BAD_DESCRIPTOR },
};

static void check_open(void **state) {
    const struct open_row *row = *state;
    Cistern__V1__SpaceOpen m = CISTERN__V1__SPACE_OPEN__INIT;
    uint8_t descriptor[1024], salt[128] = { 0 };
    size_t n = cst_box_descriptor(descriptor, sizeof(descriptor), 9);

    m.descriptor = cst_raw_bytes(descriptor, row->cut < n ? n - row->cut : 0);
    m.kind = row->kind;
    m.scope = row->scope;
    m.quality_class = row->quality_class;
    m.salt = cst_raw_bytes(salt, row->salt);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_SPACE_OPEN, &m.base), row->status);
    assert_true(!row->status || strlen(raw.text) > 10);
}

static void handles_are_limited(void **state) {
    Cistern__V1__SpaceOpen m = CISTERN__V1__SPACE_OPEN__INIT;
    Cistern__V1__SpaceClose close = CISTERN__V1__SPACE_CLOSE__INIT;
    uint8_t descriptor[1024];

    m.descriptor = cst_raw_bytes(descriptor, cst_box_descriptor(descriptor, sizeof(descriptor), 9));
    for (int i = 1; i < CST_SPACES_OPEN_MAX; i++)
        assert_int_equal(cst_raw_call(&raw, CST_MSG_SPACE_OPEN, &m.base), 0);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_SPACE_OPEN, &m.base), CST_STATUS_QUOTA);
    close.space = 77;
    assert_int_equal(cst_raw_call(&raw, CST_MSG_SPACE_CLOSE, &close.base), 0);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_SPACE_OPEN, &m.base), 0);
}

/* ---- lists ---- */

static void lists_of_the_wrong_size_are_refused(void **state) {
    Cistern__V1__Release release = CISTERN__V1__RELEASE__INIT;
    Cistern__V1__SlabGet get = CISTERN__V1__SLAB_GET__INIT;
    Cistern__V1__Lookup m = CISTERN__V1__LOOKUP__INIT;
    static uint8_t zeros[128 * 1024];

    assert_int_equal(lookup(zeros, 31, NULL), CST_STATUS_BAD_ARGUMENT);
    assert_int_equal(lookup(zeros, 33, NULL), CST_STATUS_BAD_ARGUMENT);
    assert_int_equal(lookup(zeros, 0, NULL), CST_STATUS_OK);
    assert_int_equal(lookup(zeros, 32 * 4000, NULL), CST_STATUS_OK);
    release.leases = cst_raw_bytes(zeros, 7);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_RELEASE, &release.base), CST_STATUS_BAD_ARGUMENT);
    release.leases = cst_raw_bytes(zeros, 8 * 16000);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_RELEASE, &release.base), CST_STATUS_OK);
    get.slabs = cst_raw_bytes(zeros, 6);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_SLAB_GET, &get.base), CST_STATUS_BAD_ARGUMENT);
    get.slabs = cst_raw_bytes(zeros, 4 * 17);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_SLAB_GET, &get.base), CST_STATUS_TOO_LARGE);
    m.space = space;
    m.tail = cst_raw_bytes(zeros, 4 * (BOX_TOKENS + 1));
    assert_int_equal(cst_raw_call(&raw, CST_MSG_LOOKUP, &m.base), CST_STATUS_TOO_LARGE);
    m.tail = cst_raw_bytes(zeros, 4 * BOX_TOKENS);
    m.parent = cst_raw_bytes(zeros, 31);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_LOOKUP, &m.base), CST_STATUS_BAD_ARGUMENT);
}

static void requests_have_their_own_limits(void **state) {
    Cistern__V1__Acquire m = CISTERN__V1__ACQUIRE__INIT;
    static uint8_t zeros[32 * 4001];
    static uint32_t tokens[4001];

    m.space = space;
    m.keys = cst_raw_bytes(zeros, 32 * (CST_ACQUIRE_KEYS_MAX + 1));
    assert_int_equal(cst_raw_call(&raw, CST_MSG_ACQUIRE, &m.base), CST_STATUS_TOO_LARGE);
    m.keys = cst_raw_bytes(zeros, 32 * CST_ACQUIRE_KEYS_MAX);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_ACQUIRE, &m.base), CST_STATUS_OK);
    m.mode = 2;
    assert_int_equal(cst_raw_call(&raw, CST_MSG_ACQUIRE, &m.base), CST_STATUS_BAD_ARGUMENT);
    m.mode = 0;
    m.layer_first = 1;
    m.layer_count = 1;
    assert_int_equal(cst_raw_call(&raw, CST_MSG_ACQUIRE, &m.base), CST_STATUS_BAD_ARGUMENT);
    m.layer_first = 0;
    m.layer_count = UINT32_MAX;
    assert_int_equal(cst_raw_call(&raw, CST_MSG_ACQUIRE, &m.base), CST_STATUS_BAD_ARGUMENT);
    assert_int_equal(reserve(&raw, space, root, zeros, 4001, tokens, 1), CST_STATUS_TOO_LARGE);
}

/* A list in staging answers as the same list in the packet; one outside of it is refused. */
static void lists_may_lie_in_staging(void **state) {
    Cistern__V1__ListRef ref = CISTERN__V1__LIST_REF__INIT;
    uint8_t keys[3 * 32];
    uint32_t tokens[3 * BOX_TOKENS];
    uint16_t statuses[2];

    cst_box_chain(root, 1, 3, keys, tokens);
    assert_int_equal(cst_raw_put(&raw, space, &staging, root, 1, 2, statuses), 0);
    memcpy(staging.base + staging.lists, keys, sizeof(keys));
    ref.offset = staging.lists;
    ref.length = sizeof(keys);
    assert_int_equal(lookup(NULL, 0, &ref), 0);
    assert_int_equal(present(), 2);
    assert_int_equal(lookup(keys, sizeof(keys), &ref), CST_STATUS_BAD_ARGUMENT); /* both */
    ref.length = 65;
    assert_int_equal(lookup(NULL, 0, &ref), CST_STATUS_BAD_ARGUMENT);
    ref.length = UINT64_C(65537) * 32;
    ref.offset = 0;
    assert_int_equal(lookup(NULL, 0, &ref), CST_STATUS_TOO_LARGE);
    ref.offset = staging.size - 32;
    ref.length = 64;
    assert_int_equal(lookup(NULL, 0, &ref), CST_STATUS_BAD_ARGUMENT);
    ref.offset = UINT64_MAX - 31;
    assert_int_equal(lookup(NULL, 0, &ref), CST_STATUS_BAD_ARGUMENT);
    ref.offset = 32;
    ref.length = UINT64_MAX - 31;
    assert_int_equal(lookup(NULL, 0, &ref), CST_STATUS_BAD_ARGUMENT);
}

static void without_staging_there_are_no_lists_and_no_slots(void **state) {
    Cistern__V1__Lookup m = CISTERN__V1__LOOKUP__INIT;
    Cistern__V1__ListRef ref = CISTERN__V1__LIST_REF__INIT;
    struct cst_raw fresh;
    uint8_t key[32];
    uint32_t tokens[BOX_TOKENS];

    cst_raw_connect(&fresh, &box);
    m.space = cst_raw_open(&fresh, 1, CST_KIND_TOKENS, NULL);
    m.keys_ref = &ref;
    assert_int_equal(cst_raw_call(&fresh, CST_MSG_LOOKUP, &m.base), CST_STATUS_BAD_ARGUMENT);
    cst_box_chain(root, 1, 1, key, tokens);
    assert_int_equal(reserve(&fresh, m.space, root, key, 1, tokens, BOX_TOKENS),
                     CST_STATUS_BAD_STATE);
    cst_raw_close(&fresh);
}

static void staging_is_passed_once(void **state) {
    Cistern__V1__StagingGet get = CISTERN__V1__STAGING_GET__INIT;

    assert_true(staging.lists >= 4 * BOX_BLOCK);
    assert_true(staging.size - staging.lists >= 65536 * 32);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_STAGING_GET, &get.base), CST_STATUS_BAD_STATE);
    assert_int_equal(raw.n_fds, 0);
}

/* ---- reserve, commit, abort ---- */

static void keys_must_be_the_hash_of_their_tokens(void **state) {
    uint8_t keys[3 * 32], wrong[32];
    uint32_t tokens[3 * BOX_TOKENS];
    uint64_t slot;

    cst_box_chain(root, 1, 3, keys, tokens);
    tokens[BOX_TOKENS + 3]++; /* of the second block */
    assert_int_equal(reserve(&raw, space, root, keys, 3, tokens, 3 * BOX_TOKENS), 0);
    assert_int_equal(slot_status(0, &slot), CST_STATUS_OK);
    assert_int_equal(slot_status(1, NULL), CST_STATUS_KEY_MISMATCH);
    assert_int_equal(slot_status(2, NULL), CST_STATUS_PARENT_MISSING);
    abort_slot(&raw, slot);

    tokens[BOX_TOKENS + 3]--;
    memcpy(wrong, root, 32);
    wrong[0] ^= 1; /* another root: the first key does not hang under it */
    assert_int_equal(reserve(&raw, space, wrong, keys, 1, tokens, BOX_TOKENS), 0);
    assert_int_equal(slot_status(0, NULL), CST_STATUS_KEY_MISMATCH);
    cst_key_block(wrong, tokens, BOX_TOKENS, NULL, 0, keys);
    assert_int_equal(reserve(&raw, space, wrong, keys, 1, tokens, BOX_TOKENS), 0);
    assert_int_equal(slot_status(0, NULL), CST_STATUS_PARENT_MISSING);
}

struct shape_row {
    const char *name;
    size_t keys, tokens;
    bool parent;
    int status;
};

static const struct shape_row shape_rows[] = {
    { "full blocks", 2, 2 * BOX_TOKENS, true, CST_STATUS_OK },
    { "a short last block", 2, BOX_TOKENS + 1, true, CST_STATUS_OK },
    { "no key", 0, 0, true, CST_STATUS_BAD_ARGUMENT },
    { "no tokens", 1, 0, true, CST_STATUS_BAD_ARGUMENT },
    { "a token too many", 1, BOX_TOKENS + 1, true, CST_STATUS_BAD_ARGUMENT },
    { "a block too few", 2, BOX_TOKENS, true, CST_STATUS_BAD_ARGUMENT },
    { "no parent", 1, BOX_TOKENS, false, CST_STATUS_BAD_ARGUMENT },
};

static void check_shape(void **state) {
    const struct shape_row *row = *state;
    uint8_t keys[3 * 32];
    uint32_t tokens[3 * BOX_TOKENS];

    cst_box_chain(root, 900, 3, keys, tokens);
    assert_int_equal(
        reserve(&raw, space, row->parent ? root : NULL, keys, row->keys, tokens, row->tokens),
        row->status);
    for (size_t i = 0; i < row->keys && !row->status; i++) {
        uint64_t slot;

        (void)slot_status(i, &slot);
        abort_slot(&raw, slot);
    }
}

static void a_slot_ends_once(void **state) {
    uint8_t keys[2 * 32];
    uint32_t tokens[2 * BOX_TOKENS];
    uint64_t slots[2], forged = 0;

    cst_box_chain(root, 1, 2, keys, tokens);
    assert_int_equal(reserve(&raw, space, root, keys, 2, tokens, 2 * BOX_TOKENS), 0);
    (void)slot_status(0, &slots[0]);
    (void)slot_status(1, &slots[1]);
    assert_int_equal(commit(&raw, &forged, 1, NULL, 0), CST_STATUS_BAD_HANDLE);
    forged = slots[1] + 1;
    assert_int_equal(commit(&raw, &forged, 1, NULL, 0), CST_STATUS_BAD_HANDLE);
    assert_int_equal(commit(&raw, &slots[0], 1, NULL, 0), CST_STATUS_OK);
    assert_int_equal(commit(&raw, &slots[0], 1, NULL, 0), CST_STATUS_BAD_HANDLE); /* twice */
    abort_slot(&raw, slots[0]); /* too late and harmless */
    abort_slot(&raw, slots[1]);
    abort_slot(&raw, slots[1]);
    assert_int_equal(commit(&raw, &slots[1], 1, NULL, 0), CST_STATUS_BAD_HANDLE);
    assert_int_equal(lookup(keys, 64, NULL), 0);
    assert_int_equal(present(), 1);
}

static void one_slot_twice_in_a_commit_counts_once(void **state) {
    uint8_t key[32];
    uint32_t tokens[BOX_TOKENS];
    uint64_t slots[2];
    const Cistern__V1__CommitReply *reply;

    cst_box_chain(root, 1, 1, key, tokens);
    assert_int_equal(reserve(&raw, space, root, key, 1, tokens, BOX_TOKENS), 0);
    (void)slot_status(0, &slots[0]);
    slots[1] = slots[0];
    assert_int_equal(commit(&raw, slots, 2, NULL, 0), CST_STATUS_OK);
    reply = raw.reply;
    assert_int_equal(cst_load16(reply->statuses.data + 2), CST_STATUS_BAD_STATE);
}

static void slots_of_another_client_do_not_exist(void **state) {
    struct cst_raw other;
    struct cst_raw_staging staging_other;
    uint8_t key[32];
    uint32_t tokens[BOX_TOKENS], handle;
    uint64_t slot;

    cst_raw_connect(&other, &box);
    handle = cst_raw_open(&other, 1, CST_KIND_TOKENS, NULL);
    assert_int_equal(cst_raw_staging(&other, &staging_other), 0);
    cst_box_chain(root, 1, 1, key, tokens);
    assert_int_equal(reserve(&raw, space, root, key, 1, tokens, BOX_TOKENS), 0);
    (void)slot_status(0, &slot);
    assert_int_equal(commit(&other, &slot, 1, NULL, 0), CST_STATUS_BAD_HANDLE);
    abort_slot(&other, slot); /* does not touch it */
    assert_int_equal(commit(&raw, &slot, 1, NULL, 0), CST_STATUS_OK);
    assert_int_equal(reserve(&other, handle, root, key, 1, tokens, BOX_TOKENS), 0);
    assert_int_equal(cst_load16(((const Cistern__V1__ReserveReply *)other.reply)->slots.data),
                     CST_STATUS_PRESENT);
    cst_raw_staging_unmap(&staging_other);
    cst_raw_close(&other);
}

static void surprisals_are_counted_and_finite(void **state) {
    static const uint16_t bad[] = { 0x7c00, 0x7e00, 0xfc00, 0x8001,
                                    0xbc00 }; /* inf nan -inf -x -1 */
    uint16_t values[2 * BOX_TOKENS];
    uint8_t key[32];
    uint32_t tokens[BOX_TOKENS];
    uint64_t slot;

    for (size_t i = 0; i < CST_COUNT(values); i++)
        values[i] = 0x3c00; /* one bit */
    cst_box_chain(root, 1, 1, key, tokens);
    assert_int_equal(reserve(&raw, space, root, key, 1, tokens, BOX_TOKENS), 0);
    (void)slot_status(0, &slot);
    assert_int_equal(commit(&raw, &slot, 1, values, BOX_TOKENS - 1), CST_STATUS_BAD_ARGUMENT);
    assert_int_equal(commit(&raw, &slot, 1, values, BOX_TOKENS + 1), CST_STATUS_BAD_ARGUMENT);
    for (size_t i = 0; i < CST_COUNT(bad); i++) {
        values[3] = bad[i];
        assert_int_equal(commit(&raw, &slot, 1, values, BOX_TOKENS), CST_STATUS_BAD_ARGUMENT);
    }
    values[3] = 0x8000; /* minus zero is zero */
    assert_int_equal(commit(&raw, &slot, 1, values, BOX_TOKENS), CST_STATUS_OK);
}

/* Staging is full: BUSY for the rest of the chain, and room again after Abort. */
static void a_full_staging_slab_is_busy(void **state) {
    size_t room = staging.lists / BOX_BLOCK, n = room + 3;
    uint8_t *keys = calloc(n, 32);
    uint32_t *tokens = calloc(n, BOX_TOKENS * 4);
    uint64_t *slots = calloc(n, 8);

    assert_true(keys && tokens && slots && n < 4000);
    cst_box_chain(root, 1, n, keys, tokens);
    for (int round = 0; round < 2; round++) {
        Cistern__V1__Abort m = CISTERN__V1__ABORT__INIT;
        Cistern__V1__Reserve r = CISTERN__V1__RESERVE__INIT;
        Cistern__V1__ListRef ref = CISTERN__V1__LIST_REF__INIT;

        memcpy(staging.base + staging.lists, tokens, n * BOX_TOKENS * 4);
        ref.offset = staging.lists;
        ref.length = n * BOX_TOKENS * 4;
        r.space = space;
        r.parent = cst_raw_bytes(root, 32);
        r.keys = cst_raw_bytes(keys, 32 * n);
        r.tokens_ref = &ref;
        assert_int_equal(cst_raw_call(&raw, CST_MSG_RESERVE, &r.base), 0);
        for (size_t i = 0; i < n; i++)
            assert_int_equal(slot_status(i, &slots[i]), i < room ? CST_STATUS_OK : CST_STATUS_BUSY);
        m.slots = cst_raw_bytes(slots, 8 * room);
        assert_int_equal(cst_raw_call(&raw, CST_MSG_ABORT, &m.base), 0);
    }
    free(keys);
    free(tokens);
    free(slots);
}

/* ---- leases ---- */

static struct cst_lease_record acquire_one(const uint8_t key[32], uint64_t lease) {
    Cistern__V1__Acquire m = CISTERN__V1__ACQUIRE__INIT;
    const Cistern__V1__AcquireReply *reply;
    struct cst_lease_record record;

    m.space = space;
    m.keys = cst_raw_bytes(key, 32);
    m.lease = lease;
    assert_int_equal(cst_raw_call(&raw, CST_MSG_ACQUIRE, &m.base), 0);
    reply = raw.reply;
    memcpy(&record, reply->leases.data, sizeof(record));
    return record;
}

static void read_stats(struct cst_server *server, void *arg) {
    cst_store_stats(server->store, arg);
}

static uint64_t held_leases(void) {
    struct cst_store_stats stats;

    cst_box_call(&box, read_stats, &stats);
    return stats.leases;
}

static void repeating_an_acquire_gives_the_same_lease(void **state) {
    Cistern__V1__Release release = CISTERN__V1__RELEASE__INIT;
    struct cst_lease_record first, again;
    uint8_t keys[2 * 32];
    uint32_t tokens[2 * BOX_TOKENS];
    uint16_t statuses[2];
    uint64_t ids[3] = { 5, 5, 99 };

    cst_box_chain(root, 1, 2, keys, tokens);
    assert_int_equal(cst_raw_put(&raw, space, &staging, root, 1, 2, statuses), 0);
    first = acquire_one(keys, 5);
    assert_int_equal(cst_load16(&first.status), CST_STATUS_OK);
    again = acquire_one(keys, 5);
    assert_memory_equal(&first, &again, sizeof(first));
    assert_int_equal(held_leases(), 1);
    again = acquire_one(keys + 32, 5); /* held for another key */
    assert_int_equal(cst_load16(&again.status), CST_STATUS_BAD_HANDLE);
    release.leases = cst_raw_bytes(ids, sizeof(ids)); /* twice, and one that never was */
    assert_int_equal(cst_raw_call(&raw, CST_MSG_RELEASE, &release.base), 0);
    assert_int_equal(held_leases(), 0);
    again = acquire_one(keys + 32, 5);
    assert_int_equal(cst_load16(&again.status), CST_STATUS_OK);
    again = acquire_one(root, 6); /* no block has the root's key */
    assert_int_equal(cst_load16(&again.status), CST_STATUS_NOT_FOUND);
    assert_int_equal(held_leases(), 1);
}

/* ---- the rest ---- */

static void unknown_keys_and_slabs_are_not_found(void **state) {
    Cistern__V1__Pin pin = CISTERN__V1__PIN__INIT;
    Cistern__V1__Touch touch = CISTERN__V1__TOUCH__INIT;
    Cistern__V1__Erase erase = CISTERN__V1__ERASE__INIT;
    Cistern__V1__SlabGet get = CISTERN__V1__SLAB_GET__INIT;
    const Cistern__V1__KeysReply *reply;
    struct cst_slab_record record;
    uint32_t id = 1;

    pin.space = touch.space = erase.space = space;
    pin.keys = touch.keys = erase.keys = cst_raw_bytes(root, 32);
    pin.ttl_ms = UINT64_MAX;
    assert_int_equal(cst_raw_call(&raw, CST_MSG_PIN, &pin.base), 0);
    reply = raw.reply;
    assert_int_equal(cst_load16(reply->statuses.data), CST_STATUS_NOT_FOUND);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_TOUCH, &touch.base), 0);
    reply = raw.reply;
    assert_int_equal(cst_load16(reply->statuses.data), CST_STATUS_NOT_FOUND);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_ERASE, &erase.base), 0);
    reply = raw.reply;
    assert_int_equal(cst_load16(reply->statuses.data), CST_STATUS_NOT_FOUND);
    assert_int_equal(reply->blocks, 0);
    erase.all = 1;
    assert_int_equal(cst_raw_call(&raw, CST_MSG_ERASE, &erase.base), CST_STATUS_BAD_ARGUMENT);
    get.slabs = cst_raw_bytes(&id, 4);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_SLAB_GET, &get.base), 0);
    assert_int_equal(raw.n_fds, 0);
    memcpy(&record, ((const Cistern__V1__SlabGetReply *)raw.reply)->slabs.data, sizeof(record));
    assert_int_equal(cst_load32(&record.status), CST_STATUS_NOT_FOUND);
}

static void flat_spaces_have_no_chains(void **state) {
    struct cst_raw flat;
    Cistern__V1__Lookup m = CISTERN__V1__LOOKUP__INIT;
    Cistern__V1__LookupEach each = CISTERN__V1__LOOKUP_EACH__INIT;
    struct cst_raw_staging st;
    uint8_t keys[3 * 32];
    uint32_t tokens[3 * BOX_TOKENS];
    const Cistern__V1__LookupEachReply *reply;

    cst_raw_connect(&flat, &box);
    m.space = each.space = cst_raw_open(&flat, 1, CST_KIND_FLAT, NULL);
    assert_int_equal(cst_raw_staging(&flat, &st), 0);
    assert_int_equal(cst_raw_call(&flat, CST_MSG_LOOKUP, &m.base), CST_STATUS_BAD_ARGUMENT);
    cst_box_chain(root, 1, 3, keys, tokens);
    assert_int_equal(reserve(&flat, m.space, root, keys, 1, NULL, 0), CST_STATUS_BAD_ARGUMENT);
    assert_int_equal(reserve(&flat, m.space, NULL, keys, 1, tokens, 4), CST_STATUS_BAD_ARGUMENT);
    assert_int_equal(reserve(&flat, m.space, NULL, keys + 64, 1, NULL, 0), 0);
    {
        uint64_t slot;

        memcpy(&slot, ((const Cistern__V1__ReserveReply *)flat.reply)->slots.data + 8, 8);
        assert_int_equal(commit(&flat, &slot, 1, NULL, 0), CST_STATUS_OK);
    }
    each.keys = cst_raw_bytes(keys, sizeof(keys));
    assert_int_equal(cst_raw_call(&flat, CST_MSG_LOOKUP_EACH, &each.base), 0);
    reply = flat.reply;
    assert_int_equal(reply->bitmap.len, 1);
    assert_int_equal(reply->bitmap.data[0], 1 << 2);
    assert_int_equal(reply->tiers.len, 3);
    assert_int_equal(reply->tiers.data[1], CST_TIER_NONE);
    assert_int_equal(reply->tiers.data[2], CST_TIER_HOT);
    cst_raw_staging_unmap(&st);
    cst_raw_close(&flat);
}

static void lists_of_what_there_is(void **state) {
    Cistern__V1__Spaces spaces = CISTERN__V1__SPACES__INIT;
    Cistern__V1__Blocks blocks = CISTERN__V1__BLOCKS__INIT;
    const Cistern__V1__SpacesReply *list;
    const Cistern__V1__BlocksReply *page;
    struct cst_space_record record;
    uint8_t keys[5 * 32];
    uint32_t tokens[5 * BOX_TOKENS];
    uint16_t statuses[5];
    size_t seen = 0;

    cst_box_chain(root, 1, 5, keys, tokens);
    assert_int_equal(cst_raw_put(&raw, space, &staging, root, 1, 5, statuses), 0);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_SPACES, &spaces.base), 0);
    list = raw.reply;
    assert_int_equal(list->spaces.len, sizeof(record));
    assert_int_equal(list->next, 0);
    memcpy(&record, list->spaces.data, sizeof(record));
    assert_int_equal(cst_load32(&record.space), space); /* the handle that is open already */
    assert_int_equal(cst_load64(&record.blocks), 5);
    assert_int_equal(cst_load32(&record.block_tokens), BOX_TOKENS);
    assert_string_equal(record.engine, "test");
    spaces.start = 1;
    assert_int_equal(cst_raw_call(&raw, CST_MSG_SPACES, &spaces.base), 0);
    list = raw.reply;
    assert_int_equal(list->spaces.len, 0);
    blocks.space = space;
    blocks.max = 2;
    do {
        assert_int_equal(cst_raw_call(&raw, CST_MSG_BLOCKS, &blocks.base), 0);
        page = raw.reply;
        assert_true(page->blocks.len <= 2 * sizeof(struct cst_block_record));
        seen += page->blocks.len / sizeof(struct cst_block_record);
        blocks.cursor = page->next;
    } while (page->next);
    assert_int_equal(seen, 5);
}

int main(void) {
#define T(f) cmocka_unit_test_setup_teardown(f, start, stop)
    const struct CMUnitTest tests[] = {
        T(forged_handles_are_refused),
        T(a_closed_space_is_gone_but_its_slots_live),
        T(handles_are_limited),
        T(lists_of_the_wrong_size_are_refused),
        T(requests_have_their_own_limits),
        T(lists_may_lie_in_staging),
        T(without_staging_there_are_no_lists_and_no_slots),
        T(staging_is_passed_once),
        T(keys_must_be_the_hash_of_their_tokens),
        T(a_slot_ends_once),
        T(one_slot_twice_in_a_commit_counts_once),
        T(slots_of_another_client_do_not_exist),
        T(surprisals_are_counted_and_finite),
        T(a_full_staging_slab_is_busy),
        T(repeating_an_acquire_gives_the_same_lease),
        T(unknown_keys_and_slabs_are_not_found),
        T(flat_spaces_have_no_chains),
        T(lists_of_what_there_is),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);

    (void)start(NULL);
    failed += cst_run_rows(open_rows, check_open) + cst_run_rows(shape_rows, check_shape);
    (void)stop(NULL);
    return failed;
}
