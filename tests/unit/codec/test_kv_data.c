/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The presets on caches of a real model, cut into 64-token blocks as an engine stores them:
 * lossless is exact and saves what the format promises, int8 stays within the near-lossless bound.
 *
 * usage: test-kv-data excerpt     the committed excerpt
 *        test-kv-data data        all of $CISTERN_DATA/kv
 */
#include "tests/lib/check.h"
#include "tests/unit/codec/codec_case.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

enum { TOKENS = 64, HEADS = 3, DIMS = 64, PART = TOKENS * HEADS * DIMS * 2 };

/* A file holds [layer][token][head][dim] in bf16. */
struct tensor {
    uint8_t *bytes;
    size_t size;
};

static struct tensor load(const char *folder, const char *name) {
    struct tensor t = { NULL, 0 };
    char path[PATH_MAX];
    uint8_t *packed;
    long n;
    FILE *f;

    (void)snprintf(path, sizeof(path), "%s/%s.bf16.zst", folder, name);
    f = fopen(path, "rbe");
    if (!f) {
        print_error("%s is missing\n", path);
        fail();
    }
    (void)fseek(f, 0, SEEK_END);
    n = ftell(f);
    rewind(f);
    packed = malloc((size_t)n);
    assert_int_equal(fread(packed, 1, (size_t)n, f), n);
    (void)fclose(f);
    t.size = ZSTD_getFrameContentSize(packed, (size_t)n);
    assert_true(t.size < 64 << 20);
    t.bytes = malloc(t.size);
    assert_int_equal(ZSTD_decompress(t.bytes, t.size, packed, (size_t)n), t.size);
    free(packed);
    return t;
}

struct sums {
    uint64_t raw, lossless, int8;
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
}

/* Blocks of the two tensors, whose first token is at `position`, in one order of axes. */
static struct sums check_tensors(const struct tensor *k, const struct tensor *v, uint32_t layers,
                                 uint32_t position, enum case_order order) {
    const struct case_shape shape = { order, CST_DTYPE_BF16, TOKENS, layers, HEADS, DIMS, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    size_t tokens = k->size / layers / (PART / TOKENS);
    struct sums sums = { 0 };

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
    }
    return sums;
}

static void report(const char *what, const struct sums *s) {
    print_message("%-28s lossless %.4f  int8 %.4f  error %.4f\n", what,
                  (double)s->raw / (double)s->lossless, (double)s->raw / (double)s->int8,
                  (double)s->error);
    assert_true((double)s->raw >= 1.4 * (double)s->lossless);
    /* 16 bits over 8 and a quarter; four of the first 64 tokens stay as they are */
    assert_true((double)s->raw >= 1.85 * (double)s->int8);
    assert_true(s->error > 0 && s->error <= 0.05f);
}

static void check_folder(const char *folder, uint32_t layers, uint32_t position,
                         const char *const *keys) {
    static const char *const texts[] = { "prose", "code" };
    char name[64];

    for (size_t i = 0; i < CST_COUNT(texts); i++) {
        struct tensor v;

        (void)snprintf(name, sizeof(name), "%s.v", texts[i]);
        v = load(folder, name);
        for (const char *const *key = keys; *key; key++) {
            struct tensor k;
            struct sums s;

            (void)snprintf(name, sizeof(name), "%s.%s", texts[i], *key);
            k = load(folder, name);
            s = check_tensors(&k, &v, layers, position, CASE_ROWS);
            (void)snprintf(name, sizeof(name), "%s %s + v", texts[i], *key);
            report(name, &s);
            /* each tensor for itself, in the layout that flash attention off gives V */
            s = check_tensors(&k, &k, layers, position, CASE_TRANSPOSED);
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
