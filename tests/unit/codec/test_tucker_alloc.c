/* SPDX-License-Identifier: Apache-2.0 */
/* The allocator against a search of all choices, and its promises about budgets. */
#include "tests/lib/check.h"

#include "codec/tucker_alloc.h"

#include "base/macros.h"
#include "base/random.h"

#include <math.h>
#include <string.h>

enum { CELLS = 4 };

static struct cst_hull_bins bins;

static double uniform(struct cst_seeded_random *r) {
    return (double)(cst_seeded_random_next(r) >> 11) * 0x1p-53;
}

/* Candidates around a falling curve. */
static void fill(struct cst_hull *hull, struct cst_seeded_random *r, uint32_t n) {
    double scale = pow(10, 3 * uniform(r));

    cst_hull_bins_init(&bins, 100, 20000);
    for (uint32_t i = 0; i < n; i++) {
        struct cst_point p = { .cost = 100 + cst_seeded_random_next(r) % 19000,
                               .rank_t = (uint16_t)i };

        p.error = scale * exp(-(double)p.cost / 4000) * (1 + uniform(r));
        cst_hull_bins_add(&bins, &p);
    }
    cst_hull_make(hull, &bins);
}

static void hulls_are_convex_and_below_all_candidates(void **state) {
    struct cst_seeded_random r;
    struct cst_hull hull;

    (void)state;
    cst_seeded_random_init(&r, 1);
    for (int round = 0; round < 50; round++) {
        fill(&hull, &r, 1 + (uint32_t)(cst_seeded_random_next(&r) % 400));
        assert_true(hull.n >= 1 && hull.n <= CST_HULL_POINTS);
        for (uint32_t i = 1; i < hull.n; i++) {
            const struct cst_point *p = &hull.point[i];

            assert_true(p->cost > p[-1].cost && p->error < p[-1].error);
            if (i + 1 < hull.n)
                assert_true((p[-1].error - p->error) * (double)(p[1].cost - p->cost) >=
                            (p->error - p[1].error) * (double)(p->cost - p[-1].cost));
        }
    }
}

static void many_points_are_thinned(void **state) {
    struct cst_hull hull;

    (void)state;
    cst_hull_bins_init(&bins, 0, 1024);
    for (uint64_t i = 0; i < 1024; i++)
        cst_hull_bins_add(&bins,
                          &(struct cst_point){ .cost = i, .error = pow(1024 - (double)i, 2) });
    cst_hull_make(&hull, &bins);
    assert_true(hull.n > CST_HULL_POINTS / 2 && hull.n <= CST_HULL_POINTS);
    assert_true(hull.point[0].cost <= 1);
    assert_int_equal(hull.point[hull.n - 1].cost, 1023);
}

struct sum {
    uint64_t cost;
    double error;
};

static struct sum sum_of(const struct cst_hull *hull, const uint32_t *choice) {
    struct sum s = { 0 };

    for (uint32_t c = 0; c < CELLS; c++) {
        s.cost += cst_hull_at(&hull[c], choice[c])->cost;
        s.error += cst_hull_at(&hull[c], choice[c])->error;
    }
    return s;
}

/* The least error of any choice of hull points within the budget. */
static double best(const struct cst_hull *hull, uint32_t cells, uint64_t budget) {
    double least = INFINITY;

    if (!cells)
        return 0;
    for (uint32_t i = 0; i < hull->n && hull->point[i].cost <= budget; i++) {
        double rest = best(hull + 1, cells - 1, budget - hull->point[i].cost);

        least = fmin(least, hull->point[i].error + rest);
    }
    return least;
}

static void choices_keep_the_budget_and_more_of_it_never_hurts(void **state) {
    static struct cst_hull hull[CELLS];
    struct cst_seeded_random r;
    uint32_t choice[CELLS];

    (void)state;
    cst_seeded_random_init(&r, 2);
    for (int round = 0; round < 20; round++) {
        double before = INFINITY;

        for (uint32_t c = 0; c < CELLS; c++)
            fill(&hull[c], &r, 60);
        for (uint64_t budget = 0; budget < 80000; budget += 97) {
            bool fits = cst_allocate(choice, hull, CELLS, budget);
            struct sum s = sum_of(hull, choice);

            assert_true(s.error <= before);
            before = s.error;
            assert_int_equal(fits, s.cost <= budget);
            for (uint32_t c = 0; !fits && c < CELLS; c++)
                assert_int_equal(choice[c], 0); /* the smallest */
            if (fits && budget % (97 * 64) == 0)
                assert_true(s.error <= 1.3 * best(hull, CELLS, budget));
        }
    }
}

static void cells_without_candidates_are_left_out(void **state) {
    struct cst_hull hull[2] = {
        { .n = 0 }, { .n = 2, .point = { { .cost = 10, .error = 2 }, { .cost = 20, .error = 1 } } }
    };
    uint32_t choice[2];

    (void)state;
    assert_true(cst_allocate(choice, hull, 2, 25));
    assert_int_equal(choice[1], 1);
    assert_false(cst_allocate(choice, hull, 2, 9));
    assert_true(cst_allocate(choice, hull, 1, 0));
    assert_true(cst_allocate(choice, hull, 0, 0));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hulls_are_convex_and_below_all_candidates),
        cmocka_unit_test(many_points_are_thinned),
        cmocka_unit_test(choices_keep_the_budget_and_more_of_it_never_hurts),
        cmocka_unit_test(cells_without_candidates_are_left_out),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
