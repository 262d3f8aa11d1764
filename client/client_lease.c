/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns leases: from the Acquire that names their ids to the release that ends them.
 *
 * Invariants
 *  1. Lease ids count up per client and are never reused, so an answer that comes late never
 *     touches another lease, and giving back an id that was never granted is harmless.
 *  2. A lease that the caller gets points into a mapped slab, checked against its size, and holds
 *     a reference to it; what the daemon granted but we can't use is given back in the same call.
 *  3. Leases of a lost connection are released locally only: their slab is an orphan mapping.
 *  4. The usual Acquire (few keys, known slabs) makes no heap call.
 *
 * Threads: the client's lock; a held lease is read without it, since only its release changes it.
 */
#include "base/mem.h"
#include "client/client_plan.h"
#include "client/client_side.h"
#include "codec/codec.h"
#include "proto/record.h"

#include <string.h>

enum {
    MODE_PACKED = 1,
    ACQUIRE_KEYS_FIELD = 2,
    FEW = 64,           /* leases that fit the stack */
    ACQUIRE_MAX = 3072, /* keys of one Acquire: their records fit any answer */
    RELEASE_MAX = 256,  /* ids of one Release or Acquire; fits the stack and any packet */
};

/* One Acquire: n keys, leases from the pool, ids first .. first + n - 1. */
struct acquire {
    struct cst_call call;
    cistern_space *space;
    const cistern_acquire_options *options;
    cistern_lease **leases; /* n, all set */
    size_t n;
    uint64_t first;
    bool answered, unmapped; /* unmapped: a granted lease's slab is not mapped yet */
};

/* ---- life of a lease; lock held ---- */

static void lease_put(cistern_lease *lease) {
    cistern_client *c = lease->client;

    lease->held = false;
    lease->data = NULL;
    if (lease->slab)
        cst_slab_unref(c, lease->slab);
    lease->slab = NULL;
    cst_client_space_unref(lease->space);
    cst_pool_put(&c->leases, lease);
}

static bool is_live(const cistern_client *c, const cistern_lease *lease) {
    return c->conn.up && lease->generation == c->conn.generation;
}

static bool lease_get(cistern_lease **out, struct acquire *a, size_t i) {
    cistern_client *c = a->space->client;
    cistern_lease *lease = cst_pool_get(&c->leases);

    if (!lease)
        return false;
    *lease = (cistern_lease){
        .client = c,
        .space = a->space,
        .id = a->first + i,
        .generation = c->conn.generation,
        .layer_first = a->options->layer_first,
        .layer_count = a->options->layer_count,
        .status = CISTERN_E_TIMEOUT, /* until the daemon says something */
        .owed = true,
    };
    cst_list_init(&lease->link);
    cst_client_space_ref(a->space);
    *out = lease;
    return true;
}

/* ---- what the daemon answers ---- */

/* Points the lease into its slab. False: the record is a lie. */
static bool bind(cistern_lease *lease, struct cst_slab *slab) {
    if (lease->offset > slab->size || lease->size > slab->size - lease->offset)
        return false;
    cst_slab_ref(slab);
    lease->slab = slab;
    lease->data = slab->data + lease->offset;
    return true;
}

static bool is_size_sane(const cistern_lease *lease, uint64_t size) {
    const struct cst_descriptor *descriptor = lease->space->descriptor;

    return lease->packed ? size > 0 && size <= cst_frame_bound(descriptor)
                         : size == descriptor->block_bytes;
}

static void granted(struct acquire *a, cistern_lease *lease,
                    const struct cst_lease_record *record) {
    uint64_t size = cst_load64(&record->length);
    struct cst_slab *slab;

    lease->status = CISTERN_E_CORRUPT;
    lease->tier = record->tier;
    lease->slab_id = cst_load32(&record->slab);
    lease->offset = cst_load64(&record->offset);
    lease->size = size;
    lease->tokens = cst_load32(&record->tokens);
    lease->crc32c = cst_load32(&record->crc32c);
    /* Without a frame the daemon answers decoded bytes; a raw frame is longer than those. */
    lease->packed = a->options->mode == MODE_PACKED &&
                    (record->preset || size != lease->space->descriptor->block_bytes);
    if (!is_size_sane(lease, size))
        return;
    slab = cst_map_find(&a->space->client->map, lease->slab_id);
    if (!slab)
        a->unmapped = true;
    else if (!bind(lease, slab))
        return;
    lease->status = CISTERN_OK;
}

/* Keeps one record. True: the lease is settled. */
static bool settle(struct acquire *a, const uint8_t *bytes) {
    struct cst_lease_record record;
    uint64_t id;
    cistern_lease *lease;

    memcpy(&record, bytes, sizeof(record));
    id = cst_load64(&record.lease);
    if (id - a->first >= a->n)
        return false;
    lease = a->leases[id - a->first];
    if (lease->status != CISTERN_E_TIMEOUT && lease->status != CISTERN_E_PENDING)
        return false; /* settled before: a second record changes nothing */
    lease->status = cst_status_to_api(cst_load16(&record.status));
    if (lease->status == CISTERN_E_PENDING)
        return false;
    if (lease->status == CISTERN_OK)
        granted(a, lease, &record);
    else
        lease->owed = false;
    return true;
}

static int32_t acquire_reply(struct cst_call *call, const struct cst_packet *packet,
                             struct cst_fds *fds) {
    struct acquire *a = cst_container_of(call, struct acquire, call);
    const Cistern__V1__AcquireReply *reply = cst_reply_unpack(call, packet);
    size_t size = sizeof(struct cst_lease_record);

    if (!reply || a->answered || reply->leases.len != a->n * size)
        return cst_call_corrupt(call, "Acquire");
    a->answered = true;
    for (size_t i = 0; i < a->n; i++) {
        (void)settle(a, reply->leases.data + i * size);
        if (a->leases[i]->status == CISTERN_E_TIMEOUT)
            return cst_call_corrupt(call, "Acquire without a record of each key");
        call->pending += a->leases[i]->status == CISTERN_E_PENDING;
    }
    return CISTERN_OK;
}

static bool acquire_ready(struct cst_call *call, const uint8_t *record) {
    return settle(cst_container_of(call, struct acquire, call), record);
}

/* ---- giving back ---- */

/* Tells the daemon without waiting; ids hold n <= RELEASE_MAX. */
static void post_release(cistern_client *c, uint8_t *ids, size_t n) {
    Cistern__V1__Release message = CISTERN__V1__RELEASE__INIT;

    message.leases = (ProtobufCBinaryData){ .data = ids, .len = 8 * n };
    if (n &&
        !cst_post(c, &(struct cst_request){ .type = CST_MSG_RELEASE, .message = &message.base }))
        cst_conn_lose(c, "the daemon does not read its socket");
}

/* Ends the handles leases[*at ..] until `max` ids of live ones are in ids. */
static size_t end_leases(cistern_client *c, cistern_lease *const *leases, size_t n, size_t *at,
                         uint8_t *ids, size_t max) {
    size_t used = 0;

    for (; *at < n && used < max; ++*at) {
        cistern_lease *lease = leases[*at];

        if (!lease || lease->client != c || !lease->held)
            continue;
        if (is_live(c, lease))
            cst_store64(ids + 8 * used++, lease->id);
        lease_put(lease);
    }
    return used;
}

CST_EXPORT void cistern_release(cistern_client *client, cistern_lease *const *leases, size_t n) {
    uint8_t ids[8 * RELEASE_MAX];
    int32_t status = CISTERN_OK;

    if (!client || !leases || client->forked)
        return;
    (void)pthread_mutex_lock(&client->lock);
    for (size_t at = 0; at < n;) {
        Cistern__V1__Release message = CISTERN__V1__RELEASE__INIT;
        struct cst_call call = CST_CALL_INIT(NULL);
        size_t used = end_leases(client, leases, n, &at, ids, RELEASE_MAX);

        message.leases = (ProtobufCBinaryData){ .data = ids, .len = 8 * used };
        if (status == CISTERN_E_TIMEOUT) /* the daemon hangs: once is enough to wait */
            post_release(client, ids, used);
        else if (used)
            status = cst_call_run(
                client, &call,
                &(struct cst_request){ .type = CST_MSG_RELEASE, .message = &message.base }, 0);
    }
    cst_leave(client, CST_NEED_NOTHING);
}

/* Puts back leases that the caller won't get; what the daemon may have granted is given back. */
static void drop_leases(cistern_client *c, cistern_lease **leases, size_t n) {
    uint8_t ids[8 * RELEASE_MAX];
    size_t used = 0;

    for (size_t i = 0; i < n; i++) {
        if (!leases[i])
            continue;
        if (leases[i]->owed && is_live(c, leases[i]))
            cst_store64(ids + 8 * used++, leases[i]->id);
        lease_put(leases[i]);
        leases[i] = NULL;
        if (used == RELEASE_MAX) {
            post_release(c, ids, used);
            used = 0;
        }
    }
    post_release(c, ids, used);
}

/* ---- mapping ---- */

static bool is_unmapped(const cistern_lease *lease) {
    return lease->status == CISTERN_OK && !lease->slab;
}

static void bind_late(struct acquire *a, cistern_lease *lease) {
    struct cst_slab *slab = cst_map_find(&a->space->client->map, lease->slab_id);

    if (!slab)
        lease->status = CISTERN_E_NOT_FOUND;
    else if (!bind(lease, slab))
        lease->status = CISTERN_E_CORRUPT;
}

/* Ids of unmapped slabs of leases[from ..], each once; *from moves behind the last lease seen. */
static size_t unmapped_slabs(const struct acquire *a, size_t *from, uint32_t *ids, size_t max) {
    size_t n = 0;

    for (; *from < a->n; ++*from) {
        const cistern_lease *lease = a->leases[*from];
        size_t k = 0;

        if (!is_unmapped(lease))
            continue;
        while (k < n && ids[k] != lease->slab_id)
            k++;
        if (k == max)
            return n;
        ids[k] = lease->slab_id;
        n = CST_MAX(n, k + 1);
    }
    return n;
}

/* Maps the slabs that granted leases name. A lease whose slab can't be had becomes a miss. Entered;
 * lets go of the lock so that `slow` comes first. */
static int32_t map_slabs(struct acquire *a) {
    cistern_client *c = a->space->client;
    int32_t status = CISTERN_OK;

    (void)pthread_mutex_unlock(&c->lock);
    (void)pthread_mutex_lock(&c->slow);
    (void)pthread_mutex_lock(&c->lock);
    for (size_t i = 0; !status && i < a->n;) {
        uint32_t ids[CST_PACKET_FDS_MAX];
        size_t from = i, n = unmapped_slabs(a, &i, ids, CST_PACKET_FDS_MAX);

        if (!is_live(c, a->leases[0]))
            status = cst_client_fail(CISTERN_E_DISCONNECTED, "%s", c->conn.lost);
        else if (n)
            status = cst_map_fetch(c, ids, n);
        for (size_t k = from; !status && k < i; k++)
            if (is_unmapped(a->leases[k]))
                bind_late(a, a->leases[k]);
    }
    (void)pthread_mutex_unlock(&c->slow);
    return status;
}

/* ---- Acquire ---- */

static int32_t get_leases(struct acquire *a) {
    cistern_client *c = a->space->client;

    a->first = c->next_lease;
    for (size_t i = 0; i < a->n; i++) {
        if (!lease_get(&a->leases[i], a, i)) {
            for (size_t k = 0; k < i; k++)
                lease_put(a->leases[k]);
            return cst_client_fail_status(CISTERN_E_NO_MEMORY);
        }
    }
    c->next_lease += a->n;
    return CISTERN_OK;
}

static int32_t acquire_send(struct acquire *a, const uint8_t *keys, uint8_t *release,
                            size_t n_release) {
    Cistern__V1__Acquire message = CISTERN__V1__ACQUIRE__INIT;

    message.space = a->space->handle;
    message.mode = a->options->mode;
    message.lease = a->first;
    message.layer_first = a->options->layer_first;
    message.layer_count = a->options->layer_count;
    message.release = (ProtobufCBinaryData){ .data = release, .len = 8 * n_release };
    return cst_call_run(a->space->client, &a->call,
                        &(struct cst_request){ .type = CST_MSG_ACQUIRE,
                                               .message = &message.base,
                                               .bulk_field = ACQUIRE_KEYS_FIELD,
                                               .bulk = keys,
                                               .bulk_size = a->n * CISTERN_KEY_SIZE },
                        a->options->timeout_ms);
}

/* Entered. On failure the leases are gone. */
static int32_t acquire_run(struct acquire *a, const uint8_t *keys, uint8_t *release,
                           size_t n_release) {
    cistern_client *c = a->space->client;
    int32_t status = get_leases(a);

    if (status) {
        post_release(c, release, n_release);
        return status;
    }
    status = acquire_send(a, keys, release, n_release);
    if (!a->answered) /* refused or never sent; ids that are given back twice are harmless */
        post_release(c, release, n_release);
    if (status == CISTERN_E_TIMEOUT && a->answered)
        status = CISTERN_OK; /* of the others; those that are late say so */
    if (!status && a->unmapped)
        status = map_slabs(a);
    if (!status)
        return CISTERN_OK;
    if (!a->answered && status != CISTERN_E_TIMEOUT && status != CISTERN_E_CORRUPT)
        for (size_t i = 0; i < a->n; i++) /* an error answer granted nothing */
            a->leases[i]->owed = false;
    drop_leases(c, a->leases, a->n);
    return status;
}

/* Gives out what was granted. Entered. */
static void hand_over(cistern_client *c, cistern_lease **found, size_t n, cistern_lease **leases,
                      int32_t *statuses) {
    for (size_t i = 0; i < n; i++) {
        statuses[i] = found[i]->status == CISTERN_E_PENDING ? CISTERN_E_TIMEOUT : found[i]->status;
        leases[i] = statuses[i] ? NULL : found[i];
        if (statuses[i])
            continue;
        found[i]->held = true;
        found[i] = NULL;
    }
    drop_leases(c, found, n);
}

/* One request's worth of keys; entered. *at counts the handles of options->release that ended. */
static int32_t acquire_some(cistern_space *space, const uint8_t *keys, size_t n, size_t *at,
                            const cistern_acquire_options *options, cistern_lease **found) {
    struct acquire a;
    uint8_t release[8 * RELEASE_MAX];
    size_t n_release =
        end_leases(space->client, options->release, options->n_release, at, release, RELEASE_MAX);

    cst_call_init(&a.call, acquire_reply, acquire_ready);
    a.space = space;
    a.options = options;
    a.leases = found;
    a.n = n;
    a.answered = a.unmapped = false;
    return acquire_run(&a, keys, release, n_release);
}

/* All keys, in as many requests as the limits ask for. Returns with the lock, whatever the status;
 * on failure *done leases remain to be dropped. */
static int32_t acquire_all(cistern_space *space, const uint8_t *keys, size_t n, size_t *released,
                           const cistern_acquire_options *options, cistern_lease **found,
                           size_t *done) {
    cistern_client *c = space->client;
    struct cst_plan plan = { .key_bytes = CISTERN_KEY_SIZE,
                             .reply_bytes = sizeof(struct cst_lease_record),
                             .other_bytes = 8 * RELEASE_MAX,
                             .in_packet = true };

    for (;;) {
        int32_t status;

        plan.n = CST_MIN(n - *done, (size_t)ACQUIRE_MAX);
        status = cst_plan_enter(c, space, &plan);
        if (status) {
            (void)pthread_mutex_lock(&c->lock);
            return status;
        }
        status = acquire_some(space, keys + *done * CISTERN_KEY_SIZE, plan.take, released, options,
                              found + *done);
        if (status)
            return status;
        *done += plan.take;
        if (*done == n)
            break;
        cst_leave(c, CST_NEED_NOTHING);
    }
    return is_live(c, found[0]) ? CISTERN_OK : cst_client_fail_status(CISTERN_E_DISCONNECTED);
}

static int32_t acquire(cistern_space *space, const uint8_t *keys, size_t n,
                       const cistern_acquire_options *options, cistern_lease **found,
                       cistern_lease **leases, int32_t *statuses) {
    cistern_client *c = space->client;
    size_t released = 0, done = 0;
    int32_t status = acquire_all(space, keys, n, &released, options, found, &done);

    if (status)
        drop_leases(c, found, done);
    else
        hand_over(c, found, n, leases, statuses);
    cst_leave(c, CST_NEED_NOTHING);
    if (released < options->n_release)
        cistern_release(c, options->release + released, options->n_release - released);
    return status;
}

static int32_t read_acquire_options(const cistern_space *space, cistern_acquire_options *known,
                                    const cistern_acquire_options *options) {
    int32_t status = cst_options_read(known, sizeof(*known), options, "options");
    uint32_t n_layers = space->descriptor->n_layers;

    if (status)
        return status;
    if (known->mode > MODE_PACKED)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "the mode is 0 or 1");
    if (known->layer_first > n_layers || known->layer_count > n_layers - known->layer_first)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "the layer range ends after layer %u",
                               n_layers);
    if (known->n_release && !known->release)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "release is NULL");
    return CISTERN_OK;
}

CST_EXPORT int32_t cistern_acquire(cistern_space *space, const uint8_t *keys, size_t n,
                                   const cistern_acquire_options *options, cistern_lease **leases,
                                   int32_t *statuses) {
    cst_auto(cst_freep) cistern_lease **many = NULL;
    cistern_lease *few[FEW];
    cistern_acquire_options known;
    int32_t status;

    if (!space)
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the space is NULL");
    if (n && (!keys || !leases || !statuses))
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "keys, leases or statuses is NULL");
    if (cst_check_fork(space->client))
        return CISTERN_E_FORKED;
    status = read_acquire_options(space, &known, options);
    if (status)
        return status;
    if (n > FEW)
        many = cst_malloc(n * sizeof(*many));
    if ((n > FEW && !many) || !n) {
        cistern_release(space->client, known.release, known.n_release);
        return n ? cst_client_fail_status(CISTERN_E_NO_MEMORY) : CISTERN_OK;
    }
    return acquire(space, keys, n, &known, many ? many : few, leases, statuses);
}

/* ---- reading ---- */

static int32_t check_lease(const cistern_lease *lease) {
    if (!lease || !lease->held)
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the lease is NULL or released");
    return cst_check_fork(lease->client);
}

CST_EXPORT int32_t cistern_lease_data(const cistern_lease *lease, const void **data, size_t *size,
                                      cistern_lease_info *info) {
    int32_t status = check_lease(lease);

    if (status)
        return status;
    if (!data || !size || (info && info->size < sizeof(info->size)))
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT,
                               "data or size is NULL, or info->size not set");
    *data = lease->data;
    *size = lease->size;
    if (info) {
        cistern_lease_info known = { .size = info->size,
                                     .tier = lease->tier,
                                     .packed = lease->packed,
                                     .tokens = lease->tokens,
                                     .slab = lease->slab_id,
                                     .crc32c = lease->crc32c,
                                     .offset = lease->offset };

        memcpy(info, &known, CST_MIN(sizeof(known), (size_t)info->size));
    }
    return CISTERN_OK;
}

/* A codec workspace: the space's, or a new one. */
static uint8_t *work_get(cistern_space *space, size_t size) {
    uint8_t *work;

    (void)pthread_mutex_lock(&space->client->lock);
    work = space->work;
    space->work = NULL;
    (void)pthread_mutex_unlock(&space->client->lock);
    return work ? work : cst_malloc(size);
}

static void work_put(cistern_space *space, uint8_t *work) {
    (void)pthread_mutex_lock(&space->client->lock);
    if (!space->work)
        space->work = cst_steal(&work);
    (void)pthread_mutex_unlock(&space->client->lock);
    (void)cst_free(work);
}

static int32_t decode_status(int r) {
    switch (r) {
    case 0:
        return CISTERN_OK;
    case CST_CODEC_E_VERSION:
        return cst_client_fail(CISTERN_E_UNSUPPORTED,
                               "the frame has a version that is not known here");
    default:
        return cst_client_fail(CISTERN_E_CORRUPT, "the frame does not decode; treat it as a miss");
    }
}

/* Those that the frame refers to, if any; to be put back. */
static int32_t side_get(const cistern_lease *lease, struct cst_client_side **out) {
    struct cst_frame_info info;

    if (cst_frame_inspect(lease->data, lease->size, &info) || !info.side_version)
        return CISTERN_OK; /* decoding says what is wrong with it */
    return cst_client_side_get(lease->space, info.side_version, info.side_check, out);
}

/* What decoding the frame needs, or finding out what is wrong with it. */
static size_t work_size_of(const cistern_lease *lease) {
    struct cst_frame_info info;
    uint32_t preset = CST_PRESET_RAW;

    if (!cst_frame_inspect(lease->data, lease->size, &info))
        preset = info.preset;
    return cst_codec_work_size(lease->space->descriptor, preset);
}

static int32_t decode(const cistern_lease *lease, void *block, size_t size) {
    enum { ALIGN = 64 };
    struct cst_client_side *side = NULL;
    const struct cst_descriptor *descriptor = lease->space->descriptor;
    struct cst_decode_params params = CST_DECODE_ALL;
    size_t work_size = work_size_of(lease);
    int32_t status = side_get(lease, &side);
    uint8_t *work;
    int r;

    if (status)
        return status;
    work = work_get(lease->space, work_size + ALIGN);
    if (!work) {
        cst_client_side_put(lease->space, side);
        return cst_client_fail_status(CISTERN_E_NO_MEMORY);
    }
    params.side = cst_client_side_parsed(side);
    params.first_layer = lease->layer_first;
    if (lease->layer_count)
        params.n_layers = lease->layer_count;
    else if (lease->layer_first)
        params.n_layers = descriptor->n_layers - lease->layer_first;
    r = cst_frame_decode(block, size, lease->data, lease->size, descriptor, &params,
                         (void *)cst_align_up((uintptr_t)work, ALIGN), work_size);
    work_put(lease->space, work);
    cst_client_side_put(lease->space, side);
    return decode_status(r);
}

CST_EXPORT int32_t cistern_lease_decode(const cistern_lease *lease, void *block, size_t size) {
    int32_t status = check_lease(lease);

    if (status)
        return status;
    if (!block || size < lease->space->descriptor->block_bytes)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "the block is NULL or too small");
    if (lease->packed)
        return decode(lease, block, size);
    memcpy(block, lease->data, lease->size);
    return CISTERN_OK;
}
