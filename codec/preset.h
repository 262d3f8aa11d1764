/* SPDX-License-Identifier: Apache-2.0 */
/* What each preset does with K and V. Pure; any thread. */
#pragma once

#include "codec/codec.h"
#include "codec/format.h"

/* The stage that a preset wants for a tensor: RAW, PLANES (without loss), or a lossy one with its
 * parameters; a segment that it can't take is coded without loss. */
struct cst_recipe {
    uint8_t stage; /* enum cst_stage */
    uint8_t bits;
    uint8_t flags; /* GROUPS, LLOYD */
    uint8_t group; /* GROUPS */
};

/* The number of bits that a preset uses where it is asked for `bits`: turboquant 1 to 8, 4 for 0;
 * the others have no parameter and take 0 alone. -1 when it can't. */
int cst_preset_bits(uint32_t preset, uint8_t bits);

/* Whether bits_k, bits_v and qjl are parameters of the preset. */
bool cst_preset_takes(const struct cst_encode_params *params);

/* params->preset exists and takes its parameters. */
struct cst_recipe cst_preset_recipe(const struct cst_encode_params *params, uint8_t tensor);

/* Whether its frames are layered (codec/format.h). */
static inline bool cst_preset_is_layered(uint32_t preset) {
    return preset >= CST_PRESET_JOLT && preset <= CST_PRESET_DEEP;
}

static inline bool cst_preset_needs_side(uint32_t preset) {
    return preset == CST_PRESET_KLT || preset == CST_PRESET_DEEP;
}

/* Whether it codes with stage TUCKER. */
static inline bool cst_preset_is_tucker(uint32_t preset) {
    return preset >= CST_PRESET_JOLT && preset <= CST_PRESET_JOLT_PLUS;
}
