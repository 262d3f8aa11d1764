/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon of libcistern's tests; see fake_daemon.h. Written against docs/protocol.md and the
 * contract headers, not against the client. Invariants: 1. everything but the thread's poll
 * happens under the lock; 2. it asserts with assert(): cmocka's own would jump out of the thread.
 */
#include "tests/unit/client/fake_daemon.h"

#include "base/mem.h"
#include "client/client.h"
#include "proto/key.h"
#include "proto/status.h"
#include "tests/lib/check.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

void fake_lock(struct fake_daemon *f) {
    assert(!pthread_mutex_lock(&f->lock));
}

void fake_unlock(struct fake_daemon *f) {
    assert(!pthread_mutex_unlock(&f->lock));
}

void fake_set_hook(struct fake_daemon *f, fake_hook hook, void *arg) {
    fake_lock(f);
    f->hook = hook;
    f->hook_arg = arg;
    fake_unlock(f);
}

void fake_wait(struct fake_daemon *f, uint16_t type, unsigned n) {
    fake_lock(f);
    while (f->n_requests[type] < n)
        assert(!pthread_cond_wait(&f->changed, &f->lock));
    fake_unlock(f);
}

uint8_t fake_byte(const uint8_t *key, size_t i) {
    return (uint8_t)(key[i % 32] + i / 32);
}

/* ---- sending ---- */

void fake_send(struct fake_connection *c, const void *data, size_t n) {
    (void)cst_packet_send_borrowed_fds(c->fd, data, n, NULL, 0, 0);
}

void fake_reply_fds(struct fake_daemon *f, struct fake_connection *c,
                    const struct cst_packet *packet, const ProtobufCMessage *message,
                    const int *fds, size_t n_fds) {
    size_t n = cst_packet_pack(f->tx, sizeof(f->tx), packet->type, CST_PACKET_REPLY,
                               packet->request, message);

    (void)cst_packet_send_borrowed_fds(c->fd, f->tx, n, fds, n_fds, 0);
}

void fake_reply(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *packet,
                const ProtobufCMessage *message) {
    fake_reply_fds(f, c, packet, message, NULL, 0);
}

void fake_error(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *packet,
                int status) {
    fake_send(c, f->tx,
              cst_packet_pack_error(f->tx, sizeof(f->tx), packet->type, packet->request, status,
                                    cst_status_text(status)));
}

void fake_push(struct fake_daemon *f, uint16_t type, const ProtobufCMessage *message) {
    size_t n = cst_packet_pack(f->tx, sizeof(f->tx), type, CST_PACKET_PUSH, 0, message);

    for (size_t i = 0; i < FAKE_CONNECTIONS; i++)
        if (f->connections[i].fd >= 0)
            fake_send(&f->connections[i], f->tx, n);
}

void *fake_unpack(struct fake_daemon *f, const struct cst_packet *packet) {
    cst_arena_reset(&f->arena);
    return cst_message_unpack(cst_message_descriptor(packet->type, false), packet->payload,
                              packet->length, &f->arena);
}

/* ---- the store ---- */

struct fake_block *fake_find(struct fake_daemon *f, const uint8_t *key) {
    for (size_t i = 0; i < FAKE_BLOCKS; i++)
        if (f->blocks[i].used && !memcmp(f->blocks[i].key, key, 32))
            return &f->blocks[i];
    return NULL;
}

static size_t place_of(const struct fake_daemon *f, const struct fake_block *block) {
    return (size_t)(block - f->blocks);
}

static struct fake_block *add_block(struct fake_daemon *f, const uint8_t *key,
                                    const uint8_t *parent, const uint32_t *tokens,
                                    uint32_t n_tokens) {
    struct fake_block *block = f->blocks;

    while (block < f->blocks + FAKE_BLOCKS && block->used)
        block++;
    assert(block < f->blocks + FAKE_BLOCKS);
    block->used = true;
    memcpy(block->key, key, 32);
    memcpy(block->parent, parent, 32);
    memcpy(block->tokens, tokens, 4 * (size_t)n_tokens);
    block->n_tokens = n_tokens;
    return block;
}

void fake_store(struct fake_daemon *f, const uint8_t *key, const uint8_t *parent,
                const uint32_t *tokens, uint32_t n_tokens) {
    struct fake_block *block = add_block(f, key, parent, tokens, n_tokens);
    uint8_t *bytes = f->slab + place_of(f, block) * FAKE_BLOCK_BYTES;

    for (size_t i = 0; i < FAKE_BLOCK_BYTES; i++)
        bytes[i] = fake_byte(key, i);
}

/* A list from the packet or from staging. */
static ProtobufCBinaryData list_of(const struct fake_connection *c, ProtobufCBinaryData inline_list,
                                   const Cistern__V1__ListRef *ref) {
    if (!ref)
        return inline_list;
    assert(c->staging);
    return (ProtobufCBinaryData){ .data = c->staging + ref->offset, .len = ref->length };
}

/* ---- requests, each answered truthfully ---- */

static void hello(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    Cistern__V1__HelloReply reply = CISTERN__V1__HELLO_REPLY__INIT;
    char name[] = "uid-test", version[] = "fake";

    reply.version = 1;
    reply.epoch = f->epoch;
    reply.packet_max = f->packet_max;
    reply.keys_max = f->keys_max;
    reply.requests_max = 64;
    reply.staging_bytes = (uint64_t)f->staging_places * FAKE_BLOCK_BYTES + f->lists_bytes;
    reply.namespace_ = name;
    reply.daemon_version = version;
    fake_reply(f, c, p, &reply.base);
}

static void space_open(struct fake_daemon *f, struct fake_connection *c,
                       const struct cst_packet *p) {
    const Cistern__V1__SpaceOpen *m = fake_unpack(f, p);
    Cistern__V1__SpaceOpenReply reply = CISTERN__V1__SPACE_OPEN_REPLY__INIT;
    uint8_t fingerprint[32];

    cst_descriptor_fingerprint(m->descriptor.data, m->descriptor.len, fingerprint);
    reply.space = 5 + m->kind;
    reply.block_bytes = FAKE_BLOCK_BYTES;
    reply.block_tokens = FAKE_BLOCK_TOKENS;
    reply.fingerprint = (ProtobufCBinaryData){ 32, fingerprint };
    reply.presets = 3;
    fake_reply(f, c, p, &reply.base);
}

static void match_tail(struct fake_daemon *f, const uint8_t *parent, const uint8_t *tail,
                       size_t n_tail, Cistern__V1__LookupReply *reply) {
    for (size_t i = 0; i < FAKE_BLOCKS; i++) {
        struct fake_block *block = &f->blocks[i];
        uint32_t n = 0;

        if (!block->used || memcmp(block->parent, parent, 32) != 0)
            continue;
        while (n < n_tail && n < block->n_tokens &&
               cst_load32(tail + 4 * (size_t)n) == block->tokens[n])
            n++;
        if (n <= reply->partial_tokens)
            continue;
        reply->partial_tokens = n;
        reply->partial_stored = block->n_tokens;
        reply->partial_tier = CISTERN_TIER_HOT;
        reply->partial_key = (ProtobufCBinaryData){ 32, block->key };
    }
}

static void lookup(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    const Cistern__V1__Lookup *m = fake_unpack(f, p);
    ProtobufCBinaryData keys = list_of(c, m->keys, m->keys_ref);
    Cistern__V1__LookupReply reply = CISTERN__V1__LOOKUP_REPLY__INIT;
    static const uint8_t no_parent[32];
    struct cst_tier_run run = { .tier = CISTERN_TIER_HOT };
    const uint8_t *parent = m->parent.len ? m->parent.data : no_parent;

    while (reply.present < keys.len / 32 && fake_find(f, keys.data + 32 * (size_t)reply.present))
        reply.present++;
    if (reply.present && !m->parent.len)
        parent = keys.data + 32 * ((size_t)reply.present - 1);
    else if (!m->parent.len)
        parent =
            f->blocks[0].parent; /* tests store the first block first: its parent is the root */
    match_tail(f, parent, m->tail.data, m->tail.len / 4, &reply);
    cst_store32(&run.count, reply.present);
    reply.worst_tier = reply.present ? CISTERN_TIER_HOT : CISTERN_TIER_NONE;
    if (reply.present && !m->brief)
        reply.tiers = (ProtobufCBinaryData){ sizeof(run), (uint8_t *)&run };
    reply.cost_ns = reply.present * UINT64_C(1000);
    fake_reply(f, c, p, &reply.base);
}

static void lookup_each(struct fake_daemon *f, struct fake_connection *c,
                        const struct cst_packet *p) {
    const Cistern__V1__LookupEach *m = fake_unpack(f, p);
    ProtobufCBinaryData keys = list_of(c, m->keys, m->keys_ref);
    Cistern__V1__LookupEachReply reply = CISTERN__V1__LOOKUP_EACH_REPLY__INIT;
    size_t n = keys.len / 32;
    uint8_t *tiers = cst_calloc(n, 1), *bitmap = cst_calloc((n + 7) / 8, 1);

    assert(tiers && bitmap);
    for (size_t i = 0; i < n; i++) {
        if (!fake_find(f, keys.data + 32 * i))
            continue;
        tiers[i] = CISTERN_TIER_PACKED;
        bitmap[i / 8] = (uint8_t)(bitmap[i / 8] | 1 << i % 8);
    }
    reply.tiers = (ProtobufCBinaryData){ n, tiers };
    reply.bitmap = (ProtobufCBinaryData){ (n + 7) / 8, bitmap };
    fake_reply(f, c, p, &reply.base);
    tiers = cst_free(tiers);
    bitmap = cst_free(bitmap);
}

static void note_released(struct fake_daemon *f, const ProtobufCBinaryData *ids) {
    for (size_t i = 0; i < ids->len / 8; i++) {
        f->released[f->n_released++ % CST_COUNT(f->released)] = cst_load64(ids->data + 8 * i);
        f->n_leases -= f->n_leases > 0;
    }
}

static void acquire(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    const Cistern__V1__Acquire *m = fake_unpack(f, p);
    Cistern__V1__AcquireReply reply = CISTERN__V1__ACQUIRE_REPLY__INIT;
    size_t n = m->keys.len / 32;
    struct cst_lease_record *records = cst_calloc(n, sizeof(*records));

    assert(records);
    note_released(f, &m->release);
    for (size_t i = 0; i < n; i++) {
        const struct fake_block *block = fake_find(f, m->keys.data + 32 * i);

        cst_store64(&records[i].lease, m->lease + i);
        cst_store16(&records[i].status, block ? CST_STATUS_OK : CST_STATUS_NOT_FOUND);
        if (!block)
            continue;
        f->n_leases++;
        records[i].tier = CISTERN_TIER_HOT;
        cst_store32(&records[i].slab, FAKE_SLAB);
        cst_store64(&records[i].offset, place_of(f, block) * FAKE_BLOCK_BYTES);
        cst_store64(&records[i].length, FAKE_BLOCK_BYTES);
        cst_store32(&records[i].tokens, block->n_tokens);
    }
    reply.leases = (ProtobufCBinaryData){ n * sizeof(*records), (uint8_t *)records };
    fake_reply(f, c, p, &reply.base);
    records = cst_free(records);
}

static void release(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    const Cistern__V1__Release *m = fake_unpack(f, p);
    Cistern__V1__ReleaseReply reply = CISTERN__V1__RELEASE_REPLY__INIT;

    note_released(f, &m->leases);
    fake_reply(f, c, p, &reply.base);
}

static void slab_get(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    const Cistern__V1__SlabGet *m = fake_unpack(f, p);
    Cistern__V1__SlabGetReply reply = CISTERN__V1__SLAB_GET_REPLY__INIT;
    struct cst_slab_record records[CST_PACKET_FDS_MAX] = { 0 };
    size_t n = m->slabs.len / 4, n_fds = 0;

    assert(n <= CST_PACKET_FDS_MAX);
    for (size_t i = 0; i < n; i++) {
        uint32_t id = cst_load32(m->slabs.data + 4 * i);

        cst_store32(&records[i].slab, id);
        cst_store32(&records[i].status, id == FAKE_SLAB ? CST_STATUS_OK : CST_STATUS_NOT_FOUND);
        cst_store64(&records[i].size, (uint64_t)FAKE_BLOCKS * FAKE_BLOCK_BYTES);
        n_fds += id == FAKE_SLAB;
    }
    assert(n_fds <= 1);
    reply.slabs = (ProtobufCBinaryData){ n * sizeof(records[0]), (uint8_t *)records };
    fake_reply_fds(f, c, p, &reply.base, &f->slab_fd, n_fds);
}

static void slab_dropped(struct fake_daemon *f, struct fake_connection *c,
                         const struct cst_packet *p) {
    const Cistern__V1__SlabDropped *m = fake_unpack(f, p);
    Cistern__V1__SlabDroppedReply reply = CISTERN__V1__SLAB_DROPPED_REPLY__INIT;

    f->n_dropped += (unsigned)(m->slabs.len / 4);
    fake_reply(f, c, p, &reply.base);
}

static void staging_get(struct fake_daemon *f, struct fake_connection *c,
                        const struct cst_packet *p) {
    Cistern__V1__StagingGetReply reply = CISTERN__V1__STAGING_GET_REPLY__INIT;
    int fd = memfd_create("staging", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    reply.lists = (uint64_t)f->staging_places * FAKE_BLOCK_BYTES;
    reply.size = reply.lists + f->lists_bytes;
    assert(fd >= 0 && !ftruncate(fd, (off_t)reply.size));
    assert(!fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW));
    c->staging = mmap(NULL, reply.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert(c->staging != MAP_FAILED);
    fake_reply_fds(f, c, p, &reply.base, &fd, 1);
    cst_close(fd);
}

static uint64_t reserve_place(struct fake_daemon *f, struct fake_connection *c, const uint8_t *key,
                              const uint8_t *parent, const uint32_t *tokens, uint32_t n_tokens,
                              uint64_t *offset) {
    for (size_t i = 0; i < f->staging_places && i < FAKE_BLOCKS; i++) {
        struct fake_slot *slot = &c->slots[i];

        if (slot->used)
            continue;
        *slot = (struct fake_slot){ .used = true, .id = ++f->next_slot, .n_tokens = n_tokens };
        memcpy(slot->key, key, 32);
        memcpy(slot->parent, parent, 32);
        memcpy(slot->tokens, tokens, 4 * (size_t)n_tokens);
        *offset = i * FAKE_BLOCK_BYTES;
        return slot->id;
    }
    return 0;
}

/* Gives slots in order; once one is refused for lack of room, so are the rest. */
static void reserve(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    const Cistern__V1__Reserve *m = fake_unpack(f, p);
    ProtobufCBinaryData keys = list_of(c, m->keys, m->keys_ref);
    ProtobufCBinaryData tokens = list_of(c, m->tokens, m->tokens_ref);
    Cistern__V1__ReserveReply reply = CISTERN__V1__RESERVE_REPLY__INIT;
    size_t n = keys.len / 32;
    struct cst_slot_record *records = cst_calloc(n, sizeof(*records));
    static const uint8_t no_parent[32];
    const uint8_t *parent = m->parent.len ? m->parent.data : no_parent;

    assert(records);
    for (size_t i = 0; i < n; i++) {
        const uint8_t *key = keys.data + 32 * i;
        size_t all = tokens.len / 4, from = i * FAKE_BLOCK_TOKENS;
        uint32_t ids[FAKE_BLOCK_TOKENS] = { 0 };
        uint32_t n_ids = all ? (uint32_t)CST_MIN(all - from, (size_t)FAKE_BLOCK_TOKENS) : 0;
        uint64_t offset = 0, id;
        uint8_t expected[32];

        for (uint32_t k = 0; k < n_ids; k++)
            ids[k] = cst_load32(tokens.data + 4 * (from + k));
        if (all) {
            cst_key_block(parent, ids, n_ids, NULL, 0, expected);
            assert(!memcmp(key, expected, 32)); /* the client's chain is right */
        }
        if (fake_find(f, key)) {
            cst_store16(&records[i].status, CST_STATUS_PRESENT);
        } else {
            id = reserve_place(f, c, key, parent, ids, n_ids, &offset);
            cst_store16(&records[i].status, id ? CST_STATUS_OK : CST_STATUS_BUSY);
            cst_store64(&records[i].slot, id);
            cst_store64(&records[i].offset, offset);
            cst_store64(&records[i].length, FAKE_BLOCK_BYTES);
        }
        parent = all ? key : no_parent;
    }
    reply.slots = (ProtobufCBinaryData){ n * sizeof(*records), (uint8_t *)records };
    fake_reply(f, c, p, &reply.base);
    records = cst_free(records);
}

static struct fake_slot *slot_by_id(struct fake_connection *c, uint64_t id) {
    for (size_t i = 0; i < FAKE_BLOCKS; i++)
        if (c->slots[i].used && c->slots[i].id == id)
            return &c->slots[i];
    return NULL;
}

static uint16_t commit_slot(struct fake_daemon *f, struct fake_connection *c, uint64_t id) {
    struct fake_slot *slot = slot_by_id(c, id);
    struct fake_block *block;

    if (!slot)
        return CST_STATUS_BAD_HANDLE;
    slot->used = false;
    if (fake_find(f, slot->key))
        return CST_STATUS_PRESENT;
    block = add_block(f, slot->key, slot->parent, slot->tokens, slot->n_tokens);
    memcpy(f->slab + place_of(f, block) * FAKE_BLOCK_BYTES,
           c->staging + (size_t)(slot - c->slots) * FAKE_BLOCK_BYTES, FAKE_BLOCK_BYTES);
    return CST_STATUS_OK;
}

static void commit(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    const Cistern__V1__Commit *m = fake_unpack(f, p);
    Cistern__V1__CommitReply reply = CISTERN__V1__COMMIT_REPLY__INIT;
    uint8_t statuses[2 * FAKE_BLOCKS];
    size_t n = m->slots.len / 8;

    assert(n <= FAKE_BLOCKS && m->surprisals.len <= sizeof(f->surprisals));
    for (size_t i = 0; i < n; i++)
        cst_store16(statuses + 2 * i, commit_slot(f, c, cst_load64(m->slots.data + 8 * i)));
    f->n_surprisals = m->surprisals.len / 2;
    if (m->surprisals.len)
        memcpy(f->surprisals, m->surprisals.data, m->surprisals.len);
    reply.statuses = (ProtobufCBinaryData){ 2 * n, statuses };
    fake_reply(f, c, p, &reply.base);
}

static void abort_slots(struct fake_daemon *f, struct fake_connection *c,
                        const struct cst_packet *p) {
    const Cistern__V1__Abort *m = fake_unpack(f, p);
    Cistern__V1__AbortReply reply = CISTERN__V1__ABORT_REPLY__INIT;

    for (size_t i = 0; i < m->slots.len / 8; i++) {
        struct fake_slot *slot = slot_by_id(c, cst_load64(m->slots.data + 8 * i));

        if (slot)
            slot->used = false;
        f->n_aborted += slot != NULL;
    }
    fake_reply(f, c, p, &reply.base);
}

/* Touch, Pin, Unpin, Erase: all four say how many keys they saw. */
static void care(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    Cistern__V1__KeysReply reply = CISTERN__V1__KEYS_REPLY__INIT;
    const Cistern__V1__Touch *m = fake_unpack(f, p); /* space and keys lie first in all */
    size_t n = m->keys.len / 32;
    uint8_t *statuses = cst_calloc(n, 2);

    assert(statuses);
    for (size_t i = 0; i < n; i++) {
        bool found = fake_find(f, m->keys.data + 32 * i);

        cst_store16(statuses + 2 * i, found ? CST_STATUS_OK : CST_STATUS_NOT_FOUND);
        reply.blocks += found;
    }
    reply.statuses = (ProtobufCBinaryData){ 2 * n, statuses };
    fake_reply(f, c, p, &reply.base);
    statuses = cst_free(statuses);
}

static void explain(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    const Cistern__V1__Explain *m = fake_unpack(f, p);
    ProtobufCBinaryData keys = list_of(c, m->keys, m->keys_ref);
    Cistern__V1__ExplainReply reply = CISTERN__V1__EXPLAIN_REPLY__INIT;
    char text[80];

    (void)snprintf(text, sizeof(text), "%zu keys and %zu ids are not stored", keys.len / 32,
                   m->tail.len / 4);
    reply.reason = text;
    fake_reply(f, c, p, &reply.base);
}

static void stats(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    const Cistern__V1__Stats *m = fake_unpack(f, p);
    Cistern__V1__StatsReply reply = CISTERN__V1__STATS_REPLY__INIT;

    reply.blocks = m->space;
    reply.leases = f->n_leases;
    fake_reply(f, c, p, &reply.base);
}

static void empty_reply(struct fake_daemon *f, struct fake_connection *c,
                        const struct cst_packet *p) {
    Cistern__V1__PingReply reply = CISTERN__V1__PING_REPLY__INIT; /* no fields set: no bytes */

    fake_reply(f, c, p, &reply.base);
}

void fake_answer(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    static void (*const answers[FAKE_TYPES])(struct fake_daemon *, struct fake_connection *,
                                             const struct cst_packet *) = {
        [CST_MSG_HELLO] = hello,
        [CST_MSG_PING] = empty_reply,
        [CST_MSG_SPACE_OPEN] = space_open,
        [CST_MSG_SPACE_CLOSE] = empty_reply,
        [CST_MSG_LOOKUP] = lookup,
        [CST_MSG_LOOKUP_EACH] = lookup_each,
        [CST_MSG_ACQUIRE] = acquire,
        [CST_MSG_RELEASE] = release,
        [CST_MSG_SLAB_GET] = slab_get,
        [CST_MSG_SLAB_DROPPED] = slab_dropped,
        [CST_MSG_STAGING_GET] = staging_get,
        [CST_MSG_RESERVE] = reserve,
        [CST_MSG_COMMIT] = commit,
        [CST_MSG_ABORT] = abort_slots,
        [CST_MSG_TOUCH] = care,
        [CST_MSG_PIN] = care,
        [CST_MSG_UNPIN] = care,
        [CST_MSG_ERASE] = care,
        [CST_MSG_EXPLAIN] = explain,
        [CST_MSG_STATS] = stats,
    };

    assert(p->type < FAKE_TYPES && answers[p->type]);
    answers[p->type](f, c, p);
}

/* ---- the thread ---- */

static void drop_connection(struct fake_daemon *f, struct fake_connection *c) {
    if (c->staging)
        (void)munmap(c->staging, (size_t)f->staging_places * FAKE_BLOCK_BYTES + f->lists_bytes);
    c->staging = NULL;
    c->fd = cst_close(c->fd);
    memset(c->slots, 0, sizeof(c->slots));
}

static void accept_one(struct fake_daemon *f) {
    struct fake_connection *c = f->connections;

    while (c < f->connections + FAKE_CONNECTIONS - 1 && c->fd >= 0)
        c++;
    assert(c->fd < 0);
    c->fd = accept4(f->listener, NULL, NULL, SOCK_CLOEXEC);
    f->n_connects += c->fd >= 0;
}

static void serve_one(struct fake_daemon *f, struct fake_connection *c) {
    struct cst_packet packet;
    size_t n_fds;
    ssize_t n = cst_packet_recv_owned_fds(c->fd, f->rx, sizeof(f->rx), NULL, 0, &n_fds, 0);

    if (n <= 0) {
        drop_connection(f, c);
        return;
    }
    assert(!cst_packet_parse(&packet, f->rx, (size_t)n));
    assert(packet.type < FAKE_TYPES);
    if (!f->hook || !f->hook(f, c, &packet))
        fake_answer(f, c, &packet);
    f->n_requests[packet.type]++;
    assert(!pthread_cond_broadcast(&f->changed));
}

static void *serve(void *arg) {
    struct fake_daemon *f = arg;

    for (;;) {
        struct pollfd fds[2 + FAKE_CONNECTIONS] = { { .fd = f->stop_fd, .events = POLLIN },
                                                    { .fd = f->listener, .events = POLLIN } };

        fake_lock(f);
        for (size_t i = 0; i < FAKE_CONNECTIONS; i++)
            fds[2 + i] = (struct pollfd){ .fd = f->connections[i].fd, .events = POLLIN };
        fake_unlock(f);
        if (poll(fds, CST_COUNT(fds), -1) < 0 && errno != EINTR)
            break;
        if (fds[0].revents)
            break;
        fake_lock(f);
        if (fds[1].revents)
            accept_one(f);
        for (size_t i = 0; i < FAKE_CONNECTIONS; i++)
            if (fds[2 + i].fd >= 0 && fds[2 + i].revents && f->connections[i].fd == fds[2 + i].fd)
                serve_one(f, &f->connections[i]);
        fake_unlock(f);
    }
    return NULL;
}

/* ---- start and stop ---- */

/* The uid that SO_PEERCRED shows is that of the thread that listens: raw system call, this thread
 * only. */
static void listen_as(struct fake_daemon *f) {
    if (f->server_uid)
        assert(!syscall(SYS_setresuid, -1, f->server_uid, -1));
    assert(!listen(f->listener, 8));
    if (f->server_uid)
        assert(!syscall(SYS_setresuid, -1, 0, -1));
}

void fake_start(struct fake_daemon *f) {
    union {
        struct sockaddr any;
        struct sockaddr_un un;
    } address = { .un = { .sun_family = AF_UNIX } };

    (void)unlink(f->path);
    f->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert(f->listener >= 0);
    (void)snprintf(address.un.sun_path, sizeof(address.un.sun_path), "%s", f->path);
    assert(!bind(f->listener, &address.any, sizeof(address.un)));
    listen_as(f);
    f->stop_fd = eventfd(0, EFD_CLOEXEC);
    assert(f->stop_fd >= 0);
    assert(!pthread_create(&f->thread, NULL, serve, f));
}

void fake_hang_up(struct fake_daemon *f) {
    fake_lock(f);
    for (size_t i = 0; i < FAKE_CONNECTIONS; i++)
        if (f->connections[i].fd >= 0)
            (void)shutdown(f->connections[i].fd, SHUT_RDWR);
    fake_unlock(f);
}

void fake_stop(struct fake_daemon *f) {
    assert(!eventfd_write(f->stop_fd, 1));
    assert(!pthread_join(f->thread, NULL));
    f->stop_fd = cst_close(f->stop_fd);
    f->listener = cst_close(f->listener);
    for (size_t i = 0; i < FAKE_CONNECTIONS; i++)
        drop_connection(f, &f->connections[i]);
    f->n_leases = 0;
    f->epoch++;
}

struct fake_daemon *fake_new(void) {
    struct fake_daemon *f = cst_calloc(1, sizeof(*f));

    assert(f);
    f->keys_max = 16384;
    f->packet_max = CST_PACKET_MAX;
    f->staging_places = 32;
    f->lists_bytes = 1 << 20;
    f->epoch = 1;
    (void)snprintf(f->dir, sizeof(f->dir), "/tmp/cistern-test-XXXXXX");
    assert(mkdtemp(f->dir));
    (void)snprintf(f->path, sizeof(f->path), "%s/sock", f->dir);
    assert(!pthread_mutex_init(&f->lock, NULL));
    assert(!pthread_cond_init(&f->changed, NULL));
    for (size_t i = 0; i < FAKE_CONNECTIONS; i++)
        f->connections[i].fd = -1;
    cst_arena_init(&f->arena, f->arena_room, sizeof(f->arena_room));
    f->slab_fd = memfd_create("slab", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert(f->slab_fd >= 0 && !ftruncate(f->slab_fd, (off_t)FAKE_BLOCKS * FAKE_BLOCK_BYTES));
    f->slab = mmap(NULL, (size_t)FAKE_BLOCKS * FAKE_BLOCK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
                   f->slab_fd, 0);
    assert(f->slab != MAP_FAILED);
    assert(!fcntl(f->slab_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW));
    fake_start(f);
    return f;
}

struct fake_daemon *fake_free(struct fake_daemon *f) {
    if (f->stop_fd >= 0)
        fake_stop(f);
    (void)unlink(f->path);
    (void)rmdir(f->dir);
    (void)munmap(f->slab, (size_t)FAKE_BLOCKS * FAKE_BLOCK_BYTES);
    cst_close(f->slab_fd);
    (void)pthread_mutex_destroy(&f->lock);
    (void)pthread_cond_destroy(&f->changed);
    return cst_free(f);
}

/* ---- what tests share ---- */

cistern_client *fake_client(struct fake_daemon *f, uint32_t flags) {
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;
    cistern_client *c = NULL;

    options.socket_path = f->path;
    options.flags = flags;
    if (cistern_client_open(&c, &options))
        fail_msg("client_open: %s", cistern_last_error());
    return c;
}

void fake_set_timeout(cistern_client *c, uint32_t timeout_ms) {
    const struct timeval wait = { .tv_sec = timeout_ms / 1000,
                                  .tv_usec = timeout_ms % 1000 * 1000L };

    c->timeout_ms = timeout_ms;
    assert_int_equal(setsockopt(c->conn.fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait)), 0);
}

const cistern_descriptor *fake_descriptor(void) {
    enum { HEADS = 2, DIM = 16, ROW = HEADS * DIM * 2, HALF = FAKE_BLOCK_TOKENS * ROW };
    static const cistern_layer layers[2] = {
        { .kv_heads = HEADS, .head_dim_k = DIM, .head_dim_v = DIM },
        { .kv_heads = HEADS, .head_dim_k = DIM, .head_dim_v = DIM },
    };
    static cistern_segment segments[4];
    static cistern_descriptor d = {
        .size = sizeof(d),
        .block_tokens = FAKE_BLOCK_TOKENS,
        .block_bytes = FAKE_BLOCK_BYTES,
        .content_id = "a model",
        .engine = "test",
        .n_layers = 2,
        .n_segments = 4,
        .layers = layers,
        .segments = segments,
    };

    _Static_assert(4 * HALF == FAKE_BLOCK_BYTES, "two layers of K and V");
    for (uint32_t i = 0; i < 4; i++)
        segments[i] = (cistern_segment){ .layer = i / 2,
                                         .tensor = i % 2,
                                         .dtype = CISTERN_DTYPE_BF16,
                                         .offset = (uint64_t)i * HALF,
                                         .length = HALF,
                                         .token_stride = ROW,
                                         .head_stride = DIM * 2,
                                         .dim_stride = 2 };
    return &d;
}

cistern_space *fake_space(cistern_client *c, uint32_t kind) {
    cistern_space_options options = { .size = sizeof(options), .kind = kind };
    cistern_space *space = NULL;

    if (cistern_space_open(c, fake_descriptor(), &options, &space))
        fail_msg("space_open: %s", cistern_last_error());
    return space;
}

void fake_prompt(struct fake_daemon *f, cistern_space *space, uint32_t *tokens, size_t n_tokens,
                 uint8_t *keys, size_t stored) {
    size_t n_keys, cap = n_tokens / FAKE_BLOCK_TOKENS + 1;
    uint8_t parent[32];

    for (size_t i = 0; i < n_tokens; i++)
        tokens[i] = (uint32_t)(1000 + i);
    assert(!cistern_key_chain(space, NULL, tokens, n_tokens, keys, cap, &n_keys));
    assert(!cistern_key_root(space, parent));
    fake_lock(f);
    for (size_t i = 0; i < stored; i++) {
        size_t from = i * FAKE_BLOCK_TOKENS;

        fake_store(f, keys + 32 * i, parent, tokens + from,
                   (uint32_t)CST_MIN(n_tokens - from, (size_t)FAKE_BLOCK_TOKENS));
        memcpy(parent, keys + 32 * i, 32);
    }
    fake_unlock(f);
}

int fake_setup(void **state) {
    struct fake_fixture *x = cst_calloc(1, sizeof(*x));

    assert(x);
    x->f = fake_new();
    x->client = fake_client(x->f, 0);
    x->space = fake_space(x->client, CISTERN_KIND_TOKENS);
    *state = x;
    return 0;
}

int fake_teardown(void **state) {
    struct fake_fixture *x = *state;

    cistern_client_close(x->client);
    x->f = fake_free(x->f);
    x = cst_free(x);
    return 0;
}
