/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon without its main(): listeners, sessions, store, workers on one loop. Tests run it
 * in-process. Everything here belongs to the loop thread, except where a line says otherwise.
 */
#pragma once

#include "base/hashmap.h"
#include "base/list.h"
#include "base/random.h"
#include "daemon/config.h"
#include "daemon/disk.h"
#include "daemon/loop.h"
#include "daemon/quota.h"
#include "daemon/worker.h"
#include "gpu/gpu.h"
#include "proto/frame.h"
#include "store/store.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    CST_KEYS_MAX = 65536,        /* of one request, staging lists included */
    CST_ACQUIRE_KEYS_MAX = 3200, /* 40 bytes of reply each */
    CST_RESERVE_KEYS_MAX = 4000, /* 32 bytes of reply each */
    CST_TOKENS_MAX = 1 << 20,    /* of one Reserve */
    CST_OUTPUT_MAX = 256 * 1024, /* queued bytes of one connection */
    CST_OUTPUT_TOTAL = 8 << 20,  /* of all */
    CST_SPACES_OPEN_MAX = 1024,  /* handles of one connection */
};

struct cst_session;

/* The account of a uid or of a namespace; lives while a session uses it. */
struct cst_tenant {
    struct cst_list link;
    unsigned refs;
    struct cst_account account;
    uid_t uid;                /* users only */
    struct cst_namespace *ns; /* namespaces only */
};

/* Buffers that one request uses at a time: the hot paths never ask the heap. */
struct cst_scratch {
    uint8_t *in;      /* CST_PACKET_MAX: the packet being handled */
    uint8_t *out;     /* CST_PACKET_MAX: the packet being sent */
    uint8_t *records; /* CST_PACKET_MAX: bulk fields of replies */
    uint8_t *keys;    /* CST_KEYS_MAX x 32: lists copied out of staging */
    uint32_t *tokens; /* CST_TOKENS_MAX */
    uint8_t *tiers;   /* CST_KEYS_MAX */
    struct cst_arena arena;
    void *memory; /* all of the above */
};

/* share.c: the last number that was made for a slab; blocks of one request mostly share theirs. */
struct cst_slab_number {
    uint32_t slab_id, number;
};

struct cst_listener {
    struct cst_io io;
    struct cst_timer retry; /* out of descriptors: listens again a little later */
    struct cst_server *server;
    bool admin;
};

struct cst_server_env {
    const struct cst_clock *clock;
    struct cst_random *random;
    const struct cst_mem_ops *mem;
    void (*worker_start)(void); /* called by each worker thread; may be NULL */
};

struct cst_server {
    struct cst_config config;
    struct cst_server_env env;
    struct cst_loop loop;
    struct cst_workers *workers;
    struct cst_store *store;
    struct cst_limits limits;
    struct cst_account total;
    struct cst_list users, namespaces; /* struct cst_tenant */
    struct cst_listener listeners[2];
    size_t n_listeners;
    struct cst_list sessions;
    size_t n_sessions; /* objects: those whose commits are still under way included */
    size_t n_refused;
    struct cst_list subscriptions; /* event.c */
    struct cst_hashmap shares;     /* share.c, by slab id */
    struct cst_slab_number last_number;
    struct cst_timer retire_timer;
    int slab_error;              /* why there was no slab, as last told to the operator */
    struct cst_list free_leases; /* lease.c */
    size_t n_free_leases;
    struct cst_scratch scratch;
    struct cst_timer tick, stop_timer;
    struct cst_disk disk;
    uint64_t tick_ns;       /* the current interval */
    uint64_t tick_requests; /* requests at the last tick */
    uint64_t epoch, seed, started_ns;
    uint64_t requests, errors, dropped_clients;
    unsigned open_commits;
    bool draining;
};

/* Makes loop, workers and store, and finds what is on disk. *config is copied and resolved. 0,
 * a negative errno, or CST_SERVER_E_REFUSED: what to do about it is in the log. */
enum { CST_SERVER_E_REFUSED = 1 };
int cst_server_new(struct cst_server **out, const struct cst_config *config,
                   const struct cst_server_env *env);
/* Ends what is left. NULL ok, returns NULL. */
struct cst_server *cst_server_free(struct cst_server *server);

/* Takes a listening socket on 0. */
int cst_server_listen_consume_fd(struct cst_server *server, int fd, bool admin);
/* Serves one connected socket; takes it on 0. */
int cst_server_accept_consume_fd(struct cst_server *server, int fd, bool admin);

/* Serves until a stop has finished. 0 or a negative errno of the loop. */
int cst_server_run(struct cst_server *server);

/* Begins a clean stop: no new connections or requests, a Goodbye to everybody, commits under way
 * finish, then leases end and run() returns. */
void cst_server_stop(struct cst_server *server);

/* Takes over what may change while running; returns as cst_config_reload(). */
const char *cst_server_reload(struct cst_server *server, const struct cst_config *fresh);

/* ---- for the other files of daemon/ ---- */

int cst_server_user_ref(struct cst_server *server, uid_t uid, struct cst_tenant **out);
int cst_server_namespace_ref(struct cst_server *server, const char *name, struct cst_tenant **out);
struct cst_tenant *cst_tenant_unref(struct cst_tenant *tenant);

bool cst_server_is_admin(const struct cst_server *server, uid_t uid);

/* Something happened: the store's periodic care runs at its normal pace again. */
static inline void cst_server_wake(struct cst_server *server);
void cst_server_tick_now(struct cst_server *server);

enum { CST_TICK_MS = 100, CST_TICK_IDLE_MS = 5000 };

static inline void cst_server_wake(struct cst_server *server) {
    if (server->tick_ns > CST_TICK_MS * CST_NS_PER_MS)
        cst_server_tick_now(server);
}
