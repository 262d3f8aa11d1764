/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of store/ share: the store, namespaces, spaces. Loop thread only. */
#pragma once

#include "base/pool.h"
#include "codec/codec.h"
#include "store/block.h"
#include "store/side_data.h"
#include "store/side_learn.h"

enum {
    CST_ENCODES_MAX = 2,             /* at a time */
    CST_ENCODE_FREE = 12 << 20,      /* heap of an encode that no memory limit counts */
    CST_WORK_MAX = 16 << 20,         /* workspace without loss; layouts that need more stay hot */
    CST_DENSE_MAX = 64 << 20,        /* of any preset; one that needs more is passed over */
    CST_ENCODES_MAX_BLOCK = 8 << 20, /* larger blocks: one at a time */
    CST_VICTIMS_SCANNED = 64,        /* a few victims may be busy: how far to look */
};

struct cst_scrub {
    struct cst_job job;
    struct cst_block *block; /* NULL: none under way */
    struct cst_copy *copy;
    const uint8_t *data;
    uint32_t length, crc;
    uint32_t slab, slot; /* where the next one starts */
};

struct cst_nodes_ahead {
    struct cst_job job;
    void *memory;   /* that it has made */
    bool busy;      /* it is under way */
    uint64_t bytes; /* of nodes that are to come */
};

struct cst_store {
    struct cst_store_options options;
    struct cst_store_env env;
    const struct cst_evict_ops *policy;
    uint64_t seed[4];
    struct cst_list namespaces, spaces; /* in creation order */
    struct cst_list slabs;              /* with memory, the least recently used first */
    struct cst_list retired;            /* only holders keep them */
    struct cst_list empty;              /* of `slabs`, those without used slots */
    struct cst_hashmap slab_map;
    struct cst_pool nodes;        /* of all tries */
    struct cst_nodes_ahead ahead; /* nodes.c */
    uint32_t last_slab;
    uint64_t slab_bytes, index_bytes, held_bytes; /* slab_bytes: also those being made */
    uint64_t encode_bytes;                        /* heap of large encodes under way */
    uint64_t side_bytes;                          /* side data */
    uint64_t work_bytes; /* workspaces of jobs, as many as there are workers */
    uint64_t uses;
    uint32_t now_s; /* of the clock, at the last tick */
    uint64_t leases, reserved;
    size_t jobs, encodes;
    struct cst_list showing;       /* blocks about to become visible, in one call */
    struct cst_list dirty_spaces;  /* with copies to encode, next first */
    struct cst_list finished_puts; /* to be told by cst_store_leave() */
    struct cst_list finished_fetches;
    struct cst_job kick; /* tells them when no job of ours is about to end */
    bool kicking;
    bool draining; /* a clean stop: all goes to disk as it is */
    unsigned entered;
    uint64_t slabs_after_ns; /* making slabs failed: not again before */
    struct cst_scrub scrub;
    struct cst_learning *learning; /* side_learn.c; NULL: none */
    uint32_t learn_turn;           /* of the space that the next slice starts with */
    struct cst_cold *cold;         /* cold.c; NULL: no disk tier */
    struct cst_encode_params presets[CST_CLASSES]; /* of lossy ones */
    bool preset_is_set[CST_CLASSES];               /* false: the best one */
};

struct cst_namespace {
    struct cst_store *store;
    struct cst_list link;
    struct cst_list pinned; /* the one to look at next first */
    uint64_t pinned_bytes;
    size_t disk_ops; /* reads and writes of its blocks under way */
    bool purging;    /* the disk's part of a purge is still to come */
    uint32_t n_spaces;
    struct cst_space_stats past; /* counters of spaces that are gone */
    char name[];
};

struct cst_space {
    struct cst_store *store;
    struct cst_namespace *ns;
    struct cst_list link; /* store->spaces */
    struct cst_descriptor *desc;
    struct cst_descriptor *(*desc_free)(struct cst_descriptor *);
    uint8_t fingerprint[32];
    enum cst_kind kind;
    enum cst_class klass;
    uint32_t refs;
    size_t n_jobs, n_slabs, n_hot_slabs, n_dead; /* n_slabs: retired and unmade ones too */
    struct cst_hashmap map, roots;
    struct cst_treap by_age;
    struct cst_treap_node *newest; /* the last one of by_age; NULL: none */
    uint64_t last_seq; /* of the space alone: cursors tell nothing of other namespaces */
    struct cst_evict evict;
    uint64_t evict_bytes;         /* of evict, as last accounted */
    struct cst_list clean, dirty; /* hot copies with, without another one */
    struct cst_list cold;         /* leaves at rest, the one that went to rest first first */
    struct cst_list dirty_link;   /* store->dirty_spaces */
    struct cst_list dead;
    struct cst_list hot_free; /* slabs with free slots */
    struct cst_list packed_free[CST_PACKED_CLASSES];
    struct cst_list wait_decodes, wait_puts, wait_encodes; /* for a slot */
    struct cst_list wait_keeps;                            /* the same: cold_ahead.c */
    bool making_hot, making_packed;
    size_t encodes;
    uint64_t work_bytes;       /* workspace of the largest preset that its frames may have */
    uint64_t encode_bytes;     /* of memory that an encode takes; UINT64_MAX: never encoded */
    uint32_t packed_class;     /* size class of the last frame */
    uint64_t encode_failed_ns; /* when packing found no room or memory */
    unsigned encode_fails;     /* in a row */
    uint64_t hot_copies, packed_copies, in_memory;
    struct cst_seg_space *disk; /* the space on disk; NULL: not asked for yet */
    struct cst_list disk_link;  /* cold->waiting */
    size_t spills;              /* writes under way */
    uint64_t drained;           /* seq up to which a clean stop has looked */
    uint64_t decode_ns;         /* moving average of a decode */
    uint64_t used;
    struct cst_list sides;                /* side_data.c */
    struct cst_list sides_found;          /* side_disk.c */
    uint32_t last_side;                   /* version */
    uint64_t side_epoch;                  /* purges */
    bool cannot_learn;                    /* side_learn.c */
    uint32_t learn_tokens;                /* that the last version was learned from */
    uint64_t learn_after_ns, last_put_ns; /* not before; the last block that came */
    struct cst_learn_count learn_count;
    struct cst_drift drift;
    struct cst_space_stats stats; /* *_bytes of copies are filled when asked for */
};

static inline uint64_t cst_store_now(const struct cst_store *store) {
    return cst_now_ns(store->env.clock);
}

static inline bool cst_preset_is_exact(uint32_t preset) {
    return preset == CST_PRESET_RAW || preset == CST_PRESET_LOSSLESS;
}

/* What the configuration wants for a class; NULL: the best one. */
static inline const struct cst_encode_params *cst_store_preset(const struct cst_store *store,
                                                               enum cst_class klass) {
    return store->preset_is_set[klass] ? &store->presets[klass] : NULL;
}

/* Bytes of a hot slot. */
static inline uint64_t cst_space_slot_bytes(const struct cst_space *space) {
    return cst_align_up(space->desc->block_bytes, CST_SLOT_ALIGN);
}

/* A last block with fewer tokens. */
static inline bool cst_block_is_tail(const struct cst_block *b) {
    return b->space->kind == CST_KIND_TOKENS && b->n_tokens < b->space->desc->block_tokens;
}

/* Index bytes of the space changed by delta. */
void cst_space_index_add(struct cst_space *space, int64_t delta);

/* cst_hashmap_insert(), accounted: to the space. */
int cst_map_insert(struct cst_space *space, struct cst_hashmap *map, struct cst_hnode *node,
                   uint64_t hash);

/* Accounts for ghosts that came or went. */
void cst_space_index_ghosts(struct cst_space *space);

/* Frees the space if nothing refers to it and it is empty. */
void cst_space_reap(struct cst_space *space);
/* It is empty. */
void cst_space_free(struct cst_space *space);
/* Counts the workspaces that jobs may have at a time: after a space came or went, or its presets
 * changed. */
void cst_space_count_work(struct cst_store *store);
/* Every block, stored or not. Returns how many had bytes. */
uint64_t cst_space_remove_all(struct cst_space *space, enum cst_gone why);

/*
 * Jobs are submitted through here, so that they are counted. A done() handler runs between enter()
 * and leave(): finished puts and fetches are told by leave(), when nothing of ours is half done any
 * more; leave() ends the job and may free the space.
 */
void cst_store_submit(struct cst_space *space, struct cst_job *job, enum cst_job_priority priority);
void cst_store_enter(struct cst_space *space);
void cst_store_leave(struct cst_space *space);
/* Something is in store->finished_*: it is told soon, never on this stack. */
void cst_store_finish(struct cst_store *store);
/* An empty job: the way back to the loop with a clean stack, where finished_* are told and spaces
 * that wait for the disk are served. */
void cst_store_kick(struct cst_store *store);

void cst_store_event(struct cst_space *space, enum cst_event what, const struct cst_block *b,
                     enum cst_tier tier);

/* Is the block past max_age? */
bool cst_block_is_expired(const struct cst_block *b);
/* Ends the block's own pin. */
void cst_block_unpin(struct cst_block *b);
/* What cst_store_tick() does for ages and pins. True: more blocks have expired. */
bool cst_care_slice(struct cst_store *store);

/* How many leading keys of the chain are present. */
size_t cst_lookup_run(const struct cst_space *space, const uint8_t *keys, size_t n);

/* ---- fetch.c and put.c ---- */

/* Tells the fetch's owner soon. With 0 the fetch already has its lease. */
void cst_fetch_finish(struct cst_fetch *fetch, int status);
/* Leases the hot (or packed) copy and fills loc. */
void cst_fetch_lease(struct cst_fetch *fetch, struct cst_block *b, bool packed);
void cst_fetch_tell(struct cst_fetch *fetch);
/* The put's block goes away. */
void cst_put_orphan(struct cst_put *put);
/* A put that waited gets its slot, or not. */
void cst_put_start(struct cst_put *put, struct cst_slab_slots *slab, uint32_t slot);
void cst_put_finish(struct cst_put *put, int status);
void cst_put_tell(struct cst_put *put);

/* ---- room.c: where slots and index bytes come from ---- */

enum { CST_ROOM_WAIT = 1, CST_ROOM_FULL, CST_ROOM_REFUSED };

/* 0 and a slot; CST_ROOM_WAIT: queue up, the space is served when something comes free;
 * CST_ROOM_FULL. May evict any idle block. */
int cst_room_hot(struct cst_space *space, struct cst_slab_slots **slab, uint32_t *slot);
/* used: when the block that is packed was used last: nothing younger is evicted for it. refused:
 * the disk doesn't take its frame, so no packed block is kept that may go there later. */
int cst_room_packed(struct cst_space *space, uint64_t bytes, uint64_t used, bool refused,
                    struct cst_slab_slots **slab, uint32_t *slot);
/* Evicts nothing. */
int cst_room_packed_free(struct cst_space *space, uint64_t bytes, struct cst_slab_slots **slab,
                         uint32_t *slot);
int cst_room_hot_free(struct cst_space *space, struct cst_slab_slots **slab, uint32_t *slot);
/* Is there memory for so many bytes, without taking any from others? */
bool cst_room_has(const struct cst_store *store, uint64_t bytes);
/* Is it worth encoding a block now? */
bool cst_room_packed_is_likely(const struct cst_space *space);
/* So many bytes more: 0, CST_STORE_E_LIMIT (the index cap) or CST_STORE_E_BUSY (memory). May evict
 * any idle block. */
int cst_room_index(struct cst_space *space, size_t bytes);
/* So many bytes of heap more: 0 or CST_STORE_E_BUSY. May evict any idle block. */
int cst_room_heap(struct cst_space *space, uint64_t bytes);
/* Bytes that the index may take without asking. */
uint64_t cst_room_left(const struct cst_store *store);
/* Something came free: gives slots to what waits in the space, or tells it that there are none. */
void cst_room_serve(struct cst_space *space);
/* Gives back every empty slab of the space. */
void cst_room_give_back(struct cst_space *space);

/* So many bytes of nodes are about to come, as far as known: their memory is made meanwhile. 0: no
 * more than others. */
void cst_nodes_ahead(struct cst_store *store, uint64_t bytes);

/* ---- decode.c, encode.c, scrub.c: moves between tiers ---- */

/* Starts a decode into a hot slot for the waiters of b. 0 or -ENOMEM. */
int cst_decode_start(struct cst_block *b);
/* A waiting decode, the first one; it gets its slot, or not. */
struct cst_decode *cst_decode_waiting(struct cst_space *space);
void cst_decode_run(struct cst_decode *d, struct cst_slab_slots *slab, uint32_t slot);
void cst_decode_refuse(struct cst_decode *d, int status);
/* The block goes away, or nobody waits any more: forgets a decode that has not begun. */
void cst_decode_orphan(struct cst_block *b);

/* Starts encoding if there is something to encode and a place among the CST_ENCODES_MAX. True: an
 * encode of the space is under way. */
bool cst_encode_kick(struct cst_space *space);
/* The next frame to make smaller (recode.c), and the presets to try. */
struct cst_choices;
struct cst_block *cst_recode_next(struct cst_store *store);
void cst_recode_choices(struct cst_choices *out, const struct cst_block *b,
                        const struct cst_side *side);
/* Starts making a frame smaller if memory is short. */
void cst_recode_slice(struct cst_store *store);
/* The same for whatever spaces are next. */
void cst_encode_kick_all(struct cst_store *store);
/* Gives slots to encoded blocks that wait. */
void cst_encode_serve(struct cst_space *space);

/* The frame of a cold block has arrived: decodes it for the waiters, then gives the read's buffer
 * back. 0 or -ENOMEM; the buffer stays the caller's then. */
int cst_decode_start_cold(struct cst_block *b, struct cst_cold_read *read, const uint8_t *frame,
                          size_t length);

/* ---- cold.c: the disk tier ---- */

enum { CST_PRESET_NONE = 255 }; /* of a record that holds a block's own bytes, no frame */

/* Reads the block from disk for its waiters. 0 or a condition of fetches. */
int cst_cold_fetch(struct cst_block *b);
/* The time that reading so many bytes will take. */
uint64_t cst_cold_cost(const struct cst_store *store, uint64_t bytes);
void cst_cold_read_end(struct cst_cold_read *read);
/* A fetch joins the read of its block. 0 or -ENOMEM. */
int cst_cold_hurry(struct cst_block *b);
/* Gives slots to what was read ahead. */
void cst_cold_keep_serve(struct cst_space *space);
/* The block leaves the trie, or what is on disk is not its bytes: the record goes. */
void cst_cold_drop(struct cst_block *b, bool destroy);
/* Records of the space that wait for the next start are overwritten. */
void cst_cold_drop_kept(struct cst_space *space);
/* Is there a disk tier that takes blocks? */
bool cst_cold_takes(const struct cst_store *store);
/* Is the block on its way to disk, or can that begin now, or when another write of the space has
 * ended? */
bool cst_cold_spill(struct cst_block *b);
/* A frame that memory has no room for. */
struct cst_frame {
    uint8_t *data; /* heap */
    size_t length;
    uint32_t crc;
    uint8_t preset;
    float error;
    struct cst_side_data *side; /* that it needs; NULL: none */
};
/* 0: it is on its way to disk, and data taken; CST_ROOM_WAIT: after another write of the space has
 * ended, or when the engine has room (cst_cold_serve()); CST_ROOM_FULL: not now;
 * CST_ROOM_REFUSED: the engine takes none like it. */
int cst_cold_spill_frame(struct cst_block *b, const struct cst_frame *frame);
/* Would it go to disk if it, or one above it, were packed? */
bool cst_cold_wants_frame(struct cst_block *b);
/* Writes what would be evicted next, if memory is short. */
void cst_cold_slice(struct cst_store *store);
/* Serves the spaces that wait for the engine. */
void cst_cold_serve(struct cst_store *store);
/* The space's place on disk; blocks for a new namespace's key. 0 or a negative errno. */
int cst_cold_open_space(struct cst_space *space);
/* A space ends. */
void cst_cold_forget_space(struct cst_space *space);
/* What is on disk of a namespace, after its blocks are gone. */
enum cst_purge cst_cold_purge(struct cst_namespace *ns);
void cst_cold_purge_slice(struct cst_store *store);
void cst_cold_free(struct cst_store *store);

/* Starts checking the next copy, if no check is under way. */
void cst_scrub_slice(struct cst_store *store);
