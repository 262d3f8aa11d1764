/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sign sketches of turboquant on normal values, against the formulas of the papers: inner products
 * are unbiased, their variance is (pi / 2 - 1) / d |r|^2 |y|^2 with an orthogonal S, below the
 * pi / (2 d) |r|^2 |y|^2 of a Gaussian one, where |r|^2 is the distortion of the level codes of one
 * bit less.
 */
#include "tests/lib/check.h"
#include "tests/unit/codec/codec_case.h"

#include "base/macros.h"

#include <math.h>

enum { TOKENS = 64, LAYERS = 6, HEADS = 4, QUERIES = 4 };

/* Lloyd-Max distortion of 1 to 4 bits on a normal variable: Max, "Quantizing for minimum
 * distortion", table I. */
static const double max_distortion[] = { 1, .3634, .1175, .03454, .009497 };

static double uniform(struct cst_seeded_random *random) {
    return ((double)(cst_seeded_random_next(random) >> 11) + .5) * 0x1p-53;
}

static float normal(struct cst_seeded_random *random) {
    return (float)(sqrt(-2 * log(uniform(random))) * cos(2 * M_PI * uniform(random)));
}

struct sums {
    double energy, own, error, spread, queries; /* |x|^2, <x, x'>, |x - x'|^2, <y, x - x'>^2 */
};

static void add_head(struct sums *s, const struct case_block *c, uint32_t i, uint32_t t, uint32_t h,
                     uint32_t dims, struct cst_seeded_random *random) {
    double product[QUERIES] = { 0 }, length[QUERIES] = { 0 }, energy = 0;

    for (uint32_t d = 0; d < dims; d++) {
        double x = (double)case_value(c, c->block, i, t, h, d);
        double got = (double)case_value(c, c->out, i, t, h, d);

        energy += x * x;
        s->own += x * got;
        s->error += (x - got) * (x - got);
        for (int k = 0; k < QUERIES; k++) {
            double y = (double)normal(random);

            product[k] += y * (x - got);
            length[k] += y * y;
        }
    }
    s->energy += energy;
    for (int k = 0; k < QUERIES; k++) {
        s->spread += product[k] * product[k] / length[k] / energy;
        s->queries++;
    }
}

static struct sums measure(uint32_t dims, uint8_t bits, bool qjl) {
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_F32, TOKENS, LAYERS, HEADS, dims, 0 };
    const struct cst_encode_params p = {
        CST_PRESET_TURBOQUANT, TOKENS, 64, 4, bits, bits, .qjl = qjl
    };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    struct cst_seeded_random random;
    struct sums s = { 0 };

    cst_seeded_random_init(&random, dims + bits);
    for (int round = 0; round < 2; round++) {
        for (uint32_t k = 0; k < 2 * LAYERS * TOKENS * HEADS; k++) {
            uint32_t h = k % HEADS, t = k / HEADS % TOKENS, i = k / HEADS / TOKENS;

            for (uint32_t d = 0; !round && d < dims; d++)
                case_set_value(c, i, t, h, d, normal(&random));
            if (round)
                add_head(&s, c, i, t, h, dims, &random);
        }
        if (!round) {
            assert_int_equal(case_encode(c, &p, NULL), 0);
            assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
        }
    }
    return s;
}

static void inner_products_are_unbiased(void **state) {
    struct sums plain;

    for (uint32_t dims = 64; dims <= 128; dims *= 2) {
        for (uint8_t bits = 2; bits <= 4; bits++) {
            struct sums s = measure(dims, bits, true);

            /* deviation of the mean over 3072 heads: sqrt(.571 * .3634 / 64 / 3072) = .001 */
            assert_true(fabs(s.own / s.energy - 1) < .004);
        }
    }
    /* levels alone shrink what lies along a query, more with fewer bits */
    plain = measure(128, 2, false);
    assert_true(fabs(plain.own / plain.energy - sqrt(1 - max_distortion[2])) < .003);
}

static void errors_are_those_of_the_formula(void **state) {
    for (uint32_t dims = 64; dims <= 128; dims *= 2) {
        for (uint8_t bits = 2; bits <= 5; bits++) {
            struct sums s = measure(dims, bits, true);
            double left = max_distortion[bits - 1], expected = (M_PI / 2 - 1) * left;
            double error = s.error / s.energy / expected;
            double variance = s.spread / s.queries;

            /* the formula's limit is that of many dimensions */
            assert_true(error > 1 - 7.0 / dims && error < 1.01);
            assert_true(fabs(variance * dims / expected / error - 1) < .05);
            assert_true(variance < M_PI / (2 * dims) * left);
        }
    }
}

static void streams_cost_a_norm_more(void **state) {
    static const struct case_shape shape = { CASE_ROWS, CST_DTYPE_F32, TOKENS, 1, 2, 64, 0 };
    struct cst_encode_params p = { CST_PRESET_TURBOQUANT, TOKENS, 64, 4, 4, 3 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    struct cst_seeded_random random;
    struct cst_frame_info plain, sketch;

    cst_seeded_random_init(&random, 1);
    for (uint32_t k = 0; k < 2 * TOKENS * 128; k++)
        case_set_value(c, k / 128 / TOKENS, k / 128 % TOKENS, k / 64 % 2, k % 64, normal(&random));
    assert_int_equal(case_encode(c, &p, &plain), 0);
    p.qjl = true;
    assert_int_equal(case_encode(c, &p, &sketch), 0);
    assert_int_equal(sketch.frame_bytes, plain.frame_bytes + 2 * TOKENS * 2 * 2);
}

static void only_turboquant_of_two_bits_sketches(void **state) {
    static const struct case_shape shape = { CASE_ROWS, CST_DTYPE_BF16, TOKENS, 1, 2, 64, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);

    case_fill_model(c, 1, TOKENS);
    CASE_EACH_PRESET (preset, 0) {
        struct cst_encode_params p = { preset, TOKENS, 64, 4, .qjl = true };
        bool takes = preset == CST_PRESET_TURBOQUANT;

        assert_int_equal(case_encode(c, &p, NULL), takes ? 0 : CST_CODEC_E_PRESET);
        p.bits_v = 1;
        assert_int_equal(case_encode(c, &p, NULL), CST_CODEC_E_PRESET);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(inner_products_are_unbiased),
        cmocka_unit_test(errors_are_those_of_the_formula),
        cmocka_unit_test(streams_cost_a_norm_more),
        cmocka_unit_test(only_turboquant_of_two_bits_sketches),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
