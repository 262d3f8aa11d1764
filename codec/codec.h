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
    CST_CODEC_E_SIDE,      /* the frame needs side data that weren't given, or other ones */
    CST_CODEC_E_PLACE,     /* its keys can't be turned to another position */
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
    CST_PRESET_POLAR = 7,      /* angles of pairs of pairs */
    CST_PRESET_JOLT = 8,       /* Tucker factors and a rotated residual, ranks and bits allocated */
    CST_PRESET_FLASHJOLT = 9,  /* the same with a randomized decomposition */
    CST_PRESET_JOLT_PLUS = 10, /* the same with a finer grid and Lloyd-Max levels */
    CST_PRESET_KLT = 11,       /* bases learned for each layer, rANS */
    CST_PRESET_DEEP = 12,      /* the same of what earlier layers don't predict */
    CST_PRESETS
};

const char *cst_preset_name(uint32_t preset); /* NULL if this build doesn't know it */
int cst_preset_from_name(const char *name);   /* -1 if unknown */

struct cst_side; /* learned tables of a space, codec/side.h */

/* Tokens at the start of a sequence whose K and V stay raw in lossy presets. (So do those of other
 * tokens that are far from the rest of their block, docs/codec-format.md section 4.11.) */
enum { CST_SINK_TOKENS = 4 };

struct cst_encode_params {
    uint32_t preset; /* enum cst_preset */
    uint32_t tokens; /* tokens present, 1..block_tokens */
    uint32_t
        first_position; /* position of the block's first token; decides which tokens are sinks */
    /* Largest allowed rms error over rms deviation from the channel mean, per layer and tensor,
     * sinks and outliers excluded, checked on the decoded values; 0 = must be exact. */
    float bound;
    uint8_t bits_k, bits_v; /* turboquant: bits of a value, 1..8, 0 = 4; other presets: 0 */
    uint8_t group_layers;   /* jolt family: layers that share a decomposition; 0 = 6, below
                             * 256 tokens 1 */
    float ratio;            /* jolt family: block bytes over frame bytes to reach; 0 = 3 */
    float step; /* klt, deep: quantizer step over the rms deviation of a layer; 0 = .4 */
    const struct cst_side *side; /* NULL: none; outlives the call */
    float carried; /* error that the block has of earlier frames: counts in the bound, and stands in
                      the header with what this frame adds */
    bool qjl; /* turboquant of 2 bits and more: the last bit is a sign sketch of what the others
               * leave; unbiased inner products, larger errors. For research. */
};

/* Preset and parameters from a text such as "int8", "turboquant:4", "turboquant:4,3" (bits of keys
 * and values), "turboquant:4+qjl", "klt:.35" (step) or "jolt+:3" (ratio); everything else 0. 0 or
 * CST_CODEC_E_PRESET.
 */
int cst_preset_parse(struct cst_encode_params *out, const char *text);

struct cst_frame_info {
    uint32_t version, preset, tokens, first_position;
    uint64_t block_bytes; /* decoded size */
    uint64_t frame_bytes; /* encoded size, header included */
    float error;          /* largest error found at encode time, as in `bound`; 0 when exact */
    uint32_t block_crc;   /* CRC32C of the decoded block */
    uint32_t layout_crc;  /* CRC32C over the segment table: cheap check against a foreign layout */
    uint8_t bits_k, bits_v; /* of turboquant; else 0 */
    bool layered;           /* flag of the frame, docs/codec-format.md section 2 */
    bool over_budget; /* after encode only: this is the smallest, and misses the ratio asked for */
    uint32_t side_version, side_check; /* side data that it needs; version 0: none */
};

/* Largest frame any preset makes for this descriptor: raw + header. */
size_t cst_frame_bound(const struct cst_descriptor *desc);

/* Workspace bytes that encode and decode need for a preset; alignment 64. 0: no such preset. */
size_t cst_codec_work_size(const struct cst_descriptor *desc, uint32_t preset);
size_t cst_codec_work_size_max(const struct cst_descriptor *desc); /* enough for any of them */

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

#define CST_POSITION_OWN UINT32_MAX

struct cst_decode_params {
    uint32_t first_layer, n_layers; /* all: 0, UINT32_MAX */
    uint32_t position;              /* to place the first token at; CST_POSITION_OWN: its own */
    const struct cst_side *side;    /* what the frame refers to; NULL: none at hand */
};
#define CST_DECODE_ALL                                                                             \
    ((struct cst_decode_params){ .n_layers = UINT32_MAX, .position = CST_POSITION_OWN })

/*
 * Decodes layers first_layer .. first_layer + n_layers - 1 into their places in block (block_bytes
 * bytes); bytes of other layers stay untouched. len may exceed the frame's own length.
 * Each stream that is read is checked against its checksum, or a whole block against block_crc:
 * frames that aren't layered decode to the same bits everywhere, lossy ones too. At another
 * position rotated keys are turned there, values rounded once more where they were kept exact.
 * After an error the bytes of the layers asked for are undefined.
 */
int cst_frame_decode(void *block, size_t cap, const void *frame, size_t len,
                     const struct cst_descriptor *desc, const struct cst_decode_params *params,
                     void *work, size_t work_len);
