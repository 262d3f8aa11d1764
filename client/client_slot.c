/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns slots: places in the staging slab between Reserve and Commit or Abort.
 *
 * Invariants
 *  1. A slot that the caller gets lies inside the slots' part of a staging slab that this client
 *     has mapped, and holds a reference to it: after a loss it stays writable memory.
 *  2. Every slot that the daemon gave is committed, aborted, or dies with the connection: also
 *     those of an answer that is refused or comes too late.
 *  3. Slots of a lost connection are never sent: another connection may use their numbers.
 *
 * Threads: the client's lock; a held slot is read without it.
 */
#include "client/client_slot.h"
#include "client/client_plan.h"
#include "proto/record.h"

#include <string.h>

enum {
    KEYS_FIELD = 3,
    TOKENS_FIELD = 5,
    RESERVE_MAX = 3072,       /* keys of one Reserve: their records fit any answer */
    RESERVE_TOKENS = 1 << 20, /* token ids of one Reserve */
    ABORT_MAX = 128,          /* slots of an Abort that is not waited for: needs no heap */
};

/* ---- life of a slot; lock held ---- */

void cst_slot_put(cistern_slot *slot) {
    slot->held = false;
    slot->data = NULL;
    cst_staging_unref(slot->staging);
    cst_client_space_unref(slot->space);
    cst_pool_put(&slot->client->slots, slot);
}

bool cst_slot_is_live(const cistern_slot *slot) {
    const struct cst_conn *conn = &slot->client->conn;

    return conn->up && slot->generation == conn->generation;
}

static cistern_slot *slot_get(cistern_space *space, uint32_t tokens) {
    cistern_client *c = space->client;
    cistern_slot *slot = cst_pool_get(&c->slots);

    if (!slot)
        return NULL;
    *slot = (cistern_slot){ .client = c,
                            .space = space,
                            .staging = c->map.staging,
                            .generation = c->conn.generation,
                            .size = space->descriptor->block_bytes,
                            .tokens = tokens };
    cst_list_init(&slot->link);
    cst_client_space_ref(space);
    cst_staging_ref(slot->staging);
    return slot;
}

void cst_slot_post_abort(cistern_client *c, uint8_t *ids, size_t n) {
    Cistern__V1__Abort message = CISTERN__V1__ABORT__INIT;

    message.slots = (ProtobufCBinaryData){ .data = ids, .len = 8 * n };
    if (n && !cst_post(c, &(struct cst_request){ .type = CST_MSG_ABORT, .message = &message.base }))
        cst_conn_lose(c, "the daemon does not read its socket");
}

/* ---- Reserve ---- */

struct reserve {
    struct cst_call call;
    cistern_space *space;
    cistern_slot **slots; /* n from the pool; those that were not given are put back */
    int32_t *statuses;
    uint32_t busy_ms; /* largest hint */
    size_t n;
};

/* Gives back every slot that an answer names. */
static void abort_records(cistern_client *c, const ProtobufCBinaryData *records) {
    uint8_t ids[8 * ABORT_MAX];
    size_t used = 0, size = sizeof(struct cst_slot_record);

    for (size_t i = 0; i + size <= records->len; i += size) {
        struct cst_slot_record record;

        memcpy(&record, records->data + i, size);
        if (cst_load16(&record.status))
            continue;
        memcpy(ids + 8 * used++, &record.slot, sizeof(record.slot));
        if (used == ABORT_MAX) {
            cst_slot_post_abort(c, ids, used);
            used = 0;
        }
    }
    cst_slot_post_abort(c, ids, used);
}

/* False: the record is a lie. */
static bool take_record(struct reserve *r, size_t i, const uint8_t *bytes) {
    struct cst_slot_record record;
    cistern_slot *slot = r->slots[i];
    uint64_t offset;

    memcpy(&record, bytes, sizeof(record));
    r->statuses[i] = cst_status_to_api(cst_load16(&record.status));
    r->busy_ms = CST_MAX(r->busy_ms, cst_load32(&record.busy_ms));
    if (r->statuses[i])
        return true;
    offset = cst_load64(&record.offset);
    if (cst_load64(&record.length) != slot->size || offset > slot->staging->lists ||
        slot->size > slot->staging->lists - offset)
        return false;
    slot->id = cst_load64(&record.slot);
    slot->data = slot->staging->data + offset;
    return true;
}

static int32_t reserve_reply(struct cst_call *call, const struct cst_packet *packet,
                             struct cst_fds *fds) {
    struct reserve *r = cst_container_of(call, struct reserve, call);
    const Cistern__V1__ReserveReply *reply = cst_reply_unpack(call, packet);
    size_t size = sizeof(struct cst_slot_record);
    bool ok = reply && reply->slots.len == r->n * size;

    for (size_t i = 0; ok && i < r->n; i++)
        ok = take_record(r, i, reply->slots.data + i * size);
    if (ok)
        return CISTERN_OK;
    if (reply)
        abort_records(call->client, &reply->slots);
    return cst_call_corrupt(call, "Reserve");
}

void cst_slot_late_reply(cistern_client *c, const struct cst_packet *packet) {
    struct cst_call call = { .client = c };
    const Cistern__V1__ReserveReply *reply = cst_reply_unpack(&call, packet);

    if (reply)
        abort_records(c, &reply->slots);
}

/* What one Reserve asks: n blocks from the first on. */
struct run {
    const uint8_t *parent, *keys, *tokens;
    size_t n, n_tokens;
};

static int32_t reserve_send(struct reserve *r, const struct run *run, enum cst_need need) {
    cistern_space *space = r->space;
    Cistern__V1__Reserve message = CISTERN__V1__RESERVE__INIT;
    struct cst_request request = { .type = CST_MSG_RESERVE, .message = &message.base };
    ProtobufCBinaryData keys = { run->n * CISTERN_KEY_SIZE, (uint8_t *)(uintptr_t)run->keys };
    Cistern__V1__ListRef keys_ref, tokens_ref;
    size_t used = 0;

    message.space = space->handle;
    if (!cst_client_space_is_flat(space))
        message.parent =
            (ProtobufCBinaryData){ CISTERN_KEY_SIZE, (uint8_t *)(uintptr_t)run->parent };
    if (need == CST_NEED_LISTS) {
        cst_plan_lay(space->client, &keys_ref, &used, keys.data, keys.len);
        message.keys_ref = &keys_ref;
        if (run->n_tokens) {
            cst_plan_lay(space->client, &tokens_ref, &used, run->tokens, 4 * run->n_tokens);
            message.tokens_ref = &tokens_ref;
        }
    } else if (run->n_tokens) {
        message.keys = keys;
        request.bulk_field = TOKENS_FIELD;
        request.bulk = run->tokens;
        request.bulk_size = 4 * run->n_tokens;
    } else {
        request.bulk_field = KEYS_FIELD;
        request.bulk = keys.data;
        request.bulk_size = keys.len;
    }
    return cst_call_run(space->client, &r->call, &request, 0);
}

static uint32_t tokens_of(const cistern_space *space, const struct run *run, size_t i) {
    size_t block = space->descriptor->block_tokens;

    return run->n_tokens ? (uint32_t)CST_MIN(block, run->n_tokens - i * block) : 0;
}

/* Entered. slots[i] is NULL unless statuses[i] is OK; on failure there are no slots. */
static int32_t reserve_run(struct reserve *r, const struct run *run, enum cst_need need) {
    int32_t status = CISTERN_OK;
    size_t got;

    for (got = 0; got < run->n && !status; got++) {
        r->slots[got] = slot_get(r->space, tokens_of(r->space, run, got));
        if (!r->slots[got])
            status = cst_client_fail_status(CISTERN_E_NO_MEMORY);
    }
    got -= status != CISTERN_OK;
    r->n = run->n;
    if (!status)
        status = reserve_send(r, run, need);
    for (size_t i = 0; i < got; i++) {
        if (status || r->statuses[i]) {
            cst_slot_put(r->slots[i]);
            r->slots[i] = NULL;
        } else {
            r->slots[i]->held = true;
        }
    }
    return status;
}

/* The part of the whole that begins at block `at`. */
static struct run run_from(const cistern_space *space, const struct run *whole, size_t at,
                           size_t take) {
    size_t block = space->descriptor->block_tokens;
    struct run run = { .parent = whole->parent,
                       .keys = whole->keys + at * CISTERN_KEY_SIZE,
                       .n = take };

    if (at)
        run.parent = run.keys - CISTERN_KEY_SIZE;
    if (whole->n_tokens) {
        run.tokens = whole->tokens + 4 * at * block;
        run.n_tokens = CST_MIN(take * block, whole->n_tokens - at * block);
    }
    return run;
}

static size_t reserve_max(const cistern_space *space) {
    return CST_MIN((size_t)RESERVE_MAX, (size_t)RESERVE_TOKENS / space->descriptor->block_tokens);
}

int32_t cst_reserve_check(const cistern_space *space, const uint32_t *tokens, size_t n_tokens,
                          size_t n) {
    size_t block = space->descriptor->block_tokens;

    if (cst_client_space_is_flat(space))
        return n_tokens ? cst_client_fail(CISTERN_E_BAD_ARGUMENT, "a flat space takes no tokens")
                        : CISTERN_OK;
    if (!tokens || n_tokens > n * block || n_tokens <= (n - 1) * block)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT,
                               "%zu blocks need %zu to %zu token ids, not %zu", n,
                               (n - 1) * block + 1, n * block, n_tokens);
    return CISTERN_OK;
}

int32_t cst_reserve(cistern_space *space, const uint8_t *parent, const uint8_t *keys,
                    const uint32_t *tokens, size_t n_tokens, size_t n, cistern_slot **slots,
                    int32_t *statuses, uint32_t *busy_ms) {
    struct run whole = { .parent = parent ? parent : space->root,
                         .keys = keys,
                         .tokens = (const uint8_t *)tokens,
                         .n_tokens = n_tokens,
                         .n = n };
    int32_t status = CISTERN_OK;
    size_t done = 0;

    *busy_ms = 0;
    while (!status && done < n) {
        struct reserve r = { .call = CST_CALL_INIT(reserve_reply),
                             .space = space,
                             .slots = slots + done,
                             .statuses = statuses + done };
        struct cst_plan plan = {
            .n = CST_MIN(n - done, reserve_max(space)),
            .key_bytes = CISTERN_KEY_SIZE + (n_tokens ? 4 * space->descriptor->block_tokens : 0),
            .reply_bytes = sizeof(struct cst_slot_record),
            .other_bytes = CISTERN_KEY_SIZE,
            .need = CST_NEED_STAGING,
        };
        struct run run;

        status = cst_plan_enter(space->client, space, &plan);
        if (status)
            break;
        run = run_from(space, &whole, done, plan.take);
        status = reserve_run(&r, &run, plan.need);
        cst_leave(space->client, plan.need);
        *busy_ms = CST_MAX(*busy_ms, r.busy_ms);
        done += status ? 0 : plan.take;
    }
    if (status) {
        cistern_abort(space, slots, done);
        memset(slots, 0, n * sizeof(*slots));
    }
    return status;
}

CST_EXPORT int32_t cistern_reserve(cistern_space *space, const uint8_t *parent, const uint8_t *keys,
                                   const uint32_t *tokens, size_t n_tokens, size_t n,
                                   cistern_slot **slots, int32_t *statuses) {
    uint32_t busy_ms;
    int32_t status;

    if (!space)
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the space is NULL");
    if (n && (!keys || !slots || !statuses))
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "keys, slots or statuses is NULL");
    if (cst_check_fork(space->client))
        return CISTERN_E_FORKED;
    if (!n)
        return CISTERN_OK;
    status = cst_reserve_check(space, tokens, n_tokens, n);
    return status
               ? status
               : cst_reserve(space, parent, keys, tokens, n_tokens, n, slots, statuses, &busy_ms);
}

CST_EXPORT int32_t cistern_slot_data(cistern_slot *slot, void **data, size_t *size) {
    if (!slot || !slot->held)
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the slot is NULL, committed or aborted");
    if (cst_check_fork(slot->client))
        return CISTERN_E_FORKED;
    if (!data || !size)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "data or size is NULL");
    *data = slot->data;
    *size = slot->size;
    return CISTERN_OK;
}
