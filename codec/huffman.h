/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Order-0 Huffman coder for bytes, made for fast decoding: codes of at most 11 bits, four streams
 * at a time, several symbols a table look-up. docs/codec-format.md section 5 gives the bytes.
 *
 * Pure functions. The decoder trusts nothing: it reads inside src and writes inside dst.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    CST_HUFF_BITS = 11,    /* longest code */
    CST_HUFF_LANES = 4,    /* streams come in multiples of this */
    CST_HUFF_CHUNK = 4096, /* most symbols of a stream: 4096 x 11 bits fit a u16 length */
};

/* Counts of the n bytes at p. */
void cst_huff_histogram(uint32_t count[256], const uint8_t *p, size_t n);

struct cst_huff_code {
    uint8_t length[256]; /* 0: the symbol has no code */
    uint16_t code[256];  /* the low `length` bits, first bit highest */
};

/* Optimal code of limited length, complete; needs at least two symbols with a count. The sum of
 * the counts fits 31 bits. */
void cst_huff_build(struct cst_huff_code *c, const uint32_t count[256]);

/* Bytes that encode may need for n symbols of these counts: an upper bound, at most 10 + n / 1024
 * bytes off. */
size_t cst_huff_bound(const struct cst_huff_code *c, const uint32_t count[256], size_t n);

/* dst holds at least cst_huff_bound(). Returns the bytes written. */
size_t cst_huff_encode(uint8_t *dst, const struct cst_huff_code *c, const uint8_t *src, size_t n);

/* One stream on its way: next byte and bit, next symbol. */
struct cst_huff_lane {
    const uint8_t *in, *in_end;
    uint8_t *out, *out_end;
    unsigned bit; /* of *in, 0..7 */
};

/*
 * Turns the next 11 bits into symbols: up to CST_HUFF_MULTI of them from the lowest byte on, then
 * in the top two bytes the bits that they take and their number. `work` holds the same for 0 to 10
 * bits while the table is built.
 */
enum { CST_HUFF_MULTI = 6, CST_HUFF_TAKES = 48, CST_HUFF_NUMBER = 56 };
struct cst_huff_table {
    uint64_t entry[1 << CST_HUFF_BITS];
    uint64_t work[1 << CST_HUFF_BITS];
    uint8_t length[256];
};

struct cst_codec_ops;

/* false: src is not n symbols of this coder, and dst holds garbage. */
bool cst_huff_decode(uint8_t *dst, size_t n, const uint8_t *src, size_t len,
                     struct cst_huff_table *table, const struct cst_codec_ops *ops);
