/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a block to a frame.
 *
 * Invariants: 1. stream k is segment order[k]; one more stream holds the bytes in no segment, if
 * there are any; 2. a stream is never longer than its segment, so a frame never exceeds
 * cst_frame_bound(); 3. streams of frames that aren't layered decode to the same bits everywhere,
 * and block_crc is that of the decoded block.
 */
#include "codec/codec.h"
#include "codec/dtype.h"
#include "codec/format.h"
#include "codec/frame_layout.h"
#include "codec/klt.h"
#include "codec/preset.h"
#include "codec/side.h"
#include "codec/stage.h"

#include "base/crc32c.h"
#include "base/macros.h"

#include <string.h>

size_t cst_frame_bound(const struct cst_descriptor *desc) {
    size_t per_stream = sizeof(struct cst_stream_entry) + CST_STREAM_ALIGN;

    return sizeof(struct cst_frame_header) + cst_layout_streams(desc) * per_stream +
           desc->block_bytes;
}

struct encoder {
    const struct cst_descriptor *desc;
    const struct cst_encode_params *params;
    struct cst_codec_work work;
    uint8_t *frame;
    bool layered;
    bool leans;  /* on side data */
    uint64_t at; /* end of the streams so far */
    uint32_t stream;
    float error;
    uint32_t block_crc; /* of the segments so far; not of layered frames */
};

static uint8_t *stream_start(struct encoder *e) {
    uint64_t start = cst_align_up(e->at, CST_STREAM_ALIGN);

    memset(e->frame + e->at, 0, start - e->at);
    e->at = start;
    return e->frame + start;
}

static void stream_end(struct encoder *e, struct cst_stream s) {
    struct cst_stream_entry entry = { .stage = s.stage, .version = CST_STAGE_VERSION };

    cst_store16(&entry.outliers, s.outliers);
    cst_store32(&entry.length, (uint32_t)s.length);
    cst_store32(&entry.crc, cst_crc32c(0, e->frame + e->at, s.length));
    cst_store32(&entry.error, cst_f32_bits(s.error));
    memcpy(e->frame + sizeof(struct cst_frame_header) + e->stream * sizeof(entry), &entry,
           sizeof(entry));
    e->stream++;
    e->at += s.length;
}

/* The checksum of a block is run over each segment right after it was coded, while it is in the
 * cache. */
static void add_crc(struct encoder *e, const uint8_t *block, uint32_t i, const uint8_t *decoded) {
    uint64_t at, gap = cst_layout_gap(e->desc, i, &at);

    e->block_crc = cst_crc32c(e->block_crc, block + at, gap);
    if (i < e->desc->n_segments)
        e->block_crc = cst_crc32c(e->block_crc, decoded, e->desc->segments[i].length);
}

/* Where a step table lets a tensor err more or less than others. */
static float weight_of(const struct encoder *e, const struct cst_segment *seg, uint8_t stage) {
    return stage == CST_STAGE_KLT ? cst_klt_weight(e->params->side, seg->layer, seg->tensor) : 1;
}

static void encode_segments(struct encoder *e, const uint8_t *block) {
    for (uint32_t k = 0; k < e->desc->n_segments; k++) {
        uint32_t i = e->work.order[k];
        const struct cst_segment *seg = &e->desc->segments[i];
        struct cst_view view;
        struct cst_stage_segment s =
            cst_stage_segment(&view, e->desc, seg, e->params->tokens, e->params->first_position);
        const uint8_t *src = block + seg->offset;
        struct cst_stream out = cst_stream_encode(stream_start(e), src, &s, &e->work);

        e->leans |= out.leans;
        e->error = CST_MAX(e->error, out.error / weight_of(e, seg, out.stage));
        if (!e->layered)
            add_crc(e, block, i, out.lossy ? e->work.a : src);
        stream_end(e, out);
    }
    if (!e->layered)
        add_crc(e, block, e->desc->n_segments, NULL);
}

static void start_over(struct encoder *e) {
    e->at = sizeof(struct cst_frame_header) +
            cst_layout_streams(e->desc) * sizeof(struct cst_stream_entry);
    e->stream = 0;
    e->error = 0;
    e->leans = false;
}

static void encode_gaps(struct encoder *e, const uint8_t *block) {
    uint64_t n = 0;

    for (uint32_t i = 0; i <= e->desc->n_segments; i++) {
        uint64_t at, gap = cst_layout_gap(e->desc, i, &at);

        memcpy(e->work.a + n, block + at, gap);
        n += gap;
    }
    if (n)
        stream_end(
            e, cst_stream_encode_bytes(stream_start(e), e->work.a, n, e->params->preset, &e->work));
}

static void put_header(const struct encoder *e) {
    const struct cst_encode_params *p = e->params;
    struct cst_frame_header h = { .preset = (uint8_t)p->preset,
                                  .flags = e->layered ? CST_FRAME_LAYERED : 0 };

    memcpy(h.magic, CST_FRAME_MAGIC, sizeof(h.magic));
    cst_store16(&h.version, CST_FRAME_VERSION);
    h.bits_k = (uint8_t)cst_preset_bits(p->preset, p->bits_k);
    h.bits_v = (uint8_t)cst_preset_bits(p->preset, p->bits_v);
    cst_store32(&h.tokens, p->tokens);
    cst_store32(&h.first_position, p->first_position);
    cst_store64(&h.block_bytes, e->desc->block_bytes);
    cst_store64(&h.frame_bytes, e->at);
    cst_store32(&h.error, cst_f32_bits(e->error));
    cst_store32(&h.block_crc, e->block_crc);
    cst_store32(&h.layout_crc, cst_layout_crc(e->desc));
    cst_store32(&h.n_streams, e->stream);
    if (e->leans) {
        cst_store16(&h.side_version, (uint16_t)p->side->version);
        cst_store32(&h.side_check, p->side->check);
    }
    cst_store32(&h.table_crc,
                cst_crc32c(0, e->frame + sizeof(h), e->stream * sizeof(struct cst_stream_entry)));
    cst_store32(&h.header_crc, cst_crc32c(0, &h, offsetof(struct cst_frame_header, header_crc)));
    memcpy(e->frame, &h, sizeof(h));
}

static bool params_ok(const struct cst_encode_params *p, const struct cst_descriptor *desc) {
    return cst_preset_name(p->preset) && cst_preset_takes(p) && cst_layout_ok(desc) &&
           p->tokens > 0 && p->tokens <= desc->block_tokens;
}

int cst_frame_encode(void *dst, size_t cap, const void *block, const struct cst_descriptor *desc,
                     const struct cst_encode_params *params, void *work, size_t work_len,
                     size_t *out_len, struct cst_frame_info *info) {
    struct encoder e = { .desc = desc, .params = params, .frame = dst };
    int r;

    if (!params_ok(params, desc))
        return CST_CODEC_E_PRESET;
    if (!params->side && cst_preset_needs_side(params->preset))
        return CST_CODEC_E_SIDE;
    if (cap < cst_frame_bound(desc) ||
        !cst_codec_work_init(&e.work, desc, params->preset, work, work_len))
        return CST_CODEC_E_SMALL;
    e.work.params = params;
    e.work.side = params->side;
    e.layered = cst_preset_is_layered(params->preset);
    start_over(&e);
    cst_layout_order(e.work.order, desc, e.layered);
    if (e.layered &&
        !cst_layered_begin(block, params->tokens, params->first_position, params->preset, &e.work))
        return CST_CODEC_E_PRESET;
    encode_segments(&e, block);
    if (e.layered && cst_layered_again(&e.work)) {
        start_over(&e);
        encode_segments(&e, block);
    }
    encode_gaps(&e, block);
    e.error += params->carried;
    if (e.error > params->bound)
        return CST_CODEC_E_BOUND;
    put_header(&e);
    if (info) {
        r = cst_frame_inspect(dst, e.at, info);
        if (r)
            return r;
        info->over_budget = e.layered && cst_layered_over_budget(&e.work);
    }
    *out_len = e.at;
    return 0;
}
