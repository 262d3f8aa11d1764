/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The canonical bytes of a model descriptor: docs/protocol.md, "Descriptor". No state, any thread.
 *
 * Invariants: 1. one descriptor has one encoding: every field is always written, in one order, and
 * fields without meaning are zero (descriptor_check.c); so decode(bytes) succeeds only for bytes
 * that encode() makes; 2. a count is compared with its cap and with the bytes that are left before
 * memory is taken for it.
 */
#include "base/err.h"
#include "base/le.h"
#include "base/macros.h"
#include "base/mem.h"
#include "base/sha256.h"
#include "proto/key.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define DESCRIPTOR_TAG "cistern.descriptor.1"

enum {
    TAG = sizeof(DESCRIPTOR_TAG) - 1,
    LAYER_BYTES = 47,
    SEGMENT_BYTES = 46,
    HEAD_BYTES_MAX = TAG + 64 + 4 + CST_ENGINE_MAX + 4 + CST_OPTIONS_MAX + 28 + 8,
};
_Static_assert(HEAD_BYTES_MAX + CST_LAYERS_MAX * LAYER_BYTES + CST_SEGMENTS_MAX * SEGMENT_BYTES <=
                   CST_DESCRIPTOR_BYTES_MAX,
               "the largest descriptor fits a packet");

CST_DEFINE_FREEP(struct cst_descriptor, cst_descriptor_free)

/* ---- writing ---- */

static void put(uint8_t **at, const void *data, size_t n) {
    memcpy(*at, data, n);
    *at += n;
}

static void put8(uint8_t **at, uint8_t v) {
    put(at, &v, sizeof(v));
}

static void put32(uint8_t **at, uint32_t v) {
    cst_store32(*at, v);
    *at += sizeof(v);
}

static void put64(uint8_t **at, uint64_t v) {
    cst_store64(*at, v);
    *at += sizeof(v);
}

static void put_float(uint8_t **at, float v) {
    uint32_t bits;

    memcpy(&bits, &v, sizeof(bits));
    put32(at, bits);
}

static void put_string(uint8_t **at, const char *s) {
    size_t n = strlen(s);

    put32(at, (uint32_t)n);
    put(at, s, n);
}

static void put_layer(uint8_t **at, const struct cst_layer *l) {
    put32(at, l->kv_heads);
    put32(at, l->head_dim_k);
    put32(at, l->head_dim_v);
    put32(at, l->window);
    put8(at, l->rope);
    put8(at, l->k_rotated);
    put8(at, l->rope_scaling);
    put32(at, l->rope_dims);
    put_float(at, l->rope_theta);
    for (size_t i = 0; i < CST_COUNT(l->scaling); i++)
        put_float(at, l->scaling[i]);
    put32(at, l->scaling_original_context);
}

static void put_segment(uint8_t **at, const struct cst_segment *s) {
    put32(at, s->layer);
    put8(at, s->tensor);
    put8(at, s->dtype);
    put64(at, s->offset);
    put64(at, s->length);
    put64(at, s->token_stride);
    put64(at, s->head_stride);
    put64(at, s->dim_stride);
}

static size_t encoded_size(const struct cst_descriptor *d) {
    return HEAD_BYTES_MAX - CST_ENGINE_MAX - CST_OPTIONS_MAX + strlen(d->engine) +
           strlen(d->options) + (size_t)d->n_layers * LAYER_BYTES +
           (size_t)d->n_segments * SEGMENT_BYTES;
}

size_t cst_descriptor_encode(const struct cst_descriptor *d, uint8_t *out, size_t cap) {
    uint8_t *at = out;

    if (cap < encoded_size(d))
        return 0;
    put(&at, DESCRIPTOR_TAG, TAG);
    put(&at, d->content_id, sizeof(d->content_id));
    put(&at, d->adapter_id, sizeof(d->adapter_id));
    put_string(&at, d->engine);
    put_string(&at, d->options);
    put32(&at, d->engine_abi);
    put32(&at, d->state_version);
    put32(&at, d->block_tokens);
    put32(&at, d->tp_rank);
    put32(&at, d->tp_size);
    put64(&at, d->block_bytes);
    put32(&at, d->n_layers);
    for (uint32_t i = 0; i < d->n_layers; i++)
        put_layer(&at, &d->layers[i]);
    put32(&at, d->n_segments);
    for (uint32_t i = 0; i < d->n_segments; i++)
        put_segment(&at, &d->segments[i]);
    assert((size_t)(at - out) == encoded_size(d));
    return (size_t)(at - out);
}

/* ---- reading ---- */

/* After the first short read everything reads as zero and `failed` names the field. */
struct reader {
    const uint8_t *at, *end;
    const char *failed;
};

static void get(struct reader *r, const char *field, void *out, size_t n) {
    if (!r->failed && n > (size_t)(r->end - r->at))
        r->failed = field;
    if (r->failed) {
        memset(out, 0, n);
        return;
    }
    memcpy(out, r->at, n);
    r->at += n;
}

static uint8_t get8(struct reader *r, const char *field) {
    uint8_t v;

    get(r, field, &v, sizeof(v));
    return v;
}

static uint32_t get32(struct reader *r, const char *field) {
    struct cst_le32 v;

    get(r, field, &v, sizeof(v));
    return cst_load32(&v);
}

static uint64_t get64(struct reader *r, const char *field) {
    struct cst_le64 v;

    get(r, field, &v, sizeof(v));
    return cst_load64(&v);
}

static float get_float(struct reader *r, const char *field) {
    uint32_t bits = get32(r, field);
    float v;

    memcpy(&v, &bits, sizeof(v));
    return v;
}

/* out has room for max bytes and a terminator, all zero. A zero byte inside would be cut off and
 * make a second encoding of the same descriptor. */
static const char *get_string(struct reader *r, const char *field, char *out, size_t max) {
    uint32_t n = get32(r, field);

    if (n > max)
        return "is too long";
    get(r, field, out, n);
    return memchr(out, '\0', n) && !r->failed ? "contains a zero byte" : NULL;
}

static void get_layer(struct reader *r, struct cst_layer *l) {
    l->kv_heads = get32(r, "layers");
    l->head_dim_k = get32(r, "layers");
    l->head_dim_v = get32(r, "layers");
    l->window = get32(r, "layers");
    l->rope = get8(r, "layers");
    l->k_rotated = get8(r, "layers");
    l->rope_scaling = get8(r, "layers");
    l->rope_dims = get32(r, "layers");
    l->rope_theta = get_float(r, "layers");
    for (size_t i = 0; i < CST_COUNT(l->scaling); i++)
        l->scaling[i] = get_float(r, "layers");
    l->scaling_original_context = get32(r, "layers");
}

static void get_segment(struct reader *r, struct cst_segment *s) {
    s->layer = get32(r, "segments");
    s->tensor = get8(r, "segments");
    s->dtype = get8(r, "segments");
    s->offset = get64(r, "segments");
    s->length = get64(r, "segments");
    s->token_stride = get64(r, "segments");
    s->head_stride = get64(r, "segments");
    s->dim_stride = get64(r, "segments");
}

CST_PRINTF(3, 4)
static int invalid(char *text, size_t cap, const char *fmt, ...) {
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(text, cap, fmt, ap);
    va_end(ap);
    return CST_DESCRIPTOR_E_INVALID;
}

/* Reads a count and checks that so many items may and can follow. */
static int get_count(struct reader *r, const char *field, uint32_t max, size_t item, uint32_t *out,
                     char *text, size_t cap) {
    uint32_t n = get32(r, field);

    if (r->failed)
        return invalid(text, cap, "the descriptor ends inside %s: send all of it", r->failed);
    if (n > max)
        return invalid(text, cap, "%s counts %u items: at most %u are allowed", field, n, max);
    if ((size_t)(r->end - r->at) / item < n)
        return invalid(text, cap, "the descriptor ends inside %s: send all of it", field);
    *out = n;
    return 0;
}

static int get_head(struct reader *r, struct cst_descriptor *d, char *text, size_t cap) {
    char tag[TAG];
    const char *wrong;

    get(r, "tag", tag, sizeof(tag));
    if (r->failed || memcmp(tag, DESCRIPTOR_TAG, TAG) != 0)
        return invalid(text, cap, "the descriptor does not start with \"" DESCRIPTOR_TAG "\"");
    get(r, "content_id", d->content_id, sizeof(d->content_id));
    get(r, "adapter_id", d->adapter_id, sizeof(d->adapter_id));
    wrong = get_string(r, "engine", d->engine, CST_ENGINE_MAX);
    if (wrong)
        return invalid(text, cap, "engine %s: give at most %d printable ASCII characters", wrong,
                       CST_ENGINE_MAX);
    wrong = get_string(r, "options", d->options, CST_OPTIONS_MAX);
    if (wrong)
        return invalid(text, cap, "options %s: give at most %d printable ASCII characters", wrong,
                       CST_OPTIONS_MAX);
    d->engine_abi = get32(r, "engine_abi");
    d->state_version = get32(r, "state_version");
    d->block_tokens = get32(r, "block_tokens");
    d->tp_rank = get32(r, "tp_rank");
    d->tp_size = get32(r, "tp_size");
    d->block_bytes = get64(r, "block_bytes");
    return 0;
}

static int get_lists(struct reader *r, struct cst_descriptor *d, char *text, size_t cap) {
    int e = get_count(r, "layers", CST_LAYERS_MAX, LAYER_BYTES, &d->n_layers, text, cap);

    if (e)
        return e;
    d->layers = cst_calloc(d->n_layers, sizeof(*d->layers));
    if (!d->layers)
        return cst_err(-ENOMEM);
    for (uint32_t i = 0; i < d->n_layers; i++)
        get_layer(r, &d->layers[i]);
    e = get_count(r, "segments", CST_SEGMENTS_MAX, SEGMENT_BYTES, &d->n_segments, text, cap);
    if (e)
        return e;
    d->segments = cst_calloc(d->n_segments, sizeof(*d->segments));
    if (!d->segments)
        return cst_err(-ENOMEM);
    for (uint32_t i = 0; i < d->n_segments; i++)
        get_segment(r, &d->segments[i]);
    return 0;
}

int cst_descriptor_decode(struct cst_descriptor **out, const uint8_t *data, size_t n, char *text,
                          size_t cap) {
    cst_auto(cst_descriptor_freep) struct cst_descriptor *d = cst_calloc(1, sizeof(*d));
    struct reader r = { .at = data, .end = data + n };
    int e;

    if (!d)
        return cst_err(-ENOMEM);
    e = get_head(&r, d, text, cap);
    if (!e)
        e = get_lists(&r, d, text, cap);
    if (e)
        return e;
    assert(!r.failed); /* the lists were compared with what is left */
    if (r.at != r.end)
        return invalid(text, cap, "%zu bytes follow the last segment: send none",
                       (size_t)(r.end - r.at));
    if (cst_descriptor_check(d, text, cap))
        return CST_DESCRIPTOR_E_INVALID;
    *out = cst_steal(&d);
    return 0;
}

struct cst_descriptor *cst_descriptor_free(struct cst_descriptor *d) {
    if (!d)
        return NULL;
    d->layers = cst_free(d->layers);
    d->segments = cst_free(d->segments);
    return cst_free(d);
}

void cst_descriptor_fingerprint(const uint8_t *canonical, size_t n, uint8_t out[32]) {
    cst_sha256(canonical, n, out);
}
