/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Series with so many terms that the first one left out is below 2^-55 of the result. Invariants:
 * 1. floor, frexp and ldexp are exact, everything else is + - * /; 2. the build never contracts
 * them (-ffp-contract=off).
 */
#include "codec/fixed_math.h"

#include <math.h>

enum { TERMS = 24 };

static const double inverse[TERMS] = {
    0,        1.0 / 1,  1.0 / 2,  1.0 / 3,  1.0 / 4,  1.0 / 5,  1.0 / 6,  1.0 / 7,
    1.0 / 8,  1.0 / 9,  1.0 / 10, 1.0 / 11, 1.0 / 12, 1.0 / 13, 1.0 / 14, 1.0 / 15,
    1.0 / 16, 1.0 / 17, 1.0 / 18, 1.0 / 19, 1.0 / 20, 1.0 / 21, 1.0 / 22, 1.0 / 23,
};
static const double LN2 = 0x1.62e42fefa39efp-1;
/* The upper 21 bits of pi / 2, so that products with integers below 2^32 are exact, and the rest */
static const double PIO2_HIGH = 0x1.921fbp+0, PIO2_LOW = 0x1.5110b4611a626p-22;

double cst_fixed_log(double x) {
    int exponent;
    double m = frexp(x, &exponent), s, square, sum = 0;

    if (m < 0x1.6a09e667f3bcdp-1) { /* sqrt(1/2) .. sqrt(2) */
        m *= 2;
        exponent--;
    }
    s = (m - 1) / (m + 1); /* log m = 2 atanh s */
    square = s * s;
    for (int n = TERMS - 1; n >= 1; n -= 2)
        sum = sum * square + inverse[n];
    return exponent * LN2 + 2 * s * sum;
}

double cst_fixed_exp(double x) {
    double k = floor(x / LN2 + 0.5), r = x - k * LN2, sum = 1;

    for (int n = TERMS - 2; n >= 1; n--)
        sum = 1 + sum * (r * inverse[n]);
    return ldexp(sum, (int)k);
}

void cst_fixed_sincos(double x, double *sine, double *cosine) {
    double quarter = floor(x / (PIO2_HIGH + PIO2_LOW) + 0.5);
    double r = x - quarter * PIO2_HIGH - quarter * PIO2_LOW, square = r * r, s = 1, c = 1;

    for (int n = TERMS - 2; n >= 2; n -= 2) {
        c = 1 - c * (square * (inverse[n] * inverse[n - 1]));
        s = 1 - s * (square * (inverse[n] * inverse[n + 1]));
    }
    s *= r;
    switch ((long long)quarter & 3) {
    case 0:
        *sine = s, *cosine = c;
        break;
    case 1:
        *sine = c, *cosine = -s;
        break;
    case 2:
        *sine = -s, *cosine = -c;
        break;
    default:
        *sine = -c, *cosine = s;
    }
}
