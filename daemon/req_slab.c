/* SPDX-License-Identifier: Apache-2.0 */
/* SlabGet, SlabDropped, StagingGet: descriptors on their way to the client. */
#include "daemon/call.h"

#include "daemon/share.h"
#include "proto/record.h"

static bool slab_ids(struct cst_call *call, const ProtobufCBinaryData *ids, size_t max, size_t *n) {
    *n = ids->len / sizeof(uint32_t);
    if (ids->len % sizeof(uint32_t))
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "a list of slabs has 4 bytes an id");
    else if (*n > max)
        cst_fail(call, CST_STATUS_TOO_LARGE, "at most %zu slabs a request", max);
    else
        return true;
    return false;
}

/* A slab that exists but belongs to others gets the answer of one that does not exist, and so does
 * a retired one: nothing can be leased in it, and its holders were already asked to drop it. */
static int hold_slab(struct cst_call *call, struct cst_slab *slab) {
    int r;

    if (!slab || slab->retired || !cst_handle_reads(call->session, slab->space))
        return CST_STATUS_NOT_FOUND;
    r = cst_share_hold(call->session, slab);
    return r == CST_QUOTA_E_FULL ? CST_STATUS_QUOTA : cst_status_of(r);
}

void cst_req_slab_get(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__SlabGet *get = (const void *)message;
    Cistern__V1__SlabGetReply reply = CISTERN__V1__SLAB_GET_REPLY__INIT;
    struct cst_slab_record *records = (void *)call->server->scratch.records;
    int fds[CST_PACKET_FDS_MAX];
    size_t n, n_fds = 0;

    if (!slab_ids(call, &get->slabs, CST_PACKET_FDS_MAX, &n))
        return;
    for (size_t i = 0; i < n; i++) {
        uint32_t id = cst_load32(get->slabs.data + i * sizeof(uint32_t));
        struct cst_slab *slab =
            cst_store_slab(call->server->store, cst_share_slab_id(call->server, id));
        int status = hold_slab(call, slab);

        records[i] = (struct cst_slab_record){ 0 };
        cst_store32(&records[i].slab, id);
        cst_store32(&records[i].status, (uint32_t)status);
        if (!status) {
            cst_store64(&records[i].size, slab->mem.size);
            fds[n_fds++] = slab->mem.fd;
        }
    }
    reply.slabs = (ProtobufCBinaryData){ .len = n * sizeof(*records), .data = (void *)records };
    cst_reply_borrowed_fds(call, &reply.base, fds, n_fds);
}

void cst_req_slab_dropped(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__SlabDropped *dropped = (const void *)message;
    Cistern__V1__SlabDroppedReply reply = CISTERN__V1__SLAB_DROPPED_REPLY__INIT;
    size_t n;

    if (!slab_ids(call, &dropped->slabs, CST_PACKET_MAX / sizeof(uint32_t), &n))
        return;
    for (size_t i = 0; i < n; i++) {
        uint32_t id = cst_load32(dropped->slabs.data + i * sizeof(uint32_t));

        cst_share_drop(call->session, cst_share_slab_id(call->server, id));
    }
    cst_reply(call, &reply.base);
}

static uint64_t largest_block(const struct cst_session *s) {
    uint64_t largest = 0;

    for (size_t i = 0; i < s->n_handles; i++)
        if (s->handles[i])
            largest = CST_MAX(largest, cst_space_descriptor(s->handles[i]->space)->block_bytes);
    return largest;
}

void cst_req_staging_get(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__StagingGet *get = (const void *)message;
    Cistern__V1__StagingGetReply reply = CISTERN__V1__STAGING_GET_REPLY__INIT;
    struct cst_staging *st = &call->session->staging;

    if (st->passed)
        return cst_fail(call, CST_STATUS_BAD_STATE, "the staging slab was passed already");
    if (!cst_call_staging(call, get->bytes, largest_block(call->session)))
        return;
    reply.size = st->size;
    reply.lists = st->lists;
    cst_reply_borrowed_fds(call, &reply.base, &st->mem.fd, 1);
    st->passed = true;
}
