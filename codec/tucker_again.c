/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks that were coded before. What a choice decodes to is codes and a tensor of its ranks, and
 * coding it by the same choice finds both again, at next to no error. But choices are made anew,
 * and where two of a cell are nearly alike, or two cells are about to take the next step, little
 * decides; another choice is another quantizer's noise on top. So where some cells were seen to
 * have been coded by their choice before, the others are asked about choices that would have been
 * good, too, and all keep what they had. Blocks that are new are not asked, as no cell of theirs is
 * seen, unless they have few.
 *
 * Uses what cst_tucker_fit() uses. No state; any thread.
 */
#include "codec/tucker.h"

#include "base/macros.h"

#include <math.h>

/* Of what codes miss: less is codes that were there before, or may be. */
static const float SURELY = 0.15f, MAYBE = 0.5f;
/* The same of 8 bits, which miss up to a quarter because decoded values are rounded. */
static const float SURELY_FINE = 0.3f;

enum {
    TRIES = 16,    /* of one cell */
    FEW_CELLS = 4, /* may all have taken another choice: */
    FEW_TRIES = 8, /* they are asked even if none was seen */
};

static float surely(const struct cst_point *p) {
    return p->bits == 8 ? SURELY_FINE : SURELY;
}

/* Error and cost at the price of a byte at which the cell takes its choice. */
static double price_of(const struct cst_hull *hull, const struct cst_point *now) {
    double below = INFINITY, above = 0;

    for (uint32_t i = 0; i < hull->n; i++) {
        const struct cst_point *p = &hull->point[i];

        if (p->cost < now->cost)
            below = fmin(below, (p->error - now->error) / (double)(now->cost - p->cost));
        if (p->cost > now->cost)
            above = fmax(above, (now->error - p->error) / (double)(p->cost - now->cost));
    }
    return isfinite(below) ? (below + fmax(above, 0)) / 2 : above;
}

static double loss(const struct cst_point *p, double price) {
    return p->error + price * (double)p->cost;
}

/* The candidate of least loss above a loss; false: there is none. */
static bool next_best(struct cst_point *best, const struct cst_hull *hull, double price,
                      double above) {
    double least = INFINITY;

    for (uint32_t i = 0; i < hull->n + hull->n_other; i++) {
        const struct cst_point *p = i < hull->n ? &hull->point[i] : &hull->other[i - hull->n];
        double l = loss(p, price);

        if (l > above && l < least) {
            least = l;
            *best = *p;
        }
    }
    return isfinite(least);
}

/* Makes a choice the only one. */
static void keep(struct cst_tucker *t, uint32_t cell, const struct cst_point *choice) {
    struct cst_hull *hull = &t->hull[cell];

    hull->point[0] = *choice;
    hull->n = 1;
    hull->n_other = 0;
}

/* Keeps the choice by which a cell was coded before, if it is another one than now. */
static bool find(struct cst_tucker *t, uint32_t cell, int tries, const struct cst_codec_work *w) {
    const struct cst_hull *hull = &t->hull[cell];
    const struct cst_point now = *cst_hull_at(hull, t->choice[cell]);
    struct cst_point best = now, p;
    double price = price_of(hull, &now), above = 0;
    float least = CST_MIN(t->cell[cell].missed, MAYBE);
    bool found = false;

    for (int i = 0; i < tries && least > surely(&best) && next_best(&p, hull, price, above); i++) {
        float missed = p.bits ? cst_tucker_missed(t, cell, &p, w) : 1;

        above = loss(&p, price);
        if (missed < least) {
            found = true;
            least = missed;
            best = p;
        }
    }
    if (least < MAYBE)
        keep(t, cell, &best);
    return found;
}

bool cst_tucker_again(struct cst_tucker *t, const struct cst_codec_work *w) {
    bool any = false, found = false;

    for (uint32_t c = 0; c < t->n_cells; c++)
        any |= t->hull[c].n && t->cell[c].missed < MAYBE;
    if (!any && t->n_cells > FEW_CELLS)
        return false;
    for (uint32_t c = 0; c < t->n_cells; c++) {
        if (t->hull[c].n && cst_hull_at(&t->hull[c], t->choice[c])->bits)
            found |= find(t, c, any ? TRIES : FEW_TRIES, w);
    }
    return found && cst_allocate(t->choice, t->hull, t->n_cells, t->budget);
}
