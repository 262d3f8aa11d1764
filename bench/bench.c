/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the way figures are measured and printed. No state but the output form and the chosen core.
 * Invariants: 1. A and B alternate, batch by batch; 2. nothing is printed between two batches.
 */
#include "bench/bench.h"

#include "base/clock.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>

static const double BATCH_SECONDS = 10e-3;
static bool as_json;
static int pinned_cpu = -1;
static cpu_set_t before_pin;
static bool realtime;

double cst_seconds(void) {
    return (double)cst_now_ns(&cst_clock_monotonic) * 1e-9;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double cst_quantile(double *values, size_t n, double q) {
    size_t at = (size_t)lround(q * (double)(n - 1));

    qsort(values, n, sizeof(*values), ascending);
    return values[at];
}

static int time_side(double *seconds, const struct cst_side *side, unsigned ops) {
    double start = cst_seconds();
    int r = side->run(side->arg, ops);

    *seconds = (cst_seconds() - start) / ops;
    return r;
}

static int pick_ops(unsigned *ops, const struct cst_side *side) {
    double seconds = 0;

    for (*ops = 1; *ops < 1u << 20; *ops *= 2) {
        int r = time_side(&seconds, side, *ops);

        if (r)
            return r;
        if (seconds * *ops >= BATCH_SECONDS)
            break;
    }
    return 0;
}

int cst_compare(struct cst_compared *out, struct cst_side a, struct cst_side b) {
    double as[CST_PAIRS], bs[CST_PAIRS], ratios[CST_PAIRS], warm;
    unsigned ops;
    int r = pick_ops(&ops, &a);

    if (!r)
        r = time_side(&warm, &b, ops);
    for (size_t i = 0; i < CST_PAIRS && !r; i++) {
        r = time_side(&as[i], &a, ops);
        if (!r)
            r = time_side(&bs[i], &b, ops);
        ratios[i] = as[i] / bs[i];
    }
    if (r)
        return r;
    *out = (struct cst_compared){
        .a = cst_quantile(as, CST_PAIRS, 0.5),
        .b = cst_quantile(bs, CST_PAIRS, 0.5),
        .low = cst_quantile(ratios, CST_PAIRS, 0.05),
        .high = cst_quantile(ratios, CST_PAIRS, 0.95),
        .ops = ops,
    };
    return 0;
}

void cst_report_json(bool json) {
    as_json = json;
}

static bool reached(const struct cst_figure *f) {
    return f->sense == CST_NO_TARGET ||
           (f->sense == CST_AT_MOST ? f->value <= f->target : f->value >= f->target);
}

/* The JSON members without their quotes, for people. */
static void print_plain(const char *members) {
    for (; *members; members++)
        if (*members != '"')
            (void)putchar(*members);
}

static void print_row(const struct cst_figure *f, const char *members) {
    char target[32] = "";

    if (f->sense != CST_NO_TARGET)
        (void)snprintf(target, sizeof(target), "%s %g",
                       f->sense == CST_AT_MOST ? "<=" : ">=", f->target);
    (void)printf("%-26s %10.4g %-6s %-9s %-6s ", f->name, f->value, f->unit, target,
                 f->sense == CST_NO_TARGET ? ""
                 : reached(f)              ? "ok"
                                           : "MISSED");
    print_plain(members);
    (void)putchar('\n');
}

static void print_json(const struct cst_figure *f, const char *members) {
    char target[32] = "null";

    if (f->sense != CST_NO_TARGET)
        (void)snprintf(target, sizeof(target), "%g", f->target);
    (void)printf("{\"name\": \"%s\", \"value\": %.6g, \"unit\": \"%s\", \"target\": %s, "
                 "\"ok\": %s, \"detail\": {%s}}\n",
                 f->name, f->value, f->unit, target, reached(f) ? "true" : "false", members);
}

void cst_report(const struct cst_figure *figure, const char *detail, ...) {
    char members[1024];
    va_list ap;

    va_start(ap, detail);
    (void)vsnprintf(members, sizeof(members), detail, ap);
    va_end(ap);
    (as_json ? print_json : print_row)(figure, members);
    (void)fflush(stdout);
}

void cst_report_skipped(const char *name, const char *missing) {
    if (as_json)
        (void)printf("{\"name\": \"%s\", \"value\": null, \"unit\": null, \"target\": null, "
                     "\"ok\": null, \"detail\": {\"skipped\": \"%s\"}}\n",
                     name, missing);
    else
        (void)printf("%-26s skipped: %s\n", name, missing);
}

/* Idle ticks of each core since boot. */
static size_t idle_ticks(uint64_t *idle, size_t max) {
    FILE *f = fopen("/proc/stat", "re");
    char line[512];
    size_t n = 0;

    while (f && n < max && fgets(line, sizeof(line), f)) {
        unsigned cpu;
        unsigned long long user, nice, system, free;

        if (sscanf(line, "cpu%u %llu %llu %llu %llu", &cpu, &user, &nice, &system, &free) == 5)
            idle[n++] = free;
    }
    if (f)
        (void)fclose(f);
    return n;
}

static int idlest_cpu(void) {
    uint64_t before[CPU_SETSIZE], after[CPU_SETSIZE];
    const struct timespec wait = { .tv_nsec = 300 * 1000 * 1000 };
    size_t n = idle_ticks(before, CPU_SETSIZE), best = 0;

    (void)nanosleep(&wait, NULL);
    n = CST_MIN(n, idle_ticks(after, CPU_SETSIZE));
    if (sched_getaffinity(0, sizeof(before_pin), &before_pin))
        return 0;
    while (best + 1 < n && !CPU_ISSET(best, &before_pin))
        best++;
    for (size_t i = best + 1; i < n; i++)
        if (CPU_ISSET(i, &before_pin) && after[i] - before[i] > after[best] - before[best])
            best = i;
    return (int)best;
}

static int pin_thread(pid_t tid) {
    const struct sched_param first = { .sched_priority = 1 };
    cpu_set_t set;

    if (pinned_cpu < 0)
        pinned_cpu = idlest_cpu();
    CPU_ZERO(&set);
    CPU_SET((size_t)pinned_cpu, &set);
    if (sched_setaffinity(tid, sizeof(set), &set))
        return -errno;
    realtime = !sched_setscheduler(tid, SCHED_FIFO, &first);
    return 0;
}

int cst_pin(void) {
    return pin_thread(0);
}

int cst_pin_process(pid_t pid) {
    char path[64];
    struct dirent *entry;
    DIR *tasks;
    int r = 0;

    (void)snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
    tasks = opendir(path);
    if (!tasks)
        return -errno;
    while (!r && (entry = readdir(tasks)))
        if (entry->d_name[0] != '.')
            r = pin_thread((pid_t)strtol(entry->d_name, NULL, 10));
    (void)closedir(tasks);
    return r;
}

void cst_unpin(void) {
    const struct sched_param ordinary = { 0 };

    if (pinned_cpu < 0)
        return;
    (void)sched_setscheduler(0, SCHED_OTHER, &ordinary);
    (void)sched_setaffinity(0, sizeof(before_pin), &before_pin);
}

static void processor_name(char *out, size_t cap) {
    FILE *f = fopen("/proc/cpuinfo", "re");
    char line[256];

    (void)snprintf(out, cap, "unknown");
    while (f && fgets(line, sizeof(line), f)) {
        char *name = strchr(line, ':');

        if (strncmp(line, "model name", 10) || !name)
            continue;
        line[strcspn(line, "\n\"")] = '\0';
        (void)snprintf(out, cap, "%s", name + 2);
        break;
    }
    if (f)
        (void)fclose(f);
}

void cst_report_machine(void) {
    char cpu[128];
    double load[3] = { 0 };
    struct utsname kernel = { 0 };
    struct cst_figure f = {
        .name = "machine",
        .value = (double)sysconf(_SC_NPROCESSORS_ONLN),
        .unit = "cores",
        .sense = CST_NO_TARGET,
    };

    (void)cst_pin();
    processor_name(cpu, sizeof(cpu));
    (void)uname(&kernel);
    (void)getloadavg(load, 3);
    cst_report(&f,
               "\"cpu\": \"%s\", \"kernel\": \"%s\", \"compiler\": \"%s\", \"load\": %.2f, "
               "\"realtime\": %s",
               cpu, kernel.release, __VERSION__, load[0], realtime ? "true" : "false");
}
