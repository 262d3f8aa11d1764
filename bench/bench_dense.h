/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Side data for the presets that need them, learned from the blocks that are measured, and a probe:
 * the dense products of decoding one block, alone. One thread.
 *
 * There are few blocks, so each is learned from several times, until there are tokens enough for
 * predictors. Their time is that of any others; their ratio flatters (docs/codecs.md has those of
 * other texts).
 */
#pragma once

#include "codec/codec.h"

struct cst_dense;

/* n blocks one after the other, their first positions in `position`. */
int cst_dense_new(struct cst_dense **out, const struct cst_descriptor *desc, const uint8_t *blocks,
                  const uint32_t *position, size_t n);
struct cst_dense *cst_dense_free(struct cst_dense *d);

void cst_dense_encode_params(const struct cst_dense *d, struct cst_encode_params *p);
void cst_dense_decode_params(const struct cst_dense *d, struct cst_decode_params *p);

/* The side data as they are stored; none of NULL. */
const uint8_t *cst_dense_bytes(const struct cst_dense *d, size_t *len);

/* The products of `ops` blocks of block_tokens tokens. */
struct cst_dense_probe {
    const struct cst_dense *dense;
    bool deep;
};
int cst_dense_run(void *probe, unsigned ops);
