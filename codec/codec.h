/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames: one encoded block, self-describing (docs/codec-format.md).
 *
 * Pure functions: no I/O, no globals, no logging, no heap; the caller gives the workspace. Any
 * thread, any number at a time. The same input gives the same bytes on every machine (where zstd
 * codes opaque bytes: with the same version of it).
 *
 * Frames are checked before they are believed: decode of arbitrary bytes reads and writes inside
 * its buffers and answers with a condition. Truncated or foreign frames never decode.
 */
#pragma once

#include "base/layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Conditions of cst_frame_*() */
enum {
    CST_CODEC_E_SMALL = 1, /* dst or work too small */
    CST_CODEC_E_CORRUPT,   /* not a frame, truncated, checksum or symbols wrong */
    CST_CODEC_E_VERSION,   /* a frame or stage version that this build doesn't know */
    CST_CODEC_E_MISMATCH,  /* a frame of another block shape */
    CST_CODEC_E_BOUND,     /* the preset's error exceeds the bound asked for */
    CST_CODEC_E_PRESET,    /* no such preset, or parameters or a descriptor out of their limits */
};

/* Numbers stand in frames: append only. */
enum cst_preset {
    CST_PRESET_RAW = 0,
    CST_PRESET_LOSSLESS = 1,
    CST_PRESET_INT8 = 2,
    CST_PRESET_INT4 = 3,       /* symmetric, groups of 64 channels */
    CST_PRESET_KIVI4 = 4,      /* 4 bits; K per channel, V per token, groups of 32 */
    CST_PRESET_KIVI2 = 5,      /* the same with 2 bits */
    CST_PRESET_TURBOQUANT = 6, /* mean, Hadamard, Lloyd-Max levels */
    CST_PRESETS
};

const char *cst_preset_name(uint32_t preset); /* NULL if unknown */
int cst_preset_from_name(const char *name);   /* -1 if unknown */

/* Tokens at the start of a sequence whose K and V stay raw in lossy presets. */
enum { CST_SINK_TOKENS = 4 };

struct cst_encode_params {
    uint32_t preset; /* enum cst_preset */
    uint32_t tokens; /* tokens present, 1..block_tokens */
    uint32_t
        first_position; /* position of the block's first token; decides which tokens are sinks */
    /* Largest allowed rms error over rms deviation from the channel mean, per layer and tensor,
     * sinks excluded, checked on the decoded values; 0 = must be exact. */
    float bound;
    uint8_t bits_k, bits_v; /* turboquant: bits of a value, 1..8, 0 = 4; other presets: 0 */
};

/* Preset and parameters from a text such as "int8", "turboquant:4" or "turboquant:4,3" (bits of
 * keys and values); everything else 0. 0 or CST_CODEC_E_PRESET. */
int cst_preset_parse(struct cst_encode_params *out, const char *text);

struct cst_frame_info {
    uint32_t version, preset, tokens, first_position;
    uint64_t block_bytes; /* decoded size */
    uint64_t frame_bytes; /* encoded size, header included */
    float error;          /* largest error found at encode time, as in `bound`; 0 when exact */
    uint32_t block_crc;   /* CRC32C of the decoded block */
    uint32_t layout_crc;  /* CRC32C over the segment table: cheap check against a foreign layout */
    uint8_t bits_k, bits_v; /* of turboquant; else 0 */
};

/* Largest frame any preset makes for this descriptor: raw + header. */
size_t cst_frame_bound(const struct cst_descriptor *desc);

/* Workspace bytes that encode and decode need for any preset; alignment 64. */
size_t cst_codec_work_size(const struct cst_descriptor *desc);

/*
 * block: block_bytes bytes. dst: cap >= cst_frame_bound(). Writes *out_len and, when not NULL,
 * *info on success. `lossless` and lossy presets never exceed raw + header: a stream that doesn't
 * shrink is kept raw. 0 or a condition.
 */
int cst_frame_encode(void *dst, size_t cap, const void *block, const struct cst_descriptor *desc,
                     const struct cst_encode_params *params, void *work, size_t work_len,
                     size_t *out_len, struct cst_frame_info *info);

/* Reads and checks the header only: len may be that of the header, 64 bytes, or more. */
int cst_frame_inspect(const void *frame, size_t len, struct cst_frame_info *info);

/*
 * Decodes layers first_layer .. first_layer + n_layers - 1 (all: 0, UINT32_MAX) into their places
 * in block (block_bytes bytes); bytes of other layers stay untouched. len may exceed the frame's
 * own length. Each stream of a part is checked against its checksum, a whole block against
 * block_crc: these presets decode to the same bits everywhere, lossy ones too. After an error the
 * bytes of the layers asked for are undefined.
 */
int cst_frame_decode(void *block, size_t cap, const void *frame, size_t len,
                     const struct cst_descriptor *desc, uint32_t first_layer, uint32_t n_layers,
                     void *work, size_t work_len);
