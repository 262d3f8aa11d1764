/* SPDX-License-Identifier: Apache-2.0 */
/* Streams, segments and gaps. Invariant: reads nothing but the descriptor. */
#include "codec/frame_layout.h"

#include "base/crc32c.h"
#include "base/le.h"
#include "codec/format.h"
#include "codec/view.h"

bool cst_layout_ok(const struct cst_descriptor *desc) {
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

uint32_t cst_layout_streams(const struct cst_descriptor *desc) {
    return desc->n_segments + (cst_gap_bytes(desc) > 0);
}

uint64_t cst_layout_gap(const struct cst_descriptor *desc, uint32_t i, uint64_t *at) {
    const struct cst_segment *before = i ? &desc->segments[i - 1] : NULL;
    uint64_t end = i < desc->n_segments ? desc->segments[i].offset : desc->block_bytes;

    *at = before ? before->offset + before->length : 0;
    return end - *at;
}

uint32_t cst_layout_crc(const struct cst_descriptor *desc) {
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

/* Whether a stands before b by layer; equal ones stay as they are. */
static bool is_before(const struct cst_segment *a, const struct cst_segment *b) {
    return a->layer != b->layer ? a->layer < b->layer : a->tensor < b->tensor;
}

/* Insertion: segments lie nearly in this order already. */
void cst_layout_order(uint32_t *order, const struct cst_descriptor *desc, bool layered) {
    for (uint32_t i = 0; i < desc->n_segments; i++) {
        uint32_t k = i;

        for (; layered && k && is_before(&desc->segments[i], &desc->segments[order[k - 1]]); k--)
            order[k] = order[k - 1];
        order[k] = i;
    }
}
