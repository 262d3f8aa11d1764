/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stage KLT: a tensor's tokens less their channel means and, in `deep` frames, less what K and V
 * decoded before predict of them; rotated into the basis in which they are uncorrelated; divided by
 * one step and rounded; coded with tables chosen by the deviation of each coefficient. Bases and
 * predictors come from side data. One step for all coefficients gives each its share of bits
 * (reverse water-filling).
 *
 * Streams stand in layered frames. The state between them lies in w->dense.
 */
#pragma once

#include "codec/stage.h"

size_t cst_klt_work_size(const struct cst_descriptor *desc, bool deep);

/* Before the first stream of a frame; false without side data where they are needed. */
bool cst_klt_begin(const struct cst_codec_work *w, bool deep);

/* As the other stages, but returns 0 where side data don't know the tensor. The step is that of
 * w->params; a smaller one where its error would exceed the bound. */
size_t cst_klt_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                      const struct cst_codec_work *w, float *error);

/* seg NULL: only for what later streams need of it. */
bool cst_klt_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src, size_t len,
                    const struct cst_codec_work *w);

/* A segment that was coded by another stage, which later streams may be predicted from. */
void cst_klt_note(const uint8_t *seg, const struct cst_stage_segment *s,
                  const struct cst_codec_work *w);

/* Whether a stream of this stage keeps keys turned back. */
bool cst_klt_is_unrotated(const uint8_t *src, size_t len);

/* Where there is a step table, a tensor may err by its weight more or less. */
float cst_klt_weight(const struct cst_side *side, uint32_t layer, uint8_t tensor);
