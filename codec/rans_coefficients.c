/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Coefficients with tables by class. The highest classes keep their lowest bits raw and use the
 * table of as many octaves below, which costs next to nothing where a step is small against the
 * deviation. The first few channels, in a transform's order those with the largest deviations, keep
 * one bit more where the lanes have room for raw bits that would stay empty; the stream's tag says
 * how many.
 *
 * Tables are made when a class first comes: invariant: bit i of `made` says that table[i] is.
 */
#include "codec/rans.h"

#include "codec/dispatch.h"

#include "base/macros.h"

#include <string.h>

enum { TOP = CST_RANS_TABLES - 1, PER_OCTAVE = 4, TAG_MAX = 31, MORE_MIN = 24 };
_Static_assert(2 * CST_RANS_CLASSES <= CST_RANS_BOOK, "classes, then those with one raw bit more");

struct cst_rans_work {
    struct cst_rans_table table[CST_RANS_TABLES];
    struct cst_rans_scratch scratch;
    uint8_t klass[CST_RANS_CHANNELS]; /* with CST_RANS_CLASSES added for one raw bit more */
    uint64_t made;
};

size_t cst_rans_work_size(void) {
    return sizeof(struct cst_rans_work);
}

struct cst_rans_work *cst_rans_work_init(void *memory) {
    struct cst_rans_work *work = memory;

    work->made = 0;
    return work;
}

static const struct cst_rans_table *table_of(struct cst_rans_work *work, unsigned i) {
    uint16_t frequency[2 * CST_RANS_REACH + 1];

    if (!(work->made >> i & 1)) {
        int reach = cst_rans_frequencies(frequency, i);

        (void)cst_rans_table_init(&work->table[i], frequency, reach);
        work->made |= UINT64_C(1) << i;
    }
    return &work->table[i];
}

static unsigned shift_of(unsigned klass) {
    return klass > TOP ? (klass - TOP + PER_OCTAVE - 1) / PER_OCTAVE : 0;
}

/* `more` channels with one raw bit more. false: a class that doesn't exist, or too many channels.
 */
static bool make_book(struct cst_rans_book *book, struct cst_rans_matrix *m, uint32_t more,
                      struct cst_rans_work *work) {
    if (m->channels > CST_RANS_CHANNELS || more > m->channels)
        return false;
    *book = (struct cst_rans_book){ .tag = (uint8_t)more };
    for (uint32_t c = 0; c < m->channels; c++) {
        unsigned klass = m->klass[c], shift = shift_of(klass) + (c < more), at = klass;

        if (klass >= CST_RANS_CLASSES)
            return false;
        if (c < more)
            at += CST_RANS_CLASSES;
        work->klass[c] = (uint8_t)at;
        if (book->table[at])
            continue;
        book->shift[at] = (uint8_t)shift;
        book->table[at] = table_of(work, klass - CST_MIN(klass, PER_OCTAVE * shift));
    }
    m->klass = work->klass;
    return true;
}

/* How many channels have to keep one bit more until the lanes are full, if there are as many lanes
 * as the symbols are worth. */
static uint32_t choose_more(const struct cst_rans_matrix *m, const struct cst_rans_book *book) {
    uint32_t lanes = CST_RANS_LANES, more;
    size_t raw = 8 * m->payload_len, room;
    uint64_t cost = 0;

    for (uint32_t c = 0; c < m->channels; c++) {
        cost += (uint64_t)book->table[m->klass[c]]->cost * m->tokens / 256;
        raw += (size_t)book->shift[m->klass[c]] * m->tokens;
    }
    while (lanes > 1 && (lanes > m->tokens || !cst_rans_lanes_pay(lanes, 0, cost)))
        lanes /= 2;
    room = CST_RANS_LANE_ROOM * (size_t)lanes;
    for (more = 0; raw < room && more < CST_MIN(m->channels, TAG_MAX); raw += m->tokens) {
        if (m->klass[more++] < MORE_MIN)
            return 0;
    }
    return more;
}

size_t cst_rans_encode_coefficients(uint8_t *dst, size_t cap, const struct cst_rans_matrix *m,
                                    struct cst_rans_work *work, const struct cst_codec_ops *ops) {
    struct cst_rans_matrix with_book = *m;
    struct cst_rans_book book;

    if (!make_book(&book, &with_book, 0, work))
        return 0;
    with_book.klass = m->klass;
    (void)make_book(&book, &with_book, choose_more(m, &book), work);
    return cst_rans_encode(dst, cap, &with_book, &book, ops);
}

bool cst_rans_decode_coefficients(const struct cst_rans_matrix *m, const uint8_t *src, size_t len,
                                  struct cst_rans_work *work, const struct cst_codec_ops *ops) {
    struct cst_rans_matrix with_book = *m;
    struct cst_rans_book book;

    return len > 0 && make_book(&book, &with_book, src[0] >> 3, work) &&
           cst_rans_decode(&with_book, src, len, &book, &work->scratch, ops);
}
