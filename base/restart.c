/* SPDX-License-Identifier: Apache-2.0 */
/* Owns nothing; for the main thread before there are others, since it writes the environment. */
#include "base/restart.h"

#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

void cst_restart_with(char *const argv[], const char *name, const char *value) {
    char path[PATH_MAX];
    ssize_t n;

    if (!value || getenv(name))
        return;
    n = readlink("/proc/self/exe", path, sizeof(path) - 1);
    if (n <= 0 || setenv(name, value, 1))
        return;
    path[n] = '\0';
    (void)execv(path, argv);
}
