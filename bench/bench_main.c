/* SPDX-License-Identifier: Apache-2.0 */
/* cistern-bench: picks benchmarks by name. Owns the table of names. */
#include "bench/benches.h"

#include "base/restart.h"
#include "bench/bench.h"
#include "codec/linalg.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name, *what;
    int (*run)(void);
} benches[] = {
    { "lookup", "one lookup of a 131,072-token prompt over a bare echo of its bytes",
      cst_bench_lookup },
    { "hash", "the key chain of a 131,072-token prompt over raw SHA-256", cst_bench_hash },
    { "get", "64 hot blocks of 1 MiB into private memory, over memcpy and beside redis and tmpfs",
      cst_bench_get },
    { "put", "64 blocks of 1 MiB from private memory, over memcpy", cst_bench_put },
    { "lease", "one lease taken and one given back, over a bare echo of its bytes",
      cst_bench_lease },
    { "codec", "frames of a real cache: size, and decoding over memcpy and zstd -1",
      cst_bench_codec },
    { "spill", "frames of 1.5 MiB to disk and back, over a bare io_uring probe", cst_bench_spill },
    { "recover", "a start with 1,000,000 records on disk, after kill -9 and after a clean stop",
      cst_bench_recover },
    { "evict",
      "eviction policies on request traces, beside Belady's optimum (also for one trace: "
      "evict --trace FILE --size BYTES)",
      cst_bench_evict },
    { "shm", "the first lease in a slab that was not mapped yet", cst_bench_shm },
};

static int usage(FILE *to) {
    (void)fputs("usage: cistern-bench NAME [--json]\n  all\n", to);
    for (size_t i = 0; i < CST_COUNT(benches); i++)
        (void)fprintf(to, "  %-8s %s\n", benches[i].name, benches[i].what);
    return to == stdout ? 0 : 2;
}

int main(int argc, char **argv) {
    const char *name = NULL;
    int failed = 0, ran = 0;

    cst_restart_with(argv, CST_LINALG_VARIABLE, cst_linalg_core_type());
    if (argc > 3 && !strcmp(argv[1], "evict"))
        return cst_bench_evict_trace(argc - 2, argv + 2);
    if (argc > 3 && !strcmp(argv[1], "codec") && !strcmp(argv[2], "--frame"))
        return cst_bench_decode_frame(argc - 2, argv + 2);
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help"))
            return usage(stdout);
        if (!strcmp(argv[i], "--json"))
            cst_report_json(true);
        else if (name)
            return usage(stderr);
        else
            name = argv[i];
    }
    if (!name)
        return usage(stderr);
    cst_report_machine();
    for (size_t i = 0; i < CST_COUNT(benches); i++) {
        int r;

        if (strcmp(name, "all") && strcmp(name, benches[i].name))
            continue;
        ran++;
        r = benches[i].run();
        if (r)
            (void)fprintf(stderr, "%s: %s\n", benches[i].name, strerror(-r));
        failed += r != 0;
    }
    return ran ? failed != 0 : usage(stderr);
}
