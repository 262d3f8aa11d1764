/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of messages, the rules of the schema, and the strict decoder against protobuf-c's own:
 * equal on every message with every field filled, stricter on what the protocol refuses.
 */
#include "tests/lib/check.h"
#include "tests/lib/message_equal.h"

#include "proto/frame.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { TYPES = 256 };

static uint8_t memory[CST_UNPACK_BUDGET];
static struct cst_arena arena;

static ProtobufCMessage *unpack(const ProtobufCMessageDescriptor *desc, const void *data,
                                size_t n) {
    memset(memory, 0xa5, sizeof(memory)); /* nothing may be taken for zero */
    cst_arena_init(&arena, memory, sizeof(memory));
    return cst_message_unpack(desc, data, n, &arena);
}

/* Runs fn on every message that can be on the wire. */
static unsigned for_each_message(void (*fn)(const ProtobufCMessageDescriptor *)) {
    unsigned n = 0;

    for (uint16_t type = 0; type < TYPES; type++)
        for (int reply = 0; reply < 2; reply++) {
            const ProtobufCMessageDescriptor *desc = cst_message_descriptor(type, reply);

            if (desc) {
                fn(desc);
                n++;
            }
        }
    return n;
}

static void table(void **state) {
    unsigned named = 0;

    for (uint16_t type = 0; type < TYPES; type++) {
        const char *name = cst_message_name(type);

        named += name != NULL;
        assert_true(!name == !cst_message_descriptor(type, false));
    }
    assert_int_equal(named, 31);
    assert_string_equal(cst_message_name(CST_MSG_SPACE_OPEN), "SPACE_OPEN");
    assert_string_equal(cst_message_descriptor(CST_MSG_SPACE_OPEN, false)->short_name, "SpaceOpen");
    assert_string_equal(cst_message_descriptor(CST_MSG_TOUCH, true)->short_name, "KeysReply");
    assert_string_equal(cst_message_descriptor(CST_MSG_READY, false)->short_name, "Ready");
    assert_null(cst_message_descriptor(CST_MSG_READY, true)); /* a push has no reply */
    assert_null(cst_message_name(26));
    assert_null(cst_message_name(UINT16_MAX));
}

static void check_schema(const ProtobufCMessageDescriptor *desc) {
    assert_true(desc->n_fields <= 64);
    for (unsigned i = 0; i < desc->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &desc->fields[i];

        assert_int_equal(f->label, PROTOBUF_C_LABEL_NONE); /* proto3, never repeated */
        assert_false(f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF);
        if (f->type == PROTOBUF_C_TYPE_MESSAGE) {
            const ProtobufCMessageDescriptor *sub = f->descriptor;

            for (unsigned k = 0; k < sub->n_fields; k++)
                assert_int_equal(sub->fields[k].type, PROTOBUF_C_TYPE_UINT64); /* no deeper */
        } else {
            assert_true(f->type == PROTOBUF_C_TYPE_UINT32 || f->type == PROTOBUF_C_TYPE_UINT64 ||
                        f->type == PROTOBUF_C_TYPE_BYTES || f->type == PROTOBUF_C_TYPE_STRING);
        }
    }
}

static void schema(void **state) {
    assert_int_equal(for_each_message(check_schema), 2 * 27 + 4);
}

/* A message with every field set to something that differs from the others. */
static void fill(ProtobufCMessage *m, Cistern__V1__ListRef *subs, uint8_t *bytes) {
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];
        uint8_t *member = (uint8_t *)m + f->offset;
        const char *text = "a string of some length";
        ProtobufCBinaryData data = { .len = 40 + i, .data = bytes + i };
        Cistern__V1__ListRef *sub = &subs[i];

        switch (f->type) {
        case PROTOBUF_C_TYPE_UINT32:
            memcpy(member, &(uint32_t){ UINT32_MAX - i }, sizeof(uint32_t));
            break;
        case PROTOBUF_C_TYPE_UINT64:
            memcpy(member, &(uint64_t){ UINT64_MAX - i }, sizeof(uint64_t));
            break;
        case PROTOBUF_C_TYPE_STRING:
            memcpy(member, &text, sizeof(text));
            break;
        case PROTOBUF_C_TYPE_BYTES:
            memcpy(member, &data, sizeof(data));
            break;
        default:
            cistern__v1__list_ref__init(sub);
            sub->offset = 1000 + i;
            sub->length = i;
            memcpy(member, &sub, sizeof(sub));
        }
    }
}

static void check_round_trip(const ProtobufCMessageDescriptor *desc) {
    static uint8_t bytes[128], packed[8192];
    Cistern__V1__ListRef subs[64];
    ProtobufCMessage *m = malloc(desc->sizeof_message), *oracle, *got;
    size_t n;

    assert_non_null(m);
    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (uint8_t)(i + 1);
    for (int filled = 0; filled < 2; filled++) {
        desc->message_init(m);
        if (filled)
            fill(m, subs, bytes);
        n = protobuf_c_message_pack(m, packed);
        assert_true(n <= sizeof(packed));
        oracle = protobuf_c_message_unpack(desc, NULL, n, packed);
        got = unpack(desc, packed, n);
        assert_non_null(oracle);
        assert_non_null(got);
        assert_true(cst_message_equal(m, oracle));
        assert_true(cst_message_equal(got, oracle));
        for (size_t cut = 0; cut < n; cut++) /* accepted only where protobuf-c accepts */
            if (unpack(desc, packed, cut)) {
                protobuf_c_message_free_unpacked(oracle, NULL);
                oracle = protobuf_c_message_unpack(desc, NULL, cut, packed);
                assert_non_null(oracle);
                assert_true(cst_message_equal(unpack(desc, packed, cut), oracle));
            }
        protobuf_c_message_free_unpacked(oracle, NULL);
    }
    free(m);
}

static void round_trip(void **state) {
    for_each_message(check_round_trip);
}

struct row {
    const char *name, *hex;
    bool accepted;
};

/* Lookup: 1 space u32, 2 keys bytes, 3 keys_ref {1 offset, 2 length}, 4 parent, 5 tail, 6 brief.
 * Hello: 3 client_name string. Rows of Hello begin with "hello". */
static const struct row rows[] = {
    { "empty", "", true },
    { "fields out of order",
      "1201aa"
      "0805",
      true },
    { "largest uint32", "08ffffffff0f", true },
    { "nested", "1a0408051006", true },
    { "nested, empty", "1a00", true },
    { "value in ten bytes", "0885808080808080808000", true },
    { "hello name", "1a03414243", true },
    { "hello empty name", "1a00", true },
    { "uint32 of 2^32", "088080808010", false },
    { "uint64 over 64 bits", "1a0b08ffffffffffffffffff02", false },
    { "value in eleven bytes", "088580808080808080808000", false },
    { "unknown field 7", "3801", false },
    { "unknown field 536870911", "f8ffffff0f01", false },
    { "unknown field inside nested", "1a021801", false },
    { "field 0", "0001", false },
    { "tag in six bytes", "88808080800005", false },
    { "length in six bytes", "12818080808000aa", false },
    { "space twice", "08050805", false },
    { "keys twice", "1201aa1201bb", false },
    { "nested twice", "1a0208051a021006", false },
    { "number with wire type 1", "090000000000000000", false },
    { "number with wire type 2", "0a0105", false },
    { "bytes with wire type 0", "1005", false },
    { "group", "0b0c", false },
    { "wire type 5", "0d00000000", false },
    { "wire type 7", "0f", false },
    { "bytes past the end", "1205aabb", false },
    { "bytes of 2^32 - 1", "12ffffffff0faa", false },
    { "nested past the end", "1a050805", false },
    { "nested field past its message", "1a02120512", false },
    { "tag cut", "88", false },
    { "value cut", "0885", false },
    { "value missing", "08", false },
    { "hello name with a zero byte", "1a03410043", false },
};

static void strict(void **state) {
    const struct row *row = *state;
    const ProtobufCMessageDescriptor *desc = strncmp(row->name, "hello", 5) == 0
                                                 ? &cistern__v1__hello__descriptor
                                                 : &cistern__v1__lookup__descriptor;
    size_t n = strlen(row->hex) / 2;
    uint8_t *bytes = malloc(n ? n : 1); /* exact, for the sanitizers */
    ProtobufCMessage *got;

    assert_non_null(bytes);
    cst_unhex(bytes, n, row->hex);
    got = unpack(desc, bytes, n);
    assert_true(!got == !row->accepted);
    if (got) {
        ProtobufCMessage *oracle = protobuf_c_message_unpack(desc, NULL, n, bytes);

        assert_non_null(oracle);
        assert_true(cst_message_equal(got, oracle));
        protobuf_c_message_free_unpacked(oracle, NULL);
    }
    free(bytes);
}

static void bytes_are_borrowed(void **state) {
    const uint8_t packed[] = { 0x12, 3, 'k', 'e', 'y' };
    const Cistern__V1__Lookup *got =
        (const Cistern__V1__Lookup *)unpack(&cistern__v1__lookup__descriptor, packed, 5);

    assert_non_null(got);
    assert_ptr_equal(got->keys.data, packed + 2);
    assert_int_equal(got->keys.len, 3);
}

/* Strings and structs count, bytes don't; no input makes the arena hand out more than it has. */
static void budget(void **state) {
    static uint8_t packed[CST_PACKET_MAX];
    const size_t fits = CST_UNPACK_BUDGET - sizeof(Cistern__V1__Hello) - 64;
    uint8_t *at = packed;

    memset(packed, 'n', sizeof(packed));
    *at++ = 0x1a; /* client_name */
    *at++ = (uint8_t)(fits | 0x80);
    *at++ = (uint8_t)(fits >> 7 | 0x80);
    *at++ = (uint8_t)(fits >> 14);
    assert_non_null(unpack(&cistern__v1__hello__descriptor, packed, fits + 4));
    assert_in_range(arena.used, fits, CST_UNPACK_BUDGET);
    packed[1] = 0x80 | (CST_UNPACK_BUDGET & 0x7f);
    packed[2] = (uint8_t)(CST_UNPACK_BUDGET >> 7 | 0x80);
    packed[3] = CST_UNPACK_BUDGET >> 14;
    assert_null(unpack(&cistern__v1__hello__descriptor, packed, CST_UNPACK_BUDGET + 4));
    packed[0] = 0x12; /* the same as keys of a lookup */
    assert_non_null(unpack(&cistern__v1__lookup__descriptor, packed, CST_UNPACK_BUDGET + 4));
    assert_true(arena.used < 1024);
}

/* Whatever the arena's size and address, a message lies inside it, aligned, or does not decode. */
static void small_arenas(void **state) {
    const uint8_t packed[] = { 0x1a, 3, 'a', 'b', 'c' };
    unsigned fits = 0;

    for (size_t size = 0; size < 256; size++)
        for (size_t shift = 0; shift < 16; shift++) {
            const Cistern__V1__Hello *got;

            cst_arena_init(&arena, memory + shift, size);
            got = (const Cistern__V1__Hello *)cst_message_unpack(&cistern__v1__hello__descriptor,
                                                                 packed, sizeof(packed), &arena);
            assert_true(arena.used <= size);
            if (!got)
                continue;
            fits++;
            assert_int_equal((uintptr_t)got % 16, 0);
            assert_true((const uint8_t *)got >= memory + shift);
            assert_true((const uint8_t *)got->client_name + 4 <= memory + shift + size);
            assert_string_equal(got->client_name, "abc");
        }
    assert_true(fits > 0);
}

static void arena_is_reused(void **state) {
    const uint8_t packed[] = { 0x1a, 3, 'a', 'b', 'c' };
    size_t used;

    cst_arena_init(&arena, memory, sizeof(memory));
    assert_non_null(
        cst_message_unpack(&cistern__v1__hello__descriptor, packed, sizeof(packed), &arena));
    used = arena.used;
    cst_arena_reset(&arena);
    assert_int_equal(arena.used, 0);
    assert_non_null(
        cst_message_unpack(&cistern__v1__hello__descriptor, packed, sizeof(packed), &arena));
    assert_int_equal(arena.used, used);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(table),           cmocka_unit_test(schema),
        cmocka_unit_test(round_trip),      cmocka_unit_test(bytes_are_borrowed),
        cmocka_unit_test(budget),          cmocka_unit_test(small_arenas),
        cmocka_unit_test(arena_is_reused),
    };

    return cst_run_rows(rows, strict) + cmocka_run_group_tests(tests, NULL, NULL);
}
