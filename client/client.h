/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The inside of libcistern: its objects, who guards them, and how a public call enters and leaves.
 *
 * Two locks a client, `slow` before `lock`, registry (client_fork.h) before both:
 *   lock   every field below that is not marked constant; never held across a wait for the daemon
 *          or a copy of a block
 *   slow   one thread at a time connects, opens spaces, fetches slabs or staging, or has lists in
 *          staging; held across waits
 * A public call that talks to the daemon: cst_enter(), calls of client_conn.h, cst_leave().
 */
#pragma once

#include "base/clock.h"
#include "base/hashmap.h"
#include "base/layout.h"
#include "base/list.h"
#include "client/client_conn.h"
#include "client/client_dial.h"
#include "client/client_error.h"
#include "client/client_map.h"
#include "client/client_pool.h"

#include <cistern/cistern.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Tokens and half floats are sent as they lie in memory. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "cistern.proto: lists are little-endian");

struct cst_async;

struct cistern_client {
    pthread_mutex_t slow, lock;
    bool forked;                   /* written only by the fork handler in the child */
    bool lazy;                     /* constant */
    uint32_t timeout_ms;           /* constant */
    const struct cst_clock *clock; /* constant */
    struct cst_dial dial;          /* constant */
    struct cst_list link;          /* client_fork.c's registry */

    struct cst_conn conn;
    struct cst_map map;
    struct cst_pool leases, slots;
    uint64_t next_lease; /* lease ids are never reused, not even over connections */
    struct cst_list spaces;
    struct cst_namespace *namespaces; /* every name ever handed out, newest first */
    struct cst_async *async;          /* constant; NULL without CISTERN_CLIENT_ASYNC */
};

struct cst_namespace {
    struct cst_namespace *next;
    char name[];
};

/* Everything but link, refs, open, generation, handle, sides and work is constant after opening. */
struct cistern_space {
    struct cst_list link; /* client.spaces, from open until the last reference is gone */
    cistern_client *client;
    uint32_t refs;               /* the caller's until close, one a lease and a slot */
    bool open;                   /* the caller has not closed it */
    uint32_t generation, handle; /* the daemon's handle on the connection `generation` */
    uint32_t kind, scope, quality_class;
    uint8_t salt[64];
    uint32_t salt_size;
    struct cst_descriptor *descriptor; /* owned */
    uint8_t *canonical;                /* owned */
    size_t canonical_size;
    uint8_t fingerprint[32], root[32];
    struct cst_list sides; /* client_side.c */
    void *work;            /* owned: a codec workspace nobody uses right now, or NULL */
};

struct cistern_lease {
    struct cst_list link; /* the pool's while free */
    cistern_client *client;
    cistern_space *space;  /* reference */
    struct cst_slab *slab; /* reference; NULL until it is mapped */
    const uint8_t *data;
    size_t size;
    uint64_t id, offset;
    uint32_t generation, slab_id, tokens, crc32c;
    uint32_t layer_first, layer_count;
    int32_t status; /* while acquiring */
    uint8_t tier;
    bool packed;
    bool owed; /* while acquiring: the daemon may think that we have it */
    bool held; /* the caller has it */
};

struct cistern_slot {
    struct cst_list link; /* the pool's while free */
    cistern_client *client;
    cistern_space *space;        /* reference */
    struct cst_staging *staging; /* reference */
    uint8_t *data;
    size_t size;
    uint64_t id;
    uint32_t generation, tokens;
    bool held;
};

/* ---- entering and leaving (client.c) ---- */

enum cst_need {
    CST_NEED_NOTHING,
    CST_NEED_STAGING, /* the staging slab is mapped */
    CST_NEED_LISTS,   /* and this thread alone may lay lists into it */
};

/* Checks for a fork, connects and opens the space (may be NULL) if needed, and takes the lock.
 * Anything but CISTERN_OK: the lock is not held, the thread's last error is set. */
int32_t cst_enter(cistern_client *c, cistern_space *space, enum cst_need need);

/* Answers slabs that were retired meanwhile, and unlocks. */
void cst_leave(cistern_client *c, enum cst_need need);

/* CISTERN_OK, or CISTERN_E_FORKED with the error set. */
int32_t cst_check_fork(const cistern_client *c);

/* Lock held: a daemon answered the Hello; keeps the namespace's name. Error set on failure. */
int32_t cst_client_welcome(cistern_client *c, const struct cst_hello *hello);

/* A lost or stopping daemon: lookups answer "nothing". */
static inline bool cst_is_miss(int32_t status) {
    return status == CISTERN_E_DISCONNECTED || status == CISTERN_E_DRAINING;
}

/* Reads a caller's struct that starts with its size into known (n bytes): zero-fills what the
 * caller's version lacks. NULL: all zero. CISTERN_OK or CISTERN_E_BAD_ARGUMENT. */
int32_t cst_options_read(void *known, size_t n, const void *options, const char *what);

/* ---- spaces (client_space.c); lock held ---- */

/* SpaceOpen on the current connection; `slow` held too. */
int32_t cst_client_space_attach(cistern_space *space);
void cst_client_space_ref(cistern_space *space);
void cst_client_space_unref(cistern_space *space);
/* Frees every space, referenced or not: the client closes. */
void cst_client_space_free_all(cistern_client *c);

static inline bool cst_client_space_is_flat(const cistern_space *space) {
    return space->kind == CISTERN_KIND_FLAT;
}

/* ---- the library thread (client_async.c) ---- */

/* Nothing without CISTERN_CLIENT_ASYNC. free is also for a client whose thread a fork lost. */
int32_t cst_async_start(cistern_client *c);
void cst_async_stop(cistern_client *c);

/* Lock held: the connection changed or lost its reader; the thread looks after it. */
void cst_async_wake(cistern_client *c);
