/* SPDX-License-Identifier: Apache-2.0 */
/* The clock seam: monotonic nanoseconds. Tests pass a manual clock and move it by hand. */
#pragma once

#include <stdint.h>

struct cst_clock {
    uint64_t (*now_ns)(const struct cst_clock *clock);
};

struct cst_manual_clock {
    struct cst_clock clock; /* first: pass &m.clock */
    uint64_t ns;
};

#define CST_NS_PER_MS UINT64_C(1000000)
#define CST_NS_PER_S UINT64_C(1000000000)

extern const struct cst_clock cst_clock_monotonic;
void cst_manual_clock_init(struct cst_manual_clock *m, uint64_t ns);

static inline uint64_t cst_now_ns(const struct cst_clock *clock) {
    return clock->now_ns(clock);
}
