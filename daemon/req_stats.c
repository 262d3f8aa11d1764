/* SPDX-License-Identifier: Apache-2.0 */
/* Stats, Status, Purge: numbers, and what administrators do. */
#include "daemon/call.h"

#include "daemon/share.h"

#include <string.h>
#include <unistd.h>

void cst_req_stats(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Stats *stats = (const void *)message;
    Cistern__V1__StatsReply reply = CISTERN__V1__STATS_REPLY__INIT;
    struct cst_space_stats now;

    if (stats->space) {
        struct cst_handle *handle = cst_call_handle(call, stats->space, CST_NEED_VIEW);

        if (!handle)
            return;
        cst_space_stats(handle->space, &now);
    } else {
        cst_namespace_stats(call->session->tenant->ns, &now);
    }
#define COPY(field) reply.field = now.field
    COPY(blocks);
    COPY(tail_blocks);
    COPY(hot_bytes);
    COPY(packed_bytes);
    COPY(packed_decoded_bytes);
    COPY(index_bytes);
    COPY(hot_slab_bytes);
    COPY(packed_slab_bytes);
    COPY(held_bytes);
    COPY(lookups);
    COPY(lookup_keys);
    COPY(hit_keys);
    COPY(acquires);
    COPY(served_blocks);
    COPY(served_bytes);
    COPY(served_tokens);
    COPY(stored_blocks);
    COPY(stored_bytes);
    COPY(evicted_blocks);
    COPY(detached_blocks);
    COPY(corrupt_blocks);
    COPY(expired_blocks);
    COPY(decodes);
    COPY(encodes);
    COPY(merged_fetches);
    COPY(busy);
    COPY(leases);
    COPY(reserved);
    COPY(pinned_blocks);
    COPY(fallbacks);
    COPY(recodes);
    COPY(side_bytes);
    COPY(sides_learned);
    COPY(sides_off_disk);
    COPY(cold_blocks);
    COPY(cold_bytes);
    COPY(spilled_blocks);
    COPY(spilled_bytes);
    COPY(cold_reads);
    COPY(recovered_blocks);
    COPY(prefetched_blocks);
    COPY(prefetch_used);
#undef COPY
    cst_reply(call, &reply.base);
}

static bool is_admin(struct cst_call *call) {
    if (call->session->admin)
        return true;
    cst_fail(call, CST_STATUS_DENIED, "only administrators may ask this");
    return false;
}

static void count_session(const struct cst_server *server, Cistern__V1__StatusReply *reply) {
    const struct cst_list *it;

    for (it = server->sessions.next; it != &server->sessions; it = it->next)
        reply->clients++;
}

static void tell_disk(const struct cst_server *server, Cistern__V1__StatusReply *reply) {
    struct cst_seg_stats s;
    struct cst_aio_stats io;

    if (!cst_store_disk_stats(server->store, &s))
        return;
    cst_aio_stats(server->disk.aio, &io);
    reply->disk_limit = s.bytes;
    reply->disk_used = s.record_bytes;
    reply->disk_records = s.records;
    reply->disk_read_bytes = s.read_bytes;
    reply->disk_written_bytes = s.stored_bytes;
    reply->disk_moved_bytes = s.moved_bytes;
    reply->disk_errors = s.errors;
    reply->disk_corrupt = s.corrupt;
    reply->disk_recovered = s.found;
    reply->disk_rejected = s.rejected;
    reply->disk_lost = s.lost;
    reply->disk_unused = (s.segments_retired + s.segments_foreign) * s.segment_bytes;
    reply->disk_retries = io.retries;
    reply->disk_evicted = s.evicted;
    reply->disk_io = (char *)(uintptr_t)cst_aio_name(server->disk.aio);
    reply->disk_off = s.off;
    reply->disk_encrypted = s.encrypted;
}

void cst_req_status(struct cst_call *call, const ProtobufCMessage *message) {
    Cistern__V1__StatusReply reply = CISTERN__V1__STATUS_REPLY__INIT;
    const struct cst_server *server = call->server;
    const struct cst_config *config = &server->config;
    struct cst_store_stats store;

    if (!is_admin(call))
        return;
    cst_store_stats(server->store, &store);
    reply.version = (char *)(uintptr_t)CST_DAEMON_VERSION;
    reply.epoch = server->epoch;
    reply.uptime_ms = (cst_now_ns(server->env.clock) - server->started_ns) / CST_NS_PER_MS;
    reply.staging_bytes = server->total.used[CST_RES_STAGING];
    reply.memory_limit = store.memory_limit;
    reply.memory_used = store.memory_used + reply.staging_bytes;
    reply.index_limit = store.index_limit;
    reply.index_used = store.index_used;
    reply.spaces = (uint32_t)store.spaces;
    reply.workers = (uint32_t)config->workers;
    reply.held_bytes = cst_share_held_bytes(call->server, NULL);
    reply.requests = server->requests;
    reply.errors = server->errors;
    reply.dropped_clients = server->dropped_clients;
    reply.policy = (char *)(uintptr_t)store.policy;
    reply.backend = (char *)(uintptr_t)server->env.mem->name;
    reply.pid = (uint32_t)getpid();
    reply.slabs = store.slabs;
    reply.leases = server->total.used[CST_RES_LEASES];
    reply.reserved = server->total.used[CST_RES_SLOTS];
    count_session(server, &reply);
    tell_disk(server, &reply);
    cst_reply(call, &reply.base);
}

/* ---- purge ---- */

/* A lease or a mapping can't be taken back: what clients still have of it is not erased yet. */
static const char *purge_result(const struct cst_namespace *ns, enum cst_purge result) {
    struct cst_space_stats left = { 0 };

    if (ns)
        cst_namespace_stats(ns, &left);
    return left.leases || left.held_bytes || result ? "unlinked" : "erased";
}

struct named {
    const char *name;
    struct cst_namespace *ns;
};

static void match_name(struct cst_space *space, void *arg) {
    struct cst_namespace *ns = cst_space_namespace(space);
    struct named *named = arg;

    if (!strcmp(cst_namespace_name(ns), named->name))
        named->ns = ns;
}

void cst_req_purge(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Purge *purge = (const void *)message;
    Cistern__V1__PurgeReply reply = CISTERN__V1__PURGE_REPLY__INIT;
    struct named named = { .name = purge->namespace_, .ns = call->session->tenant->ns };
    enum cst_purge result = CST_PURGE_ERASED;

    if (purge->namespace_[0]) { /* one's own namespace is everybody's right */
        if (!is_admin(call))
            return;
        named.ns = NULL;
        cst_store_for_each_space(call->server->store, NULL, match_name, &named);
    }
    if (named.ns)
        reply.blocks = cst_namespace_purge(named.ns, &result);
    if (result == CST_PURGE_FAILED) {
        cst_fail(call, CST_STATUS_INTERNAL,
                 "gone from memory, but the disk tier can't be written: what lies there may come "
                 "back with the next start, unless a purge goes well or the directory is emptied");
        return;
    }
    reply.result = (char *)(uintptr_t)purge_result(named.ns, result);
    cst_reply(call, &reply.base);
}
