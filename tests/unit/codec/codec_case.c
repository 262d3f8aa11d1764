/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks for the codec's tests. Buffers have exactly the sizes that the contract names, each its
 * own allocation, so that a sanitizer sees one byte too many. */
#include "tests/unit/codec/codec_case.h"

#include "tests/lib/check.h"

#include "codec/dtype.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void lay_out(struct cst_segment *seg, const struct case_shape *s, uint64_t offset) {
    uint64_t e = cst_dtype_size((uint8_t)s->dtype), t = s->block_tokens, h = s->heads, d = s->dims;

    seg->offset = offset;
    seg->length = t * h * d * e;
    switch (s->order) {
    case CASE_ROWS:
        seg->dim_stride = e, seg->head_stride = d * e, seg->token_stride = h * d * e;
        break;
    case CASE_TRANSPOSED:
        seg->token_stride = e, seg->dim_stride = t * e, seg->head_stride = t * d * e;
        break;
    case CASE_HEADS:
        seg->dim_stride = e, seg->token_stride = d * e, seg->head_stride = t * d * e;
        break;
    case CASE_PADDED:
        seg->dim_stride = e, seg->head_stride = d * e, seg->token_stride = h * d * e + 6;
        seg->length = t * seg->token_stride;
        break;
    case CASE_PAIRS:
        seg->dim_stride = 2 * e, seg->head_stride = 2 * d * e, seg->token_stride = 2 * h * d * e;
        seg->length = t * seg->token_stride;
        break;
    default: /* opaque rows of h * d bytes */
        seg->token_stride = h * d;
    }
}

struct case_block *case_new(const struct case_shape *s) {
    struct case_block *c = calloc(1, sizeof(*c));
    uint64_t at = 0;

    assert_non_null(c);
    c->desc = (struct cst_descriptor){
        .engine = "test",
        .block_tokens = s->block_tokens,
        .tp_size = 1,
        .n_layers = s->n_layers,
        .n_segments = 2 * s->n_layers,
        .layers = calloc(s->n_layers, sizeof(struct cst_layer)),
        .segments = calloc(2 * s->n_layers, sizeof(struct cst_segment)),
    };
    for (uint32_t l = 0; l < s->n_layers; l++)
        c->desc.layers[l] = (struct cst_layer){ .kv_heads = s->heads,
                                                .head_dim_k = s->dims,
                                                .head_dim_v = s->dims };
    for (uint32_t i = 0; i < c->desc.n_segments; i++) {
        struct cst_segment *seg = &c->desc.segments[i];
        bool opaque = s->order == CASE_OPAQUE;

        seg->layer = i / 2;
        seg->tensor = opaque ? CST_TENSOR_OPAQUE : i % 2 ? CST_TENSOR_V : CST_TENSOR_K;
        seg->dtype = opaque ? CST_DTYPE_OPAQUE : (uint8_t)s->dtype;
        lay_out(seg, s, at + s->gap);
        at = seg->offset + seg->length;
    }
    c->desc.block_bytes = at + s->gap;
    c->block = calloc(1, c->desc.block_bytes);
    c->out = malloc(c->desc.block_bytes);
    c->cap = cst_frame_bound(&c->desc);
    c->frame = malloc(c->cap);
    case_room(c);
    return c;
}

void case_room(struct case_block *c) {
    free(c->work);
    c->work_len = cst_codec_work_size_max(&c->desc);
    assert_int_equal(posix_memalign(&c->work, 64, c->work_len), 0);
}

void case_rotate_keys(struct case_block *c, enum cst_rope rope, uint32_t dims) {
    for (uint32_t l = 0; l < c->desc.n_layers && dims; l++) {
        c->desc.layers[l].rope = (uint8_t)rope;
        c->desc.layers[l].k_rotated = 1;
        c->desc.layers[l].rope_dims = dims;
        c->desc.layers[l].rope_theta = 1e4f;
    }
    case_room(c);
}

void case_stage_init(struct case_stage *stage, struct case_block *c, uint32_t i, uint32_t tokens,
                     uint32_t first_position) {
    assert_true(
        cst_codec_work_init(&stage->w, &c->desc, CST_PRESET_LOSSLESS, c->work, c->work_len));
    stage->s =
        cst_stage_segment(&stage->view, &c->desc, &c->desc.segments[i], tokens, first_position);
}

struct case_block *case_free(struct case_block *c) {
    if (c) {
        free(c->desc.layers);
        free(c->desc.segments);
        free(c->block);
        free(c->out);
        free(c->frame);
        free(c->work);
        free(c);
    }
    return NULL;
}

/* About normal: the sum of 12 uniform values has deviation 1. */
static double normal(struct cst_seeded_random *r) {
    double sum = -6;

    for (int i = 0; i < 12; i++)
        sum += (double)(cst_seeded_random_next(r) >> 11) * 0x1p-53;
    return sum;
}

static uint64_t element_at(const struct case_block *c, uint32_t i, uint32_t t, uint32_t h,
                           uint32_t d) {
    const struct cst_segment *seg = &c->desc.segments[i];

    return seg->offset + t * seg->token_stride + h * seg->head_stride + d * seg->dim_stride;
}

float case_value(const struct case_block *c, const uint8_t *bytes, uint32_t i, uint32_t t,
                 uint32_t h, uint32_t d) {
    return cst_dtype_load(c->desc.segments[i].dtype, bytes + element_at(c, i, t, h, d));
}

void case_set_value(struct case_block *c, uint32_t i, uint32_t t, uint32_t h, uint32_t d, float x) {
    uint8_t *p = c->block + element_at(c, i, t, h, d);
    uint16_t v =
        c->desc.segments[i].dtype == CST_DTYPE_F16 ? cst_f32_to_f16(x) : cst_f32_to_bf16(x);

    if (c->desc.segments[i].dtype == CST_DTYPE_F32)
        memcpy(p, &x, 4);
    else
        memcpy(p, &v, 2);
}

static void fill_opaque(struct case_block *c, const struct cst_segment *seg,
                        struct cst_seeded_random *r, uint32_t tokens) {
    for (uint64_t i = 0; i < tokens * seg->token_stride; i++)
        c->block[seg->offset + i] = (uint8_t)(fabs(normal(r)) * 8);
}

void case_fill_model(struct case_block *c, uint64_t seed, uint32_t tokens) {
    struct cst_seeded_random r;

    cst_seeded_random_init(&r, seed);
    memset(c->block, 0, c->desc.block_bytes);
    for (uint32_t i = 0; i < c->desc.n_segments; i++) {
        const struct cst_segment *seg = &c->desc.segments[i];
        const struct cst_layer *layer = &c->desc.layers[seg->layer];

        if (seg->dtype == CST_DTYPE_OPAQUE) {
            fill_opaque(c, seg, &r, tokens);
            continue;
        }
        for (uint32_t h = 0; h < layer->kv_heads; h++) {
            for (uint32_t d = 0; d < layer->head_dim_k; d++) {
                double mean = normal(&r), deviation = 0.1 + fabs(normal(&r));

                for (uint32_t t = 0; t < tokens; t++)
                    case_set_value(c, i, t, h, d, (float)(mean + deviation * normal(&r)));
            }
        }
    }
}

void case_fill_random(struct case_block *c, uint64_t seed) {
    struct cst_seeded_random r;

    cst_seeded_random_init(&r, seed);
    for (uint64_t i = 0; i < c->desc.block_bytes; i++)
        c->block[i] = (uint8_t)cst_seeded_random_next(&r);
}

int case_encode(struct case_block *c, const struct cst_encode_params *params,
                struct cst_frame_info *info) {
    return cst_frame_encode(c->frame, c->cap, c->block, &c->desc, params, c->work, c->work_len,
                            &c->frame_len, info);
}

int case_decode(struct case_block *c, uint32_t first_layer, uint32_t n_layers) {
    return case_decode_at(c, first_layer, n_layers, CST_POSITION_OWN);
}

int case_decode_at(struct case_block *c, uint32_t first_layer, uint32_t n_layers,
                   uint32_t position) {
    const struct cst_decode_params params = { first_layer, n_layers, position, c->side };

    memset(c->out, 0xa5, c->desc.block_bytes);
    return cst_frame_decode(c->out, c->desc.block_bytes, c->frame, c->frame_len, &c->desc, &params,
                            c->work, c->work_len);
}
