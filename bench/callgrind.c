/* SPDX-License-Identifier: Apache-2.0 */
/* Reads what a child under callgrind says. One thread. */
#include "bench/callgrind.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH_MAX_LEN = 4096 };

double cst_callgrind(const char *function, const char *arguments, const char *word,
                     double *number) {
    char self[PATH_MAX_LEN], command[3 * PATH_MAX_LEN], line[512];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    double collected = -1;
    FILE *out;

    if (n < 0)
        return -1;
    self[n] = '\0';
    if ((size_t)snprintf(command, sizeof(command),
                         "valgrind --tool=callgrind --callgrind-out-file=/dev/null "
                         "--collect-atstart=no --toggle-collect=%s '%s' %s 2>&1",
                         function, self, arguments) >= sizeof(command))
        return -1;
    out = popen(command, "re");
    while (out && fgets(line, sizeof(line), out)) {
        const char *at = strstr(line, "Collected : ");

        if (at)
            collected = strtod(at + strlen("Collected : "), NULL);
        if (word && !strncmp(line, word, strlen(word)))
            *number = strtod(line + strlen(word), NULL);
    }
    return out && pclose(out) == 0 ? collected : -1;
}
