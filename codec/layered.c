/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which module prepares the presets of layered frames, whose streams lean on one another. No state;
 * any thread.
 */
#include "codec/preset.h"
#include "codec/stage.h"

size_t cst_dense_work_size(const struct cst_descriptor *desc, uint32_t preset) {
    (void)desc;
    (void)preset;
    return 0;
}

bool cst_layered_begin(const uint8_t *block, uint32_t tokens, uint32_t first_position,
                       uint32_t preset, const struct cst_codec_work *w) {
    (void)block;
    (void)tokens;
    (void)first_position;
    (void)w;
    return cst_preset_is_layered(preset);
}

bool cst_layered_skip(const struct cst_stage_segment *s, uint8_t stage, const uint8_t *src,
                      size_t len, const struct cst_codec_work *w) {
    (void)s;
    (void)src;
    (void)len;
    (void)w;
    return cst_stage_known(stage, true);
}
