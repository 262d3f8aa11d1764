/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Golden frames, good and bad. Without arguments: each committed frame still decodes to what it
 * was made from, encoding still gives its bytes, and each bad one is still refused for its reason.
 * With --write DIR: makes them anew, with manifest.json for readers in other languages; only for a
 * new version of the format.
 */
#include "tests/lib/check.h"
#include "tests/unit/codec/side_case.h"

#include "codec/format.h"
#include "codec/preset.h"

#include "base/crc32c.h"
#include "base/macros.h"
#include "base/sha256.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum content { MODEL, RANDOM, ZERO, WAVES, SIDE, LEVEL };

struct good {
    const char *name;
    struct case_shape shape;
    struct cst_encode_params params;
    enum content content;
    const struct cst_layer *rope; /* how the keys of all layers are rotated, or NULL */
    bool old;                     /* of an encoder before this one's: kept, only decoded */
    bool outliers;                /* tokens 7 and 30 are 25 times as large as others */
    uint32_t learned; /* blocks that the side data beside the frame were learned from; 0: none */
};

#define BF16_ROWS                                                                                  \
    { CASE_ROWS, CST_DTYPE_BF16, 16, 2, 2, 40, 0 }

static const struct cst_layer plain = { .rope = CST_ROPE_NEOX,
                                        .rope_dims = 20,
                                        .rope_theta = 1e4f };
static const struct cst_layer linear = { .rope = CST_ROPE_NORM,
                                         .rope_dims = 40,
                                         .rope_theta = 1e5f,
                                         .rope_scaling = CST_SCALING_LINEAR,
                                         .scaling = { 4 } };
static const struct cst_layer yarn = { .rope = CST_ROPE_NEOX,
                                       .rope_dims = 36,
                                       .rope_theta = 1e6f,
                                       .rope_scaling = CST_SCALING_YARN,
                                       .scaling = { 4, 32, 1, 1 },
                                       .scaling_original_context = 32768 };
static const struct cst_layer llama3 = { .rope = CST_ROPE_NORM,
                                         .rope_dims = 32,
                                         .rope_theta = 5e5f,
                                         .rope_scaling = CST_SCALING_LLAMA3,
                                         .scaling = { 8, 1, 4 },
                                         .scaling_original_context = 8192 };

static const struct cst_layer narrow = { .rope = CST_ROPE_NEOX,
                                         .rope_dims = 8,
                                         .rope_theta = 1e4f };

static const struct good goods[] = {
    { "raw", { CASE_ROWS, CST_DTYPE_BF16, 16, 2, 1, 8, 3 }, { CST_PRESET_RAW, 16, 64, 0 }, MODEL },
    { "lossless-bf16", BF16_ROWS, { CST_PRESET_LOSSLESS, 16, 64, 0 }, MODEL, .old = true },
    { "lossless-f16-transposed",
      { CASE_TRANSPOSED, CST_DTYPE_F16, 32, 1, 2, 40, 0 },
      { CST_PRESET_LOSSLESS, 32, 64, 0 },
      MODEL },
    { "lossless-tail",
      { CASE_HEADS, CST_DTYPE_BF16, 64, 1, 2, 40, 2 },
      { CST_PRESET_LOSSLESS, 11, 128, 0 },
      MODEL,
      .old = true },
    { "exponents-bf16", BF16_ROWS, { CST_PRESET_LOSSLESS, 16, 64, 0 }, MODEL },
    { "exponents-tail",
      { CASE_HEADS, CST_DTYPE_BF16, 64, 1, 2, 40, 2 },
      { CST_PRESET_LOSSLESS, 43, 128, 0 },
      MODEL },
    { "exponents-transposed",
      { CASE_TRANSPOSED, CST_DTYPE_BF16, 32, 1, 1, 40, 0 },
      { CST_PRESET_LOSSLESS, 32, 128, 0 },
      MODEL },
    { "lossless-random",
      { CASE_ROWS, CST_DTYPE_F16, 16, 1, 1, 12, 1 },
      { CST_PRESET_LOSSLESS, 16, 0, 0 },
      RANDOM },
    { "lossless-zero", BF16_ROWS, { CST_PRESET_LOSSLESS, 1, 0, 0 }, ZERO },
    { "lossless-opaque",
      { CASE_OPAQUE, CST_DTYPE_OPAQUE, 16, 1, 2, 50, 0 },
      { CST_PRESET_LOSSLESS, 16, 0, 0 },
      MODEL },
    { "int8-bf16-sinks", BF16_ROWS, { CST_PRESET_INT8, 16, 0, 0.05f }, MODEL },
    { "int8-f16-tail",
      { CASE_TRANSPOSED, CST_DTYPE_F16, 32, 1, 2, 40, 0 },
      { CST_PRESET_INT8, 21, 2, 0.05f },
      MODEL },
    { "int8-f32-padded",
      { CASE_PADDED, CST_DTYPE_F32, 16, 1, 2, 36, 5 },
      { CST_PRESET_INT8, 16, 400, 0.05f },
      MODEL },
    { "int4-bf16-sinks", BF16_ROWS, { CST_PRESET_INT4, 16, 0, 1 }, MODEL },
    { "int4-f16-rotated",
      { CASE_HEADS, CST_DTYPE_F16, 16, 1, 2, 36, 0 },
      { CST_PRESET_INT4, 16, 90, 1 },
      MODEL,
      &yarn },
    { "kivi4-f16-tail",
      { CASE_TRANSPOSED, CST_DTYPE_F16, 64, 1, 2, 40, 0 },
      { CST_PRESET_KIVI4, 45, 2, 1 },
      MODEL,
      &plain },
    { "kivi2-bf16-linear", BF16_ROWS, { CST_PRESET_KIVI2, 16, 30000, 2 }, MODEL, &linear },
    { "turboquant-bf16-llama3",
      { CASE_ROWS, CST_DTYPE_BF16, 64, 1, 1, 80, 0 },
      { CST_PRESET_TURBOQUANT, 64, 100000, 1 },
      MODEL,
      &llama3 },
    { "turboquant-f32-yarn-3-2",
      { CASE_PADDED, CST_DTYPE_F32, 16, 1, 2, 36, 5 },
      { CST_PRESET_TURBOQUANT, 13, 2, 1, 3, 2 },
      MODEL,
      &yarn },
    { "polar-bf16-sinks",
      { CASE_ROWS, CST_DTYPE_BF16, 16, 1, 1, 80, 0 },
      { CST_PRESET_POLAR, 16, 1, 1 },
      MODEL,
      &plain },
    { "turboquant-bf16-qjl",
      { CASE_ROWS, CST_DTYPE_BF16, 64, 1, 1, 80, 0 },
      { CST_PRESET_TURBOQUANT, 40, 2, 2, 4, 2, .qjl = true },
      MODEL,
      &llama3 },
    { "turboquant-f16-5",
      { CASE_TRANSPOSED, CST_DTYPE_F16, 32, 1, 1, 112, 0 },
      { CST_PRESET_TURBOQUANT, 32, 64, 1, 5, 5 },
      MODEL },
    { "jolt-bf16",
      { CASE_ROWS, CST_DTYPE_BF16, 32, 2, 2, 40, 0 },
      { .preset = CST_PRESET_JOLT, .tokens = 32, .first_position = 64, .bound = 1 },
      WAVES,
      &plain },
    { "flashjolt-f32-sinks",
      { CASE_PADDED, CST_DTYPE_F32, 48, 2, 2, 20, 3 },
      { .preset = CST_PRESET_FLASHJOLT,
        .tokens = 45,
        .first_position = 1,
        .bound = 1,
        .group_layers = 1,
        .ratio = 4 },
      WAVES },
    { "jolt-plus-f16-yarn",
      { CASE_HEADS, CST_DTYPE_F16, 64, 3, 1, 36, 0 },
      { .preset = CST_PRESET_JOLT_PLUS, .tokens = 61, .first_position = 300, .bound = 1 },
      WAVES,
      &yarn },
    { "klt-bf16-neox",
      { CASE_ROWS, CST_DTYPE_BF16, 64, 2, 2, 12, 0 },
      { .preset = CST_PRESET_KLT, .tokens = 64, .first_position = 64, .bound = 1 },
      SIDE,
      &narrow,
      .learned = 14 },
    { "klt-f16-groups",
      { CASE_TRANSPOSED, CST_DTYPE_F16, 16, 1, 3, 96, 2 },
      { .preset = CST_PRESET_KLT, .tokens = 13, .bound = 1, .step = 0.2f },
      SIDE,
      .learned = 20 },
    { "deep-bf16-layers",
      { CASE_ROWS, CST_DTYPE_BF16, 64, 3, 2, 12, 0 },
      { .preset = CST_PRESET_DEEP, .tokens = 33, .first_position = 64, .bound = 1 },
      SIDE,
      &narrow,
      .learned = 14 },
    { "deep-f16-coordinates",
      { CASE_ROWS, CST_DTYPE_F16, 64, 1, 2, 136, 0 },
      { .preset = CST_PRESET_DEEP, .tokens = 9, .first_position = 64, .bound = 1 },
      SIDE,
      .learned = 20 },
    { "deep-bf16-sinks",
      { CASE_ROWS, CST_DTYPE_BF16, 64, 2, 2, 12, 0 },
      { .preset = CST_PRESET_DEEP, .tokens = 45, .first_position = 2, .bound = 1 },
      SIDE,
      &narrow,
      .learned = 14 },
    { "turboquant-bf16-spun",
      { CASE_ROWS, CST_DTYPE_BF16, 64, 1, 1, 80, 0 },
      { CST_PRESET_TURBOQUANT, 40, 2, 1 },
      LEVEL },
    { "turboquant-f16-spun-3-2",
      { CASE_HEADS, CST_DTYPE_F16, 16, 1, 2, 32, 3 },
      { CST_PRESET_TURBOQUANT, 16, 64, 1, 3, 2 },
      LEVEL },
    { "int8-f16-outliers",
      { CASE_TRANSPOSED, CST_DTYPE_F16, 32, 1, 2, 40, 0 },
      { CST_PRESET_INT8, 32, 64, 1 },
      MODEL,
      &plain,
      .outliers = true },
    { "turboquant-bf16-outliers",
      { CASE_HEADS, CST_DTYPE_BF16, 64, 1, 1, 80, 2 },
      { CST_PRESET_TURBOQUANT, 50, 2, 1 },
      MODEL,
      &llama3,
      .outliers = true },
    { "jolt-plus-bf16-outliers",
      { CASE_ROWS, CST_DTYPE_BF16, 32, 2, 2, 40, 0 },
      { .preset = CST_PRESET_JOLT_PLUS, .tokens = 32, .first_position = 64, .bound = 1 },
      WAVES,
      &plain,
      .outliers = true },
    { "klt-bf16-outliers",
      { CASE_ROWS, CST_DTYPE_BF16, 64, 2, 2, 12, 0 },
      { .preset = CST_PRESET_KLT, .tokens = 64, .first_position = 64, .bound = 1 },
      SIDE,
      &narrow,
      .outliers = true,
      .learned = 14 },
};

/* A bad frame is one of the good ones, lossless-bf16 if `of` is NULL, with bytes set from `at` on,
 * cut or grown, and checksums made right again where the damage is meant to lie behind them. */
struct bad {
    const char *name;
    int result;
    size_t at;
    uint8_t value;
    int grow;
    bool seal;
    const char *of;
};

enum { HEAD = sizeof(struct cst_frame_header), STREAMS = HEAD + 4 * 16 };

#define EXPONENTS "exponents-bf16"
#define TURBOQUANT "turboquant-bf16-llama3"
#define JOLT "jolt-bf16"
#define DEEP "deep-bf16-sinks"
#define OUTLIERS "jolt-plus-bf16-outliers"

static const struct bad bads[] = {
    { "bad-magic", CST_CODEC_E_CORRUPT, 0, 'X', 0, true },
    { "bad-version", CST_CODEC_E_VERSION, 4, 2, 0, true },
    { "bad-preset", CST_CODEC_E_VERSION, 6, 200, 0, true },
    { "bad-flags", CST_CODEC_E_VERSION, 7, 128, 0, true },
    { "bad-header-sum", CST_CODEC_E_CORRUPT, 12, 63, 0, false },
    { "bad-tokens", CST_CODEC_E_CORRUPT, 8, 17, 0, true },
    { "bad-block-sum", CST_CODEC_E_CORRUPT, 36, 0, 0, true },
    { "bad-layout", CST_CODEC_E_MISMATCH, 40, 0, 0, true },
    { "bad-table-sum", CST_CODEC_E_CORRUPT, HEAD + 12, 1, 0, false },
    { "bad-stage", CST_CODEC_E_VERSION, HEAD, 99, 0, true },
    { "bad-stage-version", CST_CODEC_E_VERSION, HEAD + 1, 2, 0, true },
    { "bad-length", CST_CODEC_E_CORRUPT, HEAD + 7, 255, 0, true },
    { "bad-coding", CST_CODEC_E_CORRUPT, STREAMS + 1, 3, 0, true },
    { "bad-plane-length", CST_CODEC_E_CORRUPT, STREAMS + 7, 1, 0, true },
    { "bad-code-lengths", CST_CODEC_E_CORRUPT, STREAMS + 8, 0xff, 0, true },
    { "bad-symbols", CST_CODEC_E_CORRUPT, STREAMS + 300, 0xff, 0, true },
    { "bad-exponents-flags", CST_CODEC_E_CORRUPT, STREAMS, 2, 0, true, EXPONENTS },
    { "bad-exponents-bits", CST_CODEC_E_CORRUPT, STREAMS + 1, 7, 0, true, EXPONENTS },
    { "bad-exponents-level", CST_CODEC_E_CORRUPT, STREAMS + 3, 4, 0, true, EXPONENTS },
    { "bad-exponents-lanes", CST_CODEC_E_CORRUPT, STREAMS + 4 + 50, 6, 0, true, EXPONENTS },
    { "bad-bits", CST_CODEC_E_VERSION, 52, 4, 0, true },
    { "bad-bits-turboquant", CST_CODEC_E_VERSION, 53, 9, 0, true, TURBOQUANT },
    { "bad-coded-flags", CST_CODEC_E_CORRUPT, HEAD + 32, 4, 0, true, TURBOQUANT },
    { "bad-coded-bits", CST_CODEC_E_CORRUPT, HEAD + 33, 9, 0, true, TURBOQUANT },
    { "bad-coded-exponent", CST_CODEC_E_CORRUPT, HEAD + 34, 81, 0, true, TURBOQUANT },
    { "bad-coded-sketch", CST_CODEC_E_CORRUPT, HEAD + 33, 1, 0, true, "turboquant-bf16-qjl" },
    { "bad-coded-group", CST_CODEC_E_CORRUPT, STREAMS + 3, 3, 0, true, "int4-bf16-sinks" },
    { "bad-coded-rope", CST_CODEC_E_CORRUPT, HEAD + 36, 0, 0, true, TURBOQUANT },
    { "bad-coded-scale", CST_CODEC_E_CORRUPT, STREAMS + 8 + 641, 0x7c, 0, true, "int4-bf16-sinks" },
    { "bad-layered-flag", CST_CODEC_E_VERSION, 7, 0, 0, true, JOLT },
    { "bad-tucker-flags", CST_CODEC_E_CORRUPT, STREAMS, 4, 0, true, JOLT },
    { "bad-tucker-no-factors", CST_CODEC_E_CORRUPT, STREAMS, 1, 0, true, JOLT },
    { "bad-tucker-bits", CST_CODEC_E_CORRUPT, STREAMS + 1, 9, 0, true, JOLT },
    { "bad-tucker-rank", CST_CODEC_E_CORRUPT, STREAMS + 9, 1, 0, true, JOLT },
    { "bad-tucker-scale", CST_CODEC_E_CORRUPT, STREAMS + 15, 0x7f, 0, true, JOLT },
    { "bad-tucker-sum", CST_CODEC_E_CORRUPT, STREAMS + 40, 0xaa, 0, false, JOLT },
    { "bad-klt-flags", CST_CODEC_E_CORRUPT, STREAMS, 9, 0, true, DEEP },
    { "bad-klt-predicted", CST_CODEC_E_CORRUPT, STREAMS, 5, 0, true, DEEP },
    { "bad-klt-reserved", CST_CODEC_E_CORRUPT, STREAMS + 2, 1, 0, true, DEEP },
    { "bad-klt-spread", CST_CODEC_E_CORRUPT, STREAMS + 1, 33, 0, true, DEEP },
    { "bad-klt-step", CST_CODEC_E_CORRUPT, STREAMS + 7, 0xff, 0, true, DEEP },
    { "bad-klt-rope", CST_CODEC_E_CORRUPT, STREAMS + 8, 0, 0, true, DEEP },
    { "bad-side-check", CST_CODEC_E_SIDE, 56, 0, 0, true, DEEP },
    { "bad-spun-sketch", CST_CODEC_E_CORRUPT, HEAD + 32, 128, 0, true, "turboquant-bf16-spun" },
    { "bad-outliers-count", CST_CODEC_E_CORRUPT, HEAD + 2, 3, 0, true, OUTLIERS },
    { "bad-outliers-stage", CST_CODEC_E_VERSION, HEAD + 2, 1, 0, true },
    { "bad-cut", CST_CODEC_E_CORRUPT, 0, 'C', -1, false },
    { "bad-cut-in-header", CST_CODEC_E_CORRUPT, 0, 'C', -100000, false },
};

static const char *const results[] = { "ok",       "small", "corrupt", "version",
                                       "mismatch", "bound", "preset",  "side" };

static size_t load(uint8_t *bytes, size_t cap, const char *name, const char *kind) {
    char path[PATH_MAX];
    size_t n;
    FILE *f;

    (void)snprintf(path, sizeof(path), "%s/tests/golden/frames/%s.%s", getenv("CST_SOURCE_ROOT"),
                   name, kind);
    f = fopen(path, "rbe");
    assert_non_null(f);
    n = fread(bytes, 1, cap, f);
    (void)fclose(f);
    return n;
}

/* A few waves over tokens and dimensions, different in each segment, and some noise. */
static void fill_waves(struct case_block *c, const struct good *g) {
    case_fill_model(c, g->shape.dims, g->params.tokens);
    for (uint32_t i = 0; i < c->desc.n_segments; i++) {
        for (uint32_t t = 0; t < g->params.tokens; t++) {
            for (uint32_t h = 0; h < g->shape.heads; h++) {
                for (uint32_t d = 0; d < g->shape.dims; d++)
                    case_set_value(c, i, t, h, d,
                                   .1f * case_value(c, c->block, i, t, h, d) +
                                       2 * sinf(.07f * (float)(t * (1 + h))) *
                                           cosf(.3f * (float)(d + i)) +
                                       sinf(.2f * (float)t + (float)d));
            }
        }
    }
}

/* All values of a head raised or lowered by the same, as no channel's mean tells. */
static void fill_levels(struct case_block *c, const struct good *g) {
    case_fill_model(c, g->shape.dims, g->params.tokens);
    for (uint32_t i = 0; i < c->desc.n_segments; i++) {
        for (uint32_t t = 0; t < g->params.tokens; t++) {
            for (uint32_t k = 0; k < g->shape.heads * g->shape.dims; k++) {
                uint32_t h = k / g->shape.dims, d = k % g->shape.dims;

                case_set_value(c, i, t, h, d,
                               case_value(c, c->block, i, t, h, d) +
                                   4 * sinf(1.3f * (float)t + (float)(h + i)));
            }
        }
    }
}

static void make_outliers(struct case_block *c, const struct good *g) {
    for (uint32_t i = 0; i < c->desc.n_segments; i++) {
        for (uint32_t d = 0; d < g->shape.heads * g->shape.dims; d++) {
            for (uint32_t t = 7; t <= 30; t += 23)
                case_set_value(
                    c, i, t, d / g->shape.dims, d % g->shape.dims,
                    25 * case_value(c, c->block, i, t, d / g->shape.dims, d % g->shape.dims));
        }
    }
}

/* Of the case that was made last. */
static struct side_case side;
static bool writing;

static size_t load(uint8_t *bytes, size_t cap, const char *name, const char *kind);

/* Those that lie beside the frame, unless they are to be made. */
static void take_side(struct case_block *c, const struct good *g) {
    size_t cap = cst_learn_bound(&c->desc);

    side_case_deinit(&side);
    if (writing) {
        side_case_learn(&side, c, g->learned, NULL);
        return;
    }
    side.bytes = malloc(cap);
    assert_non_null(side.bytes);
    side.len = load(side.bytes, cap, g->name, "side");
    assert_int_equal(side_case_parse(&side, &c->desc), 0);
    c->side = &side.side;
}

static struct case_block *make(const struct good *g) {
    struct cst_encode_params p = g->params;
    struct case_block *c = case_new(&g->shape);

    for (uint32_t l = 0; g->rope && l < c->desc.n_layers; l++) {
        struct cst_layer *layer = &c->desc.layers[l], was = *layer;

        *layer = *g->rope;
        layer->k_rotated = 1;
        layer->kv_heads = was.kv_heads;
        layer->head_dim_k = was.head_dim_k;
        layer->head_dim_v = was.head_dim_v;
    }
    case_room(c);
    if (g->content == MODEL)
        case_fill_model(c, g->shape.dims, g->params.tokens);
    else if (g->content == RANDOM)
        case_fill_random(c, g->shape.dims);
    else if (g->content == WAVES)
        fill_waves(c, g);
    else if (g->content == LEVEL)
        fill_levels(c, g);
    if (g->content == SIDE) {
        take_side(c, g);
        side_case_fill(c, 1, p.tokens);
        p.side = c->side;
    }
    if (g->outliers)
        make_outliers(c, g);
    assert_int_equal(case_encode(c, &p, NULL), 0);
    if (g->old)
        c->frame_len = load(c->frame, c->cap, g->name, "frame");
    return c;
}

static const struct good *good_of(const struct bad *b) {
    for (size_t i = 0; i < CST_COUNT(goods); i++) {
        if (b->of && !strcmp(goods[i].name, b->of))
            return &goods[i];
    }
    return &goods[1];
}

/* Those of layered frames are checked always. */
static void seal_streams(struct case_block *c) {
    const struct cst_frame_header *h = (const void *)c->frame;
    struct cst_stream_entry *table = (void *)(c->frame + HEAD);
    uint64_t at = HEAD + cst_load32(&h->n_streams) * sizeof(*table);

    for (uint32_t i = 0; cst_preset_is_layered(h->preset) && i < cst_load32(&h->n_streams); i++) {
        at = cst_align_up(at, CST_STREAM_ALIGN);
        cst_store32(&table[i].crc, cst_crc32c(0, c->frame + at, cst_load32(&table[i].length)));
        at += cst_load32(&table[i].length);
    }
}

static void spoil(struct case_block *c, const struct bad *b) {
    struct cst_frame_header *h = (void *)c->frame;
    size_t table = cst_load32(&h->n_streams) * sizeof(struct cst_stream_entry);

    c->frame[b->at] = b->value;
    if (b->seal) {
        seal_streams(c);
        cst_store32(&h->table_crc, cst_crc32c(0, h + 1, table));
        cst_store32(&h->header_crc,
                    cst_crc32c(0, h, offsetof(struct cst_frame_header, header_crc)));
    }
    c->frame_len = b->grow < -1 ? HEAD - 1 : c->frame_len + (size_t)b->grow;
}

/* ---- checking ---------------------------------------------------------------------------------
 */

static bool has_zstd(const struct case_block *c) {
    const struct cst_frame_header *h = (const void *)c->frame;
    const struct cst_stream_entry *table = (const void *)(h + 1);

    for (uint32_t i = 0; i < cst_load32(&h->n_streams); i++) {
        if (table[i].stage == CST_STAGE_ZSTD)
            return true;
    }
    return false;
}

/* docs/codec-format.md section 8, in c->out against the block that lies beside the frame. */
static void check_close(struct case_block *c, const struct good *g) {
    uint8_t *block = test_malloc(c->desc.block_bytes);

    assert_int_equal(load(block, c->desc.block_bytes, g->name, "block"), c->desc.block_bytes);
    for (uint32_t i = 0; i < c->desc.n_segments; i++) {
        uint32_t n = g->params.tokens * g->shape.heads * g->shape.dims;
        double energy = 0;

        for (int round = 0; round < 2; round++) {
            for (uint32_t k = 0; k < n; k++) {
                uint32_t d = k % g->shape.dims, h = k / g->shape.dims % g->shape.heads;
                uint32_t t = k / g->shape.dims / g->shape.heads;
                double x = (double)case_value(c, block, i, t, h, d);
                double y = (double)case_value(c, c->out, i, t, h, d);

                energy += round ? 0 : x * x / n;
                if (round)
                    assert_true(fabs(x - y) <= 0x1p-8 * fmax(fabs(x), sqrt(energy)));
            }
        }
    }
    test_free(block);
}

/* Encoding and decoding may differ by what dense products make of the machine. */
static void check_layered(struct case_block *c, const struct good *g) {
    assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
    c->frame_len = load(c->frame, c->cap, g->name, "frame");
    assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
    check_close(c, g);
}

static void check_good(void **state) {
    const struct good *g = *state;
    cst_auto(case_freep) struct case_block *c = make(g);
    uint8_t *bytes, *decoded;
    size_t n;

    if (cst_preset_is_layered(g->params.preset)) {
        check_layered(c, g);
        return;
    }
    bytes = test_malloc(c->cap);
    decoded = test_malloc(c->desc.block_bytes);
    n = load(bytes, c->cap, g->name, "frame");

    if (!has_zstd(c)) { /* whose bytes are those of its version */
        assert_int_equal(n, c->frame_len);
        assert_memory_equal(bytes, c->frame, n);
    }
    assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
    memcpy(decoded, c->out, c->desc.block_bytes);
    memcpy(c->frame, bytes, n);
    c->frame_len = n;
    assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
    assert_memory_equal(c->out, decoded, c->desc.block_bytes);
    if (g->params.preset <= CST_PRESET_LOSSLESS)
        assert_memory_equal(c->out, c->block, c->desc.block_bytes);
    test_free(bytes);
    test_free(decoded);
}

static void check_bad(void **state) {
    const struct bad *b = *state;
    cst_auto(case_freep) struct case_block *c = make(good_of(b));

    c->frame_len = load(c->frame, c->cap, b->name, "frame");
    assert_int_equal(case_decode(c, 0, UINT32_MAX), b->result);
}

/* ---- writing ----------------------------------------------------------------------------------
 */

static void save(const char *dir, const char *name, const char *kind, const uint8_t *bytes,
                 size_t n) {
    char path[PATH_MAX];
    FILE *f;

    (void)snprintf(path, sizeof(path), "%s/%s.%s", dir, name, kind);
    f = fopen(path, "wbe");
    if (!f || fwrite(bytes, 1, n, f) != n || fclose(f))
        exit(1);
}

static void describe_layer(FILE *f, const struct cst_layer *l, uint32_t i) {
    fprintf(f, "%s{\"kv_heads\": %u, \"head_dim_k\": %u, \"head_dim_v\": %u", i ? ",\n   " : "",
            l->kv_heads, l->head_dim_k, l->head_dim_v);
    if (l->k_rotated)
        fprintf(f,
                ", \"k_rotated\": 1,\n    \"rope\": %u, \"rope_dims\": %u, \"rope_theta\": %g, "
                "\"rope_scaling\": %u, \"scaling\": [%g, %g, %g, %g], "
                "\"scaling_original_context\": %u",
                l->rope, l->rope_dims, (double)l->rope_theta, l->rope_scaling,
                (double)l->scaling[0], (double)l->scaling[1], (double)l->scaling[2],
                (double)l->scaling[3], l->scaling_original_context);
    fprintf(f, "}");
}

static void describe(FILE *f, const struct case_block *c) {
    const struct cst_descriptor *d = &c->desc;

    fprintf(f, "  \"block_tokens\": %u, \"block_bytes\": %llu,\n  \"layers\": [", d->block_tokens,
            (unsigned long long)d->block_bytes);
    for (uint32_t i = 0; i < d->n_layers; i++)
        describe_layer(f, &d->layers[i], i);
    fprintf(f, "],\n  \"segments\": [");
    for (uint32_t i = 0; i < d->n_segments; i++) {
        const struct cst_segment *s = &d->segments[i];

        fprintf(f,
                "%s\n   {\"layer\": %u, \"tensor\": %u, \"dtype\": %u, \"offset\": %llu, "
                "\"length\": %llu, \"token_stride\": %llu, \"head_stride\": %llu, "
                "\"dim_stride\": %llu}",
                i ? "," : "", s->layer, s->tensor, s->dtype, (unsigned long long)s->offset,
                (unsigned long long)s->length, (unsigned long long)s->token_stride,
                (unsigned long long)s->head_stride, (unsigned long long)s->dim_stride);
    }
    fprintf(f, "]");
}

static void entry(FILE *f, const struct case_block *c, const char *name, int result,
                  const char *learned) {
    fprintf(f, "%s\n {\"file\": \"%s.frame\", \"result\": \"%s\",\n", ftell(f) > 1 ? "," : "", name,
            results[result]);
    if (result == 0) {
        uint8_t sum[CST_SHA256_SIZE];

        cst_sha256(c->out, c->desc.block_bytes, sum);
        fprintf(f, "  \"decoded_sha256\": \"");
        for (size_t i = 0; i < sizeof(sum); i++)
            fprintf(f, "%02x", sum[i]);
        fprintf(f, "\",\n");
    }
    if (learned)
        fprintf(f, "  \"side\": \"%s.side\",\n", learned);
    describe(f, c);
    fprintf(f, "}");
}

static int write_all(const char *dir) {
    char path[PATH_MAX];
    FILE *f;

    (void)snprintf(path, sizeof(path), "%s/manifest.json", dir);
    f = fopen(path, "we");
    if (!f)
        return 1;
    fprintf(f, "[");
    for (size_t i = 0; i < CST_COUNT(goods); i++) {
        struct case_block *c = make(&goods[i]);

        if (case_decode(c, 0, UINT32_MAX))
            return 1;
        save(dir, goods[i].name, "frame", c->frame, c->frame_len);
        if (goods[i].params.preset > CST_PRESET_INT8)
            save(dir, goods[i].name, "block", c->out, c->desc.block_bytes);
        if (c->side)
            save(dir, goods[i].name, "side", side.bytes, side.len);
        entry(f, c, goods[i].name, 0, c->side ? goods[i].name : NULL);
        case_free(c);
    }
    for (size_t i = 0; i < CST_COUNT(bads); i++) {
        struct case_block *c = make(good_of(&bads[i]));

        spoil(c, &bads[i]);
        save(dir, bads[i].name, "frame", c->frame, c->frame_len);
        entry(f, c, bads[i].name, bads[i].result, c->side ? good_of(&bads[i])->name : NULL);
        case_free(c);
    }
    fprintf(f, "\n]\n");
    return fclose(f) ? 1 : 0;
}

int main(int argc, char **argv) {
    int failed;

    writing = argc == 3;
    if (argc == 3 && !strcmp(argv[1], "--write"))
        return write_all(argv[2]);
    failed = cst_run_rows(goods, check_good) + cst_run_rows(bads, check_bad);
    side_case_deinit(&side);
    return failed;
}
