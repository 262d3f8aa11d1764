/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns nothing: touch, pin, unpin, erase, explain, stats. Each is one request, or several when the
 * keys don't fit a packet; an error ends the rest.
 */
#include "base/mem.h"
#include "client/client_plan.h"
#include "proto/key.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { KEYS_FIELD = 2 };

/* ---- Touch, Pin, Unpin, Erase: space, keys -> statuses ---- */

struct care {
    struct cst_call call;
    size_t n;
    uint64_t blocks;
    int32_t first_error; /* of the keys' statuses, misses apart */
    bool missed;         /* a key was not found */
};

static int32_t care_reply(struct cst_call *call, const struct cst_packet *packet,
                          struct cst_fds *fds) {
    struct care *care = cst_container_of(call, struct care, call);
    const Cistern__V1__KeysReply *reply = cst_reply_unpack(call, packet);

    if (!reply || reply->statuses.len != 2 * care->n)
        return cst_call_corrupt(call, "KeysReply");
    for (size_t i = 0; i < care->n; i++) {
        int32_t status = cst_status_to_api(cst_load16(reply->statuses.data + 2 * i));

        if (status == CISTERN_E_NOT_FOUND)
            care->missed = true;
        else if (!care->first_error)
            care->first_error = status;
    }
    care->blocks += reply->blocks;
    return CISTERN_OK;
}

/* The four messages begin alike but are four types. */
union care_message {
    ProtobufCMessage base;
    Cistern__V1__Touch touch;
    Cistern__V1__Pin pin;
    Cistern__V1__Unpin unpin;
    Cistern__V1__Erase erase;
};

static void care_message_fill(union care_message *m, uint16_t type, uint32_t space, uint64_t ttl_ms,
                              bool all) {
    if (type == CST_MSG_TOUCH) {
        m->touch = (Cistern__V1__Touch)CISTERN__V1__TOUCH__INIT;
        m->touch.space = space;
    } else if (type == CST_MSG_PIN) {
        m->pin = (Cistern__V1__Pin)CISTERN__V1__PIN__INIT;
        m->pin.space = space;
        m->pin.ttl_ms = ttl_ms;
    } else if (type == CST_MSG_UNPIN) {
        m->unpin = (Cistern__V1__Unpin)CISTERN__V1__UNPIN__INIT;
        m->unpin.space = space;
    } else {
        m->erase = (Cistern__V1__Erase)CISTERN__V1__ERASE__INIT;
        m->erase.space = space;
        m->erase.all = all;
    }
}

static int32_t care_once(cistern_space *space, uint16_t type, const uint8_t *keys, size_t *n,
                         uint64_t ttl_ms, struct care *care) {
    struct cst_plan plan = { .n = CST_MAX(*n, (size_t)1),
                             .key_bytes = CISTERN_KEY_SIZE,
                             .reply_bytes = 2,
                             .in_packet = true };
    struct cst_request request = { .type = type, .bulk_field = KEYS_FIELD, .bulk = keys };
    union care_message message;
    int32_t status = cst_plan_enter(space->client, space, &plan);

    if (status)
        return status;
    care->call = (struct cst_call)CST_CALL_INIT(care_reply);
    *n = care->n = CST_MIN(*n, plan.take);
    care_message_fill(&message, type, space->handle, ttl_ms, !*n);
    request.message = &message.base;
    request.bulk_size = *n * CISTERN_KEY_SIZE;
    status = cst_call_run(space->client, &care->call, &request, 0);
    cst_leave(space->client, plan.need);
    return status;
}

static int32_t care_check(const cistern_space *space, const uint8_t *keys, size_t n) {
    if (!space)
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the space is NULL");
    if (n && !keys)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "keys is NULL");
    return cst_check_fork(space->client);
}

static int32_t care_run(cistern_space *space, uint16_t type, const uint8_t *keys, size_t n,
                        uint64_t ttl_ms, struct care *care) {
    int32_t status = care_check(space, keys, n);

    for (size_t done = 0; !status && done < n;) {
        size_t take = n - done;

        status = care_once(space, type, keys + done * CISTERN_KEY_SIZE, &take, ttl_ms, care);
        done += take;
    }
    if (!status && care->first_error)
        status = cst_client_fail_status(care->first_error);
    return status;
}

CST_EXPORT int32_t cistern_touch(cistern_space *space, const uint8_t *keys, size_t n) {
    struct care care = { .n = 0 };

    return care_run(space, CST_MSG_TOUCH, keys, n, 0, &care);
}

CST_EXPORT int32_t cistern_pin(cistern_space *space, const uint8_t *keys, size_t n,
                               uint64_t ttl_ms) {
    struct care care = { .n = 0 };
    int32_t status = care_run(space, CST_MSG_PIN, keys, n, ttl_ms, &care);

    return !status && care.missed ? cst_client_fail_status(CISTERN_E_NOT_FOUND) : status;
}

CST_EXPORT int32_t cistern_unpin(cistern_space *space, const uint8_t *keys, size_t n) {
    struct care care = { .n = 0 };

    return care_run(space, CST_MSG_UNPIN, keys, n, 0, &care);
}

CST_EXPORT int32_t cistern_erase(cistern_space *space, const uint8_t *keys, size_t n,
                                 uint64_t *n_erased) {
    struct care care = { .n = 0 };
    int32_t status = care_check(space, keys, n);
    size_t none = 0;

    if (!status)
        status = n ? care_run(space, CST_MSG_ERASE, keys, n, 0, &care)
                   : care_once(space, CST_MSG_ERASE, NULL, &none, 0, &care);
    if (!status && n_erased)
        *n_erased = care.blocks;
    return status;
}

/* ---- Explain ---- */

struct explain {
    struct cst_call call;
    char *text;
    size_t cap;
};

static int32_t explain_reply(struct cst_call *call, const struct cst_packet *packet,
                             struct cst_fds *fds) {
    struct explain *explain = cst_container_of(call, struct explain, call);
    const Cistern__V1__ExplainReply *reply = cst_reply_unpack(call, packet);

    if (!reply)
        return cst_call_corrupt(call, "Explain");
    (void)snprintf(explain->text, explain->cap, "%s", reply->reason);
    return CISTERN_OK;
}

/* n keys and the ids behind them; keys that don't fit are left out with the ids. */
static int32_t explain_run(cistern_space *space, struct explain *explain, const uint8_t *keys,
                           size_t n, const uint32_t *tail, size_t n_tail) {
    Cistern__V1__Explain message = CISTERN__V1__EXPLAIN__INIT;
    struct cst_request request = { .type = CST_MSG_EXPLAIN, .message = &message.base };
    struct cst_plan plan = { .n = CST_MAX(n, (size_t)1),
                             .key_bytes = CISTERN_KEY_SIZE,
                             .reply_bytes = 1,
                             .other_bytes = 4 * n_tail };
    Cistern__V1__ListRef ref;
    size_t used = 0, take;
    int32_t status = cst_plan_enter(space->client, space, &plan);

    if (status)
        return status;
    take = CST_MIN(n, plan.take);
    message.space = space->handle;
    if (take == n)
        message.tail = (ProtobufCBinaryData){ 4 * n_tail, (uint8_t *)(uintptr_t)tail };
    if (plan.need == CST_NEED_LISTS) {
        cst_plan_lay(space->client, &ref, &used, keys, take * CISTERN_KEY_SIZE);
        message.keys_ref = &ref;
    } else {
        request.bulk_field = KEYS_FIELD;
        request.bulk = keys;
        request.bulk_size = take * CISTERN_KEY_SIZE;
    }
    status = cst_call_run(space->client, &explain->call, &request, 0);
    cst_leave(space->client, plan.need);
    return status;
}

CST_EXPORT int32_t cistern_explain(cistern_space *space, const uint32_t *tokens, size_t n_tokens,
                                   char *text, size_t cap) {
    struct explain explain = { .call = CST_CALL_INIT(explain_reply), .text = text, .cap = cap };
    cst_auto(cst_freep) uint8_t *keys = NULL;
    int32_t status = care_check(space, (const uint8_t *)tokens, n_tokens);
    uint32_t block;
    size_t n;

    if (status)
        return status;
    if (!text || !cap)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "text is NULL or has no room");
    block = space->descriptor->block_tokens;
    n = n_tokens / block;
    keys = cst_malloc(n * CISTERN_KEY_SIZE);
    if (!keys)
        return cst_client_fail_status(CISTERN_E_NO_MEMORY);
    if (n)
        cst_key_chain(space->root, tokens, n * block, block, keys);
    return explain_run(space, &explain, keys, n, n_tokens ? tokens + n * block : NULL,
                       n_tokens % block);
}

/* ---- Stats ---- */

struct stats {
    struct cst_call call;
    char *json;
    size_t cap;
};

/* Appends to a terminated string; false: no room. */
static bool append(char *out, size_t cap, size_t *n, const char *fmt, ...) CST_PRINTF(4, 5);
static bool append(char *out, size_t cap, size_t *n, const char *fmt, ...) {
    va_list ap;
    int w;

    va_start(ap, fmt);
    w = vsnprintf(out + *n, cap - *n, fmt, ap);
    va_end(ap);
    if (w < 0 || (size_t)w >= cap - *n)
        return false;
    *n += (size_t)w;
    return true;
}

/* Every field of the message is a uint64: written by the message's own description, so a counter
 * that the message gains needs no code here. */
static int32_t stats_reply(struct cst_call *call, const struct cst_packet *packet,
                           struct cst_fds *fds) {
    struct stats *stats = cst_container_of(call, struct stats, call);
    const ProtobufCMessage *reply = cst_reply_unpack(call, packet);
    size_t n = 0;
    bool ok;

    if (!reply)
        return cst_call_corrupt(call, "Stats");
    ok = append(stats->json, stats->cap, &n, "{");
    for (unsigned i = 0; ok && i < reply->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &reply->descriptor->fields[i];
        uint64_t value;

        if (field->type != PROTOBUF_C_TYPE_UINT64)
            continue;
        memcpy(&value, (const char *)reply + field->offset, sizeof(value));
        ok = append(stats->json, stats->cap, &n, "%s\"%s\":%" PRIu64, n > 1 ? "," : "", field->name,
                    value);
    }
    if (ok && append(stats->json, stats->cap, &n, "}"))
        return CISTERN_OK;
    (void)snprintf(call->text, sizeof(call->text), "the text has no room for the counters");
    return CISTERN_E_TOO_LARGE;
}

CST_EXPORT int32_t cistern_stats(cistern_client *client, cistern_space *space, char *json,
                                 size_t cap) {
    struct stats stats = { .call = CST_CALL_INIT(stats_reply), .json = json, .cap = cap };
    Cistern__V1__Stats message = CISTERN__V1__STATS__INIT;
    int32_t status;

    if (!client || (space && space->client != client))
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the client is NULL or not the space's");
    if (!json || !cap)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "json is NULL or has no room");
    status = cst_enter(client, space, CST_NEED_NOTHING);
    if (status)
        return status;
    message.space = space ? space->handle : 0;
    status =
        cst_call_run(client, &stats.call,
                     &(struct cst_request){ .type = CST_MSG_STATS, .message = &message.base }, 0);
    cst_leave(client, CST_NEED_NOTHING);
    return status;
}
