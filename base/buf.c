/* SPDX-License-Identifier: Apache-2.0 */
/* Capped growable buffer. Invariants: 1. len <= cap <= max; 2. a failed call changes nothing. */
#include "base/buf.h"

#include "base/err.h"
#include "base/mem.h"

#include <errno.h>
#include <string.h>

void cst_buf_deinit(struct cst_buf *b) {
    cst_free(b->data);
    *b = CST_BUF_NULL(b->max);
}

static int reserve(struct cst_buf *b, size_t n) {
    size_t cap = CST_MAX(b->cap, (size_t)64);
    uint8_t *data;

    if (n > b->max - b->len)
        return CST_BUF_E_FULL;
    if (b->len + n <= b->cap)
        return 0;
    while (cap < b->len + n)
        cap = cap > b->max / 2 ? b->max : 2 * cap;
    cap = CST_MIN(cap, b->max);
    data = cst_realloc(b->data, cap);
    if (!data)
        return cst_err(-ENOMEM);
    b->data = data;
    b->cap = cap;
    return 0;
}

int cst_buf_append(struct cst_buf *b, const void *data, size_t n) {
    int r = reserve(b, n);

    if (r || !n)
        return r;
    memcpy(b->data + b->len, data, n);
    b->len += n;
    return 0;
}
