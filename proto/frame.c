/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The packet's header and what follows it. No state, any thread.
 *
 * Invariants: 1. a packet that parses has exactly the length that its header says; 2. a packet that
 * is packed here parses; 3. nothing is written past cap.
 */
#include "proto/frame.h"

#include "proto/pack.h"
#include "proto/status.h"

#include <assert.h>
#include <string.h>

enum {
    FLAGS_KNOWN = CST_PACKET_REPLY | CST_PACKET_ERROR | CST_PACKET_PUSH,
    HEADER = sizeof(struct cst_packet_header),
    VARINT_MAX = 10,
};

int cst_packet_parse(struct cst_packet *out, const void *data, size_t n) {
    const struct cst_packet_header *h = data;

    *out = (struct cst_packet){ 0 };
    if (n < HEADER || n > CST_PACKET_MAX)
        return CST_STATUS_BAD_LENGTH;
    out->type = cst_load16(&h->type);
    out->version = h->version;
    out->flags = h->flags;
    out->request = cst_load32(&h->request);
    out->payload = (const uint8_t *)data + HEADER;
    out->length = n - HEADER;
    if (cst_load32(&h->magic) != CST_PACKET_MAGIC)
        return CST_STATUS_BAD_MAGIC;
    if (h->version != CST_PROTOCOL_VERSION && !(h->version == 0 && out->type == CST_MSG_HELLO))
        return CST_STATUS_BAD_VERSION;
    if (cst_load32(&h->length) != out->length)
        return CST_STATUS_BAD_LENGTH;
    return h->flags & ~FLAGS_KNOWN ? CST_STATUS_BAD_MESSAGE : 0;
}

void cst_packet_header_fill(struct cst_packet_header *h, uint16_t type, uint8_t flags,
                            uint32_t request, size_t length) {
    assert(length <= CST_PACKET_MAX - HEADER);
    cst_store32(&h->magic, CST_PACKET_MAGIC);
    h->version = CST_PROTOCOL_VERSION;
    h->flags = flags;
    cst_store16(&h->type, type);
    cst_store32(&h->length, (uint32_t)length);
    cst_store32(&h->request, request);
}

static size_t varint(uint8_t *out, uint64_t v) {
    size_t n = 0;

    for (; v >= 0x80; v >>= 7)
        out[n++] = (uint8_t)(v | 0x80);
    out[n++] = (uint8_t)v;
    return n;
}

size_t cst_packet_pack_bulk(void *out, size_t cap, uint16_t type, uint8_t flags, uint32_t request,
                            const ProtobufCMessage *message, unsigned field, size_t bulk_len) {
    uint8_t tag[2 * VARINT_MAX], *at = out;
    size_t n = cap < HEADER ? SIZE_MAX : cst_message_pack(at + HEADER, cap - HEADER, message);
    size_t tag_len = 0;

    if (bulk_len) { /* wire type 2: length, then bytes */
        tag_len = varint(tag, (uint64_t)field << 3 | 2);
        tag_len += varint(tag + tag_len, bulk_len);
    }
    if (bulk_len > CST_PACKET_MAX || n > CST_PACKET_MAX ||
        HEADER + n + tag_len + bulk_len > CST_PACKET_MAX || HEADER + n + tag_len > cap)
        return 0;
    cst_packet_header_fill(out, type, flags, request, n + tag_len + bulk_len);
    memcpy(at + HEADER + n, tag, tag_len);
    return HEADER + n + tag_len;
}

size_t cst_packet_pack(void *out, size_t cap, uint16_t type, uint8_t flags, uint32_t request,
                       const ProtobufCMessage *message) {
    return cst_packet_pack_bulk(out, cap, type, flags, request, message, 0, 0);
}

size_t cst_packet_pack_error(void *out, size_t cap, uint16_t type, uint32_t request, int status,
                             const char *text) {
    uint8_t *at = out;
    size_t n = strlen(text), room;

    if (cap > CST_PACKET_MAX)
        cap = CST_PACKET_MAX;
    if (cap < HEADER + 2)
        return 0;
    room = cap - HEADER - 2;
    if (n > room)
        n = room;
    cst_packet_header_fill(out, type, CST_PACKET_REPLY | CST_PACKET_ERROR, request, 2 + n);
    cst_store16(at + HEADER, (uint16_t)status);
    memcpy(at + HEADER + 2, text, n);
    return HEADER + 2 + n;
}

int cst_packet_error(const struct cst_packet *packet, char *text, size_t cap) {
    size_t n = packet->length < 2 ? 0 : packet->length - 2;

    assert(cap > 0);
    text[0] = '\0';
    if (!(packet->flags & CST_PACKET_ERROR))
        return CST_STATUS_OK;
    if (packet->length < 2 || cst_load16(packet->payload) == CST_STATUS_OK)
        return CST_STATUS_BAD_MESSAGE;
    if (n > cap - 1)
        n = cap - 1;
    for (size_t i = 0; i < n; i++) /* never a control character on somebody's terminal */
        text[i] = (uint8_t)(packet->payload[2 + i]) < ' ' ? ' ' : (char)packet->payload[2 + i];
    text[n] = '\0';
    return cst_load16(packet->payload);
}
