/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns stderr.
 * Invariants: 1. one write(2) a line, so lines of threads never mix; 2. more than CST_LOG_BURST
 * lines a second are dropped and counted; 3. the id seed is random per process, so that logged ids
 * mean nothing elsewhere.
 */
#include "base/log.h"

#include "base/hashmap.h"
#include "base/random.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { LOG_LINE_MAX = 1024, LOG_TAIL_MAX = 40 };

static _Atomic int max_level = CST_LOG_INFO;
static const struct cst_clock *limit_clock = &cst_clock_monotonic;
static _Atomic uint64_t window_start;
static _Atomic unsigned window_lines, dropped;
static bool to_journal;

void cst_log_set_level(enum cst_log_level max) {
    atomic_store(&max_level, (int)max);
}

void cst_log_set_clock(const struct cst_clock *clock) {
    limit_clock = clock;
    atomic_store(&window_start, 0);
    atomic_store(&window_lines, 0);
    atomic_store(&dropped, 0);
}

/* $JOURNAL_STREAM is "device:inode" of the journal's socket: a child that redirected its stderr
 * inherits the variable but not the stream. */
static void find_journal(void) {
    const char *stream = getenv("JOURNAL_STREAM");
    char own[64];
    struct stat st;

    if (!stream || fstat(STDERR_FILENO, &st))
        return;
    (void)snprintf(own, sizeof(own), "%ju:%ju", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino);
    to_journal = !strcmp(own, stream);
}

static bool admit(void) {
    uint64_t now = cst_now_ns(limit_clock), start = atomic_load(&window_start);

    if (!start || now - start >= CST_NS_PER_S) {
        atomic_store(&window_start, now);
        atomic_store(&window_lines, 0);
    }
    if (atomic_fetch_add(&window_lines, 1) < CST_LOG_BURST)
        return true;
    atomic_fetch_add(&dropped, 1);
    return false;
}

static void mask_controls(char *text, size_t n) {
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)text[i] < ' ' || text[i] == 127)
            text[i] = '?';
}

void cst_log(enum cst_log_level level, const char *fmt, ...) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    char line[LOG_LINE_MAX];
    int n = 0, w;
    unsigned lost;
    va_list ap;

    if ((int)level > atomic_load(&max_level) || !admit())
        return;
    (void)pthread_once(&once, find_journal);
    if (to_journal)
        n = snprintf(line, sizeof(line), "<%d>", (int)level);
    va_start(ap, fmt);
    w = vsnprintf(line + n, sizeof(line) - LOG_TAIL_MAX - (size_t)n, fmt, ap);
    va_end(ap);
    if (w < 0)
        return;
    n = w < LOG_LINE_MAX - LOG_TAIL_MAX - n ? n + w : LOG_LINE_MAX - LOG_TAIL_MAX - 1;
    mask_controls(line, (size_t)n);
    lost = atomic_exchange(&dropped, 0);
    if (lost)
        n += snprintf(line + n, LOG_TAIL_MAX, " (%u lines dropped)", lost);
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
