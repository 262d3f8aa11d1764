/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tables: a coder's from frequencies, and the frequencies of a logistic variable.
 *
 * Invariants: 1. every symbol has at least one slot, so whatever integer comes has a code; 2. the
 * frequencies come from fixed_math in a fixed order, so they are the same on every machine.
 */
#include "codec/rans.h"

#include "codec/fixed_math.h"

#include "base/macros.h"

#include <math.h>
#include <string.h>

enum { SLOTS = 1 << CST_RANS_BITS };

/* 256 log2 of 1 .. 4096, by its highest bits */
static uint32_t log2_of(uint32_t x) {
    unsigned log2 = 31 - (unsigned)__builtin_clz(x);

    return 256 * log2 + ((x << 8 >> log2) & 255);
}

bool cst_rans_table_init(struct cst_rans_table *table, const uint16_t *frequency, int reach) {
    uint32_t start = 0, cost = 0;

    if (reach < 1 || reach > CST_RANS_REACH)
        return false;
    for (int s = 0; s <= 2 * reach; s++) {
        if (frequency[s] < 1 || frequency[s] >= SLOTS)
            return false;
        start += frequency[s];
    }
    if (start != SLOTS)
        return false;
    start = 0;
    for (int s = 0; s <= 2 * reach; s++) {
        uint32_t f = frequency[s], outer = s == 0 || s == 2 * reach;
        uint32_t entry = f | outer << 24 | (uint32_t)(s - reach) << 25;

        table->code[s] = f | start << 12;
        table->reciprocal[s] = ((UINT64_C(1) << 44) + f - 1) / f;
        for (uint32_t i = 0; i < f; i++, entry += SLOTS)
            table->slot[start + i] = entry;
        start += f;
        cost += f * (256 * CST_RANS_BITS - log2_of(f)) / SLOTS;
    }
    table->reach = reach;
    table->cost = cost;
    return true;
}

uint8_t cst_rans_class(double ratio) {
    const double least = 0x1p-6, most = 0x1p5, per_octave = 4 / 0x1.62e42fefa39efp-1;

    ratio = ratio >= least ? CST_MIN(ratio, most) : least;
    return (uint8_t)(floor(cst_fixed_log(ratio) * per_octave + 0.5) + 24);
}

/* The probability that a logistic variable lies above y, with a = pi / (sqrt(3) deviation). */
static double above(double y, double a) {
    return 1 / (1 + cst_fixed_exp(y * a));
}

int cst_rans_frequencies(uint16_t frequency[2 * CST_RANS_REACH + 1], unsigned klass) {
    const double quarter[4] = { 1, 0x1.306fe0a31b715p+0, 0x1.6a09e667f3bcdp+0,
                                0x1.ae89f995ad3adp+0 };
    double deviation = ldexp(quarter[klass % 4], (int)(klass / 4) - 6);
    double a = 0x1.d05527b6e43d2p+0 / deviation; /* pi / sqrt(3) */
    int reach = 1, rest = SLOTS;

    while (reach < CST_RANS_REACH && SLOTS * above(reach - 0.5, a) >= 1.5)
        reach++;
    for (int s = 1; s <= reach; s++) {
        double p = above(s - 0.5, a) - (s < reach ? above(s + 0.5, a) : 0);
        int f = (int)floor(SLOTS * p + 0.5);

        frequency[reach + s] = frequency[reach - s] = (uint16_t)CST_MAX(1, f);
        rest -= 2 * frequency[reach + s];
    }
    frequency[reach] = (uint16_t)rest;
    return reach;
}
