/* SPDX-License-Identifier: Apache-2.0 */
/* CRC32C through ISA-L, which neither inverts its input nor its output: done here. No state. */
#include "base/crc32c.h"

#include "base/macros.h"

#include <isa-l/crc.h>

uint32_t cst_crc32c(uint32_t crc, const void *data, size_t n) {
    const uint8_t *p = data;

    crc = ~crc;
    while (n) {
        /* ISA-L counts in int; its prototype lacks const but it only reads */
        size_t part = CST_MIN(n, (size_t)1 << 30);

        crc = crc32_iscsi((unsigned char *)(uintptr_t)p, (int)part, crc);
        p += part;
        n -= part;
    }
    return ~crc;
}

/* Polynomials modulo the CRC's, lowest power in the highest bit. */
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;

    for (uint32_t bit = UINT32_C(1) << 31; bit; bit >>= 1) {
        if (a & bit)
            product ^= b;
        b = b & 1 ? b >> 1 ^ UINT32_C(0x82f63b78) : b >> 1;
    }
    return product;
}

uint32_t cst_crc32c_combine(uint32_t a, uint32_t b, uint64_t b_length) {
    uint32_t power = UINT32_C(1) << 23; /* x^8, squared again and again */

    for (; b_length; b_length >>= 1) {
        if (b_length & 1)
            a = multiply(a, power);
        power = multiply(power, power);
    }
    return a ^ b;
}
