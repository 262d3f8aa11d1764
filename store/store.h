/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store: namespaces, spaces, the prefix trie, and the tiers its blocks live in.
 *
 * Loop thread only, except slab memory while a job that was given it runs. Work that touches block
 * bytes (copy, checksum, encode, decode, making slabs) runs as jobs on env.jobs; its result comes
 * back on the loop thread. Nothing here knows of sockets, connections or users: the caller embeds
 * struct cst_fetch and struct cst_put in its own per-client objects and so owns them.
 *
 * Promises
 *   1. A visible block's parent chain is visible: lookups may search a chain by bisection.
 *   2. A fetch pins its block: the location stays valid until cst_fetch_release().
 *   3. Bytes of one space never reach another: slabs belong to one space for their whole life.
 *   4. Every byte is accounted: slabs + index <= options.memory, plus retired slabs that clients
 *      still hold (cst_store_stats: held_bytes).
 *   5. Checksums are checked on every move between tiers; a mismatch removes the block (with its
 *      subtree) and counts, it is never served.
 *   6. An exact space's blocks only ever pass exact presets.
 */
#pragma once

#include "base/clock.h"
#include "base/job.h"
#include "base/layout.h"
#include "base/list.h"
#include "base/random.h"
#include "gpu/gpu.h"
#include "store/seg.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Conditions of store functions; proto/status.h numbers are made from them in the daemon. */
enum {
    CST_STORE_E_NOT_FOUND = 1,
    CST_STORE_E_PENDING,        /* fetch: ready() follows; commit: visible when the parent is */
    CST_STORE_E_PARENT_MISSING, /* no such parent, or it was aborted, lost, erased */
    CST_STORE_E_PRESENT,
    CST_STORE_E_KEY_BUSY, /* another put of this key is open; see busy_ms */
    CST_STORE_E_BUSY,     /* no memory can be freed now */
    CST_STORE_E_LIMIT,    /* index cap, spaces per namespace, pin budget */
    CST_STORE_E_CORRUPT,  /* checksum mismatch; the block is gone */
    CST_STORE_E_POLICY,   /* unknown policy name */
    CST_STORE_E_BAD_SIDE, /* no side data of this space, or not a newer version */
    CST_STORE_E_REFUSED,  /* the directory of the disk tier can't be used */
};

struct cst_store;
struct cst_namespace;
struct cst_space;
struct cst_block;

struct cst_store_options {
    uint64_t memory;        /* bytes: hot and packed slabs and the index */
    uint64_t index;         /* bytes of `memory` that the index may take; 0: a quarter */
    uint64_t slab_bytes;    /* raised to 8 blocks; 0: 64 MiB, but at most a 16th of memory */
    uint64_t max_age_ns;    /* blocks older than this are gone; 0: never */
    uint64_t pin_bytes;     /* pinned bytes per namespace; 0: a quarter of memory */
    uint64_t busy_ns;       /* how long a writer keeps a key for itself; 0: 5 s */
    uint32_t spaces_max;    /* per namespace; 0: 256 */
    const char *policy;     /* of cst_evict_by_name(); NULL: "cost" */
    uint32_t workers;       /* jobs that run at a time: their workspaces count; 0: they don't */
    uint64_t side_bytes;    /* side data of a space; 0: 64 MiB */
    uint64_t learn_wait_ns; /* a lossy space waits so long after a put for more to learn from */
};

struct cst_encode_params;
struct cst_side_data;

struct cst_slab {
    uint32_t id; /* never reused in one daemon run; never 0 */
    bool packed, retired;
    struct cst_mem_slab mem;
    struct cst_space *space;
    uint32_t holders; /* cst_slab_hold() - cst_slab_unhold() */
};

enum cst_event {
    CST_EVENT_STORED = 1,
    CST_EVENT_MOVED,
    CST_EVENT_EVICTED,
    CST_EVENT_ERASED,
    CST_EVENT_DETACHED
};

struct cst_store_env {
    const struct cst_clock *clock;
    uint64_t (*unix_s)(void); /* seconds since 1970, for what outlives a run; NULL: time() */
    struct cst_random *random;
    struct cst_jobs *jobs;
    const struct cst_mem_ops *mem;
    /* The callbacks may be NULL and must not call back into the store, but for unhold() of the
     * slab that retires. The store wants this slab's memory back: every holder is asked to drop it.
     */
    void (*slab_retire)(void *arg, struct cst_slab *slab);
    /* Within the limits, and yet no slab was to be had: a negative errno. What needs one is BUSY.
     */
    void (*slab_failed)(void *arg, int status);
    void (*event)(void *arg, struct cst_space *space, enum cst_event what, const uint8_t key[32],
                  enum cst_tier tier);
    void *arg;
};

int cst_store_new(struct cst_store **out, const struct cst_store_options *options,
                  const struct cst_store_env *env);

/* Open jobs; free() must wait for 0: run the loop, or end with cst_store_busy() == 0. */
size_t cst_store_jobs(const struct cst_store *store);

/* Long jobs end soon, and none is prepared any more: call before waiting for the last ones. */
void cst_store_stop(struct cst_store *store);

/* All fetches released, all puts ended, no jobs. NULL ok, returns NULL. */
struct cst_store *cst_store_free(struct cst_store *store);

/* What blocks of a lossy class are encoded with from now on: the preset and its parameters; NULL
 * (as at the start): the best one that is safe. A block that misses its class's bound gets the next
 * safer one. */
void cst_store_set_preset(struct cst_store *store, enum cst_class klass,
                          const struct cst_encode_params *params);

/* Periodic care, a bounded slice each call: ages, pins, background encoding, scrubbing. Call about
 * every 100 ms, while nothing happens less often; but not while it answers true: then blocks past
 * their age are left, or a checkpoint is being made. */
bool cst_store_tick(struct cst_store *store);

/* ---- the disk tier ---- */

struct cst_disk_options {
    struct cst_seg_options seg;
    struct cst_aio
        *aio; /* the caller's, outlives the store. It kicks it at the end of each turn and
                 reaps it when it is ready; neither inside of the store's callbacks */
    uint64_t read_bytes;  /* buffers of reads */
    uint64_t ahead_bytes; /* under way for cst_space_prefetch() at a time; 0: it does nothing */
    void (*note)(void *arg, const char *sentence); /* for the operator */
    void *note_arg;
};

/* Once, before the first space. 0; CST_STORE_E_REFUSED and one sentence; negative errno. */
int cst_store_disk_open(struct cst_store *store, const struct cst_disk_options *options,
                        char *message, size_t cap);
/* Finds blocks of earlier runs; no other work before done(), which says 0 or a negative errno. */
void cst_store_disk_recover(struct cst_store *store, void (*done)(void *arg, int status),
                            void *arg);
/* A clean stop, no more puts and no more ticks: writes what is not on disk yet, a bounded part each
 * call, if it goes on; call it again when something has ended, and every 100 ms. Returns the blocks
 * that are left, 0: none, or the tier takes no more. */
uint64_t cst_store_drain(struct cst_store *store, bool go_on, uint64_t *total);
/* With cst_store_jobs() == 0: what is on disk stays there when the store ends. Blocks. 0 or a
 * negative errno: the next start has to look closer. */
int cst_store_disk_close(struct cst_store *store);
/* False: there is no disk tier. */
bool cst_store_disk_stats(const struct cst_store *store, struct cst_seg_stats *out);

/* ---- namespaces and spaces ---- */

/* Finds or makes. Namespaces live until cst_store_free(). */
int cst_namespace_get(struct cst_store *store, const char *name, struct cst_namespace **out);
const char *cst_namespace_name(const struct cst_namespace *ns);

/* Finds the space (namespace, fingerprint, kind, class) or makes it; takes a reference. On success
 * *desc is taken (set to NULL; freed by desc_free when not needed). CST_STORE_E_LIMIT, _BUSY;
 * -ENOMEM. */
int cst_space_open(struct cst_space **out, struct cst_namespace *ns, struct cst_descriptor **desc,
                   struct cst_descriptor *(*desc_free)(struct cst_descriptor *),
                   const uint8_t fingerprint[32], enum cst_kind kind, enum cst_class klass);
struct cst_space *cst_space_ref(struct cst_space *space);
/* An empty space without references is freed. Returns NULL; NULL ok. */
struct cst_space *cst_space_unref(struct cst_space *space);

struct cst_namespace *cst_space_namespace(const struct cst_space *space);
const struct cst_descriptor *cst_space_descriptor(const struct cst_space *space);
const uint8_t *cst_space_fingerprint(const struct cst_space *space);
enum cst_kind cst_space_kind(const struct cst_space *space);
enum cst_class cst_space_class(const struct cst_space *space);
uint32_t cst_space_presets(const struct cst_space *space); /* bit per preset it may use */

/* Every space (ns NULL) or those of one namespace, in creation order. */
void cst_store_for_each_space(struct cst_store *store, struct cst_namespace *ns,
                              void (*fn)(struct cst_space *space, void *arg), void *arg);

/* ---- lookup: no side effect but counters ---- */

struct cst_lookup {
    size_t present; /* leading run */
    uint32_t partial_tokens, partial_stored;
    enum cst_tier partial_tier;
    uint8_t partial_key[32];
    uint64_t cost_ns;
    enum cst_tier worst_tier; /* of the leading run; without tiers: of all stored blocks */
};

/*
 * keys: n x 32 bytes of one chain. tiers NULL or n bytes, filled for the leading run. With tail
 * (tail_len ids > 0) and a run of n, the children of the last key (n = 0: of `parent`, which may be
 * a root key) are matched against it; a shorter run matches nothing, since the tail follows the
 * last key. O(log n) probes unless tiers are asked for.
 */
void cst_space_lookup(struct cst_space *space, const uint8_t *keys, size_t n, const uint8_t *parent,
                      const uint32_t *tail, uint32_t tail_len, uint8_t *tiers,
                      struct cst_lookup *out);

/* Begins to read from disk those of n blocks of a chain that are only there, in order, so that the
 * fetch that follows finds them in memory: as many as may be under way, behind all fetches, and
 * only into memory that nobody uses. Ends before the first key that isn't present. */
void cst_space_prefetch(struct cst_space *space, const uint8_t *keys, size_t n);

/* Whether a block is stored and visible. No counter moves. */
bool cst_space_has(const struct cst_space *space, const uint8_t key[32]);

/* tiers[i] = CST_TIER_NONE for an absent key. Returns how many are present. */
size_t cst_space_lookup_each(struct cst_space *space, const uint8_t *keys, size_t n,
                             uint8_t *tiers);

/* ---- reading ---- */

enum cst_fetch_mode { CST_FETCH_DECODED = 0, CST_FETCH_PACKED = 1 };

struct cst_location {
    struct cst_slab *slab;
    uint64_t offset, length;
    uint32_t crc32c; /* of these bytes */
    uint32_t tokens;
    enum cst_tier tier; /* where the bytes were found */
    uint8_t preset;     /* packed: the frame's preset */
    bool packed;        /* the bytes are a frame. Mode packed may answer decoded bytes when no frame
                           exists yet */
};

/* Embedded in the caller's lease; must not move or die before cst_fetch_release(). */
struct cst_fetch {
    /* the caller's: called once on the loop thread after start returned CST_STORE_E_PENDING, with 0
     * (loc valid), CST_STORE_E_NOT_FOUND, _CORRUPT, _BUSY or a negative errno; may release. */
    void (*ready)(struct cst_fetch *fetch, int status);
    struct cst_location loc; /* valid after 0 */
    /* the store's */
    struct cst_list link;
    struct cst_block *block;
    int status;
    uint8_t mode, state;
};
#define CST_FETCH_NULL(cb) ((struct cst_fetch){ .ready = (cb) })

/* 0: pinned and loc filled, counted as a hit; CST_STORE_E_PENDING; CST_STORE_E_NOT_FOUND; _BUSY. */
int cst_fetch_start(struct cst_space *space, const uint8_t key[32], enum cst_fetch_mode mode,
                    struct cst_fetch *fetch);
/* Unpins, or cancels a pending fetch (ready() is then not called). Safe on a fetch that never
 * started and twice. */
void cst_fetch_release(struct cst_fetch *fetch);

/* ---- writing ---- */

/* Embedded in the caller's slot; must not move or die while open. */
struct cst_put {
    /* the caller's: the end of cst_put_commit(), loop thread, exactly once, with 0,
     * CST_STORE_E_PENDING, _PARENT_MISSING, _PRESENT, _BUSY or a negative errno (-ECANCELED: it was
     * aborted). The put is closed and the source bytes are no longer read when it is called. */
    void (*done)(struct cst_put *put, int status);
    /* the store's */
    struct cst_list link;  /* of its block's puts */
    struct cst_list queue; /* waiting for a slot, or finished and not yet told */
    struct cst_space *space;
    struct cst_block *block; /* NULL: the block is gone */
    struct cst_job job;
    const void *source;
    struct cst_slab *slab;
    uint32_t slot, crc;
    int status;
    uint8_t state;
    bool aborted;
};
#define CST_PUT_NULL(cb) ((struct cst_put){ .done = (cb) })

/*
 * Opens a put of `key` under `parent`. is_root: parent is a root key (made by the caller from the
 * fingerprint and a salt). The parent may itself still be an open put (of anybody): the block
 * becomes visible after it. While a put is open its ancestors can't be evicted. The caller has
 * checked that key = hash(parent, tokens) in token spaces. Flat spaces: parent NULL, no tokens.
 * 0 and an open put; CST_STORE_E_PRESENT, _KEY_BUSY (*busy_ms filled), _PARENT_MISSING, _BUSY,
 * _LIMIT; -ENOMEM.
 */
int cst_put_begin(struct cst_space *space, const uint8_t *parent, bool is_root,
                  const uint8_t key[32], const uint32_t *tokens, uint32_t n_tokens,
                  struct cst_put *put, uint32_t *busy_ms);

/* Copies block_bytes from source (stable until done()) into a hot slot, publishes. surprisals: f16
 * bits for each token, copied, or NULL. done() is always called later, from the loop. */
void cst_put_commit(struct cst_put *put, const void *source, const uint16_t *surprisals);

/* Closes an open put. After commit: the block is dropped if it isn't published yet, and done() is
 * still called. Safe on a put that never opened and twice. */
void cst_put_abort(struct cst_put *put);
bool cst_put_is_open(const struct cst_put *put);

/* ---- care ---- */

int cst_space_touch(struct cst_space *space, const uint8_t key[32]);
/* ttl_ns 0: until unpinned. Charged to the namespace's pin budget with all ancestors, which stay
 * too.
 */
int cst_space_pin(struct cst_space *space, const uint8_t key[32], uint64_t ttl_ns);
int cst_space_unpin(struct cst_space *space, const uint8_t key[32]);
/* With the whole subtree. Leased bytes stay readable until released, but are not found any more. */
int cst_space_erase(struct cst_space *space, const uint8_t key[32], uint64_t *n_erased);
uint64_t cst_space_clear(struct cst_space *space);
enum cst_purge {
    CST_PURGE_ERASED,
    CST_PURGE_UNLINKED, /* bytes on disk may still be read by somebody who has the keys */
    CST_PURGE_FAILED,   /* the disk can't be written: a start may find what lies there again */
};
uint64_t cst_namespace_purge(struct cst_namespace *ns, enum cst_purge *result);

/* Writes one sentence why keys (and the tail) miss in this space. root: whose child the first key
 * is; without keys the tail is looked for below it. field: first descriptor field in
 * which the nearest space of the same namespace differs ("" if none); nearest: its fingerprint. */
struct cst_explanation {
    size_t present, nearest_present;
    char reason[256];
    char field[64];
    uint8_t nearest[32];
    bool has_nearest;
};
void cst_space_explain(struct cst_space *space, const uint8_t root[32], const uint8_t *keys,
                       size_t n, const uint32_t *tail, uint32_t tail_len,
                       struct cst_explanation *out);

/* ---- slabs, for passing to clients ---- */

struct cst_slab *cst_store_slab(struct cst_store *store, uint32_t id); /* NULL: unknown or gone */
void cst_slab_hold(struct cst_slab *slab);
/* May free the slab. */
void cst_slab_unhold(struct cst_slab *slab);

/* ---- side data: versions of learned tables that frames of a space refer to ---- */

enum { CST_SIDES_MAX = 16 }; /* listed */

struct cst_side_info {
    uint32_t version;
    uint64_t size;
    uint8_t hash[32]; /* SHA-256 of the bytes */
};

/* Newest first; returns how many. */
size_t cst_space_sides(const struct cst_space *space, struct cst_side_info *out, size_t max);

/* The bytes of a version (0: the newest one), valid until the next call of anything else; NULL if
 * there is none. */
const uint8_t *cst_space_side_bytes(const struct cst_space *space, uint32_t version,
                                    struct cst_side_info *info);

enum cst_side_put_kind {
    CST_SIDE_PUT_TABLES = 0,  /* bytes as codec/side.h takes them, of a version above the newest */
    CST_SIDE_PUT_WEIGHTS = 1, /* the newest version with other weights of steps: f32, one a layer
                                 for K, then one a layer for V */
};

/* Embedded in the caller's; must not move or die before done(). */
struct cst_side_put {
    /* the caller's: called once, later, on the loop: 0; CST_STORE_E_BAD_SIDE; a negative errno. The
     * bytes are no longer read then. May call anything. */
    void (*done)(struct cst_side_put *put, int status);
    uint32_t version; /* after 0 */
    /* the store's */
    struct cst_job job;
    struct cst_space *space;
    struct cst_side_data *made, *base;
    const uint8_t *bytes;
    size_t size;
    int result;
    uint8_t kind;
};

/* A new version from bytes that nobody trusts, for the frames that are made from now on. The same
 * bytes as those of the newest version are no new one. 0: done() follows; CST_STORE_E_NOT_FOUND:
 * there are no tables to weigh; CST_STORE_E_BAD_SIDE; CST_STORE_E_LIMIT: more than
 * options.side_bytes; CST_STORE_E_BUSY; -ENOMEM. */
int cst_space_side_put(struct cst_space *space, enum cst_side_put_kind kind, const uint8_t *bytes,
                       size_t size, struct cst_side_put *put);

/* ---- numbers ---- */

struct cst_space_stats {
    uint64_t blocks, tail_blocks, hot_bytes, packed_bytes, packed_decoded_bytes, index_bytes;
    uint64_t hot_slab_bytes, packed_slab_bytes, held_bytes;
    uint64_t lookups, lookup_keys, hit_keys, acquires, served_blocks, served_bytes, served_tokens;
    uint64_t stored_blocks, stored_bytes, evicted_blocks, detached_blocks, corrupt_blocks;
    uint64_t expired_blocks, decodes, encodes, merged_fetches, busy, leases, reserved;
    uint64_t pinned_blocks;
    /* on disk; read from there; whose memory was taken since they are on disk */
    uint64_t cold_blocks, cold_bytes, spilled_blocks, spilled_bytes, cold_reads, cooled_blocks;
    uint64_t recovered_blocks;
    uint64_t prefetched_blocks, prefetch_used; /* read for a Lookup; fetched then */
    uint64_t fallbacks; /* encodes whose wanted preset missed the class's bound */
    uint64_t recodes;   /* frames made smaller while cold */
    uint64_t side_bytes, sides_learned;
    uint64_t
        sides_off_disk; /* versions that the disk tier has no place for, nor for their frames */
};
void cst_space_stats(const struct cst_space *space, struct cst_space_stats *out);
void cst_namespace_stats(const struct cst_namespace *ns, struct cst_space_stats *out);

struct cst_store_stats {
    uint64_t memory_limit, memory_used, index_limit, index_used, held_bytes, slabs, spaces;
    uint64_t leases, reserved;
    const char *policy;
};
void cst_store_stats(const struct cst_store *store, struct cst_store_stats *out);

struct cst_block_info {
    uint8_t key[32], parent[32];
    uint64_t packed_bytes;
    uint32_t tokens, depth;
    enum cst_tier tier;
    uint8_t preset;
    uint16_t leases;
    float error;
    float surprisal; /* bits, sum over the block's tokens; < 0 unknown */
};
/* Up to max blocks in creation order after cursor (0 = start); returns the count, *next = 0 at the
 * end. Safe while blocks come and go: a block is seen at most once. */
size_t cst_space_blocks(struct cst_space *space, uint64_t cursor, struct cst_block_info *out,
                        size_t max, uint64_t *next);
