/* SPDX-License-Identifier: Apache-2.0 */
/* What every cmocka test includes first: the prelude that cmocka wants, row tests, skipping. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/macros.h"

/* Meson's exit code of a skipped test. cmocka's own skip() prints badly: skip before the group. */
enum { CST_EXIT_SKIP = 77 };

/* Prints why and ends the program as skipped: `return cst_skip("CISTERN_DATA is not set");` */
int cst_skip(const char *missing, ...) CST_PRINTF(1, 2);

/*
 * One test per row of a table, so that a failure names its row. The row type starts with
 * `const char *name`; the test finds its row in *state. Returns the number of failures.
 *     return cst_run_rows(rows, check_row);
 */
#define cst_run_rows(rows, fn) cst_check_rows(#rows, (rows), sizeof((rows)[0]), CST_COUNT(rows), fn)
int cst_check_rows(const char *group, const void *rows, size_t size, size_t n,
                   CMUnitTestFunction fn);

/* $CST_LONG, how many times the release counts of a random test are to run; 0: unset, a short one.
 */
unsigned cst_long(void);
/* How often a random test repeats that does so `release` times before a release. */
unsigned cst_rounds(unsigned release);

/* Bytes of a hex string of exactly 2 * n digits; fails the test on anything else. */
void cst_unhex(uint8_t *out, size_t n, const char *hex);
