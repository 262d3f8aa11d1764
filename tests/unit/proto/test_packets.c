/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every file of tests/golden/packets: good ones decode and pack back to the same bytes (numbers of
 * messages and fields are pinned by it), bad ones get the status that expected.txt lists.
 */
#include "tests/lib/check.h"

#include "proto/frame.h"
#include "proto/key.h"
#include "proto/status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint8_t data[2 * CST_PACKET_MAX], again[CST_PACKET_MAX], memory[CST_UNPACK_BUDGET];
static size_t size;

static void load(const char *name) {
    char path[4096];
    FILE *f;

    (void)snprintf(path, sizeof(path), "%s/tests/golden/packets/%s", getenv("CST_SOURCE_ROOT"),
                   name);
    f = fopen(path, "re");
    assert_non_null(f);
    size = fread(data, 1, sizeof(data), f);
    (void)fclose(f);
}

static int descriptor_status(const ProtobufCMessage *message) {
    const Cistern__V1__SpaceOpen *open = (const Cistern__V1__SpaceOpen *)message;
    struct cst_descriptor *d = NULL;
    char text[200];
    int r =
        cst_descriptor_decode(&d, open->descriptor.data, open->descriptor.len, text, sizeof(text));

    assert_null(cst_descriptor_free(d));
    return r ? CST_STATUS_BAD_DESCRIPTOR : CST_STATUS_OK;
}

static void packs_back(const struct cst_packet *p, const ProtobufCMessage *message) {
    size_t n = cst_packet_pack(again, sizeof(again), p->type, p->flags, p->request, message);

    again[4] = p->version; /* packing writes the current version */
    assert_int_equal(n, size);
    assert_memory_equal(again, data, n);
}

/* What a receiver finds, in the order in which it looks. */
static int receive(void) {
    const ProtobufCMessageDescriptor *desc;
    const ProtobufCMessage *message;
    struct cst_arena arena;
    struct cst_packet p;
    char text[200];
    int status = cst_packet_parse(&p, data, size);

    if (status)
        return status;
    if (p.flags & CST_PACKET_ERROR) {
        assert_int_equal(cst_packet_error(&p, text, sizeof(text)), CST_STATUS_BUSY);
        assert_string_equal(text, "the daemon is full; try again later");
        return CST_STATUS_OK;
    }
    desc = cst_message_descriptor(p.type, p.flags & CST_PACKET_REPLY);
    if (!desc)
        return CST_STATUS_BAD_TYPE;
    cst_arena_init(&arena, memory, sizeof(memory));
    message = cst_message_unpack(desc, p.payload, p.length, &arena);
    if (!message)
        return CST_STATUS_BAD_MESSAGE;
    if (desc == &cistern__v1__space_open__descriptor && descriptor_status(message))
        return CST_STATUS_BAD_DESCRIPTOR;
    packs_back(&p, message);
    return CST_STATUS_OK;
}

static void every_packet(void **state) {
    char path[4096], line[256], name[128], status[64];
    unsigned good = 0, bad = 0;
    FILE *f;

    (void)snprintf(path, sizeof(path), "%s/tests/golden/packets/expected.txt",
                   getenv("CST_SOURCE_ROOT"));
    f = fopen(path, "re");
    assert_non_null(f);
    while (fgets(line, sizeof(line), f)) {
        int got;

        if (line[0] == '#')
            continue;
        assert_int_equal(sscanf(line, "%127s %63s", name, status), 2);
        load(name);
        got = receive();
        if (strcmp(cst_status_name(got), status) != 0)
            fail_msg("%s: %s instead of %s", name, cst_status_name(got), status);
        if (got)
            bad++;
        else
            good++;
    }
    (void)fclose(f);
    assert_int_equal(good, 2 * 27 + 4 + 2); /* every request, reply and push, and two more */
    assert_true(bad >= 29);
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(every_packet) };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
