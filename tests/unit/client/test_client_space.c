/* SPDX-License-Identifier: Apache-2.0 */
/* Spaces, descriptors and keys: identity is computed here and must be the daemon's. */
#include "tests/lib/check.h"
#include "tests/unit/client/fake_daemon.h"

#include "client/client.h"
#include "proto/key.h"
#include "proto/status.h"

#include <string.h>
#include <sys/socket.h>

enum { BT = FAKE_BLOCK_TOKENS };

/* ---- descriptors ---- */

/* The vector "rotated K, transposed V, yarn, window" of tests/golden/keys.json. */
static void test_golden_fingerprint(void **state) {
    static const cistern_layer layers[] = {
        { .kv_heads = 3,
          .head_dim_k = 8,
          .head_dim_v = 8,
          .window = 4096,
          .rope = CISTERN_ROPE_NEOX,
          .k_rotated = 1,
          .rope_scaling = CISTERN_SCALING_YARN,
          .rope_dims = 6,
          .rope_theta = 10000,
          .scaling = { 4, 32, 1, 1.25F },
          .scaling_original_context = 32768 },
        { .kv_heads = 3,
          .head_dim_k = 8,
          .head_dim_v = 8,
          .rope = CISTERN_ROPE_NORM,
          .rope_scaling = CISTERN_SCALING_LINEAR,
          .rope_dims = 8,
          .rope_theta = 500000,
          .scaling = { 0.5F } },
    };
    static const cistern_segment segments[] = {
        { 0, CISTERN_TENSOR_K, CISTERN_DTYPE_F16, 0, 0, 3072, 48, 16, 2 },
        { 0, CISTERN_TENSOR_V, CISTERN_DTYPE_F16, 0, 3072, 3072, 2, 1024, 128 },
        { 1, CISTERN_TENSOR_K, CISTERN_DTYPE_BF16, 0, 6144, 3072, 48, 16, 2 },
        { 1, CISTERN_TENSOR_V, CISTERN_DTYPE_BF16, 0, 9216, 3072, 2, 1024, 128 },
    };
    cistern_descriptor d = { .size = sizeof(d),
                             .engine = "llama.cpp",
                             .engine_options = "kv=f16;v_trans=1",
                             .engine_abi = 7,
                             .state_version = 3,
                             .block_tokens = 64,
                             .tp_rank = 1,
                             .tp_size = 2,
                             .block_bytes = 12288,
                             .n_layers = 2,
                             .n_segments = 4,
                             .layers = layers,
                             .segments = segments };
    uint8_t expected[32], got[32];

    cst_unhex(d.content_id, 32, "9372c470eeadd5ecd9c3c74c2b3cb633f8e2f2fad799250a0f70d652b6b825e4");
    cst_unhex(d.adapter_id, 32, "ae1eae1d76e5b7c865c4122ce366a08025842566d2d96c75cc13e6353a73db0d");
    cst_unhex(expected, 32, "af429d17952e1985132baab3312f1ba1a396922712a0765d01b2a53ea39b5653");
    assert_int_equal(cistern_descriptor_fingerprint(&d, got), CISTERN_OK);
    assert_memory_equal(got, expected, 32);
    assert_int_equal(cistern_descriptor_fingerprint(&d, NULL), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_descriptor_fingerprint(NULL, got), CISTERN_E_BAD_ARGUMENT);
}

enum wrong {
    NO_SIZE,
    TOO_MANY_LAYERS,
    TOO_MANY_SEGMENTS,
    NO_LAYERS,
    LONG_ENGINE,
    LONG_OPTIONS,
    WIDE_TENSOR,
    WIDE_ROPE,
    OVERLAP,
    OVERRUN,
    HUGE_BLOCK,
};

struct wrong_row {
    const char *name;
    enum wrong wrong;
    int32_t expected;
    const char *sentence; /* part of it, or NULL */
};

static const struct wrong_row wrong_rows[] = {
    { "no size", NO_SIZE, CISTERN_E_BAD_ARGUMENT, "size" },
    { "too many layers", TOO_MANY_LAYERS, CISTERN_E_BAD_DESCRIPTOR, "layers" },
    { "too many segments", TOO_MANY_SEGMENTS, CISTERN_E_BAD_DESCRIPTOR, "segments" },
    { "no layers", NO_LAYERS, CISTERN_E_BAD_ARGUMENT, "NULL" },
    { "engine too long", LONG_ENGINE, CISTERN_E_BAD_DESCRIPTOR, "engine" },
    { "options too long", LONG_OPTIONS, CISTERN_E_BAD_DESCRIPTOR, "engine_options" },
    { "tensor 256 is not tensor 0", WIDE_TENSOR, CISTERN_E_BAD_DESCRIPTOR, "segment" },
    { "rope 257 is not rope 1", WIDE_ROPE, CISTERN_E_BAD_DESCRIPTOR, "layer" },
    { "segments overlap", OVERLAP, CISTERN_E_BAD_DESCRIPTOR, "overlap" },
    { "segment overruns the block", OVERRUN, CISTERN_E_BAD_DESCRIPTOR, NULL },
    { "block too large", HUGE_BLOCK, CISTERN_E_BAD_DESCRIPTOR, "block" },
};

static void spoil(cistern_descriptor *d, cistern_layer *layers, cistern_segment *segments,
                  enum wrong wrong) {
    static char engine[CST_ENGINE_MAX + 2], options[CST_OPTIONS_MAX + 2];

    memset(engine, 'e', sizeof(engine) - 1);
    memset(options, 'o', sizeof(options) - 1);
    switch (wrong) {
    case NO_SIZE:
        d->size = 0;
        break;
    case TOO_MANY_LAYERS:
        d->n_layers = UINT32_MAX;
        break;
    case TOO_MANY_SEGMENTS:
        d->n_segments = UINT32_MAX;
        break;
    case NO_LAYERS:
        d->layers = NULL;
        break;
    case LONG_ENGINE:
        d->engine = engine;
        break;
    case LONG_OPTIONS:
        d->engine_options = options;
        break;
    case WIDE_TENSOR:
        segments[0].tensor = 256;
        break;
    case WIDE_ROPE:
        layers[0].rope = 257;
        break;
    case OVERLAP:
        segments[1].offset = segments[0].offset;
        break;
    case OVERRUN:
        d->block_bytes -= 1;
        break;
    case HUGE_BLOCK:
        d->block_bytes = CST_BLOCK_BYTES_MAX + 1;
        break;
    }
}

static void test_wrong_descriptor(void **state) {
    const struct wrong_row *row = *state;
    cistern_descriptor d = *fake_descriptor();
    cistern_layer layers[2];
    cistern_segment segments[4];
    cistern_space *space = NULL;
    void *fixture;
    struct fake_fixture *x;

    fake_setup(&fixture);
    x = fixture;
    memcpy(layers, d.layers, sizeof(layers));
    memcpy(segments, d.segments, sizeof(segments));
    d.layers = layers;
    d.segments = segments;
    assert_int_equal(cistern_space_open(x->client, &d, NULL, &space), CISTERN_OK);
    spoil(&d, layers, segments, row->wrong);
    assert_int_equal(cistern_space_open(x->client, &d, NULL, &space), row->expected);
    if (row->sentence)
        assert_non_null(strstr(cistern_last_error(), row->sentence));
    fake_lock(x->f);
    assert_int_equal(x->f->n_requests[CST_MSG_SPACE_OPEN], 2); /* the fixture's and the good one */
    fake_unlock(x->f);
    fake_teardown(&fixture);
}

/* ---- opening and closing ---- */

static void test_options(void **state) {
    struct fake_fixture *x = *state;
    uint8_t salt[65] = { 1 }, plain[32], salted[32], expected[32], fingerprint[32];
    cistern_space_options options = { .size = sizeof(options), .salt = salt, .salt_size = 64 };
    cistern_space *space = NULL;

    assert_int_equal(cistern_space_open(x->client, fake_descriptor(), &options, &space),
                     CISTERN_OK);
    assert_int_equal(cistern_key_root(x->space, plain), CISTERN_OK);
    assert_int_equal(cistern_key_root(space, salted), CISTERN_OK);
    assert_memory_not_equal(plain, salted, 32);
    assert_int_equal(cistern_descriptor_fingerprint(fake_descriptor(), fingerprint), CISTERN_OK);
    cst_key_root(fingerprint, salt, 64, expected);
    assert_memory_equal(salted, expected, 32);
    options.salt_size = 65;
    assert_int_equal(cistern_space_open(x->client, fake_descriptor(), &options, &space),
                     CISTERN_E_BAD_ARGUMENT);
    options = (cistern_space_options){ .size = sizeof(options), .kind = 2 };
    assert_int_equal(cistern_space_open(x->client, fake_descriptor(), &options, &space),
                     CISTERN_E_BAD_ARGUMENT);
    options = (cistern_space_options){ .size = sizeof(options), .quality_class = 4 };
    assert_int_equal(cistern_space_open(x->client, fake_descriptor(), &options, &space),
                     CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_space_open(NULL, fake_descriptor(), NULL, &space),
                     CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_space_open(x->client, fake_descriptor(), NULL, NULL),
                     CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_space_block_bytes(space), FAKE_BLOCK_BYTES);
    assert_int_equal(cistern_space_block_tokens(space), FAKE_BLOCK_TOKENS);
    assert_int_equal(cistern_space_block_tokens(NULL), 0);
}

static unsigned closes(struct fake_daemon *f) {
    unsigned n;

    fake_lock(f);
    n = f->n_requests[CST_MSG_SPACE_CLOSE];
    fake_unlock(f);
    return n;
}

/* One identity has one handle at the daemon: it goes with the last space that uses it. */
static void test_two_spaces_one_handle(void **state) {
    struct fake_fixture *x = *state;
    cistern_space *second = fake_space(x->client, CISTERN_KIND_TOKENS);
    cistern_space *other = fake_space(x->client, CISTERN_KIND_FLAT);
    uint8_t key[32];
    size_t n;

    cistern_space_close(x->space);
    assert_int_equal(closes(x->f), 0);
    assert_int_equal(cistern_key_root(second, key), CISTERN_OK);
    assert_int_equal(cistern_lookup_keys(second, key, 1, NULL, &n), CISTERN_OK);
    cistern_space_close(second);
    assert_int_equal(closes(x->f), 1);
    cistern_space_close(other);
    assert_int_equal(closes(x->f), 2);
    cistern_space_close(NULL);
}

static void test_lazy(void **state) {
    struct fake_daemon *f = fake_new();
    cistern_client *c;
    cistern_space *space;
    cistern_match match = { .size = sizeof(match) };
    uint32_t tokens[BT] = { 0 };

    fake_stop(f);
    c = fake_client(f, CISTERN_CLIENT_LAZY);
    space = fake_space(c, CISTERN_KIND_TOKENS);
    assert_int_equal(cistern_lookup(space, tokens, BT, NULL, &match), CISTERN_OK);
    assert_int_equal(match.blocks, 0);
    cistern_client_close(c);
    fake_start(f);
    c = fake_client(f, CISTERN_CLIENT_LAZY);
    space = fake_space(c, CISTERN_KIND_TOKENS);
    cistern_space_close(space);
    cistern_client_close(c);
    fake_free(f);
}

/* ---- lies ---- */

enum lie { OTHER_FINGERPRINT, NO_FINGERPRINT, OTHER_BYTES, OTHER_TOKENS, DENIED, HANG_UP };

struct lie_row {
    const char *name;
    enum lie lie;
    int32_t expected;
};

static const struct lie_row lie_rows[] = {
    { "another fingerprint", OTHER_FINGERPRINT, CISTERN_E_CORRUPT },
    { "no fingerprint", NO_FINGERPRINT, CISTERN_E_CORRUPT },
    { "another block size", OTHER_BYTES, CISTERN_E_CORRUPT },
    { "another number of tokens", OTHER_TOKENS, CISTERN_E_CORRUPT },
    { "denied", DENIED, CISTERN_E_DENIED },
    { "the end", HANG_UP, CISTERN_E_DISCONNECTED },
};

static bool tell_lie(struct fake_daemon *f, struct fake_connection *c, const struct cst_packet *p) {
    const struct lie_row *row = f->hook_arg;
    Cistern__V1__SpaceOpenReply reply = CISTERN__V1__SPACE_OPEN_REPLY__INIT;
    uint8_t fingerprint[32];

    if (p->type != CST_MSG_SPACE_OPEN)
        return false;
    if (cistern_descriptor_fingerprint(fake_descriptor(), fingerprint))
        return false;
    fingerprint[31] ^= row->lie == OTHER_FINGERPRINT;
    reply.space = 5;
    reply.block_bytes = FAKE_BLOCK_BYTES - (row->lie == OTHER_BYTES);
    reply.block_tokens = FAKE_BLOCK_TOKENS + (row->lie == OTHER_TOKENS);
    reply.fingerprint = (ProtobufCBinaryData){ row->lie == NO_FINGERPRINT ? 0 : 32, fingerprint };
    if (row->lie == DENIED)
        fake_error(f, c, p, CST_STATUS_DENIED);
    else if (row->lie == HANG_UP)
        (void)shutdown(c->fd, SHUT_RDWR);
    else
        fake_reply(f, c, p, &reply.base);
    return true;
}

static void test_lie(void **state) {
    struct lie_row row = **(struct lie_row **)state;
    struct fake_daemon *f = fake_new();
    cistern_client *c = fake_client(f, 0);
    cistern_space *space = NULL;

    fake_set_hook(f, tell_lie, &row);
    assert_int_equal(cistern_space_open(c, fake_descriptor(), NULL, &space), row.expected);
    assert_null(space);
    cistern_client_close(c);
    fake_free(f);
}

/* ---- keys ---- */

static void test_key_chain(void **state) {
    struct fake_fixture *x = *state;
    uint32_t tokens[2 * BT + 3];
    uint8_t keys[3 * 32], root[32], expected[3 * 32], again[32];
    size_t n;

    for (size_t i = 0; i < CST_COUNT(tokens); i++)
        tokens[i] = (uint32_t)i;
    assert_int_equal(cistern_key_root(x->space, root), CISTERN_OK);
    assert_int_equal(cistern_key_block(root, tokens, BT, NULL, 0, expected), CISTERN_OK);
    assert_int_equal(cistern_key_block(expected, tokens + BT, BT, NULL, 0, expected + 32),
                     CISTERN_OK);
    assert_int_equal(cistern_key_block(expected + 32, tokens + 2 * BT, 3, NULL, 0, expected + 64),
                     CISTERN_OK);
    assert_int_equal(cistern_key_chain(x->space, NULL, tokens, CST_COUNT(tokens), keys, 3, &n),
                     CISTERN_OK);
    assert_int_equal(n, 3);
    assert_memory_equal(keys, expected, sizeof(keys));
    assert_int_equal(cistern_key_chain(x->space, expected, tokens + BT, BT, again, 1, &n),
                     CISTERN_OK);
    assert_memory_equal(again, expected + 32, 32);
    assert_int_equal(cistern_key_chain(x->space, NULL, tokens, CST_COUNT(tokens), keys, 2, &n),
                     CISTERN_E_TOO_LARGE);
    assert_int_equal(cistern_key_chain(x->space, NULL, NULL, 0, NULL, 0, &n), CISTERN_OK);
    assert_int_equal(n, 0);
    assert_int_equal(cistern_key_chain(NULL, NULL, tokens, BT, keys, 3, &n), CISTERN_E_BAD_HANDLE);
    assert_int_equal(cistern_key_chain(x->space, NULL, NULL, BT, keys, 3, &n),
                     CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_key_block(NULL, tokens, 1, NULL, 0, again), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_key_from_bytes(NULL, 1, again), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_key_root(NULL, again), CISTERN_E_BAD_HANDLE);
}

/* Every wire status has a code of its own or one that stands for it; none is lost. */
static void test_statuses(void **state) {
    assert_string_equal(cistern_status_text(CISTERN_E_NOT_FOUND), "no such block");
    assert_string_equal(cistern_status_text(CISTERN_OK), "ok");
    assert_string_equal(cistern_status_text(-12345), cistern_status_text(7));
    assert_string_equal(cistern_status_text(INT32_MIN), cistern_status_text(7));
    assert_int_equal(cst_status_to_api(CST_STATUS_BUSY), CISTERN_E_BUSY);
    assert_int_equal(cst_status_to_api(CST_STATUS_BAD_TYPE), CISTERN_E_UNSUPPORTED);
    assert_int_equal(cst_status_to_api(CST_STATUS_BAD_MAGIC), CISTERN_E_INTERNAL);
    assert_int_equal(cst_status_to_api(CST_STATUS_TIMEOUT), CISTERN_E_INTERNAL);
    assert_int_equal(cst_status_to_api(UINT32_MAX), CISTERN_E_INTERNAL);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_fingerprint),
        cmocka_unit_test_setup_teardown(test_options, fake_setup, fake_teardown),
        cmocka_unit_test_setup_teardown(test_two_spaces_one_handle, fake_setup, fake_teardown),
        cmocka_unit_test(test_lazy),
        cmocka_unit_test_setup_teardown(test_key_chain, fake_setup, fake_teardown),
        cmocka_unit_test(test_statuses),
    };

    return cst_run_rows(wrong_rows, test_wrong_descriptor) + cst_run_rows(lie_rows, test_lie) +
           cmocka_run_group_tests(tests, NULL, NULL);
}
