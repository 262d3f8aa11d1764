/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns nothing: seals and opens the messages of the disk format.
 * Invariants: 1. a message opens only with the key, nonce, additional data and length that it was
 * sealed with; 2. nothing of the plain text is trusted before the tag is checked: a failed open
 * leaves garbage that callers drop; 3. the nonce is the caller's counter and never chosen here.
 * Any thread. The text is taken in slices that stay in the cache, since CRC and copy (or
 * cipher) each go over it.
 */
#include "store/seg_crypt.h"

#include "base/crc32c.h"
#include "base/err.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

enum { SLICE = 32 * 1024, HASH = 32, NONCE = 12 };

static int hmac(uint8_t out[HASH], const void *key, size_t key_n, const void *data, size_t n) {
    static const uint8_t none[1];

    return HMAC(EVP_sha256(), key_n ? key : none, (int)key_n, data, n, out, NULL) ? 0
                                                                                  : cst_err(-EIO);
}

int cst_hkdf_sha256(uint8_t *out, size_t out_n, const void *key, size_t key_n, const void *salt,
                    size_t salt_n, const void *info, size_t info_n) {
    uint8_t prk[HASH], block[HASH + 128 + 1], t[HASH];
    size_t t_n = 0, at = 0;
    int r = hmac(prk, salt, salt_n, key, key_n);

    if (info_n > 128 || out_n > 255 * HASH)
        return cst_err(-EINVAL);
    for (unsigned i = 1; !r && at < out_n; i++) {
        size_t n = CST_MIN(out_n - at, (size_t)HASH);

        memcpy(block, t, t_n);
        if (info_n)
            memcpy(block + t_n, info, info_n);
        block[t_n + info_n] = (uint8_t)i;
        r = hmac(t, prk, HASH, block, t_n + info_n + 1);
        t_n = HASH;
        memcpy(out + at, t, n);
        at += n;
    }
    OPENSSL_cleanse(prk, sizeof(prk));
    OPENSSL_cleanse(t, sizeof(t));
    OPENSSL_cleanse(block, sizeof(block));
    return r;
}

int cst_seal_segment_key(uint8_t out[CST_DISK_KEY], const uint8_t namespace_key[CST_DISK_KEY],
                         const uint8_t salt[CST_DISK_SALT], uint32_t id, uint64_t fill) {
    enum { NAME = sizeof(CST_DISK_SEGMENT_INFO) - 1 };
    uint8_t info[NAME + 4 + 8];

    memcpy(info, CST_DISK_SEGMENT_INFO, NAME);
    cst_store32(info + NAME, id);
    cst_store64(info + NAME + 4, fill);
    return cst_hkdf_sha256(out, CST_DISK_KEY, namespace_key, CST_DISK_KEY, salt, CST_DISK_SALT,
                           info, sizeof(info));
}

static uint32_t aad_crc(struct cst_seal_aad aad) {
    uint32_t crc = cst_crc32c(0, aad.data, aad.n);

    return aad.n2 ? cst_crc32c(crc, aad.data2, aad.n2) : crc;
}

static void ctx_freep(EVP_CIPHER_CTX **ctx) {
    EVP_CIPHER_CTX_free(*ctx);
}

/* A context that has the key, the nonce and the additional data. */
static EVP_CIPHER_CTX *start(const struct cst_seal *seal, uint64_t nonce, struct cst_seal_aad aad,
                             int encrypt) {
    EVP_CIPHER_CTX *ctx = EVP_CIPHER_CTX_new();
    uint8_t iv[NONCE] = { 0 };
    int n;

    cst_store64(iv + 4, nonce);
    if (ctx && EVP_CipherInit_ex(ctx, EVP_aes_256_gcm(), NULL, seal->key, iv, encrypt) == 1 &&
        EVP_CipherUpdate(ctx, NULL, &n, aad.data, (int)aad.n) == 1 &&
        (!aad.n2 || EVP_CipherUpdate(ctx, NULL, &n, aad.data2, (int)aad.n2) == 1))
        return ctx;
    EVP_CIPHER_CTX_free(ctx);
    return NULL;
}

static int seal_gcm(const struct cst_seal *seal, uint64_t nonce, struct cst_seal_aad aad,
                    const uint8_t *src, uint8_t *dst, size_t n, uint8_t tag[CST_DISK_TAG],
                    uint32_t *crc) {
    cst_auto(ctx_freep) EVP_CIPHER_CTX *ctx = start(seal, nonce, aad, 1);
    uint8_t rest[16];
    int got;

    if (!ctx)
        return cst_err(-EIO);
    for (size_t at = 0; at < n; at += SLICE) {
        size_t len = CST_MIN(n - at, (size_t)SLICE);

        if (crc && dst == src)
            *crc = cst_crc32c(*crc, src + at, len);
        if (EVP_EncryptUpdate(ctx, dst + at, &got, src + at, (int)len) != 1 || (size_t)got != len)
            return cst_err(-EIO);
        if (crc && dst != src) /* after: the cipher, which is slower, waits for memory less */
            *crc = cst_crc32c(*crc, src + at, len);
    }
    if (EVP_EncryptFinal_ex(ctx, rest, &got) != 1 ||
        EVP_CIPHER_CTX_ctrl(ctx, EVP_CTRL_GCM_GET_TAG, CST_DISK_TAG, tag) != 1)
        return cst_err(-EIO);
    return 0;
}

static int seal_crc(struct cst_seal_aad aad, const uint8_t *src, uint8_t *dst, size_t n,
                    uint8_t tag[CST_DISK_TAG], uint32_t *crc) {
    uint32_t sum = 0;

    for (size_t at = 0; at < n; at += SLICE) {
        size_t len = CST_MIN(n - at, (size_t)SLICE);

        sum = cst_crc32c(sum, src + at, len);
        if (dst != src)
            memcpy(dst + at, src + at, len);
    }
    if (crc)
        *crc = sum;
    memset(tag, 0, CST_DISK_TAG);
    cst_store32(tag, cst_crc32c_combine(aad_crc(aad), sum, n));
    return 0;
}

int cst_seal(const struct cst_seal *seal, uint64_t nonce, struct cst_seal_aad aad, const void *src,
             void *dst, size_t n, uint8_t tag[CST_DISK_TAG], uint32_t *plain_crc) {
    if (plain_crc)
        *plain_crc = 0;
    if (seal->cipher == CST_DISK_AES_GCM)
        return seal_gcm(seal, nonce, aad, src, dst, n, tag, plain_crc);
    return seal_crc(aad, src, dst, n, tag, plain_crc);
}

static int unseal_gcm(const struct cst_seal *seal, uint64_t nonce, struct cst_seal_aad aad,
                      uint8_t *data, size_t n, const uint8_t tag[CST_DISK_TAG]) {
    cst_auto(ctx_freep) EVP_CIPHER_CTX *ctx = start(seal, nonce, aad, 0);
    uint8_t expected[CST_DISK_TAG], rest[16];
    int got;

    if (!ctx)
        return cst_err(-EIO);
    memcpy(expected, tag, sizeof(expected));
    for (size_t at = 0; at < n; at += SLICE) {
        size_t len = CST_MIN(n - at, (size_t)SLICE);

        if (EVP_DecryptUpdate(ctx, data + at, &got, data + at, (int)len) != 1)
            return cst_err(-EIO);
    }
    if (EVP_CIPHER_CTX_ctrl(ctx, EVP_CTRL_GCM_SET_TAG, CST_DISK_TAG, expected) != 1)
        return cst_err(-EIO);
    return EVP_DecryptFinal_ex(ctx, rest, &got) == 1 ? 0 : CST_SEAL_E_TAG;
}

static int unseal_crc(struct cst_seal_aad aad, const uint8_t *data, size_t n,
                      const uint8_t tag[CST_DISK_TAG]) {
    uint8_t expected[CST_DISK_TAG] = { 0 };

    cst_store32(expected, cst_crc32c(aad_crc(aad), data, n));
    return memcmp(expected, tag, sizeof(expected)) ? CST_SEAL_E_TAG : 0;
}

int cst_unseal(const struct cst_seal *seal, uint64_t nonce, struct cst_seal_aad aad, void *data,
               size_t n, const uint8_t tag[CST_DISK_TAG]) {
    if (seal->cipher == CST_DISK_AES_GCM)
        return unseal_gcm(seal, nonce, aad, data, n, tag);
    return unseal_crc(aad, data, n, tag);
}
