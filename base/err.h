/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two error channels in one int.
 *
 *   negative  a fatal errno: raised once with cst_err(), then only propagated, never matched on;
 *   positive  a documented condition of the one module that returns it, handled by its direct
 *             caller, never forwarded. cst_fold() turns an unhandled condition into a fatal error.
 *
 * Raising records file, line and function in a small per-thread trace that the daemon prints when
 * it decides an error. Nothing here allocates or logs.
 */
#pragma once

#include "base/macros.h"

#include <stddef.h>

CST_COLD int cst_err_raise(int r, const char *file, int line, const char *func);
int cst_err_fold(int r, const char *file, int line, const char *func);

/* r < 0: starts a trace and returns r. r >= 0 is returned unchanged. */
#define cst_err(r) cst_err_raise((r), __FILE__, __LINE__, __func__)

/* 0 and negative values pass; a positive condition becomes -ENOTRECOVERABLE with a trace. */
#define cst_fold(r) cst_err_fold((r), __FILE__, __LINE__, __func__)

/* Writes the calling thread's trace as one line ("store.c:12 cst_x: Cannot allocate memory") and
 * clears it. Always terminated when cap > 0. Returns the length; 0 when there is none. */
size_t cst_err_trace(char *out, size_t cap);
