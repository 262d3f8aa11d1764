/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Side data. The first byte of an input says what happens to the rest:
 *   bytes   side data as they are;
 *   sealed  side data whose header is made right first, so that what lies behind it is reached;
 *   stream  bytes over those of a frame's streams, from the place that the second byte says,
 *           decoded with side data that were learned here.
 * What parses must encode and decode. Buffers have exactly the promised sizes, so that the address
 * sanitizer sees one byte too many.
 */
#include "tests/fuzz/fuzz.h"

#include "codec/codec.h"
#include "codec/format.h"
#include "codec/learn.h"
#include "codec/side_format.h"

#include "base/crc32c.h"
#include "base/macros.h"

#include <math.h>
#include <string.h>

enum { TOKENS = 32, LEARNED = 16, ROW0 = 16, ROW1 = 24 };
enum mode { MODE_BYTES, MODE_SEALED, MODE_STREAM, MODES };

static struct cst_layer layers[] = {
    { .kv_heads = 2,
      .head_dim_k = 8,
      .head_dim_v = 8,
      .rope = CST_ROPE_NEOX,
      .k_rotated = 1,
      .rope_dims = 8,
      .rope_theta = 1e4f },
    { .kv_heads = 1, .head_dim_k = 24, .head_dim_v = 24 },
};
#define SEGMENT(l, kind, at, row, head)                                                            \
    {                                                                                              \
        .layer = (l), .tensor = (kind), .dtype = CST_DTYPE_BF16, .offset = (at)*2 * TOKENS,        \
        .length = (row)*2 * TOKENS, .token_stride = (row)*2, .head_stride = (head)*2,              \
        .dim_stride = 2                                                                            \
    }
static struct cst_segment segments[] = {
    SEGMENT(0, CST_TENSOR_K, 0, ROW0, 8),
    SEGMENT(0, CST_TENSOR_V, ROW0, ROW0, 8),
    SEGMENT(1, CST_TENSOR_K, 2 * ROW0, ROW1, ROW1),
    SEGMENT(1, CST_TENSOR_V, 2 * ROW0 + ROW1, ROW1, ROW1),
};
enum { BLOCK = (2 * ROW0 + 2 * ROW1) * 2 * TOKENS };
static const struct cst_descriptor model = { .block_tokens = TOKENS,
                                             .block_bytes = BLOCK,
                                             .n_layers = 2,
                                             .n_segments = 4,
                                             .layers = layers,
                                             .segments = segments };

/* bf16 of waves that differ by channel and share their phase */
static void fill(uint8_t *block, uint32_t seed) {
    for (size_t i = 0; i < BLOCK / 2; i++) {
        float x = sinf((float)(seed * 7 + i / 16 % 37)) * (float)(i % 5) + (float)(i % 16);
        uint32_t u;

        memcpy(&u, &x, sizeof(u));
        cst_store16(block + 2 * i, (uint16_t)(u >> 16));
    }
}

/* Learned once; also what the seeds of the corpus were made of. */
static const uint8_t *learned(size_t *len) {
    static uint8_t *bytes;
    static size_t n;
    struct cst_learn_block blocks[LEARNED];
    const struct cst_learn_params params = { .version = 1 };
    size_t cap = cst_learn_bound(&model), work_len = cst_learn_work_size(&model, TOKENS * LEARNED);

    if (!bytes) {
        void *work = room(work_len);
        uint8_t *all = room((size_t)LEARNED * BLOCK);

        bytes = room(cap);
        for (uint32_t i = 0; i < LEARNED; i++) {
            fill(all + (size_t)i * BLOCK, i);
            blocks[i] = (struct cst_learn_block){ all + (size_t)i * BLOCK, TOKENS, 4 };
        }
        check(cst_learn(bytes, cap, &model, blocks, LEARNED, &params, work, work_len, &n, NULL) ==
              0);
        free(work);
        free(all);
    }
    *len = n;
    return bytes;
}

struct scene {
    struct cst_side side;
    void *memory, *work;
    uint8_t *block, *frame;
    size_t work_len, len;
};

/* Encodes one block; false: these aren't side data of the model. */
static bool scene_init(struct scene *s, const uint8_t *bytes, size_t len, uint32_t preset) {
    size_t memory_len = cst_side_memory(&model), cap = cst_frame_bound(&model);
    struct cst_encode_params p = {
        .preset = preset, .tokens = TOKENS, .bound = 1e30f, .side = &s->side
    };

    s->memory = room(memory_len);
    s->work_len = cst_codec_work_size(&model, preset);
    s->work = room(s->work_len);
    s->block = room(BLOCK);
    s->frame = room(cap);
    if (cst_side_parse(&s->side, bytes, len, &model, s->memory, memory_len))
        return false;
    fill(s->block, 99);
    check(cst_frame_encode(s->frame, cap, s->block, &model, &p, s->work, s->work_len, &s->len,
                           NULL) == 0);
    return true;
}

static int decode(struct scene *s, uint32_t first, uint32_t n) {
    const struct cst_decode_params p = { first, n, CST_POSITION_OWN, &s->side };

    return cst_frame_decode(s->block, BLOCK, s->frame, s->len, &model, &p, s->work, s->work_len);
}

static void scene_deinit(struct scene *s) {
    free(s->memory);
    free(s->work);
    free(s->block);
    free(s->frame);
}

static void run_side(const uint8_t *bytes, size_t len) {
    for (uint32_t preset = CST_PRESET_KLT; preset <= CST_PRESET_DEEP; preset++) {
        struct scene s = { 0 };

        if (scene_init(&s, bytes, len, preset)) {
            check(decode(&s, 0, UINT32_MAX) == 0);
            check(decode(&s, 1, 1) == 0);
        }
        scene_deinit(&s);
    }
}

static void run_sealed(const uint8_t *data, size_t size) {
    uint8_t *bytes = room(size);
    struct cst_side_header *h = (void *)bytes;

    memcpy(bytes, data, size);
    if (size >= sizeof(*h)) {
        memcpy(h->magic, CST_SIDE_MAGIC, sizeof(h->magic));
        cst_store16(&h->format, CST_SIDE_FORMAT);
        cst_store32(&h->bytes, (uint32_t)size);
        cst_store32(&h->model, cst_side_model(&model));
    }
    run_side(bytes, size);
    free(bytes);
}

static void run_stream(const uint8_t *data, size_t size) {
    size_t len, at = sizeof(struct cst_frame_header) + 4 * sizeof(struct cst_stream_entry);
    const uint8_t *bytes = learned(&len);
    uint32_t preset = data[0] % 2 ? CST_PRESET_DEEP : CST_PRESET_KLT;
    struct cst_stream_entry *table;
    struct cst_frame_header *h;
    struct scene s = { 0 };
    size_t from;

    check(scene_init(&s, bytes, len, preset));
    h = (void *)s.frame;
    table = (void *)(h + 1);
    from = at + data[0] / 2 * (s.len - at) / 128;
    memcpy(s.frame + from, data + 1, CST_MIN(size - 1, s.len - from));
    for (uint32_t i = 0; i < 4; i++) {
        uint64_t start = cst_align_up(at, CST_STREAM_ALIGN);

        memset(s.frame + at, 0, start - at);
        at = start + cst_load32(&table[i].length);
        cst_store32(&table[i].crc, cst_crc32c(0, s.frame + start, cst_load32(&table[i].length)));
    }
    cst_store32(&h->table_crc, cst_crc32c(0, table, 4 * sizeof(*table)));
    cst_store32(&h->header_crc, cst_crc32c(0, h, offsetof(struct cst_frame_header, header_crc)));
    (void)decode(&s, 0, UINT32_MAX);
    (void)decode(&s, 1, 1);
    scene_deinit(&s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2)
        return 0;
    if (data[0] % MODES == MODE_BYTES)
        run_side(data + 1, size - 1);
    else if (data[0] % MODES == MODE_SEALED)
        run_sealed(data + 1, size - 1);
    else
        run_stream(data + 1, size - 1);
    return 0;
}
