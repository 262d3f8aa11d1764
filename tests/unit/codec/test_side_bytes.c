/* SPDX-License-Identifier: Apache-2.0 */
/* Side data as bytes: what they say comes back, what they can't say is refused, and nothing beyond
 * them is read. */
#include "tests/lib/check.h"
#include "tests/unit/codec/side_case.h"

#include "codec/dtype.h"
#include "codec/format.h"
#include "codec/side_format.h"

#include "base/sha256.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct case_block *c;
static struct side_case s;
static uint8_t *good;

static struct cst_side_entry *entry(uint32_t i) {
    return (struct cst_side_entry *)(void *)(s.bytes + sizeof(struct cst_side_header)) + i;
}

static int parse_changed(void *at, const void *value, size_t n) {
    int r;

    memcpy(at, value, n);
    r = side_case_parse(&s, &c->desc);
    memcpy(s.bytes, good, s.len);
    return r;
}

static int parse_byte(size_t at, uint8_t value) {
    return parse_changed(s.bytes + at, &value, 1);
}

static int parse_float(uint8_t *at, float value) {
    struct cst_le32 le;

    cst_store32(&le, cst_f32_bits(value));
    return parse_changed(at, &le, sizeof(le));
}

static void what_was_learned_comes_back(void **state) {
    const struct cst_side_tensor *k = cst_side_tensor(&s.side, 0, CST_TENSOR_K);
    const struct cst_side_tensor *t = cst_side_tensor(&s.side, 1, CST_TENSOR_V);
    uint8_t hash[CST_SHA256_SIZE];
    size_t len;

    cst_sha256(s.bytes, s.len, hash);
    assert_memory_equal(s.side.hash, hash, sizeof(hash));
    assert_int_equal(s.side.check, cst_load32(hash));
    assert_true(cst_side_is(&s.side, 1, s.side.check));
    assert_false(cst_side_is(&s.side, 2, s.side.check));
    assert_false(cst_side_is(NULL, 1, s.side.check));
    assert_int_equal(s.side.tokens, s.report.tokens);
    assert_int_equal(k->channels, 80);
    assert_int_equal(k->sources, 0);
    assert_true(t->sources && t->weight == 1);
    for (uint32_t i = 0; i < 80; i++) { /* rows are unit vectors at right angles */
        for (uint32_t j = 0; j <= i; j++) {
            double dot = 0;

            for (uint32_t ch = 0; ch < 80; ch++)
                dot += (double)k->klt.rows[i * 80 + ch] * (double)k->klt.rows[j * 80 + ch];
            assert_true(fabs(dot - (i == j)) < 2e-3);
        }
    }
    assert_null(cst_side_tensor(&s.side, 2, CST_TENSOR_K));
    assert_null(cst_side_tensor(NULL, 0, CST_TENSOR_K));
    assert_non_null(cst_side_section(&s.side, CST_SIDE_PREDICTOR, 1, CST_TENSOR_V, &len));
    assert_null(cst_side_section(&s.side, CST_SIDE_PREDICTOR, 0, CST_TENSOR_K, &len));
    assert_null(cst_side_section(&s.side, CST_SIDE_EXPONENTS, 1, CST_TENSOR_V, &len));
}

static void offsets_are_what_means_contribute(void **state) {
    const struct cst_side_tensor *v = cst_side_tensor(&s.side, 0, CST_TENSOR_V);
    const struct cst_side_tensor *k = cst_side_tensor(&s.side, 0, CST_TENSOR_K);

    assert_int_equal(v->sources, CST_SIDE_FROM_K);
    for (uint32_t i = 0; i < 80; i++) {
        double sum = (double)v->mean[i];

        for (uint32_t j = 0; j < 80; j++)
            sum -= (double)k->mean[j] * (double)v->predictor[j * 80 + i];
        assert_true(fabs(sum - (double)v->offset[i]) < 1e-3);
    }
}

static void other_models_are_refused(void **state) {
    struct cst_layer *layer = &c->desc.layers[1];

    layer->kv_heads = 1;
    assert_int_equal(side_case_parse(&s, &c->desc), CST_SIDE_E_MISMATCH);
    layer->kv_heads = 2;
    layer->k_rotated = 1, layer->rope = CST_ROPE_NEOX, layer->rope_dims = 40;
    layer->rope_theta = 1e4f;
    assert_int_equal(side_case_parse(&s, &c->desc), CST_SIDE_E_MISMATCH);
    layer->k_rotated = 0, layer->rope = CST_ROPE_NONE;
    c->desc.block_tokens = 16; /* blocks don't matter */
    assert_int_equal(side_case_parse(&s, &c->desc), 0);
    c->desc.block_tokens = 64;
}

static void damage_is_refused(void **state) {
    size_t len = s.len;
    uint8_t *klt = s.bytes + cst_load32(&entry(0)->offset);
    static const float bad[] = { NAN, INFINITY, 0x1p61f };

    assert_int_equal(parse_byte(0, 'X'), CST_SIDE_E_CORRUPT);
    assert_int_equal(parse_byte(4, 2), CST_SIDE_E_VERSION);
    assert_int_equal(parse_byte(6, 0), CST_SIDE_E_CORRUPT); /* version 0 */
    for (size_t at = 8; at < 32; at++) {
        if (at < 20 || at >= 28) /* lengths, model, count; reserved */
            assert_int_not_equal(parse_byte(at, good[at] ^ 0x41), 0);
    }
    for (size_t at = 0; at < sizeof(struct cst_side_entry); at++)
        assert_int_not_equal(parse_byte(32 + at, good[32 + at] ^ 0x21), 0);
    for (size_t i = 0; i < CST_COUNT(bad); i++) {
        for (size_t at = 8; at < 16 + 8 * 80; at += 4)
            assert_int_equal(parse_float(klt + at, bad[i]), CST_SIDE_E_CORRUPT);
    }
    assert_int_equal(parse_float(klt + 8, 0), CST_SIDE_E_CORRUPT);            /* rms */
    assert_int_equal(parse_float(klt + 12, -1), CST_SIDE_E_CORRUPT);          /* weight */
    assert_int_equal(parse_float(klt + 16 + 4 * 80, -1), CST_SIDE_E_CORRUPT); /* a deviation */
    assert_int_equal(parse_byte((size_t)(klt - s.bytes) + 16 + 8 * 80 + 1, 0x7c),
                     CST_SIDE_E_CORRUPT); /* infinite element */
    for (s.len = 0; s.len < len; s.len += s.len < 300 ? 1 : 977)
        assert_int_not_equal(side_case_parse(&s, &c->desc), 0);
    s.len = len;
    assert_int_equal(cst_side_parse(&s.side, s.bytes, s.len, &c->desc, s.memory, 4096),
                     CST_SIDE_E_SMALL);
    assert_int_equal(side_case_parse(&s, &c->desc), 0);
}

static void weights_make_a_new_version(void **state) {
    float k[2] = { 0.5f, 2 }, v[2] = { 3, 1 };
    uint8_t *bytes = malloc(s.len);
    struct side_case other = s;

    assert_non_null(bytes);
    assert_int_equal(cst_side_set_weights(bytes, s.len - 1, &s.side, 2, k, v), CST_SIDE_E_SMALL);
    assert_int_equal(cst_side_set_weights(bytes, s.len, &s.side, 0, k, v), CST_SIDE_E_VERSION);
    assert_int_equal(cst_side_set_weights(bytes, s.len, &s.side, 70000, k, v), CST_SIDE_E_VERSION);
    assert_int_equal(cst_side_set_weights(bytes, s.len, &s.side, 2, k, v), 0);
    other.bytes = bytes;
    other.memory = NULL;
    assert_int_equal(side_case_parse(&other, &c->desc), 0);
    assert_int_equal(other.side.version, 2);
    assert_int_not_equal(other.side.check, s.side.check);
    assert_true(cst_side_tensor(&other.side, 0, CST_TENSOR_K)->weight == 0.5f);
    assert_true(cst_side_tensor(&other.side, 1, CST_TENSOR_K)->weight == 2);
    assert_true(cst_side_tensor(&other.side, 0, CST_TENSOR_V)->weight == 3);
    k[1] = NAN;
    assert_int_equal(cst_side_set_weights(bytes, s.len, &s.side, 2, k, v), CST_SIDE_E_CORRUPT);
    side_case_deinit(&other);
}

/* A weight moves a tensor's step, and what it may err by. */
static void weights_move_steps(void **state) {
    const float k[2] = { 0.5f, 1 }, v[2] = { 1, 1 };
    struct cst_encode_params p = { .preset = CST_PRESET_DEEP,
                                   .tokens = 64,
                                   .first_position = 4,
                                   .bound = 1,
                                   .step = 0.02f,
                                   .side = &s.side };
    const struct cst_stream_entry *stream =
        (const void *)(c->frame + sizeof(struct cst_frame_header));
    struct side_case other = s;
    struct cst_frame_info info;
    float before;

    side_case_fill(c, 5, 64);
    assert_int_equal(case_encode(c, &p, &info), 0);
    before = cst_f32_from_bits(cst_load32(&stream[0].error));
    other.bytes = malloc(s.len);
    other.memory = NULL;
    assert_non_null(other.bytes);
    assert_int_equal(cst_side_set_weights(other.bytes, s.len, &s.side, 2, k, v), 0);
    assert_int_equal(side_case_parse(&other, &c->desc), 0);
    p.side = &other.side;
    assert_int_equal(case_encode(c, &p, &info), 0);
    assert_true(fabsf(cst_f32_from_bits(cst_load32(&stream[0].error)) / before - 0.5f) < 0.05f);
    p.bound = before * 0.8f; /* twice the error over the weight */
    assert_int_equal(case_encode(c, &p, &info), 0);
    assert_true(info.error <= p.bound &&
                cst_f32_from_bits(cst_load32(&stream[0].error)) <= p.bound * 0.5f);
    side_case_deinit(&other);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_learned_comes_back),
        cmocka_unit_test(offsets_are_what_means_contribute),
        cmocka_unit_test(other_models_are_refused),
        cmocka_unit_test(damage_is_refused),
        cmocka_unit_test(weights_make_a_new_version),
        cmocka_unit_test(weights_move_steps),
    };
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_BF16, 64, 2, 2, 40, 0 };
    int failed;

    c = case_new(&shape);
    side_case_learn(&s, c, 42, NULL);
    good = malloc(s.len);
    if (!good)
        return 1;
    memcpy(good, s.bytes, s.len);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(good);
    side_case_deinit(&s);
    case_free(c);
    return failed;
}
