/* SPDX-License-Identifier: Apache-2.0 */
/* The cache of a real model, $CISTERN_DATA/kv or the excerpt in tests/data, as blocks of an engine:
 * bf16, rotated keys. One thread. */
#pragma once

#include "base/layout.h"

#include <stddef.h>
#include <stdint.h>

enum {
    BENCH_TOKENS = 64,
    BENCH_HEADS = 3,
    BENCH_DIMS = 64,
    BENCH_ROW = BENCH_HEADS * BENCH_DIMS * 2,
    BENCH_PART = BENCH_TOKENS * BENCH_ROW, /* of a segment */
};

struct cst_dense;

/* The different blocks, one after the other, and their layout: K and V of each layer in turn. */
struct bench_cache {
    struct cst_descriptor desc;
    uint8_t *blocks;
    size_t n, per_text;
    uint32_t first_position; /* of each text */
    struct cst_dense *dense; /* for presets that need side data, the benchmark's; else NULL */
};

/* The layout alone, without blocks: 0 or -ENOMEM; deinit in any case. */
int bench_cache_layout(struct bench_cache *c);

/* 0, -ENOENT where there is none, or -ENOMEM; deinit in any case. */
int bench_cache_load(struct bench_cache *c);
void bench_cache_deinit(struct bench_cache *c);

/* The position of the first token of block i, the blocks repeated as often as wanted. */
uint32_t bench_cache_position(const struct bench_cache *c, size_t i);

/* Squared differences of n bytes of bf16, and squares of x, added to what is there. */
struct bench_error {
    double errors, energy;
};
void bench_error_add(struct bench_error *e, const uint8_t *x, const uint8_t *y, size_t n);

/* FOLDER/NAME.bf16.zst: [layer][token][head][dim] in bf16, for cst_free(); NULL: can't be read. */
uint8_t *bench_cache_tensor(size_t *size, const char *folder, const char *name);
