/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A C program as its author would write it: llama.h, cistern/llama.h, nothing else of this project.
 * usage: c_program MODEL SOCKET FILE
 *
 * Computes the text of FILE in one context and stores it; a second context restores it and computes
 * one token; so does a third one with the engine's own saved state. Prints the tokens restored;
 * exit 0 when both give the same logits, bit for bit. test_engine_c_program.py compiles it.
 */
#include <cistern/llama.h>
#include <llama.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 300 };

#define MUST(x)                                                                                    \
    do {                                                                                           \
        if (!(x)) {                                                                                \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cistern_last_error());      \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static void quiet(enum ggml_log_level level, const char *text, void *data) {
    (void)level;
    (void)text;
    (void)data;
}

static struct llama_context *new_context(struct llama_model *model) {
    struct llama_context_params params = llama_context_default_params();
    struct llama_context *ctx;

    params.n_ctx = 512;
    params.n_threads = params.n_threads_batch = 1;
    ctx = llama_init_from_model(model, params);
    MUST(ctx);
    return ctx;
}

static size_t read_tokens(struct llama_model *model, const char *path, int32_t *out) {
    static char text[4000];
    FILE *f = fopen(path, "r");
    int32_t n;

    MUST(f);
    n = (int32_t)fread(text, 1, sizeof(text), f);
    fclose(f);
    n = llama_tokenize(llama_model_get_vocab(model), text, n, out, 4000, false, false);
    MUST(n >= TOKENS);
    return TOKENS;
}

/* Decodes tokens[n..end); positions follow from what the sequence holds. */
static const float *decode(struct llama_context *ctx, int32_t *tokens, size_t n, size_t end) {
    MUST(llama_decode(ctx, llama_batch_get_one(tokens + n, (int32_t)(end - n))) == 0);
    return llama_get_logits_ith(ctx, -1);
}

static cistern_llama *adapter(cistern_client *client, struct llama_context *ctx,
                              const char *model) {
    const cistern_llama_facts facts = { .size = sizeof(facts), .model_path = model };
    cistern_llama *out = NULL;

    MUST(cistern_llama_open(client, ctx, &facts, &out) == CISTERN_OK);
    return out;
}

int main(int argc, char **argv) {
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;
    struct llama_context *first, *second, *third;
    cistern_llama *writer, *reader;
    cistern_client *client = NULL;
    struct llama_model *model;
    int32_t tokens[4000];
    size_t n, done, vocab, size;
    const float *restored, *reference;
    unsigned char *state;

    MUST(argc == 4);
    llama_log_set(quiet, NULL);
    model = llama_model_load_from_file(argv[1], llama_model_default_params());
    MUST(model);
    n = read_tokens(model, argv[3], tokens);
    vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(model));
    options.socket_path = argv[2];
    MUST(cistern_client_open(&client, &options) == CISTERN_OK);

    first = new_context(model);
    writer = adapter(client, first, argv[1]);
    decode(first, tokens, 0, n);
    MUST(cistern_llama_store(writer, 0, tokens, n, &done) == CISTERN_OK && done == n);

    second = new_context(model);
    reader = adapter(client, second, argv[1]);
    MUST(cistern_llama_restore(reader, 0, tokens, n, &done) == CISTERN_OK);
    printf("%zu of %zu tokens restored\n", done, n);
    restored = decode(second, tokens, done, n);

    third = new_context(model);
    size = llama_state_seq_get_size(first, 0);
    state = malloc(size);
    MUST(state && llama_state_seq_get_data(first, state, size, 0) == size);
    MUST(llama_state_seq_set_data(third, state, size, 0) == size);
    llama_memory_seq_rm(llama_get_memory(third), 0, (llama_pos)done, -1);
    reference = decode(third, tokens, done, n);
    MUST(memcmp(restored, reference, vocab * sizeof(float)) == 0);

    free(state);
    cistern_llama_close(reader);
    cistern_llama_close(writer);
    cistern_client_close(client);
    llama_free(first);
    llama_free(second);
    llama_free(third);
    llama_model_free(model);
    return done == n - 1 ? 0 : 1;
}
