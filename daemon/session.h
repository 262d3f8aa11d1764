/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One client: its socket, its process, and everything that it holds. Whatever a session holds is
 * charged (quota.h) and given back when it ends. Loop thread only.
 *
 * Handlers never end a session in the middle of work: they doom it, and the end of the loop's turn
 * buries it. An ended session's memory lives while its commits or its staging job are under way.
 */
#pragma once

#include "daemon/config.h"
#include "daemon/peer.h"
#include "daemon/server.h"
#include "daemon/staging.h"

struct cst_queued;
struct cst_upload;

struct cst_session {
    struct cst_server *server;
    struct cst_list link; /* server->sessions until the end */
    unsigned refs;        /* the connection, each open commit, the staging job */
    bool admin, greeted, doomed, ended, counted_refused;
    int refused; /* status: the first request is answered with it and the session ends */
    const char *refused_text;
    char refusal[160];

    struct cst_io sock, process;
    int fd;           /* owned */
    bool refuses_fds; /* the kernel keeps the peer from attaching descriptors */
    struct cst_peer peer;
    char name[65]; /* what the client calls itself; "" before Hello */
    char namespace_name[CST_NAMESPACE_NAME_MAX + 1];

    struct cst_tenant *user, *tenant;
    struct cst_account account;
    struct cst_payer payer;
    struct cst_charge connection;
    struct cst_timer timer; /* before Hello: hello_timeout; with queued output: send_timeout */
    struct cst_deferred burial, ready_flush;

    struct cst_list queue; /* struct cst_queued, answer.c */
    size_t queued_bytes;
    uint8_t *parked; /* a packet that waits for the staging slab; nothing is read meanwhile */
    size_t parked_len;

    struct cst_handle **handles; /* handle.c; id - 1 is the index */
    size_t n_handles;
    struct cst_hashmap leases; /* lease.c */
    struct cst_list ready;     /* leases whose Ready is to be pushed */
    struct cst_hashmap slots;  /* slot.c */
    uint64_t last_slot;        /* ids count here: they tell nothing of other clients */
    struct cst_list holds;     /* share.c */
    struct cst_list subscriptions;
    struct cst_staging staging;
    struct cst_upload *upload; /* req_side.c; NULL: none */
};

/* Serves fd; takes it on 0. A peer that may not come in gets a session that answers its first
 * request with the reason. */
int cst_session_new_consume_fd(struct cst_session **out, struct cst_server *server, int fd,
                               bool admin);

struct cst_session *cst_session_ref(struct cst_session *session);
struct cst_session *cst_session_unref(struct cst_session *session); /* NULL ok, returns NULL */

/* Ends the session at the end of this turn. why: for the log, may be NULL. */
CST_COLD void cst_session_doom(struct cst_session *session, const char *why);

/* Ends it now: not from inside a request, a callback of the store, or a walk over sessions that is
 * not prepared for it. */
void cst_session_end(struct cst_session *session);

/* What the socket waits for, after output or parking changed. */
void cst_session_update_io(struct cst_session *session);

/* Keeps the packet of this call until the staging slab is there. false: out of memory. */
struct cst_call;
bool cst_session_park(struct cst_session *session, const struct cst_call *call);
/* Handles the parked packet, if any. */
void cst_session_unpark(struct cst_session *session);
