/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The decoder's inner loop, compiled once for every machine and once for those with BMI2 (which
 * shift by a variable without moving it into one fixed register first).
 *
 * A round reads 8 bytes of each lane and looks 5 entries up: 63 bits, less up to 7 already used,
 * are enough for 5 x 11. The lowest bit of `bits` is a marker, so that the number of trailing zeros
 * tells how many bits a lane has used and no lane needs a counter.
 */
#pragma once

#include "codec/huffman.h"

#include "base/le.h"
#include "base/macros.h"

enum {
    CST_HUFF_LOOKUPS = 5,
    CST_HUFF_ROUND_IN = 7,   /* most bytes that a round moves on */
    CST_HUFF_ROUND_OUT = 30, /* most symbols that a round yields */
    CST_HUFF_STORE = 8,      /* bytes of a load or store */
};

/* The entry of a code followed by what another entry holds, of which a sixth symbol is lost. */
static inline uint64_t cst_huff_prepend(uint64_t rest, unsigned symbol, unsigned length) {
    uint64_t head = UINT64_C(1) << CST_HUFF_NUMBER | (uint64_t)length << CST_HUFF_TAKES | symbol;

    return (rest & UINT64_C(0xffff000000000000)) + ((rest & UINT64_C(0xffffffffff)) << 8) + head;
}

/* Rounds that surely fit into what the lanes have left. */
static inline size_t cst_huff_rounds(const struct cst_huff_lane lane[CST_HUFF_LANES]) {
    size_t rounds = SIZE_MAX;

    for (int i = 0; i < CST_HUFF_LANES; i++) {
        size_t in = (size_t)(lane[i].in_end - lane[i].in);
        size_t out = (size_t)(lane[i].out_end - lane[i].out);

        in = in < CST_HUFF_STORE ? 0 : (in - CST_HUFF_STORE) / CST_HUFF_ROUND_IN + 1;
        out = out < CST_HUFF_ROUND_OUT + 2 ? 0 : (out - 2) / CST_HUFF_ROUND_OUT;
        rounds = CST_MIN(rounds, CST_MIN(in, out));
    }
    return rounds;
}

#define CST_HUFF_LOOKUP(i)                                                                         \
    do {                                                                                           \
        uint64_t e = entry[bits##i >> (64 - CST_HUFF_BITS)];                                       \
        memcpy(out##i, &e, sizeof(e));                                                             \
        bits##i <<= e >> CST_HUFF_TAKES & 63;                                                      \
        out##i += e >> CST_HUFF_NUMBER;                                                            \
    } while (0)

#define CST_HUFF_REFILL(i)                                                                         \
    do {                                                                                           \
        unsigned used = (unsigned)__builtin_ctzll(bits##i);                                        \
        in##i += used >> 3;                                                                        \
        bits##i = (__builtin_bswap64(cst_load64(in##i)) | 1) << (used & 7);                        \
    } while (0)

/* Only the marker stays: the next refill reads the rest of the byte again. */
#define CST_HUFF_SAVE(i)                                                                           \
    do {                                                                                           \
        unsigned used = (unsigned)__builtin_ctzll(bits##i);                                        \
        in##i += used >> 3;                                                                        \
        bits##i = UINT64_C(1) << (used & 7);                                                       \
        lane[i].in = in##i;                                                                        \
        lane[i].bit = used & 7;                                                                    \
        lane[i].out = out##i;                                                                      \
    } while (0)

static inline __attribute__((always_inline)) void
cst_huff_lanes_loop(struct cst_huff_lane lane[CST_HUFF_LANES], const uint64_t *entry) {
    const uint8_t *in0 = lane[0].in, *in1 = lane[1].in, *in2 = lane[2].in, *in3 = lane[3].in;
    uint8_t *out0 = lane[0].out, *out1 = lane[1].out, *out2 = lane[2].out, *out3 = lane[3].out;
    uint64_t bits0 = 1, bits1 = 1, bits2 = 1, bits3 = 1;

    for (size_t rounds; (rounds = cst_huff_rounds(lane)) > 0;) {
        do {
            CST_HUFF_REFILL(0);
            CST_HUFF_REFILL(1);
            CST_HUFF_REFILL(2);
            CST_HUFF_REFILL(3);
            for (int k = 0; k < CST_HUFF_LOOKUPS; k++) {
                CST_HUFF_LOOKUP(0);
                CST_HUFF_LOOKUP(1);
                CST_HUFF_LOOKUP(2);
                CST_HUFF_LOOKUP(3);
            }
        } while (--rounds);
        CST_HUFF_SAVE(0);
        CST_HUFF_SAVE(1);
        CST_HUFF_SAVE(2);
        CST_HUFF_SAVE(3);
    }
}
