/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random operations against a naive model: arrays and linear searches that know the rules and
 * nothing of how the store keeps them. What the store is free to choose (whom to evict, when a job
 * runs) reaches the model as events, and is checked against what is allowed at that moment.
 *
 *     test-store_model [seed] [operations]
 */
#include "tests/lib/check.h"

#include "store/prefix_trie.h"
#include "tests/unit/store/store_world.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NODES = 160, ROOTS = 3, SPACES = 3, PUTS = 40, FETCHES = 40, HELD = 4, GENERATIONS = 2 };

struct node { /* of the universe: what may be stored */
    uint8_t key[32];
    int parent; /* -1 - r: root r */
    uint32_t tokens[WORLD_TOKENS], n, depth;
};

struct state { /* of a node in one space */
    int open;  /* puts that are attached */
    bool stored, visible, superseded, pinned, flipped;
    int leases, waits;
    unsigned generation; /* how often it was forgotten */
    uint64_t busy_until, born;
};

enum put_state { FREE, OPEN, COMMITTED };

struct mput {
    struct cst_put put;
    enum put_state state;
    int space, node;     /* node -1: the block went away */
    bool aborted, known; /* known: its end is in the model, it only has to be told */
    uint8_t bytes[WORLD_BLOCK];
};

struct mfetch {
    struct cst_fetch fetch;
    int space, node;
    unsigned generation;
    bool used, waiting;
    bool known; /* its failure is in the model, it only has to be told */
};

struct model {
    struct world *w;
    struct cst_seeded_random rng;
    struct cst_space *spaces[SPACES];
    struct node nodes[NODES];
    uint8_t roots[ROOTS][32];
    struct state states[SPACES][NODES];
    struct mput puts[PUTS];
    struct mfetch fetches[FETCHES];
    struct cst_slab *held[HELD];
    uint64_t max_age, pin_budget, now;
    unsigned orphans, removals; /* in the operation under way */
    uint64_t corrupt_seen, hits, denied, pending, matched, decoded, detached;
};

static struct model m;
static uint64_t seed = 1;
static unsigned operations = 200000;

static uint64_t rnd(uint64_t n) {
    return cst_seeded_random_next(&m.rng) % n;
}

static bool flat(int s) {
    return s == 2;
}

static int parent_of(int s, int node) {
    return flat(s) ? -1 : m.nodes[node].parent;
}

static const uint8_t *parent_key(int node) {
    int p = m.nodes[node].parent;

    return p < 0 ? m.roots[-1 - p] : m.nodes[p].key;
}

static bool is_tail(int s, int node) {
    return !flat(s) && m.nodes[node].n < WORLD_TOKENS;
}

static bool is_expired(const struct state *st) {
    return m.max_age && m.now - st->born >= m.max_age;
}

static bool is_there(const struct state *st) {
    return st->stored || st->open;
}

static int node_of(const uint8_t key[32]) {
    for (int i = 0; i < NODES; i++)
        if (!memcmp(m.nodes[i].key, key, 32))
            return i;
    return -1;
}

static int space_of(const struct cst_space *space) {
    for (int s = 0; s < SPACES; s++)
        if (m.spaces[s] == space)
            return s;
    return -1;
}

/* ---- the universe ---- */

static void make_node(int i) {
    struct node *n = &m.nodes[i];

    n->parent = i < 6 || rnd(8) == 0 ? -1 - (int)rnd(ROOTS) : (int)rnd((uint64_t)i);
    while (n->parent >= 0 && m.nodes[n->parent].n < WORLD_TOKENS) /* tails have no children */
        n->parent = m.nodes[n->parent].parent;
    n->depth = n->parent < 0 ? 0 : m.nodes[n->parent].depth + 1;
    n->n = rnd(3) ? WORLD_TOKENS : 1 + (uint32_t)rnd(WORLD_TOKENS - 1);
    for (;;) { /* few token values, so that prefixes are shared; keys must differ */
        for (uint32_t t = 0; t < n->n; t++)
            n->tokens[t] = (uint32_t)rnd(t < 4 ? 2 : 3);
        world_key(n->key, parent_key(i), n->tokens, n->n);
        if (node_of(n->key) == i)
            return;
        n->n = n->n < WORLD_TOKENS ? n->n + 1 : n->n;
    }
}

/* ---- what the store tells ---- */

static bool has_children(int s, int node, bool stored_only) {
    for (int c = 0; c < NODES; c++)
        if (parent_of(s, c) == node &&
            (stored_only ? m.states[s][c].stored : is_there(&m.states[s][c])))
            return true;
    return false;
}

static void orphan_puts(int s, int node) {
    for (int i = 0; i < PUTS; i++)
        if (m.puts[i].state != FREE && m.puts[i].space == s && m.puts[i].node == node)
            m.puts[i].node = -1;
}

static void forget(int s, int node) {
    struct state *st = &m.states[s][node];

    for (int c = 0; c < NODES; c++) /* whoever only waited to be written below it */
        if (parent_of(s, c) == node && m.states[s][c].open) {
            assert_false(m.states[s][c].stored);
            forget(s, c);
        }
    orphan_puts(s, node);
    *st = (struct state){ .generation = st->generation + 1 };
    m.removals++;
}

/* A put's end shows in the trie before it is told: what follows from it is learned here. */
static void learn(struct mput *p) {
    struct state *st;
    int status = p->put.status;

    p->known = true;
    if (p->node < 0)
        return;
    st = &m.states[p->space][p->node];
    st->stored |= status == 0 || status == CST_STORE_E_PENDING;
    st->open--;
    m.orphans += status == CST_STORE_E_PARENT_MISSING;
    if (!st->stored && (!st->open || status == CST_STORE_E_PARENT_MISSING))
        forget(p->space, p->node);
}

static bool is_finished(const struct mput *p) {
    return p->state == COMMITTED && p->put.state == 4;
}

static bool is_current(const struct mfetch *f) {
    return m.states[f->space][f->node].generation == f->generation;
}

static void learn_fetch(struct mfetch *f) {
    if (!f->known && is_current(f))
        m.states[f->space][f->node].waits--;
    f->known = true;
}

static void learn_all(void) {
    for (int i = 0; i < FETCHES; i++)
        if (m.fetches[i].used && m.fetches[i].waiting && m.fetches[i].fetch.state == 4)
            learn_fetch(&m.fetches[i]);
    for (int i = 0; i < PUTS; i++)
        if (is_finished(&m.puts[i]) && !m.puts[i].known)
            learn(&m.puts[i]);
}

/* Is the node pinned, or above a pinned one? */
static bool is_held(int s, int node) {
    if (m.states[s][node].pinned)
        return true;
    for (int c = 0; c < NODES; c++)
        if (parent_of(s, c) == node && is_held(s, c))
            return true;
    return false;
}

static int attached_puts(int s, int node) {
    int n = 0;

    for (int i = 0; i < PUTS; i++)
        n += m.puts[i].state != FREE && !m.puts[i].known && m.puts[i].space == s &&
             m.puts[i].node == node;
    return n;
}

static void on_event(void *arg, struct cst_space *space, enum cst_event what,
                     const uint8_t key[32]) {
    int s = space_of(space), node = node_of(key);
    struct state *st = &m.states[s][node];

    assert_true(s >= 0 && node >= 0);
    learn_all();
    switch (what) {
    case CST_EVENT_STORED: {
        int p = parent_of(s, node);

        assert_false(st->visible);
        assert_true(p < 0 || m.states[s][p].visible);
        st->stored = st->visible = true;
        for (int c = 0; c < NODES && !flat(s); c++) /* shorter ones with the same tokens */
            if (c != node && parent_of(s, c) == p && m.states[s][c].visible &&
                m.nodes[c].n < m.nodes[node].n &&
                !memcmp(m.nodes[c].tokens, m.nodes[node].tokens, 4UL * m.nodes[c].n))
                m.states[s][c].superseded = true;
        break;
    }
    case CST_EVENT_EVICTED:
        assert_true(st->stored);
        assert_false(has_children(s, node, true));
        if (!is_expired(st)) { /* only what nobody needs */
            assert_int_equal(st->leases + st->waits, 0);
            assert_false(is_held(s, node));
            assert_false(has_children(s, node, false));
            assert_int_equal(attached_puts(s, node), 0);
        }
        forget(s, node);
        break;
    case CST_EVENT_ERASED:
    case CST_EVENT_DETACHED:
        assert_true(st->stored);
        assert_false(has_children(s, node, true));
        m.detached += what == CST_EVENT_DETACHED;
        forget(s, node);
        break;
    case CST_EVENT_MOVED:
        assert_true(st->stored);
        break;
    }
}

static void on_put_done(struct cst_put *put, int status) {
    struct mput *p = cst_container_of(put, struct mput, put);
    const struct state *st;

    assert_int_equal(p->state, COMMITTED);
    if (!p->known)
        learn(p);
    st = p->node >= 0 ? &m.states[p->space][p->node] : NULL;
    p->state = FREE;
    memset(p->bytes, 0xee, sizeof(p->bytes));
    m.denied += status == CST_STORE_E_BUSY;
    m.pending += status == CST_STORE_E_PENDING;
    if (p->aborted)
        assert_int_equal(status, -ECANCELED);
    else if (!st) /* one that had landed may have lost its block before it was told */
        assert_true(status >= 0 && status != CST_STORE_E_CORRUPT);
    else if (status == CST_STORE_E_PRESENT)
        assert_true(st->stored);
    else if (status == CST_STORE_E_PENDING)
        assert_true(st->stored && parent_of(p->space, p->node) >= 0);
    else if (status != CST_STORE_E_BUSY)
        assert_true(status == 0 && st->visible);
    p->node = -1;
}

static void check_bytes(const struct mfetch *f) {
    const struct state *st = &m.states[f->space][f->node];
    const struct cst_location *loc = &f->fetch.loc;

    assert_int_equal(loc->tokens, flat(f->space) ? WORLD_TOKENS : m.nodes[f->node].n);
    assert_ptr_equal(loc->slab->space, m.spaces[f->space]);
    if (!loc->packed && !st->flipped)
        assert_true(world_bytes_are(loc, m.nodes[f->node].key, GENERATIONS));
    m.hits++;
}

static void on_ready(struct cst_fetch *fetch, int status) {
    struct mfetch *f = cst_container_of(fetch, struct mfetch, fetch);
    struct state *st = &m.states[f->space][f->node];

    assert_true(f->used && f->waiting);
    learn_fetch(f);
    f->waiting = false;
    if (status == 0) {
        st->leases += is_current(f);
        if (is_current(f))
            check_bytes(f);
        m.decoded++;
        return;
    }
    f->used = false;
    m.denied += status == CST_STORE_E_BUSY;
    m.corrupt_seen += status == CST_STORE_E_CORRUPT;
    if (status != CST_STORE_E_BUSY) {
        assert_false(is_current(f));
        assert_true(status == CST_STORE_E_CORRUPT || status == CST_STORE_E_NOT_FOUND);
    }
}

/* ---- operations ---- */

/* Most often one that can be stored, or a stored one. */
static int likely_node(int s, bool stored) {
    int node = 0;

    for (int i = 0; i < 12; i++) {
        int parent;

        node = (int)rnd(NODES);
        parent = parent_of(s, node);
        if (stored
                ? m.states[s][node].visible
                : !is_there(&m.states[s][node]) && (parent < 0 || is_there(&m.states[s][parent])))
            break;
    }
    return node;
}

static void op_begin(int s) {
    int node = likely_node(s, false), parent = parent_of(s, node);
    const struct state *ps = parent >= 0 ? &m.states[s][parent] : NULL;
    struct state *st = &m.states[s][node];
    struct mput *p = &m.puts[rnd(PUTS)];
    uint32_t busy_ms = 0;
    bool expired = is_there(st) && is_expired(st);
    int want, r;

    if (p->state != FREE)
        return;
    want = is_there(st) && !expired ? st->stored               ? CST_STORE_E_PRESENT
                                      : m.now < st->busy_until ? CST_STORE_E_KEY_BUSY
                                                               : 0
           : ps && (!is_there(ps) || is_expired(ps) || is_tail(s, parent))
               ? CST_STORE_E_PARENT_MISSING
               : 0;
    p->put = CST_PUT_NULL(on_put_done);
    r = cst_put_begin(m.spaces[s], flat(s) ? NULL : parent_key(node), !flat(s) && parent < 0,
                      m.nodes[node].key, flat(s) ? NULL : m.nodes[node].tokens,
                      flat(s) ? 0 : m.nodes[node].n, &p->put, &busy_ms);
    if (expired && is_there(st)) /* had no bytes: no event */
        forget(s, node);
    if (r == CST_STORE_E_LIMIT || r == CST_STORE_E_BUSY) {
        struct cst_store_stats stats;

        cst_store_stats(m.w->store, &stats);
        assert_true(r == CST_STORE_E_BUSY || stats.index_used > stats.index_limit * 3 / 4);
        m.denied++;
        return;
    }
    assert_int_equal(r, want);
    if (r == CST_STORE_E_KEY_BUSY)
        assert_int_equal(busy_ms, (st->busy_until - m.now + CST_NS_PER_MS - 1) / CST_NS_PER_MS);
    if (r)
        return;
    p->state = OPEN;
    p->space = s;
    p->node = node;
    p->aborted = p->known = false;
    if (!st->open++)
        st->born = m.now;
    st->busy_until = m.now + 5 * CST_NS_PER_S;
}

static void op_commit(void) {
    struct mput *p = &m.puts[rnd(PUTS)];
    uint16_t surprisals[WORLD_TOKENS] = { 0x3c00 }; /* 1 bit */

    if (p->state != OPEN)
        return;
    assert_true(cst_put_is_open(&p->put));
    if (p->node >= 0)
        world_fill(p->bytes, m.nodes[p->node].key, (uint32_t)rnd(GENERATIONS));
    p->state = COMMITTED;
    cst_put_commit(&p->put, p->bytes, rnd(2) ? surprisals : NULL);
    assert_int_equal(p->state, COMMITTED); /* told later, never from the call */
}

static void abort_put(struct mput *p) {
    int s = p->space, node = p->node;

    if (p->state == FREE)
        return;
    if (is_finished(p))
        return;
    cst_put_abort(&p->put);
    p->aborted = true;
    p->node = -1;
    if (p->state == OPEN)
        p->state = FREE;
    if (node >= 0 && !--m.states[s][node].open && !m.states[s][node].stored)
        forget(s, node); /* the last hope of getting its bytes */
}

static void op_abort(void) {
    abort_put(&m.puts[rnd(PUTS)]);
}

static void op_fetch(int s) {
    int node = likely_node(s, true);
    struct state *st = &m.states[s][node];
    struct mfetch *f = &m.fetches[rnd(FETCHES)];
    enum cst_fetch_mode mode = rnd(4) ? CST_FETCH_DECODED : CST_FETCH_PACKED;
    int r;

    if (f->used)
        return;
    *f = (struct mfetch){ .fetch = CST_FETCH_NULL(on_ready), .space = s, .node = node };
    f->generation = st->generation;
    f->used = true;
    r = cst_fetch_start(m.spaces[s], m.nodes[node].key, mode, &f->fetch);
    if (!st->visible || is_expired(st))
        assert_int_equal(r, CST_STORE_E_NOT_FOUND);
    if (r == 0) {
        st->leases++;
        check_bytes(f);
    } else if (r == CST_STORE_E_PENDING) {
        f->waiting = true;
        st->waits++;
    } else {
        assert_int_equal(r, CST_STORE_E_NOT_FOUND);
        assert_true(!st->visible || is_expired(st));
        f->used = false;
    }
}

static void release(struct mfetch *f) {
    struct state *st = &m.states[f->space][f->node];

    if (!f->used)
        return;
    f->used = false;
    if (f->waiting) /* before: it may be evicted in this call */
        learn_fetch(f);
    else
        st->leases -= is_current(f);
    f->waiting = false;
    cst_fetch_release(&f->fetch);
}

static void op_release(void) {
    release(&m.fetches[rnd(FETCHES)]);
}

static uint32_t shared(const uint32_t *a, uint32_t na, const uint32_t *b, uint32_t nb) {
    uint32_t i = 0;

    while (i < na && i < nb && a[i] == b[i])
        i++;
    return i;
}

static void check_match(int s, int parent, const uint32_t *tail, uint32_t n,
                        const struct cst_lookup *got) {
    const struct state *ps = parent >= 0 ? &m.states[s][parent] : NULL;
    uint32_t best = 0;
    int node;

    for (int c = 0; c < NODES; c++)
        if (parent_of(s, c) == parent && m.states[s][c].visible) {
            if (is_expired(&m.states[s][c]))
                return; /* may hide a younger sibling for a moment */
            best = CST_MAX(best, shared(m.nodes[c].tokens, m.nodes[c].n, tail, n));
        }
    if (ps && (!ps->visible || is_expired(ps)))
        best = 0;
    assert_int_equal(got->partial_tokens, best);
    if (!best)
        return;
    node = node_of(got->partial_key);
    assert_int_equal(parent_of(s, node), parent);
    assert_true(m.states[s][node].visible);
    assert_int_equal(shared(m.nodes[node].tokens, m.nodes[node].n, tail, n), best);
    assert_int_equal(got->partial_stored, m.nodes[node].n);
    m.matched++;
}

static void op_lookup(int s) {
    int node = (int)rnd(NODES), chain[NODES], n = 0, run = 0;
    uint8_t keys[NODES * 32], tiers[NODES];
    uint32_t tail[WORLD_TOKENS], tail_len = (uint32_t)rnd(WORLD_TOKENS + 1);
    struct cst_lookup got;

    for (int at = node; at >= 0 && !flat(s); at = m.nodes[at].parent)
        chain[n++] = at;
    for (int i = 0; i < n / 2; i++) {
        int t = chain[i];

        chain[i] = chain[n - 1 - i];
        chain[n - 1 - i] = t;
    }
    if (n && rnd(3) == 0)
        n = (int)rnd((uint64_t)n); /* also the empty chain */
    for (int i = 0; i < n; i++)
        memcpy(keys + 32 * i, m.nodes[chain[i]].key, 32);
    for (uint32_t t = 0; t < tail_len; t++)
        tail[t] = (uint32_t)rnd(t < 4 ? 2 : 3);
    while (run < n && m.states[s][chain[run]].visible && !is_expired(&m.states[s][chain[run]]))
        run++;
    cst_space_lookup(m.spaces[s], keys, (size_t)n, flat(s) ? NULL : parent_key(chain[0] * !!n),
                     tail, tail_len, rnd(2) ? tiers : NULL, &got);
    assert_int_equal(got.present, run);
    if (!tail_len || run < n || flat(s))
        assert_int_equal(got.partial_tokens, 0);
    else
        check_match(s, n ? chain[n - 1] : m.nodes[0].parent, tail, tail_len, &got);
}

/* Keys in any order are no chain; the answer is only not to be believed, and true for a prefix. */
static void op_lookup_garbage(int s) {
    uint8_t keys[16 * 32], tiers[16];
    struct cst_lookup got;

    for (int i = 0; i < 16; i++)
        memcpy(keys + 32 * i, m.nodes[rnd(NODES)].key, 32);
    cst_space_lookup(m.spaces[s], keys, 16, m.roots[0], m.nodes[0].tokens, 3, tiers, &got);
    assert_true(got.present <= 16);
    for (size_t i = 0; i < got.present; i++)
        assert_true(m.states[s][node_of(keys + 32 * i)].visible);
    cst_space_lookup(m.spaces[s], keys, 16, m.roots[0], m.nodes[0].tokens, 3, NULL, &got);
}

static void op_lookup_each(int s) {
    uint8_t keys[NODES * 32], tiers[NODES];
    size_t want = 0;

    for (int i = 0; i < NODES; i++)
        memcpy(keys + 32 * i, m.nodes[i].key, 32);
    for (int i = 0; i < NODES; i++)
        want += m.states[s][i].visible && !is_expired(&m.states[s][i]);
    assert_int_equal(cst_space_lookup_each(m.spaces[s], keys, NODES, tiers), want);
    for (int i = 0; i < NODES; i++)
        assert_int_equal(tiers[i] != CST_TIER_NONE,
                         m.states[s][i].visible && !is_expired(&m.states[s][i]));
}

static uint64_t count_subtree(int s, int node) {
    uint64_t n = m.states[s][node].stored;

    for (int c = 0; c < NODES; c++)
        if (parent_of(s, c) == node && is_there(&m.states[s][c]))
            n += count_subtree(s, c);
    return n;
}

static void op_erase(int s) {
    int node = (int)rnd(NODES);
    struct state *st = &m.states[s][node];
    uint64_t want = st->stored && !is_expired(st) ? count_subtree(s, node) : 0, n;
    int r = cst_space_erase(m.spaces[s], m.nodes[node].key, &n);

    assert_int_equal(r, want ? 0 : CST_STORE_E_NOT_FOUND);
    assert_int_equal(n, want);
    assert_false(want && is_there(st));
}

static uint64_t pinned_bytes(int first, int last) {
    uint64_t n = 0;

    for (int s = first; s <= last; s++)
        for (int i = 0; i < NODES; i++)
            n += is_held(s, i);
    return n * WORLD_BLOCK;
}

/* Spaces 0 and 2 share a namespace. */
static uint64_t ns_pinned(int s) {
    return s == 1 ? pinned_bytes(1, 1) : pinned_bytes(0, 0) + pinned_bytes(2, 2);
}

static void op_pin(int s) {
    int node = (int)rnd(NODES);
    struct state *st = &m.states[s][node];
    bool before = st->pinned;
    int r;

    if (!st->visible || is_expired(st)) {
        assert_int_equal(cst_space_pin(m.spaces[s], m.nodes[node].key, 0), CST_STORE_E_NOT_FOUND);
        return;
    }
    st->pinned = true;
    r = cst_space_pin(m.spaces[s], m.nodes[node].key, 0);
    assert_int_equal(r, ns_pinned(s) > m.pin_budget ? CST_STORE_E_LIMIT : 0);
    if (r)
        st->pinned = before;
}

static void op_unpin(int s) {
    int node = (int)rnd(NODES);
    struct state *st = &m.states[s][node];
    bool pinned = st->pinned && !is_expired(st);
    int r;

    st->pinned = st->pinned && !pinned; /* before: it may be evicted in this call */
    r = cst_space_unpin(m.spaces[s], m.nodes[node].key);
    assert_int_equal(r, pinned ? 0 : CST_STORE_E_NOT_FOUND);
}

static void op_flip(void) {
    struct cst_slab *slab =
        cst_store_slab(m.w->store, 1 + (uint32_t)rnd(m.w->store->last_slab + 1));
    struct cst_slab_slots *in = slab ? cst_slab_slots(slab) : NULL;
    uint32_t slot = in ? (uint32_t)rnd(in->n_slots) : 0;
    struct cst_block *b = in ? in->owners[slot] : NULL;

    if (!b || b->dead || cst_block_is_busy(b) || rnd(4))
        return;
    if (!slab->packed) {
        struct state *st = &m.states[space_of(b->space)][node_of(b->key)];

        st->flipped = true;
        cst_slot_data(in, slot)[rnd(WORLD_BLOCK)] ^= 1;
    } else {
        cst_slot_data(in, slot)[rnd(b->packed.length)] ^= 0x10;
    }
}

static void op_slab(void) {
    struct cst_slab **held = &m.held[rnd(HELD)];

    if (*held) {
        cst_slab_unhold(*held);
        *held = NULL;
        return;
    }
    *held = cst_store_slab(m.w->store, 1 + (uint32_t)rnd(m.w->store->last_slab + 1));
    if (*held && ((*held)->retired || !rnd(2)))
        *held = NULL;
    if (*held)
        cst_slab_hold(*held);
}

static void op_clear(int s) {
    uint64_t want = 0;

    if (rnd(500))
        return;
    for (int i = 0; i < NODES; i++)
        want += m.states[s][i].stored;
    assert_int_equal(cst_space_clear(m.spaces[s]), want);
    for (int i = 0; i < NODES; i++)
        if (m.states[s][i].open) /* had no bytes: no event */
            forget(s, i);
}

static void op_time(void) {
    m.w->clock.ns += rnd(4) ? rnd(100) * CST_NS_PER_MS : rnd(3) * CST_NS_PER_S;
    m.now = m.w->clock.ns;
}

static void op_tick(void) {
    cst_store_tick(m.w->store);
    learn_all();
    for (int s = 0; s < SPACES; s++)
        for (int i = 0; i < NODES; i++) {
            struct state *st = &m.states[s][i];

            if (st->open && !st->stored && is_expired(st) &&
                !cst_trie_find(m.spaces[s], m.nodes[i].key))
                forget(s, i);
        }
}

static void op_touch(int s) {
    int node = (int)rnd(NODES);
    const struct state *st = &m.states[s][node];

    assert_int_equal(cst_space_touch(m.spaces[s], m.nodes[node].key),
                     st->visible && !is_expired(st) ? 0 : CST_STORE_E_NOT_FOUND);
}

/* Whoever waits, waits for a job. */
static void nobody_waits_for_nothing(void) {
    if (m.w->jobs.n_waiting + m.w->jobs.n_ran)
        return;
    assert_int_equal(cst_store_jobs(m.w->store), 0);
    for (int i = 0; i < PUTS; i++)
        assert_true(m.puts[i].state != COMMITTED);
    for (int i = 0; i < FETCHES; i++)
        assert_false(m.fetches[i].used && m.fetches[i].waiting);
}

static void step(void) {
    int s = (int)rnd(SPACES);

    switch (rnd(40)) {
    case 0 ... 6:
        op_begin(s);
        break;
    case 7 ... 11:
        op_commit();
        break;
    case 12:
        op_abort();
        break;
    case 13 ... 16:
        op_fetch(s);
        break;
    case 17 ... 20:
        op_release();
        break;
    case 21 ... 22:
        op_lookup(s);
        break;
    case 23:
        rnd(8) ? op_touch(s) : rnd(2) ? op_lookup_each(s) : op_lookup_garbage(s);
        break;
    case 24:
        rnd(4) ? (void)0 : op_erase(s);
        break;
    case 25:
        rnd(2) ? op_pin(s) : op_unpin(s);
        break;
    case 26:
        op_flip();
        break;
    case 27:
        op_slab();
        break;
    case 28:
        op_time();
        break;
    case 29:
        op_tick();
        break;
    case 30:
        op_clear(s);
        break;
    case 31:
        if (!rnd(8))
            (void)test_jobs_drain(&m.w->jobs);
        break;
    case 32 ... 35:
        (void)test_jobs_run(&m.w->jobs, rnd(16));
        break;
    default:
        (void)test_jobs_done(&m.w->jobs, rnd(16));
        break;
    }
    learn_all();
    nobody_waits_for_nothing();
    assert_true(!m.orphans || m.removals > m.orphans || m.max_age);
    m.orphans = m.removals = 0;
}

/* The whole state, block by block. */
static void compare(void) {
    for (int s = 0; s < SPACES; s++)
        for (int i = 0; i < NODES; i++) {
            const struct state *st = &m.states[s][i];
            const struct cst_block *b = cst_trie_find(m.spaces[s], m.nodes[i].key);

            assert_int_equal(b != NULL, is_there(st));
            if (!b)
                continue;
            assert_int_equal(b->visible, st->visible);
            assert_true(!st->superseded || st->leases || st->waits || is_held(s, i));
            assert_int_equal(b->pins != 0, is_held(s, i));
        }
}

static void setup(const char *policy, bool ages, unsigned slabs) {
    memset(&m, 0, sizeof(m));
    cst_seeded_random_init(&m.rng, seed);
    m.max_age = ages ? 60 * CST_NS_PER_S : 0;
    m.pin_budget = 12 * WORLD_BLOCK;
    m.w = world_new(&(struct world_options){ .seed = seed,
                                             .memory = (160 << 10) + slabs * WORLD_SLAB,
                                             .index = 160 << 10,
                                             .pin_bytes = m.pin_budget,
                                             .max_age_ns = m.max_age,
                                             .policy = policy,
                                             .manual_jobs = true });
    m.now = m.w->clock.ns;
    m.w->hook = on_event;
    m.spaces[0] = world_space(m.w, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    m.spaces[1] = world_space(m.w, "b", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    m.spaces[2] = world_space(m.w, "a", 1, CST_KIND_FLAT, CST_CLASS_LOSSLESS);
    for (int r = 0; r < ROOTS; r++)
        world_key_n(m.roots[r], 1000 + (uint64_t)r);
    for (int i = 0; i < NODES; i++)
        make_node(i);
    for (int i = 0; i < PUTS; i++)
        m.puts[i].put = CST_PUT_NULL(on_put_done);
}

static void teardown(void) {
    for (int i = 0; i < HELD; i++)
        if (m.held[i])
            cst_slab_unhold(m.held[i]);
    for (int i = 0; i < PUTS; i++)
        abort_put(&m.puts[i]);
    world_settle(m.w);
    for (int i = 0; i < FETCHES; i++)
        release(&m.fetches[i]);
    world_settle(m.w);
    m.w->hook = NULL;
    world_check(m.w);
    assert_int_equal(m.w->store->leases + m.w->store->reserved, 0);
    world_free(m.w);
    assert_int_equal(world_slabs, 0);
}

static void run(const char *policy, bool ages, unsigned slabs) {
    struct cst_space_stats stats;

    setup(policy, ages, slabs);
    for (unsigned i = 0; i < operations / 4; i++) {
        step();
        if (i % 8 == 0) {
            world_check(m.w);
            compare();
        }
    }
    cst_namespace_stats(cst_space_namespace(m.spaces[0]), &stats);
    printf("seed %" PRIu64 ": hits %" PRIu64 ", decoded %" PRIu64 ", matched %" PRIu64
           ", pending %" PRIu64 ", denied %" PRIu64 ", evicted %" PRIu64 ", detached %" PRIu64
           ", corrupt %" PRIu64 "\n",
           seed, m.hits, m.decoded, m.matched, m.pending, m.denied, stats.evicted_blocks,
           m.detached, stats.corrupt_blocks);
    /* the run has seen what it is for */
    assert_true(m.hits && (m.decoded || slabs < 10) && m.matched && m.pending &&
                stats.evicted_blocks && stats.corrupt_blocks && m.detached);
    teardown();
}

static void lru_equals_the_model(void **state) {
    run("lru", false, 10);
}

static void arc_equals_the_model(void **state) {
    run("arc", false, 4);
}

static void lru_with_ages_equals_the_model(void **state) {
    run("lru", true, 4);
}

static void arc_with_ages_equals_the_model(void **state) {
    run("arc", true, 10);
}

static void cost_equals_the_model(void **state) {
    run("cost", false, 4);
}

static void cost_with_ages_equals_the_model(void **state) {
    run("cost", true, 10);
}

static void s3fifo_equals_the_model(void **state) {
    run("s3fifo", true, 4);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lru_equals_the_model),
        cmocka_unit_test(arc_equals_the_model),
        cmocka_unit_test(lru_with_ages_equals_the_model),
        cmocka_unit_test(arc_with_ages_equals_the_model),
        cmocka_unit_test(cost_equals_the_model),
        cmocka_unit_test(cost_with_ages_equals_the_model),
        cmocka_unit_test(s3fifo_equals_the_model),
    };

    if (argc > 1)
        seed = strtoull(argv[1], NULL, 0);
    if (argc > 2)
        operations = (unsigned)strtoul(argv[2], NULL, 0);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
