/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes the descriptor of a context's space: everything that changes a block's bytes or meaning.
 *
 *   identity   content id of the model file, adapters with their scales, state version, the
 *              library's version, layout of states, the caller's context parameters
 *   meaning    KV heads, head dimensions and RoPE from the model's metadata; codecs use them to
 *              compress better, so what the metadata does not say is left out, not guessed
 *
 * K and V of f32, f16 and bf16 are described element by element; packed types (q8_0 and the like)
 * are opaque rows, one per token.
 */
#include "client/llama/llama_probe.h"

#include "base/le.h"
#include "base/macros.h"
#include "base/sha256.h"
#include "client/llama/content_id.h"
#include "client/llama/llama_error.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROPE_NORM = 0, ROPE_NEOX = 2, HEAD_DIM_MAX = 65536, VALUE = 128 };

struct metadata {
    const struct cst_llama_api *api;
    const struct llama_model *model;
    char arch[VALUE];
};

/* ---- the model's metadata ---- */

static bool meta_text(const struct metadata *m, const char *key, char out[VALUE]) {
    char full[2 * VALUE];
    int n;

    (void)snprintf(full, sizeof(full), "%s.%s", m->arch, key);
    n = m->api->model_meta_val_str(m->model, full, out, VALUE);
    return n > 0 && n < VALUE;
}

/* A positive number; 0 when the key is missing or something else (a list: it differs by layer). */
static double meta_number(const struct metadata *m, const char *key) {
    char text[VALUE], *end;
    double v;

    if (!meta_text(m, key, text))
        return 0;
    v = strtod(text, &end);
    return *end == '\0' && isfinite(v) && v > 0 ? v : 0;
}

static uint32_t meta_count(const struct metadata *m, const char *key) {
    double v = meta_number(m, key);

    return v <= HEAD_DIM_MAX ? (uint32_t)v : 0;
}

/* "key=value" in the caller's context parameters; 0 when it is not there or not positive. */
static double parameter(const char *params, const char *key) {
    size_t n = strlen(key);
    double v;

    for (const char *at = params; at && *at; at = strchr(at, ';')) {
        at += *at == ';';
        if (strncmp(at, key, n) == 0 && at[n] == '=') {
            v = strtod(at + n + 1, NULL);
            return isfinite(v) && v > 0 ? v : 0;
        }
    }
    return 0;
}

/* ---- layers ---- */

static void describe_scaling(const struct metadata *m, const char *params, cistern_layer *l) {
    double factor = meta_number(m, "rope.scaling.factor");
    double scale = parameter(params, "rope_freq_scale");
    char type[VALUE];

    if (!meta_text(m, "rope.scaling.type", type))
        type[0] = '\0';
    if (factor > 0 && strcmp(type, "yarn") == 0) {
        l->rope_scaling = CISTERN_SCALING_YARN;
        l->scaling[0] = (float)factor;
        l->scaling[1] = 32;
        l->scaling[2] = 1;
        l->scaling[3] = 1;
    } else if (scale > 0 || (factor > 0 && strcmp(type, "linear") == 0)) {
        l->rope_scaling = CISTERN_SCALING_LINEAR;
        l->scaling[0] = (float)(scale > 0 ? 1 / scale : factor);
    }
    if (l->rope_scaling)
        l->scaling_original_context =
            (uint32_t)CST_MIN(meta_number(m, "rope.scaling.original_context_length"), 1e9);
}

static void describe_rope(const struct metadata *m, const char *params, cistern_layer *l) {
    int32_t type = m->api->model_rope_type(m->model);
    uint32_t dims = meta_count(m, "rope.dimension_count");
    double theta = parameter(params, "rope_freq_base");

    dims = dims ? dims : l->head_dim_k;
    theta = theta > 0 ? theta : meta_number(m, "rope.freq_base");
    if ((type != ROPE_NORM && type != ROPE_NEOX) || dims < 2 || dims % 2 || dims > l->head_dim_k)
        return;
    l->rope = type == ROPE_NORM ? CISTERN_ROPE_NORM : CISTERN_ROPE_NEOX;
    l->k_rotated = 1;
    l->rope_dims = dims;
    l->rope_theta = theta > 0 ? (float)theta : 10000;
    describe_scaling(m, params, l);
}

/* Heads and dimensions that fit the rows of the state; one wide head when the metadata don't. */
static void describe_heads(const struct metadata *m, const struct cst_state_layout *l, uint32_t i,
                           cistern_layer *out) {
    uint32_t k_size = cst_state_element(l->type_k), v_size = cst_state_element(l->type_v);
    uint32_t k = k_size ? l->k_row[i] / k_size : 0, v = v_size ? l->v_row[i] / v_size : 0;
    uint32_t heads = meta_count(m, "attention.head_count"), dim;

    dim = meta_count(m, "attention.key_length");
    if (!dim && heads)
        dim = meta_count(m, "embedding_length") / heads;
    out->kv_heads = k && dim && k % dim == 0 ? k / dim : meta_count(m, "attention.head_count_kv");
    if (!out->kv_heads || k % out->kv_heads || v % out->kv_heads)
        out->kv_heads = 1;
    out->head_dim_k = k ? k / out->kv_heads : dim;
    out->head_dim_v = v / out->kv_heads;
}

static uint32_t dtype_of(int32_t type) {
    switch (type) {
    case CST_GGML_F32:
        return CISTERN_DTYPE_F32;
    case CST_GGML_F16:
        return CISTERN_DTYPE_F16;
    case CST_GGML_BF16:
        return CISTERN_DTYPE_BF16;
    default:
        return CISTERN_DTYPE_OPAQUE;
    }
}

static void describe_segment(const struct cst_state_layout *l, uint32_t layer, bool v,
                             uint32_t block_tokens, const cistern_layer *heads,
                             cistern_segment *out) {
    int32_t type = v ? l->type_v : l->type_k;
    uint32_t row = v ? l->v_row[layer] : l->k_row[layer], size = cst_state_element(type);
    uint32_t dim = v ? heads->head_dim_v : heads->head_dim_k;

    out->layer = layer;
    out->tensor = v ? CISTERN_TENSOR_V : CISTERN_TENSOR_K;
    out->dtype = dtype_of(type);
    out->offset =
        v ? cst_state_v_offset(l, layer, block_tokens) : cst_state_k_offset(l, layer, block_tokens);
    out->length = (uint64_t)row * block_tokens;
    if (out->dtype == CISTERN_DTYPE_OPAQUE) {
        out->tensor = CISTERN_TENSOR_OPAQUE;
        out->token_stride = row;
    } else if (v && l->v_trans) {
        out->token_stride = size;
        out->dim_stride = (uint64_t)size * block_tokens;
        out->head_stride = (uint64_t)size * block_tokens * dim;
    } else {
        out->token_stride = row;
        out->dim_stride = size;
        out->head_stride = (uint64_t)size * dim;
    }
}

static void describe_layers(const struct metadata *m, const struct cst_state_layout *l,
                            uint32_t block_tokens, const char *params,
                            struct cst_llama_description *out) {
    cistern_descriptor *d = &out->descriptor;

    for (uint32_t i = 0; i < l->n_layers; i++) {
        describe_heads(m, l, i, &out->layers[i]);
        describe_rope(m, params, &out->layers[i]);
        describe_segment(l, i, false, block_tokens, &out->layers[i],
                         &out->segments[d->n_segments++]);
        if (l->has_v)
            describe_segment(l, i, true, block_tokens, &out->layers[i],
                             &out->segments[d->n_segments++]);
    }
    d->n_layers = l->n_layers;
    d->layers = out->layers;
    d->segments = out->segments;
    d->block_bytes = cst_state_block_size(l, block_tokens);
}

/* ---- identity ---- */

static int32_t hash_file(const char *what, const char *path, uint8_t out[CST_SHA256_SIZE]) {
    int r = cst_content_id(path, out);

    if (r == -EBADMSG)
        return cst_llama_fail(CISTERN_E_SYSTEM, "the %s file %s is not a GGUF file", what, path);
    if (r == -EBUSY)
        return cst_llama_fail(CISTERN_E_SYSTEM, "the %s file %s changes while it is read", what,
                              path);
    if (r)
        return cst_llama_fail(CISTERN_E_SYSTEM, "can't read the %s file %s: %s", what, path,
                              strerrordesc_np(-r));
    return CISTERN_OK;
}

static int32_t hash_adapters(const cistern_llama_facts *facts, uint8_t out[CST_SHA256_SIZE]) {
    struct cst_sha256 h;
    uint8_t digest[CST_SHA256_SIZE];
    int32_t r;

    if (facts->n_adapters == 0)
        return CISTERN_OK;
    cst_sha256_init(&h);
    for (uint32_t i = 0; i < facts->n_adapters; i++) {
        uint32_t bits;

        r = hash_file("adapter", facts->adapter_paths[i], digest);
        if (r)
            return r;
        cst_sha256_update(&h, digest, sizeof(digest));
        memcpy(&bits, &facts->adapter_scales[i], sizeof(bits));
        cst_store32(digest, bits);
        cst_sha256_update(&h, digest, sizeof(bits));
    }
    cst_sha256_final(&h, out);
    return CISTERN_OK;
}

/* Packed K and V may hold rotated values, which this variable of llama.cpp switches off. */
static bool rotation_off(const struct cst_state_layout *l) {
    const char *v = getenv("LLAMA_ATTN_ROT_DISABLE");

    return v && strtol(v, NULL, 10) != 0 &&
           !(cst_state_element(l->type_k) && cst_state_element(l->type_v));
}

/* LongRoPE models rotate by one set of factors in contexts up to the original length and by another
 * one in longer ones. Only the engine sees which models have such factors. */
static bool is_long(const struct metadata *m, const struct llama_context *ctx) {
    double original = meta_number(m, "rope.scaling.original_context_length");

    if (!original)
        original = meta_number(m, "context_length");
    return original && m->api->n_ctx_seq(ctx) > original;
}

static int32_t write_options(const struct metadata *m, const struct llama_context *ctx,
                             const struct cst_state_layout *l, const char *params,
                             char out[CST_OPTIONS_MAX + 1]) {
    int n = snprintf(
        out, CST_OPTIONS_MAX + 1, "version=%s;n_stream=%u;v_trans=%d;type_k=%d;type_v=%d;%s%s%s",
        m->api->version(), l->n_stream, l->v_trans, l->type_k, l->has_v ? l->type_v : -1,
        rotation_off(l) ? "attn_rot=0;" : "", is_long(m, ctx) ? "long_context=1;" : "", params);

    if (n < 0 || n > CST_OPTIONS_MAX)
        return cst_llama_fail(CISTERN_E_BAD_ARGUMENT, "context_params is longer than %zu bytes",
                              CST_OPTIONS_MAX - (n - strlen(params)));
    return CISTERN_OK;
}

int32_t cst_llama_describe(const struct cst_llama_api *api, const struct llama_context *ctx,
                           const struct cst_llama_probe *probe, const cistern_llama_facts *facts,
                           struct cst_llama_description *out) {
    const char *params = facts->context_params ? facts->context_params : "";
    struct metadata m = { .api = api, .model = api->get_model(ctx) };
    cistern_descriptor *d = &out->descriptor;
    int32_t r;

    memset(out, 0, sizeof(*out));
    d->size = sizeof(*d);
    d->block_tokens = facts->block_tokens ? facts->block_tokens : 64;
    d->engine = "llama.cpp";
    d->engine_options = out->options;
    d->engine_abi = CST_LLAMA_BLOCK_ABI;
    d->state_version = probe->state_version;
    d->tp_size = 1;
    if (!facts->model_path)
        return cst_llama_fail(CISTERN_E_BAD_ARGUMENT,
                              "the facts name no model_path: its content identifies the model");
    if (facts->n_adapters && (!facts->adapter_paths || !facts->adapter_scales))
        return cst_llama_fail(CISTERN_E_BAD_ARGUMENT, "adapters need paths and scales");
    r = hash_file("model", facts->model_path, d->content_id);
    if (r == CISTERN_OK)
        r = hash_adapters(facts, d->adapter_id);
    if (api->model_meta_val_str(m.model, "general.architecture", m.arch, sizeof(m.arch)) < 0)
        m.arch[0] = '\0';
    if (r == CISTERN_OK)
        r = write_options(&m, ctx, &probe->layout, params, out->options);
    if (r)
        return r;
    describe_layers(&m, &probe->layout, d->block_tokens, params, out);
    return CISTERN_OK;
}
