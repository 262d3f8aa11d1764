/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The parser of cistern-segdump. Owns nothing but its buffers on the stack.
 * Invariants: 1. a length from the file is compared with what is left before it is used; 2. each
 * loop over a segment goes at least one chunk on; 3. what is encrypted is, without its key, only
 * checked as far as its headers go, and the lines say so. One thread.
 */
#include "tools/segdump.h"

#include "base/crc32c.h"
#include "base/mem.h"
#include "tools/segdump_crypt.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE = 64 << 10, META_MAX = 1 << 24 };

static uint32_t le32(struct cst_le32 v) {
    return cst_load32(v.b);
}

static uint64_t le64(struct cst_le64 v) {
    return cst_load64(v.b);
}

/* ---- lines ---- */

struct line {
    struct cst_dump *dump;
    const char *problem;
};

static struct line begin(struct cst_dump *d, const struct cst_dump_file *f, const char *what) {
    if (d->form == CST_DUMP_JSON)
        (void)printf("{\"file\": \"%s\", \"what\": \"%s\"", f->name, what);
    else if (d->form == CST_DUMP_TEXT)
        (void)printf("%s %s", f->name, what);
    return (struct line){ .dump = d };
}

static void number(struct line *l, const char *name, uint64_t v) {
    if (l->dump->form == CST_DUMP_JSON)
        (void)printf(", \"%s\": %" PRIu64, name, v);
    else if (l->dump->form == CST_DUMP_TEXT)
        (void)printf(" %s=%" PRIu64, name, v);
}

static void hex(struct line *l, const char *name, const uint8_t *bytes, size_t n) {
    if (l->dump->form == CST_DUMP_SILENT)
        return;
    (void)printf(l->dump->form == CST_DUMP_JSON ? ", \"%s\": \"" : " %s=", name);
    for (size_t i = 0; i < n; i++)
        (void)printf("%02x", bytes[i]);
    if (l->dump->form == CST_DUMP_JSON)
        (void)putchar('"');
}

/* A namespace's name, with anything but plain characters replaced. */
static void text(struct line *l, const char *name, const uint8_t *bytes, size_t n) {
    if (l->dump->form == CST_DUMP_SILENT)
        return;
    (void)printf(l->dump->form == CST_DUMP_JSON ? ", \"%s\": \"" : " %s=", name);
    for (size_t i = 0; i < n; i++)
        (void)putchar(bytes[i] > ' ' && bytes[i] < 127 && !strchr("\"\\", bytes[i]) ? bytes[i]
                                                                                    : '?');
    if (l->dump->form == CST_DUMP_JSON)
        (void)putchar('"');
}

static void bad(struct line *l, const char *problem) {
    if (!l->problem)
        l->problem = problem;
}

static void end(struct line *l) {
    struct cst_dump *d = l->dump;

    d->lines++;
    d->bad += l->problem != NULL;
    if (d->form == CST_DUMP_JSON && l->problem)
        (void)printf(", \"ok\": false, \"problem\": \"%s\"}\n", l->problem);
    else if (d->form == CST_DUMP_JSON)
        (void)puts(", \"ok\": true}");
    else if (d->form == CST_DUMP_TEXT && l->problem)
        (void)printf(" BAD: %s\n", l->problem);
    else if (d->form == CST_DUMP_TEXT)
        (void)putchar('\n');
}

/* ---- checks ---- */

static bool get(const struct cst_dump_file *f, uint64_t offset, void *out, size_t n) {
    return offset <= f->size && n <= f->size - offset && f->read(f->arg, offset, out, n);
}

/* Goes on with crc over a range of the file. */
static bool crc_range(const struct cst_dump_file *f, uint64_t offset, uint64_t n, uint32_t *crc) {
    uint8_t piece[PIECE];

    while (n) {
        size_t now = n < PIECE ? (size_t)n : PIECE;

        if (!get(f, offset, piece, now))
            return false;
        *crc = cst_crc32c(*crc, piece, now);
        offset += now;
        n -= now;
    }
    return true;
}

static bool crc_fits(const void *structure, size_t size) {
    struct cst_le32 crc;

    memcpy(&crc, (const uint8_t *)structure + size - sizeof(crc), sizeof(crc));
    return cst_crc32c(0, structure, size - sizeof(crc)) == le32(crc);
}

/* Of structures that begin with 8 bytes of magic and the versions. */
static void check_start(struct line *l, const void *structure, size_t size, const char *magic) {
    struct cst_disk_version v;

    memcpy(&v, (const uint8_t *)structure + 8, sizeof(v));
    if (memcmp(structure, magic, 8) != 0)
        bad(l, "wrong magic");
    else if (!crc_fits(structure, size))
        bad(l, "wrong checksum");
    else if (le32(v.version) != CST_DISK_VERSION)
        bad(l, "another version");
    else if (le32(v.incompat) & ~(uint32_t)CST_DISK_INCOMPAT)
        bad(l, "unknown incompatible features");
}

static void check_uuid(struct line *l, const uint8_t uuid[16]) {
    if (l->dump->has_super && memcmp(l->dump->uuid, uuid, 16) != 0)
        bad(l, "belongs to another store");
}

static bool is_plain_tag(const uint8_t tag[CST_DISK_TAG], uint32_t crc) {
    static const uint8_t zeros[CST_DISK_TAG];
    struct cst_le32 stored;

    memcpy(&stored, tag, sizeof(stored));
    return le32(stored) == crc && !memcmp(tag + 4, zeros, CST_DISK_TAG - 4);
}

/* A sealed message in the file, and what its tag covers beside it. */
struct message {
    const void *aad, *aad2;
    size_t aad_n, aad2_n;
    uint64_t nonce, offset, n;
    const uint8_t *tag;
};

/* Opens it; the first keep_n plain bytes go to keep, the CRC32C of all to *crc. False: it is not
 * what was sealed, or can't be read. key NULL: it is not encrypted. */
static bool open_message(const struct cst_dump_file *f, const struct message *m, const uint8_t *key,
                         void *keep, size_t keep_n, uint32_t *crc) {
    uint32_t sum = cst_crc32c(cst_crc32c(0, m->aad, m->aad_n), m->aad2, m->aad2_n);
    struct cst_dump_gcm *g = key ? cst_dump_gcm_begin(key, m->nonce) : NULL;
    bool right = !key || (cst_dump_gcm_aad(g, m->aad, m->aad_n) &&
                          (!m->aad2_n || cst_dump_gcm_aad(g, m->aad2, m->aad2_n)));
    uint8_t piece[PIECE];

    *crc = 0;
    for (uint64_t at = 0; right && at < m->n; at += sizeof(piece)) {
        size_t now = CST_MIN(m->n - at, sizeof(piece));

        right = get(f, m->offset + at, piece, now) && (!key || cst_dump_gcm_open(g, piece, now));
        if (!right)
            break;
        if (at < keep_n)
            memcpy((uint8_t *)keep + at, piece, CST_MIN(now, keep_n - at));
        *crc = cst_crc32c(*crc, piece, now);
        sum = key ? 0 : cst_crc32c(sum, piece, now);
    }
    if (key)
        return cst_dump_gcm_end(g, m->tag) && right;
    return right && is_plain_tag(m->tag, sum);
}

/* ---- superblock ---- */

static void dump_super(struct cst_dump *d, const struct cst_dump_file *f) {
    struct cst_disk_super s = { .magic = { 0 } };
    struct line l = begin(d, f, "superblock");
    uint64_t bytes;

    if (!get(f, 0, &s, sizeof(s)))
        bad(&l, "too short");
    else
        check_start(&l, &s, sizeof(s), CST_DISK_SUPER_MAGIC);
    bytes = le64(s.segment_bytes);
    if (bytes % CST_DISK_CHUNK || bytes < CST_DISK_SEGMENT_BYTES_MIN ||
        bytes > CST_DISK_SEGMENT_BYTES_MAX)
        bad(&l, "impossible segment size");
    hex(&l, "uuid", s.uuid, sizeof(s.uuid));
    number(&l, "segment_bytes", bytes);
    number(&l, "created", le64(s.created));
    d->has_super = !l.problem;
    memcpy(d->uuid, s.uuid, sizeof(d->uuid));
    d->segment_bytes = bytes;
    end(&l);
}

/* ---- segments ---- */

struct segment {
    struct cst_dump *dump;
    const struct cst_dump_file *file;
    struct cst_disk_segment head;
    uint64_t bytes, fill, start;
    uint32_t id;
    bool closed, has_key;
    uint8_t key[CST_DISK_KEY]; /* of this fill */
    struct cst_disk_footer footer;
    uint64_t records, sealed, payload_bytes;
};

/* Is this the header of the record at the place? NULL: yes; else why not. */
static const char *why_no_record(const struct segment *s, const struct cst_disk_record *r,
                                 uint64_t chunk, uint64_t limit) {
    uint32_t meta = le32(r->meta_bytes), n = le32(r->n_chunks);
    uint64_t payload = le64(r->payload_bytes);

    if (le32(r->magic) != CST_DISK_RECORD_MAGIC)
        return "no record";
    if (!crc_fits(r, sizeof(*r)))
        return "wrong checksum of a record's header";
    if (r->version != CST_DISK_VERSION)
        return "a record of another version";
    if (le64(r->fill) != s->fill || le64(r->start) != s->start)
        return "a record of another fill";
    if (le32(r->segment) != s->id || le32(r->chunk) != chunk || le32(r->slot) != s->records ||
        r->cipher != s->head.cipher)
        return "a record from another place";
    if (!n || n > limit - chunk)
        return "a record that is longer than its segment";
    if (r->type == CST_DISK_VOID)
        return meta || payload ? "a void with content" : NULL;
    if (r->type < CST_DISK_BLOCK || r->type > CST_DISK_VOID)
        return "a record of unknown type";
    if (meta < sizeof(struct cst_disk_meta) || meta > META_MAX || payload > s->bytes ||
        le32(r->payload_offset) != cst_disk_payload_offset(meta) ||
        n != cst_disk_record_chunks(meta, payload))
        return "a record whose lengths don't fit";
    return NULL;
}

union meta {
    struct cst_disk_meta meta;
    struct cst_disk_block block;
    struct cst_disk_side side;
};

static void check_side(struct line *l, const struct cst_disk_record *r,
                       const struct cst_disk_side *m, uint32_t part) {
    number(l, "version", le64(m->version));
    number(l, "part", le32(m->part));
    number(l, "parts", le32(m->parts));
    number(l, "total_bytes", le64(m->total_bytes));
    if (le32(r->meta_bytes) != sizeof(*m) || le32(m->payload_crc) != part)
        bad(l, "side data that doesn't fit");
    else if (le32(m->part) >= le32(m->parts) || le64(r->payload_bytes) > le64(m->total_bytes))
        bad(l, "a part of side data that can't be");
}

static void check_meta(struct line *l, const struct cst_disk_record *r, const union meta *m,
                       uint32_t frame) {
    size_t have = le32(r->meta_bytes);
    uint32_t tokens = le32(m->block.n_tokens);

    hex(l, "key", m->meta.key, sizeof(m->meta.key));
    if (r->type == CST_DISK_SIDE)
        check_side(l, r, &m->side, frame);
    if (r->type != CST_DISK_BLOCK)
        return;
    number(l, "position", le32(m->block.position));
    number(l, "tokens", tokens);
    number(l, "preset", m->block.preset);
    if (tokens > CST_DISK_TOKENS_MAX || m->block.n_side > CST_DISK_SIDE_MAX ||
        cst_disk_block_meta_bytes(tokens, m->block.flags & CST_DISK_HAS_SURPRISALS,
                                  m->block.n_side) != have)
        bad(l, "a block whose lists don't fit");
    else if (le32(m->block.payload_crc) != frame)
        bad(l, "a frame that is not the one the block names");
}

/* What lies behind the header: both messages, and whether they fit each other. */
static void check_content(struct segment *s, struct line *l, const struct cst_disk_record *r,
                          uint64_t chunk) {
    const uint8_t *key = r->cipher == CST_DISK_CRC32C ? NULL : s->key;
    uint64_t offset = chunk * CST_DISK_CHUNK;
    struct message meta = {
        .aad = r,
        .aad_n = offsetof(struct cst_disk_record, meta_tag),
        .nonce = le64(r->meta_nonce),
        .offset = offset + sizeof(*r),
        .n = le32(r->meta_bytes),
        .tag = r->meta_tag,
    };
    struct message payload = {
        .aad = r,
        .aad_n = offsetof(struct cst_disk_record, payload_tag),
        .nonce = le64(r->payload_nonce),
        .offset = offset + le32(r->payload_offset),
        .n = le64(r->payload_bytes),
        .tag = r->payload_tag,
    };
    union meta m = { .side = { .part = { .b = { 0 } } } };
    uint32_t frame = 0, unused;

    if (!open_message(s->file, &meta, key, &m, sizeof(m), &unused)) {
        bad(l, "wrong checksum of a record's meta");
        return;
    }
    payload.aad2 = m.meta.key;
    payload.aad2_n = sizeof(m.meta.key);
    if (payload.n && !open_message(s->file, &payload, key, NULL, 0, &frame))
        bad(l, "wrong checksum of a record's payload");
    check_meta(l, r, &m, frame);
}

/* Voids are empty; without its key a record stays unchecked. */
static void check_record(struct segment *s, struct line *l, const struct cst_disk_record *r,
                         uint64_t chunk) {
    if (r->type == CST_DISK_VOID)
        return;
    if (r->cipher == CST_DISK_CRC32C || s->has_key) {
        check_content(s, l, r, chunk);
        return;
    }
    s->sealed++;
    s->dump->unchecked++;
    s->dump->unchecked_bytes += le32(r->meta_bytes) + le64(r->payload_bytes);
}

static void dump_record(struct segment *s, const struct cst_disk_record *r, uint64_t chunk) {
    static const char *const types[] = { "?", "block", "space", "side data", "void" };
    enum cst_dump_form form = s->dump->form;
    struct line l;

    if (!s->dump->records)
        s->dump->form = CST_DUMP_SILENT;
    l = begin(s->dump, s->file, types[r->type]);
    number(&l, "chunk", chunk);
    number(&l, "slot", le32(r->slot));
    number(&l, "chunks", le32(r->n_chunks));
    number(&l, "generation", le64(r->generation));
    number(&l, "payload_bytes", le64(r->payload_bytes));
    check_record(s, &l, r, chunk);
    if (l.problem && s->dump->form != form) { /* said in any case, without the details */
        s->dump->form = form;
        l = begin(s->dump, s->file, types[r->type]);
        number(&l, "chunk", chunk);
        number(&l, "slot", le32(r->slot));
        check_content(s, &l, r, chunk);
    }
    end(&l);
    s->dump->form = form;
}

/* All records; returns the chunk after them. An open segment ends where the next one isn't valid:
 * a kill may leave that. */
static uint64_t dump_records(struct segment *s) {
    uint64_t limit = s->closed ? le32(s->footer.end_chunk) : s->bytes / CST_DISK_CHUNK;
    uint64_t chunk = 1;

    while (chunk < limit) {
        struct cst_disk_record r;
        const char *why = get(s->file, chunk * CST_DISK_CHUNK, &r, sizeof(r))
                              ? why_no_record(s, &r, chunk, limit)
                              : "can't be read";

        if (why && s->closed) {
            struct line l = begin(s->dump, s->file, "record");

            number(&l, "chunk", chunk);
            bad(&l, why);
            end(&l);
        }
        if (why)
            break;
        dump_record(s, &r, chunk);
        s->records++;
        s->payload_bytes += le64(r.payload_bytes);
        chunk += le32(r.n_chunks);
    }
    return chunk;
}

static void dump_index(struct segment *s, uint32_t number_, uint64_t chunk, uint64_t *entries) {
    struct cst_disk_index x = { .magic = { .b = { 0 } } };
    struct line l = begin(s->dump, s->file, "index");
    uint64_t offset = chunk * CST_DISK_CHUNK, body;
    struct message m = { .aad = &x, .aad_n = offsetof(struct cst_disk_index, tag), .tag = x.tag };
    bool plain;
    uint32_t unused;

    number(&l, "number", number_);
    number(&l, "chunk", chunk);
    if (!get(s->file, offset, &x, sizeof(x)) || le32(x.magic) != CST_DISK_INDEX_MAGIC)
        bad(&l, "no index block");
    else if (!crc_fits(&x, sizeof(x)))
        bad(&l, "wrong checksum");
    else if (x.version != CST_DISK_VERSION)
        bad(&l, "another version");
    else if (le32(x.segment) != s->id || le32(x.chunk) != chunk || le64(x.fill) != s->fill ||
             le64(x.start) != s->start || le32(x.number) != number_ || x.cipher != s->head.cipher)
        bad(&l, "from another place");
    body = le32(x.body_bytes);
    if (body > (uint64_t)CST_DISK_INDEX_CHUNKS * CST_DISK_CHUNK - sizeof(x))
        bad(&l, "longer than a block");
    plain = x.cipher == CST_DISK_CRC32C;
    m.nonce = le64(x.nonce);
    m.offset = offset + sizeof(x);
    m.n = body;
    if (!l.problem && (plain || s->has_key) &&
        !open_message(s->file, &m, plain ? NULL : s->key, NULL, 0, &unused))
        bad(&l, "wrong checksum of its entries");
    number(&l, "entries", le32(x.n_entries));
    *entries += l.problem ? 0 : le32(x.n_entries);
    end(&l);
}

static void dump_indexes(struct segment *s, uint64_t end_chunk) {
    uint32_t n = le32(s->footer.n_index), first = le32(s->footer.index_chunk);
    uint64_t entries = 0, last = s->bytes / CST_DISK_CHUNK - 1;
    struct line l;

    for (uint32_t i = 0; i < n; i++) {
        uint64_t chunk = first + (uint64_t)i * CST_DISK_INDEX_CHUNKS;

        if (chunk >= last)
            break;
        dump_index(s, i, chunk, &entries);
    }
    l = begin(s->dump, s->file, "footer");
    number(&l, "records", le32(s->footer.n_records));
    number(&l, "index_blocks", n);
    number(&l, "end_chunk", le32(s->footer.end_chunk));
    if (end_chunk != le32(s->footer.end_chunk) || s->records != le32(s->footer.n_records))
        bad(&l, "the records are not those that it names");
    else if (first < end_chunk || entries != s->records)
        bad(&l, "the index is not that of the records");
    end(&l);
}

/* A footer counts when everything in it is this segment's. */
static bool read_footer(struct segment *s) {
    uint64_t chunks = s->bytes / CST_DISK_CHUNK;
    struct cst_disk_footer *x = &s->footer;

    return get(s->file, (chunks - 1) * CST_DISK_CHUNK, x, sizeof(*x)) &&
           !memcmp(x->magic, CST_DISK_FOOTER_MAGIC, 8) && crc_fits(x, sizeof(*x)) &&
           le32(x->segment) == s->id && le64(x->fill) == s->fill && le64(x->start) == s->start &&
           le32(x->end_chunk) < chunks;
}

/* The key of the segment's fill, if the file keys has one for its namespace. */
static void find_key(struct segment *s) {
    enum { NAME = sizeof(CST_DISK_SEGMENT_INFO) - 1 };
    const struct cst_dump *d = s->dump;
    uint8_t info[NAME + 4 + 8];

    memcpy(info, CST_DISK_SEGMENT_INFO, NAME);
    cst_store32(info + NAME, s->id);
    cst_store64(info + NAME + 4, s->fill);
    for (size_t i = 0; i < d->n_keys && !s->has_key; i++)
        s->has_key =
            d->keys[i].length == s->head.namespace_length &&
            !memcmp(d->keys[i].name, s->head.namespace_name, d->keys[i].length) &&
            cst_dump_hkdf(s->key, sizeof(s->key), d->keys[i].key, s->head.salt, info, sizeof(info));
}

static void dump_segment(struct cst_dump *d, const struct cst_dump_file *f, uint32_t id) {
    static const uint8_t empty[8];
    struct segment s = { .dump = d, .file = f, .id = id };
    struct line l = begin(d, f, "segment");
    struct cst_le64 start;
    uint64_t after;

    if (!get(f, 0, &s.head, sizeof(s.head))) {
        bad(&l, "too short");
        end(&l);
        return;
    }
    if (!memcmp(s.head.magic, empty, sizeof(empty))) {
        number(&l, "empty", 1);
        end(&l);
        return;
    }
    check_start(&l, &s.head, sizeof(s.head), CST_DISK_SEGMENT_MAGIC);
    check_uuid(&l, s.head.uuid);
    s.bytes = le64(s.head.segment_bytes);
    s.fill = le64(s.head.fill);
    memcpy(&start, s.head.salt, sizeof(start));
    s.start = le64(start);
    if (le32(s.head.id) != id)
        bad(&l, "another segment's header");
    else if (!s.head.namespace_length || s.head.namespace_length > CST_DISK_NAMESPACE_MAX)
        bad(&l, "impossible name");
    else if (s.bytes % CST_DISK_CHUNK || s.bytes < CST_DISK_SEGMENT_BYTES_MIN ||
             s.bytes > CST_DISK_SEGMENT_BYTES_MAX || s.bytes > f->size ||
             (d->has_super && s.bytes != d->segment_bytes))
        bad(&l, "impossible size");
    number(&l, "fill", s.fill);
    number(&l, "sequence", le64(s.head.sequence));
    number(&l, "cipher", s.head.cipher);
    text(&l, "namespace", s.head.namespace_name,
         CST_MIN(s.head.namespace_length, CST_DISK_NAMESPACE_MAX));
    s.closed = !l.problem && read_footer(&s);
    number(&l, "closed", s.closed);
    end(&l);
    if (l.problem)
        return;
    find_key(&s);
    after = dump_records(&s);
    if (s.closed)
        dump_indexes(&s, after);
    l = begin(d, f, "total");
    number(&l, "records", s.records);
    number(&l, "payload_bytes", s.payload_bytes);
    number(&l, "free_chunks", s.closed ? 0 : s.bytes / CST_DISK_CHUNK - after);
    number(&l, "encrypted_and_not_checked", s.sealed);
    end(&l);
    cst_dump_cleanse(s.key, sizeof(s.key));
}

/* ---- checkpoint ---- */

static void dump_marks(struct line *l, const struct cst_dump_file *f, uint32_t n, uint64_t bytes) {
    uint64_t at = sizeof(struct cst_disk_checkpoint), stop = at + bytes, dropped = 0, pins = 0;

    for (uint32_t i = 0; i < n; i++) {
        struct cst_disk_mark m;
        uint64_t words;

        if (stop - at < sizeof(m) || !get(f, at, &m, sizeof(m))) {
            bad(l, "marks are cut off");
            return;
        }
        words = ((uint64_t)le32(m.n_slots) + 63) / 64;
        at += sizeof(m);
        if (stop - at < 8 * words) {
            bad(l, "marks are cut off");
            return;
        }
        for (uint64_t w = 0; w < words; w++, at += 8) {
            uint64_t word = 0;

            if (get(f, at, &word, sizeof(word)))
                dropped += (uint64_t)__builtin_popcountll(word);
        }
        if (stop - at < (uint64_t)le32(m.n_pins) * sizeof(struct cst_disk_pin)) {
            bad(l, "marks are cut off");
            return;
        }
        at += (uint64_t)le32(m.n_pins) * sizeof(struct cst_disk_pin);
        pins += le32(m.n_pins);
    }
    if (at != stop)
        bad(l, "bytes after the marks");
    number(l, "dropped", dropped);
    number(l, "pins", pins);
}

static void dump_checkpoint(struct cst_dump *d, const struct cst_dump_file *f) {
    struct cst_disk_checkpoint c = { .magic = { 0 } };
    struct line l = begin(d, f, "checkpoint");
    uint64_t body;
    uint32_t crc = 0;

    if (!get(f, 0, &c, sizeof(c)))
        bad(&l, "too short");
    else
        check_start(&l, &c, sizeof(c), CST_DISK_CHECKPOINT_MAGIC);
    check_uuid(&l, c.uuid);
    body = le64(c.body_bytes);
    number(&l, "clean", le32(c.flags) & CST_DISK_CLEAN);
    number(&l, "records", le64(c.n_records));
    number(&l, "segments", le32(c.n_segments));
    number(&l, "generation", le64(c.generation));
    number(&l, "sequence", le64(c.sequence));
    number(&l, "written", le64(c.written));
    if (!l.problem && (body > f->size - sizeof(c) || !crc_range(f, sizeof(c), body, &crc) ||
                       crc != le32(c.body_crc)))
        bad(&l, "wrong checksum of its body");
    if (!l.problem)
        dump_marks(&l, f, le32(c.n_segments), body);
    end(&l);
}

/* ---- keys ---- */

/* What the wrapped keys are wrapped with. False: there is no root key, or it is another one. */
static bool wrapping_key(struct cst_dump *d, const struct cst_disk_keys *k,
                         uint8_t out[CST_DISK_KEY]) {
    uint8_t check[CST_DISK_TAG];

    if (!d->has_root || !cst_dump_hkdf(check, sizeof(check), d->root, k->salt, CST_DISK_CHECK_INFO,
                                       sizeof(CST_DISK_CHECK_INFO) - 1))
        return false;
    d->wrong_root = memcmp(check, k->check, sizeof(check)) != 0;
    return !d->wrong_root && cst_dump_hkdf(out, CST_DISK_KEY, d->root, k->salt, CST_DISK_WRAP_INFO,
                                           sizeof(CST_DISK_WRAP_INFO) - 1);
}

/* The key of a namespace joins those that are known. */
static bool unwrap(struct cst_dump *d, struct cst_disk_wrapped *w, const uint8_t *wrapping,
                   uint64_t i) {
    struct cst_dump_gcm *g = cst_dump_gcm_begin(wrapping, i);
    bool right = cst_dump_gcm_aad(g, w, offsetof(struct cst_disk_wrapped, key)) &&
                 cst_dump_gcm_open(g, w->key, sizeof(w->key));
    struct cst_dump_key *key = &d->keys[d->n_keys];

    if (!cst_dump_gcm_end(g, w->tag) || !right)
        return false;
    memcpy(key->name, w->namespace_name, sizeof(key->name));
    key->length = w->namespace_length;
    memcpy(key->key, w->key, sizeof(key->key));
    cst_dump_cleanse(w->key, sizeof(w->key));
    d->n_keys++;
    return true;
}

static void forget_keys(struct cst_dump *d) {
    if (d->keys)
        cst_dump_cleanse(d->keys, d->n_keys * sizeof(*d->keys));
    d->keys = cst_free(d->keys);
    d->n_keys = 0;
}

void cst_dump_deinit(struct cst_dump *d) {
    forget_keys(d);
    cst_dump_cleanse(d->root, sizeof(d->root));
}

static void dump_keys(struct cst_dump *d, const struct cst_dump_file *f) {
    struct cst_disk_keys k = { .magic = { 0 } };
    struct line l = begin(d, f, "keys");
    uint8_t wrapping[CST_DISK_KEY];
    uint64_t bytes;
    struct cst_le32 stored;
    uint32_t n, crc = 0;
    bool opens;

    if (!get(f, 0, &k, sizeof(k)))
        bad(&l, "too short");
    else
        check_start(&l, &k, sizeof(k), CST_DISK_KEYS_MAGIC);
    check_uuid(&l, k.uuid);
    n = le32(k.n_entries);
    bytes = sizeof(k) + (uint64_t)n * sizeof(struct cst_disk_wrapped);
    if (!l.problem && (f->size != bytes + sizeof(stored) || !crc_range(f, 0, bytes, &crc) ||
                       !get(f, bytes, &stored, sizeof(stored)) || le32(stored) != crc))
        bad(&l, "wrong length, or wrong checksum of all");
    number(&l, "namespaces", n);
    number(&l, "root", le32(k.root));
    end(&l);
    forget_keys(d);
    opens = !l.problem && wrapping_key(d, &k, wrapping) &&
            (d->keys = cst_calloc(n + 1, sizeof(*d->keys)));
    for (uint32_t i = 0; !l.problem && i < n; i++) {
        struct cst_disk_wrapped w;
        struct line e = begin(d, f, "key");

        if (!get(f, sizeof(k) + (uint64_t)i * sizeof(w), &w, sizeof(w)) || !w.namespace_length ||
            w.namespace_length > CST_DISK_NAMESPACE_MAX)
            bad(&e, "impossible name");
        else
            text(&e, "namespace", w.namespace_name, w.namespace_length);
        if (!e.problem && opens && !unwrap(d, &w, wrapping, i))
            bad(&e, "wrong checksum of a wrapped key");
        end(&e);
    }
    cst_dump_cleanse(wrapping, sizeof(wrapping));
}

bool cst_dump(struct cst_dump *d, const struct cst_dump_file *f) {
    char name[16];
    uint32_t id;

    if (!strcmp(f->name, CST_DISK_SUPER_NAME)) {
        dump_super(d, f);
    } else if (!strcmp(f->name, CST_DISK_CHECKPOINT_NAME)) {
        dump_checkpoint(d, f);
    } else if (!strcmp(f->name, CST_DISK_KEYS_NAME)) {
        dump_keys(d, f);
    } else if (!strncmp(f->name, "seg-", 4)) {
        id = (uint32_t)strtoul(f->name + 4, NULL, 16);
        (void)snprintf(name, sizeof(name), CST_DISK_SEGMENT_NAME, id);
        if (strcmp(f->name, name) != 0)
            return false;
        dump_segment(d, f, id);
    } else {
        return false;
    }
    return true;
}
