/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stage EXPONENTS: its tables against the formula in libm, any bf16 values there and back in every
 * layout and by every instruction set, sizes near the entropy of the exponents, and damage.
 */
#include "tests/lib/check.h"
#include "tests/unit/codec/codec_case.h"

#include "codec/dtype.h"
#include "codec/exponents.h"
#include "codec/format.h"

#include "base/le.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* P(|X| < x) of a logistic variable of deviation 2^(k / 4) */
static double below(double x, unsigned k) {
    return 2 / (1 + exp(-M_PI * x / (sqrt(3) * exp2(k / 4.0)))) - 1;
}

static void tables_are_those_of_the_formula(void **state) {
    (void)state;
    for (unsigned k = 0; k < CST_EXPONENTS_TABLES; k++) {
        uint16_t f[2 * CST_EXPONENTS_REACH + 1];
        int rest = 4096;

        cst_exponents_frequencies(f, k);
        for (int s = -7; s <= 7; s++) {
            double p = (s == 7 ? 1 : below(exp2(s - 3), k)) - (s == -7 ? 0 : below(exp2(s - 4), k));

            assert_true(fabs(4096 * p + 0.5 - rint(4096 * p + 0.5)) > 1e-9);
            rest -= f[s + 7];
            if (s != CST_EXPONENTS_MIDDLE)
                assert_int_equal(f[s + 7], CST_MAX(1, (int)floor(4096 * p + 0.5)));
        }
        assert_int_equal(rest, 0);
    }
}

static void check(struct case_block *c, uint32_t tokens, size_t most) {
    const struct cst_codec_ops *sets[] = { cst_codec_ops_portable(), cst_codec_ops_avx2(),
                                           cst_codec_ops_avx512() };
    struct case_stage stage;
    uint8_t *stream, *out;
    size_t len, n;

    case_stage_init(&stage, c, 0, tokens, 64);
    n = stage.s.length;
    stream = malloc(n);
    out = malloc(n);
    len = cst_exponents_encode(stream, c->block + c->desc.segments[0].offset, &stage.s, &stage.w);
    assert_true(len > 0 && len <= most);
    for (size_t k = 0; k < CST_COUNT(sets) && sets[k]; k++) {
        uint8_t *again = malloc(n);

        stage.w.ops = sets[k];
        memset(out, 0xa5, n);
        assert_true(cst_exponents_decode(out, &stage.s, stream, len, &stage.w));
        assert_memory_equal(out, c->block + c->desc.segments[0].offset, n);
        assert_int_equal(cst_exponents_encode(again, out, &stage.s, &stage.w), len);
        assert_memory_equal(again, stream, len);
        free(again);
    }
    assert_false(cst_exponents_decode(out, &stage.s, stream, len - 1, &stage.w));
    assert_false(cst_exponents_decode(out, &stage.s, stream, 3, &stage.w));
    free(stream);
    free(out);
}

static void every_layout_reads_back(void **state) {
    static const enum case_order orders[] = { CASE_ROWS, CASE_TRANSPOSED, CASE_HEADS, CASE_PADDED };

    (void)state;
    for (size_t k = 0; k < CST_COUNT(orders); k++) {
        const struct case_shape shape = { orders[k], CST_DTYPE_BF16, 64, 1, 3, 40, 2 };

        for (uint32_t tokens = 30; tokens <= 64; tokens += 17) {
            cst_auto(case_freep) struct case_block *c = case_new(&shape);

            case_fill_model(c, k, tokens);
            check(c, tokens, (size_t)tokens * 120 * 2 * 3 / 4);
        }
    }
}

static void special_values_are_kept(void **state) {
    static const uint16_t odd[] = { 0x0000, 0x8000, 0x0001, 0x807f, 0x7f80, 0xff80,
                                    0x7fc0, 0x7f81, 0xffff, 0x7f7f, 0x0080 };
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_BF16, 64, 1, 2, 72, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);

    (void)state;
    case_fill_model(c, 1, 64);
    for (size_t i = 0; i < 40; i++)
        cst_store16(c->block + 2 * (i * 97 % 9216), odd[i % CST_COUNT(odd)]);
    for (size_t t = 0; t < 64; t++) /* a channel of nothing else, one of zeros, one that is huge */
        for (size_t d = 0; d < 3; d++)
            cst_store16(c->block + 2 * (t * 144 + d), d == 0   ? odd[t % CST_COUNT(odd)]
                                                      : d == 1 ? 0
                                                               : 0x7f00);
    check(c, 64, 64 * 144 * 2 * 3 / 4);
}

/* Values of the model that the tables stand for: head, 5 bits a level, and the coder's share above
 * sign, mantissa and the entropy of the exponents. */
static void sizes_are_near_the_entropy(void **state) {
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_BF16, 64, 1, 3, 64, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    struct cst_seeded_random random;
    double bits = 0;

    (void)state;
    cst_seeded_random_init(&random, 4);
    for (uint32_t i = 0; i < 64 * 192; i++) {
        double u = ((double)(cst_seeded_random_next(&random) >> 11) + 0.5) / 0x1p53;
        unsigned quarter = i % 192 / 8; /* deviations over 6 octaves */
        double x = sqrt(3) / M_PI * exp2(quarter / 4.0) * log(u / (1 - u));
        int e;

        case_set_value(c, 0, i / 192, i / 64 % 3, i % 64, (float)x);
        (void)frexp((double)case_value(c, c->block, 0, i / 192, i / 64 % 3, i % 64), &e);
        bits += 8 - log2(below(ldexp(1, e) / exp2(quarter / 4), quarter % 4) -
                         below(ldexp(0.5, e) / exp2(quarter / 4), quarter % 4));
    }
    check(c, 64, (size_t)(bits * 1.002 / 8) + 4 + 192 * 5 / 8 + 32);
}

static void others_are_refused(void **state) {
    struct case_shape shape = { CASE_ROWS, CST_DTYPE_BF16, 64, 1, 2, 72, 0 };
    uint8_t stream[64 * 144 * 2];

    (void)state;
    for (int k = 0; k < 3; k++) {
        cst_auto(case_freep) struct case_block *c = NULL;
        struct case_stage stage;

        shape.dtype = k == 2 ? CST_DTYPE_F16 : CST_DTYPE_BF16;
        c = case_new(&shape);
        if (k == 0)
            case_fill_random(c, 3); /* noise */
        else
            memset(c->block, 0x3f, c->desc.block_bytes); /* one value: PLANES needs ten bytes */
        case_stage_init(&stage, c, 0, 64, 64);
        assert_int_equal(cst_exponents_encode(stream, c->block, &stage.s, &stage.w), 0);
    }
}

static void damage_stays_inside(void **state) {
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_BF16, 16, 1, 2, 20, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    struct case_stage stage;
    uint8_t stream[16 * 40 * 2], out[16 * 40 * 2], *exact;
    size_t len;

    (void)state;
    case_fill_model(c, 3, 16);
    case_stage_init(&stage, c, 0, 16, 64);
    len = cst_exponents_encode(stream, c->block, &stage.s, &stage.w);
    assert_true(len > 0);
    exact = malloc(len);
    for (size_t bit = 1; bit < len * 8; bit++) { /* 0: that a code nobody has means zeros */
        memcpy(exact, stream, len);
        exact[bit / 8] ^= (uint8_t)(1 << bit % 8);
        if (cst_exponents_decode(out, &stage.s, exact, len, &stage.w)) /* other values */
            assert_memory_not_equal(out, c->block, sizeof(out));
    }
    free(exact);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_are_those_of_the_formula),
        cmocka_unit_test(every_layout_reads_back),
        cmocka_unit_test(special_values_are_kept),
        cmocka_unit_test(sizes_are_near_the_entropy),
        cmocka_unit_test(others_are_refused),
        cmocka_unit_test(damage_stays_inside),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
