/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shares bytes among cells: each has candidates (bytes, error); the sum of errors is to be small,
 * the sum of bytes at most a budget (Krishnan and Schulz, "A JoLT for the KV Cache", equations 3
 * and 4). Numbers only; pure; any thread.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* What one candidate of a cell costs and leaves. */
struct cst_point {
    uint64_t cost; /* bytes */
    double error;  /* >= 0 */
    uint16_t rank_t, rank_d;
    uint8_t bits;
};

/* Candidates of one cell on the way to its hull: of those with nearly one cost, the best. */
enum { CST_HULL_BINS = 1024, CST_HULL_POINTS = 128 };
struct cst_hull_bins {
    uint64_t least, width; /* of cost */
    struct cst_point bin[CST_HULL_BINS];
};
/* Costs from least to most are expected; others are put into the first and the last bin. */
void cst_hull_bins_init(struct cst_hull_bins *bins, uint64_t least, uint64_t most);
void cst_hull_bins_add(struct cst_hull_bins *bins, const struct cst_point *point);

/*
 * A cell's candidates that no other one beats in both cost and error, by rising cost. `point` are
 * those on the lower convex hull, each step saving less error a byte than the one before: what some
 * price of a byte makes best. `other` are all of them, some left out where they are many.
 */
struct cst_hull {
    uint32_t n, n_other; /* 0: there were no candidates */
    struct cst_point point[CST_HULL_POINTS], other[CST_HULL_POINTS];
};
void cst_hull_make(struct cst_hull *hull, struct cst_hull_bins *bins);

/*
 * choice[i]: of hull[i], see cst_hull_at(). The highest price of a byte whose choices fit the
 * budget (found by bisection, keeping the side that fits), then further steps in the order of what
 * they save as long as they fit, then, if more than a hundredth is left, the one change that saves
 * most with it. (Of less there is always something left, and spending it lets choices flicker.)
 * More budget never gives more error. false: even the smallest points don't fit; they are chosen
 * then. Hulls without points are left out.
 */
bool cst_allocate(uint32_t *choice, const struct cst_hull *hull, uint32_t n, uint64_t budget);

static inline const struct cst_point *cst_hull_at(const struct cst_hull *hull, uint32_t choice) {
    return choice < CST_HULL_POINTS ? &hull->point[choice] : &hull->other[choice - CST_HULL_POINTS];
}
