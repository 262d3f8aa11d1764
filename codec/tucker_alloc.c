/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The allocator. Invariants: 1. a hull is convex, so the choices at one price are a prefix of each
 * cell's steps, and those at a lower price contain them; 2. the sum of costs only grows by steps
 * that fit. Hence more budget never gives more error: with less, all steps before the first one
 * that doesn't fit are the same or fewer, and the last change, which costs less than that step,
 * saves no more than it, a step saving at least as much a byte as anything above its hull.
 *
 * Steps that cost one price are taken in the order of the cells. No state; any thread.
 */
#include "codec/tucker_alloc.h"

#include <assert.h>
#include <math.h>

/* ---- the hull of a cell ----------------------------------------------------------------------
 */

void cst_hull_bins_init(struct cst_hull_bins *bins, uint64_t least, uint64_t most) {
    bins->least = least;
    bins->width = most > least ? (most - least) / CST_HULL_BINS + 1 : 1;
    for (uint32_t i = 0; i < CST_HULL_BINS; i++)
        bins->bin[i] = (struct cst_point){ .error = INFINITY };
}

void cst_hull_bins_add(struct cst_hull_bins *bins, const struct cst_point *point) {
    uint64_t i = point->cost < bins->least ? 0 : (point->cost - bins->least) / bins->width;
    struct cst_point *best = &bins->bin[i < CST_HULL_BINS ? i : CST_HULL_BINS - 1];

    if (point->error < best->error || (point->error <= best->error && point->cost < best->cost))
        *best = *point;
}

/* Whether b, between a and c, lies on or above the line through them. */
static bool is_above(const struct cst_point *a, const struct cst_point *b,
                     const struct cst_point *c) {
    return (a->error - b->error) * (double)(c->cost - b->cost) <=
           (b->error - c->error) * (double)(b->cost - a->cost);
}

/* Every other point; the ends stay. A convex hull remains one. */
static uint32_t thin(struct cst_point *point, uint32_t n) {
    uint32_t kept = 0;

    for (uint32_t i = 0; i < n; i++) {
        if (i % 2 == 0 || i + 1 == n)
            point[kept++] = point[i];
    }
    return kept;
}

/* Those of the bins, which are sorted by cost, that less cost doesn't beat. */
static uint32_t leave_beaten(struct cst_point *p) {
    uint32_t n = 0;

    for (uint32_t i = 0; i < CST_HULL_BINS; i++) {
        struct cst_point c = p[i];

        if (!isfinite(c.error) || (n && c.error >= p[n - 1].error))
            continue;
        while (n && c.cost <= p[n - 1].cost)
            n--;
        p[n++] = c;
    }
    return n;
}

/* Monotone chain, in place. */
static uint32_t leave_above(struct cst_point *p, uint32_t all) {
    uint32_t n = 0;

    for (uint32_t i = 0; i < all; i++) {
        struct cst_point c = p[i];

        while (n >= 2 && is_above(&p[n - 2], &p[n - 1], &c))
            n--;
        p[n++] = c;
    }
    return n;
}

void cst_hull_make(struct cst_hull *hull, struct cst_hull_bins *bins) {
    struct cst_point *p = bins->bin;
    uint32_t n = leave_beaten(p), step = n / CST_HULL_POINTS + 1;

    hull->n_other = 0;
    for (uint32_t i = 0; i < n; i += step)
        hull->other[hull->n_other++] = p[i];
    n = leave_above(p, n);
    while (n > CST_HULL_POINTS)
        n = thin(p, n);
    hull->n = n;
    for (uint32_t i = 0; i < n; i++)
        hull->point[i] = p[i];
}

/* ---- the budget ------------------------------------------------------------------------------
 */

/* What the step from point i to the next one saves a byte; nothing behind the last one. */
static double saving(const struct cst_hull *hull, uint32_t i) {
    const struct cst_point *a = &hull->point[i], *b = a + 1;

    return i + 1 < hull->n ? (a->error - b->error) / (double)(b->cost - a->cost) : -1;
}

/* The steps that save more than a price; returns their cost. */
static uint64_t choose(uint32_t *choice, const struct cst_hull *hull, uint32_t n, double price) {
    uint64_t cost = 0;

    for (uint32_t c = 0; c < n; c++) {
        uint32_t low = 0, high = hull[c].n ? hull[c].n - 1 : 0;

        while (low < high) {
            uint32_t middle = (low + high) / 2;

            if (saving(&hull[c], middle) > price)
                low = middle + 1;
            else
                high = middle;
        }
        choice[c] = low;
        cost += hull[c].n ? hull[c].point[low].cost : 0;
    }
    return cost;
}

/* Leaves the choices of the lowest price found that fits; false if no price does. */
static bool bisect(uint32_t *choice, const struct cst_hull *hull, uint32_t n, uint64_t budget) {
    double low = 0, high = 0;

    for (uint32_t c = 0; c < n; c++)
        high = fmax(high, hull[c].n ? saving(&hull[c], 0) : 0);
    if (choose(choice, hull, n, high) > budget)
        return false;
    if (choose(choice, hull, n, low) <= budget)
        return true;
    /* exponents first: savings of a byte span many orders of magnitude */
    for (int i = 0; i < 128; i++) {
        double price = low > 0 ? sqrt(low * high) : high * 0x1p-8;

        if (choose(choice, hull, n, price) <= budget)
            high = price;
        else
            low = price;
    }
    (void)choose(choice, hull, n, high);
    return true;
}

/* Steps at the price that was too low for all of them: by saving, then by cell, while they fit. */
static uint64_t step_on(uint32_t *choice, const struct cst_hull *hull, uint32_t n, uint64_t left) {
    for (;;) {
        double best = 0;
        uint32_t at = n;
        uint64_t cost;

        for (uint32_t c = 0; c < n; c++) {
            double s = hull[c].n ? saving(&hull[c], choice[c]) : -1;

            if (s > best) {
                best = s;
                at = c;
            }
        }
        if (at == n)
            return left;
        cost = hull[at].point[choice[at] + 1].cost - hull[at].point[choice[at]].cost;
        if (cost > left)
            return left;
        left -= cost;
        choice[at]++;
    }
}

/* The one change of one cell that saves most. */
static void spend(uint32_t *choice, const struct cst_hull *hull, uint32_t n, uint64_t left) {
    uint32_t cell = n, point = 0;
    double best = 0;

    for (uint32_t c = 0; c < n; c++) {
        const struct cst_point *now = &hull[c].point[choice[c]];

        for (uint32_t i = 0; i < hull[c].n_other; i++) {
            const struct cst_point *p = &hull[c].other[i];

            if (p->cost <= now->cost + left && now->error - p->error > best) {
                best = now->error - p->error;
                cell = c;
                point = i;
            }
        }
    }
    if (cell < n)
        choice[cell] = CST_HULL_POINTS + point;
}

bool cst_allocate(uint32_t *choice, const struct cst_hull *hull, uint32_t n, uint64_t budget) {
    uint64_t cost = 0;

    if (!bisect(choice, hull, n, budget))
        return false;
    for (uint32_t c = 0; c < n; c++)
        cost += hull[c].n ? hull[c].point[choice[c]].cost : 0;
    assert(cost <= budget);
    cost = step_on(choice, hull, n, budget - cost); /* left */
    if (cost > budget / 128)
        spend(choice, hull, n, cost);
    return true;
}
