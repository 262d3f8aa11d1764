/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the streams of a frame map to the parts of a block. Pure; any thread.
 */
#pragma once

#include "base/layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What encode and decode rely on. Descriptors were checked when they came in; this keeps a mistake
 * there from becoming a write out of bounds here. */
bool cst_layout_ok(const struct cst_descriptor *desc);

/* One a segment, and one for the bytes in no segment if there are any. */
uint32_t cst_layout_streams(const struct cst_descriptor *desc);

/* Bytes in front of segment i that are in no segment, from *at on; behind the last one for
 * i = n_segments. */
uint64_t cst_layout_gap(const struct cst_descriptor *desc, uint32_t i, uint64_t *at);

/* docs/codec-format.md section 2 */
uint32_t cst_layout_crc(const struct cst_descriptor *desc);

/* order[k]: the segment of stream k; the descriptor's order, or layered: by layer, then K, V,
 * opaque. */
void cst_layout_order(uint32_t *order, const struct cst_descriptor *desc, bool layered);
