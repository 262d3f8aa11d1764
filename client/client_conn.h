/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One connection: sending, receiving, matching answers with calls.
 *
 * No thread belongs to it. Of the threads that wait for answers one reads (the leader) and hands
 * each answer to its call; the others sleep. Whoever leaves wakes the next. All functions are
 * called with the client's lock and return with it; they release it while they wait.
 */
#pragma once

#include "base/list.h"
#include "client/client_dial.h"
#include "client/client_error.h"
#include "proto/frame.h"

#include <cistern/cistern.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Descriptors that came with a packet; a reader that keeps one sets it to -1. */
struct cst_fds {
    int fd[CST_PACKET_FDS_MAX];
    size_t n;
};

/* One request on its caller's stack. A larger struct starts with it. */
struct cst_call {
    struct cst_list link; /* conn.calls while unanswered */
    cistern_client *client;
    uint32_t request;
    uint16_t type;
    bool done, waiting; /* waiting: sleeps on cond */
    int32_t status;
    uint32_t pending; /* pushed records that must follow the answer */

    /* Runs on whichever thread reads, with the lock: checks and keeps the answer. Returns the
     * status of the call. NULL: the answer says nothing. */
    int32_t (*reply)(struct cst_call *call, const struct cst_packet *packet, struct cst_fds *fds);

    /* Offered every record of a Ready; true: it was this call's. */
    bool (*ready)(struct cst_call *call, const uint8_t *record);

    pthread_cond_t cond;
    char text[CST_ERROR_TEXT]; /* the sentence of a failed status; "" = the status's own */
};

#define CST_CALL_INIT(reply_fn)                                                                    \
    { .reply = (reply_fn) }

/* The same for a hot path: leaves alone what cst_call_run() sets. */
static inline void cst_call_init(struct cst_call *call,
                                 int32_t (*reply)(struct cst_call *call,
                                                  const struct cst_packet *packet,
                                                  struct cst_fds *fds),
                                 bool (*ready)(struct cst_call *call, const uint8_t *record)) {
    call->reply = reply;
    call->ready = ready;
    call->pending = 0;
}

struct cst_conn {
    int fd;              /* -1: none; stays open after a loss until users is 0 */
    int dial_fd;         /* being connected; here so that a fork's child can close it */
    bool up;             /* fd is a live connection */
    bool reading;        /* a thread receives */
    bool plain;          /* ... by recv(), which would lose descriptors */
    unsigned fds_wanted; /* calls whose answers bring descriptors */
    unsigned users;      /* threads that use fd without the lock */
    uint32_t generation; /* of the current connection; grows when it is lost */
    uint32_t next_request;
    uint64_t retry_at; /* no connection attempt before, ns */
    uint32_t backoff_ms;
    struct cst_list calls;
    pthread_cond_t closed;     /* fd became -1 */
    pthread_cond_t plain_done; /* no plain reader any more */
    struct cst_hello hello;
    int32_t lost_status; /* why there is no connection */
    char lost[CST_ERROR_TEXT], goodbye[CST_ERROR_TEXT];
    uint8_t *rx;            /* CST_PACKET_MAX bytes, the reader's */
    struct cst_arena arena; /* unpacking */
};

/* 0 or -ENOMEM. deinit closes; safe after a failed init. */
int cst_conn_init(struct cst_conn *conn);
void cst_conn_deinit(struct cst_conn *conn);

/* Connects unless the back-off forbids; `slow` held. Sets the thread's error. */
int32_t cst_conn_connect(cistern_client *c);

/* Ends the connection: every call ends with DISCONNECTED, mappings become orphans. */
CST_COLD void cst_conn_lose(cistern_client *c, const char *fmt, ...) CST_PRINTF(2, 3);

/* A message and, optionally, the bytes of one field that are sent from where they are. */
struct cst_request {
    uint16_t type;
    unsigned bulk_field; /* 0: none */
    const ProtobufCMessage *message;
    const void *bulk;
    size_t bulk_size;
};

/* Sends and waits at most timeout_ms (0: the client's). Returns the call's status, with the
 * thread's error set when it is negative. After CISTERN_E_TIMEOUT the answer may still come; it is
 * then handled as a late one. */
int32_t cst_call_run(cistern_client *c, struct cst_call *call, const struct cst_request *request,
                     uint32_t timeout_ms);

/* Sends a request whose answer nobody needs. False: not sent. */
bool cst_post(cistern_client *c, const struct cst_request *request);

/* The arena's unpacked reply, valid until the reader's next packet; NULL if it does not decode. */
void *cst_reply_unpack(struct cst_call *call, const struct cst_packet *packet);

/* A reply that makes no sense: CISTERN_E_CORRUPT with the sentence in call->text. */
CST_COLD int32_t cst_call_corrupt(struct cst_call *call, const char *what);

/* For the library thread when it has nothing to do: reads what the daemon pushes until wake_fd is
 * readable, the connection changes or another thread reads. True: another thread reads, so the
 * caller should sleep until cst_conn_is_unread(). */
bool cst_conn_idle(cistern_client *c, int wake_fd);

/* Whether a reader is missing while somebody or something may want one. */
static inline bool cst_conn_is_unread(const struct cst_conn *conn) {
    return conn->up && !conn->reading;
}

/*
 * The whole of a public call in one function, for programs inside this tree (cisternctl):
 * reply() as in struct cst_call.
 */
int32_t cst_client_request(cistern_client *c, uint16_t type, const ProtobufCMessage *message,
                           struct cst_call *call);
