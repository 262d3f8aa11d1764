/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fault points: the n-th call of a kind fails, so that failure is a loop in a test.
 *
 * Counting is process-wide and lock-free, and only threads that joined are counted: a test arms a
 * fault for the daemon's threads while its own client code goes on undisturbed. Unarmed, a point
 * costs one relaxed load.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum cst_fault_point {
    CST_FAULT_ALLOC, /* every cst_malloc() family call */
    CST_FAULT_MAP,   /* memfd_create, ftruncate, mmap of a slab */
    CST_FAULT_SEND,  /* a packet that the daemon sends */
    CST_FAULT_POINTS,
};

/* The calling thread's calls count from now on. */
void cst_fault_join(void);
void cst_fault_leave(void);

/* The nth call (1 = next) of a joined thread fails, and the `count - 1` calls after it; nth 0
 * disarms. Resets the hit counter. */
void cst_fault_arm(enum cst_fault_point point, uint64_t nth, uint64_t count);

/* Calls seen since the last arm. */
uint64_t cst_fault_seen(enum cst_fault_point point);

bool cst_fault_hit(enum cst_fault_point point);
