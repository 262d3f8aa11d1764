/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replies and pushes: packing, sending, queueing. Owns the queued packets of every session. All
 * texts that reach a client as an error are made by cst_fail().
 *
 * Invariants
 *   1. Packets of a session leave in the order in which they were answered: once one is queued,
 *      all later ones are.
 *   2. A session's queue holds at most CST_OUTPUT_MAX bytes, all queues CST_OUTPUT_TOTAL; a client
 *      that needs more is doomed, and so is one that reads nothing for send_timeout.
 *   3. Nothing here blocks.
 */
#include "daemon/call.h"

#include "base/err.h"
#include "base/log.h"
#include "base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/socket.h>

struct cst_queued {
    struct cst_list link;
    struct cst_charge charge;
    size_t len, n_fds;
    int fds[CST_PACKET_FDS_MAX]; /* owned duplicates: the slab may be gone when they leave */
    uint8_t data[];
};

static void free_queued(struct cst_session *s, struct cst_queued *q) {
    for (size_t i = 0; i < q->n_fds; i++)
        cst_close(q->fds[i]);
    s->queued_bytes -= q->len;
    cst_charge_drop(&q->charge);
    cst_list_unlink(&q->link);
    (void)cst_free(q);
}

static bool dup_fds(struct cst_queued *q, const int *fds, size_t n) {
    for (; q->n_fds < n; q->n_fds++) {
        q->fds[q->n_fds] = fcntl(fds[q->n_fds], F_DUPFD_CLOEXEC, 0);
        if (q->fds[q->n_fds] < 0)
            return false;
    }
    return true;
}

bool cst_push_fits(const struct cst_session *s, size_t n) {
    return s->queued_bytes + n <= CST_OUTPUT_MAX / 2;
}

static void queue_packet(struct cst_session *s, const void *data, size_t n, const int *fds,
                         size_t n_fds) {
    struct cst_queued *q;

    if (s->queued_bytes + n > CST_OUTPUT_MAX) {
        cst_session_doom(s, "it does not read its replies");
        return;
    }
    q = cst_malloc(sizeof(*q) + n);
    if (!q) {
        cst_session_doom(s, "out of memory for its replies");
        return;
    }
    *q = (struct cst_queued){ .len = n };
    memcpy(q->data, data, n);
    s->queued_bytes += n;
    cst_list_append(&s->queue, &q->link);
    if (cst_charge_take(&q->charge, &s->payer, CST_RES_OUTPUT, n) || !dup_fds(q, fds, n_fds)) {
        free_queued(s, q);
        cst_session_doom(s, "too many unread replies");
        return;
    }
    if (!cst_timer_is_set(&s->timer))
        cst_timer_set(&s->server->loop, &s->timer, s->server->config.send_timeout);
    cst_session_update_io(s);
}

static void send_packet(struct cst_session *s, const void *data, size_t n, const int *fds,
                        size_t n_fds) {
    int r = -EAGAIN;

    if (s->doomed)
        return;
    if (cst_list_is_empty(&s->queue))
        r = cst_packet_send_borrowed_fds(s->fd, data, n, fds, n_fds, MSG_DONTWAIT);
    if (r == -EAGAIN)
        queue_packet(s, data, n, fds, n_fds);
    else if (r)
        cst_session_doom(s, r == -EPIPE || r == -ECONNRESET ? NULL : "its socket failed");
}

void cst_output_flush(struct cst_session *s) {
    struct cst_list *first;

    while ((first = cst_list_first(&s->queue))) {
        struct cst_queued *q = cst_list_entry(first, struct cst_queued, link);
        int r =
            cst_packet_send_borrowed_fds(s->fd, q->data, q->len, q->fds, q->n_fds, MSG_DONTWAIT);

        if (r == -EAGAIN)
            return;
        if (r) {
            cst_session_doom(s, r == -EPIPE || r == -ECONNRESET ? NULL : "its socket failed");
            return;
        }
        free_queued(s, q);
        cst_timer_set(&s->server->loop, &s->timer, s->server->config.send_timeout);
    }
    if (s->greeted)
        cst_timer_stop(&s->timer);
    cst_session_update_io(s);
}

void cst_output_drop(struct cst_session *s) {
    struct cst_list *first;

    while ((first = cst_list_first(&s->queue)))
        free_queued(s, cst_list_entry(first, struct cst_queued, link));
}

/* ---- packing ---- */

static void send_message(struct cst_session *s, uint16_t type, uint8_t flags, uint32_t request,
                         const ProtobufCMessage *message, const int *fds, size_t n_fds) {
    uint8_t *out = s->server->scratch.out;
    size_t n;

    if (s->doomed)
        return;
    n = cst_packet_pack(out, CST_PACKET_MAX, type, flags, request, message);
    if (!n) /* the limits on keys keep replies below a packet */
        n = cst_packet_pack_error(out, CST_PACKET_MAX, type, request, CST_STATUS_TOO_LARGE,
                                  cst_status_text(CST_STATUS_TOO_LARGE));
    send_packet(s, out, n, fds, n_fds);
}

void cst_reply(struct cst_call *call, const ProtobufCMessage *message) {
    send_message(call->session, call->type, CST_PACKET_REPLY, call->request, message, NULL, 0);
}

void cst_reply_borrowed_fds(struct cst_call *call, const ProtobufCMessage *message, const int *fds,
                            size_t n) {
    send_message(call->session, call->type, CST_PACKET_REPLY, call->request, message, fds, n);
}

void cst_reply_later(struct cst_session *session, uint16_t type, uint32_t request,
                     const ProtobufCMessage *message) {
    send_message(session, type, CST_PACKET_REPLY, request, message, NULL, 0);
}

void cst_push(struct cst_session *session, uint16_t type, const ProtobufCMessage *message) {
    send_message(session, type, CST_PACKET_PUSH, 0, message, NULL, 0);
}

void cst_fail(struct cst_call *call, int status, const char *fmt, ...) {
    uint8_t *out = call->server->scratch.out;
    char text[512];
    va_list ap;
    size_t n;

    call->server->errors++;
    if (fmt) {
        va_start(ap, fmt);
        (void)vsnprintf(text, sizeof(text), fmt, ap);
        va_end(ap);
    }
    n = cst_packet_pack_error(out, CST_PACKET_MAX, call->type, call->request, status,
                              fmt ? text : cst_status_text(status));
    send_packet(call->session, out, n, NULL, 0);
}

int cst_status_of(int r) {
    switch (r) {
    case CST_STORE_E_NOT_FOUND:
    case CST_STORE_E_CORRUPT: /* the block is gone */
        return CST_STATUS_NOT_FOUND;
    case CST_STORE_E_PENDING:
        return CST_STATUS_PENDING;
    case CST_STORE_E_PARENT_MISSING:
        return CST_STATUS_PARENT_MISSING;
    case CST_STORE_E_PRESENT:
        return CST_STATUS_PRESENT;
    case CST_STORE_E_KEY_BUSY:
        return CST_STATUS_KEY_BUSY;
    case CST_STORE_E_BUSY:
        return CST_STATUS_BUSY;
    case CST_STORE_E_LIMIT:
        return CST_STATUS_QUOTA;
    default:
        return cst_status_from_errno(r > 0 ? -ENOTRECOVERABLE : r);
    }
}

void cst_fail_store(struct cst_call *call, int r) {
    int status = cst_status_of(r);

    if (status == CST_STATUS_INTERNAL) {
        char trace[512]; /* none when a worker failed: it is in that thread */
        const char *why = cst_err_trace(trace, sizeof(trace)) ? trace : strerrordesc_np(-r);

        cst_log(CST_LOG_ERROR, "%s failed: %s", cst_message_name(call->type),
                why ? why : "a condition that nobody handles");
    }
    cst_fail(call, status, NULL);
}
