/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns one strace process at a time. What starting and stopping it costs in calls is taken out by
 * counting two runs of different length and keeping the difference.
 */
#include "bench/syscalls.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { SHORT = 500, LONG = 2500, NAMES_MAX = 64, ATTACH_LIMIT_MS = 10000 };

struct count {
    char name[32];
    double calls;
};

static bool is_wanted(const char *name) {
    static const char *const all[] = { "sendto", "sendmsg", "recvfrom",   "recvmsg",
                                       "poll",   "ppoll",   "epoll_wait", "epoll_pwait" };

    for (size_t i = 0; i < CST_COUNT(all); i++)
        if (!strcmp(name, all[i]))
            return true;
    return false;
}

static void run_strace(const char *out, pid_t self, pid_t daemon, int say) {
    char pids[2][16];

    (void)snprintf(pids[0], sizeof(pids[0]), "%d", (int)self);
    (void)snprintf(pids[1], sizeof(pids[1]), "%d", (int)daemon);
    (void)dup2(say, STDERR_FILENO);
    (void)execlp("strace", "strace", "-f", "-c", "-U", "calls,name", "-o", out, "-p", pids[0], "-p",
                 pids[1], (char *)NULL);
    _exit(errno == ENOENT ? 127 : 126);
}

/* Waits for "attached" from both processes. */
static bool attached(int say) {
    char text[4096];
    size_t n = 0;
    const char *first;

    while (n < sizeof(text) - 1) {
        struct pollfd p = { say, POLLIN, 0 };
        ssize_t got =
            poll(&p, 1, ATTACH_LIMIT_MS) > 0 ? read(say, text + n, sizeof(text) - 1 - n) : -1;

        if (got <= 0)
            return false;
        n += (size_t)got;
        text[n] = '\0';
        first = strstr(text, "attached");
        if (first && strstr(first + 1, "attached"))
            return true;
    }
    return false;
}

static int parse(struct count *counts, size_t *n, const char *path) {
    FILE *f = fopen(path, "re");
    char line[256];

    if (!f)
        return -errno;
    *n = 0;
    while (fgets(line, sizeof(line), f) && *n < NAMES_MAX)
        if (sscanf(line, "%lf %31s", &counts[*n].calls, counts[*n].name) == 2 &&
            strcmp(counts[*n].name, "total"))
            ++*n;
    (void)fclose(f);
    return 0;
}

static int count_run(struct count *counts, size_t *n, pid_t daemon, cst_side_fn run, void *arg,
                     unsigned ops) {
    char out[] = "/tmp/cistern-strace-XXXXXX";
    cst_auto(cst_closep) int file = mkostemp(out, O_CLOEXEC);
    pid_t self = getpid(), strace;
    int say[2], status = 0, r;
    bool ok;

    if (file < 0 || pipe2(say, O_CLOEXEC))
        return -errno;
    (void)prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    strace = fork();
    if (!strace)
        run_strace(out, self, daemon, say[1]);
    (void)close(say[1]);
    ok = attached(say[0]);
    r = ok ? run(arg, ops) : 0;
    (void)kill(strace, SIGINT);
    (void)waitpid(strace, &status, 0);
    (void)close(say[0]);
    if (!ok)
        r = WIFEXITED(status) && WEXITSTATUS(status) == 127 ? -ENOENT : -EPERM;
    if (!r)
        r = parse(counts, n, out);
    (void)unlink(out);
    return r;
}

static double calls_of(const struct count *counts, size_t n, const char *name) {
    for (size_t i = 0; i < n; i++)
        if (!strcmp(counts[i].name, name))
            return counts[i].calls;
    return 0;
}

int cst_count_syscalls(struct cst_syscalls *out, pid_t daemon, cst_side_fn run, void *arg) {
    struct count few[NAMES_MAX], many[NAMES_MAX];
    size_t n_few = 0, n_many = 0, used = 0;
    double others = 0;
    int r = count_run(few, &n_few, daemon, run, arg, SHORT);

    if (!r)
        r = count_run(many, &n_many, daemon, run, arg, LONG);
    if (r)
        return r;
    *out = (struct cst_syscalls){ 0 };
    for (size_t i = 0; i < n_many; i++) {
        double calls = many[i].calls - calls_of(few, n_few, many[i].name);
        double each = round(100 * calls / (LONG - SHORT)) / 100;

        if (is_wanted(many[i].name)) {
            out->wanted += each;
        } else if (each > 0) {
            others += each;
            used += (size_t)snprintf(out->names + used, sizeof(out->names) - used, "%s%s %.2f",
                                     used ? ", " : "", many[i].name, each);
            used = CST_MIN(used, sizeof(out->names) - 1);
        }
    }
    out->other = round(10 * others) / 10;
    return 0;
}
