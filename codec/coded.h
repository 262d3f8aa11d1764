/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the stages GROUPS and LLOYD share: the canonical view of a segment (fp32, channel order,
 * keys turned back to position 0), the head of their streams, fp16 parameters and packed codes.
 * Pure; any thread.
 */
#pragma once

#include "codec/dtype.h"
#include "codec/format.h"
#include "codec/stage.h"

#include "base/macros.h"

/* A segment's coded tokens, sinks left out. */
struct cst_coded_shape {
    uint32_t channels, padded; /* padded to a multiple of 8 */
    uint32_t coded;            /* tokens */
    size_t sink_bytes, row_bytes /* of a token's codes */;
};
struct cst_coded_shape cst_coded_shape(const struct cst_stage_segment *s, unsigned bits);

/* Rows of `padded` values in w->plane: the coded tokens while encoding, the first one of them while
 * decoding, and three more behind all of them. */
struct cst_coded_rows {
    float *x, *a, *b;
    uint8_t *codes;
};
size_t cst_coded_plane_size(const struct cst_view *view);
struct cst_coded_rows cst_coded_rows(const struct cst_stage_segment *s,
                                     const struct cst_codec_work *w);

/* Fills the rows and the head's exponent and rope. false: holes that aren't zero, values that are
 * not finite or too large, or keys that can't be turned back. */
bool cst_coded_load(struct cst_coded_header *head, const uint8_t *seg,
                    const struct cst_stage_segment *s, const struct cst_codec_work *w);
/* The same to other rows; and those of a segment, keys turned back, that were loaded so before. */
bool cst_coded_load_to(struct cst_coded_header *head, float *rows, size_t stride,
                       const uint8_t *seg, const struct cst_stage_segment *s,
                       const struct cst_codec_work *w);
void cst_coded_load_again(float *rows, size_t stride, const uint8_t *seg,
                          const struct cst_stage_segment *s, const struct cst_codec_work *w);

/* Checks a stream's head, flags against those allowed, and prepares to store rows: sinks and holes
 * are in place then. */
bool cst_coded_open(struct cst_coded_header *head, uint8_t *seg, const struct cst_stage_segment *s,
                    uint8_t allowed, const uint8_t *src, size_t len,
                    const struct cst_codec_work *w);

/* Token t of the segment from a row, which is overwritten: turned out to its position, rounded. */
void cst_coded_store(uint8_t *seg, const struct cst_stage_segment *s, uint32_t t, float *row,
                     const struct cst_coded_header *head, const struct cst_codec_work *w);

/* Packs n codes, a multiple of 8, as ops->unpack() takes them apart. */
void cst_coded_pack(uint8_t *dst, const uint8_t *codes, size_t n, unsigned bits);

/* 2^exponent */
static inline float cst_coded_unit(int exponent) {
    return cst_f32_from_bits((uint32_t)(exponent + 127) << 23);
}

/* x / 2^exponent as fp16; false when that is not finite. */
static inline bool cst_coded_put(uint8_t *dst, float x, int exponent) {
    uint16_t half = cst_f32_to_f16(x * cst_coded_unit(-exponent));

    cst_store16(dst, half);
    return (half & 0x7c00) != 0x7c00;
}
