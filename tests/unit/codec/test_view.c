/* SPDX-License-Identifier: Apache-2.0 */
/* Tensor views against a map of the segment that marks each element one by one. */
#include "tests/lib/check.h"
#include "tests/unit/codec/codec_case.h"

#include "codec/dtype.h"
#include "codec/view.h"

#include <stdlib.h>
#include <string.h>

static const struct row {
    const char *name;
    struct case_shape shape;
    uint32_t tokens;
    uint64_t runs, run_bytes; /* fewest possible for this layout */
} rows[] = {
    { "rows", { CASE_ROWS, CST_DTYPE_BF16, 16, 1, 3, 20, 0 }, 16, 1, 1920 },
    { "rows, tail", { CASE_ROWS, CST_DTYPE_BF16, 16, 1, 3, 20, 0 }, 5, 1, 600 },
    { "rows, tail of 1", { CASE_ROWS, CST_DTYPE_F32, 16, 1, 3, 20, 0 }, 1, 1, 240 },
    { "transposed", { CASE_TRANSPOSED, CST_DTYPE_F16, 16, 1, 3, 20, 0 }, 16, 1, 1920 },
    { "transposed, tail", { CASE_TRANSPOSED, CST_DTYPE_F16, 16, 1, 3, 20, 0 }, 5, 60, 10 },
    { "transposed, tail of 1", { CASE_TRANSPOSED, CST_DTYPE_F16, 16, 1, 3, 20, 0 }, 1, 60, 2 },
    { "heads", { CASE_HEADS, CST_DTYPE_BF16, 16, 1, 3, 20, 0 }, 16, 1, 1920 },
    { "heads, tail", { CASE_HEADS, CST_DTYPE_BF16, 16, 1, 3, 20, 0 }, 5, 3, 200 },
    { "padded", { CASE_PADDED, CST_DTYPE_BF16, 16, 1, 3, 20, 0 }, 16, 16, 120 },
    { "padded, tail", { CASE_PADDED, CST_DTYPE_BF16, 16, 1, 3, 20, 0 }, 5, 5, 120 },
    { "one head", { CASE_TRANSPOSED, CST_DTYPE_BF16, 16, 1, 1, 20, 0 }, 3, 20, 6 },
    { "one dim", { CASE_HEADS, CST_DTYPE_BF16, 16, 1, 3, 1, 0 }, 3, 3, 6 },
    { "one of each", { CASE_ROWS, CST_DTYPE_BF16, 16, 1, 1, 1, 0 }, 3, 1, 6 },
};

/* 1 for each byte of an element of the present tokens */
static uint8_t *naive_map(const struct case_block *c, uint32_t tokens) {
    const struct cst_segment *seg = &c->desc.segments[0];
    const struct cst_layer *layer = &c->desc.layers[0];
    uint8_t *map = calloc(1, seg->length);

    for (uint32_t t = 0; t < tokens; t++) {
        for (uint32_t h = 0; h < layer->kv_heads; h++) {
            for (uint32_t d = 0; d < layer->head_dim_k; d++)
                memset(map + t * seg->token_stride + h * seg->head_stride + d * seg->dim_stride, 1,
                       cst_dtype_size(seg->dtype));
        }
    }
    return map;
}

static void runs_cover_the_elements_in_order(void **state) {
    const struct row *row = *state;
    cst_auto(case_freep) struct case_block *c = case_new(&row->shape);
    const struct cst_segment *seg = &c->desc.segments[0];
    uint8_t *map = naive_map(c, row->tokens), *packed, *bytes = malloc(seg->length);
    struct cst_view v;
    struct cst_runs r;
    uint64_t end = 0;

    assert_true(cst_view_init(&v, &c->desc, seg));
    r = cst_view_runs(&v, row->tokens);
    assert_int_equal(r.outer * r.inner, row->runs);
    assert_int_equal(r.bytes, row->run_bytes);
    packed = malloc(cst_runs_total(&r));
    for (uint64_t i = 0; i < seg->length; i++)
        bytes[i] = (uint8_t)(i * 251 >> 3);
    cst_runs_gather(&r, packed, bytes);
    /* memory order: packed bytes are the marked bytes in rising order */
    for (uint64_t i = 0; i < seg->length; i++) {
        if (map[i])
            assert_int_equal(packed[end++], bytes[i]);
    }
    assert_int_equal(end, cst_runs_total(&r));
    cst_runs_zero_holes(&r, bytes, seg->length);
    for (uint64_t i = 0; i < seg->length; i++)
        assert_int_equal(bytes[i], map[i] ? (uint8_t)(i * 251 >> 3) : 0);
    assert_true(cst_runs_holes_are_zero(&r, bytes, seg->length));
    for (uint64_t i = 0; i < seg->length; i++) {
        if (map[i])
            continue;
        bytes[i] = 1;
        assert_false(cst_runs_holes_are_zero(&r, bytes, seg->length));
        bytes[i] = 0;
    }
    free(map);
    free(packed);
    free(bytes);
}

static void rows_are_channels_in_order(void **state) {
    const struct row *row = *state;
    cst_auto(case_freep) struct case_block *c = case_new(&row->shape);
    const struct cst_segment *seg = &c->desc.segments[0];
    uint32_t heads = row->shape.heads, dims = row->shape.dims, esize;
    uint8_t *out = calloc(1, seg->length);
    uint8_t bytes[4 * 60];
    struct cst_view v;

    case_fill_model(c, 3, row->shape.block_tokens);
    assert_true(cst_view_init(&v, &c->desc, seg));
    esize = v.esize;
    assert_int_equal(cst_view_channels(&v), heads * dims);
    for (uint32_t t = 0; t < row->shape.block_tokens; t++) {
        cst_view_get_row(&v, bytes, c->block + seg->offset, t);
        for (uint32_t i = 0; i < heads * dims; i++)
            assert_true(cst_dtype_load(seg->dtype, bytes + i * esize) ==
                        case_value(c, c->block, 0, t, i / dims, i % dims));
        cst_view_put_row(&v, out, bytes, t);
    }
    assert_memory_equal(out, c->block + seg->offset, seg->length);
    free(out);
}

static const struct refused {
    const char *name;
    uint64_t token_stride, head_stride, dim_stride, length;
    bool ok;
} refused[] = {
    /* 16 tokens x 3 heads x 20 dims of 2 bytes */
    { "plain", 120, 40, 2, 1920, true },
    { "a byte short", 120, 40, 2, 1919, false },
    { "tokens overlap", 118, 40, 2, 1920, false },
    { "heads overlap", 120, 38, 2, 1920, false },
    { "dims overlap", 120, 40, 1, 1920, false },
    { "dims apart", 240, 80, 4, 3840, false },
    { "all tokens in one place", 0, 40, 2, 1920, false },
    { "stride past the end", UINT64_MAX, 40, 2, 1920, false },
    { "strides that wrap", UINT64_C(1) << 63, UINT64_C(1) << 63, 2, 1920, false },
    { "tokens inside heads", 40, 640, 2, 1920, true },
    { "odd padding", 121, 40, 2, 1936, true },
};

static void refuses_what_does_not_fit(void **state) {
    const struct refused *row = *state;
    struct cst_layer layer = { .kv_heads = 3, .head_dim_k = 20 };
    struct cst_descriptor desc = { .block_tokens = 16, .n_layers = 1, .layers = &layer };
    struct cst_segment seg = {
        .dtype = CST_DTYPE_BF16,
        .length = row->length,
        .token_stride = row->token_stride,
        .head_stride = row->head_stride,
        .dim_stride = row->dim_stride,
    };
    struct cst_view v;

    assert_int_equal(cst_view_init(&v, &desc, &seg), row->ok);
    seg.dtype = CST_DTYPE_OPAQUE;
    assert_false(cst_view_init(&v, &desc, &seg));
    seg.dtype = CST_DTYPES;
    assert_false(cst_view_init(&v, &desc, &seg));
    seg.dtype = CST_DTYPE_BF16;
    layer.kv_heads = UINT32_MAX;
    assert_false(cst_view_init(&v, &desc, &seg));
    layer.kv_heads = 0;
    assert_false(cst_view_init(&v, &desc, &seg));
}

static void zero_is_zero(void **state) {
    uint8_t bytes[70] = { 0 };

    for (size_t n = 0; n <= sizeof(bytes); n++) {
        assert_true(cst_is_zero(bytes, n));
        for (size_t i = 0; i < n; i++) {
            bytes[i] = 0x80;
            assert_false(cst_is_zero(bytes, n));
            bytes[i] = 0;
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(zero_is_zero) };

    return cst_run_rows(rows, runs_cover_the_elements_in_order) +
           cst_run_rows(rows, rows_are_channels_in_order) +
           cst_run_rows(refused, refuses_what_does_not_fit) +
           cmocka_run_group_tests(tests, NULL, NULL);
}
