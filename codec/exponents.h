/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stage EXPONENTS: bf16 values without loss, the exponents of each channel by the rANS coder.
 * Pure; any thread.
 */
#pragma once

#include "codec/stage.h"

/* The stage's tables, in memory of cst_exponents_work_size() bytes, alignment 64. */
struct cst_exponents_work;
size_t cst_exponents_work_size(void);
struct cst_exponents_work *cst_exponents_work_init(void *memory);

/* As stages; they need a view of bf16. encode returns 0 when holes aren't zero
 * or PLANES gives less, too. */
size_t cst_exponents_encode(uint8_t *dst, const uint8_t *seg, const struct cst_stage_segment *s,
                            const struct cst_codec_work *w);
bool cst_exponents_decode(uint8_t *seg, const struct cst_stage_segment *s, const uint8_t *src,
                          size_t len, const struct cst_codec_work *w);

/* Frequencies of the symbols -CST_EXPONENTS_REACH .. of a table, for tests and readers. */
enum { CST_EXPONENTS_TABLES = 4, CST_EXPONENTS_REACH = 7, CST_EXPONENTS_MIDDLE = 4 };
void cst_exponents_frequencies(uint16_t frequency[2 * CST_EXPONENTS_REACH + 1], unsigned table);
