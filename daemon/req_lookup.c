/* SPDX-License-Identifier: Apache-2.0 */
/* Lookup, LookupEach, Explain: what is stored. Nothing here changes anything but counters; a
 * Lookup may bring blocks from disk to memory (disk_prefetch). */
#include "daemon/call.h"

#include "proto/record.h"

#include <string.h>

/* Run-length encoding. What does not fit is left out: its tier is not told. */
static size_t encode_tiers(const uint8_t *tiers, size_t n, struct cst_tier_run *runs, size_t max) {
    size_t count = 0;

    for (size_t i = 0; i < n && count < max; count++) {
        size_t first = i;

        while (++i < n && tiers[i] == tiers[first])
            ;
        runs[count].tier = tiers[first];
        cst_store32(&runs[count].count, (uint32_t)(i - first));
    }
    return count;
}

/* `parent` is a key or absent. */
static bool check_parent(struct cst_call *call, const ProtobufCBinaryData *parent) {
    if (!parent->len || parent->len == CST_KEY_SIZE)
        return true;
    cst_fail(call, CST_STATUS_BAD_ARGUMENT, "a parent is a key of 32 bytes");
    return false;
}

static void reply_lookup(struct cst_call *call, struct cst_lookup *found, bool brief) {
    enum { RUNS_MAX = (CST_PACKET_MAX - 256) / sizeof(struct cst_tier_run) };
    Cistern__V1__LookupReply reply = CISTERN__V1__LOOKUP_REPLY__INIT;
    struct cst_tier_run *runs = (void *)call->server->scratch.records;
    const uint8_t *tiers = call->server->scratch.tiers;

    reply.present = (uint32_t)found->present;
    if (!brief) {
        reply.tiers.data = (void *)runs;
        reply.tiers.len = encode_tiers(tiers, found->present, runs, RUNS_MAX) * sizeof(*runs);
    }
    reply.cost_ns = found->cost_ns;
    reply.worst_tier = (uint32_t)found->worst_tier;
    reply.partial_tokens = found->partial_tokens;
    if (found->partial_tokens) {
        reply.partial_stored = found->partial_stored;
        reply.partial_tier = (uint32_t)found->partial_tier;
        reply.partial_key =
            (ProtobufCBinaryData){ .len = CST_KEY_SIZE, .data = found->partial_key };
    }
    cst_reply(call, &reply.base);
}

void cst_req_lookup(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Lookup *lookup = (const void *)message;
    struct cst_handle *handle = cst_call_handle(call, lookup->space, CST_NEED_READ);
    struct cst_lookup found = { 0 };
    struct cst_tokens tail;
    struct cst_keys keys;

    if (!handle || !check_parent(call, &lookup->parent) ||
        !cst_call_keys(call, &lookup->keys, lookup->keys_ref, CST_KEYS_MAX, &keys) ||
        !cst_call_tokens(call, &lookup->tail, NULL,
                         cst_space_descriptor(handle->space)->block_tokens, &tail))
        return;
    if (cst_space_kind(handle->space) != CST_KIND_TOKENS)
        return cst_fail(call, CST_STATUS_BAD_ARGUMENT, "a flat space is asked with LookupEach");
    cst_space_lookup(handle->space, keys.key, keys.n,
                     lookup->parent.len ? lookup->parent.data : handle->root, tail.id,
                     (uint32_t)tail.n, lookup->brief ? NULL : call->server->scratch.tiers, &found);
    cst_space_prefetch(handle->space, keys.key, found.present);
    if (found.partial_tokens)
        cst_space_prefetch(handle->space, found.partial_key, 1);
    reply_lookup(call, &found, lookup->brief);
}

void cst_req_lookup_each(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__LookupEach *lookup = (const void *)message;
    Cistern__V1__LookupEachReply reply = CISTERN__V1__LOOKUP_EACH_REPLY__INIT;
    struct cst_handle *handle = cst_call_handle(call, lookup->space, CST_NEED_READ);
    struct cst_scratch *scratch = &call->server->scratch;
    struct cst_keys keys;

    if (!handle || !cst_call_keys(call, &lookup->keys, lookup->keys_ref, CST_KEYS_MAX, &keys))
        return;
    (void)cst_space_lookup_each(handle->space, keys.key, keys.n, scratch->tiers);
    reply.bitmap = (ProtobufCBinaryData){ .len = (keys.n + 7) / 8, .data = scratch->records };
    reply.tiers = (ProtobufCBinaryData){ .len = keys.n, .data = scratch->tiers };
    memset(scratch->records, 0, reply.bitmap.len);
    for (size_t i = 0; i < keys.n; i++)
        scratch->records[i / 8] |= (uint8_t)((scratch->tiers[i] != CST_TIER_NONE) << i % 8);
    cst_reply(call, &reply.base);
}

void cst_req_explain(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Explain *explain = (const void *)message;
    Cistern__V1__ExplainReply reply = CISTERN__V1__EXPLAIN_REPLY__INIT;
    struct cst_handle *handle = cst_call_handle(call, explain->space, CST_NEED_VIEW);
    struct cst_explanation out = { 0 };
    struct cst_tokens tail;
    struct cst_keys keys;

    if (!handle || !cst_call_keys(call, &explain->keys, explain->keys_ref, CST_KEYS_MAX, &keys) ||
        !cst_call_tokens(call, &explain->tail, NULL,
                         cst_space_descriptor(handle->space)->block_tokens, &tail))
        return;
    cst_space_explain(handle->space, handle->root, keys.key, keys.n, tail.id, (uint32_t)tail.n,
                      &out);
    reply.present = (uint32_t)out.present;
    reply.reason = out.reason;
    reply.field = out.field;
    if (out.has_nearest)
        reply.nearest = (ProtobufCBinaryData){ .len = sizeof(out.nearest), .data = out.nearest };
    reply.nearest_present = (uint32_t)out.nearest_present;
    cst_reply(call, &reply.base);
}
