/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The workspace: which buffers the stages of a layout can need, and where they lie in the caller's
 * memory; and what the stages know of a segment. Invariant: sizes depend on the descriptor and the
 * preset alone, so encode and decode fit. No state; any thread.
 */
#include "codec/carve.h"
#include "codec/codec.h"
#include "codec/coded.h"
#include "codec/exponents.h"
#include "codec/stage.h"

#include "base/macros.h"

/* What stages need of a layout's segments. */
struct needs {
    uint64_t buffer, plane; /* bytes */
    uint32_t pairs;         /* most rotated pairs of a head */
    bool zstd;
};

/* What the fp32 stages need for a segment. */
static void add_plane(struct needs *n, const struct cst_descriptor *desc,
                      const struct cst_segment *seg) {
    const struct cst_layer *layer = &desc->layers[seg->layer];
    struct cst_view view;

    if (!cst_view_init(&view, desc, seg))
        return;
    n->plane = CST_MAX(n->plane, cst_coded_plane_size(&view));
    if (seg->tensor == CST_TENSOR_K && layer->k_rotated && cst_rope_known(layer, view.dims))
        n->pairs = CST_MAX(n->pairs, layer->rope_dims / 2);
}

static struct needs needs_of(const struct cst_descriptor *desc) {
    struct needs n = { .buffer = cst_gap_bytes(desc) };

    n.zstd = n.buffer > 0;
    for (uint32_t i = 0; i < desc->n_segments; i++) {
        const struct cst_segment *seg = &desc->segments[i];

        n.zstd |= cst_dtype_size(seg->dtype) != 2;
        if (seg->dtype != CST_DTYPE_OPAQUE)
            n.buffer = CST_MAX(n.buffer, seg->length);
        add_plane(&n, desc, seg);
    }
    return n;
}

static void lay_out(struct cst_codec_work *w, struct cst_carve *c, const struct needs *n) {
    const struct cst_descriptor *desc = w->desc;
    size_t dense = cst_dense_work_size(desc, w->preset);

    w->huff = cst_carve(c, 1, sizeof(*w->huff));
    w->exponents = cst_carve(c, cst_exponents_work_size(), 1);
    w->order = cst_carve(c, desc->n_segments, sizeof(*w->order));
    w->outliers = cst_carve(c, desc->n_segments, sizeof(*w->outliers));
    w->energy = cst_carve_floats(c, 2 * (uint64_t)desc->block_tokens);
    w->a = cst_carve(c, n->buffer, 1);
    w->b = cst_carve(c, n->buffer, 1);
    w->plane = cst_carve(c, n->plane, 1);
    w->rope = n->pairs ? cst_carve(c, cst_rope_work_size(desc->block_tokens, n->pairs), 1) : NULL;
    w->zstd_size = n->zstd ? cst_zstd_work_size() : 0;
    w->zstd = n->zstd ? cst_carve(c, w->zstd_size, 1) : NULL;
    w->dense = dense ? cst_carve(c, dense, 1) : NULL;
}

size_t cst_codec_work_size(const struct cst_descriptor *desc, uint32_t preset) {
    struct cst_codec_work w = { .preset = preset, .desc = desc };
    struct cst_carve c = { NULL, 0 };
    struct needs n = needs_of(desc);

    lay_out(&w, &c, &n);
    return cst_preset_name(preset) ? c.at : 0;
}

size_t cst_codec_work_size_max(const struct cst_descriptor *desc) {
    size_t most = 0;

    for (uint32_t preset = 0; preset < CST_PRESETS; preset++)
        most = CST_MAX(most, cst_codec_work_size(desc, preset));
    return most;
}

bool cst_codec_work_init(struct cst_codec_work *w, const struct cst_descriptor *desc,
                         uint32_t preset, void *work, size_t work_len) {
    struct cst_carve c = { work, 0 };
    struct needs n = needs_of(desc);

    *w = (struct cst_codec_work){ .ops = cst_codec_ops(), .preset = preset, .desc = desc };
    lay_out(w, &c, &n);
    if (work_len < c.at || (uintptr_t)work % CST_CARVE_ALIGN)
        return false;
    w->exponents = cst_exponents_work_init(w->exponents);
    if (w->rope)
        w->rope = cst_rope_table_init(w->rope, desc->block_tokens, n.pairs);
    for (uint32_t i = 0; i < desc->n_segments; i++)
        w->outliers[i].n = 0;
    return true;
}

struct cst_stage_segment cst_stage_segment(struct cst_view *view, const struct cst_descriptor *desc,
                                           const struct cst_segment *seg, uint32_t tokens,
                                           uint32_t first_position) {
    uint32_t sinks = first_position < CST_SINK_TOKENS ? CST_SINK_TOKENS - first_position : 0;
    const struct cst_layer *layer = &desc->layers[seg->layer];
    bool rotated = seg->tensor == CST_TENSOR_K && layer->k_rotated && layer->rope != CST_ROPE_NONE;

    return (struct cst_stage_segment){
        .length = seg->length,
        .view = cst_view_init(view, desc, seg) ? view : NULL,
        .rotated = rotated ? layer : NULL,
        .index = (uint32_t)(seg - desc->segments),
        .layer = seg->layer,
        .tensor = seg->tensor,
        .dtype = seg->dtype,
        .tokens = tokens,
        .sinks = CST_MIN(sinks, tokens),
        .position = first_position,
    };
}
