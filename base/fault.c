/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the fault countdowns.
 * Invariants: 1. `armed` is zero unless a test armed something, so production pays one relaxed
 * load; 2. only joined threads move a countdown.
 */
#include "base/fault.h"

#include <stdatomic.h>

struct fault {
    _Atomic uint64_t seen, first, last; /* calls first..last fail; first 0 = disarmed */
};

static struct fault faults[CST_FAULT_POINTS];
static _Atomic unsigned armed;
static _Thread_local bool joined;

void cst_fault_join(void) {
    joined = true;
}

void cst_fault_leave(void) {
    joined = false;
}

void cst_fault_arm(enum cst_fault_point point, uint64_t nth, uint64_t count) {
    struct fault *f = &faults[point];

    atomic_store(&f->first, 0);
    atomic_store(&f->seen, 0);
    atomic_store(&f->last, count > UINT64_MAX - nth ? UINT64_MAX : nth + count - 1);
    atomic_store(&f->first, nth);
    if (nth)
        atomic_fetch_or(&armed, 1u << point);
    else
        atomic_fetch_and(&armed, ~(1u << point));
}

uint64_t cst_fault_seen(enum cst_fault_point point) {
    return atomic_load(&faults[point].seen);
}

bool cst_fault_hit(enum cst_fault_point point) {
    struct fault *f = &faults[point];
    uint64_t n, first;

    if (!(atomic_load_explicit(&armed, memory_order_relaxed) & (1u << point)) || !joined)
        return false;
    n = atomic_fetch_add(&f->seen, 1) + 1;
    first = atomic_load(&f->first);
    return first && n >= first && n <= atomic_load(&f->last);
}
