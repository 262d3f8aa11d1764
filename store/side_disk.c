/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the records of side data on disk: which versions may be there, writing them part by part,
 * and the engine's callbacks about them.
 *
 * Invariants
 *   1. The engine's owner of a part is the part's address plus one: blocks have even ones.
 *   2. A version that is being written has a reference of ours, and its space a job.
 *   3. A frame is written when all parts of its version exist. A part that gets lost later is
 *      written again from memory, where the version stays as long as a frame needs it; a start that
 *      comes in between finds misses.
 *   4. One version takes at most an eighth of the tier, all of them a quarter: they are moved when
 *      their segment is emptied, so a tier full of them would do nothing else. What doesn't fit
 *      isn't written, and so aren't the frames that need it.
 * Loop thread only.
 */
#include "store/side_disk.h"

#include "base/crc32c.h"
#include "base/mem.h"
#include "store/cold.h"
#include "store/prefix_trie.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

enum {
    LOST_MAX = 2, /* as many times a version is lost, then the tier is too small for it */
    SHARE_ONE = 8,
    SHARE_ALL = 4,
};

uint64_t cst_side_part_bytes(const struct cst_side_disk *d, uint32_t part) {
    return CST_MIN(d->total - (uint64_t)part * CST_SIDE_PART, (uint64_t)CST_SIDE_PART);
}

struct cst_side_disk *cst_side_disk_new(struct cst_side_data *side, uint64_t total,
                                        const uint8_t hash[32]) {
    uint32_t n = cst_side_parts(total);
    struct cst_side_disk *d = cst_calloc(1, sizeof(*d) + n * sizeof(d->part[0]));

    if (!d)
        return NULL;
    d->n_parts = n;
    d->total = total;
    memcpy(d->hash, hash, sizeof(d->hash));
    for (uint32_t i = 0; i < n; i++)
        d->part[i] = (struct cst_side_part){ .side = side, .ref = CST_SEG_REF_NONE };
    return d;
}

void cst_side_disk_count(struct cst_cold *c, struct cst_side_disk *d) {
    if (!d->counted)
        c->side_bytes += d->total;
    d->counted = true;
}

static void part_drop(struct cst_cold *c, struct cst_side_data *side, uint32_t i) {
    struct cst_seg_ref ref = side->disk->part[i].ref;

    if (!cst_side_keep(c, side->space->disk, ref, cst_side_part_bytes(side->disk, i)))
        cst_seg_drop(c->seg, ref, false);
}

void cst_side_disk_free(struct cst_side_data *side) {
    struct cst_cold *c = side->space->store->cold;
    struct cst_side_disk *d = side->disk;

    if (!d)
        return;
    assert(!d->writing);
    for (uint32_t i = 0; i < d->n_parts && !c->closing; i++)
        if (!cst_seg_ref_is_none(d->part[i].ref))
            part_drop(c, side, i);
    if (d->counted)
        c->side_bytes -= d->total;
    side->disk = cst_free(d);
}

/* ---- owners ---- */

void *cst_side_owner(struct cst_side_part *part) {
    return (uint8_t *)part + 1;
}

static struct cst_side_part *part_of(void *owner) {
    return (struct cst_side_part *)(void *)((uint8_t *)owner - 1);
}

bool cst_side_owns(const void *owner) {
    return (uintptr_t)owner & 1;
}

float cst_side_value(void *owner, bool *has_children) {
    *has_children = part_of(owner)->side->refs > 0;
    return *has_children ? -1 : 0; /* frames need it: it is moved, whatever that costs */
}

void cst_side_moved(void *owner, struct cst_seg_ref ref) {
    part_of(owner)->ref = ref;
}

static void lost(struct cst_side_disk *d) {
    d->refused |= ++d->n_lost > LOST_MAX * d->n_parts;
}

void cst_side_gone(void *owner) {
    struct cst_side_part *part = part_of(owner);

    part->ref = CST_SEG_REF_NONE;
    part->side->disk->n_stored--;
    lost(part->side->disk);
}

/* ---- what may be there ---- */

static void note_too_small(struct cst_cold *c, struct cst_side_disk *d) {
    char text[200];

    if (!c->note || d->noted)
        return;
    (void)snprintf(text, sizeof(text),
                   "the disk tier is too small for a space's side data of %llu KiB: frames that "
                   "need them stay in memory",
                   (unsigned long long)(d->total >> 10));
    c->note(c->note_arg, text);
    d->noted = true;
}

/* Takes a part of the tier for the version, if there is one. */
static bool take_place(struct cst_side_data *side) {
    struct cst_cold *c = side->space->store->cold;
    struct cst_side_disk *d = side->disk;
    uint64_t all, most;

    if (d->counted || d->refused)
        return !d->refused;
    all = cst_seg_bytes(c->seg);
    most = (c->namespace_bytes ? CST_MIN(all, c->namespace_bytes) : all) / SHARE_ONE;
    d->refused = d->total > most;
    d->waiting = c->side_bytes + d->total > all / SHARE_ALL;
    if (d->refused || d->waiting) {
        note_too_small(c, d);
        return false;
    }
    cst_side_disk_count(c, d);
    return true;
}

bool cst_side_disk_is_out(const struct cst_side_data *side) {
    return side->disk && (side->disk->refused || side->disk->waiting);
}

bool cst_side_disk_holds(const struct cst_side_data *side) {
    const struct cst_side_disk *d = side->disk;

    return d && (d->n_stored == d->n_parts || (d->counted && !d->refused));
}

void cst_side_disk_drop_frames(struct cst_side_data *side, bool damaged) {
    struct cst_space *space = side->space;
    struct cst_block *b;
    uint64_t seq = 0;

    while ((b = cst_trie_after(space, seq))) {
        seq = b->seq;
        if (b->cold_side != side)
            continue;
        if (!cst_block_in_memory(b)) {
            (void)cst_block_remove(b, damaged ? CST_GONE_CORRUPT : CST_GONE_EVICTED);
            continue;
        }
        cst_cold_drop(b, false);
        cst_block_settle(b, CST_EVICT_WARM);
    }
}

/* The newest one would be learned again, and older frames go one day anyway. */
bool cst_side_disk_give_up(struct cst_space *space) {
    const struct cst_side_data *newest = cst_side_newest(space);
    struct cst_side_data *side = NULL;

    for (struct cst_list *it = space->sides.prev; it != &space->sides && !side; it = it->prev) {
        side = cst_list_entry(it, struct cst_side_data, link);
        if (side == newest || !side->disk || !side->disk->counted || side->disk->writing)
            side = NULL;
    }
    if (!side)
        return false;
    (void)cst_side_ref(side);
    cst_side_disk_drop_frames(side, false);
    cst_side_disk_free(side);
    (void)cst_side_unref(side);
    return true;
}

/* ---- writing ---- */

static int write_next(struct cst_side_data *side);

static void write_done(struct cst_seg_store *store, int status) {
    struct cst_side_part *part = part_of(store->owner);
    struct cst_side_data *side = part->side;
    struct cst_side_disk *d = side->disk;
    struct cst_space *space = side->space;

    cst_store_enter(space);
    d->writing = false;
    space->spills--;
    if (status < 0)
        lost(d);
    if (!status) {
        part->ref = cst_seg_store_ref(store);
        d->n_stored++;
        if (side->refs > 1 || side == cst_side_newest(space)) /* somebody else's, too */
            (void)write_next(side);
    }
    (void)cst_side_unref(side);
    cst_room_serve(space);
    cst_cold_slice(space->store);
    cst_cold_finish(space);
}

static int write_part(struct cst_side_data *side, uint32_t i) {
    struct cst_side_disk *d = side->disk;
    const uint8_t *from = side->bytes + (size_t)i * CST_SIDE_PART;
    uint64_t n = cst_side_part_bytes(d, i);
    int r;

    d->store = (struct cst_seg_store){
        .done = write_done,
        .payload = from,
        .owner = cst_side_owner(&d->part[i]),
        .hits = UINT32_MAX,
        .record = { .type = CST_SEG_SIDE,
                    .space = side->space->disk,
                    .key = d->hash,
                    .payload_bytes = n,
                    .payload_crc = cst_crc32c(0, from, n),
                    .version = side->side.version,
                    .total_bytes = d->total,
                    .part = i,
                    .parts = d->n_parts },
    };
    r = cst_seg_store(side->space->store->cold->seg, &d->store);
    if (r) {
        d->refused |= r == CST_SEG_E_TOO_BIG;
        return r < 0 ? CST_SEG_E_BUSY : r;
    }
    d->writing = true;
    (void)cst_side_ref(side);
    side->space->spills++;
    cst_cold_begin(side->space);
    return 0;
}

/* 0: a part is on its way, or nothing is missing. */
static int write_next(struct cst_side_data *side) {
    const struct cst_side_disk *d = side->disk;
    const struct cst_cold *c = side->space->store->cold;

    if (!side->published || !side->space->disk || !take_place(side))
        return CST_SEG_E_TOO_BIG;
    if (c->recovering || c->closing || c->drain_over || side->space->ns->purging)
        return CST_SEG_E_BUSY;
    for (uint32_t i = 0; i < d->n_parts; i++)
        if (cst_seg_ref_is_none(d->part[i].ref))
            return write_part(side, i);
    return 0;
}

int cst_side_disk_ready(struct cst_side_data *side) {
    int r;

    if (!side->disk)
        side->disk = cst_side_disk_new(side, side->side.len, side->side.hash);
    if (!side->disk)
        return CST_SEG_E_BUSY;
    if (side->disk->n_stored == side->disk->n_parts)
        return 0;
    r = side->disk->writing ? 0 : write_next(side);
    return r ? r : CST_SEG_E_BUSY;
}

static struct cst_side_data *at(const struct cst_list *it) {
    return cst_container_of((struct cst_list *)(uintptr_t)it, struct cst_side_data, link);
}

static uint64_t missing(const struct cst_side_data *side) {
    const struct cst_side_disk *d = side->disk;

    return d && side->refs && d->counted && !d->refused ? d->n_parts - d->n_stored : 0;
}

uint64_t cst_side_disk_missing(const struct cst_space *space) {
    uint64_t n = 0;

    for (const struct cst_list *it = space->sides.next; it != &space->sides; it = it->next)
        n += missing(at(it));
    return n;
}

uint64_t cst_side_disk_n_out(const struct cst_space *space) {
    uint64_t n = 0;

    for (const struct cst_list *it = space->sides.next; it != &space->sides; it = it->next)
        n += cst_side_disk_is_out(at(it));
    return n;
}

static int slice(struct cst_space *space) {
    struct cst_side_data *newest = cst_side_newest(space);
    int r = 0;

    for (const struct cst_list *it = space->sides.next; it != &space->sides; it = it->next) {
        struct cst_side_data *side = at(it);

        if (side->disk && side->disk->waiting)
            (void)take_place(side);
        if (missing(side) && !side->disk->writing)
            r = write_next(side);
    }
    if (newest && newest->disk && newest->disk->waiting && cst_side_disk_give_up(space))
        (void)take_place(newest);
    return r;
}

int cst_side_disk_slice(struct cst_store *store) {
    struct cst_list *it;
    int r = 0;

    for (it = store->spaces.next; it != &store->spaces; it = it->next) {
        int one = slice(cst_list_entry(it, struct cst_space, link));

        r = one ? one : r;
    }
    return r;
}
