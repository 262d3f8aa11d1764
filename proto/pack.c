/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A packer for the messages of cistern.proto. No state, any thread.
 *
 * Like the decoder it walks protobuf-c's own descriptors. It exists because a small packet's cost
 * is the packing: protobuf-c walks the message twice (size, then bytes), through a call per field,
 * for fields that are mostly empty.
 *
 * Invariants: 1. the bytes are those of protobuf_c_message_pack(), which a test compares for every
 * message; 2. nothing is written past cap; 3. nested messages are shorter than 128 bytes (ListRef
 * is the only one), so their length takes one byte.
 */
#include "proto/pack.h"

#include "base/macros.h"

#include <assert.h>
#include <stdbool.h>
#include <string.h>

enum { NESTED_MAX = 127 };

struct writer {
    uint8_t *at, *end;
};

static bool put_varint(struct writer *w, uint64_t v) {
    for (; v > 0x7f; v >>= 7) {
        if (w->at == w->end)
            return false;
        *w->at++ = (uint8_t)(v | 0x80);
    }
    if (w->at == w->end)
        return false;
    *w->at++ = (uint8_t)v;
    return true;
}

static bool put_tag(struct writer *w, const ProtobufCFieldDescriptor *field, unsigned wire) {
    return put_varint(w, (uint64_t)field->id << 3 | wire);
}

static bool put_number(struct writer *w, const ProtobufCFieldDescriptor *field, uint64_t v) {
    return !v || (put_tag(w, field, 0) && put_varint(w, v));
}

static bool put_bytes(struct writer *w, const ProtobufCFieldDescriptor *field, const void *data,
                      size_t n) {
    if (!n)
        return true;
    if (!put_tag(w, field, 2) || !put_varint(w, n) || n > (size_t)(w->end - w->at))
        return false;
    memcpy(w->at, data, n);
    w->at += n;
    return true;
}

static bool put_nested(struct writer *w, const ProtobufCFieldDescriptor *field,
                       const ProtobufCMessage *nested) {
    size_t n;

    if (!nested)
        return true;
    if (!put_tag(w, field, 2) || w->at == w->end)
        return false;
    n = cst_message_pack(w->at + 1, (size_t)(w->end - w->at) - 1, nested);
    if (n == SIZE_MAX)
        return false;
    assert(n <= NESTED_MAX);
    *w->at = (uint8_t)n;
    w->at += n + 1;
    return true;
}

static bool put_field(struct writer *w, const ProtobufCFieldDescriptor *field,
                      const uint8_t *member) {
    ProtobufCBinaryData bytes;
    const void *pointer;
    uint32_t u32;
    uint64_t u64;

    switch (field->type) {
    case PROTOBUF_C_TYPE_UINT32:
        memcpy(&u32, member, sizeof(u32));
        return put_number(w, field, u32);
    case PROTOBUF_C_TYPE_UINT64:
        memcpy(&u64, member, sizeof(u64));
        return put_number(w, field, u64);
    case PROTOBUF_C_TYPE_BYTES:
        memcpy(&bytes, member, sizeof(bytes));
        return put_bytes(w, field, bytes.data, bytes.len);
    case PROTOBUF_C_TYPE_STRING:
        memcpy(&pointer, member, sizeof(pointer));
        return put_bytes(w, field, pointer, pointer ? strlen(pointer) : 0);
    default:
        assert(field->type == PROTOBUF_C_TYPE_MESSAGE);
        memcpy(&pointer, member, sizeof(pointer));
        return put_nested(w, field, pointer);
    }
}

size_t cst_message_pack(uint8_t *out, size_t cap, const ProtobufCMessage *message) {
    const ProtobufCMessageDescriptor *desc = message->descriptor;
    struct writer w = { .at = out, .end = out + cap };

    for (unsigned i = 0; i < desc->n_fields; i++)
        if (!put_field(&w, &desc->fields[i], (const uint8_t *)message + desc->fields[i].offset))
            return SIZE_MAX;
    return (size_t)(w.at - out);
}
