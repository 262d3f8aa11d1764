/* SPDX-License-Identifier: Apache-2.0 */
/* See fake_llama.h. One thread; aborts on misuse. States are written and read cell by cell from the
 * format's description. */
#include "tests/unit/client_llama/fake_llama.h"

#include <stdio.h>
#include <stdlib.h>

#define API __attribute__((visibility("default")))
#define MUST(x)                                                                                    \
    do {                                                                                           \
        if (!(x)) {                                                                                \
            (void)fprintf(stderr, "fake_llama: %s\n", #x);                                         \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

struct row {
    uint8_t k[FAKE_LAYERS_MAX][FAKE_ROW_MAX], v[FAKE_LAYERS_MAX][FAKE_ROW_MAX];
};
struct sequence {
    size_t n;
    struct row rows[FAKE_TOKENS];
};
struct llama_context {
    struct sequence seqs[FAKE_SEQS];
};
struct batch {
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos, *n_seq_id, **seq_id;
    int8_t *logits;
};

static struct fake_config config;
static struct fake_counters counters;

API void fake_llama_configure(const struct fake_config *c) {
    config = *c;
    memset(&counters, 0, sizeof(counters));
    MUST(c->form.n_layers <= FAKE_LAYERS_MAX && c->form.n_stream <= FAKE_SEQS);
}

API struct fake_counters fake_llama_counters(void) {
    return counters;
}

API struct llama_context *fake_llama_context(void) {
    struct llama_context *ctx = calloc(1, sizeof(*ctx));

    MUST(ctx);
    return ctx;
}

API void fake_llama_free(struct llama_context *ctx) {
    free(ctx);
}

static void compute(struct row *out, const int32_t *tokens, size_t n) {
    uint64_t h = 14695981039346656037u;

    for (size_t i = 0; i < n; i++)
        h = (h ^ (uint64_t)(uint32_t)tokens[i]) * 1099511628211u;
    memset(out, 0, sizeof(*out));
    for (uint32_t l = 0; l < config.form.n_layers; l++)
        for (uint32_t b = 0; b < FAKE_ROW_MAX; b++) {
            h = h * 6364136223846793005u + 1442695040888963407u;
            out->k[l][b] = (uint8_t)(h >> 40);
            out->v[l][b] = (uint8_t)(h >> 48);
        }
}

/* Only the prefix's own tokens are known here: a sequence that was restored is compared, never
 * grown, by tests. */
API void fake_llama_append(struct llama_context *ctx, int32_t seq, const int32_t *tokens,
                           size_t n) {
    struct sequence *s = &ctx->seqs[seq];

    MUST(s->n == 0 && n <= FAKE_TOKENS);
    for (s->n = 0; s->n < n; s->n++)
        compute(&s->rows[s->n], tokens, s->n + 1);
}

API size_t fake_llama_length(const struct llama_context *ctx, int32_t seq) {
    return ctx->seqs[seq].n;
}

API bool fake_llama_holds(const struct llama_context *ctx, int32_t seq, const int32_t *tokens,
                          size_t n) {
    const struct sequence *s = &ctx->seqs[seq];
    struct row want;

    if (s->n != n)
        return false;
    for (size_t i = 0; i < n; i++) {
        compute(&want, tokens, i + 1);
        for (uint32_t l = 0; l < config.form.n_layers; l++)
            if (memcmp(want.k[l], s->rows[i].k[l], sample_row(&config.form, false, l)) != 0 ||
                (!config.form.no_v &&
                 memcmp(want.v[l], s->rows[i].v[l], sample_row(&config.form, true, l)) != 0))
                return false;
    }
    return true;
}

/* ---- llama.h ---- */

API const void *llama_get_model(const struct llama_context *ctx);
API void *llama_get_memory(const struct llama_context *ctx);
API uint32_t llama_n_seq_max(const struct llama_context *ctx);
API uint32_t llama_n_ctx_seq(const struct llama_context *ctx);
API int32_t llama_decode(struct llama_context *ctx, struct batch batch);
API bool llama_memory_seq_rm(void *memory, int32_t seq, int32_t from, int32_t to);
API int32_t llama_memory_seq_pos_max(void *memory, int32_t seq);
API size_t llama_state_seq_get_size(struct llama_context *ctx, int32_t seq);
API size_t llama_state_seq_get_data(struct llama_context *ctx, uint8_t *to, size_t size,
                                    int32_t seq);
API size_t llama_state_seq_set_data(struct llama_context *ctx, const uint8_t *from, size_t size,
                                    int32_t seq);
API size_t llama_state_seq_save_file(struct llama_context *ctx, const char *path, int32_t seq,
                                     const int32_t *tokens, size_t n);
API bool llama_model_is_recurrent(const void *model);
API bool llama_model_is_hybrid(const void *model);
API bool llama_model_has_encoder(const void *model);
API int32_t llama_model_n_swa(const void *model);
API int32_t llama_model_rope_type(const void *model);
API int32_t llama_model_meta_val_str(const void *model, const char *key, char *to, size_t size);
API const char *llama_version(void);

const void *llama_get_model(const struct llama_context *ctx) {
    return ctx;
}

void *llama_get_memory(const struct llama_context *ctx) {
    return config.no_memory ? NULL : (void *)(uintptr_t)ctx;
}

uint32_t llama_n_seq_max(const struct llama_context *ctx) {
    (void)ctx;
    return FAKE_SEQS;
}

uint32_t llama_n_ctx_seq(const struct llama_context *ctx) {
    (void)ctx;
    return config.n_ctx ? config.n_ctx : FAKE_TOKENS;
}

int32_t llama_decode(struct llama_context *ctx, struct batch batch) {
    counters.decodes++;
    if (config.fail_decode)
        return -3;
    MUST(batch.n_tokens == 1 && batch.pos[0] == 0 && batch.n_seq_id[0] == 1);
    fake_llama_append(ctx, batch.seq_id[0][0], batch.token, 1);
    return 0;
}

bool llama_memory_seq_rm(void *memory, int32_t seq, int32_t from, int32_t to) {
    struct llama_context *ctx = memory;

    MUST(from < 0 && to < 0 && seq >= 0 && seq < FAKE_SEQS);
    ctx->seqs[seq].n = 0;
    return true;
}

int32_t llama_memory_seq_pos_max(void *memory, int32_t seq) {
    struct llama_context *ctx = memory;

    return (int32_t)ctx->seqs[seq].n - 1;
}

struct cursor {
    uint8_t *at; /* NULL: only counted */
    const uint8_t *from;
    size_t n;
};

static void put(struct cursor *c, const void *data, size_t n) {
    if (c->at)
        memcpy(c->at + c->n, data, n);
    c->n += n;
}

static void put32(struct cursor *c, uint32_t v) {
    put(c, &v, sizeof(v));
}

static void put_tensor(struct cursor *c, const struct sequence *s, uint32_t layer, bool v) {
    uint32_t row = sample_row(&config.form, v, layer), el = config.form.element;
    uint64_t wide = row;

    put32(c, (uint32_t)(v ? config.form.type_v : config.form.type_k));
    if (!v || !config.form.v_trans) {
        put(c, &wide, sizeof(wide));
        for (size_t i = 0; i < s->n; i++)
            put(c, v ? s->rows[i].v[layer] : s->rows[i].k[layer], row);
        return;
    }
    put32(c, el);
    put32(c, row / el);
    for (uint32_t j = 0; j < row; j += el)
        for (size_t i = 0; i < s->n; i++)
            put(c, s->rows[i].v[layer] + j, el);
}

static size_t write_state(const struct llama_context *ctx, uint8_t *to, int32_t seq) {
    const struct sequence *s = &ctx->seqs[seq];
    struct cursor c = { .at = to };

    put32(&c, 0xaf143cd8);
    put32(&c, (uint32_t)seq);
    put32(&c, config.form.n_stream);
    for (uint32_t stream = 0; stream < config.form.n_stream; stream++) {
        bool here = stream == (uint32_t)seq % config.form.n_stream;

        put32(&c, here ? (uint32_t)s->n : 0);
        if (!here || s->n == 0)
            continue;
        for (uint32_t i = 0; i < s->n; i++) {
            put32(&c, config.state_hole && i == config.state_hole ? (uint32_t)s->n : i);
            put32(&c, 1);
            put32(&c, (uint32_t)seq);
        }
        put32(&c, config.form.v_trans);
        put32(&c, config.form.n_layers);
        for (uint32_t l = 0; l < config.form.n_layers; l++)
            put_tensor(&c, s, l, false);
        for (uint32_t l = 0; l < config.form.n_layers && !config.form.no_v; l++)
            put_tensor(&c, s, l, true);
    }
    return c.n;
}

size_t llama_state_seq_get_size(struct llama_context *ctx, int32_t seq) {
    size_t n = write_state(ctx, NULL, seq);

    return n > config.cut_state ? n - config.cut_state : 0;
}

size_t llama_state_seq_get_data(struct llama_context *ctx, uint8_t *to, size_t size, int32_t seq) {
    size_t n = llama_state_seq_get_size(ctx, seq), whole = write_state(ctx, NULL, seq);
    uint8_t *state = malloc(whole);

    MUST(state);
    counters.gets++;
    (void)write_state(ctx, state, seq);
    if (size >= n)
        memcpy(to, state, n);
    free(state);
    return size >= n ? n : 0;
}

static uint32_t take32(struct cursor *c) {
    uint32_t v;

    memcpy(&v, c->from + c->n, sizeof(v));
    c->n += sizeof(v);
    return v;
}

static void take_tensor(struct cursor *c, struct sequence *s, uint32_t layer, bool v) {
    uint32_t row = sample_row(&config.form, v, layer), el = config.form.element;

    MUST(take32(c) == (uint32_t)(v ? config.form.type_v : config.form.type_k));
    if (!v || !config.form.v_trans) {
        MUST(take32(c) == row && take32(c) == 0);
        for (size_t i = 0; i < s->n; i++, c->n += row)
            memcpy(v ? s->rows[i].v[layer] : s->rows[i].k[layer], c->from + c->n, row);
        return;
    }
    MUST(take32(c) == el && take32(c) == row / el);
    for (uint32_t j = 0; j < row; j += el)
        for (size_t i = 0; i < s->n; i++, c->n += el)
            memcpy(s->rows[i].v[layer] + j, c->from + c->n, el);
}

size_t llama_state_seq_set_data(struct llama_context *ctx, const uint8_t *from, size_t size,
                                int32_t seq) {
    struct sequence *s = &ctx->seqs[seq];
    struct cursor c = { .from = from };

    counters.sets++;
    s->n = 0;
    if (config.fail_set)
        return 0;
    MUST(take32(&c) == 0xaf143cd8);
    (void)take32(&c);
    MUST(take32(&c) == config.form.n_stream);
    for (uint32_t stream = 0; stream < config.form.n_stream; stream++) {
        uint32_t n = take32(&c);

        if (n == 0)
            continue;
        MUST(s->n == 0 && n <= FAKE_TOKENS);
        s->n = n;
        for (uint32_t i = 0; i < n; i++)
            MUST(take32(&c) == i && take32(&c) == 1 && take32(&c) == (uint32_t)seq);
        MUST(take32(&c) == config.form.v_trans && take32(&c) == config.form.n_layers);
        for (uint32_t l = 0; l < config.form.n_layers; l++)
            take_tensor(&c, s, l, false);
        for (uint32_t l = 0; l < config.form.n_layers && !config.form.no_v; l++)
            take_tensor(&c, s, l, true);
    }
    MUST(c.n == size);
    return size;
}

size_t llama_state_seq_save_file(struct llama_context *ctx, const char *path, int32_t seq,
                                 const int32_t *tokens, size_t n) {
    const uint32_t head[] = { 0x67677371, 3, 0 };
    FILE *f = fopen(path, "wb");
    size_t written;

    (void)ctx;
    (void)seq;
    (void)tokens;
    MUST(f && n == 0);
    written = config.fail_save ? 0 : fwrite(head, 1, sizeof(head), f);
    (void)fclose(f);
    return written;
}

bool llama_model_is_recurrent(const void *model) {
    (void)model;
    return config.recurrent;
}

bool llama_model_is_hybrid(const void *model) {
    (void)model;
    return config.hybrid;
}

bool llama_model_has_encoder(const void *model) {
    (void)model;
    return config.encoder;
}

int32_t llama_model_n_swa(const void *model) {
    (void)model;
    return config.n_swa;
}

int32_t llama_model_rope_type(const void *model) {
    (void)model;
    return config.rope_type;
}

int32_t llama_model_meta_val_str(const void *model, const char *key, char *to, size_t size) {
    (void)model;
    for (const struct fake_meta *m = config.meta; m && m->key; m++)
        if (strcmp(m->key, key) == 0)
            return snprintf(to, size, "%s", m->value);
    if (size)
        to[0] = '\0';
    return -1;
}

const char *llama_version(void) {
    return config.version ? config.version : "0.5.0";
}
