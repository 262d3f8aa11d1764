/* SPDX-License-Identifier: Apache-2.0 */
/* The system's and the manual clock; no state of its own, any thread (a manual clock: one). */
#include "base/clock.h"

#include "base/macros.h"

#include <time.h>

static uint64_t monotonic_now(const struct cst_clock *clock) {
    struct timespec t;

    (void)clock;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * CST_NS_PER_S + (uint64_t)t.tv_nsec;
}

const struct cst_clock cst_clock_monotonic = { .now_ns = monotonic_now };

static uint64_t manual_now(const struct cst_clock *clock) {
    const struct cst_manual_clock *m =
        (const void *)((const char *)clock - offsetof(struct cst_manual_clock, clock));

    return m->ns;
}

void cst_manual_clock_init(struct cst_manual_clock *m, uint64_t ns) {
    m->clock.now_ns = manual_now;
    m->ns = ns;
}
