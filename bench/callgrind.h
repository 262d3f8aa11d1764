/* SPDX-License-Identifier: Apache-2.0 */
/* Instructions of one function, counted by callgrind. One thread. */
#pragma once

/*
 * Runs this program again under callgrind with `arguments`, a piece of shell text, and returns the
 * instructions executed in `function` and what it calls. Valgrind knows AVX2 and nothing above, so
 * it counts the AVX2 loops on any x86 machine. *number, where word isn't NULL: what the child
 * printed behind that word. Negative: valgrind is not there, or the child failed.
 */
double cst_callgrind(const char *function, const char *arguments, const char *word, double *number);
