/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames over every layout: exact presets give each byte back, lossy ones stay within the bound,
 * parts of a block decode alone, and nothing that isn't the frame decodes.
 */
#include "tests/lib/check.h"
#include "tests/unit/codec/codec_case.h"

#include "codec/format.h"

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
    assert_int_equal(info->block_crc, cst_crc32c(0, decoded, c->desc.block_bytes));
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

int main(void) {
    return cst_run_rows(rows, exact_presets_give_every_byte_back);
}
