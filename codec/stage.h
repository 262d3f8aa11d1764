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
#include "codec/rope.h"
#include "codec/view.h"

/* Rows of a segment that are kept as they are (codec/outliers.h). */
enum {
    CST_OUTLIERS_SHARE = 16, /* at most one in so many coded tokens */
    CST_OUTLIERS_MAX = CST_BLOCK_TOKENS_MAX / CST_OUTLIERS_SHARE
};
struct cst_outliers {
    uint16_t n;
    uint16_t token[CST_OUTLIERS_MAX]; /* in the block, rising */
};

struct cst_codec_work {
    const struct cst_codec_ops *ops;
    uint32_t preset; /* that the workspace is laid out for */
    const struct cst_descriptor *desc;
    const struct cst_encode_params *params; /* NULL while decoding */
    const struct cst_side *side;            /* NULL: none */
    uint32_t *order; /* [n_segments] segment of each stream; filled by cst_layout_order() */
    struct cst_outliers *outliers; /* [n_segments] of those coded so far, or decoded */
    float *energy;                 /* [2][block_tokens] */
    void *dense; /* of the presets of layered frames, cst_dense_work_size() bytes */
    struct cst_huff_table *huff;
    struct cst_exponents_work *exponents;
    uint8_t *a, *b; /* each as long as the longest segment that isn't opaque, or as all gaps */
    float *plane;   /* fp32 of the longest segment with a view, rows padded to 8 channels */
    struct cst_rope_table *rope; /* NULL when no keys of this layout can be turned */
    void *zstd; /* for one context; NULL when no stream of this layout can need it */
    size_t zstd_size;
};

/* One segment of a block with what the stages need to know of it. */
struct cst_stage_segment {
    uint64_t length;
    const struct cst_view *view;
    const struct cst_layer *rotated; /* how, for keys that are stored rotated; else NULL */
    uint32_t index;                  /* in the descriptor */
    uint32_t layer;
    uint8_t tensor, dtype;
    uint32_t tokens;   /* present */
    uint32_t sinks;    /* of them, at the start, kept exact by lossy stages */
    uint32_t position; /* that rotated keys are turned back from, or out to; of the first token */
};

/* false: too small (cst_codec_work_size()) or not aligned to 64 bytes. */
bool cst_codec_work_init(struct cst_codec_work *w, const struct cst_descriptor *desc,
                         uint32_t preset, void *work, size_t work_len);

/* A segment of a block of `tokens` tokens, the first one at first_position; view is its room. */
struct cst_stage_segment cst_stage_segment(struct cst_view *view, const struct cst_descriptor *desc,
                                           const struct cst_segment *seg, uint32_t tokens,
                                           uint32_t first_position);

/* ---- any stage (stage.c) ---- */

struct cst_stream {
    uint8_t stage;
    size_t length;
    float error;
    bool lossy;        /* the decoded segment is in w->a */
    bool leans;        /* on side data */
    uint16_t outliers; /* behind what the stage made */
};

/* As the preset of w->params wants it, or without loss, or as it is. dst as for a stage. */
struct cst_stream cst_stream_encode(uint8_t *dst, const uint8_t *seg,
                                    const struct cst_stage_segment *s,
                                    const struct cst_codec_work *w);
/* n bytes that are in no segment, or opaque */
struct cst_stream cst_stream_encode_bytes(uint8_t *dst, const uint8_t *src, uint64_t n,
                                          uint32_t preset, const struct cst_codec_work *w);

/* n bytes from a stream, and the outliers behind it that were opened; s is NULL for the bytes in no
 * segment. */
bool cst_stream_decode(uint8_t *dst, uint64_t n, const struct cst_stage_segment *s, uint8_t stage,
                       const uint8_t *src, size_t len, const struct cst_codec_work *w);

/* Whether streams of this stage may stand in a frame. */
bool cst_stage_known(uint8_t stage, bool layered);

/* Whether outliers may stand behind streams of this stage. */
bool cst_stage_is_lossy(uint8_t stage);

/* Whether the stream keeps keys turned back, so that decoding can place all but the sinks
 * and outliers anywhere. */
bool cst_stage_is_unrotated(uint8_t stage, const uint8_t *src, size_t len);

/* Turns keys that were decoded at s->position to `position`; false when they can't be. With
 * only_kept sinks and outliers alone, the rest is there already. */
bool cst_stage_place(uint8_t *seg, const struct cst_stage_segment *s, uint32_t position,
                     bool only_kept, const struct cst_codec_work *w);

/* ---- layered presets (layered.c) ---- */

/* Bytes of w->dense, 0 for other presets. */
size_t cst_dense_work_size(const struct cst_descriptor *desc, uint32_t preset);

/* Before the first stream of a layered frame is encoded, or decoded (block NULL). */
bool cst_layered_begin(const uint8_t *block, uint32_t tokens, uint32_t first_position,
                       uint32_t preset, const struct cst_codec_work *w);

/* After all segments were encoded: the block turns out to be one that was coded before, and another
 * choice, made now, keeps more of it; all are to be encoded once more. */
bool cst_layered_again(const struct cst_codec_work *w);

/* After encode: the smallest choice of the preset misses the ratio asked for. */
bool cst_layered_over_budget(const struct cst_codec_work *w);

/* A stream of a layer before those asked for, which later ones may depend on. */
bool cst_layered_skip(const struct cst_stage_segment *s, uint8_t stage, const uint8_t *src,
                      size_t len, const struct cst_codec_work *w);

size_t cst_planes_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                         const struct cst_codec_work *w);
bool cst_planes_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                       size_t len, const struct cst_codec_work *w);

/* The elements as one array: the segment itself where they lie together, else gathered in w->a;
 * and back from the planes that ops->split() makes of it. */
const uint8_t *cst_planes_elements(const uint8_t *seg, const struct cst_runs *runs,
                                   const struct cst_codec_work *w);
void cst_planes_put_elements(uint8_t *seg, const struct cst_runs *runs, const uint8_t *hi,
                             const uint8_t *lo, const struct cst_codec_ops *ops);

/* About what PLANES makes of two planes of n bytes. */
size_t cst_planes_bound(const uint8_t *hi, const uint8_t *lo, size_t n);

/* Needs a view. encode leaves the decoded segment in w->a and its error, as defined by
 * cst_distortion(), in *error. */
size_t cst_int8_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                       const struct cst_codec_work *w, float *error);
bool cst_int8_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                     size_t len, const struct cst_codec_work *w);

/*
 * The stages over coded.h. Need a view. encode as cst_int8_encode().
 *
 * GROUPS: codes of 2 to 8 bits with a scale, and a zero if flags say so, for each 2^group values
 * of a token, or of a channel. As stored, or keys turned back.
 */
struct cst_groups_params {
    uint8_t flags; /* of enum cst_coded_flag: ZEROS, BY_CHANNEL, UNROTATED where it applies */
    uint8_t bits, group;
};
size_t cst_groups_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                         const struct cst_groups_params *params, const struct cst_codec_work *w,
                         float *error);
bool cst_groups_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                       size_t len, const struct cst_codec_work *w);

/* LLOYD: each head, keys turned back, Hadamard transformed, codes of 1 to 8 bits of the values over
 * one norm. flags: MEAN, less the channel means where they save more than they take; SKETCH, of 2
 * bits and more. SPUN: the same behind cst_head_spin(), for heads that a transform alone doesn't
 * make normal; encode takes it where it errs less and says in *stage which one it was; NULL: LLOYD
 * whatever it errs. */
size_t cst_lloyd_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                        unsigned bits, uint8_t flags, const struct cst_codec_work *w, float *error,
                        uint8_t *stage);
bool cst_lloyd_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                      size_t len, const struct cst_codec_work *w);
bool cst_spun_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                     size_t len, const struct cst_codec_work *w);

/*
 * TUCKER (codec/tucker.h), in layered frames only: a segment as its part of a decomposition that
 * it shares with others, and codes of the residual. encode wants the frame planned and its segments
 * in the order of streams, decode those streams before it that carry factors; skip reads one of
 * them for that alone.
 */
size_t cst_tucker_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                         const struct cst_codec_work *w, float *error);
bool cst_tucker_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                       size_t len, const struct cst_codec_work *w);
bool cst_tucker_skip(const struct cst_stage_segment *s, const uint8_t *src, size_t len,
                     const struct cst_codec_work *w);

/* POLAR: each head, keys turned back, Hadamard transformed, as lengths and angles of 16 values.
 * Heads of a multiple of 16 dimensions. */
size_t cst_polar_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                        const struct cst_codec_work *w, float *error);
bool cst_polar_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                      size_t len, const struct cst_codec_work *w);

/* Any bytes. */
size_t cst_zstd_work_size(void);
size_t cst_zstd_encode(uint8_t *dst, const uint8_t *src, size_t n, const struct cst_codec_work *w);
bool cst_zstd_decode(uint8_t *dst, size_t n, const uint8_t *src, size_t len,
                     const struct cst_codec_work *w);

/* One token's values as fp32 in channel order. */
void cst_stage_load_row(float *x, const uint8_t *seg, const struct cst_view *view, uint32_t t,
                        const struct cst_codec_ops *ops);

/* The other way; values that are not finite stay so. Uses w->b. */
void cst_stage_store_row(uint8_t *seg, const struct cst_view *view, uint32_t t, const float *x,
                         const struct cst_codec_work *w);

/* The sinks' values as they are, in channel order; bytes that they take. */
size_t cst_stage_save_sinks(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s);
size_t cst_stage_restore_sinks(uint8_t *seg, const uint8_t *src, const struct cst_stage_segment *s);

/* The end of a lossy encode: decodes into w->a, measures. Its length, or 0. */
typedef bool cst_stage_decode_fn(uint8_t *seg, const struct cst_stage_segment *s,
                                 const uint8_t *src, size_t len, const struct cst_codec_work *w);
size_t cst_stage_finish(cst_stage_decode_fn *decode, const uint8_t *stream, size_t len,
                        const uint8_t *seg, const struct cst_stage_segment *s,
                        const struct cst_codec_work *w, float *error);

/*
 * Rms error over rms deviation from the channel mean, over tokens first .. end - 1 of a segment and
 * its decoded form. 0 when there is no error; infinite when there is one and no deviation, or a
 * value that is not finite. Tokens of `but` don't count; NULL: none. Uses w->b.
 */
double cst_distortion(const uint8_t *seg, const uint8_t *decoded, const struct cst_view *view,
                      uint32_t first, uint32_t end, const struct cst_outliers *but,
                      const struct cst_codec_work *w);
