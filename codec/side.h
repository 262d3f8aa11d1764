/* SPDX-License-Identifier: Apache-2.0 */
/* Side data: tables that were learned for one space and that its frames refer to. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Parsed and checked; plain memory of the caller. */
struct cst_side {
    uint32_t version; /* 1 .. 65535, counted up in a space */
    uint32_t check;   /* the first four bytes of the SHA-256 over the whole, little-endian */
};

static inline bool cst_side_is(const struct cst_side *side, uint32_t version, uint32_t check) {
    return side && side->version == version && side->check == check;
}
