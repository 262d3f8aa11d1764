/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One text's tensors through frames: encoded block by block, decoded, compared. One thread.
 * Functions return 0 or a negative errno and have printed a sentence.
 */
#pragma once

#include "codec/codec.h"
#include "tools/tensor_file.h"

#include <stddef.h>
#include <stdint.h>

struct cst_codec_text {
    const struct cst_tensor_file *tensors; /* borrowed */
    struct cst_descriptor desc;            /* of its blocks */
    uint8_t *block, *work, *work_heap;
    size_t work_len;
    uint8_t *frames; /* one after the other, each as long as its header says */
    size_t len, cap, n_frames;
    float error;               /* the largest in their headers */
    double encode_s, decode_s; /* CPU time of the codec itself */
};
#define CST_CODEC_TEXT_NULL ((struct cst_codec_text){ 0 })

int cst_codec_text_init(struct cst_codec_text *c, const struct cst_tensor_file *tensors,
                        uint32_t block_tokens);
void cst_codec_text_deinit(struct cst_codec_text *c);

/* Fills frames. params->tokens and first_position are ignored: each block has its own. */
int cst_codec_text_encode(struct cst_codec_text *c, const struct cst_encode_params *params);
/* Forgets the frames: what is encoded next is the first one. */
void cst_codec_text_restart(struct cst_codec_text *c);
/* Decodes frames into the tensors of `out`, of the same shape. side: NULL if there is none. */
int cst_codec_text_decode(struct cst_codec_text *c, const struct cst_side *side,
                          struct cst_tensor_file *out);

/* Squared error of b over energy of a per layer, tokens that presets keep raw left out; part 0: K,
 * 1: V. out: layers values. */
void cst_codec_text_nmse(const struct cst_tensor_file *a, const struct cst_tensor_file *b, int part,
                         double *out);
