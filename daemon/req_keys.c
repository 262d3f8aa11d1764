/* SPDX-License-Identifier: Apache-2.0 */
/* Touch, Pin, Unpin, Erase: one status a key. */
#include "daemon/call.h"

static void reply_statuses(struct cst_call *call, size_t n, uint64_t blocks) {
    Cistern__V1__KeysReply reply = CISTERN__V1__KEYS_REPLY__INIT;

    reply.statuses =
        (ProtobufCBinaryData){ .len = n * sizeof(uint16_t), .data = call->server->scratch.records };
    reply.blocks = blocks;
    cst_reply(call, &reply.base);
}

/* Counts what succeeded. */
static uint64_t put_status(struct cst_call *call, size_t i, int r) {
    cst_store16(call->server->scratch.records + i * sizeof(uint16_t), (uint16_t)cst_status_of(r));
    return !r;
}

void cst_req_touch(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Touch *touch = (const void *)message;
    struct cst_handle *handle = cst_call_handle(call, touch->space, CST_NEED_READ);
    struct cst_keys keys;
    uint64_t blocks = 0;

    if (!handle || !cst_call_keys(call, &touch->keys, NULL, CST_KEYS_MAX, &keys))
        return;
    for (size_t i = 0; i < keys.n; i++)
        blocks += put_status(call, i, cst_space_touch(handle->space, keys.key + i * CST_KEY_SIZE));
    reply_statuses(call, keys.n, blocks);
}

void cst_req_pin(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Pin *pin = (const void *)message;
    struct cst_handle *handle = cst_call_handle(call, pin->space, CST_NEED_WRITE);
    struct cst_keys keys;
    uint64_t blocks = 0, ttl_ns;

    if (!handle || !cst_call_keys(call, &pin->keys, NULL, CST_KEYS_MAX, &keys))
        return;
    ttl_ns =
        pin->ttl_ms > UINT64_MAX / 2 / CST_NS_PER_MS ? UINT64_MAX / 2 : pin->ttl_ms * CST_NS_PER_MS;
    for (size_t i = 0; i < keys.n; i++)
        blocks +=
            put_status(call, i, cst_space_pin(handle->space, keys.key + i * CST_KEY_SIZE, ttl_ns));
    reply_statuses(call, keys.n, blocks);
}

void cst_req_unpin(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Unpin *unpin = (const void *)message;
    struct cst_handle *handle = cst_call_handle(call, unpin->space, CST_NEED_WRITE);
    struct cst_keys keys;
    uint64_t blocks = 0;

    if (!handle || !cst_call_keys(call, &unpin->keys, NULL, CST_KEYS_MAX, &keys))
        return;
    for (size_t i = 0; i < keys.n; i++)
        blocks += put_status(call, i, cst_space_unpin(handle->space, keys.key + i * CST_KEY_SIZE));
    reply_statuses(call, keys.n, blocks);
}

void cst_req_erase(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Erase *erase = (const void *)message;
    struct cst_handle *handle = cst_call_handle(call, erase->space, CST_NEED_VIEW);
    struct cst_keys keys;
    uint64_t blocks = 0;

    if (!handle || !cst_call_keys(call, &erase->keys, NULL, CST_KEYS_MAX, &keys))
        return;
    if (!handle->writable)
        return cst_fail(call, CST_STATUS_DENIED, "this user may not fill the public namespace");
    if (erase->all > 1 || (erase->all && keys.n))
        return cst_fail(call, CST_STATUS_BAD_ARGUMENT, "Erase names keys or says all");
    if (erase->all)
        blocks = cst_space_clear(handle->space);
    for (size_t i = 0; i < keys.n; i++) {
        uint64_t erased = 0;

        (void)put_status(call, i,
                         cst_space_erase(handle->space, keys.key + i * CST_KEY_SIZE, &erased));
        blocks += erased;
    }
    reply_statuses(call, keys.n, blocks);
}
