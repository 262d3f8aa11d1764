/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns eviction: one segment at a time is emptied as a whole. What is worth it is moved: read,
 * checked, and stored again in the namespace's open segment; the rest is gone.
 *
 * A victim is the least valuable of some candidates: the emptiest and the oldest. Moved are records
 * that must not be lost, whatever it costs; inner blocks whose descendants live elsewhere, then
 * what is worth more than twice the candidates' mean, as long as all that was written besides
 * users' records stays below a tenth of those.
 *
 * Invariants: 1. a victim's records stay readable until they are told moved or gone; 2. a move that
 * fails is an eviction; 3. a record that its user drops on the way isn't there afterwards; 4. users
 * are told of what is gone from a job of its own, never from within a call of theirs.
 * Loop thread, but for the job, which touches the move's buffer.
 */
#include "base/err.h"
#include "base/mem.h"
#include "store/seg_core.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

struct keep {
    uint32_t slot;
    float value;
    bool has_children;
};

struct cst_seg_evict {
    struct cst_seg_segment *victim;
    struct keep *keep; /* owned */
    uint32_t n_keep, next;
    uint32_t n_moves; /* under way, waiting ones too */
    struct cst_list waiting;
    bool going, again;
    struct cst_seg *seg;
    struct cst_job lose;
    bool losing;
};

struct cst_seg_move {
    struct cst_list link; /* evict->waiting: for memory */
    struct cst_seg *seg;
    struct cst_seg_segment *from;
    struct cst_seg_ref ref;
    uint32_t chunk;
    uint64_t bytes;
    uint8_t *buffer;
    void *heap;
    struct cst_aio_op op;
    struct cst_job job;
    int status;
};

/* ---- moves ---- */

static void move_end(struct cst_seg_move *move) {
    struct cst_seg *seg = move->seg;

    cst_list_unlink(&move->link);
    seg->evict->n_moves--;
    seg->busy--;
    move->from->readers--;
    cst_free(move->heap);
    cst_free(move);
    cst_seg_evict_go(seg);
}

void cst_seg_move_done(struct cst_seg_move *move, int status, struct cst_seg_ref ref) {
    struct cst_seg *seg = move->seg;
    const struct cst_seg_slot *old = cst_seg_find(seg, move->ref, NULL);
    void *owner = old ? old->owner : NULL;

    if (!status && !owner) {
        cst_seg_drop(seg, ref, false);
    } else if (!status) {
        cst_seg_set_owner(seg, ref, owner);
        cst_segment_unlive(move->from, move->ref.slot);
        if (seg->env.user.moved)
            seg->env.user.moved(seg->env.user.arg, owner, ref);
    }
    move_end(move);
}

/* The record as it lies in the buffer, opened. False: it can't be stored again. */
static bool parse(const struct cst_seg_move *move, struct cst_seg_record *record) {
    const struct cst_disk_record *head = (const struct cst_disk_record *)move->buffer;
    const struct cst_disk_meta *meta = (const struct cst_disk_meta *)(head + 1);

    *record = (struct cst_seg_record){ .type = (enum cst_seg_type)head->type,
                                       .payload_bytes = cst_load64(&head->payload_bytes) };
    record->space = cst_seg_space_find(move->seg, meta->space);
    return record->space && record->space->ns == move->from->ns &&
           (head->type == CST_DISK_BLOCK || head->type == CST_DISK_SIDE) &&
           cst_seg_meta_read(record, (const uint8_t *)meta, cst_load32(&head->meta_bytes));
}

/* True: nothing more to wait for; the move is over if it couldn't be begun. */
static bool move_store(struct cst_seg_move *move) {
    const struct cst_disk_record *head = (const struct cst_disk_record *)move->buffer;
    const struct cst_seg_slot *slot = cst_seg_find(move->seg, move->ref, NULL);
    struct cst_seg_record record;
    int r;

    if (!slot || move->seg->off || !parse(move, &record)) {
        move_end(move);
        return true;
    }
    r = cst_seg_write_move(move, &record, move->buffer + cst_load32(&head->payload_offset),
                           slot->owner);
    if (r == CST_SEG_E_BUSY &&
        !(cst_list_is_empty(&move->seg->ring.parts) && cst_list_is_empty(&move->seg->heads.parts)))
        return false;
    if (r)
        move_end(move);
    return true;
}

static void move_open(struct cst_job *job) {
    struct cst_seg_move *move = cst_container_of(job, struct cst_seg_move, job);

    move->status = cst_seg_record_open(move->from, move->buffer, move->bytes, move->chunk,
                                       move->ref.slot, NULL);
}

static void move_opened(struct cst_job *job) {
    struct cst_seg_move *move = cst_container_of(job, struct cst_seg_move, job);

    if (move->status) {
        cst_seg_lose(move->seg, move->ref, CST_SEG_GONE_CORRUPT);
        move_end(move);
        return;
    }
    cst_list_append(&move->seg->evict->waiting, &move->link);
    cst_seg_evict_go(move->seg);
}

static void move_read(struct cst_aio_op *op, int res) {
    struct cst_seg_move *move = cst_container_of(op, struct cst_seg_move, op);
    struct cst_jobs *jobs = move->seg->env.jobs;

    if (res) {
        cst_seg_error(move->seg, res);
        move_end(move);
        return;
    }
    move->job = (struct cst_job){ .run = move_open, .done = move_opened };
    jobs->submit(jobs, &move->job, CST_JOB_BACKGROUND);
}

static void move_start(struct cst_seg *seg, struct cst_seg_segment *s, uint32_t slot) {
    struct cst_seg_move *move;

    if (!s->slots[slot].owner || seg->off)
        return;
    move = cst_calloc(1, sizeof(*move));
    if (!move)
        return;
    move->bytes = cst_chunk_offset(s->slots[slot].n_chunks);
    move->buffer = cst_seg_aligned(move->bytes, &move->heap);
    if (!move->buffer) {
        cst_free(move);
        return;
    }
    cst_list_init(&move->link);
    move->seg = seg;
    move->from = s;
    move->ref = cst_segment_ref(s, slot);
    move->chunk = s->slots[slot].chunk;
    move->op = (struct cst_aio_op){
        .done = move_read,
        .file = s->file,
        .code = CST_AIO_READ,
        .data = move->buffer,
        .offset = cst_chunk_offset(move->chunk),
        .length = move->bytes,
    };
    seg->evict->n_moves++;
    seg->busy++;
    s->readers++;
    cst_aio_submit(seg->env.aio, &move->op);
}

/* ---- emptying ---- */

static void step(struct cst_seg *seg, struct cst_seg_evict *e) {
    struct cst_seg_segment *s = e->victim;
    struct cst_list *it;

    while ((it = cst_list_first(&e->waiting))) {
        cst_list_unlink(it);
        if (!move_store(cst_list_entry(it, struct cst_seg_move, link))) {
            cst_list_prepend(&e->waiting, it);
            break;
        }
    }
    while (e->n_moves < CST_SEG_MOVES_MAX && e->next < e->n_keep)
        move_start(seg, s, e->keep[e->next++].slot);
}

static void lose_run(struct cst_job *job) {
    (void)job;
}

static void lose_done(struct cst_job *job) {
    struct cst_seg_evict *e = cst_container_of(job, struct cst_seg_evict, lose);
    struct cst_seg_segment *s = e->victim;
    struct cst_seg *seg = e->seg;

    seg->busy--;
    e->losing = false;
    e->going = true;
    for (uint32_t i = 0; s->n_live && i < s->n_slots; i++)
        cst_seg_lose(seg, cst_segment_ref(s, i), CST_SEG_GONE_EVICTED);
    e->going = false;
    cst_seg_evict_go(seg);
}

/* Soon: an eviction may have begun in a store of the user, who holds on to what would go. */
static void lose_soon(struct cst_seg_evict *e) {
    struct cst_jobs *jobs = e->seg->env.jobs;

    if (e->losing)
        return;
    e->losing = true;
    e->seg->busy++;
    e->lose = (struct cst_job){ .run = lose_run, .done = lose_done };
    jobs->submit(jobs, &e->lose, CST_JOB_FETCH);
}

void cst_seg_evict_go(struct cst_seg *seg) {
    struct cst_seg_evict *e = seg->evict;
    struct cst_seg_segment *s;

    if (!e || e->going) {
        if (e)
            e->again = true;
        return;
    }
    e->going = true;
    do {
        e->again = false;
        step(seg, e);
    } while (e->again);
    e->going = false;
    s = e->victim;
    if (e->n_moves || e->next < e->n_keep)
        return;
    if (s->n_live)
        lose_soon(e);
    if (e->losing || s->readers || s->writers)
        return;
    seg->evict = NULL;
    cst_free(e->keep);
    cst_free(e);
    s->chosen = false;
    s->state = CST_SEG_CLOSED;
    cst_segment_empty(s);
    cst_seg_spare(seg);
    cst_seg_room(seg);
}

/* ---- choosing ---- */

struct candidate {
    struct cst_seg_segment *segment;
    float value; /* of what is lost and moved with it, for the room that comes of it */
    float mean;  /* per byte of what may be lost */
    float must;  /* share of its live bytes that would be moved in any case */
};

static float value_of(const struct cst_seg *seg, const struct cst_seg_slot *slot,
                      bool *has_children) {
    *has_children = false;
    return seg->env.user.value ? seg->env.user.value(seg->env.user.arg, slot->owner, has_children)
                               : 1;
}

static void judge(const struct cst_seg *seg, struct candidate *c) {
    const struct cst_seg_segment *s = c->segment;
    uint32_t stride = s->n_slots / CST_SEG_SAMPLES + 1;
    uint64_t chunks = 0, must = 0;
    double sum = 0;

    for (uint32_t i = 0; i < s->n_slots; i += stride) {
        uint32_t n = s->slots[i].n_chunks;
        float value;
        bool inner;

        if (!s->slots[i].owner)
            continue;
        value = value_of(seg, &s->slots[i], &inner);
        *(value < 0 ? &must : &chunks) += n;
        sum += value < 0 ? 0 : (double)value * n;
    }
    c->mean = chunks ? (float)(sum / (double)chunks) : 0;
    c->must = must ? (float)must / (float)(chunks + must) : 0;
}

/* Moving a byte costs as much as losing one of middling value, and gives no room. */
static void value_candidate(struct candidate *c, float mean) {
    float all = (float)c->segment->seg->chunks, live = (float)c->segment->live_chunks,
          must = live * c->must;

    c->value = ((live - must) * c->mean + must * mean) / fmaxf(all - must, 1);
}

static bool may_go(const struct cst_seg_segment *s, const struct cst_seg_ns *ns) {
    return s->state == CST_SEG_CLOSED && s->ns && (!ns || s->ns == ns) && !s->readers &&
           !s->writers && !s->retired;
}

/* The emptiest ones and the oldest ones: half of the places each. */
static size_t candidates(struct cst_seg *seg, const struct cst_seg_ns *ns,
                         struct candidate out[CST_SEG_CANDIDATES]) {
    size_t n = 0;

    for (size_t place = 0; place < CST_SEG_CANDIDATES; place++) {
        struct cst_seg_segment *best = NULL;

        for (uint32_t i = 0; i < seg->n_segments; i++) {
            struct cst_seg_segment *s = &seg->segments[i];

            if (!may_go(s, ns) || s->chosen)
                continue;
            if (!best || (place < CST_SEG_CANDIDATES / 2 ? s->sequence < best->sequence
                                                         : s->live_chunks < best->live_chunks))
                best = s;
        }
        if (!best)
            break;
        best->chosen = true; /* not twice */
        out[n++].segment = best;
    }
    for (size_t i = 0; i < n; i++)
        out[i].segment->chosen = false;
    return n;
}

static int by_worth(const void *a, const void *b) {
    const struct keep *x = a, *y = b;

    if ((x->value < 0) != (y->value < 0))
        return x->value < 0 ? -1 : 1;
    if (x->has_children != y->has_children)
        return x->has_children ? -1 : 1;
    return x->value > y->value ? -1 : x->value < y->value;
}

static uint64_t budget(const struct cst_seg *seg) {
    uint64_t most = seg->stats.stored_bytes / 10,
             used = seg->stats.moved_bytes + seg->stats.overhead_bytes;

    return most > used ? CST_MIN(most - used, seg->segment_bytes / 2) : 0;
}

/* What to move out of the victim, the most valuable first. */
static void choose(struct cst_seg *seg, struct cst_seg_evict *e, float mean) {
    struct cst_seg_segment *s = e->victim;
    uint64_t left = budget(seg);
    uint32_t n = 0;

    e->keep = s->n_live ? cst_malloc(s->n_live * sizeof(*e->keep)) : NULL;
    if (!e->keep)
        return;
    for (uint32_t i = 0; i < s->n_slots && n < s->n_live; i++) {
        struct keep k = { .slot = i };

        if (!s->slots[i].owner)
            continue;
        k.value = value_of(seg, &s->slots[i], &k.has_children);
        if (k.value < 0 || (left && (k.has_children || k.value > 2 * mean)))
            e->keep[n++] = k;
    }
    qsort(e->keep, n, sizeof(*e->keep), by_worth);
    while (e->n_keep < n) {
        const struct keep *k = &e->keep[e->n_keep];
        uint64_t bytes = cst_chunk_offset(s->slots[k->slot].n_chunks);

        if (k->value >= 0 && bytes > left)
            break;
        left -= CST_MIN(left, bytes);
        e->n_keep++;
    }
}

bool cst_seg_evict_start(struct cst_seg *seg, struct cst_seg_ns *ns) {
    struct candidate all[CST_SEG_CANDIDATES] = { 0 };
    size_t n = candidates(seg, ns, all), best = 0;
    struct cst_seg_evict *e;
    float mean = 0;

    if (!n || seg->off || seg->read_only)
        return false;
    for (size_t i = 0; i < n; i++) {
        judge(seg, &all[i]);
        mean += all[i].mean / (float)n;
    }
    for (size_t i = 0; i < n; i++) {
        value_candidate(&all[i], mean);
        if (all[i].value < all[best].value)
            best = i;
    }
    e = cst_calloc(1, sizeof(*e));
    if (!e)
        return false;
    cst_list_init(&e->waiting);
    e->seg = seg;
    e->victim = all[best].segment;
    e->victim->state = CST_SEG_EVICTING;
    e->victim->chosen = true;
    choose(seg, e, mean);
    seg->evict = e;
    cst_seg_evict_go(seg);
    return true;
}

void cst_seg_evict_free(struct cst_seg *seg) {
    if (seg->evict)
        cst_free(seg->evict->keep);
    seg->evict = cst_free(seg->evict);
}
