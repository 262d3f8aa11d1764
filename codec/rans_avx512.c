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

/* 16 tokens, or those of `active`: lanes x, words below `end`. */
static inline __attribute__((always_inline)) __m512i put(__m512i x, __mmask16 active,
                                                         const int32_t *q,
                                                         const struct cst_rans_table *table,
                                                         unsigned shift, uint8_t **end) {
    const __m512i reach = _mm512_set1_epi32(table->reach), low = _mm512_set1_epi32(4095);
    __m512i symbol =
        _mm512_add_epi32(_mm512_maskz_loadu_epi32(active, q), _mm512_set1_epi32(1 << shift >> 1));
    __m512i code, f, n, rest;
    __m512 reciprocal;
    __mmask16 full;
    unsigned words;

    symbol = _mm512_add_epi32(_mm512_sra_epi32(symbol, _mm_cvtsi32_si128((int)shift)), reach);
    symbol = _mm512_max_epi32(symbol, _mm512_setzero_si512());
    symbol = _mm512_min_epi32(symbol, _mm512_add_epi32(reach, reach));
    code = _mm512_i32gather_epi32(symbol, table->code, 4);
    f = _mm512_and_si512(code, low);
    full = _mm512_mask_cmpge_epu32_mask(active, x, _mm512_slli_epi32(f, 20));
    words = (unsigned)_mm_popcnt_u32(full);
    *end -= 2 * words;
    _mm256_mask_storeu_epi16(*end, (__mmask16)((1u << words) - 1),
                             _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, x)));
    rest = _mm512_mask_srli_epi32(x, full, x, 16);
    /* Below 2^20 and with a factor less than 1, fp32 is at most 1 too low: one step corrects it. */
    reciprocal = _mm512_div_ps(_mm512_set1_ps(0x1.fffffp-1f), _mm512_cvtepi32_ps(f));
    n = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_cvtepu32_ps(rest), reciprocal));
    rest = _mm512_sub_epi32(rest, _mm512_mullo_epi32(n, f));
    full = _mm512_cmpge_epu32_mask(rest, f);
    rest = _mm512_mask_sub_epi32(rest, full, rest, f);
    n = _mm512_mask_add_epi32(n, full, n, _mm512_set1_epi32(1));
    rest = _mm512_add_epi32(rest, _mm512_srli_epi32(code, 12));
    return _mm512_mask_add_epi32(x, active, _mm512_slli_epi32(n, 12), rest);
}

uint8_t *cst_avx512_rans_put(uint8_t *end, uint32_t state[CST_RANS_LANES], unsigned lanes,
                             const int32_t *q, uint32_t tokens, const struct cst_rans_table *table,
                             unsigned shift) {
    __m512i x[2] = { _mm512_loadu_si512(state), _mm512_loadu_si512(state + 16) };
    uint32_t t = tokens;

    if (lanes < 16)
        return cst_rans_put_portable(end, state, lanes, q, tokens, table, shift);
    if (t % 16) {
        uint32_t i = lanes == 32 ? t / 16 % 2 : 0;

        x[i] = put(x[i], (__mmask16)((1u << t % 16) - 1), q + t / 16 * 16, table, shift, &end);
        t -= t % 16;
    }
    if (lanes == 32 && t / 16 % 2) {
        t -= 16;
        x[0] = put(x[0], (__mmask16)-1, q + t, table, shift, &end);
    }
    for (; lanes == 32 && t; t -= 32) {
        x[1] = put(x[1], (__mmask16)-1, q + t - 16, table, shift, &end);
        x[0] = put(x[0], (__mmask16)-1, q + t - 32, table, shift, &end);
    }
    for (; t; t -= 16)
        x[0] = put(x[0], (__mmask16)-1, q + t - 16, table, shift, &end);
    _mm512_storeu_si512(state, x[0]);
    _mm512_storeu_si512(state + 16, x[1]);
    return end;
}
