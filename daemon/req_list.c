/* SPDX-License-Identifier: Apache-2.0 */
/* Spaces and Blocks: what there is, page by page. */
#include "daemon/call.h"

#include "proto/record.h"

#include <string.h>

enum { SPACES_PAGE = 256, BLOCKS_PAGE = 1024 }; /* records of one reply */

struct listing {
    struct cst_call *call;
    uint32_t index, start; /* of the space at hand; of the first one wanted */
    uint32_t next;         /* 0: all fit so far */
    size_t n;
    int r;
};

/* The session's handle of this space; made if there is none yet. */
static int handle_of(struct cst_session *s, struct cst_space *space, struct cst_handle **out) {
    int r;

    for (size_t i = 0; i < s->n_handles; i++) {
        if (s->handles[i] && s->handles[i]->space == space && !s->handles[i]->closed) {
            *out = s->handles[i];
            return 0;
        }
    }
    r = cst_handle_new_consume(out, s, cst_space_ref(space), NULL, 0);
    if (r) {
        (void)cst_space_unref(space);
        return r;
    }
    (*out)->view = cst_space_namespace(space) != s->tenant->ns;
    return 0;
}

static void put_name(char out[CST_RECORD_NAME_MAX], const char *name) {
    memcpy(out, name, strnlen(name, CST_RECORD_NAME_MAX)); /* the record was zeroed */
}

static void put_space(struct cst_space_record *record, const struct cst_handle *handle) {
    const struct cst_descriptor *desc = cst_space_descriptor(handle->space);
    struct cst_space_stats stats;

    cst_space_stats(handle->space, &stats);
    *record = (struct cst_space_record){ .kind = (uint8_t)cst_space_kind(handle->space),
                                         .quality_class = (uint8_t)cst_space_class(handle->space) };
    cst_store32(&record->space, handle->id);
    cst_store32(&record->block_tokens, desc->block_tokens);
    cst_store32(&record->presets, cst_space_presets(handle->space));
    cst_store64(&record->block_bytes, desc->block_bytes);
    cst_store64(&record->blocks, stats.blocks);
    cst_store64(&record->tail_blocks, stats.tail_blocks);
    cst_store64(&record->hot_bytes, stats.hot_bytes);
    cst_store64(&record->packed_bytes, stats.packed_bytes);
    cst_store64(&record->index_bytes, stats.index_bytes);
    memcpy(record->fingerprint, cst_space_fingerprint(handle->space), sizeof(record->fingerprint));
    memcpy(record->content_id, desc->content_id, sizeof(record->content_id));
    put_name(record->namespace_name, cst_namespace_name(cst_space_namespace(handle->space)));
    put_name(record->engine, desc->engine);
}

static void list_space(struct cst_space *space, void *arg) {
    struct listing *l = arg;
    uint32_t index = l->index++;
    struct cst_handle *handle;

    if (index < l->start || l->next || l->r)
        return;
    if (l->n == SPACES_PAGE) {
        l->next = index;
        return;
    }
    l->r = handle_of(l->call->session, space, &handle);
    if (!l->r)
        put_space((struct cst_space_record *)l->call->server->scratch.records + l->n++, handle);
}

void cst_req_spaces(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Spaces *spaces = (const void *)message;
    Cistern__V1__SpacesReply reply = CISTERN__V1__SPACES_REPLY__INIT;
    struct listing l = { .call = call, .start = spaces->start };

    cst_store_for_each_space(call->server->store,
                             call->session->admin ? NULL : call->session->tenant->ns, list_space,
                             &l);
    if (l.r == CST_QUOTA_E_FULL)
        return cst_fail(call, CST_STATUS_QUOTA, "too many open spaces");
    if (l.r)
        return cst_fail_store(call, l.r);
    reply.spaces = (ProtobufCBinaryData){ .len = l.n * sizeof(struct cst_space_record),
                                          .data = call->server->scratch.records };
    reply.next = l.next;
    cst_reply(call, &reply.base);
}

/* ---- blocks ---- */

static void put_block(struct cst_block_record *record, const struct cst_block_info *info) {
    uint32_t error;

    *record = (struct cst_block_record){ .tier = (uint8_t)info->tier, .preset = info->preset };
    memcpy(record->key, info->key, 32);
    memcpy(record->parent, info->parent, 32);
    cst_store64(&record->packed_bytes, info->packed_bytes);
    cst_store32(&record->tokens, info->tokens);
    cst_store32(&record->depth, info->depth);
    cst_store16(&record->leases, info->leases);
    memcpy(&error, &info->error, sizeof(error));
    cst_store32(&record->error, error);
}

void cst_req_blocks(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Blocks *blocks = (const void *)message;
    Cistern__V1__BlocksReply reply = CISTERN__V1__BLOCKS_REPLY__INIT;
    struct cst_handle *handle = cst_call_handle(call, blocks->space, CST_NEED_VIEW);
    struct cst_block_record *records = (void *)call->server->scratch.records;
    struct cst_block_info *page = (void *)call->server->scratch.keys;
    size_t max = blocks->max && blocks->max < BLOCKS_PAGE ? blocks->max : BLOCKS_PAGE, n;

    if (!handle)
        return;
    n = cst_space_blocks(handle->space, blocks->cursor, page, max, &reply.next);
    for (size_t i = 0; i < n; i++)
        put_block(&records[i], &page[i]);
    reply.blocks = (ProtobufCBinaryData){ .len = n * sizeof(*records), .data = (void *)records };
    cst_reply(call, &reply.base);
}
