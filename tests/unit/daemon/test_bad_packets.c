/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a client may send wrong: each packet gets its status and a sentence, ends the connection or
 * not, and leaves the other client, its lease and its bytes alone.
 */
#include "tests/unit/daemon/serverbox.h"

#include "daemon/call.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static struct cst_box box;
static struct cst_raw good; /* the bystander */
static struct cst_raw_staging good_staging;
static uint32_t good_space;
static uint8_t root[32], good_key[32];

static int start(void **state) {
    uint32_t tokens[BOX_TOKENS];
    uint16_t status;

    cst_box_start(&box, NULL);
    cst_raw_connect(&good, &box);
    good_space = cst_raw_open(&good, 1, CST_KIND_TOKENS, root);
    assert_int_equal(cst_raw_staging(&good, &good_staging), 0);
    assert_int_equal(cst_raw_put(&good, good_space, &good_staging, root, 1, 1, &status), 0);
    assert_int_equal(status, CST_STATUS_OK);
    cst_box_chain(root, 1, 1, good_key, tokens);
    return 0;
}

static void check_bystander(void) {
    Cistern__V1__Lookup lookup = CISTERN__V1__LOOKUP__INIT;
    const Cistern__V1__LookupReply *reply;

    lookup.space = good_space;
    lookup.keys = cst_raw_bytes(good_key, 32);
    assert_int_equal(cst_raw_call(&good, CST_MSG_LOOKUP, &lookup.base), CST_STATUS_OK);
    reply = good.reply;
    assert_int_equal(reply->present, 1);
}

static int stop(void **state) {
    cst_raw_staging_unmap(&good_staging);
    cst_raw_close(&good);
    cst_box_settle(&box);
    cst_box_stop(&box);
    return 0;
}

static bool is_alive(struct cst_raw *raw) {
    Cistern__V1__Ping ping = CISTERN__V1__PING__INIT;

    return cst_raw_call(raw, CST_MSG_PING, &ping.base) == CST_STATUS_OK;
}

/* ---- framing: bytes on the wire ---- */

struct frame_row {
    const char *name;
    const char *hex; /* of the packet */
    size_t zeros;    /* appended */
    int status;
    bool ends;
};

/* magic 4353544e, version, flags, type u16, length u32, request u32 */
static const struct frame_row frame_rows[] = {
    { "one byte", "43", 0, CST_STATUS_BAD_LENGTH, true },
    { "half a header", "4353544e0100020000000000", 0, CST_STATUS_BAD_LENGTH, true },
    { "foreign magic", "4353544f010002000000000007000000", 0, CST_STATUS_BAD_MAGIC, true },
    { "HTTP", "474554202f20485454502f312e310d0a", 0, CST_STATUS_BAD_MAGIC, true },
    { "length too long", "4353544e010002000100000007000000", 0, CST_STATUS_BAD_LENGTH, true },
    { "length too short", "4353544e010002000000000007000000", 4, CST_STATUS_BAD_LENGTH, true },
    { "length of 4 GiB", "4353544e01000200ffffffff07000000", 0, CST_STATUS_BAD_LENGTH, true },
    { "more than a packet", "4353544e010002000000020007000000", CST_PACKET_MAX,
      CST_STATUS_BAD_LENGTH, true },
    { "version 2", "4353544e020002000000000007000000", 0, CST_STATUS_BAD_VERSION, false },
    { "version 0", "4353544e000002000000000007000000", 0, CST_STATUS_BAD_VERSION, false },
    { "type 0", "4353544e010000000000000007000000", 0, CST_STATUS_BAD_TYPE, false },
    { "a hole in the types", "4353544e01001a000000000007000000", 0, CST_STATUS_BAD_TYPE, false },
    { "a push's type", "4353544e010064000000000007000000", 0, CST_STATUS_BAD_TYPE, false },
    { "the last type", "4353544e0100ffff0000000007000000", 0, CST_STATUS_BAD_TYPE, false },
    { "a reply", "4353544e010102000000000007000000", 0, CST_STATUS_BAD_MESSAGE, false },
    { "an unknown flag", "4353544e018002000000000007000000", 0, CST_STATUS_BAD_MESSAGE, false },
    { "no protobuf", "4353544e010002000200000007000000ffff", 0, CST_STATUS_BAD_MESSAGE, false },
    { "an unknown field", "4353544e0100020002000000070000007800", 0, CST_STATUS_BAD_MESSAGE,
      false },
};

static void check_frame(void **state) {
    const struct frame_row *row = *state;
    static uint8_t packet[CST_PACKET_MAX + 64];
    size_t n = strlen(row->hex) / 2;
    struct cst_raw raw;

    cst_unhex(packet, n, row->hex);
    memset(packet + n, 0, row->zeros);
    cst_raw_connect(&raw, &box);
    assert_int_equal(cst_raw_hello(&raw), CST_STATUS_OK);
    assert_int_equal(send(raw.fd, packet, n + row->zeros, 0), (ssize_t)(n + row->zeros));
    assert_true(cst_raw_receive(&raw));
    assert_int_equal(cst_packet_error(&raw.packet, raw.text, sizeof(raw.text)), row->status);
    assert_true(strlen(raw.text) > 10);
    if (n >= 16 && n + row->zeros <= CST_PACKET_MAX)
        assert_int_equal(raw.packet.request, cst_load32(packet + 12));
    assert_int_equal(is_alive(&raw), !row->ends);
    check_bystander();
    cst_raw_close(&raw);
}

/* ---- descriptors ---- */

/* The way of kernels that can't refuse them at the sender. */
static void check_fds(int n) {
    uint8_t packet[64];
    Cistern__V1__Ping ping = CISTERN__V1__PING__INIT;
    size_t len = cst_packet_pack(packet, sizeof(packet), CST_MSG_PING, 0, 5, &ping.base);
    int fds[CST_PACKET_FDS_MAX], end[2];
    struct cst_raw raw;
    char byte;

    cst_raw_connect(&raw, &box);
    assert_int_equal(cst_raw_hello(&raw), CST_STATUS_OK);
    assert_int_equal(pipe2(end, O_CLOEXEC), 0);
    for (int i = 0; i < n; i++)
        fds[i] = end[1];
    assert_int_equal(cst_packet_send_borrowed_fds(raw.fd, packet, len, fds, (size_t)n, 0), 0);
    close(end[1]);
    assert_true(cst_raw_receive(&raw));
    assert_int_equal(cst_packet_error(&raw.packet, raw.text, sizeof(raw.text)), CST_STATUS_BAD_FDS);
    assert_false(is_alive(&raw));
    assert_int_equal(read(end[0], &byte, 1), 0); /* nobody kept a copy */
    close(end[0]);
    cst_raw_close(&raw);
    check_bystander();
}

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83
#endif

static void set_passing(struct cst_server *server, void *arg) {
    (void)setsockopt(server->listeners[0].io.fd, SOL_SOCKET, SO_PASSRIGHTS, arg, sizeof(int));
}

static void descriptors_end_the_connection(void **state) {
    int yes = 1, no = 0;

    cst_box_call(&box, set_passing, &yes);
    check_fds(1);
    check_fds(CST_PACKET_FDS_MAX);
    cst_box_call(&box, set_passing, &no);
}

static void can_refuse(struct cst_server *server, void *arg) {
    *(bool *)arg = cst_packet_refuses_fds(server->listeners[0].io.fd);
}

/* Newer kernels: the sender learns it at once, and nothing else happens. */
static void descriptors_do_not_pass(void **state) {
    Cistern__V1__Ping ping = CISTERN__V1__PING__INIT;
    uint8_t packet[64];
    size_t len = cst_packet_pack(packet, sizeof(packet), CST_MSG_PING, 0, 5, &ping.base);
    struct cst_raw raw;
    bool refuses;

    cst_box_call(&box, can_refuse, &refuses);
    cst_raw_connect(&raw, &box);
    assert_int_equal(cst_raw_hello(&raw), CST_STATUS_OK);
    if (refuses)
        assert_int_equal(cst_packet_send_borrowed_fds(raw.fd, packet, len, &raw.fd, 1, 0), -EPERM);
    assert_true(is_alive(&raw));
    cst_raw_close(&raw);
}

/* ---- the order of things ---- */

static void hello_comes_first_and_once(void **state) {
    Cistern__V1__Stats stats = CISTERN__V1__STATS__INIT;
    struct cst_raw raw;

    cst_raw_connect(&raw, &box);
    assert_true(is_alive(&raw)); /* Ping may come before */
    assert_int_equal(cst_raw_call(&raw, CST_MSG_STATS, &stats.base), CST_STATUS_BAD_STATE);
    assert_int_equal(cst_raw_hello(&raw), CST_STATUS_OK);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_STATS, &stats.base), CST_STATUS_OK);
    assert_int_equal(cst_raw_hello(&raw), CST_STATUS_BAD_STATE);
    cst_raw_close(&raw);
}

struct hello_row {
    const char *name;
    uint32_t min, max;
    const char *client;
    int status;
};

static const struct hello_row hello_rows[] = {
    { "exactly ours", 1, 1, "a", CST_STATUS_OK },
    { "a wide range", 0, 99, "a", CST_STATUS_OK },
    { "only newer", 2, 9, "a", CST_STATUS_BAD_VERSION },
    { "only older", 0, 0, "a", CST_STATUS_BAD_VERSION },
    { "an empty range", 3, 1, "a", CST_STATUS_BAD_VERSION },
    { "no name", 1, 1, "", CST_STATUS_OK },
    { "64 characters", 1, 1, "0123456789012345678901234567890123456789012345678901234567890123",
      CST_STATUS_OK },
    { "65 characters", 1, 1, "01234567890123456789012345678901234567890123456789012345678901234",
      CST_STATUS_BAD_ARGUMENT },
    { "a control character", 1, 1, "a\nb", CST_STATUS_BAD_ARGUMENT },
    { "no ASCII", 1, 1, "\xc3\xa4", CST_STATUS_BAD_ARGUMENT },
};

static void check_hello(void **state) {
    const struct hello_row *row = *state;
    Cistern__V1__Hello hello = CISTERN__V1__HELLO__INIT;
    struct cst_raw raw;

    hello.version_min = row->min;
    hello.version_max = row->max;
    hello.client_name = (char *)(uintptr_t)row->client;
    cst_raw_connect(&raw, &box);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_HELLO, &hello.base), row->status);
    if (!row->status) {
        const Cistern__V1__HelloReply *reply = raw.reply;

        assert_int_equal(reply->version, 1);
        assert_int_equal(reply->packet_max, CST_PACKET_MAX);
        assert_int_equal(reply->keys_max, 65536);
        assert_int_equal(reply->requests_max, 64);
        assert_true(reply->epoch != 0);
    }
    cst_raw_close(&raw);
}

static void every_request_has_a_handler(void **state) {
    static const uint16_t types[] = {
#define R(NAME, number, request, reply) number,
#include "proto/message.def"
    };
    struct cst_raw raw;

    cst_raw_connect(&raw, &box);
    assert_int_equal(cst_raw_hello(&raw), CST_STATUS_OK);
    for (size_t i = 0; i < CST_COUNT(types); i++) {
        struct cst_packet_header empty; /* an empty message is valid protobuf for each of them */

        cst_packet_header_fill(&empty, types[i], 0, 77, 0);
        assert_int_equal(send(raw.fd, &empty, sizeof(empty), 0), sizeof(empty));
        assert_true(cst_raw_receive(&raw));
        assert_int_equal(raw.packet.request, 77);
        assert_true(cst_packet_error(&raw.packet, raw.text, sizeof(raw.text)) !=
                    CST_STATUS_BAD_TYPE);
    }
    assert_true(is_alive(&raw));
    cst_raw_close(&raw);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(descriptors_end_the_connection),
        cmocka_unit_test(descriptors_do_not_pass),
        cmocka_unit_test(hello_comes_first_and_once),
        cmocka_unit_test(every_request_has_a_handler),
    };
    int failed;

    (void)start(NULL);
    failed = cst_run_rows(frame_rows, check_frame) + cst_run_rows(hello_rows, check_hello) +
             cmocka_run_group_tests(tests, NULL, NULL);
    (void)stop(NULL);
    return failed;
}
