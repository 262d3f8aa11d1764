/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long reads from disk take, measured: the time during which at least one is under way, over
 * the bytes that arrived in it. So a batch counts as fast as it is, and a disk that answers one
 * read at a time as slow as that. The past fades: what is older than the last window of bytes
 * counts half, and so on. Loop thread only; all zeros is a meter that has seen nothing.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define CST_DISK_RATE_WINDOW (UINT64_C(32) << 20)

struct cst_disk_rate {
    size_t under_way;
    uint64_t mark_ns; /* up to here the time is counted */
    uint64_t ns, bytes;
};

static inline void cst_disk_rate_begin(struct cst_disk_rate *m, uint64_t now_ns) {
    if (!m->under_way++)
        m->mark_ns = now_ns;
}

/* bytes 0: it failed, and only took its time. */
static inline void cst_disk_rate_end(struct cst_disk_rate *m, uint64_t now_ns, uint64_t bytes) {
    m->under_way--;
    m->ns += now_ns - m->mark_ns;
    m->mark_ns = now_ns;
    m->bytes += bytes;
    while (m->bytes > 2 * CST_DISK_RATE_WINDOW) {
        m->bytes /= 2;
        m->ns /= 2;
    }
}

/* What so many bytes will take; before the first measurement a guess of 1 GB/s. */
static inline uint64_t cst_disk_rate_cost(const struct cst_disk_rate *m, uint64_t bytes) {
    return m->bytes ? (uint64_t)((double)m->ns / (double)m->bytes * (double)bytes) : bytes;
}
