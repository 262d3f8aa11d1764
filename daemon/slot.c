/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the slots of all sessions and the commits under way.
 *
 * Invariants
 *   1. A slot is in session->slots, owns its pages of staging and one open put, and uses its handle
 *      until it is freed: by Abort, by the end of the session, or by done().
 *   2. A slot with a commit can't be aborted: workers read its bytes. It is freed in done().
 *   3. A commit holds a reference of its session until its last slot is done; a session that ended
 *      meanwhile gets no answer.
 *   4. Copies of one commit end in any order. A block that landed before its parent is asked again
 *      when all have landed, so that PENDING is only said while an ancestor of another commit is
 *      missing.
 */
#include "daemon/slot.h"

#include "base/err.h"
#include "base/le.h"
#include "base/mem.h"
#include "daemon/call.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

struct commit {
    struct cst_session *session;
    struct cst_charge charge;
    uint32_t request;
    size_t n, open;
    struct cst_list pending; /* slots that are done and stored under an unfinished parent */
    struct cst_le16 statuses[];
};

struct cst_slot {
    struct cst_hnode node;
    struct cst_session *session;
    struct cst_handle *handle;
    struct cst_charge charge;
    uint64_t id, offset, length;
    uint32_t n_tokens;
    struct commit *commit; /* NULL: open for writing */
    size_t index;          /* of its status in the commit */
    struct cst_list link;  /* commit->pending */
    uint8_t key[CST_KEY_SIZE];
    struct cst_put put;
};

static bool has_id(const struct cst_hnode *node, const void *key) {
    return cst_container_of((void *)(uintptr_t)node, struct cst_slot, node)->id ==
           *(const uint64_t *)key;
}

static struct cst_slot *find(const struct cst_session *s, uint64_t id) {
    struct cst_hnode *node =
        cst_hashmap_find(&s->slots, cst_hash_u64(s->server->seed, id), has_id, &id);

    return node ? cst_container_of(node, struct cst_slot, node) : NULL;
}

/* The slot is in session->slots and its put is closed. */
static void free_slot(struct cst_slot *slot) {
    struct cst_session *s = slot->session;

    cst_hashmap_remove(&s->slots, &slot->node);
    cst_staging_give(&s->staging, slot->offset, slot->length);
    cst_charge_drop(&slot->charge);
    cst_handle_unuse(slot->handle);
    (void)cst_free(slot);
}

static void settle_pending(struct commit *commit) {
    struct cst_list *it, *next;

    cst_list_for_each_safe (it, next, &commit->pending) {
        struct cst_slot *slot = cst_list_entry(it, struct cst_slot, link);

        if (cst_space_has(slot->handle->space, slot->key))
            cst_store16(&commit->statuses[slot->index], CST_STATUS_OK);
        free_slot(slot);
    }
}

static void finish_commit(struct commit *commit) {
    Cistern__V1__CommitReply reply = CISTERN__V1__COMMIT_REPLY__INIT;
    struct cst_session *s = commit->session;

    settle_pending(commit);
    reply.statuses = (ProtobufCBinaryData){ .len = commit->n * sizeof(commit->statuses[0]),
                                            .data = (void *)commit->statuses };
    cst_charge_drop(&commit->charge);
    if (!s->ended)
        cst_reply_later(s, CST_MSG_COMMIT, commit->request, &reply.base);
    s->server->open_commits--;
    (void)cst_free(commit);
    (void)cst_session_unref(s);
}

static void put_done(struct cst_put *put, int r) {
    struct cst_slot *slot = cst_container_of(put, struct cst_slot, put);
    struct commit *commit = slot->commit;

    cst_store16(&commit->statuses[slot->index], (uint16_t)cst_status_of(r));
    if (r == CST_STORE_E_PENDING)
        cst_list_append(&commit->pending, &slot->link);
    else
        free_slot(slot);
    if (!--commit->open)
        finish_commit(commit);
}

/* ---- reserve ---- */

/* A slot with pages, in session->slots, without a put. 0, CST_STATUS_BUSY as a positive condition
 * or -ENOMEM. */
static int new_slot(struct cst_slot **out, struct cst_handle *handle, uint64_t length) {
    struct cst_session *s = handle->session;
    cst_auto(cst_freep) struct cst_slot *slot = cst_calloc(1, sizeof(*slot));
    int r;

    if (!slot)
        return cst_err(-ENOMEM);
    if (!cst_staging_take(&s->staging, length, &slot->offset))
        return CST_STATUS_BUSY;
    slot->session = s;
    slot->handle = handle;
    slot->length = length;
    slot->id = ++s->last_slot;
    slot->put = CST_PUT_NULL(put_done);
    r = cst_charge_take(&slot->charge, &s->payer, CST_RES_SLOTS, 1);
    if (!r)
        r = cst_hashmap_insert(&s->slots, &slot->node, cst_hash_u64(s->server->seed, slot->id));
    if (r) {
        cst_charge_drop(&slot->charge);
        cst_staging_give(&s->staging, slot->offset, slot->length);
        return r > 0 ? CST_STATUS_BUSY : r;
    }
    cst_handle_use(handle);
    *out = cst_steal(&slot);
    return 0;
}

int cst_slot_reserve(struct cst_handle *handle, const struct cst_slot_request *request,
                     struct cst_slot_record *record) {
    uint64_t length = cst_space_descriptor(handle->space)->block_bytes;
    struct cst_slot *slot = NULL;
    uint32_t busy_ms = 0;
    int status, r = new_slot(&slot, handle, length);

    *record = (struct cst_slot_record){ 0 };
    if (r) {
        status = r > 0 ? r : cst_status_of(r);
        cst_store16(&record->status, (uint16_t)status);
        return status;
    }
    slot->n_tokens = request->n_tokens;
    memcpy(slot->key, request->key, CST_KEY_SIZE);
    r = cst_put_begin(handle->space, request->parent, request->is_root, request->key,
                      request->tokens, request->n_tokens, &slot->put, &busy_ms);
    status = cst_status_of(r);
    cst_store16(&record->status, (uint16_t)status);
    cst_store32(&record->busy_ms, busy_ms);
    if (status) {
        free_slot(slot);
        return status;
    }
    cst_store64(&record->slot, slot->id);
    cst_store64(&record->offset, slot->offset);
    cst_store64(&record->length, length);
    return 0;
}

/* ---- commit ---- */

uint32_t cst_slot_tokens(const struct cst_session *session, uint64_t id) {
    const struct cst_slot *slot = find(session, id);

    return slot && !slot->commit ? slot->n_tokens : 0;
}

static int new_commit(struct commit **out, struct cst_session *s, uint32_t request, size_t n) {
    struct commit *commit = cst_calloc(1, sizeof(*commit) + n * sizeof(commit->statuses[0]));

    if (!commit)
        return cst_err(-ENOMEM);
    if (cst_charge_take(&commit->charge, &s->payer, CST_RES_REQUESTS, 1)) {
        (void)cst_free(commit);
        return CST_STATUS_BUSY;
    }
    commit->session = cst_session_ref(s);
    commit->request = request;
    commit->n = n;
    commit->open = 1; /* ours, until all slots are submitted */
    cst_list_init(&commit->pending);
    s->server->open_commits++;
    *out = commit;
    return 0;
}

int cst_slot_commit(struct cst_session *s, uint32_t request, const uint8_t *ids, size_t n,
                    const uint16_t *surprisals) {
    struct commit *commit = NULL;
    int r = new_commit(&commit, s, request, n);

    if (r)
        return r > 0 ? r : cst_status_of(r);
    for (size_t i = 0; i < n; i++) {
        struct cst_slot *slot = find(s, cst_load64(ids + i * sizeof(uint64_t)));

        if (!slot || slot->commit) {
            cst_store16(&commit->statuses[i], slot ? CST_STATUS_BAD_STATE : CST_STATUS_BAD_HANDLE);
            continue;
        }
        slot->commit = commit;
        slot->index = i;
        commit->open++;
        cst_put_commit(&slot->put, s->staging.mem.base + slot->offset, surprisals);
        if (surprisals)
            surprisals += slot->n_tokens;
    }
    if (!--commit->open)
        finish_commit(commit);
    return CST_STATUS_OK;
}

/* ---- abort ---- */

static void abort_slot(struct cst_slot *slot) {
    if (slot->commit)
        return;
    cst_put_abort(&slot->put);
    free_slot(slot);
}

void cst_slot_abort(struct cst_session *s, uint64_t id) {
    struct cst_slot *slot = find(s, id);

    if (slot)
        abort_slot(slot);
}

static void abort_node(struct cst_hnode *node, void *arg) {
    abort_slot(cst_container_of(node, struct cst_slot, node));
}

void cst_slot_abort_all(struct cst_session *s) {
    cst_hashmap_for_each(&s->slots, abort_node, NULL);
}
