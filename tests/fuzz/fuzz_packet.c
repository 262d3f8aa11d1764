/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Framing and the strict decoder over any bytes. What it accepts, protobuf-c accepts with the same
 * values, and packing it gives the bytes that protobuf-c packs, which decode again. Aborts on a
 * difference.
 */
#include "tests/fuzz/fuzz.h"
#include "tests/lib/message_equal.h"

#include "proto/frame.h"
#include "proto/status.h"

static void check_repacked(const ProtobufCMessage *message, uint16_t type, uint8_t flags) {
    static uint8_t packet[CST_PACKET_MAX], oracle[CST_PACKET_MAX], memory[CST_UNPACK_BUDGET];
    size_t n = cst_packet_pack(packet, sizeof(packet), type, flags, 1, message);
    struct cst_packet p;
    struct cst_arena arena;
    const ProtobufCMessage *again;

    if (!n) /* a packet of the largest size may have had shorter encodings of its fields */
        return;
    check(cst_packet_parse(&p, packet, n) == CST_STATUS_OK);
    check(protobuf_c_message_get_packed_size(message) == p.length);
    check(protobuf_c_message_pack(message, oracle) == p.length);
    check(memcmp(oracle, p.payload, p.length) == 0);
    cst_arena_init(&arena, memory, sizeof(memory));
    again = cst_message_unpack(message->descriptor, p.payload, p.length, &arena);
    check(again && cst_message_equal(again, message));
}

/* The payload is tried whatever the header says, so that one flipped bit there hides nothing. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static uint8_t memory[CST_UNPACK_BUDGET];
    const ProtobufCMessageDescriptor *desc;
    ProtobufCMessage *message, *oracle;
    struct cst_packet p;
    struct cst_arena arena;
    char text[64];
    int status = cst_packet_parse(&p, data, size);

    check(status != CST_STATUS_OK || p.length + sizeof(struct cst_packet_header) == size);
    if (!p.payload)
        return 0;
    check(strlen((cst_packet_error(&p, text, sizeof(text)), text)) < sizeof(text));
    desc = cst_message_descriptor(p.type, p.flags & CST_PACKET_REPLY);
    if (!desc)
        return 0;
    cst_arena_init(&arena, memory, sizeof(memory));
    message = cst_message_unpack(desc, p.payload, p.length, &arena);
    check(arena.used <= sizeof(memory));
    if (!message)
        return 0;
    oracle = protobuf_c_message_unpack(desc, NULL, p.length, p.payload);
    check(oracle && cst_message_equal(message, oracle));
    protobuf_c_message_free_unpacked(oracle, NULL);
    check_repacked(message, p.type, p.flags & CST_PACKET_REPLY);
    return 0;
}
