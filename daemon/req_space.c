/* SPDX-License-Identifier: Apache-2.0 */
/* SpaceOpen, SpaceClose, Subscribe: handles of spaces. */
#include "daemon/call.h"

#include "daemon/event.h"
#include "daemon/upload.h"
#include "proto/key.h"

#include <stdio.h>
#include <string.h>

static void free_descriptor(struct cst_descriptor **desc) {
    *desc = cst_descriptor_free(*desc);
}

/* The namespace that the request names: its own, or the public one. NULL: answered. */
static struct cst_namespace *choose_namespace(struct cst_call *call, uint32_t scope) {
    struct cst_namespace *ns = NULL;
    int r;

    if (scope == 0)
        return call->session->tenant->ns;
    if (!call->server->config.public_writers.n) {
        cst_fail(call, CST_STATUS_UNSUPPORTED, "this daemon has no public namespace");
        return NULL;
    }
    r = cst_namespace_get(call->server->store, "public", &ns);
    if (r) {
        cst_fail_store(call, r);
        return NULL;
    }
    return ns;
}

static bool check_open(struct cst_call *call, const Cistern__V1__SpaceOpen *open) {
    if (open->kind >= CST_KINDS)
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "there is no kind %u", open->kind);
    else if (open->scope > 1)
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "there is no scope %u", open->scope);
    else if (open->quality_class >= CST_CLASSES)
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "there is no quality class %u",
                 open->quality_class);
    else if (open->quality_class > call->server->config.quality_class)
        cst_fail(call, CST_STATUS_DENIED, "the daemon's configuration asks for a stricter class");
    else if (open->salt.len > CST_SALT_MAX)
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "a salt has at most %d bytes", CST_SALT_MAX);
    else
        return true;
    return false;
}

static bool may_write(const struct cst_call *call, const Cistern__V1__SpaceOpen *open) {
    return !open->scope ||
           cst_uids_have(&call->server->config.public_writers, call->session->peer.uid);
}

struct census {
    const Cistern__V1__SpaceOpen *open;
    const uint8_t *fingerprint;
    size_t n;
    bool found;
};

static void count_space(struct cst_space *space, void *arg) {
    struct census *c = arg;

    c->n++;
    c->found |= !memcmp(cst_space_fingerprint(space), c->fingerprint, 32) &&
                (uint32_t)cst_space_kind(space) == c->open->kind &&
                (uint32_t)cst_space_class(space) == c->open->quality_class;
}

/* Those who may only read the public namespace open what is there, and make new spaces in half of
 * the places: the others stay for those who fill it. */
static bool may_make(const struct cst_call *call, const Cistern__V1__SpaceOpen *open,
                     struct cst_namespace *ns, const uint8_t fingerprint[32]) {
    struct census census = { .open = open, .fingerprint = fingerprint };

    if (may_write(call, open))
        return true;
    cst_store_for_each_space(call->server->store, ns, count_space, &census);
    return census.found || census.n < call->server->config.spaces / 2;
}

/* Finds or makes the space and a handle for it. NULL: answered. */
static struct cst_handle *open_space(struct cst_call *call, const Cistern__V1__SpaceOpen *open,
                                     struct cst_namespace *ns, struct cst_descriptor **desc) {
    struct cst_space *space = NULL;
    struct cst_handle *handle;
    uint8_t fingerprint[32];
    int r;

    cst_descriptor_fingerprint(open->descriptor.data, open->descriptor.len, fingerprint);
    if (!may_make(call, open, ns, fingerprint)) {
        cst_fail(call, CST_STATUS_QUOTA, "the public namespace has too many spaces");
        return NULL;
    }
    r = cst_space_open(&space, ns, desc, cst_descriptor_free, fingerprint,
                       (enum cst_kind)open->kind, (enum cst_class)open->quality_class);
    if (r) {
        cst_fail_store(call, r);
        return NULL;
    }
    r = cst_handle_new_consume(&handle, call->session, space, open->salt.data,
                               (uint32_t)open->salt.len);
    if (r) {
        (void)cst_space_unref(space);
        if (r == CST_QUOTA_E_FULL)
            cst_fail(call, CST_STATUS_QUOTA, "too many open spaces");
        else
            cst_fail_store(call, r);
        return NULL;
    }
    return handle;
}

void cst_req_space_open(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__SpaceOpen *open = (const void *)message;
    Cistern__V1__SpaceOpenReply reply = CISTERN__V1__SPACE_OPEN_REPLY__INIT;
    struct cst_side_record sides[CST_SIDES_MAX];
    cst_auto(free_descriptor) struct cst_descriptor *desc = NULL;
    struct cst_namespace *ns;
    struct cst_handle *handle;
    char text[256];
    int r;

    if (!check_open(call, open))
        return;
    r = cst_descriptor_decode(&desc, open->descriptor.data, open->descriptor.len, text,
                              sizeof(text));
    if (r == CST_DESCRIPTOR_E_INVALID)
        return cst_fail(call, CST_STATUS_BAD_DESCRIPTOR, "%s", text);
    if (r)
        return cst_fail_store(call, r);
    ns = choose_namespace(call, open->scope);
    handle = ns ? open_space(call, open, ns, &desc) : NULL;
    if (!handle)
        return;
    handle->writable = may_write(call, open);
    reply.space = handle->id;
    reply.block_bytes = cst_space_descriptor(handle->space)->block_bytes;
    reply.block_tokens = cst_space_descriptor(handle->space)->block_tokens;
    reply.presets = cst_space_presets(handle->space);
    reply.sides =
        (ProtobufCBinaryData){ .len = cst_side_records(handle->space, sides) * sizeof(*sides),
                               .data = (void *)sides };
    reply.fingerprint =
        (ProtobufCBinaryData){ .len = 32,
                               .data = (uint8_t *)(uintptr_t)cst_space_fingerprint(handle->space) };
    cst_reply(call, &reply.base);
}

void cst_req_space_close(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__SpaceClose *close = (const void *)message;
    Cistern__V1__SpaceCloseReply reply = CISTERN__V1__SPACE_CLOSE_REPLY__INIT;
    struct cst_handle *handle = cst_call_handle(call, close->space, CST_NEED_VIEW);

    if (!handle)
        return;
    cst_event_unsubscribe(handle);
    cst_handle_close(handle);
    cst_reply(call, &reply.base);
}

void cst_req_subscribe(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Subscribe *subscribe = (const void *)message;
    Cistern__V1__SubscribeReply reply = CISTERN__V1__SUBSCRIBE_REPLY__INIT;
    struct cst_handle *handle = cst_call_handle(call, subscribe->space, CST_NEED_READ);
    int r;

    if (!handle)
        return;
    r = cst_event_subscribe(handle);
    if (r == CST_QUOTA_E_FULL)
        return cst_fail(call, CST_STATUS_QUOTA, "too many subscriptions");
    if (r)
        return cst_fail_store(call, r);
    cst_reply(call, &reply.base);
}
