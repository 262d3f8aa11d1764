/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The workspace: which buffers the stages of a layout can need, and where they lie in the caller's
 * memory; and what the stages know of a segment. Invariant: sizes depend on the descriptor and the
 * preset alone, so encode and decode fit. No state; any thread.
 */
#include "codec/codec.h"
#include "codec/coded.h"
#include "codec/exponents.h"
#include "codec/stage.h"

#include "base/macros.h"

enum { WORK_ALIGN = 64 };

struct room {
    uint64_t table, exponents, order, outliers, energy, buffer, plane, rope, zstd, dense;
    uint32_t pairs; /* most rotated pairs of a head */
};

/* What the fp32 stages need for a segment. */
static void room_for_plane(struct room *r, const struct cst_descriptor *desc,
                           const struct cst_segment *seg) {
    const struct cst_layer *layer = &desc->layers[seg->layer];
    struct cst_view view;

    if (!cst_view_init(&view, desc, seg))
        return;
    r->plane = CST_MAX(r->plane, cst_align_up(cst_coded_plane_size(&view), WORK_ALIGN));
    if (seg->tensor == CST_TENSOR_K && layer->k_rotated && cst_rope_known(layer, view.dims))
        r->pairs = CST_MAX(r->pairs, layer->rope_dims / 2);
}

static uint64_t room_total(const struct room *r) {
    return r->table + r->exponents + r->order + r->outliers + r->energy + 2 * r->buffer + r->plane +
           r->rope + r->zstd + r->dense;
}

static struct room room_of(const struct cst_descriptor *desc, uint32_t preset) {
    struct room r = { .table = cst_align_up(sizeof(struct cst_huff_table), WORK_ALIGN),
                      .exponents = cst_align_up(cst_exponents_work_size(), WORK_ALIGN),
                      .order = cst_align_up(desc->n_segments * sizeof(uint32_t), WORK_ALIGN),
                      .outliers =
                          cst_align_up(desc->n_segments * sizeof(struct cst_outliers), WORK_ALIGN),
                      .energy = cst_align_up(2 * sizeof(float) * desc->block_tokens, WORK_ALIGN),
                      .dense = cst_align_up(cst_dense_work_size(desc, preset), WORK_ALIGN),
                      .buffer = cst_gap_bytes(desc) };
    bool bytes = r.buffer > 0;

    for (uint32_t i = 0; i < desc->n_segments; i++) {
        const struct cst_segment *seg = &desc->segments[i];

        bytes |= cst_dtype_size(seg->dtype) != 2;
        if (seg->dtype != CST_DTYPE_OPAQUE)
            r.buffer = CST_MAX(r.buffer, seg->length);
        room_for_plane(&r, desc, seg);
    }
    r.rope = r.pairs ? cst_rope_work_size(desc->block_tokens, r.pairs) : 0;
    r.buffer = cst_align_up(r.buffer, WORK_ALIGN);
    r.zstd = bytes ? cst_align_up(cst_zstd_work_size(), WORK_ALIGN) : 0;
    return r;
}

size_t cst_codec_work_size(const struct cst_descriptor *desc, uint32_t preset) {
    struct room r = room_of(desc, preset);

    return cst_preset_name(preset) ? room_total(&r) : 0;
}

size_t cst_codec_work_size_max(const struct cst_descriptor *desc) {
    size_t most = 0;

    for (uint32_t preset = 0; preset < CST_PRESETS; preset++)
        most = CST_MAX(most, cst_codec_work_size(desc, preset));
    return most;
}

bool cst_codec_work_init(struct cst_codec_work *w, const struct cst_descriptor *desc,
                         uint32_t preset, void *work, size_t work_len) {
    struct room r = room_of(desc, preset);
    uint8_t *exponents = (uint8_t *)work + r.table, *order = exponents + r.exponents;
    uint8_t *outliers = order + r.order, *energy = outliers + r.outliers;
    uint8_t *a = energy + r.energy, *plane = a + 2 * r.buffer;
    uint8_t *rope = plane + r.plane, *zstd = rope + r.rope;

    if (work_len < room_total(&r) || (uintptr_t)work % WORK_ALIGN)
        return false;
    *w = (struct cst_codec_work){
        .ops = cst_codec_ops(),
        .preset = preset,
        .desc = desc,
        .huff = work,
        .exponents = cst_exponents_work_init(exponents),
        .order = (void *)order,
        .outliers = (void *)outliers,
        .energy = (void *)energy,
        .a = a,
        .b = a + r.buffer,
        .plane = (void *)plane,
        .rope = r.pairs ? cst_rope_table_init(rope, desc->block_tokens, r.pairs) : NULL,
        .zstd = r.zstd ? zstd : NULL,
        .zstd_size = r.zstd,
        .dense = r.dense ? zstd + r.zstd : NULL,
        .dense_size = r.dense,
    };
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
