/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Elementary functions against the C library's; frequencies against the formulas of the scalings
 * with the C library's powers; tables against sines and cosines at their positions; what turning
 * back and out does to keys.
 */
#include "tests/lib/check.h"

#include "codec/fixed_math.h"
#include "codec/rope.h"

#include "base/random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double PI = 3.14159265358979323846;

static void functions_match_the_library(void **state) {
    for (int i = -20000; i <= 20000; i++) {
        double x = exp(i / 400.0), y = i / 200.0, s, c;

        assert_true(fabs(cst_fixed_log(x) - log(x)) <= 1e-15 * fmax(1, fabs(log(x))));
        assert_true(fabs(cst_fixed_exp(y) / exp(y) - 1) <= 1e-14);
        if (x > 1e6)
            continue;
        cst_fixed_sincos(x, &s, &c);
        assert_true(fabs(s - sin(x)) < 1e-14 && fabs(c - cos(x)) < 1e-14);
    }
    assert_true(cst_fixed_log(1) == 0 && cst_fixed_exp(0) == 1);
}

/* ---- frequencies ------------------------------------------------------------------------------
 */

static const struct row {
    const char *name;
    uint32_t dims; /* of a head */
    struct cst_layer layer;
} rows[] = {
    { "norm", 64, { .rope = CST_ROPE_NORM, .rope_dims = 64, .rope_theta = 1e5f } },
    { "neox", 128, { .rope = CST_ROPE_NEOX, .rope_dims = 128, .rope_theta = 1e4f } },
    { "partial neox", 80, { .rope = CST_ROPE_NEOX, .rope_dims = 20, .rope_theta = 1e4f } },
    { "partial norm", 64, { .rope = CST_ROPE_NORM, .rope_dims = 6, .rope_theta = 5e5f } },
    { "linear",
      64,
      { .rope = CST_ROPE_NORM,
        .rope_dims = 64,
        .rope_theta = 1e4f,
        .rope_scaling = CST_SCALING_LINEAR,
        .scaling = { 4 } } },
    { "yarn",
      128,
      { .rope = CST_ROPE_NEOX,
        .rope_dims = 128,
        .rope_theta = 1e6f,
        .rope_scaling = CST_SCALING_YARN,
        .scaling = { 4, 32, 1, 1 },
        .scaling_original_context = 32768 } },
    { "llama3",
      128,
      { .rope = CST_ROPE_NORM,
        .rope_dims = 128,
        .rope_theta = 5e5f,
        .rope_scaling = CST_SCALING_LLAMA3,
        .scaling = { 8, 1, 4 },
        .scaling_original_context = 8192 } },
};

/* As the models' own code writes it (YaRN: its pairs are counted as dimensions / 2). */
static double slow_frequency(const struct cst_layer *l, uint32_t i) {
    double base = (double)l->rope_theta, f = pow(base, -2.0 * i / l->rope_dims);
    double factor = (double)l->scaling[0], original = l->scaling_original_context;
    double wavelength = 2 * PI / f;

    if (l->rope_scaling == CST_SCALING_LINEAR)
        return f / factor;
    if (l->rope_scaling == CST_SCALING_YARN) {
        double low = floor(l->rope_dims * log(original / (32 * 2 * PI)) / (2 * log(base)));
        double high = ceil(l->rope_dims * log(original / (1 * 2 * PI)) / (2 * log(base)));
        double mix = fmin(1, fmax(0, (i - low) / (high - low)));

        return f / factor * mix + f * (1 - mix);
    }
    if (l->rope_scaling == CST_SCALING_LLAMA3) {
        double smooth = (original / wavelength - 1) / (4 - 1);

        if (wavelength < original / 4)
            return f;
        if (wavelength > original / 1)
            return f / factor;
        return (1 - smooth) * f / factor + smooth * f;
    }
    return f;
}

static void frequencies_match_the_formulas(void **state) {
    const struct row *row = *state;

    assert_true(cst_rope_known(&row->layer, row->dims));
    for (uint32_t i = 0; i < row->layer.rope_dims / 2; i++) {
        double want = slow_frequency(&row->layer, i);

        assert_true(fabs(cst_rope_frequency(&row->layer, i) / want - 1) < 1e-13);
    }
}

/* ---- tables ------------------------------------------------------------------------------------
 */

static struct cst_rope_table *new_table(uint32_t tokens, uint32_t pairs) {
    void *work = NULL;

    assert_int_equal(posix_memalign(&work, 64, cst_rope_work_size(tokens, pairs)), 0);
    return cst_rope_table_init(work, tokens, pairs);
}

static void tables_hold_the_angles(void **state) {
    static const uint32_t positions[] = { 0, 1, 4096, 131072, 10000000 };
    const struct row *row = *state;
    uint32_t pairs = row->layer.rope_dims / 2;
    struct cst_rope_table *t = new_table(1024, pairs);

    for (size_t p = 0; p < CST_COUNT(positions); p++) {
        cst_rope_prepare(t, &row->layer, positions[p], 1024);
        for (uint32_t k = 0; k < 1024; k += 93) {
            for (uint32_t i = 0; i < pairs; i++) {
                double angle = cst_rope_frequency(&row->layer, i) * (positions[p] + (double)k);

                assert_true(fabs((double)t->cosine[k * pairs + i] - cos(angle)) < 1e-7);
                assert_true(fabs((double)t->sine[k * pairs + i] - sin(angle)) < 1e-7);
            }
        }
    }
    free(t);
}

static void turn(const struct row *row, struct cst_rope_table *t, float *x, uint32_t position,
                 float direction) {
    cst_rope_prepare(t, &row->layer, position, 16);
    for (uint32_t k = 0; k < 16; k++)
        cst_rope_turn(t, &row->layer, x + k * 2 * row->dims, 2, row->dims, k, direction,
                      cst_codec_ops());
}

static void keys_can_be_placed_elsewhere(void **state) {
    const struct row *row = *state;
    size_t n = (size_t)16 * 2 * row->dims;
    float *x = test_malloc(n * sizeof(*x)), *y = test_malloc(n * sizeof(*x)),
          *z = test_malloc(n * sizeof(*x));
    struct cst_rope_table *t = new_table(16, row->layer.rope_dims / 2);
    struct cst_seeded_random random;

    cst_seeded_random_init(&random, 3);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)((double)(cst_seeded_random_next(&random) >> 11) * 0x1p-52 - 1);
    memcpy(y, x, n * sizeof(*x));
    memcpy(z, x, n * sizeof(*x));
    turn(row, t, y, 700, 1);
    turn(row, t, z, 7000, 1);
    for (uint32_t k = 0; k < 16 * 2; k++) { /* dimensions that aren't rotated stay */
        size_t at = k * row->dims + row->layer.rope_dims;

        assert_memory_equal(x + at, y + at, (row->dims - row->layer.rope_dims) * sizeof(*x));
    }
    assert_memory_not_equal(x, y, row->layer.rope_dims * sizeof(*x));
    turn(row, t, y, 700, -1); /* back, and where z is */
    for (size_t i = 0; i < n; i++)
        assert_true(fabsf(x[i] - y[i]) < 1e-6f);
    turn(row, t, y, 7000, 1);
    for (size_t i = 0; i < n; i++)
        assert_true(fabsf(z[i] - y[i]) < 1e-6f);
    free(t);
    test_free(x);
    test_free(y);
    test_free(z);
}

static void tables_are_made_anew_for_other_layers(void **state) {
    struct cst_layer layer = rows[0].layer, other = rows[6].layer;
    struct cst_rope_table *t = new_table(16, 64);
    float first;

    cst_rope_prepare(t, &layer, 5, 16);
    first = t->cosine[40];
    t->cosine[40] = 99;
    cst_rope_prepare(t, &layer, 5, 12); /* it is still there */
    assert_true(t->cosine[40] == 99);
    cst_rope_prepare(t, &other, 5, 16);
    assert_int_equal(t->pairs, 64);
    cst_rope_prepare(t, &layer, 5, 12);
    assert_true(t->cosine[40] == first);
    t->cosine[40] = 99;
    cst_rope_prepare(t, &layer, 5, 16); /* too few tokens */
    assert_true(t->cosine[40] == first);
    cst_rope_prepare(t, &layer, 6, 16);
    assert_true(t->cosine[40] != first);
    free(t);
}

/* ---- limits ------------------------------------------------------------------------------------
 */

static void unknown_rotations_are_refused(void **state) {
    const struct cst_layer good = rows[5].layer, llama = rows[6].layer;
    struct cst_layer l;

#define REFUSED(from, change)                                                                      \
    do {                                                                                           \
        l = (from);                                                                                \
        assert_true(cst_rope_known(&l, 128));                                                      \
        change;                                                                                    \
        assert_false(cst_rope_known(&l, 128));                                                     \
    } while (0)
    REFUSED(good, l.rope = CST_ROPE_MROPE);
    REFUSED(good, l.rope = CST_ROPE_NONE);
    REFUSED(good, l.rope_dims = 0);
    REFUSED(good, l.rope_dims = 63);
    REFUSED(good, l.rope_dims = 130);
    REFUSED(good, l.rope_theta = 0.5f);
    REFUSED(good, l.rope_theta = 1);
    REFUSED(good, l.rope_theta = INFINITY);
    REFUSED(good, l.rope_scaling = CST_SCALINGS);
    REFUSED(good, l.scaling[0] = 0);
    REFUSED(good, l.scaling[0] = NAN);
    REFUSED(good, l.scaling[1] = 0);
    REFUSED(good, l.scaling[2] = 0);
    REFUSED(good, l.scaling_original_context = 0);
    REFUSED(llama, l.scaling[2] = l.scaling[1]);
    REFUSED(llama, l.scaling_original_context = 0);
    REFUSED(rows[4].layer, l.scaling[0] = 0.5f);
#undef REFUSED
}

static void each_parameter_has_a_part_in_the_id(void **state) {
    const struct cst_layer good = rows[5].layer;
    uint32_t id = cst_rope_id(&good);
    struct cst_layer l;

#define OTHER(change)                                                                              \
    do {                                                                                           \
        l = good;                                                                                  \
        change;                                                                                    \
        assert_int_not_equal(cst_rope_id(&l), id);                                                 \
    } while (0)
    OTHER(l.rope = CST_ROPE_NORM);
    OTHER(l.rope_scaling = CST_SCALING_NONE);
    OTHER(l.rope_dims = 64);
    OTHER(l.rope_theta = 1e5f);
    OTHER(l.scaling[0] = 8);
    OTHER(l.scaling[1] = 8);
    OTHER(l.scaling[2] = 8);
    OTHER(l.scaling[3] = 8);
    OTHER(l.scaling_original_context = 8);
#undef OTHER
    l = good;
    l.kv_heads = l.window = 9; /* say nothing about the rotation */
    assert_int_equal(cst_rope_id(&l), id);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(functions_match_the_library),
        cmocka_unit_test(tables_are_made_anew_for_other_layers),
        cmocka_unit_test(unknown_rotations_are_refused),
        cmocka_unit_test(each_parameter_has_a_part_in_the_id),
    };

    return cst_run_rows(rows, frequencies_match_the_formulas) +
           cst_run_rows(rows, tables_hold_the_angles) +
           cst_run_rows(rows, keys_can_be_placed_elsewhere) +
           cmocka_run_group_tests(tests, NULL, NULL);
}
