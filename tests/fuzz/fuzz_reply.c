/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a daemon may answer: any packets, to any call of libcistern. Nothing that a call hands out
 * afterwards may lie outside its memory (every lease is read, every slot written at both ends), and
 * nothing may hang: the connection ends after the last packet.
 *
 * Input: u8 call, then packets of: u8 flags, u8 type, u8 request (from the call's first on), u8
 * descriptors, u16le length, payload.
 */
#include "tests/fuzz/fuzz.h"

#include "base/mem.h"
#include "client/client.h"

#include <assert.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    BT = 16,
    BLOCK = 4096,
    KEYS = 4,
    SLAB = 8 * BLOCK,
    HEAD = 6,
    CALLS = 12,
};

static struct {
    cistern_client *client;
    cistern_space *space;
    int slab;
    uint32_t tokens[KEYS * BT];
    uint8_t keys[KEYS * CISTERN_KEY_SIZE];
} world;

static int sealed_memory(void) {
    int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    assert(fd >= 0 && !ftruncate(fd, SLAB) && !fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK));
    return fd;
}

static void make_world(void) {
    static const cistern_layer layer = { .kv_heads = 1, .head_dim_k = 64, .head_dim_v = 64 };
    static const cistern_segment segment = { .tensor = CISTERN_TENSOR_K,
                                             .dtype = CISTERN_DTYPE_BF16,
                                             .length = (size_t)BT * 64 * 2,
                                             .token_stride = 128,
                                             .head_stride = 128,
                                             .dim_stride = 2 };
    cistern_descriptor d = { .size = sizeof(d),
                             .block_tokens = BT,
                             .block_bytes = BLOCK,
                             .content_id = "fuzz",
                             .engine = "fuzz",
                             .n_layers = 1,
                             .n_segments = 1,
                             .layers = &layer,
                             .segments = &segment };
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;
    size_t n;
    int32_t status;

    options.socket_path = "/nonexistent/cistern.sock";
    options.flags = CISTERN_CLIENT_LAZY;
    status = cistern_client_open(&world.client, &options);
    assert(!status);
    world.client->conn.retry_at = UINT64_MAX; /* it never dials */
    status = cistern_space_open(world.client, &d, NULL, &world.space);
    assert(!status);
    status = cistern_key_chain(world.space, NULL, world.tokens, KEYS * BT, world.keys, KEYS, &n);
    assert(!status);
    world.slab = sealed_memory();
}

static void give_staging(struct cst_map *map) {
    struct cst_staging *staging = cst_calloc(1, sizeof(*staging));

    assert(staging);
    *staging = (struct cst_staging){ .refs = 1, .size = SLAB, .lists = SLAB / 2 };
    staging->data = cst_map_memory(world.slab, SLAB, true);
    assert(staging->data);
    cst_list_append(&map->stagings, &staging->link);
    map->staging = staging;
}

/* A live connection, as after a Hello; returns the daemon's end. */
static int connect_world(void) {
    struct cst_conn *conn = &world.client->conn;
    int ends[2];

    assert(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
    conn->fd = ends[0];
    conn->up = true;
    conn->hello = (struct cst_hello){ .packet_max = CST_PACKET_MAX, .keys_max = 1000 };
    world.client->next_lease = 1; /* what an input says of lease 1 is about the first key */
    world.space->generation = conn->generation;
    world.space->handle = 1;
    give_staging(&world.client->map);
    return ends[1];
}

static void send_packets(int daemon, const uint8_t *data, size_t size) {
    static uint8_t packet[sizeof(struct cst_packet_header) + UINT16_MAX];
    int fds[CST_PACKET_FDS_MAX];

    for (size_t i = 0; i < CST_PACKET_FDS_MAX; i++)
        fds[i] = world.slab;
    while (size >= HEAD) {
        size_t n = CST_MIN((size_t)cst_load16(data + 4), size - HEAD);
        uint32_t request = world.client->conn.next_request + 1 + data[2];

        cst_packet_header_fill((void *)packet, data[1], data[0], request, n);
        memcpy(packet + sizeof(struct cst_packet_header), data + HEAD, n);
        if (cst_packet_send_borrowed_fds(daemon, packet, sizeof(struct cst_packet_header) + n, fds,
                                         data[3] % (CST_PACKET_FDS_MAX + 1), MSG_DONTWAIT))
            break;
        data += HEAD + n;
        size -= HEAD + n;
    }
    (void)shutdown(daemon, SHUT_WR);
}

static void read_leases(cistern_lease *const *leases, const int32_t *statuses) {
    static uint8_t block[BLOCK];
    volatile uint8_t sink;

    for (size_t i = 0; i < KEYS; i++) {
        const void *data;
        size_t n;

        assert(!leases[i] == (statuses[i] != CISTERN_OK));
        if (!leases[i])
            continue;
        assert(!cistern_lease_data(leases[i], &data, &n, NULL) && n);
        sink = ((const uint8_t *)data)[0];
        sink = ((const uint8_t *)data)[n - 1];
        (void)sink;
        (void)cistern_lease_decode(leases[i], block, sizeof(block));
    }
    cistern_release(world.client, leases, KEYS);
}

static void acquire(uint32_t mode) {
    cistern_acquire_options options = { .size = sizeof(options), .mode = mode };
    cistern_lease *leases[KEYS];
    int32_t statuses[KEYS];

    if (!cistern_acquire(world.space, world.keys, KEYS, &options, leases, statuses))
        read_leases(leases, statuses);
}

static void reserve(void) {
    cistern_slot *slots[KEYS];
    int32_t statuses[KEYS];

    if (cistern_reserve(world.space, NULL, world.keys, world.tokens, KEYS * BT, KEYS, slots,
                        statuses))
        return;
    for (size_t i = 0; i < KEYS; i++) {
        void *data;
        size_t n;

        assert(!slots[i] == (statuses[i] != CISTERN_OK));
        if (!slots[i])
            continue;
        assert(!cistern_slot_data(slots[i], &data, &n) && n == BLOCK);
        ((uint8_t *)data)[0] = ((uint8_t *)data)[n - 1] = 1;
    }
    (void)cistern_commit(world.space, slots, KEYS, NULL, statuses);
}

static void look(unsigned call) {
    cistern_match match = { .size = sizeof(match) };
    uint8_t tiers[KEYS];
    size_t n;

    if (call == 0) {
        if (!cistern_lookup(world.space, world.tokens, KEYS * BT - 3, world.keys, &match))
            assert(match.tokens <= KEYS * BT - 3);
    } else if (call == 1) {
        if (!cistern_lookup_keys(world.space, world.keys, KEYS, tiers, &n))
            assert(n <= KEYS);
    } else {
        (void)cistern_lookup_each(world.space, world.keys, KEYS, tiers);
    }
}

static void side_data(bool get) {
    static uint8_t data[4 * BLOCK];
    cistern_sidedata_info info = { .size = sizeof(info) };
    uint32_t version;

    if (!get)
        (void)cistern_sidedata_put(world.space, CISTERN_SIDEDATA_TABLES, data, sizeof(data),
                                   &version);
    else if (!cistern_sidedata_get(world.space, 0, data, sizeof(data), &info))
        assert(info.bytes <= sizeof(data));
}

static void run(unsigned call) {
    static uint8_t blocks[KEYS][BLOCK];
    void *const targets[KEYS] = { blocks[0], blocks[1], blocks[2], blocks[3] };
    const size_t sizes[KEYS] = { BLOCK, BLOCK, BLOCK, BLOCK };
    int32_t statuses[KEYS];
    char text[512];

    if (call < 3)
        look(call);
    else if (call < 5)
        acquire(call - 3);
    else if (call == 5)
        reserve();
    else if (call == 6)
        (void)cistern_get_into(world.space, world.keys, KEYS, targets, sizes, statuses);
    else if (call == 7)
        (void)cistern_pin(world.space, world.keys, KEYS, 1);
    else if (call == 8)
        (void)cistern_explain(world.space, world.tokens, KEYS * BT, text, sizeof(text));
    else if (call == 9)
        (void)cistern_stats(world.client, NULL, text, sizeof(text));
    else
        side_data(call == 10);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    int daemon;

    if (!size)
        return 0;
    if (!world.client)
        make_world();
    daemon = connect_world();
    send_packets(daemon, data + 1, size - 1);
    run(data[0] % CALLS);
    while (world.client->conn.up) /* reads what is left, to the end of the connection */
        (void)cistern_client_ping(world.client);
    cst_close(daemon);
    assert(cst_list_is_empty(&world.client->map.stagings));
    assert(cst_list_is_empty(&world.client->map.all));
    return 0;
}
