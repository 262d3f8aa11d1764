/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns records on their way back: whole aligned ranges, checked before a byte of them is used.
 * Invariants: 1. a payload is given out only when the head is that of this place in this fill, the
 * meta's tag covers the head, the key is the one that was asked for and the payload's tag covers
 * both; 2. a record that fails that, or can't be read (but for read.keep), is gone for good, and
 * its owner is told; 3. a segment isn't used again while it is read. Loop thread, but for the job,
 * which touches the buffer and its copy of the seal.
 */
#include "base/err.h"
#include "base/mem.h"
#include "store/seg_core.h"

#include <assert.h>
#include <errno.h>

int cst_seg_record_open(const struct cst_seg_segment *s, uint8_t *buffer, uint64_t bytes,
                        uint32_t chunk, uint32_t slot, const uint8_t *key) {
    const struct cst_disk_record *head = (const struct cst_disk_record *)buffer;
    const struct cst_disk_meta *meta = (const struct cst_disk_meta *)(head + 1);
    const struct cst_seal_aad aad = { head, offsetof(struct cst_disk_record, payload_tag),
                                      meta->key, sizeof(meta->key) };
    int r;

    if (!cst_seg_head_is(head, s, chunk, slot) ||
        cst_chunk_offset(cst_load32(&head->n_chunks)) != bytes || head->type == CST_DISK_VOID)
        return CST_SEG_E_CORRUPT;
    r = cst_seg_head_open(s, buffer, bytes);
    if (r)
        return r;
    if (key && memcmp(meta->key, key, sizeof(meta->key)))
        return CST_SEG_E_CORRUPT;
    return cst_unseal(&s->seal, cst_load64(&head->payload_nonce), aad,
                      buffer + cst_load32(&head->payload_offset), cst_load64(&head->payload_bytes),
                      head->payload_tag) == 0
               ? 0
               : CST_SEG_E_CORRUPT;
}

uint64_t cst_seg_read_bytes(const struct cst_seg *seg, struct cst_seg_ref ref) {
    const struct cst_seg_slot *slot = cst_seg_find(seg, ref, NULL);

    return slot ? cst_chunk_offset(slot->n_chunks) : 0;
}

void cst_seg_lose(struct cst_seg *seg, struct cst_seg_ref ref, enum cst_seg_gone why) {
    struct cst_seg_segment *s;
    struct cst_seg_slot *slot = cst_seg_find(seg, ref, &s);
    void *owner;

    if (!slot)
        return;
    owner = slot->owner;
    cst_segment_unlive(s, ref.slot);
    if (why == CST_SEG_GONE_CORRUPT)
        seg->stats.corrupt++;
    else if (why == CST_SEG_GONE_LOST)
        seg->stats.lost++;
    else
        seg->stats.evicted++;
    seg->env.user.gone(seg->env.user.arg, owner, why);
}

static void finish(struct cst_seg_read *read, int status) {
    struct cst_seg *seg = read->seg;
    struct cst_seg_segment *s = &seg->segments[read->ref.segment];

    if (status == CST_SEG_E_CORRUPT)
        cst_seg_lose(seg, read->ref, CST_SEG_GONE_CORRUPT);
    else if (status < 0 && !read->keep)
        cst_seg_lose(seg, read->ref, CST_SEG_GONE_LOST);
    if (!status) {
        seg->stats.read++;
        seg->stats.read_bytes += read->bytes;
    }
    s->readers--;
    seg->busy--;
    read->done(read, status);
    cst_segment_settle(s);
}

static void open_run(struct cst_job *job) {
    struct cst_seg_read *read = cst_container_of(job, struct cst_seg_read, job);
    const struct cst_disk_record *head = read->buffer;
    const struct cst_seg_segment *s =
        &read->seg->segments[read->ref.segment]; /* read: stays as it is */

    read->status =
        cst_seg_record_open(s, read->buffer, read->bytes, read->chunk, read->ref.slot, read->key);
    if (read->status)
        return;
    read->payload = (const uint8_t *)read->buffer + cst_load32(&head->payload_offset);
    read->payload_bytes = cst_load64(&head->payload_bytes);
}

static void open_done(struct cst_job *job) {
    struct cst_seg_read *read = cst_container_of(job, struct cst_seg_read, job);

    finish(read, read->status);
}

static void read_done(struct cst_aio_op *op, int res) {
    struct cst_seg_read *read = cst_container_of(op, struct cst_seg_read, op);
    struct cst_jobs *jobs = read->seg->env.jobs;

    if (res) {
        cst_seg_error(read->seg, res);
        finish(read, res > 0 ? cst_err(-EIO) : res);
        return;
    }
    read->job = (struct cst_job){ .run = open_run, .done = open_done };
    if (read->bytes <= CST_SEG_INLINE) {
        open_run(&read->job);
        open_done(&read->job);
        return;
    }
    jobs->submit(jobs, &read->job, CST_JOB_FETCH);
}

/* ---- reads that end at once are told by a job of their own ---- */

static void tell_run(struct cst_job *job) {
    (void)job;
}

static void tell_done(struct cst_job *job) {
    struct cst_seg *seg = cst_container_of(job, struct cst_seg, tell);
    struct cst_list now = CST_LIST_INIT(now), *it;

    seg->telling = false;
    while ((it = cst_list_first(&seg->reading))) {
        cst_list_unlink(it);
        cst_list_append(&now, it);
    }
    while ((it = cst_list_first(&now))) {
        struct cst_seg_read *read = cst_list_entry(it, struct cst_seg_read, link);

        cst_list_unlink(it);
        seg->busy--;
        read->done(read, read->status);
    }
}

static void end_soon(struct cst_seg *seg, struct cst_seg_read *read, int status) {
    read->status = status;
    seg->busy++;
    cst_list_append(&seg->reading, &read->link);
    if (seg->telling)
        return;
    seg->telling = true;
    seg->tell = (struct cst_job){ .run = tell_run, .done = tell_done };
    seg->env.jobs->submit(seg->env.jobs, &seg->tell, CST_JOB_FETCH);
}

void cst_seg_read(struct cst_seg *seg, struct cst_seg_read *read) {
    struct cst_seg_segment *s;
    const struct cst_seg_slot *slot = cst_seg_find(seg, read->ref, &s);

    read->seg = seg;
    cst_list_init(&read->link);
    read->payload = NULL;
    read->payload_bytes = 0;
    if (!slot || seg->off) {
        end_soon(seg, read, slot ? CST_SEG_E_OFF : CST_SEG_E_GONE);
        return;
    }
    assert(((uintptr_t)read->buffer & (CST_AIO_ALIGN - 1)) == 0);
    read->chunk = slot->chunk;
    read->bytes = cst_chunk_offset(slot->n_chunks);
    read->op = (struct cst_aio_op){
        .done = read_done,
        .file = s->file,
        .code = CST_AIO_READ,
        .data = read->buffer,
        .offset = cst_chunk_offset(slot->chunk),
        .length = read->bytes,
    };
    s->readers++;
    seg->busy++;
    cst_aio_submit(seg->env.aio, &read->op);
}

/* ---- records that are given up ---- */

struct wipe {
    struct cst_seg_segment *segment;
    struct cst_aio_op op;
    void *heap;
};

static void wiped(struct cst_aio_op *op, int res) {
    struct wipe *wipe = cst_container_of(op, struct wipe, op);
    struct cst_seg_segment *s = wipe->segment;

    if (res)
        cst_seg_error(s->seg, res);
    s->writers--;
    s->seg->busy--;
    cst_free(wipe->heap);
    cst_free(wipe);
    cst_segment_settle(s);
}

/* The chunk that takes the place of a record's head: a void as long as the record, so that a scan
 * after a kill goes on behind it. Its nonce is one that no counter reaches, its message always the
 * same. A seal that fails leaves zeros, which end the scan. */
static void fill_void(struct cst_disk_record *head, const struct cst_seg_segment *s,
                      uint32_t slot) {
    const struct cst_seal_aad aad = { head, offsetof(struct cst_disk_record, meta_tag), NULL, 0 };
    uint64_t nonce = UINT64_C(1) << 63 | slot;

    memset(head, 0, CST_DISK_CHUNK);
    cst_store32(&head->magic, CST_DISK_RECORD_MAGIC);
    head->version = CST_DISK_VERSION;
    head->type = CST_DISK_VOID;
    head->cipher = (uint8_t)s->seal.cipher;
    cst_store32(&head->segment, s->id);
    cst_store32(&head->chunk, s->slots[slot].chunk);
    cst_store64(&head->fill, s->fill);
    cst_store64(&head->start, s->start);
    cst_store32(&head->slot, slot);
    cst_store32(&head->n_chunks, s->slots[slot].n_chunks);
    cst_store64(&head->meta_nonce, nonce);
    if (cst_seal(&s->seal, nonce, aad, head + 1, head + 1, 0, head->meta_tag, NULL))
        memset(head, 0, sizeof(*head));
    else
        cst_seg_crc_set(head, sizeof(*head));
}

/* Overwrites the head: without it the rest is nothing. */
static void wipe_start(struct cst_seg_segment *s, uint32_t slot) {
    struct wipe *wipe = cst_calloc(1, sizeof(*wipe));
    void *chunk = wipe ? cst_seg_aligned(CST_DISK_CHUNK, &wipe->heap) : NULL;

    if (!chunk) {
        cst_free(wipe);
        return;
    }
    fill_void(chunk, s, slot);
    wipe->segment = s;
    wipe->op = (struct cst_aio_op){
        .done = wiped,
        .file = s->file,
        .code = CST_AIO_WRITE,
        .data = chunk,
        .offset = cst_chunk_offset(s->slots[slot].chunk),
        .length = CST_DISK_CHUNK,
    };
    s->writers++;
    s->unsynced = true;
    s->seg->busy++;
    cst_aio_submit(s->seg->env.aio, &wipe->op);
}

void cst_seg_drop(struct cst_seg *seg, struct cst_seg_ref ref, bool destroy) {
    struct cst_seg_segment *s;

    if (!cst_seg_find(seg, ref, &s))
        return;
    cst_segment_unlive(s, ref.slot);
    if (destroy && !seg->off && !seg->read_only) {
        seg->hurry = true;
        wipe_start(s, ref.slot);
    }
    cst_segment_settle(s);
}
