/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stage PLANES: 16-bit floats without loss. Each value is rotated left by one bit, which puts the
 * exponent into the upper byte (of bf16 all of it, of fp16 with three mantissa bits) and leaves
 * sign and mantissa in the lower one. The upper bytes of a segment take a few dozen values and are
 * worth coding; the lower ones are noise and mostly stay as they are.
 *
 * Elements are taken in memory order, tokens that are not there left out; when a hole isn't zero,
 * or there is no view, the segment is taken flat, byte for byte, so nothing is ever lost.
 */
#include "codec/format.h"
#include "codec/stage.h"

#include "base/macros.h"

#include <string.h>

/* A plane is coded only when this share of it is saved: decoding costs more than copying. */
enum { WORTH = 32 };

struct plane {
    const uint8_t *bytes;
    uint32_t count[256];
    struct cst_huff_code code;
    enum cst_plane_coding coding;
    size_t bound; /* of the encoded bytes */
};

/* Whether coding can't save the share: -log2(sum of p^2) is never above the entropy, so more than
 * 7.75 bits of it (2^-7.75 > 1/216) end the search before a code is built. */
static bool is_noise(const uint32_t count[256], size_t n) {
    uint64_t squares = 0;

    for (int s = 0; s < 256; s++)
        squares += (uint64_t)count[s] * count[s];
    return squares < (uint64_t)n * n / 216;
}

static void plan(struct plane *p, const uint8_t *bytes, size_t n) {
    p->bytes = bytes;
    p->coding = CST_PLANE_RAW;
    p->bound = n;
    cst_huff_histogram(p->count, bytes, n);
    if (p->count[bytes[0]] == n) {
        p->coding = CST_PLANE_FILL;
        p->bound = 1;
    } else if (!is_noise(p->count, n)) {
        size_t bound;

        cst_huff_build(&p->code, p->count);
        bound = cst_huff_bound(&p->code, p->count, n);
        if (bound < n - n / WORTH) {
            p->coding = CST_PLANE_HUFFMAN;
            p->bound = bound;
        }
    }
}

static size_t put_plane(uint8_t *dst, const struct plane *p, size_t n) {
    if (p->coding == CST_PLANE_HUFFMAN)
        return cst_huff_encode(dst, &p->code, p->bytes, n);
    memcpy(dst, p->bytes, p->bound);
    return p->bound;
}

const uint8_t *cst_planes_elements(const uint8_t *seg, const struct cst_runs *runs,
                                   const struct cst_codec_work *w) {
    if (runs->outer * runs->inner == 1)
        return seg;
    cst_runs_gather(runs, w->a, seg);
    return w->a;
}

size_t cst_planes_bound(const uint8_t *hi_bytes, const uint8_t *lo_bytes, size_t n) {
    struct plane hi, lo;

    plan(&hi, hi_bytes, n);
    plan(&lo, lo_bytes, n);
    return sizeof(struct cst_planes_header) + hi.bound + lo.bound;
}

size_t cst_planes_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                         const struct cst_codec_work *w) {
    struct cst_planes_header head = { 0 };
    struct cst_runs runs = cst_runs_flat(s->length);
    struct plane hi, lo;
    size_t n, hi_length, length = sizeof(head);

    if (s->view)
        runs = cst_view_runs(s->view, s->tokens);
    if (!s->view || !cst_runs_holes_are_zero(&runs, seg, s->length)) {
        runs = cst_runs_flat(s->length);
        head.flags = CST_PLANES_FLAT;
    }
    n = cst_runs_total(&runs) / 2;
    if (n == 0 || cst_runs_total(&runs) % 2)
        return 0;
    w->ops->split(w->b, w->b + n, cst_planes_elements(seg, &runs, w), n);
    plan(&hi, w->b, n);
    plan(&lo, w->b + n, n);
    if (length + hi.bound + lo.bound >= s->length)
        return 0;
    hi_length = put_plane(dst + length, &hi, n);
    length += hi_length;
    length += put_plane(dst + length, &lo, n);
    head.hi_coding = (uint8_t)hi.coding;
    head.lo_coding = (uint8_t)lo.coding;
    cst_store32(&head.hi_length, (uint32_t)hi_length);
    memcpy(dst, &head, sizeof(head));
    return length;
}

/* The plane's n bytes: in place where they are raw, else in `room`. NULL when they are wrong. */
static const uint8_t *get_plane(uint8_t *room, size_t n, uint8_t coding, const uint8_t *src,
                                size_t len, const struct cst_codec_work *w) {
    switch (coding) {
    case CST_PLANE_RAW:
        return len == n ? src : NULL;
    case CST_PLANE_FILL:
        if (len != 1)
            return NULL;
        memset(room, src[0], n);
        return room;
    case CST_PLANE_HUFFMAN:
        return cst_huff_decode(room, n, src, len, w->huff, w->ops) ? room : NULL;
    default:
        return NULL;
    }
}

void cst_planes_put_elements(uint8_t *seg, const struct cst_runs *runs, const uint8_t *hi,
                             const uint8_t *lo, const struct cst_codec_ops *ops) {
    size_t n = runs->bytes / 2;

    for (uint64_t i = 0; i < runs->outer; i++) {
        for (uint64_t j = 0; j < runs->inner; j++) {
            ops->merge(seg + i * runs->outer_stride + j * runs->inner_stride, hi, lo, n);
            hi += n;
            lo += n;
        }
    }
}

bool cst_planes_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                       size_t len, const struct cst_codec_work *w) {
    struct cst_planes_header head;
    struct cst_runs runs = cst_runs_flat(s->length);
    const uint8_t *hi, *lo;
    size_t n, hi_length;

    if (len < sizeof(head))
        return false;
    memcpy(&head, src, sizeof(head));
    src += sizeof(head);
    len -= sizeof(head);
    hi_length = cst_load32(&head.hi_length);
    if (head.flags & ~CST_PLANES_FLAT || head.reserved || hi_length > len)
        return false;
    if (!(head.flags & CST_PLANES_FLAT)) {
        if (!s->view)
            return false;
        runs = cst_view_runs(s->view, s->tokens);
    }
    n = cst_runs_total(&runs) / 2;
    if (n == 0 || cst_runs_total(&runs) % 2)
        return false;
    hi = get_plane(w->b, n, head.hi_coding, src, hi_length, w);
    lo = get_plane(w->b + n, n, head.lo_coding, src + hi_length, len - hi_length, w);
    if (!hi || !lo)
        return false;
    cst_runs_zero_holes(&runs, seg, s->length);
    cst_planes_put_elements(seg, &runs, hi, lo, w->ops);
    return true;
}
