/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory backends behind one vtable: where slabs live and how they are shared.
 *
 * `host` makes sealed memfds. A device backend is a module that fills the same table. Slabs are
 * made and dropped on any thread (both take milliseconds), everything else on the loop thread.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum cst_slab_use {
    CST_SLAB_READ_ONLY, /* clients map it read-only: SHRINK | GROW | FUTURE_WRITE | SEAL */
    CST_SLAB_STAGING,   /* clients write it: SHRINK | GROW | SEAL */
};

struct cst_mem_slab {
    int fd;        /* owned; may be passed to clients as it is: the seals hold for any holder */
    uint8_t *base; /* the daemon's read-write mapping */
    uint64_t size; /* bytes, a multiple of the page size */
};
#define CST_MEM_SLAB_NULL ((struct cst_mem_slab){ .fd = -1 })

struct cst_mem_ops {
    const char *name;
    /* Makes, maps, prefaults and seals a slab of `size` bytes. 0, -ENOMEM or another errno. */
    int (*slab_make)(struct cst_mem_slab *out, uint64_t size, enum cst_slab_use use);
    /* Unmaps and closes; safe on CST_MEM_SLAB_NULL and twice. */
    void (*slab_drop)(struct cst_mem_slab *slab);
};

extern const struct cst_mem_ops cst_mem_host;
