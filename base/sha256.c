/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SHA-256 through libcrypto's low-level functions. They are marked deprecated in favour of EVP,
 * whose set-up costs as much as hashing a 64-token block; the code below them is the same.
 * No state, no heap, any thread.
 */
#define OPENSSL_API_COMPAT 0x10101000L
#include "base/sha256.h"

#include <openssl/sha.h>

_Static_assert(sizeof(SHA256_CTX) <= sizeof(struct cst_sha256), "libcrypto's state fits");

void cst_sha256_init(struct cst_sha256 *h) {
    SHA256_Init((SHA256_CTX *)(void *)h);
}

void cst_sha256_update(struct cst_sha256 *h, const void *data, size_t n) {
    SHA256_Update((SHA256_CTX *)(void *)h, data, n);
}

void cst_sha256_final(struct cst_sha256 *h, uint8_t out[CST_SHA256_SIZE]) {
    SHA256_Final(out, (SHA256_CTX *)(void *)h);
}

void cst_sha256(const void *data, size_t n, uint8_t out[CST_SHA256_SIZE]) {
    struct cst_sha256 h;

    cst_sha256_init(&h);
    cst_sha256_update(&h, data, n);
    cst_sha256_final(&h, out);
}
