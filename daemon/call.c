/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From packet to handler, and how handlers read their arguments. Owns nothing.
 *
 * Invariants
 *   1. A handler sees only bytes that no client can change: the packet lies in our own buffer, and
 *      a list in staging is copied before anybody looks at it.
 *   2. Every packet is answered, or its session is doomed.
 */
#include "daemon/call.h"

#include "base/le.h"
#include "base/macros.h"

#include <string.h>

enum { KEY = CST_KEY_SIZE };

static const cst_request_fn handlers[] = {
#define R(NAME, number, request, reply) [number] = cst_req_##request,
#include "proto/message.def"
};

static bool is_allowed_before_hello(uint16_t type) {
    return type == CST_MSG_HELLO || type == CST_MSG_PING;
}

/* What gives memory back, and what only asks, goes on while the daemon stops. */
static bool is_allowed_while_draining(uint16_t type) {
    return type == CST_MSG_RELEASE || type == CST_MSG_SLAB_DROPPED || type == CST_MSG_ABORT ||
           type == CST_MSG_PING || type == CST_MSG_STATUS;
}

static void handle(struct cst_call *call, const struct cst_packet *packet) {
    const ProtobufCMessageDescriptor *desc = cst_message_descriptor(packet->type, false);
    struct cst_session *s = call->session;
    const ProtobufCMessage *message;

    if (packet->type >= CST_COUNT(handlers) || !handlers[packet->type] || !desc)
        return cst_fail(call, CST_STATUS_BAD_TYPE, NULL);
    if (packet->flags)
        return cst_fail(call, CST_STATUS_BAD_MESSAGE, "a request carries no flags");
    if (!s->greeted && !is_allowed_before_hello(packet->type))
        return cst_fail(call, CST_STATUS_BAD_STATE, "the first request is Hello");
    if (call->server->draining && !is_allowed_while_draining(packet->type))
        return cst_fail(call, CST_STATUS_DRAINING, NULL);
    cst_arena_reset(&call->server->scratch.arena);
    message =
        cst_message_unpack(desc, packet->payload, packet->length, &call->server->scratch.arena);
    if (!message)
        return cst_fail(call, CST_STATUS_BAD_MESSAGE, NULL);
    handlers[packet->type](call, message);
}

void cst_dispatch(struct cst_session *s, const uint8_t *data, size_t n) {
    struct cst_packet packet;
    int status = cst_packet_parse(&packet, data, n);
    struct cst_call call = { .session = s,
                             .server = s->server,
                             .packet = data,
                             .packet_len = n,
                             .type = packet.type,
                             .request = packet.request };

    s->server->requests++;
    cst_server_wake(s->server);
    if (s->refused) {
        cst_fail(&call, s->refused, "%s", s->refused_text);
        cst_session_doom(s, s->refused_text);
    } else if (!status) {
        handle(&call, &packet);
    } else {
        cst_fail(&call, status, NULL);
        if (status == CST_STATUS_BAD_MAGIC || status == CST_STATUS_BAD_LENGTH)
            cst_session_doom(s, "it does not speak the protocol");
    }
}

/* ---- arguments ---- */

struct cst_handle *cst_call_handle(struct cst_call *call, uint32_t id, enum cst_need need) {
    struct cst_handle *h = cst_handle_find(call->session, id);

    if (!h) {
        cst_fail(call, CST_STATUS_BAD_HANDLE, "this connection has no space %u", id);
    } else if (h->view && need != CST_NEED_VIEW) {
        cst_fail(call, CST_STATUS_DENIED, "this space belongs to another namespace");
        h = NULL;
    } else if (!h->writable && need == CST_NEED_WRITE) {
        cst_fail(call, CST_STATUS_DENIED, "this user may not fill the public namespace");
        h = NULL;
    }
    return h;
}

/* The bytes of a list, wherever it lies; copied to `copy` when it lies in staging. */
static bool list_bytes(struct cst_call *call, const ProtobufCBinaryData *bytes,
                       const Cistern__V1__ListRef *ref, size_t max, void *copy,
                       const uint8_t **data, size_t *len) {
    const struct cst_staging *st = &call->session->staging;

    *data = bytes->data;
    *len = bytes->len;
    if (ref && bytes->len) {
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "a list lies in the packet or in staging");
        return false;
    }
    if (ref && (st->state != CST_STAGING_READY || ref->offset > st->size ||
                ref->length > st->size - ref->offset)) {
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "the list lies outside of the staging slab");
        return false;
    }
    if ((ref ? ref->length : bytes->len) > max) {
        cst_fail(call, CST_STATUS_TOO_LARGE, "the list is longer than %zu bytes", max);
        return false;
    }
    if (ref) {
        memcpy(copy, st->mem.base + ref->offset, ref->length);
        *data = copy;
        *len = ref->length;
    }
    return true;
}

bool cst_call_keys(struct cst_call *call, const ProtobufCBinaryData *bytes,
                   const Cistern__V1__ListRef *ref, size_t max, struct cst_keys *out) {
    const uint8_t *data;
    size_t len;

    if (!list_bytes(call, bytes, ref, max * KEY, call->server->scratch.keys, &data, &len))
        return false;
    if (len % KEY) {
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "a list of keys has 32 bytes a key");
        return false;
    }
    *out = (struct cst_keys){ .key = data, .n = len / KEY };
    return true;
}

bool cst_call_tokens(struct cst_call *call, const ProtobufCBinaryData *bytes,
                     const Cistern__V1__ListRef *ref, size_t max, struct cst_tokens *out) {
    uint32_t *tokens = call->server->scratch.tokens;
    const uint8_t *data;
    size_t len;

    if (!list_bytes(call, bytes, ref, max * sizeof(*tokens), tokens, &data, &len))
        return false;
    if (len % sizeof(*tokens)) {
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "a list of token ids has 4 bytes a token");
        return false;
    }
    out->n = len / sizeof(*tokens);
    out->id = tokens;
    if (data != (const uint8_t *)tokens)
        for (size_t i = 0; i < out->n; i++)
            tokens[i] = cst_load32(data + i * sizeof(*tokens));
    return true;
}

bool cst_call_ids(struct cst_call *call, const ProtobufCBinaryData *bytes, size_t max, size_t *n) {
    if (bytes->len % sizeof(uint64_t)) {
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "a list of ids has 8 bytes an id");
        return false;
    }
    if (bytes->len / sizeof(uint64_t) > max) {
        cst_fail(call, CST_STATUS_TOO_LARGE, "a list has at most %zu ids", max);
        return false;
    }
    *n = bytes->len / sizeof(uint64_t);
    return true;
}

bool cst_call_staging(struct cst_call *call, uint64_t bytes, uint64_t block_bytes) {
    struct cst_session *s = call->session;
    int r = s->staging.error;

    if (s->staging.state == CST_STAGING_READY)
        return true;
    s->staging.error = 0;
    if (!r && s->staging.state == CST_STAGING_NONE)
        r = cst_staging_make(s, bytes, block_bytes);
    if (r == CST_QUOTA_E_FULL)
        cst_fail(call, CST_STATUS_QUOTA, "no staging memory is left for this user");
    else if (r) /* now, or in the job that this packet waited for */
        cst_fail_store(call, r);
    else if (!cst_session_park(s, call))
        cst_fail(call, CST_STATUS_NO_MEMORY, NULL);
    return false;
}
