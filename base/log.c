/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns stderr.
 * Invariants: 1. one write(2) a line, so lines of threads never mix; 2. more than LOG_BURST lines
 * a second are dropped and counted; 3. the id seed is random per process, so that logged ids mean
 * nothing elsewhere.
 */
#include "base/log.h"

#include "base/clock.h"
#include "base/hashmap.h"
#include "base/random.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

enum { LOG_BURST = 200, LOG_LINE_MAX = 1024 };

static _Atomic int max_level = CST_LOG_INFO;
static _Atomic uint64_t window_start;
static _Atomic unsigned window_lines, dropped;

void cst_log_set_level(enum cst_log_level max) {
    atomic_store(&max_level, (int)max);
}

static bool admit(void) {
    uint64_t now = cst_now_ns(&cst_clock_monotonic);

    if (now - atomic_load(&window_start) > CST_NS_PER_S) {
        atomic_store(&window_start, now);
        atomic_store(&window_lines, 0);
    }
    if (atomic_fetch_add(&window_lines, 1) < LOG_BURST)
        return true;
    atomic_fetch_add(&dropped, 1);
    return false;
}

void cst_log(enum cst_log_level level, const char *fmt, ...) {
    char line[LOG_LINE_MAX];
    int n = 0, w;
    unsigned lost;
    va_list ap;

    if ((int)level > atomic_load(&max_level) || !admit())
        return;
    if (getenv("JOURNAL_STREAM"))
        n = snprintf(line, sizeof(line), "<%d>", (int)level);
    va_start(ap, fmt);
    w = vsnprintf(line + n, sizeof(line) - (size_t)n, fmt, ap);
    va_end(ap);
    if (w < 0)
        return;
    n = CST_MIN(n + w, LOG_LINE_MAX - 40);
    lost = atomic_exchange(&dropped, 0);
    if (lost)
        n += snprintf(line + n, sizeof(line) - (size_t)n, " (%u lines dropped)", lost);
    line[n++] = '\n';
    if (write(STDERR_FILENO, line, (size_t)n) < 0)
        return; /* nowhere left to say it */
}

static uint64_t id_seed[4];

static void make_seed(void) {
    (void)cst_random_system.fill(&cst_random_system, id_seed, sizeof(id_seed));
}

struct cst_log_id cst_log_id(const uint8_t key[32]) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct cst_log_id id;

    (void)pthread_once(&once, make_seed);
    (void)snprintf(id.text, sizeof(id.text), "%016llx",
                   (unsigned long long)cst_hash_key(id_seed, key));
    return id;
}
