/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The eviction simulator: traces are read as they are, LRU equals a naive cache that looks at every
 * block, Belady's choice equals the best of all choices on small traces, and cost keeps its promise
 * on excerpts of real traces.
 */
#include "tests/lib/check.h"

#include "base/mem.h"
#include "base/random.h"
#include "bench/evict_sim.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IDS_MAX = 4096 };

/* ---- traces ---- */

static void mooncake_lines_are_read(void **state) {
    static const char text[] = "{\"timestamp\": 1500, \"input_length\": 1024, \"output_length\": "
                               "7, \"hash_ids\": [5, 9]}\n"
                               "{\"timestamp\": 2000, \"input_length\": 1025, \"output_length\": "
                               "1, \"hash_ids\": [5, 7, 8]}";
    struct cst_trace t;

    assert_int_equal(cst_trace_parse(&t, text, strlen(text)), 0);
    assert_int_equal(t.block_tokens, 512);
    assert_int_equal(t.n_requests, 2);
    assert_int_equal(t.n_touches, 4); /* the third block of the second is not full */
    assert_int_equal(t.n_blocks, 3);
    assert_int_equal(t.requests[0].time_s, 1);
    assert_int_equal(t.requests[1].first, 2);
    assert_int_equal(t.requests[1].n_blocks, 2);
    assert_int_equal(t.blocks[2], t.blocks[0]);
    assert_int_equal(t.blocks[3], 2);
    cst_trace_deinit(&t);
}

static void sessions_are_read(void **state) {
    static const char text[] = "{\"id\": \"t\", \"models\": [\"in\", \"t\"], \"block_size\": 64, "
                               "\"requests\": [{\"t\": 3.0, "
                               "\"type\": \"s\", \"in\": 130, \"out\": 4, \"hash_ids\": [1, 2]}]}";
    struct cst_trace t;

    assert_int_equal(cst_trace_parse(&t, text, strlen(text)), 0);
    assert_int_equal(t.block_tokens, 64);
    assert_int_equal(t.n_requests, 1);
    assert_int_equal(t.n_touches, 2);
    assert_int_equal(t.requests[0].time_s, 3);
    cst_trace_deinit(&t);
}

static void other_texts_are_refused(void **state) {
    static const char *const texts[] = {
        "",
        "{}",
        "{\"hash_ids\": 3}",
        "{\"input_length\": 512, \"hash_ids\": [1",
        "{\"input_length\": 512, \"hash_ids\": [-1]}",
        "{\"input_length\": 512, \"hash_ids\": [1e14]}",
        "{\"input_length\": \"x\", \"hash_ids\": [1]}",
        "{\"block_size\": 0, \"in\": 64, \"hash_ids\": [1]}",
        "{\"input_length\": 511, \"hash_ids\": [1]}", /* no full block at all */
        "{\"input_length",
    };
    struct cst_trace t;

    for (size_t i = 0; i < CST_COUNT(texts); i++)
        assert_int_equal(cst_trace_parse(&t, texts[i], strlen(texts[i])), -EINVAL);
    assert_int_equal(cst_trace_load(&t, "/nowhere"), -ENOENT);
}

/* ---- a naive cache ---- */

struct naive {
    const struct cst_trace *t;
    uint32_t capacity, used, parent[IDS_MAX], order[IDS_MAX];
    bool there[IDS_MAX];
    uint32_t clock;
    uint64_t hits;
};

static bool is_leaf(const struct naive *n, uint32_t id) {
    for (uint32_t i = 0; i < n->t->n_blocks; i++)
        if (n->there[i] && n->parent[i] == id)
            return false;
    return n->there[id];
}

static bool in_chain(const struct naive *n, const struct cst_trace_request *q, uint32_t id) {
    for (uint32_t i = 0; i < q->n_blocks; i++)
        if (n->t->blocks[q->first + i] == id)
            return true;
    return false;
}

/* Evicts the leaf that was used longest ago, if it is not in the chain under way. */
static bool naive_evict(struct naive *n, const struct cst_trace_request *q) {
    uint32_t best = UINT32_MAX;

    for (uint32_t i = 0; i < n->t->n_blocks; i++)
        if (is_leaf(n, i) && !in_chain(n, q, i) &&
            (best == UINT32_MAX || n->order[i] < n->order[best]))
            best = i;
    if (best == UINT32_MAX)
        return false;
    n->there[best] = false;
    n->used--;
    return true;
}

static void naive_request(struct naive *n, const struct cst_trace_request *q) {
    uint32_t i = 0;

    for (; i < q->n_blocks && n->there[n->t->blocks[q->first + i]]; i++)
        n->order[n->t->blocks[q->first + i]] = ++n->clock;
    n->hits += i;
    for (; i < q->n_blocks; i++) {
        uint32_t id = n->t->blocks[q->first + i];

        if (n->used == n->capacity && !naive_evict(n, q))
            return;
        n->there[id] = true;
        n->parent[id] = i ? n->t->blocks[q->first + i - 1] : UINT32_MAX;
        n->order[id] = ++n->clock;
        n->used++;
    }
}

/* Prompts that walk down a random tree: chains that share prefixes. */
static void random_trace(struct cst_trace *t, struct cst_seeded_random *rng, uint32_t requests,
                         uint32_t depth_max, uint32_t fan) {
    size_t max = (size_t)requests * depth_max;
    uint32_t *children = cst_calloc(IDS_MAX, fan * sizeof(*children));

    *t = (struct cst_trace){ .block_tokens = 512, .n_blocks = 1 };
    t->requests = cst_calloc(requests, sizeof(*t->requests));
    t->blocks = cst_calloc(max, sizeof(*t->blocks));
    assert_true(children && t->requests && t->blocks);
    for (; t->n_requests < requests; t->n_requests++) {
        uint32_t depth = 1 + (uint32_t)(cst_seeded_random_next(rng) % depth_max), at = 0;

        t->requests[t->n_requests] = (struct cst_trace_request){ .time_s = (uint32_t)t->n_requests,
                                                                 .n_blocks = depth,
                                                                 .first = t->n_touches };
        for (uint32_t d = 0; d < depth; d++) {
            uint32_t *next = &children[at * fan + cst_seeded_random_next(rng) % fan];

            if (!*next) {
                assert_true(t->n_blocks < IDS_MAX);
                *next = t->n_blocks++;
            }
            at = *next;
            t->blocks[t->n_touches++] = at;
        }
    }
    cst_free(children);
}

static void lru_equals_a_naive_cache(void **state) {
    struct cst_seeded_random rng;

    cst_seeded_random_init(&rng, 3);
    for (unsigned round = 0; round < 40; round++) {
        static struct naive n;
        struct cst_trace t;
        struct cst_sim_result r;

        random_trace(&t, &rng, 60, 5, 3);
        n = (struct naive){ .t = &t, .capacity = 3 + round };
        for (size_t i = 0; i < t.n_requests; i++)
            naive_request(&n, &t.requests[i]);
        assert_int_equal(cst_sim_policy(&r, &t, n.capacity, &cst_evict_lru), 0);
        assert_int_equal(r.hit_tokens, n.hits * 512);
        assert_int_equal(r.tokens, t.n_touches * 512);
        cst_trace_deinit(&t);
    }
}

/* ---- Belady ---- */

static uint64_t best_from(const struct naive *n, size_t request);

/* The most hits from here, with block i of the request to be stored next. */
static uint64_t best_stored(const struct naive *n, size_t request, uint32_t i) {
    const struct cst_trace_request *q = &n->t->requests[request];
    struct naive next = *n;
    uint64_t best = 0;
    bool any = false;

    if (i == q->n_blocks)
        return best_from(n, request + 1);
    if (n->used < n->capacity) {
        uint32_t id = n->t->blocks[q->first + i];

        next.there[id] = true;
        next.parent[id] = i ? n->t->blocks[q->first + i - 1] : UINT32_MAX;
        next.used++;
        return best_stored(&next, request, i + 1);
    }
    for (uint32_t id = 0; id < n->t->n_blocks; id++) {
        uint64_t hits;

        if (!is_leaf(n, id) || in_chain(n, q, id))
            continue;
        next.there[id] = false;
        next.used--;
        hits = best_stored(&next, request, i);
        next.there[id] = true;
        next.used++;
        best = hits > best ? hits : best;
        any = true;
    }
    return any ? best : best_from(n, request + 1);
}

static uint64_t best_from(const struct naive *n, size_t request) {
    const struct cst_trace_request *q = &n->t->requests[request];
    uint32_t i = 0;

    if (request == n->t->n_requests)
        return 0;
    while (i < q->n_blocks && n->there[n->t->blocks[q->first + i]])
        i++;
    return i + best_stored(n, request, i);
}

/* With room for every single chain: where one does not fit, a rest is not stored, and which
 * choices then are best is another question. */
static void belady_is_the_best_of_all_choices(void **state) {
    struct cst_seeded_random rng;

    cst_seeded_random_init(&rng, 4);
    for (unsigned round = 0; round < 60; round++) {
        static struct naive n;
        struct cst_trace t;
        struct cst_sim_result r;

        random_trace(&t, &rng, 7, 3, 2);
        n = (struct naive){ .t = &t, .capacity = 3 + round % 4 };
        assert_int_equal(cst_sim_belady(&r, &t, n.capacity), 0);
        assert_int_equal(r.hit_tokens, best_from(&n, 0) * 512);
        cst_trace_deinit(&t);
    }
}

/* ---- real traces ---- */

static const char *const excerpts[] = { "conversation-2000.jsonl.zst", "trace_0015.json.zst",
                                        "trace_0707.json.zst" };

static void load_excerpt(struct cst_trace *t, const char *name) {
    char path[512];

    (void)snprintf(path, sizeof(path), "%s/tests/data/traces/%s", getenv("CST_SOURCE_ROOT"), name);
    assert_int_equal(cst_trace_load(t, path), 0);
}

static void seconds_follow_the_model(void **state) {
    struct cst_trace t;
    struct cst_sim_result r;
    double all = 0;

    load_excerpt(&t, excerpts[0]);
    assert_int_equal(cst_sim_policy(&r, &t, t.n_blocks, &cst_evict_cost), 0);
    assert_int_equal(r.victims, 0);
    for (size_t i = 0; i < t.n_requests; i++)
        for (uint32_t k = 0; k < t.requests[i].n_blocks; k++)
            all += 512 * (1 + k * 512 / 16384.0);
    assert_true(fabs(r.all_s / all - 1) < 1e-9);
    /* Everything fits: what is not a hit is each block's first appearance. */
    assert_int_equal(r.tokens - r.hit_tokens, (uint64_t)t.n_blocks * 512);
    cst_trace_deinit(&t);
}

static void results_are_deterministic(void **state) {
    static const char *const policies[] = { "lru", "s3fifo", "arc", "cost" };
    struct cst_trace t;

    load_excerpt(&t, excerpts[0]);
    for (size_t i = 0; i < CST_COUNT(policies); i++) {
        struct cst_sim_result a, b;

        assert_int_equal(cst_sim_policy(&a, &t, 1000, cst_evict_by_name(policies[i])), 0);
        assert_int_equal(cst_sim_policy(&b, &t, 1000, cst_evict_by_name(policies[i])), 0);
        assert_memory_equal(&a, &b, sizeof(a));
        assert_true(a.victims > 0);
    }
    cst_trace_deinit(&t);
}

static void cost_is_never_much_worse_than_lru(void **state) {
    for (size_t i = 0; i < CST_COUNT(excerpts); i++) {
        struct cst_trace t;
        double best = 0;

        load_excerpt(&t, excerpts[i]);
        for (uint32_t size = 20; size < t.n_blocks; size += size / 4) {
            struct cst_sim_result lru, cost, belady;

            assert_int_equal(cst_sim_policy(&lru, &t, size, &cst_evict_lru), 0);
            assert_int_equal(cst_sim_policy(&cost, &t, size, &cst_evict_cost), 0);
            assert_int_equal(cst_sim_belady(&belady, &t, size), 0);
            assert_true(cost.saved_s >= .99 * lru.saved_s);
            assert_true(belady.hit_tokens >= cost.hit_tokens);
            assert_true(belady.hit_tokens >= lru.hit_tokens);
            best = fmax(best, cost.saved_s / lru.saved_s);
        }
        assert_true(i || best >= 1.5);
        cst_trace_deinit(&t);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mooncake_lines_are_read),
        cmocka_unit_test(sessions_are_read),
        cmocka_unit_test(other_texts_are_refused),
        cmocka_unit_test(lru_equals_a_naive_cache),
        cmocka_unit_test(belady_is_the_best_of_all_choices),
        cmocka_unit_test(seconds_follow_the_model),
        cmocka_unit_test(results_are_deterministic),
        cmocka_unit_test(cost_is_never_much_worse_than_lru),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
