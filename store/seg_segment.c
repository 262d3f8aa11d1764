/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the life of segments: allocated, begun, filled, closed, emptied, and used again.
 * Invariants: 1. `fill` grows before anything is written to a segment again, and with it the key:
 * no nonce comes twice; 2. slots, entries and chunks are given out in one order, and published in
 * it;
 * 3. a record is only given a place that leaves room for the index of all records and the footer;
 * 4. a segment is emptied only with no reader, no writer and no live record; 5. one that a write
 * failed in is closed with what exists, and not used again.
 * Loop thread, but for the job that seals an index, which touches its own buffer.
 */
#include "base/err.h"
#include "base/mem.h"
#include "store/seg_core.h"

#include <assert.h>
#include <errno.h>
#include <openssl/crypto.h>
#include <stdio.h>

enum { BODY_MAX = CST_DISK_INDEX_CHUNKS * CST_DISK_CHUNK - sizeof(struct cst_disk_index) };

/* ---- index and footer ---- */

struct index {
    uint8_t *data;               /* aligned; index blocks, then the footer's chunk */
    void *heap;                  /* owned */
    uint32_t n_blocks, n_chunks; /* without the footer */
    uint32_t first_chunk;
    struct cst_seal seal;
};

static uint32_t entry_bytes(const uint8_t *entry) {
    return cst_disk_entry_bytes(cst_disk_entry_meta_bytes((const struct cst_disk_entry *)entry));
}

/* How many bytes of entries the block that begins at `at` takes, and how many entries. */
static uint32_t block_span(const struct cst_seg_segment *s, size_t at, uint32_t *n) {
    uint32_t bytes = 0;

    for (*n = 0; at + bytes < s->body_end; (*n)++) {
        uint32_t more = entry_bytes(s->body + at + bytes);

        if (bytes + more > BODY_MAX)
            break;
        bytes += more;
    }
    return bytes;
}

static uint32_t block_chunks(uint32_t body) {
    return (uint32_t)cst_disk_chunks(sizeof(struct cst_disk_index) + body);
}

static void index_measure(const struct cst_seg_segment *s, struct index *index) {
    uint32_t last = 0, n;

    index->n_blocks = 0;
    for (size_t at = 0; at < s->body_end; at += last, index->n_blocks++)
        last = block_span(s, at, &n);
    index->n_chunks =
        index->n_blocks ? (index->n_blocks - 1) * CST_DISK_INDEX_CHUNKS + block_chunks(last) : 0;
    index->first_chunk = s->seg->chunks - 1 - index->n_chunks;
}

static void block_head(struct cst_seg_segment *s, struct cst_disk_index *head, uint32_t chunk,
                       uint32_t number, uint32_t n, uint32_t bytes) {
    cst_store32(&head->magic, CST_DISK_INDEX_MAGIC);
    head->version = CST_DISK_VERSION;
    head->cipher = (uint8_t)s->seal.cipher;
    cst_store32(&head->segment, s->id);
    cst_store32(&head->chunk, chunk);
    cst_store64(&head->fill, s->fill);
    cst_store64(&head->start, s->start);
    cst_store32(&head->number, number);
    cst_store32(&head->n_entries, n);
    cst_store64(&head->nonce, ++s->nonce);
    cst_store32(&head->body_bytes, bytes);
}

static void footer_fill(const struct cst_seg_segment *s, const struct index *index,
                        uint8_t *chunk) {
    struct cst_disk_footer *f = (struct cst_disk_footer *)chunk;

    memset(chunk, 0, CST_DISK_CHUNK);
    memcpy(f->magic, CST_DISK_FOOTER_MAGIC, sizeof(f->magic));
    cst_store32(&f->segment, s->id);
    cst_store32(&f->index_chunk, index->first_chunk);
    cst_store64(&f->fill, s->fill);
    cst_store64(&f->start, s->start);
    cst_store32(&f->n_index, index->n_blocks);
    cst_store32(&f->n_records, s->n_slots);
    cst_store32(&f->end_chunk, s->end_chunk);
    cst_seg_crc_set(f, sizeof(*f));
}

/* Lays the index of what was published out, unsealed. 0 or -ENOMEM. */
static int index_init(struct cst_seg_segment *s, struct index *index) {
    uint64_t bytes;
    uint8_t *block;
    uint32_t n, chunk;

    index_measure(s, index);
    bytes = cst_chunk_offset(index->n_chunks + 1);
    index->data = cst_seg_aligned(bytes, &index->heap);
    if (!index->data)
        return cst_err(-ENOMEM);
    memset(index->data, 0, bytes);
    index->seal = s->seal;
    block = index->data;
    chunk = index->first_chunk;
    for (size_t at = 0, number = 0; at < s->body_end; number++) {
        uint32_t span = block_span(s, at, &n);

        block_head(s, (struct cst_disk_index *)block, chunk, (uint32_t)number, n, span);
        memcpy(block + sizeof(struct cst_disk_index), s->body + at, span);
        at += span;
        block += CST_DISK_INDEX_CHUNKS * CST_DISK_CHUNK;
        chunk += CST_DISK_INDEX_CHUNKS;
    }
    footer_fill(s, index, index->data + cst_chunk_offset(index->n_chunks));
    return 0;
}

static void index_deinit(struct index *index) {
    OPENSSL_cleanse(&index->seal, sizeof(index->seal));
    index->heap = cst_free(index->heap);
}

static int index_seal(struct index *index) {
    int r = 0;

    for (uint32_t i = 0; i < index->n_blocks && !r; i++) {
        uint8_t *block = index->data + cst_chunk_offset(i * CST_DISK_INDEX_CHUNKS);
        struct cst_disk_index *head = (struct cst_disk_index *)block;
        const struct cst_seal_aad aad = { head, offsetof(struct cst_disk_index, tag), NULL, 0 };

        r = cst_seal(&index->seal, cst_load64(&head->nonce), aad, head + 1, head + 1,
                     cst_load32(&head->body_bytes), head->tag, NULL);
        cst_seg_crc_set(head, sizeof(*head));
    }
    return r;
}

/* ---- closing ---- */

struct closing {
    struct cst_seg_segment *segment;
    struct index index;
    struct cst_job job;
    struct cst_aio_op op;
    int status;
};

static void closed(struct cst_seg_segment *s) {
    s->state = CST_SEG_CLOSED;
    s->body = cst_free(s->body);
    s->body_n = s->body_cap = s->body_end = 0;
    cst_segment_settle(s);
}

static void closing_end(struct closing *c, int status) {
    struct cst_seg_segment *s = c->segment;

    if (status) {
        s->retired = true; /* the next start reads it record by record */
        cst_seg_write_error(s->seg, status);
    } else {
        s->seg->stats.overhead_bytes += cst_chunk_offset(c->index.n_chunks + 1);
    }
    s->writers--;
    s->seg->busy--;
    index_deinit(&c->index);
    cst_free(c);
    closed(s);
    cst_seg_spare(s->seg);
}

static void closing_written(struct cst_aio_op *op, int res) {
    closing_end(cst_container_of(op, struct closing, op), res);
}

static void closing_write(struct closing *c) {
    c->op = (struct cst_aio_op){
        .done = closing_written,
        .file = c->segment->file,
        .code = CST_AIO_WRITE,
        .data = c->index.data,
        .offset = cst_chunk_offset(c->index.first_chunk),
        .length = cst_chunk_offset(c->index.n_chunks + 1),
    };
    cst_aio_submit(c->segment->seg->env.aio, &c->op);
}

static void closing_run(struct cst_job *job) {
    struct closing *c = cst_container_of(job, struct closing, job);

    c->status = index_seal(&c->index);
}

static void closing_sealed(struct cst_job *job) {
    struct closing *c = cst_container_of(job, struct closing, job);

    if (c->status)
        closing_end(c, c->status);
    else
        closing_write(c);
}

/* The head of a record whose write failed may be there all the same: it must not be found. */
static void closing_wiped(struct cst_aio_op *op, int res) {
    struct closing *c = cst_container_of(op, struct closing, op);
    struct cst_seg *seg = c->segment->seg;

    if (res)
        cst_seg_error(seg, res);
    c->job = (struct cst_job){ .run = closing_run, .done = closing_sealed };
    seg->env.jobs->submit(seg->env.jobs, &c->job, CST_JOB_BACKGROUND);
}

static void closing_start(struct cst_seg_segment *s) {
    struct closing *c = s->seg->off ? NULL : cst_calloc(1, sizeof(*c));

    if (!c || index_init(s, &c->index)) {
        cst_free(c);
        closed(s); /* as after a kill */
        return;
    }
    c->segment = s;
    s->writers++;
    s->seg->busy++;
    if (!s->retired || s->end_chunk >= c->index.first_chunk) {
        closing_wiped(&c->op, 0);
        return;
    }
    c->op = (struct cst_aio_op){
        .done = closing_wiped,
        .file = s->file,
        .code = CST_AIO_WRITE,
        .data = c->index.data + cst_chunk_offset(c->index.n_chunks), /* anything but a record */
        .offset = cst_chunk_offset(s->end_chunk),
        .length = CST_DISK_CHUNK,
    };
    cst_aio_submit(s->seg->env.aio, &c->op);
}

int cst_segment_close_now(struct cst_seg_segment *s) {
    struct index index = { 0 };
    int r;

    assert(!s->writers);
    s->ns->open = NULL;
    r = index_init(s, &index);
    if (!r)
        r = index_seal(&index);
    if (!r)
        r = cst_fold(cst_aio_now(s->file, CST_AIO_WRITE, index.data,
                                 cst_chunk_offset(index.first_chunk),
                                 cst_chunk_offset(index.n_chunks + 1)));
    index_deinit(&index);
    s->state = CST_SEG_CLOSED;
    return r;
}

void cst_segment_finish(struct cst_seg_segment *s) {
    assert(s->state == CST_SEG_OPEN);
    s->state = CST_SEG_CLOSING;
    s->ns->open = NULL;
    cst_segment_settle(s);
}

/* ---- being filled ---- */

bool cst_segment_fits(const struct cst_seg_segment *s, uint32_t n_chunks, uint32_t meta_bytes) {
    uint32_t entry = cst_disk_entry_bytes(meta_bytes), blocks = s->index_blocks,
             fill = s->index_fill + entry;

    if (fill > BODY_MAX) {
        blocks++;
        fill = entry;
    }
    return (uint64_t)s->next_chunk + n_chunks + (uint64_t)blocks * CST_DISK_INDEX_CHUNKS +
               block_chunks(fill) + 1 <=
           s->seg->chunks;
}

int cst_segment_grow(struct cst_seg_segment *s, uint32_t meta_bytes) {
    int r = cst_grow(&s->slots, &s->cap_slots, (size_t)s->next_slot + 1, sizeof(*s->slots));

    if (!r && s->state == CST_SEG_OPEN)
        r = cst_grow(&s->body, &s->body_cap, s->body_n + cst_disk_entry_bytes(meta_bytes), 1);
    return r;
}

void cst_segment_add_entry(struct cst_seg_segment *s, const struct cst_disk_record *head) {
    uint32_t n = cst_disk_entry_bytes(cst_load32(&head->meta_bytes));

    assert(s->body_n + n <= s->body_cap);
    cst_seg_entry_write(s->body + s->body_n, head);
    s->body_n += n;
    s->index_fill += n;
    if (s->index_fill > BODY_MAX) {
        s->index_blocks++;
        s->index_fill = n;
    }
}

/* Its length stays: the index was measured with it. */
void cst_segment_void_entry(struct cst_seg_segment *s, size_t end, uint32_t meta_bytes) {
    struct cst_disk_entry *e =
        (struct cst_disk_entry *)(s->body + end - cst_disk_entry_bytes(meta_bytes));

    memset(e + 1, 0, meta_bytes);
    cst_disk_entry_set(e, CST_DISK_VOID, meta_bytes);
}

void cst_segment_publish(struct cst_seg_segment *s, uint32_t chunk, uint32_t n_chunks,
                         void *owner) {
    assert(s->n_slots < s->cap_slots);
    s->slots[s->n_slots++] = (struct cst_seg_slot){ chunk, n_chunks, NULL };
    s->end_chunk = chunk + n_chunks;
    if (owner)
        cst_segment_live(s, s->n_slots - 1, owner);
}

void cst_segment_live(struct cst_seg_segment *s, uint32_t slot, void *owner) {
    struct cst_seg_slot *it = &s->slots[slot];

    it->owner = owner;
    s->n_live++;
    s->live_chunks += it->n_chunks;
    s->ns->records++;
    s->ns->chunks += it->n_chunks;
}

void cst_segment_unlive(struct cst_seg_segment *s, uint32_t slot) {
    struct cst_seg_slot *it = &s->slots[slot];

    if (!it->owner)
        return;
    it->owner = NULL;
    s->n_live--;
    s->live_chunks -= it->n_chunks;
    s->ns->records--;
    s->ns->chunks -= it->n_chunks;
    s->seg->changed = true;
}

bool cst_segment_has_space(const struct cst_seg_segment *s, const struct cst_seg_space *space) {
    for (uint32_t i = 0; i < s->n_spaces; i++)
        if (s->spaces[i] == space)
            return true;
    return false;
}

int cst_segment_add_space(struct cst_seg_segment *s, struct cst_seg_space *space) {
    struct cst_seg_space **spaces;

    if (cst_segment_has_space(s, space))
        return 0;
    spaces = cst_realloc(s->spaces, (s->n_spaces + 1) * sizeof(struct cst_seg_space *));
    if (!spaces)
        return cst_err(-ENOMEM);
    s->spaces = spaces;
    s->spaces[s->n_spaces++] = space;
    space->refs++;
    return 0;
}

int cst_segment_set_key(struct cst_seg_segment *s) {
    if (s->seal.cipher != CST_DISK_AES_GCM)
        return 0;
    return cst_seal_segment_key(s->seal.key, s->ns->key, s->salt, s->id, s->fill);
}

static void begin(struct cst_seg_segment *s, struct cst_seg_ns *ns) {
    s->state = CST_SEG_OPEN;
    s->unsynced = true;
    s->begun = false;
    s->ns = ns;
    ns->n_segments++;
    ns->open = s;
    cst_list_unlink(&s->link);
    cst_list_append(&ns->segments, &s->link);
    s->seg->n_free--;
    s->fill++;
    s->sequence = ++s->seg->sequence;
    memcpy(s->salt, s->seg->salt, sizeof(s->salt));
    s->start = cst_load64(s->salt);
    s->seal.cipher =
        s->seg->options.crypt == CST_SEG_CRYPT_AES ? CST_DISK_AES_GCM : CST_DISK_CRC32C;
    s->nonce = 0;
    s->next_chunk = s->end_chunk = 1;
    s->next_slot = s->n_slots = 0;
    s->body_n = s->body_end = 0;
    s->index_blocks = s->index_fill = 0;
}

int cst_segment_begin(struct cst_seg_ns *ns) {
    struct cst_seg *seg = ns->seg;
    uint64_t cap = seg->options.namespace_bytes;
    struct cst_seg_write *header;
    struct cst_seg_segment *s;
    int r;

    if (cap && (ns->n_segments + 1) * seg->segment_bytes > CST_MAX(cap, 2 * seg->segment_bytes)) {
        (void)(!seg->evict && cst_seg_evict_start(seg, ns));
        return seg->evict ? CST_SEG_E_BUSY : CST_SEG_E_FULL;
    }
    if (!seg->n_free) {
        cst_seg_spare(seg);
        return seg->making || seg->evict ? CST_SEG_E_BUSY : CST_SEG_E_FULL;
    }
    r = cst_seg_header_new(seg, &header);
    if (r)
        return r;
    s = cst_list_entry(seg->free.next, struct cst_seg_segment, link);
    begin(s, ns);
    r = cst_segment_set_key(s);
    if (r) { /* nothing was written with this fill; the next one is another */
        cst_seg_header_free(seg, header);
        s->state = CST_SEG_CLOSED;
        ns->open = NULL;
        cst_segment_settle(s);
    } else {
        cst_seg_header_write(s, header);
    }
    cst_seg_spare(seg);
    return r;
}

void cst_segment_fail(struct cst_seg_write *from, int status) {
    struct cst_seg_segment *s = from->segment;
    struct cst_list *it;

    s->retired = true;
    cst_seg_write_error(s->seg, status);
    if (s->state == CST_SEG_OPEN) {
        s->state = CST_SEG_CLOSING;
        s->ns->open = NULL;
    }
    for (it = &from->link; it != &s->ns->writes; it = it->next) {
        struct cst_seg_write *w = cst_list_entry(it, struct cst_seg_write, link);

        if (w->segment == s && !w->failed) {
            w->failed = true;
            w->status = status > 0 ? CST_SEG_E_FULL : status;
        }
    }
}

/* ---- emptied, and made ---- */

static void segment_name(const struct cst_seg_segment *s, char out[32]) {
    (void)snprintf(out, 32, CST_DISK_SEGMENT_NAME, s->id);
}

static void remove_file(struct cst_seg_segment *s) {
    char name[32];

    segment_name(s, name);
    s->file = cst_aio_close(s->file);
    if (cst_aio_unlink(s->seg->env.aio, name))
        cst_seg_error(s->seg, -EIO);
    s->state = CST_SEG_ABSENT;
    s->allocated = false;
    s->seg->n_files--;
}

void cst_segment_empty(struct cst_seg_segment *s) {
    struct cst_seg *seg = s->seg;

    assert(!s->readers && !s->writers && !s->n_live);
    if (s->ns) {
        cst_list_unlink(&s->link);
        s->ns->n_segments--;
        s->was = s->ns;
        s->ns = NULL;
    }
    s->slots = cst_free(s->slots);
    s->body = cst_free(s->body);
    s->n_slots = s->next_slot = 0;
    s->cap_slots = s->body_n = s->body_cap = s->body_end = 0;
    while (s->n_spaces)
        (void)cst_seg_space_unref(s->spaces[--s->n_spaces]);
    s->spaces = cst_free(s->spaces);
    OPENSSL_cleanse(&s->seal, sizeof(s->seal)); /* begin() makes another */
    if (s->forget) {
        s->state = CST_SEG_MAKING;
        cst_segment_discard(s);
    }
    if (s->retired) {
        s->state = CST_SEG_RETIRED;
        seg->stats.segments_retired++;
        return;
    }
    if (!seg->read_only && seg->n_files > seg->n_allowed) {
        remove_file(s);
        return;
    }
    if (!s->allocated) {
        s->state = CST_SEG_ABSENT;
        return;
    }
    s->state = CST_SEG_FREE;
    cst_list_append(&seg->free, &s->link);
    seg->n_free++;
}

void cst_segment_settle(struct cst_seg_segment *s) {
    if (s->state == CST_SEG_CLOSING && !s->writers) {
        closing_start(s);
        return;
    }
    if (s->state == CST_SEG_CLOSED && !s->n_live && !s->readers && !s->writers && !s->chosen &&
        s->seg->recovered) {
        cst_segment_empty(s);
        return;
    }
    if (s->state == CST_SEG_EVICTING)
        cst_seg_evict_go(s->seg);
}

struct cst_seg_making {
    struct cst_seg *seg;
    struct cst_seg_segment *segment;
    struct cst_aio_op op;
    bool new; /* the file is */
};

static void make_failed(struct cst_seg_making *m, int res) {
    struct cst_seg *seg = m->seg;

    if (m->new)
        remove_file(m->segment);
    else
        m->segment->state = CST_SEG_ABSENT;
    cst_seg_error(seg, res);
    seg->allocate_after_ns = cst_seg_now(seg) + CST_SEG_ALLOCATE_RETRY_S * CST_NS_PER_S;
}

static void made(struct cst_aio_op *op, int res) {
    struct cst_seg_making *m = cst_container_of(op, struct cst_seg_making, op);
    struct cst_seg *seg = m->seg;
    struct cst_seg_segment *s = m->segment;

    seg->making = NULL;
    seg->busy--;
    if (res) {
        make_failed(m, res);
    } else {
        s->allocated = true;
        s->state = CST_SEG_FREE;
        cst_list_append(&seg->free, &s->link);
        seg->n_free++;
    }
    cst_free(m);
    cst_seg_spare(seg);
    cst_seg_room(seg);
}

static struct cst_seg_segment *find_absent(struct cst_seg *seg) {
    for (uint32_t i = 0; i < seg->n_segments; i++) {
        struct cst_seg_segment *s = &seg->segments[i];

        if (s->state == CST_SEG_ABSENT && (s->file || seg->n_files < seg->n_allowed))
            return s;
    }
    return NULL;
}

static int make_start(struct cst_seg *seg, struct cst_seg_segment *s) {
    struct cst_seg_making *m = cst_calloc(1, sizeof(*m));
    char name[32];
    int r = 0;

    if (!m)
        return cst_err(-ENOMEM);
    segment_name(s, name);
    if (!s->file) {
        r = cst_aio_open(seg->env.aio, name, CST_AIO_CREATE | CST_AIO_EXCLUSIVE, &s->file);
        m->new = !r;
        seg->n_files += !r;
    }
    if (!r && m->new)
        r = cst_aio_lock(s->file);
    if (r) {
        if (m->new)
            remove_file(s);
        else if (!cst_seg_is_shortage(r))
            s->state = CST_SEG_FOREIGN; /* somebody put a file there */
        cst_free(m);
        return r;
    }
    m->seg = seg;
    m->segment = s;
    s->state = CST_SEG_MAKING;
    m->op = (struct cst_aio_op){
        .done = made, .file = s->file, .code = CST_AIO_ALLOCATE, .length = seg->segment_bytes
    };
    seg->making = m;
    seg->busy++;
    cst_aio_submit(seg->env.aio, &m->op);
    return 0;
}

/* Every segment is some namespace's open one: the oldest that nobody writes to is closed, so that
 * it can be evicted. */
static void finish_idle(struct cst_seg *seg) {
    struct cst_seg_segment *oldest = NULL;

    for (uint32_t i = 0; i < seg->n_segments; i++) {
        struct cst_seg_segment *s = &seg->segments[i];

        if (s->state == CST_SEG_CLOSING)
            return;
        if (s->state == CST_SEG_OPEN && !s->writers && (!oldest || s->sequence < oldest->sequence))
            oldest = s;
    }
    if (oldest)
        cst_segment_finish(oldest);
}

void cst_seg_spare(struct cst_seg *seg) {
    struct cst_seg_segment *s;

    if (seg->n_free >= CST_SEG_SPARES || seg->making || seg->off || seg->read_only ||
        !seg->recovered)
        return;
    s = cst_seg_now(seg) >= seg->allocate_after_ns ? find_absent(seg) : NULL;
    if (s) {
        int r = make_start(seg, s);

        if (r) {
            cst_seg_error(seg, r);
            seg->allocate_after_ns = cst_seg_now(seg) + CST_SEG_ALLOCATE_RETRY_S * CST_NS_PER_S;
        }
        return;
    }
    if (seg->n_free && seg->n_files <= CST_SEG_SPARES)
        return; /* so few: the reserve would be all there is */
    if (!seg->evict && !cst_seg_evict_start(seg, NULL) && !seg->n_free)
        finish_idle(seg);
}
