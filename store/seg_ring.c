/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the memory of records on their way to the disk: one region that the aio knows, used as two
 * rings: of whole records, and of what waits for its turn and must not hold their memory meanwhile:
 * heads whose payload is on disk, headers and spaces of new segments. Parts are freed in any order
 * and used again in order, so that records that follow each other on disk mostly do in memory, and
 * can be written together.
 * Invariants: 1. parts are in the list in the order in which they were taken; 2. used is
 * [tail, head), at most size; 3. a part is contiguous: the end of the ring is skipped if need be.
 * Loop thread only.
 */
#include "base/err.h"
#include "base/mem.h"
#include "store/seg_core.h"

#include <errno.h>

#define DEFAULT_BYTES (UINT64_C(16) << 20)
#define HEADS_BYTES (UINT64_C(256) << 10)

int cst_seg_ring_init(struct cst_seg *seg, uint64_t size) {
    struct cst_seg_ring *ring = &seg->ring;

    ring->size = cst_align_up(size ? size : DEFAULT_BYTES, CST_DISK_CHUNK);
    ring->base = cst_map(ring->size + HEADS_BYTES);
    if (!ring->base)
        return cst_err(-ENOMEM);
    seg->heads.base = ring->base + ring->size;
    seg->heads.size = HEADS_BYTES;
    (void)cst_aio_register(seg->env.aio, ring->base, ring->size + HEADS_BYTES);
    return 0;
}

void cst_seg_ring_deinit(struct cst_seg *seg) {
    if (!seg->ring.base)
        return;
    cst_aio_unregister(seg->env.aio, seg->ring.base);
    seg->ring.base = cst_unmap(seg->ring.base, seg->ring.size + HEADS_BYTES);
}

void *cst_seg_aligned(uint64_t n, void **heap) {
    *heap = cst_malloc(n + CST_DISK_CHUNK);
    return *heap ? (uint8_t *)*heap + (-(uintptr_t)*heap & (CST_DISK_CHUNK - 1)) : NULL;
}

int cst_seg_ring_take(struct cst_seg_ring *ring, uint64_t n, struct cst_seg_part *part) {
    uint64_t at = ring->head, pos;

    *part = (struct cst_seg_part){ 0 };
    cst_list_init(&part->link);
    if (n > ring->size / 2) { /* as rare as records of that size */
        part->data = cst_seg_aligned(n, &part->heap);
        return part->data ? 0 : cst_err(-ENOMEM);
    }
    pos = at % ring->size;
    if (pos + n > ring->size)
        at += ring->size - pos;
    if (at + n - ring->tail > ring->size)
        return CST_SEG_E_BUSY;
    part->data = ring->base + at % ring->size;
    part->end = ring->head = at + n;
    cst_list_append(&ring->parts, &part->link);
    return 0;
}

/* The part's struct is the caller's and may go at once: its place in the order is kept by a
 * neighbour. */
void cst_seg_ring_give(struct cst_seg_ring *ring, struct cst_seg_part *part) {
    struct cst_list *before = part->link.prev;

    if (!part->data)
        return;
    part->data = NULL;
    part->heap = cst_free(part->heap);
    if (cst_list_is_empty(&part->link))
        return;
    if (before == &ring->parts)
        ring->tail = part->end; /* the oldest: what was free behind it is its own end */
    else
        cst_list_entry(before, struct cst_seg_part, link)->end = part->end;
    cst_list_unlink(&part->link);
    if (cst_list_is_empty(&ring->parts))
        ring->head = ring->tail = 0;
}
