/* SPDX-License-Identifier: Apache-2.0 */
/* Little-endian wrapper types for wire and disk layouts: no alignment, no padding, no swaps seen.
 */
#pragma once

#include <endian.h>
#include <stdint.h>
#include <string.h>

struct cst_le16 {
    uint8_t b[2];
};
struct cst_le32 {
    uint8_t b[4];
};
struct cst_le64 {
    uint8_t b[8];
};

static inline uint16_t cst_load16(const void *p) {
    uint16_t v;

    memcpy(&v, p, sizeof(v));
    return le16toh(v);
}

static inline uint32_t cst_load32(const void *p) {
    uint32_t v;

    memcpy(&v, p, sizeof(v));
    return le32toh(v);
}

static inline uint64_t cst_load64(const void *p) {
    uint64_t v;

    memcpy(&v, p, sizeof(v));
    return le64toh(v);
}

static inline void cst_store16(void *p, uint16_t v) {
    v = htole16(v);
    memcpy(p, &v, sizeof(v));
}

static inline void cst_store32(void *p, uint32_t v) {
    v = htole32(v);
    memcpy(p, &v, sizeof(v));
}

static inline void cst_store64(void *p, uint64_t v) {
    v = htole64(v);
    memcpy(p, &v, sizeof(v));
}
