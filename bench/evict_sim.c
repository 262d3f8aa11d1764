/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns a simulated cache. The policy and Belady's choice are two chooser tables over one trie.
 *
 * Invariants: 1. a block that is there has its predecessor there; 2. the chooser knows exactly the
 * leaves that are there and not in the chain of the request under way. One thread.
 */
#include "bench/evict_sim.h"

#include "base/macros.h"
#include "base/mem.h"
#include "store/treap.h"

#include <assert.h>
#include <errno.h>

#ifdef __clang__
#define NO_INLINE __attribute__((noinline))
#else
#define NO_INLINE __attribute__((noipa)) /* nor a clone under another name */
#endif

enum { POSITION = 16384 };

struct node {
    struct cst_evict_entry entry;
    struct cst_treap_node by_next; /* Belady: of the leaves */
    uint32_t next;                 /* request that uses it next */
    uint32_t parent, depth, children;
    bool there;
};

struct sim;

struct chooser {
    void (*born)(struct sim *s, struct node *n);
    void (*free)(struct sim *s, struct node *n, enum cst_evict_how how); /* may be chosen now */
    void (*busy)(struct sim *s, struct node *n, bool evicted);
    struct node *(*choose)(struct sim *s);
};

struct sim {
    const struct cst_trace *trace;
    const struct chooser *chooser;
    struct cst_evict evict;
    struct cst_treap leaves;
    struct node *nodes;
    uint32_t *next_use; /* of each touch */
    uint32_t used, capacity, now_s;
    uint64_t uses;
    struct cst_sim_result out;
};

static double cost_at(const struct sim *s, uint32_t depth) {
    return 1 + (double)depth * s->trace->block_tokens / POSITION;
}

/* ---- the policies ---- */

static void policy_born(struct sim *s, struct node *n) {
    s->evict.born = s->used;
    s->evict.room = SIZE_MAX;
    if (s->evict.ops->born)
        s->evict.ops->born(&s->evict, &n->entry);
}

static void policy_free(struct sim *s, struct node *n, enum cst_evict_how how) {
    s->evict.ops->insert(&s->evict, &n->entry, how);
}

static void policy_busy(struct sim *s, struct node *n, bool evicted) {
    s->evict.ops->remove(&s->evict, &n->entry, evicted);
}

static struct node *policy_choose(struct sim *s) {
    struct cst_evict_entry *e = s->evict.ops->victim(&s->evict, NULL);

    return e ? cst_container_of(e, struct node, entry) : NULL;
}

static const struct chooser by_policy = { policy_born, policy_free, policy_busy, policy_choose };

/* ---- Belady ---- */

static int later_first(const struct cst_treap_node *node, const void *key) {
    const struct node *n = cst_container_of(node, struct node, by_next);
    const uint32_t *next = key;

    return (n->next < *next) - (n->next > *next);
}

static void belady_born(struct sim *s, struct node *n) {
}

static void belady_free(struct sim *s, struct node *n, enum cst_evict_how how) {
    uint64_t priority = (uint64_t)(n - s->nodes + 1) * UINT64_C(0x9e3779b97f4a7c15);

    cst_treap_insert(&s->leaves, &n->by_next, priority ^ priority >> 29, later_first, &n->next);
}

static void belady_busy(struct sim *s, struct node *n, bool evicted) {
    cst_treap_remove(&s->leaves, &n->by_next);
}

static struct node *belady_choose(struct sim *s) {
    struct cst_treap_node *first = cst_treap_first(&s->leaves);

    return first ? cst_container_of(first, struct node, by_next) : NULL;
}

static const struct chooser by_future = { belady_born, belady_free, belady_busy, belady_choose };

/* ---- the cache ---- */

static void use(struct sim *s, size_t touch) {
    struct node *n = &s->nodes[s->trace->blocks[touch]];

    cst_evict_use(&n->entry, ++s->uses, s->now_s);
    n->next = s->next_use[touch];
}

/* Makes room for one block; keep: the block that the next one hangs on. False: there is none.
 * Callgrind counts what happens in here: it stays a function, with this name. */
static NO_INLINE bool cst_sim_evict_one(struct sim *s, const struct node *keep) {
    struct node *n = s->chooser->choose(s), *parent;

    if (!n)
        return false;
    s->chooser->busy(s, n, true);
    n->there = false;
    s->used--;
    s->out.victims++;
    if (n->parent == CST_TRACE_NO_BLOCK)
        return true;
    parent = &s->nodes[n->parent];
    if (!--parent->children && parent != keep)
        s->chooser->free(s, parent,
                         parent->entry.order <= n->entry.order ? CST_EVICT_COLD : CST_EVICT_WARM);
    return true;
}

static void store(struct sim *s, size_t touch, uint32_t depth) {
    uint32_t id = s->trace->blocks[touch];
    struct node *n = &s->nodes[id], *parent = NULL;

    n->parent = depth ? s->trace->blocks[touch - 1] : CST_TRACE_NO_BLOCK;
    if (depth)
        parent = &s->nodes[n->parent];
    n->depth = depth;
    n->children = 0;
    n->there = true;
    n->entry = (struct cst_evict_entry){ .hash = id, .cost = (float)cost_at(s, depth) };
    s->used++;
    s->chooser->born(s, n);
    use(s, touch);
    if (parent)
        parent->children++;
}

static void request(struct sim *s, const struct cst_trace_request *q) {
    const uint32_t *ids = &s->trace->blocks[q->first];
    uint32_t tokens = s->trace->block_tokens, hit = 0, i;
    struct node *last = NULL;

    s->now_s = q->time_s;
    for (i = 0; i < q->n_blocks; i++)
        s->out.all_s += tokens * cost_at(s, i);
    for (; hit < q->n_blocks && s->nodes[ids[hit]].there; hit++) {
        last = &s->nodes[ids[hit]];
        use(s, q->first + hit);
        s->out.saved_s += tokens * cost_at(s, hit);
    }
    s->out.tokens += (uint64_t)q->n_blocks * tokens;
    s->out.hit_tokens += (uint64_t)hit * tokens;
    if (last && !last->children)
        s->chooser->busy(s, last, false);
    for (i = hit; i < q->n_blocks; i++) {
        if (s->used == s->capacity && !cst_sim_evict_one(s, last))
            break;
        store(s, q->first + i, i);
        last = &s->nodes[ids[i]];
    }
    if (last && !last->children)
        s->chooser->free(s, last, i > hit ? CST_EVICT_NEW : CST_EVICT_USED);
}

/* When each touch's block is used again. */
static int look_ahead(struct sim *s) {
    const struct cst_trace *t = s->trace;

    s->next_use = cst_calloc(t->n_touches, sizeof(*s->next_use));
    if (!s->next_use)
        return -ENOMEM;
    for (uint32_t i = 0; i < t->n_blocks; i++)
        s->nodes[i].next = UINT32_MAX;
    for (size_t r = t->n_requests; r-- > 0;) {
        const struct cst_trace_request *q = &t->requests[r];

        for (size_t k = q->first; k < q->first + q->n_blocks; k++) {
            s->next_use[k] = s->nodes[t->blocks[k]].next;
            s->nodes[t->blocks[k]].next = (uint32_t)r;
        }
    }
    return 0;
}

static int simulate(struct sim *s, struct cst_sim_result *out) {
    int r;

    assert(s->capacity);
    s->nodes = cst_calloc(s->trace->n_blocks, sizeof(*s->nodes));
    r = s->nodes ? look_ahead(s) : -ENOMEM;
    for (size_t i = 0; !r && i < s->trace->n_requests; i++)
        request(s, &s->trace->requests[i]);
    for (uint32_t i = 0; !r && i < s->trace->n_blocks; i++)
        if (s->nodes[i].there && !s->nodes[i].children)
            s->chooser->busy(s, &s->nodes[i], false);
    *out = s->out;
    cst_free(s->nodes);
    cst_free(s->next_use);
    return r;
}

int cst_sim_policy(struct cst_sim_result *out, const struct cst_trace *trace, uint32_t capacity,
                   const struct cst_evict_ops *policy) {
    struct sim s = { .trace = trace, .chooser = &by_policy, .capacity = capacity };
    int r;

    cst_evict_init(&s.evict, policy);
    r = simulate(&s, out);
    cst_evict_deinit(&s.evict);
    return r;
}

int cst_sim_belady(struct cst_sim_result *out, const struct cst_trace *trace, uint32_t capacity) {
    struct sim s = { .trace = trace, .chooser = &by_future, .capacity = capacity };

    return simulate(&s, out);
}
