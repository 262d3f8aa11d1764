/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rotary position embedding: turns keys back to position 0, where their channels have means and
 * deviations worth knowing, and out again to any position. Rotation only: a magnitude that a
 * scaling brings (YaRN's attn_factor) is the same at every position and stays in the values.
 *
 * The tables are the same on every machine. One thread a table.
 */
#pragma once

#include "codec/dispatch.h"

#include "base/layout.h"

#include <stdbool.h>

/* cos and sin of `tokens` consecutive positions. */
struct cst_rope_table {
    uint32_t id, position, tokens; /* what it holds; no tokens: nothing */
    uint32_t pairs, room;          /* rotated pairs of a head; the most that fit */
    float *cosine, *sine;          /* [token][pair] */
    double *state;                 /* four of each pair, while the table is made */
};

/* Whether this module can rotate heads of `dims` dimensions as the layer says: norm or neox with
 * no, linear, YaRN or llama3 scaling and parameters in their limits; never M-RoPE. */
bool cst_rope_known(const struct cst_layer *layer, uint32_t dims);

/* CRC32C over the parameters: keys turned back with one set aren't turned out with another. */
uint32_t cst_rope_id(const struct cst_layer *layer);

/* Angle in radians that pair i < rope_dims / 2 turns by from one position to the next. */
double cst_rope_frequency(const struct cst_layer *layer, uint32_t i);

/* An empty table in memory of cst_rope_work_size() bytes, alignment 64. */
size_t cst_rope_work_size(uint32_t tokens, uint32_t pairs);
struct cst_rope_table *cst_rope_table_init(void *work, uint32_t tokens, uint32_t pairs);

/* Fills the table unless it holds these positions already. The layer is known; tokens and
 * rope_dims / 2 are at most those of the table. */
void cst_rope_prepare(struct cst_rope_table *table, const struct cst_layer *layer,
                      uint32_t position, uint32_t tokens);

/* Turns the heads of row `token` of a prepared table: direction 1 out, -1 back. */
void cst_rope_turn(const struct cst_rope_table *table, const struct cst_layer *layer, float *row,
                   uint32_t heads, uint32_t dims, uint32_t token, float direction,
                   const struct cst_codec_ops *ops);
