/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns puts: from begin to the moment done() is called.
 *
 *   begin -> OPEN --commit--> WAITING (for a slot) -> COPYING (job) -> FINISHED -> told, CLOSED
 *
 * Invariants
 *   1. An open, waiting or copying put is in its block's puts, unless the block is gone: then
 *      put->block is NULL and the put ends with PARENT_MISSING when it commits.
 *   2. A block without bytes has at least one such put; when the last one ends without bytes the
 *      block goes, and all below it.
 *   3. Of several puts of one key the first whose copy ends gives the bytes.
 *   4. The bytes are copied first and checksummed in the copy: the source may still change.
 * Loop thread, but for the copy job, which touches the source and one slot.
 */
#include "base/crc32c.h"
#include "base/err.h"
#include "store/core.h"
#include "store/prefix_trie.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

enum { CLOSED, OPEN, WAITING, COPYING, FINISHED };

static void opened(struct cst_put *put, struct cst_space *space, struct cst_block *b) {
    cst_list_init(&put->queue);
    cst_list_append(&b->puts, &put->link);
    put->space = space;
    put->block = b;
    put->state = OPEN;
    put->aborted = false;
    b->busy_ns = cst_store_now(space->store) + space->store->options.busy_ns;
    space->stats.reserved++;
    space->store->reserved++;
    cst_block_settle(b, CST_EVICT_WARM);
}

static void closed(struct cst_put *put) {
    put->state = CLOSED;
    put->space->stats.reserved--;
    put->space->store->reserved--;
}

/* The key has a block already. */
static int join(struct cst_put *put, struct cst_block *b, uint32_t *busy_ms) {
    uint64_t now = cst_store_now(b->space->store);

    if (b->stored)
        return CST_STORE_E_PRESENT;
    if (now < b->busy_ns) {
        *busy_ms = (uint32_t)((b->busy_ns - now + CST_NS_PER_MS - 1) / CST_NS_PER_MS);
        return CST_STORE_E_KEY_BUSY;
    }
    opened(put, b->space, b);
    return 0;
}

static void unhold(struct cst_block *parent) {
    if (!parent || --parent->holds)
        return;
    if (parent->root && !parent->n_children)
        cst_trie_cut(parent);
    else
        cst_block_settle(parent, CST_EVICT_WARM);
}

/* A parent that can have children, held, or NULL: none. */
static struct cst_block *hold_parent(struct cst_space *space, const uint8_t *key, bool is_root) {
    struct cst_block *parent;

    if (!key)
        return NULL;
    parent = is_root ? cst_trie_root(space, key) : cst_trie_find(space, key);
    if (!parent || (!is_root && (cst_block_is_tail(parent) || cst_block_is_expired(parent))))
        return NULL;
    parent->holds++;
    cst_block_settle(parent, CST_EVICT_WARM);
    return parent;
}

/* Makes the hidden node. The parent is held; NULL: a flat space, or a root to be made. */
static int make_node(struct cst_space *space, struct cst_block **parent, const uint8_t *root_key,
                     const uint8_t key[32], const uint32_t *tokens, uint32_t n_tokens,
                     struct cst_block **out) {
    bool new_root = !*parent && root_key;
    int r = cst_room_index(space, cst_trie_need(space, n_tokens, new_root));

    if (!r && new_root) {
        r = cst_trie_root_add(parent, space, root_key);
        if (!r)
            (*parent)->holds++;
    }
    return r ? r : cst_trie_add(out, space, *parent, key, tokens, n_tokens);
}

int cst_put_begin(struct cst_space *space, const uint8_t *parent_key, bool is_root,
                  const uint8_t key[32], const uint32_t *tokens, uint32_t n_tokens,
                  struct cst_put *put, uint32_t *busy_ms) {
    struct cst_block *b = cst_trie_find(space, key), *parent;
    int r;

    assert(put->state == CLOSED);
    assert(space->kind == CST_KIND_FLAT
               ? !parent_key && !n_tokens
               : parent_key && n_tokens && n_tokens <= space->desc->block_tokens);
    *busy_ms = 0;
    if (b && cst_block_is_expired(b)) {
        (void)cst_block_remove(b, CST_GONE_EXPIRED);
        b = NULL;
    }
    if (b)
        return join(put, b, busy_ms);
    parent = hold_parent(space, parent_key, is_root);
    if (!parent && parent_key && !is_root)
        return CST_STORE_E_PARENT_MISSING;
    r = make_node(space, &parent, is_root ? parent_key : NULL, key, tokens, n_tokens, &b);
    if (!r) {
        b->born_ns = cst_store_now(space->store);
        b->evict.order = ++space->store->uses;
        opened(put, space, b);
    }
    unhold(parent);
    return r;
}

/* ---- the end of a put ---- */

/* The put is no longer one of its block's. */
static void detach(struct cst_put *put) {
    struct cst_block *b = put->block;

    put->block = NULL;
    if (!b)
        return;
    cst_list_unlink(&put->link);
    if (!b->stored && cst_list_is_empty(&b->puts))
        (void)cst_block_remove(b, CST_GONE_ABORTED);
    else
        cst_block_settle(b, CST_EVICT_WARM);
}

void cst_put_finish(struct cst_put *put, int status) {
    struct cst_store *store = put->space->store;

    cst_list_unlink(&put->queue);
    detach(put);
    put->space->stats.busy += status == CST_STORE_E_BUSY;
    put->state = FINISHED;
    put->status = status;
    cst_list_append(&store->finished_puts, &put->queue);
    cst_store_finish(store);
}

void cst_put_tell(struct cst_put *put) {
    cst_list_unlink(&put->queue);
    closed(put);
    put->done(put, put->status);
}

void cst_put_orphan(struct cst_put *put) {
    cst_list_unlink(&put->link);
    put->block = NULL;
    if (put->state == WAITING)
        cst_put_finish(put, CST_STORE_E_PARENT_MISSING);
}

void cst_put_abort(struct cst_put *put) {
    struct cst_space *space = put->space;

    switch (put->state) {
    case OPEN:
        detach(put);
        closed(put);
        cst_space_reap(space);
        break;
    case WAITING:
        cst_put_finish(put, -ECANCELED);
        break;
    case COPYING:
        put->aborted = true;
        detach(put);
        break;
    default:
        break;
    }
}

bool cst_put_is_open(const struct cst_put *put) {
    return put->state == OPEN;
}

/* ---- commit ---- */

static void copy_run(struct cst_job *job) {
    struct cst_put *put = cst_container_of(job, struct cst_put, job);
    uint64_t n = put->space->desc->block_bytes;
    uint8_t *to = cst_slot_data(cst_slab_slots(put->slab), put->slot);

    memcpy(to, put->source, n);
    put->crc = cst_crc32c(0, to, n);
}

static int settled(const struct cst_block *b) {
    return b->visible ? CST_STORE_E_PRESENT : CST_STORE_E_PENDING;
}

/* The copy is there: it becomes the block's, or its slot goes back. */
static int land(struct cst_put *put) {
    struct cst_slab_slots *slab = cst_slab_slots(put->slab);
    struct cst_block *b = put->block;
    struct cst_space *space = put->space;

    if (!b || b->stored) {
        cst_slab_give(slab, put->slot);
        if (put->aborted)
            return -ECANCELED;
        return b ? settled(b) : CST_STORE_E_PARENT_MISSING;
    }
    cst_copy_set(&b->hot, b, slab, put->slot, (uint32_t)space->desc->block_bytes, put->crc);
    b->crc = put->crc;
    b->stored = true;
    space->stats.blocks++;
    cst_block_born(b);
    cst_block_use(b);
    space->stats.tail_blocks += cst_block_is_tail(b);
    space->stats.stored_blocks++;
    space->last_put_ns = cst_store_now(space->store);
    space->stats.stored_bytes += space->desc->block_bytes;
    return cst_block_publish(b);
}

static void copy_done(struct cst_job *job) {
    struct cst_put *put = cst_container_of(job, struct cst_put, job);
    struct cst_space *space = put->space;
    struct cst_block *b = put->block;
    int status;

    cst_store_enter(space);
    cst_slab_slots(put->slab)->busy--;
    status = land(put);
    if (b) {
        put->block = NULL;
        cst_list_unlink(&put->link);
        cst_block_settle(b, CST_EVICT_NEW);
    }
    cst_put_finish(put, status);
    cst_room_serve(space);
    cst_store_leave(space);
}

void cst_put_start(struct cst_put *put, struct cst_slab_slots *slab, uint32_t slot) {
    cst_list_unlink(&put->queue);
    put->slab = &slab->slab;
    put->slot = slot;
    put->state = COPYING;
    slab->busy++;
    put->job = (struct cst_job){ .run = copy_run, .done = copy_done };
    cst_store_submit(put->space, &put->job, CST_JOB_FETCH);
}

void cst_put_commit(struct cst_put *put, const void *source, const uint16_t *surprisals) {
    assert(put->state == OPEN);
    put->source = source;
    if (!put->block) {
        cst_put_finish(put, CST_STORE_E_PARENT_MISSING);
        return;
    }
    if (put->block->stored) {
        cst_put_finish(put, settled(put->block));
        return;
    }
    if (surprisals && put->block->n_tokens)
        cst_block_set_surprisals(put->block, surprisals);
    put->state = WAITING;
    cst_list_append(&put->space->wait_puts, &put->queue);
    cst_room_serve(put->space);
}
