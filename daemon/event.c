/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the subscriptions.
 *
 * Invariants
 *   1. Events of one subscription are pushed in the order in which they happened; those of one turn
 *      that are alike (what, tier) share a packet.
 *   2. A subscriber that reads slowly loses events, is told how many, and slows nobody down.
 */
#include "daemon/event.h"

#include "base/err.h"
#include "base/mem.h"
#include "daemon/call.h"

#include <errno.h>
#include <string.h>

enum { BATCH_MAX = 64 };

struct subscription {
    struct cst_list in_server, in_session;
    struct cst_handle *handle;
    struct cst_charge charge;
    struct cst_deferred flush;
    uint32_t what, tier;
    uint64_t lost;
    size_t n;
    uint8_t keys[BATCH_MAX][32];
};

static void push_batch(struct subscription *sub) {
    Cistern__V1__Event push = CISTERN__V1__EVENT__INIT;

    if (!sub->n)
        return;
    if (!cst_push_fits(sub->handle->session, sizeof(sub->keys) + 64)) {
        sub->lost += sub->n;
        sub->n = 0;
        return;
    }
    push.space = sub->handle->id;
    push.what = sub->what;
    push.tier = sub->tier;
    push.lost = sub->lost;
    push.keys = (ProtobufCBinaryData){ .len = sub->n * 32, .data = sub->keys[0] };
    sub->lost = 0;
    sub->n = 0;
    cst_push(sub->handle->session, CST_MSG_EVENT, &push.base);
}

static void flush(struct cst_deferred *deferred) {
    push_batch(cst_container_of(deferred, struct subscription, flush));
}

static struct subscription *find(const struct cst_handle *handle) {
    struct cst_list *it, *tmp;

    cst_list_for_each_safe (it, tmp, &handle->session->subscriptions) {
        struct subscription *sub = cst_list_entry(it, struct subscription, in_session);

        if (sub->handle == handle)
            return sub;
    }
    return NULL;
}

int cst_event_subscribe(struct cst_handle *handle) {
    struct subscription *sub;
    int r;

    if (find(handle))
        return 0;
    sub = cst_calloc(1, sizeof(*sub));
    if (!sub)
        return cst_err(-ENOMEM);
    r = cst_charge_take(&sub->charge, &handle->session->payer, CST_RES_SUBSCRIPTIONS, 1);
    if (r) {
        (void)cst_free(sub);
        return r;
    }
    sub->handle = handle;
    cst_deferred_init(&sub->flush, flush);
    cst_list_append(&handle->session->server->subscriptions, &sub->in_server);
    cst_list_append(&handle->session->subscriptions, &sub->in_session);
    return 0;
}

static void free_subscription(struct subscription *sub) {
    cst_deferred_stop(&sub->flush);
    cst_charge_drop(&sub->charge);
    cst_list_unlink(&sub->in_server);
    cst_list_unlink(&sub->in_session);
    (void)cst_free(sub);
}

void cst_event_unsubscribe(struct cst_handle *handle) {
    struct subscription *sub = find(handle);

    if (sub)
        free_subscription(sub);
}

void cst_event_unsubscribe_all(struct cst_session *session) {
    struct cst_list *first;

    while ((first = cst_list_first(&session->subscriptions)))
        free_subscription(cst_list_entry(first, struct subscription, in_session));
}

void cst_event_notify(struct cst_server *server, const struct cst_space *space, enum cst_event what,
                      const uint8_t key[32], enum cst_tier tier) {
    struct cst_list *it, *tmp;

    cst_list_for_each_safe (it, tmp, &server->subscriptions) {
        struct subscription *sub = cst_list_entry(it, struct subscription, in_server);

        if (sub->handle->space != space)
            continue;
        if (sub->n == BATCH_MAX || (sub->n && (sub->what != what || sub->tier != tier)))
            push_batch(sub);
        sub->what = what;
        sub->tier = tier;
        memcpy(sub->keys[sub->n++], key, 32);
        cst_defer(&server->loop, &sub->flush);
    }
}
