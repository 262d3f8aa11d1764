/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the socket, the calls that wait on it, and who reads.
 *
 * Invariants
 *  1. At most one thread reads (conn.reading); it is one of those that wait, or the library thread
 *     when idle. Whoever stops reading, or leaves without having read, wakes a waiting call
 *     (promote), so that no answer lies in the socket while everybody sleeps.
 *  2. fd is closed only when no thread uses it outside the lock (users == 0); a lost connection is
 *     shut down first, which wakes them all. A new one begins only after that, so the receive
 *     buffer and fd never belong to two connections.
 *  3. `generation` names a connection. Handles remember it; it grows at the loss, so that a handle
 *     of a lost connection is recognised without a table.
 *  4. A call is on conn.calls exactly while its answer may still change it; replies run under the
 *     lock and write only into their call. A call that gave up has left the list, so its answer,
 *     if it comes, is a late one.
 *  5. A request whose answer brings descriptors is sent only while no thread is in a plain recv(),
 *     and while it is out none begins one.
 *
 * Threads: everything under the client's lock. A blocking call by a single thread costs one send
 * and one receive: SO_RCVTIMEO bounds the receive, so that poll is needed only after something else
 * arrived first or with a timeout of its own; and recv() costs 170 ns less than recvmsg().
 */
#include "client/client_conn.h"

#include "base/mem.h"
#include "client/client.h"
#include "client/client_slot.h"
#include "proto/record.h"
#include "proto/status.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

enum {
    HEAD_ROOM = 2560,    /* a request that fits here costs no heap call */
    BACKOFF_MIN_MS = 10, /* between connection attempts, doubling */
    BACKOFF_MAX_MS = 2000,
    STEP_MAX_MS = 60 * 1000, /* of one wait */
};

int cst_conn_init(struct cst_conn *conn) {
    void *arena = cst_malloc(CST_UNPACK_BUDGET);

    *conn = (struct cst_conn){
        .fd = -1,
        .dial_fd = -1,
        .generation = 1,
        .backoff_ms = BACKOFF_MIN_MS,
        .closed = PTHREAD_COND_INITIALIZER,
        .plain_done = PTHREAD_COND_INITIALIZER,
        .rx = cst_malloc(CST_PACKET_MAX),
    };
    cst_list_init(&conn->calls);
    cst_arena_init(&conn->arena, arena, CST_UNPACK_BUDGET);
    return conn->rx && arena ? 0 : -ENOMEM;
}

void cst_conn_deinit(struct cst_conn *conn) {
    conn->up = false;
    conn->fd = cst_close(conn->fd);
    conn->rx = cst_free(conn->rx);
    conn->arena.data = cst_free(conn->arena.data);
}

/* ---- using the socket outside the lock ---- */

static int borrow_fd(struct cst_conn *conn, uint32_t *generation) {
    conn->users++;
    *generation = conn->generation;
    return conn->fd;
}

/* False: the connection was lost meanwhile. */
static bool return_fd(struct cst_conn *conn, uint32_t generation) {
    conn->users--;
    if (generation == conn->generation)
        return true;
    if (!conn->users) {
        conn->fd = cst_close(conn->fd);
        (void)pthread_cond_broadcast(&conn->closed);
    }
    return false;
}

/* ---- calls ---- */

static void finish(struct cst_call *call, int32_t status) {
    call->status = status;
    call->done = true;
    cst_list_unlink(&call->link);
    if (call->waiting)
        (void)pthread_cond_signal(&call->cond);
}

static struct cst_call *call_at(struct cst_list *link) {
    return cst_list_entry(link, struct cst_call, link);
}

void cst_conn_lose(cistern_client *c, const char *fmt, ...) {
    struct cst_conn *conn = &c->conn;
    struct cst_list *link;
    va_list ap;

    if (!conn->up)
        return;
    va_start(ap, fmt);
    (void)vsnprintf(conn->lost, sizeof(conn->lost), fmt, ap);
    va_end(ap);
    conn->lost_status = CISTERN_E_DISCONNECTED;
    conn->up = false;
    conn->generation++;
    (void)shutdown(conn->fd, SHUT_RDWR);
    if (!conn->users) {
        conn->fd = cst_close(conn->fd);
        (void)pthread_cond_broadcast(&conn->closed);
    }
    while ((link = cst_list_first(&conn->calls))) {
        (void)snprintf(call_at(link)->text, CST_ERROR_TEXT, "%s", conn->lost);
        finish(call_at(link), CISTERN_E_DISCONNECTED);
    }
    cst_map_lose(c);
    cst_async_wake(c);
}

/* Somebody must read while anybody waits (invariant 1). */
static void promote(cistern_client *c) {
    struct cst_list *it, *tmp;

    if (!cst_conn_is_unread(&c->conn))
        return;
    cst_list_for_each_safe (it, tmp, &c->conn.calls) {
        if (call_at(it)->waiting) {
            (void)pthread_cond_signal(&call_at(it)->cond);
            return;
        }
    }
    cst_async_wake(c);
}

/* ---- what arrives ---- */

void *cst_reply_unpack(struct cst_call *call, const struct cst_packet *packet) {
    struct cst_arena *arena = &call->client->conn.arena;

    cst_arena_reset(arena);
    return cst_message_unpack(cst_message_descriptor(packet->type, true), packet->payload,
                              packet->length, arena);
}

int32_t cst_call_corrupt(struct cst_call *call, const char *what) {
    (void)snprintf(call->text, sizeof(call->text), "the daemon's answer is not valid: %s", what);
    return CISTERN_E_CORRUPT;
}

static int32_t error_reply(struct cst_call *call, const struct cst_packet *packet) {
    int wire = cst_packet_error(packet, call->text, sizeof(call->text));

    return wire ? cst_status_to_api((uint32_t)wire) : CISTERN_E_INTERNAL;
}

static void late_reply(cistern_client *c, const struct cst_packet *packet, struct cst_fds *fds) {
    if (packet->flags & CST_PACKET_ERROR)
        return;
    if (packet->type == CST_MSG_RESERVE)
        cst_slot_late_reply(c, packet);
    else if (packet->type == CST_MSG_STAGING_GET)
        cst_staging_late_reply(c, packet, fds);
}

static void answer(cistern_client *c, const struct cst_packet *packet, struct cst_fds *fds) {
    struct cst_list *it, *tmp;

    cst_list_for_each_safe (it, tmp, &c->conn.calls) {
        struct cst_call *call = call_at(it);
        int32_t status = CISTERN_OK;

        if (call->request != packet->request)
            continue;
        if (call->type != packet->type)
            status = cst_call_corrupt(call, "another message was asked for");
        else if (packet->flags & CST_PACKET_ERROR)
            status = error_reply(call, packet);
        else if (call->reply)
            status = call->reply(call, packet, fds);
        if (status || !call->pending)
            finish(call, status);
        return;
    }
    late_reply(c, packet, fds);
}

static void ready_record(cistern_client *c, const uint8_t *record) {
    struct cst_list *it, *tmp;

    cst_list_for_each_safe (it, tmp, &c->conn.calls) {
        struct cst_call *call = call_at(it);

        if (!call->ready || !call->ready(call, record))
            continue;
        if (call->pending && !--call->pending)
            finish(call, CISTERN_OK);
        return;
    }
}

static void *push_unpack(cistern_client *c, const struct cst_packet *packet) {
    const ProtobufCMessageDescriptor *descriptor = cst_message_descriptor(packet->type, false);

    cst_arena_reset(&c->conn.arena);
    return descriptor
               ? cst_message_unpack(descriptor, packet->payload, packet->length, &c->conn.arena)
               : NULL;
}

static void pushed(cistern_client *c, const struct cst_packet *packet) {
    void *message = push_unpack(c, packet);

    if (!message) {
        cst_conn_lose(c, "the daemon pushed a message that cannot be decoded");
    } else if (packet->type == CST_MSG_READY) {
        const Cistern__V1__Ready *ready = message;

        for (size_t i = 0; i + sizeof(struct cst_lease_record) <= ready->leases.len;
             i += sizeof(struct cst_lease_record))
            ready_record(c, ready->leases.data + i);
    } else if (packet->type == CST_MSG_SLAB_RETIRE) {
        cst_map_retire(c, ((const Cistern__V1__SlabRetire *)message)->slab);
    } else if (packet->type == CST_MSG_GOODBYE) {
        const Cistern__V1__Goodbye *goodbye = message;

        (void)snprintf(c->conn.goodbye, sizeof(c->conn.goodbye), "%s",
                       goodbye->text[0] ? goodbye->text : cst_status_text((int)goodbye->status));
    }
}

static void arrived(cistern_client *c, size_t n, struct cst_fds *fds) {
    struct cst_packet packet;

    if (fds->n == SIZE_MAX)
        cst_conn_lose(c, "the daemon sent too many descriptors");
    else if (cst_packet_parse(&packet, c->conn.rx, n))
        cst_conn_lose(c, "the daemon sent a malformed packet");
    else if (packet.flags & CST_PACKET_PUSH)
        pushed(c, &packet);
    else if (packet.flags & CST_PACKET_REPLY)
        answer(c, &packet, fds);
    else
        cst_conn_lose(c, "the daemon sent a request");
    for (size_t i = 0; fds->n != SIZE_MAX && i < fds->n; i++)
        cst_close(fds->fd[i]);
}

/* ---- reading ---- */

/* Waits wait_ms (negative: as long as SO_RCVTIMEO says) for a packet or for wake_fd. */
static ssize_t receive(int fd, int wake_fd, int wait_ms, uint8_t *rx, struct cst_fds *fds) {
    struct pollfd poll_fds[2] = { { .fd = fd, .events = POLLIN },
                                  { .fd = wake_fd, .events = POLLIN } };

    fds->n = 0;
    if (wait_ms >= 0 || wake_fd >= 0) {
        if (poll(poll_fds, 2, wait_ms) < 0 || !poll_fds[0].revents)
            return -EAGAIN;
    }
    return cst_packet_recv_owned_fds(fd, rx, CST_PACKET_MAX, fds->fd, CST_PACKET_FDS_MAX, &fds->n,
                                     wait_ms >= 0 || wake_fd >= 0 ? MSG_DONTWAIT : 0);
}

static ssize_t receive_plain(int fd, uint8_t *rx, struct cst_fds *fds) {
    fds->n = 0;
    return cst_packet_recv(fd, rx, CST_PACKET_MAX, 0);
}

static void lose_at_end(cistern_client *c) {
    bool told = c->conn.goodbye[0];

    cst_conn_lose(c, "the daemon closed the connection%s%s", told ? ": " : "", c->conn.goodbye);
}

/* plain: recv() will do, if nobody wants descriptors. */
static void read_once(cistern_client *c, int wake_fd, int wait_ms, bool plain) {
    struct cst_conn *conn = &c->conn;
    struct cst_fds fds;
    uint32_t generation;
    int fd = borrow_fd(conn, &generation);
    ssize_t n;

    plain = plain && wait_ms < 0 && !conn->fds_wanted;
    conn->reading = true;
    conn->plain = plain;
    (void)pthread_mutex_unlock(&c->lock);
    n = plain ? receive_plain(fd, conn->rx, &fds) : receive(fd, wake_fd, wait_ms, conn->rx, &fds);
    (void)pthread_mutex_lock(&c->lock);
    conn->reading = false;
    conn->plain = false;
    if (plain && conn->fds_wanted)
        (void)pthread_cond_broadcast(&conn->plain_done);
    if (!return_fd(conn, generation)) {
        for (size_t i = 0; fds.n != SIZE_MAX && i < fds.n; i++)
            cst_close(fds.fd[i]);
        return;
    }
    if (n > 0)
        arrived(c, (size_t)n, &fds);
    else if (n == 0)
        lose_at_end(c);
    else if (n == -ECONNRESET)
        lose_at_end(c);
    else if (n != -EAGAIN && n != -EINTR)
        cst_conn_lose(c, "receiving from the daemon failed: %s", strerrordesc_np((int)-n));
}

bool cst_conn_idle(cistern_client *c, int wake_fd) {
    if (c->conn.reading)
        return true;
    if (c->conn.up) {
        read_once(c, wake_fd, -1, false);
        promote(c);
    }
    return false;
}

/* ---- one call ---- */

static uint64_t now(const cistern_client *c) {
    return cst_now_ns(c->clock);
}

/* Rounded up; no more than one step's worth, since every caller looks again. */
static int ms_until(const cistern_client *c, uint64_t deadline) {
    uint64_t t = now(c),
             ms = t >= deadline ? 0 : (deadline - t + CST_NS_PER_MS - 1) / CST_NS_PER_MS;

    return (int)CST_MIN(ms, (uint64_t)STEP_MAX_MS);
}

/* Sleeps until another thread has the answer or stops reading. */
static void follow(cistern_client *c, struct cst_call *call, int wait_ms) {
    struct timespec at;

    if (!call->waiting) {
        call->cond = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
        call->waiting = true;
    }
    (void)clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_sec += wait_ms / 1000;
    at.tv_nsec += wait_ms % 1000 * 1000000L;
    if (at.tv_nsec >= 1000000000L) {
        at.tv_nsec -= 1000000000L;
        at.tv_sec++;
    }
    (void)pthread_cond_clockwait(&call->cond, &c->lock, CLOCK_MONOTONIC, &at);
}

/* The daemon answers these at once, so that who wants descriptors does not wait long for the
 * reader. */
static bool is_quick(uint16_t type) {
    return type == CST_MSG_ACQUIRE || type == CST_MSG_LOOKUP || type == CST_MSG_LOOKUP_EACH;
}

static void await(cistern_client *c, struct cst_call *call, uint64_t deadline, int wait_ms) {
    while (!call->done) {
        if (c->conn.reading)
            follow(c, call, wait_ms >= 0 ? wait_ms : ms_until(c, deadline));
        else
            read_once(c, -1, wait_ms, is_quick(call->type));
        if (call->done)
            break;
        wait_ms = ms_until(c, deadline);
        if (!wait_ms)
            finish(call, CISTERN_E_TIMEOUT);
    }
    if (call->waiting)
        (void)pthread_cond_destroy(&call->cond);
    promote(c);
}

static int send_now(const struct cst_conn *conn, const uint8_t *head, size_t n,
                    const struct cst_request *request) {
    int r;

    do
        r = request->bulk_size
                ? cst_packet_send_bulk(conn->fd, head, n, request->bulk, request->bulk_size,
                                       MSG_DONTWAIT)
                : cst_packet_send_borrowed_fds(conn->fd, head, n, NULL, 0, MSG_DONTWAIT);
    while (r == -EINTR);
    return r;
}

static void lose_on_send(cistern_client *c, int r) {
    if (r == -EPIPE || r == -ECONNRESET)
        lose_at_end(c);
    else
        cst_conn_lose(c, "sending to the daemon failed: %s", strerrordesc_np(-r));
}

/* Sends, waiting for room in the socket if need be. Not CISTERN_OK: call->text says why. */
static int32_t send_call(cistern_client *c, struct cst_call *call, const uint8_t *head, size_t n,
                         const struct cst_request *request, uint64_t deadline) {
    uint32_t generation;

    for (;;) {
        int r = send_now(&c->conn, head, n, request), wait_ms;
        struct pollfd p = { .events = POLLOUT };

        if (!r)
            return CISTERN_OK;
        if (r != -EAGAIN) {
            lose_on_send(c, r);
            break;
        }
        wait_ms = ms_until(c, deadline);
        if (!wait_ms)
            return CISTERN_E_TIMEOUT;
        p.fd = borrow_fd(&c->conn, &generation);
        (void)pthread_mutex_unlock(&c->lock);
        (void)poll(&p, 1, wait_ms);
        (void)pthread_mutex_lock(&c->lock);
        if (!return_fd(&c->conn, generation))
            break;
    }
    (void)snprintf(call->text, sizeof(call->text), "%s", c->conn.lost);
    return CISTERN_E_DISCONNECTED;
}

static size_t pack(uint8_t *out, size_t cap, uint32_t id, const struct cst_request *request) {
    if (!request->bulk_size)
        return cst_packet_pack(out, cap, request->type, 0, id, request->message);
    return cst_packet_pack_bulk(out, cap, request->type, 0, id, request->message,
                                request->bulk_field, request->bulk_size);
}

/* Packs into room[HEAD_ROOM], or into *heap (to be freed) if that is too small. NULL: does not fit
 * a packet or out of memory, *status says which. */
static const uint8_t *pack_head(const struct cst_request *request, uint32_t id, uint8_t *room,
                                uint8_t **heap, size_t *n, int32_t *status) {
    size_t size;

    *n = pack(room, HEAD_ROOM, id, request);
    if (*n)
        return room;
    *status = CISTERN_E_TOO_LARGE;
    size = protobuf_c_message_get_packed_size(request->message) + HEAD_ROOM;
    if (size + request->bulk_size > CST_PACKET_MAX + HEAD_ROOM)
        return NULL;
    *heap = cst_malloc(size);
    if (!*heap)
        *status = CISTERN_E_NO_MEMORY;
    else
        *n = pack(*heap, size, id, request);
    return *n ? *heap : NULL;
}

static uint32_t next_request(struct cst_conn *conn) {
    if (!++conn->next_request)
        conn->next_request = 1; /* 0 is for pushes */
    return conn->next_request;
}

static int32_t call_error(const struct cst_call *call) {
    if (call->status >= 0)
        return CISTERN_OK;
    return call->text[0] ? cst_client_fail(call->status, "%s", call->text)
                         : cst_client_fail_status(call->status);
}

static int32_t run_call(cistern_client *c, struct cst_call *call, const struct cst_request *request,
                        uint32_t timeout_ms) {
    cst_auto(cst_freep) uint8_t *heap = NULL;
    uint8_t room[HEAD_ROOM];
    const uint8_t *head;
    bool usual = !timeout_ms || timeout_ms == c->timeout_ms;
    uint64_t deadline;
    size_t n;

    if (!c->conn.up)
        return cst_client_fail(CISTERN_E_DISCONNECTED, "%s", c->conn.lost);
    call->client = c;
    call->type = request->type;
    call->request = next_request(&c->conn);
    call->done = call->waiting = false;
    call->text[0] = '\0';
    head = pack_head(request, call->request, room, &heap, &n, &call->status);
    if (!head)
        return call_error(call);
    deadline = now(c) + (usual ? c->timeout_ms : timeout_ms) * CST_NS_PER_MS;
    call->status = send_call(c, call, head, n, request, deadline);
    if (call->status)
        return call_error(call);
    cst_list_append(&c->conn.calls, &call->link);
    await(c, call, deadline, usual ? -1 : ms_until(c, deadline));
    return call_error(call);
}

/* From here on nobody begins a plain recv(), and nobody is in one. */
static void want_fds(cistern_client *c) {
    c->conn.fds_wanted++;
    while (c->conn.reading && c->conn.plain)
        (void)pthread_cond_wait(&c->conn.plain_done, &c->lock);
}

int32_t cst_call_run(cistern_client *c, struct cst_call *call, const struct cst_request *request,
                     uint32_t timeout_ms) {
    uint32_t generation = c->conn.generation;
    int32_t status;

    if (request->type != CST_MSG_SLAB_GET && request->type != CST_MSG_STAGING_GET)
        return run_call(c, call, request, timeout_ms);
    want_fds(c);
    if (c->conn.generation != generation)
        return cst_client_fail(CISTERN_E_DISCONNECTED, "%s", c->conn.lost);
    status = run_call(c, call, request, timeout_ms);
    /* After a timeout the answer may still come: then this connection stays without plain recv().
     */
    if (status != CISTERN_E_TIMEOUT && c->conn.generation == generation)
        c->conn.fds_wanted--;
    return status;
}

bool cst_post(cistern_client *c, const struct cst_request *request) {
    cst_auto(cst_freep) uint8_t *heap = NULL;
    uint8_t room[HEAD_ROOM];
    const uint8_t *head;
    int32_t status;
    size_t n;
    int r;

    if (!c->conn.up)
        return false;
    head = pack_head(request, next_request(&c->conn), room, &heap, &n, &status);
    if (!head)
        return false;
    r = send_now(&c->conn, head, n, request);
    if (r && r != -EAGAIN)
        lose_on_send(c, r);
    return !r;
}

/* ---- connecting ---- */

static int32_t set_up(cistern_client *c, int fd) {
    struct cst_conn *conn = &c->conn;
    struct cst_hello hello;
    int32_t status;

    conn->dial_fd = fd;
    (void)pthread_mutex_unlock(&c->lock);
    status = cst_dial(&c->dial, fd, &hello);
    (void)pthread_mutex_lock(&c->lock);
    conn->dial_fd = -1;
    if (!status)
        status = cst_client_welcome(c, &hello);
    if (status) {
        (void)snprintf(conn->lost, sizeof(conn->lost), "%s", cistern_last_error());
        return conn->lost_status = status;
    }
    conn->hello = hello;
    conn->goodbye[0] = '\0';
    conn->fd = fd;
    conn->fds_wanted = 0;
    conn->up = true;
    conn->backoff_ms = BACKOFF_MIN_MS;
    cst_async_wake(c);
    return CISTERN_OK;
}

int32_t cst_conn_connect(cistern_client *c) {
    struct cst_conn *conn = &c->conn;
    int32_t status;
    int fd;

    if (now(c) < conn->retry_at)
        return cst_client_fail(conn->lost_status, "%s", conn->lost);
    conn->retry_at = now(c) + conn->backoff_ms * CST_NS_PER_MS;
    conn->backoff_ms = CST_MIN(2 * conn->backoff_ms, (uint32_t)BACKOFF_MAX_MS);
    while (conn->fd >= 0)
        (void)pthread_cond_wait(&conn->closed, &c->lock);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return cst_client_fail(CISTERN_E_SYSTEM, "socket: %s", strerrordesc_np(errno));
    status = set_up(c, fd);
    if (status)
        cst_close(fd);
    return status;
}

int32_t cst_client_request(cistern_client *c, uint16_t type, const ProtobufCMessage *message,
                           struct cst_call *call) {
    int32_t status = cst_enter(c, NULL, CST_NEED_NOTHING);

    if (status)
        return status;
    status = cst_call_run(c, call, &(struct cst_request){ .type = type, .message = message }, 0);
    cst_leave(c, CST_NEED_NOTHING);
    return status;
}
