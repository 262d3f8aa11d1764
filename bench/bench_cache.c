/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the tensors' files and cuts them into blocks. One thread. */
#include "bench/bench_cache.h"

#include "base/mem.h"
#include "codec/dtype.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

uint8_t *bench_cache_tensor(size_t *size, const char *folder, const char *name) {
    char path[PATH_MAX];
    uint8_t *packed = NULL, *bytes = NULL;
    long n = 0;
    FILE *f;

    (void)snprintf(path, sizeof(path), "%s/%s.bf16.zst", folder, name);
    f = fopen(path, "re");
    if (f && !fseek(f, 0, SEEK_END) && (n = ftell(f)) > 0) {
        rewind(f);
        packed = cst_malloc((size_t)n);
    }
    if (packed && fread(packed, 1, (size_t)n, f) == (size_t)n) {
        *size = ZSTD_getFrameContentSize(packed, (size_t)n);
        bytes = *size < 64 << 20 ? cst_malloc(*size) : NULL;
        if (bytes && ZSTD_decompress(bytes, *size, packed, (size_t)n) != *size)
            bytes = cst_free(bytes);
    }
    if (f)
        (void)fclose(f);
    cst_free(packed);
    return bytes;
}

static int cache_layout(struct bench_cache *c, uint32_t layers) {
    c->desc = (struct cst_descriptor){
        .block_tokens = BENCH_TOKENS,
        .block_bytes = (uint64_t)2 * layers * BENCH_PART,
        .tp_size = 1,
        .n_layers = layers,
        .n_segments = 2 * layers,
        .layers = cst_calloc(layers, sizeof(struct cst_layer)),
        .segments = cst_calloc(2 * layers, sizeof(struct cst_segment)),
    };
    if (!c->desc.layers || !c->desc.segments)
        return -ENOMEM;
    for (uint32_t i = 0; i < 2 * layers; i++) {
        c->desc.layers[i / 2] = (struct cst_layer){ .kv_heads = BENCH_HEADS,
                                                    .head_dim_k = BENCH_DIMS,
                                                    .head_dim_v = BENCH_DIMS,
                                                    .rope = CST_ROPE_NORM,
                                                    .k_rotated = 1,
                                                    .rope_dims = BENCH_DIMS,
                                                    .rope_theta = 1e5f };
        c->desc.segments[i] = (struct cst_segment){
            .layer = i / 2,
            .tensor = i % 2 ? CST_TENSOR_V : CST_TENSOR_K,
            .dtype = CST_DTYPE_BF16,
            .offset = (uint64_t)i * BENCH_PART,
            .length = BENCH_PART,
            .token_stride = BENCH_ROW,
            .head_stride = BENCH_DIMS * 2,
            .dim_stride = 2,
        };
    }
    return 0;
}

static int cache_append(struct bench_cache *c, const char *folder, const char *text) {
    uint64_t block_bytes = c->desc.block_bytes;
    size_t size[2] = { 0 }, blocks;
    uint8_t *tensor[2], *grown;
    char name[64];

    for (int i = 0; i < 2; i++) {
        (void)snprintf(name, sizeof(name), "%s.%s", text, i ? "v" : "kpost");
        tensor[i] = bench_cache_tensor(&size[i], folder, name);
    }
    blocks = size[0] / (BENCH_PART * c->desc.n_layers);
    c->per_text = blocks;
    grown = cst_realloc(c->blocks, (c->n + blocks) * block_bytes);
    if (grown)
        c->blocks = grown;
    if (grown && tensor[0] && tensor[1] && size[0] == size[1]) {
        for (size_t b = 0; b < blocks; b++, c->n++) {
            for (uint32_t i = 0; i < c->desc.n_segments; i++)
                memcpy(c->blocks + c->n * block_bytes + (size_t)i * BENCH_PART,
                       tensor[i % 2] + ((i / 2) * blocks + b) * BENCH_PART, BENCH_PART);
        }
    }
    cst_free(tensor[0]);
    cst_free(tensor[1]);
    return grown && c->n ? 0 : -ENOENT;
}

int bench_cache_layout(struct bench_cache *c) {
    return cache_layout(c, getenv("CISTERN_DATA") ? 30 : 4);
}

int bench_cache_load(struct bench_cache *c) {
    const char *data = getenv("CISTERN_DATA"), *root = getenv("CST_SOURCE_ROOT");
    char folder[PATH_MAX];
    int r = bench_cache_layout(c);

    c->first_position = data ? 0 : 128;
    if (data)
        (void)snprintf(folder, sizeof(folder), "%s/kv", data);
    else
        (void)snprintf(folder, sizeof(folder), "%s/tests/data/kv", root ? root : ".");
    if (!r)
        r = cache_append(c, folder, "prose");
    if (!r)
        r = cache_append(c, folder, "code");
    return r;
}

void bench_cache_deinit(struct bench_cache *c) {
    cst_free(c->desc.layers);
    cst_free(c->desc.segments);
    cst_free(c->blocks);
}

uint32_t bench_cache_position(const struct bench_cache *c, size_t block) {
    return c->first_position + (uint32_t)(block % c->n % c->per_text) * BENCH_TOKENS;
}

void bench_error_add(struct bench_error *e, const uint8_t *x, const uint8_t *y, size_t n) {
    for (size_t at = 0; at < n; at += 2) {
        double v = (double)cst_dtype_load(CST_DTYPE_BF16, x + at);
        double d = v - (double)cst_dtype_load(CST_DTYPE_BF16, y + at);

        e->errors += d * d;
        e->energy += v * v;
    }
}
