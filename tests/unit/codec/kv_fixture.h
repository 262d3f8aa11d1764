/* SPDX-License-Identifier: Apache-2.0 */
/* Caches of a real model: files of [layer][token][head][dim] in bf16, compressed. Test programs. */
#pragma once

#include "tests/unit/codec/codec_case.h"

#include <stddef.h>
#include <stdint.h>

enum { KV_HEADS = 3, KV_DIMS = 64, KV_ROW = KV_HEADS * KV_DIMS, KV_LAYERS = 30, KV_TOKENS = 512 };

struct kv_tensor {
    uint8_t *bytes; /* the caller frees them */
    size_t size;
};

/* FOLDER/NAME.bf16.zst; the test fails when it is missing. */
struct kv_tensor kv_load(const char *folder, const char *name);

/* A document as a block of one fp32 segment a layer and tensor, so that the rounding of decoded
 * values plays no part; keys is the name of the tensor of keys. */
struct case_block *kv_document(const char *folder, const char *text, const char *keys,
                               bool rotated);

/* Relative squared error of a decoded segment of one, sinks left out; energies with means. */
double kv_nmse(const uint8_t *segment, const uint8_t *decoded);
