/* SPDX-License-Identifier: Apache-2.0 */
/* The one file that calls the libc allocator; see mem.h. Owns nothing, any thread. */
#include "base/mem.h"

#include "base/fault.h"

#include <stdlib.h>
#include <string.h>

void *cst_malloc(size_t n) {
    return cst_fault_hit(CST_FAULT_ALLOC) ? NULL : malloc(n ? n : 1);
}

void *cst_calloc(size_t n, size_t size) {
    return cst_fault_hit(CST_FAULT_ALLOC) ? NULL : calloc(n ? n : 1, size ? size : 1);
}

void *cst_realloc(void *p, size_t n) {
    return cst_fault_hit(CST_FAULT_ALLOC) ? NULL : realloc(p, n ? n : 1);
}

void *cst_memdup(const void *p, size_t n) {
    void *copy = cst_malloc(n);

    if (copy && n)
        memcpy(copy, p, n);
    return copy;
}

char *cst_strdup(const char *s) {
    return cst_memdup(s, strlen(s) + 1);
}

void *cst_free(void *p) {
    free(p);
    return NULL;
}
