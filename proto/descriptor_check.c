/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a valid model descriptor is. Every sentence names the field and says what is allowed, for
 * its reader is a person who writes an engine adapter. No state, any thread.
 *
 * Invariants that later code relies on
 *   1. Every element of a K or V segment lies inside the segment, segments lie inside the block and
 *      don't overlap, and no product or sum below overflows 64 bits: all factors have caps.
 *   2. No two elements of a segment share a byte: strides nest.
 *   3. Fields without meaning are zero, so that one meaning has one fingerprint.
 */
#include "base/macros.h"
#include "proto/key.h"

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { HEADS_MAX = 4096, HEAD_DIM_MAX = 65536, TP_SIZE_MAX = 65536 };

struct sentence {
    char *text;
    size_t cap;
};

CST_PRINTF(2, 3) static bool wrong(const struct sentence *s, const char *fmt, ...) {
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(s->text, s->cap, fmt, ap);
    va_end(ap);
    return false;
}

static bool all_zero(const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (p[i])
            return false;
    return true;
}

static bool check_string(const char *field, const char *s, size_t max, const struct sentence *out) {
    size_t n = strnlen(s, max + 1);

    if (n > max)
        return wrong(out, "%s is too long: at most %zu characters are allowed", field, max);
    for (size_t i = 0; i < n; i++)
        if (s[i] < ' ' || s[i] > '~')
            return wrong(out, "%s has a byte that is not printable ASCII at %zu", field, i);
    return true;
}

static bool check_head(const struct cst_descriptor *d, const struct sentence *out) {
    if (all_zero(d->content_id, sizeof(d->content_id)))
        return wrong(out, "content_id is zero: give the SHA-256 of the model");
    if (!check_string("engine", d->engine, CST_ENGINE_MAX, out) ||
        !check_string("options", d->options, CST_OPTIONS_MAX, out))
        return false;
    if (!d->engine[0])
        return wrong(out, "engine is empty: name the program that made the bytes");
    if (d->block_tokens < CST_BLOCK_TOKENS_MIN || d->block_tokens > CST_BLOCK_TOKENS_MAX)
        return wrong(out, "block_tokens is %u: %d to %d are allowed", d->block_tokens,
                     CST_BLOCK_TOKENS_MIN, CST_BLOCK_TOKENS_MAX);
    if (d->tp_size < 1 || d->tp_size > TP_SIZE_MAX)
        return wrong(out, "tp_size is %u: 1 to %d are allowed", d->tp_size, TP_SIZE_MAX);
    if (d->tp_rank >= d->tp_size)
        return wrong(out, "tp_rank is %u: it must be below tp_size, %u", d->tp_rank, d->tp_size);
    if (d->block_bytes < 1 || d->block_bytes > CST_BLOCK_BYTES_MAX)
        return wrong(out, "block_bytes is %llu: 1 to %llu are allowed",
                     (unsigned long long)d->block_bytes, (unsigned long long)CST_BLOCK_BYTES_MAX);
    if (d->n_layers < 1 || d->n_layers > CST_LAYERS_MAX)
        return wrong(out, "layers counts %u items: 1 to %d are allowed", d->n_layers,
                     CST_LAYERS_MAX);
    if (d->n_segments < 1 || d->n_segments > CST_SEGMENTS_MAX)
        return wrong(out, "segments counts %u items: 1 to %d are allowed", d->n_segments,
                     CST_SEGMENTS_MAX);
    return true;
}

/* Finite and not below zero; minus zero would be a second encoding of zero. */
static bool plain_float(float v) {
    return isfinite(v) && !signbit(v);
}

static bool check_rope(const struct cst_layer *l, unsigned i, const struct sentence *out) {
    unsigned dims = CST_MAX(l->head_dim_k, l->head_dim_v);

    if (l->rope >= CST_ROPES)
        return wrong(out, "layer %u: rope is %u: below %d is allowed", i, l->rope, CST_ROPES);
    if (l->k_rotated > 1)
        return wrong(out, "layer %u: k_rotated is %u: 0 or 1 is allowed", i, l->k_rotated);
    if (!plain_float(l->rope_theta))
        return wrong(out, "layer %u: rope_theta is not a finite number of at least 0", i);
    if (l->rope == CST_ROPE_NONE) {
        if (l->k_rotated || l->rope_dims || l->rope_theta != 0 || l->rope_scaling)
            return wrong(out,
                         "layer %u: rope is none: k_rotated, rope_dims, rope_theta and "
                         "rope_scaling must be 0",
                         i);
        return true;
    }
    if (l->rope_dims < 2 || l->rope_dims % 2 || l->rope_dims > dims)
        return wrong(out,
                     "layer %u: rope_dims is %u: an even number from 2 to head_dim, %u, is "
                     "allowed",
                     i, l->rope_dims, dims);
    if (l->rope_theta == 0)
        return wrong(out, "layer %u: rope_theta is 0: give the base of the rotation", i);
    return true;
}

static bool check_scaling(const struct cst_layer *l, unsigned i, const struct sentence *out) {
    static const unsigned used[CST_SCALINGS] = { [CST_SCALING_NONE] = 0,
                                                 [CST_SCALING_LINEAR] = 1,
                                                 [CST_SCALING_YARN] = 4,
                                                 [CST_SCALING_LLAMA3] = 3 };

    if (l->rope_scaling >= CST_SCALINGS)
        return wrong(out, "layer %u: rope_scaling is %u: below %d is allowed", i, l->rope_scaling,
                     CST_SCALINGS);
    for (unsigned k = 0; k < CST_COUNT(l->scaling); k++) {
        if (!plain_float(l->scaling[k]))
            return wrong(out, "layer %u: scaling[%u] is not a finite number of at least 0", i, k);
        if (k >= used[l->rope_scaling] && l->scaling[k] != 0)
            return wrong(out, "layer %u: scaling[%u] has no meaning for this rope_scaling: set 0",
                         i, k);
    }
    if (l->rope_scaling == CST_SCALING_NONE && l->scaling_original_context)
        return wrong(out,
                     "layer %u: scaling_original_context has no meaning without rope_scaling: "
                     "set 0",
                     i);
    return true;
}

static bool check_layer(const struct cst_layer *l, unsigned i, const struct sentence *out) {
    if (l->kv_heads > HEADS_MAX)
        return wrong(out, "layer %u: kv_heads is %u: at most %d is allowed", i, l->kv_heads,
                     HEADS_MAX);
    if (l->head_dim_k > HEAD_DIM_MAX || l->head_dim_v > HEAD_DIM_MAX)
        return wrong(out,
                     "layer %u: head_dim_k and head_dim_v are %u and %u: at most %d is allowed", i,
                     l->head_dim_k, l->head_dim_v, HEAD_DIM_MAX);
    return check_rope(l, i, out) && check_scaling(l, i, out);
}

static unsigned element_size(uint8_t dtype) {
    return dtype == CST_DTYPE_F32 ? 4 : 2;
}

struct axis {
    const char *field;
    uint64_t stride, count;
};

/* From the smallest stride up, each must step over all that the smaller ones reach. */
static bool check_nesting(struct axis axes[3], uint64_t element, unsigned i,
                          const struct sentence *out) {
    uint64_t reach = element;

    for (unsigned n = 3; n > 0; n--) {
        unsigned least = 0;

        for (unsigned k = 1; k < n; k++)
            if (axes[k].stride < axes[least].stride ||
                (axes[k].stride == axes[least].stride && axes[k].count < axes[least].count))
                least = k;
        if (axes[least].count > 1) {
            if (axes[least].stride < reach)
                return wrong(out,
                             "segment %u: %s is %llu: it must be at least %llu, else elements "
                             "overlap",
                             i, axes[least].field, (unsigned long long)axes[least].stride,
                             (unsigned long long)reach);
            reach = axes[least].stride * axes[least].count;
        }
        axes[least] = axes[n - 1];
    }
    return true;
}

static bool check_strides(const struct cst_descriptor *d, const struct cst_segment *s, unsigned i,
                          const struct sentence *out) {
    const struct cst_layer *l = &d->layers[s->layer];
    uint64_t element = element_size(s->dtype), last = 0;
    struct axis axes[3] = {
        { "token_stride", s->token_stride, d->block_tokens },
        { "head_stride", s->head_stride, l->kv_heads },
        { "dim_stride", s->dim_stride, s->tensor == CST_TENSOR_K ? l->head_dim_k : l->head_dim_v },
    };

    if (!l->kv_heads || !axes[2].count)
        return wrong(out, "segment %u: layer %u has no %s heads: set kv_heads and head_dim_%c", i,
                     s->layer, s->tensor == CST_TENSOR_K ? "K" : "V",
                     s->tensor == CST_TENSOR_K ? 'k' : 'v');
    for (unsigned k = 0; k < CST_COUNT(axes); k++) {
        if (!axes[k].stride || axes[k].stride % element || axes[k].stride > CST_BLOCK_BYTES_MAX)
            return wrong(out,
                         "segment %u: %s is %llu: a multiple of %llu bytes up to %llu is "
                         "allowed",
                         i, axes[k].field, (unsigned long long)axes[k].stride,
                         (unsigned long long)element, (unsigned long long)CST_BLOCK_BYTES_MAX);
        last += axes[k].stride * (axes[k].count - 1);
    }
    if (last + element > s->length)
        return wrong(out, "segment %u: its last element ends at byte %llu: length is only %llu", i,
                     (unsigned long long)(last + element), (unsigned long long)s->length);
    return check_nesting(axes, element, i, out);
}

static bool check_opaque(const struct cst_descriptor *d, const struct cst_segment *s, unsigned i,
                         const struct sentence *out) {
    if (s->head_stride || s->dim_stride)
        return wrong(out,
                     "segment %u: head_stride and dim_stride have no meaning for opaque bytes: "
                     "set 0",
                     i);
    if (s->token_stride > CST_BLOCK_BYTES_MAX || s->token_stride * d->block_tokens > s->length)
        return wrong(out, "segment %u: token_stride is %llu: %u tokens of it exceed length, %llu",
                     i, (unsigned long long)s->token_stride, d->block_tokens,
                     (unsigned long long)s->length);
    return true;
}

static bool check_place(const struct cst_descriptor *d, unsigned i, const struct sentence *out) {
    const struct cst_segment *s = &d->segments[i], *before = i ? s - 1 : NULL;

    if (s->length < 1)
        return wrong(out, "segment %u: length is 0: leave the segment out", i);
    if (s->length > d->block_bytes || s->offset > d->block_bytes - s->length)
        return wrong(out, "segment %u: offset %llu + length %llu exceed block_bytes, %llu", i,
                     (unsigned long long)s->offset, (unsigned long long)s->length,
                     (unsigned long long)d->block_bytes);
    if (before && s->offset < before->offset)
        return wrong(out, "segment %u starts before segment %u: sort segments by offset", i, i - 1);
    if (before && s->offset < before->offset + before->length)
        return wrong(out, "segment %u overlaps segment %u: it must start at byte %llu or later", i,
                     i - 1, (unsigned long long)(before->offset + before->length));
    return true;
}

static bool check_segment(const struct cst_descriptor *d, unsigned i, const struct sentence *out) {
    const struct cst_segment *s = &d->segments[i];

    if (s->layer >= d->n_layers)
        return wrong(out, "segment %u: layer is %u: there are only %u", i, s->layer, d->n_layers);
    if (s->tensor >= CST_TENSORS)
        return wrong(out, "segment %u: tensor is %u: below %d is allowed", i, s->tensor,
                     CST_TENSORS);
    if (s->dtype >= CST_DTYPES)
        return wrong(out, "segment %u: dtype is %u: below %d is allowed", i, s->dtype, CST_DTYPES);
    if ((s->dtype == CST_DTYPE_OPAQUE) != (s->tensor == CST_TENSOR_OPAQUE))
        return wrong(out,
                     "segment %u: dtype opaque and tensor opaque go together: set both or "
                     "neither",
                     i);
    if (!check_place(d, i, out))
        return false;
    if (s->tensor == CST_TENSOR_OPAQUE)
        return check_opaque(d, s, i, out);
    if (s->offset % element_size(s->dtype))
        return wrong(out, "segment %u: offset is %llu: a multiple of %u bytes is allowed", i,
                     (unsigned long long)s->offset, element_size(s->dtype));
    return check_strides(d, s, i, out);
}

const char *cst_descriptor_check(const struct cst_descriptor *d, char *text, size_t cap) {
    const struct sentence out = { .text = text, .cap = cap };
    bool seen[CST_LAYERS_MAX][CST_TENSORS] = { { false } };

    if (!check_head(d, &out))
        return text;
    for (unsigned i = 0; i < d->n_layers; i++)
        if (!check_layer(&d->layers[i], i, &out))
            return text;
    for (unsigned i = 0; i < d->n_segments; i++) {
        const struct cst_segment *s = &d->segments[i];

        if (!check_segment(d, i, &out))
            return text;
        if (s->tensor != CST_TENSOR_OPAQUE && seen[s->layer][s->tensor]) {
            (void)wrong(&out, "segment %u: layer %u has this tensor already: one segment each", i,
                        s->layer);
            return text;
        }
        seen[s->layer][s->tensor] = true;
    }
    return NULL;
}
