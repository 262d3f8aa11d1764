/* SPDX-License-Identifier: Apache-2.0 */
/* The calling thread's last failure: a status and one plain sentence. */
#pragma once

#include "base/macros.h"

#include <stdint.h>

enum { CST_ERROR_TEXT = 256 };

/* Keeps the sentence for cistern_last_error() and returns the status (a negative CISTERN_E_*). */
CST_COLD int32_t cst_client_fail(int32_t status, const char *fmt, ...) CST_PRINTF(2, 3);

/* With the status's own sentence. */
CST_COLD int32_t cst_client_fail_status(int32_t status);

/* A number of status.def from the wire as the C API's: 0, or a negative code that cistern.h lists.
 */
int32_t cst_status_to_api(uint32_t wire);
