/* SPDX-License-Identifier: Apache-2.0 */
/* The llama.cpp glue between a fake llama.cpp and a fake store: what is refused, what descriptor a
 * context gets, that a restored sequence holds exactly what its tokens compute, and that whatever
 * fails leaves an empty sequence, no lease and no slot. */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "base/sha256.h"
#include "tests/unit/client_llama/fake_cistern.h"
#include "tests/unit/client_llama/fake_llama.h"

#include <cistern/llama.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = 16, PROMPT = 100 };

#define FORM(trans, k, v, k_bytes, v_bytes, v_element)                                             \
    {                                                                                              \
        .n_stream = 1, .n_layers = 3, .v_trans = trans, .type_k = k, .type_v = v,                  \
        .k_row = k_bytes, .v_row = v_bytes, .element = v_element                                   \
    }
#define PLAIN FORM(false, 1, 1, 32, 48, 2)

static char model_path[] = "/tmp/cistern-test-model-XXXXXX";
static int32_t prompt[PROMPT + 400];

static int32_t open_glue(struct llama_context *ctx, cistern_llama **out) {
    const cistern_llama_facts facts = {
        .size = sizeof(facts),
        .block_tokens = BLOCK,
        .model_path = model_path,
    };

    return cistern_llama_open(&fake_client, ctx, &facts, out);
}

static void configure(const struct fake_config *config) {
    fake_store_reset();
    fake_llama_configure(config);
}

/* A context whose sequence 0 holds the first n tokens, stored. */
static void store_prompt(size_t n) {
    struct llama_context *ctx = fake_llama_context();
    cistern_llama *glue = NULL;
    size_t stored = 0;

    assert_int_equal(open_glue(ctx, &glue), CISTERN_OK);
    fake_llama_append(ctx, 0, prompt, n);
    assert_int_equal(cistern_llama_store(glue, 0, prompt, n, &stored), CISTERN_OK);
    assert_int_equal(stored, n);
    cistern_llama_close(glue);
    fake_llama_free(ctx);
}

/* ---- refusals ---- */

static const struct refusal_row {
    const char *name;
    struct fake_config config;
    int32_t expected;
    const char *word; /* in the sentence */
} refusals[] = {
    { "no KV cache", { PLAIN, .no_memory = true }, CISTERN_E_UNSUPPORTED, "no KV cache" },
    { "recurrent", { PLAIN, .recurrent = true }, CISTERN_E_UNSUPPORTED, "recurrent" },
    { "hybrid", { PLAIN, .hybrid = true }, CISTERN_E_UNSUPPORTED, "hybrid" },
    { "encoder", { PLAIN, .encoder = true }, CISTERN_E_UNSUPPORTED, "encoder" },
    { "sliding window", { PLAIN, .n_swa = 512 }, CISTERN_E_UNSUPPORTED, "sliding-window" },
    { "M-RoPE", { PLAIN, .rope_type = 8 }, CISTERN_E_UNSUPPORTED, "M-RoPE" },
    { "interleaved M-RoPE", { PLAIN, .rope_type = 40 }, CISTERN_E_UNSUPPORTED, "M-RoPE" },
    { "vision RoPE", { PLAIN, .rope_type = 24 }, CISTERN_E_UNSUPPORTED, "M-RoPE" },
    { "decode fails", { PLAIN, .fail_decode = true }, CISTERN_E_ENGINE, "decode" },
    { "no state version", { PLAIN, .fail_save = true }, CISTERN_E_ENGINE, "version" },
    { "no state", { PLAIN, .cut_state = 100000 }, CISTERN_E_ENGINE, "no state" },
    { "truncated state", { PLAIN, .cut_state = 5 }, CISTERN_E_UNSUPPORTED, "truncated" },
    { "transposed groups",
      { FORM(true, 1, 8, 32, 48, 2) },
      CISTERN_E_UNSUPPORTED,
      "unusable types" },
};

static void check_refusal(void **row) {
    const struct refusal_row *r = *row;
    struct llama_context *ctx = fake_llama_context();
    cistern_llama *glue = NULL;

    configure(&r->config);
    assert_int_equal(open_glue(ctx, &glue), r->expected);
    assert_non_null(strstr(cistern_last_error(), r->word));
    assert_null(glue);
    assert_int_equal(fake_store.spaces, 0);
    assert_int_equal(fake_llama_length(ctx, 0), 0);
    fake_llama_free(ctx);
}

static void bad_facts_are_refused(void **unused) {
    struct llama_context *ctx = fake_llama_context();
    const struct fake_config config = { PLAIN };
    const char *const no_file[] = { "/nonexistent/adapter.gguf" };
    const float scale[] = { 1 };
    char long_params[600];
    cistern_llama_facts good = { .size = sizeof(good), .model_path = model_path }, bad;
    cistern_llama *glue = NULL;

    (void)unused;
    configure(&config);
    assert_int_equal(cistern_llama_open(NULL, ctx, &good, &glue), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_llama_open(&fake_client, NULL, &good, &glue), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_llama_open(&fake_client, ctx, NULL, &glue), CISTERN_E_BAD_ARGUMENT);
    bad = good;
    bad.size = 8;
    assert_int_equal(cistern_llama_open(&fake_client, ctx, &bad, &glue), CISTERN_E_BAD_ARGUMENT);
    bad = good;
    bad.model_path = NULL;
    assert_int_equal(cistern_llama_open(&fake_client, ctx, &bad, &glue), CISTERN_E_BAD_ARGUMENT);
    bad.model_path = "/nonexistent/model.gguf";
    assert_int_equal(cistern_llama_open(&fake_client, ctx, &bad, &glue), CISTERN_E_SYSTEM);
    assert_non_null(strstr(cistern_last_error(), "/nonexistent/model.gguf: No such file"));
    bad.model_path = "/dev/null";
    assert_int_equal(cistern_llama_open(&fake_client, ctx, &bad, &glue), CISTERN_E_SYSTEM);
    assert_non_null(strstr(cistern_last_error(), "not a GGUF file"));
    bad = good;
    bad.n_adapters = 1;
    assert_int_equal(cistern_llama_open(&fake_client, ctx, &bad, &glue), CISTERN_E_BAD_ARGUMENT);
    bad.adapter_paths = no_file;
    bad.adapter_scales = scale;
    assert_int_equal(cistern_llama_open(&fake_client, ctx, &bad, &glue), CISTERN_E_SYSTEM);
    assert_non_null(strstr(cistern_last_error(), "adapter file"));
    bad = good;
    memset(long_params, 'x', sizeof(long_params));
    long_params[sizeof(long_params) - 1] = '\0';
    bad.context_params = long_params;
    assert_int_equal(cistern_llama_open(&fake_client, ctx, &bad, &glue), CISTERN_E_BAD_ARGUMENT);
    bad = good;
    bad.library = dlopen("libm.so.6", RTLD_NOW);
    assert_non_null(bad.library);
    assert_int_equal(cistern_llama_open(&fake_client, ctx, &bad, &glue), CISTERN_E_ENGINE);
    assert_non_null(strstr(cistern_last_error(), "llama_get_model"));
    dlclose(bad.library);
    assert_null(glue);
    fake_llama_free(ctx);
}

/* ---- descriptors ---- */

static const struct fake_meta llama_meta[] = {
    { "general.architecture", "llama" },         { "llama.attention.head_count", "4" },
    { "llama.embedding_length", "32" },          { "llama.rope.dimension_count", "6" },
    { "llama.rope.freq_base", "500000.000000" }, { NULL, NULL },
};
static const struct fake_meta yarn_meta[] = {
    { "general.architecture", "qwen" },
    { "qwen.attention.key_length", "16" },
    { "qwen.rope.scaling.type", "yarn" },
    { "qwen.rope.scaling.factor", "4.000000" },
    { "qwen.rope.scaling.original_context_length", "4096" },
    { NULL, NULL },
};
static const struct fake_meta listed_meta[] = {
    { "general.architecture", "llama" },
    { "llama.attention.head_count", "[4, 4, 8]" },
    { "llama.embedding_length", "32" },
    { NULL, NULL },
};

/* Layer 0 has rows of 32 bytes of K and 48 of V: 16 and 24 elements of f16. */
static const struct descriptor_row {
    const char *name;
    struct fake_config config;
    const char *params, *options;
    cistern_layer layer;
    cistern_segment k, v;
    uint32_t n_segments;
} descriptors[] = {
    { "f16 with flash attention",
      { PLAIN, .meta = llama_meta },
      NULL,
      "version=0.5.0;n_stream=1;v_trans=0;type_k=1;type_v=1;",
      { .kv_heads = 2,
        .head_dim_k = 8,
        .head_dim_v = 12,
        .rope = CISTERN_ROPE_NORM,
        .k_rotated = 1,
        .rope_dims = 6,
        .rope_theta = 500000 },
      { 0, CISTERN_TENSOR_K, CISTERN_DTYPE_F16, 0, 0, 32 * 16, 32, 16, 2 },
      { 0, CISTERN_TENSOR_V, CISTERN_DTYPE_F16, 0, 32 * 16, 48 * 16, 48, 24, 2 },
      6 },
    { "bf16 K, transposed f32 V, base given",
      { FORM(true, 30, 0, 32, 48, 4), .meta = llama_meta, .rope_type = 2 },
      "rope_freq_scale=0.5;rope_freq_base=1000",
      "version=0.5.0;n_stream=1;v_trans=1;type_k=30;type_v=0;"
      "rope_freq_scale=0.5;rope_freq_base=1000",
      { .kv_heads = 2,
        .head_dim_k = 8,
        .head_dim_v = 6,
        .rope = CISTERN_ROPE_NEOX,
        .k_rotated = 1,
        .rope_dims = 6,
        .rope_theta = 1000,
        .rope_scaling = CISTERN_SCALING_LINEAR,
        .scaling = { 2 } },
      { 0, CISTERN_TENSOR_K, CISTERN_DTYPE_BF16, 0, 0, 32 * 16, 32, 16, 2 },
      { 0, CISTERN_TENSOR_V, CISTERN_DTYPE_F32, 0, 32 * 16, 48 * 16, 4, 4 * 16 * 6, 4 * 16 },
      6 },
    { "q8_0 and q4_0",
      { FORM(false, 8, 2, 34, 18, 0), .meta = llama_meta, .rope_type = -1, .version = "9.9" },
      NULL,
      "version=9.9;n_stream=1;v_trans=0;type_k=8;type_v=2;",
      { .kv_heads = 1, .head_dim_k = 8 },
      { 0, CISTERN_TENSOR_OPAQUE, CISTERN_DTYPE_OPAQUE, 0, 0, 34 * 16, 34, 0, 0 },
      { 0, CISTERN_TENSOR_OPAQUE, CISTERN_DTYPE_OPAQUE, 0, 34 * 16, 18 * 16, 18, 0, 0 },
      6 },
    { "no V, yarn",
      { { .n_stream = 1, .n_layers = 3, .no_v = true, .type_k = 1, .k_row = 32 },
        .meta = yarn_meta,
        .n_ctx = 4096 },
      NULL,
      "version=0.5.0;n_stream=1;v_trans=0;type_k=1;type_v=-1;",
      { .kv_heads = 1,
        .head_dim_k = 16,
        .rope = CISTERN_ROPE_NORM,
        .k_rotated = 1,
        .rope_dims = 16,
        .rope_theta = 10000,
        .rope_scaling = CISTERN_SCALING_YARN,
        .scaling = { 4, 32, 1, 1 },
        .scaling_original_context = 4096 },
      { 0, CISTERN_TENSOR_K, CISTERN_DTYPE_F16, 0, 0, 32 * 16, 32, 32, 2 },
      /* the next segment is K of layer 1, 8 bytes wider */
      { 1, CISTERN_TENSOR_K, CISTERN_DTYPE_F16, 0, 32 * 16, 40 * 16, 40, 40, 2 },
      3 },
    { "no V, yarn, a context longer than the original one",
      { { .n_stream = 1, .n_layers = 3, .no_v = true, .type_k = 1, .k_row = 32 },
        .meta = yarn_meta,
        .n_ctx = 4097 },
      NULL,
      "version=0.5.0;n_stream=1;v_trans=0;type_k=1;type_v=-1;long_context=1;",
      { .kv_heads = 1,
        .head_dim_k = 16,
        .rope = CISTERN_ROPE_NORM,
        .k_rotated = 1,
        .rope_dims = 16,
        .rope_theta = 10000,
        .rope_scaling = CISTERN_SCALING_YARN,
        .scaling = { 4, 32, 1, 1 },
        .scaling_original_context = 4096 },
      { 0, CISTERN_TENSOR_K, CISTERN_DTYPE_F16, 0, 0, 32 * 16, 32, 32, 2 },
      /* the next segment is K of layer 1, 8 bytes wider */
      { 1, CISTERN_TENSOR_K, CISTERN_DTYPE_F16, 0, 32 * 16, 40 * 16, 40, 40, 2 },
      3 },
    { "heads that differ by layer",
      { PLAIN, .meta = listed_meta },
      NULL,
      "version=0.5.0;n_stream=1;v_trans=0;type_k=1;type_v=1;",
      { .kv_heads = 1,
        .head_dim_k = 16,
        .head_dim_v = 24,
        .rope = CISTERN_ROPE_NORM,
        .k_rotated = 1,
        .rope_dims = 16,
        .rope_theta = 10000 },
      { 0, CISTERN_TENSOR_K, CISTERN_DTYPE_F16, 0, 0, 32 * 16, 32, 32, 2 },
      { 0, CISTERN_TENSOR_V, CISTERN_DTYPE_F16, 0, 32 * 16, 48 * 16, 48, 48, 2 },
      6 },
};

static void check_descriptor(void **row) {
    const struct descriptor_row *r = *row;
    const cistern_llama_facts facts = { .size = sizeof(facts),
                                        .block_tokens = BLOCK,
                                        .model_path = model_path,
                                        .context_params = r->params,
                                        .quality_class = CISTERN_CLASS_SMALL_LOSS,
                                        .salt = "pepper",
                                        .salt_size = 6 };
    struct llama_context *ctx = fake_llama_context();
    const cistern_descriptor *d;
    uint8_t content[32];
    cistern_llama *glue = NULL;

    configure(&r->config);
    assert_int_equal(cistern_llama_open(&fake_client, ctx, &facts, &glue), CISTERN_OK);
    assert_non_null(cistern_llama_space(glue));
    d = fake_store.descriptor;
    cst_sha256("GGUF model", 10, content);
    assert_memory_equal(d->content_id, content, 32);
    assert_string_equal(d->engine, "llama.cpp");
    assert_string_equal(d->engine_options, r->options);
    assert_int_equal(d->state_version, 3);
    assert_int_equal(d->block_tokens, BLOCK);
    assert_int_equal(d->n_layers, 3);
    assert_int_equal(d->n_segments, r->n_segments);
    assert_memory_equal(&d->layers[0], &r->layer, sizeof(r->layer));
    assert_memory_equal(&d->segments[0], &r->k, sizeof(r->k));
    assert_memory_equal(&d->segments[1], &r->v, sizeof(r->v));
    assert_int_equal(d->block_bytes,
                     d->segments[d->n_segments - 1].offset + d->segments[d->n_segments - 1].length);
    assert_int_equal(fake_store.options.kind, CISTERN_KIND_TOKENS);
    assert_int_equal(fake_store.options.quality_class, CISTERN_CLASS_SMALL_LOSS);
    assert_int_equal(fake_store.options.salt_size, 6);
    cistern_llama_close(glue);
    assert_int_equal(fake_store.spaces, 0);
    fake_llama_free(ctx);
}

static void adapters_change_the_identity(void **unused) {
    const char *const paths[] = { model_path, model_path };
    const float scales[] = { 1, 0.5f }, swapped[] = { 0.5f, 1 };
    const struct {
        uint32_t n;
        const float *scales;
    } rows[] = { { 0, NULL }, { 1, scales }, { 1, swapped }, { 2, scales }, { 2, swapped } };
    const struct fake_config config = { PLAIN };
    uint8_t ids[CST_COUNT(rows)][32];
    static const uint8_t zero[32];

    (void)unused;
    configure(&config);
    for (size_t i = 0; i < CST_COUNT(rows); i++) {
        struct llama_context *ctx = fake_llama_context();
        const cistern_llama_facts facts = { .size = sizeof(facts),
                                            .model_path = model_path,
                                            .adapter_paths = paths,
                                            .adapter_scales = rows[i].scales,
                                            .n_adapters = rows[i].n };
        cistern_llama *glue = NULL;

        assert_int_equal(cistern_llama_open(&fake_client, ctx, &facts, &glue), CISTERN_OK);
        memcpy(ids[i], fake_store.descriptor->adapter_id, 32);
        for (size_t k = 0; k < i; k++)
            assert_memory_not_equal(ids[i], ids[k], 32);
        cistern_llama_close(glue);
        fake_llama_free(ctx);
    }
    assert_memory_equal(ids[0], zero, 32);
}

/* llama.cpp may store packed K and V rotated; the variable that forbids it changes their bytes. */
static void the_rotation_switch_is_part_of_a_packed_identity(void **unused) {
    const struct fake_config packed = { FORM(false, 8, 8, 34, 34, 0) }, plain = { PLAIN };
    const struct fake_config *configs[] = { &packed, &plain };

    (void)unused;
    for (size_t i = 0; i < CST_COUNT(configs); i++) {
        struct llama_context *ctx = fake_llama_context();
        cistern_llama *glue = NULL;

        configure(configs[i]);
        assert_int_equal(setenv("LLAMA_ATTN_ROT_DISABLE", "1", 1), 0);
        assert_int_equal(open_glue(ctx, &glue), CISTERN_OK);
        assert_int_equal(unsetenv("LLAMA_ATTN_ROT_DISABLE"), 0);
        assert_int_equal(strstr(fake_store.descriptor->engine_options, "attn_rot=0;") != NULL,
                         configs[i] == &packed);
        cistern_llama_close(glue);
        fake_llama_free(ctx);
    }
}

/* ---- probing ---- */

static void an_empty_context_is_probed_with_one_token(void **unused) {
    const struct fake_config config = { PLAIN };
    struct llama_context *ctx = fake_llama_context();
    cistern_llama *glue = NULL;

    (void)unused;
    configure(&config);
    assert_int_equal(open_glue(ctx, &glue), CISTERN_OK);
    assert_int_equal(fake_llama_counters().decodes, 1);
    for (int32_t seq = 0; seq < FAKE_SEQS; seq++)
        assert_int_equal(fake_llama_length(ctx, seq), 0);
    cistern_llama_close(glue);
    fake_llama_free(ctx);
}

static void a_context_in_use_is_read_as_it_is(void **unused) {
    const struct fake_config config = { PLAIN };
    struct llama_context *ctx = fake_llama_context();
    cistern_llama *glue = NULL;

    (void)unused;
    configure(&config);
    fake_llama_append(ctx, 2, prompt, 10);
    assert_int_equal(open_glue(ctx, &glue), CISTERN_OK);
    assert_int_equal(fake_llama_counters().decodes, 0);
    assert_true(fake_llama_holds(ctx, 2, prompt, 10));
    cistern_llama_close(glue);
    fake_llama_free(ctx);
}

/* ---- storing and restoring ---- */

static const struct trip_row {
    const char *name;
    struct fake_config config;
    size_t stored, asked, same; /* tokens; the first `same` of the asked ones are the stored ones */
    size_t expected;
    int32_t seq;
} trips[] = {
    { "same prompt", { PLAIN }, 100, 100, 100, 99, 0 },
    { "same prompt, whole blocks", { PLAIN }, 96, 96, 96, 95, 0 },
    { "one block", { PLAIN }, 16, 16, 16, 15, 0 },
    { "two tokens", { PLAIN }, 2, 2, 2, 1, 0 },
    { "one token", { PLAIN }, 1, 1, 1, 0, 0 },
    { "longer prompt", { PLAIN }, 70, 100, 100, 70, 0 },
    { "longer by one", { PLAIN }, 70, 71, 71, 70, 0 },
    { "shorter prompt", { PLAIN }, 100, 50, 50, 49, 0 },
    { "shorter, at a block's end", { PLAIN }, 100, 64, 64, 63, 0 },
    { "other question inside a block", { PLAIN }, 100, 100, 37, 37, 0 },
    { "other question inside the tail", { PLAIN }, 100, 120, 98, 98, 0 },
    { "other question at a block's end", { PLAIN }, 100, 100, 48, 48, 0 },
    { "nothing in common", { PLAIN }, 100, 100, 0, 0, 0 },
    { "another sequence", { PLAIN }, 100, 100, 100, 99, 3 },
    { "transposed V", { FORM(true, 1, 1, 32, 48, 2) }, 100, 100, 77, 77, 1 },
    { "packed rows", { FORM(false, 8, 2, 34, 18, 0) }, 100, 100, 77, 77, 1 },
    { "no V",
      { { .n_stream = 1, .n_layers = 3, .no_v = true, .type_k = 1, .k_row = 32 } },
      100,
      100,
      77,
      77,
      1 },
    { "four streams",
      { { .n_stream = 4, .n_layers = 2, .type_k = 1, .type_v = 1, .k_row = 32, .v_row = 16 } },
      100,
      100,
      77,
      77,
      2 },
};

static void check_trip(void **row) {
    const struct trip_row *r = *row;
    struct llama_context *ctx = fake_llama_context();
    int32_t asked[PROMPT + 400];
    cistern_llama *glue = NULL;
    size_t n = 7;

    configure(&r->config);
    store_prompt(r->stored);
    assert_int_equal(fake_store_blocks(), (r->stored + BLOCK - 1) / BLOCK);
    memcpy(asked, prompt, sizeof(asked));
    for (size_t i = r->same; i < r->asked; i++)
        asked[i] += 5000;
    assert_int_equal(open_glue(ctx, &glue), CISTERN_OK);
    fake_llama_append(ctx, r->seq, asked + 1, 5); /* is cleared */
    assert_int_equal(cistern_llama_restore(glue, r->seq, asked, r->asked, &n), CISTERN_OK);
    assert_int_equal(n, r->expected);
    assert_true(fake_llama_holds(ctx, r->seq, asked, r->expected));
    assert_int_equal(fake_store.leases, 0);
    cistern_llama_close(glue);
    fake_llama_free(ctx);
}

/* A chat: each turn stores prompt and answer and finds all of it in the next. */
static void each_turn_of_a_chat_finds_the_turns_before(void **unused) {
    const size_t turns[] = { 40, 41, 90, 400 };
    const struct fake_config config = { PLAIN };
    size_t before = 0, n;

    (void)unused;
    configure(&config);
    for (size_t i = 0; i < CST_COUNT(turns); i++) {
        struct llama_context *ctx = fake_llama_context();
        cistern_llama *glue = NULL;

        assert_int_equal(open_glue(ctx, &glue), CISTERN_OK);
        assert_int_equal(cistern_llama_restore(glue, 0, prompt, turns[i], &n), CISTERN_OK);
        assert_int_equal(n, before);
        assert_true(fake_llama_holds(ctx, 0, prompt, n));
        before = turns[i];
        cistern_llama_close(glue);
        fake_llama_free(ctx);
        store_prompt(before);
    }
}

static void what_is_stored_is_not_read_again(void **unused) {
    const struct fake_config config = { PLAIN };
    struct llama_context *ctx = fake_llama_context();
    cistern_llama *glue = NULL;
    unsigned gets;
    size_t n;

    (void)unused;
    configure(&config);
    store_prompt(PROMPT);
    assert_int_equal(open_glue(ctx, &glue), CISTERN_OK);
    fake_llama_append(ctx, 0, prompt, PROMPT);
    gets = fake_llama_counters().gets;
    assert_int_equal(cistern_llama_store(glue, 0, prompt, PROMPT, &n), CISTERN_OK);
    assert_int_equal(n, PROMPT);
    assert_int_equal(fake_llama_counters().gets, gets);
    cistern_llama_close(glue);
    fake_llama_free(ctx);
}

/* ---- what goes wrong ---- */

/* Opens an adapter over a context that holds the prompt, then changes what the engine does. */
static cistern_llama *glue_of_prompt(struct llama_context **ctx, const struct fake_config *later) {
    const struct fake_config config = { PLAIN };
    cistern_llama *glue = NULL;

    configure(&config);
    *ctx = fake_llama_context();
    assert_int_equal(open_glue(*ctx, &glue), CISTERN_OK);
    fake_llama_append(*ctx, 0, prompt, PROMPT);
    fake_llama_configure(later);
    return glue;
}

static void fail_store(void (*what)(struct fake_store *), int32_t expected, size_t n_expected,
                       const struct fake_config *later) {
    struct llama_context *ctx;
    cistern_llama *glue = glue_of_prompt(&ctx, later);
    size_t n = 7;

    if (what)
        what(&fake_store);
    assert_int_equal(cistern_llama_store(glue, 0, prompt, PROMPT, &n), expected);
    if (expected)
        assert_true(cistern_last_error()[0]);
    assert_int_equal(n, n_expected);
    assert_int_equal(fake_store.slots, 0);
    if (later->form.n_layers == 3)
        assert_true(fake_llama_holds(ctx, 0, prompt, PROMPT));
    cistern_llama_close(glue);
    fake_llama_free(ctx);
}

static void no_daemon_at_reserve(struct fake_store *s) {
    s->fail_reserve = CISTERN_E_DISCONNECTED;
}

static void no_daemon_at_commit(struct fake_store *s) {
    s->fail_commit = CISTERN_E_DISCONNECTED;
}

static void another_writer(struct fake_store *s) {
    s->busy_key = 2;
}

static void a_child_before_its_parent(struct fake_store *s) {
    s->pending_key = 3;
}

static void two_slots_a_call(struct fake_store *s) {
    s->slots_max = 2;
}

static void small_slots(struct fake_store *s) {
    s->wrong_size = 1;
}

static void stores_that_fail_store_nothing_wrong(void **unused) {
    const struct fake_config good = { PLAIN }, hole = { PLAIN, .state_hole = 50 },
                             cut = { PLAIN, .cut_state = 1 },
                             gone = { PLAIN, .cut_state = 1u << 30 },
                             changed = { FORM(false, 1, 8, 32, 34, 2) };

    (void)unused;
    fail_store(no_daemon_at_reserve, CISTERN_E_DISCONNECTED, 0, &good);
    fail_store(no_daemon_at_commit, CISTERN_E_DISCONNECTED, 0, &good);
    fail_store(small_slots, CISTERN_E_CORRUPT, 0, &good);
    fail_store(NULL, CISTERN_E_ENGINE, 0, &hole);
    assert_non_null(strstr(cistern_last_error(), "hole"));
    fail_store(NULL, CISTERN_E_ENGINE, 0, &cut);
    assert_non_null(strstr(cistern_last_error(), "truncated"));
    fail_store(NULL, CISTERN_E_ENGINE, 0, &gone);
    fail_store(NULL, CISTERN_E_ENGINE, 0, &changed);
    assert_int_equal(fake_store_blocks(), 0);
    /* Another writer's block counts only when it is there; ours behind it are stored all the same.
     */
    fail_store(another_writer, CISTERN_OK, 2 * BLOCK, &good);
    assert_int_equal(fake_store_blocks(), 6);
    /* A copy that ended before its parent's is stored all the same. */
    fail_store(a_child_before_its_parent, CISTERN_OK, PROMPT, &good);
    /* Little staging memory means more rounds. */
    fail_store(two_slots_a_call, CISTERN_OK, PROMPT, &good);
    assert_int_equal(fake_store.commits, 4);
}

static void more_tokens_than_the_sequence_holds(void **unused) {
    const struct fake_config config = { PLAIN };
    struct llama_context *ctx;
    cistern_llama *glue = glue_of_prompt(&ctx, &config);
    size_t n = 7;

    (void)unused;
    assert_int_equal(cistern_llama_store(glue, 0, prompt, PROMPT + 1, &n), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(n, 0);
    assert_int_equal(cistern_llama_store(glue, FAKE_SEQS, prompt, PROMPT, &n),
                     CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_llama_store(glue, -1, prompt, PROMPT, &n), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_llama_restore(glue, FAKE_SEQS, prompt, PROMPT, &n),
                     CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_llama_store(glue, 0, NULL, PROMPT, &n), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_llama_store(glue, 0, prompt, 0, &n), CISTERN_OK);
    assert_int_equal(fake_store_blocks(), 0);
    assert_int_equal(fake_store.slots, 0);
    cistern_llama_close(glue);
    fake_llama_free(ctx);
}

static const struct lossy_row {
    const char *name;
    struct fake_store wrong;
    bool fail_set;
    int32_t expected;
    size_t n;
} losses[] = {
    { "no answer to the lookup",
      { .fail_lookup = CISTERN_E_DISCONNECTED },
      false,
      CISTERN_E_DISCONNECTED,
      0 },
    { "no answer to the acquire", { .fail_acquire = CISTERN_E_TIMEOUT }, false, CISTERN_OK, 0 },
    { "blocks lost after the lookup", { .lost_from = 3 }, false, CISTERN_OK, 3 * BLOCK },
    { "leases of another size", { .wrong_size = 1 }, false, CISTERN_E_CORRUPT, 0 },
    { "refused by llama.cpp", { 0 }, true, CISTERN_E_ENGINE, 0 },
};

static void check_loss(void **row) {
    const struct lossy_row *r = *row;
    const struct fake_config good = { PLAIN }, config = { PLAIN, .fail_set = r->fail_set };
    struct llama_context *ctx = fake_llama_context();
    cistern_llama *glue = NULL;
    size_t n = 7;

    configure(&good);
    store_prompt(PROMPT);
    assert_int_equal(open_glue(ctx, &glue), CISTERN_OK);
    fake_store.fail_lookup = r->wrong.fail_lookup;
    fake_store.fail_acquire = r->wrong.fail_acquire;
    fake_store.lost_from = r->wrong.lost_from;
    fake_store.wrong_size = r->wrong.wrong_size;
    fake_llama_configure(&config);
    fake_llama_append(ctx, 0, prompt + 1, 9);
    assert_int_equal(cistern_llama_restore(glue, 0, prompt, PROMPT, &n), r->expected);
    assert_int_equal(n, r->n);
    assert_true(fake_llama_holds(ctx, 0, prompt, r->n));
    assert_int_equal(fake_store.leases, 0);
    cistern_llama_close(glue);
    fake_llama_free(ctx);
}

/* Memory runs out at the nth allocation, for every n until all of it works. */
static void out_of_memory_is_a_miss(void **unused) {
    const struct fake_config config = { PLAIN };
    bool done = false;

    (void)unused;
    for (unsigned nth = 1; !done; nth++) {
        struct llama_context *ctx = fake_llama_context();
        cistern_llama *glue = NULL;
        size_t n = 0;
        int32_t r;

        configure(&config);
        store_prompt(PROMPT);
        fake_llama_append(ctx, 1, prompt, PROMPT + 30);
        cst_fault_join();
        cst_fault_arm(CST_FAULT_ALLOC, nth, 1);
        r = open_glue(ctx, &glue);
        if (r == CISTERN_OK)
            r = cistern_llama_restore(glue, 0, prompt, PROMPT, &n);
        if (r == CISTERN_OK)
            r = cistern_llama_store(glue, 1, prompt, PROMPT + 30, &n);
        done = cst_fault_seen(CST_FAULT_ALLOC) < nth;
        cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
        cst_fault_leave();
        if (r)
            assert_int_equal(r, CISTERN_E_NO_MEMORY);
        assert_true(done == (r == CISTERN_OK && n == PROMPT + 30) || r == CISTERN_OK);
        if (r && glue)
            assert_int_equal(n, 0);
        assert_int_equal(fake_store.leases + fake_store.slots, 0);
        cistern_llama_close(glue);
        fake_llama_free(ctx);
    }
}

static int set_up(void) {
    int fd = mkstemp(model_path);

    for (size_t i = 0; i < CST_COUNT(prompt); i++)
        prompt[i] = (int32_t)(i * i % 1009);
    return fd < 0 || write(fd, "GGUF model", 10) != 10 || close(fd) != 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_facts_are_refused),
        cmocka_unit_test(adapters_change_the_identity),
        cmocka_unit_test(the_rotation_switch_is_part_of_a_packed_identity),
        cmocka_unit_test(an_empty_context_is_probed_with_one_token),
        cmocka_unit_test(a_context_in_use_is_read_as_it_is),
        cmocka_unit_test(each_turn_of_a_chat_finds_the_turns_before),
        cmocka_unit_test(what_is_stored_is_not_read_again),
        cmocka_unit_test(stores_that_fail_store_nothing_wrong),
        cmocka_unit_test(more_tokens_than_the_sequence_holds),
        cmocka_unit_test(out_of_memory_is_a_miss),
    };
    int failed;

    if (set_up())
        return 1;
    failed = cst_run_rows(refusals, check_refusal) + cst_run_rows(descriptors, check_descriptor) +
             cst_run_rows(trips, check_trip) + cst_run_rows(losses, check_loss) +
             cmocka_run_group_tests(tests, NULL, NULL);
    fake_store_reset();
    (void)unlink(model_path);
    return failed;
}
