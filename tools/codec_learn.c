/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command learn, and side data from files. Owns the memory that parsed side data lie in: a
 * text's blocks say what model they are of, so they are parsed anew for each text. One thread.
 */
#include "tools/codec_learn.h"

#include "base/macros.h"
#include "base/mem.h"
#include "client/ctl/ctl_out.h"
#include "codec/learn.h"
#include "tools/codec_text.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { ALIGN = 64 };

static void *aligned(void *heap) {
    return (uint8_t *)heap + (-(uintptr_t)heap & (ALIGN - 1));
}

/* ---- side data ---- */

int cst_tool_side_open(struct cst_tool_side *s, const char *path,
                       const struct cst_descriptor *desc) {
    size_t memory_len = cst_side_memory(desc), len;
    int r;

    *s = CST_TOOL_SIDE_NULL;
    if (!path)
        return 0;
    r = cst_file_read(path, CST_SIDE_BYTES_MAX, &s->bytes, &len);
    if (r)
        return r;
    s->heap = cst_malloc(memory_len + ALIGN);
    if (!s->heap)
        return -ENOMEM;
    if (cst_side_parse(&s->side, s->bytes, len, desc, aligned(s->heap), memory_len)) {
        (void)fprintf(stderr, "cistern-codec: %s: no side data of this model\n", path);
        return -EINVAL;
    }
    s->use = &s->side;
    return 0;
}

void cst_tool_side_close(struct cst_tool_side *s) {
    s->bytes = cst_free(s->bytes);
    s->heap = cst_free(s->heap);
}

/* ---- learn ---- */

struct lesson {
    struct cst_descriptor desc;
    struct cst_learn_block *blocks;
    size_t n, cap;
    uint32_t tokens;
};

static void lesson_deinit(struct lesson *l) {
    for (size_t i = 0; i < l->n; i++)
        cst_free((void *)l->blocks[i].bytes);
    l->blocks = cst_free(l->blocks);
    cst_tensor_file_undescribe(&l->desc);
}

static int add_block(struct lesson *l, const struct cst_tensor_file *t, uint32_t first) {
    struct cst_learn_block b = { .tokens = CST_MIN(l->desc.block_tokens, t->tokens - first),
                                 .first_position = t->first_position + first };
    struct cst_learn_block *grown = l->blocks;
    uint8_t *bytes = cst_malloc(l->desc.block_bytes);

    if (bytes && l->n == l->cap) {
        grown = cst_realloc(l->blocks, (2 * l->cap + 64) * sizeof(*grown));
        if (grown)
            l->cap = 2 * l->cap + 64;
    }
    if (!bytes || !grown) {
        cst_free(bytes);
        return -ENOMEM;
    }
    cst_tensor_file_cut(t, &l->desc, first, b.tokens, bytes);
    b.bytes = bytes;
    l->blocks = grown;
    l->blocks[l->n++] = b;
    l->tokens += b.tokens;
    return 0;
}

static int add_text(struct lesson *l, const struct cst_tool_options *o, const char *name) {
    cst_auto(cst_tensor_file_deinit) struct cst_tensor_file t = CST_TENSOR_FILE_NULL;
    struct cst_descriptor desc = { 0 };
    int r = cst_tensor_file_read(&t, o->folder, name, o->keys);
    bool same;

    if (!r)
        r = cst_tensor_file_describe(&t, o->block_tokens, &desc);
    if (r)
        return r;
    same = !l->n || (desc.n_layers == l->desc.n_layers && desc.block_bytes == l->desc.block_bytes &&
                     !memcmp(&desc.layers[0], &l->desc.layers[0], sizeof(desc.layers[0])));
    if (!l->n)
        l->desc = desc;
    else
        cst_tensor_file_undescribe(&desc);
    if (!same) {
        (void)fprintf(stderr, "cistern-codec: %s: of another shape than the texts before\n", name);
        return -EINVAL;
    }
    for (uint32_t first = 0; first < t.tokens && !r; first += l->desc.block_tokens)
        r = add_block(l, &t, first);
    return r;
}

static void put_report(const struct cst_learn_report *report, size_t len) {
    cst_json_open(NULL, '{');
    cst_json_number("bytes", len);
    cst_json_number("tokens", report->tokens);
    cst_json_number("tensors", report->tensors);
    cst_json_number("predicted", report->predicted);
    cst_json_real("bits_klt", (double)report->bits_klt);
    cst_json_real("bits_deep", (double)report->bits_deep);
    cst_json_close('}');
}

static int learn(const struct cst_tool_options *o, struct lesson *l) {
    size_t cap = cst_learn_bound(&l->desc), work_len = cst_learn_work_size(&l->desc, l->tokens);
    struct cst_learn_params params = { .version = 1, .step = o->params.step };
    cst_auto(cst_freep) uint8_t *dst = cst_malloc(cap), *heap = cst_malloc(work_len + ALIGN);
    struct cst_learn_report report;
    size_t len;
    int r;

    if (!dst || !heap)
        return -ENOMEM;
    r = cst_learn(dst, cap, &l->desc, l->blocks, l->n, &params, aligned(heap), work_len, &len,
                  &report);
    if (r) {
        (void)fprintf(stderr, "cistern-codec: %s\n",
                      r == CST_LEARN_E_FEW ? "too few tokens to learn from"
                                           : "nothing in these tensors can be learned");
        return -EINVAL;
    }
    r = cst_file_write(o->out, dst, len);
    if (!r)
        put_report(&report, len);
    return r;
}

int cst_tool_learn(const struct cst_tool_options *o) {
    cst_auto(lesson_deinit) struct lesson l = { 0 };
    int r = 0;

    if (!o->out) {
        (void)fprintf(stderr, "cistern-codec: learn needs --out FILE\n");
        return -EINVAL;
    }
    for (size_t i = 0; i < o->n_names && !r; i++)
        r = add_text(&l, o, o->names[i]);
    if (r == -ENOMEM)
        (void)fprintf(stderr, "cistern-codec: no memory\n");
    return r ? r : learn(o, &l);
}
