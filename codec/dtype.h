/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 16-bit floats to and from fp32, exact or rounded to nearest even as IEEE 754 asks; the same bits
 * as F16C and AVX512-BF16 give, NaN payloads included (a NaN comes back quiet, top bits kept).
 */
#pragma once

#include "base/layout.h"

#include <stdint.h>
#include <string.h>

static inline float cst_f32_from_bits(uint32_t u) {
    float f;

    memcpy(&f, &u, sizeof(f));
    return f;
}

static inline uint32_t cst_f32_bits(float f) {
    uint32_t u;

    memcpy(&u, &f, sizeof(u));
    return u;
}

static inline float cst_bf16_to_f32(uint16_t h) {
    return cst_f32_from_bits((uint32_t)h << 16);
}

static inline uint16_t cst_f32_to_bf16(float f) {
    uint32_t u = cst_f32_bits(f);

    if ((u & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline float cst_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fff;

    if (mag >= 0x7c00) /* infinity, NaN (made quiet) */
        return cst_f32_from_bits(sign | 0x7f800000 | mag << 13 | (mag > 0x7c00 ? 0x400000 : 0));
    if (mag >= 0x0400)
        return cst_f32_from_bits(sign | ((mag << 13) + 0x38000000));
    /* subnormal: mag * 2^-24, exact */
    return cst_f32_from_bits(sign | cst_f32_bits((float)mag * 0x1p-24f));
}

static inline uint16_t cst_f32_to_f16(float f) {
    uint32_t u = cst_f32_bits(f), mag = u & 0x7fffffff;
    uint16_t sign = (uint16_t)(u >> 16 & 0x8000);

    if (mag > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (mag >> 13 & 0x1ff));
    if (mag >= 0x477ff000) /* rounds to 2^16 or more */
        return sign | 0x7c00;
    if (mag >= 0x38800000)
        return (uint16_t)(sign | (mag - 0x38000000 + 0xfff + (mag >> 13 & 1)) >> 13);
    /* subnormal: adding 1/2 leaves the value in units of 2^-24 in the low bits, rounded */
    return (uint16_t)(sign | (cst_f32_bits(cst_f32_from_bits(mag) + 0.5f) - 0x3f000000));
}

static inline uint32_t cst_dtype_size(uint8_t dtype) {
    return dtype == CST_DTYPE_F32 ? 4 : dtype == CST_DTYPE_OPAQUE ? 1 : 2;
}

/* An element of the dtype at p, any alignment. Not for opaque. */
static inline float cst_dtype_load(uint8_t dtype, const uint8_t *p) {
    uint32_t u;
    uint16_t h;

    if (dtype == CST_DTYPE_F32) {
        memcpy(&u, p, sizeof(u));
        return cst_f32_from_bits(u);
    }
    memcpy(&h, p, sizeof(h));
    return dtype == CST_DTYPE_F16 ? cst_f16_to_f32(h) : cst_bf16_to_f32(h);
}
