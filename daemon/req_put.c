/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reserve, Commit, Abort: writing blocks.
 *
 * In a token space each key is recomputed from its parent and its token ids before anything is
 * opened for it, so that no client can bind other tokens' bytes to a key.
 */
#include "daemon/call.h"

#include "daemon/slot.h"
#include "proto/key.h"

#include <string.h>

/* Keys, tokens and parent of a Reserve, checked for shape. */
struct chain {
    struct cst_keys keys;
    struct cst_tokens tokens;
    const uint8_t *parent;
    uint32_t block_tokens; /* 0: a flat space */
};

static bool read_chain(struct cst_call *call, const Cistern__V1__Reserve *reserve,
                       const struct cst_handle *handle, struct chain *out) {
    bool flat = cst_space_kind(handle->space) == CST_KIND_FLAT;
    size_t n;

    *out = (struct chain){ .parent = reserve->parent.data };
    out->block_tokens = flat ? 0 : cst_space_descriptor(handle->space)->block_tokens;
    if (!cst_call_keys(call, &reserve->keys, reserve->keys_ref, CST_RESERVE_KEYS_MAX, &out->keys) ||
        !cst_call_tokens(call, &reserve->tokens, reserve->tokens_ref, CST_TOKENS_MAX, &out->tokens))
        return false;
    n = flat ? 0 : (out->tokens.n + out->block_tokens - 1) / out->block_tokens;
    if (!out->keys.n)
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "Reserve names at least one key");
    else if (flat && (reserve->parent.len || out->tokens.n))
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "a flat space has no parents and no tokens");
    else if (!flat && reserve->parent.len != CST_KEY_SIZE)
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "a parent is a key of 32 bytes");
    else if (!flat && n != out->keys.n)
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "%zu token ids fill %zu blocks, not %zu",
                 out->tokens.n, n, out->keys.n);
    else
        return true;
    return false;
}

/* What the i-th key of the chain asks for; false if key and token ids disagree. */
static bool chain_link(const struct chain *chain, const struct cst_handle *handle, size_t i,
                       struct cst_slot_request *out) {
    uint8_t key[CST_KEY_SIZE];
    size_t first = i * chain->block_tokens;

    *out = (struct cst_slot_request){ .key = chain->keys.key + i * CST_KEY_SIZE };
    if (!chain->block_tokens)
        return true;
    out->parent = i ? out->key - CST_KEY_SIZE : chain->parent;
    out->is_root = !i && !memcmp(chain->parent, handle->root, CST_KEY_SIZE);
    out->tokens = chain->tokens.id + first;
    out->n_tokens = (uint32_t)CST_MIN(chain->tokens.n - first, (size_t)chain->block_tokens);
    cst_key_block(out->parent, out->tokens, out->n_tokens, NULL, 0, key);
    return !memcmp(key, out->key, CST_KEY_SIZE);
}

/* After one BUSY the rest is BUSY too: its blocks would hang under one that was not reserved. */
static void reserve_chain(const struct chain *chain, struct cst_handle *handle,
                          struct cst_slot_record *records) {
    bool full = false;

    for (size_t i = 0; i < chain->keys.n; i++) {
        struct cst_slot_request request;

        records[i] = (struct cst_slot_record){ 0 };
        if (full)
            cst_store16(&records[i].status, CST_STATUS_BUSY);
        else if (!chain_link(chain, handle, i, &request))
            cst_store16(&records[i].status, CST_STATUS_KEY_MISMATCH);
        else
            full = cst_slot_reserve(handle, &request, &records[i]) == CST_STATUS_BUSY;
    }
}

void cst_req_reserve(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Reserve *reserve = (const void *)message;
    Cistern__V1__ReserveReply reply = CISTERN__V1__RESERVE_REPLY__INIT;
    struct cst_handle *handle = cst_call_handle(call, reserve->space, CST_NEED_WRITE);
    struct cst_slot_record *records = (void *)call->server->scratch.records;
    const struct cst_staging *st = &call->session->staging;
    struct chain chain;

    if (!handle)
        return;
    if (st->state != CST_STAGING_READY)
        return cst_fail(call, CST_STATUS_BAD_STATE, "StagingGet comes before Reserve");
    if (cst_space_descriptor(handle->space)->block_bytes > st->lists)
        return cst_fail(call, CST_STATUS_TOO_LARGE,
                        "a block is larger than the staging slab of this connection");
    if (!read_chain(call, reserve, handle, &chain))
        return;
    reserve_chain(&chain, handle, records);
    reply.slots =
        (ProtobufCBinaryData){ .len = chain.keys.n * sizeof(*records), .data = (void *)records };
    cst_reply(call, &reply.base);
}

/* ---- commit ---- */

enum { F16_SIGN = 0x8000, F16_INFINITY = 0x7c00 };

/* Surprisals are finite and not negative; copied to aligned memory. */
static bool copy_surprisals(const uint8_t *data, size_t n, uint16_t *out) {
    for (size_t i = 0; i < n; i++) {
        out[i] = cst_load16(data + 2 * i);
        if ((out[i] & ~F16_SIGN) >= F16_INFINITY || (out[i] & F16_SIGN && out[i] != F16_SIGN))
            return false;
    }
    return true;
}

/* true and *out (NULL if there are none), or answered. */
static bool read_surprisals(struct cst_call *call, const Cistern__V1__Commit *commit, size_t n,
                            const uint16_t **out) {
    uint16_t *copy = (void *)call->server->scratch.tokens;
    uint64_t tokens = 0;

    *out = NULL;
    if (!commit->surprisals.len)
        return true;
    for (size_t i = 0; i < n; i++)
        tokens += cst_slot_tokens(call->session, cst_load64(commit->slots.data + 8 * i));
    if (commit->surprisals.len != 2 * tokens) {
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "the slots hold %llu tokens, so many surprisals",
                 (unsigned long long)tokens);
        return false;
    }
    if (!copy_surprisals(commit->surprisals.data, tokens, copy)) {
        cst_fail(call, CST_STATUS_BAD_ARGUMENT, "a surprisal is negative or not finite");
        return false;
    }
    *out = copy;
    return true;
}

void cst_req_commit(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Commit *commit = (const void *)message;
    const uint16_t *surprisals;
    size_t n;
    int status;

    if (!cst_call_ids(call, &commit->slots, CST_PACKET_MAX / 8, &n) ||
        !read_surprisals(call, commit, n, &surprisals))
        return;
    status = cst_slot_commit(call->session, call->request, commit->slots.data, n, surprisals);
    if (status)
        cst_fail(call, status, NULL);
}

void cst_req_abort(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Abort *abort = (const void *)message;
    Cistern__V1__AbortReply reply = CISTERN__V1__ABORT_REPLY__INIT;
    size_t n;

    if (!cst_call_ids(call, &abort->slots, CST_PACKET_MAX / 8, &n))
        return;
    for (size_t i = 0; i < n; i++)
        cst_slot_abort(call->session, cst_load64(abort->slots.data + 8 * i));
    cst_reply(call, &reply.base);
}
