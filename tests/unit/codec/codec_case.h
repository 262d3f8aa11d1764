/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts and contents of blocks for the codec's tests. Heap; a test program's main thread. */
#pragma once

#include "codec/codec.h"
#include "codec/preset.h"
#include "codec/stage.h"

#include "base/random.h"

enum case_order {
    CASE_ROWS,       /* [token][head][dim], as llama.cpp keeps K */
    CASE_TRANSPOSED, /* [head][dim][token], as llama.cpp keeps V without flash attention */
    CASE_HEADS,      /* [head][token][dim] */
    CASE_PADDED,     /* rows with 6 bytes between them */
    CASE_PAIRS,      /* dims 2 elements apart: no axis is contiguous */
    CASE_OPAQUE,
    CASE_ORDERS
};

/* A model of n_layers layers with K and V in the same order, `gap` unused bytes before each
 * segment and after the last. */
struct case_shape {
    enum case_order order;
    enum cst_dtype dtype;
    uint32_t block_tokens, n_layers, heads, dims, gap;
};

struct case_block {
    struct cst_descriptor desc;
    uint8_t *block, *out, *frame;
    size_t cap, frame_len;
    void *work;
    size_t work_len;
    const struct cst_side *side; /* for decoding; the test's */
};

/* Fills the block with zeros. free: NULL ok. room: a new workspace after a change
 * of the layers. */
struct case_block *case_new(const struct case_shape *shape);
struct case_block *case_free(struct case_block *c);
void case_room(struct case_block *c);
static inline void case_freep(struct case_block **c) {
    *c = case_free(*c);
}

/* Says that the keys of all layers are stored rotated, base 10000; nothing for 0 dims. */
void case_rotate_keys(struct case_block *c, enum cst_rope rope, uint32_t dims);

/* Zero in the tokens from `tokens` on, in padding and in gaps; elsewhere values as a model has
 * them: each channel with its own mean and deviation. */
void case_fill_model(struct case_block *c, uint64_t seed, uint32_t tokens);
/* Any bytes everywhere. */
void case_fill_random(struct case_block *c, uint64_t seed);

/* Element of segment i as fp32, from `bytes` = c->block or c->out. */
float case_value(const struct case_block *c, const uint8_t *bytes, uint32_t i, uint32_t t,
                 uint32_t h, uint32_t d);
void case_set_value(struct case_block *c, uint32_t i, uint32_t t, uint32_t h, uint32_t d, float x);

/* cst_frame_encode / _decode with all of the case's buffers; out is filled with 0xa5 before. */
int case_encode(struct case_block *c, const struct cst_encode_params *params,
                struct cst_frame_info *info);
int case_decode(struct case_block *c, uint32_t first_layer, uint32_t n_layers);
int case_decode_at(struct case_block *c, uint32_t first_layer, uint32_t n_layers,
                   uint32_t position);

/* Every preset from `first` on that needs no side data. */
#define CASE_EACH_PRESET(preset, first)                                                            \
    for (uint32_t preset = (first); preset < CST_PRESETS; preset++)                                \
        if (cst_preset_name(preset) && !cst_preset_needs_side(preset))

/* Segment i of a case for its stages, which work in the case's own workspace. */
struct case_stage {
    struct cst_view view;
    struct cst_stage_segment s;
    struct cst_codec_work w;
};
void case_stage_init(struct case_stage *stage, struct case_block *c, uint32_t i, uint32_t tokens,
                     uint32_t first_position);
