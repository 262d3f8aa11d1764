/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine of the disk tier: records in segment files (docs/disk-format.md). It knows nothing of
 * the trie, of memory or of clients: its user keeps an index of blocks and gives each record an
 * owner (a pointer); the engine tells when an owner's record has moved or is gone.
 *
 * One thread: the one that owns the aio (loop thread). Payloads are checked, encrypted and
 * decrypted in jobs. Operations are submitted to the aio, never kicked: the user calls
 * cst_aio_kick() once a turn, and cst_aio_reap() when cst_aio_fd() is readable. Callbacks come from
 * cst_aio_reap() or a job's done(), but where it says otherwise.
 *
 * Promises
 *   1. A record exists once its payload and then its head were written without an error; a record
 *      whose store failed never does, in this run or a later one, but for a machine that stops
 *      at that moment: then it has the right bytes.
 *   2. A read gives the payload that was stored with this key, or a condition. Wrong, torn, stale,
 *      misplaced or foreign bytes are CST_SEG_E_CORRUPT, and the record is gone.
 *   3. Records of one namespace come to exist in the order of their stores, and none with a parent
 *      that doesn't.
 *   4. A segment holds one namespace, and its key and nonces never repeat (section 8 of the
 *      format).
 *   5. Files that weren't understood are never changed or removed.
 */
#pragma once

#include "base/clock.h"
#include "base/job.h"
#include "base/layout.h"
#include "base/list.h"
#include "base/random.h"
#include "store/io.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Conditions of cst_seg_*(). They begin where the aio's end: what the engine decides on a result of
 * the aio's must never be decided on one of its own. */
enum {
    CST_SEG_E_REFUSED = CST_AIO_E_END, /* open: the directory can't be used, see the message */
    CST_SEG_E_OFF,     /* the tier is off: too many errors, or it may only be read */
    CST_SEG_E_BUSY,    /* too much under way; store: room() follows when something has ended */
    CST_SEG_E_BUDGET,  /* store: the bytes per second are used up */
    CST_SEG_E_FULL,    /* no segment can be had for it now */
    CST_SEG_E_HITS,    /* store: not asked for often enough yet */
    CST_SEG_E_TOO_BIG, /* doesn't fit a segment */
    CST_SEG_E_PARENT,  /* its parent has no record (any more) */
    CST_SEG_E_GONE,    /* the record is gone */
    CST_SEG_E_CORRUPT, /* it failed a check, and is gone now */
};

/* Where a record is. A stale one (its segment was used again) is noticed. */
struct cst_seg_ref {
    uint32_t segment, slot;
    uint32_t fill; /* the low bits of the segment's */
};
#define CST_SEG_REF_NONE ((struct cst_seg_ref){ UINT32_MAX, UINT32_MAX, 0 })

static inline bool cst_seg_ref_is_none(struct cst_seg_ref ref) {
    return ref.segment == UINT32_MAX;
}

struct cst_seg;
struct cst_seg_space; /* a space as the engine knows it: identity and canonical bytes */

enum cst_seg_type { CST_SEG_BLOCK = 1, CST_SEG_SIDE = 3 }; /* as on disk */

/* What a record says about its payload. Pointers of a found record are valid during the call. */
struct cst_seg_record {
    enum cst_seg_type type;
    struct cst_seg_space *space;
    const uint8_t *key;     /* 32 bytes. Side data: SHA-256 of the whole */
    uint64_t payload_bytes; /* > 0 */
    uint32_t payload_crc;   /* CRC32C of the payload; a store checks it */
    /* blocks */
    const uint8_t *parent; /* 32 bytes; NULL in flat spaces */
    bool has_parent;       /* the parent is a block, not a root */
    uint32_t position;     /* in the chain */
    uint32_t n_tokens;     /* 0 in flat spaces */
    const uint32_t *tokens;
    const uint16_t *surprisals; /* f16 bits, n_tokens; or NULL */
    uint8_t preset;
    float error;
    uint32_t block_crc;
    uint64_t born; /* seconds since 1970 */
    uint32_t n_side;
    const uint64_t *side; /* versions of side data that the payload needs */
    /* side data: one of `parts` parts of the bytes */
    uint64_t version, total_bytes;
    uint32_t kind, part, parts;
    /* only of found records */
    uint64_t generation;
    uint64_t pinned_until; /* seconds since 1970; UINT64_MAX: no end; 0: not pinned */
};

enum cst_seg_gone { CST_SEG_GONE_EVICTED, CST_SEG_GONE_CORRUPT, CST_SEG_GONE_LOST };

/* The user's index. Callbacks may call cst_seg_drop() and cst_seg_pin(), nothing else of the
 * engine; all but found() and gone() may be NULL. */
struct cst_seg_user {
    /*
     * Recovery: a record. 0 and an owner: it stays; CST_SEG_E_PARENT: its parent may still come,
     * ask again later (at the end, in the order of positions); anything else: it is dropped. A key
     * may be found twice (it was moved just before a kill).
     */
    int (*found)(void *arg, const struct cst_seg_record *record, struct cst_seg_ref ref,
                 void **owner);
    /* Recovery, a hint, before the first record: about so many there are. */
    void (*expect)(void *arg, uint64_t n_records);
    /* Recovery, a hint: a block with this key may be found after a few others; soon: very few.
     * Each is told twice, so that what found() will look at can be loaded in two steps. */
    void (*coming)(void *arg, struct cst_seg_space *space, const uint8_t *key, bool soon);
    /* Eviction: what is lost with this record, per byte, in any unit, and whether other records
     * depend on it. Negative: it is never given up where it can be moved. NULL: all the same. */
    float (*value)(void *arg, void *owner, bool *has_children);
    /* The record is at another place now. */
    void (*moved)(void *arg, void *owner, struct cst_seg_ref ref);
    /* The record doesn't exist any more. What depends on it should be dropped at once. Never from
     * within a call of the user's. */
    void (*gone)(void *arg, void *owner, enum cst_seg_gone why);
    /* What stores were answered CST_SEG_E_BUSY for has ended: they may go now. Also from within a
     * call of the user's. */
    void (*room)(void *arg);
    /* Until when the record is pinned (as in struct cst_seg_record); for checkpoints. */
    uint64_t (*pinned_until)(void *arg, void *owner);
    /* One sentence for the operator. Also from cst_seg_open(). */
    void (*note)(void *arg, const char *sentence);
    void *arg;
};

enum cst_seg_crypt { CST_SEG_CRYPT_AES, CST_SEG_CRYPT_OFF };

struct cst_seg_options {
    uint64_t bytes;         /* of all segments; at least two of them */
    uint64_t segment_bytes; /* for a new directory. 0: 64 MiB, more above 64 GiB (1,024 files), less
                               for small tiers (8 files) */
    uint64_t namespace_bytes; /* of one namespace at most, in whole segments; 0: no cap */
    uint64_t write_rate;      /* bytes/s of stores; bursts of two seconds; 0: no limit */
    uint64_t buffer_bytes;    /* payloads on their way to the disk; 0: 16 MiB */
    uint32_t min_hits;        /* store only what was asked for so often */
    uint32_t lock_ms;     /* how long to wait for the locks of a daemon that was killed; 0: 3,000 */
    uint32_t errors_max;  /* I/O errors, with less than ten minutes between
                                  them, until the tier is off; 0: 16 */
    uint32_t slice_slots; /* records that a tick looks at for a checkpoint; 0: 8,192 */
    enum cst_seg_crypt crypt;
    /*
     * crypt aes, the root key: `key_file`, a file of 32 bytes or 64 hexadecimal digits (a systemd
     * credential is one); NULL: an ephemeral key in the first directory of `runtime` (a NULL-ended
     * list, or NULL) that is on a tmpfs and ours alone; none: in memory only, so the tier is cold
     * after each start.
     */
    const char *key_file;
    const char *const *runtime;
};

struct cst_seg_env {
    struct cst_aio *aio; /* outlives the engine */
    const struct cst_clock *clock;
    uint64_t (*unix_s)(void); /* seconds since 1970; NULL: time() */
    struct cst_random *random;
    struct cst_jobs *jobs;
    struct cst_seg_user user;
};

/* Locks and reads the directory of the aio; blocks. 0; CST_SEG_E_REFUSED and one sentence in
 * message; negative errno. Nothing is stored or read before recovery has ended. */
int cst_seg_open(struct cst_seg **out, const struct cst_seg_options *options,
                 const struct cst_seg_env *env, char *message, size_t cap);

/* Starts to look for records; done(arg, 0 or negative errno) when all are told. Spaces are told
 * with the first record that has one. */
void cst_seg_recover(struct cst_seg *seg, void (*done)(void *arg, int status), void *arg);

/* Seconds since 1970, of env.unix_s. */
uint64_t cst_seg_unix(const struct cst_seg *seg);
/* Operations of all kinds under way. */
size_t cst_seg_busy(const struct cst_seg *seg);
/* Care; call about every 100 ms, less often only while it answers false. */
bool cst_seg_tick(struct cst_seg *seg);

/* A clean stop: with nothing under way (cst_seg_busy() == 0). Closes segments, writes a checkpoint;
 * blocks. The tier is off afterwards. 0 or negative errno: the next start has to look closer. */
int cst_seg_close(struct cst_seg *seg);
/* With nothing under way; the directory is left as a kill would. NULL ok, returns NULL. No owner
 * is told. */
struct cst_seg *cst_seg_free(struct cst_seg *seg);
CST_DEFINE_FREEP(struct cst_seg, cst_seg_free)

/* ---- spaces ---- */

/* The identity of a space on disk. */
void cst_seg_identity(uint8_t out[32], const uint8_t fingerprint[32], enum cst_kind kind,
                      enum cst_class klass, const char *namespace_name);

/* Finds or makes; takes a reference. canonical: the descriptor's canonical bytes, copied. The
 * namespace gets its key here, so this may block. 0 or negative errno. Any time after open. */
int cst_seg_space_open(struct cst_seg *seg, const char *namespace_name, enum cst_kind kind,
                       enum cst_class klass, const void *canonical, uint32_t n,
                       struct cst_seg_space **out);
/* It also lives while it has records. NULL ok, returns NULL. */
struct cst_seg_space *cst_seg_space_unref(struct cst_seg_space *space);

struct cst_seg_space_info {
    const char *namespace_name;
    const uint8_t *identity;  /* 32 bytes */
    const uint8_t *canonical; /* checked by nobody yet when it comes from disk */
    uint32_t canonical_bytes;
    enum cst_kind kind;
    enum cst_class klass;
};
void cst_seg_space_info(const struct cst_seg_space *space, struct cst_seg_space_info *out);
/* The user's own pointer, NULL at first; NULL again when the user is done with it. */
void cst_seg_space_set_user(struct cst_seg_space *space, void *user);
void *cst_seg_space_user(const struct cst_seg_space *space);

/* ---- records ---- */

/* Embedded by the user; must not move, and record and payload stay as they are, until done(). */
struct cst_seg_store {
    /* 0: the record exists, at ref. CST_SEG_E_GONE (purged on its way), CST_SEG_E_PARENT, _CORRUPT
     * (the payload isn't what payload_crc says), _OFF, _FULL, negative errno: it doesn't. */
    void (*done)(struct cst_seg_store *store, int status);
    struct cst_seg_record record;
    const void *payload;
    void *owner;
    struct cst_seg_ref parent; /* of a record with has_parent: where that is; its store may still be
                                  under way, then as given by cst_seg_store_ref() */
    uint32_t hits;
    /* the engine's */
    struct cst_seg_ref ref;
};

/* 0: done() follows, never before the return. Else nothing was begun: CST_SEG_E_OFF, _BUSY,
 * _BUDGET, _FULL, _HITS, _TOO_BIG, _PARENT; negative errno. */
int cst_seg_store(struct cst_seg *seg, struct cst_seg_store *store);
/* Was a store answered CST_SEG_E_BUSY, and is room() still to come? */
bool cst_seg_is_awaited(const struct cst_seg *seg);
/* Where a store that has begun will be, for its children's. */
static inline struct cst_seg_ref cst_seg_store_ref(const struct cst_seg_store *store) {
    return store->ref;
}

/* Bytes of buffer that a read of the record needs; 0: it is gone. */
uint64_t cst_seg_read_bytes(const struct cst_seg *seg, struct cst_seg_ref ref);

/* Embedded by the user; must not move until done(). */
struct cst_seg_read {
    /* 0: payload points into buffer, payload_bytes are those that were stored. CST_SEG_E_GONE,
     * _OFF, _CORRUPT (gone() is called, too, if it had an owner), negative errno. */
    void (*done)(struct cst_seg_read *read, int status);
    struct cst_seg_ref ref;
    const uint8_t *key; /* 32 bytes, the record's; stable until done() */
    bool keep;          /* an I/O error doesn't end the record: it is read again, or next time */
    void *buffer;       /* aligned to CST_AIO_ALIGN, cst_seg_read_bytes() long */
    const uint8_t *payload;
    uint64_t payload_bytes;
    /* the engine's */
    struct cst_seg *seg;
    struct cst_list link;
    struct cst_aio_op op;
    struct cst_job job;
    uint64_t bytes;
    uint32_t chunk;
    int status;
};

/* done() follows, never before the return. In the order of the calls, as far as the aio goes. */
void cst_seg_read(struct cst_seg *seg, struct cst_seg_read *read);

/* The owner gives the record up; gone() isn't called. destroy: its bytes are overwritten where
 * they are, as soon as may be, and it doesn't come back after a kill. Stale refs are ignored. */
void cst_seg_drop(struct cst_seg *seg, struct cst_seg_ref ref, bool destroy);
/* The record is another one's from now on. */
void cst_seg_set_owner(struct cst_seg *seg, struct cst_seg_ref ref, void *owner);

enum cst_seg_erasure {
    CST_SEG_ERASED,   /* no key for the bytes exists any more */
    CST_SEG_UNLINKED, /* the bytes were given up, but whoever has the root key (or, without
                         encryption, the device) may still read copies of them */
};
/* Drops all records of the namespace, its key, and gives its segments' bytes back; owners aren't
 * told. What is under way ends first. Blocks for the keys file. 0; CST_SEG_E_OFF (read only);
 * negative errno: the records are gone, but a start may find them again. */
int cst_seg_purge(struct cst_seg *seg, const char *namespace_name, enum cst_seg_erasure *how);

/* ---- numbers ---- */

struct cst_seg_stats {
    bool off, read_only, encrypted;
    bool cached;    /* I/O doesn't go past the page cache */
    uint64_t bytes; /* cst_seg_bytes() */
    uint64_t segment_bytes, segments;
    uint64_t segments_retired,
        segments_foreign;           /* not used: a write failed in it; not understood */
    uint64_t records, record_bytes; /* live ones, with all that belongs to them */
    uint64_t stored, stored_bytes;  /* by users */
    uint64_t moved, moved_bytes;    /* re-inserted from evicted segments */
    uint64_t overhead_bytes;        /* written for headers, indexes, spaces */
    uint64_t read, read_bytes;
    uint64_t evicted, corrupt, lost, errors;
    /* recovery */
    uint64_t found, rejected, recover_ns; /* rejected: can't be used */
    uint32_t recover_done, recover_total; /* segments */
    bool recovered_clean;                 /* the last run had stopped cleanly */
};
/* Bytes that the tier may take. */
uint64_t cst_seg_bytes(const struct cst_seg *seg);
/* No reads, no stores any more. */
bool cst_seg_is_off(const struct cst_seg *seg);
/* Does it take stores: is it on, and not only read? */
bool cst_seg_takes(const struct cst_seg *seg);
void cst_seg_stats(const struct cst_seg *seg, struct cst_seg_stats *out);

struct cst_seg_account {
    uint64_t records, record_bytes, segments, segment_bytes;
};
void cst_seg_account(const struct cst_seg *seg, const char *namespace_name,
                     struct cst_seg_account *out);
