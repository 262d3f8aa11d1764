/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the disk tier's engine share. Loop thread only, but for jobs. */
#pragma once

#include "base/hashmap.h"
#include "store/seg.h"
#include "store/seg_crypt.h"
#include "store/seg_format.h"

#include <errno.h>

enum {
    CST_SEG_INLINE = 16 * 1024,    /* smaller records are sealed and opened on the loop thread */
    CST_SEG_HEADS_MAX = 4,         /* writes of heads of a namespace at a time */
    CST_SEG_RUN_MAX = 1024 * 1024, /* heads that are written together */
    CST_SEG_SPARES = 2,            /* free segments to keep: the reserve for moves */
    CST_SEG_MOVES_MAX = 4,         /* at a time */
    CST_SEG_CANDIDATES = 12,       /* segments that are looked at for a victim */
    CST_SEG_SAMPLES = 64,          /* records that are looked at in each */
    CST_SEG_CHECKPOINT_S = 60,     /* at most so often, if there is something to say */
    CST_SEG_ALLOCATE_RETRY_S = 60, /* after the file system was full */
    CST_SEG_SPACES_MAX = 4096,
    CST_SEG_NAMESPACES_MAX = 16384, /* a purged one counts until the next start */
    CST_SEG_FILES_DEFAULT = 1024,
};

enum cst_seg_state {
    CST_SEG_ABSENT,   /* no file yet, or no blocks for it */
    CST_SEG_MAKING,   /* being allocated, or given back */
    CST_SEG_FREE,     /* ready to be begun */
    CST_SEG_OPEN,     /* being filled: the ns's open one */
    CST_SEG_CLOSING,  /* no more stores; the index is being written */
    CST_SEG_CLOSED,   /* only read. Unclosed ones of earlier runs, too */
    CST_SEG_EVICTING, /* records are being moved out */
    CST_SEG_RETIRED,  /* empty, and not used again in this run: a write failed in it */
    CST_SEG_FOREIGN,  /* not understood: left alone */
};

struct cst_seg_slot {
    uint32_t chunk, n_chunks;
    void *owner; /* NULL: not a record of a user (any more) */
};

struct cst_seg_segment {
    struct cst_seg *seg;
    uint32_t id;
    enum cst_seg_state state;
    bool retired;   /* a write failed in it */
    bool unsynced;  /* written since the last sync */
    bool begun;     /* the header of this fill is on disk */
    bool allocated; /* has all its blocks */
    bool odd;       /* its file was shorter or longer at the start */
    bool chosen;    /* a victim */
    bool forget;    /* its bytes are given back when it is empty: a purge */
    bool kept;      /* it was to be given back, and the disk refused: a start may find it again */
    struct cst_aio_file *file; /* NULL: none */
    struct cst_list link;      /* seg->free, or its namespace's segments, the oldest first */
    struct cst_seg_ns *ns;     /* NULL without content */
    struct cst_seg_ns *was;    /* whose bytes still lie in an empty one; NULL: unknown */
    struct cst_seal seal;
    uint8_t salt[CST_DISK_SALT];
    uint64_t fill, start, sequence;
    struct cst_seg_slot *slots; /* owned */
    size_t cap_slots;
    uint32_t n_slots; /* published ones */
    uint32_t n_live, live_chunks;
    uint32_t readers, writers; /* operations under way */
    /* while it is being filled */
    uint64_t nonce; /* the last counter used */
    uint32_t next_chunk, next_slot;
    uint32_t end_chunk;                /* after the last published record */
    uint8_t *body;                     /* owned: entries of all slots given out so far */
    size_t body_n, body_cap, body_end; /* body_end: of the published ones */
    uint32_t index_blocks, index_fill; /* full index blocks, and bytes in the last one */
    struct cst_seg_space **spaces;     /* owned: those that have a record in it */
    uint32_t n_spaces;
};

struct cst_seg_ns {
    struct cst_seg *seg;
    struct cst_hnode by_name; /* seg->ns_map */
    struct cst_list link;     /* seg->namespaces */
    struct cst_list segments; /* with its content */
    struct cst_list writes;   /* in the order in which they come to exist */
    struct cst_seg_segment *open;
    bool has_key;
    uint32_t n_heading; /* writes of heads under way */
    bool pumping, pump_again;
    uint8_t key[CST_DISK_KEY];
    uint32_t n_segments;
    uint64_t records, chunks; /* live */
    char name[CST_DISK_NAMESPACE_MAX + 1];
};

struct cst_seg_space {
    struct cst_seg_ns *ns;
    struct cst_hnode by_identity;
    struct cst_list link; /* seg->spaces */
    uint8_t identity[32];
    uint32_t refs; /* the user's, and one of each segment that has it in `spaces` */
    uint8_t kind, klass;
    void *user;
    uint32_t canonical_bytes;
    uint8_t canonical[];
};

/* Memory of records on their way: a ring, freed in any order, used again in order. */
struct cst_seg_ring {
    uint8_t *base;
    uint64_t size, head, tail; /* used: [tail, head), modulo size; head - tail <= size */
    struct cst_list parts;     /* in order */
};
struct cst_seg_part {
    struct cst_list link;
    uint64_t end;
    uint8_t *data;
    void *heap; /* not of the ring: owned */
};

enum cst_write_state {
    CST_WRITE_SEALING,
    CST_WRITE_SEALED, /* waits for the segment's header */
    CST_WRITE_PAYLOAD,
    CST_WRITE_READY,
    CST_WRITE_HEAD,
    CST_WRITE_DONE, /* the head is on disk: it exists when all before it do */
};

/* A record on its way (or the header of a segment that is begun: slot UINT32_MAX). */
struct cst_seg_write {
    struct cst_list link; /* ns->writes */
    struct cst_seg_segment *segment;
    struct cst_seg_store *store; /* NULL: not a user's */
    struct cst_seg_move *move;   /* a moved record */
    struct cst_seg_part part;    /* its bytes; NULL data: only the head is needed any more */
    struct cst_seg_part head;    /* then the head's; all of the engine's own records */
    const void *payload;
    struct cst_seal seal;
    struct cst_job job;
    struct cst_aio_op op;
    uint32_t slot, chunk, n_chunks, head_chunks;
    uint32_t n_run; /* writes whose heads go with this one's, itself too */
    uint32_t payload_crc;
    uint8_t key[32];
    void *owner;
    uint8_t state;
    bool busy;   /* a job or an operation is under way */
    bool failed; /* so are all behind it in the segment */
    int status;  /* what its user is told */
    struct cst_seg_ref parent;
    bool has_parent;
    size_t body_end;
};

struct cst_seg_keys {
    uint8_t root[CST_DISK_KEY];
    bool ephemeral, in_memory; /* in_memory: there is no file for it */
    char path[512];            /* of the ephemeral root key */
};

struct cst_seg {
    struct cst_seg_options options;
    struct cst_seg_env env;
    struct cst_aio_file *super;
    bool super_is_new; /* this start made its file */
    uint8_t uuid[16];
    uint64_t segment_bytes;
    uint32_t chunks; /* of a segment */
    uint8_t salt[CST_DISK_SALT];
    bool off, read_only, recovered;
    struct cst_seg_segment *segments; /* by id; owned */
    uint32_t n_segments;              /* ids known: the array */
    uint32_t n_allowed;               /* that may have blocks */
    uint32_t n_files;                 /* that have, with content or without */
    struct cst_list free;
    uint32_t n_free;
    struct cst_list namespaces, spaces;
    struct cst_hashmap ns_map, space_map;
    bool told_full; /* of namespaces */
    uint32_t n_spaces;
    struct cst_seg_keys keys;
    struct cst_seg_ring ring, heads; /* of records; of their headers once the payload is written */
    uint64_t generation, sequence;
    size_t busy;
    bool awaited;                  /* a store was answered BUSY, room() is owed */
    struct cst_seg_making *making; /* a segment is being allocated */
    uint64_t allocate_after_ns;
    bool noted_full, noted_lost, noted_short[2]; /* of descriptors, of memory */
    struct cst_seg_evict *evict;                 /* a victim is being emptied */
    struct cst_seg_recover *recover;
    struct cst_list reading; /* reads that end at once, told by `told` */
    struct cst_job tell;
    bool telling;
    bool changed, hurry; /* since the last checkpoint began; hurry: something was destroyed */
    struct cst_seg_draft *draft; /* a checkpoint that is being made */
    uint64_t error_ns, n_errors; /* the last one; without a long pause between them */
    uint64_t checkpoint_ns;
    uint64_t rate_at_ns, rate_left;
    struct cst_seg_stats stats;
};

static inline uint64_t cst_seg_now(const struct cst_seg *seg) {
    return cst_now_ns(seg->env.clock);
}

/* printf to the sentence of a refusal; CST_SEG_E_REFUSED. */
CST_PRINTF(3, 4) int cst_seg_refuse(char *message, size_t cap, const char *format, ...);
/* printf to user.note(). */
CST_PRINTF(2, 3) void cst_seg_note(struct cst_seg *seg, const char *format, ...);

static inline uint64_t cst_chunk_offset(uint32_t chunk) {
    return (uint64_t)chunk * CST_DISK_CHUNK;
}

static inline struct cst_seg_ref cst_segment_ref(const struct cst_seg_segment *s, uint32_t slot) {
    return (struct cst_seg_ref){ s->id, slot, (uint32_t)s->fill };
}

/* The live slot, or NULL: stale, dropped. */
struct cst_seg_slot *cst_seg_find(const struct cst_seg *seg, struct cst_seg_ref ref,
                                  struct cst_seg_segment **segment);

/* Of room on the file system, memory or descriptors: no defect of the device. */
static inline bool cst_seg_is_shortage(int r) {
    return r == CST_AIO_E_FULL || r == -ENOSPC || r == -ENOMEM || r == -EMFILE || r == -ENFILE;
}
/* Something failed: r is the aio's, or negative. An error of the device counts, and turns the tier
 * off when it was one too many; a full file system and want of memory are said once. */
void cst_seg_error(struct cst_seg *seg, int r);
/* The same of a write into a segment, which costs the segment: its room was allocated, so a full
 * file system counts, too. */
void cst_seg_write_error(struct cst_seg *seg, int r);
/* Something has ended that stores may have been waiting for: tells the user, if any were. */
void cst_seg_room(struct cst_seg *seg);

/* ---- seg_open.c ---- */

/* True: the flags allow to read it; *write: also to write. */
bool cst_seg_version_is_known(const struct cst_disk_version *v, bool *write);
void cst_seg_version_set(struct cst_disk_version *v);
/* Writes a small file of n bytes under its name, as a whole or not at all; with sync for good. */
int cst_seg_replace(struct cst_seg *seg, const char *name, const void *data, size_t n, bool sync);
/* Reads a small file of at most cap bytes. 0 and *out (owned), CST_AIO_E_ABSENT or negative. */
int cst_seg_slurp(struct cst_seg *seg, const char *name, size_t cap, uint8_t **out, size_t *n);

/* ---- seg_keys.c ---- */

/* Finds the root key and reads the keys file into the namespaces. 0, CST_SEG_E_REFUSED and a
 * sentence, negative errno. */
int cst_seg_keys_open(struct cst_seg *seg, bool has_segments, char *message, size_t cap);
/* Gives the namespace a key, and saves it. */
int cst_seg_keys_add(struct cst_seg *seg, struct cst_seg_ns *ns);
/* Forgets the namespace's key for good, as far as that can be done. */
int cst_seg_keys_forget(struct cst_seg *seg, struct cst_seg_ns *ns, enum cst_seg_erasure *how);

/* ---- seg_space.c ---- */

/* Finds or makes; NULL: no memory. */
struct cst_seg_ns *cst_seg_ns_get(struct cst_seg *seg, const char *name, size_t n);
struct cst_seg_ns *cst_seg_ns_find(const struct cst_seg *seg, const char *name, size_t n);
/* Finds or makes; takes a reference. 0 or -ENOMEM, -EINVAL (from disk: numbers out of range). */
int cst_seg_space_get(struct cst_seg_ns *ns, const uint8_t identity[32], uint32_t kind,
                      uint32_t klass, const void *canonical, uint32_t n,
                      struct cst_seg_space **out);
struct cst_seg_space *cst_seg_space_find(const struct cst_seg *seg, const uint8_t identity[32]);
void cst_seg_spaces_free(struct cst_seg *seg);

/* ---- seg_meta.c: metas, entries and headers of records ---- */

uint32_t cst_seg_meta_bytes(const struct cst_seg_record *record);
void cst_seg_meta_write(uint8_t *out, const struct cst_seg_record *record);
/* Checks n bytes of plain meta; pointers into it (8-byte aligned). False: not a meta of the type.
 */
bool cst_seg_meta_read(struct cst_seg_record *record, const uint8_t *meta, uint32_t n);
/* The entry of a record, cst_disk_entry_bytes() long: head, then its plain meta. */
void cst_seg_entry_write(uint8_t *out, const struct cst_disk_record *head);
/* A record's header as it lies on disk: is it one, and that of this place? */
bool cst_seg_head_is(const struct cst_disk_record *head, const struct cst_seg_segment *s,
                     uint32_t chunk, uint32_t slot);
/* Opens the meta behind a header that is right; n bytes are there. */
int cst_seg_head_open(const struct cst_seg_segment *s, uint8_t *record, uint64_t n);
void cst_seg_crc_set(void *p, size_t n);
bool cst_seg_crc_is(const void *p, size_t n);

/* ---- seg_segment.c: the life of segments ---- */

/* A free one becomes the namespace's open one; its header is the first write. 0, CST_SEG_E_FULL,
 * _BUSY, negative. */
int cst_segment_begin(struct cst_seg_ns *ns);
/* No more stores; closed when its writes have ended. */
void cst_segment_finish(struct cst_seg_segment *s);
/* A write failed: so do all behind it in the segment, which takes no more. What exists stays. */
void cst_segment_fail(struct cst_seg_write *from, int status);
/* Something under way has ended: closes it, frees it, goes on with its eviction. */
void cst_segment_settle(struct cst_seg_segment *s);
/* No content any more: owners have been told. */
void cst_segment_empty(struct cst_seg_segment *s);
/* Does a record fit, with its index entry? */
bool cst_segment_fits(const struct cst_seg_segment *s, uint32_t n_chunks, uint32_t meta_bytes);
/* Memory for one more slot with such a meta. 0 or -ENOMEM. */
int cst_segment_grow(struct cst_seg_segment *s, uint32_t meta_bytes);
/* Appends the entry of a record, as cst_seg_entry_write(); there is memory for it. */
void cst_segment_add_entry(struct cst_seg_segment *s, const struct cst_disk_record *head);
/* The entry that ends at `end` is that of a void. */
void cst_segment_void_entry(struct cst_seg_segment *s, size_t end, uint32_t meta_bytes);
/* Slot n_slots is taken by a record; owner NULL: of nobody. */
void cst_segment_publish(struct cst_seg_segment *s, uint32_t chunk, uint32_t n_chunks, void *owner);
/* A published slot gets an owner; or it has none any more. */
void cst_segment_live(struct cst_seg_segment *s, uint32_t slot, void *owner);
void cst_segment_unlive(struct cst_seg_segment *s, uint32_t slot);
/* Its key, from header and namespace. */
int cst_segment_set_key(struct cst_seg_segment *s);
/* Allocates or evicts, if free segments run short. */
void cst_seg_spare(struct cst_seg *seg);
/* Writes index and footer now; blocks. */
int cst_segment_close_now(struct cst_seg_segment *s);
/* Registers that the segment has a record of the space. */
int cst_segment_add_space(struct cst_seg_segment *s, struct cst_seg_space *space);
bool cst_segment_has_space(const struct cst_seg_segment *s, const struct cst_seg_space *space);

/* ---- seg_write.c ---- */

/* A record that is moved: as cst_seg_store(), without budgets and admission. */
int cst_seg_write_move(struct cst_seg_move *move, const struct cst_seg_record *record,
                       const void *payload, void *owner);
/* The header of a segment: its memory, before the segment is begun. 0, CST_SEG_E_BUSY, -ENOMEM. */
int cst_seg_header_new(struct cst_seg *seg, struct cst_seg_write **out);
void cst_seg_header_free(struct cst_seg *seg, struct cst_seg_write *header);
/* Takes it: it is the segment's first write. */
void cst_seg_header_write(struct cst_seg_segment *s, struct cst_seg_write *header);
/* Starts what may be started of the namespace's writes, and ends those that failed. */
void cst_seg_pump(struct cst_seg_ns *ns);

/* ---- seg_ring.c ---- */

int cst_seg_ring_init(struct cst_seg *seg, uint64_t size);
void cst_seg_ring_deinit(struct cst_seg *seg);
/* n zeroed bytes, aligned to a chunk. 0, CST_SEG_E_BUSY (none free now), -ENOMEM. */
int cst_seg_ring_take(struct cst_seg_ring *ring, uint64_t n, struct cst_seg_part *part);
void cst_seg_ring_give(struct cst_seg_ring *ring, struct cst_seg_part *part);
/* Heap memory aligned to a chunk; *heap is owned. */
void *cst_seg_aligned(uint64_t n, void **heap);

/* ---- seg_purge.c ---- */

/* Gives the segment's bytes back: nothing in it is found again. Blocks. */
void cst_segment_discard(struct cst_seg_segment *s);

/* ---- seg_read.c ---- */

/* Checks and opens a whole record in buffer. 0 or CST_SEG_E_CORRUPT, negative. key NULL: any. */
int cst_seg_record_open(const struct cst_seg_segment *s, uint8_t *buffer, uint64_t bytes,
                        uint32_t chunk, uint32_t slot, const uint8_t *key);
/* A record failed a check or can't be read: its owner is told. */
void cst_seg_lose(struct cst_seg *seg, struct cst_seg_ref ref, enum cst_seg_gone why);

/* ---- seg_evict.c ---- */

/* The write of a moved record has ended. */
void cst_seg_move_done(struct cst_seg_move *move, int status, struct cst_seg_ref ref);

/* Starts to empty a segment: of the namespace, or of any (NULL). False: there is none. */
bool cst_seg_evict_start(struct cst_seg *seg, struct cst_seg_ns *ns);
void cst_seg_evict_go(struct cst_seg *seg);
void cst_seg_evict_free(struct cst_seg *seg);

/* ---- seg_checkpoint.c ---- */

struct cst_seg_marks; /* a checkpoint that was read */
int cst_seg_marks_read(struct cst_seg *seg, struct cst_seg_marks **out);
struct cst_seg_marks *cst_seg_marks_free(struct cst_seg_marks *m);
bool cst_seg_marks_clean(const struct cst_seg_marks *m);
/* From now on the last stop wasn't a clean one. Blocks. 0 or negative errno. */
int cst_seg_marks_unclean(struct cst_seg *seg, const struct cst_seg_marks *m);
/* Had the segment's fill been given up? */
bool cst_seg_marks_empty(const struct cst_seg_marks *m, const struct cst_seg_segment *s);
/* Of the segment's fill: was the slot dropped, until when is it pinned? */
bool cst_seg_marks_dropped(const struct cst_seg_marks *m, const struct cst_seg_segment *s,
                           uint32_t slot);
/* Segments with records that have no file. */
uint32_t cst_seg_marks_missing(const struct cst_seg_marks *m, const struct cst_seg *seg);
uint64_t cst_seg_marks_pin(const struct cst_seg_marks *m, const struct cst_seg_segment *s,
                           uint32_t slot);
/* Of a clean stop. Blocks: 0.1 s for a million records, then for the disk. 0; negative errno: it
 * came to nothing, which is counted. */
int cst_seg_checkpoint_clean(struct cst_seg *seg);
/* While others are served, a slice each call: seg->draft is NULL when it is over. */
void cst_seg_checkpoint_slice(struct cst_seg *seg);
struct cst_seg_draft *cst_seg_draft_free(struct cst_seg_draft *d);
