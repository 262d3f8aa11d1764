/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 16-bit floats against their definition (IEEE 754 binary16, and the upper half of binary32):
 * every value converts exactly, and rounding is checked at and beside each midpoint of neighbours.
 */
#include "tests/lib/check.h"

#include "codec/dtype.h"

#include <math.h>

/* What the bits of a finite value mean, by the standard's formula. */
static double meaning(uint16_t h, int exponent_bits, int mantissa_bits) {
    int bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = h >> mantissa_bits & ((1 << exponent_bits) - 1);
    int mantissa = h & ((1 << mantissa_bits) - 1);
    double m = exponent ? mantissa + (1 << mantissa_bits) : mantissa;
    double v = ldexp(m, (exponent ? exponent : 1) - bias - mantissa_bits);

    return h & 0x8000 ? -v : v;
}

static const struct format {
    const char *name;
    int exponent_bits, mantissa_bits;
    float (*load)(uint16_t);
    uint16_t (*store)(float);
} formats[] = {
    { "fp16", 5, 10, cst_f16_to_f32, cst_f32_to_f16 },
    { "bf16", 8, 7, cst_bf16_to_f32, cst_f32_to_bf16 },
};

static void check_format(void **state) {
    const struct format *f = *state;
    uint16_t infinity = (uint16_t)(0x7fff & ~((1 << f->mantissa_bits) - 1));

    for (uint32_t h = 0; h < 0x10000; h++) {
        uint16_t magnitude = h & 0x7fff;
        float x = f->load((uint16_t)h);

        if (magnitude > infinity) {
            uint16_t back = f->store(x);

            assert_true(isnan(x));
            assert_int_equal(back | 1 << (f->mantissa_bits - 1),
                             h | 1U << (f->mantissa_bits - 1)); /* payload kept, made quiet */
            assert_true((back & 0x7fff) > infinity);
            continue;
        }
        if (magnitude == infinity)
            assert_true(isinf(x) && (x < 0) == (h >= 0x8000));
        else
            assert_true((double)x == meaning((uint16_t)h, f->exponent_bits, f->mantissa_bits));
        assert_int_equal(signbit(x) != 0, h >> 15);
        assert_int_equal(f->store(x), h);
    }
}

/* Midpoints are exact in fp32 for fp16; for bf16 they are the values with lower half 0x8000. The
 * largest finite value and infinity have one too: half a step above the largest. */
static void check_rounding(void **state) {
    const struct format *f = *state;
    uint16_t infinity = (uint16_t)(0x7fff & ~((1 << f->mantissa_bits) - 1));

    for (uint16_t h = 0; h < infinity; h++) {
        double low = meaning(h, f->exponent_bits, f->mantissa_bits);
        double step = meaning((uint16_t)(h ^ 1), f->exponent_bits, f->mantissa_bits) - low;
        double high = h + 1 < infinity
                          ? meaning((uint16_t)(h + 1), f->exponent_bits, f->mantissa_bits)
                          : low + fabs(step);
        float middle = (float)((low + high) / 2);
        uint16_t even = h & 1 ? (uint16_t)(h + 1) : h;

        assert_true((double)middle == (low + high) / 2);
        assert_int_equal(f->store(middle), even);
        assert_int_equal(f->store(-middle), even | 0x8000);
        assert_int_equal(f->store(nextafterf(middle, INFINITY)), h + 1);
        assert_int_equal(f->store(nextafterf(middle, 0)), h);
    }
    assert_int_equal(f->store(INFINITY), infinity);
    assert_int_equal(f->store(3.4e38f), f->exponent_bits == 5 ? infinity : 0x7f80);
}

int main(void) {
    return cst_run_rows(formats, check_format) + cst_run_rows(formats, check_rounding);
}
