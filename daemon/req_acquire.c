/* SPDX-License-Identifier: Apache-2.0 */
/* Acquire and Release: leases. Each key succeeds or fails by itself. */
#include "daemon/call.h"

#include "daemon/lease.h"

enum { MODE_PACKED = 1 };

static void release_ids(struct cst_session *s, const ProtobufCBinaryData *ids, size_t n) {
    for (size_t i = 0; i < n; i++)
        cst_lease_release(s, cst_load64(ids->data + i * sizeof(uint64_t)));
}

static bool check_acquire(struct cst_call *call, const Cistern__V1__Acquire *acquire,
                          const struct cst_handle *handle) {
    uint32_t layers = cst_space_descriptor(handle->space)->n_layers;

    if (acquire->mode > MODE_PACKED)
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "there is no mode %u", acquire->mode);
    else if (acquire->layer_count && (acquire->layer_first >= layers ||
                                      acquire->layer_count > layers - acquire->layer_first))
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "the space has %u layers", layers);
    else
        return true;
    return false;
}

void cst_req_acquire(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Acquire *acquire = (const void *)message;
    Cistern__V1__AcquireReply reply = CISTERN__V1__ACQUIRE_REPLY__INIT;
    struct cst_handle *handle = cst_call_handle(call, acquire->space, CST_NEED_READ);
    struct cst_lease_record *records = (void *)call->server->scratch.records;
    struct cst_keys keys;
    size_t n_release;

    if (!handle ||
        !cst_call_keys(call, &acquire->keys, acquire->keys_ref, CST_ACQUIRE_KEYS_MAX, &keys) ||
        !cst_call_ids(call, &acquire->release, CST_PACKET_MAX / 8, &n_release) ||
        !check_acquire(call, acquire, handle))
        return;
    release_ids(call->session, &acquire->release, n_release);
    for (size_t i = 0; i < keys.n; i++)
        cst_lease_acquire(handle, acquire->lease + i, keys.key + i * CST_KEY_SIZE,
                          acquire->mode == MODE_PACKED ? CST_FETCH_PACKED : CST_FETCH_DECODED,
                          &records[i]);
    reply.leases =
        (ProtobufCBinaryData){ .len = keys.n * sizeof(*records), .data = (void *)records };
    cst_reply(call, &reply.base);
}

void cst_req_release(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Release *release = (const void *)message;
    Cistern__V1__ReleaseReply reply = CISTERN__V1__RELEASE_REPLY__INIT;
    size_t n;

    if (!cst_call_ids(call, &release->leases, CST_PACKET_MAX / 8, &n))
        return;
    release_ids(call->session, &release->leases, n);
    cst_reply(call, &reply.base);
}
