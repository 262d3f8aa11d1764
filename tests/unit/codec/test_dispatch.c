/* SPDX-License-Identifier: Apache-2.0 */
/* Every set of inner loops against the portable one, bit for bit, at all short lengths and
 * alignments; and the portable one against the definitions. */
#include "tests/lib/check.h"

#include "codec/dispatch.h"
#include "codec/dtype.h"

#include "base/random.h"

#include <math.h>
#include <string.h>

enum { N = 200 };

static struct cst_seeded_random r;

static void fill(void *p, size_t n) {
    uint8_t *b = p;

    for (size_t i = 0; i < n; i++)
        b[i] = (uint8_t)cst_seeded_random_next(&r);
}

static void split_and_merge(void **state) {
    const struct cst_codec_ops *ops = *state, *ref = cst_codec_ops_portable();
    uint8_t src[2 * N], hi[2][N], lo[2][N], dst[2][2 * N];

    fill(src, sizeof(src));
    for (size_t n = 0; n <= N; n++) {
        memset(hi, 7, sizeof(hi));
        memset(lo, 7, sizeof(lo));
        memset(dst, 7, sizeof(dst));
        ops->split(hi[0], lo[0], src, n);
        ref->split(hi[1], lo[1], src, n);
        assert_memory_equal(hi[0], hi[1], N);
        assert_memory_equal(lo[0], lo[1], N);
        for (size_t i = 0; i < n; i++) {
            unsigned x = (unsigned)(src[2 * i] | src[2 * i + 1] << 8);

            assert_int_equal(hi[0][i], x >> 7 & 255);              /* the 8 bits under the sign */
            assert_int_equal(lo[0][i], (x & 0x7f) << 1 | x >> 15); /* the rest, sign last */
        }
        ops->merge(dst[0], hi[0], lo[0], n);
        ref->merge(dst[1], hi[0], lo[0], n);
        assert_memory_equal(dst[0], src, 2 * n);
        assert_memory_equal(dst[0], dst[1], 2 * N);
    }
}

static void conversions(void **state) {
    const struct cst_codec_ops *ops = *state;

    for (uint8_t dtype = CST_DTYPE_F32; dtype < CST_DTYPES; dtype++) {
        for (uint32_t base = 0; base < 0x10000; base += 37) {
            uint8_t src[4 * 37];
            float x[37];

            for (uint32_t i = 0; i < 37; i++) {
                uint16_t h = (uint16_t)(base + i);
                uint32_t u = (uint32_t)h << 16 | h;

                memcpy(src + i * cst_dtype_size(dtype), dtype == CST_DTYPE_F32 ? (void *)&u : &h,
                       cst_dtype_size(dtype));
            }
            ops->to_f32[dtype](x, src, 37);
            for (uint32_t i = 0; i < 37; i++)
                assert_int_equal(cst_f32_bits(x[i]), cst_f32_bits(cst_dtype_load(
                                                         dtype, src + i * cst_dtype_size(dtype))));
        }
    }
}

static void dequantized_values(void **state) {
    const struct cst_codec_ops *ops = *state;
    int8_t q[256];

    for (int i = 0; i < 256; i++)
        q[i] = (int8_t)(i - 128);
    for (uint32_t h = 0; h < 0x7c00; h += 13) {
        float scale = cst_f16_to_f32((uint16_t)h);

        for (uint8_t dtype = CST_DTYPE_F32; dtype < CST_DTYPES; dtype++) {
            uint8_t dst[4 * 256 + 4];
            size_t n = 256 - h % 40;

            memset(dst, 7, sizeof(dst));
            ops->dequant[dtype](dst, q, scale, n);
            for (size_t i = 0; i < n; i++) {
                double exact = (double)q[i] * (double)scale; /* 8 + 11 bits */
                float want = (float)exact;

                if (dtype == CST_DTYPE_F16)
                    want = cst_f16_to_f32(cst_f32_to_f16(want));
                if (dtype == CST_DTYPE_BF16)
                    want = cst_bf16_to_f32(cst_f32_to_bf16(want));
                assert_int_equal(
                    cst_f32_bits(cst_dtype_load(dtype, dst + i * cst_dtype_size(dtype))),
                    cst_f32_bits(want));
            }
            assert_int_equal(dst[n * cst_dtype_size(dtype)], 7);
        }
    }
}

static void magnitudes(void **state) {
    const struct cst_codec_ops *ops = *state;
    float x[67];

    for (size_t n = 1; n <= CST_COUNT(x); n++) {
        for (size_t i = 0; i < n; i++)
            x[i] = (float)i / 100 * (i % 2 ? -1.0f : 1.0f);
        for (size_t i = 0; i < n; i++) {
            float kept = x[i];

            x[i] = -5.5f;
            assert_int_equal(ops->largest(x, n), cst_f32_bits(5.5f));
            x[i] = -INFINITY;
            assert_int_equal(ops->largest(x, n), 0x7f800000);
            x[i] = NAN;
            assert_true(ops->largest(x, n) > 0x7f800000);
            x[i] = kept;
        }
    }
}

static void quantized_values(void **state) {
    const struct cst_codec_ops *ops = *state;
    float x[N], scale = 0.375f; /* exact quotients */
    int8_t q[N + 1];

    for (size_t n = 0; n <= N; n++) {
        memset(q, 99, sizeof(q));
        for (size_t i = 0; i < n; i++)
            x[i] = scale * 0.25f * (float)((int)(i * 7) - 600); /* quarters: ties included */
        ops->quantize(q, x, scale, n);
        for (size_t i = 0; i < n; i++) {
            /* round() rounds halves away from zero */
            double want = round((double)x[i] / (double)scale);

            assert_int_equal(q[i], (int)fmax(-127, fmin(127, want)));
        }
        assert_int_equal(q[n], 99);
    }
    /* just under a half stays down: no rounding of the sum */
    for (size_t i = 0; i < N; i++)
        x[i] = nextafterf(0.5f, 0);
    ops->quantize(q, x, 1, N);
    for (size_t i = 0; i < N; i++)
        assert_int_equal(q[i], 0);
}

static void sums(void **state) {
    const struct cst_codec_ops *ops = *state;
    double sum[67] = { 0 }, square[67] = { 0 }, error[67] = { 0 }, mean[67];
    float x[67], y[67];

    for (int i = 0; i < 67; i++) {
        x[i] = (float)i * 0.37f;
        y[i] = x[i] + 0.01f * (float)(i % 5);
        mean[i] = (double)(i % 3);
    }
    for (int round = 0; round < 3; round++) {
        ops->add(sum, x, 66);
        ops->moments(square, error, mean, x, y, 66);
    }
    for (int i = 0; i < 66; i++) {
        double d = (double)x[i] - mean[i], e = (double)x[i] - (double)y[i];

        assert_true(sum[i] == (double)x[i] + (double)x[i] + (double)x[i]);
        assert_true(square[i] == d * d + d * d + d * d);
        assert_true(error[i] == e * e + e * e + e * e);
    }
    assert_true(sum[66] == 0 && square[66] == 0 && error[66] == 0);
}

static void table_entries(void **state) {
    const struct cst_codec_ops *ops = *state;
    uint64_t from[19], to[19];

    for (size_t n = 0; n <= 18; n++) {
        fill(from, sizeof(from));
        memset(to, 7, sizeof(to));
        ops->huff_prepend(to, from, n, 0xab, 9);
        for (size_t i = 0; i < n; i++) {
            uint8_t want[8], was[8], got[8];

            memcpy(was, &from[i], 8);
            memcpy(got, &to[i], 8);
            want[0] = 0xab;
            memcpy(want + 1, was, 5);
            assert_memory_equal(got, want, 6);
            assert_int_equal(to[i] >> 48, ((from[i] >> 48) + (1 << 8 | 9)) & 0xffff);
        }
        assert_int_equal(to[n], UINT64_C(0x0707070707070707));
    }
}

static void the_best_set_is_one_of_them(void **state) {
    const struct cst_codec_ops *best = cst_codec_ops();

    assert_true(best == cst_codec_ops_portable() || best == cst_codec_ops_avx2());
}

#define ROW(fn, ops)                                                                               \
    { .name = #fn, .test_func = fn, .initial_state = (void *)(uintptr_t)(ops) }

static int run(const struct cst_codec_ops *ops) {
    const struct CMUnitTest tests[] = {
        ROW(split_and_merge, ops),    ROW(conversions, ops),
        ROW(dequantized_values, ops), ROW(magnitudes, ops),
        ROW(quantized_values, ops),   ROW(sums, ops),
        ROW(table_entries, ops),      ROW(the_best_set_is_one_of_them, ops),
    };

    cst_seeded_random_init(&r, 11);
    return cmocka_run_group_tests_name(ops->name, tests, NULL, NULL);
}

int main(void) {
    int failed = run(cst_codec_ops_portable());

    if (cst_codec_ops_avx2())
        failed += run(cst_codec_ops_avx2());
    return failed;
}
