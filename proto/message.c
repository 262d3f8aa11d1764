/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of messages and a strict decoder for them. No state, any thread.
 *
 * The decoder walks protobuf-c's own descriptors and fills protobuf-c's own structs, so packing,
 * field names and types stay generated. It exists because protobuf-c's decoder keeps unknown fields
 * on the heap (52 times their size), has no depth limit, and copies every bytes field: for a lookup
 * of 2,048 keys that copy is 6 % of the whole call.
 *
 * Invariants
 *   1. A decoded message is one that protobuf-c decodes to the same values (fuzzed for equality);
 *      the reverse does not hold: unknown or repeated fields, a uint32 above 2^32 - 1, a string
 *      with a zero byte and nesting below one level are refused.
 *   2. `bytes` fields point into the packet; everything else lies in the arena.
 *   3. Time is linear in the number of fields on the wire, whatever the length of the packet:
 *      repeated fields are refused, so at most once each.
 */
#include "base/macros.h"
#include "proto/frame.h"

#include <assert.h>
#include <string.h>

enum { DEPTH_MAX = 2, ARENA_ALIGN = 16, FIELDS_MAX = 64, TAG_BYTES_MAX = 5, VALUE_BYTES_MAX = 10 };

struct reader {
    const uint8_t *at, *end;
};

const char *cst_message_name(uint16_t type) {
    switch (type) {
#define R(NAME, number, request, reply)                                                            \
    case number:                                                                                   \
        return #NAME;
#define P(NAME, number, push)                                                                      \
    case number:                                                                                   \
        return #NAME;
#include "proto/message.def"
    default:
        return NULL;
    }
}

const ProtobufCMessageDescriptor *cst_message_descriptor(uint16_t type, bool reply) {
    switch (type) {
#define R(NAME, number, request, answer)                                                           \
    case number:                                                                                   \
        return reply ? &cistern__v1__##answer##__descriptor : &cistern__v1__##request##__descriptor;
#define P(NAME, number, push)                                                                      \
    case number:                                                                                   \
        return reply ? NULL : &cistern__v1__##push##__descriptor;
#include "proto/message.def"
    default:
        return NULL;
    }
}

void cst_arena_init(struct cst_arena *a, void *memory, size_t size) {
    *a = (struct cst_arena){ .data = memory, .size = size };
}

void cst_arena_reset(struct cst_arena *a) {
    a->used = 0;
}

static void *arena_take(struct cst_arena *a, size_t n) {
    size_t at =
        (size_t)cst_align_up((uintptr_t)a->data + a->used, ARENA_ALIGN) - (uintptr_t)a->data;

    if (at > a->size || n > a->size - at)
        return NULL;
    a->used = at + n;
    return a->data + at;
}

/* At most max bytes; protobuf-c reads no more for tags and lengths. */
static bool read_long_varint(struct reader *r, unsigned max, uint64_t *out) {
    uint64_t v = 0;

    for (unsigned shift = 0; shift < 7 * max && r->at < r->end; shift += 7) {
        uint8_t byte = *r->at++;

        if (shift == 63 && byte > 1)
            return false;
        v |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80)) {
            *out = v;
            return true;
        }
    }
    return false;
}

/* Nearly all are one byte long. */
static inline bool read_varint(struct reader *r, unsigned max, uint64_t *out) {
    if (r->at < r->end && *r->at < 0x80) {
        *out = *r->at++;
        return true;
    }
    return read_long_varint(r, max, out);
}

static bool read_bytes(struct reader *r, struct reader *out) {
    uint64_t n;

    if (!read_varint(r, TAG_BYTES_MAX, &n) || n > (size_t)(r->end - r->at))
        return false;
    *out = (struct reader){ .at = r->at, .end = r->at + n };
    r->at += n;
    return true;
}

static ProtobufCMessage *decode(const ProtobufCMessageDescriptor *desc, struct reader r,
                                struct cst_arena *arena, unsigned depth);

static bool decode_string(void *member, struct reader bytes, struct cst_arena *arena) {
    size_t n = (size_t)(bytes.end - bytes.at);
    char *copy;

    if (memchr(bytes.at, '\0', n))
        return false;
    copy = arena_take(arena, n + 1);
    if (!copy)
        return false;
    memcpy(copy, bytes.at, n);
    copy[n] = '\0';
    memcpy(member, &copy, sizeof(copy));
    return true;
}

/* One value into its place in the message; wire is its wire type. */
static bool decode_field(const ProtobufCFieldDescriptor *field, unsigned wire, struct reader *r,
                         uint8_t *message, struct cst_arena *arena, unsigned depth) {
    void *member = message + field->offset;
    bool varint = field->type == PROTOBUF_C_TYPE_UINT32 || field->type == PROTOBUF_C_TYPE_UINT64;
    struct reader bytes = { 0 };
    uint64_t v = 0;

    if (wire != (varint ? 0 : 2) ||
        !(varint ? read_varint(r, VALUE_BYTES_MAX, &v) : read_bytes(r, &bytes)))
        return false;
    switch (field->type) {
    case PROTOBUF_C_TYPE_UINT32:
        if (v > UINT32_MAX)
            return false;
        memcpy(member, &(uint32_t){ (uint32_t)v }, sizeof(uint32_t));
        return true;
    case PROTOBUF_C_TYPE_UINT64:
        memcpy(member, &v, sizeof(v));
        return true;
    case PROTOBUF_C_TYPE_BYTES:
        memcpy(member,
               &(ProtobufCBinaryData){ .len = (size_t)(bytes.end - bytes.at),
                                       .data = (uint8_t *)(uintptr_t)bytes.at },
               sizeof(ProtobufCBinaryData));
        return true;
    case PROTOBUF_C_TYPE_STRING:
        return decode_string(member, bytes, arena);
    case PROTOBUF_C_TYPE_MESSAGE: {
        ProtobufCMessage *sub = decode(field->descriptor, bytes, arena, depth + 1);

        memcpy(member, &sub, sizeof(sub));
        return sub != NULL;
    }
    default: /* the schema has no other types: a test checks it */
        return false;
    }
}

/* Fields lie in the order of their numbers, and packers send them so: the search goes on from the
 * last one; a field out of turn (bulk bytes come last) is searched for. */
static const ProtobufCFieldDescriptor *find_field(const ProtobufCMessageDescriptor *desc,
                                                  unsigned *next, unsigned number) {
    while (*next < desc->n_fields && desc->fields[*next].id < number)
        ++*next;
    if (*next < desc->n_fields && desc->fields[*next].id == number)
        return &desc->fields[(*next)++];
    return protobuf_c_message_descriptor_get_field(desc, number);
}

static ProtobufCMessage *decode(const ProtobufCMessageDescriptor *desc, struct reader r,
                                struct cst_arena *arena, unsigned depth) {
    ProtobufCMessage *message;
    uint64_t seen = 0, tag;
    unsigned next = 0;

    assert(desc->n_fields <= FIELDS_MAX);
    if (depth > DEPTH_MAX)
        return NULL;
    message = arena_take(arena, desc->sizeof_message);
    if (!message)
        return NULL;
    desc->message_init(message);
    while (r.at < r.end) {
        const ProtobufCFieldDescriptor *field;
        uint64_t bit;

        if (!read_varint(&r, TAG_BYTES_MAX, &tag) || tag > UINT32_MAX)
            return NULL;
        field = find_field(desc, &next, (unsigned)(tag >> 3));
        if (!field)
            return NULL;
        bit = UINT64_C(1) << (field - desc->fields);
        if (seen & bit || !decode_field(field, tag & 7, &r, (uint8_t *)message, arena, depth))
            return NULL;
        seen |= bit;
    }
    return message;
}

ProtobufCMessage *cst_message_unpack(const ProtobufCMessageDescriptor *desc, const uint8_t *data,
                                     size_t n, struct cst_arena *arena) {
    return decode(desc, (struct reader){ .at = data, .end = data + n }, arena, 1);
}
