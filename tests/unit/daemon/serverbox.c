/* SPDX-License-Identifier: Apache-2.0 */
/* Owns the thread of an in-process daemon and the sockets of its test clients. */
#include "tests/unit/daemon/serverbox.h"

#include "base/fault.h"
#include "base/log.h"
#include "base/random.h"
#include "daemon/session.h"
#include "proto/key.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- the server ---- */

static void on_control(struct cst_io *io, uint32_t events) {
    struct cst_box *box = cst_container_of(io, struct cst_box, control);
    uint64_t count;

    assert_int_equal(read(io->fd, &count, sizeof(count)), sizeof(count));
    if (box->fn)
        box->fn(box->server, box->arg);
    else
        cst_server_stop(box->server);
    (void)sem_post(&box->done);
}

static void *run(void *arg) {
    struct cst_box *box = arg;

    cst_fault_join();
    box->result = cst_server_run(box->server);
    cst_io_stop(&box->server->loop, &box->control);
    box->server = cst_server_free(box->server);
    cst_fault_leave();
    return NULL;
}

void cst_box_start(struct cst_box *box, void (*configure)(struct cst_config *config)) {
    const struct cst_server_env env = { .clock = &cst_clock_monotonic,
                                        .random = &cst_random_system,
                                        .mem = &cst_mem_host,
                                        .worker_start = cst_fault_join };
    struct sockaddr_un addr = { .sun_family = AF_UNIX };
    static struct cst_config config;
    int fd;

    *box = (struct cst_box){ .control = CST_IO_NULL(on_control) };
    cst_log_set_level(CST_LOG_ERROR); /* tests disconnect many clients */
    cst_config_defaults(&config);
    config.memory = 64 << 20;
    config.slab = 1 << 20;
    config.staging = 4 << 20;
    config.workers = 2;
    if (configure)
        configure(&config);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (void *)&addr, sizeof(addr.sun_family)), 0); /* autobind */
    assert_int_equal(listen(fd, 64), 0);
    box->addr_len = sizeof(box->addr);
    assert_int_equal(getsockname(fd, (void *)&box->addr, &box->addr_len), 0);
    assert_int_equal(cst_server_new(&box->server, &config, &env), 0);
    assert_int_equal(cst_server_listen_consume_fd(box->server, fd, false), 0);
    box->control_fd = eventfd(0, EFD_CLOEXEC);
    assert_int_equal(cst_io_start(&box->server->loop, &box->control, box->control_fd, EPOLLIN), 0);
    assert_int_equal(sem_init(&box->done, 0, 0), 0);
    assert_int_equal(pthread_create(&box->thread, NULL, run, box), 0);
}

void cst_box_call(struct cst_box *box, void (*fn)(struct cst_server *server, void *arg),
                  void *arg) {
    uint64_t one = 1;

    box->fn = fn;
    box->arg = arg;
    assert_int_equal(write(box->control_fd, &one, sizeof(one)), sizeof(one));
    while (sem_wait(&box->done))
        ;
}

void cst_box_stop(struct cst_box *box) {
    cst_box_call(box, NULL, NULL);
    assert_int_equal(pthread_join(box->thread, NULL), 0);
    assert_int_equal(box->result, 0);
    close(box->control_fd);
    (void)sem_destroy(&box->done);
}

static void look(struct cst_server *server, void *arg) {
    *(bool *)arg = !server->n_sessions && !cst_store_jobs(server->store);
}

void cst_box_settle(struct cst_box *box) {
    bool settled = false;

    while (!settled) {
        cst_box_call(box, look, &settled);
        if (!settled)
            (void)poll(NULL, 0, 1);
    }
}

/* ---- the client ---- */

void cst_raw_connect_to(struct cst_raw *raw, const struct sockaddr_un *addr, socklen_t len) {
    memset(raw, 0, sizeof(*raw));
    raw->in = malloc(CST_PACKET_MAX);
    raw->out = malloc(CST_PACKET_MAX);
    raw->memory = malloc(CST_UNPACK_BUDGET);
    assert_true(raw->in && raw->out && raw->memory);
    cst_arena_init(&raw->arena, raw->memory, CST_UNPACK_BUDGET);
    raw->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_true(raw->fd >= 0);
    assert_int_equal(connect(raw->fd, (const void *)addr, len), 0);
}

void cst_raw_connect(struct cst_raw *raw, const struct cst_box *box) {
    cst_raw_connect_to(raw, &box->addr, box->addr_len);
}

static void close_fds(struct cst_raw *raw) {
    for (size_t i = 0; i < raw->n_fds; i++)
        cst_close(raw->fds[i]);
    raw->n_fds = 0;
}

void cst_raw_close(struct cst_raw *raw) {
    close_fds(raw);
    raw->fd = cst_close(raw->fd);
    free(raw->in);
    free(raw->out);
    free(raw->memory);
    raw->in = raw->out = raw->memory = NULL;
}

void cst_raw_send(struct cst_raw *raw, uint16_t type, const ProtobufCMessage *message) {
    size_t n = cst_packet_pack(raw->out, CST_PACKET_MAX, type, 0, ++raw->request, message);

    assert_true(n > 0);
    (void)cst_packet_send_borrowed_fds(raw->fd, raw->out, n, NULL, 0, 0);
}

static void keep_push(struct cst_raw *raw) {
    size_t i = raw->n_pushes++;

    assert_true(i < RAW_PUSHES);
    raw->pushes[i] = raw->packet.type;
    raw->push_len[i] = CST_MIN(raw->packet.length, sizeof(raw->push_data[i]));
    memcpy(raw->push_data[i], raw->packet.payload, raw->push_len[i]);
}

bool cst_raw_receive(struct cst_raw *raw) {
    ssize_t n;

    close_fds(raw);
    n = cst_packet_recv_owned_fds(raw->fd, raw->in, CST_PACKET_MAX, raw->fds, CST_PACKET_FDS_MAX,
                                  &raw->n_fds, 0);
    if (n == -ECONNRESET) /* packets may still wait behind the error */
        n = cst_packet_recv_owned_fds(raw->fd, raw->in, CST_PACKET_MAX, raw->fds,
                                      CST_PACKET_FDS_MAX, &raw->n_fds, 0);
    if (n <= 0)
        return false;
    assert_int_equal(cst_packet_parse(&raw->packet, raw->in, (size_t)n), 0);
    if (raw->packet.flags & CST_PACKET_PUSH)
        keep_push(raw);
    return true;
}

size_t cst_raw_wait_push(struct cst_raw *raw) {
    size_t before = raw->n_pushes;

    while (raw->n_pushes == before)
        assert_true(cst_raw_receive(raw));
    return before;
}

int cst_raw_call(struct cst_raw *raw, uint16_t type, const ProtobufCMessage *message) {
    cst_raw_send(raw, type, message);
    do {
        if (!cst_raw_receive(raw))
            return -1;
    } while (raw->packet.flags & CST_PACKET_PUSH);
    assert_int_equal(raw->packet.request, raw->request);
    if (raw->packet.flags & CST_PACKET_ERROR)
        return cst_packet_error(&raw->packet, raw->text, sizeof(raw->text));
    assert_int_equal(raw->packet.type, type);
    cst_arena_reset(&raw->arena);
    raw->reply = cst_message_unpack(cst_message_descriptor(type, true), raw->packet.payload,
                                    raw->packet.length, &raw->arena);
    assert_non_null(raw->reply);
    return CST_STATUS_OK;
}

int cst_raw_hello(struct cst_raw *raw) {
    Cistern__V1__Hello hello = CISTERN__V1__HELLO__INIT;

    hello.version_min = hello.version_max = CST_PROTOCOL_VERSION;
    hello.client_name = (char *)(uintptr_t) "test";
    return cst_raw_call(raw, CST_MSG_HELLO, &hello.base);
}

/* ---- a small space ---- */

size_t cst_box_descriptor(uint8_t *out, size_t cap, uint8_t model) {
    struct cst_layer layer = { 0 };
    struct cst_segment segment = { .tensor = CST_TENSOR_OPAQUE,
                                   .length = BOX_BLOCK,
                                   .token_stride = BOX_BLOCK / BOX_TOKENS };
    struct cst_descriptor d = { .engine = "test",
                                .block_tokens = BOX_TOKENS,
                                .tp_size = 1,
                                .block_bytes = BOX_BLOCK,
                                .n_layers = 1,
                                .n_segments = 1,
                                .layers = &layer,
                                .segments = &segment };

    d.content_id[0] = 1;
    d.content_id[1] = model;
    return cst_descriptor_encode(&d, out, cap);
}

uint32_t cst_raw_open(struct cst_raw *raw, uint8_t model, uint32_t kind, uint8_t root[32]) {
    Cistern__V1__SpaceOpen open = CISTERN__V1__SPACE_OPEN__INIT;
    const Cistern__V1__SpaceOpenReply *reply;
    uint8_t bytes[1024];

    assert_int_equal(cst_raw_hello(raw), CST_STATUS_OK);
    open.descriptor = (ProtobufCBinaryData){ .len = cst_box_descriptor(bytes, sizeof(bytes), model),
                                             .data = bytes };
    open.kind = kind;
    assert_int_equal(cst_raw_call(raw, CST_MSG_SPACE_OPEN, &open.base), 0);
    reply = raw->reply;
    assert_int_equal(reply->block_bytes, BOX_BLOCK);
    if (root)
        cst_key_root(reply->fingerprint.data, NULL, 0, root);
    return reply->space;
}

int cst_raw_staging(struct cst_raw *raw, struct cst_raw_staging *out) {
    Cistern__V1__StagingGet get = CISTERN__V1__STAGING_GET__INIT;
    const Cistern__V1__StagingGetReply *reply;
    int status = cst_raw_call(raw, CST_MSG_STAGING_GET, &get.base);
    void *base;

    if (status)
        return status;
    reply = raw->reply;
    assert_int_equal(raw->n_fds, 1);
    base = mmap(NULL, reply->size, PROT_READ | PROT_WRITE, MAP_SHARED, raw->fds[0], 0);
    assert_true(base != MAP_FAILED);
    *out = (struct cst_raw_staging){ .base = base, .size = reply->size, .lists = reply->lists };
    return 0;
}

void cst_raw_staging_unmap(struct cst_raw_staging *staging) {
    (void)munmap(staging->base, staging->size);
}

void cst_box_chain(const uint8_t parent[32], uint32_t first, size_t n, uint8_t *keys,
                   uint32_t *tokens) {
    for (size_t i = 0; i < n * BOX_TOKENS; i++)
        tokens[i] = first + (uint32_t)i;
    cst_key_chain(parent, tokens, n * BOX_TOKENS, BOX_TOKENS, keys);
}

uint8_t cst_box_fill(const uint8_t key[32]) {
    return (uint8_t)(key[0] ^ key[31]);
}

static int commit_slots(struct cst_raw *raw, uint8_t *ids, size_t n, uint16_t *statuses) {
    Cistern__V1__Commit commit = CISTERN__V1__COMMIT__INIT;
    const Cistern__V1__CommitReply *reply;
    int status;

    commit.slots = cst_raw_bytes(ids, n * 8);
    status = cst_raw_call(raw, CST_MSG_COMMIT, &commit.base);
    reply = raw->reply;
    for (size_t i = 0; i < n && !status; i++)
        statuses[i] = cst_load16(reply->statuses.data + 2 * i);
    return status;
}

int cst_raw_put(struct cst_raw *raw, uint32_t space, struct cst_raw_staging *staging,
                const uint8_t parent[32], uint32_t first, size_t n, uint16_t *statuses) {
    enum { MAX = 64 };
    Cistern__V1__Reserve reserve = CISTERN__V1__RESERVE__INIT;
    const Cistern__V1__ReserveReply *reply;
    uint8_t keys[MAX * 32], ids[MAX * 8];
    uint32_t tokens[MAX * BOX_TOKENS];
    int status;

    assert_true(n <= MAX);
    cst_box_chain(parent, first, n, keys, tokens);
    reserve.space = space;
    reserve.parent = cst_raw_bytes(parent, 32);
    reserve.keys = cst_raw_bytes(keys, n * 32);
    reserve.tokens = cst_raw_bytes(tokens, n * BOX_TOKENS * 4);
    status = cst_raw_call(raw, CST_MSG_RESERVE, &reserve.base);
    if (status)
        return status;
    reply = raw->reply;
    assert_int_equal(reply->slots.len, n * sizeof(struct cst_slot_record));
    for (size_t i = 0; i < n; i++) {
        const struct cst_slot_record *record = (const void *)(reply->slots.data + 32 * i);

        statuses[i] = cst_load16(&record->status);
        if (statuses[i])
            return 0; /* the caller looks */
        memset(staging->base + cst_load64(&record->offset), cst_box_fill(keys + 32 * i), BOX_BLOCK);
        memcpy(ids + 8 * i, &record->slot, 8);
    }
    return commit_slots(raw, ids, n, statuses);
}
