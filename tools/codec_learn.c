/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command learn: side data of a model from texts that it has seen, as the daemon learns it from
 * what a space stores.
 *
 * With a table of step weights there are two passes: the first one learns no more than it takes to
 * hold the weights, the second one learns what layers predict of each other at the steps that they
 * will be coded with.
 */
#include "base/macros.h"
#include "base/mem.h"
#include "client/ctl/ctl_out.h"
#include "codec/learn.h"
#include "codec/side.h"
#include "tools/codec_side.h"
#include "tools/codec_tool.h"
#include "tools/json_read.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { ALIGN = 64, TABLE_CAP = 1 << 20 };

struct lesson {
    const struct cst_tool_options *options;
    struct cst_descriptor desc;
    struct cst_learn_block *blocks;
    size_t n_blocks;
    uint32_t tokens;
    uint8_t *dst, *work_heap;
    size_t cap, len;
    struct cst_learn_report report;
};

static void lesson_deinit(struct lesson *l) {
    for (size_t i = 0; i < l->n_blocks; i++) {
        void *bytes;

        memcpy(&bytes, &l->blocks[i].bytes, sizeof(bytes)); /* ours, const for the learner */
        cst_free(bytes);
    }
    l->blocks = cst_free(l->blocks);
    l->dst = cst_free(l->dst);
    l->work_heap = cst_free(l->work_heap);
    cst_tensor_file_undescribe(&l->desc);
}

static int no_memory(void) {
    (void)fprintf(stderr, "cistern-codec: no memory\n");
    return -ENOMEM;
}

/* ---- blocks ---- */

static int add_block(struct lesson *l, const struct cst_tensor_file *t, uint32_t first,
                     uint32_t n) {
    struct cst_learn_block *grown = cst_realloc(l->blocks, (l->n_blocks + 1) * sizeof(*grown));
    uint8_t *bytes = cst_malloc(l->desc.block_bytes);

    if (grown)
        l->blocks = grown;
    if (!grown || !bytes) {
        cst_free(bytes);
        return no_memory();
    }
    cst_tensor_file_cut(t, &l->desc, first, n, bytes);
    grown[l->n_blocks++] = (struct cst_learn_block){ bytes, n, t->first_position + first };
    l->tokens += n;
    return 0;
}

static bool same_shape(const struct cst_tensor_file *t, const struct cst_descriptor *desc) {
    const struct cst_layer *a = &t->layer, *b = &desc->layers[0];

    return t->layers == desc->n_layers && t->dtype == desc->segments[0].dtype &&
           a->kv_heads == b->kv_heads && a->head_dim_k == b->head_dim_k && a->rope == b->rope &&
           a->k_rotated == b->k_rotated && a->rope_dims == b->rope_dims &&
           a->rope_theta == b->rope_theta;
}

static int add_text(struct lesson *l, const char *name) {
    cst_auto(cst_tensor_file_deinit) struct cst_tensor_file t = CST_TENSOR_FILE_NULL;
    uint32_t per_block = l->options->block_tokens, max = l->options->text_tokens;
    int r = cst_tensor_file_read(&t, l->options->folder, name, l->options->keys);

    if (!r && !l->desc.layers)
        r = cst_tensor_file_describe(&t, per_block, &l->desc);
    if (!r && !same_shape(&t, &l->desc)) {
        (void)fprintf(stderr, "cistern-codec: %s: has another shape than the first text\n", name);
        r = -EINVAL;
    }
    if (!max || max > t.tokens)
        max = t.tokens;
    for (uint32_t first = 0; first < max && !r; first += per_block)
        r = add_block(l, &t, first, CST_MIN(per_block, max - first));
    return r;
}

/* ---- step weights ---- */

static int read_weights(const char *path, uint32_t layers, float *k, float *v) {
    cst_auto(cst_freep) uint8_t *text = NULL;
    struct cst_json_text json = { 0 };
    int r = cst_file_read(path, TABLE_CAP, &text, &json.len);

    json.text = (const char *)text;
    for (uint32_t i = 0; i < 2 * layers && !r; i++) {
        char item[64];
        double w = 0;

        (void)snprintf(item, sizeof(item), "step_weight.%s.%u", i < layers ? "K" : "V", i % layers);
        if (!cst_json_get_real(json, item, &w) || !(w > 0) || !isfinite(w)) {
            (void)fprintf(stderr, "cistern-codec: %s: has no %s\n", path, item);
            r = -EINVAL;
        }
        (i < layers ? k : v)[i % layers] = (float)w;
    }
    return r;
}

/* ---- learning ---- */

static const char *condition_text(int condition) {
    switch (condition) {
    case CST_LEARN_E_FEW:
        return "too few tokens to learn from";
    case CST_LEARN_E_SHAPE:
        return "nothing of this model can be learned";
    default:
        return "a buffer is too small";
    }
}

static int learn(struct lesson *l, const struct cst_learn_params *params) {
    size_t work_len = cst_learn_work_size(&l->desc, l->tokens);
    int r;

    if (!l->work_heap)
        l->work_heap = cst_malloc(work_len + ALIGN);
    if (!l->work_heap)
        return no_memory();
    r = cst_learn(l->dst, l->cap, &l->desc, l->blocks, l->n_blocks, params,
                  l->work_heap + (-(uintptr_t)l->work_heap & (ALIGN - 1)), work_len, &l->len,
                  &l->report);
    if (r) {
        (void)fprintf(stderr, "cistern-codec: %s\n", condition_text(r));
        return -EINVAL;
    }
    return 0;
}

/* Bases only, and the weights of the table on them: into a file that is parsed again as `before`.
 */
static int learn_weights(struct lesson *l, const char *table, struct cst_codec_side *before) {
    const struct cst_learn_params first = { .version = 1, .no_predictors = true };
    cst_auto(cst_freep) float *weights = cst_calloc(2 * l->desc.n_layers, sizeof(float));
    cst_auto(cst_freep) uint8_t *weighted = cst_malloc(l->cap);
    int r = weights && weighted ? 0 : no_memory();

    if (!r)
        r = read_weights(table, l->desc.n_layers, weights, weights + l->desc.n_layers);
    if (!r)
        r = learn(l, &first);
    if (!r)
        r = cst_codec_side_parse(before, l->dst, l->len, &l->desc);
    if (!r && cst_side_set_weights(weighted, l->cap, &before->side, 2, weights,
                                   weights + l->desc.n_layers)) {
        (void)fprintf(stderr, "cistern-codec: %s: weights out of their limits\n", table);
        r = -EINVAL;
    }
    if (r)
        return r;
    cst_codec_side_deinit(before);
    return cst_codec_side_parse(before, weighted, l->len, &l->desc);
}

static void put_report(const struct lesson *l) {
    cst_json_open(NULL, '{');
    cst_json_number("bytes", l->len);
    cst_json_number("tokens", l->report.tokens);
    cst_json_number("tensors", l->report.tensors);
    cst_json_number("predicted", l->report.predicted);
    cst_json_real("bits_klt", (double)l->report.bits_klt);
    cst_json_real("bits_deep", (double)l->report.bits_deep);
    cst_json_close('}');
}

int cst_tool_learn(const struct cst_tool_options *o) {
    cst_auto(cst_codec_side_deinit) struct cst_codec_side before = CST_CODEC_SIDE_NULL;
    cst_auto(lesson_deinit) struct lesson l = { .options = o };
    struct cst_learn_params params = { .version = 1,
                                       .step = o->params.step,
                                       .no_predictors = o->no_predictors };
    int r = 0;

    for (size_t i = 0; i < o->n_names && !r; i++)
        r = add_text(&l, o->names[i]);
    if (r)
        return r;
    l.cap = cst_learn_bound(&l.desc);
    l.dst = cst_malloc(l.cap);
    if (!l.dst)
        return no_memory();
    if (o->steps) {
        r = learn_weights(&l, o->steps, &before);
        params.before = &before.side;
        params.version = 3;
    }
    if (!r)
        r = learn(&l, &params);
    if (!r)
        r = cst_file_write(o->out, l.dst, l.len);
    if (!r)
        put_report(&l);
    return r;
}
