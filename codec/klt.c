/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stage KLT.
 *
 * Invariants: 1. the encoder learns what it decodes to, and what later layers are predicted from,
 * by decoding, so both sides compute the same floats with the same products of the same shapes;
 * 2. predictions read values before they are rounded to the segment's type; 3. nothing is predicted
 * from a tensor that wasn't decoded just before, or that holds values out of limits. State lies in
 * the workspace: one frame at a time.
 *
 * Coefficients lie by channel, values by token: products turn one into the other, so nothing is
 * transposed. What is added to values (means, and what means contribute to predictions) is written
 * first and the products are added to it.
 */
#include "codec/klt.h"
#include "codec/carve.h"
#include "codec/codec.h"
#include "codec/dtype.h"
#include "codec/format.h"
#include "codec/linalg.h"
#include "codec/outliers.h"
#include "codec/rans.h"
#include "codec/side_format.h"

#include "base/le.h"
#include "base/macros.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    TRIES = 4, /* steps until one keeps the bound */
    /* Gains of tokens are 2^(code / 8 - 8). */
    GAIN_UNITS = 8,
    GAIN_ZERO = 64,
    GAIN_MOST = 127
};
static const float DEFAULT_STEP = 0.4f;

/* Of values and steps: products of these stay finite. */
#define MAGNITUDE_MAX 0x1p60f

/* What was decoded of a tensor, [tokens][channels], before it was rounded. */
struct kept {
    float *x;
    uint32_t layer;
    bool known;
};

struct state {
    bool deep;
    bool sound;                          /* what was decoded last is within limits */
    uint32_t most;                       /* channels of the widest tensor */
    struct kept kept[2][CST_SIDE_DEPTH]; /* of K and V, layer l at l % depth */
    float *x[2];                         /* [tokens][channels] of K and V, under way */
    float *inputs;                       /* [tokens][rank] coordinates of a source */
    float *row;                          /* of values, or one for each token */
    float *z;                            /* [most][stride] coefficients */
    float *wanted; /* [most][stride] coefficients to encode, or [tokens][channels] values */
    int32_t *q;    /* [most][stride] over their steps */
    float *scale;  /* [stride] step of each token */
    uint8_t *klass;
    uint8_t *codes; /* [tokens] gains */
    struct cst_rans_work *rans;
};

static struct state *state_of(const struct cst_codec_work *w) {
    return w->dense;
}

/* ---- workspace ------------------------------------------------------------------------------- */

static void carve_all(struct state *s, struct cst_carve *c, const struct cst_descriptor *desc,
                      bool deep) {
    uint64_t rows = cst_align_up(desc->block_tokens, CST_RANS_ROW);
    void *rans;

    (void)cst_carve(c, 1, sizeof(*s));
    s->deep = deep;
    s->most = cst_side_most(desc);
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < CST_SIDE_DEPTH; k++)
            s->kept[i][k].x = deep ? cst_carve_floats(c, rows * s->most) : NULL;
        s->x[i] = deep || i == 0 ? cst_carve_floats(c, rows * s->most) : s->x[0];
    }
    s->inputs =
        deep ? cst_carve_floats(c, rows * CST_MIN(s->most, (uint32_t)CST_SIDE_RANK_MAX)) : NULL;
    s->row = cst_carve_floats(c, CST_MAX(rows, (uint64_t)s->most));
    s->wanted = cst_carve_floats(c, rows * s->most);
    s->z = cst_carve_floats(c, rows * s->most);
    s->q = cst_carve(c, rows * s->most, sizeof(int32_t));
    s->scale = cst_carve_floats(c, rows);
    s->klass = cst_carve(c, s->most, 1);
    s->codes = cst_carve(c, rows, 1);
    rans = cst_carve(c, cst_rans_work_size(), 1);
    s->rans = c->base ? cst_rans_work_init(rans) : NULL;
}

size_t cst_klt_work_size(const struct cst_descriptor *desc, bool deep) {
    struct cst_carve c = { NULL, 0 };
    struct state s;

    carve_all(&s, &c, desc, deep);
    return c.at;
}

bool cst_klt_begin(const struct cst_codec_work *w, bool deep) {
    struct cst_carve c = { w->dense, 0 };
    struct state s = { 0 };

    carve_all(&s, &c, w->desc, deep);
    memcpy(w->dense, &s, sizeof(s));
    return w->side || !w->params;
}

/* ---- shapes ---------------------------------------------------------------------------------- */

/* What a stream's parts are, and where. */
struct tensor {
    const struct cst_side_tensor *t;
    const struct cst_side_basis *basis;
    const float *start; /* [channels] what products are added to */
    uint8_t sources;
    uint32_t tokens, channels, stride;
    size_t sink_bytes;
};

/* What bit i of a tensor's sources means, as decoded; NULL: it wasn't, or may not be leant on. */
static const float *source_rows(const struct state *state, uint32_t layer, uint8_t tensor, int i) {
    uint32_t back = (uint32_t)i / 2 + !(tensor == CST_TENSOR_V && i % 2 == 0);
    const struct kept *k;

    if (layer < back)
        return NULL;
    k = &state->kept[i % 2][(layer - back) % CST_SIDE_DEPTH];
    return k->known && k->layer == layer - back ? k->x : NULL;
}

static bool may_predict(const struct state *state, const struct cst_stage_segment *s,
                        const struct cst_side_tensor *t) {
    if (!state->deep || !t->sources)
        return false;
    for (int i = 0; i < CST_SIDE_SOURCES; i++) {
        if (t->sources >> i & 1 && !source_rows(state, s->layer, s->tensor, i))
            return false;
    }
    return true;
}

/* false: side data don't know it. */
static bool tensor_init(struct tensor *out, const struct cst_stage_segment *s, bool predicted,
                        const struct cst_codec_work *w) {
    const struct cst_side_tensor *t = cst_side_tensor(w->side, s->layer, s->tensor);

    if (!t || !s->view || cst_view_channels(s->view) != t->channels)
        return false;
    *out = (struct tensor){
        .t = t,
        .basis = predicted ? &t->residual : &t->klt,
        .start = predicted ? t->offset : t->mean,
        .sources = predicted ? t->sources : 0,
        .tokens = s->tokens - s->sinks,
        .channels = t->channels,
        .stride = (uint32_t)cst_align_up(s->tokens - s->sinks, CST_RANS_ROW),
        .sink_bytes = (size_t)s->sinks * t->channels * s->view->esize,
    };
    return true;
}

static bool can_turn(const struct cst_stage_segment *s, const struct cst_codec_work *w) {
    return w->rope && cst_rope_known(s->rotated, s->view->dims);
}

/* Tokens behind the sinks, keys turned back, to rows; false when one is out of limits. */
static bool load(float *rows, const uint8_t *seg, const struct cst_stage_segment *s,
                 const struct cst_codec_work *w) {
    uint32_t channels = cst_view_channels(s->view);

    if (s->rotated && !can_turn(s, w))
        return false;
    if (s->rotated)
        cst_rope_prepare(w->rope, s->rotated, s->position, s->tokens);
    for (uint32_t t = s->sinks; t < s->tokens; t++, rows += channels) {
        cst_stage_load_row(rows, seg, s->view, t, w->ops);
        if (s->rotated)
            cst_rope_turn(w->rope, s->rotated, rows, s->view->heads, s->view->dims, t, -1, w->ops);
        if (w->ops->largest(rows, channels) > cst_f32_bits(MAGNITUDE_MAX))
            return false;
    }
    return true;
}

void cst_klt_note(const uint8_t *seg, const struct cst_stage_segment *s,
                  const struct cst_codec_work *w) {
    struct state *state = state_of(w);
    struct kept *k;
    struct tensor t;

    if (!state->deep || s->tensor > CST_TENSOR_V)
        return;
    k = &state->kept[s->tensor][s->layer % CST_SIDE_DEPTH];
    k->layer = s->layer;
    k->known = tensor_init(&t, s, false, w) && load(k->x, seg, s, w);
}

/* ---- products -------------------------------------------------------------------------------- */

/* rows += sign * what channels predict */
static void predict_channels(float *rows, const struct tensor *t, const struct cst_stage_segment *s,
                             float sign, const struct cst_codec_work *w) {
    const float *matrix = t->t->predictor;

    for (uint32_t g = 0; g < cst_side_groups(t->channels, t->t->width); g++) {
        struct cst_side_span to = cst_side_group(t->channels, t->t->width, g);

        for (int i = 0; i < CST_SIDE_SOURCES; i++) {
            const struct cst_side_tensor *from;
            struct cst_side_span seen;

            if (!(t->sources >> i & 1))
                continue;
            from = cst_side_source(w->side->tensor, s->layer, s->tensor, i);
            seen = cst_side_seen(from->channels, from->width, t->channels, t->t->width, g);
            cst_gemm(false, false, t->tokens, to.n, seen.n, sign,
                     source_rows(state_of(w), s->layer, s->tensor, i) + seen.at, from->channels,
                     matrix, to.n, 1, rows + to.at, t->channels);
            matrix += (size_t)seen.n * to.n;
        }
    }
}

/* The first n coordinates of a source's tokens, group by group, to z. n. */
static uint32_t coordinates(float *z, const float *x, const struct cst_side_tensor *from,
                            uint32_t rank, uint32_t tokens) {
    uint16_t group[CST_SIDE_RANK_MAX], counts[CST_SIDE_PICK_GROUPS_MAX] = { 0 };
    uint32_t n = cst_side_pick(group, from, rank), at = 0;

    for (uint32_t i = 0; i < n; i++)
        counts[group[i]]++;
    for (uint32_t g = 0; g < cst_side_groups(from->channels, from->width); at += counts[g++]) {
        struct cst_side_span span = cst_side_group(from->channels, from->width, g);

        if (counts[g])
            cst_gemm(false, true, tokens, counts[g], span.n, 1, x + span.at, from->channels,
                     from->klt.rows + (size_t)g * from->width * from->width, span.n, 0, z + at, n);
    }
    return n;
}

/* rows += sign * what coordinates predict */
static void predict_pooled(float *rows, const struct tensor *t, const struct cst_stage_segment *s,
                           float sign, const struct cst_codec_work *w) {
    const struct state *state = state_of(w);
    const float *matrix = t->t->predictor;

    for (int i = 0; i < CST_SIDE_SOURCES; i++) {
        const struct cst_side_tensor *from;
        uint32_t n;

        if (!(t->sources >> i & 1))
            continue;
        from = cst_side_source(w->side->tensor, s->layer, s->tensor, i);
        n = coordinates(state->inputs, source_rows(state, s->layer, s->tensor, i), from, t->t->rank,
                        t->tokens);
        cst_gemm(false, false, t->tokens, t->channels, n, sign, state->inputs, n, matrix,
                 t->channels, 1, rows, t->channels);
        matrix += (size_t)n * t->channels;
    }
}

static void predict(float *rows, const struct tensor *t, const struct cst_stage_segment *s,
                    float sign, const struct cst_codec_work *w) {
    if (t->sources && t->t->rank)
        predict_pooled(rows, t, s, sign, w);
    else if (t->sources)
        predict_channels(rows, t, s, sign, w);
}

/* Residuals to coefficients */
static void turn_in(float *z, const float *rows, const struct tensor *t) {
    const float *matrix = t->basis->rows;

    for (uint32_t g = 0; g < cst_side_groups(t->channels, t->t->width); g++) {
        struct cst_side_span span = cst_side_group(t->channels, t->t->width, g);

        cst_gemm(false, true, span.n, t->tokens, span.n, 1, matrix, span.n, rows + span.at,
                 t->channels, 0, z + (size_t)span.at * t->stride, t->stride);
        matrix += (size_t)span.n * span.n;
    }
}

/* rows += what coefficients stand for */
static void turn_out(float *rows, const float *z, const struct tensor *t) {
    const float *matrix = t->basis->rows;

    for (uint32_t g = 0; g < cst_side_groups(t->channels, t->t->width); g++) {
        struct cst_side_span span = cst_side_group(t->channels, t->t->width, g);

        cst_gemm(true, false, t->tokens, span.n, span.n, 1, z + (size_t)span.at * t->stride,
                 t->stride, matrix, span.n, 1, rows + span.at, t->channels);
        matrix += (size_t)span.n * span.n;
    }
}

static void start_rows(float *rows, const struct tensor *t) {
    for (uint32_t i = 0; i < t->tokens; i++)
        memcpy(rows + (size_t)i * t->channels, t->start, t->channels * sizeof(*rows));
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* 2^(1 / 8) to its powers */
static const float eighths[GAIN_UNITS] = { 1.0f,       1.0905077f, 1.1892071f, 1.2968396f,
                                           1.4142135f, 1.5422108f, 1.6817929f, 1.8340081f };

static float gain_of(uint8_t code) {
    return ldexpf(eighths[code % GAIN_UNITS], code / GAIN_UNITS - GAIN_ZERO / GAIN_UNITS);
}

/* The step of each token, to state->scale; false: a code that means nothing. */
static bool set_scale(const struct state *state, const struct tensor *t, float step, bool gains) {
    for (uint32_t i = 0; i < t->tokens; i++) {
        if (gains && state->codes[i] > GAIN_MOST)
            return false;
        state->scale[i] = gains ? step * gain_of(state->codes[i]) : step;
    }
    return true;
}

/* The deviation of each token over that of the tensor, as a code. */
static void find_gains(const struct state *state, const struct tensor *t, const float *rows) {
    for (uint32_t i = 0; i < t->tokens; i++, rows += t->channels) {
        double sum = 0;
        float log;

        for (uint32_t c = 0; c < t->channels; c++)
            sum += (double)rows[c] * (double)rows[c];
        log = log2f((float)sqrt(sum / t->channels) / t->t->rms) * GAIN_UNITS + GAIN_ZERO + 0.5f;
        state->codes[i] = (uint8_t)(log > 0 ? CST_MIN(log, (float)GAIN_MOST) : 0);
    }
}

/* Coefficients over steps to integers, half away from zero; false: one may be too large. */
static bool quantize(const struct state *state, const struct tensor *t,
                     const struct cst_codec_work *w) {
    float *inverse = state->row, fastest = 0;

    for (uint32_t i = 0; i < t->tokens; i++) {
        inverse[i] = 1 / state->scale[i];
        fastest = CST_MAX(fastest, inverse[i]);
    }
    for (uint32_t c = 0; c < t->channels; c++) {
        const float *z = state->wanted + (size_t)c * t->stride;

        if (!(cst_f32_from_bits(w->ops->largest(z, t->tokens)) * fastest < CST_RANS_MAGNITUDE / 2))
            return false;
        w->ops->to_steps(state->q + (size_t)c * t->stride, z, inverse, t->tokens);
    }
    return true;
}

/* How many of the edges between classes, 2^((k - 24.5 - spread) / 4) steps, lie at or below each
 * deviation. */
static void set_classes(const struct state *state, const struct tensor *t, float step, int spread) {
    static const double quarter[4] = { 0x1.d5818dcfba487p-1, 0x1.172b83c7d517bp+0,
                                       0x1.4bfdad5362a27p+0, 0x1.8ace5422aa0dbp+0 };
    double edge[CST_RANS_CLASSES];
    unsigned k = 0;

    for (unsigned i = 0; i < CST_RANS_CLASSES; i++) {
        unsigned at = i + CST_KLT_SPREAD_MAX - (unsigned)spread;

        edge[i] = quarter[at % 4] * (double)(1u << at / 4) * (double)step * 0x1p-14;
    }
    for (uint32_t c = 0; c < t->channels; c++) {
        double sigma = (double)t->basis->sigma[c];

        while (k + 1 < CST_RANS_CLASSES && sigma >= edge[k + 1])
            k++;
        while (k > 0 && sigma < edge[k])
            k--;
        state->klass[c] = (uint8_t)k;
    }
}

static struct cst_rans_matrix matrix_of(const struct state *state, const struct tensor *t,
                                        const struct cst_klt_header *head) {
    set_classes(state, t, cst_f32_from_bits(cst_load32(&head->step)), head->spread);
    return (struct cst_rans_matrix){
        .q = state->q,
        .stride = t->stride,
        .tokens = t->tokens,
        .channels = t->channels,
        .klass = state->klass,
        .payload = state->codes,
        .payload_len = head->flags & CST_KLT_GAINS ? t->tokens : 0,
    };
}

/* ---- encode ---------------------------------------------------------------------------------- */

/* The tokens, less means and predictions, to rows. */
static bool load_residual(float *rows, const uint8_t *seg, const struct cst_stage_segment *s,
                          const struct tensor *t, const struct cst_codec_work *w) {
    struct cst_runs runs = cst_view_runs(s->view, s->tokens);
    float *row = rows;

    if (!cst_runs_holes_are_zero(&runs, seg, s->length) || !load(row, seg, s, w))
        return false;
    cst_outliers_take(rows, t->channels,
                      state_of(w)->deep ? CST_OUTLIER_EXCESS_STEP : cst_outlier_excess(s->view), s,
                      w);
    for (uint32_t i = 0; i < t->tokens; i++, row += t->channels) {
        for (uint32_t c = 0; c < t->channels; c++)
            row[c] -= t->start[c];
    }
    predict(rows, t, s, -1, w);
    return true;
}

/* Coefficients with the spread of the head; bytes or 0. */
static size_t encode_spread(uint8_t *dst, size_t cap, const struct tensor *t,
                            const struct cst_klt_header *head, const struct cst_codec_work *w) {
    struct cst_rans_matrix m = matrix_of(state_of(w), t, head);

    return cst_rans_encode_coefficients(dst, cap, &m, state_of(w)->rans, w->ops);
}

/* The spread that takes fewest bytes, uphill from none in either direction: texts are as a whole
 * louder or quieter than those that were learned from. */
static size_t choose_spread(uint8_t *dst, size_t cap, const struct tensor *t,
                            struct cst_klt_header *head, const struct cst_codec_work *w) {
    size_t least = encode_spread(dst, cap, t, head, w), last = least;
    int8_t best = 0;

    if (!least)
        return 0;
    for (int8_t by = 1; by >= -1 && !best; by = (int8_t)(by - 2)) {
        for (head->spread = by; abs(head->spread) <= CST_KLT_SPREAD_MAX;
             head->spread = (int8_t)(head->spread + by)) {
            last = encode_spread(dst, cap, t, head, w);
            if (!last || last >= least)
                break;
            least = last;
            best = head->spread;
        }
    }
    head->spread = best;
    return encode_spread(dst, cap, t, head, w);
}

/* A whole stream with one step; its length or 0. */
static size_t encode_step(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                          const struct tensor *t, float step, bool gains,
                          const struct cst_codec_work *w) {
    const struct state *state = state_of(w);
    struct cst_klt_header head = { .flags = (uint8_t)((s->rotated ? CST_KLT_UNROTATED : 0) |
                                                      (gains ? CST_KLT_GAINS : 0) |
                                                      (t->sources ? CST_KLT_PREDICTED : 0)) };
    size_t at = sizeof(head) + t->sink_bytes, n;

    if (at >= s->length || !set_scale(state, t, step, gains) || !quantize(state, t, w))
        return 0;
    cst_store32(&head.step, cst_f32_bits(step));
    cst_store32(&head.rope, s->rotated ? cst_rope_id(s->rotated) : 0);
    n = choose_spread(dst + at, s->length - at, t, &head, w);
    if (!n || at + n >= s->length)
        return 0;
    memcpy(dst, &head, sizeof(head));
    cst_stage_save_sinks(dst + sizeof(head), seg, s);
    return at + n;
}

float cst_klt_weight(const struct cst_side *side, uint32_t layer, uint8_t tensor) {
    const struct cst_side_tensor *t = cst_side_tensor(side, layer, tensor);

    return t ? t->weight : 1;
}

/* What was decoded is what the next streams are predicted from. */
static void take(struct state *state, const struct cst_stage_segment *s, bool known) {
    struct kept *k = &state->kept[s->tensor][s->layer % CST_SIDE_DEPTH];
    float *was = k->x;

    if (!state->deep)
        return;
    *k = (struct kept){ state->x[s->tensor], s->layer, known };
    state->x[s->tensor] = was;
}

/* With smaller steps until the bound holds. */
static size_t encode_bound(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                           const struct tensor *t, bool gains, const struct cst_codec_work *w,
                           float *error) {
    float step = (w->params->step > 0 ? w->params->step : DEFAULT_STEP) * t->t->rms * t->t->weight;
    float bound = w->params->bound * t->t->weight;

    for (int i = 0; i < TRIES && bound > 0; i++) {
        size_t len = encode_step(dst, seg, s, t, step, gains, w);

        len = len ? cst_stage_finish(cst_klt_decode, dst, len, seg, s, w, error) : 0;
        if (!len || *error <= bound)
            return len;
        step *= 0.97f * bound / *error;
    }
    return 0;
}

/*
 * Gains where nothing is predicted: quiet tokens then err less and loud ones more, which is what
 * attention wants of them. Predicted residuals don't follow the token's own deviation.
 */
size_t cst_klt_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                      const struct cst_codec_work *w, float *error) {
    struct state *state = state_of(w);
    const struct cst_side_tensor *side = cst_side_tensor(w->side, s->layer, s->tensor);
    bool gains = !state->deep;
    float *rows = state->x[s->tensor > CST_TENSOR_V ? 0 : s->tensor];
    struct tensor t;
    size_t len;

    if (!side || !tensor_init(&t, s, may_predict(state, s, side), w) || !t.tokens ||
        !load_residual(rows, seg, s, &t, w))
        return 0;
    if (gains)
        find_gains(state, &t, rows);
    turn_in(state->wanted, rows, &t);
    len = encode_bound(dst, seg, s, &t, gains, w, error);
    if (len)
        take(state, s, state->sound);
    return len;
}

/* ---- decode ---------------------------------------------------------------------------------- */

bool cst_klt_is_unrotated(const uint8_t *src, size_t len) {
    const struct cst_klt_header *head = (const void *)src;

    return len >= sizeof(*head) && head->flags & CST_KLT_UNROTATED;
}

static bool open_stream(struct tensor *t, struct cst_klt_header *head,
                        const struct cst_stage_segment *s, const uint8_t *src, size_t len,
                        const struct cst_codec_work *w) {
    const uint8_t all = CST_KLT_UNROTATED | CST_KLT_GAINS | CST_KLT_PREDICTED;
    const struct cst_side_tensor *side = cst_side_tensor(w->side, s->layer, s->tensor);
    bool predicted;
    float step;

    if (len < sizeof(*head) || !side)
        return false;
    memcpy(head, src, sizeof(*head));
    predicted = head->flags & CST_KLT_PREDICTED;
    step = cst_f32_from_bits(cst_load32(&head->step));
    return !(head->flags & ~all) && !head->reserved[0] && !head->reserved[1] &&
           abs(head->spread) <= CST_KLT_SPREAD_MAX &&
           (!predicted || may_predict(state_of(w), s, side)) && step > 0 && step <= MAGNITUDE_MAX &&
           !(head->flags & CST_KLT_UNROTATED) == !s->rotated && (!s->rotated || can_turn(s, w)) &&
           cst_load32(&head->rope) == (s->rotated ? cst_rope_id(s->rotated) : 0) &&
           tensor_init(t, s, predicted, w) && t->tokens && len > sizeof(*head) + t->sink_bytes;
}

static void coefficients(const struct state *state, const struct tensor *t,
                         const struct cst_codec_work *w) {
    for (uint32_t c = 0; c < t->channels; c++)
        w->ops->from_steps(state->z + (size_t)c * t->stride, state->q + (size_t)c * t->stride,
                           state->scale, t->tokens);
}

static void store(uint8_t *seg, const struct cst_stage_segment *s, const struct tensor *t,
                  const float *x, const struct cst_codec_work *w) {
    struct cst_runs runs = cst_view_runs(s->view, s->tokens);
    float *row = state_of(w)->row;

    cst_runs_zero_holes(&runs, seg, s->length);
    if (s->rotated)
        cst_rope_prepare(w->rope, s->rotated, s->position, s->tokens);
    for (uint32_t i = s->sinks; i < s->tokens; i++, x += t->channels) {
        if (!s->rotated) {
            cst_stage_store_row(seg, s->view, i, x, w);
            continue;
        }
        memcpy(row, x, t->channels * sizeof(*row));
        cst_rope_turn(w->rope, s->rotated, row, s->view->heads, s->view->dims, i, 1, w->ops);
        cst_stage_store_row(seg, s->view, i, row, w);
    }
}

/* What isn't predicted from may hold anything. */
static bool is_sound(const float *x, const struct tensor *t, const struct cst_codec_work *w) {
    return w->ops->largest(x, (size_t)t->tokens * t->channels) <= cst_f32_bits(MAGNITUDE_MAX);
}

bool cst_klt_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src, size_t len,
                    const struct cst_codec_work *w) {
    struct state *state = state_of(w);
    struct cst_klt_header head;
    struct cst_rans_matrix m;
    struct tensor t;
    size_t at;
    float step, *x;

    if (!state || !open_stream(&t, &head, s, src, len, w))
        return false;
    at = sizeof(head) + t.sink_bytes;
    x = state->x[s->tensor];
    step = cst_f32_from_bits(cst_load32(&head.step));
    m = matrix_of(state, &t, &head);
    if (!cst_rans_decode_coefficients(&m, src + at, len - at, state->rans, w->ops) ||
        !set_scale(state, &t, step, head.flags & CST_KLT_GAINS))
        return false;
    coefficients(state, &t, w);
    start_rows(x, &t);
    predict(x, &t, s, 1, w);
    turn_out(x, state->z, &t);
    state->sound = !state->deep || is_sound(x, &t, w);
    if (seg && state->sound) {
        store(seg, s, &t, x, w);
        cst_stage_restore_sinks(seg, src + sizeof(head), s);
    }
    if (!w->params) /* an encoder may try again */
        take(state, s, state->sound);
    return state->sound;
}
