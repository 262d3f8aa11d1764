/* SPDX-License-Identifier: Apache-2.0 */
/* Status numbers and sentences; the only file where an errno or a module's condition becomes one.
 */
#pragma once

enum cst_status {
#define X(NAME, number, text) CST_STATUS_##NAME = number,
#include "proto/status.def"
#undef X
};

/* "no such block"; "unknown status" for others. */
const char *cst_status_text(int status);
const char *cst_status_name(int status);

/* -ENOMEM -> NO_MEMORY, -EMSGSIZE -> TOO_LARGE, other negative errno -> INTERNAL; 0 -> OK. */
int cst_status_from_errno(int r);
