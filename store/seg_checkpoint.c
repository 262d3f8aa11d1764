/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns checkpoints: which records were dropped, which are pinned. Everything else is in the
 * segments. Invariants: 1. a mark only ever hides or pins records of the very fill it was made for,
 * so an old checkpoint is as true as it was; 2. a checkpoint that fails a check is as none. Loop
 * thread only.
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

/* Bytes of the segment's mark; with out they are written. */
static size_t mark(const struct cst_seg *seg, const struct cst_seg_segment *s, uint8_t *out) {
    struct cst_disk_mark *m = (struct cst_disk_mark *)out;
    size_t bitmap = 8 * words_of(s->n_slots);
    struct cst_disk_pin *pin = out ? (struct cst_disk_pin *)(out + sizeof(*m) + bitmap) : NULL;
    uint32_t n_pins = 0;

    for (uint32_t i = 0; i < s->n_slots; i++) {
        uint64_t until = pin_of(seg, &s->slots[i]);

        if (out && !s->slots[i].owner)
            out[sizeof(*m) + i / 8] |= (uint8_t)(1U << i % 8);
        if (!until)
            continue;
        if (pin) {
            cst_store32(&pin[n_pins].slot, i);
            cst_store64(&pin[n_pins].until, until);
        }
        n_pins++;
    }
    if (m) {
        cst_store32(&m->segment, s->id);
        cst_store32(&m->n_slots, s->n_slots);
        cst_store64(&m->fill, s->fill);
        cst_store64(&m->start, s->start);
        cst_store32(&m->n_pins, n_pins);
    }
    return sizeof(*m) + bitmap + n_pins * sizeof(*pin);
}

int cst_seg_checkpoint_now(struct cst_seg *seg, bool clean) {
    cst_auto(cst_freep) uint8_t *data = NULL;
    struct cst_disk_checkpoint *head;
    size_t bytes = sizeof(*head), at = sizeof(*head);
    uint64_t n_records = 0;
    uint32_t n = 0;

    for (uint32_t i = 0; i < seg->n_segments; i++)
        if (is_marked(&seg->segments[i]))
            bytes += mark(seg, &seg->segments[i], NULL);
    data = cst_calloc(1, bytes);
    if (!data)
        return cst_err(-ENOMEM);
    for (uint32_t i = 0; i < seg->n_segments; i++) {
        if (!is_marked(&seg->segments[i]))
            continue;
        at += mark(seg, &seg->segments[i], data + at);
        n_records += seg->segments[i].n_live;
        n++;
    }
    head = (struct cst_disk_checkpoint *)data;
    memcpy(head->magic, CST_DISK_CHECKPOINT_MAGIC, sizeof(head->magic));
    cst_seg_version_set(&head->version);
    memcpy(head->uuid, seg->uuid, sizeof(head->uuid));
    cst_store64(&head->generation, seg->generation);
    cst_store64(&head->sequence, seg->sequence);
    cst_store64(&head->written, cst_seg_unix(seg));
    cst_store64(&head->n_records, n_records);
    cst_store64(&head->body_bytes, bytes - sizeof(*head));
    cst_store32(&head->flags, clean ? CST_DISK_CLEAN : 0);
    cst_store32(&head->n_segments, n);
    cst_store32(&head->body_crc, cst_crc32c(0, head + 1, bytes - sizeof(*head)));
    cst_seg_crc_set(head, sizeof(*head));
    seg->changed = seg->hurry = false;
    return cst_seg_replace(seg, CST_DISK_CHECKPOINT_NAME, data, bytes, clean);
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
