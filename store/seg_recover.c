/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns what a start does: finds the records that are on disk, and tells them.
 *
 * First the headers and footers of all segments, many at a time. Then pieces, in the order in
 * which the segments were begun: the index blocks of a closed segment, one piece each; an unclosed
 * one is one piece, read record by record up to the first that isn't valid. Pieces are read and
 * opened (by jobs) ahead, up to PIECES_MAX, and told in order, so that parents mostly come before
 * their children; records whose parent comes later are kept, and told at the end by position.
 *
 * Invariants: 1. nothing is written but at the very end; 2. what isn't understood stays as it is
 * (CST_SEG_FOREIGN); what is ours and empty, without a key, or of the other cipher is free; 3.
 * payloads aren't read: they are checked when they are; 4. slots are numbered as they were: an
 * entry that is out of order ends its segment. Loop thread, but for jobs, which touch their piece
 * and a segment's constants.
 */
#include "base/err.h"
#include "base/mem.h"
#include "base/sha256.h"
#include "store/seg_core.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

enum {
    HEADERS_MAX = 32,
    PIECES_MAX = 24,
    PIECE_CHUNKS = CST_DISK_INDEX_CHUNKS,
    SPARSE_CHUNKS = 4, /* of a look at the head of a large record */
    HINT_ENTRIES = 12, /* told ahead: cache misses at a time */
};

struct header {
    struct cst_seg_recover *r;
    struct cst_seg_segment *segment;
    struct cst_aio_op op;
    uint8_t *chunk;
    void *heap;
};

struct piece {
    struct cst_list link; /* r->pieces in order, or r->unused */
    struct cst_seg_recover *r;
    struct cst_seg_segment *segment;
    struct cst_aio_op op;
    struct cst_job job;
    uint8_t *data; /* PIECE_CHUNKS */
    void *heap;
    bool ready, scans;
    int status;
    uint32_t number;
    const uint8_t *body; /* entries */
    size_t body_n;
    uint32_t n_entries;
    /* of an unclosed segment */
    uint32_t chunk, slot, window; /* where the next record is, how much is read there */
    uint8_t *found;               /* owned: entries so far */
    size_t found_cap;
};

struct orphan {
    struct cst_seg_ref ref;
    uint32_t position;
    size_t entry; /* in r->kept */
};

/* A segment with content, as far as its footer says. */
struct plan {
    struct cst_seg_segment *segment;
    uint32_t n_index, index_chunk, n_records;
};

struct cst_seg_recover {
    struct cst_seg *seg;
    void (*done)(void *arg, int status);
    void *arg;
    uint64_t start_ns;
    struct cst_seg_marks *marks;
    uint32_t next_header, n_headers; /* next id; under way */
    struct plan *plans;              /* owned, in the order of sequences */
    uint32_t n_plans, next_plan, next_number;
    struct cst_list pieces, unused;
    uint32_t n_pieces;
    struct cst_seg_space *last; /* space of the last record */
    uint8_t *kept;              /* owned: entries of orphans */
    size_t kept_n, kept_cap;
    struct orphan *orphans; /* owned */
    size_t n_orphans, cap_orphans;
    uint32_t n_other_cipher, n_no_key, n_odd, n_missing;
    bool telling;
};

static void headers_go(struct cst_seg_recover *r);
static void pieces_go(struct cst_seg_recover *r);

/* ---- entries ---- */

static bool entry_record(struct cst_seg_recover *r, const struct cst_seg_segment *s, uint32_t slot,
                         const struct cst_disk_entry *e, struct cst_seg_record *record) {
    const struct cst_disk_meta *meta = (const struct cst_disk_meta *)(e + 1);
    uint32_t n = cst_disk_entry_meta_bytes(e);

    if (n < sizeof(*meta))
        return false;
    if (!r->last || memcmp(r->last->identity, meta->space, 32))
        r->last = cst_seg_space_find(r->seg, meta->space);
    if (!r->last || r->last->ns != s->ns || !cst_segment_has_space(s, r->last))
        return false;
    *record = (struct cst_seg_record){
        .type = (enum cst_seg_type)cst_disk_entry_type(e),
        .space = r->last,
        .payload_bytes = cst_load32(&e->payload_bytes),
        .generation = cst_load64(&e->generation),
    };
    if (!cst_seg_meta_read(record, (const uint8_t *)meta, n))
        return false;
    record->pinned_until = cst_seg_marks_pin(r->marks, s, slot);
    return true;
}

static int keep_orphan(struct cst_seg_recover *r, struct cst_seg_ref ref, uint32_t position,
                       const struct cst_disk_entry *e) {
    size_t n = cst_disk_entry_bytes(cst_disk_entry_meta_bytes(e));

    int status = cst_grow(&r->orphans, &r->cap_orphans, r->n_orphans + 1, sizeof(*r->orphans));

    if (!status)
        status = cst_grow(&r->kept, &r->kept_cap, r->kept_n + n, 1);
    if (status)
        return status;
    memcpy(r->kept + r->kept_n, e, n);
    r->orphans[r->n_orphans++] = (struct orphan){ ref, position, r->kept_n };
    r->kept_n += n;
    return 0;
}

/* Tells the record; again: for the last time. */
static void tell_record(struct cst_seg_recover *r, struct cst_seg_segment *s, uint32_t slot,
                        const struct cst_disk_entry *e, bool again) {
    const struct cst_seg_user *user = &r->seg->env.user;
    struct cst_seg_record record;
    void *owner = NULL;
    int status;

    if (!entry_record(r, s, slot, e, &record)) {
        r->seg->stats.rejected++;
        return;
    }
    r->seg->generation = CST_MAX(r->seg->generation, record.generation);
    if (cst_seg_marks_dropped(r->marks, s, slot))
        return;
    status = user->found(user->arg, &record, cst_segment_ref(s, slot), &owner);
    if (status == CST_SEG_E_PARENT && !again)
        status = keep_orphan(r, cst_segment_ref(s, slot), record.position, e);
    else if (!status)
        cst_segment_live(s, slot, owner);
    if (status)
        r->seg->stats.rejected++;
    r->seg->stats.found += owner && !status;
}

static void found_space(struct cst_seg_segment *s, const struct cst_disk_entry *e) {
    const struct cst_disk_space *meta = (const struct cst_disk_space *)(e + 1);
    uint32_t n = cst_disk_entry_meta_bytes(e);
    struct cst_seg_space *space;
    uint8_t fingerprint[32], identity[32];

    if (n < sizeof(*meta) || n != sizeof(*meta) + cst_load32(&meta->canonical_bytes))
        return;
    cst_sha256(meta + 1, n - sizeof(*meta), fingerprint);
    cst_seg_identity(identity, fingerprint, (enum cst_kind)meta->kind, (enum cst_class)meta->klass,
                     s->ns->name);
    if (memcmp(identity, meta->meta.space, 32) ||
        cst_seg_space_get(s->ns, identity, meta->kind, meta->klass, meta + 1,
                          n - (uint32_t)sizeof(*meta), &space))
        return;
    (void)cst_segment_add_space(s, space);
    (void)cst_seg_space_unref(space);
}

/* One entry. False: it and what follows in its segment can't be. */
static bool tell_entry(struct cst_seg_recover *r, struct cst_seg_segment *s,
                       const struct cst_disk_entry *e) {
    uint32_t chunk = cst_load32(&e->chunk), n_chunks = cst_load32(&e->n_chunks);
    enum cst_disk_type type = cst_disk_entry_type(e);

    if (chunk != s->end_chunk || !n_chunks || n_chunks > s->seg->chunks - chunk ||
        (type != CST_DISK_VOID &&
         n_chunks !=
             cst_disk_record_chunks(cst_disk_entry_meta_bytes(e), cst_load32(&e->payload_bytes))))
        return false;
    s->next_slot = s->n_slots;
    if (cst_segment_grow(s, 0))
        return false;
    cst_segment_publish(s, chunk, n_chunks, NULL);
    if (type == CST_DISK_SPACE)
        found_space(s, e);
    else if (type == CST_DISK_BLOCK || type == CST_DISK_SIDE)
        tell_record(r, s, s->n_slots - 1, e, false);
    return true;
}

/* A place in a piece. */
struct cursor {
    size_t at;
    uint32_t i;
};

/* The entry there, and on to the next. NULL: the end, or it can't be. */
static const struct cst_disk_entry *entry_next(const struct piece *p, struct cursor *c) {
    const struct cst_disk_entry *e = (const struct cst_disk_entry *)(p->body + c->at);
    size_t n, left = p->body_n - c->at;

    if (c->i >= p->n_entries || left < sizeof(*e))
        return NULL;
    n = cst_disk_entry_bytes(cst_disk_entry_meta_bytes(e));
    if (left < n)
        return NULL;
    c->at += n;
    c->i++;
    return e;
}

/* Tells what is coming up to the entry i. */
static void hint(const struct cst_seg_recover *r, const struct piece *p, struct cursor *c,
                 uint32_t i, bool soon) {
    const struct cst_seg_user *user = &r->seg->env.user;
    const struct cst_disk_entry *e;

    while (user->coming && c->i <= i && (e = entry_next(p, c))) {
        const struct cst_disk_meta *meta = (const struct cst_disk_meta *)(e + 1);

        if (cst_disk_entry_type(e) == CST_DISK_BLOCK &&
            cst_disk_entry_meta_bytes(e) >= sizeof(*meta) && r->last &&
            !memcmp(r->last->identity, meta->space, sizeof(meta->space)))
            user->coming(user->arg, r->last, meta->key, soon);
    }
}

static void tell_piece(struct cst_seg_recover *r, struct piece *p) {
    struct cursor at = { 0 }, far = { 0 }, near = { 0 };

    while (at.i < p->n_entries) {
        const struct cst_disk_entry *e;

        hint(r, p, &far, at.i + 2 * HINT_ENTRIES, false);
        hint(r, p, &near, at.i + HINT_ENTRIES, true);
        e = entry_next(p, &at);
        if (!e || !tell_entry(r, p->segment, e)) {
            r->seg->stats.rejected += p->n_entries - at.i + (e != NULL);
            break;
        }
    }
}

/* ---- pieces ---- */

static void index_open(struct piece *p) {
    struct cst_disk_index *head = (struct cst_disk_index *)p->data;
    const struct cst_seg_segment *s = p->segment;
    const struct cst_seal_aad aad = { head, offsetof(struct cst_disk_index, tag), NULL, 0 };
    uint32_t n = cst_load32(&head->body_bytes);

    p->status = CST_SEG_E_CORRUPT;
    if (cst_load32(&head->magic) != CST_DISK_INDEX_MAGIC || !cst_seg_crc_is(head, sizeof(*head)) ||
        head->version != CST_DISK_VERSION || head->cipher != s->seal.cipher ||
        cst_load32(&head->segment) != s->id ||
        cst_load32(&head->chunk) != p->op.offset / CST_DISK_CHUNK ||
        cst_load64(&head->fill) != s->fill || cst_load64(&head->start) != s->start ||
        cst_load32(&head->number) != p->number || n > p->op.length - sizeof(*head))
        return;
    p->status = cst_unseal(&s->seal, cst_load64(&head->nonce), aad, head + 1, n, head->tag);
    p->body = (const uint8_t *)(head + 1);
    p->body_n = n;
    p->n_entries = cst_load32(&head->n_entries);
}

static int add_found(struct piece *p, const struct cst_disk_record *head) {
    size_t n = cst_disk_entry_bytes(cst_load32(&head->meta_bytes));

    int r = cst_grow(&p->found, &p->found_cap, p->body_n + n, 1);

    if (r)
        return r;
    cst_seg_entry_write(p->found + p->body_n, head);
    p->body_n += n;
    p->n_entries++;
    return 0;
}

/* The records whose heads are in the window. status 0: there may be more behind it. */
static void scan_window(struct piece *p) {
    const struct cst_seg_segment *s = p->segment;
    uint32_t base = p->chunk, chunks = (uint32_t)(p->op.length / CST_DISK_CHUNK);

    while (p->chunk - base < chunks) {
        uint8_t *at = p->data + cst_chunk_offset(p->chunk - base);
        const struct cst_disk_record *head = (const struct cst_disk_record *)at;
        uint64_t left = cst_chunk_offset(chunks - (p->chunk - base));

        p->status = CST_SEG_E_CORRUPT;
        if (!cst_seg_head_is(head, s, p->chunk, p->slot))
            return;
        if (sizeof(*head) + cst_load32(&head->meta_bytes) > left) {
            if (p->chunk == base && p->window == PIECE_CHUNKS)
                return;
            p->window = PIECE_CHUNKS; /* once more, from here */
            break;
        }
        if (cst_seg_head_open(s, at, left) || add_found(p, head))
            return;
        p->window = cst_load32(&head->n_chunks) >= PIECE_CHUNKS ? SPARSE_CHUNKS : PIECE_CHUNKS;
        p->chunk += cst_load32(&head->n_chunks);
        p->slot++;
    }
    p->status = p->chunk < s->seg->chunks ? 0 : CST_SEG_E_CORRUPT;
}

static void piece_run(struct cst_job *job) {
    struct piece *p = cst_container_of(job, struct piece, job);

    if (p->scans)
        scan_window(p);
    else
        index_open(p);
}

static void piece_read(struct piece *p);

static void piece_done(struct cst_job *job) {
    struct piece *p = cst_container_of(job, struct piece, job);

    if (p->scans && !p->status) {
        piece_read(p);
        return;
    }
    if (p->scans) {
        p->status = 0; /* that was the end */
        p->body = p->found;
    }
    p->ready = true;
    pieces_go(p->r);
}

static void piece_arrived(struct cst_aio_op *op, int res) {
    struct piece *p = cst_container_of(op, struct piece, op);
    struct cst_jobs *jobs = p->r->seg->env.jobs;

    if (res) {
        cst_seg_error(p->r->seg, res);
        p->status = p->scans ? 0 : CST_SEG_E_CORRUPT;
        p->body = p->found;
        p->ready = true;
        pieces_go(p->r);
        return;
    }
    p->job = (struct cst_job){ .run = piece_run, .done = piece_done };
    jobs->submit(jobs, &p->job, CST_JOB_BACKGROUND);
}

static void piece_read(struct piece *p) {
    uint32_t most = p->segment->seg->chunks - p->chunk;

    p->op = (struct cst_aio_op){
        .done = piece_arrived,
        .file = p->segment->file,
        .code = CST_AIO_READ,
        .data = p->data,
        .offset = cst_chunk_offset(p->chunk),
        .length = cst_chunk_offset(CST_MIN(p->window, most)),
    };
    cst_aio_submit(p->segment->seg->env.aio, &p->op);
}

static struct piece *piece_get(struct cst_seg_recover *r) {
    struct cst_list *it = cst_list_first(&r->unused);
    struct piece *p;

    if (it) {
        cst_list_unlink(it);
        return cst_list_entry(it, struct piece, link);
    }
    p = cst_calloc(1, sizeof(*p));
    if (p)
        p->data = cst_seg_aligned(cst_chunk_offset(PIECE_CHUNKS), &p->heap);
    if (p && !p->data)
        p = cst_free(p);
    if (p)
        cst_list_init(&p->link);
    return p;
}

static bool piece_start(struct cst_seg_recover *r) {
    const struct plan *plan = &r->plans[r->next_plan];
    struct piece *p = piece_get(r);

    if (!p)
        return false;
    p->r = r;
    p->segment = plan->segment;
    p->ready = false;
    p->status = 0;
    p->body = NULL;
    p->body_n = p->n_entries = 0;
    p->scans = !plan->n_index;
    p->number = r->next_number;
    p->slot = 0;
    p->window = PIECE_CHUNKS;
    p->chunk = p->scans ? 1 : plan->index_chunk + p->number * CST_DISK_INDEX_CHUNKS;
    if (!p->scans) /* not the footer */
        p->window = CST_MIN(p->window, p->segment->seg->chunks - 1 - p->chunk);
    if (++r->next_number >= plan->n_index) {
        r->next_plan++;
        r->next_number = 0;
    }
    cst_list_append(&r->pieces, &p->link);
    r->n_pieces++;
    piece_read(p);
    return true;
}

static int by_position(const void *a, const void *b) {
    const struct orphan *x = a, *y = b;

    return x->position < y->position ? -1 : x->position > y->position;
}

static void tell_orphans(struct cst_seg_recover *r) {
    if (r->n_orphans)
        qsort(r->orphans, r->n_orphans, sizeof(*r->orphans), by_position);
    for (size_t i = 0; i < r->n_orphans; i++) {
        const struct orphan *o = &r->orphans[i];

        tell_record(r, &r->seg->segments[o->ref.segment], o->ref.slot,
                    (const struct cst_disk_entry *)(r->kept + o->entry), true);
    }
}

/* ---- the end ---- */

static void pieces_free(struct cst_list *list) {
    struct cst_list *it;

    while ((it = cst_list_first(list))) {
        struct piece *p = cst_list_entry(it, struct piece, link);

        cst_list_unlink(it);
        cst_free(p->found);
        cst_free(p->heap);
        cst_free(p);
    }
}

static void end(struct cst_seg_recover *r, int status) {
    struct cst_seg *seg = r->seg;
    void (*done)(void *arg, int status) = r->done;
    void *arg = r->arg;
    int mark_failed = 0;

    seg->recover = NULL;
    seg->busy--;
    seg->recovered = true;
    seg->stats.recover_ns = cst_seg_now(seg) - r->start_ns;
    seg->stats.recover_done = seg->stats.recover_total;
    seg->stats.recovered_clean = cst_seg_marks_clean(r->marks);
    for (uint32_t i = 0; i < seg->n_segments; i++)
        cst_segment_settle(&seg->segments[i]);
    if (r->n_no_key)
        cst_seg_note(seg, "%u segments of the disk tier have no key any more: they are free",
                     r->n_no_key);
    if (r->n_odd)
        cst_seg_note(seg,
                     "%u files of the disk tier are not as long as a segment (half copied, or "
                     "changed by hand?): what they lack is lost, copy the directory again while no "
                     "daemon uses it",
                     r->n_odd);
    if (r->n_missing)
        cst_seg_note(
            seg,
            "%u segments of the disk tier have no file any more (deleted, or not copied?): "
            "what they held is lost, copy the directory again while no daemon uses it",
            r->n_missing);
    if (r->n_other_cipher)
        cst_seg_note(seg, "%u segments of the disk tier are %s: they are free", r->n_other_cipher,
                     seg->options.crypt == CST_SEG_CRYPT_AES ? "not encrypted" : "encrypted");
    if (!status && !seg->read_only && !seg->off)
        mark_failed = cst_seg_marks_unclean(seg, r->marks);
    if (mark_failed)
        cst_seg_error(seg, mark_failed);
    pieces_free(&r->unused);
    cst_seg_marks_free(r->marks);
    cst_free(r->plans);
    cst_free(r->orphans);
    cst_free(r->kept);
    cst_free(r);
    seg->checkpoint_ns = cst_seg_now(seg);
    if (!status)
        seg->changed = true; /* the marks may speak of what was not found */
    cst_seg_spare(seg);
    done(arg, status);
}

static void pieces_go(struct cst_seg_recover *r) {
    struct cst_list *it;

    if (r->telling)
        return;
    r->telling = true;
    do {
        while (r->n_pieces < PIECES_MAX && r->next_plan < r->n_plans && piece_start(r))
            continue;
        it = cst_list_first(&r->pieces);
        if (it && cst_list_entry(it, struct piece, link)->ready) {
            struct piece *p = cst_list_entry(it, struct piece, link);

            if (p->status)
                r->seg->stats.rejected++;
            else
                tell_piece(r, p);
            r->seg->stats.recover_done = r->next_plan;
            cst_list_unlink(it);
            cst_list_append(&r->unused, it);
            r->n_pieces--;
        } else {
            break;
        }
    } while (true);
    r->telling = false;
    if (r->n_pieces)
        return;
    if (r->next_plan < r->n_plans) { /* not even memory for one piece */
        end(r, cst_err(-ENOMEM));
        return;
    }
    tell_orphans(r);
    end(r, 0);
}

/* ---- headers and footers ---- */

static void header_end(struct header *h) {
    struct cst_seg_recover *r = h->r;

    cst_free(h->heap);
    cst_free(h);
    r->n_headers--;
    headers_go(r);
}

static void footer_read(struct cst_aio_op *op, int res) {
    struct header *h = cst_container_of(op, struct header, op);
    struct cst_seg_segment *s = h->segment;
    const struct cst_disk_footer *f = (const struct cst_disk_footer *)h->chunk;
    struct plan *plan = &h->r->plans[h->r->n_plans++];
    uint32_t first = cst_load32(&f->index_chunk), n = cst_load32(&f->n_index),
             last = s->seg->chunks - 1;

    *plan = (struct plan){ .segment = s };
    if (!res && !memcmp(f->magic, CST_DISK_FOOTER_MAGIC, sizeof(f->magic)) &&
        cst_seg_crc_is(f, sizeof(*f)) && cst_load32(&f->segment) == s->id &&
        cst_load64(&f->fill) == s->fill && cst_load64(&f->start) == s->start && first < last && n &&
        n == (last - first + CST_DISK_INDEX_CHUNKS - 1) / CST_DISK_INDEX_CHUNKS) {
        plan->n_index = n;
        plan->index_chunk = first;
        plan->n_records = cst_load32(&f->n_records);
    }
    header_end(h);
}

static void foreign(struct cst_seg_segment *s) {
    s->state = CST_SEG_FOREIGN;
    s->seg->stats.segments_foreign++;
    cst_seg_note(s->seg,
                 "segment %u of the disk tier isn't understood (a newer format, or of another "
                 "directory): it is left alone",
                 s->id);
}

/* Takes what the header says. False: there is nothing to read. */
static bool take_header(struct cst_seg_recover *r, struct cst_seg_segment *s,
                        const uint8_t *chunk) {
    const struct cst_disk_segment *head = (const struct cst_disk_segment *)chunk;
    static const uint8_t zero[8];
    enum cst_disk_cipher wanted =
        r->seg->options.crypt == CST_SEG_CRYPT_AES ? CST_DISK_AES_GCM : CST_DISK_CRC32C;
    bool write;

    if (!memcmp(head->magic, zero, sizeof(zero)))
        return false;
    if (memcmp(head->magic, CST_DISK_SEGMENT_MAGIC, sizeof(head->magic)) ||
        !cst_seg_version_is_known(&head->version, &write) ||
        memcmp(head->uuid, r->seg->uuid, sizeof(head->uuid))) {
        foreign(s);
        return false;
    }
    if (!cst_seg_crc_is(head, sizeof(*head)) || cst_load32(&head->id) != s->id ||
        cst_load64(&head->segment_bytes) != r->seg->segment_bytes)
        return false; /* ours, and damaged */
    r->n_odd += s->odd;
    s->fill = cst_load64(&head->fill);
    s->sequence = cst_load64(&head->sequence);
    r->seg->sequence = CST_MAX(r->seg->sequence, s->sequence);
    if (head->cipher != wanted) {
        r->n_other_cipher++;
        return false;
    }
    s->seal.cipher = wanted;
    memcpy(s->salt, head->salt, sizeof(s->salt));
    s->start = cst_load64(s->salt);
    if (cst_seg_marks_empty(r->marks, s))
        return false;
    s->ns = cst_seg_ns_get(r->seg, (const char *)head->namespace_name,
                           CST_MIN(head->namespace_length, CST_DISK_NAMESPACE_MAX));
    if (!s->ns || (wanted == CST_DISK_AES_GCM && (!s->ns->has_key || cst_segment_set_key(s)))) {
        r->n_no_key += s->ns != NULL;
        s->ns = NULL;
        return false;
    }
    s->end_chunk = 1;
    s->ns->n_segments++;
    cst_list_append(&s->ns->segments, &s->link);
    return true;
}

static void header_read(struct cst_aio_op *op, int res) {
    struct header *h = cst_container_of(op, struct header, op);
    struct cst_seg_segment *s = h->segment;

    h->r->n_odd += res && s->odd;
    if (res || !take_header(h->r, s, h->chunk)) {
        if (res && s->allocated) {
            cst_seg_error(s->seg, res);
            s->retired = true;
        }
        header_end(h);
        return;
    }
    h->op.done = footer_read;
    h->op.offset = cst_chunk_offset(s->seg->chunks - 1);
    cst_aio_submit(s->seg->env.aio, &h->op);
}

static bool header_start(struct cst_seg_recover *r, struct cst_seg_segment *s) {
    struct header *h = cst_calloc(1, sizeof(*h));

    if (h)
        h->chunk = cst_seg_aligned(CST_DISK_CHUNK, &h->heap);
    if (!h || !h->chunk) {
        cst_free(h);
        s->retired = true; /* stays as it is */
        return false;
    }
    h->r = r;
    h->segment = s;
    h->op = (struct cst_aio_op){ .done = header_read,
                                 .file = s->file,
                                 .code = CST_AIO_READ,
                                 .data = h->chunk,
                                 .length = CST_DISK_CHUNK };
    r->n_headers++;
    cst_aio_submit(r->seg->env.aio, &h->op);
    return true;
}

static int by_sequence(const void *a, const void *b) {
    const struct plan *x = a, *y = b;

    return x->segment->sequence < y->segment->sequence
               ? -1
               : x->segment->sequence > y->segment->sequence;
}

/* Nobody has signed the footers: a segment has no more records than chunks. */
static void tell_total(const struct cst_seg_recover *r) {
    const struct cst_seg_user *user = &r->seg->env.user;
    uint64_t n = 0;

    for (uint32_t i = 0; i < r->n_plans; i++)
        n += CST_MIN(r->plans[i].n_records, r->seg->chunks);
    if (user->expect)
        user->expect(user->arg, n);
}

static void headers_go(struct cst_seg_recover *r) {
    struct cst_seg *seg = r->seg;

    while (r->n_headers < HEADERS_MAX && r->next_header < seg->n_segments) {
        struct cst_seg_segment *s = &seg->segments[r->next_header++];

        if (s->state == CST_SEG_CLOSED)
            (void)header_start(r, s);
    }
    if (r->n_headers || r->next_header < seg->n_segments)
        return;
    if (r->n_plans)
        qsort(r->plans, r->n_plans, sizeof(*r->plans), by_sequence);
    seg->stats.recover_total = r->n_plans;
    tell_total(r);
    pieces_go(r);
}

void cst_seg_recover(struct cst_seg *seg, void (*done)(void *arg, int status), void *arg) {
    struct cst_seg_recover *r = cst_calloc(1, sizeof(*r));

    assert(!seg->recovered && !seg->recover);
    if (!r) {
        done(arg, cst_err(-ENOMEM));
        return;
    }
    *r = (struct cst_seg_recover){
        .seg = seg, .done = done, .arg = arg, .start_ns = cst_seg_now(seg)
    };
    cst_list_init(&r->pieces);
    cst_list_init(&r->unused);
    r->plans = cst_calloc(seg->n_segments + 1, sizeof(*r->plans));
    if (!r->plans || cst_seg_marks_read(seg, &r->marks)) {
        cst_free(r->plans);
        cst_free(r);
        done(arg, cst_err(-ENOMEM));
        return;
    }
    r->n_missing = cst_seg_marks_missing(r->marks, seg);
    seg->recover = r;
    seg->busy++;
    headers_go(r);
}
