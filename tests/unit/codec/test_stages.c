/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stages one by one: what they keep, what they refuse, what their streams look like. Expected
 * values come from the definitions in docs/codec-format.md, written here once more and slowly.
 */
#include "tests/lib/check.h"
#include "tests/unit/codec/codec_case.h"

#include "codec/coded.h"
#include "codec/dtype.h"
#include "codec/format.h"
#include "codec/stage.h"

#include "base/le.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct bench {
    struct case_block *c;
    const struct cst_segment *seg;
    const uint8_t *src;
    struct cst_view view;
    struct cst_stage_segment s;
    struct cst_codec_work w;
    uint8_t *stream, *out;
};

static void bench_init(struct bench *b, const struct case_shape *shape, uint32_t tokens,
                       uint32_t sinks) {
    b->c = case_new(shape);
    b->seg = &b->c->desc.segments[0];
    b->src = b->c->block + b->seg->offset;
    b->s = (struct cst_stage_segment){
        .length = b->seg->length,
        .view = cst_view_init(&b->view, &b->c->desc, b->seg) ? &b->view : NULL,
        .dtype = b->seg->dtype,
        .tokens = tokens,
        .sinks = sinks,
    };
    b->w = (struct cst_codec_work){
        .ops = cst_codec_ops(),
        .huff = malloc(sizeof(struct cst_huff_table)),
        .a = malloc(b->seg->length),
        .b = malloc(b->seg->length),
        .outliers = calloc(1, sizeof(struct cst_outliers)),
        .energy = malloc(2 * sizeof(float) * shape->block_tokens),
        .plane = malloc(b->s.view ? cst_coded_plane_size(b->s.view) : 1),
        .zstd = malloc(cst_zstd_work_size()),
        .zstd_size = cst_zstd_work_size(),
    };
    b->stream = malloc(b->seg->length);
    b->out = malloc(b->seg->length);
}

static void bench_deinit(struct bench *b) {
    free(b->w.huff);
    free(b->w.a);
    free(b->w.b);
    free(b->w.outliers);
    free(b->w.energy);
    free(b->w.plane);
    free(b->w.zstd);
    free(b->stream);
    free(b->out);
    case_free(b->c);
}

static const struct case_shape rows_shape = { CASE_ROWS, CST_DTYPE_BF16, 64, 1, 2, 72, 0 };
static const struct case_shape rows_f16 = { CASE_ROWS, CST_DTYPE_F16, 64, 1, 2, 72, 0 };

/* ---- PLANES ------------------------------------------------------------------------------------
 */

static void check_planes(struct bench *b, size_t least, size_t most) {
    size_t len = cst_planes_encode(b->stream, b->src, &b->s, &b->w);
    uint8_t *exact;

    assert_true(len >= least && len <= most);
    if (!len)
        return;
    exact = malloc(len);
    memcpy(exact, b->stream, len);
    memset(b->out, 0xa5, b->s.length);
    assert_true(cst_planes_decode(b->out, &b->s, exact, len, &b->w));
    assert_memory_equal(b->out, b->src, b->s.length);
    for (size_t n = 0; n < len; n++)
        assert_false(cst_planes_decode(b->out, &b->s, b->stream, n, &b->w));
    free(exact);
}

static void planes_keep_special_values(void **state) {
    static const uint16_t odd[] = {
        0x0000, 0x8000, 0x0001, 0x807f, 0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffff, 0x7c00, 0x7c01,
    }; /* zeros, subnormals, infinities, NaNs with payloads, of both formats */
    const struct case_shape *shapes[] = { &rows_shape, &rows_f16 };

    for (size_t k = 0; k < CST_COUNT(shapes); k++) {
        struct bench b;

        bench_init(&b, shapes[k], 64, 0);
        case_fill_model(b.c, 1, 64);
        for (size_t i = 0; i < CST_COUNT(odd); i++)
            cst_store16(b.c->block + 2 * (i * 97), odd[i]);
        check_planes(&b, 1, b.s.length * 9 / 10);
        for (uint64_t i = 0; i < b.s.length; i += 2) /* only these */
            cst_store16(b.c->block + i, odd[i / 2 * 7 % CST_COUNT(odd)]);
        check_planes(&b, 1, b.s.length);
        bench_deinit(&b);
    }
}

static void planes_of_one_value_are_tiny(void **state) {
    struct bench b;

    bench_init(&b, &rows_shape, 64, 0);
    for (uint64_t i = 0; i < b.s.length; i += 2)
        cst_store16(b.c->block + i, 0x3f81);
    check_planes(&b, 10, 10); /* head, two bytes */
    assert_int_equal(b.stream[1], CST_PLANE_FILL);
    assert_int_equal(b.stream[8], 0x7f); /* exponent */
    assert_int_equal(b.stream[9], 0x02); /* mantissa, sign */
    for (uint64_t i = 0; i < b.s.length; i += 4)
        cst_store16(b.c->block + i, 0xbf81); /* alternating sign: one bit an element */
    check_planes(&b, b.s.length / 16, b.s.length / 16 + 40);
    bench_deinit(&b);
}

static void planes_refuse_noise(void **state) {
    struct bench b;

    bench_init(&b, &rows_shape, 64, 0);
    case_fill_random(b.c, 4);
    check_planes(&b, 0, 0);
    bench_deinit(&b);
}

static void planes_leave_missing_tokens_out(void **state) {
    static const enum case_order orders[] = { CASE_ROWS, CASE_TRANSPOSED, CASE_HEADS, CASE_PADDED };
    struct case_shape shape = rows_shape;

    for (size_t k = 0; k < CST_COUNT(orders); k++) {
        struct bench b;

        shape.order = orders[k];
        bench_init(&b, &shape, 6, 0);
        case_fill_model(b.c, 1, 6);
        check_planes(&b, 1, 6 * 2 * 72 * 2); /* less than the six tokens raw */
        assert_int_equal(b.stream[0], 0);
        /* a byte in a missing token or between rows counts: nothing is lost */
        b.c->block[b.s.length - 1] = 1;
        check_planes(&b, 1, b.s.length);
        assert_int_equal(b.stream[0], CST_PLANES_FLAT);
        bench_deinit(&b);
    }
}

static void planes_check_their_head(void **state) {
    struct bench b;
    size_t len;

    bench_init(&b, &rows_shape, 64, 0);
    case_fill_model(b.c, 1, 64);
    len = cst_planes_encode(b.stream, b.src, &b.s, &b.w);
    assert_true(len > 0);
    for (size_t i = 0; i < sizeof(struct cst_planes_header); i++) {
        for (int bit = 0; bit < 8; bit++) {
            bool ok;

            b.stream[i] ^= (uint8_t)(1 << bit);
            ok = cst_planes_decode(b.out, &b.s, b.stream, len, &b.w);
            /* flat or not is the same in a layout without holes */
            assert_int_equal(ok, i == 0 && bit == 0);
            b.stream[i] ^= (uint8_t)(1 << bit);
        }
    }
    b.s.view = NULL; /* as a segment that has none */
    assert_false(cst_planes_decode(b.out, &b.s, b.stream, len, &b.w));
    bench_deinit(&b);
}

/* ---- INT8 --------------------------------------------------------------------------------------
 */

/* x from its group's scale and q, at the places that the format names. */
static float slow_int8(const struct bench *b, uint32_t t, uint32_t h, uint32_t d, float *scale) {
    uint32_t channels = b->view.heads * b->view.dims, groups = (channels + 63) / 64;
    uint32_t c = h * b->view.dims + d, coded = b->s.tokens - b->s.sinks;
    const uint8_t *scales = b->stream + b->s.sinks * channels * b->view.esize;
    const uint8_t *q = scales + coded * groups * 2;
    uint8_t x[4];

    t -= b->s.sinks;
    *scale = cst_f16_to_f32(cst_load16(scales + (t * groups + c / 64) * 2));
    b->w.ops->dequant[b->view.dtype](x, (const int8_t *)q + t * channels + c, *scale, 1);
    return cst_dtype_load(b->view.dtype, x);
}

static void check_int8(struct bench *b) {
    uint32_t channels = b->view.heads * b->view.dims, coded = b->s.tokens - b->s.sinks;
    float error = -1;
    size_t len = cst_int8_encode(b->stream, b->src, &b->s, &b->w, &error);

    assert_int_equal(len, b->s.sinks * channels * b->view.esize +
                              coded * (channels + (channels + 63) / 64 * 2));
    memset(b->out, 0xa5, b->s.length);
    assert_true(cst_int8_decode(b->out, &b->s, b->stream, len, &b->w));
    assert_memory_equal(b->out, b->w.a, b->s.length); /* what encode left there */
    for (uint32_t t = 0; t < b->view.tokens; t++) {
        for (uint32_t h = 0; h < b->view.heads; h++) {
            for (uint32_t d = 0; d < b->view.dims; d++) {
                uint64_t at = cst_view_at(&b->view, t, h, d);
                float x = cst_dtype_load(b->view.dtype, b->src + at), scale;
                float y = cst_dtype_load(b->view.dtype, b->out + at);

                if (t < b->s.sinks || t >= b->s.tokens) {
                    assert_memory_equal(b->out + at, b->src + at, b->view.esize);
                    continue;
                }
                assert_true(y == slow_int8(b, t, h, d, &scale));
                /* half a step, and the rounding of scale and value to 16 bits */
                assert_true(fabsf(x - y) <= scale * 0.5f + 0.01f * fabsf(x));
            }
        }
    }
    assert_true(error > 0 && error < 0.02f);
    for (size_t n = 0; n < len; n += 7)
        assert_false(cst_int8_decode(b->out, &b->s, b->stream, n, &b->w));
}

static void int8_of_every_layout_is_the_same_stream(void **state) {
    static const enum case_order orders[] = { CASE_ROWS, CASE_TRANSPOSED, CASE_HEADS, CASE_PADDED };
    static const uint32_t present[][2] = { { 64, 0 }, { 64, 4 }, { 17, 1 }, { 64, 64 } };

    for (uint8_t dtype = CST_DTYPE_F32; dtype < CST_DTYPES; dtype++) {
        for (size_t p = 0; p < CST_COUNT(present); p++) {
            uint8_t first[40000];
            size_t len = 0;

            for (size_t k = 0; k < CST_COUNT(orders); k++) {
                struct case_shape shape = { orders[k], dtype, 64, 1, 2, 72, 0 };
                struct bench b;

                bench_init(&b, &shape, present[p][0], present[p][1]);
                case_fill_model(b.c, 9, present[p][0]);
                if (present[p][0] == present[p][1]) { /* nothing to code: not smaller than raw */
                    float error;

                    if (orders[k] != CASE_PADDED)
                        assert_int_equal(cst_int8_encode(b.stream, b.src, &b.s, &b.w, &error), 0);
                    bench_deinit(&b);
                    continue;
                }
                check_int8(&b);
                len = (size_t)present[p][1] * 144 * b.view.esize +
                      (present[p][0] - present[p][1]) * (size_t)(144 + 6);
                assert_true(len <= sizeof(first));
                if (k == 0)
                    memcpy(first, b.stream, len);
                assert_memory_equal(b.stream, first, len);
                bench_deinit(&b);
            }
        }
    }
}

static void int8_refuses_what_it_would_spoil(void **state) {
    static const float bad[] = { INFINITY, -INFINITY, NAN };
    struct bench b;
    float error;

    bench_init(&b, &rows_shape, 64, 4);
    for (size_t i = 0; i < CST_COUNT(bad); i++) {
        case_fill_model(b.c, 1, 64);
        case_set_value(b.c, 0, 3, 1, 70, bad[i]); /* a sink is kept as it is */
        assert_true(cst_int8_encode(b.stream, b.src, &b.s, &b.w, &error) > 0);
        case_set_value(b.c, 0, 4, 1, 71, bad[i]);
        assert_int_equal(cst_int8_encode(b.stream, b.src, &b.s, &b.w, &error), 0);
    }
    case_fill_model(b.c, 1, 64);
    for (uint32_t t = 60; t < 64; t++)
        case_set_value(b.c, 0, t, 0, 0, 1e7f); /* scales overflow fp16; too many for outliers */
    assert_int_equal(cst_int8_encode(b.stream, b.src, &b.s, &b.w, &error), 0);
    case_fill_model(b.c, 1, 64);
    b.c->block[b.s.length - 1] = 1;
    b.s.tokens = 63; /* a byte in a missing token */
    assert_int_equal(cst_int8_encode(b.stream, b.src, &b.s, &b.w, &error), 0);
    bench_deinit(&b);
}

static void int8_of_constants(void **state) {
    struct bench b;
    float error;

    bench_init(&b, &rows_shape, 64, 0);
    for (uint64_t i = 0; i < b.s.length; i += 2)
        cst_store16(b.c->block + i, cst_f32_to_bf16(127)); /* scale 1: no error at all */
    assert_true(cst_int8_encode(b.stream, b.src, &b.s, &b.w, &error) > 0);
    assert_true(error == 0);
    for (uint64_t i = 0; i < b.s.length; i += 2)
        cst_store16(b.c->block + i, cst_f32_to_bf16(1.0078125f * (float)(1 + i / 2 % 3)));
    for (uint32_t t = 1; t < 64; t++) /* each channel the same in all tokens */
        memcpy(b.c->block + t * b.view.token_stride, b.c->block, b.view.token_stride);
    assert_int_equal(cst_int8_encode(b.stream, b.src, &b.s, &b.w, &error), 0);
    b.s.tokens = 1; /* a tail of one token has no deviation either */
    memset(b.c->block + b.view.token_stride, 0, b.s.length - b.view.token_stride);
    assert_int_equal(cst_int8_encode(b.stream, b.src, &b.s, &b.w, &error), 0);
    bench_deinit(&b);
}

static void int8_refuses_scales_that_are_not_finite(void **state) {
    struct bench b;
    float error;
    size_t len;

    bench_init(&b, &rows_shape, 64, 0);
    case_fill_model(b.c, 1, 64);
    len = cst_int8_encode(b.stream, b.src, &b.s, &b.w, &error);
    cst_store16(b.stream + 6 * 63 + 4, 0x7c00);
    assert_false(cst_int8_decode(b.out, &b.s, b.stream, len, &b.w));
    cst_store16(b.stream + 6 * 63 + 4, 0xfe00);
    assert_false(cst_int8_decode(b.out, &b.s, b.stream, len, &b.w));
    cst_store16(b.stream + 6 * 63 + 4, 0x3c00);
    assert_true(cst_int8_decode(b.out, &b.s, b.stream, len, &b.w));
    bench_deinit(&b);
}

/* ---- ZSTD --------------------------------------------------------------------------------------
 */

static void zstd_gives_bytes_back(void **state) {
    struct bench b;
    size_t len;

    bench_init(&b, &rows_shape, 64, 0);
    case_fill_random(b.c, 1);
    assert_int_equal(cst_zstd_encode(b.stream, b.src, b.s.length, &b.w), 0); /* doesn't shrink */
    assert_int_equal(cst_zstd_encode(b.stream, b.src, 0, &b.w), 0);
    memset(b.c->block + 1000, 3, 9000);
    len = cst_zstd_encode(b.stream, b.src, b.s.length, &b.w);
    assert_true(len > 0 && len < b.s.length - 8500);
    assert_true(cst_zstd_decode(b.out, b.s.length, b.stream, len, &b.w));
    assert_memory_equal(b.out, b.src, b.s.length);
    assert_false(cst_zstd_decode(b.out, b.s.length - 1, b.stream, len, &b.w));
    assert_false(cst_zstd_decode(b.out, b.s.length, b.stream, len - 1, &b.w));
    assert_false(cst_zstd_decode(b.out, b.s.length, b.stream, 0, &b.w));
    bench_deinit(&b);
}

/* ---- distortion --------------------------------------------------------------------------------
 */

static void distortion_by_hand(void **state) {
    static const struct case_shape shape = { CASE_TRANSPOSED, CST_DTYPE_F32, 16, 1, 1, 2, 0 };
    static const struct cst_outliers but = { 2, { 5, 7 } };
    struct bench b;
    float *x, *y;

    bench_init(&b, &shape, 16, 0);
    x = (void *)b.c->block;
    y = (void *)b.out;
    for (int t = 0; t < 16; t++) {
        x[t] = 100 + (t % 2 ? 3.0f : -3.0f); /* mean 100, deviation 3 */
        x[16 + t] = t % 2 ? 4.0f : -4.0f;    /* mean 0, deviation 4 */
        y[t] = x[t] + 0.5f;
        y[16 + t] = x[16 + t];
    }
    /* errors: 16 x .25; deviation: 16 x (9 + 16) */
    assert_true(fabs(cst_distortion(b.src, b.out, &b.view, 0, 16, NULL, &b.w) - sqrt(4.0 / 400)) <
                1e-15);
    /* of tokens 4 and 5 only */
    assert_true(fabs(cst_distortion(b.src, b.out, &b.view, 4, 6, NULL, &b.w) - sqrt(.5 / 50)) <
                1e-15);
    assert_true(cst_distortion(b.src, b.src, &b.view, 0, 16, NULL, &b.w) == 0);
    assert_true(cst_distortion(b.src, b.out, &b.view, 16, 16, NULL, &b.w) == 0);
    assert_true(isinf(cst_distortion(b.src, b.out, &b.view, 4, 5, NULL, &b.w))); /* no deviation */
    y[7] = NAN;
    /* of 4, 6 and 8 only, all of one sign */
    assert_true(isinf(cst_distortion(b.src, b.out, &b.view, 4, 9, &but, &b.w)));
    /* and 9: mean of the squares less that of the values, twice 3 and 4 */
    assert_true(fabs(cst_distortion(b.src, b.out, &b.view, 4, 10, &but, &b.w) -
                     sqrt(4 * .25 / (4 * (9 + 16) * .75))) < 1e-15);
    assert_true(isinf(cst_distortion(b.src, b.out, &b.view, 0, 16, NULL, &b.w)));
    bench_deinit(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(planes_keep_special_values),
        cmocka_unit_test(planes_of_one_value_are_tiny),
        cmocka_unit_test(planes_refuse_noise),
        cmocka_unit_test(planes_leave_missing_tokens_out),
        cmocka_unit_test(planes_check_their_head),
        cmocka_unit_test(int8_of_every_layout_is_the_same_stream),
        cmocka_unit_test(int8_refuses_what_it_would_spoil),
        cmocka_unit_test(int8_of_constants),
        cmocka_unit_test(int8_refuses_scales_that_are_not_finite),
        cmocka_unit_test(zstd_gives_bytes_back),
        cmocka_unit_test(distortion_by_hand),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
