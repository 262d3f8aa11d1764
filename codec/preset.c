/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of presets. int4 codes keys as they are stored: on a real model plain integers of
 * keys turned back lose slightly more (docs/decisions/006), and it spares the work; the others turn
 * keys back, where their channels are quiet.
 */
#include "codec/preset.h"

#include <string.h>

enum { TURBOQUANT_BITS = 4 };

static const struct row {
    const char *name;
    struct cst_recipe k, v;
} rows[CST_PRESETS] = {
    [CST_PRESET_RAW] = { "raw", { CST_STAGE_RAW }, { CST_STAGE_RAW } },
    [CST_PRESET_LOSSLESS] = { "lossless", { CST_STAGE_PLANES }, { CST_STAGE_PLANES } },
    [CST_PRESET_INT8] = { "int8", { CST_STAGE_INT8 }, { CST_STAGE_INT8 } },
    [CST_PRESET_INT4] = { "int4",
                          { CST_STAGE_GROUPS, .bits = 4, .group = 6 },
                          { CST_STAGE_GROUPS, .bits = 4, .group = 6 } },
#define KIVI(n)                                                                                    \
    { CST_STAGE_GROUPS, .bits = (n), .group = 5,                                                   \
      .flags = CST_CODED_UNROTATED | CST_CODED_ZEROS | CST_CODED_BY_CHANNEL },                     \
    {                                                                                              \
        CST_STAGE_GROUPS, .bits = (n), .group = 5, .flags = CST_CODED_ZEROS                        \
    }
    [CST_PRESET_KIVI4] = { "kivi4", KIVI(4) },
    [CST_PRESET_KIVI2] = { "kivi2", KIVI(2) },
#undef KIVI
    [CST_PRESET_TURBOQUANT] = { "turboquant",
                                { CST_STAGE_LLOYD, .bits = TURBOQUANT_BITS },
                                { CST_STAGE_LLOYD, .bits = TURBOQUANT_BITS } },
#define TUCKER(name)                                                                               \
    {                                                                                              \
        name, { CST_STAGE_TUCKER }, {                                                              \
            CST_STAGE_TUCKER                                                                       \
        }                                                                                          \
    }
    [CST_PRESET_JOLT] = TUCKER("jolt"),
    [CST_PRESET_FLASHJOLT] = TUCKER("flashjolt"),
    [CST_PRESET_JOLT_PLUS] = TUCKER("jolt+"),
#undef TUCKER
    [CST_PRESET_POLAR] = { "polar", { CST_STAGE_POLAR }, { CST_STAGE_POLAR } },
    [CST_PRESET_KLT] = { "klt", { CST_STAGE_KLT }, { CST_STAGE_KLT } },
    [CST_PRESET_DEEP] = { "deep", { CST_STAGE_KLT }, { CST_STAGE_KLT } },
};

const char *cst_preset_name(uint32_t preset) {
    return preset < CST_PRESETS ? rows[preset].name : NULL;
}

int cst_preset_from_name(const char *name) {
    for (int i = 0; i < CST_PRESETS; i++) {
        if (rows[i].name && !strcmp(name, rows[i].name))
            return i;
    }
    return -1;
}

int cst_preset_bits(uint32_t preset, uint8_t bits) {
    if (preset != CST_PRESET_TURBOQUANT)
        return bits == 0 ? 0 : -1;
    return bits > 8 ? -1 : bits ? bits : TURBOQUANT_BITS;
}

bool cst_preset_takes(const struct cst_encode_params *p) {
    int k = cst_preset_bits(p->preset, p->bits_k), v = cst_preset_bits(p->preset, p->bits_v);

    return k >= 0 && v >= 0 && (!p->qjl || (k >= 2 && v >= 2));
}

struct cst_recipe cst_preset_recipe(const struct cst_encode_params *params, uint8_t tensor) {
    bool key = tensor == CST_TENSOR_K;
    struct cst_recipe recipe = key ? rows[params->preset].k : rows[params->preset].v;

    if (recipe.stage == CST_STAGE_LLOYD) {
        recipe.bits =
            (uint8_t)cst_preset_bits(params->preset, key ? params->bits_k : params->bits_v);
        recipe.flags = CST_CODED_MEAN | (params->qjl ? CST_CODED_SKETCH : 0);
    }
    return recipe;
}
