/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What libcistern exports for libcistern-llama alone (version node CISTERN_PRIVATE): may change
 * with every release, the two are installed together.
 */
#pragma once

#include <stdint.h>

/* Makes the sentence the calling thread's cistern_last_error(); returns status. */
int32_t cistern_private_fail(int32_t status, const char *sentence);
