/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The functions of llama.cpp that the glue calls, found by name at run time: no engine headers, no
 * link-time dependency, whatever libllama the process has. Signatures as in llama.h of 0.5.0; the
 * one struct that is passed by value is mirrored here.
 *
 * The table is filled once and read only; calls follow llama.cpp's rule of one thread per context.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct llama_context;
struct llama_model;

struct cst_llama_batch {
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos;
    int32_t *n_seq_id;
    int32_t **seq_id;
    int8_t *logits;
};

#define CST_LLAMA_FUNCTIONS(X)                                                                     \
    X(const struct llama_model *, get_model, (const struct llama_context *))                       \
    X(void *, get_memory, (const struct llama_context *))                                          \
    X(uint32_t, n_seq_max, (const struct llama_context *))                                         \
    X(uint32_t, n_ctx_seq, (const struct llama_context *))                                         \
    X(int32_t, decode, (struct llama_context *, struct cst_llama_batch))                           \
    X(bool, memory_seq_rm, (void *, int32_t seq, int32_t from, int32_t to))                        \
    X(int32_t, memory_seq_pos_max, (void *, int32_t seq))                                          \
    X(size_t, state_seq_get_size, (struct llama_context *, int32_t seq))                           \
    X(size_t, state_seq_get_data, (struct llama_context *, uint8_t *, size_t, int32_t seq))        \
    X(size_t, state_seq_set_data, (struct llama_context *, const uint8_t *, size_t, int32_t seq))  \
    X(size_t, state_seq_save_file,                                                                 \
      (struct llama_context *, const char *path, int32_t seq, const int32_t *tokens, size_t n))    \
    X(bool, model_is_recurrent, (const struct llama_model *))                                      \
    X(bool, model_is_hybrid, (const struct llama_model *))                                         \
    X(bool, model_has_encoder, (const struct llama_model *))                                       \
    X(int32_t, model_n_swa, (const struct llama_model *))                                          \
    X(int32_t, model_rope_type, (const struct llama_model *))                                      \
    X(int32_t, model_meta_val_str, (const struct llama_model *, const char *key, char *, size_t))  \
    X(const char *, version, (void))

struct cst_llama_api {
#define X(result, name, arguments) result(*name) arguments;
    CST_LLAMA_FUNCTIONS(X)
#undef X
};

/* Fills the table from a dlopen handle, or from the whole process (NULL). Returns NULL, or the name
 * of the first function that is missing. */
const char *cst_llama_api_resolve(struct cst_llama_api *out, void *library);
