/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stages that turn one segment into one stream and back, and the workspace that they share.
 *
 * encode: dst holds at least as many bytes as the segment; returns the stream's length, or 0 when
 * the stage doesn't make it smaller or can't represent it, and then dst holds garbage.
 * decode: src is not trusted; false when it is no stream of this stage, and then the segment holds
 * garbage. `view` may be NULL for stages that allow a segment without one.
 */
#pragma once

#include "codec/dispatch.h"
#include "codec/view.h"

struct cst_codec_work {
    const struct cst_codec_ops *ops;
    struct cst_huff_table *huff;
    uint8_t *a, *b; /* each as long as the longest segment that isn't opaque, or as all gaps */
    void *zstd;     /* for one context; NULL when no stream of this layout can need it */
    size_t zstd_size;
};

/* One segment of a block with what the stages need to know of it. */
struct cst_stage_segment {
    uint64_t length;
    const struct cst_view *view;
    uint8_t dtype;
    uint32_t tokens; /* present */
    uint32_t sinks;  /* of them, at the start, kept exact by lossy stages */
};

size_t cst_planes_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                         const struct cst_codec_work *w);
bool cst_planes_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                       size_t len, const struct cst_codec_work *w);

/* Needs a view. encode leaves the decoded segment in w->a and its error, as defined by
 * cst_distortion(), in *error. */
size_t cst_int8_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                       const struct cst_codec_work *w, float *error);
bool cst_int8_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                     size_t len, const struct cst_codec_work *w);

/* Any bytes. */
size_t cst_zstd_work_size(void);
size_t cst_zstd_encode(uint8_t *dst, const uint8_t *src, size_t n, const struct cst_codec_work *w);
bool cst_zstd_decode(uint8_t *dst, size_t n, const uint8_t *src, size_t len,
                     const struct cst_codec_work *w);

/* One token's values as fp32 in channel order. */
void cst_stage_load_row(float *x, const uint8_t *seg, const struct cst_view *view, uint32_t t,
                        const struct cst_codec_ops *ops);

/*
 * Rms error over rms deviation from the channel mean, over tokens first .. end - 1 of a segment and
 * its decoded form. 0 when there is no error; infinite when there is one and no deviation, or a
 * value that is not finite. Uses w->b.
 */
double cst_distortion(const uint8_t *seg, const uint8_t *decoded, const struct cst_view *view,
                      uint32_t first, uint32_t end, const struct cst_codec_work *w);
