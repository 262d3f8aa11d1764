/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns records on their way to the disk.
 *
 *   sealing (a job, small ones at once) -> sealed (until the segment's header is on disk)
 *     -> payload (what follows the head's chunks is written) -> ready (waits for its turn)
 *     -> head (its first chunks are written) -> the record exists
 *
 * Invariants: 1. nothing of a fill is written before the segment's header: after a kill no older
 * index speaks of records that are no longer there; a head is written when the payload's write has
 * ended well; 2. writes of heads of a namespace begin in the order of stores, a few at a time, and
 * a record exists when its head and all before it are on disk: after a kill there is no gap before
 * a record that a user was told of; heads that lie side by side, of records that are nothing but a
 * head, go in one write; 3. a record that came to nothing before its head was written leaves a void
 * in its place; 4. when a write fails, all records behind it in the segment fail, too,
 * and those below them elsewhere lack their parent; 5. a user is
 * told once, never from within its call. Loop thread, but for the job, which touches the write's
 * buffer, its seal and the user's payload.
 */
#include "base/err.h"
#include "base/mem.h"
#include "store/seg_core.h"

#include <assert.h>
#include <errno.h>
#include <openssl/crypto.h>

enum { PAYLOAD_AAD = offsetof(struct cst_disk_record, payload_tag) };

static uint8_t *bytes_of(const struct cst_seg_write *w) {
    return w->part.data ? w->part.data : w->head.data;
}

static struct cst_disk_record *head_of(const struct cst_seg_write *w) {
    return (struct cst_disk_record *)bytes_of(w);
}

/* ---- sealing ---- */

static int seal_meta(struct cst_seg_write *w) {
    struct cst_disk_record *head = head_of(w);
    const struct cst_seal_aad aad = { head, offsetof(struct cst_disk_record, meta_tag), NULL, 0 };
    int r = cst_seal(&w->seal, cst_load64(&head->meta_nonce), aad, head + 1, head + 1,
                     cst_load32(&head->meta_bytes), head->meta_tag, NULL);

    cst_seg_crc_set(head, sizeof(*head));
    return r;
}

static void seal_run(struct cst_job *job) {
    struct cst_seg_write *w = cst_container_of(job, struct cst_seg_write, job);
    struct cst_disk_record *head = head_of(w);
    const struct cst_seal_aad aad = { head, PAYLOAD_AAD, w->key, sizeof(w->key) };
    uint32_t crc;

    w->status = cst_seal(&w->seal, cst_load64(&head->payload_nonce), aad, w->payload,
                         bytes_of(w) + cst_load32(&head->payload_offset),
                         cst_load64(&head->payload_bytes), head->payload_tag, &crc);
    if (!w->status && w->payload && crc != w->payload_crc)
        w->status = CST_SEG_E_CORRUPT;
    if (!w->status)
        w->status = seal_meta(w);
}

/* The record came to nothing: what lies in its place says so, and the index, too. */
static void make_void(struct cst_seg_write *w) {
    struct cst_disk_record *head = head_of(w);

    cst_segment_void_entry(w->segment, w->body_end, cst_load32(&head->meta_bytes));
    head->type = CST_DISK_VOID;
    memset(head->payload_tag, 0, sizeof(head->payload_tag));
    cst_store32(&head->meta_bytes, 0);
    cst_store32(&head->payload_offset, 0);
    cst_store64(&head->payload_bytes, 0);
    cst_store64(&head->meta_nonce, ++w->segment->nonce);
    cst_store64(&head->payload_nonce, ++w->segment->nonce);
    memset(head + 1, 0, CST_DISK_CHUNK - sizeof(*head));
    w->head_chunks = 1;
    w->owner = NULL;
    if (seal_meta(w))
        cst_segment_fail(w, -EIO);
}

/* The payload's memory is free for other records before its header is on disk, if there is a place
 * for that. */
static void keep_head(struct cst_seg_write *w) {
    struct cst_seg *seg = w->segment->seg;
    uint64_t n = cst_chunk_offset(w->head_chunks);

    assert(w->part.data && !w->head.data);
    if (cst_seg_ring_take(&seg->heads, n, &w->head))
        return;
    memcpy(w->head.data, w->part.data, n);
    cst_seg_ring_give(&seg->ring, &w->part);
}

static void payload_written(struct cst_aio_op *op, int res) {
    struct cst_seg_write *w = cst_container_of(op, struct cst_seg_write, op);
    struct cst_seg_ns *ns = w->segment->ns;

    w->busy = false;
    w->state = CST_WRITE_READY;
    keep_head(w);
    if (res)
        cst_segment_fail(w, res);
    cst_seg_pump(ns);
}

static void write_op(struct cst_seg_write *w, void (*done)(struct cst_aio_op *op, int res),
                     uint32_t chunk, uint64_t length) {
    w->op = (struct cst_aio_op){
        .done = done,
        .file = w->segment->file,
        .code = CST_AIO_WRITE,
        .data = bytes_of(w) + cst_chunk_offset(chunk),
        .offset = cst_chunk_offset(w->chunk + chunk),
        .length = length,
    };
    cst_aio_submit(w->segment->seg->env.aio, &w->op);
}

static void write_payload(struct cst_seg_write *w) {
    w->busy = true;
    w->state = CST_WRITE_PAYLOAD;
    write_op(w, payload_written, w->head_chunks, cst_chunk_offset(w->n_chunks - w->head_chunks));
}

static void sealed(struct cst_seg_write *w) {
    w->busy = false;
    w->state = CST_WRITE_READY;
    if (w->failed)
        return;
    if (w->status)
        make_void(w);
    else if (w->n_chunks > w->head_chunks && w->segment->begun)
        write_payload(w);
    else if (w->n_chunks > w->head_chunks)
        w->state = CST_WRITE_SEALED;
}

static void seal_done(struct cst_job *job) {
    struct cst_seg_write *w = cst_container_of(job, struct cst_seg_write, job);
    struct cst_seg_ns *ns = w->segment->ns;

    sealed(w);
    cst_seg_pump(ns);
}

/* ---- the end of a write ---- */

static void count(struct cst_seg_write *w) {
    struct cst_seg_stats *stats = &w->segment->seg->stats;
    uint64_t bytes = cst_chunk_offset(w->n_chunks);

    if (w->store) {
        stats->stored++;
        stats->stored_bytes += bytes;
    } else if (w->move) {
        stats->moved++;
        stats->moved_bytes += bytes;
    } else {
        stats->overhead_bytes += bytes;
    }
}

/* w is gone. */
static void tell(struct cst_seg_write *w, int status) {
    struct cst_seg_segment *s = w->segment;
    struct cst_seg *seg = s->seg;
    struct cst_seg_store *store = w->store;
    struct cst_seg_move *move = w->move;
    struct cst_seg_ref ref = cst_segment_ref(s, w->slot);

    cst_list_unlink(&w->link);
    cst_seg_ring_give(&seg->ring, &w->part);
    cst_seg_ring_give(&seg->heads, &w->head);
    OPENSSL_cleanse(&w->seal, sizeof(w->seal));
    cst_free(w);
    s->writers--;
    seg->busy--;
    cst_seg_room(seg);
    if (store) {
        store->done(store, status);
    } else if (move) {
        cst_seg_move_done(move, status, ref);
    }
    cst_segment_settle(s);
}

static bool parent_is_live(const struct cst_seg_write *w) {
    return !w->has_parent || cst_seg_find(w->segment->seg, w->parent, NULL);
}

/* The head is on disk: the record exists. */
static void publish(struct cst_seg_write *w) {
    struct cst_seg_segment *s = w->segment;

    if (w->slot == UINT32_MAX)
        return;
    assert(w->slot == s->n_slots);
    if (w->owner && (s->forget || !parent_is_live(w))) {
        w->owner = NULL;
        w->status = s->forget ? CST_SEG_E_GONE : CST_SEG_E_PARENT;
    }
    s->body_end = w->body_end;
    cst_segment_publish(s, w->chunk, w->n_chunks, w->owner);
    if (!w->status)
        count(w);
    s->seg->changed |= w->owner != NULL;
}

/* What has come to exist: the first writes, as far as their heads are on disk. */
static void publish_all(struct cst_seg_ns *ns) {
    struct cst_list told = CST_LIST_INIT(told), *it;

    while ((it = cst_list_first(&ns->writes))) {
        struct cst_seg_write *w = cst_list_entry(it, struct cst_seg_write, link);

        if (w->state != CST_WRITE_DONE || w->failed)
            break;
        publish(w);
        cst_list_unlink(it);
        cst_list_append(&told, it);
    }
    while ((it = cst_list_first(&told))) {
        struct cst_seg_write *w = cst_list_entry(it, struct cst_seg_write, link);

        tell(w, w->status);
    }
}

static void heads_written(struct cst_aio_op *op, int res) {
    struct cst_seg_write *w = cst_container_of(op, struct cst_seg_write, op);
    struct cst_seg_ns *ns = w->segment->ns;
    struct cst_list *it = &w->link;

    ns->n_heading--;
    if (res)
        cst_segment_fail(w, res);
    for (uint32_t n = w->n_run; n; n--, it = it->next) {
        w = cst_list_entry(it, struct cst_seg_write, link);
        w->busy = false;
        w->state = CST_WRITE_DONE;
    }
    cst_seg_pump(ns);
}

/* ---- heads, in order ---- */

/* May the next one's head go into the same write? */
static bool is_adjacent(const struct cst_seg_write *w, const struct cst_seg_write *next) {
    return next->state == CST_WRITE_READY && !next->failed && next->segment == w->segment &&
           w->n_chunks == w->head_chunks && next->chunk == w->chunk + w->n_chunks &&
           bytes_of(next) == bytes_of(w) + cst_chunk_offset(w->n_chunks);
}

static void write_heads(struct cst_seg_ns *ns, struct cst_seg_write *first) {
    struct cst_seg_write *w = first;
    uint64_t bytes = 0;

    for (;;) {
        struct cst_seg_write *next = cst_list_entry(w->link.next, struct cst_seg_write, link);

        w->busy = true;
        w->state = CST_WRITE_HEAD;
        first->n_run++;
        bytes += cst_chunk_offset(w->head_chunks);
        if (w->link.next == &ns->writes || bytes >= CST_SEG_RUN_MAX || !is_adjacent(w, next))
            break;
        w = next;
    }
    ns->n_heading++;
    write_op(first, heads_written, 0, bytes);
}

/* The next head whose turn it is: all before it are being written. */
static struct cst_seg_write *next_head(struct cst_seg_ns *ns) {
    struct cst_list *it;

    for (it = ns->writes.next; it != &ns->writes; it = it->next) {
        struct cst_seg_write *w = cst_list_entry(it, struct cst_seg_write, link);

        if (w->failed || w->state < CST_WRITE_READY)
            return NULL;
        if (w->state == CST_WRITE_READY)
            return w->segment->begun ? w : NULL;
    }
    return NULL;
}

static void pump(struct cst_seg_ns *ns) {
    struct cst_seg_write *w;
    struct cst_list *it;

    while ((it = cst_list_first(&ns->writes))) {
        w = cst_list_entry(it, struct cst_seg_write, link);
        if (w->failed && !w->busy)
            tell(w, w->status);
        else if (w->state == CST_WRITE_DONE && !w->failed)
            publish_all(ns);
        else
            break;
    }
    while (ns->n_heading < CST_SEG_HEADS_MAX && (w = next_head(ns)))
        write_heads(ns, w);
}

/* Who is told may store something else, which comes back here: the outer call goes on with that, so
 * that nobody is told from within a call of theirs. */
void cst_seg_pump(struct cst_seg_ns *ns) {
    ns->pump_again = true;
    if (ns->pumping)
        return;
    ns->pumping = true;
    while (ns->pump_again) {
        ns->pump_again = false;
        pump(ns);
    }
    ns->pumping = false;
    cst_seg_evict_go(ns->seg); /* a move may wait for memory */
}

/* ---- the beginning of a write ---- */

static void fill_head(struct cst_seg_write *w, enum cst_disk_type type, uint32_t meta_bytes,
                      uint64_t payload_bytes) {
    struct cst_seg_segment *s = w->segment;
    struct cst_disk_record *head = head_of(w);

    cst_store32(&head->magic, CST_DISK_RECORD_MAGIC);
    head->version = CST_DISK_VERSION;
    head->type = (uint8_t)type;
    head->cipher = (uint8_t)s->seal.cipher;
    cst_store32(&head->segment, s->id);
    cst_store32(&head->chunk, w->chunk);
    cst_store64(&head->fill, s->fill);
    cst_store64(&head->start, s->start);
    cst_store32(&head->slot, w->slot);
    cst_store32(&head->n_chunks, w->n_chunks);
    cst_store64(&head->generation, ++s->seg->generation);
    cst_store32(&head->meta_bytes, meta_bytes);
    cst_store32(&head->payload_offset, cst_disk_payload_offset(meta_bytes));
    cst_store64(&head->payload_bytes, payload_bytes);
    cst_store64(&head->meta_nonce, ++s->nonce);
    cst_store64(&head->payload_nonce, ++s->nonce);
}

/* own: the engine's own record, which is nothing but a head. It waits for the heads before it, and
 * the records behind it must not wait with it for their memory. */
static int write_new(struct cst_seg *seg, uint32_t n_chunks, bool own, struct cst_seg_write **out) {
    struct cst_seg_write *w = cst_calloc(1, sizeof(*w));
    int r;

    if (!w)
        return cst_err(-ENOMEM);
    r = cst_seg_ring_take(own ? &seg->heads : &seg->ring, cst_chunk_offset(n_chunks),
                          own ? &w->head : &w->part);
    if (r) {
        cst_free(w);
        return r;
    }
    w->n_chunks = n_chunks;
    w->slot = UINT32_MAX;
    *out = w;
    return 0;
}

static void write_to(struct cst_seg_segment *s, struct cst_seg_write *w) {
    w->segment = s;
    w->seal = s->seal;
    s->writers++;
    s->seg->busy++;
    cst_list_append(&s->ns->writes, &w->link);
}

/* A place in the segment, with head and room for the meta, which the caller writes; then start().
 */
static int record_new(struct cst_seg_segment *s, enum cst_disk_type type, uint32_t meta_bytes,
                      const void *payload, uint64_t payload_bytes, struct cst_seg_write **out) {
    uint32_t n_chunks = cst_disk_record_chunks(meta_bytes, payload_bytes);
    struct cst_seg_write *w = NULL;
    int r;

    r = cst_segment_grow(s, meta_bytes);
    if (!r)
        r = write_new(s->seg, n_chunks, type == CST_DISK_SPACE, &w);
    if (r)
        return r;
    write_to(s, w);
    memset(bytes_of(w), 0, sizeof(struct cst_disk_record));
    w->chunk = s->next_chunk;
    w->slot = s->next_slot++;
    s->next_chunk += n_chunks;
    w->head_chunks = (uint32_t)cst_disk_chunks(sizeof(struct cst_disk_record) + meta_bytes);
    w->payload = payload;
    fill_head(w, type, meta_bytes, payload_bytes);
    *out = w;
    return 0;
}

static void zero_gaps(struct cst_seg_write *w) {
    const struct cst_disk_record *head = head_of(w);
    uint64_t meta_end = sizeof(*head) + cst_load32(&head->meta_bytes),
             payload = cst_load32(&head->payload_offset),
             end = payload + cst_load64(&head->payload_bytes);

    memset(bytes_of(w) + meta_end, 0, payload - meta_end);
    memset(bytes_of(w) + end, 0, cst_chunk_offset(w->n_chunks) - end);
}

static void nothing(struct cst_job *job) {
}

static void start(struct cst_seg_write *w) {
    struct cst_seg_segment *s = w->segment;

    cst_segment_add_entry(s, head_of(w));
    w->body_end = s->body_n;
    zero_gaps(w);
    w->busy = true;
    w->state = CST_WRITE_SEALING;
    w->job = (struct cst_job){ .run = seal_run, .done = seal_done };
    if (cst_chunk_offset(w->n_chunks) <= CST_SEG_INLINE) {
        seal_run(&w->job);
        sealed(w);
        if (!w->failed) {
            cst_seg_pump(s->ns);
            return;
        }
        w->busy = true; /* not even a void could be sealed; told later, not from within the call */
        w->job.run = nothing;
    }
    s->seg->env.jobs->submit(s->seg->env.jobs, &w->job, CST_JOB_BACKGROUND);
}

static void header_written(struct cst_aio_op *op, int res) {
    struct cst_seg_write *header = cst_container_of(op, struct cst_seg_write, op);
    struct cst_seg_segment *s = header->segment;
    struct cst_list *it;

    header->busy = false;
    header->state = CST_WRITE_DONE;
    s->begun = !res;
    if (res)
        cst_segment_fail(header, res);
    for (it = &header->link; it != &s->ns->writes; it = it->next) {
        struct cst_seg_write *w = cst_list_entry(it, struct cst_seg_write, link);

        if (w->segment == s && w->state == CST_WRITE_SEALED && !w->failed)
            write_payload(w);
    }
    cst_seg_pump(s->ns);
}

int cst_seg_header_new(struct cst_seg *seg, struct cst_seg_write **out) {
    return write_new(seg, 1, true, out);
}

void cst_seg_header_free(struct cst_seg *seg, struct cst_seg_write *w) {
    cst_seg_ring_give(&seg->heads, &w->head);
    cst_free(w);
}

void cst_seg_header_write(struct cst_seg_segment *s, struct cst_seg_write *w) {
    struct cst_disk_segment *head = (struct cst_disk_segment *)bytes_of(w);

    write_to(s, w);
    memset(head, 0, CST_DISK_CHUNK);
    memcpy(head->magic, CST_DISK_SEGMENT_MAGIC, sizeof(head->magic));
    cst_seg_version_set(&head->version);
    memcpy(head->uuid, s->seg->uuid, sizeof(head->uuid));
    cst_store32(&head->id, s->id);
    head->cipher = (uint8_t)s->seal.cipher;
    head->namespace_length = (uint8_t)strlen(s->ns->name);
    memcpy(head->namespace_name, s->ns->name, strlen(s->ns->name));
    cst_store64(&head->fill, s->fill);
    cst_store64(&head->sequence, s->sequence);
    cst_store64(&head->segment_bytes, s->seg->segment_bytes);
    cst_store64(&head->created, cst_seg_unix(s->seg));
    memcpy(head->salt, s->salt, sizeof(head->salt));
    cst_seg_crc_set(head, sizeof(*head));
    w->busy = true;
    w->state = CST_WRITE_HEAD;
    write_op(w, header_written, 0, CST_DISK_CHUNK); /* not in turn: all others wait for it */
}

static uint32_t space_meta_bytes(const struct cst_seg_space *space) {
    return (uint32_t)sizeof(struct cst_disk_space) + space->canonical_bytes;
}

static int write_space(struct cst_seg_segment *s, struct cst_seg_space *space) {
    struct cst_disk_space *meta;
    struct cst_seg_write *w;
    int r = record_new(s, CST_DISK_SPACE, space_meta_bytes(space), NULL, 0, &w);

    if (r)
        return r;
    meta = (struct cst_disk_space *)(bytes_of(w) + sizeof(struct cst_disk_record));
    memset(meta, 0, sizeof(*meta));
    memcpy(meta->meta.key, space->identity, 32);
    memcpy(meta->meta.space, space->identity, 32);
    meta->kind = space->kind;
    meta->klass = space->klass;
    cst_store32(&meta->canonical_bytes, space->canonical_bytes);
    memcpy(meta + 1, space->canonical, space->canonical_bytes);
    memcpy(w->key, space->identity, 32);
    start(w);
    return cst_segment_add_space(s, space);
}

/* The namespace's open segment with room for the record and, if it is new there, its space. */
static int find_room(struct cst_seg_space *space, uint32_t n_chunks, uint32_t meta_bytes) {
    struct cst_seg_ns *ns = space->ns;
    uint32_t more = cst_disk_record_chunks(space_meta_bytes(space), 0);

    if (ns->open && cst_segment_has_space(ns->open, space) &&
        cst_segment_fits(ns->open, n_chunks, meta_bytes))
        return 0;
    /* the space's record, and its entry wherever the index blocks end */
    if (ns->open && cst_segment_fits(ns->open, n_chunks + 3 * more + 2, meta_bytes) &&
        !cst_segment_has_space(ns->open, space))
        return write_space(ns->open, space);
    if (ns->open) {
        struct cst_seg_segment *full = ns->open;

        if (!ns->seg->n_free) { /* leave it open: a smaller record may still fit */
            cst_seg_spare(ns->seg);
            return ns->seg->making || ns->seg->evict ? CST_SEG_E_BUSY : CST_SEG_E_FULL;
        }
        cst_segment_finish(full);
    }
    return CST_SEG_E_GONE; /* a new one is needed */
}

static int make_room(struct cst_seg_space *space, uint32_t n_chunks, uint32_t meta_bytes) {
    int r = find_room(space, n_chunks, meta_bytes);

    if (r != CST_SEG_E_GONE)
        return r;
    r = cst_segment_begin(space->ns);
    if (!r && !space->ns->open)
        r = CST_SEG_E_BUSY;
    return r ? r : write_space(space->ns->open, space);
}

static bool is_too_big(const struct cst_seg_space *space, const struct cst_seg_record *record) {
    uint32_t meta = cst_seg_meta_bytes(record), space_meta = space_meta_bytes(space);
    uint64_t chunks = cst_disk_record_chunks(space_meta, 0) +
                      cst_disk_chunks(sizeof(struct cst_disk_index) + cst_disk_entry_bytes(meta) +
                                      cst_disk_entry_bytes(space_meta)) +
                      2;

    return record->payload_bytes >= space->ns->seg->segment_bytes ||
           chunks + cst_disk_record_chunks(meta, record->payload_bytes) > space->ns->seg->chunks;
}

static int record_begin(const struct cst_seg_record *record, const void *payload,
                        struct cst_seg_write **out) {
    uint32_t meta = cst_seg_meta_bytes(record);
    struct cst_seg_space *space = record->space;
    uint32_t n_chunks = cst_disk_record_chunks(meta, record->payload_bytes);
    struct cst_seg_write *w;
    int r = make_room(space, n_chunks, meta);

    /* a move that waited for memory may have come first */
    if (!r && (!space->ns->open || !cst_segment_has_space(space->ns->open, space) ||
               !cst_segment_fits(space->ns->open, n_chunks, meta)))
        r = CST_SEG_E_BUSY;
    if (!r)
        r = record_new(space->ns->open, (enum cst_disk_type)record->type, meta, payload,
                       record->payload_bytes, &w);
    if (r)
        return r;
    cst_seg_meta_write(bytes_of(w) + sizeof(struct cst_disk_record), record);
    memcpy(w->key, record->key, sizeof(w->key));
    w->payload_crc = record->payload_crc;
    *out = w;
    return 0;
}

static bool pay(struct cst_seg *seg, uint64_t bytes) {
    uint64_t rate = seg->options.write_rate, now = cst_seg_now(seg), most = 2 * rate;

    if (!rate)
        return true;
    if (now - seg->rate_at_ns >= CST_NS_PER_MS) {
        uint64_t ms = (now - seg->rate_at_ns) / CST_NS_PER_MS;

        seg->rate_left = CST_MIN(most, seg->rate_left + (ms > 2000 ? most : ms * rate / 1000));
        seg->rate_at_ns += ms * CST_NS_PER_MS;
    }
    if (seg->rate_left < CST_MIN(bytes, most))
        return false;
    return true;
}

/* The parent has a record, or will have one before its child. */
static bool parent_is_known(const struct cst_seg *seg, struct cst_seg_ref ref) {
    const struct cst_seg_segment *s;

    if (cst_seg_find(seg, ref, NULL))
        return true;
    if (ref.segment >= seg->n_segments)
        return false;
    s = &seg->segments[ref.segment];
    return (uint32_t)s->fill == ref.fill && ref.slot >= s->n_slots && ref.slot < s->next_slot &&
           s->writers;
}

static int admit(struct cst_seg *seg, const struct cst_seg_store *store) {
    const struct cst_seg_record *record = &store->record;

    if (!cst_seg_takes(seg))
        return CST_SEG_E_OFF;
    if (!seg->recovered)
        return CST_SEG_E_BUSY;
    if (store->hits < seg->options.min_hits)
        return CST_SEG_E_HITS;
    if (record->n_tokens > CST_DISK_TOKENS_MAX || record->n_side > CST_DISK_SIDE_MAX ||
        is_too_big(record->space, record))
        return CST_SEG_E_TOO_BIG;
    if (record->has_parent && !parent_is_known(seg, store->parent))
        return CST_SEG_E_PARENT;
    if (!record->space->ns->has_key && seg->options.crypt == CST_SEG_CRYPT_AES)
        return CST_SEG_E_OFF;
    return pay(seg, record->payload_bytes) ? 0 : CST_SEG_E_BUDGET;
}

int cst_seg_store(struct cst_seg *seg, struct cst_seg_store *store) {
    const struct cst_seg_record *record = &store->record;
    struct cst_seg_write *w;
    int r = admit(seg, store);

    assert(store->owner && record->payload_bytes && record->space->ns->seg == seg);
    if (!r)
        r = record_begin(record, store->payload, &w);
    seg->awaited |= r == CST_SEG_E_BUSY;
    if (cst_seg_is_shortage(r))
        cst_seg_error(seg, r);
    if (r)
        return r;
    seg->rate_left -= CST_MIN(seg->rate_left, record->payload_bytes);
    w->store = store;
    w->owner = store->owner;
    w->parent = store->parent;
    w->has_parent = record->has_parent;
    store->ref = cst_segment_ref(w->segment, w->slot);
    start(w);
    return 0;
}

bool cst_seg_is_awaited(const struct cst_seg *seg) {
    return seg->awaited;
}

int cst_seg_write_move(struct cst_seg_move *move, const struct cst_seg_record *record,
                       const void *payload, void *owner) {
    struct cst_seg_write *w;
    int r = record_begin(record, payload, &w);

    if (r)
        return r;
    w->move = move;
    w->owner = owner;
    start(w);
    return 0;
}
