/* SPDX-License-Identifier: Apache-2.0 */
/* Codebooks of the LLOYD stage. Pure; any thread. */
#pragma once

/* 2^bits levels in rising order, 1 <= bits <= 8; at least 16 floats can be read. */
const float *cst_lloyd_levels(unsigned bits);
