/* SPDX-License-Identifier: Apache-2.0 */
/* What libraries read from the environment while they are loaded, before main(). */
#pragma once

/*
 * First thing in a program's main: starts it again, as the same process with the same arguments,
 * with one more variable in its environment. Returns where the variable is there already, value is
 * NULL, or it can't be done.
 */
void cst_restart_with(char *const argv[], const char *name, const char *value);
