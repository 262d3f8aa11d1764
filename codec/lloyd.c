/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stages LLOYD (TurboQuant, with or without its sign sketch) and SPUN: each head of a token as
 * rotated codes (heads.h) of the Lloyd-Max levels of a normal variable.
 *
 * The mean of each channel is taken off first where that saves more than the 16 bits that it
 * takes: halving the energy is worth half a bit a value. It is then set to what gives decoded
 * values the mean of the original ones, so that a block that is coded again and again doesn't
 * wander.
 */
#include "codec/coded.h"
#include "codec/fixed_math.h"
#include "codec/heads.h"
#include "codec/lloyd_table.h"
#include "codec/side.h"
#include "codec/sketch.h"

#include <math.h>
#include <string.h>

enum {
    MEAN_BITS = 16, /* what a mean takes */
    OWN_BITS = 5,   /* what it may cost where side data have means, too: see choose_means */
};
/* Rotations are compared on one token in so many. */
enum { SAMPLE = 8 };
/* Errors over that of normal values that make the transform alone suspect, and of the other
 * rotation over the transform's below which it is taken. */
static const double SUSPECT = 1.2, LESS = 0.8;

enum { FLAGS = CST_CODED_UNROTATED | CST_CODED_MEAN | CST_CODED_SIDE_MEAN | CST_CODED_SKETCH };

/* Where the parts of a stream lie, in bytes from its start. */
struct parts {
    struct cst_coded_shape shape;
    uint32_t heads, dims;
    uint32_t at_once; /* tokens whose norms fit into a row */
    float unit;       /* of the transform, where a head is one block; else 0 */
    bool spun;        /* stage SPUN */
    uint64_t means, norms, sizes, codes, end; /* sizes: of sketches, else none */
};

static struct parts parts_of(const struct cst_stage_segment *s, const struct cst_coded_header *head,
                             bool spun) {
    struct parts p = { .shape = cst_coded_shape(s, head->bits),
                       .heads = s->view->heads,
                       .dims = s->view->dims,
                       .spun = spun };

    p.means = sizeof(*head) + p.shape.sink_bytes;
    p.norms = p.means + (head->flags & CST_CODED_MEAN ? 2 * (uint64_t)p.shape.channels : 0);
    p.sizes = p.norms + 2 * (uint64_t)p.shape.coded * p.heads;
    p.codes =
        p.sizes + (head->flags & CST_CODED_SKETCH ? 2 * (uint64_t)p.shape.coded * p.heads : 0);
    p.at_once = p.shape.padded / p.heads;
    p.unit = p.dims & (p.dims - 1) || spun ? 0 : cst_head_unit(p.dims);
    p.end = p.codes + p.shape.coded * p.shape.row_bytes;
    return p;
}

/* Norms of coded tokens from t on, times the transform's unit where a head is one block, to
 * rows->b. */
static bool read_norms(const struct cst_coded_rows *rows, const struct parts *p, uint32_t t,
                       const uint8_t *src, const struct cst_coded_header *head,
                       const struct cst_codec_ops *ops) {
    uint32_t n = CST_MIN(p->at_once, p->shape.coded - t) * p->heads;
    bool ok = ops->halves(rows->b, src + p->norms + 2 * (size_t)t * p->heads,
                          cst_coded_unit(head->exponent), n);

    for (uint32_t i = 0; p->unit > 0 && i < n; i++)
        rows->b[i] *= p->unit;
    return ok;
}

/* The same of a stream with sketches. */
static bool decode_sketches(const struct cst_coded_rows *rows, const struct parts *p, uint32_t t,
                            const uint8_t *src, const struct cst_coded_header *head,
                            const float *mean, const struct cst_codec_ops *ops) {
    const float unit = cst_coded_unit(head->exponent);

    ops->unpack(rows->codes, src + p->codes + t * p->shape.row_bytes, p->shape.padded, head->bits);
    for (uint32_t h = 0, c = 0; h < p->heads; h++, c += p->dims) {
        size_t at = 2 * ((size_t)t * p->heads + h);
        float norm, size;

        if (!ops->halves(&norm, src + p->norms + at, unit, 1) ||
            !ops->halves(&size, src + p->sizes + at, unit, 1))
            return false;
        cst_sketch_decode(rows->x + c, rows->codes + c, p->dims, head->bits, norm, size,
                          mean ? mean + c : NULL, ops);
    }
    return true;
}

/* The same of stage SPUN; norms are in their row. */
static void decode_spun(const struct cst_coded_rows *rows, const struct parts *p,
                        const uint8_t *packed, const struct cst_coded_header *head,
                        const float *norm, const float *mean, const struct cst_codec_ops *ops) {
    const float *level = cst_lloyd_levels(head->bits);

    ops->unpack(rows->codes, packed, p->shape.padded, head->bits);
    for (uint32_t h = 0, c = 0; h < p->heads; h++) {
        float *x = rows->x + c;

        for (uint32_t d = 0; d < p->dims; d++)
            x[d] = level[rows->codes[c + d]] * norm[h];
        cst_head_spin_back(x, p->dims, ops);
        for (uint32_t d = 0; d < p->dims; d++, c++)
            x[d] += mean ? mean[c] : 0;
    }
}

/* Coded token t as it was before its means were taken off, or without them (NULL), to rows->x.
 * Tokens go up from 0; norms are read for as many as fit into a row. */
static bool decode_row(const struct cst_coded_rows *rows, const struct parts *p, uint32_t t,
                       const uint8_t *src, const struct cst_coded_header *head, const float *mean,
                       const struct cst_codec_ops *ops) {
    const float *level = cst_lloyd_levels(head->bits), *norm = rows->b + t % p->at_once * p->heads;
    const uint8_t *packed = src + p->codes + t * p->shape.row_bytes;

    if (head->flags & CST_CODED_SKETCH)
        return decode_sketches(rows, p, t, src, head, mean, ops);
    if (norm == rows->b && !read_norms(rows, p, t, src, head, ops))
        return false;
    if (p->spun) {
        decode_spun(rows, p, packed, head, norm, mean, ops);
        return true;
    }
    if (p->unit > 0) {
        ops->hadamard_row(rows->x, rows->codes, packed, level, head->bits, norm, mean, p->dims,
                          p->heads);
        return true;
    }
    ops->unpack(rows->codes, packed, p->shape.padded, head->bits);
    for (uint32_t h = 0, c = 0; h < p->heads; h++, c += p->dims)
        cst_head_decode(rows->x + c, rows->codes + c, p->dims, level, head->bits, norm[h],
                        mean ? mean + c : NULL, ops);
    return true;
}

/* ---- encode ---------------------------------------------------------------------------------- */

/* What finding the means needs, in w->b: a segment has at least 16 tokens of 2 bytes a channel. */
struct sums {
    double *mean, *deviation, *energy;
    float *zero;
};

static struct sums sums_init(uint8_t *b, uint32_t channels) {
    double *d = (void *)b;

    memset(b, 0, channels * (3 * sizeof(double) + sizeof(float)));
    return (struct sums){ d, d + channels, d + 2 * channels, (void *)(d + 3 * channels) };
}

/* Channel means, and as fp16 holds them. */
static bool find_means(float *mean, const struct sums *s, const float *x, const struct parts *p,
                       int exponent, const struct cst_codec_ops *ops) {
    for (uint32_t t = 0; t < p->shape.coded; t++)
        ops->add(s->mean, x + (size_t)t * p->shape.padded, p->shape.channels);
    for (uint32_t c = 0; c < p->shape.channels; c++) {
        uint8_t half[2];

        s->mean[c] /= p->shape.coded;
        if (!cst_coded_put(half, (float)s->mean[c], exponent))
            return false;
        mean[c] = cst_f16_to_f32(cst_load16(half)) * cst_coded_unit(exponent);
    }
    return true;
}

/* The squares of what is left when sums->mean is taken off; *energy: of the values. */
static double deviation_of(double *energy, const struct sums *s, const float *x,
                           const struct parts *p, const struct cst_codec_ops *ops) {
    double deviation = 0;

    memset(s->deviation, 0, p->shape.channels * sizeof(double));
    memset(s->energy, 0, p->shape.channels * sizeof(double));
    for (uint32_t t = 0; t < p->shape.coded; t++)
        ops->moments(s->deviation, s->energy, s->mean, x + (size_t)t * p->shape.padded, s->zero,
                     p->shape.channels);
    *energy = 0;
    for (uint32_t c = 0; c < p->shape.channels; c++) {
        *energy += s->energy[c];
        deviation += s->deviation[c];
    }
    return deviation;
}

/* Whether values of this energy are worth `bits` a channel to have the deviation instead:
 * log2(energy / deviation) / 2 bits a value are saved. */
static bool pays(double energy, double deviation, double bits, const struct parts *p) {
    return energy > deviation * cst_fixed_exp(1.3862943611198906 * bits / p->shape.coded);
}

static void take_means(float *x, const float *mean, const struct parts *p) {
    for (uint32_t t = 0; t < p->shape.coded; t++, x += p->shape.padded) {
        for (uint32_t c = 0; c < p->shape.channels; c++)
            x[c] -= mean[c];
    }
}

/* A transformed head, with its norm and, with a sketch, its sketch's size to their places. */
static bool encode_head(uint8_t *codes, uint8_t *norm, uint8_t *size, float *x,
                        const struct parts *p, const struct cst_coded_header *head,
                        const struct cst_codebook *book, const struct cst_codec_ops *ops) {
    float stored;

    if (!(head->flags & CST_CODED_SKETCH))
        return cst_coded_put(norm, cst_head_encode(codes, x, p->dims, book, ops), head->exponent);
    if (!cst_coded_put(norm, cst_sketch_codes(codes, x, p->dims, book, ops), head->exponent))
        return false;
    stored = cst_f16_to_f32(cst_load16(norm)) * cst_coded_unit(head->exponent);
    return cst_coded_put(size, cst_sketch_signs(codes, x, p->dims, book, stored, ops),
                         head->exponent);
}

static void rotate(float *x, const struct parts *p, const struct cst_codec_ops *ops) {
    if (p->spun)
        cst_head_spin(x, p->dims, ops);
    else
        cst_head_transform(x, p->dims, ops);
}

/* Squared error of every SAMPLE-th token by the rotation of p, and in *energy what there is. Uses
 * rows->a and the codes. */
static double sample_error(const struct cst_coded_rows *rows, const struct parts *p,
                           const struct cst_codebook *book, double *energy,
                           const struct cst_codec_ops *ops) {
    double error = 0;
    float *x = rows->a;

    *energy = 0;
    for (uint32_t t = 0; t < p->shape.coded; t += SAMPLE) {
        memcpy(x, rows->x + (size_t)t * p->shape.padded, p->shape.channels * sizeof(*x));
        for (uint32_t c = 0; c < p->shape.channels; c += p->dims) {
            float norm;

            rotate(x + c, p, ops);
            norm = cst_head_encode(rows->codes, x + c, p->dims, book, ops);
            for (uint32_t d = 0; d < p->dims; d++) {
                float e = x[c + d] - book->level[rows->codes[d]] * norm;

                error += (double)(e * e);
                *energy += (double)(x[c + d] * x[c + d]);
            }
        }
    }
    return error;
}

/* Whether heads behind the transform alone are so far from normal that another rotation pays. */
static bool spinning_pays(const struct cst_coded_rows *rows, const struct parts *p, unsigned bits,
                          const struct cst_codec_ops *ops) {
    struct cst_codebook book;
    struct parts spun = *p;
    double energy, error;

    cst_codebook_lloyd(&book, bits);
    error = sample_error(rows, p, &book, &energy, ops);
    spun.spun = true;
    return error > SUSPECT * cst_codebook_distortion(true, bits) * energy &&
           sample_error(rows, &spun, &book, &energy, ops) < LESS * error;
}

static bool encode_rows(uint8_t *dst, const struct parts *p, const struct cst_coded_header *head,
                        const struct cst_coded_rows *rows, const struct cst_codec_ops *ops) {
    struct cst_codebook book;
    float *x = rows->x;

    cst_codebook_lloyd(&book, head->bits - !!(head->flags & CST_CODED_SKETCH));
    memset(rows->codes, 0, p->shape.padded);
    for (uint32_t t = 0; t < p->shape.coded; t++, x += p->shape.padded) {
        for (uint32_t h = 0; h < p->heads; h++) {
            size_t at = 2 * ((size_t)t * p->heads + h);

            rotate(x + h * p->dims, p, ops);
            if (!encode_head(rows->codes + h * p->dims, dst + p->norms + at, dst + p->sizes + at,
                             x + h * p->dims, p, head, &book, ops))
                return false;
        }
        cst_coded_pack(dst + p->codes + t * p->shape.row_bytes, rows->codes, p->shape.padded,
                       head->bits);
    }
    return true;
}

/* Stores the means of the channels less those of what was coded of them. */
static bool put_means(uint8_t *dst, const struct parts *p, const struct cst_coded_header *head,
                      const struct cst_coded_rows *rows, const struct sums *s,
                      const struct cst_codec_ops *ops) {
    double *coded = s->energy;
    bool ok = true;

    memset(coded, 0, p->shape.channels * sizeof(*coded));
    for (uint32_t t = 0; t < p->shape.coded && ok; t++) {
        ok = decode_row(rows, p, t, dst, head, NULL, ops);
        ops->add(coded, rows->x, p->shape.channels);
    }
    for (uint32_t c = 0; c < p->shape.channels; c++)
        ok &= cst_coded_put(dst + p->means + 2 * (size_t)c,
                            (float)(s->mean[c] - coded[c] / p->shape.coded), head->exponent);
    return ok;
}

/* Means of side data for the channels of a segment, or NULL. */
static const float *side_mean(const struct cst_stage_segment *s, const struct cst_codec_work *w) {
    const struct cst_side_tensor *t = cst_side_tensor(w->side, s->layer, s->tensor);

    return t && t->channels == cst_view_channels(s->view) ? t->mean : NULL;
}

/* Takes off the means of this segment where they are allowed and pay, else those of side data,
 * which cost nothing, where they make the values smaller. Beside those of side data, own means are
 * given OWN_BITS only: they also keep the means of the errors at zero, which a model notices more
 * than their squares. */
static void choose_means(struct cst_coded_header *head, struct parts *p, struct sums *sums,
                         const struct cst_coded_rows *rows, const struct cst_stage_segment *s,
                         bool own, const struct cst_codec_work *w) {
    const float *side = side_mean(s, w);
    double energy, left = INFINITY;

    if (p->shape.coded == 0)
        return;
    own = own && p->end + 2 * (uint64_t)p->shape.channels < s->length;
    for (uint32_t c = 0; side && c < p->shape.channels; c++)
        sums->mean[c] = (double)side[c];
    if (side)
        left = deviation_of(&energy, sums, rows->x, p, w->ops);
    memset(sums->mean, 0, p->shape.channels * sizeof(double));
    if (own && find_means(rows->a, sums, rows->x, p, head->exponent, w->ops)) {
        double deviation = deviation_of(&energy, sums, rows->x, p, w->ops);

        if (pays(energy, deviation, MEAN_BITS, p) && pays(left, deviation, OWN_BITS, p)) {
            head->flags |= CST_CODED_MEAN;
            *p = parts_of(s, head, false);
            take_means(rows->x, rows->a, p);
            return;
        }
    }
    if (side && left < energy) {
        head->flags |= CST_CODED_SIDE_MEAN;
        take_means(rows->x, side, p);
    }
}

size_t cst_lloyd_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                        unsigned bits, uint8_t flags, const struct cst_codec_work *w, float *error,
                        uint8_t *stage) {
    struct cst_coded_header head = { .bits = (uint8_t)bits,
                                     .flags = (flags & CST_CODED_SKETCH) |
                                              (s->rotated ? CST_CODED_UNROTATED : 0) };
    struct cst_coded_rows rows = cst_coded_rows(s, w);
    struct parts p = parts_of(s, &head, false);
    struct sums sums;

    if (p.end >= s->length || !cst_coded_load(&head, seg, s, w))
        return 0;
    sums = sums_init(w->b, p.shape.channels);
    choose_means(&head, &p, &sums, &rows, s, flags & CST_CODED_MEAN, w);
    if (stage && !(flags & CST_CODED_SKETCH) && spinning_pays(&rows, &p, bits, w->ops))
        p = parts_of(s, &head, true);
    if (stage)
        *stage = p.spun ? CST_STAGE_SPUN : CST_STAGE_LLOYD;
    if (!encode_rows(dst, &p, &head, &rows, w->ops) ||
        (head.flags & CST_CODED_MEAN && !put_means(dst, &p, &head, &rows, &sums, w->ops)))
        return 0;
    memcpy(dst, &head, sizeof(head));
    cst_stage_save_sinks(dst + sizeof(head), seg, s);
    return cst_stage_finish(p.spun ? cst_spun_decode : cst_lloyd_decode, dst, p.end, seg, s, w,
                            error);
}

/* ---- decode ---------------------------------------------------------------------------------- */

static bool decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src, size_t len,
                   bool spun, const struct cst_codec_work *w) {
    struct cst_coded_rows rows = cst_coded_rows(s, w);
    struct cst_coded_header head;
    const float *mean;
    struct parts p;

    if (!cst_coded_open(&head, seg, s, spun ? FLAGS & ~CST_CODED_SKETCH : FLAGS, src, len, w) ||
        head.group || head.bits < (head.flags & CST_CODED_SKETCH ? 2 : 1))
        return false;
    p = parts_of(s, &head, spun);
    if (len != p.end ||
        (head.flags & CST_CODED_MEAN &&
         !w->ops->halves(rows.a, src + p.means, cst_coded_unit(head.exponent), p.shape.channels)))
        return false;
    mean = head.flags & CST_CODED_MEAN        ? rows.a
           : head.flags & CST_CODED_SIDE_MEAN ? side_mean(s, w)
                                              : NULL;
    if ((head.flags & CST_CODED_SIDE_MEAN) && (!mean || head.flags & CST_CODED_MEAN))
        return false;
    for (uint32_t t = 0; t < p.shape.coded; t++) {
        if (!decode_row(&rows, &p, t, src, &head, mean, w->ops))
            return false;
        cst_coded_store(seg, s, s->sinks + t, rows.x, &head, w);
    }
    return true;
}

bool cst_lloyd_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                      size_t len, const struct cst_codec_work *w) {
    return decode(seg, s, src, len, false, w);
}

bool cst_spun_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                     size_t len, const struct cst_codec_work *w) {
    return decode(seg, s, src, len, true, w);
}
