/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a frame to a block.
 *
 * Invariants: 1. no field is read before the checksum over it was right, no stream outside the
 * frame; 2. no byte outside the segments asked for is written; 3. a whole block of a frame that
 * isn't layered is checked against block_crc, everything else against the checksums of the streams
 * that are read.
 */
#include "codec/codec.h"
#include "codec/dtype.h"
#include "codec/format.h"
#include "codec/frame_layout.h"
#include "codec/outliers.h"
#include "codec/preset.h"
#include "codec/side.h"
#include "codec/stage.h"

#include "base/crc32c.h"
#include "base/macros.h"

#include <string.h>

int cst_frame_inspect(const void *frame, size_t len, struct cst_frame_info *info) {
    const struct cst_frame_header *h = frame;
    size_t checked = offsetof(struct cst_frame_header, header_crc);

    if (len < sizeof(*h) || memcmp(h->magic, CST_FRAME_MAGIC, sizeof(h->magic)))
        return CST_CODEC_E_CORRUPT;
    if (cst_load16(&h->version) != CST_FRAME_VERSION)
        return CST_CODEC_E_VERSION;
    if (cst_crc32c(0, h, checked) != cst_load32(&h->header_crc))
        return CST_CODEC_E_CORRUPT;
    if (!cst_preset_name(h->preset) ||
        h->flags != (cst_preset_is_layered(h->preset) ? CST_FRAME_LAYERED : 0) ||
        cst_preset_bits(h->preset, h->bits_k) != h->bits_k ||
        cst_preset_bits(h->preset, h->bits_v) != h->bits_v)
        return CST_CODEC_E_VERSION;
    *info = (struct cst_frame_info){
        .version = CST_FRAME_VERSION,
        .preset = h->preset,
        .tokens = cst_load32(&h->tokens),
        .first_position = cst_load32(&h->first_position),
        .block_bytes = cst_load64(&h->block_bytes),
        .frame_bytes = cst_load64(&h->frame_bytes),
        .error = cst_f32_from_bits(cst_load32(&h->error)),
        .block_crc = cst_load32(&h->block_crc),
        .layout_crc = cst_load32(&h->layout_crc),
        .bits_k = h->bits_k,
        .bits_v = h->bits_v,
        .layered = h->flags & CST_FRAME_LAYERED,
        .side_version = cst_load16(&h->side_version),
        .side_check = cst_load32(&h->side_check),
    };
    return 0;
}

struct decoder {
    const struct cst_descriptor *desc;
    const struct cst_decode_params *params;
    struct cst_codec_work work;
    struct cst_frame_info info;
    const uint8_t *frame;
    uint32_t n_streams;
    uint32_t position; /* of the first token once it is decoded */
    uint8_t *block;
    bool whole;   /* all layers */
    bool sealed;  /* block_crc covers what is decoded */
    uint32_t crc; /* of the block so far, when sealed */
};

/* Checks the table, and that the streams and the zeros between them fill the frame exactly. */
static int check_table(const struct decoder *d) {
    const struct cst_frame_header *h = (const void *)d->frame;
    const struct cst_stream_entry *table = (const void *)(d->frame + sizeof(*h));
    uint64_t at = sizeof(*h) + d->n_streams * sizeof(*table);

    if (cst_load32(&h->n_streams) != d->n_streams || at > d->info.frame_bytes ||
        cst_crc32c(0, table, d->n_streams * sizeof(*table)) != cst_load32(&h->table_crc))
        return CST_CODEC_E_CORRUPT;
    for (uint32_t i = 0; i < d->n_streams; i++) {
        uint64_t start = cst_align_up(at, CST_STREAM_ALIGN);

        if (start > d->info.frame_bytes || !cst_is_zero(d->frame + at, start - at) ||
            cst_load32(&table[i].length) > d->info.frame_bytes - start)
            return CST_CODEC_E_CORRUPT;
        if (!cst_stage_known(table[i].stage, d->info.layered) ||
            table[i].version != CST_STAGE_VERSION ||
            (cst_load16(&table[i].outliers) && !cst_stage_is_lossy(table[i].stage)))
            return CST_CODEC_E_VERSION;
        at = start + cst_load32(&table[i].length);
    }
    return at == d->info.frame_bytes ? 0 : CST_CODEC_E_CORRUPT;
}

static const struct cst_stream_entry *entry_of(const struct decoder *d, uint32_t k) {
    const struct cst_stream_entry *table =
        (const void *)(d->frame + sizeof(struct cst_frame_header));

    return &table[k];
}

static uint64_t stream_next(const struct decoder *d, uint32_t k, uint64_t at) {
    return cst_align_up(at + cst_load32(&entry_of(d, k)->length), CST_STREAM_ALIGN);
}

static bool stream_is_intact(const struct decoder *d, uint32_t k, uint64_t at) {
    const struct cst_stream_entry *entry = entry_of(d, k);

    return d->sealed ||
           cst_crc32c(0, d->frame + at, cst_load32(&entry->length)) == cst_load32(&entry->crc);
}

static bool decode_gaps(struct decoder *d, uint64_t at) {
    uint32_t k = d->n_streams - 1;
    uint64_t n = cst_gap_bytes(d->desc);
    const uint8_t *p = d->work.a;

    if (!n)
        return true;
    if (!stream_is_intact(d, k, at) ||
        !cst_stream_decode(d->work.a, n, NULL, entry_of(d, k)->stage, d->frame + at,
                           cst_load32(&entry_of(d, k)->length), &d->work))
        return false;
    for (uint32_t i = 0; i <= d->desc->n_segments; i++) {
        uint64_t to, gap = cst_layout_gap(d->desc, i, &to);

        memcpy(d->block + to, p, gap);
        p += gap;
    }
    return true;
}

/* Keys are turned to the position asked for while they are decoded, or, where a stream keeps them
 * as they were stored, afterwards. */
static bool decode_keys(const struct decoder *d, uint8_t *dst, struct cst_stage_segment *s,
                        uint8_t stage, const uint8_t *src, size_t len) {
    uint32_t stored = s->position;
    bool only_kept = cst_stage_is_unrotated(stage, src, len);

    if (only_kept)
        s->position = d->position;
    if (!cst_stream_decode(dst, s->length, s, stage, src, len, &d->work))
        return false;
    s->position = stored;
    return cst_stage_place(dst, s, d->position, only_kept, &d->work);
}

static bool decode_one(const struct decoder *d, uint32_t k, uint64_t at) {
    const struct cst_segment *seg = &d->desc->segments[d->work.order[k]];
    const struct cst_stream_entry *entry = entry_of(d, k);
    size_t len = cst_load32(&entry->length);
    const uint8_t *src = d->frame + at;
    struct cst_view view;
    struct cst_stage_segment s =
        cst_stage_segment(&view, d->desc, seg, d->info.tokens, d->info.first_position);

    if (!stream_is_intact(d, k, at) ||
        !cst_outliers_open(&s, cst_load16(&entry->outliers), src, &len, &d->work))
        return false;
    if (seg->layer < d->params->first_layer)
        return cst_layered_skip(&s, entry->stage, src, len, &d->work);
    if (s.rotated && d->position != d->info.first_position)
        return decode_keys(d, d->block + seg->offset, &s, entry->stage, src, len);
    return cst_stream_decode(d->block + seg->offset, seg->length, &s, entry->stage, src, len,
                             &d->work);
}

/* Whether stream k is read: layers asked for, and in a layered frame all before them. */
static bool is_wanted(const struct decoder *d, uint32_t k) {
    uint32_t layer = d->desc->segments[d->work.order[k]].layer, first = d->params->first_layer;

    if (layer < first)
        return d->info.layered && d->params->n_layers;
    return layer - first < d->params->n_layers;
}

static bool decode_segments(struct decoder *d, uint64_t at) {
    for (uint32_t k = 0; k < d->desc->n_segments; at = stream_next(d, k++, at)) {
        uint32_t i = d->work.order[k];
        uint64_t gap_at, gap = cst_layout_gap(d->desc, i, &gap_at);

        if (!is_wanted(d, k))
            continue;
        if (!decode_one(d, k, at))
            return false;
        if (d->sealed)
            d->crc = cst_crc32c(d->crc, d->block + gap_at, gap + d->desc->segments[i].length);
    }
    return true;
}

static bool decode_all(struct decoder *d) {
    uint64_t first = cst_align_up(sizeof(struct cst_frame_header) +
                                      d->n_streams * sizeof(struct cst_stream_entry),
                                  CST_STREAM_ALIGN);
    uint64_t at = first, gap;

    if (d->info.layered &&
        !cst_layered_begin(NULL, d->info.tokens, d->position, d->info.preset, &d->work))
        return false;
    if (d->whole) {
        for (uint32_t k = 0; k < d->desc->n_segments; k++)
            at = stream_next(d, k, at);
        if (!decode_gaps(d, at))
            return false;
    }
    if (!decode_segments(d, first))
        return false;
    if (!d->sealed)
        return true;
    gap = cst_layout_gap(d->desc, d->desc->n_segments, &at);
    return cst_crc32c(d->crc, d->block + at, gap) == d->info.block_crc;
}

/* Whether all keys of the layout can be turned. */
static bool can_place(const struct decoder *d) {
    for (uint32_t i = 0; i < d->desc->n_segments; i++) {
        const struct cst_segment *seg = &d->desc->segments[i];
        const struct cst_layer *layer = &d->desc->layers[seg->layer];
        struct cst_view view;

        if (seg->tensor == CST_TENSOR_OPAQUE)
            return false;
        if (seg->tensor == CST_TENSOR_K && layer->k_rotated && layer->rope != CST_ROPE_NONE &&
            !(cst_view_init(&view, d->desc, seg) && cst_rope_known(layer, view.dims)))
            return false;
    }
    return true;
}

static int check_params(struct decoder *d) {
    const struct cst_decode_params *p = d->params;

    d->position = p->position == CST_POSITION_OWN ? d->info.first_position : p->position;
    d->whole = p->first_layer == 0 && p->n_layers >= d->desc->n_layers;
    d->sealed = d->whole && !d->info.layered && d->position == d->info.first_position;
    if (d->info.side_version && !cst_side_is(p->side, d->info.side_version, d->info.side_check))
        return CST_CODEC_E_SIDE;
    return d->position == d->info.first_position || can_place(d) ? 0 : CST_CODEC_E_PLACE;
}

int cst_frame_decode(void *block, size_t cap, const void *frame, size_t len,
                     const struct cst_descriptor *desc, const struct cst_decode_params *params,
                     void *work, size_t work_len) {
    struct decoder d = { .desc = desc, .params = params, .frame = frame, .block = block };
    int r = cst_frame_inspect(frame, len, &d.info);

    if (r)
        return r;
    if (d.info.frame_bytes > len)
        return CST_CODEC_E_CORRUPT;
    if (!cst_layout_ok(desc) || d.info.layout_crc != cst_layout_crc(desc) ||
        d.info.block_bytes != desc->block_bytes)
        return CST_CODEC_E_MISMATCH;
    if (d.info.tokens == 0 || d.info.tokens > desc->block_tokens)
        return CST_CODEC_E_CORRUPT;
    if (cap < desc->block_bytes ||
        !cst_codec_work_init(&d.work, desc, d.info.preset, work, work_len))
        return CST_CODEC_E_SMALL;
    d.work.side = params->side;
    d.n_streams = cst_layout_streams(desc);
    cst_layout_order(d.work.order, desc, d.info.layered);
    r = check_table(&d);
    if (r)
        return r;
    r = check_params(&d);
    if (r)
        return r;
    return decode_all(&d) ? 0 : CST_CODEC_E_CORRUPT;
}
