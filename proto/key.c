/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys: SHA-256 over tagged, length-framed fields; docs/protocol.md, "Keys". No state, any thread.
 *
 * Token ids are hashed as they lie in memory, so the host is little-endian. One update per run of
 * fields keeps a 64-token block at five compressions and a few copies.
 */
#include "proto/key.h"

#include "base/le.h"
#include "base/sha256.h"

#include <assert.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "token ids are hashed in place");

#define KEY_TAG "cistern.key.1"
#define ROOT_TAG "cistern.root.1"
#define FLAT_TAG "cistern.flat.1"

enum {
    TAG = sizeof(KEY_TAG) - 1,
    HEAD = TAG + CST_KEY_SIZE + 4,     /* tag, parent, count */
    FLAT_PLAIN_MAX = CST_KEY_SIZE - 1, /* foreign keys up to this length stay readable */
    FLAT_HASHED = 0xff,                /* last byte of the others */
};

void cst_key_root(const uint8_t fingerprint[32], const void *salt, uint32_t salt_len,
                  uint8_t out[32]) {
    struct cst_sha256 h;
    struct cst_le32 len;

    cst_store32(&len, salt_len);
    cst_sha256_init(&h);
    cst_sha256_update(&h, ROOT_TAG, sizeof(ROOT_TAG) - 1);
    cst_sha256_update(&h, fingerprint, CST_KEY_SIZE);
    cst_sha256_update(&h, &len, sizeof(len));
    if (salt_len)
        cst_sha256_update(&h, salt, salt_len);
    cst_sha256_final(&h, out);
}

void cst_key_block(const uint8_t parent[32], const uint32_t *tokens, uint32_t n, const void *extra,
                   uint32_t extra_len, uint8_t out[32]) {
    struct cst_sha256 h;
    uint8_t head[HEAD];
    struct cst_le32 len;

    memcpy(head, KEY_TAG, TAG);
    memcpy(head + TAG, parent, CST_KEY_SIZE);
    cst_store32(head + TAG + CST_KEY_SIZE, n);
    cst_store32(&len, extra_len);
    cst_sha256_init(&h);
    cst_sha256_update(&h, head, sizeof(head));
    if (n)
        cst_sha256_update(&h, tokens, (size_t)n * sizeof(*tokens));
    cst_sha256_update(&h, &len, sizeof(len));
    if (extra_len)
        cst_sha256_update(&h, extra, extra_len);
    cst_sha256_final(&h, out);
}

void cst_key_chain(const uint8_t parent[32], const uint32_t *tokens, size_t n,
                   uint32_t block_tokens, uint8_t *keys) {
    assert(block_tokens > 0);
    for (size_t at = 0; at < n; at += block_tokens) {
        size_t count = n - at < block_tokens ? n - at : block_tokens;

        cst_key_block(parent, tokens + at, (uint32_t)count, NULL, 0, keys);
        parent = keys;
        keys += CST_KEY_SIZE;
    }
}

void cst_key_from_bytes(const void *data, size_t n, uint8_t out[32]) {
    struct cst_sha256 h;
    struct cst_le32 len;

    assert(n <= UINT32_MAX);
    if (n <= FLAT_PLAIN_MAX) {
        memset(out, 0, CST_KEY_SIZE);
        if (n)
            memcpy(out, data, n);
        out[FLAT_PLAIN_MAX] = (uint8_t)n;
        return;
    }
    cst_store32(&len, (uint32_t)n);
    cst_sha256_init(&h);
    cst_sha256_update(&h, FLAT_TAG, sizeof(FLAT_TAG) - 1);
    cst_sha256_update(&h, &len, sizeof(len));
    cst_sha256_update(&h, data, n);
    cst_sha256_final(&h, out);
    out[FLAT_PLAIN_MAX] = FLAT_HASHED;
}
