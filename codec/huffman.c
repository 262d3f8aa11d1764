/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The byte coder. A plain prefix code loses about 1 % against an arithmetic coder on exponents, but
 * decodes several times as fast: one table look-up yields about four exponents of 2.5 bits.
 *
 * Invariants: 1. a code is complete (its lengths fill the 11-bit space exactly), so every bit
 * pattern decodes and the length table ends by itself; 2. a stream ends in the byte of its last
 * bit, and the bits after that are zero, so a bit that changes is seen; 3. the fast
 * loop only runs where a whole round fits into input and output, the rest goes symbol by symbol.
 * No state; any thread.
 */
#include "codec/huffman.h"

#include "codec/dispatch.h"
#include "codec/huffman_loop.h"

#include "base/le.h"
#include "base/macros.h"

#include <assert.h>
#include <string.h>

enum { SYMBOLS = 256, SPACE = 1 << CST_HUFF_BITS };

void cst_huff_histogram(uint32_t count[256], const uint8_t *p, size_t n) {
    uint32_t part[4][SYMBOLS] = { 0 }; /* equal neighbours don't wait for one another's store */
    size_t i = 0;

    for (; i + 4 <= n; i += 4) {
        part[0][p[i]]++;
        part[1][p[i + 1]]++;
        part[2][p[i + 2]]++;
        part[3][p[i + 3]]++;
    }
    for (; i < n; i++)
        part[0][p[i]]++;
    for (int s = 0; s < SYMBOLS; s++)
        count[s] = part[0][s] + part[1][s] + part[2][s] + part[3][s];
}

/* Symbols with a count, rarest first, equal ones in their own order. Returns how many. */
static unsigned sort_symbols(uint8_t sorted[SYMBOLS], const uint32_t count[SYMBOLS]) {
    unsigned n = 0;

    for (unsigned s = 0; s < SYMBOLS; s++) {
        unsigned i = n;

        if (!count[s])
            continue;
        for (; i > 0 && count[sorted[i - 1]] > count[s]; i--)
            sorted[i] = sorted[i - 1];
        sorted[i] = (uint8_t)s;
        n++;
    }
    return n;
}

/*
 * Lengths by package-merge (Larmore and Hirschberg 1990). A level's list is the symbols and the
 * pairs of the level below, by weight; of the top list the first 2n - 2 are bought, and a symbol's
 * length is how often it is bought on the way down. Only "is it a symbol" is kept per level.
 */
static void limited_lengths(uint8_t length[SYMBOLS], const uint8_t sorted[SYMBOLS], unsigned n,
                            const uint32_t count[SYMBOLS]) {
    bool leaf[CST_HUFF_BITS][2 * SYMBOLS];
    uint32_t list[2][2 * SYMBOLS];
    unsigned size = 0, bought = 2 * n - 2;

    for (int level = 0; level < CST_HUFF_BITS; level++) {
        const uint32_t *below = list[level & 1];
        uint32_t *out = list[~level & 1];
        unsigned pairs = size / 2, s = 0, p = 0;

        for (size = 0; s < n || p < pairs; size++) {
            uint32_t pair = p < pairs ? below[2 * p] + below[2 * p + 1] : UINT32_MAX;

            leaf[level][size] = s < n && count[sorted[s]] <= pair;
            out[size] = leaf[level][size] ? count[sorted[s++]] : pair;
            p += !leaf[level][size];
        }
    }
    memset(length, 0, SYMBOLS);
    for (int level = CST_HUFF_BITS - 1; level >= 0; level--) {
        unsigned symbols = 0;

        for (unsigned i = 0; i < bought; i++)
            symbols += leaf[level][i];
        for (unsigned i = 0; i < symbols; i++)
            length[sorted[i]]++;
        bought = 2 * (bought - symbols);
    }
}

/* Canonical: shorter codes first, equal lengths in symbol order. */
static void assign_codes(uint16_t code[SYMBOLS], const uint8_t length[SYMBOLS]) {
    unsigned number[CST_HUFF_BITS + 1] = { 0 }, next[CST_HUFF_BITS + 1] = { 0 };

    for (unsigned s = 0; s < SYMBOLS; s++) {
        if (length[s])
            number[length[s]]++;
    }
    for (unsigned l = 2; l <= CST_HUFF_BITS; l++)
        next[l] = (next[l - 1] + number[l - 1]) << 1;
    for (unsigned s = 0; s < SYMBOLS; s++) {
        if (length[s])
            code[s] = (uint16_t)next[length[s]]++;
    }
}

void cst_huff_build(struct cst_huff_code *c, const uint32_t count[256]) {
    uint8_t sorted[SYMBOLS];
    unsigned n = sort_symbols(sorted, count);

    assert(n >= 2);
    limited_lengths(c->length, sorted, n, count);
    assign_codes(c->code, c->length);
}

/* Streams for n symbols, and symbols of each but the last ones. */
static size_t lanes_of(size_t n) {
    size_t round = CST_HUFF_LANES * CST_HUFF_CHUNK;

    return CST_HUFF_LANES * ((n + round - 1) / round);
}

static size_t chunk_of(size_t n) {
    size_t lanes = lanes_of(n);

    return (n + lanes - 1) / lanes;
}

size_t cst_huff_bound(const struct cst_huff_code *c, const uint32_t count[256], size_t n) {
    uint64_t bits = 0;

    for (int s = 0; s < SYMBOLS; s++)
        bits += (uint64_t)count[s] * c->length[s];
    /* table; u16 length and a partial byte a stream; the last store writes 8 bytes */
    return SYMBOLS / 2 + 3 * lanes_of(n) + bits / 8 + 8;
}

/* Lengths as nibbles, symbol by symbol up to the last one: 1..11, or 0 and then a run of 1..16
 * symbols without a code, less 1. Returns the bytes, the last one padded with a zero nibble. */
static size_t put_table(uint8_t *dst, const uint8_t length[SYMBOLS]) {
    unsigned filled = 0;
    size_t nibbles = 0;

    for (unsigned s = 0; filled < SPACE; nibbles++) {
        unsigned run = 0;

        if (!(nibbles & 1))
            dst[nibbles / 2] = 0;
        if (length[s]) {
            dst[nibbles / 2] |= (uint8_t)(length[s] << (nibbles & 1) * 4);
            filled += SPACE >> length[s++];
            continue;
        }
        while (run < 16 && !length[s + run])
            run++;
        s += run;
        nibbles++;
        if (!(nibbles & 1))
            dst[nibbles / 2] = 0;
        dst[nibbles / 2] |= (uint8_t)((run - 1) << (nibbles & 1) * 4);
    }
    return (nibbles + 1) / 2;
}

/* Returns the bytes of the table, 0 when it is none. */
static size_t get_table(uint8_t length[SYMBOLS], const uint8_t *src, size_t len) {
    unsigned filled = 0, s = 0, run;
    size_t nibbles = 0;

    memset(length, 0, SYMBOLS);
    while (filled < SPACE) {
        unsigned v;

        if (s >= SYMBOLS || nibbles / 2 >= len)
            return 0;
        v = src[nibbles / 2] >> (nibbles & 1) * 4 & 15;
        nibbles++;
        if (v > CST_HUFF_BITS)
            return 0;
        if (v) {
            length[s++] = (uint8_t)v;
            filled += SPACE >> v;
            continue;
        }
        if (nibbles / 2 >= len)
            return 0;
        run = (src[nibbles / 2] >> (nibbles & 1) * 4 & 15) + 1;
        nibbles++;
        s += run;
    }
    if (filled != SPACE || (nibbles & 1 && src[nibbles / 2] >> 4))
        return 0;
    return (nibbles + 1) / 2;
}

/* Appends a code of up to 44 bits; at most 7 bits wait in acc between calls. */
static inline uint8_t *put_bits(uint8_t *dst, uint64_t *acc, unsigned *bits, uint64_t code,
                                unsigned length) {
    *acc = *acc << length | code;
    *bits += length;
    cst_store64(dst, __builtin_bswap64(*acc << (64 - *bits)));
    dst += *bits / 8;
    *bits &= 7;
    return dst;
}

static uint8_t *put_stream(uint8_t *dst, const uint32_t packed[SYMBOLS], const uint8_t *src,
                           size_t n) {
    uint64_t acc = 0;
    unsigned bits = 0;
    size_t i = 0;

    for (; i + 4 <= n; i += 4) {
        uint32_t a = packed[src[i]], b = packed[src[i + 1]];
        uint32_t c = packed[src[i + 2]], d = packed[src[i + 3]];
        /* the codes join pair by pair, so that acc is touched once in four symbols */
        uint64_t ab = (uint64_t)(a >> 4) << (b & 15) | b >> 4;
        uint64_t cd = (uint64_t)(c >> 4) << (d & 15) | d >> 4;
        unsigned cd_length = (c & 15) + (d & 15);

        dst = put_bits(dst, &acc, &bits, ab << cd_length | cd, (a & 15) + (b & 15) + cd_length);
    }
    for (; i < n; i++)
        dst = put_bits(dst, &acc, &bits, packed[src[i]] >> 4, packed[src[i]] & 15);
    return dst + (bits > 0);
}

size_t cst_huff_encode(uint8_t *dst, const struct cst_huff_code *c, const uint8_t *src, size_t n) {
    size_t lanes = lanes_of(n), chunk = chunk_of(n);
    uint8_t *lengths = dst + put_table(dst, c->length), *out = lengths + 2 * lanes;
    uint32_t packed[SYMBOLS]; /* code << 4 | length */

    for (int s = 0; s < SYMBOLS; s++)
        packed[s] = (uint32_t)c->code[s] << 4 | c->length[s];
    for (size_t i = 0; i < lanes; i++) {
        size_t part = CST_MIN(chunk, n);
        uint8_t *end = put_stream(out, packed, src, part);

        cst_store16(lengths + 2 * i, (uint16_t)(end - out));
        out = end;
        src += part;
        n -= part;
    }
    return (size_t)(out - dst);
}

/* Takes the last of six symbols away again, to leave room for one in front. */
static void drop_sixth(uint64_t *entry, size_t n, const uint8_t length[SYMBOLS]) {
    for (size_t i = 0; i < n; i++) {
        uint64_t last = entry[i] >> 40 & 255;

        if (entry[i] >> CST_HUFF_NUMBER == CST_HUFF_MULTI)
            entry[i] -= UINT64_C(1) << CST_HUFF_NUMBER | last << 40 |
                        (uint64_t)length[last] << CST_HUFF_TAKES;
    }
}

/* Widths whose table is a part of the one for 11 bits, as a bit mask; w only if a w-bit rest can
 * follow some codes. */
static unsigned needed_widths(const uint8_t length[SYMBOLS], const uint8_t *symbols, unsigned n) {
    unsigned lengths = 0, needed = 1U << CST_HUFF_BITS;

    for (unsigned i = 0; i < n; i++)
        lengths |= 1U << length[symbols[i]];
    for (unsigned w = CST_HUFF_BITS; w > 0; w--) {
        for (unsigned l = 1; l <= w && needed >> w & 1; l++)
            needed |= (lengths >> l & 1) << (w - l);
    }
    return needed;
}

/* The table for w bits is, for each code, a copy of the table for the bits that it leaves. Entries
 * of bits that hold no whole code stay zero. */
static void build_table(struct cst_huff_table *t, const struct cst_codec_ops *ops) {
    uint8_t symbols[SYMBOLS];
    uint16_t code[SYMBOLS];
    unsigned n = 0, needed;

    assign_codes(code, t->length);
    for (unsigned s = 0; s < SYMBOLS; s++) {
        if (t->length[s])
            symbols[n++] = (uint8_t)s;
    }
    needed = needed_widths(t->length, symbols, n);
    memset(t->work, 0, sizeof(t->work));
    for (unsigned w = 1; w <= CST_HUFF_BITS; w++) {
        uint64_t *to = w == CST_HUFF_BITS ? t->entry : t->work + (1 << w);

        if (!(needed >> w & 1))
            continue;
        for (unsigned i = 0; i < n; i++) {
            unsigned s = symbols[i], l = t->length[s];

            if (l <= w)
                ops->huff_prepend(to + ((size_t)code[s] << (w - l)), t->work + (1 << (w - l)),
                                  (size_t)1 << (w - l), s, l);
        }
        if (needed >> (CST_HUFF_BITS - 1) & 1 && w < CST_HUFF_BITS) /* there is a 1-bit code */
            drop_sixth(to, (size_t)1 << w, t->length);
    }
}

void cst_huff_prepend_portable(uint64_t *to, const uint64_t *from, size_t n, unsigned symbol,
                               unsigned length) {
    for (size_t i = 0; i < n; i++)
        to[i] = cst_huff_prepend(from[i], symbol, length);
}

/* 64 bits from bit `used` of a stream on, fewer where a byte is cut; zeros after its end. */
static uint64_t window_at(const struct cst_huff_lane *lane, size_t used) {
    size_t left = (size_t)(lane->in_end - lane->in), at = used / 8;
    uint8_t bytes[8] = { 0 };

    if (at < left)
        memcpy(bytes, lane->in + at, CST_MIN(sizeof(bytes), left - at));
    return __builtin_bswap64(cst_load64(bytes)) << used % 8;
}

/* What the fast loop left over, and the checks of invariant 2. */
static bool finish_lane(struct cst_huff_lane *lane, const struct cst_huff_table *t) {
    size_t left = (size_t)(lane->in_end - lane->in) * 8;
    size_t used = lane->bit;

    /* several symbols at a time while a store fits; `used` may pass the end only below */
    while (lane->out_end - lane->out >= CST_HUFF_STORE && used + CST_HUFF_BITS <= left) {
        uint64_t e = t->entry[window_at(lane, used) >> (64 - CST_HUFF_BITS)];

        memcpy(lane->out, &e, sizeof(e));
        lane->out += e >> CST_HUFF_NUMBER;
        used += e >> CST_HUFF_TAKES & 63;
    }
    while (lane->out < lane->out_end) {
        unsigned symbol = t->entry[window_at(lane, used) >> (64 - CST_HUFF_BITS)] & 255;

        if (used >= left)
            return false;
        *lane->out++ = (uint8_t)symbol;
        used += t->length[symbol];
    }
    if (used > left || (used + 7) / 8 != left / 8)
        return false;
    return window_at(lane, used) >> 56 == 0;
}

void cst_huff_lanes_portable(struct cst_huff_lane lane[CST_HUFF_LANES], const uint64_t *entry) {
    cst_huff_lanes_loop(lane, entry);
}

bool cst_huff_decode(uint8_t *dst, size_t n, const uint8_t *src, size_t len,
                     struct cst_huff_table *table, const struct cst_codec_ops *ops) {
    size_t lanes = lanes_of(n), chunk = n ? chunk_of(n) : 0,
           at = get_table(table->length, src, len);
    const uint8_t *lengths = src + at, *end = src + len;

    if (!at || len - at < 2 * lanes)
        return false;
    build_table(table, ops);
    src = lengths + 2 * lanes;
    for (size_t i = 0; i < lanes; i += CST_HUFF_LANES) {
        struct cst_huff_lane lane[CST_HUFF_LANES];

        for (size_t j = 0; j < CST_HUFF_LANES; j++) {
            size_t bytes = cst_load16(lengths + 2 * (i + j)), part = CST_MIN(chunk, n);

            if (bytes > (size_t)(end - src))
                return false;
            lane[j] = (struct cst_huff_lane){ src, src + bytes, dst, dst + part, 0 };
            src += bytes;
            dst += part;
            n -= part;
        }
        ops->huff_lanes(lane, table->entry);
        for (size_t j = 0; j < CST_HUFF_LANES; j++) {
            if (!finish_lane(&lane[j], table))
                return false;
        }
    }
    return src == end;
}
