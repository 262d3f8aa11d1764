/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The byte coder: codes are optimal (against a dynamic program over all codes), streams read back
 * by a slow decoder written from docs/codec-format.md, and arbitrary bytes never leave the buffers.
 */
#include "tests/lib/check.h"

#include "codec/dispatch.h"

#include "base/le.h"
#include "base/random.h"

#include <stdlib.h>
#include <string.h>

/* ---- codes ------------------------------------------------------------------------------------
 */

static int descending(const void *a, const void *b) {
    const uint32_t *x = a, *y = b;

    return *x < *y ? 1 : *x > *y ? -1 : 0;
}

/*
 * Least total length of any prefix code with codes of at most `levels` bits: going down the code
 * tree, at each level some of the free nodes become the next most frequent symbols.
 */
static uint64_t least(const uint32_t *count, unsigned n, unsigned placed, unsigned free_nodes,
                      unsigned level, unsigned levels, uint64_t *memo) {
    uint64_t best = UINT64_MAX / 2, cost = 0;
    unsigned nodes = CST_MIN(free_nodes, n);
    uint64_t *seen = &memo[(level * (n + 1) + placed) * (n + 1) + nodes];

    if (placed == n)
        return 0;
    if (level > levels || free_nodes == 0)
        return best;
    if (*seen)
        return *seen - 1;
    for (unsigned leaves = 0; leaves <= CST_MIN(nodes, n - placed); leaves++) {
        uint64_t rest =
            least(count, n, placed + leaves, 2 * (nodes - leaves), level + 1, levels, memo);

        best = CST_MIN(best, cost + rest);
        if (placed + leaves < n)
            cost += (uint64_t)count[placed + leaves] * level;
    }
    *seen = best + 1;
    return best;
}

static void check_code(const uint32_t count[256]) {
    struct cst_huff_code c;
    uint32_t sorted[256];
    unsigned n = 0;
    uint64_t cost = 0, space = 0, *memo;

    for (int s = 0; s < 256; s++) {
        if (count[s])
            sorted[n++] = count[s];
    }
    qsort(sorted, n, sizeof(*sorted), descending);
    cst_huff_build(&c, count);
    for (int s = 0; s < 256; s++) {
        assert_int_equal(c.length[s] > 0, count[s] > 0);
        assert_true(c.length[s] <= CST_HUFF_BITS);
        cost += (uint64_t)count[s] * c.length[s];
        space += c.length[s] ? 1U << (CST_HUFF_BITS - c.length[s]) : 0;
        for (int t = 0; t < s; t++) { /* no code begins another one */
            unsigned l = CST_MIN(c.length[s], c.length[t]);

            if (l)
                assert_true(c.code[s] >> (c.length[s] - l) != c.code[t] >> (c.length[t] - l));
        }
    }
    assert_int_equal(space, 1 << CST_HUFF_BITS);
    memo = calloc((CST_HUFF_BITS + 2) * (n + 1) * (n + 1), sizeof(*memo));
    assert_int_equal(cost, least(sorted, n, 0, 2, 1, CST_HUFF_BITS, memo));
    free(memo);
}

static void codes_are_optimal(void **state) {
    uint32_t count[256] = { 0 };
    struct cst_seeded_random r;

    count[7] = 1, count[200] = 1000000; /* two symbols: one bit each */
    check_code(count);
    memset(count, 0, sizeof(count));
    for (uint32_t i = 0, a = 1, b = 1; i < 30; i++) { /* Fibonacci: deepest without the limit */
        uint32_t next = a + b;

        count[i * 5] = a;
        a = b;
        b = next;
        if (i > 0)
            check_code(count);
    }
    cst_seeded_random_init(&r, 5);
    for (int round = 0; round < 60; round++) {
        unsigned n = 2 + (unsigned)(cst_seeded_random_next(&r) % 40);

        memset(count, 0, sizeof(count));
        for (unsigned i = 0; i < n; i++)
            count[cst_seeded_random_next(&r) % 256] =
                1 + (uint32_t)(cst_seeded_random_next(&r) >> (40 + i % 24));
        count[0]++, count[255]++;
        check_code(count);
    }
    for (int s = 0; s < 256; s++)
        count[s] = 1;
    check_code(count);
}

/* ---- streams ----------------------------------------------------------------------------------
 */

/* docs/codec-format.md section 5, bit by bit. false where the text says so. */
static bool slow_table(uint8_t length[256], const uint8_t *src, size_t len, size_t *at) {
    unsigned filled = 0, s = 0;
    size_t nibble = 0;

    memset(length, 0, 256);
    while (filled < 2048) {
        unsigned v;

        if (nibble / 2 >= len || s > 255)
            return false;
        v = nibble % 2 ? src[nibble / 2] >> 4 : src[nibble / 2] & 15;
        nibble++;
        if (v == 0) {
            if (nibble / 2 >= len)
                return false;
            s += 1U + (nibble % 2 ? src[nibble / 2] >> 4 : src[nibble / 2] & 15);
            nibble++;
        } else if (v <= 11) {
            filled += 2048 >> v;
            length[s++] = (uint8_t)v;
        } else {
            return false;
        }
    }
    *at = (nibble + 1) / 2;
    return filled == 2048;
}

static int slow_symbol(const uint8_t length[256], const uint8_t *src, size_t bits, size_t *at) {
    unsigned code = 0, first = 0;

    for (unsigned l = 1; l <= 11; l++) {
        unsigned n = 0;

        if (*at >= bits)
            return -1;
        code = code << 1 | (src[*at / 8] >> (7 - *at % 8) & 1);
        ++*at;
        for (int s = 0; s < 256; s++) {
            if (length[s] == l && code == first + n++)
                return s;
        }
        first = (first + n) << 1;
    }
    return -1;
}

static void slow_decode(uint8_t *dst, size_t n, const uint8_t *src, size_t len) {
    size_t streams = 4 * ((n + 16383) / 16384), chunk = (n + streams - 1) / streams, at = 0;
    uint8_t length[256];
    const uint8_t *lengths, *p;

    assert_true(slow_table(length, src, len, &at));
    lengths = src + at;
    p = lengths + 2 * streams;
    for (size_t i = 0; i < streams; i++) {
        size_t part = CST_MIN(chunk, n), bytes = cst_load16(lengths + 2 * i), bit = 0;

        assert_true(bytes <= (size_t)(src + len - p));
        for (size_t k = 0; k < part; k++) {
            int s = slow_symbol(length, p, bytes * 8, &bit);

            assert_true(s >= 0);
            *dst++ = (uint8_t)s;
        }
        assert_int_equal((bit + 7) / 8, bytes);
        p += bytes;
        n -= part;
    }
    assert_ptr_equal(p, src + len);
}

static const struct row {
    const char *name;
    size_t n;
    int kind;
} rows[] = {
    { "2 symbols", 2, 0 },
    { "3", 3, 0 },
    { "5", 5, 1 },
    { "a few", 63, 1 },
    { "one bit codes", 5000, 0 },
    { "short codes", 12288, 1 },
    { "one stream less", 16384, 1 },
    { "one stream more", 16385, 1 },
    { "all symbols", 40000, 2 },
    { "limited codes", 100000, 3 },
    { "uneven streams", 12288, 4 },
    { "every chunk size", 4 * 257, 1 },
};

static void make(uint8_t *p, const struct row *row) {
    struct cst_seeded_random r;

    cst_seeded_random_init(&r, row->n);
    for (size_t i = 0; i < row->n; i++) {
        uint64_t v = cst_seeded_random_next(&r);
        unsigned geometric = (unsigned)__builtin_ctzll(v | UINT64_C(1) << 40);

        switch (row->kind) {
        case 0: /* half of the bits are one symbol */
            p[i] = geometric < 5 ? 100 : (uint8_t)(100 + geometric % 3);
            break;
        case 1: /* exponents of a normal variable, about */
            p[i] = (uint8_t)(120 - geometric + (v >> 60 & 3));
            break;
        case 2:
            p[i] = (uint8_t)(v >> 32);
            break;
        case 3: /* probabilities down to 2^-17 */
            p[i] = (uint8_t)(geometric * 13);
            break;
        default: /* the first quarter takes one bit a symbol, the rest eight */
            p[i] = i < row->n / 4 ? 9 : (uint8_t)(v >> 32);
        }
    }
    p[0] = 100; /* two symbols at least */
    p[row->n - 1] = 101;
}

static void streams_read_back(void **state) {
    const struct row *row = *state;
    const struct cst_codec_ops *sets[] = { cst_codec_ops_portable(), cst_codec_ops_avx2() };
    uint8_t *src = malloc(row->n), *slow = malloc(row->n), *dst = malloc(row->n), *enc, *exact;
    struct cst_huff_table *table = malloc(sizeof(*table));
    struct cst_huff_code c;
    uint32_t count[256], naive[256] = { 0 };
    size_t bound, len;

    make(src, row);
    for (size_t i = 0; i < row->n; i++)
        naive[src[i]]++;
    cst_huff_histogram(count, src, row->n);
    assert_memory_equal(count, naive, sizeof(count));
    cst_huff_build(&c, count);
    bound = cst_huff_bound(&c, count, row->n);
    enc = malloc(bound);
    len = cst_huff_encode(enc, &c, src, row->n);
    assert_true(len <= bound);
    exact = malloc(len); /* of its own, for the sanitizer */
    memcpy(exact, enc, len);
    slow_decode(slow, row->n, exact, len);
    assert_memory_equal(slow, src, row->n);
    for (size_t k = 0; k < CST_COUNT(sets) && sets[k]; k++) {
        memset(dst, 7, row->n);
        assert_true(cst_huff_decode(dst, row->n, exact, len, table, sets[k]));
        assert_memory_equal(dst, src, row->n);
        /* another number of symbols, or a byte less or more, is not this stream */
        assert_false(cst_huff_decode(dst, row->n - 1, exact, len, table, sets[k]));
        assert_false(cst_huff_decode(dst, row->n, exact, len - 1, table, sets[k]));
        assert_false(cst_huff_decode(dst, row->n, enc, len + 1, table, sets[k]));
    }
    free(src);
    free(slow);
    free(dst);
    free(enc);
    free(exact);
    free(table);
}

static void damage_is_refused_or_stays_inside(void **state) {
    const struct cst_codec_ops *sets[] = { cst_codec_ops_portable(), cst_codec_ops_avx2() };
    const struct row row = { "", 700, 1 };
    uint8_t src[700], enc[900], *exact, *dst[2] = { malloc(700), malloc(700) };
    struct cst_huff_table *table = malloc(sizeof(*table));
    struct cst_huff_code c;
    uint32_t count[256];
    size_t len;

    make(src, &row);
    cst_huff_histogram(count, src, row.n);
    cst_huff_build(&c, count);
    assert_true(cst_huff_bound(&c, count, row.n) <= sizeof(enc));
    len = cst_huff_encode(enc, &c, src, row.n);
    exact = malloc(len);
    memcpy(exact, enc, len);
    for (size_t n = 0; n < len; n++)
        assert_false(cst_huff_decode(dst[0], row.n, enc, n, table, sets[0]));
    for (size_t bit = 0; bit < len * 8; bit++) {
        bool ok[2] = { false, false };

        exact[bit / 8] ^= (uint8_t)(1 << bit % 8);
        for (size_t k = 0; k < CST_COUNT(sets) && sets[k]; k++)
            ok[k] = cst_huff_decode(dst[k], row.n, exact, len, table, sets[k]);
        if (ok[0]) /* another message */
            assert_memory_not_equal(dst[0], src, row.n);
        if (sets[1]) {
            assert_int_equal(ok[0], ok[1]);
            if (ok[0])
                assert_memory_equal(dst[0], dst[1], row.n);
        }
        exact[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    free(exact);
    free(dst[0]);
    free(dst[1]);
    free(table);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(codes_are_optimal),
        cmocka_unit_test(damage_is_refused_or_stays_inside),
    };

    return cst_run_rows(rows, streams_read_back) + cmocka_run_group_tests(tests, NULL, NULL);
}
