/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcistern for llama.cpp: restore and store the KV of one sequence, in blocks.
 *
 * No engine headers: the few llama.cpp functions are resolved by name at run time from the process
 * (or from the library handle in the facts). No change to llama.cpp. Not thread-safe per context,
 * like llama.cpp itself. Whatever goes wrong on cistern's side reads as a miss: *n_restored = 0 and
 * the sequence empty, or nothing stored; the return value and cistern_last_error() say why.
 */
#ifndef CISTERN_LLAMA_H
#define CISTERN_LLAMA_H

#include <cistern/cistern.h>

#ifdef __cplusplus
extern "C" {
#endif

struct llama_context;
typedef struct cistern_llama cistern_llama;

/* What llama.h does not tell about a context. */
typedef struct cistern_llama_facts {
    uint32_t size;
    uint32_t block_tokens;      /* 0: 64 */
    const char *model_path;     /* GGUF file; its SHA-256 (cached by device, inode, size, mtime) is
                                   the content id */
    void *library;              /* dlopen handle of libllama; NULL: search the process */
    const char *context_params; /* context parameters that change K or V: "rope_freq_base=..;..." */
    const char *const *adapter_paths; /* LoRA and control vector files */
    const float *adapter_scales;
    uint32_t n_adapters;
    uint32_t quality_class; /* CISTERN_CLASS_* */
    const void *salt;
    uint32_t salt_size;
    uint32_t reserved;
} cistern_llama_facts;

/* Binds a context to a space. Refuses what can't be cached exactly (sliding windows, recurrent and
 * hybrid memories, encoders, M-RoPE): CISTERN_E_UNSUPPORTED and one sentence. Call it before the
 * first decode: the layout of states shows only in a sequence that holds something, so in an empty
 * context one token is decoded and removed again, which replaces the last logits and counts in
 * llama.cpp's own statistics. */
int32_t cistern_llama_open(cistern_client *client, struct llama_context *ctx,
                           const cistern_llama_facts *facts, cistern_llama **out);
void cistern_llama_close(cistern_llama *glue);
cistern_space *cistern_llama_space(cistern_llama *glue);

/* Loads the longest stored prefix of tokens into sequence seq (cleared first) and leaves at least
 * one token to compute: *n_restored <= n_tokens - 1. The caller decodes from there. */
int32_t cistern_llama_restore(cistern_llama *glue, int32_t seq, const int32_t *tokens,
                              size_t n_tokens, size_t *n_restored);

/* Stores the KV of the first n_tokens tokens of sequence seq (prompt and generated tokens alike),
 * tail block included; blocks that are stored already are skipped. *n_stored = tokens now stored.
 */
int32_t cistern_llama_store(cistern_llama *glue, int32_t seq, const int32_t *tokens,
                            size_t n_tokens, size_t *n_stored);

#ifdef __cplusplus
}
#endif
#endif
