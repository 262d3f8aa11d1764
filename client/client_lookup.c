/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns nothing: the questions about what is stored.
 *
 * Invariants: 1. lookups change nothing, here or in the daemon; 2. without a daemon they answer
 * "nothing" and CISTERN_OK, the thread's last error says why; 3. an answer that claims more than
 * was asked is refused, so no caller indexes past its own prompt.
 */
#include "base/mem.h"
#include "client/client_plan.h"
#include "proto/key.h"
#include "proto/record.h"

#include <string.h>

enum { LOOKUP_KEYS_FIELD = 2, LOOKUP_EACH_KEYS_FIELD = 2 };

struct lookup {
    struct cst_call call;
    size_t n, n_tail; /* asked */
    uint8_t *tiers;   /* the caller's, n bytes, or NULL */
    cistern_match match;
};

/* ---- one Lookup ---- */

static bool read_tiers(struct lookup *l, const ProtobufCBinaryData *runs) {
    size_t at = 0;

    for (size_t i = 0; i + sizeof(struct cst_tier_run) <= runs->len;
         i += sizeof(struct cst_tier_run)) {
        struct cst_tier_run run;
        uint32_t count;

        memcpy(&run, runs->data + i, sizeof(run));
        count = cst_load32(&run.count);
        if (count > l->match.blocks - at)
            return false;
        if (l->tiers)
            memset(l->tiers + at, run.tier, count);
        at += count;
    }
    return at == (l->tiers ? l->match.blocks : 0);
}

static bool read_partial(struct lookup *l, const Cistern__V1__LookupReply *reply) {
    if (!reply->partial_tokens)
        return true;
    if (reply->partial_tokens > l->n_tail || reply->partial_stored < reply->partial_tokens ||
        reply->partial_key.len != CISTERN_KEY_SIZE)
        return false;
    l->match.partial_tokens = reply->partial_tokens;
    l->match.partial_stored = reply->partial_stored;
    l->match.partial_tier = reply->partial_tier;
    memcpy(l->match.partial_key, reply->partial_key.data, CISTERN_KEY_SIZE);
    return true;
}

static int32_t lookup_reply(struct cst_call *call, const struct cst_packet *packet,
                            struct cst_fds *fds) {
    struct lookup *l = cst_container_of(call, struct lookup, call);
    const Cistern__V1__LookupReply *reply = cst_reply_unpack(call, packet);

    if (!reply || reply->present > l->n)
        return cst_call_corrupt(call, "Lookup");
    l->match = (cistern_match){ .blocks = reply->present,
                                .cost_ns = reply->cost_ns,
                                .worst_tier = reply->worst_tier };
    if (!read_tiers(l, &reply->tiers))
        return cst_call_corrupt(call, "Lookup tiers");
    if (l->match.blocks == l->n && !read_partial(l, reply))
        return cst_call_corrupt(call, "Lookup partial match");
    return CISTERN_OK;
}

/* Entered; keys of the plan, then tail. */
static int32_t lookup_once(struct lookup *l, const cistern_space *space, const uint8_t *keys,
                           const struct cst_plan *plan, const uint8_t *parent,
                           const uint8_t *tail) {
    Cistern__V1__Lookup message = CISTERN__V1__LOOKUP__INIT;
    struct cst_request request = { .type = CST_MSG_LOOKUP, .message = &message.base };
    Cistern__V1__ListRef ref;
    size_t used = 0, size = l->n * CISTERN_KEY_SIZE;

    message.space = space->handle;
    message.brief = !l->tiers;
    if (parent)
        message.parent = (ProtobufCBinaryData){ CISTERN_KEY_SIZE, (uint8_t *)(uintptr_t)parent };
    message.tail = (ProtobufCBinaryData){ 4 * l->n_tail, (uint8_t *)(uintptr_t)tail };
    if (plan->need == CST_NEED_LISTS) {
        cst_plan_lay(space->client, &ref, &used, keys, size);
        message.keys_ref = &ref;
    } else {
        request.bulk_field = LOOKUP_KEYS_FIELD;
        request.bulk = keys;
        request.bulk_size = size;
    }
    return cst_call_run(space->client, &l->call, &request, 0);
}

static void add(cistern_match *sum, const cistern_match *more) {
    uint32_t blocks = sum->blocks + more->blocks;
    uint32_t worst = CST_MAX(sum->worst_tier, more->worst_tier);
    uint64_t cost = sum->cost_ns + more->cost_ns;

    *sum = *more;
    sum->blocks = blocks;
    sum->worst_tier = worst;
    sum->cost_ns = cost;
}

/* The leading run of n keys, in as many requests as the limits ask for, and, if all are present,
 * the match of `tail` behind them. */
static int32_t lookup_run(cistern_space *space, const uint8_t *keys, size_t n,
                          const uint8_t *parent, const uint8_t *tail, size_t n_tail, uint8_t *tiers,
                          cistern_match *out) {
    size_t done = 0;

    *out = (cistern_match){ .blocks = 0 };
    do {
        struct lookup l = { .call = CST_CALL_INIT(lookup_reply) };
        struct cst_plan plan = { .n = CST_MAX(n - done, (size_t)1),
                                 .key_bytes = CISTERN_KEY_SIZE,
                                 .reply_bytes = sizeof(struct cst_tier_run),
                                 .other_bytes = CISTERN_KEY_SIZE + 4 * n_tail };
        int32_t status = cst_plan_enter(space->client, space, &plan);

        if (status)
            return status;
        l.n = CST_MIN(plan.take, n - done);
        l.n_tail = done + l.n == n ? n_tail : 0;
        l.tiers = tiers ? tiers + done : NULL;
        status = lookup_once(&l, space, l.n ? keys + done * CISTERN_KEY_SIZE : NULL, &plan, parent,
                             tail);
        cst_leave(space->client, plan.need);
        if (status)
            return status;
        add(out, &l.match);
        if (l.match.blocks < l.n)
            break;
        done += l.n;
    } while (done < n);
    return CISTERN_OK;
}

/* ---- public ---- */

static int32_t check(const cistern_space *space, bool pointers_ok) {
    if (!space)
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the space is NULL");
    if (!pointers_ok)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "an argument is NULL or its size not set");
    return cst_check_fork(space->client);
}

static void write_match(cistern_match *out, const cistern_match *match) {
    cistern_match copy = *match;

    copy.size = out->size;
    memcpy(out, &copy, CST_MIN((size_t)out->size, sizeof(copy)));
}

/* The block after the leading run: matched token by token. */
static int32_t lookup_inside(cistern_space *space, const uint8_t *tokens, const uint8_t *keys,
                             cistern_match *match) {
    size_t n = match->blocks, block = space->descriptor->block_tokens;
    const uint8_t *parent = n ? keys + (n - 1) * CISTERN_KEY_SIZE : space->root;
    cistern_match inside;
    int32_t status =
        lookup_run(space, NULL, 0, parent, tokens + 4 * n * block, block, NULL, &inside);

    if (status)
        return status;
    match->partial_tokens = inside.partial_tokens;
    match->partial_stored = inside.partial_stored;
    match->partial_tier = inside.partial_tier;
    memcpy(match->partial_key, inside.partial_key, sizeof(match->partial_key));
    return CISTERN_OK;
}

static int32_t lookup_prompt(cistern_space *space, const uint8_t *tokens, size_t n_tokens,
                             const uint8_t *keys, cistern_match *match) {
    uint32_t block = space->descriptor->block_tokens;
    size_t n = n_tokens / block;
    int32_t status =
        lookup_run(space, keys, n, NULL, tokens + 4 * n * block, n_tokens % block, NULL, match);

    if (!status && match->blocks < n)
        status = lookup_inside(space, tokens, keys, match);
    match->tokens = (uint64_t)match->blocks * block + match->partial_tokens;
    return status;
}

CST_EXPORT int32_t cistern_lookup(cistern_space *space, const uint32_t *tokens, size_t n_tokens,
                                  const uint8_t *keys, cistern_match *out) {
    cst_auto(cst_freep) uint8_t *own = NULL;
    cistern_match match;
    int32_t status = check(space, out && out->size >= sizeof(out->size) && (tokens || !n_tokens));
    size_t n;

    if (status)
        return status;
    if (cst_client_space_is_flat(space))
        return cst_client_fail(CISTERN_E_BAD_STATE, "a flat space has no prompts: use lookup_each");
    match = (cistern_match){ .blocks = 0 };
    if (!n_tokens) {
        write_match(out, &match);
        return CISTERN_OK;
    }
    n = n_tokens / space->descriptor->block_tokens;
    if (!keys && n) {
        own = cst_malloc(n * CISTERN_KEY_SIZE);
        if (!own)
            return cst_client_fail_status(CISTERN_E_NO_MEMORY);
        cst_key_chain(space->root, tokens, n * space->descriptor->block_tokens,
                      space->descriptor->block_tokens, own);
        keys = own;
    }
    status = lookup_prompt(space, (const uint8_t *)tokens, n_tokens, keys, &match);
    if (cst_is_miss(status)) {
        match = (cistern_match){ .blocks = 0 };
        status = CISTERN_OK;
    }
    if (!status)
        write_match(out, &match);
    return status;
}

CST_EXPORT int32_t cistern_lookup_keys(cistern_space *space, const uint8_t *keys, size_t n,
                                       uint8_t *tiers, size_t *n_present) {
    cistern_match match;
    int32_t status = check(space, (keys || !n) && n_present);

    if (status)
        return status;
    match = (cistern_match){ .blocks = 0 };
    if (n)
        status = lookup_run(space, keys, n, NULL, NULL, 0, tiers, &match);
    if (cst_is_miss(status)) {
        match.blocks = 0;
        status = CISTERN_OK;
    }
    if (status)
        return status;
    if (tiers && n)
        memset(tiers + match.blocks, CISTERN_TIER_NONE, n - match.blocks);
    *n_present = match.blocks;
    return CISTERN_OK;
}

/* ---- LookupEach ---- */

struct each {
    struct cst_call call;
    size_t n;
    uint8_t *tiers;
};

static int32_t each_reply(struct cst_call *call, const struct cst_packet *packet,
                          struct cst_fds *fds) {
    struct each *e = cst_container_of(call, struct each, call);
    const Cistern__V1__LookupEachReply *reply = cst_reply_unpack(call, packet);

    if (!reply || reply->tiers.len != e->n || reply->bitmap.len != (e->n + 7) / 8)
        return cst_call_corrupt(call, "LookupEach");
    for (size_t i = 0; i < e->n; i++) {
        bool present = reply->bitmap.data[i / 8] >> (i % 8) & 1;

        e->tiers[i] = present ? reply->tiers.data[i] : CISTERN_TIER_NONE;
    }
    return CISTERN_OK;
}

static int32_t each_once(struct each *e, const cistern_space *space, const uint8_t *keys,
                         const struct cst_plan *plan) {
    Cistern__V1__LookupEach message = CISTERN__V1__LOOKUP_EACH__INIT;
    struct cst_request request = { .type = CST_MSG_LOOKUP_EACH, .message = &message.base };
    Cistern__V1__ListRef ref;
    size_t used = 0;

    message.space = space->handle;
    if (plan->need == CST_NEED_LISTS) {
        cst_plan_lay(space->client, &ref, &used, keys, e->n * CISTERN_KEY_SIZE);
        message.keys_ref = &ref;
    } else {
        request.bulk_field = LOOKUP_EACH_KEYS_FIELD;
        request.bulk = keys;
        request.bulk_size = e->n * CISTERN_KEY_SIZE;
    }
    return cst_call_run(space->client, &e->call, &request, 0);
}

CST_EXPORT int32_t cistern_lookup_each(cistern_space *space, const uint8_t *keys, size_t n,
                                       uint8_t *tiers) {
    int32_t status = check(space, !n || (keys && tiers));

    for (size_t done = 0; !status && done < n;) {
        struct each e = { .call = CST_CALL_INIT(each_reply), .tiers = tiers + done };
        struct cst_plan plan = { .n = n - done, .key_bytes = CISTERN_KEY_SIZE, .reply_bytes = 2 };

        status = cst_plan_enter(space->client, space, &plan);
        if (status)
            break;
        e.n = plan.take;
        status = each_once(&e, space, keys + done * CISTERN_KEY_SIZE, &plan);
        cst_leave(space->client, plan.need);
        done += e.n;
    }
    if (cst_is_miss(status) && n) {
        memset(tiers, CISTERN_TIER_NONE, n);
        status = CISTERN_OK;
    }
    return status;
}
