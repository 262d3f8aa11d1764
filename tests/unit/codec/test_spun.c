/* SPDX-License-Identifier: Apache-2.0 */
/* The rotation behind fixed signs: what it is, that it leaves nothing in one place, and when it is
 * taken. Definitions are those of docs/codec-format.md, written here once more and slowly. */
#include "tests/lib/check.h"
#include "tests/unit/codec/codec_case.h"

#include "codec/coded.h"
#include "codec/format.h"
#include "codec/heads.h"

#include <math.h>
#include <string.h>

enum { MOST = 256 };

static double sign(uint32_t i) {
    uint32_t h = i;

    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return (h ^ h >> 16) & 1 ? -1 : 1;
}

static void transform(double *x, uint32_t n) {
    double y[MOST];

    for (uint32_t i = 0; i < n; i++) {
        y[i] = 0;
        for (uint32_t j = 0; j < n; j++)
            y[i] += __builtin_popcount(i & j) % 2 ? -x[j] : x[j];
    }
    for (uint32_t i = 0; i < n; i++)
        x[i] = y[i] / sqrt(n);
}

static void spin(double *x, uint32_t dims) {
    uint32_t n = 1;

    while (2 * n <= dims)
        n *= 2;
    for (uint32_t j = 0; j < dims; j++)
        x[j] *= sign(j + 1);
    transform(x, n);
    if (n == dims)
        return;
    for (uint32_t j = 0; j < dims; j++)
        x[j] *= sign(dims + j + 1);
    transform(x + dims - n, n);
}

/* About normal */
static double normal(struct cst_seeded_random *r) {
    double sum = -6;

    for (int i = 0; i < 12; i++)
        sum += (double)(cst_seeded_random_next(r) >> 11) * 0x1p-53;
    return sum;
}

static void spinning_is_defined_and_undone(void **state) {
    static const uint32_t sizes[] = { 1, 2, 3, 8, 12, 64, 80, 96, 112, 128, 256 };
    struct cst_seeded_random r;

    (void)state;
    cst_seeded_random_init(&r, 1);
    for (size_t k = 0; k < CST_COUNT(sizes); k++) {
        float x[MOST], was[MOST];
        double y[MOST];

        for (uint32_t j = 0; j < sizes[k]; j++)
            x[j] = was[j] = (float)(y[j] = (double)(float)normal(&r));
        cst_head_spin(x, sizes[k], cst_codec_ops());
        spin(y, sizes[k]);
        for (uint32_t j = 0; j < sizes[k]; j++)
            assert_true(fabs((double)x[j] - y[j]) < 1e-5);
        cst_head_spin_back(x, sizes[k], cst_codec_ops());
        for (uint32_t j = 0; j < sizes[k]; j++)
            assert_true(fabsf(x[j] - was[j]) < 1e-5f);
    }
}

/* Relative squared error of 4-bit codes of heads behind one of the rotations. */
static double error_of(const float *x, uint32_t heads, uint32_t dims, bool spun) {
    const struct cst_codec_ops *ops = cst_codec_ops();
    struct cst_codebook book;
    double error = 0, energy = 0;

    cst_codebook_lloyd(&book, 4);
    for (uint32_t h = 0; h < heads; h++, x += dims) {
        uint8_t codes[MOST];
        float y[MOST], norm;

        memcpy(y, x, dims * sizeof(*x));
        (spun ? cst_head_spin : cst_head_transform)(y, dims, ops);
        norm = cst_head_encode(codes, y, dims, &book, ops);
        for (uint32_t d = 0; d < dims; d++) {
            double e = (double)(y[d] - book.level[codes[d]] * norm);

            error += e * e;
            energy += (double)y[d] * (double)y[d];
        }
    }
    return error / energy;
}

/* Noise around a row of the transform, which the transform alone would turn into one value, and
 * noise in which few values are large. A dense random rotation makes heads normal, for which the
 * codes' error is .0095. */
static void heads_of_any_shape_become_normal(void **state) {
    static const uint32_t sizes[] = { 64, 80, 96, 112, 128, 256 };
    static float x[64 * MOST];
    struct cst_seeded_random r;

    (void)state;
    cst_seeded_random_init(&r, 2);
    for (size_t k = 0; k < CST_COUNT(sizes); k++) {
        uint32_t dims = sizes[k];
        double sum = 0, alone = 0;

        for (uint32_t row = 0; row < dims; row++) {
            for (uint32_t i = 0; i < 4 * dims; i++)
                x[i] = (float)(normal(&r) + (__builtin_popcount(row & i % dims) % 2 ? -3 : 3));
            sum += error_of(x, 4, dims, true) / dims;
            alone += error_of(x, 4, dims, false) / dims;
        }
        assert_true(sum < 1.15 * .0095 && alone > 3 * sum);
        for (uint32_t large = 1; large <= 8; large *= 2) {
            for (uint32_t i = 0; i < 64 * dims; i++)
                x[i] = (float)(normal(&r) * (i % dims >= dims - large ? 25 : 1));
            assert_true(error_of(x, 64, dims, true) < 1.05 * .0095);
        }
    }
}

/* ---- frames ------------------------------------------------------------------------------------
 */

struct choice_row {
    const char *name;
    uint32_t dims, bits;
    float level; /* that all values of a head are raised by, other ones for each token */
    uint8_t stage;
};

static const struct choice_row choices[] = {
    { "plain 64", 64, 4, 0, CST_STAGE_LLOYD },      { "plain 80", 80, 4, 0, CST_STAGE_LLOYD },
    { "plain 96", 96, 3, 0, CST_STAGE_LLOYD },      { "plain, 2 bits", 128, 2, 0, CST_STAGE_LLOYD },
    { "plain, 8 bits", 64, 8, 0, CST_STAGE_LLOYD }, { "level 64", 64, 4, 4, CST_STAGE_SPUN },
    { "level 80", 80, 4, 4, CST_STAGE_SPUN },       { "level 112", 112, 3, 4, CST_STAGE_SPUN },
    { "level 256", 256, 2, 4, CST_STAGE_SPUN },
};

static void fill(struct case_block *c, const struct choice_row *row) {
    struct cst_seeded_random r;

    cst_seeded_random_init(&r, 3);
    case_fill_model(c, 4, 64);
    for (uint32_t i = 0; i < c->desc.n_segments; i++) {
        for (uint32_t k = 0; k < 64 * 2; k++) {
            float level = row->level * (float)normal(&r);

            for (uint32_t d = 0; d < row->dims; d++)
                case_set_value(c, i, k / 2, k % 2, d,
                               level + case_value(c, c->block, i, k / 2, k % 2, d));
        }
    }
}

static uint8_t stage_of(const struct case_block *c, uint32_t i) {
    const struct cst_stream_entry *entry =
        (const void *)(c->frame + sizeof(struct cst_frame_header));

    return entry[i].stage;
}

/* Then the error is about that of normal values, whatever the level. */
static void the_better_rotation_is_taken(void **state) {
    const struct choice_row *row = *state;
    const struct case_shape shape = { CASE_HEADS, CST_DTYPE_F32, 64, 2, 2, row->dims, 0 };
    struct case_block *c = case_new(&shape);
    struct cst_encode_params p = { CST_PRESET_TURBOQUANT, 64, 64, 1 };
    uint8_t *whole = test_malloc(c->desc.block_bytes);
    struct cst_frame_info info;

    p.bits_k = p.bits_v = (uint8_t)row->bits;
    fill(c, row);
    assert_int_equal(case_encode(c, &p, &info), 0);
    for (uint32_t i = 0; i < c->desc.n_segments; i++)
        assert_int_equal(stage_of(c, i), row->stage);
    assert_true((double)info.error < 1.15 * sqrt(cst_codebook_distortion(true, row->bits)) + .008);
    assert_int_equal(case_decode(c, 0, UINT32_MAX), 0); /* and block_crc is right */
    memcpy(whole, c->out, c->desc.block_bytes);
    assert_int_equal(case_decode(c, 1, 1), 0);
    assert_memory_equal(c->out + c->desc.segments[2].offset, whole + c->desc.segments[2].offset,
                        2 * c->desc.segments[2].length);
    p.qjl = row->bits > 1; /* which has no such form */
    assert_int_equal(case_encode(c, &p, &info), 0);
    assert_int_equal(stage_of(c, 0), CST_STAGE_LLOYD);
    test_free(whole);
    case_free(c);
}

/* Of keys that are stored rotated, at another position: as turned there from their own. */
static void spun_keys_can_be_placed(void **state) {
    static const struct choice_row row = { "", 64, 4, 4, CST_STAGE_SPUN };
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_F32, 64, 1, 2, 64, 0 };
    const struct cst_encode_params p = { CST_PRESET_TURBOQUANT, 64, 64, 1 };
    struct case_block *c = case_new(&shape);
    struct case_stage stage;
    float *x;

    (void)state;
    case_rotate_keys(c, CST_ROPE_NEOX, 64);
    fill(c, &row);
    case_stage_init(&stage, c, 0, 64, 64);
    cst_rope_prepare(stage.w.rope, c->desc.layers, 64, 64);
    x = (void *)c->block;
    for (uint32_t t = 0; t < 64; t++) /* levels are levels before the rotation */
        cst_rope_turn(stage.w.rope, c->desc.layers, x + (size_t)t * 128, 2, 64, t, 1, stage.w.ops);
    assert_int_equal(case_encode(c, &p, NULL), 0);
    assert_int_equal(stage_of(c, 0), CST_STAGE_SPUN);
    assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
    case_stage_init(&stage, c, 0, 64, 64);
    assert_true(cst_stage_place(c->out, &stage.s, 5000, false, &stage.w));
    memcpy(c->block, c->out, c->desc.block_bytes);
    assert_int_equal(case_decode_at(c, 0, UINT32_MAX, 5000), 0);
    for (uint32_t i = 0; i < 64 * 128; i++)
        assert_true(fabsf(((const float *)(void *)c->out)[i] - x[i]) < 1e-4f);
    case_free(c);
}

/* Every set of inner loops decodes the same bits. */
static void instruction_sets_agree(void **state) {
    const struct cst_codec_ops *sets[] = { cst_codec_ops_portable(), cst_codec_ops_avx2(),
                                           cst_codec_ops_avx512() };

    (void)state;
    for (size_t k = 0; k < CST_COUNT(choices); k++) {
        const struct case_shape shape = { CASE_ROWS, CST_DTYPE_BF16, 64, 1, 2, choices[k].dims, 0 };
        struct case_block *c = case_new(&shape);
        struct case_stage stage;
        uint8_t kind = 0;
        float error;
        size_t len;

        fill(c, &choices[k]);
        case_stage_init(&stage, c, 0, 64, 64);
        len = cst_lloyd_encode(c->frame, c->block, &stage.s, choices[k].bits, 0, &stage.w, &error,
                               &kind);
        assert_true(len > 0);
        memcpy(c->block, stage.w.a, stage.s.length);
        for (size_t i = 0; i < CST_COUNT(sets) && sets[i] && kind == CST_STAGE_SPUN; i++) {
            stage.w.ops = sets[i];
            assert_true(cst_spun_decode(c->out, &stage.s, c->frame, len, &stage.w));
            assert_memory_equal(c->out, c->block, stage.s.length);
        }
        case_free(c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(spinning_is_defined_and_undone),
        cmocka_unit_test(heads_of_any_shape_become_normal),
        cmocka_unit_test(spun_keys_can_be_placed),
        cmocka_unit_test(instruction_sets_agree),
    };

    return cst_run_rows(choices, the_better_rotation_is_taken) +
           cmocka_run_group_tests(tests, NULL, NULL);
}
