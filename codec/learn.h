/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Learns the side data of a space from blocks that it holds: channel means and Karhunen-Loeve bases
 * of each layer's K and V, and linear predictors of a layer from the one before.
 *
 * Predictors are learned layer by layer on values as the codec will reconstruct them (quantized at
 * `step`, predicted from reconstructed ones), by ridge regression. They are taken only where there
 * are enough tokens and where, in cross-validation, tokens that they weren't fitted to take fewer
 * bits with them.
 *
 * Pure and deterministic on one machine; the caller's workspace; any thread. Takes seconds for a
 * small model and thousands of tokens: a background job. It polls *stop, and reads each block about
 * four times, a layer at a time.
 */
#pragma once

#include "base/layout.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Conditions of cst_learn() */
enum {
    CST_LEARN_E_SMALL = 1, /* dst or work too small */
    CST_LEARN_E_FEW,       /* fewer than CST_LEARN_TOKENS_MIN tokens (sinks don't count) */
    CST_LEARN_E_SHAPE,     /* no tensor of this model has channels that could be learned */
    CST_LEARN_E_STOPPED,
};

enum {
    CST_LEARN_TOKENS_MIN = 256,
    CST_LEARN_TOKENS_GOOD = 8192, /* more gain little */
    CST_LEARN_TOKENS_MAX = 32768, /* further ones are ignored */
};

struct cst_learn_block {
    const uint8_t *bytes; /* decoded, block_bytes */
    uint32_t tokens, first_position;
};

struct cst_side;

struct cst_learn_params {
    uint32_t version; /* of the result, 1 .. CST_SIDE_VERSION_MAX */
    /* Quantizer step over the rms deviation that predictors are learned for; 0 = .4. Of a space's
     * class: what its `deep` preset uses. */
    float step;
    const struct cst_side *before; /* its step weights are kept; NULL: all are 1 */
    bool no_predictors;
    const atomic_bool *stop; /* NULL: never */
};

struct cst_learn_report {
    uint32_t tokens;             /* used */
    uint32_t tensors, predicted; /* with a basis; of them with a predictor */
    /* Bits a value at `step` by the entropy of normal variables, cross-validated: with bases
     * alone, and with predictors where they are taken. */
    float bits_klt, bits_deep;
};

/* Largest result for a model. */
size_t cst_learn_bound(const struct cst_descriptor *desc);

/* Bytes for at most `tokens` tokens in all blocks; alignment 64. */
size_t cst_learn_work_size(const struct cst_descriptor *desc, uint32_t tokens);

/* Writes *len and, when not NULL, *report on success. 0 or a condition. */
int cst_learn(void *dst, size_t cap, const struct cst_descriptor *desc,
              const struct cst_learn_block *blocks, size_t n_blocks,
              const struct cst_learn_params *params, void *work, size_t work_len, size_t *len,
              struct cst_learn_report *report);
