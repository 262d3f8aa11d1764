/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The inner loops for x86 with AVX2, BMI2 and F16C, compiled with these flags and reached only
 * where the processor has them. The last few elements of each call go one by one.
 */
#include "codec/dispatch_x86.h"

#include "codec/dtype.h"
#include "codec/huffman_loop.h"

#include "base/macros.h"

#include <immintrin.h>
#include <string.h>

static inline __m256i load(const void *p) {
    return _mm256_loadu_si256(p);
}

void cst_avx2_huff_prepend(uint64_t *to, const uint64_t *from, size_t n, unsigned symbol,
                           unsigned length) {
    __m256i head = _mm256_set1_epi64x((long long)cst_huff_prepend(0, symbol, length));
    __m256i top = _mm256_set1_epi64x((long long)UINT64_C(0xffff000000000000));
    size_t i = 0;

    for (; i + 4 <= n; i += 4) {
        __m256i rest = load(from + i);
        /* the five symbols move up by one, over where the sixth was */
        __m256i symbols = _mm256_srli_epi64(_mm256_slli_epi64(rest, 24), 16);

        rest = _mm256_add_epi64(_mm256_and_si256(rest, top), _mm256_or_si256(symbols, head));
        _mm256_storeu_si256((void *)(to + i), rest);
    }
    for (; i < n; i++)
        to[i] = cst_huff_prepend(from[i], symbol, length);
}

void cst_avx2_huff_lanes(struct cst_huff_lane lane[CST_HUFF_LANES], const uint64_t *entry) {
    cst_huff_lanes_loop(lane, entry);
}

void cst_avx2_split(uint8_t *hi, uint8_t *lo, const uint8_t *src, size_t n) {
    const __m256i low = _mm256_set1_epi16(255);
    size_t i = 0;

    for (; i + 32 <= n; i += 32) {
        __m256i a = load(src + 2 * i), b = load(src + 2 * i + 32);
        __m256i ra = _mm256_or_si256(_mm256_slli_epi16(a, 1), _mm256_srli_epi16(a, 15));
        __m256i rb = _mm256_or_si256(_mm256_slli_epi16(b, 1), _mm256_srli_epi16(b, 15));
        __m256i h = _mm256_packus_epi16(_mm256_srli_epi16(ra, 8), _mm256_srli_epi16(rb, 8));
        __m256i l = _mm256_packus_epi16(_mm256_and_si256(ra, low), _mm256_and_si256(rb, low));

        /* packing goes by 128-bit halves: put the quarters in order */
        _mm256_storeu_si256((void *)(hi + i), _mm256_permute4x64_epi64(h, 0xd8));
        _mm256_storeu_si256((void *)(lo + i), _mm256_permute4x64_epi64(l, 0xd8));
    }
    if (i < n)
        cst_codec_ops_portable()->split(hi + i, lo + i, src + 2 * i, n - i);
}

void cst_avx2_merge(uint8_t *dst, const uint8_t *hi, const uint8_t *lo, size_t n) {
    size_t i = 0;

    for (; i + 32 <= n; i += 32) {
        __m256i h = _mm256_permute4x64_epi64(load(hi + i), 0xd8);
        __m256i l = _mm256_permute4x64_epi64(load(lo + i), 0xd8);
        __m256i a = _mm256_unpacklo_epi8(l, h), b = _mm256_unpackhi_epi8(l, h);

        a = _mm256_or_si256(_mm256_srli_epi16(a, 1), _mm256_slli_epi16(a, 15));
        b = _mm256_or_si256(_mm256_srli_epi16(b, 1), _mm256_slli_epi16(b, 15));
        _mm256_storeu_si256((void *)(dst + 2 * i), a);
        _mm256_storeu_si256((void *)(dst + 2 * i + 32), b);
    }
    if (i < n)
        cst_codec_ops_portable()->merge(dst + 2 * i, hi + i, lo + i, n - i);
}

void cst_avx2_from_f32(float *x, const uint8_t *src, size_t n) {
    memcpy(x, src, n * sizeof(*x));
}

void cst_avx2_from_f16(float *x, const uint8_t *src, size_t n) {
    size_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(x + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(src + 2 * i))));
    if (i < n)
        cst_codec_ops_portable()->to_f32[CST_DTYPE_F16](x + i, src + 2 * i, n - i);
}

void cst_avx2_from_bf16(float *x, const uint8_t *src, size_t n) {
    size_t i = 0;

    for (; i + 8 <= n; i += 8) {
        __m256i u = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(src + 2 * i)));

        _mm256_storeu_si256((void *)(x + i), _mm256_slli_epi32(u, 16));
    }
    if (i < n)
        cst_codec_ops_portable()->to_f32[CST_DTYPE_BF16](x + i, src + 2 * i, n - i);
}

/* 8 values times scale */
static inline __m256 scaled(const int8_t *q, __m256 scale) {
    __m256i x = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)q));

    return _mm256_mul_ps(_mm256_cvtepi32_ps(x), scale);
}

void cst_avx2_dequant_f32(uint8_t *dst, const int8_t *q, float scale, size_t n) {
    size_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps((void *)(dst + 4 * i), scaled(q + i, _mm256_set1_ps(scale)));
    if (i < n)
        cst_codec_ops_portable()->dequant[CST_DTYPE_F32](dst + 4 * i, q + i, scale, n - i);
}

void cst_avx2_dequant_f16(uint8_t *dst, const int8_t *q, float scale, size_t n) {
    size_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(
            (void *)(dst + 2 * i),
            _mm256_cvtps_ph(scaled(q + i, _mm256_set1_ps(scale)), _MM_FROUND_TO_NEAREST_INT));
    if (i < n)
        cst_codec_ops_portable()->dequant[CST_DTYPE_F16](dst + 2 * i, q + i, scale, n - i);
}

/* fp32 bits of finite values rounded to their upper halves */
static inline __m256i to_bf16(__m256 x) {
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));

    u = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_srli_epi32(u, 16);
}

void cst_avx2_dequant_bf16(uint8_t *dst, const int8_t *q, float scale, size_t n) {
    size_t i = 0;

    for (; i + 16 <= n; i += 16) {
        __m256i a = to_bf16(scaled(q + i, _mm256_set1_ps(scale)));
        __m256i b = to_bf16(scaled(q + i + 8, _mm256_set1_ps(scale)));
        __m256i x = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);

        _mm256_storeu_si256((void *)(dst + 2 * i), x);
    }
    if (i < n)
        cst_codec_ops_portable()->dequant[CST_DTYPE_BF16](dst + 2 * i, q + i, scale, n - i);
}

uint32_t cst_avx2_largest(const float *x, size_t n) {
    __m256i most = _mm256_setzero_si256();
    __m128i half;
    size_t i = 0;
    uint32_t rest;

    for (; i + 8 <= n; i += 8)
        most = _mm256_max_epu32(most, _mm256_and_si256(load(x + i), _mm256_set1_epi32(0x7fffffff)));
    half = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
    rest = cst_codec_ops_portable()->largest(x + i, n - i);
    return CST_MAX(rest, (uint32_t)_mm_cvtsi128_si32(half));
}

static inline __m256i quantized(const float *x, __m256 scale) {
    __m256 limit = _mm256_set1_ps(127), half = _mm256_set1_ps(0.5f);
    __m256 y = _mm256_div_ps(_mm256_loadu_ps(x), scale), rest;
    __m256i whole, up, down;

    y = _mm256_max_ps(_mm256_min_ps(y, limit), _mm256_set1_ps(-127));
    whole = _mm256_cvttps_epi32(y);
    rest = _mm256_sub_ps(y, _mm256_cvtepi32_ps(whole));
    /* comparisons give -1 where they hold */
    up = _mm256_castps_si256(_mm256_cmp_ps(rest, half, _CMP_GE_OQ));
    down = _mm256_castps_si256(_mm256_cmp_ps(rest, _mm256_set1_ps(-0.5f), _CMP_LE_OQ));
    return _mm256_add_epi32(_mm256_sub_epi32(whole, up), down);
}

void cst_avx2_quantize(int8_t *q, const float *x, float scale, size_t n) {
    const __m256 s = _mm256_set1_ps(scale);
    size_t i = 0;

    for (; i + 16 <= n; i += 16) {
        __m256i v = _mm256_packs_epi32(quantized(x + i, s), quantized(x + i + 8, s));

        v = _mm256_permute4x64_epi64(v, 0xd8);
        v = _mm256_permute4x64_epi64(_mm256_packs_epi16(v, v), 0xd8);
        _mm_storeu_si128((void *)(q + i), _mm256_castsi256_si128(v));
    }
    if (i < n)
        cst_codec_ops_portable()->quantize(q + i, x + i, scale, n - i);
}

/* The bits of eight codes spread to bytes, as long as eight bytes can be read. */
void cst_avx2_unpack(uint8_t *codes, const uint8_t *src, size_t n, unsigned bits) {
    uint64_t mask = UINT64_C(0x0101010101010101) * ((1u << bits) - 1);
    size_t i = 0, len = n / 8 * bits;

    if (bits == 4) {
        for (; i + 32 <= n; i += 32, src += 16, len -= 16) {
            __m256i low = _mm256_set1_epi16(0x0f0f);
            __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)src));

            x = _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi16(x, 4)), low);
            _mm256_storeu_si256((void *)(codes + i), x);
        }
    }
    for (; len >= 8; i += 8, src += bits, len -= bits) {
        uint64_t u;

        memcpy(&u, src, 8);
        u = _pdep_u64(u, mask);
        memcpy(codes + i, &u, 8);
    }
    if (i < n)
        cst_codec_ops_portable()->unpack(codes + i, src, n - i, bits);
}

bool cst_avx2_halves(float *x, const uint8_t *src, float unit, size_t n) {
    const __m128i exponent = _mm_set1_epi16(0x7c00);
    __m128i infinite = _mm_setzero_si128();
    size_t i = 0;

    for (; i + 8 <= n; i += 8) {
        __m128i half = _mm_loadu_si128((const void *)(src + 2 * i));

        infinite = _mm_or_si128(infinite, _mm_cmpeq_epi16(_mm_and_si128(half, exponent), exponent));
        _mm256_storeu_ps(x + i, _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(unit)));
    }
    return cst_codec_ops_portable()->halves(x + i, src + 2 * i, unit, n - i) &&
           _mm_testz_si128(infinite, infinite);
}

static inline __m256i eight_codes(const uint8_t *codes) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)codes));
}

void cst_avx2_from_steps(float *x, const int32_t *q, const float *step, size_t n) {
    size_t i = 0;

    for (; i + 8 <= n; i += 8) {
        __m256 y = _mm256_cvtepi32_ps(_mm256_loadu_si256((const void *)(q + i)));

        _mm256_storeu_ps(x + i, _mm256_mul_ps(y, _mm256_loadu_ps(step + i)));
    }
    if (i < n)
        cst_codec_ops_portable()->from_steps(x + i, q + i, step + i, n - i);
}

void cst_avx2_to_steps(int32_t *q, const float *x, const float *inverse, size_t n) {
    const __m256 sign = _mm256_set1_ps(-0.0f), half = _mm256_set1_ps(0.5f);
    size_t i = 0;

    for (; i + 8 <= n; i += 8) {
        __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(inverse + i));

        y = _mm256_add_ps(y, _mm256_or_ps(half, _mm256_and_ps(y, sign)));
        _mm256_storeu_si256((void *)(q + i), _mm256_cvttps_epi32(y));
    }
    if (i < n)
        cst_codec_ops_portable()->to_steps(q + i, x + i, inverse + i, n - i);
}

void cst_avx2_affine(float *x, const uint8_t *codes, const float *scale, const float *zero,
                     size_t n) {
    size_t i = 0;

    for (; i + 8 <= n; i += 8) {
        __m256 q = _mm256_cvtepi32_ps(eight_codes(codes + i));

        q = _mm256_add_ps(_mm256_mul_ps(q, _mm256_loadu_ps(scale + i)), _mm256_loadu_ps(zero + i));
        _mm256_storeu_ps(x + i, q);
    }
    if (i < n)
        cst_codec_ops_portable()->affine(x + i, codes + i, scale + i, zero + i, n - i);
}

void cst_avx2_affine_group(float *x, const uint8_t *codes, float scale, float zero, size_t n) {
    const __m256 s = _mm256_set1_ps(scale), z = _mm256_set1_ps(zero);
    size_t i = 0;

    for (; i + 8 <= n; i += 8) {
        __m256 q = _mm256_cvtepi32_ps(eight_codes(codes + i));

        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_mul_ps(q, s), z));
    }
    if (i < n)
        cst_codec_ops_portable()->affine_group(x + i, codes + i, scale, zero, n - i);
}

/* Sums and differences 1, 2 and 4 apart: each value plus its partner, the second of each pair with
 * its sign turned; b and -b give the same differences. */
static inline __m256 hadamard_8(__m256 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f), none = _mm256_setzero_ps();
    __m256 other;

    other = _mm256_permute_ps(x, 0xb1);
    x = _mm256_add_ps(other, _mm256_xor_ps(x, _mm256_blend_ps(none, sign, 0xaa)));
    other = _mm256_permute_ps(x, 0x4e);
    x = _mm256_add_ps(other, _mm256_xor_ps(x, _mm256_blend_ps(none, sign, 0xcc)));
    other = _mm256_permute2f128_ps(x, x, 1);
    return _mm256_add_ps(other, _mm256_xor_ps(x, _mm256_blend_ps(none, sign, 0xf0)));
}

static inline void butterfly(__m256 *a, __m256 *b) {
    __m256 sum = _mm256_add_ps(*a, *b);

    *b = _mm256_sub_ps(*a, *b);
    *a = sum;
}

static inline void butterflies(__m256 v[4]) {
    butterfly(&v[0], &v[1]);
    butterfly(&v[2], &v[3]);
    butterfly(&v[0], &v[2]);
    butterfly(&v[1], &v[3]);
}

static inline void join(__m256 v[4], __m256 u[4]) {
    butterfly(&v[0], &u[0]);
    butterfly(&v[1], &u[1]);
    butterfly(&v[2], &u[2]);
    butterfly(&v[3], &u[3]);
}

/* 32 values in registers, written out for the compiler's sake. */
static inline __attribute__((always_inline)) void hadamard_32(__m256 v[4], const float *x) {
    v[0] = hadamard_8(_mm256_loadu_ps(x));
    v[1] = hadamard_8(_mm256_loadu_ps(x + 8));
    v[2] = hadamard_8(_mm256_loadu_ps(x + 16));
    v[3] = hadamard_8(_mm256_loadu_ps(x + 24));
    butterflies(v);
}

static inline void store_32(float *x, const __m256 v[4]) {
    _mm256_storeu_ps(x, v[0]);
    _mm256_storeu_ps(x + 8, v[1]);
    _mm256_storeu_ps(x + 16, v[2]);
    _mm256_storeu_ps(x + 24, v[3]);
}

static void hadamard_64(float *x) {
    __m256 v[4], u[4];

    hadamard_32(v, x);
    hadamard_32(u, x + 32);
    join(v, u);
    store_32(x, v);
    store_32(x + 32, u);
}

static void sums_and_differences(float *x, float *y, size_t n) {
    for (size_t i = 0; i < n; i += 8) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(y + i);

        _mm256_storeu_ps(x + i, _mm256_add_ps(a, b));
        _mm256_storeu_ps(y + i, _mm256_sub_ps(a, b));
    }
}

void cst_avx2_hadamard(float *x, size_t n) {
    if (n == 32) {
        __m256 v[4];

        hadamard_32(v, x);
        store_32(x, v);
    } else if (n < 32) {
        for (size_t i = 0; n >= 8 && i < n; i += 8)
            _mm256_storeu_ps(x + i, hadamard_8(_mm256_loadu_ps(x + i)));
        if (n < 8)
            cst_codec_ops_portable()->hadamard(x, n);
        if (n == 16)
            sums_and_differences(x, x + 8, 8);
    }
    for (size_t i = 0; n >= 64 && i < n; i += 64)
        hadamard_64(x + i);
    for (size_t apart = 64; apart < n; apart *= 2) {
        for (size_t i = 0; i < n; i += 2 * apart)
            sums_and_differences(x + i, x + i + apart, apart);
    }
}

/* Levels of 8 codes; low and high hold the table of up to 16. */
static inline __m256 small_levels(const uint8_t *codes, __m256 low, __m256 high) {
    __m256i q = eight_codes(codes);
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(q, 28));

    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, q), _mm256_permutevar8x32_ps(high, q),
                            upper);
}

static inline __attribute__((always_inline)) void small_levels_32(__m256 v[4], const uint8_t *codes,
                                                                  __m256 low, __m256 high) {
    v[0] = hadamard_8(small_levels(codes, low, high));
    v[1] = hadamard_8(small_levels(codes + 8, low, high));
    v[2] = hadamard_8(small_levels(codes + 16, low, high));
    v[3] = hadamard_8(small_levels(codes + 24, low, high));
    butterflies(v);
}

static inline void increase_32(__m256 v[4], const float *y) {
    v[0] = _mm256_add_ps(v[0], _mm256_loadu_ps(y));
    v[1] = _mm256_add_ps(v[1], _mm256_loadu_ps(y + 8));
    v[2] = _mm256_add_ps(v[2], _mm256_loadu_ps(y + 16));
    v[3] = _mm256_add_ps(v[3], _mm256_loadu_ps(y + 24));
}

/* The common case, in registers from the codes on: one block of 64, no more than 4 bits. */
static void hadamard_levels_64(float *x, const uint8_t *codes, __m256 low, __m256 high,
                               const float *mean) {
    __m256 v[4], u[4];

    small_levels_32(v, codes, low, high);
    small_levels_32(u, codes + 32, low, high);
    join(v, u);
    if (mean) {
        increase_32(v, mean);
        increase_32(u, mean + 32);
    }
    store_32(x, v);
    store_32(x + 32, u);
}

static void large_levels(float *x, const uint8_t *codes, const float *level, __m256 scale,
                         size_t n) {
    for (size_t i = 0; i < n; i += 8) {
        __m256 y = _mm256_i32gather_ps(level, eight_codes(codes + i), 4);

        _mm256_storeu_ps(x + i, _mm256_mul_ps(y, scale));
    }
}

void cst_avx2_hadamard_levels(float *x, const uint8_t *codes, const float *level, unsigned bits,
                              float scale, const float *mean, size_t n) {
    const __m256 s = _mm256_set1_ps(scale), low = _mm256_mul_ps(_mm256_loadu_ps(level), s);
    const __m256 high = bits == 4 ? _mm256_mul_ps(_mm256_loadu_ps(level + 8), s) : low;

    if (n < 8) {
        cst_codec_ops_portable()->hadamard_levels(x, codes, level, bits, scale, mean, n);
        return;
    }
    if (bits <= 4 && n == 64) {
        hadamard_levels_64(x, codes, low, high, mean);
        return;
    }
    if (bits > 4)
        large_levels(x, codes, level, s, n);
    for (size_t i = 0; bits <= 4 && i < n; i += 8)
        _mm256_storeu_ps(x + i, small_levels(codes + i, low, high));
    cst_avx2_hadamard(x, n);
    for (size_t i = 0; mean && i < n; i += 8)
        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(mean + i)));
}

void cst_avx2_turn_pairs(float *x, const float *cosine, const float *sine, float direction,
                         size_t n) {
    const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    const __m128 d = _mm_set1_ps(direction);
    size_t i = 0;

    for (; i + 4 <= n; i += 4) {
        __m128 s4 = _mm_mul_ps(_mm_loadu_ps(sine + i), d);
        __m256 c = _mm256_castps128_ps256(_mm_loadu_ps(cosine + i));
        __m256 s = _mm256_castps128_ps256(s4), y = _mm256_loadu_ps(x + 2 * i);

        c = _mm256_mul_ps(y, _mm256_permutevar8x32_ps(c, twice));
        s = _mm256_mul_ps(_mm256_permute_ps(y, 0xb1), _mm256_permutevar8x32_ps(s, twice));
        _mm256_storeu_ps(x + 2 * i, _mm256_addsub_ps(c, s));
    }
    if (i < n)
        cst_codec_ops_portable()->turn_pairs(x + 2 * i, cosine + i, sine + i, direction, n - i);
}

void cst_avx2_turn_halves(float *x, const float *cosine, const float *sine, float direction,
                          size_t n) {
    const __m256 d = _mm256_set1_ps(direction);
    size_t whole = n & ~(size_t)7;

    for (size_t i = 0; i < whole; i += 8) {
        __m256 c = _mm256_loadu_ps(cosine + i), s = _mm256_mul_ps(_mm256_loadu_ps(sine + i), d);
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + n + i);

        _mm256_storeu_ps(x + i, _mm256_sub_ps(_mm256_mul_ps(a, c), _mm256_mul_ps(b, s)));
        _mm256_storeu_ps(x + n + i, _mm256_add_ps(_mm256_mul_ps(b, c), _mm256_mul_ps(a, s)));
    }
    for (size_t i = whole; i < n; i++) {
        float pair[2] = { x[i], x[n + i] };

        cst_codec_ops_portable()->turn_pairs(pair, cosine + i, sine + i, direction, 1);
        x[i] = pair[0];
        x[n + i] = pair[1];
    }
}

void cst_avx2_to_f32_bytes(uint8_t *dst, const float *x, size_t n) {
    memcpy(dst, x, n * sizeof(*x));
}

void cst_avx2_to_f16_bytes(uint8_t *dst, const float *x, size_t n) {
    size_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((void *)(dst + 2 * i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    if (i < n)
        cst_codec_ops_portable()->from_f32[CST_DTYPE_F16](dst + 2 * i, x + i, n - i);
}

void cst_avx2_to_bf16_bytes(uint8_t *dst, const float *x, size_t n) {
    size_t i = 0;

    for (; i + 16 <= n; i += 16) {
        __m256i a = to_bf16(_mm256_loadu_ps(x + i)), b = to_bf16(_mm256_loadu_ps(x + i + 8));

        a = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
        _mm256_storeu_si256((void *)(dst + 2 * i), a);
    }
    if (i < n)
        cst_codec_ops_portable()->from_f32[CST_DTYPE_BF16](dst + 2 * i, x + i, n - i);
}

static inline void put_codes(uint8_t *codes, __m256i code) {
    __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));

    _mm_storel_epi64((void *)codes, _mm_packus_epi16(words, words));
}

/* Up to 4 bits: midpoints are compared one by one; each one not above takes -1 off. */
void cst_avx2_nearest(uint8_t *codes, const float *x, float scale, const float *midpoint,
                      unsigned bits, size_t n) {
    const __m256 s = _mm256_set1_ps(scale);
    unsigned midpoints = (1u << bits) - 1;
    size_t i = 0;

    for (; bits <= 4 && i + 8 <= n; i += 8) {
        __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + i), s);
        __m256i code = _mm256_setzero_si256();

        for (unsigned k = 0; k < midpoints; k++) {
            __m256 below = _mm256_cmp_ps(y, _mm256_broadcast_ss(midpoint + k), _CMP_GE_OQ);

            code = _mm256_sub_epi32(code, _mm256_castps_si256(below));
        }
        put_codes(codes + i, code);
    }
    if (i < n)
        cst_codec_ops_portable()->nearest(codes + i, x + i, scale, midpoint, bits, n - i);
}

void cst_avx2_to_codes(uint8_t *codes, const float *x, const float *scale, const float *zero,
                       float least, float most, size_t n) {
    const __m256 low = _mm256_set1_ps(least), high = _mm256_set1_ps(most);
    size_t i = 0;

    for (; i + 8 <= n; i += 8) {
        __m256 s = _mm256_loadu_ps(scale + i);
        __m256 y = _mm256_sub_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(zero + i));

        y = _mm256_and_ps(_mm256_div_ps(y, s), _mm256_cmp_ps(s, _mm256_setzero_ps(), _CMP_GT_OQ));
        y = _mm256_add_ps(_mm256_max_ps(low, _mm256_min_ps(high, y)), _mm256_set1_ps(0.5f));
        put_codes(codes + i, _mm256_cvttps_epi32(y));
    }
    if (i < n)
        cst_codec_ops_portable()->to_codes(codes + i, x + i, scale + i, zero + i, least, most,
                                           n - i);
}

void cst_avx2_widen(float *low, float *high, const float *x, size_t n) {
    size_t i = 0;

    for (; i + 8 <= n; i += 8) {
        __m256 y = _mm256_loadu_ps(x + i);

        _mm256_storeu_ps(low + i, _mm256_min_ps(_mm256_loadu_ps(low + i), y));
        _mm256_storeu_ps(high + i, _mm256_max_ps(_mm256_loadu_ps(high + i), y));
    }
    if (i < n)
        cst_codec_ops_portable()->widen(low + i, high + i, x + i, n - i);
}

void cst_avx2_add(double *sum, const float *x, size_t n) {
    size_t i = 0;

    for (; i + 4 <= n; i += 4) {
        __m256d v = _mm256_cvtps_pd(_mm_loadu_ps(x + i));

        _mm256_storeu_pd(sum + i, _mm256_add_pd(_mm256_loadu_pd(sum + i), v));
    }
    if (i < n)
        cst_codec_ops_portable()->add(sum + i, x + i, n - i);
}

void cst_avx2_moments(double *square, double *error, const double *mean, const float *x,
                      const float *y, size_t n) {
    size_t i = 0;

    for (; i + 4 <= n; i += 4) {
        __m256d v = _mm256_cvtps_pd(_mm_loadu_ps(x + i));
        __m256d d = _mm256_sub_pd(v, _mm256_loadu_pd(mean + i));
        __m256d e = _mm256_sub_pd(v, _mm256_cvtps_pd(_mm_loadu_ps(y + i)));

        _mm256_storeu_pd(square + i,
                         _mm256_add_pd(_mm256_loadu_pd(square + i), _mm256_mul_pd(d, d)));
        _mm256_storeu_pd(error + i, _mm256_add_pd(_mm256_loadu_pd(error + i), _mm256_mul_pd(e, e)));
    }
    if (i < n)
        cst_codec_ops_portable()->moments(square + i, error + i, mean + i, x + i, y + i, n - i);
}

void cst_avx2_hadamard_row(float *x, uint8_t *codes, const uint8_t *packed, const float *level,
                           unsigned bits, const float *scale, const float *mean, size_t n,
                           uint32_t heads) {
    cst_avx2_unpack(codes, packed, cst_align_up(n * heads, 8), bits);
    for (size_t h = 0; h < heads; h++)
        cst_avx2_hadamard_levels(x + h * n, codes + h * n, level, bits, scale[h],
                                 mean ? mean + h * n : NULL, n);
}

const struct cst_codec_ops cst_codec_avx2_table = {
    .name = "avx2",
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
    .unpack = cst_avx2_unpack,
    .halves = cst_avx2_halves,
    .from_steps = cst_avx2_from_steps,
    .to_steps = cst_avx2_to_steps,
    .affine = cst_avx2_affine,
    .affine_group = cst_avx2_affine_group,
    .hadamard = cst_avx2_hadamard,
    .hadamard_levels = cst_avx2_hadamard_levels,
    .hadamard_row = cst_avx2_hadamard_row,
    .turn_pairs = cst_avx2_turn_pairs,
    .turn_halves = cst_avx2_turn_halves,
    .from_f32 = { [CST_DTYPE_F32] = cst_avx2_to_f32_bytes,
                  [CST_DTYPE_F16] = cst_avx2_to_f16_bytes,
                  [CST_DTYPE_BF16] = cst_avx2_to_bf16_bytes },
    .nearest = cst_avx2_nearest,
    .to_codes = cst_avx2_to_codes,
    .widen = cst_avx2_widen,
    .rans_rows = cst_avx2_rans_rows,
    .rans_put = cst_rans_put_portable,
    .int_range = cst_avx2_int_range,
    .low_bits = cst_avx2_low_bits,
    .bytes_to_rows = cst_avx2_bytes_to_rows,
    .rows_to_bytes = cst_avx2_rows_to_bytes,
    .add = cst_avx2_add,
    .moments = cst_avx2_moments,
};
