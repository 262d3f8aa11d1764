/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams: head, states, words, raw bits.
 *
 * Invariants: 1. between symbols each state lies in 2^16 .. 2^32 - 1, and at most one word of 16
 * bits moves at a symbol; 2. the encoder runs backwards from states that hold 16 raw bits above
 * nothing, so the decoder must end with 1 in the upper half of each; 3. every bit of a stream is
 * checked: words and raw bits end together with the stream, and bits that mean nothing are zero.
 *
 * A state that is written down says some 3.5 bits more than it has to (its size is free), a byte
 * says which lanes there are, and raw bits that are missing leave holes in the states. The number
 * of lanes is the largest that keeps these below 1/256 of the symbols.
 */
#include "codec/rans.h"

#include "codec/dispatch.h"

#include "base/le.h"
#include "base/macros.h"

#include <string.h>

enum {
    SHIFT_MAX = 8,
    TAG_BITS = 3, /* of the first byte that say the lanes */
    STATES_MAX = 1 + (CST_RANS_LANES * 36 + 7) / 8,
    ROW_TOKENS = 1024,
    MARGIN = 64 /* bytes that loops may read ahead */
};
_Static_assert(CST_RANS_TAIL >= 2 * (2 * ROW_TOKENS + MARGIN), "a row fits twice");

/* ---- bits --------------------------------------------------------------------------------------
 */

struct writer {
    uint8_t *p;
    uint64_t bits;
    unsigned n; /* fewer than 8 between calls */
};

static void put(struct writer *w, uint32_t bits, unsigned n) {
    w->bits |= (uint64_t)bits << w->n;
    for (w->n += n; w->n >= 8; w->n -= 8, w->bits >>= 8)
        *w->p++ = (uint8_t)w->bits;
}

static uint8_t *put_end(struct writer *w) {
    if (w->n)
        *w->p++ = (uint8_t)w->bits;
    w->n = 0;
    return w->p;
}

/* Bits of two pieces of memory, one after the other. */
struct reader {
    const uint8_t *p, *end, *next, *next_end;
    uint64_t bits; /* what lies above the lowest n of them is read again */
    unsigned n;
    bool short_of;
};

static void refill(struct reader *r) {
    if (CST_LIKELY(r->end - r->p >= 8)) {
        r->bits |= cst_load64(r->p) << r->n;
        r->p += (63 - r->n) >> 3;
        r->n |= 56;
        return;
    }
    r->bits &= (UINT64_C(1) << r->n) - 1;
    while (r->n <= 48) {
        if (r->p == r->end) {
            if (r->next == r->next_end)
                return;
            r->p = r->next;
            r->end = r->next = r->next_end;
        }
        r->bits |= (uint64_t)*r->p++ << r->n;
        r->n += 8;
    }
}

/* n <= 32 */
static inline uint32_t get(struct reader *r, unsigned n) {
    uint32_t bits;

    if (r->n < n) {
        refill(r);
        if (r->n < n) {
            r->short_of = true;
            return 0;
        }
    }
    bits = (uint32_t)(r->bits & ((UINT64_C(1) << n) - 1));
    r->bits >>= n;
    r->n -= n;
    return bits;
}

/* Whether what is left means nothing: zeros, beyond the lanes' room less than a byte of them. */
static bool get_end(struct reader *r, bool beyond_lanes) {
    size_t left = r->n + 8 * (size_t)(r->end - r->p + (r->next_end - r->next));
    uint32_t ones = 0;

    if (r->short_of || (beyond_lanes && left >= 8))
        return false;
    for (; left > 32; left -= 32)
        ones |= get(r, 32);
    return (ones | get(r, (unsigned)left)) == 0;
}

/* ---- encode ------------------------------------------------------------------------------------
 */

/* What an integer is to its table. */
struct parts {
    int32_t symbol;
    uint32_t beyond, low;
};

static inline struct parts parts_of(int32_t q, int32_t reach, unsigned shift) {
    int32_t up = q + (1 << shift >> 1), symbol = up >> shift;
    int32_t clipped = CST_MAX(-reach, CST_MIN(reach, symbol));

    return (struct parts){ clipped, (uint32_t)(symbol < 0 ? clipped - symbol : symbol - clipped),
                           (uint32_t)(up & ((1 << shift) - 1)) };
}

static inline bool is_outer(int32_t symbol, int32_t reach) {
    return symbol == reach || symbol == -reach;
}

/* Bits of x + 1 below its highest one. */
static unsigned gamma_bits(uint32_t x) {
    return 31 - (unsigned)__builtin_clz(x + 1);
}

static void put_gamma(struct writer *w, uint32_t x) {
    unsigned n = gamma_bits(x);

    put(w, (1u << n) - 1, n);
    put(w, 0, 1);
    put(w, x + 1 - (1u << n), n);
}

/* Bits of a row beside its symbols; SIZE_MAX when an integer is too large. */
static size_t raw_bits_of_row(const int32_t *q, uint32_t tokens, int32_t reach, unsigned shift) {
    size_t bits = (size_t)tokens * shift;

    for (uint32_t t = 0; t < tokens; t++) {
        struct parts p;

        if (q[t] <= -CST_RANS_MAGNITUDE || q[t] >= CST_RANS_MAGNITUDE)
            return SIZE_MAX;
        p = parts_of(q[t], reach, shift);
        bits += is_outer(p.symbol, reach) ? 2 * gamma_bits(p.beyond) + 1 : 0;
    }
    return bits;
}

static void put_raw_row(struct writer *w, const int32_t *q, uint32_t tokens, int32_t reach,
                        unsigned shift) {
    for (uint32_t t = 0; t < tokens; t++) {
        struct parts p = parts_of(q[t], reach, shift);

        if (is_outer(p.symbol, reach))
            put_gamma(w, p.beyond);
    }
    for (uint32_t t = 0; shift && t < tokens; t++)
        put(w, parts_of(q[t], reach, shift).low, shift);
}

/* Raw bits and the cost of the symbols in 1/256 bits. */
struct size {
    size_t raw;
    uint64_t cost;
};

static bool find_size(struct size *size, const struct cst_rans_matrix *m,
                      const struct cst_rans_book *book) {
    *size = (struct size){ .raw = 8 * m->payload_len };
    for (uint32_t c = 0; c < m->channels; c++) {
        const struct cst_rans_table *table = book->table[m->klass[c]];
        size_t bits = raw_bits_of_row(m->q + c * m->stride, m->tokens, table->reach,
                                      book->shift[m->klass[c]]);

        if (bits == SIZE_MAX)
            return false;
        size->raw += bits;
        size->cost += (uint64_t)table->cost * m->tokens;
    }
    return true;
}

bool cst_rans_lanes_pay(uint32_t lanes, size_t holes, uint64_t bits) {
    return 256 * (7 * (uint64_t)lanes / 2 + holes) <= bits;
}

/* log2 of the number of lanes */
static unsigned choose_lanes(const struct size *size, uint32_t tokens) {
    for (unsigned log2 = 5; log2 > 0; log2--) {
        size_t room = (size_t)16 << log2, holes = room > size->raw ? room - size->raw : 0;

        if (1u << log2 <= tokens && cst_rans_lanes_pay(1u << log2, holes, size->cost / 256))
            return log2;
    }
    return 0;
}

static void put_raw(struct writer *w, const struct cst_rans_matrix *m,
                    const struct cst_rans_book *book) {
    memcpy(w->p, m->payload, m->payload_len);
    w->p += m->payload_len;
    for (uint32_t c = 0; c < m->channels; c++)
        put_raw_row(w, m->q + c * m->stride, m->tokens, book->table[m->klass[c]]->reach,
                    book->shift[m->klass[c]]);
}

/* Words of the row in front of `end`; the start of them. */
static uint8_t *put_symbols(uint8_t *end, uint32_t state[CST_RANS_LANES], unsigned lanes,
                            const int32_t *q, uint32_t tokens, const struct cst_rans_table *table,
                            unsigned shift) {
    const struct cst_rans_symbol *zero = table->symbol + table->reach;

    for (uint32_t t = tokens; t-- > 0;) {
        const struct cst_rans_symbol *s = &zero[parts_of(q[t], table->reach, shift).symbol];
        uint32_t x = state[t & (lanes - 1)], full = x >= s->frequency << 20, n;

        cst_store16(end - 2, (uint16_t)x);
        end -= 2 * full;
        x >>= 16 * full;
        n = (uint32_t)((x * (unsigned __int128)s->reciprocal) >> 44);
        state[t & (lanes - 1)] = (n << CST_RANS_BITS) + x - n * s->frequency + s->start;
    }
    return end;
}

/* The head; its length. */
static size_t put_head(uint8_t *dst, uint8_t tag, unsigned log2, const uint32_t *state) {
    struct writer w = { .p = dst };

    put(&w, log2 | (uint32_t)tag << TAG_BITS, 8);
    for (unsigned i = 0; i < 1u << log2; i++) {
        unsigned n = 31 - (unsigned)__builtin_clz(state[i]);

        put(&w, n - 16, 4);
        put(&w, state[i] - (1u << n), n);
    }
    return (size_t)(put_end(&w) - dst);
}

/* In dst: room for the head, free space, words, raw bits that the lanes don't take. The raw bits
 * are written to the front and moved. */
size_t cst_rans_encode(uint8_t *dst, size_t cap, const struct cst_rans_matrix *m,
                       const struct cst_rans_book *book) {
    struct writer w = { .p = dst };
    uint32_t state[CST_RANS_LANES];
    uint8_t *end, *at, in_lanes[2 * CST_RANS_LANES] = { 0 };
    struct size size;
    size_t raw, room, length;
    unsigned log2;

    if (m->channels > CST_RANS_CHANNELS || m->tokens > ROW_TOKENS || !find_size(&size, m, book))
        return 0;
    log2 = choose_lanes(&size, m->tokens);
    room = (size_t)2 << log2;
    raw = (size.raw + 7) / 8;
    if (raw + STATES_MAX > cap)
        return 0;
    put_raw(&w, m, book);
    put_end(&w);
    memcpy(in_lanes, dst, CST_MIN(raw, room));
    end = at = dst + cap - (raw > room ? raw - room : 0);
    memmove(end, dst + room, raw > room ? raw - room : 0);
    for (unsigned i = 0; i < 1u << log2; i++)
        state[i] = 1u << 16 | cst_load16(in_lanes + 2 * (size_t)i);
    for (uint32_t c = m->channels; c-- > 0;) {
        if ((size_t)(at - dst) < STATES_MAX + 2 * (size_t)m->tokens)
            return 0;
        at = put_symbols(at, state, 1u << log2, m->q + c * m->stride, m->tokens,
                         book->table[m->klass[c]], book->shift[m->klass[c]]);
    }
    length = put_head(dst, book->tag, log2, state);
    memmove(dst + length, at, (size_t)(dst + cap - at));
    return length + (size_t)(dst + cap - at);
}

/* ---- decode ------------------------------------------------------------------------------------
 */

uint32_t cst_rans_rows_portable(struct cst_rans_reader *r, const struct cst_rans_rows *rows,
                                uint32_t row) {
    const uint8_t *in = r->in;

    for (; row < rows->channels && in <= r->limit; row++) {
        const uint32_t *slot = rows->book->table[rows->klass[row]]->slot;
        int32_t *q = rows->q + row * rows->stride;
        uint32_t outer = 0;

        for (uint32_t t = 0; t < rows->tokens; t++) {
            uint32_t *state = &r->state[t & (rows->lanes - 1)];
            uint32_t entry = slot[*state & ((1u << CST_RANS_BITS) - 1)], x, take;

            x = (entry & 4095) * (*state >> CST_RANS_BITS) + (entry >> 12 & 4095);
            take = x < 1u << 16;
            *state = x << 16 * take | (cst_load16(in) & -take);
            in += 2 * take;
            q[t] = (int32_t)entry >> 25;
            outer |= entry;
        }
        rows->outer[row] = outer >> 24 & 1;
    }
    r->in = in;
    return row;
}

static const uint8_t *get_head(struct cst_rans_reader *r, unsigned *log2, uint8_t tag,
                               uint32_t tokens, const uint8_t *src, size_t len) {
    struct reader bits = { .p = src, .end = src + len };
    uint32_t first = get(&bits, 8);

    *log2 = first & ((1u << TAG_BITS) - 1);
    if (bits.short_of || *log2 > 5 || (1u << *log2) > tokens || first >> TAG_BITS != tag)
        return NULL;
    for (unsigned i = 0; i < 1u << *log2; i++) {
        unsigned n = get(&bits, 4) + 16;

        r->state[i] = 1u << n | get(&bits, n);
    }
    if (bits.short_of || get(&bits, bits.n % 8) != 0)
        return NULL;
    return bits.p - bits.n / 8;
}

/* All symbols; where the words end, NULL when they are no words of this matrix. The last rows are
 * read from a copy, behind which there is room. */
static const uint8_t *get_rows(struct cst_rans_reader *r, const struct cst_rans_rows *rows,
                               const uint8_t *end, struct cst_rans_scratch *scratch,
                               const struct cst_codec_ops *ops) {
    size_t keep = 2 * (size_t)rows->tokens + MARGIN, left;
    const uint8_t *start;
    uint32_t row = 0;

    if ((size_t)(end - r->in) >= keep) {
        r->limit = end - keep;
        row = ops->rans_rows(r, rows, 0);
    }
    start = r->in;
    left = (size_t)(end - start);
    if (row == rows->channels)
        return start;
    memcpy(scratch->tail, start, left);
    memset(scratch->tail + left, 0, keep);
    r->in = scratch->tail;
    r->limit = scratch->tail + left;
    row = ops->rans_rows(r, rows, row);
    if (row < rows->channels || r->in > r->limit)
        return NULL;
    return start + (r->in - scratch->tail);
}

static uint32_t get_gamma(struct reader *r) {
    unsigned n = 0;

    while (n < 29 && get(r, 1))
        n++;
    return (1u << n) + get(r, n) - 1;
}

/* Completes a row of symbols. */
static bool get_raw_row(struct reader *r, int32_t *q, uint32_t tokens, int32_t reach,
                        unsigned shift, bool outer) {
    int32_t half = 1 << shift >> 1;

    for (uint32_t t = 0; outer && t < tokens; t++) {
        if (is_outer(q[t], reach)) {
            uint32_t beyond = get_gamma(r);

            if (beyond >= (uint32_t)CST_RANS_MAGNITUDE >> shift)
                return false;
            q[t] += q[t] < 0 ? -(int32_t)beyond : (int32_t)beyond;
        }
    }
    for (uint32_t t = 0; shift && t < tokens; t++)
        q[t] = q[t] * (1 << shift) - half + (int32_t)get(r, shift);
    return true;
}

static bool get_payload(struct reader *r, uint8_t *payload, size_t n) {
    size_t first = CST_MIN(n, (size_t)(r->end - r->p));

    memcpy(payload, r->p, first);
    r->p += first;
    if (n - first > (size_t)(r->next_end - r->next))
        return false;
    memcpy(payload + first, r->next, n - first);
    r->next += n - first;
    return true;
}

bool cst_rans_decode(const struct cst_rans_matrix *m, const uint8_t *src, size_t len,
                     const struct cst_rans_book *book, struct cst_rans_scratch *scratch,
                     const struct cst_codec_ops *ops) {
    struct cst_rans_rows rows = { m->q, scratch->outer, m->stride, m->tokens, m->channels,
                                  0,    m->klass,       book };
    const uint8_t *end = src + len;
    struct cst_rans_reader r;
    struct reader raw = { 0 };
    uint8_t in_lanes[2 * CST_RANS_LANES];
    bool beyond_lanes;
    unsigned log2;

    if (m->channels > CST_RANS_CHANNELS || m->tokens > ROW_TOKENS)
        return false;
    r.in = get_head(&r, &log2, book->tag, m->tokens, src, len);
    if (!r.in)
        return false;
    rows.lanes = 1u << log2;
    raw.next = get_rows(&r, &rows, end, scratch, ops);
    raw.next_end = end;
    if (!raw.next)
        return false;
    beyond_lanes = raw.next < end;
    for (unsigned i = 0; i < rows.lanes; i++) {
        if (r.state[i] >> 16 != 1)
            return false;
        cst_store16(in_lanes + 2 * (size_t)i, (uint16_t)r.state[i]);
    }
    raw.p = in_lanes;
    raw.end = in_lanes + 2 * (size_t)rows.lanes;
    if (!get_payload(&raw, m->payload, m->payload_len))
        return false;
    for (uint32_t c = 0; c < m->channels; c++) {
        unsigned shift = book->shift[m->klass[c]];

        if ((shift || scratch->outer[c]) &&
            !get_raw_row(&raw, m->q + c * m->stride, m->tokens, book->table[m->klass[c]]->reach,
                         shift, scratch->outer[c]))
            return false;
    }
    return get_end(&raw, beyond_lanes);
}
