/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the contexts of libcrypto while a message is open. Invariant: no key stays in memory that
 * was freed. One thread.
 */
#include "tools/segdump_crypt.h"

#include <ctype.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <stdlib.h>
#include <string.h>

bool cst_dump_hkdf(uint8_t *out, size_t n, const uint8_t key[CST_DISK_KEY],
                   const uint8_t salt[CST_DISK_SALT], const void *info, size_t info_n) {
    EVP_KDF *kdf = EVP_KDF_fetch(NULL, "HKDF", NULL);
    EVP_KDF_CTX *ctx = kdf ? EVP_KDF_CTX_new(kdf) : NULL;
    const OSSL_PARAM params[] = {
        OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, (char *)(uintptr_t) "SHA256", 0),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, (void *)(uintptr_t)key, CST_DISK_KEY),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_SALT, (void *)(uintptr_t)salt,
                                          CST_DISK_SALT),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, (void *)(uintptr_t)info, info_n),
        OSSL_PARAM_construct_end(),
    };
    bool right = ctx && EVP_KDF_derive(ctx, out, n, params) == 1;

    EVP_KDF_CTX_free(ctx);
    EVP_KDF_free(kdf);
    return right;
}

/* struct cst_dump_gcm is libcrypto's context under our name. */
static EVP_CIPHER_CTX *ctx_of(struct cst_dump_gcm *g) {
    return (EVP_CIPHER_CTX *)g;
}

struct cst_dump_gcm *cst_dump_gcm_begin(const uint8_t key[CST_DISK_KEY], uint64_t nonce) {
    EVP_CIPHER_CTX *ctx = EVP_CIPHER_CTX_new();
    uint8_t iv[12] = { 0 }; /* u32le 0, u64le counter */

    cst_store64(iv + 4, nonce);
    if (ctx && EVP_DecryptInit_ex(ctx, EVP_aes_256_gcm(), NULL, key, iv) == 1)
        return (struct cst_dump_gcm *)ctx;
    EVP_CIPHER_CTX_free(ctx);
    return NULL;
}

bool cst_dump_gcm_aad(struct cst_dump_gcm *g, const void *data, size_t n) {
    int got;

    return g && EVP_DecryptUpdate(ctx_of(g), NULL, &got, data, (int)n) == 1;
}

bool cst_dump_gcm_open(struct cst_dump_gcm *g, uint8_t *data, size_t n) {
    int got;

    return g && EVP_DecryptUpdate(ctx_of(g), data, &got, data, (int)n) == 1;
}

bool cst_dump_gcm_end(struct cst_dump_gcm *g, const uint8_t tag[CST_DISK_TAG]) {
    uint8_t expected[CST_DISK_TAG], rest[16];
    bool right;
    int got;

    memcpy(expected, tag, sizeof(expected));
    right = g &&
            EVP_CIPHER_CTX_ctrl(ctx_of(g), EVP_CTRL_GCM_SET_TAG, CST_DISK_TAG, expected) == 1 &&
            EVP_DecryptFinal_ex(ctx_of(g), rest, &got) == 1;
    EVP_CIPHER_CTX_free(ctx_of(g));
    return right;
}

bool cst_dump_root(uint8_t out[CST_DISK_KEY], const char *text, size_t n) {
    if (n == CST_DISK_KEY) {
        memcpy(out, text, n);
        return true;
    }
    while (n && isspace((unsigned char)text[n - 1]))
        n--;
    if (n != 2 * CST_DISK_KEY)
        return false;
    for (size_t i = 0; i < CST_DISK_KEY; i++) {
        char digits[3] = { text[2 * i], text[2 * i + 1], 0 };

        if (!isxdigit((unsigned char)digits[0]) || !isxdigit((unsigned char)digits[1]))
            return false;
        out[i] = (uint8_t)strtoul(digits, NULL, 16);
    }
    return true;
}

void cst_dump_cleanse(void *key, size_t n) {
    OPENSSL_cleanse(key, n);
}
