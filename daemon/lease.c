/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the leases of all sessions and a short list of spare objects, so that the cheapest request
 * (acquire a hot block, give back the last one) costs no heap call.
 *
 * Invariants
 *   1. A lease is in session->leases from acquire until release; its fetch pins the block.
 *   2. status is OK exactly when loc is valid, PENDING until ready(); any other status means that
 *      the fetch is over and the lease is freed once its Ready has been pushed.
 *   3. A lease in session->ready was announced as PENDING and has news.
 */
#include "daemon/lease.h"

#include "base/err.h"
#include "base/mem.h"
#include "daemon/call.h"
#include "daemon/share.h"

#include <errno.h>
#include <string.h>

enum { SPARE_MAX = 1024 };

struct cst_lease {
    struct cst_hnode node;
    struct cst_list link; /* session->ready or server->free_leases */
    struct cst_session *session;
    struct cst_handle *handle;
    struct cst_charge charge;
    uint64_t id;
    int status;
    uint8_t key[32];
    struct cst_fetch fetch;
};

static bool has_id(const struct cst_hnode *node, const void *key) {
    return cst_container_of((void *)(uintptr_t)node, struct cst_lease, node)->id ==
           *(const uint64_t *)key;
}

static struct cst_lease *find(const struct cst_session *s, uint64_t id) {
    struct cst_hnode *node =
        cst_hashmap_find(&s->leases, cst_hash_u64(s->server->seed, id), has_id, &id);

    return node ? cst_container_of(node, struct cst_lease, node) : NULL;
}

static struct cst_lease *take_object(struct cst_server *server) {
    struct cst_list *first = cst_list_first(&server->free_leases);

    if (!first)
        return cst_malloc(sizeof(struct cst_lease));
    cst_list_unlink(first);
    server->n_free_leases--;
    return cst_list_entry(first, struct cst_lease, link);
}

static void give_object(struct cst_server *server, struct cst_lease *lease) {
    if (server->n_free_leases >= SPARE_MAX) {
        (void)cst_free(lease);
        return;
    }
    server->n_free_leases++;
    cst_list_prepend(&server->free_leases, &lease->link); /* the newest is warm in the cache */
}

void cst_lease_deinit(struct cst_server *server) {
    struct cst_list *first;

    while ((first = cst_list_first(&server->free_leases))) {
        cst_list_unlink(first);
        (void)cst_free(cst_list_entry(first, struct cst_lease, link));
    }
    server->n_free_leases = 0;
}

/* The lease is in session->leases. */
static void drop(struct cst_lease *lease) {
    struct cst_session *s = lease->session;

    cst_fetch_release(&lease->fetch);
    cst_hashmap_remove(&s->leases, &lease->node);
    cst_list_unlink(&lease->link);
    cst_charge_drop(&lease->charge);
    cst_handle_unuse(lease->handle);
    give_object(s->server, lease);
}

static void fill_failure(struct cst_lease_record *record, uint64_t id, int status) {
    memset(record, 0, sizeof(*record));
    cst_store16(&record->status, (uint16_t)status);
    cst_store64(&record->lease, id);
}

static void fill_record(struct cst_lease_record *record, const struct cst_lease *lease) {
    const struct cst_location *loc = &lease->fetch.loc;

    fill_failure(record, lease->id, lease->status);
    if (lease->status)
        return;
    record->tier = (uint8_t)loc->tier;
    record->preset = loc->preset;
    cst_store32(&record->slab, cst_share_number(lease->session->server, loc->slab->id));
    cst_store64(&record->offset, loc->offset);
    cst_store64(&record->length, loc->length);
    cst_store32(&record->tokens, loc->tokens);
    cst_store32(&record->crc32c, loc->crc32c);
}

static void fetch_ready(struct cst_fetch *fetch, int r) {
    struct cst_lease *lease = cst_container_of(fetch, struct cst_lease, fetch);
    struct cst_session *s = lease->session;

    lease->status = cst_status_of(r);
    cst_list_append(&s->ready, &lease->link);
    cst_defer(&s->server->loop, &s->ready_flush);
}

/* A new lease in session->leases, not yet fetched. 0, CST_QUOTA_E_FULL, -ENOMEM. */
static int new_lease(struct cst_lease **out, struct cst_handle *handle, uint64_t id,
                     const uint8_t key[32]) {
    struct cst_session *s = handle->session;
    struct cst_lease *lease = take_object(s->server);
    int r;

    if (!lease)
        return cst_err(-ENOMEM);
    *lease = (struct cst_lease){ .session = s,
                                 .handle = handle,
                                 .id = id,
                                 .status = CST_STATUS_PENDING,
                                 .fetch = CST_FETCH_NULL(fetch_ready) };
    cst_list_init(&lease->link);
    memcpy(lease->key, key, sizeof(lease->key));
    r = cst_charge_take(&lease->charge, &s->payer, CST_RES_LEASES, 1);
    if (!r)
        r = cst_hashmap_insert(&s->leases, &lease->node, cst_hash_u64(s->server->seed, id));
    if (r) {
        cst_charge_drop(&lease->charge);
        give_object(s->server, lease);
        return r;
    }
    cst_handle_use(handle);
    *out = lease;
    return 0;
}

void cst_lease_acquire(struct cst_handle *handle, uint64_t id, const uint8_t key[32],
                       enum cst_fetch_mode mode, struct cst_lease_record *record) {
    struct cst_lease *lease = find(handle->session, id);
    int r;

    if (lease) {
        if (lease->handle == handle && !memcmp(lease->key, key, sizeof(lease->key)))
            fill_record(record, lease);
        else
            fill_failure(record, id, CST_STATUS_BAD_HANDLE);
        return;
    }
    r = new_lease(&lease, handle, id, key);
    if (r) {
        fill_failure(record, id, r > 0 ? CST_STATUS_QUOTA : cst_status_of(r));
        return;
    }
    r = cst_fetch_start(handle->space, key, mode, &lease->fetch);
    lease->status = cst_status_of(r);
    fill_record(record, lease);
    if (lease->status && lease->status != CST_STATUS_PENDING)
        drop(lease);
}

void cst_lease_release(struct cst_session *s, uint64_t id) {
    struct cst_lease *lease = find(s, id);

    if (lease)
        drop(lease);
}

static void drop_node(struct cst_hnode *node, void *arg) {
    drop(cst_container_of(node, struct cst_lease, node));
}

void cst_lease_release_all(struct cst_session *s) {
    cst_hashmap_for_each(&s->leases, drop_node, NULL);
}

void cst_lease_flush_ready(struct cst_deferred *deferred) {
    struct cst_session *s = cst_container_of(deferred, struct cst_session, ready_flush);
    struct cst_lease_record *records = (void *)s->server->scratch.records;
    Cistern__V1__Ready push = CISTERN__V1__READY__INIT;
    struct cst_list *first;
    size_t n = 0;

    while (n < CST_ACQUIRE_KEYS_MAX && (first = cst_list_first(&s->ready))) {
        struct cst_lease *lease = cst_list_entry(first, struct cst_lease, link);

        cst_list_unlink(first);
        fill_record(&records[n++], lease);
        if (lease->status)
            drop(lease);
    }
    push.leases = (ProtobufCBinaryData){ .len = n * sizeof(*records), .data = (void *)records };
    if (n)
        cst_push(s, CST_MSG_READY, &push.base);
    if (!cst_list_is_empty(&s->ready))
        cst_defer(&s->server->loop, &s->ready_flush);
}
