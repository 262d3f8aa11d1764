/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames: the header, the stream table, and which stage codes which segment.
 *
 * Invariants: 1. stream i is segment i; one more stream holds the bytes in no segment, if there are
 * any; 2. a stream is never longer than its segment, so a frame never exceeds cst_frame_bound();
 * 3. decode reads no field before the checksum over it was right, no stream outside the frame, and
 * writes no byte outside the segments asked for; 4. streams decode to the same bits everywhere, so
 * the block checksum is checked after each whole decode, lossy presets included.
 *
 * The block checksum is run over each segment right after it was coded, while it is in the cache.
 */
#include "codec/codec.h"
#include "codec/dtype.h"
#include "codec/format.h"
#include "codec/preset.h"
#include "codec/stage.h"

#include "base/crc32c.h"
#include "base/macros.h"

#include <string.h>

/* ---- the layout ------------------------------------------------------------------------------ */

/* What the loops below rely on. Descriptors were checked when they came in; this keeps a mistake
 * there from becoming a write out of bounds here. */
static bool layout_ok(const struct cst_descriptor *desc) {
    uint64_t end = 0;

    if (desc->block_bytes > CST_BLOCK_BYTES_MAX || desc->n_segments > CST_SEGMENTS_MAX ||
        desc->block_tokens < CST_BLOCK_TOKENS_MIN || desc->block_tokens > CST_BLOCK_TOKENS_MAX)
        return false;
    for (uint32_t i = 0; i < desc->n_segments; i++) {
        const struct cst_segment *seg = &desc->segments[i];

        if (seg->layer >= desc->n_layers || seg->offset < end || seg->offset > desc->block_bytes ||
            seg->length > desc->block_bytes - seg->offset)
            return false;
        end = seg->offset + seg->length;
    }
    return true;
}

static uint32_t stream_count(const struct cst_descriptor *desc) {
    return desc->n_segments + (cst_gap_bytes(desc) > 0);
}

/* The gap in front of segment i; behind the last one for i = n_segments. */
static uint64_t gap_before(const struct cst_descriptor *desc, uint32_t i, uint64_t *at) {
    const struct cst_segment *before = i ? &desc->segments[i - 1] : NULL;
    uint64_t end = i < desc->n_segments ? desc->segments[i].offset : desc->block_bytes;

    *at = before ? before->offset + before->length : 0;
    return end - *at;
}

/* docs/codec-format.md section 2 */
static uint32_t layout_crc(const struct cst_descriptor *desc) {
    struct {
        struct cst_le64 block_bytes;
        struct cst_le32 block_tokens, n_segments;
    } head;
    struct {
        struct cst_le64 offset, length, token_stride, head_stride, dim_stride;
        struct cst_le32 layer, kv_heads, head_dim;
        uint8_t tensor, dtype, reserved[2];
    } row = { 0 };
    uint32_t crc;

    _Static_assert(sizeof(head) == 16 && sizeof(row) == 56, "docs/codec-format.md section 2");
    cst_store64(&head.block_bytes, desc->block_bytes);
    cst_store32(&head.block_tokens, desc->block_tokens);
    cst_store32(&head.n_segments, desc->n_segments);
    crc = cst_crc32c(0, &head, sizeof(head));
    for (uint32_t i = 0; i < desc->n_segments; i++) {
        const struct cst_segment *seg = &desc->segments[i];
        const struct cst_layer *layer = &desc->layers[seg->layer];

        cst_store64(&row.offset, seg->offset);
        cst_store64(&row.length, seg->length);
        cst_store64(&row.token_stride, seg->token_stride);
        cst_store64(&row.head_stride, seg->head_stride);
        cst_store64(&row.dim_stride, seg->dim_stride);
        cst_store32(&row.layer, seg->layer);
        cst_store32(&row.kv_heads, layer->kv_heads);
        cst_store32(&row.head_dim,
                    seg->tensor == CST_TENSOR_V ? layer->head_dim_v : layer->head_dim_k);
        row.tensor = seg->tensor;
        row.dtype = seg->dtype;
        crc = cst_crc32c(crc, &row, sizeof(row));
    }
    return crc;
}

size_t cst_frame_bound(const struct cst_descriptor *desc) {
    size_t per_stream = sizeof(struct cst_stream_entry) + CST_STREAM_ALIGN;

    return sizeof(struct cst_frame_header) + stream_count(desc) * per_stream + desc->block_bytes;
}

/* ---- segments -------------------------------------------------------------------------------- */

struct stream {
    uint8_t stage;
    size_t length;
    float error;
};

static struct stream encode_bytes(uint8_t *dst, const uint8_t *src, uint64_t n, uint32_t preset,
                                  const struct cst_codec_work *w) {
    struct stream s = { .stage = CST_STAGE_ZSTD };

    if (preset != CST_PRESET_RAW) {
        if (cst_is_zero(src, n))
            return (struct stream){ .stage = CST_STAGE_ZERO };
        s.length = cst_zstd_encode(dst, src, n, w);
    }
    if (!s.length) {
        memcpy(dst, src, n);
        s = (struct stream){ .stage = CST_STAGE_RAW, .length = n };
    }
    return s;
}

/* Length 0: the recipe has no lossy stage, or it can't take this segment. */
static struct stream encode_lossy(uint8_t *dst, const uint8_t *src,
                                  const struct cst_stage_segment *seg, struct cst_recipe recipe,
                                  const struct cst_codec_work *w) {
    struct stream s = { .stage = recipe.stage };
    struct cst_groups_params groups = { recipe.flags, recipe.bits, recipe.group };

    if (!seg->view)
        return s;
    if (!seg->rotated)
        groups.flags &= (uint8_t)~CST_CODED_UNROTATED;
    if (recipe.stage == CST_STAGE_INT8)
        s.length = cst_int8_encode(dst, src, seg, w, &s.error);
    else if (recipe.stage == CST_STAGE_GROUPS)
        s.length = cst_groups_encode(dst, src, seg, &groups, w, &s.error);
    else if (recipe.stage == CST_STAGE_LLOYD)
        s.length = cst_lloyd_encode(dst, src, seg, recipe.bits, true, w, &s.error);
    return s;
}

static struct stream encode_segment(uint8_t *dst, const uint8_t *src,
                                    const struct cst_stage_segment *seg, struct cst_recipe recipe,
                                    uint32_t preset, const struct cst_codec_work *w) {
    struct stream s;

    if (preset == CST_PRESET_RAW || cst_dtype_size(seg->dtype) == 1 ||
        cst_is_zero(src, seg->length))
        return encode_bytes(dst, src, seg->length, preset, w);
    s = encode_lossy(dst, src, seg, recipe, w);
    if (!s.length && cst_dtype_size(seg->dtype) == 2) {
        s = (struct stream){ .stage = CST_STAGE_PLANES };
        s.length = cst_planes_encode(dst, src, seg, w);
        if (!s.length)
            preset = CST_PRESET_RAW;
    }
    return s.length ? s : encode_bytes(dst, src, seg->length, preset, w);
}

static bool decode_stream(uint8_t *dst, uint64_t n, const struct cst_stage_segment *seg,
                          uint8_t stage, const uint8_t *src, size_t len,
                          const struct cst_codec_work *w) {
    switch (stage) {
    case CST_STAGE_RAW:
        if (len == n)
            memcpy(dst, src, n);
        return len == n;
    case CST_STAGE_ZERO:
        memset(dst, 0, n);
        return len == 0;
    case CST_STAGE_ZSTD:
        return cst_zstd_decode(dst, n, src, len, w);
    case CST_STAGE_PLANES:
        return seg && cst_dtype_size(seg->dtype) == 2 && cst_planes_decode(dst, seg, src, len, w);
    case CST_STAGE_INT8:
        return seg && seg->view && cst_int8_decode(dst, seg, src, len, w);
    case CST_STAGE_GROUPS:
        return seg && seg->view && cst_groups_decode(dst, seg, src, len, w);
    case CST_STAGE_LLOYD:
        return seg && seg->view && cst_lloyd_decode(dst, seg, src, len, w);
    default:
        return false;
    }
}

/* ---- encode ---------------------------------------------------------------------------------- */

struct encoder {
    const struct cst_descriptor *desc;
    const struct cst_encode_params *params;
    struct cst_codec_work work;
    uint8_t *frame;
    uint64_t at; /* end of the streams so far */
    uint32_t stream;
    float error;
    uint32_t block_crc;
};

static uint8_t *stream_start(struct encoder *e) {
    uint64_t start = cst_align_up(e->at, CST_STREAM_ALIGN);

    memset(e->frame + e->at, 0, start - e->at);
    e->at = start;
    return e->frame + start;
}

static void stream_end(struct encoder *e, struct stream s) {
    struct cst_stream_entry entry = { .stage = s.stage, .version = CST_STAGE_VERSION };

    cst_store32(&entry.length, (uint32_t)s.length);
    cst_store32(&entry.crc, cst_crc32c(0, e->frame + e->at, s.length));
    cst_store32(&entry.error, cst_f32_bits(s.error));
    memcpy(e->frame + sizeof(struct cst_frame_header) + e->stream * sizeof(entry), &entry,
           sizeof(entry));
    e->stream++;
    e->at += s.length;
    e->error = CST_MAX(e->error, s.error);
}

static void encode_segments(struct encoder *e, const uint8_t *block) {
    uint64_t gap, at;

    for (uint32_t i = 0; i < e->desc->n_segments; i++) {
        const struct cst_segment *seg = &e->desc->segments[i];
        struct cst_view view;
        struct cst_stage_segment s =
            cst_stage_segment(&view, e->desc, seg, e->params->tokens, e->params->first_position);
        const uint8_t *src = block + seg->offset;
        struct stream out =
            encode_segment(stream_start(e), src, &s, cst_preset_recipe(e->params, seg->tensor),
                           e->params->preset, &e->work);

        gap = gap_before(e->desc, i, &at);
        e->block_crc = cst_crc32c(e->block_crc, block + at, gap);
        if (out.stage >= CST_STAGE_INT8)
            src = e->work.a; /* lossy stages leave the decoded segment there */
        e->block_crc = cst_crc32c(e->block_crc, src, seg->length);
        stream_end(e, out);
    }
    gap = gap_before(e->desc, e->desc->n_segments, &at);
    e->block_crc = cst_crc32c(e->block_crc, block + at, gap);
}

static void encode_gaps(struct encoder *e, const uint8_t *block) {
    uint64_t n = 0;

    for (uint32_t i = 0; i <= e->desc->n_segments; i++) {
        uint64_t at, gap = gap_before(e->desc, i, &at);

        memcpy(e->work.a + n, block + at, gap);
        n += gap;
    }
    if (n)
        stream_end(e, encode_bytes(stream_start(e), e->work.a, n, e->params->preset, &e->work));
}

static void put_header(const struct encoder *e) {
    const struct cst_encode_params *p = e->params;
    struct cst_frame_header h = { .preset = (uint8_t)p->preset };

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
    cst_store32(&h.layout_crc, layout_crc(e->desc));
    cst_store32(&h.n_streams, e->stream);
    cst_store32(&h.table_crc,
                cst_crc32c(0, e->frame + sizeof(h), e->stream * sizeof(struct cst_stream_entry)));
    cst_store32(&h.header_crc, cst_crc32c(0, &h, offsetof(struct cst_frame_header, header_crc)));
    memcpy(e->frame, &h, sizeof(h));
}

int cst_frame_encode(void *dst, size_t cap, const void *block, const struct cst_descriptor *desc,
                     const struct cst_encode_params *params, void *work, size_t work_len,
                     size_t *out_len, struct cst_frame_info *info) {
    struct encoder e = { .desc = desc, .params = params, .frame = dst };
    int r;

    if (params->preset >= CST_PRESETS || cst_preset_bits(params->preset, params->bits_k) < 0 ||
        cst_preset_bits(params->preset, params->bits_v) < 0 || !layout_ok(desc) ||
        params->tokens == 0 || params->tokens > desc->block_tokens)
        return CST_CODEC_E_PRESET;
    if (cap < cst_frame_bound(desc) || !cst_codec_work_init(&e.work, desc, work, work_len))
        return CST_CODEC_E_SMALL;
    e.at = sizeof(struct cst_frame_header) + stream_count(desc) * sizeof(struct cst_stream_entry);
    encode_segments(&e, block);
    encode_gaps(&e, block);
    if (e.error > params->bound)
        return CST_CODEC_E_BOUND;
    put_header(&e);
    if (info) {
        r = cst_frame_inspect(dst, e.at, info);
        if (r)
            return r;
    }
    *out_len = e.at;
    return 0;
}

/* ---- decode ---------------------------------------------------------------------------------- */

int cst_frame_inspect(const void *frame, size_t len, struct cst_frame_info *info) {
    const struct cst_frame_header *h = frame;
    size_t checked = offsetof(struct cst_frame_header, header_crc);

    if (len < sizeof(*h) || memcmp(h->magic, CST_FRAME_MAGIC, sizeof(h->magic)))
        return CST_CODEC_E_CORRUPT;
    if (cst_load16(&h->version) != CST_FRAME_VERSION)
        return CST_CODEC_E_VERSION;
    if (cst_crc32c(0, h, checked) != cst_load32(&h->header_crc))
        return CST_CODEC_E_CORRUPT;
    if (h->preset >= CST_PRESETS || h->flags || !cst_is_zero(h->reserved, sizeof(h->reserved)) ||
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
    };
    return 0;
}

struct decoder {
    const struct cst_descriptor *desc;
    struct cst_codec_work work;
    struct cst_frame_info info;
    const uint8_t *frame;
    uint32_t n_streams;
    uint8_t *block;
    uint64_t first, end; /* layers */
    bool whole;
    uint32_t crc; /* of the block so far, when whole */
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
        if (table[i].stage >= CST_STAGES || table[i].version != CST_STAGE_VERSION ||
            cst_load16(&table[i].reserved))
            return CST_CODEC_E_VERSION;
        at = start + cst_load32(&table[i].length);
    }
    return at == d->info.frame_bytes ? 0 : CST_CODEC_E_CORRUPT;
}

/* Stream i, of n decoded bytes; seg is NULL for the gaps. A part of a block is covered by the
 * checksums of its streams, a whole one by its own. */
static bool decode_one(const struct decoder *d, uint8_t *dst, uint64_t n, uint32_t i, uint64_t at,
                       const struct cst_stage_segment *seg) {
    const struct cst_stream_entry *entry =
        (const void *)(d->frame + sizeof(struct cst_frame_header) + i * sizeof(*entry));
    size_t len = cst_load32(&entry->length);

    if (!d->whole && cst_crc32c(0, d->frame + at, len) != cst_load32(&entry->crc))
        return false;
    return decode_stream(dst, n, seg, entry->stage, d->frame + at, len, &d->work);
}

static uint64_t stream_next(const struct decoder *d, uint32_t i, uint64_t at) {
    const struct cst_stream_entry *entry =
        (const void *)(d->frame + sizeof(struct cst_frame_header) + i * sizeof(*entry));

    return cst_align_up(at + cst_load32(&entry->length), CST_STREAM_ALIGN);
}

static bool decode_gaps(struct decoder *d, uint64_t at) {
    uint64_t n = cst_gap_bytes(d->desc);
    const uint8_t *p = d->work.a;

    if (!n)
        return true;
    if (!decode_one(d, d->work.a, n, d->n_streams - 1, at, NULL))
        return false;
    for (uint32_t i = 0; i <= d->desc->n_segments; i++) {
        uint64_t to, gap = gap_before(d->desc, i, &to);

        memcpy(d->block + to, p, gap);
        p += gap;
    }
    return true;
}

static bool decode_segments(struct decoder *d, uint64_t at) {
    for (uint32_t i = 0; i < d->desc->n_segments; at = stream_next(d, i++, at)) {
        const struct cst_segment *seg = &d->desc->segments[i];
        struct cst_stage_segment s;
        struct cst_view view;
        uint64_t gap_at, gap = gap_before(d->desc, i, &gap_at);

        if (seg->layer < d->first || seg->layer >= d->end)
            continue;
        s = cst_stage_segment(&view, d->desc, seg, d->info.tokens, d->info.first_position);
        if (!decode_one(d, d->block + seg->offset, seg->length, i, at, &s))
            return false;
        if (d->whole)
            d->crc = cst_crc32c(d->crc, d->block + gap_at, gap + seg->length);
    }
    return true;
}

static bool decode_all(struct decoder *d) {
    uint64_t first = cst_align_up(sizeof(struct cst_frame_header) +
                                      d->n_streams * sizeof(struct cst_stream_entry),
                                  CST_STREAM_ALIGN);
    uint64_t at = first, gap;

    if (d->whole) {
        for (uint32_t i = 0; i < d->desc->n_segments; i++)
            at = stream_next(d, i, at);
        if (!decode_gaps(d, at))
            return false;
    }
    if (!decode_segments(d, first))
        return false;
    if (!d->whole)
        return true;
    gap = gap_before(d->desc, d->desc->n_segments, &at);
    return cst_crc32c(d->crc, d->block + at, gap) == d->info.block_crc;
}

int cst_frame_decode(void *block, size_t cap, const void *frame, size_t len,
                     const struct cst_descriptor *desc, uint32_t first_layer, uint32_t n_layers,
                     void *work, size_t work_len) {
    struct decoder d = { .desc = desc, .frame = frame, .block = block, .first = first_layer };
    int r = cst_frame_inspect(frame, len, &d.info);

    if (r)
        return r;
    if (d.info.frame_bytes > len)
        return CST_CODEC_E_CORRUPT;
    if (!layout_ok(desc) || d.info.layout_crc != layout_crc(desc) ||
        d.info.block_bytes != desc->block_bytes)
        return CST_CODEC_E_MISMATCH;
    if (d.info.tokens == 0 || d.info.tokens > desc->block_tokens)
        return CST_CODEC_E_CORRUPT;
    if (cap < desc->block_bytes || !cst_codec_work_init(&d.work, desc, work, work_len))
        return CST_CODEC_E_SMALL;
    d.n_streams = stream_count(desc);
    d.end = d.first + n_layers;
    d.whole = first_layer == 0 && n_layers >= desc->n_layers;
    r = check_table(&d);
    if (r)
        return r;
    return decode_all(&d) ? 0 : CST_CODEC_E_CORRUPT;
}
