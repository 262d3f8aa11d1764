/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Range asymmetric numeral systems (Duda 2013, arXiv 1311.2540) with static tables: a matrix of
 * integers, each channel with a table of its own, to little more bytes than its entropy under these
 * tables. docs/codec-format.md section 11 gives the bytes.
 *
 * The coder runs in up to 32 lanes, token t in lane t % lanes, so that all lanes use one table at a
 * time. Lanes cost next to nothing: their first states carry raw bits that have to be stored
 * anyway, and streams that are too short for many lanes get fewer.
 *
 * Pure functions without heap; any thread, one workspace a call. The decoder trusts nothing: it
 * reads inside src and writes inside its outputs.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cst_codec_ops;

enum {
    CST_RANS_BITS = 12,           /* probabilities are multiples of 2^-12 */
    CST_RANS_LANES = 32,          /* most lanes */
    CST_RANS_REACH = 63,          /* a table has the symbols -reach .. reach */
    CST_RANS_CHANNELS = 16384,    /* most channels of a matrix */
    CST_RANS_ROW = 16,            /* rows of a matrix are padded to a multiple of this */
    CST_RANS_MAGNITUDE = 1 << 28, /* integers are below this */
};

/*
 * A table: symbol s takes frequency[s + reach] of 4096 slots, in rising order. The outer symbols
 * stand for all integers from there on; how far an integer lies beyond follows in the raw bits.
 */
struct cst_rans_table {
    /* frequency | slot - start << 12 | outer << 24 | symbol << 25, of each slot */
    uint32_t slot[1 << CST_RANS_BITS];
    uint32_t code[2 * CST_RANS_REACH + 1];       /* frequency | start << 12, of each symbol */
    uint64_t reciprocal[2 * CST_RANS_REACH + 1]; /* 2^44 / frequency, rounded up */
    int32_t reach;
    uint32_t cost; /* 256 x entropy in bits, about */
};

/* false: not 2 * reach + 1 frequencies of at least 1 that add up to 4096, or no such reach. */
bool cst_rans_table_init(struct cst_rans_table *table, const uint16_t *frequency, int reach);

/* What stands for each class of channels. The lowest `shift` bits of an integer are kept raw, the
 * others go by the table: integer = (symbol << shift) - (1 << shift >> 1) + raw bits. */
enum { CST_RANS_BOOK = 96 };
struct cst_rans_book {
    const struct cst_rans_table *table[CST_RANS_BOOK];
    uint8_t shift[CST_RANS_BOOK]; /* at most 6 */
    uint8_t tag;                  /* below 32, stands in the stream: src[0] >> 3 */
};

/* Integers by channel. Raw bytes may come along; they cost nothing where lanes have room. */
struct cst_rans_matrix {
    int32_t *q;    /* [channel][stride]; decoding overwrites rows up to a multiple of 16 */
    size_t stride; /* at least tokens, rounded up to CST_RANS_ROW */
    uint32_t tokens, channels;
    const uint8_t *klass; /* of each channel, below CST_RANS_BOOK, in the book */
    uint8_t *payload;
    size_t payload_len;
};

/* What decoding writes beside its result, whatever the input. */
enum { CST_RANS_TAIL = 2 * (1024 * 2 + 64) };
struct cst_rans_scratch {
    uint8_t tail[CST_RANS_TAIL]; /* the end of a stream and zeros behind it */
    uint8_t outer[CST_RANS_CHANNELS];
};

/* Bytes written to dst, or 0 when they would exceed cap or an integer is too large. All of dst[0 ..
 * cap - 1] may be overwritten. At most 1024 tokens. */
size_t cst_rans_encode(uint8_t *dst, size_t cap, const struct cst_rans_matrix *m,
                       const struct cst_rans_book *book, const struct cst_codec_ops *ops);

/* src is exactly one stream of a matrix of this shape. false: it is not, and q and payload hold
 * garbage. */
bool cst_rans_decode(const struct cst_rans_matrix *m, const uint8_t *src, size_t len,
                     const struct cst_rans_book *book, struct cst_rans_scratch *scratch,
                     const struct cst_codec_ops *ops);

/* Raw bits that a lane takes, about. */
enum { CST_RANS_LANE_ROOM = 27 };

/* Whether so many lanes, with so many bits of their room unused, cost at most 1/256 of `bits`. */
bool cst_rans_lanes_pay(uint32_t lanes, size_t holes, uint64_t bits);

/* ---- coefficients ------------------------------------------------------------------------------
 *
 * Coefficients of a transform over a step: about logistic with a deviation that their channel is
 * known by. Measured on a real cache against Gaussian, Laplacian and learned tables: within .2 % of
 * the best of them.
 */

/* Classes are quarter octaves of deviation over step, 2^-6 .. 2^5. */
enum { CST_RANS_CLASSES = 45 };
uint8_t cst_rans_class(double deviation_over_step);

/* The tables made so far, in memory of cst_rans_work_size() bytes, alignment 64: init once, then
 * encode or decode any number of matrices, one thread at a time. */
struct cst_rans_work;
size_t cst_rans_work_size(void);
struct cst_rans_work *cst_rans_work_init(void *memory);

/* As cst_rans_encode() and cst_rans_decode(); klass is cst_rans_class() of each channel. */
size_t cst_rans_encode_coefficients(uint8_t *dst, size_t cap, const struct cst_rans_matrix *m,
                                    struct cst_rans_work *work, const struct cst_codec_ops *ops);
bool cst_rans_decode_coefficients(const struct cst_rans_matrix *m, const uint8_t *src, size_t len,
                                  struct cst_rans_work *work, const struct cst_codec_ops *ops);

/* Frequencies of the table of a class below CST_RANS_TABLES, for tests and readers: returns the
 * reach. */
enum { CST_RANS_TABLES = 35 };
int cst_rans_frequencies(uint16_t frequency[2 * CST_RANS_REACH + 1], unsigned klass);

/* ---- for the loops of an instruction set -------------------------------------------------------
 */

struct cst_rans_reader {
    uint32_t state[CST_RANS_LANES];
    const uint8_t *in, *limit; /* a row is begun while in <= limit */
};
struct cst_rans_rows {
    int32_t *q;
    uint8_t *outer; /* of each row: whether it holds an outer symbol */
    size_t stride;
    uint32_t tokens, channels;
    unsigned lanes;
    const uint8_t *klass;
    const struct cst_rans_book *book;
};
/* Symbols of the rows from `row` on, until there are no more or the reader's limit is passed: the
 * row that comes next. 64 bytes behind what a row consumes can be read. */
uint32_t cst_rans_rows_portable(struct cst_rans_reader *r, const struct cst_rans_rows *rows,
                                uint32_t row);

/* Words of one row, the last token first, written downwards from `end`: their start. 2 * tokens
 * bytes below `end` may be overwritten. */
uint8_t *cst_rans_put_portable(uint8_t *end, uint32_t state[CST_RANS_LANES], unsigned lanes,
                               const int32_t *q, uint32_t tokens,
                               const struct cst_rans_table *table, unsigned shift);
