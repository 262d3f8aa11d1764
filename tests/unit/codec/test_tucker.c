/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The decomposition behind stage TUCKER against numpy's and against its own reconstruction; the
 * plan of a frame against the frame; and shapes of all kinds.
 */
#include "tests/lib/check.h"
#include "tests/unit/codec/codec_case.h"

#include "codec/dtype.h"
#include "codec/format.h"
#include "codec/frame_layout.h"
#include "codec/linalg.h"
#include "codec/tucker.h"

#include "base/macros.h"
#include "base/random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- decomposition ---------------------------------------------------------------------------
 */

enum { PARTS = 3, PROBES = 4 };

/* A cell of a formula, and what numpy.linalg (eigh of the dimensions, svd of the tokens, in double)
 * captures of it with ranks (t, d). */
static const struct basis_row {
    const char *name;
    uint32_t tokens, dims, n_parts, heads[PARTS];
    double energy;
    struct {
        uint32_t t, d;
        double energy;
    } probe[PROBES];
} bases[] = {
    { "one part, more channels than tokens",
      40,
      16,
      1,
      { 3 },
      2818.729323,
      { { 1, 1, 991.238462 },
        { 2, 3, 2457.564079 },
        { 4, 4, 2804.971457 },
        { 6, 2, 2240.346350 } } },
    { "three parts, more channels than tokens",
      20,
      12,
      3,
      { 2, 2, 2 },
      1821.957035,
      { { 1, 1, 745.613970 },
        { 2, 3, 1593.010792 },
        { 4, 4, 1812.521946 },
        { 6, 2, 1591.796630 } } },
    { "two parts, more tokens than channels",
      100,
      8,
      2,
      { 1, 1 },
      2195.397130,
      { { 1, 1, 1102.563139 },
        { 2, 3, 1794.576372 },
        { 4, 4, 2186.347742 },
        { 6, 2, 2084.945650 } } },
};

struct cell {
    struct cst_tucker_shape shape;
    struct cst_tucker_part part[PARTS];
    struct cst_tucker_basis basis;
    struct cst_tucker_scratch scratch;
    float *x;
    void *memory;
};

static double formula(uint32_t h, uint32_t t, uint32_t d) {
    double noise =
        (double)((h * 7919 + t * 104729 + d * 1299709 + (h + 1) * (t + 3) * (d + 7)) % 1009) /
            1009 -
        .5;

    return sin(.05 * t * (1 + h)) * cos(.3 * d + h) * 2 + (t % 7) * (d % 5) * .1 + .3 * noise;
}

static void cell_fill(struct cell *c) {
    float *x = c->x;

    for (uint32_t p = 0, head = 0; p < c->shape.n_parts; head += c->part[p++].heads) {
        for (uint32_t t = 0; t < c->shape.tokens; t++) {
            for (uint32_t h = 0; h < c->part[p].heads; h++) {
                for (uint32_t d = 0; d < c->shape.dims; d++)
                    *x++ = (float)formula(head + h, t, d);
            }
        }
    }
}

static void cell_init(struct cell *c, const struct basis_row *row) {
    size_t side = CST_MAX(row->tokens, row->dims), n, eigen, most;
    float *at;

    *c = (struct cell){ .shape = { row->tokens, row->dims, 0, row->n_parts, c->part } };
    for (uint32_t p = 0; p < row->n_parts; p++) {
        c->part[p] = (struct cst_tucker_part){ row->heads[p], 1 };
        c->shape.heads += row->heads[p];
    }
    most = CST_MIN(row->tokens, c->shape.heads * row->dims);
    n = cst_tucker_size(&c->shape);
    eigen = CST_MAX(cst_eigen_work((uint32_t)side) + (size_t)row->tokens * row->tokens,
                    cst_orthonormalize_work((uint32_t)side));
    eigen = cst_align_up(eigen, 16);
    n = cst_align_up(n, 16);
    c->memory = test_malloc((4 * side * side + 16 * side + eigen + 4 * n + 64) * sizeof(float) +
                            (most + 1) * (row->dims + 1) * sizeof(double));
    c->basis.captured = c->memory;
    at = (void *)(c->basis.captured + (most + 1) * (row->dims + 1));
    c->basis.rank = (uint32_t)most;
    c->basis.dim = at, at += side * side;
    c->basis.token = at, at += side * side;
    c->scratch.gram = at, at += side * side;
    c->scratch.values = at, at += 16 * side;
    c->scratch.eigen = at, at += eigen;
    c->scratch.y = at, at += n;
    c->scratch.z = at, at += n;
    c->basis.core = at, at += n;
    c->x = at;
    cell_fill(c);
}

static double captured(const struct cell *c, uint32_t t, uint32_t d) {
    return c->basis.captured[t * (c->shape.dims + 1) + d];
}

static void check_orthonormal(const float *rows, uint32_t n, uint32_t columns) {
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t j = 0; j <= i; j++) {
            double dot = 0;

            for (uint32_t k = 0; k < columns; k++)
                dot += (double)rows[i * columns + k] * (double)rows[j * columns + k];
            assert_true(fabs(dot - (i == j)) < 1e-4);
        }
    }
}

/* Energy of the cell less its projection onto the first directions, computed value by value. */
static double left_after(const struct cell *c, uint32_t rank_t, uint32_t rank_d, double *largest) {
    const struct cst_tucker_shape *s = &c->shape;
    double left = 0;

    *largest = 0;
    for (uint32_t h = 0; h < s->heads; h++) {
        double *core = test_calloc((size_t)rank_t * rank_d + 1, sizeof(double));

        for (uint32_t i = 0; i < rank_t * rank_d; i++) {
            for (uint32_t k = 0; k < s->tokens * s->dims; k++)
                core[i] += (double)c->basis.token[i / rank_d * s->tokens + k / s->dims] *
                           (double)c->basis.dim[i % rank_d * s->dims + k % s->dims] *
                           formula(h, k / s->dims, k % s->dims);
        }
        for (uint32_t k = 0; k < s->tokens * s->dims; k++) {
            double x = formula(h, k / s->dims, k % s->dims);

            for (uint32_t i = 0; i < rank_t * rank_d; i++)
                x -= core[i] * (double)c->basis.token[i / rank_d * s->tokens + k / s->dims] *
                     (double)c->basis.dim[i % rank_d * s->dims + k % s->dims];
            left += x * x;
            *largest = fmax(*largest, fabs(x));
        }
        test_free(core);
    }
    return left;
}

/* Energy of the cell less all directions by their cores, computed value by value. */
static double left_by_core(const struct cell *c) {
    const struct cst_tucker_shape *s = &c->shape;
    const float *x = c->x, *core = c->basis.core;
    double left = 0;

    for (uint32_t p = 0; p < s->n_parts; p++) {
        uint32_t channels = s->part[p].heads * s->dims;

        for (uint32_t t = 0; t < s->tokens; t++) {
            for (uint32_t k = 0; k < channels; k++) {
                double value = (double)*x++;

                for (uint32_t i = 0; i < c->basis.rank; i++)
                    value -=
                        (double)c->basis.token[i * s->tokens + t] * (double)core[i * channels + k];
                left += value * value;
            }
        }
        core += c->basis.rank * channels;
    }
    return left;
}

static void bases_capture_what_numpy_finds(void **state) {
    const struct basis_row *row = *state;
    double largest, left;
    struct cell c;

    cell_init(&c, row);
    assert_int_equal(cst_tucker_basis_make(&c.basis, &c.shape, c.x, 0, false, &c.scratch), 0);
    check_orthonormal(c.basis.dim, row->dims, row->dims);
    check_orthonormal(c.basis.token, c.basis.rank, row->tokens);
    for (int i = 0; i < PROBES; i++)
        assert_true(
            fabs(captured(&c, row->probe[i].t, row->probe[i].d) / row->probe[i].energy - 1) < 1e-4);
    for (uint32_t t = 1; t <= 5; t += 2) {
        for (uint32_t d = 1; d <= 5; d += 2) {
            left = left_after(&c, t, d, &largest);
            assert_true(fabs(row->energy - captured(&c, t, d) - left) < 1e-4 * row->energy);
        }
    }
    assert_true(left_by_core(&c) < 1e-6 * row->energy);
    /* full ranks give the cell back */
    (void)left_after(&c, c.basis.rank, row->dims, &largest);
    assert_true(largest < 0x1p-11 * 4); /* half a unit of fp16 of values up to 4 */
    assert_true(fabs(captured(&c, c.basis.rank, row->dims) / row->energy - 1) < 1e-5);
    test_free(c.memory);
}

static void sketches_capture_nearly_as_much(void **state) {
    const struct basis_row *row = *state;
    struct cell c;

    cell_init(&c, row);
    c.basis.rank = 6;
    assert_int_equal(cst_tucker_basis_make(&c.basis, &c.shape, c.x, 1, false, &c.scratch), 0);
    assert_true(fabs(row->energy - captured(&c, 6, row->dims) - left_by_core(&c)) <
                1e-4 * row->energy);
    for (int i = 0; i < PROBES; i++) {
        double most = row->probe[i].energy;

        assert_true(captured(&c, row->probe[i].t, row->probe[i].d) > .99 * most);
        assert_true(captured(&c, row->probe[i].t, row->probe[i].d) < 1.001 * most);
    }
    test_free(c.memory);
}

/* What the directions have of the cell, and how far that of another basis is from it. */
static double distance(const struct cell *a, const struct cell *b) {
    const struct cst_tucker_shape *s = &a->shape;
    const float *core_a = a->basis.core, *core_b = b->basis.core;
    double sum = 0;

    for (uint32_t p = 0; p < s->n_parts; p++) {
        uint32_t channels = s->part[p].heads * s->dims;

        for (uint32_t t = 0; t < s->tokens; t++) {
            for (uint32_t k = 0; k < channels; k++) {
                double value = 0;

                for (uint32_t i = 0; i < a->basis.rank; i++)
                    value += (double)a->basis.token[i * s->tokens + t] *
                                 (double)core_a[i * channels + k] -
                             (double)b->basis.token[i * s->tokens + t] *
                                 (double)core_b[i * channels + k];
                sum += value * value;
            }
        }
        core_a += a->basis.rank * channels;
        core_b += b->basis.rank * channels;
    }
    return sqrt(sum);
}

/* The directions of a flat spectrum are a sketch's own. A block that was coded, which is nearly
 * what it was before, is to have the same ones again, or its codes aren't found. */
static void a_little_noise_moves_sketches_little(void **state) {
    static const struct basis_row flat = {
        .tokens = 301, .dims = 16, .n_parts = 2, .heads = { 6, 6 }
    };
    struct cst_seeded_random random;
    struct cell a, b;
    double noise = 0;
    size_t n;

    (void)state;
    cst_seeded_random_init(&random, 1);
    cell_init(&a, &flat);
    cell_init(&b, &flat);
    n = cst_tucker_size(&a.shape);
    for (size_t i = 0; i < n; i++) {
        float step = (float)(cst_seeded_random_next(&random) >> 40) * 0x1p-24f - .5f;

        a.x[i] = (float)(cst_seeded_random_next(&random) >> 40) * 0x1p-24f - .5f;
        b.x[i] = a.x[i] + 0.05f * step;
        noise += (double)(0.05f * step) * (double)(0.05f * step);
    }
    a.basis.rank = b.basis.rank = 24;
    assert_int_equal(cst_tucker_basis_make(&a.basis, &a.shape, a.x, 1, true, &a.scratch), 0);
    assert_int_equal(cst_tucker_basis_make(&b.basis, &b.shape, b.x, 1, true, &b.scratch), 0);
    print_message("%.3f of a noise of %.3f\n", distance(&a, &b), sqrt(noise));
    assert_true(distance(&a, &b) < 3 * sqrt(noise));
    test_free(a.memory);
    test_free(b.memory);
}

/* ---- plans -----------------------------------------------------------------------------------
 */

static const struct plan_row {
    const char *name;
    uint32_t preset;
    struct case_shape shape;
    uint32_t tokens, position;
    uint8_t layers;
    float ratio;
    bool impossible;
} plans[] = {
    { "jolt", CST_PRESET_JOLT, { CASE_ROWS, CST_DTYPE_BF16, 64, 4, 2, 64, 0 }, 64, 64, 0, 0 },
    { "jolt, by layer",
      CST_PRESET_JOLT,
      { CASE_ROWS, CST_DTYPE_F16, 64, 4, 2, 64, 0 },
      64,
      0,
      1,
      0 },
    { "jolt 2x, two layers",
      CST_PRESET_JOLT,
      { CASE_HEADS, CST_DTYPE_F16, 64, 5, 2, 80, 0 },
      64,
      9,
      2,
      2 },
    { "flashjolt 4x",
      CST_PRESET_FLASHJOLT,
      { CASE_TRANSPOSED, CST_DTYPE_BF16, 256, 3, 2, 64, 0 },
      256,
      256,
      0,
      4 },
    { "jolt+", CST_PRESET_JOLT_PLUS, { CASE_ROWS, CST_DTYPE_BF16, 64, 4, 3, 64, 7 }, 50, 0, 0, 3 },
    { "jolt+ 5x, fp32",
      CST_PRESET_JOLT_PLUS,
      { CASE_PADDED, CST_DTYPE_F32, 128, 2, 2, 112, 0 },
      128,
      4,
      0,
      5 },
    { "jolt+ 100x",
      CST_PRESET_JOLT_PLUS,
      { CASE_ROWS, CST_DTYPE_BF16, 64, 2, 2, 64, 0 },
      64,
      64,
      0,
      100,
      true },
};

static struct cst_encode_params params_of(const struct plan_row *row) {
    return (struct cst_encode_params){ .preset = row->preset,
                                       .tokens = row->tokens,
                                       .first_position = row->position,
                                       .bound = 1,
                                       .group_layers = row->layers,
                                       .ratio = row->ratio };
}

/* What the plan says of a block: bytes, and the summed error of its choices. */
static uint64_t planned(struct case_block *c, const struct cst_encode_params *p, double *error) {
    struct cst_codec_work w;
    const struct cst_tucker *t;

    assert_true(cst_codec_work_init(&w, &c->desc, p->preset, c->work, c->work_len));
    w.params = p;
    cst_layout_order(w.order, &c->desc, true);
    assert_true(cst_layered_begin(c->block, p->tokens, p->first_position, p->preset, &w));
    t = w.dense;
    *error = 0;
    for (uint32_t i = 0; i < t->n_cells; i++)
        *error += cst_hull_at(&t->hull[i], t->choice[i])->error;
    return t->planned;
}

/* Bytes of the frame's streams of TUCKER, each up to where the next one starts. */
static uint64_t serialized(const struct case_block *c) {
    const struct cst_stream_entry *entry =
        (const void *)(c->frame + sizeof(struct cst_frame_header));
    uint64_t sum = 0;

    for (uint32_t i = 0; i < c->desc.n_segments; i++) {
        assert_int_equal(entry[i].stage, CST_STAGE_TUCKER);
        sum += cst_align_up(cst_load32(&entry[i].length), CST_STREAM_ALIGN);
    }
    return sum;
}

static void frames_have_the_bytes_that_were_planned(void **state) {
    const struct plan_row *row = *state;
    cst_auto(case_freep) struct case_block *c = case_new(&row->shape);
    struct cst_encode_params p = params_of(row);
    double error, coarser, target;
    struct cst_frame_info info;
    uint64_t bytes;

    case_fill_model(c, 5, row->tokens);
    bytes = planned(c, &p, &error);
    assert_int_equal(case_encode(c, &p, &info), 0);
    assert_int_equal(serialized(c), bytes);
    assert_int_equal(info.over_budget, row->impossible);
    target = (double)(c->desc.block_bytes) * row->tokens / row->shape.block_tokens /
             (double)(row->ratio > 0 ? row->ratio : 3);
    if (!row->impossible && !row->shape.gap && row->shape.order != CASE_PADDED)
        assert_true((double)info.frame_bytes <= target && (double)info.frame_bytes > .85 * target);
    for (p.ratio = 1.5f; p.ratio < 8; p.ratio *= 1.1f, coarser = error) {
        (void)planned(c, &p, &error);
        if (p.ratio > 1.5f)
            assert_true(error >= coarser);
    }
}

/* The paper's equation 1, for its bytes without heads and sinks; norms on top. */
static void streams_have_the_bytes_of_the_paper(void **state) {
    struct cst_tucker_member member[3] = { { .heads = 2 }, { .heads = 2 }, { .heads = 2 } };
    const struct cst_tucker t = { .tokens = 100, .member = member };
    const struct cst_tucker_cell cell = { .n = 3, .dims = 64, .heads = 6 };
    const struct cst_point p = { .rank_t = 7, .rank_d = 11, .bits = 4 };
    uint64_t sum = 0, m = 6, tokens = 100, d = 64;

    (void)state;
    for (uint32_t i = 0; i < 3; i++)
        sum += cst_tucker_stream_size(&t, &cell, i, &p) - sizeof(struct cst_coded_header) -
               sizeof(struct cst_tucker_header);
    assert_int_equal(sum, 2 * (m * 7 * 11 + tokens * 7 + d * 11) + m * tokens * d * 4 / 8 +
                              2 * m * tokens);
}

/* ---- shapes ----------------------------------------------------------------------------------
 */

static const struct shape_row {
    const char *name;
    struct case_shape shape;
    uint32_t tokens;
    enum { MODEL, CONSTANT_TOKENS, ZERO_LAYER, ZERO_CHANNELS, LARGE_CHANNEL, NOT_FINITE } content;
} shapes[] = {
    { "16 tokens", { CASE_ROWS, CST_DTYPE_BF16, 16, 3, 2, 64, 0 }, 16, MODEL },
    { "1 token", { CASE_ROWS, CST_DTYPE_BF16, 16, 3, 2, 64, 0 }, 1, MODEL },
    { "2 tokens", { CASE_ROWS, CST_DTYPE_F16, 1024, 1, 1, 128, 0 }, 2, MODEL },
    { "1000 tokens of 64", { CASE_ROWS, CST_DTYPE_BF16, 1024, 2, 1, 64, 0 }, 1000, MODEL },
    { "1024 tokens of 256", { CASE_HEADS, CST_DTYPE_BF16, 1024, 1, 1, 256, 0 }, 1024, MODEL },
    { "heads of 80", { CASE_TRANSPOSED, CST_DTYPE_F16, 64, 2, 3, 80, 0 }, 64, MODEL },
    { "heads of 96", { CASE_ROWS, CST_DTYPE_F32, 64, 2, 1, 96, 0 }, 63, MODEL },
    { "heads of 112", { CASE_HEADS, CST_DTYPE_BF16, 32, 7, 2, 112, 1 }, 32, MODEL },
    { "heads of 3", { CASE_ROWS, CST_DTYPE_BF16, 64, 2, 5, 3, 0 }, 64, MODEL },
    { "tokens alike", { CASE_ROWS, CST_DTYPE_BF16, 64, 3, 2, 64, 0 }, 64, CONSTANT_TOKENS },
    { "a layer of zeros", { CASE_ROWS, CST_DTYPE_BF16, 64, 3, 2, 64, 0 }, 64, ZERO_LAYER },
    { "channels of zeros", { CASE_ROWS, CST_DTYPE_BF16, 64, 3, 2, 64, 0 }, 64, ZERO_CHANNELS },
    { "a large channel", { CASE_ROWS, CST_DTYPE_F16, 64, 3, 2, 64, 0 }, 64, LARGE_CHANNEL },
    { "130 layers", { CASE_ROWS, CST_DTYPE_BF16, 16, 130, 16, 64, 0 }, 16, MODEL },
    { "infinity", { CASE_ROWS, CST_DTYPE_F16, 64, 3, 2, 64, 0 }, 64, NOT_FINITE },
};

static void spoil(struct case_block *c, const struct shape_row *row, uint32_t i, uint32_t t,
                  uint32_t h, uint32_t d) {
    if (row->content == CONSTANT_TOKENS && i < 4)
        case_set_value(c, i, t, h, d, (float)(d + h));
    else if (row->content == ZERO_LAYER && i / 2 == 1)
        case_set_value(c, i, t, h, d, 0);
    else if (row->content == ZERO_CHANNELS && d % 3 == 0)
        case_set_value(c, i, t, h, d, 0);
    else if (row->content == LARGE_CHANNEL && d == 5)
        case_set_value(c, i, t, h, d, 25 * case_value(c, c->block, i, t, h, d));
    else if (row->content == NOT_FINITE && i == 0 && t == 40 && d == 1)
        case_set_value(c, i, t, h, d, INFINITY);
}

static void fill_shape(struct case_block *c, const struct shape_row *row) {
    case_fill_model(c, 9, row->tokens);
    for (uint32_t i = 0; i < c->desc.n_segments; i++) {
        for (uint32_t t = 0; t < row->tokens; t++) {
            for (uint32_t h = 0; h < row->shape.heads; h++) {
                for (uint32_t d = 0; d < row->shape.dims; d++)
                    spoil(c, row, i, t, h, d);
            }
        }
    }
}

static void shapes_come_back(void **state) {
    const struct shape_row *row = *state;
    cst_auto(case_freep) struct case_block *c = case_new(&row->shape);

    fill_shape(c, row);
    if (row->shape.dims >= 32)
        case_rotate_keys(c, CST_ROPE_NEOX, 32);
    CASE_EACH_PRESET (preset, CST_PRESET_JOLT) {
        for (uint8_t layers = 0; layers < 3; layers++) {
            struct cst_encode_params p = { .preset = preset,
                                           .tokens = row->tokens,
                                           .first_position = 3,
                                           .bound = .7f,
                                           .group_layers = layers };
            struct cst_frame_info info;

            if (preset > CST_PRESET_JOLT_PLUS)
                continue;
            assert_int_equal(case_encode(c, &p, &info), 0);
            assert_true(info.error < .7f);
            assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
            for (uint32_t i = 0; i < c->desc.n_segments; i++) {
                for (uint32_t d = 0; d < row->shape.dims; d++) /* the one sink */
                    assert_true(case_value(c, c->block, i, 0, 0, d) ==
                                case_value(c, c->out, i, 0, 0, d));
            }
        }
    }
}

/* Of wide models the plan's cores aren't kept: the sketch's directions are made orthonormal. */
static void sketches_without_cores_are_found_again(void **state) {
    static const struct case_shape shape = { CASE_ROWS, CST_DTYPE_BF16, 1024, 5, 16, 128, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    const struct cst_encode_params p = {
        .preset = CST_PRESET_FLASHJOLT, .tokens = 1024, .first_position = 64, .bound = 1
    };
    struct cst_frame_info first, again;

    (void)state;
    case_fill_model(c, 5, 1024);
    assert_int_equal(case_encode(c, &p, &first), 0);
    assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
    memcpy(c->block, c->out, c->desc.block_bytes);
    assert_int_equal(case_encode(c, &p, &again), 0);
    assert_true(again.error < .5f * first.error);
}

/* The store passes over presets that need more than 64 MiB. */
static void large_models_are_not_passed_over(void **state) {
    static const struct case_shape models[] = {
        { CASE_ROWS, CST_DTYPE_BF16, 64, 80, 8, 128, 0 },
        { CASE_ROWS, CST_DTYPE_BF16, 64, 126, 8, 128, 0 },
        { CASE_ROWS, CST_DTYPE_BF16, 1024, 28, 4, 128, 0 },
    };

    (void)state;
    for (size_t i = 0; i < CST_COUNT(models); i++) {
        cst_auto(case_freep) struct case_block *c = case_new(&models[i]);

        for (uint32_t preset = CST_PRESET_JOLT; preset <= CST_PRESET_JOLT_PLUS; preset++)
            assert_true(cst_codec_work_size(&c->desc, preset) <= 64 << 20);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_little_noise_moves_sketches_little),
        cmocka_unit_test(streams_have_the_bytes_of_the_paper),
        cmocka_unit_test(sketches_without_cores_are_found_again),
        cmocka_unit_test(large_models_are_not_passed_over),
    };

    return cst_run_rows(bases, bases_capture_what_numpy_finds) +
           cst_run_rows(bases, sketches_capture_nearly_as_much) +
           cst_run_rows(plans, frames_have_the_bytes_that_were_planned) +
           cst_run_rows(shapes, shapes_come_back) + cmocka_run_group_tests(tests, NULL, NULL);
}
