/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A block: a node of the trie, and where its bytes are.
 *
 * Life: open (puts, no bytes) -> stored (bytes, hidden until the parent is visible) -> visible ->
 * dead (out of the trie; freed when the last lease and job are gone). Roots are nodes without bytes
 * that exist while they have children. A block has up to three copies: hot and packed ones in
 * memory, a cold one on disk; one at rest is on disk only, and nobody asks for it or for anything
 * below it.
 */
#pragma once

#include "base/hashmap.h"
#include "store/evict.h"
#include "store/seg.h"
#include "store/slab.h"
#include "store/store.h"
#include "store/treap.h"

struct cst_decode;
struct cst_side_data;
struct cst_cold_read;
struct cst_cold_spill;

struct cst_copy {
    struct cst_slab_slots *slab; /* NULL: no copy in this tier */
    uint32_t slot;
    uint32_t length; /* bytes used */
    uint32_t crc;    /* CRC32C of them */
    uint32_t leases;
    uint32_t busy; /* jobs that read it */
};

enum cst_filed { CST_FILED_NOT, CST_FILED_CLEAN, CST_FILED_DIRTY, CST_FILED_COLD };

/* In the order of use: a lookup touches the first cache line of a node, a fetch the first three. */
struct cst_block {
    struct cst_hnode by_key;
    uint8_t key[CST_KEY_SIZE];
    bool root, stored, visible, dead;
    bool superseded; /* a longer block has its tokens: goes when idle */
    bool encoding;
    bool unpackable; /* doesn't shrink: stays as it is */
    bool recoded;    /* its frame was tried to be made smaller */
    bool has_surprisals;
    bool counted_warm;   /* in parent->n_warm: not at rest */
    bool prefetched;     /* in memory because of a Lookup, not fetched since */
    bool unspillable;    /* too big for the disk tier */
    uint8_t spill_fails; /* writes to disk that failed since it was used */
    bool written;        /* to disk, and not used since */
    uint8_t preset;      /* of the packed copy */
    uint8_t filed;       /* enum cst_filed */
    uint32_t n_children; /* hidden ones too */
    uint32_t n_warm;     /* of these, those that are not at rest */

    struct cst_space *space;
    struct cst_copy hot;
    uint64_t born_ns;
    struct cst_evict_entry evict; /* in while the block may be evicted; order: of store->uses */
    struct cst_list file;         /* the space's clean, dirty or cold blocks; dead: space->dead */
    struct cst_list puts;         /* open puts of this key */
    struct cst_list waiters;      /* fetches that wait for the decode */
    uint32_t pins;                /* its own pin + children with pins */
    uint32_t holds;               /* a function on the stack needs it */
    struct cst_copy packed;
    struct cst_decode *decode;       /* under way */
    uint32_t crc;                    /* CRC32C of the bytes that were committed */
    float error;                     /* of the packed copy */
    struct cst_side_data *side;      /* that the packed copy needs, a reference; NULL: none */
    struct cst_seg_ref cold;         /* the record on disk; none: CST_SEG_REF_NONE */
    struct cst_cold_read *read;      /* under way */
    struct cst_cold_spill *spill;    /* under way */
    struct cst_side_data *cold_side; /* that the record needs, a reference; NULL: none */
    uint32_t cold_bytes;             /* of the record's payload */
    uint16_t hits;
    uint8_t cold_preset; /* of the record; CST_PRESET_NONE: it holds the block's own bytes */

    struct cst_block *parent;      /* NULL: a root, or of a flat space */
    struct cst_treap_node by_age;  /* space->by_age, all blocks but roots */
    struct cst_treap_node sibling; /* visible: parent->children */
    struct cst_list hidden_link;   /* else: parent->hidden */
    struct cst_treap children;     /* visible, by tokens */
    struct cst_list hidden;        /* children that are not visible yet */
    struct cst_list pin_link;      /* namespace->pinned */
    uint64_t pinned_until;         /* of a pin of its own; 0: none */
    uint64_t seq;                  /* creation order in the space, from 1 */
    uint64_t busy_ns;              /* the youngest put's writer has the key for itself until then */
    float surprisal;               /* bits; < 0: unknown */
    uint32_t n_tokens, depth;
    uint32_t tokens[]; /* n_tokens ids, then n_tokens f16 surprisals */
};

/* Heap bytes of a node. */
size_t cst_block_bytes(uint32_t n_tokens);

static inline bool cst_block_is_leased(const struct cst_block *b) {
    return b->hot.leases || b->packed.leases;
}

static inline bool cst_block_is_busy(const struct cst_block *b) {
    return b->hot.busy || b->packed.busy || b->decode || b->encoding || b->read || b->spill;
}

static inline bool cst_block_is_cold(const struct cst_block *b) {
    return !cst_seg_ref_is_none(b->cold);
}

static inline bool cst_block_in_memory(const struct cst_block *b) {
    return b->hot.slab || b->packed.slab;
}

/* Its hot copy holds the bytes that were committed, not what a lossy frame gave back. */
static inline bool cst_block_is_original(const struct cst_block *b) {
    return b->hot.slab && b->hot.crc == b->crc;
}

static inline enum cst_tier cst_block_tier(const struct cst_block *b) {
    if (cst_block_in_memory(b))
        return b->hot.slab ? CST_TIER_HOT : CST_TIER_PACKED;
    return cst_block_is_cold(b) ? CST_TIER_COLD : CST_TIER_NONE;
}

/* The surprisals' place in the node: n_tokens f16 values. */
uint16_t *cst_block_surprisals(struct cst_block *b);

/* The block has bytes now. */
void cst_block_born(struct cst_block *b);

/* Of n_tokens tokens; anything that isn't a number of bits makes the whole block's unknown. */
void cst_block_set_surprisals(struct cst_block *b, const uint16_t *surprisals);

/* Marks a use now. */
void cst_block_use(struct cst_block *b);

/* After any change of what keeps a block from being evicted: joins or leaves the policy and the
 * lists of copies. A superseded block that is idle is removed: don't use it afterwards. */
void cst_block_settle(struct cst_block *b, enum cst_evict_how how);

/* May its memory be taken: stored, all below it at rest, unleased, unpinned, nobody waiting. */
bool cst_block_is_idle(const struct cst_block *b);

/* Could the whole subtree be dropped? Gives up (false) after *budget nodes. */
bool cst_block_subtree_idle(const struct cst_block *b, unsigned *budget);

enum cst_gone {
    CST_GONE_EVICTED,
    CST_GONE_ERASED,
    CST_GONE_EXPIRED,
    CST_GONE_CORRUPT,
    CST_GONE_DETACHED, /* with an ancestor */
    CST_GONE_ABORTED,  /* never had bytes */
};

/*
 * Removes the block and everything below it, leaves first: puts end with PARENT_MISSING when they
 * commit, waiting fetches with NOT_FOUND (_CORRUPT), bytes stay while leased or busy. The block
 * itself is counted as `why`, what hangs below as detached. Returns how many blocks with bytes
 * went.
 */
uint64_t cst_block_remove(struct cst_block *b, enum cst_gone why);

/* Takes the memory of an idle block: with a record on disk it stays in the trie, else it is removed
 * with all below it. Copies that jobs read stay. */
void cst_block_evict(struct cst_block *b);

/* Frees a dead block that nothing uses any more. */
void cst_block_reap(struct cst_block *b);

/* Gives a copy's slot back. The caller settles the block. */
void cst_block_drop_hot(struct cst_block *b);
void cst_block_drop_packed(struct cst_block *b);

/* The slot (slab, slot) becomes the block's copy. */
void cst_copy_set(struct cst_copy *copy, struct cst_block *b, struct cst_slab_slots *slab,
                  uint32_t slot, uint32_t length, uint32_t crc);

/* A job reads the copy from now on, until cst_copy_unpin(). */
void cst_copy_pin(struct cst_copy *copy);
void cst_copy_unpin(struct cst_copy *copy);

/* The block has its bytes: makes it visible if its parent is, and then what waited below it.
 * Returns 0 or CST_STORE_E_PENDING. */
int cst_block_publish(struct cst_block *b);
