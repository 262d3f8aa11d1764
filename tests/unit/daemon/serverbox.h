/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A whole daemon in the test's own process, on its own thread, and a client that speaks packets to
 * it. The server's threads join the fault points, the test's thread does not.
 */
#pragma once

#include "tests/lib/check.h"

#include "daemon/server.h"
#include "proto/frame.h"
#include "proto/record.h"
#include "proto/status.h"

#include <pthread.h>
#include <semaphore.h>
#include <sys/un.h>

struct cst_box {
    struct cst_server *server;
    struct sockaddr_un addr; /* abstract */
    socklen_t addr_len;
    pthread_t thread;
    struct cst_io control;
    int control_fd;
    sem_t done;
    void (*fn)(struct cst_server *server, void *arg); /* the order at hand; NULL: stop */
    void *arg;
    int result; /* of cst_server_run() */
};

/* configure may be NULL. */
void cst_box_start(struct cst_box *box, void (*configure)(struct cst_config *config));
/* A clean stop; checks that the server ended without an error. */
void cst_box_stop(struct cst_box *box);
/* Runs fn on the loop thread and waits for it. */
void cst_box_call(struct cst_box *box, void (*fn)(struct cst_server *server, void *arg), void *arg);
/* Turns of the loop until no session and no job is left. */
void cst_box_settle(struct cst_box *box);

enum { RAW_PUSHES = 64 };

struct cst_raw {
    int fd;
    uint32_t request;
    int fds[CST_PACKET_FDS_MAX]; /* owned: those of the last reply */
    size_t n_fds;
    char text[512]; /* of the last error reply */
    struct cst_arena arena;
    uint8_t *in, *out, *memory;
    struct cst_packet packet;
    const void *reply; /* decoded */
    size_t n_pushes;
    uint16_t pushes[RAW_PUSHES]; /* types, in order */
    uint8_t push_data[RAW_PUSHES][512];
    size_t push_len[RAW_PUSHES];
};

/* Connects, without Hello. */
void cst_raw_connect(struct cst_raw *raw, const struct cst_box *box);
void cst_raw_connect_to(struct cst_raw *raw, const struct sockaddr_un *addr, socklen_t len);
void cst_raw_close(struct cst_raw *raw);

void cst_raw_send(struct cst_raw *raw, uint16_t type, const ProtobufCMessage *message);
/* The next packet: false at the end of the connection. Pushes are only kept. */
bool cst_raw_receive(struct cst_raw *raw);
/* Waits for one more push; its index. */
size_t cst_raw_wait_push(struct cst_raw *raw);

/* One request, its reply's status: OK and raw->reply (until the next call), or the error and
 * raw->text. -1: the connection has ended. */
int cst_raw_call(struct cst_raw *raw, uint16_t type, const ProtobufCMessage *message);

int cst_raw_hello(struct cst_raw *raw);

/* A field of n bytes, which are only read. */
static inline ProtobufCBinaryData cst_raw_bytes(const void *data, size_t n) {
    return (ProtobufCBinaryData){ .len = n, .data = (uint8_t *)(uintptr_t)data };
}

/* ---- a small space of opaque blocks ---- */

enum { BOX_TOKENS = 16, BOX_BLOCK = 8192 };

/* Canonical bytes of a descriptor; `model` makes it differ. Returns the length. */
size_t cst_box_descriptor(uint8_t *out, size_t cap, uint8_t model);
/* Hello and SpaceOpen; the handle. */
uint32_t cst_raw_open(struct cst_raw *raw, uint8_t model, uint32_t kind, uint8_t root[32]);
/* Hello, SpaceOpen, StagingGet and the mapping. */
struct cst_raw_staging {
    uint8_t *base;
    uint64_t size, lists;
};
int cst_raw_staging(struct cst_raw *raw, struct cst_raw_staging *out);
void cst_raw_staging_unmap(struct cst_raw_staging *staging);

/* The chain of n full blocks whose token ids begin at `first`: keys n x 32, tokens n x BOX_TOKENS.
 */
void cst_box_chain(const uint8_t parent[32], uint32_t first, size_t n, uint8_t *keys,
                   uint32_t *tokens);
/* Reserve, fill with a byte pattern of the key, Commit; statuses of Reserve or Commit. */
int cst_raw_put(struct cst_raw *raw, uint32_t space, struct cst_raw_staging *staging,
                const uint8_t parent[32], uint32_t first, size_t n, uint16_t *statuses);
/* The byte that fills the block of this key. */
uint8_t cst_box_fill(const uint8_t key[32]);
