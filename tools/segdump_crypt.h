/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The keys and sealed messages of a disk tier, as docs/disk-format.md says, for cistern-segdump:
 * HKDF-SHA256 (RFC 5869) and AES-256-GCM (NIST SP 800-38D) through libcrypto. The engine has its
 * own code for the same. One thread.
 */
#pragma once

#include "store/seg_format.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* False: libcrypto failed. */
bool cst_dump_hkdf(uint8_t *out, size_t n, const uint8_t key[CST_DISK_KEY],
                   const uint8_t salt[CST_DISK_SALT], const void *info, size_t info_n);

/* A message that is opened bit by bit; the plain bytes count only when end() says true. */
struct cst_dump_gcm;
struct cst_dump_gcm *cst_dump_gcm_begin(const uint8_t key[CST_DISK_KEY], uint64_t nonce);
bool cst_dump_gcm_aad(struct cst_dump_gcm *g, const void *data, size_t n);
bool cst_dump_gcm_open(struct cst_dump_gcm *g, uint8_t *data, size_t n); /* in place */
/* Frees g (NULL ok). True: the tag is that of the message. */
bool cst_dump_gcm_end(struct cst_dump_gcm *g, const uint8_t tag[CST_DISK_TAG]);

/* The root key from what a key file holds: 32 bytes, or 64 hexadecimal digits. */
bool cst_dump_root(uint8_t out[CST_DISK_KEY], const char *text, size_t n);

/* Forgets a key for good. */
void cst_dump_cleanse(void *key, size_t n);
