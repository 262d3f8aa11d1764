/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rows of rans.h for AVX-512: 16 lanes a register, their table entries by gathers, the words of
 * those that need one spread over them by an expansion. Fewer lanes go the AVX2 way.
 */
#include "codec/dispatch_x86.h"

#include "base/macros.h"

#include <immintrin.h>

struct words {
    const uint8_t *in;
    __m512i outer; /* entries of the row, or-ed */
};

/* 16 tokens, or those of `active` */
static inline __attribute__((always_inline)) __m512i
step(__m512i x, __mmask16 active, const uint32_t *slot, int32_t *q, struct words *w) {
    const __m512i low = _mm512_set1_epi32(4095);
    __m512i entry = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), active,
                                                _mm512_and_si512(x, low), slot, 4);
    __m512i frequency = _mm512_and_si512(entry, low);
    __m512i offset = _mm512_and_si512(_mm512_srli_epi32(entry, 12), low);
    __m512i word = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)w->in)), y;
    __mmask16 take;

    _mm512_storeu_si512(q, _mm512_srai_epi32(entry, 25));
    w->outer = _mm512_or_si512(w->outer, entry);
    y = _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srli_epi32(x, 12)), offset);
    take = _mm512_mask_cmplt_epu32_mask(active, y, _mm512_set1_epi32(1 << 16));
    w->in += 2 * (unsigned)_mm_popcnt_u32(take);
    word = _mm512_maskz_expand_epi32(take, word);
    y = _mm512_or_si512(_mm512_mask_slli_epi32(y, take, y, 16), word);
    return _mm512_mask_mov_epi32(x, active, y);
}

static inline __attribute__((always_inline)) __m512i
step_16(__m512i x, const uint32_t *slot, int32_t *q, uint32_t n, struct words *w) {
    return step(x, n >= 16 ? (__mmask16)-1 : (__mmask16)((1u << n) - 1), slot, q, w);
}

static inline bool holds_outer(__m512i entries) {
    return _mm512_test_epi32_mask(entries, _mm512_set1_epi32(1 << 24)) != 0;
}

static uint32_t rows_32(struct cst_rans_reader *r, const struct cst_rans_rows *rows, uint32_t row) {
    __m512i a = _mm512_loadu_si512(r->state), b = _mm512_loadu_si512(r->state + 16);
    struct words w = { .in = r->in };

    for (; row < rows->channels && w.in <= r->limit; row++) {
        const uint32_t *slot = rows->book->table[rows->klass[row]]->slot;
        int32_t *q = rows->q + row * rows->stride;
        uint32_t t = 0;

        w.outer = _mm512_setzero_si512();
        for (; t + 32 <= rows->tokens; t += 32) {
            a = step(a, (__mmask16)-1, slot, q + t, &w);
            b = step(b, (__mmask16)-1, slot, q + t + 16, &w);
        }
        if (t < rows->tokens)
            a = step_16(a, slot, q + t, rows->tokens - t, &w);
        if (t + 16 < rows->tokens)
            b = step_16(b, slot, q + t + 16, rows->tokens - t - 16, &w);
        rows->outer[row] = holds_outer(w.outer);
    }
    _mm512_storeu_si512(r->state, a);
    _mm512_storeu_si512(r->state + 16, b);
    r->in = w.in;
    return row;
}

static uint32_t rows_16(struct cst_rans_reader *r, const struct cst_rans_rows *rows, uint32_t row) {
    __m512i a = _mm512_loadu_si512(r->state);
    struct words w = { .in = r->in };

    for (; row < rows->channels && w.in <= r->limit; row++) {
        const uint32_t *slot = rows->book->table[rows->klass[row]]->slot;
        int32_t *q = rows->q + row * rows->stride;
        uint32_t t = 0;

        w.outer = _mm512_setzero_si512();
        for (; t + 16 <= rows->tokens; t += 16)
            a = step(a, (__mmask16)-1, slot, q + t, &w);
        if (t < rows->tokens)
            a = step_16(a, slot, q + t, rows->tokens - t, &w);
        rows->outer[row] = holds_outer(w.outer);
    }
    _mm512_storeu_si512(r->state, a);
    r->in = w.in;
    return row;
}

uint32_t cst_avx512_rans_rows(struct cst_rans_reader *r, const struct cst_rans_rows *rows,
                              uint32_t row) {
    if (rows->lanes == 32)
        return rows_32(r, rows, row);
    if (rows->lanes == 16)
        return rows_16(r, rows, row);
    return cst_avx2_rans_rows(r, rows, row);
}
