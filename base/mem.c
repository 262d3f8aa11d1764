/* SPDX-License-Identifier: Apache-2.0 */
/* The one file that calls the libc allocator; see mem.h. Owns nothing, any thread. */
#include "base/mem.h"

#include "base/err.h"
#include "base/fault.h"
#include "base/macros.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, HUGE = 2 << 20, GROW_MIN = 64 };

void *cst_malloc(size_t n) {
    return cst_fault_hit(CST_FAULT_ALLOC) ? NULL : malloc(n ? n : 1);
}

void *cst_calloc(size_t n, size_t size) {
    return cst_fault_hit(CST_FAULT_ALLOC) ? NULL : calloc(n ? n : 1, size ? size : 1);
}

void *cst_realloc(void *p, size_t n) {
    return cst_fault_hit(CST_FAULT_ALLOC) ? NULL : realloc(p, n ? n : 1);
}

int cst_grow(void *array, size_t *cap, size_t need, size_t size) {
    size_t n = CST_MAX(need, CST_MAX(2 * *cap, (size_t)GROW_MIN)), bytes;
    void *old, *grown;

    if (need <= *cap)
        return 0;
    memcpy(&old, array, sizeof(old));
    grown = __builtin_mul_overflow(n, size, &bytes) ? NULL : cst_realloc(old, bytes);
    if (!grown)
        return cst_err(-ENOMEM);
    memcpy(array, &grown, sizeof(grown));
    *cap = n;
    return 0;
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

/* Aligned by hand, as older kernels don't: what lies around the aligned part is given back. */
void *cst_map(size_t n) {
    size_t size = cst_align_up(n, PAGE), all = size >= HUGE ? size + HUGE : size, before;
    void *base = MAP_FAILED;
    char *p;

    if (!cst_fault_hit(CST_FAULT_ALLOC))
        base = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
    before = all > size ? -(uintptr_t)base & (HUGE - 1) : 0;
    p = (char *)base + before;
    if (before)
        (void)munmap(base, before);
    if (all - before > size)
        (void)munmap(p + size, all - before - size);
    (void)madvise(p, size, MADV_HUGEPAGE); /* a hint: some hosts have none */
    (void)madvise(p, size, MADV_DONTDUMP);
    return p;
}

void *cst_unmap(void *p, size_t n) {
    if (p)
        (void)munmap(p, cst_align_up(n, PAGE));
    return NULL;
}
