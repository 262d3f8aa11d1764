/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two blocks of a make-believe model: look them up, store what is missing, read them back.
 *     cc example.c $(pkg-config --cflags --libs cistern) && ./a.out
 * Run it twice: the second run, a process of its own, finds what the first one stored.
 */
#include <cistern/cistern.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_TOKENS = 64, BLOCKS = 2, TOKENS = BLOCKS * BLOCK_TOKENS, HEADS = 4, DIM = 32 };
enum { TENSOR_BYTES = BLOCK_TOKENS * HEADS * DIM * 2, BLOCK_BYTES = 2 * TENSOR_BYTES };

static void check(int32_t status, const char *what) {
    if (status == CISTERN_OK)
        return;
    (void)fprintf(stderr, "%s: %s\n", what, cistern_last_error());
    exit(1);
}

/* One layer: K and V of 64 tokens, 16-bit floats, [token][head][dimension]. */
static cistern_space *open_space(cistern_client *client) {
    cistern_layer layer = { .kv_heads = HEADS, .head_dim_k = DIM, .head_dim_v = DIM };
    cistern_segment segments[2] = { { .tensor = CISTERN_TENSOR_K },
                                    { .tensor = CISTERN_TENSOR_V } };
    cistern_descriptor model = { .size = sizeof(model), .content_id = "make-believe" };
    cistern_space *space;

    for (int i = 0; i < 2; i++) {
        segments[i].dtype = CISTERN_DTYPE_F16;
        segments[i].offset = (uint64_t)i * TENSOR_BYTES;
        segments[i].length = TENSOR_BYTES;
        segments[i].token_stride = HEADS * DIM * 2;
        segments[i].head_stride = DIM * 2;
        segments[i].dim_stride = 2;
    }
    model.engine = "example";
    model.block_tokens = BLOCK_TOKENS;
    model.block_bytes = BLOCK_BYTES;
    model.n_layers = 1;
    model.layers = &layer;
    model.n_segments = 2;
    model.segments = segments;
    check(cistern_space_open(client, &model, NULL, &space), "space_open");
    return space;
}

int main(void) {
    static unsigned char blocks[BLOCKS][BLOCK_BYTES], copies[BLOCKS][BLOCK_BYTES];
    const void *sources[BLOCKS] = { blocks[0], blocks[1] };
    void *targets[BLOCKS] = { copies[0], copies[1] };
    size_t sizes[BLOCKS] = { BLOCK_BYTES, BLOCK_BYTES }, n_keys;
    cistern_match match = { .size = sizeof(match) };
    uint8_t keys[BLOCKS * CISTERN_KEY_SIZE];
    uint32_t tokens[TOKENS];
    int32_t statuses[BLOCKS];
    cistern_client *client;
    cistern_space *space;

    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = i;
    memset(blocks, 42, sizeof(blocks)); /* what a model would have computed */
    check(cistern_client_open(&client, NULL), "client_open");
    space = open_space(client);
    check(cistern_lookup(space, tokens, TOKENS, NULL, &match), "lookup");
    printf("stored before: %u of %d blocks\n", match.blocks, BLOCKS);
    check(cistern_key_chain(space, NULL, tokens, TOKENS, keys, BLOCKS, &n_keys), "key_chain");
    check(cistern_put_from(space, NULL, keys, tokens, TOKENS, n_keys, sources, statuses), "put");
    for (int i = 0; i < BLOCKS; i++)
        printf("put block %d: %s\n", i, cistern_status_text(statuses[i]));
    check(cistern_get_into(space, keys, n_keys, targets, sizes, statuses), "get");
    for (int i = 0; i < BLOCKS; i++)
        printf("got block %d: %s, %s\n", i, cistern_status_text(statuses[i]),
               memcmp(copies[i], blocks[i], BLOCK_BYTES) ? "other bytes" : "the same bytes");
    cistern_space_close(space);
    cistern_client_close(client);
    return 0;
}
