/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The keys and values of one text as files in a folder:
 *
 *   NAME.json         layers, tokens, kv_heads, head_dim, dtype ("bf16 ...", "f16 ...", "f32 ..."),
 *                     rope.kind ("interleaved ...", "halves ...", "none"), rope.base, rope.dims,
 *                     rope.first_position, files.kpost.file or files.kpre.file, files.v.file
 *   the files named   [layer][token][head][dimension], little-endian; a name that ends in .zst is a
 *                     zstd frame of that
 *
 * kpost: keys after the rotary embedding, as engines store them; kpre: before it. Functions return
 * 0 or a negative errno and print one sentence about what is wrong. One thread.
 */
#pragma once

#include "base/layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CST_TENSOR_NAME_MAX = 128 };

struct cst_tensor_file {
    char name[CST_TENSOR_NAME_MAX];
    uint32_t layers, tokens, heads, dims, first_position;
    uint8_t dtype;   /* enum cst_dtype */
    bool plain_keys; /* the file's name is kpre */
    struct cst_layer layer;
    uint8_t *part[2]; /* K, V; owned */
};
#define CST_TENSOR_FILE_NULL ((struct cst_tensor_file){ 0 })

enum cst_keys {
    CST_KEYS_ROTATED,
    CST_KEYS_PLAIN,
    CST_KEYS_OPAQUE, /* rotated, and nothing is said about the rotation */
};

int cst_tensor_file_read(struct cst_tensor_file *out, const char *folder, const char *name,
                         enum cst_keys keys);
/* Of a text that was encoded: part[] is zeroed memory to decode into. */
int cst_tensor_file_read_frames(struct cst_tensor_file *out, const char *folder, const char *name,
                                uint32_t *block_tokens);
int cst_tensor_file_write(const struct cst_tensor_file *t, const char *folder);
/* NAME.json alone; with block_tokens, it names NAME.frames instead of tensors. */
int cst_tensor_file_write_shape(const struct cst_tensor_file *t, const char *folder,
                                uint32_t block_tokens);
void cst_tensor_file_deinit(struct cst_tensor_file *t);

/* Bytes of one token of one layer, of K or of V. */
size_t cst_tensor_file_row(const struct cst_tensor_file *t);

/* How blocks of this text look: per layer block_tokens rows of K, then of V. `desc` owns its lists;
 * give them back with cst_tensor_file_undescribe(). */
int cst_tensor_file_describe(const struct cst_tensor_file *t, uint32_t block_tokens,
                             struct cst_descriptor *desc);
void cst_tensor_file_undescribe(struct cst_descriptor *desc);
/* Tokens first .. first + n - 1 to a block or from it; what a block lacks is zero. */
void cst_tensor_file_cut(const struct cst_tensor_file *t, const struct cst_descriptor *desc,
                         uint32_t first, uint32_t n, uint8_t *block);
void cst_tensor_file_join(struct cst_tensor_file *t, const struct cst_descriptor *desc,
                          uint32_t first, uint32_t n, const uint8_t *block);

/* A whole file; *out is owned by the caller. `cap` bytes at most. */
int cst_file_read(const char *path, size_t cap, uint8_t **out, size_t *len);
int cst_file_write(const char *path, const void *data, size_t len);
/* The names in a folder whose shape can be read (NAME.json with layers and tokens), sorted. Frees
 * with cst_free() each and the list. */
int cst_tensor_file_list(const char *folder, char ***out, size_t *n);
