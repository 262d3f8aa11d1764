/* SPDX-License-Identifier: Apache-2.0 */
/* What fuzz targets share. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* The target: any bytes. Returns 0; what is wrong ends the process. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static inline void check(bool ok) {
    if (!ok)
        abort();
}

/* Exactly n bytes at a multiple of 64, so that the address sanitizer sees one byte too many. */
static inline void *room(size_t n) {
    void *p = NULL;

    check(posix_memalign(&p, 64, n ? n : 1) == 0);
    return p;
}
