/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the loop over blocks. Frames need no index beside them: each says how long it is. The
 * workspace is aligned here because the heap aligns to 16 bytes only.
 */
#include "tools/codec_text.h"

#include "base/macros.h"
#include "base/mem.h"
#include "codec/dtype.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { WORK_ALIGN = 64 };

static const char *condition_text(int condition) {
    switch (condition) {
    case CST_CODEC_E_SMALL:
        return "a buffer is too small";
    case CST_CODEC_E_CORRUPT:
        return "not a frame, or a damaged one";
    case CST_CODEC_E_VERSION:
        return "a frame of another version";
    case CST_CODEC_E_MISMATCH:
        return "a frame of another shape";
    case CST_CODEC_E_BOUND:
        return "the error exceeds the bound asked for";
    case CST_CODEC_E_PRESET:
        return "the preset doesn't take these parameters or tensors";
    case CST_CODEC_E_SIDE:
        return "needs side data that weren't given, or other ones";
    default:
        return "failed";
    }
}

static int complain(const struct cst_codec_text *c, int condition) {
    (void)fprintf(stderr, "cistern-codec: %s: %s\n", c->tensors->name, condition_text(condition));
    return -EINVAL;
}

static int no_memory(const struct cst_codec_text *c) {
    (void)fprintf(stderr, "cistern-codec: %s: no memory\n", c->tensors->name);
    return -ENOMEM;
}

int cst_codec_text_init(struct cst_codec_text *c, const struct cst_tensor_file *tensors,
                        uint32_t block_tokens) {
    int r;

    *c = CST_CODEC_TEXT_NULL;
    c->tensors = tensors;
    r = cst_tensor_file_describe(tensors, block_tokens, &c->desc);
    if (r)
        return r;
    c->work_len = cst_codec_work_size_max(&c->desc);
    c->block = cst_malloc(c->desc.block_bytes);
    c->work_heap = cst_malloc(c->work_len + WORK_ALIGN);
    if (!c->block || !c->work_heap)
        return no_memory(c);
    c->work = c->work_heap + (-(uintptr_t)c->work_heap & (WORK_ALIGN - 1));
    return 0;
}

void cst_codec_text_deinit(struct cst_codec_text *c) {
    cst_tensor_file_undescribe(&c->desc);
    c->block = cst_free(c->block);
    c->work_heap = cst_free(c->work_heap);
    c->frames = cst_free(c->frames);
}

void cst_codec_text_restart(struct cst_codec_text *c) {
    c->len = c->n_frames = 0;
}

static double cpu_s(void) {
    struct timespec t;

    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int make_room(struct cst_codec_text *c, size_t n) {
    return cst_grow(&c->frames, &c->cap, c->len + n, 1) ? no_memory(c) : 0;
}

int cst_codec_text_encode(struct cst_codec_text *c, const struct cst_encode_params *params) {
    const struct cst_tensor_file *t = c->tensors;
    size_t bound = cst_frame_bound(&c->desc), len;
    struct cst_encode_params p = *params;
    struct cst_frame_info info;
    double start;
    int r;

    for (uint32_t first = 0; first < t->tokens; first += p.tokens, c->n_frames++) {
        p.tokens = CST_MIN(c->desc.block_tokens, t->tokens - first);
        p.first_position = t->first_position + first;
        cst_tensor_file_cut(t, &c->desc, first, p.tokens, c->block);
        r = make_room(c, bound);
        if (r)
            return r;
        start = cpu_s();
        r = cst_frame_encode(c->frames + c->len, bound, c->block, &c->desc, &p, c->work,
                             c->work_len, &len, &info);
        c->encode_s += cpu_s() - start;
        if (r)
            return complain(c, r);
        c->len += len;
        c->error = CST_MAX(c->error, info.error);
    }
    return 0;
}

int cst_codec_text_decode(struct cst_codec_text *c, const struct cst_side *side,
                          struct cst_tensor_file *out) {
    struct cst_decode_params p = CST_DECODE_ALL;
    struct cst_frame_info info;
    uint32_t first = 0;
    size_t at = 0;
    double start;
    int r;

    p.side = side;
    while (at < c->len && first < out->tokens) {
        r = cst_frame_inspect(c->frames + at, c->len - at, &info);
        if (r || info.frame_bytes > c->len - at || info.tokens > out->tokens - first)
            return complain(c, r ? r : CST_CODEC_E_CORRUPT);
        start = cpu_s();
        r = cst_frame_decode(c->block, c->desc.block_bytes, c->frames + at, c->len - at, &c->desc,
                             &p, c->work, c->work_len);
        c->decode_s += cpu_s() - start;
        if (r)
            return complain(c, r);
        cst_tensor_file_join(out, &c->desc, first, info.tokens, c->block);
        first += info.tokens;
        at += info.frame_bytes;
    }
    return first == out->tokens && at == c->len ? 0 : complain(c, CST_CODEC_E_CORRUPT);
}

void cst_codec_text_nmse(const struct cst_tensor_file *a, const struct cst_tensor_file *b, int part,
                         double *out) {
    size_t row = cst_tensor_file_row(a), size = a->dtype == CST_DTYPE_F32 ? 4 : 2;
    uint32_t sinks = CST_SINK_TOKENS - CST_MIN(a->first_position, CST_SINK_TOKENS);
    size_t skipped = CST_MIN(sinks, a->tokens) * row, all = a->tokens * row;

    for (uint32_t layer = 0; layer < a->layers; layer++) {
        const uint8_t *x = a->part[part] + layer * all, *y = b->part[part] + layer * all;
        double errors = 0, energy = 0;

        for (size_t at = skipped; at < all; at += size) {
            double v = (double)cst_dtype_load(a->dtype, x + at);
            double e = v - (double)cst_dtype_load(a->dtype, y + at);

            errors += e * e;
            energy += v * v;
        }
        out[layer] = energy > 0 ? errors / energy : 0;
    }
}
