/* SPDX-License-Identifier: Apache-2.0 */
/* Caches of a real model: files of [layer][token][head][dim] in bf16, compressed. Test programs. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { KV_HEADS = 3, KV_DIMS = 64, KV_ROW = KV_HEADS * KV_DIMS };

struct kv_tensor {
    uint8_t *bytes; /* the caller frees them */
    size_t size;
};

/* FOLDER/NAME.bf16.zst; the test fails when it is missing. */
struct kv_tensor kv_load(const char *folder, const char *name);
