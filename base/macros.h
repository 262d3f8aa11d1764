/* SPDX-License-Identifier: Apache-2.0 */
/* Language helpers that every folder uses: cleanup attributes, ownership moves, alignment. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#define CST_COUNT(a) (sizeof(a) / sizeof((a)[0]))
#define CST_LIKELY(x) __builtin_expect(!!(x), 1)
#define CST_UNLIKELY(x) __builtin_expect(!!(x), 0)
/* Called when something goes wrong: the branches that lead there move out of the way. */
#define CST_COLD __attribute__((cold))
#define CST_EXPORT __attribute__((visibility("default")))
#define CST_PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))

#define cst_container_of(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))

/* Runs fn(&variable) when the variable leaves scope. */
#define cst_auto(fn) __attribute__((cleanup(fn)))

/* Moves ownership out of a variable with a cleanup attribute. */
#define cst_steal(pp)                                                                              \
    ({                                                                                             \
        __typeof__(*(pp)) cst_stolen_ = *(pp);                                                     \
        *(pp) = NULL;                                                                              \
        cst_stolen_;                                                                               \
    })

/* Makes fn##p(), usable with cst_auto(), from a destructor that takes and returns a pointer. */
#define CST_DEFINE_FREEP(type, fn)                                                                 \
    static inline void fn##p(type **p) {                                                           \
        if (*p)                                                                                    \
            *p = fn(*p);                                                                           \
    }

/* Descriptors: -1 means none. cst_close() accepts -1 and returns -1. */
static inline int cst_close(int fd) {
    if (fd >= 0)
        (void)close(fd);
    return -1;
}

static inline void cst_closep(int *fd) {
    *fd = cst_close(*fd);
}

static inline int cst_steal_fd(int *fd) {
    int stolen = *fd;

    *fd = -1;
    return stolen;
}

/* align is a power of two */
static inline uint64_t cst_align_up(uint64_t n, uint64_t align) {
    return (n + align - 1) & ~(align - 1);
}

#define CST_MIN(a, b) ((a) < (b) ? (a) : (b))
#define CST_MAX(a, b) ((a) > (b) ? (a) : (b))
