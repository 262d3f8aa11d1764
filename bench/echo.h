/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The limit probe of everything that is one round trip: the same request and reply bytes between
 * two processes that do nothing but poll, receive and send. The one that asks polls with a time
 * limit, like every call of the library: a wait without an end is a microsecond cheaper, and no
 * client can afford it.
 *
 * A tap sits between a client and the daemon and records the packets of one operation; an echo
 * process then answers those requests with those replies.
 */
#pragma once

#include "bench/bench.h"

#include <stdint.h>

enum { CST_EXCHANGES_MAX = 4, CST_PACKET_MAX = 128 * 1024 };

struct cst_exchange {
    uint8_t request[CST_PACKET_MAX], reply[CST_PACKET_MAX];
    size_t request_len, reply_len;
};

struct cst_recording {
    size_t n;
    struct cst_exchange exchanges[CST_EXCHANGES_MAX];
};

/* A relay at `path` to the daemon's socket for one client, on its own thread. */
struct cst_tap;
int cst_tap_new(struct cst_tap **out, const char *path, const char *daemon);
void cst_tap_record(struct cst_tap *tap, struct cst_recording *to); /* to NULL: stop */
/* The client must be closed. NULL ok; returns NULL. */
struct cst_tap *cst_tap_free(struct cst_tap *tap);

/* The other process: poll, recv, send, on the pinned core. */
struct cst_echo {
    pid_t pid;
    int fd;
    bool endless; /* ask without a time limit: send, recv */
    const struct cst_recording *recording;
    uint8_t *reply;
};
int cst_echo_open(struct cst_echo *echo, const struct cst_recording *recording);
void cst_echo_close(struct cst_echo *echo);

/* A side for cst_compare(): one operation = all exchanges of the recording in turn. */
int cst_echo_run(void *echo, unsigned ops);
