/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The inner loops for x86 with AVX2, BMI2 and F16C, compiled with these flags and reached only
 * where the processor has them. The last few elements of each call go one by one.
 */
#include "codec/dispatch.h"

#include "codec/dtype.h"
#include "codec/huffman_loop.h"

#include <immintrin.h>

static void huff_lanes(struct cst_huff_lane lane[CST_HUFF_LANES], const uint64_t *entry) {
    cst_huff_lanes_loop(lane, entry);
}

static inline __m256i load(const void *p) {
    return _mm256_loadu_si256(p);
}

static void split(uint8_t *hi, uint8_t *lo, const uint8_t *src, size_t n) {
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
    cst_codec_ops_portable()->split(hi + i, lo + i, src + 2 * i, n - i);
}

static void merge(uint8_t *dst, const uint8_t *hi, const uint8_t *lo, size_t n) {
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
    cst_codec_ops_portable()->merge(dst + 2 * i, hi + i, lo + i, n - i);
}

/* 8 values times scale */
static inline __m256 scaled(const int8_t *q, __m256 scale) {
    __m256i x = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)q));

    return _mm256_mul_ps(_mm256_cvtepi32_ps(x), scale);
}

static void dequant_f32(uint8_t *dst, const int8_t *q, float scale, size_t n) {
    size_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps((void *)(dst + 4 * i), scaled(q + i, _mm256_set1_ps(scale)));
    cst_codec_ops_portable()->dequant[CST_DTYPE_F32](dst + 4 * i, q + i, scale, n - i);
}

static void dequant_f16(uint8_t *dst, const int8_t *q, float scale, size_t n) {
    size_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(
            (void *)(dst + 2 * i),
            _mm256_cvtps_ph(scaled(q + i, _mm256_set1_ps(scale)), _MM_FROUND_TO_NEAREST_INT));
    cst_codec_ops_portable()->dequant[CST_DTYPE_F16](dst + 2 * i, q + i, scale, n - i);
}

/* fp32 bits of finite values rounded to their upper halves */
static inline __m256i to_bf16(__m256 x) {
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));

    u = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_srli_epi32(u, 16);
}

static void dequant_bf16(uint8_t *dst, const int8_t *q, float scale, size_t n) {
    size_t i = 0;

    for (; i + 16 <= n; i += 16) {
        __m256i a = to_bf16(scaled(q + i, _mm256_set1_ps(scale)));
        __m256i b = to_bf16(scaled(q + i + 8, _mm256_set1_ps(scale)));
        __m256i x = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);

        _mm256_storeu_si256((void *)(dst + 2 * i), x);
    }
    cst_codec_ops_portable()->dequant[CST_DTYPE_BF16](dst + 2 * i, q + i, scale, n - i);
}

const struct cst_codec_ops cst_codec_avx2_table = {
    .name = "avx2",
    .huff_lanes = huff_lanes,
    .split = split,
    .merge = merge,
    .dequant = { [CST_DTYPE_F32] = dequant_f32,
                 [CST_DTYPE_F16] = dequant_f16,
                 [CST_DTYPE_BF16] = dequant_bf16 },
};
