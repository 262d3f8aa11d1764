/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A request on its way through the daemon: the handler's arguments, how it reads lists, how it
 * answers. Loop thread only. Each handler answers exactly once: now with cst_reply() or cst_fail(),
 * or later with cst_reply_later().
 */
#pragma once

#include "daemon/handle.h"
#include "daemon/session.h"
#include "proto/frame.h"
#include "proto/status.h"

#include <stdbool.h>

struct cst_call {
    struct cst_session *session;
    struct cst_server *server;
    const uint8_t *packet; /* whole, in memory that no client writes */
    size_t packet_len;
    uint16_t type;
    uint32_t request;
};

typedef void (*cst_request_fn)(struct cst_call *call, const ProtobufCMessage *message);

/* One handler for each request of message.def. */
#define R(NAME, number, request, reply)                                                            \
    void cst_req_##request(struct cst_call *call, const ProtobufCMessage *message);
#include "proto/message.def"

/* Parses, checks and handles one packet. */
void cst_dispatch(struct cst_session *session, const uint8_t *packet, size_t n);

/* ---- answers (answer.c) ---- */

void cst_reply(struct cst_call *call, const ProtobufCMessage *message);
void cst_reply_borrowed_fds(struct cst_call *call, const ProtobufCMessage *message, const int *fds,
                            size_t n);
void cst_reply_later(struct cst_session *session, uint16_t type, uint32_t request,
                     const ProtobufCMessage *message);

/* An error reply; fmt NULL: the status's own sentence. */
CST_COLD void cst_fail(struct cst_call *call, int status, const char *fmt, ...) CST_PRINTF(3, 4);
/* The same from a store condition or a negative errno. */
CST_COLD void cst_fail_store(struct cst_call *call, int r);

/* A client that can't take the push is doomed. */
void cst_push(struct cst_session *session, uint16_t type, const ProtobufCMessage *message);
/* Whether a push of about n bytes would be sent or queued without ending the session. */
bool cst_push_fits(const struct cst_session *session, size_t n);

/* Called when the socket takes output again; at the end of the session. */
void cst_output_flush(struct cst_session *session);
void cst_output_drop(struct cst_session *session);

/* The only place where a store condition or an errno becomes a status. */
int cst_status_of(int r);

/* ---- arguments (call.c): each answers the call itself when it returns NULL or false ---- */

enum cst_need {
    CST_NEED_VIEW = 0, /* counters and listings: handles that only watch are fine */
    CST_NEED_READ = 1,
    CST_NEED_WRITE = 2,
};
struct cst_handle *cst_call_handle(struct cst_call *call, uint32_t id, enum cst_need need);

struct cst_keys {
    const uint8_t *key; /* n x 32 bytes */
    size_t n;
};
/* From the packet, or copied out of staging. */
bool cst_call_keys(struct cst_call *call, const ProtobufCBinaryData *bytes,
                   const Cistern__V1__ListRef *ref, size_t max, struct cst_keys *out);

struct cst_tokens {
    const uint32_t *id; /* aligned copy */
    size_t n;
};
bool cst_call_tokens(struct cst_call *call, const ProtobufCBinaryData *bytes,
                     const Cistern__V1__ListRef *ref, size_t max, struct cst_tokens *out);

/* The session's staging slab is there: true. Else it is ordered (`bytes` and `block_bytes` as for
 * cst_staging_make), the packet parked until it is there, and false. */
bool cst_call_staging(struct cst_call *call, uint64_t bytes, uint64_t block_bytes);

/* u64le ids. */
bool cst_call_ids(struct cst_call *call, const ProtobufCBinaryData *bytes, size_t max, size_t *n);
