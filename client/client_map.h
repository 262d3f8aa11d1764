/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory that the daemon shares with this client: slabs (read-only) and the staging slab
 * (writable). The client's lock guards everything.
 *
 * A slab is mapped at its first use and stays so until the daemon retires it and no lease uses it;
 * then it is unmapped and the daemon told (SlabDropped). When the connection is lost, mappings in
 * use become orphans: readable until their last user is gone.
 */
#pragma once

#include "base/hashmap.h"
#include "base/list.h"
#include "client/client_conn.h"

#include <cistern/cistern.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cst_slab {
    struct cst_hnode node; /* map.slabs while listed */
    struct cst_list link;  /* map.all, then map.dropped */
    uint32_t id, refs;
    bool listed, retired;
    const uint8_t *data; /* NULL once unmapped */
    size_t size;
};

struct cst_staging {
    struct cst_list link; /* map.stagings */
    uint32_t refs;        /* the connection's and one a slot */
    uint8_t *data;
    size_t size, lists; /* slots lie before `lists`, this client's lists from there on */
};

struct cst_map {
    struct cst_hashmap slabs;
    struct cst_list all;     /* every mapped slab */
    struct cst_list dropped; /* unmapped, SlabDropped not sent yet */
    struct cst_list stagings;
    struct cst_staging *staging; /* of the current connection, or NULL */
};

void cst_map_init(struct cst_map *map);
void cst_map_deinit(struct cst_map *map); /* unmaps everything; safe twice */

/* The mapped slab, or NULL. */
struct cst_slab *cst_map_find(struct cst_map *map, uint32_t id);

/* Fetches and maps up to CST_PACKET_FDS_MAX slabs that are not mapped yet; `slow` held. Slabs that
 * the daemon does not give stay unmapped. Negative: the call failed, error set. */
int32_t cst_map_fetch(cistern_client *c, const uint32_t *ids, size_t n);

void cst_slab_ref(struct cst_slab *slab);
void cst_slab_unref(cistern_client *c, struct cst_slab *slab);

/* SlabRetire arrived. */
void cst_map_retire(cistern_client *c, uint32_t id);

/* Tells the daemon about unmapped slabs; what can't be sent now waits for the next call. */
void cst_map_flush(cistern_client *c);

/* The connection is gone. */
void cst_map_lose(cistern_client *c);

/* Gets and maps the staging slab if there is none; `slow` held. Error set on failure. */
int32_t cst_staging_fetch(cistern_client *c, uint64_t block_bytes);
/* An answer that came after its caller gave up: keeps the slab, its descriptor comes only once. */
void cst_staging_late_reply(cistern_client *c, const struct cst_packet *packet,
                            struct cst_fds *fds);
void cst_staging_ref(struct cst_staging *staging);
void cst_staging_unref(struct cst_staging *staging);

/* Writable (or read-only) shared mapping of a descriptor that must be at least `size` bytes and
 * sealed against shrinking, so that no peer can make an access fault. NULL and errno on failure.
 * Borrows fd. */
void *cst_map_memory(int fd, uint64_t size, bool writable);
