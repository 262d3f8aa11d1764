/* SPDX-License-Identifier: Apache-2.0 */
/* The glue's failures become libcistern's last error of the calling thread. */
#pragma once

#include "base/macros.h"

#include <stdint.h>

/* Keeps the sentence for cistern_last_error() and returns the status, a negative CISTERN_E_*. */
int32_t cst_llama_fail(int32_t status, const char *fmt, ...) CST_PRINTF(2, 3);

/* Of a negative errno. */
int32_t cst_llama_fail_errno(int r, const char *what);
