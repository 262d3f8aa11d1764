/* SPDX-License-Identifier: Apache-2.0 */
/* The portable inner loops, which define what every other set gives, and the choice between sets.
 * No state but the compiler's record of the processor; any thread. */
#include "codec/dispatch.h"

#include "codec/dtype.h"

#include "base/le.h"
#include "base/macros.h"

#include <math.h>
#include <string.h>

_Static_assert(CST_DTYPES == 4, "a function for each dtype");

static void split(uint8_t *hi, uint8_t *lo, const uint8_t *src, size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned x = cst_load16(src + 2 * i);

        hi[i] = (uint8_t)(x >> 7);
        lo[i] = (uint8_t)(x << 1 | x >> 15);
    }
}

static void merge(uint8_t *dst, const uint8_t *hi, const uint8_t *lo, size_t n) {
    for (size_t i = 0; i < n; i++)
        cst_store16(dst + 2 * i, (uint16_t)(hi[i] << 7 | lo[i] >> 1 | lo[i] << 15));
}

static void from_f32(float *x, const uint8_t *src, size_t n) {
    memcpy(x, src, n * sizeof(*x));
}

static void from_f16(float *x, const uint8_t *src, size_t n) {
    for (size_t i = 0; i < n; i++)
        x[i] = cst_f16_to_f32(cst_load16(src + 2 * i));
}

static void from_bf16(float *x, const uint8_t *src, size_t n) {
    for (size_t i = 0; i < n; i++)
        x[i] = cst_bf16_to_f32(cst_load16(src + 2 * i));
}

static void dequant_f32(uint8_t *dst, const int8_t *q, float scale, size_t n) {
    for (size_t i = 0; i < n; i++)
        cst_store32(dst + 4 * i, cst_f32_bits((float)q[i] * scale));
}

static void dequant_f16(uint8_t *dst, const int8_t *q, float scale, size_t n) {
    for (size_t i = 0; i < n; i++)
        cst_store16(dst + 2 * i, cst_f32_to_f16((float)q[i] * scale));
}

static void dequant_bf16(uint8_t *dst, const int8_t *q, float scale, size_t n) {
    for (size_t i = 0; i < n; i++)
        cst_store16(dst + 2 * i, cst_f32_to_bf16((float)q[i] * scale));
}

static uint32_t largest(const float *x, size_t n) {
    uint32_t most = 0;

    for (size_t i = 0; i < n; i++)
        most = CST_MAX(most, cst_f32_bits(x[i]) & 0x7fffffff);
    return most;
}

static void quantize(int8_t *q, const float *x, float scale, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float y = CST_MAX(-127.0f, CST_MIN(127.0f, x[i] / scale));
        int whole = (int)y;
        float rest = y - (float)whole; /* exact */

        q[i] = (int8_t)(whole + (rest >= 0.5f) - (rest <= -0.5f));
    }
}

static void unpack(uint8_t *codes, const uint8_t *src, size_t n, unsigned bits) {
    for (size_t i = 0; i < n; i += 8, src += bits) {
        uint64_t u = 0;

        for (unsigned b = 0; b < bits; b++)
            u |= (uint64_t)src[b] << 8 * b;
        for (unsigned k = 0; k < 8; k++)
            codes[i + k] = u >> k * bits & ((1u << bits) - 1);
    }
}

static bool halves(float *x, const uint8_t *src, float unit, size_t n) {
    bool finite = true;

    for (size_t i = 0; i < n; i++) {
        uint16_t half = cst_load16(src + 2 * i);

        finite &= (half & 0x7c00) != 0x7c00;
        x[i] = cst_f16_to_f32(half) * unit;
    }
    return finite;
}

static void from_steps(float *x, const int32_t *q, const float *step, size_t n) {
    for (size_t i = 0; i < n; i++)
        x[i] = (float)q[i] * step[i];
}

static void to_steps(int32_t *q, const float *x, const float *inverse, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float y = x[i] * inverse[i];

        q[i] = (int32_t)(y + copysignf(0.5f, y));
    }
}

static void affine(float *x, const uint8_t *codes, const float *scale, const float *zero,
                   size_t n) {
    for (size_t i = 0; i < n; i++)
        x[i] = (float)codes[i] * scale[i] + zero[i];
}

static void affine_group(float *x, const uint8_t *codes, float scale, float zero, size_t n) {
    for (size_t i = 0; i < n; i++)
        x[i] = (float)codes[i] * scale + zero;
}

static void hadamard(float *x, size_t n) {
    for (size_t apart = 1; apart < n; apart *= 2) {
        for (size_t i = 0; i < n; i += 2 * apart) {
            for (size_t j = i; j < i + apart; j++) {
                float a = x[j], b = x[j + apart];

                x[j] = a + b;
                x[j + apart] = a - b;
            }
        }
    }
}

static void hadamard_levels(float *x, const uint8_t *codes, const float *level, unsigned bits,
                            float scale, const float *mean, size_t n) {
    for (size_t i = 0; i < n; i++)
        x[i] = level[codes[i]] * scale;
    hadamard(x, n);
    for (size_t i = 0; mean && i < n; i++)
        x[i] += mean[i];
}

static void hadamard_row(float *x, uint8_t *codes, const uint8_t *packed, const float *level,
                         unsigned bits, const float *scale, const float *mean, size_t n,
                         uint32_t heads) {
    unpack(codes, packed, cst_align_up(n * heads, 8), bits);
    for (size_t h = 0; h < heads; h++)
        hadamard_levels(x + h * n, codes + h * n, level, bits, scale[h], mean ? mean + h * n : NULL,
                        n);
}

static void turn(float *a, float *b, float c, float s) {
    float x = *a, y = *b;

    *a = x * c - y * s;
    *b = y * c + x * s;
}

static void turn_pairs(float *x, const float *cosine, const float *sine, float direction,
                       size_t n) {
    for (size_t i = 0; i < n; i++)
        turn(&x[2 * i], &x[2 * i + 1], cosine[i], sine[i] * direction);
}

static void turn_halves(float *x, const float *cosine, const float *sine, float direction,
                        size_t n) {
    for (size_t i = 0; i < n; i++)
        turn(&x[i], &x[n + i], cosine[i], sine[i] * direction);
}

static void to_f32_bytes(uint8_t *dst, const float *x, size_t n) {
    memcpy(dst, x, n * sizeof(*x));
}

static void to_f16(uint8_t *dst, const float *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        cst_store16(dst + 2 * i, cst_f32_to_f16(x[i]));
}

static void to_bf16(uint8_t *dst, const float *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        cst_store16(dst + 2 * i, cst_f32_to_bf16(x[i]));
}

static void nearest(uint8_t *codes, const float *x, float scale, const float *midpoint,
                    unsigned bits, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float y = x[i] * scale;
        unsigned code = 0;

        for (unsigned step = 1u << (bits - 1); step; step /= 2)
            code += y >= midpoint[code + step - 1] ? step : 0;
        codes[i] = (uint8_t)code;
    }
}

static void to_codes(uint8_t *codes, const float *x, const float *scale, const float *zero,
                     float least, float most, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float y = scale[i] > 0 ? (x[i] - zero[i]) / scale[i] : 0;

        codes[i] = (uint8_t)(CST_MAX(least, CST_MIN(most, y)) + 0.5f);
    }
}

static void widen(float *low, float *high, const float *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        low[i] = CST_MIN(low[i], x[i]);
        high[i] = CST_MAX(high[i], x[i]);
    }
}

static void add(double *sum, const float *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        sum[i] += (double)x[i];
}

static void moments(double *square, double *error, const double *mean, const float *x,
                    const float *y, size_t n) {
    for (size_t i = 0; i < n; i++) {
        double d = (double)x[i] - mean[i], e = (double)x[i] - (double)y[i];

        square[i] += d * d;
        error[i] += e * e;
    }
}

static void int_range(int32_t *least, int32_t *most, const int32_t *q, size_t n) {
    *least = *most = q[0];
    for (size_t i = 1; i < n; i++) {
        *least = CST_MIN(*least, q[i]);
        *most = CST_MAX(*most, q[i]);
    }
}

static void low_bits(int32_t *q, const uint8_t *src, unsigned bit, size_t n, unsigned shift) {
    const int32_t one = 1 << shift;

    for (size_t i = 0; i < n; i += 8) {
        uint64_t bits = cst_load64(src) >> bit;

        for (size_t k = 0; k < 8; k++, bits >>= shift)
            q[i + k] = q[i + k] * one - one / 2 + (int32_t)(bits & (uint64_t)(one - 1));
        src += shift;
    }
}

static void bytes_to_rows(int32_t *q, size_t stride, const uint8_t *src, size_t pitch,
                          uint32_t tokens, uint32_t channels) {
    for (uint32_t c = 0; c < channels; c++) {
        for (uint32_t t = 0; t < tokens; t++)
            q[c * stride + t] = src[t * pitch + c];
    }
}

static void rows_to_bytes(uint8_t *dst, size_t pitch, const int32_t *q, size_t stride,
                          uint32_t tokens, const int32_t *offset, uint32_t channels) {
    for (uint32_t c = 0; c < channels; c++) {
        for (uint32_t t = 0; t < tokens; t++)
            dst[t * pitch + c] = (uint8_t)(q[c * stride + t] + offset[c]);
    }
}

static const struct cst_codec_ops portable = {
    .name = "portable",
    .huff_prepend = cst_huff_prepend_portable,
    .huff_lanes = cst_huff_lanes_portable,
    .split = split,
    .merge = merge,
    .to_f32 = { [CST_DTYPE_F32] = from_f32,
                [CST_DTYPE_F16] = from_f16,
                [CST_DTYPE_BF16] = from_bf16 },
    .dequant = { [CST_DTYPE_F32] = dequant_f32,
                 [CST_DTYPE_F16] = dequant_f16,
                 [CST_DTYPE_BF16] = dequant_bf16 },
    .largest = largest,
    .quantize = quantize,
    .unpack = unpack,
    .halves = halves,
    .from_steps = from_steps,
    .to_steps = to_steps,
    .affine = affine,
    .affine_group = affine_group,
    .hadamard = hadamard,
    .hadamard_levels = hadamard_levels,
    .hadamard_row = hadamard_row,
    .turn_pairs = turn_pairs,
    .turn_halves = turn_halves,
    .from_f32 = { [CST_DTYPE_F32] = to_f32_bytes,
                  [CST_DTYPE_F16] = to_f16,
                  [CST_DTYPE_BF16] = to_bf16 },
    .nearest = nearest,
    .to_codes = to_codes,
    .widen = widen,
    .rans_rows = cst_rans_rows_portable,
    .rans_put = cst_rans_put_portable,
    .int_range = int_range,
    .low_bits = low_bits,
    .bytes_to_rows = bytes_to_rows,
    .rows_to_bytes = rows_to_bytes,
    .add = add,
    .moments = moments,
};

const struct cst_codec_ops *cst_codec_ops_portable(void) {
    return &portable;
}

const struct cst_codec_ops *cst_codec_ops_avx2(void) {
#if defined(__x86_64__)
    /* F16C, which clang 14 can't ask for, is older than any of these and comes with them */
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") &&
        __builtin_cpu_supports("fma"))
        return &cst_codec_avx2_table;
#endif
    return NULL;
}

const struct cst_codec_ops *cst_codec_ops_avx512(void) {
#if defined(__x86_64__)
    if (cst_codec_ops_avx2() && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return &cst_codec_avx512_table;
#endif
    return NULL;
}

const struct cst_codec_ops *cst_codec_ops(void) {
    const struct cst_codec_ops *avx2 = cst_codec_ops_avx2(), *avx512 = cst_codec_ops_avx512();

    return avx512 ? avx512 : avx2 ? avx2 : &portable;
}
