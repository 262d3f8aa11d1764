/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns what a start does with side data on disk: collects the records that recovery finds, reads
 * the versions back, gives up what needs one that isn't there.
 *
 * Invariants
 *   1. What was found or is wanted by a block is in space->sides_found until it was read; a version
 *      that is being read has a reference of ours, and its space a job.
 *   2. A number that was seen on disk is never given to another version while the space lives
 *      (space->last_side). If a space ended and a kill brings records of it back, a number may be
 *      there twice: the younger version counts, and frames of the other one fail the check of their
 *      side data.
 *   3. What is read is believed after its hash, its version and its shape were checked.
 *   4. Only damage gives records up. What can't be read or finds no room now is kept on disk for
 *      the next start (side_keep.c); its frames are misses until then.
 * Loop thread, but for the job, which touches the version that is being read.
 */
#include "base/err.h"
#include "base/mem.h"
#include "store/cold.h"
#include "store/side_disk.h"

#include <errno.h>
#include <string.h>

enum {
    FOUND_MAX = 64, /* versions of a space */
    READS_MAX = 2,  /* of a part that can't be read */
    DROP = CST_SEG_E_GONE,
};

enum { DAMAGED = 1, NO_MEMORY, NO_SHARE, NO_DISK }; /* why a version can't be had */

struct cst_side_load {
    struct cst_seg_read read;
    struct cst_job job;
    struct cst_cold *cold;
    struct cst_side_data *side;
    uint32_t version, at;
    unsigned n_reads; /* of this part */
    bool noted;
    void *heap;
    int result;
};

/* ---- what recovery finds ---- */

struct cst_side_data *cst_side_load_wanted(struct cst_space *space, uint64_t version) {
    struct cst_side_data *side;
    struct cst_list *it;
    unsigned n = 0;

    if (!version || version > CST_SIDE_VERSION_MAX)
        return NULL;
    for (it = space->sides_found.next; it != &space->sides_found; it = it->next, n++) {
        side = cst_list_entry(it, struct cst_side_data, link);
        if (side->side.version == version)
            return side;
    }
    side = n < FOUND_MAX ? cst_calloc(1, sizeof(*side)) : NULL;
    if (!side)
        return NULL;
    cst_list_init(&side->link);
    side->space = space;
    side->found = true;
    side->side.version = (uint32_t)version;
    cst_list_append(&space->sides_found, &side->link);
    space->last_side = CST_MAX(space->last_side, (uint32_t)version);
    return side;
}

static bool is_plausible(const struct cst_seg_record *r) {
    return !r->kind && r->total_bytes && r->total_bytes <= CST_SIDE_BYTES_MAX &&
           r->parts == cst_side_parts(r->total_bytes);
}

static bool is_of(const struct cst_side_disk *d, const struct cst_seg_record *r) {
    return d->total == r->total_bytes && !memcmp(d->hash, r->key, sizeof(d->hash));
}

int cst_side_load_found(struct cst_space *space, const struct cst_seg_record *r,
                        struct cst_seg_ref ref, void **owner) {
    struct cst_side_data *side = is_plausible(r) ? cst_side_load_wanted(space, r->version) : NULL;
    struct cst_side_disk *d;

    if (!side)
        return DROP;
    if (side->disk && !is_of(side->disk, r) && r->generation > side->disk->generation)
        cst_side_disk_free(side);
    if (!side->disk)
        side->disk = cst_side_disk_new(side, r->total_bytes, r->key);
    d = side->disk;
    if (!d || !is_of(d, r) || r->payload_bytes != cst_side_part_bytes(d, r->part) ||
        !cst_seg_ref_is_none(d->part[r->part].ref))
        return DROP;
    d->part[r->part].ref = ref;
    d->n_stored++;
    d->generation = CST_MAX(d->generation, r->generation);
    *owner = cst_side_owner(&d->part[r->part]);
    return 0;
}

/* ---- reading ---- */

static void load_go(struct cst_side_load *l);

static void note(struct cst_side_load *l, int why) {
    static const char *const sentences[] = {
        [NO_MEMORY] = "side data on disk find no room in memory: frames that need them stay on "
                      "disk but are misses in this run; raise memory",
        [NO_SHARE] = "side data on disk are larger than side_data allows: frames that need them "
                     "stay on disk but are misses in this run; raise side_data",
        [NO_DISK] = "side data on disk couldn't be read: frames that need them stay there but are "
                    "misses in this run",
    };

    if (!l->cold->note || l->noted || !sentences[why])
        return;
    l->cold->note(l->cold->note_arg, sentences[why]);
    l->noted = true;
}

static int restore(struct cst_side_data *side) {
    int r = cst_side_restore(side);

    return r == CST_STORE_E_LIMIT ? NO_SHARE : r ? DAMAGED : 0;
}

/* What needs the version has nothing to be decoded with, if it isn't one of the space's now. */
static void load_end(struct cst_side_load *l, int why) {
    struct cst_side_data *side = l->side;
    struct cst_space *space = side->space;

    cst_store_enter(space);
    l->heap = cst_free(l->heap);
    why = why ? why : restore(side);
    if (!why)
        cst_side_disk_count(l->cold, side->disk);
    if (why > DAMAGED) {
        note(l, why);
        cst_side_keep_begin(l->cold, side->disk);
    }
    if (why)
        cst_side_disk_drop_frames(side, why == DAMAGED);
    (void)cst_side_unref(side);
    cst_side_keep_end(l->cold);
    cst_room_serve(space);
    cst_cold_finish(space);
}

static void load_run(struct cst_job *job) {
    struct cst_side_load *l = cst_container_of(job, struct cst_side_load, job);
    const struct cst_side_disk *d = l->side->disk;
    int r = cst_side_fill(l->side, d->total);

    l->result = r < 0 ? NO_MEMORY : r ? DAMAGED : 0;
    if (!l->result && (l->side->side.version != l->version ||
                       memcmp(l->side->side.hash, d->hash, sizeof(d->hash)) != 0))
        l->result = DAMAGED;
}

static void load_ran(struct cst_job *job) {
    struct cst_side_load *l = cst_container_of(job, struct cst_side_load, job);
    struct cst_space *space = l->side->space;

    cst_store_enter(space);
    cst_store_leave(space); /* it lives by load_begin()'s */
    load_end(l, l->result);
    load_go(l);
}

static int read_next(struct cst_side_load *l);

static int part_arrived(struct cst_side_load *l) {
    struct cst_side_data *side = l->side;
    const struct cst_side_disk *d = side->disk;

    if (l->read.payload_bytes != cst_side_part_bytes(d, l->at))
        return DAMAGED;
    memcpy(side->bytes + (size_t)l->at * CST_SIDE_PART, l->read.payload, l->read.payload_bytes);
    l->heap = cst_free(l->heap);
    l->n_reads = 0;
    if (++l->at < d->n_parts)
        return read_next(l);
    l->job = (struct cst_job){ .run = load_run, .done = load_ran };
    cst_store_submit(side->space, &l->job, CST_JOB_BACKGROUND);
    return 0;
}

static int part_failed(struct cst_side_load *l, int status) {
    l->heap = cst_free(l->heap);
    if (status < 0 && l->n_reads < READS_MAX)
        return read_next(l);
    return status < 0 || status == CST_SEG_E_OFF ? NO_DISK : DAMAGED;
}

static void part_read(struct cst_seg_read *read, int status) {
    struct cst_side_load *l = cst_container_of(read, struct cst_side_load, read);
    int r = status ? part_failed(l, status) : part_arrived(l);

    if (!r)
        return;
    load_end(l, r);
    load_go(l);
}

/* 0: part_read() follows. */
static int read_next(struct cst_side_load *l) {
    const struct cst_side_disk *d = l->side->disk;
    struct cst_seg *seg = l->cold->seg;
    uint64_t bytes = cst_seg_read_bytes(seg, d->part[l->at].ref);
    uint8_t *heap = bytes ? cst_malloc(bytes + CST_AIO_ALIGN) : NULL;

    if (!heap)
        return bytes ? NO_MEMORY : DAMAGED;
    l->heap = heap;
    l->n_reads++;
    l->read = (struct cst_seg_read){
        .done = part_read,
        .ref = d->part[l->at].ref,
        .key = d->hash,
        .keep = true,
        .buffer = heap + (-(uintptr_t)heap & (CST_AIO_ALIGN - 1)),
    };
    cst_seg_read(seg, &l->read);
    return 0;
}

/* 0: load_end() follows. */
static int load_begin(struct cst_side_load *l, struct cst_side_data *side) {
    struct cst_space *space = side->space;
    const struct cst_side_disk *d = side->disk;
    int r;

    cst_list_unlink(&side->link);
    side->found = false;
    l->side = cst_side_ref(side);
    l->version = side->side.version;
    l->at = l->n_reads = 0;
    cst_cold_begin(space); /* until load_end() */
    if (!d || d->n_stored < d->n_parts)
        return DAMAGED;
    cst_cold_begin(space);
    cst_store_enter(space);
    r = cst_side_reserve(side, d->total);
    cst_cold_finish(space);
    if (r)
        return r == CST_STORE_E_LIMIT ? NO_SHARE : NO_MEMORY;
    return read_next(l);
}

/* Should memory or the cap not do for all, the older ones are left on disk. */
static struct cst_side_data *newest_found(const struct cst_space *space) {
    struct cst_side_data *best = NULL;

    for (struct cst_list *it = space->sides_found.next; it != &space->sides_found; it = it->next) {
        struct cst_side_data *side = cst_list_entry(it, struct cst_side_data, link);

        if (!best || side->side.version > best->side.version)
            best = side;
    }
    return best;
}

static struct cst_side_data *next_found(const struct cst_store *store) {
    struct cst_list *it;

    for (it = store->spaces.next; it != &store->spaces; it = it->next) {
        struct cst_space *space = cst_list_entry(it, struct cst_space, link);

        if (space->sides_found.next != &space->sides_found)
            return newest_found(space);
    }
    return NULL;
}

static void load_go(struct cst_side_load *l) {
    struct cst_cold *c = l->cold;
    struct cst_side_data *side;

    while ((side = next_found(c->store))) {
        int r = load_begin(l, side);

        if (!r)
            return;
        load_end(l, r);
    }
    cst_free(l);
    cst_cold_recovered(c, 0);
}

void cst_side_load(struct cst_cold *c) {
    struct cst_side_load *l = cst_calloc(1, sizeof(*l));

    if (!l) {
        cst_cold_recovered(c, cst_err(-ENOMEM));
        return;
    }
    l->cold = c;
    load_go(l);
}
