/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns side data in the client: their way in and out of the daemon, and the parsed versions that a
 * space keeps for decoding frames.
 *
 * Invariants: 1. only the thread that entered with CST_NEED_LISTS uses the list area of staging; 2.
 * what comes from the daemon is used only if its SHA-256 is the one that was announced; 3. a
 * version that a thread decodes with stays; of the others a space keeps the last ones.
 */
#include "client/client_side.h"

#include "base/macros.h"
#include "base/mem.h"
#include "base/sha256.h"
#include "client/client_plan.h"

#include <string.h>

enum { ALIGN = 64, KEPT = 4 };

/* ---- SidedataGet ---- */

struct get {
    struct cst_call call;
    cistern_sidedata_info info;
    uint64_t length;
};

static int32_t get_reply(struct cst_call *call, const struct cst_packet *packet,
                         struct cst_fds *fds) {
    struct get *get = cst_container_of(call, struct get, call);
    const Cistern__V1__SidedataGetReply *reply = cst_reply_unpack(call, packet);

    if (!reply || reply->sha256.len != sizeof(get->info.sha256) ||
        reply->size > CST_SIDE_BYTES_MAX || reply->length > reply->size)
        return cst_call_corrupt(call, "SidedataGet");
    get->info.version = reply->version;
    get->info.bytes = reply->size;
    get->length = reply->length;
    memcpy(get->info.sha256, reply->sha256.data, sizeof(get->info.sha256));
    return CISTERN_OK;
}

/* Entered; without `into` only the numbers. */
static int32_t get_piece(struct get *get, const cistern_space *space, uint32_t version,
                         uint64_t offset, Cistern__V1__ListRef *into) {
    Cistern__V1__SidedataGet message = CISTERN__V1__SIDEDATA_GET__INIT;

    get->call = (struct cst_call)CST_CALL_INIT(get_reply);
    message.space = space->handle;
    message.version = version;
    message.offset = offset;
    message.into = into;
    return cst_call_run(
        space->client, &get->call,
        &(struct cst_request){ .type = CST_MSG_SIDEDATA_GET, .message = &message.base }, 0);
}

/* The connection may be lost during any call: the caller keeps the staging slab. */
static int32_t get_into(struct get *get, cistern_space *space, const struct cst_staging *staging,
                        uint32_t version, uint8_t *data, size_t cap) {
    Cistern__V1__ListRef into = CISTERN__V1__LIST_REF__INIT;
    uint64_t room = staging->size - staging->lists;
    int32_t status = get_piece(get, space, version, 0, NULL);
    uint64_t size = get->info.bytes, done = 0;

    if (!status && size > cap)
        return cst_client_fail(CISTERN_E_TOO_LARGE, "the side data have %llu bytes",
                               (unsigned long long)size);
    into.offset = staging->lists;
    while (!status && done < size) {
        into.length = CST_MIN(room, size - done);
        status = get_piece(get, space, get->info.version, done, &into);
        if (!status && (get->info.bytes != size || get->length != into.length))
            status = cst_client_fail(CISTERN_E_CORRUPT, "the daemon sent a part of side data only");
        if (status)
            return status;
        memcpy(data + done, staging->data + into.offset, into.length);
        done += into.length;
    }
    return status;
}

/* Entered with CST_NEED_LISTS. */
static int32_t get_all(struct get *get, cistern_space *space, uint32_t version, uint8_t *data,
                       size_t cap) {
    struct cst_staging *staging = space->client->map.staging;
    int32_t status;

    cst_staging_ref(staging);
    status = get_into(get, space, staging, version, data, cap);
    cst_staging_unref(staging);
    return status;
}

static int32_t check_hash(const struct get *get, const uint8_t *data) {
    uint8_t hash[CST_SHA256_SIZE];

    cst_sha256(data, get->info.bytes, hash);
    if (!memcmp(hash, get->info.sha256, sizeof(hash)))
        return CISTERN_OK;
    return cst_client_fail(CISTERN_E_CORRUPT, "side data were damaged on their way");
}

static void answer_info(cistern_sidedata_info *out, cistern_sidedata_info info) {
    uint32_t size = out->size;

    memcpy(out, &info, CST_MIN(sizeof(info), (size_t)size));
    out->size = size;
}

CST_EXPORT int32_t cistern_sidedata_get(cistern_space *space, uint32_t version, void *data,
                                        size_t cap, cistern_sidedata_info *info) {
    enum cst_need need = data ? CST_NEED_LISTS : CST_NEED_NOTHING;
    struct get get = { .length = 0 };
    int32_t status;

    if (!space)
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the space is NULL");
    if (info && info->size < sizeof(info->size))
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "info->size is not set");
    status = cst_enter(space->client, space, need);
    if (status)
        return status;
    status =
        data ? get_all(&get, space, version, data, cap) : get_piece(&get, space, version, 0, NULL);
    cst_leave(space->client, need);
    if (!status && data)
        status = check_hash(&get, data);
    if (!status && info)
        answer_info(info, get.info);
    return status;
}

/* ---- SidedataPut ---- */

struct put {
    struct cst_call call;
    uint32_t version;
};

static int32_t put_reply(struct cst_call *call, const struct cst_packet *packet,
                         struct cst_fds *fds) {
    const Cistern__V1__SidedataPutReply *reply = cst_reply_unpack(call, packet);

    if (!reply)
        return cst_call_corrupt(call, "SidedataPut");
    cst_container_of(call, struct put, call)->version = reply->version;
    return CISTERN_OK;
}

/* Entered with CST_NEED_LISTS. */
static int32_t put_all(struct put *put, cistern_space *space, uint32_t kind, const uint8_t *data,
                       size_t size) {
    const struct cst_staging *staging = space->client->map.staging;
    uint64_t room = staging->size - staging->lists;
    Cistern__V1__SidedataPut message = CISTERN__V1__SIDEDATA_PUT__INIT;
    Cistern__V1__ListRef ref;
    int32_t status = CISTERN_OK;

    message.space = space->handle;
    message.kind = kind;
    message.size = size;
    message.data = &ref;
    for (size_t done = 0; !status && done < size; done += ref.length) {
        size_t used = 0;

        if (space->client->map.staging != staging) /* lost since the last piece */
            return cst_client_fail(CISTERN_E_DISCONNECTED, "%s", space->client->conn.lost);
        put->call = (struct cst_call)CST_CALL_INIT(put_reply);
        message.offset = done;
        cst_plan_lay(space->client, &ref, &used, data + done, CST_MIN(size - done, (size_t)room));
        status = cst_call_run(
            space->client, &put->call,
            &(struct cst_request){ .type = CST_MSG_SIDEDATA_PUT, .message = &message.base }, 0);
    }
    return status;
}

CST_EXPORT int32_t cistern_sidedata_put(cistern_space *space, uint32_t kind, const void *data,
                                        size_t size, uint32_t *version) {
    struct put put = { .version = 0 };
    int32_t status;

    if (!space)
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the space is NULL");
    if (!data || !size)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "there are no bytes to put");
    status = cst_enter(space->client, space, CST_NEED_LISTS);
    if (status)
        return status;
    status = put_all(&put, space, kind, data, size);
    cst_leave(space->client, CST_NEED_LISTS);
    if (!status && version)
        *version = put.version;
    return status;
}

/* ---- for decoding here ---- */

struct cst_client_side {
    struct cst_list link; /* space->sides, the last used one first; client's lock */
    uint32_t users;       /* client's lock */
    struct cst_side side; /* constant from here on */
    uint8_t *bytes, *memory;
};

static struct cst_client_side *side_free(struct cst_client_side *side) {
    if (!side)
        return NULL;
    cst_list_unlink(&side->link);
    (void)cst_free(side->bytes);
    (void)cst_free(side->memory);
    return cst_free(side);
}
CST_DEFINE_FREEP(struct cst_client_side, side_free)

/* Lock held. */
static struct cst_client_side *find(cistern_space *space, uint32_t version, uint32_t check) {
    for (struct cst_list *it = space->sides.next; it != &space->sides; it = it->next) {
        struct cst_client_side *side = cst_list_entry(it, struct cst_client_side, link);

        if (cst_side_is(&side->side, version, check))
            return side;
    }
    return NULL;
}

/* Lock held. */
static void forget_old(cistern_space *space) {
    struct cst_list *it, *tmp;
    unsigned n = 0;

    cst_list_for_each_safe (it, tmp, &space->sides) {
        struct cst_client_side *side = cst_list_entry(it, struct cst_client_side, link);

        if (++n > KEPT && !side->users)
            (void)side_free(side);
    }
}

static int32_t parse(struct cst_client_side *side, size_t size,
                     const struct cst_descriptor *descriptor) {
    size_t n = cst_side_memory(descriptor);

    side->memory = cst_malloc(n + ALIGN);
    if (!side->memory)
        return cst_client_fail_status(CISTERN_E_NO_MEMORY);
    if (cst_side_parse(&side->side, side->bytes, size, descriptor,
                       (void *)cst_align_up((uintptr_t)side->memory, ALIGN), n))
        return cst_client_fail(CISTERN_E_UNSUPPORTED, "these side data are not understood here");
    return CISTERN_OK;
}

static int32_t fetch(cistern_space *space, uint32_t version, struct cst_client_side **out) {
    cst_auto(side_freep) struct cst_client_side *side = cst_calloc(1, sizeof(*side));
    cistern_sidedata_info info = { .size = sizeof(info) };
    int32_t status;

    if (!side)
        return cst_client_fail_status(CISTERN_E_NO_MEMORY);
    cst_list_init(&side->link);
    status = cistern_sidedata_get(space, version, NULL, 0, &info);
    if (status)
        return status;
    side->bytes = cst_malloc(info.bytes);
    if (!side->bytes)
        return cst_client_fail_status(CISTERN_E_NO_MEMORY);
    status = cistern_sidedata_get(space, version, side->bytes, info.bytes, NULL);
    if (!status)
        status = parse(side, info.bytes, space->descriptor);
    if (!status)
        *out = cst_steal(&side);
    return status;
}

int32_t cst_client_side_get(cistern_space *space, uint32_t version, uint32_t check,
                            struct cst_client_side **out) {
    cistern_client *c = space->client;
    struct cst_client_side *side, *fresh = NULL;
    int32_t status = CISTERN_OK;

    (void)pthread_mutex_lock(&c->lock);
    side = find(space, version, check);
    if (!side) {
        (void)pthread_mutex_unlock(&c->lock);
        status = fetch(space, version, &fresh);
        (void)pthread_mutex_lock(&c->lock);
        side = find(space, version, check); /* another thread was faster */
        if (!side && fresh && cst_side_is(&fresh->side, version, check))
            side = cst_steal(&fresh);
    }
    if (side) {
        side->users++;
        cst_list_unlink(&side->link);
        cst_list_prepend(&space->sides, &side->link);
        forget_old(space);
    }
    (void)pthread_mutex_unlock(&c->lock);
    (void)side_free(fresh);
    *out = side;
    if (side)
        return CISTERN_OK;
    return status ? status
                  : cst_client_fail(CISTERN_E_CORRUPT, "the frame refers to other side data");
}

const struct cst_side *cst_client_side_parsed(const struct cst_client_side *side) {
    return side ? &side->side : NULL;
}

void cst_client_side_put(cistern_space *space, struct cst_client_side *side) {
    if (!side)
        return;
    (void)pthread_mutex_lock(&space->client->lock);
    side->users--;
    (void)pthread_mutex_unlock(&space->client->lock);
}

void cst_client_side_free_all(cistern_space *space) {
    struct cst_list *it;

    while ((it = cst_list_first(&space->sides)))
        (void)side_free(cst_list_entry(it, struct cst_client_side, link));
}
