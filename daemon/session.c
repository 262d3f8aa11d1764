/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the sessions: reading, parking, the end.
 *
 * Invariants
 *   1. From new until end a session is in server->sessions, its socket and its pidfd are in the
 *      loop. Either of them ends it: a forked child that keeps the socket does not keep the leases.
 *   2. One packet is read per event. Nothing is read while output is queued or a packet is parked,
 *      so a client's memory here is bounded by what it may hold.
 *   3. end() releases everything but slots whose commit is under way; those keep the session's
 *      memory (refs), so the staging slab they read from stays.
 *   4. doom() may be called anywhere, any number of times; end() runs from the loop only.
 */
#include "daemon/session.h"

#include "base/err.h"
#include "base/log.h"
#include "base/mem.h"
#include "daemon/call.h"
#include "daemon/event.h"
#include "daemon/handle.h"
#include "daemon/lease.h"
#include "daemon/share.h"
#include "daemon/slot.h"
#include "daemon/upload.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

enum { REFUSED_MAX = 32 };

static void read_one(struct cst_io *io, uint32_t events);
static void process_ended(struct cst_io *io, uint32_t events);

/* ---- the beginning ---- */

static void too_slow(struct cst_timer *timer) {
    struct cst_session *s = cst_container_of(timer, struct cst_session, timer);

    cst_session_doom(s, s->greeted ? "it does not read its replies" : "it never said Hello");
}

static void bury(struct cst_deferred *deferred) {
    cst_session_end(cst_container_of(deferred, struct cst_session, burial));
}

static void init_session(struct cst_session *s, struct cst_server *server, bool admin) {
    s->server = server;
    s->refs = 1;
    s->admin = admin;
    s->fd = -1;
    s->peer = CST_PEER_NULL;
    s->sock = CST_IO_NULL(read_one);
    s->process = CST_IO_NULL(process_ended);
    s->staging.mem = CST_MEM_SLAB_NULL;
    cst_list_init(&s->link);
    cst_list_init(&s->queue);
    cst_list_init(&s->ready);
    cst_list_init(&s->holds);
    cst_list_init(&s->subscriptions);
    cst_timer_init(&s->timer, too_slow);
    cst_deferred_init(&s->burial, bury);
    cst_deferred_init(&s->ready_flush, cst_lease_flush_ready);
    server->n_sessions++;
}

/* Accounts of the peer's uid and namespace, and its place among the connections. */
static int join_accounts(struct cst_session *s) {
    struct cst_server *server = s->server;
    struct cst_namespace_name name;
    int r;

    r = cst_peer_namespace(&s->peer, &server->config, &name, s->refusal, sizeof(s->refusal));
    if (r == CST_PEER_E_REFUSED) {
        s->refused = CST_STATUS_DENIED;
        s->refused_text = s->refusal;
        (void)snprintf(name.text, sizeof(name.text), "uid-%u", (unsigned)s->peer.uid);
    }
    (void)snprintf(s->namespace_name, sizeof(s->namespace_name), "%s", name.text);
    r = cst_server_user_ref(server, s->peer.uid, &s->user);
    if (!r)
        r = cst_server_namespace_ref(server, s->namespace_name, &s->tenant);
    if (r)
        return r;
    s->payer = (struct cst_payer){
        .limits = &server->limits,
        .accounts = { &s->account, &s->user->account, &s->tenant->account, &server->total },
    };
    s->admin = cst_server_is_admin(server, s->peer.uid);
    return 0;
}

static void admit(struct cst_session *s, bool admin_socket) {
    if (s->refused)
        return;
    if (admin_socket && !s->admin) {
        s->refused = CST_STATUS_DENIED;
        s->refused_text = "only administrators may use this socket";
    } else if (!admin_socket &&
               cst_charge_take(&s->connection, &s->payer, CST_RES_CONNECTIONS, 1)) {
        s->refused = CST_STATUS_BUSY;
        s->refused_text = "too many connections";
    }
}

static int start_io(struct cst_session *s, int fd) {
    struct cst_loop *loop = &s->server->loop;
    int r = cst_io_start(loop, &s->process, s->peer.pidfd, EPOLLIN);

    if (r)
        return r;
    r = cst_io_start(loop, &s->sock, fd, EPOLLIN);
    if (r)
        cst_io_stop(loop, &s->process);
    return r;
}

int cst_session_new_consume_fd(struct cst_session **out, struct cst_server *server, int fd,
                               bool admin) {
    struct cst_session *s = cst_calloc(1, sizeof(*s));
    int r;

    if (!s)
        return cst_err(-ENOMEM);
    init_session(s, server, admin);
    r = cst_peer_init(&s->peer, fd);
    if (!r)
        r = join_accounts(s);
    if (!r) {
        admit(s, admin);
        r = s->refused && server->n_refused >= REFUSED_MAX ? -EBUSY : start_io(s, fd);
    }
    if (r) {
        (void)cst_session_unref(s);
        return r;
    }
    s->fd = fd;
    s->refuses_fds = cst_packet_refuses_fds(fd);
    s->counted_refused = s->refused != 0;
    server->n_refused += s->counted_refused;
    cst_list_append(&server->sessions, &s->link);
    cst_timer_set(&server->loop, &s->timer, server->config.hello_timeout);
    cst_log(CST_LOG_DEBUG, "client of uid %u, pid %d, namespace %s", (unsigned)s->peer.uid,
            (int)s->peer.pid, s->namespace_name);
    *out = s;
    return 0;
}

/* ---- reading ---- */

void cst_session_update_io(struct cst_session *s) {
    uint32_t events = !cst_list_is_empty(&s->queue) ? EPOLLOUT : s->parked ? 0 : EPOLLIN;

    cst_io_set(&s->server->loop, &s->sock, events);
}

static void read_packet(struct cst_session *s) {
    struct cst_server *server = s->server;
    uint8_t *in = server->scratch.in;
    size_t n_fds = 0;
    ssize_t n = s->refuses_fds ? cst_packet_recv(s->fd, in, CST_PACKET_MAX, MSG_DONTWAIT)
                               : cst_packet_recv_owned_fds(s->fd, in, CST_PACKET_MAX, NULL, 0,
                                                           &n_fds, MSG_DONTWAIT);
    struct cst_call call = { .session = s, .server = server };

    if (n == -EAGAIN)
        return;
    if (n > 0 && !n_fds) {
        cst_dispatch(s, in, (size_t)n);
        return;
    }
    if (n == -EMSGSIZE)
        cst_fail(&call, CST_STATUS_BAD_LENGTH, "a packet has at most %d bytes", CST_PACKET_MAX);
    else if (n > 0)
        cst_fail(&call, CST_STATUS_BAD_FDS, NULL);
    cst_session_doom(s, n == 0                            ? NULL
                        : n == -EMSGSIZE                  ? "its packet was too long"
                        : n > 0                           ? "it sent descriptors"
                        : n == -ECONNRESET || n == -EPIPE ? NULL
                                                          : "its socket failed");
}

static void read_one(struct cst_io *io, uint32_t events) {
    struct cst_session *s = cst_container_of(io, struct cst_session, sock);

    if (s->doomed)
        return;
    if (events & EPOLLOUT && !cst_list_is_empty(&s->queue))
        cst_output_flush(s);
    if (events & EPOLLIN && io->events & EPOLLIN)
        read_packet(s);
    else if (events & (EPOLLHUP | EPOLLERR))
        cst_session_doom(s, NULL);
}

static void process_ended(struct cst_io *io, uint32_t events) {
    cst_session_doom(cst_container_of(io, struct cst_session, process), NULL);
}

bool cst_session_park(struct cst_session *s, const struct cst_call *call) {
    assert(!s->parked);
    s->parked = cst_memdup(call->packet, call->packet_len);
    s->parked_len = call->packet_len;
    if (!s->parked)
        return false;
    cst_session_update_io(s);
    return true;
}

void cst_session_unpark(struct cst_session *s) {
    uint8_t *packet = s->parked;

    s->parked = NULL;
    if (packet && !s->doomed)
        cst_dispatch(s, packet, s->parked_len);
    (void)cst_free(packet);
    cst_session_update_io(s);
}

/* ---- the end ---- */

struct cst_session *cst_session_ref(struct cst_session *s) {
    s->refs++;
    return s;
}

static void free_session(struct cst_session *s) {
    cst_handle_close_all(s);
    (void)cst_free(s->handles);
    cst_hashmap_deinit(&s->leases);
    cst_hashmap_deinit(&s->slots);
    cst_charge_drop(&s->connection);
    cst_peer_deinit(&s->peer);
    (void)cst_tenant_unref(s->user);
    (void)cst_tenant_unref(s->tenant);
    s->server->n_sessions--;
    (void)cst_free(s);
}

struct cst_session *cst_session_unref(struct cst_session *s) {
    if (!s || --s->refs)
        return NULL;
    if (s->staging.state == CST_STAGING_READY)
        cst_staging_drop(s, free_session);
    else
        free_session(s);
    return NULL;
}

void cst_session_doom(struct cst_session *s, const char *why) {
    if (s->doomed || s->ended)
        return;
    s->doomed = true;
    if (why) {
        s->server->dropped_clients++;
        cst_log(CST_LOG_NOTICE, "disconnecting \"%s\" (uid %u, pid %d): %s", s->name,
                (unsigned)s->peer.uid, (int)s->peer.pid, why);
    }
    cst_defer(&s->server->loop, &s->burial);
}

void cst_session_end(struct cst_session *s) {
    struct cst_loop *loop = &s->server->loop;

    assert(!s->ended);
    s->doomed = s->ended = true;
    cst_list_unlink(&s->link);
    s->server->n_refused -= s->counted_refused;
    cst_io_stop(loop, &s->sock);
    cst_io_stop(loop, &s->process);
    s->fd = cst_close(s->fd);
    cst_timer_stop(&s->timer);
    cst_deferred_stop(&s->burial);
    cst_deferred_stop(&s->ready_flush);
    cst_output_drop(s);
    s->parked = cst_free(s->parked);
    cst_event_unsubscribe_all(s);
    cst_lease_release_all(s);
    cst_slot_abort_all(s);
    cst_upload_drop(s);
    cst_share_drop_all(s);
    cst_handle_close_all(s);
    cst_charge_drop(&s->connection);
    cst_server_wake(s->server);
    (void)cst_session_unref(s);
}
