/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the per-thread trace of the last raised errors.
 * Invariants: 1. a trace entry is only written by its own thread; 2. the trace keeps the newest
 * CST_TRACE_MAX entries, so that a loop of failures costs no memory.
 */
#include "base/err.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { CST_TRACE_MAX = 4 };

struct trace_entry {
    const char *file, *func;
    int line, r;
};

static _Thread_local struct trace_entry trace[CST_TRACE_MAX];
static _Thread_local unsigned trace_count;

int cst_err_raise(int r, const char *file, int line, const char *func) {
    if (r >= 0)
        return r;
    trace[trace_count++ % CST_TRACE_MAX] =
        (struct trace_entry){ .file = file, .func = func, .line = line, .r = r };
    return r;
}

int cst_err_fold(int r, const char *file, int line, const char *func) {
    if (r <= 0)
        return r;
    return cst_err_raise(-ENOTRECOVERABLE, file, line, func);
}

size_t cst_err_trace(char *out, size_t cap) {
    unsigned n = trace_count < CST_TRACE_MAX ? trace_count : CST_TRACE_MAX;
    size_t len = 0;

    if (cap)
        out[0] = '\0';
    for (unsigned i = trace_count - n; i != trace_count && len + 1 < cap; i++) {
        const struct trace_entry *e = &trace[i % CST_TRACE_MAX];
        const char *base = strrchr(e->file, '/'), *text = strerrordesc_np(-e->r);
        int w =
            snprintf(out + len, cap - len, "%s%s:%d %s: %s", len ? "; " : "",
                     base ? base + 1 : e->file, e->line, e->func, text ? text : "unknown error");

        if (w < 0)
            break;
        len += (size_t)w < cap - len ? (size_t)w : cap - len - 1;
    }
    trace_count = 0;
    return len;
}
