/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The allocator seam. All heap memory of the product comes from these functions (a lint test
 * greps for the libc names), so CST_FAULT_ALLOC reaches every allocation.
 * Any thread. Failure returns NULL; nothing aborts.
 */
#pragma once

#include "base/macros.h"

#include <stddef.h>

void *cst_malloc(size_t n);
void *cst_calloc(size_t n, size_t size);
void *cst_realloc(void *p, size_t n);
void *cst_memdup(const void *p, size_t n);
char *cst_strdup(const char *s);

/* Room for `need` elements in an array, of which there are at least twice as many as before if it
 * grows: array is the address of its pointer, of any type. 0 or -ENOMEM, and it is as it was. */
int cst_grow(void *array, size_t *cap, size_t need, size_t size);

/* NULL ok; returns NULL. */
void *cst_free(void *p);

/*
 * n bytes of zeroed pages of their own for transfers from and to devices, not in core dumps,
 * aligned to a page, from 2 MiB on to 2 MiB; in huge pages where those are to be had: a transfer is
 * then one piece for the device instead of one for each 4 KiB. cst_unmap() takes the same n; NULL
 * ok, returns NULL.
 */
void *cst_map(size_t n);
void *cst_unmap(void *p, size_t n);

/* p is the address of a pointer of any type; for cst_auto(cst_freep). */
static inline void cst_freep(void *p) {
    void *owned;

    __builtin_memcpy(&owned, p, sizeof(owned));
    owned = cst_free(owned);
    __builtin_memcpy(p, &owned, sizeof(owned));
}
