/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an eviction policy would have saved on a trace. Deterministic.
 *
 * The cache keeps blocks of one size as a trie, like the store: a request hits the blocks at its
 * start that are there, then stores the others in order. For each block that does not fit, the
 * policy's victim goes; only leaves may go that are not in the request's own chain. When there is
 * none, the rest of the request is not stored.
 *
 * To compute 512 tokens at token position p takes 512 x (1 + p / 16,384) seconds (of some machine;
 * only ratios mean something); a hit saves them.
 */
#pragma once

#include "bench/evict_trace.h"
#include "store/evict.h"

struct cst_sim_result {
    uint64_t hit_tokens, tokens;
    double saved_s, all_s;
    uint64_t victims;
};

/* capacity: in blocks, at least 1. 0 or -ENOMEM. */
int cst_sim_policy(struct cst_sim_result *out, const struct cst_trace *trace, uint32_t capacity,
                   const struct cst_evict_ops *policy);

/* Belady's optimum for block hits: of the leaves that may go, the one that is used again last. */
int cst_sim_belady(struct cst_sim_result *out, const struct cst_trace *trace, uint32_t capacity);
