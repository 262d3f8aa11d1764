/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the fixture. No state. */
#include "tests/unit/codec/kv_fixture.h"

#include "tests/lib/check.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

struct kv_tensor kv_load(const char *folder, const char *name) {
    struct kv_tensor t = { NULL, 0 };
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

struct case_block *kv_document(const char *folder, const char *text, const char *keys,
                               bool rotated) {
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_F32, KV_TOKENS, KV_LAYERS,
                                      KV_HEADS,  KV_DIMS,       0 };
    struct case_block *c = case_new(&shape);

    for (uint32_t tensor = 0; tensor < 2; tensor++) {
        struct kv_tensor t;
        char name[64];

        (void)snprintf(name, sizeof(name), "%s.%s", text, tensor ? "v" : keys);
        t = kv_load(folder, name);
        assert_int_equal(t.size, (size_t)KV_LAYERS * KV_TOKENS * KV_ROW * 2);
        for (uint32_t l = 0; l < KV_LAYERS; l++)
            cst_codec_ops()->to_f32[CST_DTYPE_BF16](
                (float *)(void *)(c->block + c->desc.segments[2 * l + tensor].offset),
                t.bytes + (size_t)l * KV_TOKENS * KV_ROW * 2, (size_t)KV_TOKENS * KV_ROW);
        free(t.bytes);
    }
    if (rotated)
        case_rotate_keys(c, CST_ROPE_NORM, KV_DIMS);
    for (uint32_t l = 0; l < KV_LAYERS; l++)
        c->desc.layers[l].rope_theta = 1e5f;
    return c;
}

double kv_nmse(const uint8_t *segment, const uint8_t *decoded) {
    const float *x = (const void *)segment, *y = (const void *)decoded;
    double errors = 0, energy = 0;

    for (size_t i = CST_SINK_TOKENS * KV_ROW; i < (size_t)KV_TOKENS * KV_ROW; i++) {
        errors += ((double)x[i] - (double)y[i]) * ((double)x[i] - (double)y[i]);
        energy += (double)x[i] * (double)x[i];
    }
    return errors / energy;
}
