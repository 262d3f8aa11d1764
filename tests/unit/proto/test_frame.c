/* SPDX-License-Identifier: Apache-2.0 */
/* The packet header: what parses and what does not, and that what is packed parses. */
#include "tests/lib/check.h"

#include "proto/frame.h"
#include "proto/status.h"

#include <stdlib.h>
#include <string.h>

/* Header bytes by hand: "CSTN", version, flags, u16 type, u32 length, u32 request. */
struct row {
    const char *name;
    const char *hex; /* of the header */
    size_t payload;  /* bytes that follow it */
    int status;
};

static const struct row rows[] = {
    { "lookup",
      "4353544e"
      "01"
      "00"
      "0500"
      "03000000"
      "78563412",
      3, 0 },
    { "no payload",
      "4353544e"
      "01"
      "00"
      "0200"
      "00000000"
      "78563412",
      0, 0 },
    { "hello of version 1",
      "4353544e"
      "01"
      "00"
      "0100"
      "00000000"
      "78563412",
      0, 0 },
    { "hello of version 0",
      "4353544e"
      "00"
      "00"
      "0100"
      "00000000"
      "78563412",
      0, 0 },
    { "hello of version 2",
      "4353544e"
      "02"
      "00"
      "0100"
      "00000000"
      "78563412",
      0, CST_STATUS_BAD_VERSION },
    { "lookup of version 0",
      "4353544e"
      "00"
      "00"
      "0500"
      "00000000"
      "78563412",
      0, CST_STATUS_BAD_VERSION },
    { "lookup of version 2",
      "4353544e"
      "02"
      "00"
      "0500"
      "00000000"
      "78563412",
      0, CST_STATUS_BAD_VERSION },
    { "other magic",
      "4353544d"
      "01"
      "00"
      "0500"
      "00000000"
      "78563412",
      0, CST_STATUS_BAD_MAGIC },
    { "magic of the other byte order",
      "4e545343"
      "01"
      "00"
      "0500"
      "00000000"
      "78563412",
      0, CST_STATUS_BAD_MAGIC },
    { "length one short",
      "4353544e"
      "01"
      "00"
      "0500"
      "02000000"
      "78563412",
      3, CST_STATUS_BAD_LENGTH },
    { "length one over",
      "4353544e"
      "01"
      "00"
      "0500"
      "04000000"
      "78563412",
      3, CST_STATUS_BAD_LENGTH },
    { "length of all ones",
      "4353544e"
      "01"
      "00"
      "0500"
      "ffffffff"
      "78563412",
      3, CST_STATUS_BAD_LENGTH },
    { "all flags",
      "4353544e"
      "01"
      "07"
      "0500"
      "00000000"
      "78563412",
      0, 0 },
    { "unknown flag",
      "4353544e"
      "01"
      "08"
      "0500"
      "00000000"
      "78563412",
      0, CST_STATUS_BAD_MESSAGE },
    { "largest packet",
      "4353544e"
      "01"
      "00"
      "0500"
      "f0ff0100"
      "78563412",
      CST_PACKET_MAX - 16, 0 },
    { "one byte more",
      "4353544e"
      "01"
      "00"
      "0500"
      "f1ff0100"
      "78563412",
      CST_PACKET_MAX - 15, CST_STATUS_BAD_LENGTH },
};

static uint8_t packet[CST_PACKET_MAX + 1];

static void parses(void **state) {
    const struct row *row = *state;
    struct cst_packet p;

    memset(packet, 0xab, sizeof(packet));
    cst_unhex(packet, 16, row->hex);
    assert_int_equal(cst_packet_parse(&p, packet, 16 + row->payload), row->status);
    if (16 + row->payload > CST_PACKET_MAX)
        return;
    assert_int_equal(p.request, 0x12345678);
    assert_int_equal(p.type, packet[6]);
    assert_int_equal(p.version, packet[4]);
    assert_int_equal(p.flags, packet[5]);
    assert_int_equal(p.length, row->payload);
    assert_ptr_equal(p.payload, packet + 16);
}

static void short_packets(void **state) {
    struct cst_packet p;

    cst_unhex(packet, 16, rows[0].hex);
    for (size_t n = 0; n < 16; n++) {
        assert_int_equal(cst_packet_parse(&p, packet, n), CST_STATUS_BAD_LENGTH);
        assert_int_equal(p.request, 0);
        assert_null(p.payload);
    }
}

/* Ping with 3 bytes, by hand: field 1, wire type 2, length 3. */
static void packs_as_drawn(void **state) {
    static const char expected[] = "4353544e"
                                   "01"
                                   "01"
                                   "0200"
                                   "05000000"
                                   "07000000"
                                   "0a03"
                                   "414243";
    Cistern__V1__Ping ping = CISTERN__V1__PING__INIT;
    uint8_t bytes[sizeof(expected) / 2], out[64];

    cst_unhex(bytes, sizeof(bytes), expected);
    ping.payload = (ProtobufCBinaryData){ .len = 3, .data = (uint8_t[]){ 'A', 'B', 'C' } };
    assert_int_equal(
        cst_packet_pack(out, sizeof(out), CST_MSG_PING, CST_PACKET_REPLY, 7, &ping.base),
        sizeof(bytes));
    assert_memory_equal(out, bytes, sizeof(bytes));
    for (size_t cap = 0; cap < sizeof(bytes); cap++)
        assert_int_equal(cst_packet_pack(out, cap, CST_MSG_PING, 0, 7, &ping.base), 0);
}

static void packs_up_to_the_limit(void **state) {
    static uint8_t bulk[CST_PACKET_MAX], out[2 * CST_PACKET_MAX];
    Cistern__V1__Ping ping = CISTERN__V1__PING__INIT;
    size_t room = CST_PACKET_MAX - 16 - 1 - 3; /* header, tag, three bytes of length */

    ping.payload = (ProtobufCBinaryData){ .len = room, .data = bulk };
    assert_int_equal(cst_packet_pack(out, sizeof(out), CST_MSG_PING, 0, 1, &ping.base),
                     CST_PACKET_MAX);
    ping.payload.len++;
    assert_int_equal(cst_packet_pack(out, sizeof(out), CST_MSG_PING, 0, 1, &ping.base), 0);
    ping.payload.len = 0;
    assert_int_equal(
        cst_packet_pack_bulk(out, sizeof(out), CST_MSG_PING, 0, 1, &ping.base, 1, room), 20);
    assert_int_equal(
        cst_packet_pack_bulk(out, sizeof(out), CST_MSG_PING, 0, 1, &ping.base, 1, room + 1), 0);
    assert_int_equal(
        cst_packet_pack_bulk(out, sizeof(out), CST_MSG_PING, 0, 1, &ping.base, 1, SIZE_MAX), 0);
}

/* Head and bulk together decode, by protobuf-c itself, to the message with the field set. */
static void bulk_is_the_same_message(void **state) {
    static const size_t sizes[] = { 0, 1, 32, 127, 128, 16383, 16384, 65536 };
    static uint8_t keys[65536];

    for (size_t i = 0; i < sizeof(keys); i++)
        keys[i] = (uint8_t)(i * 31 >> 3);
    for (size_t i = 0; i < CST_COUNT(sizes); i++) {
        Cistern__V1__Lookup lookup = CISTERN__V1__LOOKUP__INIT, *got;
        size_t head, n = sizes[i];
        struct cst_packet p;

        lookup.space = 77;
        lookup.brief = 1;
        head = cst_packet_pack_bulk(packet, 64, CST_MSG_LOOKUP, 0, 9, &lookup.base, 2, n);
        assert_true(head > 0);
        memcpy(packet + head, keys, n);
        assert_int_equal(cst_packet_parse(&p, packet, head + n), 0);
        got = cistern__v1__lookup__unpack(NULL, p.length, p.payload);
        assert_non_null(got);
        assert_int_equal(got->space, 77);
        assert_int_equal(got->brief, 1);
        assert_int_equal(got->keys.len, n);
        if (n)
            assert_memory_equal(got->keys.data, keys, n);
        cistern__v1__lookup__free_unpacked(got, NULL);
    }
}

static void errors(void **state) {
    struct cst_packet p;
    char text[64];
    size_t n =
        cst_packet_pack_error(packet, 256, CST_MSG_ERASE, 5, CST_STATUS_DENIED, "no\033 \"x\"");

    assert_int_equal(n, 16 + 2 + 7);
    assert_int_equal(cst_packet_parse(&p, packet, n), 0);
    assert_int_equal(p.type, CST_MSG_ERASE);
    assert_int_equal(p.flags, CST_PACKET_REPLY | CST_PACKET_ERROR);
    assert_int_equal(p.request, 5);
    assert_int_equal(cst_packet_error(&p, text, sizeof(text)), CST_STATUS_DENIED);
    assert_string_equal(text, "no  \"x\""); /* no escape reaches a terminal */
    assert_int_equal(cst_packet_error(&p, text, 3), CST_STATUS_DENIED);
    assert_string_equal(text, "no");
    p.length = 1; /* no room for a status */
    assert_int_equal(cst_packet_error(&p, text, sizeof(text)), CST_STATUS_BAD_MESSAGE);
    assert_string_equal(text, "");
    p.flags = CST_PACKET_REPLY;
    assert_int_equal(cst_packet_error(&p, text, sizeof(text)), CST_STATUS_OK);
}

static void error_of_ok_is_broken(void **state) {
    struct cst_packet p = { .flags = CST_PACKET_REPLY | CST_PACKET_ERROR,
                            .payload = (const uint8_t *)"\0\0fine",
                            .length = 6 };
    char text[64];

    assert_int_equal(cst_packet_error(&p, text, sizeof(text)), CST_STATUS_BAD_MESSAGE);
}

static void long_error_text_is_cut(void **state) {
    static char text[2 * CST_PACKET_MAX];

    memset(text, 'e', sizeof(text) - 1);
    assert_int_equal(cst_packet_pack_error(packet, 100, 1, 1, CST_STATUS_BUSY, text), 100);
    assert_int_equal(cst_packet_pack_error(packet, SIZE_MAX, 1, 1, CST_STATUS_BUSY, text),
                     CST_PACKET_MAX);
    assert_int_equal(cst_packet_pack_error(packet, 17, 1, 1, CST_STATUS_BUSY, text), 0);
    assert_int_equal(cst_packet_pack_error(packet, 18, 1, 1, CST_STATUS_BUSY, text), 18);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(short_packets),
        cmocka_unit_test(packs_as_drawn),
        cmocka_unit_test(packs_up_to_the_limit),
        cmocka_unit_test(bulk_is_the_same_message),
        cmocka_unit_test(errors),
        cmocka_unit_test(error_of_ok_is_broken),
        cmocka_unit_test(long_error_text_is_cut),
    };

    return cst_run_rows(rows, parses) + cmocka_run_group_tests(tests, NULL, NULL);
}
