/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which stage codes a segment. Invariants: 1. a stream is never longer than its segment; 2. what a
 * stage can't take is coded without loss, and what doesn't shrink is kept as it is. No state; any
 * thread.
 */
#include "codec/stage.h"
#include "codec/codec.h"
#include "codec/dtype.h"
#include "codec/exponents.h"
#include "codec/format.h"
#include "codec/klt.h"
#include "codec/outliers.h"
#include "codec/preset.h"

#include <string.h>

/* ---- encode ---------------------------------------------------------------------------------- */

struct cst_stream cst_stream_encode_bytes(uint8_t *dst, const uint8_t *src, uint64_t n,
                                          uint32_t preset, const struct cst_codec_work *w) {
    struct cst_stream s = { .stage = CST_STAGE_ZSTD };

    if (preset != CST_PRESET_RAW) {
        if (cst_is_zero(src, n))
            return (struct cst_stream){ .stage = CST_STAGE_ZERO };
        s.length = cst_zstd_encode(dst, src, n, w);
    }
    if (!s.length) {
        memcpy(dst, src, n);
        s = (struct cst_stream){ .stage = CST_STAGE_RAW, .length = n };
    }
    return s;
}

/* Whether a stream needs the side data. */
static bool leans(const uint8_t *stream, uint8_t stage) {
    const struct cst_coded_header *head = (const void *)stream;

    return stage == CST_STAGE_KLT || ((stage == CST_STAGE_LLOYD || stage == CST_STAGE_SPUN) &&
                                      head->flags & CST_CODED_SIDE_MEAN);
}

/* Puts the outliers of a segment behind its stream. */
static void append_outliers(struct cst_stream *s, uint8_t *dst, const uint8_t *src,
                            const struct cst_stage_segment *seg, const struct cst_codec_work *w) {
    size_t n = cst_outliers_size(seg, w);

    if (s->length + n >= seg->length) {
        s->length = 0;
        return;
    }
    cst_outliers_save(dst + s->length, w->a, src, seg, w);
    s->length += n;
    s->outliers = w->outliers[seg->index].n;
}

/* Length 0: the recipe has no lossy stage, or it can't take this segment. */
static struct cst_stream encode_lossy(uint8_t *dst, const uint8_t *src,
                                      const struct cst_stage_segment *seg, struct cst_recipe recipe,
                                      const struct cst_codec_work *w) {
    struct cst_stream s = { .stage = recipe.stage, .lossy = true };
    struct cst_groups_params groups = { recipe.flags, recipe.bits, recipe.group };

    if (!seg->view)
        return s;
    if (!seg->rotated)
        groups.flags &= (uint8_t)~CST_CODED_UNROTATED;
    if (recipe.stage == CST_STAGE_INT8)
        s.length = cst_int8_encode(dst, src, seg, w, &s.error);
    else if (recipe.stage == CST_STAGE_GROUPS)
        s.length = cst_groups_encode(dst, src, seg, &groups, w, &s.error);
    else if (recipe.stage == CST_STAGE_LLOYD)
        s.length =
            cst_lloyd_encode(dst, src, seg, recipe.bits, recipe.flags, w, &s.error, &s.stage);
    else if (recipe.stage == CST_STAGE_POLAR)
        s.length = cst_polar_encode(dst, src, seg, w, &s.error);
    else if (recipe.stage == CST_STAGE_TUCKER)
        s.length = cst_tucker_encode(dst, src, seg, w, &s.error);
    else if (recipe.stage == CST_STAGE_KLT)
        s.length = cst_klt_encode(dst, src, seg, w, &s.error);
    s.leans = s.length && leans(dst, s.stage);
    if (s.length)
        append_outliers(&s, dst, src, seg, w);
    return s;
}

static struct cst_stream encode_segment(uint8_t *dst, const uint8_t *seg,
                                        const struct cst_stage_segment *s,
                                        const struct cst_codec_work *w) {
    uint32_t preset = w->params->preset;
    struct cst_stream out;

    if (preset == CST_PRESET_RAW || cst_dtype_size(s->dtype) == 1 || cst_is_zero(seg, s->length))
        return cst_stream_encode_bytes(dst, seg, s->length, preset, w);
    out = encode_lossy(dst, seg, s, cst_preset_recipe(w->params, s->tensor), w);
    if (out.length)
        return out;
    if (cst_dtype_size(s->dtype) == 2) {
        out = (struct cst_stream){ .stage = CST_STAGE_EXPONENTS };
        out.length = cst_exponents_encode(dst, seg, s, w);
        if (!out.length) {
            out.stage = CST_STAGE_PLANES;
            out.length = cst_planes_encode(dst, seg, s, w);
        }
        if (!out.length)
            preset = CST_PRESET_RAW;
    }
    return out.length ? out : cst_stream_encode_bytes(dst, seg, s->length, preset, w);
}

struct cst_stream cst_stream_encode(uint8_t *dst, const uint8_t *seg,
                                    const struct cst_stage_segment *s,
                                    const struct cst_codec_work *w) {
    struct cst_stream out = encode_segment(dst, seg, s, w);

    if (w->preset == CST_PRESET_DEEP && out.stage != CST_STAGE_KLT)
        cst_klt_note(seg, s, w);
    return out;
}

/* ---- decode ---------------------------------------------------------------------------------- */

bool cst_stage_known(uint8_t stage, bool layered) {
    return stage <= CST_STAGE_POLAR || stage == CST_STAGE_EXPONENTS || stage == CST_STAGE_SPUN ||
           (layered && (stage == CST_STAGE_TUCKER || stage == CST_STAGE_KLT));
}

bool cst_stage_is_lossy(uint8_t stage) {
    return (stage >= CST_STAGE_INT8 && stage <= CST_STAGE_KLT) || stage == CST_STAGE_SPUN;
}

bool cst_stage_is_unrotated(uint8_t stage, const uint8_t *src, size_t len) {
    const struct cst_coded_header *head = (const void *)src;

    switch (stage) {
    case CST_STAGE_GROUPS:
    case CST_STAGE_LLOYD:
    case CST_STAGE_SPUN:
    case CST_STAGE_POLAR:
    case CST_STAGE_TUCKER:
        return len >= sizeof(*head) && head->flags & CST_CODED_UNROTATED;
    case CST_STAGE_KLT:
        return cst_klt_is_unrotated(src, len);
    default:
        return false;
    }
}

static bool decode_segment(uint8_t *dst, uint64_t n, const struct cst_stage_segment *seg,
                           uint8_t stage, const uint8_t *src, size_t len,
                           const struct cst_codec_work *w) {
    switch (stage) {
    case CST_STAGE_RAW:
        if (len == n)
            memcpy(dst, src, n);
        return len == n;
    case CST_STAGE_ZERO:
        memset(dst, 0, n);
        return len == 0;
    case CST_STAGE_ZSTD:
        return cst_zstd_decode(dst, n, src, len, w);
    case CST_STAGE_PLANES:
        return seg && cst_dtype_size(seg->dtype) == 2 && cst_planes_decode(dst, seg, src, len, w);
    case CST_STAGE_EXPONENTS:
        return seg && cst_exponents_decode(dst, seg, src, len, w);
    case CST_STAGE_INT8:
        return seg && seg->view && cst_int8_decode(dst, seg, src, len, w);
    case CST_STAGE_GROUPS:
        return seg && seg->view && cst_groups_decode(dst, seg, src, len, w);
    case CST_STAGE_LLOYD:
        return seg && seg->view && cst_lloyd_decode(dst, seg, src, len, w);
    case CST_STAGE_SPUN:
        return seg && seg->view && cst_spun_decode(dst, seg, src, len, w);
    case CST_STAGE_POLAR:
        return seg && seg->view && cst_polar_decode(dst, seg, src, len, w);
    case CST_STAGE_TUCKER:
        return seg && seg->view && cst_preset_is_tucker(w->preset) &&
               cst_tucker_decode(dst, seg, src, len, w);
    case CST_STAGE_KLT:
        return seg && seg->view && (w->preset == CST_PRESET_KLT || w->preset == CST_PRESET_DEEP) &&
               cst_klt_decode(dst, seg, src, len, w);
    default:
        return false;
    }
}

bool cst_stream_decode(uint8_t *dst, uint64_t n, const struct cst_stage_segment *seg, uint8_t stage,
                       const uint8_t *src, size_t len, const struct cst_codec_work *w) {
    if (!decode_segment(dst, n, seg, stage, src, len, w))
        return false;
    if (seg)
        cst_outliers_restore(dst, src + len, seg, w);
    if (w->preset == CST_PRESET_DEEP && seg && stage != CST_STAGE_KLT)
        cst_klt_note(dst, seg, w);
    return true;
}

/* ---- another position ------------------------------------------------------------------------ */

static void move(uint8_t *seg, const struct cst_stage_segment *s, uint32_t t, float direction,
                 const struct cst_codec_work *w) {
    cst_stage_load_row(w->plane, seg, s->view, t, w->ops);
    cst_rope_turn(w->rope, s->rotated, w->plane, s->view->heads, s->view->dims, 0, direction,
                  w->ops);
    cst_stage_store_row(seg, s->view, t, w->plane, w);
}

/* Keys move by one angle a pair, however many tokens: that of the distance. */
bool cst_stage_place(uint8_t *seg, const struct cst_stage_segment *s, uint32_t position,
                     bool only_kept, const struct cst_codec_work *w) {
    const struct cst_outliers *o = &w->outliers[s->index];
    bool ahead = position >= s->position;
    uint32_t n = only_kept ? s->sinks : s->tokens;
    uint32_t distance = ahead ? position - s->position : s->position - position;

    if (!s->view || !w->rope || !cst_rope_known(s->rotated, s->view->dims))
        return false;
    cst_rope_prepare(w->rope, s->rotated, distance, 1);
    for (uint32_t t = 0; t < n; t++)
        move(seg, s, t, ahead ? 1 : -1, w);
    for (uint32_t k = 0; only_kept && k < o->n; k++)
        move(seg, s, o->token[k], ahead ? 1 : -1, w);
    return true;
}
