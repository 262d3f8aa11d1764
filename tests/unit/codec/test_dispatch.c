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

static void unpacked_codes(void **state) {
    const struct cst_codec_ops *ops = *state;

    for (unsigned bits = 1; bits <= 8; bits++) {
        for (size_t n = 0; n <= N; n += 8) {
            uint8_t *src = test_malloc(n / 8 * bits + 1), codes[N + 1];

            fill(src, n / 8 * bits);
            memset(codes, 99, sizeof(codes));
            ops->unpack(codes, src, n, bits);
            for (size_t i = 0; i < n; i++) {
                unsigned want = 0;

                for (unsigned b = 0; b < bits; b++)
                    want |= (src[(i * bits + b) / 8] >> (i * bits + b) % 8 & 1u) << b;
                assert_int_equal(codes[i], want);
            }
            assert_int_equal(codes[n], 99);
            test_free(src);
        }
    }
}

static void halves_are_scaled_and_checked(void **state) {
    const struct cst_codec_ops *ops = *state;
    uint8_t src[2 * 37];
    float x[38] = { 0 };

    for (size_t n = 0; n <= 37; n++) {
        for (size_t i = 0; i < 37; i++) {
            uint16_t half = (uint16_t)(cst_seeded_random_next(&r) & 0xbbff); /* finite */

            memcpy(src + 2 * i, &half, 2);
        }
        x[n] = 99;
        assert_true(ops->halves(x, src, 0.125f, n));
        for (size_t i = 0; i < n; i++)
            assert_int_equal(cst_f32_bits(x[i]),
                             cst_f32_bits(cst_dtype_load(CST_DTYPE_F16, src + 2 * i) * 0.125f));
        assert_true(x[n] == 99);
        for (size_t i = 0; i < n; i++) {
            uint16_t kept, odd = i % 2 ? 0x7c00 : 0xfe01;

            memcpy(&kept, src + 2 * i, 2);
            memcpy(src + 2 * i, &odd, 2);
            assert_false(ops->halves(x, src, 1, n));
            memcpy(src + 2 * i, &kept, 2);
        }
    }
}

/* Values about 1, and one of each two sets of loops must give the same bits. */
static void fill_floats(float *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        x[i] = (float)((double)(cst_seeded_random_next(&r) >> 11) * 0x1p-52 - 1);
}

static void affine_values(void **state) {
    const struct cst_codec_ops *ops = *state;
    float scale[N], zero[N], x[N + 1];
    uint8_t codes[N];

    fill(codes, sizeof(codes));
    fill_floats(scale, N);
    fill_floats(zero, N);
    for (size_t n = 0; n <= N; n++) {
        x[n] = 99;
        ops->affine(x, codes, scale, zero, n);
        for (size_t i = 0; i < n; i++) {
            volatile float product = (float)codes[i] * scale[i]; /* rounded, then added */

            assert_int_equal(cst_f32_bits(x[i]), cst_f32_bits(product + zero[i]));
        }
        ops->affine_group(x, codes, scale[0], zero[0], n);
        for (size_t i = 0; i < n; i++) {
            volatile float product = (float)codes[i] * scale[0];

            assert_int_equal(cst_f32_bits(x[i]), cst_f32_bits(product + zero[0]));
        }
        assert_true(x[n] == 99);
    }
}

static void hadamard_by_its_matrix(void **state) {
    const struct cst_codec_ops *ops = *state;
    static float x[4096 + 1], y[4096];

    for (size_t n = 1; n <= 4096; n *= 2) {
        fill_floats(x, n);
        memcpy(y, x, n * sizeof(*x));
        x[n] = 99;
        ops->hadamard(x, n);
        assert_true(x[n] == 99);
        for (size_t i = 0; i<n; i += n> 256 ? 97 : 1) {
            double want = 0;

            for (size_t j = 0; j < n; j++)
                want += __builtin_popcountll(i & j) % 2 ? -(double)y[j] : (double)y[j];
            assert_true(fabs((double)x[i] - want) < 1e-6 * (double)n);
        }
        cst_codec_ops_portable()->hadamard(y, n);
        assert_memory_equal(x, y, n * sizeof(*x));
    }
}

/* The levels one by one, transformed by the portable loop that the test above checked. */
static void hadamard_of_levels(void **state) {
    const struct cst_codec_ops *ops = *state;

    for (unsigned bits = 1; bits <= 8; bits++) {
        float level[256 + 16], mean[256], x[257], want[256];
        uint8_t codes[256];

        for (size_t n = 1; n <= 256; n *= 2) {
            fill(codes, sizeof(codes));
            fill_floats(level, CST_COUNT(level));
            fill_floats(mean, CST_COUNT(mean));
            for (size_t i = 0; i < n; i++) {
                codes[i] &= (1u << bits) - 1;
                want[i] = level[codes[i]] * 0.7f;
            }
            cst_codec_ops_portable()->hadamard(want, n);
            x[n] = 99;
            ops->hadamard_levels(x, codes, level, bits, 0.7f, NULL, n);
            assert_memory_equal(x, want, n * sizeof(*x));
            ops->hadamard_levels(x, codes, level, bits, 0.7f, mean, n);
            for (size_t i = 0; i < n; i++)
                assert_int_equal(cst_f32_bits(x[i]), cst_f32_bits(want[i] + mean[i]));
            assert_true(x[n] == 99);
        }
    }
}

static void nearest_levels(void **state) {
    const struct cst_codec_ops *ops = *state;

    for (unsigned bits = 1; bits <= 8; bits++) {
        float midpoint[255], x[N];
        uint8_t codes[N + 1];

        for (unsigned k = 0; k < 255; k++)
            midpoint[k] = (float)k - (float)(1u << bits) / 2;
        for (size_t n = 0; n <= N; n++) {
            codes[n] = 99;
            for (size_t i = 0; i < n; i++) /* halves: ties included */
                x[i] = (float)((int)(cst_seeded_random_next(&r) % 600) - 300);
            ops->nearest(codes, x, 0.5f, midpoint, bits, n);
            for (size_t i = 0; i < n; i++) {
                unsigned want = 0;

                for (unsigned k = 0; k + 1 < 1u << bits; k++)
                    want += x[i] * 0.5f >= midpoint[k];
                assert_int_equal(codes[i], want);
            }
            assert_int_equal(codes[n], 99);
        }
    }
}

static void codes_of_groups(void **state) {
    const struct cst_codec_ops *ops = *state;
    float x[N] = { 0 }, scale[N] = { 0 }, zero[N] = { 0 };
    uint8_t codes[N + 1];

    for (size_t n = 0; n <= N; n++) {
        fill_floats(zero, n);
        for (size_t i = 0; i < n; i++) {
            scale[i] = i % 9 ? 0.25f : 0; /* exact quotients */
            zero[i] = roundf(zero[i] * 64) / 64;
            x[i] = zero[i] + 0.125f * (float)((int)(cst_seeded_random_next(&r) % 40) - 4);
        }
        codes[n] = 99;
        ops->to_codes(codes, x, scale, zero, 1, 15, n);
        for (size_t i = 0; i < n; i++) {
            double y = i % 9 ? ((double)x[i] - (double)zero[i]) / 0.25 : 0;

            assert_int_equal(codes[i], (int)floor(fmax(1, fmin(15, y)) + 0.5));
        }
        assert_int_equal(codes[n], 99);
    }
}

static void widened_ranges(void **state) {
    const struct cst_codec_ops *ops = *state;
    float low[68], high[68], x[67], l[67], h[67];

    for (size_t n = 0; n <= 67; n++) {
        fill_floats(x, 67);
        fill_floats(low, 67);
        memcpy(high, low, sizeof(high));
        memcpy(l, low, sizeof(l));
        low[n] = high[n] = 99;
        for (size_t i = 0; i < n; i++)
            h[i] = fmaxf(l[i], x[i]), l[i] = fminf(l[i], x[i]);
        ops->widen(low, high, x, n);
        assert_memory_equal(low, l, n * sizeof(*l));
        assert_memory_equal(high, h, n * sizeof(*h));
        assert_true(low[n] == 99 && high[n] == 99);
    }
}

static void turned_pairs(void **state) {
    const struct cst_codec_ops *ops = *state, *ref = cst_codec_ops_portable();
    float c[37], s[37], x[75], y[75], was[75];

    for (size_t n = 0; n <= 37; n++) {
        for (size_t i = 0; i < n; i++) {
            c[i] = (float)cos((double)i);
            s[i] = (float)sin((double)i);
        }
        for (int k = 0; k < 4; k++) {
            float direction = k % 2 ? 1 : -1;

            fill_floats(x, 75);
            memcpy(was, x, sizeof(x));
            memcpy(y, x, sizeof(x));
            (k / 2 ? ops->turn_pairs : ops->turn_halves)(x, c, s, direction, n);
            (k / 2 ? ref->turn_pairs : ref->turn_halves)(y, c, s, direction, n);
            assert_memory_equal(x, y, sizeof(x)); /* what lies behind included */
            for (size_t i = 0; i < n; i++) {
                size_t ia = k / 2 ? 2 * i : i, ib = k / 2 ? 2 * i + 1 : n + i;
                double angle = (double)direction * (double)i;

                assert_true(fabs((double)x[ia] - ((double)was[ia] * cos(angle) -
                                                  (double)was[ib] * sin(angle))) < 1e-6);
                assert_true(fabs((double)x[ib] - ((double)was[ib] * cos(angle) +
                                                  (double)was[ia] * sin(angle))) < 1e-6);
            }
        }
    }
}

static void rounded_values(void **state) {
    const struct cst_codec_ops *ops = *state;
    float x[67];

    for (uint8_t dtype = CST_DTYPE_F32; dtype < CST_DTYPES; dtype++) {
        size_t size = cst_dtype_size(dtype);

        for (int round = 0; round < 2000; round++) {
            size_t n = (size_t)round % 67;
            uint8_t dst[4 * 67 + 1];

            for (size_t i = 0; i < n; i++) {
                uint32_t u = (uint32_t)cst_seeded_random_next(&r);

                x[i] = cst_f32_from_bits((u & 0x7f800000) == 0x7f800000 ? u & 0xbfffffff : u);
            }
            dst[n * size] = 7;
            ops->from_f32[dtype](dst, x, n);
            for (size_t i = 0; i < n; i++) {
                float want = x[i];

                if (dtype == CST_DTYPE_F16)
                    want = cst_f16_to_f32(cst_f32_to_f16(want));
                if (dtype == CST_DTYPE_BF16)
                    want = cst_bf16_to_f32(cst_f32_to_bf16(want));
                assert_int_equal(cst_f32_bits(cst_dtype_load(dtype, dst + i * size)),
                                 cst_f32_bits(want));
            }
            assert_int_equal(dst[n * size], 7);
        }
    }
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

/* Rows of packed codes: apart, then head by head. */
static void hadamard_of_rows(void **state) {
    const struct cst_codec_ops *ops = *state, *ref = cst_codec_ops_portable();
    static const size_t sizes[] = { 1, 8, 16, 64, 128, 256 };
    float level[256 + 16], mean[3 * 256], scale[3] = { 0.5f, 3, -1 };

    fill_floats(level, CST_COUNT(level));
    fill_floats(mean, CST_COUNT(mean));
    for (unsigned bits = 1; bits <= 8; bits++) {
        for (size_t k = 0; k < 2 * CST_COUNT(sizes); k++) {
            size_t n = sizes[k / 2], padded = cst_align_up(3 * n, 8);
            const float *plus = k % 2 ? mean : NULL;
            float x[3 * 256 + 1], want[3 * 256];
            uint8_t codes[3 * 256], packed[3 * 256];

            fill(packed, sizeof(packed));
            ref->unpack(codes, packed, padded, bits);
            for (size_t h = 0; h < 3; h++)
                ref->hadamard_levels(want + h * n, codes + h * n, level, bits, scale[h],
                                     plus ? plus + h * n : NULL, n);
            x[3 * n] = 99;
            ops->hadamard_row(x, codes, packed, level, bits, scale, plus, n, 3);
            assert_memory_equal(x, want, 3 * n * sizeof(*x));
            assert_true(x[3 * n] == 99);
        }
    }
}

static void integer_ranges(void **state) {
    const struct cst_codec_ops *ops = *state;
    int32_t q[40], least, most;

    for (size_t n = 1; n <= 40; n++) {
        for (size_t at = 0; at < n; at++) {
            memset(q, 0, sizeof(q));
            q[at] = 5;
            q[(at + 1) % n] = INT32_MIN;
            ops->int_range(&least, &most, q, n);
            assert_int_equal(least, INT32_MIN);
            assert_int_equal(most, n == 1 ? INT32_MIN : 5);
        }
    }
}

/* Bits from the lowest of the first byte up, in reverse from each integer. */
static void bits_below_integers(void **state) {
    const struct cst_codec_ops *ops = *state;
    uint8_t src[40 * 6 / 8 + 9];
    int32_t q[41];

    for (unsigned shift = 1; shift <= 6; shift++) {
        for (unsigned bit = 0; bit < 8; bit++) {
            fill(src, sizeof(src));
            for (int i = 0; i <= 40; i++)
                q[i] = i - 20;
            ops->low_bits(q, src, bit, 40, shift);
            for (int i = 0; i < 40; i++) {
                int low = 0;

                for (unsigned k = 0; k < shift; k++) {
                    unsigned at = bit + (unsigned)i * shift + k;

                    low |= (src[at / 8] >> at % 8 & 1) << k;
                }
                assert_int_equal(q[i], (i - 20) * (1 << shift) - (1 << shift) / 2 + low);
            }
            assert_int_equal(q[40], 20);
        }
    }
}

static void transposed_bytes(void **state) {
    const struct cst_codec_ops *ops = *state;
    enum { T = 27, C = 21, PITCH = 30, STRIDE = 32 };
    uint8_t src[T * PITCH], dst[T * PITCH];
    int32_t q[C * STRIDE], offset[C];

    for (uint32_t tokens = 1; tokens <= T; tokens++) {
        for (uint32_t channels = 1; channels <= C; channels++) {
            fill(src, sizeof(src));
            memset(dst, 7, sizeof(dst));
            memset(q, 7, sizeof(q));
            ops->bytes_to_rows(q, STRIDE, src, PITCH, tokens, channels);
            for (uint32_t c = 0; c < channels; c++) {
                offset[c] = (int32_t)c * 40 - 300;
                for (uint32_t t = 0; t < tokens; t++)
                    assert_int_equal(q[c * STRIDE + t], src[t * PITCH + c]);
            }
            ops->rows_to_bytes(dst, PITCH, q, STRIDE, tokens, offset, channels);
            for (uint32_t t = 0; t < T; t++) {
                for (uint32_t c = 0; c < PITCH; c++)
                    assert_int_equal(
                        dst[t * PITCH + c],
                        t < tokens && c < channels ? (uint8_t)(src[t * PITCH + c] + offset[c]) : 7);
            }
        }
    }
}

static void the_best_set_is_one_of_them(void **state) {
    const struct cst_codec_ops *best = cst_codec_ops();

    assert_true(best == cst_codec_ops_portable() || best == cst_codec_ops_avx2() ||
                best == cst_codec_ops_avx512());
}

#define ROW(fn, ops)                                                                               \
    { .name = #fn, .test_func = fn, .initial_state = (void *)(uintptr_t)(ops) }

static int run(const struct cst_codec_ops *ops) {
    const struct CMUnitTest tests[] = {
        ROW(split_and_merge, ops),     ROW(conversions, ops),
        ROW(dequantized_values, ops),  ROW(magnitudes, ops),
        ROW(quantized_values, ops),    ROW(sums, ops),
        ROW(table_entries, ops),       ROW(the_best_set_is_one_of_them, ops),
        ROW(unpacked_codes, ops),      ROW(halves_are_scaled_and_checked, ops),
        ROW(affine_values, ops),       ROW(hadamard_by_its_matrix, ops),
        ROW(hadamard_of_levels, ops),  ROW(nearest_levels, ops),
        ROW(codes_of_groups, ops),     ROW(widened_ranges, ops),
        ROW(turned_pairs, ops),        ROW(rounded_values, ops),
        ROW(hadamard_of_rows, ops),    ROW(integer_ranges, ops),
        ROW(bits_below_integers, ops), ROW(transposed_bytes, ops),
    };

    cst_seeded_random_init(&r, 11);
    return cmocka_run_group_tests_name(ops->name, tests, NULL, NULL);
}

int main(void) {
    int failed = run(cst_codec_ops_portable());

    if (cst_codec_ops_avx2())
        failed += run(cst_codec_ops_avx2());
    if (cst_codec_ops_avx512())
        failed += run(cst_codec_ops_avx512());
    return failed;
}
