/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A library with the functions of llama.cpp that the glue looks up, over a model that can be turned
 * into any kind by a few fields. The KV of a token is a function of all tokens up to it, so that KV
 * under the wrong prefix shows.
 */
#pragma once

#include "tests/unit/client_llama/sample_state.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { FAKE_SEQS = 4, FAKE_TOKENS = 1024, FAKE_ROW_MAX = 128, FAKE_LAYERS_MAX = 4 };

struct fake_meta {
    const char *key, *value;
};

struct fake_config {
    struct sample form; /* layout of states: streams, layers, types, rows */
    bool no_memory, recurrent, hybrid, encoder;
    int32_t n_swa, rope_type;
    const struct fake_meta *meta; /* ends with a NULL key */
    bool fail_decode, fail_set, fail_save;
    size_t cut_state;    /* bytes missing at the end of each state */
    uint32_t state_hole; /* this position is written as the one after the last; 0: none */
    const char *version;
    uint32_t n_ctx; /* 0: FAKE_TOKENS */
};

struct llama_context;

/* The model and the next contexts; counters start at 0. */
void fake_llama_configure(const struct fake_config *config);
struct llama_context *fake_llama_context(void);
void fake_llama_free(struct llama_context *ctx);

/* Computes tokens at the end of a sequence, as a decode would. */
void fake_llama_append(struct llama_context *ctx, int32_t seq, const int32_t *tokens, size_t n);

/* Tokens in a sequence, and whether their KV is what computing these tokens gives. */
size_t fake_llama_length(const struct llama_context *ctx, int32_t seq);
bool fake_llama_holds(const struct llama_context *ctx, int32_t seq, const int32_t *tokens,
                      size_t n);

struct fake_counters {
    unsigned decodes, gets, sets;
};
struct fake_counters fake_llama_counters(void);
