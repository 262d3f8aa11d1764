/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The integer coder: tables against the formula in libm, sizes against the entropy under the
 * tables, streams of all shapes read back by every instruction set, and damage.
 */
#include "tests/lib/check.h"

#include "codec/dispatch.h"
#include "codec/rans.h"

#include "base/le.h"
#include "base/random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SYMBOLS = 2 * CST_RANS_REACH + 1, TOP = CST_RANS_TABLES - 1 };

static struct cst_rans_work *new_work(void) {
    size_t size = cst_align_up(cst_rans_work_size(), 64);

    return cst_rans_work_init(aligned_alloc(64, size));
}

/* ---- tables ------------------------------------------------------------------------------------
 */

/* P(X > y) of a logistic variable of deviation 2^((klass - 24) / 4) */
static double above(double y, unsigned klass) {
    return 1 / (1 + exp(y * M_PI / sqrt(3) / exp2(((double)klass - 24) / 4)));
}

static void check_frequency(int f, double p) {
    double expected = 4096 * p + 0.5;

    assert_int_equal(f, CST_MAX(1, (int)floor(expected)));
    assert_true(fabs(expected - rint(expected)) > 1e-9); /* no doubt in any other arithmetic */
}

static void tables_are_logistic(void **state) {
    (void)state;
    for (unsigned k = 0; k < CST_RANS_TABLES; k++) {
        uint16_t f[SYMBOLS];
        int reach = cst_rans_frequencies(f, k), sum = 0;

        for (int s = 1; s <= reach; s++) {
            double end = s == reach ? 0 : above(s + 0.5, k);

            check_frequency(f[reach + s], above(s - 0.5, k) - end);
            assert_int_equal(f[reach - s], f[reach + s]);
        }
        assert_true(4096 * above(reach - 0.5, k) < 1.5);
        assert_true(reach == 1 || 4096 * above(reach - 1.5, k) >= 1.5);
        for (int s = 0; s <= 2 * reach; s++)
            sum += f[s];
        assert_int_equal(sum, 4096);
        assert_true(f[reach] >= f[reach + 1]);
    }
}

static void classes_are_quarter_octaves(void **state) {
    (void)state;
    for (int k = 0; k < CST_RANS_CLASSES; k++) {
        assert_int_equal(cst_rans_class(exp2((k - 24) / 4.0)), k);
        assert_int_equal(cst_rans_class(exp2((k - 24 + 0.499) / 4)), k);
        assert_int_equal(cst_rans_class(exp2((k - 24 - 0.499) / 4)), k);
    }
    assert_int_equal(cst_rans_class(0), 0);
    assert_int_equal(cst_rans_class(1e30), CST_RANS_CLASSES - 1);
    assert_int_equal(cst_rans_class(INFINITY), CST_RANS_CLASSES - 1);
    assert_int_equal(cst_rans_class(NAN), 0);
}

static void wrong_tables_are_refused(void **state) {
    struct cst_rans_table *t = malloc(sizeof(*t));
    uint16_t f[SYMBOLS] = { 1, 4094, 1 };

    (void)state;
    assert_true(cst_rans_table_init(t, f, 1));
    assert_false(cst_rans_table_init(t, f, 0));
    assert_false(cst_rans_table_init(t, f, CST_RANS_REACH + 1));
    f[1] = 4095;
    assert_false(cst_rans_table_init(t, f, 1));
    f[2] = 0;
    assert_false(cst_rans_table_init(t, f, 1));
    free(t);
}

/* ---- streams -----------------------------------------------------------------------------------
 */

struct row {
    const char *name;
    uint32_t tokens, channels;
    int lowest, highest; /* classes, spread over the channels from the highest down */
    size_t payload;
    unsigned wild; /* one in so many integers is any integer at all */
};

static const struct row rows[] = {
    { "64 x 192", 64, 192, 14, 38, 0, 0 },
    { "64 x 192, coarse", 64, 192, 6, 33, 0, 0 },
    { "64 x 192, fine", 64, 192, 24, 44, 0, 0 },
    { "64 x 192 with gains", 64, 192, 14, 38, 128, 0 },
    { "60 x 192", 60, 192, 14, 38, 0, 0 },
    { "16 x 192", 16, 192, 14, 38, 0, 0 },
    { "1 x 192", 1, 192, 14, 38, 0, 0 },
    { "1 x 192 with a gain", 1, 192, 14, 38, 2, 0 },
    { "33 x 64", 33, 64, 20, 36, 66, 0 },
    { "1000 x 80", 1000, 80, 10, 40, 0, 0 },
    { "1024 x 17", 1024, 17, 0, 44, 2048, 0 },
    { "nothing but zeros", 64, 192, 0, 0, 0, 0 },
    { "wild", 64, 50, 0, 44, 7, 20 },
    { "all wild", 40, 30, 0, 44, 0, 1 },
    { "one", 1, 1, 24, 24, 0, 0 },
};

struct stream {
    struct cst_rans_matrix m;
    uint8_t *bytes, *klass;
    size_t cap, len;
    double entropy; /* under the tables, in bits */
};

static double uniform(struct cst_seeded_random *random) {
    return ((double)(cst_seeded_random_next(random) >> 11) + 0.5) / 0x1p53;
}

static int32_t draw(struct cst_seeded_random *random, unsigned klass, unsigned wild) {
    double u = uniform(random), scale = sqrt(3) / M_PI * exp2(((double)klass - 24) / 4);

    if (wild && cst_seeded_random_next(random) % wild == 0)
        return (int32_t)(cst_seeded_random_next(random) % (2 * CST_RANS_MAGNITUDE - 1)) -
               (CST_RANS_MAGNITUDE - 1);
    return (int32_t)rint(scale * log(u / (1 - u)));
}

/* Bits of one integer under the table of its class, classes beyond the tables by raw low bits. */
static double bits_of(int32_t q, unsigned klass) {
    unsigned shift = klass > TOP ? (klass - TOP + 3) / 4 : 0;
    int32_t symbol = (q + (1 << shift >> 1)) >> shift, beyond = 0;
    uint16_t f[SYMBOLS];
    int reach = cst_rans_frequencies(f, klass - 4 * shift);

    if (abs(symbol) >= reach) {
        beyond = 1 + 2 * (int32_t)floor(log2(abs(symbol) - reach + 1));
        symbol = symbol < 0 ? -reach : reach;
    }
    return 12 - log2(f[reach + symbol]) + shift + beyond;
}

static void make(struct stream *s, const struct row *row, struct cst_rans_work *work) {
    struct cst_seeded_random random;
    size_t stride = cst_align_up(row->tokens, CST_RANS_ROW);

    cst_seeded_random_init(&random, row->tokens * 1000 + row->channels);
    *s = (struct stream){ .cap = 400 + row->payload + (size_t)8 * row->tokens * row->channels };
    s->klass = malloc(row->channels);
    s->m = (struct cst_rans_matrix){
        calloc(row->channels * stride, 4), stride,      row->tokens, row->channels, s->klass,
        malloc(row->payload + 1),          row->payload
    };
    for (size_t i = 0; i < row->payload; i++)
        s->m.payload[i] = (uint8_t)cst_seeded_random_next(&random);
    for (uint32_t c = 0; c < row->channels; c++) {
        int range = row->highest - row->lowest;

        s->klass[c] = (uint8_t)(row->highest - range * (int)c / (int)row->channels);
        for (uint32_t t = 0; t < row->tokens; t++) {
            s->m.q[c * stride + t] = draw(&random, s->klass[c], row->wild);
            s->entropy += bits_of(s->m.q[c * stride + t], s->klass[c]);
        }
    }
    s->entropy += 8 * (double)row->payload;
    s->bytes = malloc(s->cap);
    s->len = cst_rans_encode_coefficients(s->bytes, s->cap, &s->m, work, cst_codec_ops_portable());
    assert_true(s->len > 0);
}

static void deinit(struct stream *s) {
    free(s->m.q);
    free(s->m.payload);
    free(s->klass);
    free(s->bytes);
}

/* A place for the decoded matrix, filled with something else. */
static struct cst_rans_matrix room_for(const struct stream *s) {
    struct cst_rans_matrix m = s->m;
    size_t n = m.channels * m.stride * sizeof(*m.q);

    m.q = malloc(n);
    memset(m.q, 0x55, n);
    m.payload = malloc(m.payload_len + 1);
    memset(m.payload, 0x55, m.payload_len + 1);
    return m;
}

static void check_equal(const struct cst_rans_matrix *a, const struct cst_rans_matrix *b) {
    for (uint32_t c = 0; c < a->channels; c++)
        assert_memory_equal(a->q + c * a->stride, b->q + c * b->stride, a->tokens * sizeof(*a->q));
    assert_memory_equal(a->payload, b->payload, a->payload_len);
}

static void streams_read_back(void **state) {
    const struct cst_codec_ops *sets[] = { cst_codec_ops_portable(), cst_codec_ops_avx2(),
                                           cst_codec_ops_avx512() };
    struct cst_rans_work *work = new_work();
    struct stream s;
    uint8_t *exact;

    make(&s, *state, work);
    exact = malloc(s.len); /* so that sanitizers see reads behind it */
    memcpy(exact, s.bytes, s.len);
    for (size_t k = 0; k < CST_COUNT(sets); k++) {
        struct cst_rans_matrix m = room_for(&s);

        if (sets[k]) {
            uint8_t *same = malloc(s.cap);

            assert_int_equal(cst_rans_encode_coefficients(same, s.cap, &s.m, work, sets[k]), s.len);
            assert_memory_equal(same, exact, s.len);
            free(same);
            assert_true(cst_rans_decode_coefficients(&m, exact, s.len, work, sets[k]));
            check_equal(&s.m, &m);
            assert_false(cst_rans_decode_coefficients(&m, exact, s.len - 1, work, sets[k]));
            assert_false(cst_rans_decode_coefficients(&m, s.bytes, s.len + 1, work, sets[k]));
        }
        free(m.q);
        free(m.payload);
    }
    /* no byte more than needed is asked for, but for what the head may take */
    assert_int_equal(cst_rans_encode_coefficients(s.bytes, s.len - 1, &s.m, work, cst_codec_ops()),
                     0);
    free(exact);
    deinit(&s);
    free(work);
}

/* 64 x 192 at 1.7 to 5 bits: half a percent above the entropy. Shorter ones: head, padding and
 * empty lanes may add 8 bytes. */
static void sizes_are_near_the_entropy(void **state) {
    struct cst_rans_work *work = new_work();

    (void)state;
    for (int top = 30; top <= 44; top++) {
        const struct row row = { "", 64, 192, top - 16, top, 0, 0 };
        struct stream s;

        make(&s, &row, work);
        print_message("classes %d .. %d: %.3f bits, %.3f %% above\n", row.lowest, row.highest,
                      s.entropy / 64 / 192, (double)s.len * 800 / s.entropy - 100);
        assert_true((double)s.len * 8 < s.entropy * 1.005);
        deinit(&s);
    }
    for (size_t i = 0; i < CST_COUNT(rows); i++) {
        struct stream s;

        make(&s, &rows[i], work);
        print_message("%s: %.0f bits, %.0f above\n", rows[i].name, s.entropy,
                      (double)s.len * 8 - s.entropy);
        assert_true((double)s.len * 8 < s.entropy * 1.006 + 64);
        deinit(&s);
    }
    free(work);
}

static void large_integers_are_refused(void **state) {
    struct cst_rans_work *work = new_work();
    int32_t q[CST_RANS_ROW] = { CST_RANS_MAGNITUDE - 1, 1 - CST_RANS_MAGNITUDE };
    uint8_t klass = 30, dst[1000];
    struct cst_rans_matrix m = { q, CST_RANS_ROW, 2, 1, &klass, NULL, 0 };

    (void)state;
    assert_true(cst_rans_encode_coefficients(dst, sizeof(dst), &m, work, cst_codec_ops()) > 0);
    q[0]++;
    assert_int_equal(cst_rans_encode_coefficients(dst, sizeof(dst), &m, work, cst_codec_ops()), 0);
    q[0] = INT32_MIN;
    assert_int_equal(cst_rans_encode_coefficients(dst, sizeof(dst), &m, work, cst_codec_ops()), 0);
    q[0] = 0;
    klass = CST_RANS_CLASSES;
    assert_int_equal(cst_rans_encode_coefficients(dst, sizeof(dst), &m, work, cst_codec_ops()), 0);
    free(work);
}

/* ---- damage ------------------------------------------------------------------------------------
 */

static void check_damaged(const struct stream *s, const uint8_t *src, size_t len,
                          struct cst_rans_work *work) {
    const struct cst_codec_ops *sets[] = { cst_codec_ops_portable(), cst_codec_ops_avx2(),
                                           cst_codec_ops_avx512() };
    struct cst_rans_matrix first = room_for(s), m = room_for(s);
    bool ok = cst_rans_decode_coefficients(&first, src, len, work, sets[0]);

    for (size_t k = 1; k < CST_COUNT(sets); k++) {
        if (!sets[k])
            continue;
        assert_int_equal(cst_rans_decode_coefficients(&m, src, len, work, sets[k]), ok);
        if (ok)
            check_equal(&first, &m);
    }
    if (ok) { /* the only stream of another matrix */
        uint8_t *again = malloc(s->cap);

        assert_true(cst_rans_encode_coefficients(again, s->cap, &first, work, cst_codec_ops()) > 0);
        free(again);
    }
    free(first.q);
    free(first.payload);
    free(m.q);
    free(m.payload);
}

static void damage_is_refused_or_stays_inside(void **state) {
    const struct row shapes[] = { { "", 64, 24, 20, 38, 0, 0 },
                                  { "", 40, 12, 20, 38, 30, 9 },
                                  { "", 5, 6, 10, 40, 3, 0 } };
    struct cst_rans_work *work = new_work();

    (void)state;
    for (size_t i = 0; i < CST_COUNT(shapes); i++) {
        struct stream s;
        uint8_t *exact;

        make(&s, &shapes[i], work);
        for (size_t n = 0; n < s.len; n++) {
            exact = malloc(n + 1);
            memcpy(exact, s.bytes, n);
            check_damaged(&s, exact, n, work);
            free(exact);
        }
        exact = malloc(s.len);
        memcpy(exact, s.bytes, s.len);
        for (size_t bit = 0; bit < s.len * 8; bit++) {
            exact[bit / 8] ^= (uint8_t)(1 << bit % 8);
            check_damaged(&s, exact, s.len, work);
            exact[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
        free(exact);
        deinit(&s);
    }
    free(work);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_are_logistic),
        cmocka_unit_test(classes_are_quarter_octaves),
        cmocka_unit_test(wrong_tables_are_refused),
        cmocka_unit_test(sizes_are_near_the_entropy),
        cmocka_unit_test(large_integers_are_refused),
        cmocka_unit_test(damage_is_refused_or_stays_inside),
    };

    return cst_run_rows(rows, streams_read_back) + cmocka_run_group_tests(tests, NULL, NULL);
}
