/* SPDX-License-Identifier: Apache-2.0 */
/* The packer against protobuf-c's own, on every message, with fields filled at random. */
#include "tests/lib/check.h"

#include "base/random.h"
#include "proto/frame.h"
#include "proto/pack.h"

#include <string.h>

enum { TYPES = 256, ROUNDS = 200, BYTES_MAX = 300, GUARD = 0xa5 };

static struct cst_seeded_random rng;
static uint8_t bulk[BYTES_MAX];
static char text[BYTES_MAX];

/* Small, large and border values; a third is empty. */
static uint64_t number(void) {
    uint64_t v = cst_seeded_random_next(&rng);

    return v % 3 ? cst_seeded_random_next(&rng) >> v % 64 : 0;
}

static void fill(ProtobufCMessage *m, Cistern__V1__ListRef *nested) {
    cistern__v1__list_ref__init(nested);
    nested->offset = number();
    nested->length = number();
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];
        void *member = (char *)m + f->offset;
        uint64_t v = number();
        ProtobufCBinaryData bytes = { .data = bulk, .len = v % BYTES_MAX };
        const char *string = text + (BYTES_MAX - 1 - v % BYTES_MAX);
        const void *sub = v ? nested : NULL;

        if (f->type == PROTOBUF_C_TYPE_UINT32)
            memcpy(member, &(uint32_t){ (uint32_t)v }, sizeof(uint32_t));
        else if (f->type == PROTOBUF_C_TYPE_UINT64)
            memcpy(member, &v, sizeof(v));
        else if (f->type == PROTOBUF_C_TYPE_BYTES)
            memcpy(member, &bytes, sizeof(bytes));
        else if (f->type == PROTOBUF_C_TYPE_STRING)
            memcpy(member, &string, sizeof(string));
        else
            memcpy(member, &sub, sizeof(sub));
    }
}

static void check_message(const ProtobufCMessageDescriptor *desc) {
    static uint8_t expected[64 * 1024], got[64 * 1024];
    _Alignas(16) uint8_t room[1024];
    ProtobufCMessage *m = (void *)room;
    Cistern__V1__ListRef nested;
    size_t n;

    assert_true(desc->sizeof_message <= sizeof(room));
    protobuf_c_message_init(desc, m);
    fill(m, &nested);
    n = protobuf_c_message_pack(m, expected);
    assert_int_equal(cst_message_pack(got, n, m), n);
    assert_memory_equal(got, expected, n);
    for (size_t cap = 0; cap < n; cap += 1 + cap / 16) {
        memset(got, GUARD, n);
        assert_int_equal(cst_message_pack(got, cap, m), SIZE_MAX);
        for (size_t i = cap; i < n; i++)
            assert_int_equal(got[i], GUARD);
    }
}

static void test_like_protobuf_c(void **state) {
    unsigned checked = 0;

    cst_seeded_random_init(&rng, 20);
    memset(bulk, 0x5a, sizeof(bulk));
    memset(text, 't', sizeof(text) - 1);
    for (int round = 0; round < ROUNDS; round++)
        for (uint16_t type = 0; type < TYPES; type++)
            for (int reply = 0; reply < 2; reply++) {
                const ProtobufCMessageDescriptor *desc = cst_message_descriptor(type, reply);

                if (!desc)
                    continue;
                check_message(desc);
                checked++;
            }
    assert_true(checked >= ROUNDS * 50);
}

/* A string may also be NULL; protobuf-c packs that as nothing, too. */
static void test_null_string(void **state) {
    Cistern__V1__Goodbye m = CISTERN__V1__GOODBYE__INIT;
    uint8_t out[16];

    m.text = NULL;
    assert_int_equal(cst_message_pack(out, sizeof(out), &m.base), 0);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_like_protobuf_c),
        cmocka_unit_test(test_null_string),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
