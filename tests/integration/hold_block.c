/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A C program that holds a lease of one block until its standard input ends. usage: hold_block
 * SOCKET DESCRIPTOR_FILE KEY
 *
 * The file holds the canonical bytes of the space's descriptor, the key is 64 hex digits. Leases
 * the block, reads all of it and prints "ADDRESS SIZE SHA256" (the address in hex). Uses cistern.h
 * and the shared library like any program; only the file is read with the project's own decoder.
 * One thread.
 */
#include "base/sha256.h"
#include "proto/key.h"

#include <cistern/cistern.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEGMENTS = 64, LAYERS = 32 };

static int fail(const char *what, const char *why) {
    (void)fprintf(stderr, "hold_block: %s: %s\n", what, why);
    return 1;
}

static struct cst_descriptor *read_descriptor(const char *path) {
    static uint8_t bytes[CST_DESCRIPTOR_BYTES_MAX];
    struct cst_descriptor *d = NULL;
    FILE *f = fopen(path, "rb");
    char text[200] = "can't be read";
    size_t n = f ? fread(bytes, 1, sizeof(bytes), f) : 0;

    if (f)
        (void)fclose(f);
    if (cst_descriptor_decode(&d, bytes, n, text, sizeof(text)) || d->n_layers > LAYERS ||
        d->n_segments > SEGMENTS)
        exit(fail(path, text));
    return d;
}

static void copy_layer(cistern_layer *to, const struct cst_layer *from) {
    *to = (cistern_layer){ .kv_heads = from->kv_heads,
                           .head_dim_k = from->head_dim_k,
                           .head_dim_v = from->head_dim_v,
                           .window = from->window,
                           .rope = from->rope,
                           .k_rotated = from->k_rotated,
                           .rope_dims = from->rope_dims,
                           .rope_theta = from->rope_theta,
                           .rope_scaling = from->rope_scaling,
                           .scaling_original_context = from->scaling_original_context };
    memcpy(to->scaling, from->scaling, sizeof(to->scaling));
}

static int32_t open_space(cistern_client *client, const struct cst_descriptor *d,
                          cistern_space **out) {
    cistern_layer layers[LAYERS];
    cistern_segment segments[SEGMENTS];
    cistern_descriptor model = { .size = sizeof(model),
                                 .block_tokens = d->block_tokens,
                                 .block_bytes = d->block_bytes,
                                 .engine = d->engine,
                                 .engine_options = d->options,
                                 .engine_abi = d->engine_abi,
                                 .state_version = d->state_version,
                                 .tp_rank = d->tp_rank,
                                 .tp_size = d->tp_size,
                                 .n_layers = d->n_layers,
                                 .n_segments = d->n_segments,
                                 .layers = layers,
                                 .segments = segments };

    memcpy(model.content_id, d->content_id, sizeof(model.content_id));
    memcpy(model.adapter_id, d->adapter_id, sizeof(model.adapter_id));
    for (uint32_t i = 0; i < d->n_layers; i++)
        copy_layer(&layers[i], &d->layers[i]);
    for (uint32_t i = 0; i < d->n_segments; i++) {
        const struct cst_segment *s = &d->segments[i];

        segments[i] = (cistern_segment){ .layer = s->layer,
                                         .tensor = s->tensor,
                                         .dtype = s->dtype,
                                         .offset = s->offset,
                                         .length = s->length,
                                         .token_stride = s->token_stride,
                                         .head_stride = s->head_stride,
                                         .dim_stride = s->dim_stride };
    }
    return cistern_space_open(client, &model, NULL, out);
}

static void show(const void *data, size_t size) {
    uint8_t digest[32];

    cst_sha256(data, size, digest);
    (void)printf("%llx %zu ", (unsigned long long)(uintptr_t)data, size);
    for (size_t i = 0; i < sizeof(digest); i++)
        (void)printf("%02x", digest[i]);
    (void)printf("\n");
    (void)fflush(stdout);
}

int main(int argc, char **argv) {
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;
    struct cst_descriptor *descriptor;
    cistern_client *client;
    cistern_space *space;
    cistern_lease *lease;
    int32_t status;
    const void *data;
    uint8_t key[CISTERN_KEY_SIZE];
    size_t size;

    if (argc != 4 || strlen(argv[3]) != 64) {
        (void)fputs("usage: hold_block SOCKET DESCRIPTOR_FILE KEY\n", stderr);
        return 2;
    }
    for (int i = 0; i < CISTERN_KEY_SIZE; i++) {
        char digits[3] = { argv[3][2 * i], argv[3][2 * i + 1], 0 };

        key[i] = (uint8_t)strtoul(digits, NULL, 16);
    }
    descriptor = read_descriptor(argv[2]);
    options.socket_path = argv[1];
    if (cistern_client_open(&client, &options))
        return fail("open", cistern_last_error());
    if (open_space(client, descriptor, &space))
        return fail("space", cistern_last_error());
    if (cistern_acquire(space, key, 1, NULL, &lease, &status) || status)
        return fail("acquire", cistern_status_text(status));
    if (cistern_lease_data(lease, &data, &size, NULL))
        return fail("data", cistern_last_error());
    show(data, size);
    while (getchar() != EOF)
        ;
    cistern_release(client, &lease, 1);
    cistern_space_close(space);
    cistern_client_close(client);
    (void)cst_descriptor_free(descriptor);
    return 0;
}
