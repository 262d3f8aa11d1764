/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which module prepares the presets of layered frames, whose streams lean on one another. No state;
 * any thread.
 */
#include "codec/codec.h"
#include "codec/format.h"
#include "codec/klt.h"
#include "codec/preset.h"
#include "codec/stage.h"
#include "codec/tucker.h"

size_t cst_dense_work_size(const struct cst_descriptor *desc, uint32_t preset) {
    switch (preset) {
    case CST_PRESET_JOLT:
    case CST_PRESET_FLASHJOLT:
    case CST_PRESET_JOLT_PLUS:
        return cst_tucker_work_size(desc);
    case CST_PRESET_KLT:
    case CST_PRESET_DEEP:
        return cst_klt_work_size(desc, preset == CST_PRESET_DEEP);
    default:
        return 0;
    }
}

bool cst_layered_begin(const uint8_t *block, uint32_t tokens, uint32_t first_position,
                       uint32_t preset, const struct cst_codec_work *w) {
    switch (preset) {
    case CST_PRESET_JOLT:
    case CST_PRESET_FLASHJOLT:
    case CST_PRESET_JOLT_PLUS:
        if (block)
            cst_tucker_plan(block, tokens, first_position, w);
        else
            (void)cst_tucker_init(w);
        return true;
    case CST_PRESET_KLT:
    case CST_PRESET_DEEP:
        return cst_klt_begin(w, preset == CST_PRESET_DEEP);
    default:
        return cst_preset_is_layered(preset);
    }
}

bool cst_layered_over_budget(const struct cst_codec_work *w) {
    const struct cst_tucker *t = w->dense;

    return cst_preset_is_tucker(w->preset) && t->over_budget;
}

bool cst_layered_again(const struct cst_codec_work *w) {
    return cst_preset_is_tucker(w->preset) && cst_tucker_again(w->dense, w);
}

bool cst_layered_skip(const struct cst_stage_segment *s, uint8_t stage, const uint8_t *src,
                      size_t len, const struct cst_codec_work *w) {
    if (stage == CST_STAGE_TUCKER)
        return cst_preset_is_tucker(w->preset) && cst_tucker_skip(s, src, len, w);
    if (w->preset != CST_PRESET_DEEP || !s->view)
        return cst_stage_known(stage, true);
    if (stage == CST_STAGE_KLT)
        return cst_klt_decode(NULL, s, src, len, w);
    return cst_stream_decode(w->a, s->length, s, stage, src, len, w);
}
