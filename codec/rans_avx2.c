/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rows of rans.h for AVX2: 8 lanes a register, their table entries by gathers, the words of
 * those that need one spread over them by a permutation. Fewer lanes go the portable way.
 */
#include "codec/dispatch_x86.h"

#include "base/macros.h"

#include <immintrin.h>
#include <string.h>

/* For each lane the number of lanes below it that take a word, in bytes. */
static inline __m256i places(unsigned take) {
    uint64_t ones = _pdep_u64(take, UINT64_C(0x0101010101010101));

    return _mm256_cvtepu8_epi32(
        _mm_cvtsi64_si128((long long)(ones * UINT64_C(0x0101010101010100))));
}

struct words {
    const uint8_t *in;
    __m256i outer; /* entries of the row, or-ed */
};

/* The first n of 8 tokens */
static inline __attribute__((always_inline)) __m256i
step(__m256i x, uint32_t n, const uint32_t *slot, int32_t *q, struct words *w) {
    const __m256i low = _mm256_set1_epi32(4095), zero = _mm256_setzero_si256();
    __m256i entry = _mm256_i32gather_epi32((const int *)slot, _mm256_and_si256(x, low), 4);
    __m256i offset = _mm256_and_si256(_mm256_srli_epi32(entry, 12), low);
    __m256i word = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)w->in)), y, take;
    unsigned taken;

    y = _mm256_mullo_epi32(_mm256_and_si256(entry, low), _mm256_srli_epi32(x, 12));
    y = _mm256_add_epi32(y, offset);
    take = _mm256_cmpeq_epi32(_mm256_srli_epi32(y, 16), zero);
    if (n < 8) {
        __m256i active = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n),
                                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));

        take = _mm256_and_si256(take, active);
        y = _mm256_blendv_epi8(x, y, active);
        entry = _mm256_and_si256(entry, active);
    }
    _mm256_storeu_si256((void *)q, _mm256_srai_epi32(entry, 25));
    w->outer = _mm256_or_si256(w->outer, entry);
    taken = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(take));
    word = _mm256_permutevar8x32_epi32(word, places(taken));
    w->in += 2 * (unsigned)_mm_popcnt_u32(taken);
    return _mm256_blendv_epi8(y, _mm256_or_si256(_mm256_slli_epi32(y, 16), word), take);
}

/* `registers` is a constant where this is inlined. */
static inline __attribute__((always_inline)) uint32_t rows_of(struct cst_rans_reader *r,
                                                              const struct cst_rans_rows *rows,
                                                              uint32_t row,
                                                              const uint32_t registers) {
    struct words w = { .in = r->in };
    __m256i x[4];

    for (uint32_t i = 0; i < registers; i++)
        x[i] = _mm256_loadu_si256((const void *)(r->state + 8 * i));
    for (; row < rows->channels && w.in <= r->limit; row++) {
        const uint32_t *slot = rows->book->table[rows->klass[row]]->slot;
        int32_t *q = rows->q + row * rows->stride;
        uint32_t t = 0;

        w.outer = _mm256_setzero_si256();
        for (; t + 8 * registers <= rows->tokens; t += 8 * registers) {
            for (uint32_t i = 0; i < registers; i++)
                x[i] = step(x[i], 8, slot, q + t + 8 * i, &w);
        }
        for (uint32_t i = 0; i < registers; i++, t += 8) {
            if (t < rows->tokens)
                x[i] = step(x[i], CST_MIN(8, rows->tokens - t), slot, q + t, &w);
        }
        rows->outer[row] = !_mm256_testz_si256(w.outer, _mm256_set1_epi32(1 << 24));
    }
    for (uint32_t i = 0; i < registers; i++)
        _mm256_storeu_si256((void *)(r->state + 8 * i), x[i]);
    r->in = w.in;
    return row;
}

uint32_t cst_avx2_rans_rows(struct cst_rans_reader *r, const struct cst_rans_rows *rows,
                            uint32_t row) {
    if (rows->lanes == 32)
        return rows_of(r, rows, row, 4);
    if (rows->lanes == 16)
        return rows_of(r, rows, row, 2);
    if (rows->lanes == 8)
        return rows_of(r, rows, row, 1);
    return cst_rans_rows_portable(r, rows, row);
}

void cst_avx2_int_range(int32_t *least, int32_t *most, const int32_t *q, size_t n) {
    __m256i low = _mm256_set1_epi32(q[0]), high = low;
    int32_t lows[8], highs[8];
    size_t i = 0;

    for (; i + 8 <= n; i += 8) {
        __m256i x = _mm256_loadu_si256((const void *)(q + i));

        low = _mm256_min_epi32(low, x);
        high = _mm256_max_epi32(high, x);
    }
    _mm256_storeu_si256((void *)lows, low);
    _mm256_storeu_si256((void *)highs, high);
    *least = lows[0];
    *most = highs[0];
    for (size_t k = 1; k < 8; k++) {
        *least = CST_MIN(*least, lows[k]);
        *most = CST_MAX(*most, highs[k]);
    }
    for (; i < n; i++) {
        *least = CST_MIN(*least, q[i]);
        *most = CST_MAX(*most, q[i]);
    }
}

void cst_avx2_low_bits(int32_t *q, const uint8_t *src, unsigned bit, size_t n, unsigned shift) {
    const uint64_t mask = UINT64_C(0x0101010101010101) * ((1u << shift) - 1);
    const __m256i half = _mm256_set1_epi32(1 << shift >> 1);
    const __m128i by = _mm_cvtsi32_si128((int)shift);

    for (size_t i = 0; i < n; i += 8, src += shift) {
        __m256i x = _mm256_sll_epi32(_mm256_loadu_si256((const void *)(q + i)), by), low;
        uint64_t bits;

        memcpy(&bits, src, sizeof(bits));
        bits = _pdep_u64(bits >> bit, mask);
        low = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bits));
        _mm256_storeu_si256((void *)(q + i), _mm256_add_epi32(_mm256_sub_epi32(x, half), low));
    }
}

/* ---- transposes --------------------------------------------------------------------------------
 */

/* 8 x 8 bytes, rows in the low halves. */
static inline __attribute__((always_inline)) void transpose_8(__m128i out[4], const __m128i in[8]) {
    __m128i a = _mm_unpacklo_epi8(in[0], in[1]), b = _mm_unpacklo_epi8(in[2], in[3]);
    __m128i c = _mm_unpacklo_epi8(in[4], in[5]), d = _mm_unpacklo_epi8(in[6], in[7]);
    __m128i ab = _mm_unpacklo_epi16(a, b), cd = _mm_unpacklo_epi16(c, d);
    __m128i ab2 = _mm_unpackhi_epi16(a, b), cd2 = _mm_unpackhi_epi16(c, d);

    out[0] = _mm_unpacklo_epi32(ab, cd); /* two rows each */
    out[1] = _mm_unpackhi_epi32(ab, cd);
    out[2] = _mm_unpacklo_epi32(ab2, cd2);
    out[3] = _mm_unpackhi_epi32(ab2, cd2);
}

void cst_avx2_bytes_to_rows(int32_t *q, size_t stride, const uint8_t *src, size_t pitch,
                            uint32_t tokens, uint32_t channels) {
    const struct cst_codec_ops *rest = cst_codec_ops_portable();
    uint32_t c = 0, whole = tokens & ~7u;

    for (; c + 8 <= channels; c += 8) {
        for (uint32_t t = 0; t < whole; t += 8) {
            __m128i in[8], out[4];

            for (uint32_t i = 0; i < 8; i++)
                in[i] = _mm_loadl_epi64((const void *)(src + (t + i) * pitch + c));
            transpose_8(out, in);
            for (uint32_t i = 0; i < 8; i++) {
                __m128i row = i % 2 ? _mm_unpackhi_epi64(out[i / 2], out[i / 2]) : out[i / 2];

                _mm256_storeu_si256((void *)(q + (c + i) * stride + t), _mm256_cvtepu8_epi32(row));
            }
        }
    }
    if (whole < tokens)
        rest->bytes_to_rows(q + whole, stride, src + whole * pitch, pitch, tokens - whole, c);
    if (c < channels)
        rest->bytes_to_rows(q + c * stride, stride, src + c, pitch, tokens, channels - c);
}

void cst_avx2_rows_to_bytes(uint8_t *dst, size_t pitch, const int32_t *q, size_t stride,
                            uint32_t tokens, const int32_t *offset, uint32_t channels) {
    const struct cst_codec_ops *rest = cst_codec_ops_portable();
    const __m256i low = _mm256_set1_epi32(255);
    uint32_t c = 0, whole = tokens & ~7u;

    for (; c + 8 <= channels; c += 8) {
        for (uint32_t t = 0; t < whole; t += 8) {
            __m128i in[8], out[4];

            for (uint32_t i = 0; i < 8; i++) {
                __m256i x = _mm256_loadu_si256((const void *)(q + (c + i) * stride + t));
                __m128i half;

                x = _mm256_and_si256(_mm256_add_epi32(x, _mm256_set1_epi32(offset[c + i])), low);
                half = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
                in[i] = _mm_packus_epi16(half, half);
            }
            transpose_8(out, in);
            for (uint32_t i = 0; i < 8; i++) {
                __m128i row = i % 2 ? _mm_unpackhi_epi64(out[i / 2], out[i / 2]) : out[i / 2];

                _mm_storel_epi64((void *)(dst + (t + i) * pitch + c), row);
            }
        }
    }
    if (whole < tokens)
        rest->rows_to_bytes(dst + whole * pitch, pitch, q + whole, stride, tokens - whole, offset,
                            c);
    if (c < channels)
        rest->rows_to_bytes(dst + c, pitch, q + c * stride, stride, tokens, offset + c,
                            channels - c);
}
