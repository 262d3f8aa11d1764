/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames over every layout: exact presets give each byte back, lossy ones stay within the bound,
 * parts of a block decode alone, and nothing that isn't the frame decodes.
 */
#include "tests/lib/check.h"
#include "tests/unit/codec/codec_case.h"

#include "codec/format.h"
#include "codec/preset.h"

#include "base/crc32c.h"

#include <math.h>
#include <string.h>

static const struct row {
    const char *name;
    struct case_shape shape;
    uint32_t tokens;
} rows[] = {
    { "rows bf16", { CASE_ROWS, CST_DTYPE_BF16, 64, 3, 3, 64, 0 }, 64 },
    { "rows f16", { CASE_ROWS, CST_DTYPE_F16, 64, 2, 2, 80, 0 }, 64 },
    { "rows f32", { CASE_ROWS, CST_DTYPE_F32, 32, 2, 1, 64, 0 }, 32 },
    { "transposed bf16", { CASE_TRANSPOSED, CST_DTYPE_BF16, 64, 2, 3, 64, 0 }, 64 },
    { "transposed f16, gaps", { CASE_TRANSPOSED, CST_DTYPE_F16, 32, 2, 2, 20, 5 }, 32 },
    { "heads bf16", { CASE_HEADS, CST_DTYPE_BF16, 64, 2, 4, 32, 16 }, 64 },
    { "padded bf16", { CASE_PADDED, CST_DTYPE_BF16, 64, 2, 2, 48, 3 }, 64 },
    { "pairs bf16", { CASE_PAIRS, CST_DTYPE_BF16, 16, 2, 2, 32, 0 }, 16 },
    { "opaque", { CASE_OPAQUE, CST_DTYPE_OPAQUE, 64, 2, 2, 100, 1 }, 64 },
    { "one head of one dim", { CASE_ROWS, CST_DTYPE_BF16, 16, 1, 1, 1, 0 }, 16 },
    { "tail of rows", { CASE_ROWS, CST_DTYPE_BF16, 64, 2, 3, 64, 0 }, 9 },
    { "tail of 1, transposed", { CASE_TRANSPOSED, CST_DTYPE_BF16, 64, 2, 3, 64, 2 }, 1 },
    { "tail of heads", { CASE_HEADS, CST_DTYPE_F16, 64, 2, 3, 64, 0 }, 17 },
    { "tail of padded", { CASE_PADDED, CST_DTYPE_BF16, 64, 2, 2, 48, 3 }, 5 },
    { "tail of f32", { CASE_TRANSPOSED, CST_DTYPE_F32, 32, 2, 2, 20, 0 }, 6 },
    { "tail of opaque", { CASE_OPAQUE, CST_DTYPE_OPAQUE, 64, 2, 2, 100, 0 }, 3 },
};

static void check_info(const struct case_block *c, const struct cst_encode_params *p,
                       const struct cst_frame_info *info, const uint8_t *decoded) {
    struct cst_frame_info again;

    assert_int_equal(cst_frame_inspect(c->frame, sizeof(struct cst_frame_header), &again), 0);
    assert_memory_equal(&again, info, offsetof(struct cst_frame_info, layout_crc) + 4);
    assert_int_equal(info->version, 1);
    assert_int_equal(info->preset, p->preset);
    assert_int_equal(info->tokens, p->tokens);
    assert_int_equal(info->first_position, p->first_position);
    assert_int_equal(info->block_bytes, c->desc.block_bytes);
    assert_int_equal(info->frame_bytes, c->frame_len);
    assert_int_equal(info->block_crc,
                     info->layered ? 0 : cst_crc32c(0, decoded, c->desc.block_bytes));
    assert_true(c->frame_len <= c->cap);
}

static void exact_presets_give_every_byte_back(void **state) {
    const struct row *row = *state;
    cst_auto(case_freep) struct case_block *c = case_new(&row->shape);

    for (uint32_t preset = CST_PRESET_RAW; preset <= CST_PRESET_LOSSLESS; preset++) {
        struct cst_encode_params p = { preset, row->tokens, 128, 0 };
        struct cst_frame_info info;

        for (int content = 0; content < 3; content++) {
            if (content == 0)
                memset(c->block, 0, c->desc.block_bytes);
            else if (content == 1)
                case_fill_model(c, 1, row->tokens);
            else
                case_fill_random(c, 2);
            assert_int_equal(case_encode(c, &p, &info), 0);
            assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
            assert_memory_equal(c->out, c->block, c->desc.block_bytes);
            check_info(c, &p, &info, c->block);
            assert_true(info.error == 0);
        }
    }
}

/* Largest error that a preset makes of what a model has, in case_fill_model()'s rows. */
static const float worst[CST_PRESETS] = {
    [CST_PRESET_INT8] = 0.02f,     [CST_PRESET_INT4] = 0.3f,       [CST_PRESET_KIVI4] = 0.2f,
    [CST_PRESET_KIVI2] = 1.0f,     [CST_PRESET_TURBOQUANT] = 0.2f, [CST_PRESET_JOLT] = 0.7f,
    [CST_PRESET_FLASHJOLT] = 0.7f, [CST_PRESET_JOLT_PLUS] = 0.7f,  [CST_PRESET_POLAR] = 1.0f
};

static void check_sinks_and_holes(const struct case_block *c, uint32_t sinks, uint32_t tokens) {
    for (uint32_t i = 0; i < c->desc.n_segments; i++) {
        for (uint32_t t = 0; t < c->desc.block_tokens; t++) {
            for (uint32_t d = 0; d < c->desc.layers[0].head_dim_k; d++) {
                if (t < sinks || t >= tokens)
                    assert_true(case_value(c, c->block, i, t, 0, d) ==
                                case_value(c, c->out, i, t, 0, d));
            }
        }
    }
}

static void check_lossy(struct case_block *c, const struct row *row, uint32_t preset) {
    struct cst_encode_params p = { CST_PRESET_LOSSLESS, row->tokens, 1, worst[preset] };
    struct cst_frame_info info;
    size_t exact;

    assert_int_equal(case_encode(c, &p, &info), 0);
    exact = c->frame_len;
    p.preset = preset;
    assert_int_equal(case_encode(c, &p, &info), 0);
    assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
    check_info(c, &p, &info, c->out);
    assert_true(info.error >= 0 && info.error <= worst[preset]);
    if (row->shape.order == CASE_OPAQUE || row->shape.order == CASE_PAIRS) {
        assert_memory_equal(c->out, c->block, c->desc.block_bytes); /* nothing that they can do */
        assert_int_equal(c->frame_len, exact);
        return;
    }
    if (row->tokens == row->shape.block_tokens && row->shape.dims > 1 &&
        (preset != CST_PRESET_POLAR || row->shape.dims % 16 == 0))
        assert_true(c->frame_len < exact);
    check_sinks_and_holes(c, 3, row->tokens); /* positions 1, 2, 3; missing */
    if (info.error == 0)
        return; /* only sinks */
    p.bound = info.error / 2;
    assert_int_equal(case_encode(c, &p, &info), CST_CODEC_E_BOUND);
    p.bound = 0;
    assert_int_equal(case_encode(c, &p, &info), CST_CODEC_E_BOUND);
    p.first_position = 4; /* no sinks: more coded, still within the bound */
    p.bound = worst[preset];
    exact = c->frame_len;
    assert_int_equal(case_encode(c, &p, &info), 0);
    assert_true(c->frame_len < exact || cst_preset_is_layered(preset)); /* those have a budget */
}

static void lossy_presets_keep_sinks_and_bound(void **state) {
    const struct row *row = *state;
    cst_auto(case_freep) struct case_block *c = case_new(&row->shape);

    case_fill_model(c, 7, row->tokens);
    CASE_EACH_PRESET (preset, CST_PRESET_INT8) {
        check_lossy(c, row, preset);
    }
}

static void layer_ranges_decode_alone(void **state) {
    const struct row *row = *state;
    cst_auto(case_freep) struct case_block *c = case_new(&row->shape);
    uint32_t layers = row->shape.n_layers;

    CASE_EACH_PRESET (preset, 0) {
        struct cst_encode_params p = { preset, row->tokens, 0, 1 };
        uint8_t *whole = test_malloc(c->desc.block_bytes);

        case_fill_model(c, preset, row->tokens);
        assert_int_equal(case_encode(c, &p, NULL), 0);
        assert_int_equal(case_decode(c, 0, layers), 0);
        memcpy(whole, c->out, c->desc.block_bytes);
        for (uint32_t first = 0; first <= layers; first++) {
            for (uint32_t n = 0; n <= layers + 1; n++) {
                if (first == 0 && n >= layers)
                    continue;
                assert_int_equal(case_decode(c, first, n), 0);
                for (uint32_t i = 0; i < c->desc.n_segments; i++) {
                    const struct cst_segment *seg = &c->desc.segments[i];

                    if (seg->layer >= first && seg->layer - first < n) {
                        assert_memory_equal(c->out + seg->offset, whole + seg->offset, seg->length);
                        memset(c->out + seg->offset, 0xa5, seg->length);
                    }
                }
                for (uint64_t i = 0; i < c->desc.block_bytes; i++)
                    assert_int_equal(c->out[i], 0xa5); /* the rest is untouched */
            }
        }
        test_free(whole);
    }
}

static void other_bytes_than_the_frame_do_not_decode(void **state) {
    static const struct case_shape shapes[] = {
        { CASE_ROWS, CST_DTYPE_BF16, 16, 2, 1, 16, 0 },
        { CASE_PADDED, CST_DTYPE_F16, 16, 1, 1, 20, 3 },
        { CASE_OPAQUE, CST_DTYPE_OPAQUE, 16, 1, 2, 40, 0 },
    };

    for (size_t k = 0; k < CST_COUNT(shapes) * CST_PRESETS; k++) {
        cst_auto(case_freep) struct case_block *c = case_new(&shapes[k / CST_PRESETS]);
        struct cst_encode_params p = { k % CST_PRESETS, 16, 0, 1 };
        uint8_t *whole;
        size_t len;

        if (!cst_preset_name(p.preset) || cst_preset_needs_side(p.preset))
            continue;
        if (c->desc.segments[0].dtype == CST_DTYPE_BF16)
            case_rotate_keys(c, CST_ROPE_NEOX, 8);
        case_fill_model(c, k, 16);
        assert_int_equal(case_encode(c, &p, NULL), 0);
        assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
        whole = test_malloc(c->desc.block_bytes);
        memcpy(whole, c->out, c->desc.block_bytes);
        len = c->frame_len;
        for (c->frame_len = 0; c->frame_len < len; c->frame_len++)
            assert_int_equal(case_decode(c, 0, UINT32_MAX), CST_CODEC_E_CORRUPT);
        for (size_t bit = 0; bit < len * 8; bit++) {
            c->frame[bit / 8] ^= (uint8_t)(1 << bit % 8);
            if (case_decode(c, 0, UINT32_MAX) == 0) /* nothing but the right block */
                assert_memory_equal(c->out, whole, c->desc.block_bytes);
            if (c->desc.n_layers > 1) {
                int first = case_decode(c, 0, 1), second = case_decode(c, 1, 1);

                assert_true(first || second);
            }
            c->frame[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
        assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
        test_free(whole);
    }
}

static const struct case_shape small = { CASE_ROWS, CST_DTYPE_BF16, 16, 2, 1, 16, 2 };

static void foreign_layouts_do_not_decode(void **state) {
    cst_auto(case_freep) struct case_block *c = case_new(&small);
    struct cst_descriptor kept = c->desc;
    struct cst_segment *seg = &c->desc.segments[1];
    struct cst_segment kept_seg = *seg;
    struct cst_layer kept_layer = c->desc.layers[0];

    case_fill_model(c, 1, 16);
    assert_int_equal(case_encode(c, &(struct cst_encode_params){ CST_PRESET_INT8, 16, 0, 1 }, NULL),
                     0);
#define FOREIGN(change)                                                                            \
    do {                                                                                           \
        change;                                                                                    \
        assert_int_equal(case_decode(c, 0, UINT32_MAX), CST_CODEC_E_MISMATCH);                     \
        c->desc = kept;                                                                            \
        *seg = kept_seg;                                                                           \
        c->desc.layers[0] = kept_layer;                                                            \
        assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);                                        \
    } while (0)
    FOREIGN(c->desc.block_tokens = 32);
    FOREIGN(c->desc.block_bytes--);
    FOREIGN(c->desc.n_segments--);
    FOREIGN(seg->layer = 1);
    FOREIGN(seg->tensor = CST_TENSOR_K);
    FOREIGN(seg->dtype = CST_DTYPE_F16);
    FOREIGN(seg->offset++);
    FOREIGN(seg->length--);
    FOREIGN(seg->token_stride += 2);
    FOREIGN(seg->head_stride += 2);
    FOREIGN(seg->dim_stride = 4);
    FOREIGN(c->desc.layers[0].kv_heads = 2);
    FOREIGN(c->desc.layers[0].head_dim_v = 8);
    /* layouts that break the rules of base/layout.h */
    FOREIGN(seg->offset = c->desc.segments[0].offset);
    FOREIGN(seg->length = UINT64_MAX);
    FOREIGN(seg->layer = 2);
#undef FOREIGN
}

static void wrong_calls_are_refused(void **state) {
    cst_auto(case_freep) struct case_block *c = case_new(&small);
    struct cst_encode_params p = { CST_PRESET_LOSSLESS, 16, 0, 0 };
    uint32_t block_tokens = c->desc.block_tokens;
    uint64_t length = c->desc.segments[0].length;

    p.preset = CST_PRESETS;
    assert_int_equal(case_encode(c, &p, NULL), CST_CODEC_E_PRESET);
    p = (struct cst_encode_params){ CST_PRESET_LOSSLESS, 0, 0, 0 };
    assert_int_equal(case_encode(c, &p, NULL), CST_CODEC_E_PRESET);
    p.tokens = 17;
    assert_int_equal(case_encode(c, &p, NULL), CST_CODEC_E_PRESET);
    p.tokens = 16;
    c->desc.block_tokens = 8; /* below the least */
    assert_int_equal(case_encode(c, &p, NULL), CST_CODEC_E_PRESET);
    c->desc.block_tokens = block_tokens;
    c->desc.segments[0].length += 3; /* into the next segment */
    assert_int_equal(case_encode(c, &p, NULL), CST_CODEC_E_PRESET);
    c->desc.segments[0].length = length;
    c->cap--;
    assert_int_equal(case_encode(c, &p, NULL), CST_CODEC_E_SMALL);
    c->cap++;
    c->work_len = cst_codec_work_size(&c->desc, CST_PRESET_LOSSLESS) - 1;
    assert_int_equal(case_encode(c, &p, NULL), CST_CODEC_E_SMALL);
    c->work_len++;
    assert_int_equal(case_encode(c, &p, NULL), 0);
    assert_int_equal(cst_frame_decode(c->out, c->desc.block_bytes - 1, c->frame, c->frame_len,
                                      &c->desc, &CST_DECODE_ALL, c->work, c->work_len),
                     CST_CODEC_E_SMALL);
    c->work_len = cst_codec_work_size(&c->desc, CST_PRESET_LOSSLESS) - 1;
    assert_int_equal(case_decode(c, 0, UINT32_MAX), CST_CODEC_E_SMALL);
}

/* Fields of header and table changed with the checksums made right again. */
static int decode_changed(struct case_block *c, size_t at, uint8_t value) {
    struct cst_frame_header *h = (void *)c->frame;
    size_t table = 2 * c->desc.n_layers + 1; /* and gaps */
    uint8_t was = c->frame[at];
    int r;

    for (int i = 0; i < 2; i++) {
        c->frame[at] = i == 0 ? value : was;
        cst_store32(&h->table_crc, cst_crc32c(0, h + 1, table * sizeof(struct cst_stream_entry)));
        cst_store32(&h->header_crc,
                    cst_crc32c(0, h, offsetof(struct cst_frame_header, header_crc)));
        if (i == 0)
            r = case_decode(c, 0, UINT32_MAX);
    }
    return r;
}

static void forged_fields_are_refused(void **state) {
    cst_auto(case_freep) struct case_block *c = case_new(&small);
    const size_t entry = sizeof(struct cst_frame_header);

    case_fill_model(c, 1, 16);
    c->block[0] = 1; /* a gap with something in it */
    assert_int_equal(case_encode(c, &(struct cst_encode_params){ CST_PRESET_INT8, 16, 0, 1 }, NULL),
                     0);
    assert_int_equal(decode_changed(c, 0, 'C'), 0); /* as it was */
    assert_int_equal(decode_changed(c, 0, 'c'), CST_CODEC_E_CORRUPT);
    assert_int_equal(decode_changed(c, 4, 2), CST_CODEC_E_VERSION);
    assert_int_equal(decode_changed(c, 6, CST_PRESETS), CST_CODEC_E_VERSION);
    assert_int_equal(decode_changed(c, 7, 1), CST_CODEC_E_VERSION);
    assert_int_equal(decode_changed(c, 8, 0), CST_CODEC_E_CORRUPT);   /* no tokens */
    assert_int_equal(decode_changed(c, 8, 17), CST_CODEC_E_CORRUPT);  /* too many */
    assert_int_equal(decode_changed(c, 8, 15), CST_CODEC_E_CORRUPT);  /* not so many */
    assert_int_equal(decode_changed(c, 12, 2), CST_CODEC_E_CORRUPT);  /* not so many sinks */
    assert_int_equal(decode_changed(c, 16, 0), CST_CODEC_E_MISMATCH); /* block bytes */
    assert_int_equal(decode_changed(c, 31, 1), CST_CODEC_E_CORRUPT);  /* longer than it is */
    assert_int_equal(decode_changed(c, 36, c->frame[36] ^ 1), CST_CODEC_E_CORRUPT); /* block crc */
    assert_int_equal(decode_changed(c, 40, c->frame[40] ^ 1), CST_CODEC_E_MISMATCH);
    assert_int_equal(decode_changed(c, 44, 4), CST_CODEC_E_CORRUPT); /* streams */
    assert_int_equal(decode_changed(c, 52, 1), CST_CODEC_E_VERSION); /* bits, which it has not */
    assert_int_equal(decode_changed(c, 53, 4), CST_CODEC_E_VERSION);
    assert_int_equal(decode_changed(c, 54, 1), CST_CODEC_E_SIDE); /* that aren't at hand */
    assert_int_equal(decode_changed(c, 6, CST_PRESET_TURBOQUANT),
                     CST_CODEC_E_VERSION); /* no bits */
    assert_int_equal(decode_changed(c, entry, CST_STAGES), CST_CODEC_E_VERSION);
    assert_int_equal(decode_changed(c, entry, CST_STAGE_RAW), CST_CODEC_E_CORRUPT);
    assert_int_equal(decode_changed(c, entry, CST_STAGE_ZERO), CST_CODEC_E_CORRUPT);
    assert_int_equal(decode_changed(c, entry, CST_STAGE_ZSTD), CST_CODEC_E_CORRUPT);
    assert_int_equal(decode_changed(c, entry, CST_STAGE_PLANES), CST_CODEC_E_CORRUPT);
    assert_int_equal(decode_changed(c, entry, CST_STAGE_GROUPS), CST_CODEC_E_CORRUPT);
    assert_int_equal(decode_changed(c, entry, CST_STAGE_LLOYD), CST_CODEC_E_CORRUPT);
    assert_int_equal(decode_changed(c, entry + 1, 2), CST_CODEC_E_VERSION);
    assert_int_equal(decode_changed(c, entry + 2, 1), CST_CODEC_E_CORRUPT); /* no outliers */
    assert_int_equal(decode_changed(c, entry + 4, 0), CST_CODEC_E_CORRUPT);
    assert_int_equal(decode_changed(c, entry + 7, 255), CST_CODEC_E_CORRUPT);
    assert_int_equal(decode_changed(c, entry + 4 * 16, CST_STAGE_INT8), CST_CODEC_E_CORRUPT);
    assert_int_equal(decode_changed(c, entry + 4 * 16, CST_STAGE_PLANES), CST_CODEC_E_CORRUPT);
}

static void encoding_is_deterministic(void **state) {
    cst_auto(case_freep) struct case_block *a = case_new(&rows[0].shape);
    cst_auto(case_freep) struct case_block *b = case_new(&rows[0].shape);

    CASE_EACH_PRESET (preset, 0) {
        struct cst_encode_params p = { preset, 64, 0, 1 };

        case_fill_model(a, 1, 64);
        case_fill_model(b, 1, 64);
        memset(b->work, 0xff, b->work_len); /* nothing depends on what lay there */
        memset(b->frame, 0xff, b->cap);
        assert_int_equal(case_encode(a, &p, NULL), 0);
        assert_int_equal(case_encode(b, &p, NULL), 0);
        assert_int_equal(a->frame_len, b->frame_len);
        assert_memory_equal(a->frame, b->frame, a->frame_len);
    }
}

static void frames_stay_under_raw_plus_header(void **state) {
    cst_auto(case_freep) struct case_block *c = case_new(&rows[0].shape);
    size_t raw;

    case_fill_random(c, 3);
    assert_int_equal(case_encode(c, &(struct cst_encode_params){ CST_PRESET_RAW, 64, 0, 0 }, NULL),
                     0);
    raw = c->frame_len;
    assert_true(raw <= c->desc.block_bytes + 64 + 32 * c->desc.n_segments);
    CASE_EACH_PRESET (preset, CST_PRESET_LOSSLESS) {
        struct cst_encode_params p = { preset, 64, 0, 1 };

        assert_int_equal(case_encode(c, &p, NULL), 0);
        assert_true(c->frame_len <= raw);
    }
}

/* Any shape that a model has, with rows and channels that are constant or zero. */
static void presets_take_every_shape(void **state) {
    static const uint32_t dims[] = { 1, 64, 80, 96, 112, 128, 256 };
    static const uint32_t tokens[] = { 16, 33, 500, 1000 };

    for (size_t k = 0; k < CST_COUNT(dims) * CST_COUNT(tokens); k++) {
        uint32_t d = dims[k / CST_COUNT(tokens)], n = tokens[k % CST_COUNT(tokens)];
        const struct case_shape shape = {
            CASE_ROWS, k % 2 ? CST_DTYPE_F16 : CST_DTYPE_BF16, n, 1, 1, d, 0
        };
        cst_auto(case_freep) struct case_block *c = case_new(&shape);

        case_rotate_keys(c, k % 3 ? CST_ROPE_NORM : CST_ROPE_NEOX, d & ~1u);
        case_fill_model(c, k, n);
        memset(c->block + (size_t)6 * d * 2, 0, (size_t)3 * d * 2);
        for (uint32_t t = 0; t < n; t++) {
            case_set_value(c, 1, t, 0, 0, 30);
            case_set_value(c, 1, t, 0, d / 2, 0);
        }
        CASE_EACH_PRESET (preset, 0) {
            struct cst_encode_params p = { preset, n, (uint32_t)k, 1e6f };
            struct cst_frame_info info;

            assert_int_equal(case_encode(c, &p, &info), 0);
            assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
            check_info(c, &p, &info, c->out);
            if (preset <= CST_PRESET_LOSSLESS)
                assert_memory_equal(c->out, c->block, c->desc.block_bytes);
        }
    }
}

static void turboquant_takes_bits(void **state) {
    static const struct {
        uint8_t bits_k, bits_v, k, v;
    } cases[] = { { 0, 0, 4, 4 }, { 4, 4, 4, 4 }, { 8, 1, 8, 1 }, { 3, 0, 3, 4 }, { 0, 5, 4, 5 } };
    cst_auto(case_freep) struct case_block *c = case_new(&rows[0].shape);

    case_fill_model(c, 1, 64);
    for (size_t i = 0; i < CST_COUNT(cases); i++) {
        struct cst_encode_params p = { CST_PRESET_TURBOQUANT, 64, 64, 1, cases[i].bits_k,
                                       cases[i].bits_v };
        const struct cst_stream_entry *table;
        struct cst_frame_info info;

        assert_int_equal(case_encode(c, &p, &info), 0);
        assert_int_equal(info.bits_k, cases[i].k);
        assert_int_equal(info.bits_v, cases[i].v);
        table = (const void *)(c->frame + sizeof(struct cst_frame_header));
        for (int tensor = 0; tensor < 2; tensor++) {
            size_t bits = tensor ? cases[i].v : cases[i].k;
            size_t length = cst_load32(&table[tensor].length);

            assert_int_equal(table[tensor].stage, CST_STAGE_LLOYD);
            /* codes; head, norms and, where they pay, means */
            assert_true(length == 64 * 24 * bits + 8 + 384 ||
                        length == 64 * 24 * bits + 8 + 384 + 384);
        }
        assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
    }
    CASE_EACH_PRESET (preset, 0) {
        struct cst_encode_params p = { preset, 64, 64, 1, 9, 0 };

        assert_int_equal(case_encode(c, &p, NULL), CST_CODEC_E_PRESET);
        p.bits_k = 0;
        p.bits_v = 200;
        assert_int_equal(case_encode(c, &p, NULL), CST_CODEC_E_PRESET);
        p.bits_v = 4;
        assert_int_equal(case_encode(c, &p, NULL),
                         preset == CST_PRESET_TURBOQUANT ? 0 : CST_CODEC_E_PRESET);
    }
}

/* A part has no block checksum that would tell other angles. */
static void foreign_rotations_do_not_decode(void **state) {
    static const uint32_t presets[] = { CST_PRESET_KIVI4, CST_PRESET_TURBOQUANT };
    cst_auto(case_freep) struct case_block *c = case_new(&rows[0].shape);

    case_rotate_keys(c, CST_ROPE_NORM, 64);
    case_fill_model(c, 1, 64);
    for (size_t i = 0; i < CST_COUNT(presets); i++) {
        assert_int_equal(case_encode(c, &(struct cst_encode_params){ presets[i], 64, 64, 1 }, NULL),
                         0);
        assert_int_equal(case_decode(c, 1, 1), 0);
        c->desc.layers[1].rope_theta *= 2;
        assert_int_equal(case_decode(c, 1, 1), CST_CODEC_E_CORRUPT);
        assert_int_equal(case_decode(c, 0, 1), 0);
        assert_int_equal(case_decode(c, 0, UINT32_MAX), CST_CODEC_E_CORRUPT);
        c->desc.layers[1].rope_theta /= 2;
    }
}

/* Distance times frequency, of the pair that dimension d of `rotated` ones belongs to. */
static double angle_of(const struct case_block *c, uint32_t d, uint32_t rotated, double distance) {
    bool norm = c->desc.layers[0].rope == CST_ROPE_NORM;
    uint32_t pair = norm ? d / 2 : d % (rotated / 2);

    return distance * pow(1e4, -2.0 * pair / rotated);
}

static void check_placed(const struct case_block *c, const uint8_t *own, uint32_t rotated,
                         double distance, uint32_t tokens) {
    bool norm = c->desc.layers[0].rope == CST_ROPE_NORM;

    for (uint32_t t = 0; t < tokens; t++) {
        for (uint32_t d = 0; d < 64; d++) {
            double x = case_value(c, own, 0, t, 1, d), y = 0, angle = 0;
            bool first = norm ? d % 2 == 0 : d < rotated / 2;
            uint32_t other = norm ? d ^ 1 : first ? d + rotated / 2 : d - rotated / 2;

            if (d < rotated) {
                y = case_value(c, own, 0, t, 1, other);
                angle = angle_of(c, d, rotated, distance);
            }
            x = x * cos(angle) + (first ? -y : y) * sin(angle);
            assert_true(fabs(x - case_value(c, c->out, 0, t, 1, d)) <=
                        (fabs(x) + fabs(y) + 1) / 64);
            assert_true(case_value(c, own, 1, t, 1, d) == case_value(c, c->out, 1, t, 1, d));
        }
    }
}

static void keys_can_be_placed_elsewhere(void **state) {
    static const struct {
        enum cst_rope rope;
        uint32_t rotated, from, to;
    } cases[] = { { CST_ROPE_NORM, 64, 0, 1000 },
                  { CST_ROPE_NORM, 32, 500, 3 },
                  { CST_ROPE_NEOX, 64, 2, 77 },
                  { CST_ROPE_NEOX, 48, 4096, 0 } };

    for (size_t i = 0; i < CST_COUNT(cases); i++) {
        const struct case_shape shape = { CASE_ROWS, CST_DTYPE_BF16, 64, 2, 3, 64, 0 };
        cst_auto(case_freep) struct case_block *c = case_new(&shape);
        uint8_t *own = test_malloc(c->desc.block_bytes);

        case_rotate_keys(c, cases[i].rope, cases[i].rotated);
        case_fill_model(c, i, 60);
        CASE_EACH_PRESET (preset, 0) {
            struct cst_encode_params p = { preset, 60, cases[i].from, 1e6f };

            assert_int_equal(case_encode(c, &p, NULL), 0);
            assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
            memcpy(own, c->out, c->desc.block_bytes);
            assert_int_equal(case_decode_at(c, 0, UINT32_MAX, cases[i].to), 0);
            check_placed(c, own, cases[i].rotated, (double)cases[i].to - cases[i].from, 60);
        }
        c->desc.layers[0].rope = CST_ROPE_MROPE;
        assert_int_equal(case_decode_at(c, 0, UINT32_MAX, cases[i].to), CST_CODEC_E_PLACE);
        test_free(own);
    }
}

static void names_of_presets(void **state) {
    static const char *const names[] = { "raw",   "lossless",   "int8",  "int4", "kivi4",
                                         "kivi2", "turboquant", "polar", "jolt", "flashjolt",
                                         "jolt+", "klt",        "deep" };

    assert_int_equal(CST_COUNT(names), CST_PRESETS);
    CASE_EACH_PRESET (i, 0) {
        assert_string_equal(cst_preset_name(i), names[i]);
        assert_int_equal(cst_preset_from_name(names[i]), i);
    }
    assert_null(cst_preset_name(CST_PRESETS));
    assert_int_equal(cst_preset_from_name("RAW"), -1);
    assert_int_equal(cst_preset_from_name(""), -1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(other_bytes_than_the_frame_do_not_decode),
        cmocka_unit_test(foreign_layouts_do_not_decode),
        cmocka_unit_test(wrong_calls_are_refused),
        cmocka_unit_test(forged_fields_are_refused),
        cmocka_unit_test(encoding_is_deterministic),
        cmocka_unit_test(frames_stay_under_raw_plus_header),
        cmocka_unit_test(presets_take_every_shape),
        cmocka_unit_test(turboquant_takes_bits),
        cmocka_unit_test(foreign_rotations_do_not_decode),
        cmocka_unit_test(keys_can_be_placed_elsewhere),
        cmocka_unit_test(names_of_presets),
    };

    return cst_run_rows(rows, exact_presets_give_every_byte_back) +
           cst_run_rows(rows, lossy_presets_keep_sinks_and_bound) +
           cst_run_rows(rows, layer_ranges_decode_alone) +
           cmocka_run_group_tests(tests, NULL, NULL);
}
