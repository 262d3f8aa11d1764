/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Learning, on variables whose best code is known: the gain of a Karhunen-Loeve basis on an
 * autoregressive covariance, and of a predictor on a layer that follows another one, against their
 * closed forms. And what can't be learned from.
 */
#include "tests/lib/check.h"
#include "tests/unit/codec/side_case.h"

#include "codec/side_format.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHANNELS = 64, BLOCK = 512, BLOCKS = 12 };

static struct cst_seeded_random r = { .state = 1 };

static double normal(void) { /* Box and Muller */
    double u = (double)((cst_seeded_random_next(&r) >> 11) + 1) * 0x1p-53;
    double v = (double)(cst_seeded_random_next(&r) >> 11) * 0x1p-53;

    return sqrt(-2 * log(u)) * cos(2 * acos(-1) * v);
}

static const struct row {
    const char *name;
    double rho;
} rows[] = { { "rho = 0", 0 }, { "rho = .5", 0.5 }, { "rho = .9", 0.9 }, { "rho = .95", 0.95 } };

/* A token: channels of an autoregressive process of deviation 1. */
static void fill_process(float *x, double rho) {
    double was = normal();

    for (size_t i = 0; i < CHANNELS; i++) {
        x[i] = (float)was;
        was = rho * was + sqrt(1 - rho * rho) * normal();
    }
}

/* BLOCKS blocks of one shape, as c is. */
static uint8_t *fill_blocks(struct case_block *c, struct cst_learn_block *blocks,
                            void (*fill)(float *x, double rho), double rho) {
    size_t channels = (size_t)c->desc.layers[0].kv_heads * c->desc.layers[0].head_dim_k;
    size_t row = c->desc.n_segments * channels;
    uint8_t *all = malloc(BLOCKS * c->desc.block_bytes);
    float *token = malloc(row * sizeof(*token));

    assert_true(all && token);
    for (size_t b = 0; b < BLOCKS; b++) {
        uint8_t *to = all + b * c->desc.block_bytes;

        for (size_t t = 0; t < BLOCK; t++) {
            fill(token, rho);
            for (uint32_t i = 0; i < c->desc.n_segments; i++)
                memcpy(to + c->desc.segments[i].offset + t * channels * sizeof(float),
                       token + i * channels, channels * sizeof(float));
        }
        blocks[b] = (struct cst_learn_block){ to, BLOCK, 4 };
    }
    free(token);
    return all;
}

static void fill_pair(float *x, double rho) {
    fill_process(x, rho);
    fill_process(x + CHANNELS, rho);
}

/*
 * With eigenvalues l_i of mean 1, the gain is the mean of -log2(l_i) / 2, and since the determinant
 * of the process is (1 - rho^2)^(n - 1), it is -(n - 1) / (2 n) log2(1 - rho^2). Frames at a small
 * step take log2(2 pi e / step^2) / 2 bits a value less this gain, and a little.
 */
static void gain_is_that_of_the_process(void **state) {
    const struct row *row = *state;
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_F32, BLOCK, 1, 1, CHANNELS, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    double gain = -(CHANNELS - 1.0) / (2 * CHANNELS) * log2(1 - row->rho * row->rho);
    const double step = 0.1, pi = acos(-1);
    const struct cst_encode_params p = { .preset = CST_PRESET_DEEP,
                                         .tokens = BLOCK,
                                         .first_position = 4,
                                         .bound = 1,
                                         .step = (float)step };
    struct cst_encode_params params = p;
    struct cst_learn_block blocks[BLOCKS];
    double bits, ideal;
    struct side_case s;
    uint8_t *all = fill_blocks(c, blocks, fill_pair, row->rho);

    assert_int_equal(side_case_learn_blocks(&s, &c->desc, blocks, BLOCKS, NULL), 0);
    assert_int_equal(side_case_parse(&s, &c->desc), 0);
    assert_int_equal(s.report.predicted, 0); /* V is independent of K */
    for (uint8_t tensor = 0; tensor < 2; tensor++) {
        const struct cst_side_tensor *t = cst_side_tensor(&s.side, 0, tensor);
        double learned = 0;

        assert_true(fabs((double)t->rms - 1) < 0.02);
        for (size_t i = 0; i < CHANNELS; i++)
            learned -= log2((double)t->klt.sigma[i]) / CHANNELS;
        assert_true(fabs(learned - gain) < 0.03);
    }
    memcpy(c->block, blocks[1].bytes, c->desc.block_bytes);
    params.side = &s.side;
    assert_int_equal(case_encode(c, &params, NULL), 0);
    bits = (double)c->frame_len * 8 / (2.0 * CHANNELS * BLOCK);
    ideal = log2(2 * pi * exp(1) / (step * step)) / 2 - gain;
    print_message("%.3f bits, ideal %.3f\n", bits, ideal);
    assert_true(bits > ideal - 0.02 && bits < ideal + 0.05);
    side_case_deinit(&s);
    free(all);
}

/* Two layers; every tensor but the first is rho times the channels of the one before, in reverse
 * order, and noise. */
static void fill_chain(float *x, double rho) {
    for (size_t i = 0; i < 4 * CHANNELS; i++) {
        size_t layer = i / CHANNELS, ch = i % CHANNELS;

        x[i] = (float)(layer ? rho * (double)x[layer * CHANNELS - 1 - ch] +
                                   sqrt(1 - rho * rho) * normal()
                             : normal());
    }
}

static double deviation(const float *sigma, size_t n) {
    double sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += (double)sigma[i] * (double)sigma[i] / (double)n;
    return sqrt(sum);
}

/* What remains of a tensor has the deviation sqrt(1 - rho^2), if its source is known exactly. */
static void predictors_find_what_follows(void **state) {
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_F32, BLOCK, 2, 1, CHANNELS, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    const struct cst_learn_params params = { .version = 3, .step = 0.05f };
    const struct cst_learn_params without = { .version = 3, .step = 0.05f, .no_predictors = true };
    const double rho = 0.95;
    static const uint8_t sources[] = { 0, CST_SIDE_FROM_K, CST_SIDE_FROM_V, CST_SIDE_FROM_K };
    struct cst_learn_block blocks[BLOCKS];
    struct side_case s, again;
    uint8_t *all = fill_blocks(c, blocks, fill_chain, rho);

    assert_int_equal(side_case_learn_blocks(&s, &c->desc, blocks, BLOCKS, &params), 0);
    assert_int_equal(side_case_parse(&s, &c->desc), 0);
    assert_int_equal(s.side.version, 3);
    assert_int_equal(s.report.predicted, 3);
    for (uint32_t i = 1; i < 4; i++) {
        const struct cst_side_tensor *t = cst_side_tensor(&s.side, i / 2, (uint8_t)(i % 2));

        assert_true(t->sources & sources[i]);
        assert_true(fabs(deviation(t->residual.sigma, CHANNELS) / sqrt(1 - rho * rho) - 1) < 0.03);
    }
    /* three of four tensors gain log2(1 / sqrt(1 - rho^2)) */
    assert_true(fabs((double)(s.report.bits_klt - s.report.bits_deep) +
                     0.75 * log2(1 - rho * rho) / 2) < 0.05);
    assert_int_equal(side_case_learn_blocks(&again, &c->desc, blocks, BLOCKS, &params), 0);
    assert_int_equal(again.len, s.len);
    assert_memory_equal(again.bytes, s.bytes, s.len);
    side_case_deinit(&again);
    assert_int_equal(side_case_learn_blocks(&again, &c->desc, blocks, BLOCKS, &without), 0);
    assert_int_equal(again.report.predicted, 0);
    assert_true(again.len < s.len);
    side_case_deinit(&again);
    /* fewer than 16 tokens an input */
    assert_int_equal(side_case_learn_blocks(&again, &c->desc, blocks, 1, &params), 0);
    assert_int_equal(again.report.predicted, 0);
    side_case_deinit(&again);
    side_case_deinit(&s);
    free(all);
}

/* Three layers of noise; V of the last one follows V of the first: two layers further back. */
static void fill_far(float *x, double rho) {
    for (size_t i = 0; i < 6 * CHANNELS; i++)
        x[i] = (float)normal();
    for (size_t i = 0; i < CHANNELS; i++)
        x[5 * CHANNELS + i] = (float)(rho * (double)x[CHANNELS + (i + 5) % CHANNELS] +
                                      sqrt(1 - rho * rho) * normal());
}

static void predictors_look_two_layers_back(void **state) {
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_F32, BLOCK, 3, 1, CHANNELS, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    const struct cst_learn_params params = { .version = 1, .step = 0.05f };
    const double rho = 0.95;
    struct cst_learn_block blocks[BLOCKS];
    struct side_case s;
    uint8_t *all = fill_blocks(c, blocks, fill_far, rho);
    const struct cst_side_tensor *t;

    assert_int_equal(side_case_learn_blocks(&s, &c->desc, blocks, BLOCKS, &params), 0);
    assert_int_equal(side_case_parse(&s, &c->desc), 0);
    assert_int_equal(s.report.predicted, 1);
    t = cst_side_tensor(&s.side, 2, CST_TENSOR_V);
    assert_true(t->sources & CST_SIDE_FROM_V2);
    assert_int_equal(t->rank, 0);
    assert_true(fabs(deviation(t->residual.sigma, CHANNELS) / sqrt(1 - rho * rho) - 1) < 0.03);
    side_case_deinit(&s);
    free(all);
}

/* Four inputs a channel save log2(1 / sqrt(1 - rho^2)) = .07 of 6 bits: more than nothing, less
 * than their products are worth. */
static void predictors_that_save_little_are_not_taken(void **state) {
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_F32, BLOCK, 3, 1, CHANNELS, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    const struct cst_learn_params params = { .version = 1, .step = 0.05f };
    struct cst_learn_block blocks[BLOCKS];
    struct side_case s;
    uint8_t *all = fill_blocks(c, blocks, fill_far, 0.3);

    assert_int_equal(side_case_learn_blocks(&s, &c->desc, blocks, BLOCKS, &params), 0);
    assert_int_equal(s.report.predicted, 0);
    side_case_deinit(&s);
    free(all);
}

/*
 * One layer of WIDE_HEADS heads of a dimension of WIDE_DIMS, two groups. Keys are FACTORS factors
 * in noise, seen by all channels of all heads; values are the factors again, in other noise. With n
 * channels to estimate them from, a factor of weight 1 a channel is known but for a variance of
 * 1 / (1 + n / noise^2), so both groups' keys leave less of V than those of one.
 */
enum { WIDE_HEADS = 2, WIDE_DIMS = 136, WIDE = WIDE_HEADS * WIDE_DIMS, FACTORS = 16 };
static const double key_noise = 6, value_noise = 0.05;

static void fill_wide(float *x, double rho) {
    double factor[FACTORS];

    (void)rho;
    for (size_t f = 0; f < FACTORS; f++)
        factor[f] = normal();
    for (size_t i = 0; i < WIDE; i++) {
        /* signs that are at right angles within each group's first 128 channels */
        double sum = 0;

        for (size_t f = 0; f < FACTORS; f++)
            sum +=
                __builtin_parity((unsigned)(i % WIDE_DIMS) & (unsigned)f) ? -factor[f] : factor[f];
        x[i] = (float)(sum + key_noise * normal());
        x[WIDE + i] = (float)(factor[i % FACTORS] + value_noise * normal());
    }
}

static void heads_of_predictors_are_checked(struct side_case *s,
                                            const struct cst_descriptor *desc) {
    static const struct {
        size_t at;
        uint8_t value;
    } bad[] = { { 0, 0 },   /* no sources */
                { 0, 3 },   /* one that isn't there */
                { 0, 16 },  /* one that isn't defined */
                { 1, 1 },   /* reserved */
                { 2, 0 },   /* another rank, and bytes left over */
                { 3, 3 } }; /* a rank beyond the most */
    size_t len;
    const uint8_t *section = cst_side_section(&s->side, CST_SIDE_PREDICTOR2, 0, CST_TENSOR_V, &len);
    uint8_t *head = s->bytes + (section - s->bytes);

    for (size_t i = 0; i < CST_COUNT(bad); i++) {
        uint8_t was = head[bad[i].at];

        head[bad[i].at] = bad[i].value;
        assert_int_equal(side_case_parse(s, desc), CST_SIDE_E_CORRUPT);
        head[bad[i].at] = was;
    }
    assert_int_equal(side_case_parse(s, desc), 0);
    for (size_t i = 0; i < 3; i++) { /* as the other kind, which knows no ranks */
        struct cst_side_entry *e = (struct cst_side_entry *)(void *)(s->bytes + 32) + i;

        if (e->kind != CST_SIDE_PREDICTOR2)
            continue;
        e->kind = CST_SIDE_PREDICTOR;
        assert_int_equal(side_case_parse(s, desc), CST_SIDE_E_CORRUPT);
        e->kind = CST_SIDE_PREDICTOR2;
    }
    assert_int_equal(side_case_parse(s, desc), 0);
}

static void wide_tensors_are_predicted_from_all_heads(void **state) {
    struct case_shape shape = { CASE_ROWS, CST_DTYPE_F32, BLOCK, 1, WIDE_HEADS, WIDE_DIMS, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    const struct cst_learn_params params = { .version = 1, .step = 0.05f };
    double noise = key_noise * key_noise, all = 1 / (1 + WIDE / noise);
    double one = 1 / (1 + WIDE_DIMS / noise);
    struct cst_learn_block *blocks = calloc(BLOCKS, sizeof(*blocks));
    const struct cst_side_tensor *t;
    struct side_case s;
    uint8_t *bytes;
    double left;

    assert_non_null(blocks);
    bytes = fill_blocks(c, blocks, fill_wide, 0);
    assert_int_equal(side_case_learn_blocks(&s, &c->desc, blocks, BLOCKS, &params), 0);
    assert_int_equal(side_case_parse(&s, &c->desc), 0);
    t = cst_side_tensor(&s.side, 0, CST_TENSOR_V);
    assert_int_equal(t->width, WIDE_DIMS);
    assert_true(t->sources == CST_SIDE_FROM_K && t->rank >= FACTORS);
    left = deviation(t->residual.sigma, WIDE);
    left = left * left - value_noise * value_noise;
    print_message("%.4f of the factors left; from all heads %.4f, from one group %.4f\n", left, all,
                  one);
    assert_true(left < 1.1 * all && left < 0.7 * one);
    heads_of_predictors_are_checked(&s, &c->desc);
    side_case_deinit(&s);
    free(bytes);
    free(blocks);
}

static void side_data_of_large_models_keep_their_budget(void **state) {
    static const struct {
        uint32_t layers, heads, dims;
        bool predicts;
    } models[] = { { 80, 8, 128, true },  { 80, 64, 128, false }, { 32, 8, 128, true },
                   { 32, 32, 128, true }, { 28, 4, 128, true },   { 30, 3, 64, true },
                   { 126, 8, 128, true }, { 1, 1, 1, false },     { 256, 128, 128, false } };

    for (size_t i = 0; i < CST_COUNT(models); i++) {
        struct cst_layer layers[CST_LAYERS_MAX];
        const struct cst_descriptor desc = { .n_layers = models[i].layers, .layers = layers };
        struct cst_side_plan plan;

        for (uint32_t l = 0; l < models[i].layers; l++)
            layers[l] = (struct cst_layer){ .kv_heads = models[i].heads,
                                            .head_dim_k = models[i].dims,
                                            .head_dim_v = models[i].dims };
        plan = cst_side_plan(&desc);
        print_message("%u layers, %u heads: groups of %u, %u inputs, %.1f MiB\n", models[i].layers,
                      models[i].heads, plan.width, plan.inputs, (double)plan.bytes / (1 << 20));
        assert_true(plan.bytes <= UINT64_C(64) << 20);
        assert_true(cst_learn_bound(&desc) == plan.bytes);
        assert_true(!models[i].predicts || plan.inputs >= plan.width);
        assert_true(cst_side_memory(&desc) < (size_t)192 << 20);
    }
}

static void odd_blocks_are_learned_from(void **state) {
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_F32, BLOCK, 2, 1, CHANNELS, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    struct cst_learn_block blocks[BLOCKS];
    uint8_t *all = fill_blocks(c, blocks, fill_chain, 0.5);
    atomic_bool stop = true;
    const struct cst_learn_params stopped = { .version = 1, .stop = &stop };
    struct side_case s;
    float nan = NAN;

    /* too few, sinks don't count */
    blocks[0].tokens = CST_LEARN_TOKENS_MIN + 3;
    blocks[0].first_position = 0;
    assert_int_equal(side_case_learn_blocks(&s, &c->desc, blocks, 1, NULL), CST_LEARN_E_FEW);
    side_case_deinit(&s);
    assert_int_equal(side_case_learn_blocks(&s, &c->desc, blocks, 2, &stopped),
                     CST_LEARN_E_STOPPED);
    side_case_deinit(&s);
    /* a value that isn't one */
    memcpy(all + c->desc.segments[1].offset + 4096, &nan, sizeof(nan));
    assert_int_equal(side_case_learn_blocks(&s, &c->desc, blocks, 2, NULL), 0);
    assert_int_equal(side_case_parse(&s, &c->desc), 0);
    assert_int_equal(s.report.tensors, 4);
    side_case_deinit(&s);
    /* a tensor that never changes */
    for (int b = 0; b < 2; b++)
        memset(all + b * c->desc.block_bytes + c->desc.segments[1].offset, 0,
               c->desc.segments[1].length);
    assert_int_equal(side_case_learn_blocks(&s, &c->desc, blocks, 2, NULL), 0);
    assert_int_equal(side_case_parse(&s, &c->desc), 0);
    assert_null(cst_side_tensor(&s.side, 0, CST_TENSOR_V));
    assert_non_null(cst_side_tensor(&s.side, 1, CST_TENSOR_V));
    side_case_deinit(&s);
    memset(all, 0, BLOCKS * c->desc.block_bytes);
    assert_int_equal(side_case_learn_blocks(&s, &c->desc, blocks, 2, NULL), CST_LEARN_E_SHAPE);
    side_case_deinit(&s);
    free(all);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(predictors_find_what_follows),
        cmocka_unit_test(predictors_look_two_layers_back),
        cmocka_unit_test(predictors_that_save_little_are_not_taken),
        cmocka_unit_test(wide_tensors_are_predicted_from_all_heads),
        cmocka_unit_test(side_data_of_large_models_keep_their_budget),
        cmocka_unit_test(odd_blocks_are_learned_from),
    };

    return cst_run_rows(rows, gain_is_that_of_the_process) +
           cmocka_run_group_tests(tests, NULL, NULL);
}
