/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns nothing: ends slots by Commit or Abort.
 *
 * Invariants: 1. a slot handle ends here exactly once, whatever the daemon says; a handle given
 * twice is refused the second time; 2. slots travel in the caller's order, in runs whose
 * surprisals lie together, so nothing is copied; 3. see client_slot.c, invariant 3.
 */
#include "client/client.h"
#include "client/client_slot.h"

#include "proto/status.h"

enum {
    SURPRISALS_FIELD = 2,
    SLOTS_MAX = 512, /* of one request */
    FIXED_BYTES = 256,
};

/* Consecutive slots that one request takes. */
struct batch {
    struct cst_call call;
    cistern_client *client;
    uint8_t ids[8 * SLOTS_MAX];
    cistern_slot *slots[SLOTS_MAX];
    int32_t *statuses; /* of the first slot; NULL: nobody asks */
    size_t n, n_tokens;
};

static bool is_ours(const cistern_client *c, const cistern_slot *slot) {
    return slot && slot->held && slot->client == c;
}

/* Takes slots from the front of the array while they are good; their handles end. Lock held. */
static void gather(struct batch *b, cistern_slot *const *slots, size_t n, bool surprisals) {
    size_t room = b->client->conn.hello.packet_max - FIXED_BYTES, each;

    for (b->n = b->n_tokens = 0; b->n < n && b->n < SLOTS_MAX; b->n++) {
        cistern_slot *slot = slots[b->n];

        if (!is_ours(b->client, slot) || !cst_slot_is_live(slot))
            break;
        each = 8 + (surprisals ? 2 * (size_t)slot->tokens : 0);
        if (each > room)
            break;
        room -= each;
        slot->held = false;
        b->slots[b->n] = slot;
        cst_store64(b->ids + 8 * b->n, slot->id);
        b->n_tokens += slot->tokens;
    }
}

static void put_all(struct batch *b) {
    for (size_t i = 0; i < b->n; i++)
        cst_slot_put(b->slots[i]);
}

/* Ends the slot at the front that can't be sent. Lock held. */
static int32_t end_unsent(const cistern_client *c, cistern_slot *slot) {
    if (!is_ours(c, slot))
        return CISTERN_E_BAD_HANDLE;
    cst_slot_put(slot);
    return CISTERN_E_DISCONNECTED;
}

static int32_t commit_reply(struct cst_call *call, const struct cst_packet *packet,
                            struct cst_fds *fds) {
    struct batch *b = cst_container_of(call, struct batch, call);
    const Cistern__V1__CommitReply *reply = cst_reply_unpack(call, packet);

    if (!reply || reply->statuses.len != 2 * b->n)
        return cst_call_corrupt(call, "Commit");
    for (size_t i = 0; i < b->n; i++)
        b->statuses[i] = cst_status_to_api(cst_load16(reply->statuses.data + 2 * i));
    return CISTERN_OK;
}

static int32_t commit_batch(struct batch *b, const cistern_commit_options *options,
                            size_t tokens_before) {
    Cistern__V1__Commit message = CISTERN__V1__COMMIT__INIT;
    struct cst_request request = { .type = CST_MSG_COMMIT, .message = &message.base };

    b->call = (struct cst_call)CST_CALL_INIT(commit_reply);
    message.slots = (ProtobufCBinaryData){ .data = b->ids, .len = 8 * b->n };
    message.prediction = options->prediction;
    if (options->surprisals && b->n_tokens) {
        request.bulk_field = SURPRISALS_FIELD;
        request.bulk = options->surprisals + tokens_before;
        request.bulk_size = 2 * b->n_tokens;
    }
    return cst_call_run(b->client, &b->call, &request, 0);
}

/* Commits a run of slots, or ends one that can't be sent. Lock held. Returns how many were used
 * up; *status is what to return if nothing is stored. */
static size_t commit_some(struct batch *b, cistern_slot *const *slots, size_t n,
                          const cistern_commit_options *options, size_t *tokens, int32_t *status) {
    gather(b, slots, n, options->surprisals);
    if (!b->n) {
        uint32_t skipped = is_ours(b->client, slots[0]) ? slots[0]->tokens : 0;

        *status = b->statuses[0] = end_unsent(b->client, slots[0]);
        *tokens += skipped;
        return 1;
    }
    *status = commit_batch(b, options, *tokens);
    for (size_t i = 0; *status && i < b->n; i++)
        b->statuses[i] = *status;
    if (*status) /* a Commit that is refused as a whole leaves its slots open */
        cst_slot_post_abort(b->client, b->ids, b->n);
    put_all(b);
    *tokens += b->n_tokens;
    return b->n;
}

static int32_t commit(cistern_client *c, cistern_slot *const *slots, size_t n,
                      const cistern_commit_options *options, int32_t *statuses) {
    struct batch b = { .client = c };
    int32_t first_error = CISTERN_OK;
    bool answered = !n;
    size_t tokens = 0;

    (void)pthread_mutex_lock(&c->lock);
    for (size_t at = 0; at < n;) {
        int32_t status = CISTERN_OK;

        b.statuses = statuses + at;
        at += commit_some(&b, slots + at, n - at, options, &tokens, &status);
        if (!first_error)
            first_error = status;
        answered |= !status || status == CISTERN_E_BAD_HANDLE;
    }
    cst_leave(c, CST_NEED_NOTHING);
    if (answered)
        return CISTERN_OK;
    return cst_client_fail(first_error, "nothing was stored: %s", cst_status_text(-first_error));
}

static int32_t check_options(cistern_commit_options *known, const cistern_commit_options *options,
                             cistern_slot *const *slots, size_t n) {
    int32_t status = cst_options_read(known, sizeof(*known), options, "options");
    size_t tokens = 0;

    if (status || !known->surprisals)
        return status;
    for (size_t i = 0; i < n; i++)
        tokens += slots[i] ? slots[i]->tokens : 0;
    if (tokens != known->n_surprisals)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "%zu surprisals for %zu tokens",
                               known->n_surprisals, tokens);
    return CISTERN_OK;
}

CST_EXPORT int32_t cistern_commit(cistern_space *space, cistern_slot *const *slots, size_t n,
                                  const cistern_commit_options *options, int32_t *statuses) {
    cistern_commit_options known;
    int32_t status;

    if (!space)
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the space is NULL");
    if (n && (!slots || !statuses))
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "slots or statuses is NULL");
    if (cst_check_fork(space->client))
        return CISTERN_E_FORKED;
    status = check_options(&known, options, slots, n);
    if (status) {
        cistern_abort(space, slots, n);
        return status;
    }
    return commit(space->client, slots, n, &known, statuses);
}

CST_EXPORT void cistern_abort(cistern_space *space, cistern_slot *const *slots, size_t n) {
    cistern_client *c = space ? space->client : NULL;
    struct batch b = { .client = c };

    if (!c || !slots || c->forked)
        return;
    (void)pthread_mutex_lock(&c->lock);
    for (size_t at = 0; at < n; at += CST_MAX(b.n, (size_t)1)) {
        Cistern__V1__Abort message = CISTERN__V1__ABORT__INIT;

        gather(&b, slots + at, n - at, false);
        if (!b.n) {
            (void)end_unsent(c, slots[at]);
            continue;
        }
        b.call = (struct cst_call)CST_CALL_INIT(NULL);
        message.slots = (ProtobufCBinaryData){ .data = b.ids, .len = 8 * b.n };
        (void)cst_call_run(c, &b.call,
                           &(struct cst_request){ .type = CST_MSG_ABORT, .message = &message.base },
                           0);
        put_all(&b);
    }
    cst_leave(c, CST_NEED_NOTHING);
}
