/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the bytes of metas and the checks of what was read: the one place where numbers from the
 * disk become numbers of the engine.
 * Invariants: 1. nothing is believed before its checksum or tag is right, and no number before it
 * was compared with the place it was read from; 2. lists of a parsed meta lie inside it.
 * Loop thread and jobs; no state.
 */
#include "base/crc32c.h"
#include "store/seg_core.h"

#include <assert.h>

void cst_seg_crc_set(void *p, size_t n) {
    cst_store32((uint8_t *)p + n - 4, cst_crc32c(0, p, n - 4));
}

bool cst_seg_crc_is(const void *p, size_t n) {
    return cst_load32((const uint8_t *)p + n - 4) == cst_crc32c(0, p, n - 4);
}

uint32_t cst_seg_meta_bytes(const struct cst_seg_record *record) {
    return record->type == CST_SEG_SIDE
               ? (uint32_t)sizeof(struct cst_disk_side)
               : cst_disk_block_meta_bytes(record->n_tokens, record->surprisals, record->n_side);
}

static void write_side(struct cst_disk_side *m, const struct cst_seg_record *r) {
    cst_store64(&m->version, r->version);
    cst_store64(&m->total_bytes, r->total_bytes);
    cst_store32(&m->kind, r->kind);
    cst_store32(&m->part, r->part);
    cst_store32(&m->parts, r->parts);
    cst_store32(&m->payload_crc, r->payload_crc);
}

static void write_block(struct cst_disk_block *m, const struct cst_seg_record *r) {
    uint8_t *at = (uint8_t *)(m + 1);
    uint32_t error;

    if (r->parent)
        memcpy(m->parent, r->parent, sizeof(m->parent));
    memcpy(&error, &r->error, sizeof(error));
    cst_store32(&m->position, r->position);
    cst_store32(&m->n_tokens, r->n_tokens);
    cst_store32(&m->error, error);
    cst_store32(&m->payload_crc, r->payload_crc);
    cst_store32(&m->block_crc, r->block_crc);
    m->preset = r->preset;
    m->flags = (uint8_t)((r->surprisals ? CST_DISK_HAS_SURPRISALS : 0) |
                         (r->has_parent ? CST_DISK_HAS_PARENT : 0));
    m->n_side = (uint8_t)r->n_side;
    cst_store64(&m->born, r->born);
    for (uint32_t i = 0; i < r->n_tokens; i++, at += 4)
        cst_store32(at, r->tokens[i]);
    for (uint32_t i = 0; r->surprisals && i < r->n_tokens; i++, at += 2)
        cst_store16(at, r->surprisals[i]);
    at = (uint8_t *)m + cst_seg_meta_bytes(r) - 8 * (size_t)r->n_side;
    for (uint32_t i = 0; i < r->n_side; i++, at += 8)
        cst_store64(at, r->side[i]);
}

void cst_seg_meta_write(uint8_t *out, const struct cst_seg_record *record) {
    struct cst_disk_meta *meta = (struct cst_disk_meta *)out;

    memset(out, 0, cst_seg_meta_bytes(record));
    memcpy(meta->key, record->key, sizeof(meta->key));
    memcpy(meta->space, record->space->identity, sizeof(meta->space));
    if (record->type == CST_SEG_SIDE)
        write_side((struct cst_disk_side *)out, record);
    else
        write_block((struct cst_disk_block *)out, record);
}

static bool read_side(struct cst_seg_record *r, const struct cst_disk_side *m, uint32_t n) {
    if (n != sizeof(*m))
        return false;
    r->version = cst_load64(&m->version);
    r->total_bytes = cst_load64(&m->total_bytes);
    r->kind = cst_load32(&m->kind);
    r->part = cst_load32(&m->part);
    r->parts = cst_load32(&m->parts);
    r->payload_crc = cst_load32(&m->payload_crc);
    return r->part < r->parts && r->payload_bytes <= r->total_bytes;
}

static bool read_block(struct cst_seg_record *r, const struct cst_disk_block *m, uint32_t n) {
    const uint8_t *at = (const uint8_t *)(m + 1);
    uint32_t error;

    if (n < sizeof(*m))
        return false;
    r->n_tokens = cst_load32(&m->n_tokens);
    r->n_side = m->n_side;
    if (r->n_tokens > CST_DISK_TOKENS_MAX || r->n_side > CST_DISK_SIDE_MAX ||
        n != cst_disk_block_meta_bytes(r->n_tokens, m->flags & CST_DISK_HAS_SURPRISALS, r->n_side))
        return false;
    r->parent = r->space->kind == CST_KIND_FLAT ? NULL : m->parent;
    r->has_parent = m->flags & CST_DISK_HAS_PARENT;
    r->position = cst_load32(&m->position);
    error = cst_load32(&m->error);
    memcpy(&r->error, &error, sizeof(error));
    r->payload_crc = cst_load32(&m->payload_crc);
    r->block_crc = cst_load32(&m->block_crc);
    r->preset = m->preset;
    r->born = cst_load64(&m->born);
    r->tokens = (const uint32_t *)(const void *)at; /* 8-byte aligned: entries and heads are */
    if (m->flags & CST_DISK_HAS_SURPRISALS)
        r->surprisals = (const uint16_t *)(const void *)(at + 4 * (size_t)r->n_tokens);
    r->side = (const uint64_t *)(const void *)((const uint8_t *)m + n - 8 * (size_t)r->n_side);
    return !r->has_parent == !r->position;
}

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "lists are used where they lie");

bool cst_seg_meta_read(struct cst_seg_record *record, const uint8_t *meta, uint32_t n) {
    assert(((uintptr_t)meta & 7) == 0);
    if (n < sizeof(struct cst_disk_meta) || !record->payload_bytes)
        return false;
    record->key = meta;
    return record->type == CST_SEG_SIDE
               ? read_side(record, (const struct cst_disk_side *)meta, n)
               : read_block(record, (const struct cst_disk_block *)meta, n);
}

void cst_seg_entry_write(uint8_t *out, const struct cst_disk_record *head) {
    struct cst_disk_entry *e = (struct cst_disk_entry *)out;
    uint32_t meta_bytes = cst_load32(&head->meta_bytes);

    memset(out, 0, cst_disk_entry_bytes(meta_bytes));
    e->chunk = head->chunk;
    e->n_chunks = head->n_chunks;
    e->generation = head->generation;
    cst_store32(&e->payload_bytes, (uint32_t)cst_load64(&head->payload_bytes));
    cst_disk_entry_set(e, (enum cst_disk_type)head->type, meta_bytes);
    memcpy(e + 1, head + 1, meta_bytes);
}

static bool sizes_are_right(const struct cst_disk_record *head, uint32_t room) {
    uint32_t meta = cst_load32(&head->meta_bytes), n_chunks = cst_load32(&head->n_chunks);
    uint64_t payload = cst_load64(&head->payload_bytes);

    if (n_chunks < 1 || n_chunks > room || payload > cst_chunk_offset(n_chunks) ||
        meta > CST_DISK_CANONICAL_MAX + sizeof(struct cst_disk_space))
        return false;
    if (head->type == CST_DISK_VOID)
        return !meta && !payload;
    return meta >= sizeof(struct cst_disk_meta) &&
           cst_load32(&head->payload_offset) == cst_disk_payload_offset(meta) &&
           n_chunks == cst_disk_record_chunks(meta, payload);
}

bool cst_seg_head_is(const struct cst_disk_record *head, const struct cst_seg_segment *s,
                     uint32_t chunk, uint32_t slot) {
    return cst_load32(&head->magic) == CST_DISK_RECORD_MAGIC &&
           cst_seg_crc_is(head, sizeof(*head)) && head->version == CST_DISK_VERSION &&
           head->cipher == s->seal.cipher && cst_load32(&head->segment) == s->id &&
           cst_load32(&head->chunk) == chunk && cst_load64(&head->fill) == s->fill &&
           cst_load64(&head->start) == s->start && cst_load32(&head->slot) == slot &&
           sizes_are_right(head, s->seg->chunks - chunk);
}

int cst_seg_head_open(const struct cst_seg_segment *s, uint8_t *record, uint64_t n) {
    const struct cst_disk_record *head = (const struct cst_disk_record *)record;
    const struct cst_seal_aad aad = { head, offsetof(struct cst_disk_record, meta_tag), NULL, 0 };
    uint32_t meta = cst_load32(&head->meta_bytes);

    if (sizeof(*head) + meta > n)
        return CST_SEG_E_CORRUPT;
    return cst_unseal(&s->seal, cst_load64(&head->meta_nonce), aad, record + sizeof(*head), meta,
                      head->meta_tag) == 0
               ? 0
               : CST_SEG_E_CORRUPT;
}
