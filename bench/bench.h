/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The benchmark harness: two sides measured alternately in one process, reported as a ratio.
 *
 * A figure is one line: name, value, unit, target, ok, detail; a table row for people or one JSON
 * object with --json. Figures named A_over_B are time over time. Each side is timed in batches, at
 * least CST_PAIRS of them, A and B in turn; the value comes from the two medians, because single
 * shots and blocks run one after the other differ by 10 % and more on a shared machine.
 *
 * Functions return 0 or a negative errno. One thread.
 */
#pragma once

#include "base/macros.h"

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum { CST_PAIRS = 25 };

/* Runs the operation `ops` times. */
typedef int (*cst_side_fn)(void *arg, unsigned ops);

struct cst_side {
    cst_side_fn run;
    void *arg;
};

struct cst_compared {
    double a, b;      /* median seconds of one operation */
    double low, high; /* 5 and 95 % quantiles of the pairs' a / b */
    unsigned ops;     /* of a batch */
};

/* Picks the batch size (a batch of A takes about 10 ms), warms up, then measures. */
int cst_compare(struct cst_compared *out, struct cst_side a, struct cst_side b);

/* n values, sorted in place; q in 0..1. */
double cst_quantile(double *values, size_t n, double q);

double cst_seconds(void);

enum cst_sense { CST_AT_MOST, CST_AT_LEAST, CST_NO_TARGET };

struct cst_figure {
    const char *name;
    double value;
    const char *unit;
    enum cst_sense sense;
    double target;
};

void cst_report_json(bool json);

/* detail: printf format of the members of a JSON object, e.g. "\"ours_us\": %.2f". */
void cst_report(const struct cst_figure *figure, const char *detail, ...) CST_PRINTF(2, 3);

/* A figure that can't be measured here; `missing` is a plain sentence without quotes. */
void cst_report_skipped(const char *name, const char *missing);

/*
 * Pins the calling process, or every thread of another one, to one core (the least busy at first)
 * and, where that is allowed, before all ordinary processes there: the sides of a comparison then
 * only wait for each other.
 */
int cst_pin(void);
int cst_pin_process(pid_t pid);
/* Back to where and how the calling process ran before it was pinned (a forked peer). */
void cst_unpin(void);

/* What ran where: processor, kernel, compiler, load. */
void cst_report_machine(void);
