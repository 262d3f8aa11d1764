/* SPDX-License-Identifier: Apache-2.0 */
/* Outliers: which rows are some, and that they stay as they are, spoil nothing, and are refused
 * where a stream lies about them. */
#include "tests/lib/check.h"
#include "tests/unit/codec/side_case.h"

#include "codec/dtype.h"
#include "codec/format.h"
#include "codec/frame_layout.h"
#include "codec/outliers.h"
#include "codec/tucker.h"

#include "base/crc32c.h"

#include <math.h>
#include <string.h>

/* ---- finding -----------------------------------------------------------------------------------
 */

struct rows_row {
    const char *name;
    uint32_t n, channels, sinks;
    float factor, mean;
    uint32_t far[6], n_far; /* rows times the factor */
    bool aligned;           /* all in one direction */
    uint32_t found;
};

static const struct rows_row finds[] = {
    { "none", 64, 128, 0, 1, 0, { 0 }, 0, false, 0 },
    { "one", 64, 128, 4, 6, 0, { 20 }, 1, false, 1 },
    { "neighbours", 64, 100, 0, 25, 0, { 30, 31 }, 2, false, 2 },
    { "first and last", 64, 128, 4, 25, 0, { 0, 63 }, 2, false, 2 },
    { "as many as may be", 64, 128, 0, 25, 0, { 1, 2, 3, 40 }, 4, true, 4 },
    { "one more", 64, 128, 0, 25, 0, { 1, 2, 3, 40, 50 }, 5, false, 0 },
    { "not far enough", 64, 128, 0, 4, 0, { 20 }, 1, false, 0 },
    { "around a mean", 64, 128, 0, 8, 1000, { 20 }, 1, false, 1 },
    { "few rows", 15, 128, 0, 25, 0, { 3 }, 1, false, 0 },
    { "sixteen rows", 16, 12, 2, 25, 0, { 3 }, 1, false, 1 },
    { "many rows", 1000, 7, 0, 40, 0, { 3, 500, 501, 502, 999 }, 5, true, 5 },
    { "one channel", 64, 1, 0, 1e4f, 0, { 9 }, 1, true, 1 },
    { "too large to sum", 64, 128, 0, 1e30f, 0, { 9 }, 1, false, 0 },
    { "not finite", 64, 128, 0, INFINITY, 0, { 9 }, 1, false, 0 },
};

static bool is_far(const struct rows_row *row, uint32_t i) {
    for (uint32_t k = 0; k < row->n_far; k++) {
        if (row->far[k] == i)
            return true;
    }
    return false;
}

static void rows_far_off_are_found(void **state) {
    const struct rows_row *row = *state;
    static float x[1000 * 128], was[1000 * 128], mean[128], energy[2000];
    const struct cst_outlier_rows rows = {
        x, 128, row->n, row->channels, row->sinks, mean, energy
    };
    struct cst_seeded_random r;
    struct cst_outliers found;

    cst_seeded_random_init(&r, 3);
    for (uint32_t i = 0; i < row->n; i++) {
        for (uint32_t c = 0; c < row->channels; c++) {
            double u = (double)(cst_seeded_random_next(&r) >> 11) * 0x1p-52 - 1;

            if (is_far(row, i))
                u = (row->aligned ? .58 : u) * (double)row->factor;
            x[i * 128 + c] = (float)u + row->mean;
        }
    }
    memcpy(was, x, sizeof(x));
    cst_outliers_find(&found, &rows, 22.2f);
    assert_int_equal(found.n, row->found);
    for (uint32_t k = 0; k < found.n; k++)
        assert_int_equal(found.token[k], row->sinks + row->far[k]);
    for (uint32_t i = 0; i < row->n; i++) {
        uint32_t from = i;

        while (found.n && is_far(row, from) && from > 0)
            from--;
        while (found.n && is_far(row, from))
            from++;
        assert_memory_equal(x + i * 128, was + from * 128, row->channels * sizeof(*x));
    }
}

/* ---- frames ------------------------------------------------------------------------------------
 */

static const struct case_shape shape = { CASE_ROWS, CST_DTYPE_BF16, 64, 2, 2, 64, 0 };
static const uint32_t tokens[] = { 9, 10, 50 };
enum { POSITION = 100 };

struct preset_row {
    const char *name;
    struct cst_encode_params params;
    bool side;
    uint32_t kept;
};

#define AT 64, POSITION, .bound = 2
static const struct preset_row presets[] = {
    { "int8", { CST_PRESET_INT8, AT }, false, 3 },
    { "int4", { CST_PRESET_INT4, AT }, false, 3 },
    { "kivi4", { CST_PRESET_KIVI4, AT }, false, 3 },
    { "kivi2", { CST_PRESET_KIVI2, AT }, false, 3 },
    { "turboquant", { CST_PRESET_TURBOQUANT, AT }, false, 3 },
    { "turboquant+qjl", { CST_PRESET_TURBOQUANT, AT, .qjl = true }, false, 3 },
    { "polar", { CST_PRESET_POLAR, AT }, false, 3 },
    { "jolt", { CST_PRESET_JOLT, AT, .ratio = 2.5f }, false, 3 },
    { "flashjolt", { CST_PRESET_FLASHJOLT, AT, .ratio = 2.5f }, false, 3 },
    { "jolt+", { CST_PRESET_JOLT_PLUS, AT, .ratio = 2.5f }, false, 3 },
    { "klt", { CST_PRESET_KLT, AT }, true, 3 },
    { "deep", { CST_PRESET_DEEP, AT }, true, 0 }, /* one step for all: they harm nobody */
};

static struct side_case side;

static void fill(struct case_block *c, bool learned) {
    if (learned)
        side_case_fill(c, 7, 64);
    else
        case_fill_model(c, 7, 64);
}

/* Three tokens of every tensor 25 times larger. */
static void make_outliers(struct case_block *c) {
    for (uint32_t i = 0; i < c->desc.n_segments; i++) {
        for (uint32_t k = 0; k < CST_COUNT(tokens); k++) {
            for (uint32_t d = 0; d < 128; d++)
                case_set_value(c, i, tokens[k], d / 64, d % 64,
                               25 * case_value(c, c->block, i, tokens[k], d / 64, d % 64));
        }
    }
}

static struct case_block *make(const struct preset_row *row) {
    struct case_block *c = case_new(&shape);

    case_rotate_keys(c, CST_ROPE_NEOX, 64);
    side_case_deinit(&side);
    if (row->side)
        side_case_learn(&side, c, 20, NULL);
    return c;
}

static const struct cst_stream_entry *entry_of(const struct case_block *c, uint32_t i) {
    return (const struct cst_stream_entry *)(const void *)(c->frame +
                                                           sizeof(struct cst_frame_header)) +
           i;
}

/* Tokens kept of what was encoded last, as they were; keys turned on by `distance`. */
static void check_kept(struct case_block *c, const struct preset_row *row, uint32_t distance) {
    struct case_stage stage;

    case_stage_init(&stage, c, 0, 64, POSITION);
    cst_rope_prepare(stage.w.rope, c->desc.layers, distance, 1);
    for (uint32_t i = 0; i < c->desc.n_segments; i++) {
        for (uint32_t k = 0; k < row->kept; k++) {
            float x[128];

            for (uint32_t d = 0; d < 128; d++)
                x[d] = case_value(c, c->block, i, tokens[k], d / 64, d % 64);
            if (i % 2 == 0 && distance)
                cst_rope_turn(stage.w.rope, c->desc.layers, x, 2, 64, 0, 1, stage.w.ops);
            for (uint32_t d = 0; d < 128; d++) {
                float y = case_value(c, c->out, i, tokens[k], d / 64, d % 64);

                assert_true(fabsf(x[d] - y) <= (distance ? 0x1p-8f * fabsf(x[d]) : 0));
            }
        }
    }
}

static void outliers_stay_and_spoil_nothing(void **state) {
    const struct preset_row *row = *state;
    struct case_block *c = make(row);
    struct cst_encode_params p = row->params;
    struct cst_frame_info clean, info;
    uint8_t *whole = test_malloc(c->desc.block_bytes);

    p.side = c->side;
    fill(c, row->side);
    assert_int_equal(case_encode(c, &p, &clean), 0);
    for (uint32_t i = 0; i < c->desc.n_segments; i++)
        assert_int_equal(cst_load16(&entry_of(c, i)->outliers), 0);
    make_outliers(c);
    assert_int_equal(case_encode(c, &p, &info), 0);
    for (uint32_t i = 0; i < c->desc.n_segments; i++)
        assert_int_equal(cst_load16(&entry_of(c, i)->outliers), row->kept);
    /* jolt pays for them with other tokens' bits */
    assert_true(info.error <= clean.error * (cst_preset_is_tucker(p.preset) ? 1.5f : 1.1f));
    assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
    check_kept(c, row, 0);
    memcpy(whole, c->out, c->desc.block_bytes);
    assert_int_equal(case_decode(c, 1, 1), 0); /* the second layer */
    assert_memory_equal(c->out + c->desc.segments[2].offset, whole + c->desc.segments[2].offset,
                        2 * c->desc.segments[2].length);
    assert_int_equal(case_decode_at(c, 0, UINT32_MAX, 1000), 0);
    check_kept(c, row, 1000 - POSITION);
    test_free(whole);
    case_free(c);
}

/* Blocks that are coded again and again keep them, and don't wander. */
static void rounds_keep_outliers(void **state) {
    const struct preset_row *row = *state;
    struct case_block *c = make(row);
    struct cst_encode_params p = row->params;
    uint8_t *first = test_malloc(c->desc.block_bytes);
    struct cst_frame_info once, info;
    struct case_stage stage;

    p.side = c->side;
    fill(c, row->side);
    make_outliers(c);
    memcpy(first, c->block, c->desc.block_bytes);
    for (int i = 0; i < 10; i++) {
        assert_int_equal(case_encode(c, &p, i ? &info : &once), 0);
        assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
        memcpy(c->block, c->out, c->desc.block_bytes);
    }
    memcpy(c->block, first, c->desc.block_bytes);
    check_kept(c, row, 0);
    /* the jolt family allocates anew each time, and sketches wander without outliers, too */
    for (uint32_t i = 0; i < c->desc.n_segments && !p.qjl && !cst_preset_is_tucker(p.preset); i++) {
        static const struct cst_outliers but = { 3, { 9, 10, 50 } };

        case_stage_init(&stage, c, i, 64, POSITION);
        assert_true(cst_distortion(first + c->desc.segments[i].offset,
                                   c->out + c->desc.segments[i].offset, &stage.view, 0, 64,
                                   row->kept ? &but : NULL, &stage.w) <= 1.1 * (double)once.error);
    }
    test_free(first);
    case_free(c);
}

/* The plan of jolt counts them to the byte. */
static void plans_count_outliers(void **state) {
    const struct cst_encode_params p = { .preset = CST_PRESET_JOLT_PLUS,
                                         .tokens = 64,
                                         .first_position = POSITION,
                                         .bound = 2,
                                         .ratio = 2.5f };
    struct case_block *c = case_new(&shape);
    struct cst_codec_work w;
    uint64_t planned, bytes = 0;

    (void)state;
    case_fill_model(c, 7, 64);
    make_outliers(c);
    assert_true(cst_codec_work_init(&w, &c->desc, p.preset, c->work, c->work_len));
    w.params = &p;
    cst_layout_order(w.order, &c->desc, true);
    assert_true(cst_layered_begin(c->block, 64, POSITION, p.preset, &w));
    planned = ((const struct cst_tucker *)w.dense)->planned;
    assert_int_equal(case_encode(c, &p, NULL), 0);
    for (uint32_t i = 0; i < c->desc.n_segments; i++) {
        assert_int_equal(cst_load16(&entry_of(c, i)->outliers), 3);
        bytes += cst_align_up(cst_load32(&entry_of(c, i)->length), CST_STREAM_ALIGN);
    }
    assert_int_equal(planned, bytes);
    case_free(c);
}

/* ---- forged lists ------------------------------------------------------------------------------
 */

static void seal(struct case_block *c) {
    struct cst_frame_header *h = (void *)c->frame;
    struct cst_stream_entry *table = (void *)(h + 1);
    uint64_t at = sizeof(*h) + c->desc.n_segments * sizeof(*table);

    for (uint32_t i = 0; i < c->desc.n_segments; i++) {
        at = cst_align_up(at, CST_STREAM_ALIGN);
        cst_store32(&table[i].crc, cst_crc32c(0, c->frame + at, cst_load32(&table[i].length)));
        at += cst_load32(&table[i].length);
    }
    cst_store32(&h->table_crc, cst_crc32c(0, table, c->desc.n_segments * sizeof(*table)));
    cst_store32(&h->header_crc, cst_crc32c(0, h, offsetof(struct cst_frame_header, header_crc)));
}

static int decode_with(struct case_block *c, uint8_t *place, uint16_t value) {
    uint16_t was = cst_load16(place);
    int r;

    cst_store16(place, value);
    seal(c);
    r = case_decode(c, 0, UINT32_MAX);
    cst_store16(place, was);
    return r;
}

static void forged_lists_are_refused(void **state) {
    const struct cst_encode_params p = { .preset = CST_PRESET_JOLT_PLUS, .tokens = 60, .bound = 2 };
    struct case_block *c = case_new(&shape);
    uint8_t *count, *list;

    (void)state;
    case_fill_model(c, 7, 60);
    make_outliers(c);
    assert_int_equal(case_encode(c, &p, NULL), 0);
    count = c->frame + sizeof(struct cst_frame_header) + 2;
    list = c->frame +
           cst_align_up(sizeof(struct cst_frame_header) +
                            c->desc.n_segments * sizeof(struct cst_stream_entry),
                        CST_STREAM_ALIGN) +
           cst_load32(&entry_of(c, 0)->length) - 3 * (2 + 256);
    assert_int_equal(cst_load16(count), 3);
    assert_int_equal(cst_load16(list), 9);
    assert_int_equal(decode_with(c, list, 8), 0);
    assert_int_equal(decode_with(c, list, 4), 0);
    assert_int_equal(decode_with(c, list, 3), CST_CODEC_E_CORRUPT); /* a sink */
    assert_int_equal(decode_with(c, list, 10), CST_CODEC_E_CORRUPT);
    assert_int_equal(decode_with(c, list + 2, 9), CST_CODEC_E_CORRUPT);
    assert_int_equal(decode_with(c, list + 4, 59), 0);
    assert_int_equal(decode_with(c, list + 4, 60), CST_CODEC_E_CORRUPT); /* not present */
    assert_int_equal(decode_with(c, count, 2), CST_CODEC_E_CORRUPT);
    assert_int_equal(decode_with(c, count, 4), CST_CODEC_E_CORRUPT); /* of 56: 3 at most */
    assert_int_equal(decode_with(c, count, 0xffff), CST_CODEC_E_CORRUPT);
    c->frame[count - c->frame - 2] = CST_STAGE_RAW; /* which keeps everything */
    assert_int_equal(decode_with(c, count, 3), CST_CODEC_E_VERSION);
    case_free(c);
}

/* ---- learning ----------------------------------------------------------------------------------
 */

static void tables_come_from_the_others(void **state) {
    enum { BLOCKS = 12 };
    struct case_block *c = case_new(&shape);
    struct cst_learn_block blocks[BLOCKS];
    struct side_case with;
    float rms[4];

    (void)state;
    case_rotate_keys(c, CST_ROPE_NEOX, 64);
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < BLOCKS; i++) {
            uint8_t *bytes = test_malloc(c->desc.block_bytes);

            side_case_fill(c, 1000 + i, 64);
            if (round)
                make_outliers(c);
            memcpy(bytes, c->block, c->desc.block_bytes);
            blocks[i] = (struct cst_learn_block){ bytes, 64, 64 * (1 + i) };
        }
        assert_int_equal(side_case_learn_blocks(&with, &c->desc, blocks, BLOCKS, NULL), 0);
        assert_int_equal(side_case_parse(&with, &c->desc), 0);
        for (uint32_t i = 0; i < 4; i++) {
            const struct cst_side_tensor *t = cst_side_tensor(&with.side, i / 2, i % 2);

            if (round)
                assert_true(fabsf(t->rms / rms[i] - 1) < .03f);
            rms[i] = t->rms;
        }
        for (uint32_t i = 0; i < BLOCKS; i++)
            test_free((void *)blocks[i].bytes);
        side_case_deinit(&with);
    }
    case_free(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plans_count_outliers),
        cmocka_unit_test(forged_lists_are_refused),
        cmocka_unit_test(tables_come_from_the_others),
    };
    int failed = cst_run_rows(finds, rows_far_off_are_found) +
                 cst_run_rows(presets, outliers_stay_and_spoil_nothing) +
                 cst_run_rows(presets, rounds_keep_outliers) +
                 cmocka_run_group_tests(tests, NULL, NULL);

    side_case_deinit(&side);
    return failed;
}
