/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The presets on caches of a real model, cut into 64-token blocks as an engine stores them:
 * lossless is exact and saves what the format promises, int8 stays within the near-lossless bound,
 * turboquant, of keys that are rotated, within the bound of small losses.
 *
 * usage: test-kv-data excerpt     the committed excerpt
 *        test-kv-data data        all of $CISTERN_DATA/kv
 */
#include "tests/lib/check.h"
#include "tests/unit/codec/codec_case.h"
#include "tests/unit/codec/kv_fixture.h"

#include "codec/dtype.h"
#include "codec/preset.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 64, HEADS = KV_HEADS, DIMS = KV_DIMS, PART = TOKENS * HEADS * DIMS * 2 };

struct sums {
    uint64_t raw, lossless, int8, turboquant;
    float error;
};

static void check_block(struct case_block *c, uint32_t position, struct sums *sums) {
    struct cst_encode_params p = { CST_PRESET_LOSSLESS, TOKENS, position, 0 };
    struct cst_frame_info info;

    assert_int_equal(case_encode(c, &p, &info), 0);
    assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
    assert_memory_equal(c->out, c->block, c->desc.block_bytes);
    sums->raw += c->desc.block_bytes;
    sums->lossless += c->frame_len;
    p.preset = CST_PRESET_INT8;
    p.bound = 0.05f;
    assert_int_equal(case_encode(c, &p, &info), 0);
    assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
    sums->int8 += c->frame_len;
    sums->error = CST_MAX(sums->error, info.error);
    if (!c->desc.layers[0].k_rotated)
        return;
    p.preset = CST_PRESET_TURBOQUANT;
    p.bound = 0.15f;
    assert_int_equal(case_encode(c, &p, &info), 0);
    assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
    sums->turboquant += c->frame_len;
}

/* Squared error of the decoded block against the one that it was made from first. */
static double squared_error(const struct case_block *c, const uint8_t *original) {
    double sum = 0;

    for (uint64_t at = 0; at < c->desc.block_bytes; at += 2) {
        double e = (double)cst_dtype_load(CST_DTYPE_BF16, original + at) -
                   (double)cst_dtype_load(CST_DTYPE_BF16, c->out + at);

        sum += e * e;
    }
    return sum;
}

/* Decoded and encoded again ten times, its error grows by less than a tenth. */
static void check_drift(struct case_block *c, uint32_t position) {
    uint8_t *original = test_malloc(c->desc.block_bytes);

    memcpy(original, c->block, c->desc.block_bytes);
    CASE_EACH_PRESET (preset, CST_PRESET_INT8) {
        struct cst_encode_params p = { preset, TOKENS, position, 1 };
        double first = 0;

        for (int round = 0; round <= 10; round++) {
            assert_int_equal(case_encode(c, &p, NULL), 0);
            assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
            memcpy(c->block, c->out, c->desc.block_bytes);
            if (round == 0)
                first = squared_error(c, original);
        }
        assert_true(squared_error(c, original) <= 1.1 * 1.1 * first);
        memcpy(c->block, original, c->desc.block_bytes);
    }
    test_free(original);
}

/* Blocks of the two tensors, whose first token is at `position`, in one order of axes. */
static struct sums check_tensors(const struct kv_tensor *k, const struct kv_tensor *v,
                                 uint32_t layers, uint32_t position, enum case_order order,
                                 bool rotated) {
    const struct case_shape shape = { order, CST_DTYPE_BF16, TOKENS, layers, HEADS, DIMS, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    size_t tokens = k->size / layers / (PART / TOKENS);
    struct sums sums = { 0 };

    if (rotated)
        case_rotate_keys(c, CST_ROPE_NORM, DIMS);
    for (uint32_t l = 0; l < layers; l++)
        c->desc.layers[l].rope_theta = 1e5f;
    assert_int_equal(k->size, v->size);
    for (uint32_t first = 0; first + TOKENS <= tokens; first += TOKENS) {
        for (uint32_t i = 0; i < 2 * layers; i++) {
            const uint8_t *src =
                (i % 2 ? v : k)->bytes + ((i / 2) * tokens + first) * (PART / TOKENS);

            for (uint32_t e = 0; e < PART / 2; e++) {
                const struct cst_segment *seg = &c->desc.segments[i];
                uint32_t t = e / (HEADS * DIMS), h = e / DIMS % HEADS, d = e % DIMS;

                memcpy(c->block + seg->offset + t * seg->token_stride + h * seg->head_stride +
                           d * seg->dim_stride,
                       src + 2 * e, 2);
            }
        }
        check_block(c, position + first, &sums);
        if (rotated && first == 0)
            check_drift(c, position);
    }
    return sums;
}

static void report(const char *what, const struct sums *s) {
    print_message("%-28s lossless %.4f  int8 %.4f  error %.4f  turboquant %.4f\n", what,
                  (double)s->raw / (double)s->lossless, (double)s->raw / (double)s->int8,
                  (double)s->error, s->turboquant ? (double)s->raw / (double)s->turboquant : 0);
    assert_true((double)s->raw >= 1.4 * (double)s->lossless);
    /* 16 bits over 8 and a quarter; four of the first 64 tokens stay as they are */
    assert_true((double)s->raw >= 1.85 * (double)s->int8);
    assert_true(s->error > 0 && s->error <= 0.05f);
    if (s->turboquant)
        assert_true((double)s->raw >= 3.45 * (double)s->turboquant);
}

static void check_folder(const char *folder, uint32_t layers, uint32_t position,
                         const char *const *keys) {
    static const char *const texts[] = { "prose", "code" };
    char name[64];

    for (size_t i = 0; i < CST_COUNT(texts); i++) {
        struct kv_tensor v;

        (void)snprintf(name, sizeof(name), "%s.v", texts[i]);
        v = kv_load(folder, name);
        for (const char *const *key = keys; *key; key++) {
            struct kv_tensor k;
            struct sums s;

            (void)snprintf(name, sizeof(name), "%s.%s", texts[i], *key);
            k = kv_load(folder, name);
            s = check_tensors(&k, &v, layers, position, CASE_ROWS, !strcmp(*key, "kpost"));
            (void)snprintf(name, sizeof(name), "%s %s + v", texts[i], *key);
            report(name, &s);
            /* each tensor for itself, in the layout that flash attention off gives V */
            s = check_tensors(&k, &k, layers, position, CASE_TRANSPOSED, false);
            (void)snprintf(name, sizeof(name), "%s %s, transposed", texts[i], *key);
            report(name, &s);
            free(k.bytes);
        }
        free(v.bytes);
    }
}

static void excerpt(void **state) {
    static const char *const keys[] = { "kpost", NULL };
    char folder[PATH_MAX];

    (void)snprintf(folder, sizeof(folder), "%s/tests/data/kv", getenv("CST_SOURCE_ROOT"));
    check_folder(folder, 4, 128, keys);
}

static void data(void **state) {
    static const char *const keys[] = { "kpost", "kpre", "v", NULL };
    char folder[PATH_MAX];

    (void)snprintf(folder, sizeof(folder), "%s/kv", getenv("CISTERN_DATA"));
    check_folder(folder, 30, 0, keys);
}

int main(int argc, char **argv) {
    const struct CMUnitTest excerpt_tests[] = { cmocka_unit_test(excerpt) };
    const struct CMUnitTest data_tests[] = { cmocka_unit_test(data) };

    if (argc > 1 && !strcmp(argv[1], "excerpt"))
        return cmocka_run_group_tests(excerpt_tests, NULL, NULL);
    if (!getenv("CISTERN_DATA"))
        return cst_skip("CISTERN_DATA is not set");
    return cmocka_run_group_tests(data_tests, NULL, NULL);
}
