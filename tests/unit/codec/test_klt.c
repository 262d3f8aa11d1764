/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Presets klt and deep: every shape comes back within its bound; parts of a block are those of the
 * whole; what can't be coded is coded without loss; drift; places; and what other bytes do.
 */
#include "tests/lib/check.h"
#include "tests/unit/codec/side_case.h"

#include "codec/dtype.h"
#include "codec/format.h"

#include "base/crc32c.h"
#include "base/le.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct row {
    const char *name;
    struct case_shape shape;
    uint32_t tokens, position, rope_dims;
    enum cst_rope rope;
    uint32_t predicted; /* tensors; 0: too few tokens are learned from */
} rows[] = {
    { "rows bf16", { CASE_ROWS, CST_DTYPE_BF16, 64, 3, 3, 64, 0 }, 64, 64, 64, CST_ROPE_NORM },
    { "sinks", { CASE_ROWS, CST_DTYPE_BF16, 64, 2, 3, 64, 0 }, 64, 0, 64, CST_ROPE_NEOX },
    { "only sinks", { CASE_ROWS, CST_DTYPE_BF16, 16, 2, 1, 64, 0 }, 3, 0, 0, 0 },
    { "one token", { CASE_ROWS, CST_DTYPE_F16, 16, 2, 2, 80, 0 }, 1, 64, 80, CST_ROPE_NORM },
    { "transposed f16, gaps",
      { CASE_TRANSPOSED, CST_DTYPE_F16, 64, 2, 2, 96, 6 },
      50,
      2,
      32,
      CST_ROPE_NEOX },
    { "heads f32", { CASE_HEADS, CST_DTYPE_F32, 32, 2, 2, 112, 0 }, 32, 10, 0, 0 },
    { "padded", { CASE_PADDED, CST_DTYPE_BF16, 64, 2, 1, 128, 0 }, 33, 900, 128, CST_ROPE_NEOX },
    { "one layer, one head of 256",
      { CASE_ROWS, CST_DTYPE_BF16, 64, 1, 1, 256, 0 },
      64,
      64,
      64,
      CST_ROPE_NEOX },
    { "groups of heads",
      { CASE_ROWS, CST_DTYPE_BF16, 64, 2, 5, 96, 0 },
      64,
      64,
      96,
      CST_ROPE_NORM },
    { "predicted groups of heads",
      { CASE_ROWS, CST_DTYPE_BF16, 64, 2, 3, 96, 0 },
      64,
      64,
      96,
      CST_ROPE_NORM,
      3 },
    { "predicted from two layers",
      { CASE_ROWS, CST_DTYPE_BF16, 64, 5, 2, 12, 0 },
      64,
      64,
      12,
      CST_ROPE_NEOX,
      9 },
    { "1,000 tokens",
      { CASE_ROWS, CST_DTYPE_BF16, 1024, 1, 2, 64, 0 },
      1000,
      0,
      64,
      CST_ROPE_NEOX },
    { "one head of one dimension", { CASE_ROWS, CST_DTYPE_F16, 64, 2, 1, 1, 0 }, 64, 0, 0, 0 },
};

static const uint32_t presets[] = { CST_PRESET_KLT, CST_PRESET_DEEP };

/* A case with side data of its model, and a block that they weren't learned from. */
struct scene {
    struct case_block *c;
    struct side_case side;
};

static void scene_init(struct scene *s, const struct row *row) {
    s->c = case_new(&row->shape);
    if (row->rope_dims)
        case_rotate_keys(s->c, row->rope, row->rope_dims);
    /* a group has up to 192 inputs from each source */
    side_case_learn(&s->side, s->c,
                    CST_MAX(2u, (row->predicted ? 3200 : 640) / row->shape.block_tokens), NULL);
    assert_true(s->side.report.predicted >= row->predicted);
    side_case_fill(s->c, 7, row->tokens);
}

static void scene_deinit(struct scene *s) {
    case_free(s->c);
    side_case_deinit(&s->side);
}

static struct cst_encode_params params_of(const struct scene *s, const struct row *row,
                                          uint32_t preset) {
    return (struct cst_encode_params){ .preset = preset,
                                       .tokens = row->tokens,
                                       .first_position = row->position,
                                       .bound = 0.2f,
                                       .side = &s->side.side };
}

/* Rms error over rms deviation from the channel mean of a segment's coded tokens, by the book. */
static double error_of(const struct case_block *c, uint32_t i, uint32_t first, uint32_t end) {
    const struct cst_layer *layer = &c->desc.layers[c->desc.segments[i].layer];
    double errors = 0, squares = 0;

    for (uint32_t ch = 0; ch < layer->kv_heads * layer->head_dim_k; ch++) {
        uint32_t h = ch / layer->head_dim_k, d = ch % layer->head_dim_k;
        double mean = 0;

        for (uint32_t t = first; t < end; t++)
            mean += (double)case_value(c, c->block, i, t, h, d) / (end - first);
        for (uint32_t t = first; t < end; t++) {
            double x = (double)case_value(c, c->block, i, t, h, d);

            squares += (x - mean) * (x - mean);
            x -= (double)case_value(c, c->out, i, t, h, d);
            errors += x * x;
        }
    }
    return errors == 0 ? 0 : sqrt(errors / squares);
}

static void comes_back_within_its_bound(void **state) {
    const struct row *row = *state;
    uint32_t sinks = row->position < 4 ? CST_MIN(4 - row->position, row->tokens) : 0;
    struct scene s;

    scene_init(&s, row);
    for (size_t k = 0; k < CST_COUNT(presets); k++) {
        struct cst_encode_params p = params_of(&s, row, presets[k]);
        struct cst_frame_info info;

        assert_int_equal(case_encode(s.c, &p, &info), 0);
        assert_true(info.layered && info.error <= p.bound && info.block_crc == 0);
        assert_int_equal(case_decode(s.c, 0, UINT32_MAX), 0);
        for (uint32_t i = 0; i < s.c->desc.n_segments; i++) {
            if (row->tokens > sinks)
                assert_true(error_of(s.c, i, sinks, row->tokens) <= (double)info.error * 1.001);
            for (uint32_t t = 0; t < row->shape.block_tokens; t++) {
                if (t < sinks || t >= row->tokens)
                    assert_true(case_value(s.c, s.c->block, i, t, 0, 0) ==
                                case_value(s.c, s.c->out, i, t, 0, 0));
            }
        }
        /* something was coded with the side data where there was something to code */
        assert_int_equal(info.side_version, row->tokens > sinks + 1 && row->shape.dims > 1);
        if (row->tokens >= 32 && row->shape.dims > 1)
            assert_true(s.c->frame_len < s.c->desc.block_bytes / 2);
        p.bound = CST_MAX(info.error / 4, 1e-3f); /* smaller steps keep a smaller bound */
        assert_int_equal(case_encode(s.c, &p, &info), 0);
        assert_true(info.error <= p.bound);
    }
    scene_deinit(&s);
}

static void layers_decode_alone(void **state) {
    const struct row *row = *state;
    struct scene s;

    scene_init(&s, row);
    for (size_t k = 0; k < CST_COUNT(presets); k++) {
        struct cst_encode_params p = params_of(&s, row, presets[k]);
        uint8_t *whole = malloc(s.c->desc.block_bytes);

        assert_non_null(whole);
        assert_int_equal(case_encode(s.c, &p, NULL), 0);
        assert_int_equal(case_decode(s.c, 0, UINT32_MAX), 0);
        memcpy(whole, s.c->out, s.c->desc.block_bytes);
        for (uint32_t first = 0; first < row->shape.n_layers; first++) {
            assert_int_equal(case_decode(s.c, first, 1), 0);
            for (uint32_t i = 0; i < s.c->desc.n_segments; i++) {
                const struct cst_segment *seg = &s.c->desc.segments[i];

                if (seg->layer == first)
                    assert_memory_equal(s.c->out + seg->offset, whole + seg->offset, seg->length);
                else
                    for (uint64_t b = 0; b < seg->length; b++)
                        assert_int_equal(s.c->out[seg->offset + b], 0xa5);
            }
        }
        free(whole);
    }
    scene_deinit(&s);
}

static double squared_error(const struct case_block *c, const uint8_t *original) {
    double sum = 0;

    for (uint64_t at = 0; at < c->desc.block_bytes; at += 2) {
        double e = (double)cst_dtype_load(CST_DTYPE_BF16, original + at) -
                   (double)cst_dtype_load(CST_DTYPE_BF16, c->out + at);

        sum += e * e;
    }
    return sum;
}

static void ten_rounds_drift_by_less_than_a_tenth(void **state) {
    const struct row *row = &rows[0];
    struct scene s;

    scene_init(&s, row);
    for (size_t k = 0; k < CST_COUNT(presets); k++) {
        struct cst_encode_params p = params_of(&s, row, presets[k]);
        uint8_t *original = malloc(s.c->desc.block_bytes);
        double first = 0;

        assert_non_null(original);
        side_case_fill(s.c, 7, row->tokens);
        memcpy(original, s.c->block, s.c->desc.block_bytes);
        for (int round = 0; round <= 10; round++) {
            assert_int_equal(case_encode(s.c, &p, NULL), 0);
            assert_int_equal(case_decode(s.c, 0, UINT32_MAX), 0);
            memcpy(s.c->block, s.c->out, s.c->desc.block_bytes);
            if (round == 0)
                first = squared_error(s.c, original);
        }
        assert_true(squared_error(s.c, original) <= 1.1 * 1.1 * first);
        free(original);
    }
    scene_deinit(&s);
}

/* Keys of a frame that is placed elsewhere are those of the block, turned. */
static void frames_are_placed_at_other_positions(void **state) {
    const struct row *row = &rows[0];
    struct scene s;

    scene_init(&s, row);
    for (size_t k = 0; k < CST_COUNT(presets); k++) {
        struct cst_encode_params p = params_of(&s, row, presets[k]);
        uint32_t to = 5000;

        assert_int_equal(case_encode(s.c, &p, NULL), 0);
        assert_int_equal(case_decode(s.c, 0, UINT32_MAX), 0);
        memcpy(s.c->block, s.c->out, s.c->desc.block_bytes);
        assert_int_equal(case_decode_at(s.c, 0, UINT32_MAX, to), 0);
        for (uint32_t i = 0; i < s.c->desc.n_segments; i++) {
            for (uint32_t t = 0; t < row->tokens; t++) {
                for (uint32_t d = 0; d < 64; d += 2) {
                    double angle = i % 2 ? 0 : (to - row->position) * pow(1e4, -(double)d / 64);
                    double a = (double)case_value(s.c, s.c->block, i, t, 1, d);
                    double b = (double)case_value(s.c, s.c->block, i, t, 1, d + 1);
                    double x = (double)case_value(s.c, s.c->out, i, t, 1, d);
                    double near = 0.02 * hypot(a, b) + 1e-3;

                    assert_true(fabs(a * cos(angle) - b * sin(angle) - x) <= near);
                }
            }
        }
        side_case_fill(s.c, 7, row->tokens);
    }
    scene_deinit(&s);
}

/* Values that a stage can't take, in the middle of the layers that lean on one another. */
static void odd_values_are_coded_without_loss(void **state) {
    static const float odd[] = { NAN, INFINITY, 3e38f };
    const struct row *row = &rows[0];
    struct scene s;

    scene_init(&s, row);
    for (size_t k = 0; k < CST_COUNT(presets) * CST_COUNT(odd); k++) {
        struct cst_encode_params p = params_of(&s, row, presets[k % CST_COUNT(presets)]);
        const struct cst_segment *seg = &s.c->desc.segments[2];
        const struct cst_stream_entry *entry =
            (const void *)(s.c->frame + sizeof(struct cst_frame_header));

        side_case_fill(s.c, 7, row->tokens);
        case_set_value(s.c, 2, 30, 1, 5, odd[k / CST_COUNT(presets)]);
        assert_int_equal(case_encode(s.c, &p, NULL), 0);
        assert_true(entry[2].stage != CST_STAGE_KLT && entry[4].stage == CST_STAGE_KLT);
        assert_int_equal(case_decode(s.c, 0, UINT32_MAX), 0);
        assert_memory_equal(s.c->out + seg->offset, s.c->block + seg->offset, seg->length);
        assert_int_equal(case_decode(s.c, 2, 1), 0);
    }
    scene_deinit(&s);
}

static const void *stream_of(const struct case_block *c, uint32_t k) {
    const struct cst_stream_entry *entry =
        (const void *)(c->frame + sizeof(struct cst_frame_header));
    uint64_t at = sizeof(struct cst_frame_header) + c->desc.n_segments * sizeof(*entry);

    for (uint32_t i = 0; i < k; i++)
        at = cst_align_up(at, CST_STREAM_ALIGN) + cst_load32(&entry[i].length);
    return c->frame + cst_align_up(at, CST_STREAM_ALIGN);
}

/* Whether bit i of a tensor's sources means another one, by the book. */
static bool is_source(uint32_t layer, uint8_t tensor, int i, uint32_t of_layer, uint8_t of_tensor) {
    uint32_t first = i % 2 == 0 && tensor == CST_TENSOR_V ? layer : layer - 1;

    return of_tensor == i % 2 && first - (uint32_t)i / 2 == of_layer;
}

/* Streams are predicted where all their sources could be decoded, two layers back too. */
static void nothing_leans_on_what_is_not_known(void **state) {
    const struct row *row = *state;
    const struct cst_stream_entry *entry;
    struct cst_encode_params p;
    uint32_t far = 0, unpredicted = 0;
    struct scene s;

    assert_string_equal(row->name, "predicted from two layers");
    scene_init(&s, row);
    p = params_of(&s, row, CST_PRESET_DEEP);
    entry = (const void *)(s.c->frame + sizeof(struct cst_frame_header));
    case_set_value(s.c, 2, 30, 1, 5, NAN); /* K of layer 1 */
    assert_int_equal(case_encode(s.c, &p, NULL), 0);
    assert_true(entry[2].stage != CST_STAGE_KLT);
    for (uint32_t i = 0; i < s.c->desc.n_segments; i++) {
        uint32_t layer = i / 2;
        uint8_t tensor = (uint8_t)(i % 2);
        const struct cst_side_tensor *t = cst_side_tensor(&s.side.side, layer, tensor);
        const struct cst_klt_header *head = stream_of(s.c, i);
        bool leans = false;

        if (i == 2)
            continue;
        for (int k = 0; k < CST_SIDE_SOURCES; k++)
            leans = leans || (t->sources >> k & 1 && is_source(layer, tensor, k, 1, CST_TENSOR_K));
        assert_int_equal(entry[i].stage, CST_STAGE_KLT);
        assert_int_equal(!(head->flags & CST_KLT_PREDICTED), !t->sources || leans);
        far += t->sources > 3;
        unpredicted += leans;
    }
    assert_true(far > 0 && unpredicted > 1);
    assert_int_equal(case_decode(s.c, 0, UINT32_MAX), 0);
    scene_deinit(&s);
}

static void side_data_are_asked_for(void **state) {
    const struct row *row = &rows[0];
    struct side_case other;
    struct cst_encode_params p;
    struct scene s;

    scene_init(&s, row);
    p = params_of(&s, row, CST_PRESET_DEEP);
    assert_int_equal(case_encode(s.c, &p, NULL), 0);
    s.c->side = NULL;
    assert_int_equal(case_decode(s.c, 0, UINT32_MAX), CST_CODEC_E_SIDE);
    side_case_learn(&other, s.c, 9, NULL);
    assert_int_equal(case_decode(s.c, 0, UINT32_MAX), CST_CODEC_E_SIDE);
    p.side = NULL;
    assert_int_equal(case_encode(s.c, &p, NULL), CST_CODEC_E_SIDE);
    side_case_deinit(&other);
    scene_deinit(&s);
}

/* Makes the checksums of a frame right again. */
static void seal(struct case_block *c) {
    struct cst_frame_header *h = (void *)c->frame;
    struct cst_stream_entry *entry = (void *)(c->frame + sizeof(*h));
    uint32_t n = cst_load32(&h->n_streams);
    uint64_t at = sizeof(*h) + n * sizeof(*entry);

    for (uint32_t i = 0; i < n; i++) {
        at = cst_align_up(at, CST_STREAM_ALIGN);
        cst_store32(&entry[i].crc, cst_crc32c(0, c->frame + at, cst_load32(&entry[i].length)));
        at += cst_load32(&entry[i].length);
    }
    cst_store32(&h->table_crc, cst_crc32c(0, entry, n * sizeof(*entry)));
    cst_store32(&h->header_crc, cst_crc32c(0, h, offsetof(struct cst_frame_header, header_crc)));
}

/* Streams with a changed head: refused, or at least without harm. */
static void damaged_streams_do_no_harm(void **state) {
    const struct row *row = &rows[1];
    struct cst_encode_params p;
    struct scene s;
    uint64_t at;
    uint8_t *frame;

    scene_init(&s, row);
    p = params_of(&s, row, CST_PRESET_DEEP);
    assert_int_equal(case_encode(s.c, &p, NULL), 0);
    frame = malloc(s.c->frame_len);
    assert_non_null(frame);
    memcpy(frame, s.c->frame, s.c->frame_len);
    at = cst_align_up(sizeof(struct cst_frame_header) +
                          s.c->desc.n_segments * sizeof(struct cst_stream_entry),
                      CST_STREAM_ALIGN);
    for (uint32_t i = 0; i < sizeof(struct cst_klt_header); i++) {
        int r;

        memcpy(s.c->frame, frame, s.c->frame_len);
        s.c->frame[at + i] ^= 0x80;
        assert_int_equal(case_decode(s.c, 0, UINT32_MAX), CST_CODEC_E_CORRUPT);
        seal(s.c);
        r = case_decode(s.c, 0, UINT32_MAX);
        /* another step is a number like any other */
        assert_true(r == CST_CODEC_E_CORRUPT || (r == 0 && i >= 4 && i < 8));
    }
    for (uint32_t i = 0; i < 400; i++) {
        memcpy(s.c->frame, frame, s.c->frame_len);
        s.c->frame[at + 12 + i * 37 % (s.c->frame_len - at - 12)] ^= (uint8_t)(1 << i % 8);
        seal(s.c);
        (void)case_decode(s.c, 0, UINT32_MAX);
    }
    free(frame);
    scene_deinit(&s);
}

int main(void) {
    const struct row *two_layers = &rows[10];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ten_rounds_drift_by_less_than_a_tenth),
        cmocka_unit_test(frames_are_placed_at_other_positions),
        cmocka_unit_test(odd_values_are_coded_without_loss),
        cmocka_unit_test_prestate(nothing_leans_on_what_is_not_known,
                                  (void *)(uintptr_t)two_layers),
        cmocka_unit_test(side_data_are_asked_for),
        cmocka_unit_test(damaged_streams_do_no_harm),
    };

    return cst_run_rows(rows, comes_back_within_its_bound) +
           cst_run_rows(rows, layers_decode_alone) + cmocka_run_group_tests(tests, NULL, NULL);
}
