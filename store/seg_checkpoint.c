/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns checkpoints: which records were dropped, which are pinned. Everything else is in the
 * segments. Invariants: 1. a mark only ever hides or pins records of the very fill it was made for,
 * so an old checkpoint is as true as it was; 2. a checkpoint that fails a check is as none; 3.
 * while the loop serves others, it is made in slices: no call looks at more than
 * options.slice_slots of them. Loop thread only.
 */
#include "base/crc32c.h"
#include "base/err.h"
#include "base/mem.h"
#include "store/seg_core.h"

#include <errno.h>

enum { CHECKPOINT_MAX = 512 << 20 };

static size_t words_of(uint32_t n_slots) {
    return (n_slots + 63) / 64;
}

/* Empty ones say so: what an older run finds there doesn't count. */
static bool is_marked(const struct cst_seg_segment *s) {
    bool has_content = s->state == CST_SEG_OPEN || s->state == CST_SEG_CLOSING ||
                       s->state == CST_SEG_CLOSED || s->state == CST_SEG_EVICTING;

    return (s->state == CST_SEG_FREE && s->fill) || (has_content && s->ns && s->n_slots);
}

static uint64_t pin_of(const struct cst_seg *seg, const struct cst_seg_slot *slot) {
    return slot->owner && seg->env.user.pinned_until
               ? seg->env.user.pinned_until(seg->env.user.arg, slot->owner)
               : 0;
}

/*
 * A checkpoint being made, a bounded number of slots a slice. What changes behind it makes the next
 * one necessary, so what it says of each segment is as true as when it was looked at.
 */
struct cst_seg_draft {
    uint8_t *data; /* owned: the head, finished marks, and the one under way from `at` on */
    size_t n, cap, at;
    uint32_t next;         /* segment */
    bool under_way, hurry; /* hurry: seg->hurry, as it was */
    uint64_t fill, start;  /* of that one */
    uint32_t slot, n_slots, n_pins;
    uint64_t n_records;
    uint32_t n_marks;
};

/* n zeroed bytes at the end. NULL: no memory. */
static void *extend(struct cst_seg_draft *d, size_t n) {
    uint8_t *out;

    if (cst_grow(&d->data, &d->cap, d->n + n, 1))
        return NULL;
    out = d->data + d->n;
    memset(out, 0, n);
    d->n += n;
    return out;
}

static int mark_begin(struct cst_seg_draft *d, const struct cst_seg_segment *s) {
    struct cst_disk_mark *m;

    d->at = d->n;
    m = extend(d, sizeof(*m) + 8 * words_of(s->n_slots));
    if (!m)
        return cst_err(-ENOMEM);
    cst_store32(&m->segment, s->id);
    cst_store32(&m->n_slots, s->n_slots);
    cst_store64(&m->fill, s->fill);
    cst_store64(&m->start, s->start);
    d->under_way = true;
    d->fill = s->fill;
    d->start = s->start;
    d->slot = d->n_pins = 0;
    d->n_slots = s->n_slots;
    return 0;
}

static int mark_slots(const struct cst_seg *seg, struct cst_seg_draft *d,
                      const struct cst_seg_segment *s, uint32_t end) {
    for (; d->slot < end; d->slot++) {
        const struct cst_seg_slot *slot = &s->slots[d->slot];
        uint8_t *bits = d->data + d->at + sizeof(struct cst_disk_mark);
        uint64_t until = pin_of(seg, slot);
        struct cst_disk_pin *pin;

        if (!slot->owner)
            bits[d->slot / 8] |= (uint8_t)(1U << d->slot % 8);
        if (!until)
            continue;
        pin = extend(d, sizeof(*pin));
        if (!pin)
            return cst_err(-ENOMEM);
        cst_store32(&pin->slot, d->slot);
        cst_store64(&pin->until, until);
        d->n_pins++;
    }
    return 0;
}

static void mark_end(struct cst_seg_draft *d, const struct cst_seg_segment *s) {
    struct cst_disk_mark *m = (struct cst_disk_mark *)(d->data + d->at);

    cst_store32(&m->n_pins, d->n_pins);
    d->n_records += s->n_live;
    d->n_marks++;
    d->under_way = false;
    d->next++;
}

/* Has the segment another content than when its mark was begun? */
static bool is_stale(const struct cst_seg_draft *d, const struct cst_seg_segment *s) {
    return !is_marked(s) || s->fill != d->fill || s->start != d->start || s->n_slots < d->n_slots;
}

/* Goes on by so many slots (a segment counts as one). 0; negative errno. */
static int go_on(const struct cst_seg *seg, struct cst_seg_draft *d, uint64_t slots) {
    while (d->next < seg->n_segments && slots) {
        const struct cst_seg_segment *s = &seg->segments[d->next];
        uint64_t n;
        int r = 0;

        slots--;
        if (d->under_way && is_stale(d, s)) {
            d->n = d->at;
            d->under_way = false;
        }
        if (!d->under_way && !is_marked(s)) {
            d->next++;
            continue;
        }
        if (!d->under_way)
            r = mark_begin(d, s);
        n = r ? 0 : CST_MIN(slots, (uint64_t)d->n_slots - d->slot);
        if (!r)
            r = mark_slots(seg, d, s, d->slot + (uint32_t)n);
        if (r)
            return r;
        slots -= n;
        if (d->slot == d->n_slots)
            mark_end(d, s);
    }
    return 0;
}

static int write_draft(struct cst_seg *seg, struct cst_seg_draft *d, bool clean) {
    struct cst_disk_checkpoint *head = (struct cst_disk_checkpoint *)d->data;
    size_t body = d->n - sizeof(*head);

    memcpy(head->magic, CST_DISK_CHECKPOINT_MAGIC, sizeof(head->magic));
    cst_seg_version_set(&head->version);
    memcpy(head->uuid, seg->uuid, sizeof(head->uuid));
    cst_store64(&head->generation, seg->generation);
    cst_store64(&head->sequence, seg->sequence);
    cst_store64(&head->written, cst_seg_unix(seg));
    cst_store64(&head->n_records, d->n_records);
    cst_store64(&head->body_bytes, body);
    cst_store32(&head->flags, clean ? CST_DISK_CLEAN : 0);
    cst_store32(&head->n_segments, d->n_marks);
    cst_store32(&head->body_crc, cst_crc32c(0, head + 1, body));
    cst_seg_crc_set(head, sizeof(*head));
    return cst_seg_replace(seg, CST_DISK_CHECKPOINT_NAME, d->data, d->n, clean);
}

struct cst_seg_draft *cst_seg_draft_free(struct cst_seg_draft *d) {
    if (d)
        cst_free(d->data);
    return cst_free(d);
}

/* What happens from now on is for the next one. */
static struct cst_seg_draft *draft_new(struct cst_seg *seg) {
    struct cst_seg_draft *d = cst_calloc(1, sizeof(*d));

    if (!d || !extend(d, sizeof(struct cst_disk_checkpoint)))
        return cst_seg_draft_free(d);
    d->hurry = seg->hurry;
    seg->changed = seg->hurry = false;
    return d;
}

/* What it was to say is still to be said. */
static void draft_failed(struct cst_seg *seg, const struct cst_seg_draft *d, int r) {
    seg->changed = true;
    seg->hurry |= d && d->hurry;
    cst_seg_error(seg, r);
}

int cst_seg_checkpoint_clean(struct cst_seg *seg) {
    struct cst_seg_draft *d = draft_new(seg);
    int r = d ? go_on(seg, d, UINT64_MAX) : cst_err(-ENOMEM);

    if (!r)
        r = write_draft(seg, d, true);
    if (r)
        draft_failed(seg, d, r);
    (void)cst_seg_draft_free(d);
    return r;
}

static uint64_t slice_slots(const struct cst_seg *seg) {
    uint32_t wanted = seg->options.slice_slots;

    return wanted ? CST_MAX(wanted, 2U) : 8192;
}

void cst_seg_checkpoint_slice(struct cst_seg *seg) {
    struct cst_seg_draft *d = seg->draft ? seg->draft : draft_new(seg);
    int r = d ? go_on(seg, d, slice_slots(seg)) : cst_err(-ENOMEM);

    seg->draft = d;
    if (!r && d->next < seg->n_segments)
        return;
    if (!r)
        r = write_draft(seg, d, false);
    if (r)
        draft_failed(seg, d, r);
    seg->draft = cst_seg_draft_free(d);
}

/* ---- what a start reads ---- */

struct cst_seg_marks {
    uint8_t *data; /* owned */
    bool clean;
    uint32_t n;                               /* ids below it */
    const struct cst_disk_mark *by_segment[]; /* NULL: none */
};

struct cst_seg_marks *cst_seg_marks_free(struct cst_seg_marks *m) {
    if (m)
        cst_free(m->data);
    return cst_free(m);
}

static bool is_sound(const struct cst_seg *seg, const uint8_t *data, size_t n) {
    const struct cst_disk_checkpoint *head = (const struct cst_disk_checkpoint *)data;
    bool write;

    return n >= sizeof(*head) &&
           !memcmp(head->magic, CST_DISK_CHECKPOINT_MAGIC, sizeof(head->magic)) &&
           cst_seg_crc_is(head, sizeof(*head)) &&
           cst_seg_version_is_known(&head->version, &write) &&
           !memcmp(head->uuid, seg->uuid, sizeof(head->uuid)) &&
           cst_load64(&head->body_bytes) == n - sizeof(*head) &&
           cst_load32(&head->body_crc) == cst_crc32c(0, head + 1, n - sizeof(*head));
}

static void index_marks(struct cst_seg_marks *m, size_t n) {
    const struct cst_disk_checkpoint *head = (const struct cst_disk_checkpoint *)m->data;
    size_t at = sizeof(*head);

    for (uint32_t i = 0; i < cst_load32(&head->n_segments); i++) {
        const struct cst_disk_mark *mark = (const struct cst_disk_mark *)(m->data + at);
        uint32_t id;

        if (n - at < sizeof(*mark))
            return;
        id = cst_load32(&mark->segment);
        at += sizeof(*mark);
        if (n - at < 8 * words_of(cst_load32(&mark->n_slots)))
            return;
        at += 8 * words_of(cst_load32(&mark->n_slots));
        if ((n - at) / sizeof(struct cst_disk_pin) < cst_load32(&mark->n_pins))
            return;
        at += cst_load32(&mark->n_pins) * sizeof(struct cst_disk_pin);
        if (id < m->n)
            m->by_segment[id] = mark;
    }
}

int cst_seg_marks_read(struct cst_seg *seg, struct cst_seg_marks **out) {
    struct cst_seg_marks *m =
        cst_calloc(1, sizeof(*m) + seg->n_segments * sizeof(m->by_segment[0]));
    const struct cst_disk_checkpoint *head;
    size_t n = 0;
    int r;

    if (!m)
        return cst_err(-ENOMEM);
    r = cst_seg_slurp(seg, CST_DISK_CHECKPOINT_NAME, CHECKPOINT_MAX, &m->data, &n);
    *out = m;
    m->n = seg->n_segments;
    if (r || !is_sound(seg, m->data, n)) {
        m->n = 0;
        return 0;
    }
    head = (const struct cst_disk_checkpoint *)m->data;
    m->clean = cst_load32(&head->flags) & CST_DISK_CLEAN;
    seg->generation = CST_MAX(seg->generation, cst_load64(&head->generation));
    seg->sequence = CST_MAX(seg->sequence, cst_load64(&head->sequence));
    index_marks(m, n);
    return 0;
}

bool cst_seg_marks_clean(const struct cst_seg_marks *m) {
    return m->clean;
}

/* Only the head is written, in its place, which is less than a sector: the marks are as true as
 * they were, and many. */
int cst_seg_marks_unclean(struct cst_seg *seg, const struct cst_seg_marks *m) {
    struct cst_disk_checkpoint head;
    struct cst_aio_file *file;
    int r;

    if (!m->clean)
        return 0;
    memcpy(&head, m->data, sizeof(head));
    cst_store32(&head.flags, cst_load32(&head.flags) & ~(uint32_t)CST_DISK_CLEAN);
    cst_seg_crc_set(&head, sizeof(head));
    r = cst_aio_open(seg->env.aio, CST_DISK_CHECKPOINT_NAME, CST_AIO_BUFFERED, &file);
    if (r)
        return cst_fold(r);
    r = cst_aio_now(file, CST_AIO_WRITE, &head, 0, sizeof(head));
    (void)cst_aio_close(file);
    return r == CST_AIO_E_FULL ? cst_err(-ENOSPC) : cst_fold(r); /* of copy on write */
}

static const struct cst_disk_mark *mark_of(const struct cst_seg_marks *m,
                                           const struct cst_seg_segment *s) {
    const struct cst_disk_mark *mark = s->id < m->n ? m->by_segment[s->id] : NULL;

    return mark && cst_load64(&mark->fill) == s->fill && cst_load64(&mark->start) == s->start
               ? mark
               : NULL;
}

bool cst_seg_marks_empty(const struct cst_seg_marks *m, const struct cst_seg_segment *s) {
    const struct cst_disk_mark *mark = mark_of(m, s);

    return mark && !cst_load32(&mark->n_slots);
}

bool cst_seg_marks_dropped(const struct cst_seg_marks *m, const struct cst_seg_segment *s,
                           uint32_t slot) {
    const struct cst_disk_mark *mark = mark_of(m, s);

    return mark && slot < cst_load32(&mark->n_slots) &&
           ((const uint8_t *)(mark + 1))[slot / 8] >> slot % 8 & 1;
}

uint32_t cst_seg_marks_missing(const struct cst_seg_marks *m, const struct cst_seg *seg) {
    uint32_t n = 0;

    for (uint32_t id = 0; id < m->n; id++)
        n +=
            m->by_segment[id] && cst_load32(&m->by_segment[id]->n_slots) && !seg->segments[id].file;
    return n;
}

uint64_t cst_seg_marks_pin(const struct cst_seg_marks *m, const struct cst_seg_segment *s,
                           uint32_t slot) {
    const struct cst_disk_mark *mark = mark_of(m, s);
    const struct cst_disk_pin *pins;
    uint32_t low = 0, high;

    if (!mark)
        return 0;
    pins = (const struct cst_disk_pin *)((const uint8_t *)(mark + 1) +
                                         8 * words_of(cst_load32(&mark->n_slots)));
    high = cst_load32(&mark->n_pins);
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;

        if (cst_load32(&pins[middle].slot) < slot)
            low = middle + 1;
        else
            high = middle;
    }
    return low < cst_load32(&mark->n_pins) && cst_load32(&pins[low].slot) == slot
               ? cst_load64(&pins[low].until)
               : 0;
}
