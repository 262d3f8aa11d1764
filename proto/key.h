/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys (design: chained SHA-256) and the canonical bytes of a descriptor. Used by both sides.
 *
 *   block  SHA-256("cistern.key.1", parent[32], u32le count, count x u32le id, u32le len, extra)
 *   root   SHA-256("cistern.root.1", fingerprint[32], u32le len, salt)
 *   fingerprint  SHA-256(canonical descriptor bytes)
 */
#pragma once

#include "base/layout.h"

#include <stddef.h>
#include <stdint.h>

void cst_key_root(const uint8_t fingerprint[32], const void *salt, uint32_t salt_len,
                  uint8_t out[32]);
void cst_key_block(const uint8_t parent[32], const uint32_t *tokens, uint32_t n, const void *extra,
                   uint32_t extra_len, uint8_t out[32]);

/* Keys of all full blocks and of the tail, if any; keys holds ceil(n / block_tokens) x 32 bytes. */
void cst_key_chain(const uint8_t parent[32], const uint32_t *tokens, size_t n,
                   uint32_t block_tokens, uint8_t *keys);
void cst_key_from_bytes(const void *data, size_t n, uint8_t out[32]);

/* Largest canonical encoding that a packet carries. */
enum { CST_DESCRIPTOR_BYTES_MAX = 120 * 1024 };

/* Checks ranges, segment order, overlap, overrun, strides, printable strings. NULL or a sentence
 * that names the field ("segment 3 overlaps segment 2"), in text[cap]. */
const char *cst_descriptor_check(const struct cst_descriptor *d, char *text, size_t cap);

/* Canonical bytes. Returns the length; 0 if cap is too small. d is valid. */
size_t cst_descriptor_encode(const struct cst_descriptor *d, uint8_t *out, size_t cap);

/* Parses and checks untrusted canonical bytes; only the canonical form is accepted. 0 and *out
 * (owned: cst_descriptor_free), -ENOMEM, or CST_DESCRIPTOR_E_INVALID with a sentence in text. */
enum { CST_DESCRIPTOR_E_INVALID = 1 };
int cst_descriptor_decode(struct cst_descriptor **out, const uint8_t *data, size_t n, char *text,
                          size_t cap);
struct cst_descriptor *cst_descriptor_free(struct cst_descriptor *d);
void cst_descriptor_fingerprint(const uint8_t *canonical, size_t n, uint8_t out[32]);
