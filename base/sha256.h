/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256 (FIPS 180-4) through libcrypto, with no heap and no provider look-up per message. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define CST_SHA256_SIZE 32

struct cst_sha256 {
    uint64_t opaque[16]; /* libcrypto's SHA256_CTX; size asserted in sha256.c */
};

void cst_sha256_init(struct cst_sha256 *h);
void cst_sha256_update(struct cst_sha256 *h, const void *data, size_t n);
void cst_sha256_final(struct cst_sha256 *h, uint8_t out[CST_SHA256_SIZE]);

/* One message in one call. */
void cst_sha256(const void *data, size_t n, uint8_t out[CST_SHA256_SIZE]);
