/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small daemon in a thread, for tests of libcistern: it speaks the protocol truthfully over a
 * store of a few blocks, and lies when a test's hook says so. One slab of FAKE_BLOCKS places, one
 * block a place; no eviction, no namespaces.
 *
 * Tests read fields between fake_lock() and fake_unlock(); hooks run on the thread with the lock.
 */
#pragma once

#include "proto/frame.h"
#include "proto/record.h"

#include <cistern/cistern.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FAKE_BLOCKS = 512,
    FAKE_BLOCK_TOKENS = 16,
    FAKE_BLOCK_BYTES = 4096,
    FAKE_CONNECTIONS = 8,
    FAKE_TYPES = 128,
    FAKE_SLAB = 7, /* id of the slab */
};

struct fake_block {
    bool used;
    uint8_t key[32], parent[32];
    uint32_t tokens[FAKE_BLOCK_TOKENS], n_tokens;
};

struct fake_slot {
    bool used;
    uint64_t id;
    uint8_t key[32], parent[32];
    uint32_t tokens[FAKE_BLOCK_TOKENS], n_tokens;
};

struct fake_connection {
    int fd; /* -1: free */
    uint8_t *staging;
    struct fake_slot slots[FAKE_BLOCKS]; /* place i of staging */
};

struct fake_daemon;

/* True: the hook has answered (or decided not to). */
typedef bool (*fake_hook)(struct fake_daemon *f, struct fake_connection *c,
                          const struct cst_packet *packet);

struct fake_daemon {
    /* set before fake_start(), or under the lock */
    uint32_t keys_max, packet_max, staging_places, lists_bytes, server_uid;
    uint64_t epoch;
    fake_hook hook;
    void *hook_arg;

    char dir[64], path[96];
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* after every packet handled */
    int listener, stop_fd, slab_fd;
    uint8_t *slab;
    struct fake_connection connections[FAKE_CONNECTIONS];
    struct fake_block blocks[FAKE_BLOCKS];
    uint64_t next_slot;

    unsigned n_connects, n_requests[FAKE_TYPES];
    unsigned n_leases;       /* granted and not released */
    uint64_t released[8192]; /* lease ids in the order of release */
    unsigned n_released, n_aborted, n_dropped;
    uint16_t surprisals[1024]; /* of the last Commit */
    size_t n_surprisals;
    struct cst_arena arena;
    uint8_t arena_room[CST_UNPACK_BUDGET], rx[CST_PACKET_MAX], tx[CST_PACKET_MAX];
};

/* A daemon with sensible limits, listening. Fails the test if it can't. */
struct fake_daemon *fake_new(void);
struct fake_daemon *fake_free(struct fake_daemon *f);

/* Closes every connection (and the listener: stop; again there: start). */
void fake_hang_up(struct fake_daemon *f);
void fake_stop(struct fake_daemon *f);
void fake_start(struct fake_daemon *f);

void fake_lock(struct fake_daemon *f);
void fake_unlock(struct fake_daemon *f);
void fake_set_hook(struct fake_daemon *f, fake_hook hook, void *arg);

/* Waits until the daemon has handled n requests of a type since it began. */
void fake_wait(struct fake_daemon *f, uint16_t type, unsigned n);

/* For hooks and tests; lock held. */
void fake_reply(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *packet,
                const ProtobufCMessage *message);
void fake_reply_fds(struct fake_daemon *f, struct fake_connection *c,
                    const struct cst_packet *packet, const ProtobufCMessage *message,
                    const int *fds, size_t n_fds);
void fake_error(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *packet,
                int status);
void fake_push(struct fake_daemon *f, uint16_t type, const ProtobufCMessage *message);
void fake_send(struct fake_connection *c, const void *data, size_t n);
void *fake_unpack(struct fake_daemon *f, const struct cst_packet *packet);
void fake_answer(struct fake_daemon *f, struct fake_connection *c,
                 const struct cst_packet *packet); /* the truth */
struct fake_block *fake_find(struct fake_daemon *f, const uint8_t *key);
/* Stores a block as if somebody had; bytes are fake_byte(). */
void fake_store(struct fake_daemon *f, const uint8_t *key, const uint8_t *parent,
                const uint32_t *tokens, uint32_t n_tokens);

/* Byte i of the block with that key. */
uint8_t fake_byte(const uint8_t *key, size_t i);

/* ---- what tests share ---- */

/* A client of this daemon, and the descriptor of its blocks (static memory). */
cistern_client *fake_client(struct fake_daemon *f, uint32_t flags);

/* How long a connected client waits from now on. Short only around the call that must run into it:
 * on a busy machine every other answer may take longer than that. */
enum { FAKE_SHORT_MS = 30, FAKE_PATIENT_MS = 10000 };
void fake_set_timeout(cistern_client *c, uint32_t timeout_ms);
const cistern_descriptor *fake_descriptor(void);
cistern_space *fake_space(cistern_client *c, uint32_t kind);

/* Keys of n_tokens tokens 1000, 1001, ...; also stores the first `stored` blocks. */
void fake_prompt(struct fake_daemon *f, cistern_space *space, uint32_t *tokens, size_t n_tokens,
                 uint8_t *keys, size_t stored);

/* A daemon, a client with the default timeout and a token space; for cmocka's setup and teardown.
 */
struct fake_fixture {
    struct fake_daemon *f;
    cistern_client *client;
    cistern_space *space;
};
int fake_setup(void **state);
int fake_teardown(void **state);
