/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Request traces: which blocks each prompt has, and when it came. Two formats are read, as they are
 * or compressed with zstd: lines of JSON objects with timestamp (ms), input_length and hash_ids
 * (Mooncake, 512 tokens a block), and one object with block_size and requests of t (s), in and
 * hash_ids (kv-cache-tester). A last block that is not full is dropped.
 *
 * The ids of a trace are chained: an id always has the same predecessor. Ids are renumbered from 0
 * by first appearance. Functions return 0 or a negative errno; -EINVAL: not such a trace.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { CST_TRACE_NO_BLOCK = UINT32_MAX };

struct cst_trace_request {
    uint32_t time_s;
    uint32_t n_blocks;
    size_t first; /* blocks[first .. first + n_blocks) */
};

struct cst_trace {
    uint32_t block_tokens;
    size_t n_requests;
    struct cst_trace_request *requests;
    size_t n_touches;
    uint32_t *blocks;
    uint32_t n_blocks; /* different ones */
};

#define CST_TRACE_NULL ((struct cst_trace){ .requests = NULL })

int cst_trace_load(struct cst_trace *out, const char *path);
int cst_trace_parse(struct cst_trace *out, const char *text, size_t len);
void cst_trace_deinit(struct cst_trace *t);
