/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Outliers: tokens whose row of a segment is so far from the others that a lossy stage would spend
 * its error or its range on it. Like sinks they are kept as they are, but anywhere in the block;
 * the stage codes another row in their place, so no stage knows of them, and their number and their
 * values stand behind its stream (docs/codec-format.md section 4.11).
 *
 * Lists lie in w->outliers, one a segment. Rows are those behind the sinks.
 */
#pragma once

#include "codec/stage.h"

/*
 * A row's energy around the channel means over the median of all rows, from which on it is one. A
 * kept row of C values takes C e bytes and saves its error; as many bytes more for the m rows coded
 * lower their error by 16 ln 2 C e / (m C) of itself. Where a row's error is proportional to its
 * energy, as with scales, norms or gains of its own, the former is more from 11 e times the mean
 * energy on.
 */
static inline float cst_outlier_excess(const struct cst_view *view) {
    return 11.1f * (float)view->esize;
}
/* Where the error is the same for all rows, the same bits would hold a row of this energy. */
#define CST_OUTLIER_EXCESS_STEP 0x1p20f

struct cst_outlier_rows {
    float *x;
    size_t stride;
    uint32_t n, channels;
    uint32_t sinks;       /* tokens before the first row */
    float *mean, *energy; /* scratch: [channels], [2][n] */
};

/* Finds the outliers among rows, and writes the row of a token before it over each of them (after
 * it, for want of one). More than one in CST_OUTLIERS_SHARE are none: then they are how this tensor
 * is. */
void cst_outliers_find(struct cst_outliers *out, const struct cst_outlier_rows *rows, float excess);

/* The same of all coded rows of a segment, to its list. Uses w->b. */
void cst_outliers_take(float *rows, size_t stride, float excess, const struct cst_stage_segment *s,
                       const struct cst_codec_work *w);
/* Writes over those in the list once more, in rows that were loaded anew. */
void cst_outliers_stand_in(float *rows, size_t stride, const struct cst_stage_segment *s,
                           const struct cst_codec_work *w);

/* Bytes that they take behind a stream. */
size_t cst_outliers_size(const struct cst_stage_segment *s, const struct cst_codec_work *w);

/* Writes them to dst, and their values as they are into the decoded segment. */
void cst_outliers_save(uint8_t *dst, uint8_t *decoded, const uint8_t *seg,
                       const struct cst_stage_segment *s, const struct cst_codec_work *w);

/* Reads the list of n of them from the end of a stream of *len bytes, which becomes that of what is
 * before them. */
bool cst_outliers_open(const struct cst_stage_segment *s, uint32_t n, const uint8_t *src,
                       size_t *len, const struct cst_codec_work *w);

/* Values of the list that was opened, which begins at src. */
void cst_outliers_restore(uint8_t *seg, const uint8_t *src, const struct cst_stage_segment *s,
                          const struct cst_codec_work *w);
