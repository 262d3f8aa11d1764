/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the mappings of slabs and staging.
 *
 * Invariants
 *  1. A slab is listed (found by id) only on the connection that gave it; ids mean nothing later.
 *  2. A slab is unmapped at the moment when it is unused and either retired or no longer listed;
 *     never while a lease points into it.
 *  3. Nothing is mapped that the peer could shorten under us: size and seal are checked first.
 *  4. A retired slab's struct lives on `dropped` until its SlabDropped was sent, so telling the
 *     daemon needs no memory.
 *
 * Threads: the client's lock.
 */
#include "client/client_map.h"

#include "base/mem.h"
#include "client/client.h"
#include "proto/record.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum { STAGING_BLOCKS_MIN = 4 };

void *cst_map_memory(int fd, uint64_t size, bool writable) {
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    void *p;

    if (seals < 0 || fstat(fd, &st) < 0)
        return NULL;
    if (!(seals & F_SEAL_SHRINK) || !size || size > (uint64_t)st.st_size || size > SIZE_MAX / 2) {
        errno = EINVAL;
        return NULL;
    }
    p = mmap(NULL, size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    return p == MAP_FAILED ? NULL : p;
}

/* ---- slabs ---- */

void cst_map_init(struct cst_map *map) {
    *map = (struct cst_map){ .slabs = CST_HASHMAP_NULL };
    cst_list_init(&map->all);
    cst_list_init(&map->dropped);
    cst_list_init(&map->stagings);
}

static struct cst_slab *slab_at(struct cst_list *link) {
    return cst_list_entry(link, struct cst_slab, link);
}

static uint64_t hash_of(uint32_t id) {
    return cst_hash_u64(0, id);
}

static bool has_id(const struct cst_hnode *node, const void *key) {
    return cst_container_of(node, const struct cst_slab, node)->id == *(const uint32_t *)key;
}

struct cst_slab *cst_map_find(struct cst_map *map, uint32_t id) {
    struct cst_hnode *node = cst_hashmap_find(&map->slabs, hash_of(id), has_id, &id);

    return node ? cst_container_of(node, struct cst_slab, node) : NULL;
}

static void unlist(struct cst_map *map, struct cst_slab *slab) {
    if (slab->listed)
        cst_hashmap_remove(&map->slabs, &slab->node);
    slab->listed = false;
}

static void unmap(struct cst_slab *slab) {
    if (slab->data)
        (void)munmap((void *)(uintptr_t)slab->data, slab->size);
    slab->data = NULL;
    cst_list_unlink(&slab->link);
}

/* Invariant 2. */
static void unmap_if_unused(struct cst_map *map, struct cst_slab *slab) {
    bool tell = slab->listed && slab->retired;

    if (slab->refs || (slab->listed && !slab->retired))
        return;
    unlist(map, slab);
    unmap(slab);
    if (tell)
        cst_list_append(&map->dropped, &slab->link);
    else
        (void)cst_free(slab);
}

void cst_slab_ref(struct cst_slab *slab) {
    slab->refs++;
}

void cst_slab_unref(cistern_client *c, struct cst_slab *slab) {
    slab->refs--;
    unmap_if_unused(&c->map, slab);
}

void cst_map_retire(cistern_client *c, uint32_t id) {
    struct cst_slab *slab = cst_map_find(&c->map, id);

    if (!slab)
        return;
    slab->retired = true;
    unmap_if_unused(&c->map, slab);
}

static void forget_dropped(struct cst_map *map, size_t n) {
    struct cst_list *link;

    for (; n && (link = cst_list_first(&map->dropped)); n--) {
        cst_list_unlink(link);
        (void)cst_free(slab_at(link));
    }
}

void cst_map_flush(cistern_client *c) {
    while (!cst_list_is_empty(&c->map.dropped)) {
        Cistern__V1__SlabDropped message = CISTERN__V1__SLAB_DROPPED__INIT;
        uint8_t ids[CST_PACKET_FDS_MAX * 4];
        struct cst_list *it, *tmp;
        size_t n = 0;

        cst_list_for_each_safe (it, tmp, &c->map.dropped) {
            if (n == CST_PACKET_FDS_MAX)
                break;
            cst_store32(ids + 4 * n++, slab_at(it)->id);
        }
        message.slabs = (ProtobufCBinaryData){ .data = ids, .len = 4 * n };
        if (!cst_post(
                c, &(struct cst_request){ .type = CST_MSG_SLAB_DROPPED, .message = &message.base }))
            return;
        forget_dropped(&c->map, n);
    }
}

void cst_map_lose(cistern_client *c) {
    struct cst_map *map = &c->map;
    struct cst_list *it, *tmp;

    forget_dropped(map, SIZE_MAX);
    cst_list_for_each_safe (it, tmp, &map->all) {
        unlist(map, slab_at(it));
        unmap_if_unused(map, slab_at(it));
    }
    if (map->staging)
        cst_staging_unref(map->staging);
    map->staging = NULL;
}

static struct cst_staging *staging_at(struct cst_list *link) {
    return cst_list_entry(link, struct cst_staging, link);
}

void cst_map_deinit(struct cst_map *map) {
    struct cst_list *link;

    forget_dropped(map, SIZE_MAX);
    while ((link = cst_list_first(&map->all))) {
        unlist(map, slab_at(link));
        unmap(slab_at(link));
        (void)cst_free(slab_at(link));
    }
    while ((link = cst_list_first(&map->stagings))) {
        staging_at(link)->refs = 1;
        cst_staging_unref(staging_at(link));
    }
    map->staging = NULL;
    cst_hashmap_deinit(&map->slabs);
}

/* ---- SlabGet ---- */

static int32_t keep_slab(struct cst_map *map, uint32_t id, uint64_t size, int fd) {
    struct cst_slab *slab;

    if (cst_map_find(map, id))
        return CISTERN_OK;
    slab = cst_calloc(1, sizeof(*slab));
    if (!slab)
        return CISTERN_E_NO_MEMORY;
    *slab = (struct cst_slab){ .id = id, .size = size, .listed = true };
    slab->data = cst_map_memory(fd, size, false);
    if (!slab->data || cst_hashmap_insert(&map->slabs, &slab->node, hash_of(id))) {
        int32_t status = slab->data ? CISTERN_E_NO_MEMORY : CISTERN_E_SYSTEM;

        cst_list_init(&slab->link);
        unmap(slab);
        (void)cst_free(slab);
        return status;
    }
    cst_list_append(&map->all, &slab->link);
    return CISTERN_OK;
}

static int32_t slab_get_reply(struct cst_call *call, const struct cst_packet *packet,
                              struct cst_fds *fds) {
    const Cistern__V1__SlabGetReply *reply = cst_reply_unpack(call, packet);
    size_t size = sizeof(struct cst_slab_record), used = 0;
    int32_t status = CISTERN_OK;

    if (!reply || reply->slabs.len % size)
        return cst_call_corrupt(call, "SlabGet");
    for (size_t i = 0; !status && i < reply->slabs.len; i += size) {
        struct cst_slab_record record;

        memcpy(&record, reply->slabs.data + i, size);
        if (cst_load32(&record.status))
            continue;
        if (used == fds->n)
            return cst_call_corrupt(call, "SlabGet without the slab's descriptor");
        status = keep_slab(&call->client->map, cst_load32(&record.slab), cst_load64(&record.size),
                           fds->fd[used++]);
    }
    return status;
}

int32_t cst_map_fetch(cistern_client *c, const uint32_t *ids, size_t n) {
    Cistern__V1__SlabGet message = CISTERN__V1__SLAB_GET__INIT;
    struct cst_call call = CST_CALL_INIT(slab_get_reply);
    uint8_t wire[CST_PACKET_FDS_MAX * 4];
    size_t missing = 0;

    for (size_t i = 0; i < n; i++)
        if (!cst_map_find(&c->map, ids[i]))
            cst_store32(wire + 4 * missing++, ids[i]);
    if (!missing)
        return CISTERN_OK;
    message.slabs = (ProtobufCBinaryData){ .data = wire, .len = 4 * missing };
    return cst_call_run(
        c, &call, &(struct cst_request){ .type = CST_MSG_SLAB_GET, .message = &message.base }, 0);
}

/* ---- staging ---- */

void cst_staging_ref(struct cst_staging *staging) {
    staging->refs++;
}

void cst_staging_unref(struct cst_staging *staging) {
    if (--staging->refs)
        return;
    (void)munmap(staging->data, staging->size);
    cst_list_unlink(&staging->link);
    (void)cst_free(staging);
}

static int32_t adopt_consume_fd(cistern_client *c, int fd, uint64_t size, uint64_t lists) {
    struct cst_staging *staging;

    if (lists > size)
        return CISTERN_E_CORRUPT;
    staging = cst_calloc(1, sizeof(*staging));
    if (!staging)
        return CISTERN_E_NO_MEMORY;
    *staging = (struct cst_staging){ .refs = 1, .size = size, .lists = lists };
    staging->data = cst_map_memory(fd, size, true);
    if (!staging->data) {
        (void)cst_free(staging);
        return CISTERN_E_SYSTEM;
    }
    cst_list_append(&c->map.stagings, &staging->link);
    c->map.staging = staging;
    cst_close(fd);
    return CISTERN_OK;
}

static int32_t staging_reply(struct cst_call *call, const struct cst_packet *packet,
                             struct cst_fds *fds) {
    const Cistern__V1__StagingGetReply *reply = cst_reply_unpack(call, packet);
    int32_t status;

    if (call->client->map.staging)
        return CISTERN_OK; /* a late answer came first */
    if (!reply || fds->n != 1)
        return cst_call_corrupt(call, "StagingGet");
    status = adopt_consume_fd(call->client, fds->fd[0], reply->size, reply->lists);
    if (!status)
        fds->fd[0] = -1;
    return status;
}

void cst_staging_late_reply(cistern_client *c, const struct cst_packet *packet,
                            struct cst_fds *fds) {
    struct cst_call call = { .client = c };

    /* The descriptor comes once: kept now, the next call that needs staging finds it. */
    (void)staging_reply(&call, packet, fds);
}

int32_t cst_staging_fetch(cistern_client *c, uint64_t block_bytes) {
    Cistern__V1__StagingGet message = CISTERN__V1__STAGING_GET__INIT;
    struct cst_call call = CST_CALL_INIT(staging_reply);

    if (c->map.staging)
        return CISTERN_OK;
    if (STAGING_BLOCKS_MIN * block_bytes > c->conn.hello.staging_bytes)
        message.bytes = STAGING_BLOCKS_MIN * block_bytes;
    return cst_call_run(
        c, &call, &(struct cst_request){ .type = CST_MSG_STAGING_GET, .message = &message.base },
        0);
}
