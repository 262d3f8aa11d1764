/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stage EXPONENTS: the values of a channel are about logistic around zero, so one number, the
 * quarter octave of its deviation, says how often each exponent comes. Four tables are enough: one
 * for each quarter of an octave, whole octaves move the exponents. Signs and mantissas are noise
 * and stay as they are, in memory order; they also fill the coder's lanes.
 *
 * Values that don't look like that, few different ones above all, are smaller as PLANES; the
 * encoder leaves them to it.
 *
 * A level is a deviation's quarter octave: exponent of the symbol CST_EXPONENTS_MIDDLE times 4,
 * plus the table. The encoder takes the one that costs least.
 */
#include "codec/exponents.h"

#include "codec/coded.h"
#include "codec/fixed_math.h"
#include "codec/format.h"
#include "codec/rans.h"

#include "base/macros.h"

#include <math.h>
#include <string.h>

enum {
    REACH = CST_EXPONENTS_REACH,
    MIDDLE = CST_EXPONENTS_MIDDLE,
    SYMBOLS = 2 * REACH + 1,
    SLOTS = 1 << CST_RANS_BITS,
    WINDOW = 16, /* exponents on each side of the middle one whose costs are told apart */
    LEVELS = 1024,
    MEAN_TO_LEVEL = 6, /* 4 times the mean exponent of a level lies so much below it, about */
    BITS_MAX = 6,      /* of a channel's level above the lowest one */
};

struct cst_exponents_work {
    struct cst_rans_book book;
    struct cst_rans_table table[CST_EXPONENTS_TABLES];
    struct cst_rans_scratch scratch;
    uint32_t cost[CST_EXPONENTS_TABLES][2 * WINDOW + 1]; /* of symbols, in 1/256 bits */
};

/* ---- tables ---------------------------------------------------------------------------------- */

/* The probability that the magnitude of a logistic variable lies below x; a is pi / sqrt(3) over
 * its deviation. */
static double below(double x, double a) {
    return 2 / (1 + cst_fixed_exp(-x * a)) - 1;
}

void cst_exponents_frequencies(uint16_t frequency[SYMBOLS], unsigned table) {
    static const double quarter[4] = { 1, 0x1.306fe0a31b715p+0, 0x1.6a09e667f3bcdp+0,
                                       0x1.ae89f995ad3adp+0 };
    double a = 0x1.d05527b6e43d2p+0 / quarter[table];
    int rest = SLOTS;

    for (int s = -REACH; s <= REACH; s++) {
        double end = s < REACH ? below(ldexp(2, s - MIDDLE), a) : 1;
        double start = s > -REACH ? below(ldexp(1, s - MIDDLE), a) : 0;
        int f = (int)floor(SLOTS * (end - start) + 0.5);

        frequency[s + REACH] = (uint16_t)CST_MAX(1, f);
        rest -= CST_MAX(1, f);
    }
    frequency[MIDDLE + REACH] = (uint16_t)(frequency[MIDDLE + REACH] + rest);
}

/* 256 log2 x */
static uint32_t log2_of(uint32_t x) {
    return (uint32_t)(cst_fixed_log(x) * (256 / 0x1.62e42fefa39efp-1) + 0.5);
}

size_t cst_exponents_work_size(void) {
    return sizeof(struct cst_exponents_work);
}

struct cst_exponents_work *cst_exponents_work_init(void *memory) {
    struct cst_exponents_work *work = memory;

    work->book.table[0] = NULL; /* made when they are needed */
    return work;
}

static void make_tables(struct cst_exponents_work *work) {
    if (work->book.table[0])
        return;
    work->book = (struct cst_rans_book){ 0 };
    for (unsigned i = 0; i < CST_EXPONENTS_TABLES; i++) {
        uint16_t frequency[SYMBOLS];

        cst_exponents_frequencies(frequency, i);
        (void)cst_rans_table_init(&work->table[i], frequency, REACH);
        work->book.table[i] = &work->table[i];
        for (int s = -WINDOW; s <= WINDOW; s++) {
            int outer = CST_MAX(s, -s) - REACH, at = CST_MAX(-REACH, CST_MIN(REACH, s)) + REACH;
            uint32_t beyond = outer < 0 ? 0 : 256 + 2 * log2_of((uint32_t)outer + 1);

            work->cost[i][s + WINDOW] = 256 * CST_RANS_BITS - log2_of(frequency[at]) + beyond;
        }
    }
}

/* ---- planes and rows ------------------------------------------------------------------------- */

/* Where the bytes of a plane, that is, of present elements in memory order, lie. */
struct packed {
    size_t token, head, dim; /* distances */
};

static size_t inside(uint64_t n, uint64_t stride, uint64_t outer_stride) {
    return n > 1 && stride < outer_stride ? n : 1;
}

static struct packed packed_of(const struct cst_view *v, uint32_t tokens) {
    return (struct packed){
        .token = inside(v->heads, v->head_stride, v->token_stride) *
                 inside(v->dims, v->dim_stride, v->token_stride),
        .head = inside(tokens, v->token_stride, v->head_stride) *
                inside(v->dims, v->dim_stride, v->head_stride),
        .dim = inside(tokens, v->token_stride, v->dim_stride) *
               inside(v->heads, v->head_stride, v->dim_stride),
    };
}

/* Scratch by channel, in w->a: a segment has at least 16 tokens of 2 bytes a channel. */
struct channels {
    uint32_t n;
    int32_t *offset; /* from an exponent to its symbol */
    uint16_t *level;
    uint8_t *code, *klass;
};

static struct channels channels_of(const struct cst_stage_segment *s,
                                   const struct cst_codec_work *w) {
    uint32_t n = cst_view_channels(s->view), padded = (uint32_t)cst_align_up(n, 8);
    struct channels c = { .n = n, .offset = (void *)w->a };

    c.level = (void *)(c.offset + n);
    c.code = (void *)(c.level + n);
    c.klass = c.code + padded;
    return c;
}

static struct cst_rans_matrix matrix_of(const struct cst_stage_segment *s, const struct channels *c,
                                        uint8_t *low, size_t n, const struct cst_codec_work *w) {
    return (struct cst_rans_matrix){
        .q = (void *)w->plane,
        .stride = cst_align_up(s->tokens, CST_RANS_ROW),
        .tokens = s->tokens,
        .channels = c->n,
        .klass = c->klass,
        .payload = low,
        .payload_len = n,
    };
}

/* Between a plane and rows of integers; offsets are NULL for none. */
static void plane_to_rows(const struct cst_rans_matrix *m, const uint8_t *plane,
                          const struct cst_view *v, const struct cst_codec_ops *ops) {
    struct packed p = packed_of(v, m->tokens);
    uint32_t at_once = p.dim == 1 ? v->dims : 1;

    for (uint32_t c = 0; c < m->channels; c += at_once)
        ops->bytes_to_rows(m->q + c * m->stride, m->stride,
                           plane + c / v->dims * p.head + c % v->dims * p.dim, p.token, m->tokens,
                           at_once);
}

static void rows_to_plane(uint8_t *plane, const struct cst_rans_matrix *m, const int32_t *offset,
                          const struct cst_view *v, const struct cst_codec_ops *ops) {
    struct packed p = packed_of(v, m->tokens);
    uint32_t at_once = p.dim == 1 ? v->dims : 1;

    for (uint32_t c = 0; c < m->channels; c += at_once)
        ops->rows_to_bytes(plane + c / v->dims * p.head + c % v->dims * p.dim, p.token,
                           m->q + c * m->stride, m->stride, m->tokens, offset + c, at_once);
}

/* ---- encode ---------------------------------------------------------------------------------- */

/* How often each exponent comes, around a middle one; those farther away count as the last. */
struct histogram {
    int middle, first, last; /* bins that aren't empty */
    uint32_t count[2 * WINDOW + 1];
};

static uint64_t cost_of(const struct histogram *h, int level,
                        const struct cst_exponents_work *work) {
    const uint32_t *cost = work->cost[level & 3];
    int moved = MIDDLE + h->middle - (level >> 2);
    uint64_t sum = 0;

    for (int i = h->first; i <= h->last; i++)
        sum += (uint64_t)h->count[i] * cost[CST_MAX(0, CST_MIN(2 * WINDOW, i + moved))];
    return sum;
}

/* Four counters a bin in turn, so that no increment waits for the one before. */
static void count_exponents(struct histogram *h, const int32_t *e, uint32_t tokens) {
    uint32_t count[4][2 * WINDOW + 1] = { { 0 } };

    for (uint32_t t = 0; t < tokens; t++)
        count[t % 4][CST_MAX(-WINDOW, CST_MIN(WINDOW, e[t] - h->middle)) + WINDOW]++;
    h->first = 2 * WINDOW;
    h->last = 0;
    for (int i = 0; i <= 2 * WINDOW; i++) {
        h->count[i] = count[0][i] + count[1][i] + count[2][i] + count[3][i];
        if (h->count[i]) {
            h->first = CST_MIN(h->first, i);
            h->last = i;
        }
    }
}

/* The level of a row of exponents: from where their mean lies, zeros left out, as long as the next
 * one costs less. */
static uint16_t choose_level(const int32_t *e, uint32_t tokens,
                             const struct cst_exponents_work *work) {
    uint32_t present = 0, sum = 0;
    struct histogram h;
    int level, start;
    uint64_t cost;

    for (uint32_t t = 0; t < tokens; t++) {
        sum += (uint32_t)e[t];
        present += e[t] > 0;
    }
    if (2 * present < tokens)
        return 0; /* zeros, above all */
    h.middle = (int)(sum / present);
    count_exponents(&h, e, tokens);
    level = start = (int)(4 * sum / present) + MEAN_TO_LEVEL;
    cost = cost_of(&h, level, work);
    for (int step = -1; step <= 1 && level == start; step += 2) {
        uint64_t next;

        for (; (next = cost_of(&h, level + step, work)) < cost; level += step)
            cost = next;
    }
    return (uint16_t)CST_MAX(0, CST_MIN(LEVELS - 1, level));
}

/* The head for the channels' levels: from the lowest on, channels of zeros (level 0) left to the
 * highest code where there are others. Where six bits don't reach, around the mean. */
static struct cst_exponents_header choose_head(const struct channels *c) {
    struct cst_exponents_header head = { 0 };
    uint32_t lowest = LEVELS, highest = 0, sum = 0, n = 0, zeros = 0, codes;

    for (uint32_t i = 0; i < c->n; i++) {
        if (c->level[i] == 0) {
            zeros++;
            continue;
        }
        lowest = CST_MIN(lowest, c->level[i]);
        highest = CST_MAX(highest, c->level[i]);
        sum += c->level[i];
        n++;
    }
    if (n == 0)
        return head;
    head.flags = zeros ? CST_EXPONENTS_ZEROS : 0;
    codes = highest - lowest + 1 + (zeros > 0);
    while (head.bits < BITS_MAX && codes > 1u << head.bits)
        head.bits++;
    if (codes > 1u << BITS_MAX && sum / n > lowest + (1u << BITS_MAX) / 2)
        lowest = sum / n - (1u << BITS_MAX) / 2;
    cst_store16(&head.level, (uint16_t)lowest);
    return head;
}

/* The level that a code stands for. */
static uint32_t level_of(const struct cst_exponents_header *head, uint32_t code) {
    if (head->flags & CST_EXPONENTS_ZEROS && code == (1u << head->bits) - 1)
        return 0;
    return cst_load16(&head->level) + code;
}

static uint8_t code_of(const struct cst_exponents_header *head, uint32_t level) {
    uint32_t most = (1u << head->bits) - 1, lowest = cst_load16(&head->level);

    if (head->flags & CST_EXPONENTS_ZEROS) {
        if (level == 0)
            return (uint8_t)most;
        most--;
    }
    return (uint8_t)(level > lowest ? CST_MIN(level - lowest, most) : 0);
}

/* Levels, and rows of symbols in place of exponents; the head and the levels as they are stored.
 * Returns their length. */
static size_t encode_levels(uint8_t *dst, const struct cst_rans_matrix *m, struct channels *c,
                            const struct cst_codec_work *w) {
    uint32_t padded = (uint32_t)cst_align_up(c->n, 8);
    struct cst_exponents_header head;

    for (uint32_t i = 0; i < c->n; i++)
        c->level[i] = choose_level(m->q + i * m->stride, m->tokens, w->exponents);
    head = choose_head(c);
    memset(c->code, 0, padded);
    for (uint32_t i = 0; i < c->n; i++) {
        uint8_t code = code_of(&head, c->level[i]);
        uint32_t level = level_of(&head, code);
        int32_t offset = MIDDLE - (int32_t)(level >> 2);

        c->code[i] = code;
        c->klass[i] = level & 3;
        for (uint32_t t = 0; t < m->tokens; t++)
            m->q[i * m->stride + t] += offset;
    }
    memcpy(dst, &head, sizeof(head));
    cst_coded_pack(dst + sizeof(head), c->code, padded, head.bits);
    return sizeof(head) + padded / 8 * head.bits;
}

size_t cst_exponents_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                            const struct cst_codec_work *w) {
    struct cst_runs runs;
    struct cst_rans_matrix m;
    struct channels c;
    size_t n, at, len;

    if (!s->view || s->dtype != CST_DTYPE_BF16 || cst_view_channels(s->view) > CST_RANS_CHANNELS)
        return 0;
    runs = cst_view_runs(s->view, s->tokens);
    if (!cst_runs_holes_are_zero(&runs, seg, s->length))
        return 0;
    n = cst_runs_total(&runs) / 2;
    w->ops->split(w->b, w->b + n, cst_planes_elements(seg, &runs, w), n);
    c = channels_of(s, w);
    m = matrix_of(s, &c, w->b + n, n, w);
    make_tables(w->exponents);
    plane_to_rows(&m, w->b, s->view, w->ops);
    at = sizeof(struct cst_exponents_header) + cst_align_up(c.n, 8) / 8 * BITS_MAX;
    if (at >= s->length)
        return 0;
    at = encode_levels(dst, &m, &c, w);
    len = cst_rans_encode(dst + at, s->length - at, &m, &w->exponents->book, w->ops);
    return len && at + len < cst_planes_bound(w->b, w->b + n, n) ? at + len : 0;
}

/* ---- decode ---------------------------------------------------------------------------------- */

/* The head and the levels; their length, or 0. */
static size_t decode_levels(struct channels *c, const uint8_t *src, size_t len,
                            const struct cst_codec_ops *ops) {
    uint32_t padded = (uint32_t)cst_align_up(c->n, 8);
    struct cst_exponents_header head;
    size_t at;

    if (len < sizeof(head))
        return 0;
    memcpy(&head, src, sizeof(head));
    at = sizeof(head) + padded / 8 * head.bits;
    if (head.flags & ~CST_EXPONENTS_ZEROS || head.bits > BITS_MAX ||
        cst_load16(&head.level) >= LEVELS || len < at)
        return 0;
    if (head.bits)
        ops->unpack(c->code, src + sizeof(head), padded, head.bits);
    else
        memset(c->code, 0, padded);
    for (uint32_t i = 0; i < c->n; i++) {
        uint32_t level = level_of(&head, c->code[i]);

        c->klass[i] = level & 3;
        c->offset[i] = (int32_t)(level >> 2) - MIDDLE;
    }
    return at;
}

bool cst_exponents_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                          size_t len, const struct cst_codec_work *w) {
    struct cst_runs runs;
    struct cst_rans_matrix m;
    struct channels c;
    size_t n, at;

    if (!s->view || s->dtype != CST_DTYPE_BF16 || cst_view_channels(s->view) > CST_RANS_CHANNELS)
        return false;
    runs = cst_view_runs(s->view, s->tokens);
    n = cst_runs_total(&runs) / 2;
    c = channels_of(s, w);
    m = matrix_of(s, &c, w->b + n, n, w);
    at = decode_levels(&c, src, len, w->ops);
    if (!at)
        return false;
    make_tables(w->exponents);
    if (!cst_rans_decode(&m, src + at, len - at, &w->exponents->book, &w->exponents->scratch,
                         w->ops))
        return false;
    rows_to_plane(w->b, &m, c.offset, s->view, w->ops);
    cst_runs_zero_holes(&runs, seg, s->length);
    cst_planes_put_elements(seg, &runs, w->b, w->b + n, w->ops);
    return true;
}
