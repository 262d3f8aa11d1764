/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams: head, states, words, raw bits.
 *
 * Invariants: 1. between symbols each state lies in 2^16 .. 2^32 - 1, and at most one word of 16
 * bits moves at a symbol; 2. the encoder runs backwards from states that raw bits make in the same
 * way as the head's bits make the decoder's, so what the head spends on a state the raw bits get
 * back; 3. every bit of a stream is checked: words and raw bits end together with the stream, and
 * bits that mean nothing are zero.
 *
 * So lanes cost about nothing where there are raw bits for them. The number of lanes is the largest
 * that keeps empty room below 1/256 of the symbols.
 */
#include "codec/rans.h"

#include "codec/dispatch.h"

#include "base/le.h"
#include "base/macros.h"

#include <string.h>

enum {
    TAG_BITS = 3,                                         /* of the first byte that say the lanes */
    LANE_MAX = 35,                                        /* bits of a state */
    HEAD_MAX = 1 + CST_RANS_LANES * LANE_MAX / 8 + 1 + 8, /* and what put() writes behind */
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

/* n <= 56; writes up to 8 bytes, of which those that aren't full come again. */
static inline void put(struct writer *w, uint64_t bits, unsigned n) {
    w->bits |= bits << w->n;
    w->n += n;
    cst_store64(w->p, w->bits);
    w->p += w->n / 8;
    w->bits >>= w->n & ~7u;
    w->n %= 8;
}

static uint8_t *put_end(struct writer *w) {
    if (w->n)
        *w->p++ = (uint8_t)w->bits;
    w->n = 0;
    return w->p;
}

/* Bits of two pieces of memory, one after the other. */
struct reader {
    const uint8_t *start, *p, *end, *next, *next_end;
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
            r->start = r->p = r->next;
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

/* A state: 4 bits for its size, then those below its highest one. */
static void put_state(struct writer *w, uint32_t state) {
    unsigned n = 31 - (unsigned)__builtin_clz(state);

    put(w, n - 16, 4);
    put(w, state - (1u << n), n);
}

static uint32_t get_state(struct reader *r) {
    unsigned n = 16 + get(r, 4);

    return 1u << n | get(r, n);
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

/* A row of integers and what they mean. */
struct row {
    const int32_t *q;
    const struct cst_rans_table *table;
    unsigned shift;
    int32_t least, most;
};

static struct row row_of(const struct cst_rans_matrix *m, const struct cst_rans_book *book,
                         uint32_t c, const struct cst_codec_ops *ops) {
    struct row row = { m->q + c * m->stride, book->table[m->klass[c]], book->shift[m->klass[c]], 0,
                       0 };

    ops->int_range(&row.least, &row.most, row.q, m->tokens);
    return row;
}

static bool holds_outer(const struct row *row) {
    int32_t reach = row->table->reach;

    return is_outer(parts_of(row->least, reach, row->shift).symbol, reach) ||
           is_outer(parts_of(row->most, reach, row->shift).symbol, reach);
}

/* Bits of a row beside its symbols. */
static size_t raw_bits_of_row(const struct row *row, uint32_t tokens) {
    size_t bits = (size_t)tokens * row->shift;
    int32_t reach = row->table->reach;

    for (uint32_t t = 0; t < tokens && holds_outer(row); t++) {
        struct parts p = parts_of(row->q[t], reach, row->shift);

        bits += is_outer(p.symbol, reach) ? 2 * gamma_bits(p.beyond) + 1 : 0;
    }
    return bits;
}

static void put_raw_row(struct writer *w, const struct row *row, uint32_t tokens) {
    const int32_t half = 1 << row->shift >> 1, mask = (1 << row->shift) - 1;
    int32_t reach = row->table->reach;
    uint32_t t = 0;

    for (t = 0; t < tokens && holds_outer(row); t++) {
        struct parts p = parts_of(row->q[t], reach, row->shift);

        if (is_outer(p.symbol, reach))
            put_gamma(w, p.beyond);
    }
    if (!row->shift)
        return;
    for (t = 0; t + 8 <= tokens; t += 8) {
        uint64_t bits = 0;

        for (unsigned i = 0; i < 8; i++)
            bits |= (uint64_t)((row->q[t + i] + half) & mask) << i * row->shift;
        put(w, bits, 8 * row->shift);
    }
    for (; t < tokens; t++)
        put(w, (uint32_t)((row->q[t] + half) & mask), row->shift);
}

/* Raw bits and the cost of the symbols in 1/256 bits. */
struct size {
    size_t raw;
    uint64_t cost;
};

/* false: an integer is too large. */
static bool find_size(struct size *size, const struct cst_rans_matrix *m,
                      const struct cst_rans_book *book, const struct cst_codec_ops *ops) {
    *size = (struct size){ .raw = 8 * m->payload_len };
    for (uint32_t c = 0; c < m->channels; c++) {
        struct row row = row_of(m, book, c, ops);

        if (row.least <= -CST_RANS_MAGNITUDE || row.most >= CST_RANS_MAGNITUDE)
            return false;
        size->raw += raw_bits_of_row(&row, m->tokens);
        size->cost += (uint64_t)row.table->cost * m->tokens;
    }
    return true;
}

bool cst_rans_lanes_pay(uint32_t lanes, size_t holes, uint64_t bits) {
    return 256 * (2 * (uint64_t)lanes + holes) <= bits;
}

/* log2 of the number of lanes */
static unsigned choose_lanes(const struct size *size, uint32_t tokens) {
    for (unsigned log2 = 5; log2 > 0; log2--) {
        size_t room = (size_t)CST_RANS_LANE_ROOM << log2,
               holes = room > size->raw ? room - size->raw : 0;

        if (1u << log2 <= tokens && cst_rans_lanes_pay(1u << log2, holes, size->cost / 256))
            return log2;
    }
    return 0;
}

static void put_raw(struct writer *w, const struct cst_rans_matrix *m,
                    const struct cst_rans_book *book, const struct cst_codec_ops *ops) {
    if (m->payload_len)
        memcpy(w->p, m->payload, m->payload_len);
    w->p += m->payload_len;
    for (uint32_t c = 0; c < m->channels; c++) {
        struct row row = row_of(m, book, c, ops);

        if (row.shift || holds_outer(&row))
            put_raw_row(w, &row, m->tokens);
    }
}

uint8_t *cst_rans_put_portable(uint8_t *end, uint32_t state[CST_RANS_LANES], unsigned lanes,
                               const int32_t *q, uint32_t tokens,
                               const struct cst_rans_table *table, unsigned shift) {
    for (uint32_t t = tokens; t-- > 0;) {
        int32_t symbol = parts_of(q[t], table->reach, shift).symbol + table->reach;
        uint32_t f = table->code[symbol] & 4095, start = table->code[symbol] >> 12;
        uint32_t x = state[t & (lanes - 1)], full = x >= f << 20, n;

        cst_store16(end - 2, (uint16_t)x);
        end -= 2 * full;
        x >>= 16 * full;
        /* exact: x < 2^20 f, and the reciprocal is less than 1 too large */
        n = (uint32_t)((x * (unsigned __int128)table->reciprocal[symbol]) >> 44);
        state[t & (lanes - 1)] = (n << CST_RANS_BITS) + x - n * f + start;
    }
    return end;
}

/* The head; its length. */
static size_t put_head(uint8_t *dst, uint8_t tag, unsigned log2, const uint32_t *state) {
    struct writer w = { .p = dst };

    put(&w, log2 | (uint32_t)tag << TAG_BITS, 8);
    for (unsigned i = 0; i < 1u << log2; i++)
        put_state(&w, state[i]);
    return (size_t)(put_end(&w) - dst);
}

/* The states that n raw bytes make, zeros behind them; the number of bytes that went into them. The
 * highest bits of the last state that would begin another byte stay zero. */
static size_t fill_lanes(uint32_t state[CST_RANS_LANES], unsigned lanes, const uint8_t *raw,
                         size_t n) {
    uint8_t bytes[HEAD_MAX] = { 0 };
    struct reader r = { .start = bytes, .p = bytes, .end = bytes + sizeof(bytes) };
    unsigned bits = 0, size = 0;

    memcpy(bytes, raw, CST_MIN(n, sizeof(bytes)));
    for (unsigned i = 0; i < lanes; i++) {
        state[i] = get_state(&r);
        size = 31 - (unsigned)__builtin_clz(state[i]);
        bits += 4 + size;
    }
    state[lanes - 1] &= 1u << size | ((1u << (size - bits % 8)) - 1);
    return CST_MIN(n, bits / 8);
}

/* In dst: room for the head, free space, words, raw bits that the lanes don't take. The raw bits
 * are written to the front and moved. */
size_t cst_rans_encode(uint8_t *dst, size_t cap, const struct cst_rans_matrix *m,
                       const struct cst_rans_book *book, const struct cst_codec_ops *ops) {
    struct writer w = { .p = dst };
    uint32_t state[CST_RANS_LANES];
    size_t raw, in_lanes, length;
    struct size size;
    uint8_t *at;
    unsigned log2;

    if (m->channels > CST_RANS_CHANNELS || m->tokens > ROW_TOKENS ||
        !find_size(&size, m, book, ops))
        return 0;
    log2 = choose_lanes(&size, m->tokens);
    raw = (size.raw + 7) / 8;
    if (raw + HEAD_MAX > cap)
        return 0;
    put_raw(&w, m, book, ops);
    put_end(&w);
    in_lanes = fill_lanes(state, 1u << log2, dst, raw);
    at = dst + cap - (raw - in_lanes);
    memmove(at, dst + in_lanes, raw - in_lanes);
    for (uint32_t c = m->channels; c-- > 0;) {
        if ((size_t)(at - dst) < HEAD_MAX + 2 * (size_t)m->tokens)
            return 0;
        at = ops->rans_put(at, state, 1u << log2, m->q + c * m->stride, m->tokens,
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
    struct reader bits = { .start = src, .p = src, .end = src + len };
    uint32_t first = get(&bits, 8);

    *log2 = first & ((1u << TAG_BITS) - 1);
    if (bits.short_of || *log2 > 5 || (1u << *log2) > tokens || first >> TAG_BITS != tag)
        return NULL;
    for (unsigned i = 0; i < 1u << *log2; i++)
        r->state[i] = get_state(&bits);
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

static inline void get_low(struct reader *r, int32_t *q, unsigned shift) {
    *q = *q * (1 << shift) - (1 << shift >> 1) + (int32_t)get(r, shift);
}

/* Symbols and the raw bits below them: eight at a time where these are in one piece and eight bytes
 * behind them can be read. */
static void get_low_row(struct reader *r, int32_t *q, uint32_t tokens, unsigned shift,
                        const struct cst_codec_ops *ops) {
    uint32_t t = 0, n = 0;
    size_t ahead;

    for (; t < tokens && r->n > 8 * (size_t)(r->p - r->start); t++)
        get_low(r, &q[t], shift);
    ahead = 8 * (size_t)(r->end - r->p);
    if (ahead > 64)
        n = (uint32_t)CST_MIN(tokens - t, (ahead - 64) / shift) & ~7u;
    if (n) {
        unsigned bit = -r->n % 8, end = bit + n * shift;

        r->p -= (r->n + 7) / 8;
        ops->low_bits(q + t, r->p, bit, n, shift);
        r->p += end / 8;
        r->bits = r->n = 0;
        (void)get(r, end % 8);
    }
    for (t += n; t < tokens; t++)
        get_low(r, &q[t], shift);
}

/* Completes a row of symbols. */
static bool get_raw_row(struct reader *r, int32_t *q, uint32_t tokens, int32_t reach,
                        unsigned shift, bool outer, const struct cst_codec_ops *ops) {
    for (uint32_t t = 0; outer && t < tokens; t++) {
        if (is_outer(q[t], reach)) {
            uint32_t beyond = get_gamma(r);

            if (beyond >= (uint32_t)CST_RANS_MAGNITUDE >> shift)
                return false;
            q[t] += q[t] < 0 ? -(int32_t)beyond : (int32_t)beyond;
        }
    }
    if (shift)
        get_low_row(r, q, tokens, shift, ops);
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

/* The raw bytes that went into the states, to dst; their end, NULL when no encoder left such. */
static uint8_t *drain_lanes(uint8_t *dst, const uint32_t *state, unsigned lanes) {
    struct writer w = { .p = dst };

    for (unsigned i = 0; i < lanes; i++)
        put_state(&w, state[i]);
    return w.bits ? NULL : w.p;
}

static bool get_raw(struct reader *r, const struct cst_rans_matrix *m,
                    const struct cst_rans_book *book, const uint8_t *outer,
                    const struct cst_codec_ops *ops) {
    if (m->payload_len && !get_payload(r, m->payload, m->payload_len))
        return false;
    for (uint32_t c = 0; c < m->channels; c++) {
        unsigned shift = book->shift[m->klass[c]];

        if ((shift || outer[c]) &&
            !get_raw_row(r, m->q + c * m->stride, m->tokens, book->table[m->klass[c]]->reach, shift,
                         outer[c], ops))
            return false;
    }
    return true;
}

bool cst_rans_decode(const struct cst_rans_matrix *m, const uint8_t *src, size_t len,
                     const struct cst_rans_book *book, struct cst_rans_scratch *scratch,
                     const struct cst_codec_ops *ops) {
    struct cst_rans_rows rows = { m->q, scratch->outer, m->stride, m->tokens, m->channels,
                                  0,    m->klass,       book };
    struct reader raw = { .next_end = src + len };
    uint8_t in_lanes[HEAD_MAX];
    struct cst_rans_reader r;
    bool beyond_lanes;
    unsigned log2;

    if (m->channels > CST_RANS_CHANNELS || m->tokens > ROW_TOKENS)
        return false;
    r.in = get_head(&r, &log2, book->tag, m->tokens, src, len);
    if (!r.in)
        return false;
    rows.lanes = 1u << log2;
    raw.next = get_rows(&r, &rows, src + len, scratch, ops);
    raw.start = raw.p = in_lanes;
    raw.end = drain_lanes(in_lanes, r.state, rows.lanes);
    if (!raw.next || !raw.end)
        return false;
    beyond_lanes = raw.next < raw.next_end;
    return get_raw(&raw, m, book, scratch->outer, ops) && get_end(&raw, beyond_lanes);
}
