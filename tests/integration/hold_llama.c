/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A worker that shares prompts through the llama.cpp adapter, over a stand-in for llama.cpp. usage:
 * hold_llama SOCKET MODEL_FILE
 *
 * Stores the KV of a prompt of three blocks, restores it into a second context as another worker
 * would, checks it and prints how many tokens came back; keeps its connection until its standard
 * input ends. One thread.
 */
#include "tests/unit/client_llama/fake_llama.h"

#include <cistern/llama.h>
#include <stdio.h>
#include <stdlib.h>

enum { BLOCK = 16, TOKENS = 3 * BLOCK };

#define MUST(x)                                                                                    \
    do {                                                                                           \
        if (!(x)) {                                                                                \
            (void)fprintf(stderr, "hold_llama: %s: %s\n", #x, cistern_last_error());               \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static cistern_llama *open_glue(cistern_client *client, struct llama_context *ctx,
                                const char *model) {
    cistern_llama_facts facts = { .size = sizeof(facts),
                                  .block_tokens = BLOCK,
                                  .model_path = model };
    cistern_llama *glue;

    MUST(cistern_llama_open(client, ctx, &facts, &glue) == CISTERN_OK);
    return glue;
}

int main(int argc, char **argv) {
    const struct fake_config config = { .form = { .n_stream = 1,
                                                  .n_layers = 4,
                                                  .type_k = 1,
                                                  .type_v = 1,
                                                  .k_row = 96,
                                                  .v_row = 96,
                                                  .element = 2 } };
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;
    struct llama_context *first, *second;
    cistern_llama *glue;
    cistern_client *client;
    int32_t tokens[TOKENS];
    size_t n;

    if (argc != 3) {
        (void)fputs("usage: hold_llama SOCKET MODEL_FILE\n", stderr);
        return 2;
    }
    for (int32_t i = 0; i < TOKENS; i++)
        tokens[i] = 100 + i;
    fake_llama_configure(&config);
    options.socket_path = argv[1];
    MUST(cistern_client_open(&client, &options) == CISTERN_OK);
    first = fake_llama_context();
    glue = open_glue(client, first, argv[2]);
    fake_llama_append(first, 0, tokens, TOKENS);
    MUST(cistern_llama_store(glue, 0, tokens, TOKENS, &n) == CISTERN_OK && n == TOKENS);
    cistern_llama_close(glue);

    second = fake_llama_context();
    glue = open_glue(client, second, argv[2]);
    MUST(cistern_llama_restore(glue, 0, tokens, TOKENS, &n) == CISTERN_OK);
    MUST(fake_llama_holds(second, 0, tokens, n));
    (void)printf("%zu\n", n);
    (void)fflush(stdout);
    while (getchar() != EOF)
        ;
    cistern_llama_close(glue);
    cistern_client_close(client);
    fake_llama_free(second);
    fake_llama_free(first);
    return 0;
}
