/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames. The first byte of an input says what happens to the rest, for one of three layouts:
 *   decode  the bytes as a frame, as they are;
 *   sealed  the bytes as a frame whose checksums and identity are made right first, so that what
 *           lies behind them is reached; layer by layer, since the block's own checksum is not;
 *   block   the bytes as a block's content, encoded with each preset and decoded again;
 *   stream  the bytes as one stream of a stage, of one of the layout's segments, decoded by each
 *           set of inner loops, which must agree.
 * Buffers have exactly the promised sizes, so that the address sanitizer sees one byte too many.
 */
#include "tests/fuzz/fuzz.h"

#include "codec/codec.h"
#include "codec/exponents.h"
#include "codec/format.h"
#include "codec/preset.h"
#include "codec/stage.h"

#include "base/crc32c.h"
#include "base/macros.h"

#include <string.h>

static struct cst_layer layers[] = {
    { .kv_heads = 2,
      .head_dim_k = 40,
      .head_dim_v = 40,
      .rope = CST_ROPE_NEOX,
      .k_rotated = 1,
      .rope_dims = 20,
      .rope_theta = 1e4f },
    { .kv_heads = 1, .head_dim_k = 16, .head_dim_v = 24 },
};

/* K rows and V transposed in bf16, then fp16 with gaps, then fp32 and opaque bytes */
static struct cst_segment plain[] = {
    { .layer = 0,
      .tensor = CST_TENSOR_K,
      .dtype = CST_DTYPE_BF16,
      .offset = 0,
      .length = 2560,
      .token_stride = 160,
      .head_stride = 80,
      .dim_stride = 2 },
    { .layer = 0,
      .tensor = CST_TENSOR_V,
      .dtype = CST_DTYPE_BF16,
      .offset = 2560,
      .length = 2560,
      .token_stride = 2,
      .head_stride = 1280,
      .dim_stride = 32 },
};
static struct cst_segment gaps[] = {
    { .layer = 0,
      .tensor = CST_TENSOR_K,
      .dtype = CST_DTYPE_F16,
      .offset = 5,
      .length = 2656,
      .token_stride = 166,
      .head_stride = 80,
      .dim_stride = 2 },
    { .layer = 1,
      .tensor = CST_TENSOR_V,
      .dtype = CST_DTYPE_F16,
      .offset = 2700,
      .length = 768,
      .token_stride = 48,
      .head_stride = 48,
      .dim_stride = 2 },
};
static struct cst_segment bytes[] = {
    { .layer = 0, .tensor = CST_TENSOR_OPAQUE, .offset = 0, .length = 1600, .token_stride = 100 },
    { .layer = 1,
      .tensor = CST_TENSOR_K,
      .dtype = CST_DTYPE_F32,
      .offset = 1600,
      .length = 1024,
      .token_stride = 64,
      .head_stride = 64,
      .dim_stride = 4 },
};
static const struct cst_descriptor layouts[] = {
    { .block_tokens = 16,
      .block_bytes = 5120,
      .n_layers = 1,
      .n_segments = 2,
      .layers = layers,
      .segments = plain },
    { .block_tokens = 16,
      .block_bytes = 3500,
      .n_layers = 2,
      .n_segments = 2,
      .layers = layers,
      .segments = gaps },
    { .block_tokens = 16,
      .block_bytes = 2624,
      .n_layers = 2,
      .n_segments = 2,
      .layers = layers,
      .segments = bytes },
};

enum mode { MODE_DECODE, MODE_SEALED, MODE_BLOCK, MODE_STREAM, MODES };

struct buffers {
    uint8_t *block, *out, *frame, *work;
    size_t bound, work_len;
};

static void buffers_init(struct buffers *b, const struct cst_descriptor *desc) {
    b->bound = cst_frame_bound(desc);
    b->work_len = cst_codec_work_size_max(desc);
    b->block = room(desc->block_bytes);
    b->out = room(desc->block_bytes);
    b->frame = room(b->bound);
    b->work = room(b->work_len);
}

static void buffers_deinit(struct buffers *b) {
    free(b->block);
    free(b->out);
    free(b->frame);
    free(b->work);
}

static int decode(struct buffers *b, const struct cst_descriptor *desc, const uint8_t *frame,
                  size_t len, uint32_t first, uint32_t n) {
    const struct cst_decode_params params = { first, n, CST_POSITION_OWN, NULL };

    return cst_frame_decode(b->out, desc->block_bytes, frame, len, desc, &params, b->work,
                            b->work_len);
}

/* What a frame of this layout has in front of its streams, from one that was just made. */
static size_t seal(uint8_t *frame, size_t size, const struct buffers *b) {
    struct cst_frame_header *h = (void *)frame;
    const struct cst_frame_header *own = (const void *)b->frame;
    uint32_t n = cst_load32(&own->n_streams);
    struct cst_stream_entry *table = (void *)(h + 1);
    uint64_t at = sizeof(*h) + n * sizeof(*table);

    if (size < at)
        return size;
    memcpy(h->magic, own->magic, sizeof(h->magic));
    h->version = own->version;
    h->block_bytes = own->block_bytes;
    h->layout_crc = own->layout_crc;
    h->n_streams = own->n_streams;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t start = cst_align_up(at, CST_STREAM_ALIGN);

        if (start > size)
            return size;
        memset(frame + at, 0, start - at);
        if (i == n - 1 || cst_load32(&table[i].length) > size - start)
            cst_store32(&table[i].length, (uint32_t)(size - start));
        cst_store32(&table[i].crc, cst_crc32c(0, frame + start, cst_load32(&table[i].length)));
        at = start + cst_load32(&table[i].length);
    }
    cst_store64(&h->frame_bytes, at);
    cst_store32(&h->table_crc, cst_crc32c(0, table, n * sizeof(*table)));
    cst_store32(&h->header_crc, cst_crc32c(0, h, offsetof(struct cst_frame_header, header_crc)));
    return at;
}

static void run_sealed(struct buffers *b, const struct cst_descriptor *desc, const uint8_t *data,
                       size_t size) {
    struct cst_encode_params p = { CST_PRESET_RAW, 1, 0, 0 };
    uint8_t *frame = room(size);
    size_t len;

    memset(b->block, 0, desc->block_bytes);
    check(cst_frame_encode(b->frame, b->bound, b->block, desc, &p, b->work, b->work_len, &len,
                           NULL) == 0);
    memcpy(frame, data, size);
    len = seal(frame, size, b);
    (void)decode(b, desc, frame, len, 0, UINT32_MAX);
    for (uint32_t l = 0; l < desc->n_layers; l++)
        (void)decode(b, desc, frame, len, l, desc->n_layers == 1 ? 0 : 1);
    free(frame);
}

static void run_block(struct buffers *b, const struct cst_descriptor *desc, const uint8_t *data,
                      size_t size) {
    struct cst_encode_params p = { .tokens = 16, .bound = 1e30f };

    if (size > 0)
        p.tokens = 1 + data[0] % 16;
    if (size > 1)
        p.first_position = data[1] % 6;
    memset(b->block, 0, desc->block_bytes);
    memcpy(b->block, data, CST_MIN(size, desc->block_bytes));
    for (p.preset = 0; p.preset < CST_PRESETS; p.preset++) {
        struct cst_frame_info info;
        size_t len;

        if (!cst_preset_name(p.preset) || cst_preset_needs_side(p.preset))
            continue;
        if (p.preset == CST_PRESET_TURBOQUANT && size > 2)
            p.bits_k = data[2] % 9, p.bits_v = data[2] / 9 % 9;
        p.qjl = p.bits_k > 1 && p.bits_v > 1 && size > 3 && data[3] & 1;
        check(cst_frame_encode(b->frame, b->bound, b->block, desc, &p, b->work, b->work_len, &len,
                               &info) == 0);
        check(len <= b->bound && info.frame_bytes == len);
        memset(b->out, 0xa5, desc->block_bytes);
        check(decode(b, desc, b->frame, len, 0, UINT32_MAX) == 0);
        check(info.layered || cst_crc32c(0, b->out, desc->block_bytes) == info.block_crc);
        if (p.preset <= CST_PRESET_LOSSLESS)
            check(memcmp(b->out, b->block, desc->block_bytes) == 0);
        check(decode(b, desc, b->frame, len - 1, 0, UINT32_MAX) == CST_CODEC_E_CORRUPT);
        p.bits_k = p.bits_v = 0;
        p.qjl = false;
    }
}

static void run_stream(struct buffers *b, const struct cst_descriptor *desc, unsigned choice,
                       const uint8_t *data, size_t size) {
    static cst_stage_decode_fn *const stages[] = { cst_planes_decode, cst_int8_decode,
                                                   cst_groups_decode, cst_lloyd_decode,
                                                   cst_exponents_decode };
    const struct cst_codec_ops *sets[] = { cst_codec_ops_portable(), cst_codec_ops_avx2(),
                                           cst_codec_ops_avx512() };
    const struct cst_segment *seg = &desc->segments[choice % 2];
    cst_stage_decode_fn *stage = stages[choice / 2 % CST_COUNT(stages)];
    struct cst_view view;
    struct cst_stage_segment s = cst_stage_segment(&view, desc, seg, 16, choice / 10);
    uint8_t *first = calloc(1, seg->length), *out = calloc(1, seg->length);
    bool ok = false;

    check(first && out);
    for (size_t k = 0; k < CST_COUNT(sets) && sets[k] && (s.view || stage == stages[0]); k++) {
        struct cst_codec_work w;

        check(cst_codec_work_init(&w, desc, CST_PRESET_LOSSLESS, b->work, b->work_len));
        w.ops = sets[k];
        if (k == 0)
            ok = stage(first, &s, data, size, &w);
        else
            check(stage(out, &s, data, size, &w) == ok);
        if (k > 0 && ok)
            check(memcmp(first, out, seg->length) == 0);
    }
    free(first);
    free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const struct cst_descriptor *desc;
    struct cst_frame_info info;
    struct buffers b;

    if (size == 0)
        return 0;
    desc = &layouts[data[0] / MODES % CST_COUNT(layouts)];
    buffers_init(&b, desc);
    switch (data[0] % MODES) {
    case MODE_DECODE:
        (void)cst_frame_inspect(data + 1, size - 1, &info);
        (void)decode(&b, desc, data + 1, size - 1, 0, UINT32_MAX);
        break;
    case MODE_SEALED:
        run_sealed(&b, desc, data + 1, size - 1);
        break;
    case MODE_BLOCK:
        run_block(&b, desc, data + 1, size - 1);
        break;
    default:
        run_stream(&b, desc, data[0] / MODES / CST_COUNT(layouts), data + 1, size - 1);
    }
    buffers_deinit(&b);
    return 0;
}
