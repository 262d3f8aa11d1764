/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rotation tables. Angles are doubles: sine and cosine are computed for the first position and for
 * one step, the positions between by complex multiplication, whose error grows by 2^-53 a step and
 * disappears in the rounding to fp32. Invariant: an entry depends on the layer, the first position
 * and the token's distance from it alone. Why not the engine's own fp32 angles: turning back and
 * out again with one table cancels, whatever the table, and engines differ in theirs.
 */
#include "codec/rope.h"

#include "codec/carve.h"
#include "codec/dtype.h"
#include "codec/fixed_math.h"

#include "base/crc32c.h"
#include "base/le.h"
#include "base/macros.h"

#include <math.h>

static const double PI = 0x1.921fb54442d18p+1;

static bool finite_at_least(float x, float least) {
    return isfinite(x) && x >= least;
}

static bool scaling_known(const struct cst_layer *l) {
    switch (l->rope_scaling) {
    case CST_SCALING_NONE:
        return true;
    case CST_SCALING_LINEAR:
        return finite_at_least(l->scaling[0], 1);
    case CST_SCALING_YARN:
        return finite_at_least(l->scaling[0], 1) && finite_at_least(l->scaling[1], 0x1p-20f) &&
               finite_at_least(l->scaling[2], 0x1p-20f) && l->scaling_original_context > 0 &&
               l->rope_theta > 1;
    case CST_SCALING_LLAMA3:
        return finite_at_least(l->scaling[0], 1) && finite_at_least(l->scaling[1], 0x1p-20f) &&
               finite_at_least(l->scaling[2], 0x1p-20f) && l->scaling[2] > l->scaling[1] &&
               l->scaling_original_context > 0;
    default:
        return false;
    }
}

bool cst_rope_known(const struct cst_layer *l, uint32_t dims) {
    return (l->rope == CST_ROPE_NORM || l->rope == CST_ROPE_NEOX) && l->rope_dims >= 2 &&
           l->rope_dims % 2 == 0 && l->rope_dims <= dims && finite_at_least(l->rope_theta, 1) &&
           scaling_known(l);
}

uint32_t cst_rope_id(const struct cst_layer *l) {
    struct {
        uint8_t rope, scaling, reserved[2];
        struct cst_le32 dims, theta, parameter[4], original_context;
    } p = { .rope = l->rope, .scaling = l->rope_scaling };

    _Static_assert(sizeof(p) == 32, "docs/codec-format.md section 4.4");
    cst_store32(&p.dims, l->rope_dims);
    cst_store32(&p.theta, cst_f32_bits(l->rope_theta));
    for (size_t i = 0; i < CST_COUNT(p.parameter); i++)
        cst_store32(&p.parameter[i], cst_f32_bits(l->scaling[i]));
    cst_store32(&p.original_context, l->scaling_original_context);
    return cst_crc32c(0, &p, sizeof(p));
}

/* The pair that turns `rotations` times within the original context. */
static double yarn_pair(const struct cst_layer *l, double rotations) {
    return l->rope_dims * cst_fixed_log(l->scaling_original_context / (rotations * 2 * PI)) /
           (2 * cst_fixed_log((double)l->rope_theta));
}

/* Share of a pair's own frequency, against the one divided by the factor. */
static double yarn_share(const struct cst_layer *l, uint32_t i) {
    double low = CST_MAX(0.0, floor(yarn_pair(l, (double)l->scaling[1])));
    double high = CST_MIN(l->rope_dims - 1.0, ceil(yarn_pair(l, (double)l->scaling[2])));
    double ramp = (i - low) / CST_MAX(0.001, high - low);

    return 1 - CST_MIN(1.0, CST_MAX(0.0, ramp));
}

static double llama3_share(const struct cst_layer *l, double frequency) {
    double turns = l->scaling_original_context * frequency / (2 * PI);
    double low = (double)l->scaling[1], high = (double)l->scaling[2];

    return CST_MIN(1.0, CST_MAX(0.0, (turns - low) / (high - low)));
}

double cst_rope_frequency(const struct cst_layer *l, uint32_t i) {
    double theta = (double)l->rope_theta, factor = (double)l->scaling[0], share;
    double frequency = cst_fixed_exp(-2.0 * i / l->rope_dims * cst_fixed_log(theta));

    switch (l->rope_scaling) {
    case CST_SCALING_LINEAR:
        return frequency / factor;
    case CST_SCALING_YARN:
        share = yarn_share(l, i);
        break;
    case CST_SCALING_LLAMA3:
        share = llama3_share(l, frequency);
        break;
    default:
        return frequency;
    }
    return frequency * share + frequency / factor * (1 - share);
}

static void lay_out(struct cst_rope_table *table, struct cst_carve *c, uint32_t tokens,
                    uint32_t pairs) {
    (void)cst_carve(c, 1, sizeof(*table));
    table->cosine = cst_carve_floats(c, (uint64_t)tokens * pairs);
    table->sine = cst_carve_floats(c, (uint64_t)tokens * pairs);
    table->state = cst_carve(c, 4 * (uint64_t)pairs, sizeof(double));
}

size_t cst_rope_work_size(uint32_t tokens, uint32_t pairs) {
    struct cst_carve c = { NULL, 0 };
    struct cst_rope_table table;

    lay_out(&table, &c, tokens, pairs);
    return c.at;
}

struct cst_rope_table *cst_rope_table_init(void *work, uint32_t tokens, uint32_t pairs) {
    struct cst_carve c = { work, 0 };
    struct cst_rope_table *table = work;

    *table = (struct cst_rope_table){ .room = pairs };
    lay_out(table, &c, tokens, pairs);
    return table;
}

static void start(struct cst_rope_table *table, const struct cst_layer *layer) {
    double *c = table->state, *s = c + table->pairs, *step_c = s + table->pairs,
           *step_s = step_c + table->pairs;

    for (uint32_t i = 0; i < table->pairs; i++) {
        double frequency = cst_rope_frequency(layer, i);

        cst_fixed_sincos(frequency * table->position, &s[i], &c[i]);
        cst_fixed_sincos(frequency, &step_s[i], &step_c[i]);
    }
}

/* One row of the table, and the state a position on. */
static void step(struct cst_rope_table *table, float *cosine, float *sine) {
    double *c = table->state, *s = c + table->pairs;
    const double *step_c = s + table->pairs, *step_s = step_c + table->pairs;

    for (uint32_t i = 0; i < table->pairs; i++) {
        double next = c[i] * step_c[i] - s[i] * step_s[i];

        cosine[i] = (float)c[i];
        sine[i] = (float)s[i];
        s[i] = s[i] * step_c[i] + c[i] * step_s[i];
        c[i] = next;
    }
}

void cst_rope_prepare(struct cst_rope_table *table, const struct cst_layer *layer,
                      uint32_t position, uint32_t tokens) {
    uint32_t id = cst_rope_id(layer), pairs = layer->rope_dims / 2;

    if (table->tokens >= tokens && table->id == id && table->position == position)
        return;
    table->id = id;
    table->position = position;
    table->tokens = tokens;
    table->pairs = pairs;
    start(table, layer);
    for (size_t t = 0; t < tokens; t++)
        step(table, table->cosine + t * pairs, table->sine + t * pairs);
}

void cst_rope_turn(const struct cst_rope_table *table, const struct cst_layer *layer, float *row,
                   uint32_t heads, uint32_t dims, uint32_t token, float direction,
                   const struct cst_codec_ops *ops) {
    const float *cosine = table->cosine + (size_t)token * table->pairs;
    const float *sine = table->sine + (size_t)token * table->pairs;

    for (uint32_t h = 0; h < heads; h++, row += dims) {
        if (layer->rope == CST_ROPE_NORM)
            ops->turn_pairs(row, cosine, sine, direction, table->pairs);
        else
            ops->turn_halves(row, cosine, sine, direction, table->pairs);
    }
}
