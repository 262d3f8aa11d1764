/* SPDX-License-Identifier: Apache-2.0 */
/* codec.PRESET.instructions: of decoding a frame, checksums included, for each value of the block,
 * on the AVX2 loops; counted by callgrind, so hardly different between machines. One thread. */
#pragma once

#include "bench/bench_cache.h"

/* Reports codec.PRESET.instructions from a frame of the cache's layout and, unless it is NULL, its
 * side data; says so where valgrind is missing. */
void cst_report_instructions(const char *preset, const struct bench_cache *cache,
                             const uint8_t *frame, size_t len, const uint8_t *side,
                             size_t side_len);
