/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Elementary functions that give the same bits on every machine: only the operations that IEEE 754
 * rounds correctly, in a fixed order. A C library's own differ between versions and processors,
 * which would make frames differ. Within 1e-14 of the true value, relative to it or, for sine and
 * cosine below 2^20, to 1. Pure; any thread.
 */
#pragma once

/* x > 0 and normal. */
double cst_fixed_log(double x);
/* |x| < 700. */
double cst_fixed_exp(double x);
/* 0 <= x < 2^33. */
void cst_fixed_sincos(double x, double *sine, double *cosine);
