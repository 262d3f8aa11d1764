/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every vector of tests/golden/keys.json: descriptors, fingerprints, root keys, chains, flat keys.
 * The file is made by an independent script (make_keys.py); it has one flat object a line.
 */
#include "tests/lib/check.h"

#include "proto/key.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINE_MAX_ = 64 * 1024, BYTES_MAX = 16 * 1024 };

struct bytes {
    uint8_t data[BYTES_MAX];
    size_t n;
};

/* The text between `"field": "` and the next quote. */
static const char *find(const char *line, const char *field, size_t *n) {
    char pattern[64];
    const char *at;

    (void)snprintf(pattern, sizeof(pattern), "\"%s\": \"", field);
    at = strstr(line, pattern);
    assert_non_null(at);
    at += strlen(pattern);
    *n = strcspn(at, "\"");
    return at;
}

static void hex(const char *line, const char *field, struct bytes *out) {
    static char text[2 * BYTES_MAX + 1];
    size_t n;
    const char *at = find(line, field, &n);

    assert_true(n % 2 == 0 && n / 2 <= BYTES_MAX);
    memcpy(text, at, n);
    text[n] = '\0';
    out->n = n / 2;
    cst_unhex(out->data, out->n, text);
}

static bool is(const char *line, const char *field, const char *value) {
    size_t n;
    const char *at = find(line, field, &n);

    return n == strlen(value) && memcmp(at, value, n) == 0;
}

static void equal(const uint8_t *got, const struct bytes *expected, size_t n) {
    assert_int_equal(expected->n, n);
    assert_memory_equal(got, expected->data, n);
}

/* The vector "rotated K, transposed V, yarn, window", field by field. */
static const struct cst_layer layers[] = {
    { .kv_heads = 3,
      .head_dim_k = 8,
      .head_dim_v = 8,
      .window = 4096,
      .rope = CST_ROPE_NEOX,
      .k_rotated = 1,
      .rope_scaling = CST_SCALING_YARN,
      .rope_dims = 6,
      .rope_theta = 10000,
      .scaling = { 4, 32, 1, 1.25F },
      .scaling_original_context = 32768 },
    { .kv_heads = 3,
      .head_dim_k = 8,
      .head_dim_v = 8,
      .rope = CST_ROPE_NORM,
      .rope_scaling = CST_SCALING_LINEAR,
      .rope_dims = 8,
      .rope_theta = 500000,
      .scaling = { 0.5F } },
};
static const struct cst_segment segments[] = {
    { 0, CST_TENSOR_K, CST_DTYPE_F16, 0, 3072, 48, 16, 2 },
    { 0, CST_TENSOR_V, CST_DTYPE_F16, 3072, 3072, 2, 1024, 128 },
    { 1, CST_TENSOR_K, CST_DTYPE_BF16, 6144, 3072, 48, 16, 2 },
    { 1, CST_TENSOR_V, CST_DTYPE_BF16, 9216, 3072, 2, 1024, 128 },
};

static void check_literal(const struct bytes *expected) {
    struct cst_descriptor d = { .engine = "llama.cpp",
                                .options = "kv=f16;v_trans=1",
                                .engine_abi = 7,
                                .state_version = 3,
                                .block_tokens = 64,
                                .tp_rank = 1,
                                .tp_size = 2,
                                .block_bytes = 12288,
                                .n_layers = CST_COUNT(layers),
                                .n_segments = CST_COUNT(segments),
                                .layers = (struct cst_layer *)(uintptr_t)layers,
                                .segments = (struct cst_segment *)(uintptr_t)segments };
    uint8_t out[BYTES_MAX];

    /* SHA-256 of "model" and of "adapter" */
    cst_unhex(d.content_id, 32, "9372c470eeadd5ecd9c3c74c2b3cb633f8e2f2fad799250a0f70d652b6b825e4");
    cst_unhex(d.adapter_id, 32, "ae1eae1d76e5b7c865c4122ce366a08025842566d2d96c75cc13e6353a73db0d");
    equal(out, expected, cst_descriptor_encode(&d, out, sizeof(out)));
}

static void check_descriptor(const char *line) {
    static struct bytes data, fingerprint;
    static uint8_t again[BYTES_MAX];
    struct cst_descriptor *d = NULL;
    uint8_t id[32];
    char text[200] = "";

    hex(line, "bytes", &data);
    hex(line, "fingerprint", &fingerprint);
    assert_int_equal(cst_descriptor_decode(&d, data.data, data.n, text, sizeof(text)), 0);
    equal(again, &data, cst_descriptor_encode(d, again, sizeof(again)));
    assert_int_equal(cst_descriptor_encode(d, again, data.n - 1), 0);
    cst_descriptor_fingerprint(data.data, data.n, id);
    equal(id, &fingerprint, sizeof(id));
    assert_null(cst_descriptor_free(d));
    if (is(line, "name", "rotated K, transposed V, yarn, window"))
        check_literal(&data);
}

static void check_root(const char *line) {
    static struct bytes fingerprint, salt, root;
    uint8_t out[32];

    hex(line, "fingerprint", &fingerprint);
    hex(line, "salt", &salt);
    hex(line, "root", &root);
    cst_key_root(fingerprint.data, salt.data, (uint32_t)salt.n, out);
    equal(out, &root, sizeof(out));
}

/* Token ids are u32le in the file, whatever the host. */
static size_t tokens_of(const struct bytes *from, uint32_t *out) {
    for (size_t i = 0; i < from->n / 4; i++)
        out[i] = (uint32_t)from->data[4 * i] | (uint32_t)from->data[4 * i + 1] << 8 |
                 (uint32_t)from->data[4 * i + 2] << 16 | (uint32_t)from->data[4 * i + 3] << 24;
    return from->n / 4;
}

static void check_block(const char *line) {
    static struct bytes parent, ids, extra, key;
    static uint32_t tokens[BYTES_MAX / 4];
    uint8_t out[32];

    hex(line, "parent", &parent);
    hex(line, "tokens", &ids);
    hex(line, "extra", &extra);
    hex(line, "key", &key);
    cst_key_block(parent.data, tokens, (uint32_t)tokens_of(&ids, tokens), extra.data,
                  (uint32_t)extra.n, out);
    equal(out, &key, sizeof(out));
}

static void check_chain(const char *line) {
    static struct bytes root, ids, keys;
    static uint32_t tokens[BYTES_MAX / 4];
    static uint8_t out[BYTES_MAX];
    const char *at = strstr(line, "\"block_tokens\": ");
    unsigned long size;
    size_t n;

    assert_non_null(at);
    size = strtoul(at + strlen("\"block_tokens\": "), NULL, 10);
    hex(line, "root", &root);
    hex(line, "tokens", &ids);
    hex(line, "keys", &keys);
    n = tokens_of(&ids, tokens);
    memset(out, 0xee, sizeof(out));
    cst_key_chain(root.data, tokens, n, (uint32_t)size, out);
    equal(out, &keys, (n + size - 1) / size * 32);
    assert_int_equal(out[keys.n], 0xee); /* nothing written behind the last key */
}

static void check_flat(const char *line) {
    static struct bytes data, key;
    uint8_t out[32];

    hex(line, "data", &data);
    hex(line, "key", &key);
    cst_key_from_bytes(data.data, data.n, out);
    equal(out, &key, sizeof(out));
}

static const struct {
    const char *what;
    void (*check)(const char *line);
    unsigned least; /* vectors that the file has at least */
} kinds[] = {
    { "descriptor", check_descriptor, 3 }, { "root", check_root, 3 }, { "block", check_block, 4 },
    { "chain", check_chain, 8 },           { "flat", check_flat, 7 },
};

static void every_vector(void **state) {
    static char line[LINE_MAX_];
    unsigned seen[CST_COUNT(kinds)] = { 0 };
    char path[4096];
    FILE *f;

    (void)snprintf(path, sizeof(path), "%s/tests/golden/keys.json", getenv("CST_SOURCE_ROOT"));
    f = fopen(path, "re");
    assert_non_null(f);
    while (fgets(line, sizeof(line), f))
        for (size_t i = 0; line[0] == '{' && i < CST_COUNT(kinds); i++)
            if (is(line, "what", kinds[i].what)) {
                kinds[i].check(line);
                seen[i]++;
            }
    (void)fclose(f);
    for (size_t i = 0; i < CST_COUNT(kinds); i++)
        assert_true(seen[i] >= kinds[i].least);
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(every_vector) };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
