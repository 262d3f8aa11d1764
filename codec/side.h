/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Side data: tables that were learned for one space and that its frames refer to by version and
 * check. One byte string (docs/codec-format.md section 10), never changed once a frame refers to
 * it; parsed into memory of the caller for encoding and decoding. Not trusted: sizes, shapes and
 * values are checked, and what doesn't fit the model is refused.
 *
 * Pure functions on plain memory: any thread, any number at a time.
 */
#pragma once

#include "base/layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Conditions of cst_side_*() */
enum {
    CST_SIDE_E_SMALL = 1, /* dst or memory too small */
    CST_SIDE_E_CORRUPT,   /* no side data, truncated, or values out of their limits */
    CST_SIDE_E_VERSION,   /* of a format that this build doesn't know */
    CST_SIDE_E_MISMATCH,  /* of a model of another shape */
};

#define CST_SIDE_BYTES_MAX (UINT64_C(64) << 20)

enum { CST_SIDE_VERSION_MAX = UINT16_MAX };

/* What a tensor may be predicted from: of K and V those that were decoded last. Bit i means K
 * (even) or V (odd), i / 2 layers further back than the first of its kind. */
enum cst_side_source {
    CST_SIDE_FROM_K = 1,  /* for K: K of the layer before; for V: K of its own layer */
    CST_SIDE_FROM_V = 2,  /* V of the layer before */
    CST_SIDE_FROM_K2 = 4, /* K of the layer before FROM_K's */
    CST_SIDE_FROM_V2 = 8, /* V of the layer before FROM_V's */
};
enum { CST_SIDE_DEPTH = 2, CST_SIDE_SOURCES = 2 * CST_SIDE_DEPTH };

/* Width of a group of channels that share a basis: whole heads where they fit. */
static inline uint32_t cst_side_groups(uint32_t channels, uint32_t width) {
    return channels ? (channels + width - 1) / width : 0;
}

/* A rotation and the deviations of what it yields. */
struct cst_side_basis {
    const float *sigma; /* [channels] of the coefficients, group by group, falling in each */
    const float *rows;  /* group by group a w x w matrix, coefficient i = row i times the values */
};

/* What is known of K or V of a layer. No channels: nothing, it is coded without side data. */
struct cst_side_tensor {
    uint32_t channels; /* heads * dimensions */
    uint32_t width;    /* channels of a group; the last one may be narrower */
    float rms;         /* deviation from the channel means, over all channels */
    float weight;      /* of the quantizer's step; 1 without a step table */
    const float *mean; /* [channels] of K before its rotation, of V */
    struct cst_side_basis klt;
    /* With sources != 0: the residual of a prediction from values less their means; value j =
     * inputs times column j.
     * Rank 0: group g takes the group of each source that lies at the same share of its groups; its
     * matrix is n x w, n = the widths of the sources' groups, in the order of bits.
     * Else the inputs are principal coordinates, of each source the first `rank` (all, if it has
     * fewer) of all groups, cst_side_pick(); a matrix [n][channels] for each source, coordinates in
     * the order of groups. */
    uint8_t sources; /* bits of enum cst_side_source */
    uint32_t rank;
    struct cst_side_basis residual;
    const float *predictor;
    const float *offset; /* [channels] what is added to inputs that are not less their means */
};

/* Parsed and checked; lies in the caller's memory, as does what it points to. */
struct cst_side {
    uint32_t version; /* 1 .. CST_SIDE_VERSION_MAX, counted up in a space */
    uint32_t check;   /* the first four bytes of the SHA-256 over the whole, little-endian */
    uint8_t hash[32];
    uint32_t tokens; /* that it was learned from */
    float step;      /* that predictors were learned at */
    uint32_t n_layers;
    const struct cst_side_tensor *tensor; /* [2 * n_layers]: K, V of layer 0, K of layer 1, ... */
    const uint8_t *bytes;                 /* the caller's */
    size_t len, memory_used;              /* of the bytes; of the caller's memory */
};

static inline bool cst_side_is(const struct cst_side *side, uint32_t version, uint32_t check) {
    return side && side->version == version && side->check == check;
}

/* NULL when there is none. */
const struct cst_side_tensor *cst_side_tensor(const struct cst_side *side, uint32_t layer,
                                              uint8_t tensor);

/* Bytes of memory that cst_side_parse() needs for a model, alignment 64; at most about twice
 * CST_SIDE_BYTES_MAX, since matrices are fp16 in the bytes and fp32 in memory. */
size_t cst_side_memory(const struct cst_descriptor *desc);

/* bytes outlives *out. 0 or a condition. */
int cst_side_parse(struct cst_side *out, const void *bytes, size_t len,
                   const struct cst_descriptor *desc, void *memory, size_t memory_len);

/*
 * The same side data as a new version with other step weights: k and v of n_layers each, positive,
 * finite. Writes side->len bytes.
 */
int cst_side_set_weights(void *dst, size_t cap, const struct cst_side *side, uint32_t version,
                         const float *k, const float *v);

/* Sections of other kinds: tables that other stages own. NULL when there is none. */
enum cst_side_kind {
    CST_SIDE_KLT = 1,
    CST_SIDE_PREDICTOR = 2,
    CST_SIDE_EXPONENTS = 3,  /* of stage EXPONENTS */
    CST_SIDE_PREDICTOR2 = 4, /* of more sources, or from principal coordinates */
    CST_SIDE_KINDS
};
const uint8_t *cst_side_section(const struct cst_side *side, enum cst_side_kind kind,
                                uint32_t layer, uint8_t tensor, size_t *len);
