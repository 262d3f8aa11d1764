/* SPDX-License-Identifier: Apache-2.0 */
/* Side data for the codec's tests, learned from blocks that look like a model's. */
#pragma once

#include "tests/unit/codec/codec_case.h"

#include "codec/learn.h"
#include "codec/side.h"

struct side_case {
    struct cst_side side;
    uint8_t *bytes;
    size_t len;
    void *memory;
    size_t memory_len;
    struct cst_learn_report report;
};

/* Tokens of one model: channels have means and deviations of their own (one in nine is constant,
 * one 25 times larger than others), share a few factors, and a layer follows the one before. The
 * rest of a block is zero. `seed` makes the tokens, not the model. */
void side_case_fill(struct case_block *c, uint64_t seed, uint32_t tokens);

/* Learned from `blocks` full blocks of c's shape, filled with seeds from 1000 on; c's own block is
 * overwritten. NULL params: version 1. deinit: twice ok. */
void side_case_learn(struct side_case *s, struct case_block *c, uint32_t blocks,
                     const struct cst_learn_params *params);
void side_case_deinit(struct side_case *s);

/* Learns from blocks as they are: bytes to s->bytes, not parsed. A condition of cst_learn(). */
int side_case_learn_blocks(struct side_case *s, const struct cst_descriptor *desc,
                           const struct cst_learn_block *blocks, size_t n,
                           const struct cst_learn_params *params);
/* A condition of cst_side_parse(). */
int side_case_parse(struct side_case *s, const struct cst_descriptor *desc);
