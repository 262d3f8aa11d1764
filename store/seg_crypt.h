/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sealed messages of the disk format: AES-256-GCM through libcrypto (NIST SP 800-38D), or a CRC32C
 * with the same checks. Keys come from HKDF-SHA256 (RFC 5869). Any thread; no state.
 */
#pragma once

#include "store/seg_format.h"

enum { CST_SEAL_E_TAG = 1 }; /* the message isn't what was sealed */

struct cst_seal {
    uint8_t key[CST_DISK_KEY];
    enum cst_disk_cipher cipher;
};

/* What a tag also covers: n bytes, then n2 bytes. */
struct cst_seal_aad {
    const void *data;
    size_t n;
    const void *data2;
    size_t n2;
};

/* out_n <= 255 x 32. 0 or -EIO (libcrypto failed). */
int cst_hkdf_sha256(uint8_t *out, size_t out_n, const void *key, size_t key_n, const void *salt,
                    size_t salt_n, const void *info, size_t info_n);

/* n bytes from src to dst (which may be the same); never twice with one nonce and key. plain_crc,
 * if not NULL, becomes the CRC32C of the plain bytes. 0 or -EIO. */
int cst_seal(const struct cst_seal *seal, uint64_t nonce, struct cst_seal_aad aad, const void *src,
             void *dst, size_t n, uint8_t tag[CST_DISK_TAG], uint32_t *plain_crc);

/* In place. 0, CST_SEAL_E_TAG (the bytes are then of no use) or -EIO. */
int cst_unseal(const struct cst_seal *seal, uint64_t nonce, struct cst_seal_aad aad, void *data,
               size_t n, const uint8_t tag[CST_DISK_TAG]);

/* The key of a segment's fill from its namespace's. 0 or -EIO. */
int cst_seal_segment_key(uint8_t out[CST_DISK_KEY], const uint8_t namespace_key[CST_DISK_KEY],
                         const uint8_t salt[CST_DISK_SALT], uint32_t id, uint64_t fill);
