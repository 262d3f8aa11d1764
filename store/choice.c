/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The presets of each class, best first. Owns nothing.
 *
 * Each rung is smaller and worse than the next: a block that misses its class's bound on one is
 * tried on the next, so what decides is the error that was measured on its own decoded bytes. A bit
 * more of turboquant halves the error: on real caches 3, 4 and 6 bits give about .2, .11 and .03.
 */
#include "store/choice.h"

#include "base/macros.h"

#include <stddef.h>

static const struct klass {
    float bound, step; /* of deep */
    struct cst_encode_params rungs[4];
    uint32_t n;
} classes[CST_CLASSES] = {
#define TURBOQUANT(b)                                                                              \
    { .preset = CST_PRESET_TURBOQUANT, .bits_k = (b), .bits_v = (b) }
#define INT8                                                                                       \
    { .preset = CST_PRESET_INT8 }
    [CST_CLASS_NEAR_LOSSLESS] = { .05F, .1F, { TURBOQUANT(6), TURBOQUANT(7), INT8 }, 3 },
    [CST_CLASS_SMALL_LOSS] = { .15F,
                               .4F,
                               { TURBOQUANT(4), TURBOQUANT(5), TURBOQUANT(6), INT8 },
                               4 },
    [CST_CLASS_COLD] = { .30F, .62F, { TURBOQUANT(3), TURBOQUANT(4), TURBOQUANT(5), INT8 }, 4 },
#undef TURBOQUANT
#undef INT8
};

float cst_class_bound(enum cst_class klass) {
    return classes[klass].bound;
}

float cst_class_step(enum cst_class klass) {
    return classes[klass].step;
}

static void add(struct cst_choices *out, const struct cst_encode_params *params, float bound,
                const struct cst_side *side) {
    struct cst_encode_params *p = &out->try[out->n++];

    *p = *params;
    p->bound = bound;
    p->side = side;
}

/* Learned tables make the smallest frames. With predictions of other layers errors differ more
 * between tensors, so the step is a little smaller; bases alone are the safer choice. */
static void add_learned(struct cst_choices *out, const struct klass *k,
                        const struct cst_side *side) {
    static const struct {
        uint32_t preset;
        float step;
    } rungs[] = { { CST_PRESET_DEEP, 1 },
                  { CST_PRESET_DEEP, .8F },
                  { CST_PRESET_KLT, 1.15F },
                  { CST_PRESET_KLT, .8F } };

    for (size_t i = 0; i < CST_COUNT(rungs); i++) {
        const struct cst_encode_params p = { .preset = rungs[i].preset,
                                             .step = rungs[i].step * k->step };

        add(out, &p, k->bound, side);
    }
}

void cst_choices(struct cst_choices *out, enum cst_class klass,
                 const struct cst_encode_params *wanted, const struct cst_side *side) {
    static const struct cst_encode_params lossless = { .preset = CST_PRESET_LOSSLESS },
                                          raw = { .preset = CST_PRESET_RAW };
    const struct klass *k = &classes[klass];

    out->n = 0;
    if (wanted && k->bound > 0)
        add(out, wanted, k->bound, side);
    if (side && k->bound > 0)
        add_learned(out, k, side);
    for (uint32_t i = 0; i < k->n; i++)
        add(out, &k->rungs[i], k->bound, NULL);
    add(out, &lossless, 0, side);
    add(out, &raw, 0, NULL);
}
