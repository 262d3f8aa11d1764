/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Eviction policies on request traces: the store's own policy code in a simulated cache, beside
 * Belady's optimum. Nothing is timed, so the figures are the same on every machine.
 *   cost_over_P_N     recompute seconds that cost saves over those that P saves, with room for N
 *                     blocks of 512 tokens, on the Mooncake conversation trace
 *   worst_over_lru    the smallest such ratio over LRU, over all traces at sizes from 20 blocks to
 *                     everything, 24 to a factor of ten
 *   instructions      per victim, everything between the decision and the victim's ghost and
 *                     parent, counted by callgrind on that trace with 10,000 blocks
 *   growth            the same with 1,000,000 over 10,000 blocks that nobody uses twice
 * The child that callgrind runs is this program again: evict --trace F --size S --policy P.
 */
#include "bench/bench.h"
#include "bench/benches.h"
#include "bench/callgrind.h"
#include "bench/evict_sim.h"

#include "base/macros.h"
#include "base/mem.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_MAX_LEN = 4096, FLAT_EXTRA = 20000, TOKEN_BYTES = 131072, PEERS = 3 };

static const char *const policies[] = { "lru", "s3fifo", "arc", "cost" };

static int simulate(struct cst_sim_result *out, const struct cst_trace *t, uint32_t size,
                    const char *policy) {
    if (!strcmp(policy, "belady"))
        return cst_sim_belady(out, t, size);
    return cst_sim_policy(out, t, size, cst_evict_by_name(policy));
}

/* ---- instructions ---- */

/* Blocks that come once, `size` and some more: every one more evicts one. */
static int flat_trace(struct cst_trace *out, uint32_t size) {
    uint32_t n = size + FLAT_EXTRA;
    struct cst_trace t = { .block_tokens = 512, .n_requests = n, .n_touches = n, .n_blocks = n };

    t.requests = cst_calloc(n, sizeof(*t.requests));
    t.blocks = cst_calloc(n, sizeof(*t.blocks));
    if (!t.requests || !t.blocks) {
        cst_trace_deinit(&t);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < n; i++) {
        t.requests[i] = (struct cst_trace_request){ .time_s = i / 8, .n_blocks = 1, .first = i };
        t.blocks[i] = i;
    }
    *out = t;
    return 0;
}

/* Runs `cistern-bench evict --trace TRACE --size SIZE --policy POLICY` under callgrind. Negative:
 * it is not there, or said nothing. */
static double count_instructions(const char *trace, uint32_t size, const char *policy) {
    char arguments[PATH_MAX_LEN + 256];
    double collected, victims = 0;

    if (strchr(trace, '\''))
        return -1;
    (void)snprintf(arguments, sizeof(arguments), "evict --trace '%s' --size %ublocks --policy %s",
                   trace, size, policy);
    collected = cst_callgrind("cst_sim_evict_one", arguments, "victims ", &victims);
    return victims > 0 ? collected / victims : -1;
}

/* ---- one trace, one size ---- */

struct options {
    const char *trace, *policy;
    uint64_t size;
    bool in_blocks;
    uint32_t token_bytes;
};

static bool parse_size(const char *s, struct options *o) {
    static const struct {
        const char *unit;
        uint64_t bytes;
    } units[] = { { "", 1 },          { "B", 1 },         { "KiB", 1 << 10 },
                  { "MiB", 1 << 20 }, { "GiB", 1 << 30 }, { "TiB", UINT64_C(1) << 40 },
                  { "blocks", 0 } };
    char *end;

    errno = 0;
    o->size = strtoull(s, &end, 10);
    if (errno || end == s || *s == '-')
        return false;
    for (size_t i = 0; i < CST_COUNT(units); i++) {
        if (strcmp(units[i].unit, end) != 0)
            continue;
        o->in_blocks = !units[i].bytes;
        return !units[i].bytes || !__builtin_mul_overflow(o->size, units[i].bytes, &o->size);
    }
    return false;
}

static int load(struct cst_trace *t, const char *path) {
    uint32_t flat;

    if (sscanf(path, "flat:%u", &flat) == 1 && flat < 1U << 24)
        return flat_trace(t, flat);
    return cst_trace_load(t, path);
}

static void print_one(const char *policy, const struct cst_sim_result *r, double instructions) {
    (void)printf("%-8s %9.2f %% %13.2f %% %14.0f %10llu ", policy,
                 100 * (double)r->hit_tokens / (double)r->tokens, 100 * r->saved_s / r->all_s,
                 r->saved_s, (unsigned long long)r->victims);
    if (instructions < 0)
        (void)puts(strcmp(policy, "belady") ? "needs valgrind" : "-");
    else
        (void)printf("%.0f\n", instructions);
}

static int run_one(const struct options *o) {
    struct cst_trace t = CST_TRACE_NULL;
    struct cst_sim_result r;
    uint64_t blocks;
    int e = load(&t, o->trace);

    if (e)
        return e;
    blocks = o->in_blocks ? o->size : o->size / ((uint64_t)t.block_tokens * o->token_bytes);
    blocks = CST_MIN(blocks, UINT32_MAX);
    if (!blocks)
        e = -ERANGE;
    if (!e && o->policy) {
        e = simulate(&r, &t, (uint32_t)blocks, o->policy);
        if (!e)
            (void)printf("victims %llu\n", (unsigned long long)r.victims);
        cst_trace_deinit(&t);
        return e;
    }
    if (!e)
        (void)printf("%zu requests, %zu blocks of %u tokens, %u different; room for %llu\n"
                     "policy     token hits  seconds saved   (of machine)    victims instructions "
                     "each\n",
                     t.n_requests, t.n_touches, t.block_tokens, t.n_blocks,
                     (unsigned long long)blocks);
    for (size_t i = 0; !e && i <= CST_COUNT(policies); i++) {
        const char *policy = i < CST_COUNT(policies) ? policies[i] : "belady";

        e = simulate(&r, &t, (uint32_t)blocks, policy);
        if (!e)
            print_one(policy, &r,
                      i < CST_COUNT(policies) && r.victims
                          ? count_instructions(o->trace, (uint32_t)blocks, policy)
                          : -1);
        (void)fflush(stdout);
    }
    cst_trace_deinit(&t);
    return e;
}

int cst_bench_evict_trace(int argc, char **argv) {
    struct options o = { .token_bytes = TOKEN_BYTES };
    bool ok = argc % 2 == 0;
    int e;

    for (int i = 0; ok && i < argc; i += 2) {
        if (!strcmp(argv[i], "--trace"))
            o.trace = argv[i + 1];
        else if (!strcmp(argv[i], "--policy"))
            o.policy = argv[i + 1];
        else if (!strcmp(argv[i], "--size"))
            ok = parse_size(argv[i + 1], &o);
        else if (!strcmp(argv[i], "--token-bytes"))
            o.token_bytes = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else
            ok = false;
    }
    if (o.policy && !cst_evict_by_name(o.policy) && strcmp(o.policy, "belady") != 0)
        ok = false;
    if (!ok || !o.trace || !o.size || !o.token_bytes) {
        (void)fputs("usage: cistern-bench evict --trace FILE --size BYTES[KiB|MiB|GiB|TiB|blocks]\n"
                    "         [--token-bytes N] [--policy lru|s3fifo|arc|cost|belady]\n"
                    "  --token-bytes  of the cache; 131072 if not given\n"
                    "  --policy       prints only how many victims this one had\n",
                    stderr);
        return 2;
    }
    e = run_one(&o);
    if (e)
        (void)fprintf(stderr, "%s: %s\n", o.trace,
                      e == -EINVAL   ? "is not a trace that is known here"
                      : e == -ERANGE ? "the size is less than one block"
                                     : strerror(-e));
    return e != 0;
}

/* ---- figures ---- */

struct worst {
    double ratio;
    char trace[256];
    uint32_t size;
};

/* All sizes of one trace. */
static int find_worst(struct worst *worst, const char *path, const char *name) {
    struct cst_trace t = CST_TRACE_NULL;
    struct cst_sim_result lru, cost;
    int e = cst_trace_load(&t, path);

    for (unsigned i = 0; !e; i++) {
        uint32_t size = (uint32_t)lround(20 * pow(10, i / 24.0));

        if (size > t.n_blocks)
            break;
        e = simulate(&lru, &t, size, "lru");
        if (!e)
            e = simulate(&cost, &t, size, "cost");
        if (!e && lru.saved_s > 0 && cost.saved_s / lru.saved_s < worst->ratio) {
            worst->ratio = cost.saved_s / lru.saved_s;
            worst->size = size;
            (void)snprintf(worst->trace, sizeof(worst->trace), "%s", name);
        }
    }
    cst_trace_deinit(&t);
    return e;
}

static int find_worst_in(struct worst *worst, const char *folder) {
    DIR *d = opendir(folder);
    struct dirent *entry;
    int e = d ? 0 : -errno;

    while (!e && (entry = readdir(d))) {
        char path[PATH_MAX_LEN];
        int n = snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);

        if (strstr(entry->d_name, ".json") && n > 0 && (size_t)n < sizeof(path))
            e = find_worst(worst, path, entry->d_name);
    }
    if (d)
        (void)closedir(d);
    return e;
}

static int report_worst(const char *traces) {
    static const char *const folders[] = { "mooncake", "coding-sessions" };
    struct worst worst = { .ratio = INFINITY };
    struct cst_figure f = {
        .name = "evict.worst_over_lru", .unit = "x", .sense = CST_AT_LEAST, .target = .99
    };
    int e = 0;

    for (size_t i = 0; !e && i < CST_COUNT(folders); i++) {
        char path[PATH_MAX_LEN];

        (void)snprintf(path, sizeof(path), "%s/%s", traces, folders[i]);
        e = find_worst_in(&worst, path);
    }
    if (e)
        return e;
    f.value = worst.ratio;
    cst_report(&f, "\"trace\": \"%s\", \"blocks\": %u", worst.trace, worst.size);
    return 0;
}

static const struct {
    uint32_t blocks;
    double over[PEERS]; /* targets; 0: none */
} sizes[] = {
    { 1000, { 2.0, 1.03, 0 } },
    { 3000, { 2.3, 1.03, 0 } },
    { 10000, { 1.10, 1.03, 0 } },
    { 30000, { 0.99, 0, 0 } },
};

static int report_size(const struct cst_trace *t, size_t i) {
    static const char *const peers[PEERS] = { "lru", "s3fifo", "belady" };
    struct cst_sim_result ours, peer;
    int e = simulate(&ours, t, sizes[i].blocks, "cost");

    for (size_t k = 0; !e && k < PEERS; k++) {
        char name[64];
        struct cst_figure f = { .name = name, .unit = "x", .target = sizes[i].over[k] };

        e = simulate(&peer, t, sizes[i].blocks, peers[k]);
        if (e)
            break;
        (void)snprintf(name, sizeof(name), "evict.cost_over_%s_%u", peers[k], sizes[i].blocks);
        f.value = ours.saved_s / peer.saved_s;
        f.sense = f.target > 0 ? CST_AT_LEAST : CST_NO_TARGET;
        cst_report(&f,
                   "\"saved_pct\": %.2f, \"peer_saved_pct\": %.2f, \"hits_pct\": %.2f, "
                   "\"peer_hits_pct\": %.2f",
                   100 * ours.saved_s / ours.all_s, 100 * peer.saved_s / peer.all_s,
                   100 * (double)ours.hit_tokens / (double)ours.tokens,
                   100 * (double)peer.hit_tokens / (double)peer.tokens);
    }
    return e;
}

static void report_instructions(const char *path) {
    double each = count_instructions(path, 10000, "cost");
    double few = count_instructions("flat:10000", 10000, "cost");
    double many = count_instructions("flat:1000000", 1000000, "cost");
    struct cst_figure f = { .name = "evict.instructions",
                            .value = CST_MAX(each, CST_MAX(few, many)),
                            .unit = "",
                            .sense = CST_AT_MOST,
                            .target = 800 };
    struct cst_figure g = { .name = "evict.growth",
                            .value = many / few,
                            .unit = "x",
                            .sense = CST_AT_MOST,
                            .target = 1.25 };

    if (each < 0 || few < 0 || many < 0) {
        cst_report_skipped(f.name, "valgrind is not installed");
        cst_report_skipped(g.name, "valgrind is not installed");
        return;
    }
    cst_report(&f, "\"trace\": %.0f, \"flat_10000\": %.0f, \"flat_1000000\": %.0f", each, few,
               many);
    cst_report(&g, "\"flat_10000\": %.0f, \"flat_1000000\": %.0f", few, many);
}

int cst_bench_evict(void) {
    const char *data = getenv("CISTERN_DATA");
    char traces[PATH_MAX_LEN / 2], path[PATH_MAX_LEN];
    struct cst_trace t = CST_TRACE_NULL;
    int e;

    if (!data) {
        cst_report_skipped("evict", "CISTERN_DATA is not set");
        return 0;
    }
    cst_unpin(); /* nothing is timed, and callgrind is slow */
    (void)snprintf(traces, sizeof(traces), "%s/traces", data);
    (void)snprintf(path, sizeof(path), "%s/mooncake/conversation_trace.jsonl.zst", traces);
    e = cst_trace_load(&t, path);
    if (e == -ENOENT) {
        cst_report_skipped("evict", "CISTERN_DATA has no traces");
        return 0;
    }
    for (size_t i = 0; !e && i < CST_COUNT(sizes); i++)
        e = report_size(&t, i);
    cst_trace_deinit(&t);
    if (!e)
        e = report_worst(traces);
    if (!e)
        report_instructions(path);
    return e;
}
