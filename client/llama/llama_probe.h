/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a llama.cpp context is: may its KV be cached, how do its states look, and the descriptor of
 * its space.
 */
#pragma once

#include "client/llama/llama_api.h"
#include "client/llama/state.h"

#include <cistern/llama.h>

/* The version of the way in which state_copy.c lays out blocks; in every descriptor. */
enum { CST_LLAMA_BLOCK_ABI = 1 };

struct cst_llama_probe {
    struct cst_state_layout layout;
    uint32_t state_version; /* LLAMA_STATE_SEQ_VERSION of the library */
};

/*
 * CISTERN_OK; CISTERN_E_UNSUPPORTED with a sentence when the memory is not one plain KV cache;
 * CISTERN_E_ENGINE when llama.cpp fails. An empty context tells nothing about its types, so one
 * token is decoded into a free sequence and removed again, unless some sequence is in use already.
 */
int32_t cst_llama_probe(const struct cst_llama_api *api, struct llama_context *ctx,
                        struct cst_llama_probe *out);

/* A descriptor with the memory that it points to. */
struct cst_llama_description {
    cistern_descriptor descriptor;
    char options[CST_OPTIONS_MAX + 1];
    cistern_layer layers[CST_LAYERS_MAX];
    cistern_segment segments[CST_SEGMENTS_MAX];
};

/* Fills out (large: not for the stack). Reads the model file, hashes it if it must. */
int32_t cst_llama_describe(const struct cst_llama_api *api, const struct llama_context *ctx,
                           const struct cst_llama_probe *probe, const cistern_llama_facts *facts,
                           struct cst_llama_description *out);
