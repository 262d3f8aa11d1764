/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SidedataGet, SidedataPut: learned tables of a space, in pieces through the list area of staging.
 *
 * Owns the uploads of sessions, one each: a buffer that pieces are copied into, charged as staging.
 * Invariants: 1. nothing is read from staging twice: a piece is copied once and looked at in the
 * copy, by a worker; 2. while that job is under way the upload holds a reference of its session and
 * of its handle, and takes no more pieces.
 */
#include "daemon/call.h"

#include "base/err.h"
#include "base/mem.h"
#include "daemon/upload.h"
#include "proto/record.h"

#include <errno.h>
#include <string.h>

struct cst_upload {
    struct cst_session *session;
    struct cst_handle *handle;
    struct cst_charge charge;
    struct cst_side_put put;
    uint32_t kind, request;
    uint64_t size, got;
    bool checking;
    uint8_t bytes[];
};

/* ---- get ---- */

/* A part of the list area of staging. NULL: answered. */
static uint8_t *list_area(struct cst_call *call, const Cistern__V1__ListRef *ref) {
    const struct cst_staging *st = &call->session->staging;

    if (st->state == CST_STAGING_READY && ref->offset >= st->lists && ref->offset <= st->size &&
        ref->length <= st->size - ref->offset)
        return st->mem.base + ref->offset;
    cst_fail(call, CST_STATUS_BAD_ARGUMENT, "the piece lies outside of the list area of staging");
    return NULL;
}

void cst_req_sidedata_get(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__SidedataGet *get = (const void *)message;
    Cistern__V1__SidedataGetReply reply = CISTERN__V1__SIDEDATA_GET_REPLY__INIT;
    struct cst_handle *handle = cst_call_handle(call, get->space, CST_NEED_READ);
    struct cst_side_info info;
    const uint8_t *bytes;
    uint8_t *to;

    if (!handle)
        return;
    bytes = cst_space_side_bytes(handle->space, get->version, &info);
    if (!bytes)
        return cst_fail(call, CST_STATUS_NOT_FOUND, "there are no such side data");
    if (get->into) {
        to = list_area(call, get->into);
        if (!to)
            return;
        if (get->offset < info.size)
            reply.length = CST_MIN(get->into->length, info.size - get->offset);
        memcpy(to, bytes + CST_MIN(get->offset, info.size), reply.length);
    }
    reply.version = info.version;
    reply.size = info.size;
    reply.sha256 = (ProtobufCBinaryData){ .len = sizeof(info.hash), .data = info.hash };
    cst_reply(call, &reply.base);
}

size_t cst_side_records(const struct cst_space *space, struct cst_side_record *out) {
    struct cst_side_info info[CST_SIDES_MAX];
    size_t n = cst_space_sides(space, info, CST_COUNT(info));

    for (size_t i = 0; i < n; i++) {
        out[i] = (struct cst_side_record){ 0 };
        cst_store32(&out[i].version, info[i].version);
        cst_store64(&out[i].size, info[i].size);
        memcpy(out[i].sha256, info[i].hash, sizeof(out[i].sha256));
    }
    return n;
}

/* ---- put ---- */

static void upload_free(struct cst_upload *u) {
    if (!u)
        return;
    u->session->upload = NULL;
    cst_charge_drop(&u->charge);
    cst_handle_unuse(u->handle);
    (void)cst_free(u);
}

void cst_upload_drop(struct cst_session *session) {
    if (session->upload && !session->upload->checking)
        upload_free(session->upload);
}

/* Whoever fills a space could spoil its tables for everybody else in its namespace, so this is
 * for those that the configuration names, or for the only user of the namespace. */
static bool may_put(const struct cst_call *call, const struct cst_handle *handle) {
    const struct cst_config *config = &call->server->config;
    uid_t uid = call->session->peer.uid;
    char own[32];

    if (config->side_data_uids.n)
        return cst_uids_have(&config->side_data_uids, uid);
    (void)snprintf(own, sizeof(own), "uid-%u", (unsigned)uid);
    return !strcmp(cst_namespace_name(cst_space_namespace(handle->space)), own);
}

/* The session's upload, empty. NULL: answered. */
static struct cst_upload *upload_new(struct cst_call *call, const Cistern__V1__SidedataPut *put,
                                     struct cst_handle *handle) {
    struct cst_charge charge = CST_CHARGE_NULL;
    struct cst_session *s = call->session;
    struct cst_upload *u;

    cst_upload_drop(s);
    if (put->size > call->server->config.side_data) {
        cst_fail(call, CST_STATUS_TOO_LARGE, "side data have at most %llu bytes",
                 (unsigned long long)call->server->config.side_data);
        return NULL;
    }
    if (cst_charge_take(&charge, &s->payer, CST_RES_STAGING, put->size)) {
        cst_fail(call, CST_STATUS_QUOTA, "no staging memory is left for this user");
        return NULL;
    }
    u = cst_calloc(1, sizeof(*u) + put->size);
    if (!u) {
        cst_charge_drop(&charge);
        cst_fail(call, CST_STATUS_NO_MEMORY, NULL);
        return NULL;
    }
    u->charge = charge;
    u->session = s;
    u->handle = handle;
    u->kind = put->kind;
    u->size = put->size;
    s->upload = u;
    cst_handle_use(handle);
    return u;
}

/* Answers for a store's condition. */
static void fail_put(struct cst_call *call, int r) {
    if (r == CST_STORE_E_BAD_SIDE)
        cst_fail(call, CST_STATUS_BAD_ARGUMENT,
                 "these are no side data for this space, or no newer version");
    else if (r == CST_STORE_E_NOT_FOUND)
        cst_fail(call, CST_STATUS_NOT_FOUND, "the space has no side data yet");
    else if (r == CST_STORE_E_LIMIT)
        cst_fail(call, CST_STATUS_QUOTA, "the space has too many side data");
    else
        cst_fail_store(call, r);
}

static void put_done(struct cst_side_put *put, int r) {
    struct cst_upload *u = cst_container_of(put, struct cst_upload, put);
    Cistern__V1__SidedataPutReply reply = CISTERN__V1__SIDEDATA_PUT_REPLY__INIT;
    struct cst_session *s = u->session;
    struct cst_call call = {
        .session = s, .server = s->server, .type = CST_MSG_SIDEDATA_PUT, .request = u->request
    };

    reply.version = put->version;
    upload_free(u);
    if (!s->ended && r)
        fail_put(&call, r);
    else if (!s->ended)
        cst_reply_later(s, CST_MSG_SIDEDATA_PUT, call.request, &reply.base);
    (void)cst_session_unref(s);
}

/* All pieces are there. */
static void check(struct cst_call *call, struct cst_upload *u) {
    int r;

    u->put.done = put_done;
    r = cst_space_side_put(u->handle->space, (enum cst_side_put_kind)u->kind, u->bytes, u->size,
                           &u->put);
    if (r) {
        upload_free(u);
        return fail_put(call, r);
    }
    u->request = call->request;
    u->checking = true;
    (void)cst_session_ref(u->session);
}

static bool follows(const struct cst_upload *u, const Cistern__V1__SidedataPut *put,
                    const struct cst_handle *handle) {
    return u && u->handle == handle && u->kind == put->kind && u->size == put->size &&
           u->got == put->offset;
}

void cst_req_sidedata_put(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__SidedataPut *put = (const void *)message;
    Cistern__V1__SidedataPutReply reply = CISTERN__V1__SIDEDATA_PUT_REPLY__INIT;
    struct cst_handle *handle = cst_call_handle(call, put->space, CST_NEED_WRITE);
    struct cst_upload *u = call->session->upload;
    const uint8_t *piece;

    if (!handle)
        return;
    if (!may_put(call, handle))
        return cst_fail(call, CST_STATUS_DENIED, "this user may not put side data");
    if (put->kind > CST_SIDE_PUT_WEIGHTS)
        return cst_fail(call, CST_STATUS_BAD_ARGUMENT, "there is no kind %u", put->kind);
    if (u && u->checking)
        return cst_fail(call, CST_STATUS_BUSY, "the last side data are still being checked");
    if (!put->data || !put->data->length)
        return cst_fail(call, CST_STATUS_BAD_ARGUMENT, "a piece has bytes in staging");
    piece = list_area(call, put->data);
    if (!piece)
        return;
    u = put->offset ? u : upload_new(call, put, handle);
    if (!put->offset && !u)
        return;
    if (!follows(u, put, handle) || put->data->length > u->size - u->got) {
        cst_upload_drop(call->session);
        return cst_fail(call, CST_STATUS_BAD_ARGUMENT, "the pieces don't follow each other");
    }
    memcpy(u->bytes + u->got, piece, put->data->length);
    u->got += put->data->length;
    if (u->got == u->size)
        return check(call, u);
    cst_reply(call, &reply.base);
}
