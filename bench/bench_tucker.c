/* SPDX-License-Identifier: Apache-2.0 */
/*
 * codec.flashjolt.encode_speedup: jolt's time over flashjolt's to encode one block of 1,024 tokens
 * of a real model's cache, both 3x with the default cells. And what the sketch costs in error:
 * codec.flashjolt.error_over_jolt, of the root of the summed relative squared errors of keys and
 * values. The cache is $CISTERN_DATA/kv, keys as they were before their rotation.
 */
#include "bench/bench.h"
#include "bench/bench_cache.h"
#include "bench/benches.h"

#include "base/layout.h"
#include "base/macros.h"
#include "base/mem.h"
#include "codec/codec.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 30, TOKENS = 1024, HEADS = 3, DIMS = 64, ROW = HEADS * DIMS * 2 };
enum { PART = TOKENS * ROW };

struct block {
    struct cst_descriptor desc;
    struct cst_layer layers[LAYERS];
    struct cst_segment segments[2 * LAYERS];
    uint8_t *bytes, *out, *frame;
    size_t bound, len, work_len;
    void *work;
};

struct side {
    struct block *block;
    uint32_t preset;
};

static void lay_out(struct block *b) {
    for (uint32_t i = 0; i < 2 * LAYERS; i++) {
        b->layers[i / 2] =
            (struct cst_layer){ .kv_heads = HEADS, .head_dim_k = DIMS, .head_dim_v = DIMS };
        b->segments[i] = (struct cst_segment){ .layer = i / 2,
                                               .tensor = i % 2 ? CST_TENSOR_V : CST_TENSOR_K,
                                               .dtype = CST_DTYPE_BF16,
                                               .offset = (uint64_t)i * PART,
                                               .length = PART,
                                               .token_stride = ROW,
                                               .head_stride = DIMS * 2,
                                               .dim_stride = 2 };
    }
    b->desc = (struct cst_descriptor){ .block_tokens = TOKENS,
                                       .block_bytes = (uint64_t)2 * LAYERS * PART,
                                       .tp_size = 1,
                                       .n_layers = LAYERS,
                                       .n_segments = 2 * LAYERS,
                                       .layers = b->layers,
                                       .segments = b->segments };
}

/* Two texts, one after the other. */
static int load(struct block *b, const char *folder) {
    static const char *const names[2][2] = { { "prose.kpre", "prose.v" },
                                             { "code.kpre", "code.v" } };

    for (uint32_t text = 0; text < 2; text++) {
        for (uint32_t tensor = 0; tensor < 2; tensor++) {
            size_t size = 0;
            uint8_t *bytes = bench_cache_tensor(&size, folder, names[text][tensor]);
            bool right = bytes && size == (size_t)LAYERS * PART / 2;

            for (uint32_t l = 0; right && l < LAYERS; l++)
                memcpy(b->bytes + (size_t)(2 * l + tensor) * PART + (size_t)text * (PART / 2),
                       bytes + (size_t)l * (PART / 2), PART / 2);
            cst_free(bytes);
            if (!right)
                return -ENOENT;
        }
    }
    return 0;
}

static int block_init(struct block *b) {
    lay_out(b);
    b->bound = cst_frame_bound(&b->desc);
    b->work_len = cst_codec_work_size(&b->desc, CST_PRESET_JOLT);
    b->bytes = cst_malloc(b->desc.block_bytes);
    b->out = cst_malloc(b->desc.block_bytes);
    b->frame = cst_malloc(b->bound);
    b->work = aligned_alloc(64, cst_align_up(b->work_len, 64));
    return b->bytes && b->out && b->frame && b->work ? 0 : -ENOMEM;
}

static void block_deinit(struct block *b) {
    cst_free(b->bytes);
    cst_free(b->out);
    cst_free(b->frame);
    free(b->work);
}

static int run_encode(void *arg, unsigned ops) {
    const struct side *side = arg;
    const struct cst_encode_params p = { .preset = side->preset, .tokens = TOKENS, .bound = 1 };
    struct block *b = side->block;

    while (ops--) {
        if (cst_frame_encode(b->frame, b->bound, b->bytes, &b->desc, &p, b->work, b->work_len,
                             &b->len, NULL))
            return -EINVAL;
    }
    return 0;
}

/* Root of the summed errors of all segments; negative: it failed. */
static double error_of(struct side *side) {
    struct block *b = side->block;
    double sum = 0;

    if (run_encode(side, 1) || cst_frame_decode(b->out, b->desc.block_bytes, b->frame, b->len,
                                                &b->desc, &CST_DECODE_ALL, b->work, b->work_len))
        return -1;
    for (size_t at = 0; at < b->desc.block_bytes; at += PART) {
        struct bench_error e = { 0 };

        bench_error_add(&e, b->bytes + at, b->out + at, PART);
        sum += e.errors / e.energy;
    }
    return sqrt(sum / (2 * LAYERS));
}

static int measure(struct block *b) {
    struct side jolt = { b, CST_PRESET_JOLT }, flash = { b, CST_PRESET_FLASHJOLT };
    struct cst_figure figure = { .name = "codec.flashjolt.encode_speedup",
                                 .unit = "ratio",
                                 .sense = CST_AT_LEAST,
                                 .target = 5 };
    double slow = error_of(&jolt), fast = error_of(&flash);
    struct cst_compared m;
    int r = slow < 0 || fast < 0 ? -EINVAL
                                 : cst_compare(&m, (struct cst_side){ run_encode, &flash },
                                               (struct cst_side){ run_encode, &jolt });

    if (r)
        return r;
    figure.value = m.b / m.a;
    cst_report(&figure, "\"jolt_ms\": %.1f, \"flashjolt_ms\": %.1f, \"pairs\": [%.2f, %.2f]",
               1e3 * m.b, 1e3 * m.a, 1 / m.high, 1 / m.low);
    figure = (struct cst_figure){ .name = "codec.flashjolt.error_over_jolt",
                                  .unit = "ratio",
                                  .sense = CST_NO_TARGET,
                                  .value = fast / slow };
    cst_report(&figure, "\"jolt\": %.4f, \"flashjolt\": %.4f", slow, fast);
    return 0;
}

int cst_bench_tucker(void) {
    const char *data = getenv("CISTERN_DATA");
    struct block b = { .bound = 0 };
    char folder[PATH_MAX];
    int r;

    if (!data) {
        cst_report_skipped("codec.flashjolt.encode_speedup", "CISTERN_DATA is not set");
        return 0;
    }
    (void)snprintf(folder, sizeof(folder), "%s/kv", data);
    r = block_init(&b);
    if (!r)
        r = load(&b, folder);
    if (!r)
        r = cst_pin();
    if (!r)
        r = measure(&b);
    block_deinit(&b);
    return r;
}
