/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes of side data, format 1: header, directory, sections. docs/codec-format.md section 10
 * explains them. And the shape that learning chooses for a model, for side.c and learn.c.
 */
#pragma once

#include "codec/side.h"

#include "base/le.h"

#define CST_SIDE_MAGIC "CSID"

enum {
    CST_SIDE_FORMAT = 1,
    CST_SIDE_ALIGN = 16,      /* sections start at multiples of this */
    CST_SIDE_WIDTH_MAX = 256, /* channels that share a basis */
    CST_SIDE_CHANNELS_MAX = 16384,
    CST_SIDE_RANK_MAX = 512,        /* coordinates of a source */
    CST_SIDE_PICK_GROUPS_MAX = 1024 /* of a source whose coordinates are inputs */
};

/* The first 6 bytes stay what they are in every format. */
struct cst_side_header {
    uint8_t magic[4];
    struct cst_le16 format;
    struct cst_le16 version;
    struct cst_le32 bytes; /* of the whole */
    struct cst_le32 model; /* cst_side_model() */
    struct cst_le32 n_sections;
    struct cst_le32 tokens;
    struct cst_le32 step; /* float */
    uint8_t reserved[4];
};
_Static_assert(sizeof(struct cst_side_header) == 32, "docs/codec-format.md section 10");

/* By layer, then tensor, then kind, rising; sections follow in the same order without gaps but the
 * zeros up to the next multiple of CST_SIDE_ALIGN. */
struct cst_side_entry {
    uint8_t kind, tensor;
    struct cst_le16 layer;
    struct cst_le32 offset, length;
    uint8_t reserved[4];
};
_Static_assert(sizeof(struct cst_side_entry) == 16, "docs/codec-format.md section 10");

/* Then f32 mean[channels], f32 sigma[channels], f16 basis matrices. */
struct cst_side_klt {
    struct cst_le32 channels, width;
    struct cst_le32 rms, weight; /* float */
};
_Static_assert(sizeof(struct cst_side_klt) == 16, "docs/codec-format.md section 10");

/* Then f32 sigma[channels], f16 basis matrices, f16 predictor matrices. */
struct cst_side_predictor {
    uint8_t sources;
    uint8_t reserved;
    struct cst_le16 rank;  /* 0 in PREDICTOR */
    struct cst_le32 scale; /* float: of the predictor's elements, which are fp16 */
};
_Static_assert(sizeof(struct cst_side_predictor) == 8, "docs/codec-format.md section 10");

/* CRC32C over what the tables depend on: layers, heads, dimensions, rotation. Not over layout,
 * element type or block size. */
uint32_t cst_side_model(const struct cst_descriptor *desc);

/* Channels of a layer's K or V; 0 for tensors that side data can't describe. */
uint32_t cst_side_channels(const struct cst_descriptor *desc, uint32_t layer, uint8_t tensor);

/* Channels of the widest tensor. */
uint32_t cst_side_most(const struct cst_descriptor *desc);

/* The widest groups with which bases and predictors stay within CST_SIDE_BYTES_MAX. */
struct cst_side_plan {
    uint32_t width;  /* 0: not even bases fit */
    uint32_t inputs; /* most that a predictor may have; 0: no predictors */
    uint64_t bytes;  /* most that side data of this plan take */
};
struct cst_side_plan cst_side_plan(const struct cst_descriptor *desc);

/* Group g of `channels`: its first channel and its width. */
struct cst_side_span {
    uint32_t at, n;
};
static inline struct cst_side_span cst_side_group(uint32_t channels, uint32_t width, uint32_t g) {
    uint32_t at = g * width;

    return (struct cst_side_span){ at, channels - at < width ? channels - at : width };
}

/* Width of groups within `most`, whole heads where they fit. */
uint32_t cst_side_width(uint32_t heads, uint32_t dims, uint32_t most);

/* Which channels of a source (of `from` channels) group g of a target sees. */
static inline struct cst_side_span cst_side_seen(uint32_t from, uint32_t from_width,
                                                 uint32_t channels, uint32_t width, uint32_t g) {
    uint32_t n = cst_side_groups(channels, width), m = cst_side_groups(from, from_width);

    return m ? cst_side_group(from, from_width, g * m / n) : (struct cst_side_span){ 0, 0 };
}

/* The tensor that bit i of a tensor's sources means, of those in [2 * layers]; NULL: there is none,
 * or nothing is known of it. */
static inline const struct cst_side_tensor *cst_side_source(const struct cst_side_tensor *all,
                                                            uint32_t layer, uint8_t tensor, int i) {
    uint32_t kind = (uint32_t)i % 2, back = (uint32_t)i / 2 + !(tensor == 1 && kind == 0);
    const struct cst_side_tensor *from;

    if (layer < back)
        return NULL;
    from = &all[2 * (layer - back) + kind];
    return from->channels ? from : NULL;
}

/* The first n = min(rank, channels) coordinates of a tensor by falling deviation, whatever their
 * group: group[i] is that of the i-th, which is the next of this group's. rank at most
 * CST_SIDE_RANK_MAX. n; 0: it has more than CST_SIDE_PICK_GROUPS_MAX groups. */
uint32_t cst_side_pick(uint16_t *group, const struct cst_side_tensor *from, uint32_t rank);
