/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stages GROUPS and LLOYD: what their streams look like and decode to, by the definitions of
 * docs/codec-format.md written here once more and slowly; that their errors are those that theory
 * gives; what they refuse.
 */
#include "tests/lib/check.h"
#include "tests/unit/codec/codec_case.h"

#include "codec/coded.h"
#include "codec/lloyd_table.h"
#include "codec/side.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* How a stream is made. */
struct scheme {
    bool lloyd;
    struct cst_groups_params groups;
    unsigned bits;
    bool means;
};

static const struct scheme int4 = { .groups = { 0, 4, 6 } };
static const struct scheme kivi_k = {
    .groups = { CST_CODED_UNROTATED | CST_CODED_ZEROS | CST_CODED_BY_CHANNEL, 4, 5 }
};
static const struct scheme kivi_v = { .groups = { CST_CODED_ZEROS, 4, 5 } };
static const struct scheme kivi2_k = { .groups = { CST_CODED_ZEROS | CST_CODED_BY_CHANNEL, 2, 5 } };
static const struct scheme lloyd4 = { .lloyd = true, .bits = 4, .means = true };
static const struct scheme lloyd3 = { .lloyd = true, .bits = 3 };

/* The inner loops that encode() and decode() use; NULL: the best. */
static const struct cst_codec_ops *forced;

/* Encodes segment i into c->frame; its decoded form lies in stage->w.a. */
static size_t encode(struct case_block *c, struct case_stage *stage, const struct scheme *scheme,
                     uint32_t i, uint32_t tokens, uint32_t first_position, float *error) {
    const uint8_t *src = c->block + c->desc.segments[i].offset;
    struct cst_groups_params groups = scheme->groups;

    case_stage_init(stage, c, i, tokens, first_position);
    if (forced)
        stage->w.ops = forced;
    if (!stage->s.rotated)
        groups.flags &= (uint8_t)~CST_CODED_UNROTATED;
    if (scheme->lloyd)
        return cst_lloyd_encode(c->frame, src, &stage->s, scheme->bits,
                                scheme->means ? CST_CODED_MEAN : 0, &stage->w, error, NULL);
    return cst_groups_encode(c->frame, src, &stage->s, &groups, &stage->w, error);
}

static bool decode(struct case_block *c, struct case_stage *stage, const struct scheme *scheme,
                   uint8_t *out, size_t len) {
    return (scheme->lloyd ? cst_lloyd_decode : cst_groups_decode)(out, &stage->s, c->frame, len,
                                                                  &stage->w);
}

/* ---- a slow decoder ----------------------------------------------------------------------------
 */

struct slow {
    const uint8_t *stream;
    const struct cst_coded_header *head;
    const struct cst_view *view;
    uint32_t tokens, sinks, channels;
};

static double parameter(const struct slow *s, uint64_t at) {
    return ldexp((double)cst_f16_to_f32(cst_load16(s->stream + at)), s->head->exponent);
}

static unsigned code(const struct slow *s, uint64_t codes, uint32_t n, uint32_t c) {
    uint64_t row = codes + n * (uint64_t)((s->channels + 7) / 8 * s->head->bits);
    unsigned q = 0;

    for (unsigned b = 0; b < s->head->bits; b++) {
        uint64_t bit = (uint64_t)c * s->head->bits + b;

        q |= (s->stream[row + bit / 8] >> bit % 8 & 1u) << b;
    }
    return q;
}

/* Value of coded token n and channel c before K is turned out. */
static double slow_group(const struct slow *s, uint32_t n, uint32_t c) {
    uint32_t coded = s->tokens - s->sinks, length = 1u << s->head->group;
    bool by_channel = s->head->flags & CST_CODED_BY_CHANNEL;
    bool zeros = s->head->flags & CST_CODED_ZEROS;
    uint64_t rows = by_channel ? (coded + length - 1) / length : coded;
    uint64_t per_row = by_channel ? s->channels : (s->channels + length - 1) / length;
    uint64_t at = by_channel ? n / length * per_row + c : n * per_row + c / length;
    uint64_t scales = 8 + (uint64_t)s->sinks * s->channels * s->view->esize;
    uint64_t codes = scales + 2 * rows * per_row * (zeros ? 2 : 1);
    double scale = parameter(s, scales + 2 * at), q = code(s, codes, n, c);

    if (zeros)
        return q * scale + parameter(s, scales + 2 * (rows * per_row + at));
    return (q - (1 << (s->head->bits - 1))) * scale;
}

static double slow_lloyd(const struct slow *s, uint32_t n, uint32_t c) {
    uint32_t coded = s->tokens - s->sinks, dims = s->view->dims, h = c / dims, d = c % dims;
    bool mean = s->head->flags & CST_CODED_MEAN;
    uint64_t means = 8 + (uint64_t)s->sinks * s->channels * s->view->esize;
    uint64_t norms = means + (mean ? 2 * s->channels : 0);
    uint64_t codes = norms + 2 * (uint64_t)coded * s->view->heads;
    uint32_t first = 0, size = 1;
    double x = 0;

    for (uint32_t left = dims;; first += size, left -= size) { /* the block that d lies in */
        for (size = 1; 2 * size <= left;)
            size *= 2;
        if (d < first + size)
            break;
    }
    for (uint32_t j = 0; j < size; j++) {
        double level =
            (double)cst_lloyd_levels(s->head->bits)[code(s, codes, n, h * dims + first + j)];

        x += __builtin_popcount(j & (d - first)) % 2 ? -level : level;
    }
    x *= parameter(s, norms + 2 * (n * s->view->heads + h)) / sqrt(size);
    return x + (mean ? parameter(s, means + 2 * c) : 0);
}

/* Row of coded token n, keys turned out by the formula. */
static void slow_row(const struct slow *s, const struct scheme *scheme,
                     const struct cst_stage_segment *seg, uint32_t n, double *row) {
    for (uint32_t c = 0; c < s->channels; c++)
        row[c] = scheme->lloyd ? slow_lloyd(s, n, c) : slow_group(s, n, c);
    if (!(s->head->flags & CST_CODED_UNROTATED))
        return;
    for (uint32_t h = 0; h < s->view->heads; h++) {
        for (uint32_t i = 0; i < seg->rotated->rope_dims / 2; i++) {
            bool norm = seg->rotated->rope == CST_ROPE_NORM;
            double *a = row + h * s->view->dims + (norm ? 2 * i : i);
            double *b = norm ? a + 1 : a + seg->rotated->rope_dims / 2, x = *a, y = *b;
            double angle =
                pow((double)seg->rotated->rope_theta, -2.0 * i / seg->rotated->rope_dims) *
                (seg->position + (double)(s->sinks + n));

            *a = x * cos(angle) - y * sin(angle);
            *b = x * sin(angle) + y * cos(angle);
        }
    }
}

static double step_of(uint8_t dtype) {
    return dtype == CST_DTYPE_BF16 ? 0x1p-8 : dtype == CST_DTYPE_F16 ? 0x1p-11 : 0x1p-22;
}

static void check_decoded(struct case_block *c, const struct case_stage *stage,
                          const struct scheme *scheme, const uint8_t *out) {
    const struct cst_coded_header *head = (const void *)c->frame;
    const struct cst_view *v = &stage->view;
    struct slow s = { c->frame, head, v, stage->s.tokens, stage->s.sinks, v->heads * v->dims };
    const uint8_t *src = c->block;
    double row[512];

    for (uint32_t t = 0; t < v->tokens; t++) {
        if (t >= s.sinks && t < s.tokens)
            slow_row(&s, scheme, &stage->s, t - s.sinks, row);
        for (uint32_t ch = 0; ch < s.channels; ch++) {
            uint64_t at = cst_view_at(v, t, ch / v->dims, ch % v->dims);
            double y = (double)cst_dtype_load(v->dtype, out + at);

            if (t < s.sinks || t >= s.tokens)
                assert_memory_equal(out + at, src + at, v->esize);
            else
                assert_true(fabs(y - row[ch]) <= step_of(v->dtype) * fabs(row[ch]) + 2e-5);
        }
    }
}

/* ---- streams ----------------------------------------------------------------------------------
 */

static const struct row {
    const char *name;
    const struct scheme *scheme;
    uint32_t heads, dims, tokens, first_position;
    uint8_t rope;
    uint32_t rope_dims;
    size_t parameters, row; /* bytes that the format asks for: fp16 values, and codes of a token */
} rows[] = {
    { "int4", &int4, 2, 72, 64, 64, 0, 0, 2 * 64 * 3, 72 },
    { "int4, sinks, tail", &int4, 2, 72, 17, 1, 0, 0, 2 * 14 * 3, 72 },
    { "int4, few channels", &int4, 1, 20, 64, 64, 0, 0, 2 * 64, 12 },
    { "kivi keys", &kivi_k, 2, 64, 64, 0, CST_ROPE_NORM, 64, 2 * 2 * 2 * 128, 64 },
    { "kivi keys, neox, tail", &kivi_k, 2, 48, 45, 9, CST_ROPE_NEOX, 24, 2 * 2 * 2 * 96, 48 },
    { "kivi values", &kivi_v, 3, 80, 64, 0, 0, 0, 2 * 2 * 60 * 8, 120 },
    { "kivi of 2 bits", &kivi2_k, 1, 20, 33, 9, 0, 0, 2 * 2 * 2 * 20, 6 },
    { "lloyd 4", &lloyd4, 2, 64, 64, 0, CST_ROPE_NORM, 64, 2 * 60 * 2, 64 },
    { "lloyd 4 of 80", &lloyd4, 2, 80, 64, 300, CST_ROPE_NEOX, 32, 2 * 64 * 2 + 2 * 160, 80 },
    { "lloyd 4 of 128", &lloyd4, 1, 128, 64, 64, 0, 0, 2 * 64 + 2 * 128, 64 },
    { "lloyd 3 of 112", &lloyd3, 1, 112, 40, 3, 0, 0, 2 * 39, 42 },
    { "lloyd 3 of 7", &lloyd3, 3, 7, 64, 64, 0, 0, 2 * 64 * 3, 9 },
};

static void streams_are_as_the_format_says(void **state) {
    static const enum case_order orders[] = { CASE_ROWS, CASE_TRANSPOSED, CASE_HEADS, CASE_PADDED };
    const struct row *row = *state;

    for (uint8_t dtype = CST_DTYPE_F32; dtype < CST_DTYPES; dtype++) {
        uint8_t *first = NULL;
        size_t len = 0;

        for (size_t k = 0; k < CST_COUNT(orders); k++) {
            struct case_shape shape = { orders[k], dtype, 64, 1, row->heads, row->dims, 0 };
            cst_auto(case_freep) struct case_block *c = case_new(&shape);
            struct case_stage stage;
            uint8_t *stream;
            float error = -1;

            case_rotate_keys(c, row->rope, row->rope_dims);
            case_fill_model(c, 9, row->tokens);
            len = encode(c, &stage, row->scheme, 0, row->tokens, row->first_position, &error);
            assert_int_equal(
                len, 8 + (size_t)stage.s.sinks * row->heads * row->dims * cst_dtype_size(dtype) +
                         row->parameters + (row->tokens - stage.s.sinks) * row->row);
            memset(c->out, 0xa5, c->desc.block_bytes);
            assert_true(decode(c, &stage, row->scheme, c->out, len));
            assert_memory_equal(c->out, stage.w.a, stage.s.length); /* what encode left there */
            check_decoded(c, &stage, row->scheme, c->out);
            assert_true(error > 0 && error < 0.6f);
            stream = test_malloc(len);
            memcpy(stream, c->frame, len);
            if (!first)
                first = stream;
            assert_memory_equal(stream, first, len); /* whatever the layout */
            for (size_t n = 0; n < len; n += 5)
                assert_false(decode(c, &stage, row->scheme, c->out, n));
            assert_false(decode(c, &stage, row->scheme, c->out, len + 1));
            if (stream != first)
                test_free(stream);
        }
        test_free(first);
    }
}

static void every_set_of_loops_gives_the_same(void **state) {
    const struct cst_codec_ops *sets[] = { cst_codec_ops_portable(), cst_codec_ops_avx2(),
                                           cst_codec_ops_avx512() };
    const struct row *row = *state;
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_BF16, 64, 1, row->heads, row->dims, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    uint8_t *stream = test_malloc(c->desc.block_bytes), *block = test_malloc(c->desc.block_bytes);
    struct case_stage stage;
    size_t len = 0;

    case_rotate_keys(c, row->rope, row->rope_dims);
    case_fill_model(c, 9, row->tokens);
    for (size_t k = 0; k < CST_COUNT(sets) && sets[k]; k++) {
        size_t n;
        float e;

        forced = sets[k];
        n = encode(c, &stage, row->scheme, 0, row->tokens, row->first_position, &e);
        if (k == 0) {
            memcpy(stream, c->frame, n);
            memcpy(block, stage.w.a, stage.s.length);
            len = n;
        }
        assert_int_equal(n, len);
        assert_memory_equal(c->frame, stream, len);
        assert_true(decode(c, &stage, row->scheme, c->out, len));
        assert_memory_equal(c->out, block, stage.s.length);
    }
    forced = NULL;
    test_free(stream);
    test_free(block);
}

/* ---- heads -------------------------------------------------------------------------------------
 */

static const struct case_shape small = { CASE_ROWS, CST_DTYPE_BF16, 64, 1, 2, 64, 0 };
static const struct case_shape exact = { CASE_ROWS, CST_DTYPE_F32, 64, 1, 2, 64, 0 };

static void heads_are_checked(void **state) {
    static const struct scheme *const schemes[] = { &int4, &kivi_k, &lloyd4 };
    for (size_t k = 0; k < CST_COUNT(schemes); k++) {
        cst_auto(case_freep) struct case_block *c = case_new(&small);
        struct case_stage stage;
        bool turned;
        float error;
        size_t len;

        case_rotate_keys(c, CST_ROPE_NORM, 64);
        case_fill_model(c, 2, 64);
        len = encode(c, &stage, schemes[k], 0, 64, 64, &error);
        assert_true(len > 0);
        turned = c->frame[0] & CST_CODED_UNROTATED;
        assert_int_equal(turned, k > 0);
        assert_int_equal(cst_load32(c->frame + 4), k ? cst_rope_id(c->desc.layers) : 0);
#define REFUSED(at, value)                                                                         \
    do {                                                                                           \
        uint8_t was = c->frame[at];                                                                \
        assert_true(decode(c, &stage, schemes[k], c->out, len));                                   \
        c->frame[at] = (uint8_t)(value);                                                           \
        assert_false(decode(c, &stage, schemes[k], c->out, len));                                  \
        c->frame[at] = was;                                                                        \
    } while (0)
        REFUSED(0, was ^ CST_CODED_UNROTATED);
        REFUSED(0, was | 16);
        REFUSED(0, was ^ (k == 2 ? CST_CODED_ZEROS : CST_CODED_MEAN));
        REFUSED(1, 0);
        REFUSED(1, 9);
        REFUSED(1, 3); /* not its length */
        REFUSED(2, 81);
        REFUSED(2, -127);
        REFUSED(3, was + 1);
        REFUSED(3, 64);
        REFUSED(4, was ^ 1);
#undef REFUSED
        if (!turned)
            continue;
        c->desc.layers[0].rope_theta = 2e4f; /* other angles */
        assert_false(decode(c, &stage, schemes[k], c->out, len));
        c->desc.layers[0].rope_theta = 1e4f;
        stage.s.rotated = NULL;
        assert_false(decode(c, &stage, schemes[k], c->out, len));
    }
}

static void parameters_that_are_not_finite_are_refused(void **state) {
    static const struct scheme *const schemes[] = { &int4, &kivi_v, &kivi_k, &lloyd4 };
    /* where a scale, a zero, a mean or a norm lies, 64 tokens of 128 channels */
    static const size_t at[][2] = {
        { 8, 8 + 254 }, { 8, 8 + 512 + 510 }, { 8 + 510, 8 + 512 }, { 8 + 254, 8 + 256 + 254 }
    };

    for (size_t k = 0; k < CST_COUNT(schemes); k++) {
        cst_auto(case_freep) struct case_block *c = case_new(&small);
        struct case_stage stage;
        float error;
        size_t len;

        case_fill_model(c, 2, 64);
        len = encode(c, &stage, schemes[k], 0, 64, 64, &error);
        for (int i = 0; i < 2; i++) {
            uint16_t was = cst_load16(c->frame + at[k][i]);

            assert_true(decode(c, &stage, schemes[k], c->out, len));
            cst_store16(c->frame + at[k][i], 0xfc00);
            assert_false(decode(c, &stage, schemes[k], c->out, len));
            cst_store16(c->frame + at[k][i], 0x7e00);
            assert_false(decode(c, &stage, schemes[k], c->out, len));
            cst_store16(c->frame + at[k][i], was);
        }
    }
}

/* ---- what is refused ---------------------------------------------------------------------------
 */

static void values_that_would_be_spoilt_are_refused(void **state) {
    static const float bad[] = { INFINITY, -INFINITY, NAN, 0x1p92f };
    static const uint32_t large[] = { 1, 1, 1, 4 }; /* fewer large ones are outliers */
    static const struct scheme *const schemes[] = { &int4, &kivi_k, &kivi_v, &lloyd4 };

    for (size_t k = 0; k < CST_COUNT(schemes); k++) {
        cst_auto(case_freep) struct case_block *c = case_new(&small);
        struct case_stage stage;
        float error;

        for (size_t i = 0; i < CST_COUNT(bad); i++) {
            case_fill_model(c, 1, 64);
            case_set_value(c, 0, 3, 1, 50, bad[i]); /* a sink is kept as it is */
            assert_true(encode(c, &stage, schemes[k], 0, 64, 0, &error) > 0);
            assert_memory_equal(stage.w.a, c->block, 4 * 256);
            for (uint32_t t = 4; t < 4 + large[i]; t++)
                case_set_value(c, 0, t, 1, 51, bad[i]);
            assert_int_equal(encode(c, &stage, schemes[k], 0, 64, 0, &error), 0);
        }
        case_fill_model(c, 1, 64);
        c->block[63 * 256 + 255] = 1; /* a byte in a missing token */
        assert_int_equal(encode(c, &stage, schemes[k], 0, 63, 0, &error), 0);
        case_fill_model(c, 1, 1); /* nothing to compare an error with */
        assert_true(encode(c, &stage, schemes[k], 0, 1, 64, &error) == 0 || error == 0);
    }
}

static void rotations_that_nobody_knows_are_refused(void **state) {
    cst_auto(case_freep) struct case_block *c = case_new(&small);
    struct case_stage stage;
    float error;

    case_rotate_keys(c, CST_ROPE_MROPE, 64);
    case_fill_model(c, 1, 64);
    assert_int_equal(encode(c, &stage, &lloyd4, 0, 64, 64, &error), 0);
    assert_int_equal(encode(c, &stage, &kivi_k, 0, 64, 64, &error), 0);
    assert_true(encode(c, &stage, &int4, 0, 64, 64, &error) > 0);   /* as they are */
    assert_true(encode(c, &stage, &lloyd4, 1, 64, 64, &error) > 0); /* values don't turn */
}

/* ---- values ------------------------------------------------------------------------------------
 */

static double normal(struct cst_seeded_random *r) {
    double u = (double)((cst_seeded_random_next(r) >> 11) + 1) * 0x1p-53;
    double v = (double)(cst_seeded_random_next(r) >> 11) * 0x1p-53;

    return sqrt(-2 * log(u)) * cos(2 * 3.14159265358979323846 * v);
}

static const struct distortion {
    const char *name;
    double d; /* of the Lloyd-Max quantizer of a normal variable */
} distortions[] = {
    { "1 bit", .36338 },   { "2 bits", .11748 },  { "3 bits", .03455 },   { "4 bits", .009501 },
    { "5 bits", .002505 }, { "6 bits", 6.44e-4 }, { "7 bits", 1.635e-4 }, { "8 bits", 4.119e-5 },
};

/* Mass and mean of a normal variable between a and b. */
static double mass(double a, double b) {
    return (erfc(a / sqrt(2)) - erfc(b / sqrt(2))) / 2;
}

static double density(double x) {
    return exp(-x * x / 2) / sqrt(2 * 3.14159265358979323846);
}

static void levels_are_those_of_lloyd_and_max(void **state) {
    const struct distortion *row = *state;
    unsigned bits = (unsigned)(row - distortions) + 1, n = 1u << bits;
    const float *level = cst_lloyd_levels(bits);
    double d = 1;

    for (unsigned i = n / 2; i < n; i++) {
        double x = (double)level[i];
        double low = i == n / 2 ? 0 : ((double)level[i - 1] + x) / 2;
        double high = i == n - 1 ? 40 : (x + (double)level[i + 1]) / 2;
        double m = mass(low, high);

        assert_true(level[i] == -level[n - 1 - i]);
        assert_true(fabs((density(low) - density(high)) / m - x) < 1e-6);
        d -= 2 * m * x * x; /* E[x^2] less that of the levels */
    }
    assert_true(fabs(d / row->d - 1) < 1e-3);
}

static void normal_values_have_that_distortion(void **state) {
    const struct distortion *row = *state;
    struct scheme scheme = { .lloyd = true, .bits = (unsigned)(row - distortions) + 1 };
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_F32, 256, 1, 4, 128, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    float *x = (void *)c->block;
    struct cst_seeded_random r;
    struct case_stage stage;
    double errors = 0, energy = 0;
    float error;

    cst_seeded_random_init(&r, scheme.bits);
    for (size_t i = 0; i < 256 * 512; i++)
        x[i] = (float)normal(&r) * 3;
    assert_true(encode(c, &stage, &scheme, 0, 256, 64, &error) > 0);
    for (size_t i = 0; i < 256 * 512; i++) {
        double y = (double)((const float *)(void *)stage.w.a)[i];

        errors += ((double)x[i] - y) * ((double)x[i] - y);
        energy += (double)x[i] * (double)x[i];
    }
    /* a head of 128 is a little better than a normal variable; with one bit, norms that are kept
     * cost what the mean of the levels saves */
    assert_true(errors / energy < (scheme.bits == 1 ? 1.25 : 1.03) * row->d);
    assert_true(errors / energy > 0.9 * row->d);
    assert_true(fabs((double)error / sqrt(errors / energy) - 1) < 0.01);
}

static void norms_are_kept_and_zeros_are_zero(void **state) {
    cst_auto(case_freep) struct case_block *c = case_new(&exact);
    struct case_stage stage;
    const float *y;
    float error;

    case_fill_model(c, 3, 64);
    memset(c->block + 20 * 512 + 256, 0, 256); /* a head without anything */
    assert_true(encode(c, &stage, &lloyd3, 0, 64, 64, &error) > 0);
    y = (const void *)stage.w.a;
    for (size_t h = 0; h < 128; h++) {
        const float *x = (const float *)(void *)c->block + h * 64;
        double was = 0, is = 0;

        for (size_t i = 0; i < 64; i++) {
            was += (double)x[i] * (double)x[i];
            is += (double)y[h * 64 + i] * (double)y[h * 64 + i];
        }
        assert_true(h == 41 || fabs(sqrt(is / was) - 1) < 0x1p-11 + 1e-6);
        if (h == 41)
            assert_memory_equal(y + h * 64, c->block + 20 * 512 + 256, 256);
    }
}

/* Large channels, which spoil their groups, are spread by the transform. */
static void outliers_are_spread(void **state) {
    cst_auto(case_freep) struct case_block *c = case_new(&exact);
    struct case_stage stage;
    struct cst_seeded_random r;
    float error[2], *x = (void *)c->block;

    cst_seeded_random_init(&r, 8);
    for (size_t i = 0; i < 64 * 128; i++)
        x[i] = (float)normal(&r) * (i % 64 < 3 ? 12 : 1);
    assert_true(encode(c, &stage, &int4, 0, 64, 64, &error[0]) > 0);
    assert_true(encode(c, &stage, &lloyd4, 0, 64, 64, &error[1]) > 0);
    assert_true(error[0] > 0.15f);
    assert_true(error[1] < 0.105f);
}

static void sizes_of_values_do_not_matter(void **state) {
    static const struct scheme *const schemes[] = { &int4, &kivi_v, &kivi2_k, &lloyd4 };
    static const float factors[] = { 0x1p-100f, 0x1p-30f, 0x1p20f, 0x1p80f };

    for (size_t k = 0; k < CST_COUNT(schemes) * CST_COUNT(factors); k++) {
        const struct scheme *scheme = schemes[k / CST_COUNT(factors)];
        cst_auto(case_freep) struct case_block *c = case_new(&exact);
        float error[2], *x = (void *)c->block, factor = factors[k % CST_COUNT(factors)];
        struct case_stage stage;
        uint8_t *first;
        size_t len;

        case_fill_model(c, 4, 64);
        len = encode(c, &stage, scheme, 0, 64, 64, &error[0]);
        first = test_malloc(len);
        memcpy(first, c->frame, len);
        for (size_t i = 0; i < 64 * 128; i++)
            x[i] *= factor;
        assert_int_equal(encode(c, &stage, scheme, 0, 64, 64, &error[1]), len);
        assert_int_equal((int8_t)c->frame[2], (int8_t)first[2] + ilogbf(factor));
        c->frame[2] = first[2];
        assert_memory_equal(c->frame, first, len);
        assert_true(error[0] == error[1]);
        test_free(first);
    }
}

/* Half a bit a value for each halving of the energy, against 16 bits for each channel. */
static void means_are_taken_where_they_pay(void **state) {
    static const struct {
        uint32_t tokens;
        double mean;
        bool taken;
    } cases[] = { { 64, 0, false }, { 64, 0.5, false }, { 64, 0.75, true },
                  { 64, 10, true }, { 16, 1.5, false }, { 16, 1.9, true } };

    for (size_t k = 0; k < CST_COUNT(cases); k++) {
        cst_auto(case_freep) struct case_block *c = case_new(&exact);
        float error, *x = (void *)c->block;
        struct cst_seeded_random r;
        struct case_stage stage;

        cst_seeded_random_init(&r, 5);
        for (size_t i = 0; i < cases[k].tokens * (size_t)128; i++)
            x[i] = (float)(normal(&r) + (i % 2 ? cases[k].mean : -cases[k].mean));
        assert_true(encode(c, &stage, &lloyd4, 0, cases[k].tokens, 64, &error) > 0);
        assert_int_equal(!!(c->frame[0] & CST_CODED_MEAN), cases[k].taken);
    }
}

/* Keys are constant before they are turned: coded as stored they lose most of it. */
static void turning_back_pays(void **state) {
    cst_auto(case_freep) struct case_block *c = case_new(&exact);
    struct cst_rope_table *table;
    struct case_stage stage;
    struct cst_seeded_random r;
    float error, *x = (void *)c->block;
    double was = 0;

    case_rotate_keys(c, CST_ROPE_NEOX, 64);
    case_stage_init(&stage, c, 0, 64, 1000);
    table = stage.w.rope;
    cst_seeded_random_init(&r, 5);
    for (size_t i = 0; i < 64 * 128; i++)
        x[i] = (float)(normal(&r) + (i % 2 ? 5 : -5));
    cst_rope_prepare(table, c->desc.layers, 1000, 64);
    for (uint32_t t = 0; t < 64; t++)
        cst_rope_turn(table, c->desc.layers, x + (size_t)t * 128, 2, 64, t, 1, stage.w.ops);
    for (int turn = 0; turn < 2; turn++) {
        double errors = 0;

        c->desc.layers[0].k_rotated = (uint8_t)turn;
        assert_true(encode(c, &stage, &lloyd4, 0, 64, 1000, &error) > 0);
        for (size_t i = 0; i < 64 * 128; i++) {
            double e = (double)x[i] - (double)((const float *)(void *)stage.w.a)[i];

            errors += e * e;
        }
        if (turn)
            assert_true(errors < 0.1 * was && errors / (64 * 128) < 0.0105);
        was = errors;
    }
}

/* Of a case whose every channel has a mean and a deviation of its own. */
static void means_of_side_data_cost_nothing(void **state) {
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_BF16, 64, 1, 2, 64, 0 };
    const struct cst_encode_params own = { CST_PRESET_TURBOQUANT, 64, 64, 1 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    struct cst_side_tensor tensor[2] = { { .channels = 128 }, { .channels = 128 } };
    struct cst_side side = { .version = 3, .check = 77, .n_layers = 1, .tensor = tensor };
    struct cst_encode_params p = own;
    struct cst_frame_info info, with;
    float mean[2][128];
    size_t length;

    (void)state;
    case_fill_model(c, 5, 64);
    for (uint32_t i = 0; i < 256; i++) {
        mean[i / 128][i % 128] = 0;
        for (uint32_t t = 0; t < 64; t++)
            mean[i / 128][i % 128] += case_value(c, c->block, i / 128, t, i / 64 % 2, i % 64) / 64;
        tensor[i / 128].mean = mean[i / 128];
    }
    assert_int_equal(case_encode(c, &p, &info), 0);
    assert_int_equal(info.side_version, 0);
    length = c->frame_len;
    p.side = c->side = &side;
    assert_int_equal(case_encode(c, &p, &with), 0);
    assert_int_equal(with.side_version, 3);
    assert_int_equal(with.side_check, 77);
    assert_int_equal(length - c->frame_len, 2 * 128 * 2); /* a half each */
    assert_true(with.error < 1.05f * info.error);
    assert_int_equal(case_decode(c, 0, UINT32_MAX), 0); /* and block_crc is right */
    c->side = NULL;
    assert_int_equal(case_decode(c, 0, UINT32_MAX), CST_CODEC_E_SIDE);
    /* means that are far off are left alone, tensors of another width unknown */
    for (uint32_t i = 0; i < 256; i++)
        mean[i / 128][i % 128] += 1000;
    assert_int_equal(case_encode(c, &p, &with), 0);
    assert_int_equal(with.side_version, 0);
    assert_int_equal(c->frame_len, length);
    tensor[0].channels = tensor[1].channels = 64;
    assert_int_equal(case_encode(c, &p, &with), 0);
    assert_int_equal(with.side_version, 0);
}

/* Expected cosine between an angle of a level >= 2, of density sin(2 x)^(2^(level - 1) - 1) for
 * independent normal values (PolarQuant, lemma 2), and the nearest of four. */
static double expected_cosine(int level, const double cosines[4]) {
    double sum = 0, weight = 0;

    for (int i = 0; i < 100000; i++) {
        double x = M_PI / 2 * (i + 0.5) / 100000, f = pow(sin(2 * x), (1 << (level - 1)) - 1);
        double best = 0;

        for (int k = 0; k < 4; k++)
            best = CST_MAX(best, cos(x - acos(cosines[k])));
        sum += f * best;
        weight += f;
    }
    return sum / weight;
}

/* Lengths are kept, so the error is 2 - 2 E<x, y>, and the inner product of a block is the product
 * of independent cosines, one a level. */
static void angles_have_the_distortion_of_the_formula(void **state) {
    static const double codes[3][4] = { { .9523438, .805634, .5924136, .3050268 },
                                        { .9104246, .7810479, .6244711, .413675 },
                                        { .8656486, .7609979, .6487543, .5006521 } };
    const struct case_shape shape = { CASE_ROWS, CST_DTYPE_F32, 256, 1, 4, 128, 0 };
    cst_auto(case_freep) struct case_block *c = case_new(&shape);
    double errors = 0, energy = 0, expected = sin(M_PI / 16) / (M_PI / 16);
    float *x = (void *)c->block, error;
    struct cst_seeded_random r;
    struct case_stage stage;

    (void)state;
    for (int level = 2; level <= 4; level++)
        expected *= expected_cosine(level, codes[level - 2]);
    cst_seeded_random_init(&r, 2);
    for (size_t i = 0; i < 256 * 512; i++)
        x[i] = (float)normal(&r);
    case_stage_init(&stage, c, 0, 256, 64);
    assert_int_equal(cst_polar_encode(c->frame, c->block, &stage.s, &stage.w, &error),
                     8 + 256 * 512 * 62 / 16 / 8);
    for (size_t i = 0; i < 256 * 512; i++) {
        double y = (double)((const float *)(void *)stage.w.a)[i];

        errors += ((double)x[i] - y) * ((double)x[i] - y);
        energy += (double)x[i] * (double)x[i];
    }
    assert_true(fabs(errors / energy / (2 - 2 * expected) - 1) < 0.01);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_are_checked),
        cmocka_unit_test(parameters_that_are_not_finite_are_refused),
        cmocka_unit_test(values_that_would_be_spoilt_are_refused),
        cmocka_unit_test(rotations_that_nobody_knows_are_refused),
        cmocka_unit_test(norms_are_kept_and_zeros_are_zero),
        cmocka_unit_test(outliers_are_spread),
        cmocka_unit_test(sizes_of_values_do_not_matter),
        cmocka_unit_test(means_are_taken_where_they_pay),
        cmocka_unit_test(turning_back_pays),
        cmocka_unit_test(means_of_side_data_cost_nothing),
        cmocka_unit_test(angles_have_the_distortion_of_the_formula),
    };

    return cst_run_rows(rows, streams_are_as_the_format_says) +
           cst_run_rows(rows, every_set_of_loops_gives_the_same) +
           cst_run_rows(distortions, levels_are_those_of_lloyd_and_max) +
           cst_run_rows(distortions, normal_values_have_that_distortion) +
           cmocka_run_group_tests(tests, NULL, NULL);
}
