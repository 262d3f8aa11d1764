/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns spaces: the descriptor as the caller gave it, its canonical bytes, fingerprint and root key,
 * and the daemon's handle on the current connection.
 *
 * Invariants: 1. identity is computed here and compared with the daemon's at every (re)open: a
 * daemon that means another layout is refused; 2. a space lives until its caller closed it and no
 * lease or slot needs it; 3. two spaces of one identity may have the same handle, which is given
 * back with the last of them.
 */
#include "base/layout.h"
#include "base/mem.h"
#include "client/client.h"
#include "client/client_side.h"
#include "proto/key.h"
#include "proto/status.h"

#include <string.h>

/* ---- descriptors ---- */

static int32_t bad_descriptor(const char *text) {
    return cst_client_fail(CISTERN_E_BAD_DESCRIPTOR, "%s", text);
}

/* False if v does not fit the byte that it becomes. */
static bool to_u8(uint8_t *out, uint32_t v) {
    *out = (uint8_t)v;
    return v <= UINT8_MAX;
}

static bool layer_from_api(struct cst_layer *out, const cistern_layer *in) {
    *out = (struct cst_layer){
        .kv_heads = in->kv_heads,
        .head_dim_k = in->head_dim_k,
        .head_dim_v = in->head_dim_v,
        .window = in->window,
        .rope_dims = in->rope_dims,
        .rope_theta = in->rope_theta,
        .scaling_original_context = in->scaling_original_context,
    };
    memcpy(out->scaling, in->scaling, sizeof(out->scaling));
    return to_u8(&out->rope, in->rope) && to_u8(&out->k_rotated, in->k_rotated) &&
           to_u8(&out->rope_scaling, in->rope_scaling);
}

static bool segment_from_api(struct cst_segment *out, const cistern_segment *in) {
    *out = (struct cst_segment){
        .layer = in->layer,
        .offset = in->offset,
        .length = in->length,
        .token_stride = in->token_stride,
        .head_stride = in->head_stride,
        .dim_stride = in->dim_stride,
    };
    return to_u8(&out->tensor, in->tensor) && to_u8(&out->dtype, in->dtype);
}

static bool string_from_api(char *out, size_t cap, const char *in) {
    size_t n = in ? strnlen(in, cap) : 0;

    if (n >= cap)
        return false;
    if (n)
        memcpy(out, in, n);
    out[n] = '\0';
    return true;
}

static struct cst_descriptor *descriptor_new(const cistern_descriptor *in) {
    struct cst_descriptor *d = cst_calloc(1, sizeof(*d));

    if (!d)
        return NULL;
    d->layers = cst_calloc(in->n_layers, sizeof(*d->layers));
    d->segments = cst_calloc(in->n_segments, sizeof(*d->segments));
    if (!d->layers || !d->segments)
        return cst_descriptor_free(d);
    memcpy(d->content_id, in->content_id, sizeof(d->content_id));
    memcpy(d->adapter_id, in->adapter_id, sizeof(d->adapter_id));
    d->engine_abi = in->engine_abi;
    d->state_version = in->state_version;
    d->block_tokens = in->block_tokens;
    d->block_bytes = in->block_bytes;
    d->tp_rank = in->tp_rank;
    d->tp_size = in->tp_size ? in->tp_size : 1;
    d->n_layers = in->n_layers;
    d->n_segments = in->n_segments;
    return d;
}

static int32_t descriptor_fill(struct cst_descriptor *d, const cistern_descriptor *in) {
    char text[CST_ERROR_TEXT];
    const char *wrong;

    if (!string_from_api(d->engine, sizeof(d->engine), in->engine) ||
        !string_from_api(d->options, sizeof(d->options), in->engine_options))
        return bad_descriptor("engine or engine_options is too long");
    for (uint32_t i = 0; i < d->n_layers; i++)
        if (!layer_from_api(&d->layers[i], &in->layers[i]))
            return bad_descriptor("a layer has a value that is not allowed");
    for (uint32_t i = 0; i < d->n_segments; i++)
        if (!segment_from_api(&d->segments[i], &in->segments[i]))
            return bad_descriptor("a segment has a value that is not allowed");
    wrong = cst_descriptor_check(d, text, sizeof(text));
    return wrong ? bad_descriptor(wrong) : CISTERN_OK;
}

/* *out is owned by the caller, on failure too (it may be NULL). */
static int32_t descriptor_from_api(struct cst_descriptor **out, const cistern_descriptor *given) {
    cistern_descriptor in;
    int32_t status;

    *out = NULL;
    if (!given)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "the descriptor is NULL");
    status = cst_options_read(&in, sizeof(in), given, "descriptor");
    if (status)
        return status;
    if (in.n_layers > CST_LAYERS_MAX || in.n_segments > CST_SEGMENTS_MAX)
        return bad_descriptor("too many layers or segments");
    if ((in.n_layers && !in.layers) || (in.n_segments && !in.segments))
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT,
                               "the descriptor's layers or segments are NULL");
    *out = descriptor_new(&in);
    return *out ? descriptor_fill(*out, &in) : cst_client_fail_status(CISTERN_E_NO_MEMORY);
}

/* Canonical bytes, owned by the caller, and their hash. */
static int32_t canonical_new(uint8_t **out, size_t *n, uint8_t fingerprint[32],
                             const struct cst_descriptor *d) {
    uint8_t *room = cst_malloc(CST_DESCRIPTOR_BYTES_MAX);

    if (!room)
        return cst_client_fail_status(CISTERN_E_NO_MEMORY);
    *n = cst_descriptor_encode(d, room, CST_DESCRIPTOR_BYTES_MAX);
    if (*n) {
        cst_descriptor_fingerprint(room, *n, fingerprint);
        *out = cst_memdup(room, *n);
    }
    (void)cst_free(room);
    if (!*n)
        return bad_descriptor("the descriptor does not fit a packet");
    return *out ? CISTERN_OK : cst_client_fail_status(CISTERN_E_NO_MEMORY);
}

CST_EXPORT int32_t cistern_descriptor_fingerprint(const cistern_descriptor *descriptor,
                                                  uint8_t out[32]) {
    cst_auto(cst_freep) uint8_t *canonical = NULL;
    struct cst_descriptor *d;
    size_t n;
    int32_t status = descriptor_from_api(&d, descriptor);

    if (!status && !out)
        status = cst_client_fail(CISTERN_E_BAD_ARGUMENT, "out is NULL");
    if (!status)
        status = canonical_new(&canonical, &n, out, d);
    (void)cst_descriptor_free(d);
    return status;
}

/* ---- life ---- */

static cistern_space *space_free(cistern_space *space) {
    if (!space)
        return NULL;
    cst_list_unlink(&space->link);
    (void)cst_descriptor_free(space->descriptor);
    (void)cst_free(space->canonical);
    (void)cst_free(space->work);
    cst_client_side_free_all(space);
    return cst_free(space);
}
CST_DEFINE_FREEP(cistern_space, space_free)

void cst_client_space_ref(cistern_space *space) {
    space->refs++;
}

void cst_client_space_unref(cistern_space *space) {
    if (!--space->refs)
        (void)space_free(space);
}

void cst_client_space_free_all(cistern_client *c) {
    struct cst_list *link;

    while ((link = cst_list_first(&c->spaces)))
        (void)space_free(cst_list_entry(link, cistern_space, link));
}

static int32_t space_options(cistern_space *space, const cistern_space_options *options) {
    cistern_space_options known;
    int32_t status = cst_options_read(&known, sizeof(known), options, "options");

    if (status)
        return status;
    if (known.kind >= CST_KINDS || known.scope > CISTERN_SCOPE_PUBLIC ||
        known.quality_class >= CST_CLASSES)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "kind, scope or quality class is unknown");
    if (known.salt_size > sizeof(space->salt) || (known.salt_size && !known.salt))
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "a salt has at most %zu bytes",
                               sizeof(space->salt));
    space->kind = known.kind;
    space->scope = known.scope;
    space->quality_class = known.quality_class;
    space->salt_size = known.salt_size;
    if (known.salt_size)
        memcpy(space->salt, known.salt, known.salt_size);
    return CISTERN_OK;
}

static int32_t space_new(cistern_space **out, cistern_client *c,
                         const cistern_descriptor *descriptor,
                         const cistern_space_options *options) {
    cst_auto(space_freep) cistern_space *space = cst_calloc(1, sizeof(*space));
    int32_t status;

    if (!space)
        return cst_client_fail_status(CISTERN_E_NO_MEMORY);
    cst_list_init(&space->link);
    cst_list_init(&space->sides);
    space->client = c;
    space->refs = 1;
    space->open = true;
    status = space_options(space, options);
    if (!status)
        status = descriptor_from_api(&space->descriptor, descriptor);
    if (!status)
        status = canonical_new(&space->canonical, &space->canonical_size, space->fingerprint,
                               space->descriptor);
    if (status)
        return status;
    cst_key_root(space->fingerprint, space->salt, space->salt_size, space->root);
    *out = cst_steal(&space);
    return CISTERN_OK;
}

/* ---- SpaceOpen, SpaceClose ---- */

struct attach {
    struct cst_call call;
    cistern_space *space;
};

static int32_t attach_reply(struct cst_call *call, const struct cst_packet *packet,
                            struct cst_fds *fds) {
    cistern_space *space = cst_container_of(call, struct attach, call)->space;
    const Cistern__V1__SpaceOpenReply *reply = cst_reply_unpack(call, packet);

    if (!reply)
        return cst_call_corrupt(call, "SpaceOpen");
    if (reply->fingerprint.len != sizeof(space->fingerprint) ||
        memcmp(reply->fingerprint.data, space->fingerprint, sizeof(space->fingerprint)) != 0 ||
        reply->block_bytes != space->descriptor->block_bytes ||
        reply->block_tokens != space->descriptor->block_tokens)
        return cst_call_corrupt(call, "the space has another fingerprint");
    space->handle = reply->space;
    space->generation = call->client->conn.generation;
    return CISTERN_OK;
}

int32_t cst_client_space_attach(cistern_space *space) {
    struct attach attach = { .call = CST_CALL_INIT(attach_reply), .space = space };
    Cistern__V1__SpaceOpen message = CISTERN__V1__SPACE_OPEN__INIT;

    message.kind = space->kind;
    message.scope = space->scope;
    message.quality_class = space->quality_class;
    message.salt = (ProtobufCBinaryData){ .data = space->salt, .len = space->salt_size };
    return cst_call_run(space->client, &attach.call,
                        &(struct cst_request){ .type = CST_MSG_SPACE_OPEN,
                                               .message = &message.base,
                                               .bulk_field = 1,
                                               .bulk = space->canonical,
                                               .bulk_size = space->canonical_size },
                        0);
}

CST_EXPORT int32_t cistern_space_open(cistern_client *client, const cistern_descriptor *descriptor,
                                      const cistern_space_options *options, cistern_space **out) {
    cistern_space *space = NULL;
    int32_t status;

    if (!client || !out)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "client or out is NULL");
    if (cst_check_fork(client))
        return CISTERN_E_FORKED;
    status = space_new(&space, client, descriptor, options);
    if (status)
        return status;
    status = cst_enter(client, space, CST_NEED_NOTHING);
    if (status) {
        if (!client->lazy || !cst_is_miss(status)) {
            (void)space_free(space);
            return status;
        }
        (void)pthread_mutex_lock(&client->lock);
    }
    cst_list_append(&client->spaces, &space->link);
    *out = space;
    cst_leave(client, CST_NEED_NOTHING);
    return CISTERN_OK;
}

static bool is_shared_handle(const cistern_client *c, uint32_t handle) {
    const struct cst_list *it;

    for (it = c->spaces.next; it != &c->spaces; it = it->next) {
        const cistern_space *other = cst_list_entry(it, const cistern_space, link);

        if (other->open && other->generation == c->conn.generation && other->handle == handle)
            return true;
    }
    return false;
}

static void detach(cistern_client *c, cistern_space *space) {
    Cistern__V1__SpaceClose message = CISTERN__V1__SPACE_CLOSE__INIT;
    struct cst_call call = CST_CALL_INIT(NULL);

    space->open = false;
    if (!c->conn.up || space->generation != c->conn.generation ||
        is_shared_handle(c, space->handle))
        return;
    message.space = space->handle;
    (void)cst_call_run(
        c, &call, &(struct cst_request){ .type = CST_MSG_SPACE_CLOSE, .message = &message.base },
        0);
}

CST_EXPORT void cistern_space_close(cistern_space *space) {
    cistern_client *c;

    if (!space || space->client->forked)
        return;
    c = space->client;
    (void)pthread_mutex_lock(&c->slow); /* nobody opens the same identity meanwhile */
    (void)pthread_mutex_lock(&c->lock);
    detach(c, space);
    cst_client_space_unref(space);
    cst_leave(c, CST_NEED_LISTS);
}

CST_EXPORT uint64_t cistern_space_block_bytes(const cistern_space *space) {
    return space ? space->descriptor->block_bytes : 0;
}

CST_EXPORT uint32_t cistern_space_block_tokens(const cistern_space *space) {
    return space ? space->descriptor->block_tokens : 0;
}

/* ---- keys ---- */

static int32_t check_space(const cistern_space *space) {
    if (!space)
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the space is NULL");
    return cst_check_fork(space->client);
}

CST_EXPORT int32_t cistern_key_root(const cistern_space *space, uint8_t out[32]) {
    int32_t status = check_space(space);

    if (status)
        return status;
    if (!out)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "out is NULL");
    memcpy(out, space->root, sizeof(space->root));
    return CISTERN_OK;
}

CST_EXPORT int32_t cistern_key_chain(const cistern_space *space, const uint8_t *parent,
                                     const uint32_t *tokens, size_t n_tokens, uint8_t *keys,
                                     size_t cap, size_t *n_keys) {
    int32_t status = check_space(space);
    uint32_t block;
    size_t n;

    if (status)
        return status;
    block = space->descriptor->block_tokens;
    n = n_tokens / block + (n_tokens % block != 0);
    if ((n && (!tokens || !keys)) || !n_keys)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "tokens, keys or n_keys is NULL");
    if (n > cap)
        return cst_client_fail(CISTERN_E_TOO_LARGE, "%zu keys are needed, there is room for %zu", n,
                               cap);
    cst_key_chain(parent ? parent : space->root, tokens, n_tokens, block, keys);
    *n_keys = n;
    return CISTERN_OK;
}

CST_EXPORT int32_t cistern_key_block(const uint8_t parent[32], const uint32_t *tokens,
                                     uint32_t n_tokens, const void *extra, uint32_t extra_size,
                                     uint8_t out[32]) {
    if (!parent || !out || (n_tokens && !tokens) || (extra_size && !extra))
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "parent, tokens, extra or out is NULL");
    cst_key_block(parent, tokens, n_tokens, extra, extra_size, out);
    return CISTERN_OK;
}

CST_EXPORT int32_t cistern_key_from_bytes(const void *data, size_t size, uint8_t out[32]) {
    if (!out || (size && !data))
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "data or out is NULL");
    cst_key_from_bytes(data, size, out);
    return CISTERN_OK;
}
