/* SPDX-License-Identifier: Apache-2.0 */
/* The benchmarks. Each reports its figures and returns 0 or a negative errno. */
#pragma once

int cst_bench_rans(void); /* the second part of cst_bench_codec() */
int cst_bench_lookup(void);
int cst_bench_hash(void);
int cst_bench_get(void);
int cst_bench_put(void);
int cst_bench_lease(void);
int cst_bench_shm(void);
int cst_bench_codec(void);
int cst_bench_tucker(void); /* a part of codec */
int cst_bench_spill(void);
int cst_bench_recover(void);
int cst_bench_evict(void);

/* codec with --frame FILE [--side FILE]: decodes it, silently. Returns an exit status. */
int cst_bench_decode_frame(int argc, char **argv);

/* evict with options: one trace at one size. Returns an exit status. */
int cst_bench_evict_trace(int argc, char **argv);
