/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loops of coded streams for x86 with AVX-512 F, BW, DQ and VL, compiled with these flags and
 * reached only where the processor has them; everything else is the AVX2 loop. The same operations
 * in the same order give the same bits.
 */
#include "codec/dispatch_x86.h"

#include "codec/dtype.h"

#include "base/macros.h"

#include <immintrin.h>

/* 64 codes of 4 bits */
static void unpack(uint8_t *codes, const uint8_t *src, size_t n, unsigned bits) {
    size_t i = 0;

    for (; bits == 4 && i + 64 <= n; i += 64, src += 32) {
        __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)src));

        x = _mm512_or_si512(x, _mm512_slli_epi16(x, 4));
        _mm512_storeu_si512(codes + i, _mm512_and_si512(x, _mm512_set1_epi16(0x0f0f)));
    }
    if (i < n)
        cst_avx2_unpack(codes + i, src, n - i, bits);
}

static inline __m512i codes_16(const uint8_t *codes) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)codes));
}

static void from_steps(float *x, const int32_t *q, const float *step, size_t n) {
    size_t i = 0;

    for (; i + 16 <= n; i += 16) {
        __m512 y = _mm512_cvtepi32_ps(_mm512_loadu_si512(q + i));

        _mm512_storeu_ps(x + i, _mm512_mul_ps(y, _mm512_loadu_ps(step + i)));
    }
    if (i < n)
        cst_avx2_from_steps(x + i, q + i, step + i, n - i);
}

static void affine(float *x, const uint8_t *codes, const float *scale, const float *zero,
                   size_t n) {
    size_t i = 0;

    for (; i + 16 <= n; i += 16) {
        __m512 q =
            _mm512_mul_ps(_mm512_cvtepi32_ps(codes_16(codes + i)), _mm512_loadu_ps(scale + i));

        _mm512_storeu_ps(x + i, _mm512_add_ps(q, _mm512_loadu_ps(zero + i)));
    }
    if (i < n)
        cst_avx2_affine(x + i, codes + i, scale + i, zero + i, n - i);
}

static void affine_group(float *x, const uint8_t *codes, float scale, float zero, size_t n) {
    size_t i = 0;

    for (; i + 16 <= n; i += 16) {
        __m512 q = _mm512_mul_ps(_mm512_cvtepi32_ps(codes_16(codes + i)), _mm512_set1_ps(scale));

        _mm512_storeu_ps(x + i, _mm512_add_ps(q, _mm512_set1_ps(zero)));
    }
    if (i < n)
        cst_avx2_affine_group(x + i, codes + i, scale, zero, n - i);
}

/* ---- Hadamard ----------------------------------------------------------------------------------
 */

/* x and its partner of each pair: their sum, and in the second's place the first less the second. A
 * product with 1 or -1 is exact, so one rounding is left, that of the sum. */
static inline __m512 pairs(__m512 x, __m512 partner, __m512 sign) {
    return _mm512_fmadd_ps(x, sign, partner);
}

static inline __m512 signs(__mmask16 second) {
    return _mm512_mask_blend_ps(second, _mm512_set1_ps(1), _mm512_set1_ps(-1));
}

static inline __m512 hadamard_16(__m512 x) {
    x = pairs(x, _mm512_permute_ps(x, 0xb1), signs(0xaaaa));
    x = pairs(x, _mm512_permute_ps(x, 0x4e), signs(0xcccc));
    x = pairs(x, _mm512_shuffle_f32x4(x, x, 0xb1), signs(0xf0f0));
    return pairs(x, _mm512_shuffle_f32x4(x, x, 0x4e), signs(0xff00));
}

static inline void butterfly(__m512 *a, __m512 *b) {
    __m512 sum = _mm512_add_ps(*a, *b);

    *b = _mm512_sub_ps(*a, *b);
    *a = sum;
}

static inline void butterflies(__m512 v[4]) {
    butterfly(&v[0], &v[1]);
    butterfly(&v[2], &v[3]);
    butterfly(&v[0], &v[2]);
    butterfly(&v[1], &v[3]);
}

static inline __attribute__((always_inline)) void levels_64(__m512 v[4], const uint8_t *codes,
                                                            __m512 level) {
    v[0] = hadamard_16(_mm512_permutexvar_ps(codes_16(codes), level));
    v[1] = hadamard_16(_mm512_permutexvar_ps(codes_16(codes + 16), level));
    v[2] = hadamard_16(_mm512_permutexvar_ps(codes_16(codes + 32), level));
    v[3] = hadamard_16(_mm512_permutexvar_ps(codes_16(codes + 48), level));
    butterflies(v);
}

static inline __attribute__((always_inline)) void store_64(float *x, const __m512 v[4],
                                                           const float *mean) {
    const __m512 none = _mm512_set1_ps(-0.0f); /* added to anything, that thing */

    _mm512_storeu_ps(x, _mm512_add_ps(v[0], mean ? _mm512_loadu_ps(mean) : none));
    _mm512_storeu_ps(x + 16, _mm512_add_ps(v[1], mean ? _mm512_loadu_ps(mean + 16) : none));
    _mm512_storeu_ps(x + 32, _mm512_add_ps(v[2], mean ? _mm512_loadu_ps(mean + 32) : none));
    _mm512_storeu_ps(x + 48, _mm512_add_ps(v[3], mean ? _mm512_loadu_ps(mean + 48) : none));
}

/* Blocks of 64 and 128 stay in registers from the codes on, where one register holds all levels. */
static void hadamard_levels(float *x, const uint8_t *codes, const float *level, unsigned bits,
                            float scale, const float *mean, size_t n) {
    __m512 table = _mm512_mul_ps(_mm512_loadu_ps(level), _mm512_set1_ps(scale)), v[4], u[4];

    if (bits > 4 || (n != 64 && n != 128)) {
        cst_avx2_hadamard_levels(x, codes, level, bits, scale, mean, n);
        return;
    }
    levels_64(v, codes, table);
    if (n == 128) {
        levels_64(u, codes + 64, table);
        butterfly(&v[0], &u[0]);
        butterfly(&v[1], &u[1]);
        butterfly(&v[2], &u[2]);
        butterfly(&v[3], &u[3]);
        store_64(x + 64, u, mean ? mean + 64 : NULL);
    }
    store_64(x, v, mean);
}

/* 16 codes of 4 bits, each in a register's lowest bits, others above them. */
static inline __m512i nibbles_16(const uint8_t *packed) {
    __m512i pairs_of = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const void *)packed));

    return _mm512_or_si512(pairs_of, _mm512_slli_epi64(pairs_of, 28));
}

static void hadamard_row(float *x, uint8_t *codes, const uint8_t *packed, const float *level,
                         unsigned bits, const float *scale, const float *mean, size_t n,
                         uint32_t heads) {
    const __m512 levels = _mm512_loadu_ps(level);

    if (bits == 4 && n == 64) {
        for (size_t h = 0; h < heads; h++, x += 64, packed += 32) {
            __m512 table = _mm512_mul_ps(levels, _mm512_set1_ps(scale[h])), v[4];

            v[0] = hadamard_16(_mm512_permutexvar_ps(nibbles_16(packed), table));
            v[1] = hadamard_16(_mm512_permutexvar_ps(nibbles_16(packed + 8), table));
            v[2] = hadamard_16(_mm512_permutexvar_ps(nibbles_16(packed + 16), table));
            v[3] = hadamard_16(_mm512_permutexvar_ps(nibbles_16(packed + 24), table));
            butterflies(v);
            store_64(x, v, mean ? mean + 64 * h : NULL);
        }
        return;
    }
    unpack(codes, packed, cst_align_up(n * heads, 8), bits);
    for (size_t h = 0; h < heads; h++)
        hadamard_levels(x + h * n, codes + h * n, level, bits, scale[h], mean ? mean + h * n : NULL,
                        n);
}

/* Up to 4 bits: a binary search in a register. */
static void nearest(uint8_t *codes, const float *x, float scale, const float *midpoint,
                    unsigned bits, size_t n) {
    const __m512 s = _mm512_set1_ps(scale);
    const __mmask16 midpoints = (__mmask16)((1u << ((1u << CST_MIN(bits, 4)) - 1)) - 1);
    const __m512 table = _mm512_maskz_loadu_ps(midpoints, midpoint);
    size_t i = 0;

    for (; bits <= 4 && i + 16 <= n; i += 16) {
        __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x + i), s);
        __m512i code = _mm512_setzero_si512();

        for (int step = 1 << (bits - 1); step; step /= 2) {
            __m512i at = _mm512_add_epi32(code, _mm512_set1_epi32(step - 1));
            __mmask16 above = _mm512_cmp_ps_mask(y, _mm512_permutexvar_ps(at, table), _CMP_GE_OQ);

            code = _mm512_mask_add_epi32(code, above, code, _mm512_set1_epi32(step));
        }
        _mm_storeu_si128((void *)(codes + i), _mm512_cvtepi32_epi8(code));
    }
    if (i < n)
        cst_avx2_nearest(codes + i, x + i, scale, midpoint, bits, n - i);
}

/* ---- rotation ----------------------------------------------------------------------------------
 */

static void turn_pairs(float *x, const float *cosine, const float *sine, float direction,
                       size_t n) {
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m256 d = _mm256_set1_ps(direction);
    size_t i = 0;

    for (; i + 8 <= n; i += 8) {
        __m512 c = _mm512_castps256_ps512(_mm256_loadu_ps(cosine + i));
        __m512 s = _mm512_castps256_ps512(_mm256_mul_ps(_mm256_loadu_ps(sine + i), d));
        __m512 y = _mm512_loadu_ps(x + 2 * i);

        c = _mm512_mul_ps(y, _mm512_permutexvar_ps(twice, c));
        s = _mm512_mul_ps(_mm512_permute_ps(y, 0xb1), _mm512_permutexvar_ps(twice, s));
        _mm512_storeu_ps(x + 2 * i, _mm512_mask_sub_ps(_mm512_add_ps(c, s), 0x5555, c, s));
    }
    if (i < n)
        cst_avx2_turn_pairs(x + 2 * i, cosine + i, sine + i, direction, n - i);
}

/* ---- rounding ----------------------------------------------------------------------------------
 */

static void to_f16(uint8_t *dst, const float *x, size_t n) {
    size_t i = 0;

    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((void *)(dst + 2 * i),
                            _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    if (i < n)
        cst_avx2_to_f16_bytes(dst + 2 * i, x + i, n - i);
}

static void to_bf16(uint8_t *dst, const float *x, size_t n) {
    size_t i = 0;

    for (; i + 16 <= n; i += 16) {
        __m512i u = _mm512_loadu_si512(x + i);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));

        u = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        _mm256_storeu_si256((void *)(dst + 2 * i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(u, 16)));
    }
    if (i < n)
        cst_avx2_to_bf16_bytes(dst + 2 * i, x + i, n - i);
}

const struct cst_codec_ops cst_codec_avx512_table = {
    .name = "avx512",
    .huff_prepend = cst_avx2_huff_prepend,
    .huff_lanes = cst_avx2_huff_lanes,
    .split = cst_avx2_split,
    .merge = cst_avx2_merge,
    .to_f32 = { [CST_DTYPE_F32] = cst_avx2_from_f32,
                [CST_DTYPE_F16] = cst_avx2_from_f16,
                [CST_DTYPE_BF16] = cst_avx2_from_bf16 },
    .dequant = { [CST_DTYPE_F32] = cst_avx2_dequant_f32,
                 [CST_DTYPE_F16] = cst_avx2_dequant_f16,
                 [CST_DTYPE_BF16] = cst_avx2_dequant_bf16 },
    .largest = cst_avx2_largest,
    .quantize = cst_avx2_quantize,
    .unpack = unpack,
    .halves = cst_avx2_halves,
    .from_steps = from_steps,
    .to_steps = cst_avx2_to_steps,
    .affine = affine,
    .affine_group = affine_group,
    .hadamard = cst_avx2_hadamard,
    .hadamard_levels = hadamard_levels,
    .hadamard_row = hadamard_row,
    .turn_pairs = turn_pairs,
    .turn_halves = cst_avx2_turn_halves,
    .from_f32 = { [CST_DTYPE_F32] = cst_avx2_to_f32_bytes,
                  [CST_DTYPE_F16] = to_f16,
                  [CST_DTYPE_BF16] = to_bf16 },
    .nearest = nearest,
    .to_codes = cst_avx2_to_codes,
    .widen = cst_avx2_widen,
    .rans_rows = cst_avx512_rans_rows,
    .rans_put = cst_avx512_rans_put,
    .int_range = cst_avx2_int_range,
    .low_bits = cst_avx2_low_bits,
    .bytes_to_rows = cst_avx2_bytes_to_rows,
    .rows_to_bytes = cst_avx2_rows_to_bytes,
    .add = cst_avx2_add,
    .moments = cst_avx2_moments,
};
