/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Eviction policies against references that keep plain arrays and move everything by hand, on
 * random traces; and what arc is for: a scan must not push out what is used again.
 */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "base/random.h"
#include "store/evict.h"

#include <math.h>
#include <string.h>

enum { KEYS = 64, STEPS = 6000 };

/* ---- the reference: hashes in arrays, oldest first ---- */

struct array {
    uint64_t at[4 * KEYS];
    size_t n;
};

struct item {
    bool in, again;
    uint64_t order, place;
    unsigned used_s, uses;
    double cost;
};

struct reference;

struct rules {
    const char *name;
    void (*born)(struct reference *r, uint64_t key);
    void (*insert)(struct reference *r, uint64_t key, enum cst_evict_how how);
    void (*remove)(struct reference *r, uint64_t key, bool evicted);
    /* The i-th best victim; KEYS: none. */
    uint64_t (*victim)(struct reference *r, size_t i);
};

struct reference {
    const struct rules *rules;
    struct array lists[2], ghosts[2]; /* arc: once, again; s3fifo: small, main; lru: the first */
    unsigned ghost_uses[KEYS];
    size_t target, born;
    unsigned now_s;
    struct item items[KEYS];
};

static void put_at(struct array *a, size_t i, uint64_t v) {
    memmove(&a->at[i + 1], &a->at[i], (a->n - i) * sizeof(v));
    a->at[i] = v;
    a->n++;
}

static bool take(struct array *a, uint64_t v) {
    for (size_t i = 0; i < a->n; i++)
        if (a->at[i] == v) {
            a->n--;
            memmove(&a->at[i], &a->at[i + 1], (a->n - i) * sizeof(v));
            return true;
        }
    return false;
}

static void leave_ghost(struct reference *r, unsigned list, uint64_t key, size_t max) {
    (void)(take(&r->ghosts[0], key) || take(&r->ghosts[1], key)); /* one ghost a key */
    while (r->ghosts[0].n + r->ghosts[1].n >= max) {
        struct array *longer = &r->ghosts[r->ghosts[0].n < r->ghosts[1].n];

        if (!longer->n)
            return;
        (void)take(longer, longer->at[0]);
    }
    put_at(&r->ghosts[list], r->ghosts[list].n, key);
    r->ghost_uses[key] = r->items[key].uses;
}

static uint64_t pick(const struct array *first, const struct array *second, size_t i) {
    if (i < first->n)
        return first->at[i];
    i -= first->n;
    return i < second->n ? second->at[i] : KEYS;
}

/* Before the first one with a larger place. */
static void put_in_order(struct reference *r, struct array *a, uint64_t key, uint64_t place) {
    size_t i = a->n;

    r->items[key].place = place;
    while (i && r->items[a->at[i - 1]].place > place)
        i--;
    put_at(a, i, key);
}

static void take_out(struct reference *r, uint64_t key) {
    assert_true(take(&r->lists[0], key) || take(&r->lists[1], key));
}

/* ---- lru ---- */

static void lru_born(struct reference *r, uint64_t key) {
}

static void lru_insert(struct reference *r, uint64_t key, enum cst_evict_how how) {
    put_in_order(r, &r->lists[0], key, r->items[key].order);
}

static void lru_remove(struct reference *r, uint64_t key, bool evicted) {
    take_out(r, key);
}

static uint64_t lru_victim(struct reference *r, size_t i) {
    return pick(&r->lists[0], &r->lists[1], i);
}

/* ---- arc ---- */

static void arc_insert(struct reference *r, uint64_t key, enum cst_evict_how how) {
    struct array *list;

    if (how == CST_EVICT_NEW) {
        size_t b1 = r->ghosts[0].n, b2 = r->ghosts[1].n, c = r->lists[0].n + r->lists[1].n + 1;

        r->items[key].again = false;
        if (take(&r->ghosts[0], key)) {
            size_t step = b2 / b1 > 1 ? b2 / b1 : 1;

            r->target = r->target + step < c ? r->target + step : c;
            r->items[key].again = true;
        } else if (take(&r->ghosts[1], key)) {
            size_t step = b1 / b2 > 1 ? b1 / b2 : 1;

            r->target = r->target > step ? r->target - step : 0;
            r->items[key].again = true;
        }
    } else if (how == CST_EVICT_USED) {
        r->items[key].again = true;
    }
    list = &r->lists[r->items[key].again];
    put_at(list, how == CST_EVICT_COLD ? 0 : list->n, key);
}

static void arc_remove(struct reference *r, uint64_t key, bool evicted) {
    size_t all = r->lists[0].n + r->lists[1].n;
    unsigned list = take(&r->lists[0], key) ? 0 : 1;

    if (list)
        assert_true(take(&r->lists[1], key));
    if (evicted)
        leave_ghost(r, list, key, all);
}

static uint64_t arc_victim(struct reference *r, size_t i) {
    int first = !(r->lists[0].n && (r->lists[0].n > r->target || !r->lists[1].n));

    return pick(&r->lists[first], &r->lists[!first], i);
}

/* ---- s3fifo ---- */

static void s3fifo_born(struct reference *r, uint64_t key) {
    r->items[key].again = take(&r->ghosts[0], key);
    r->items[key].uses = 0;
    r->items[key].place = ++r->target;
}

static void s3fifo_insert(struct reference *r, uint64_t key, enum cst_evict_how how) {
    put_in_order(r, &r->lists[r->items[key].again], key, r->items[key].place);
}

static void s3fifo_remove(struct reference *r, uint64_t key, bool evicted) {
    bool small = take(&r->lists[0], key);

    if (!small)
        assert_true(take(&r->lists[1], key));
    if (evicted && small)
        leave_ghost(r, 0, key, r->born);
}

static unsigned s3fifo_queue(const struct reference *r) {
    size_t small = r->lists[0].n, main = r->lists[1].n;

    return !main || (double)small > .1 * (double)(small + main) ? 0 : 1;
}

/* As in the paper: a small entry with two hits goes to the main queue, a main one with any goes
 * round. */
static uint64_t s3fifo_victim(struct reference *r, size_t i) {
    unsigned q = s3fifo_queue(r);

    for (unsigned n = 0; n < 64 && !i && r->lists[q].n; n++, q = s3fifo_queue(r)) {
        uint64_t key = r->lists[q].at[0];
        struct item *item = &r->items[key];
        unsigned hits = item->uses - 1 > 3 ? 3 : item->uses - 1;

        if (hits < (q ? 1 : 2))
            break;
        (void)take(&r->lists[q], key);
        item->uses = q ? hits : 1; /* one hit less */
        item->again = true;
        item->place = ++r->target;
        put_at(&r->lists[1], r->lists[1].n, key);
    }
    return pick(&r->lists[q], &r->lists[!q], i);
}

/* ---- cost ---- */

static void cost_born(struct reference *r, uint64_t key) {
    r->items[key].uses = take(&r->ghosts[0], key) ? r->ghost_uses[key] : 0;
}

static void cost_insert(struct reference *r, uint64_t key, enum cst_evict_how how) {
    r->now_s = r->items[key].used_s > r->now_s ? r->items[key].used_s : r->now_s;
    put_in_order(r, &r->lists[0], key, r->items[key].order);
}

static void cost_remove(struct reference *r, uint64_t key, bool evicted) {
    take_out(r, key);
    if (evicted)
        leave_ghost(r, 0, key, 8192); /* and more only for more entries than there are */
}

/* The formula of evict_cost.c, with the numerator squared rounded down to 1 or 1.5 times a power of
 * two and then taken as the middle of its class. */
static double badness(const struct reference *r, uint64_t key) {
    const struct item *item = &r->items[key];
    double x = item->uses * item->cost * (item->uses > 1 ? 1.35 * 1.35 : 1);
    double floor2, middle;

    x = fmin(fmax(x, 1.0 / 16), 1.5 * 2048);
    floor2 = exp2(floor(log2(x)));
    middle = x >= 1.5 * floor2 ? 1.75 * floor2 : 1.25 * floor2;

    return (150 + r->now_s - item->used_s) * round(65536 / sqrt(middle));
}

static uint64_t cost_victim(struct reference *r, size_t i) {
    struct array left = r->lists[0];
    uint64_t best = KEYS;

    if (i >= left.n)
        return KEYS;
    for (i++; i; i--) {
        best = left.at[0];
        for (size_t k = 1; k < left.n; k++)
            if (badness(r, left.at[k]) > badness(r, best))
                best = left.at[k];
        (void)take(&left, best);
    }
    return best;
}

static const struct rules rules[] = {
    { "lru", lru_born, lru_insert, lru_remove, lru_victim },
    { "arc", lru_born, arc_insert, arc_remove, arc_victim },
    { "s3fifo", s3fifo_born, s3fifo_insert, s3fifo_remove, s3fifo_victim },
    { "cost", cost_born, cost_insert, cost_remove, cost_victim },
};

/* ---- the trace ---- */

struct trace {
    struct cst_evict e;
    struct reference ref;
    struct cst_evict_entry entries[KEYS];
    bool there[KEYS]; /* born and not evicted */
    uint64_t uses;
    struct cst_seeded_random rng;
};

static uint64_t key_of(const struct trace *t, const struct cst_evict_entry *entry) {
    return entry ? (uint64_t)(entry - t->entries) : KEYS;
}

static void check_order(struct trace *t) {
    struct cst_evict_entry *v = NULL;
    size_t n = 0, in = 0;

    for (;; n++) {
        v = t->e.ops->victim(&t->e, v);
        assert_int_equal(key_of(t, v), t->ref.rules->victim(&t->ref, n));
        if (!v)
            break;
    }
    for (size_t i = 0; i < KEYS; i++)
        in += t->entries[i].in;
    assert_int_equal(n, in);
}

static void use(struct trace *t, uint64_t key, uint32_t now_s) {
    struct item *item = &t->ref.items[key];

    if (item->used_s != now_s || !item->uses)
        item->uses++;
    item->used_s = now_s;
    item->order = ++t->uses;
    cst_evict_use(&t->entries[key], t->uses, now_s);
}

static void insert(struct trace *t, uint64_t key, enum cst_evict_how how) {
    t->e.ops->insert(&t->e, &t->entries[key], how);
    t->ref.rules->insert(&t->ref, key, how);
}

static void remove_one(struct trace *t, uint64_t key, bool evicted) {
    t->e.ops->remove(&t->e, &t->entries[key], evicted);
    t->ref.rules->remove(&t->ref, key, evicted);
}

static void make(struct trace *t, uint64_t key, double cost, uint32_t now_s) {
    t->entries[key] = (struct cst_evict_entry){ .hash = key, .cost = (float)cost };
    t->ref.items[key] = (struct item){ .cost = (float)cost };
    t->there[key] = true;
    t->e.born = ++t->ref.born;
    if (t->e.ops->born)
        t->e.ops->born(&t->e, &t->entries[key]);
    t->ref.rules->born(&t->ref, key);
    use(t, key, now_s);
}

static void step(struct trace *t, uint32_t now_s) {
    uint64_t r = cst_seeded_random_next(&t->rng), key = r % KEYS;
    unsigned what = (unsigned)(r >> 32) % 8;
    bool in = t->entries[key].in;

    if (!t->there[key]) {
        make(t, key, (double)(1 + (r >> 40) % 1000) / 64, now_s);
        if (what < 6) /* else it comes back another time */
            insert(t, key, CST_EVICT_NEW);
    } else if (!in && what < 4) {
        use(t, key, now_s);
        insert(t, key, CST_EVICT_USED);
    } else if (!in) {
        insert(t, key, what < 6 ? CST_EVICT_WARM : CST_EVICT_COLD);
    } else if (what < 3) {
        use(t, key, now_s); /* while in, as the store does it */
        remove_one(t, key, false);
        insert(t, key, CST_EVICT_USED);
    } else if (what < 6) {
        uint64_t v = key_of(t, t->e.ops->victim(&t->e, NULL));

        assert_int_equal(v, t->ref.rules->victim(&t->ref, 0));
        remove_one(t, v, true);
        t->there[v] = false;
        t->e.born = --t->ref.born;
    } else {
        remove_one(t, key, false);
    }
}

static void finish(struct cst_evict *e, struct cst_evict_entry *entries, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (entries[i].in)
            e->ops->remove(e, &entries[i], false);
    cst_evict_deinit(e);
    assert_int_equal(cst_evict_bytes(e), 0);
    cst_evict_deinit(e);
}

static void equals_the_reference(void **state) {
    struct trace t = { .ref.rules = *state, .ref.born = 64 }; /* fewer: see the next test */

    cst_seeded_random_init(&t.rng, 11);
    cst_evict_init(&t.e, cst_evict_by_name(t.ref.rules->name));
    t.e.room = SIZE_MAX;
    for (unsigned i = 0; i < STEPS; i++) {
        step(&t, i / 7);
        if (i % 8 == 0)
            check_order(&t);
        assert_int_equal(t.e.n_ghosts[0], t.ref.ghosts[0].n);
        assert_int_equal(t.e.n_ghosts[1], t.ref.ghosts[1].n);
    }
    finish(&t.e, t.entries, KEYS);
}

/* In a cache of less than 64 blocks only recency counts, whatever they cost and were used. */
static void few_entries_go_by_recency(void **state) {
    struct trace t = { .ref.rules = &rules[3] };

    cst_evict_init(&t.e, &cst_evict_cost);
    for (unsigned i = 0; i < 63; i++) {
        make(&t, i, 63 - i, i);
        insert(&t, i, CST_EVICT_NEW);
    }
    for (unsigned i = 0; i < 63; i++) {
        struct cst_evict_entry *v = t.e.ops->victim(&t.e, NULL);

        assert_int_equal(key_of(&t, v), i);
        t.e.ops->remove(&t.e, v, true);
    }
    finish(&t.e, t.entries, KEYS);
}

/* Of every 5 uses 2 go to 8 hot keys in turn and 3 to keys that never come back; 16 fit. Between
 * two uses of a hot key 28 others pass: lru always misses; arc learns what comes back. */
static unsigned hits_under_a_scan(const char *policy) {
    enum { CACHE = 16, HOT = 8, USES = 4000 };
    static struct cst_evict_entry entries[USES];
    struct cst_evict e;
    unsigned hits = 0, hot = 0, scan = HOT;

    memset(entries, 0, sizeof(entries));
    cst_evict_init(&e, cst_evict_by_name(policy));
    e.room = SIZE_MAX;
    for (unsigned i = 0; i < USES; i++) {
        unsigned key = i % 5 < 2 ? hot++ % HOT : scan++;
        struct cst_evict_entry *entry = &entries[key];

        entry->hash = key;
        if (entry->in) {
            hits++;
            e.ops->remove(&e, entry, false);
            e.ops->insert(&e, entry, CST_EVICT_USED);
            continue;
        }
        if (e.n[0] + e.n[1] == CACHE)
            e.ops->remove(&e, e.ops->victim(&e, NULL), true);
        e.ops->insert(&e, entry, CST_EVICT_NEW);
    }
    finish(&e, entries, USES);
    return hits;
}

static void arc_resists_a_scan(void **state) {
    assert_int_equal(hits_under_a_scan("lru"), 0);
    assert_true(hits_under_a_scan("arc") >= 1200); /* of 1600 */
}

static void ghosts_stay_in_their_room(void **state) {
    struct cst_evict_entry entries[KEYS] = { 0 };
    struct cst_evict e;

    cst_evict_init(&e, &cst_evict_arc);
    for (unsigned i = 0; i < KEYS; i++) {
        entries[i].hash = i;
        e.ops->insert(&e, &entries[i], CST_EVICT_NEW);
    }
    for (e.room = 0; e.n[0] > KEYS / 2;) /* no room: no ghosts */
        e.ops->remove(&e, e.ops->victim(&e, NULL), true);
    assert_int_equal(cst_evict_bytes(&e), 0);
    cst_fault_join();
    cst_fault_arm(CST_FAULT_ALLOC, 1, 2); /* no memory: no ghost, no harm */
    e.room = SIZE_MAX;
    e.ops->remove(&e, e.ops->victim(&e, NULL), true);
    e.ops->remove(&e, e.ops->victim(&e, NULL), true);
    cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
    cst_fault_leave();
    assert_int_equal(e.n_ghosts[0], 0);
    e.ops->remove(&e, e.ops->victim(&e, NULL), true);
    assert_int_equal(e.n_ghosts[0], 1);
    assert_true(cst_evict_bytes(&e) > 0);
    assert_true(cst_evict_forget(&e));
    assert_false(cst_evict_forget(&e));
    finish(&e, entries, KEYS);
}

static void policies_have_names(void **state) {
    assert_ptr_equal(cst_evict_by_name("lru"), &cst_evict_lru);
    assert_ptr_equal(cst_evict_by_name("arc"), &cst_evict_arc);
    assert_ptr_equal(cst_evict_by_name("s3fifo"), &cst_evict_s3fifo);
    assert_ptr_equal(cst_evict_by_name("cost"), &cst_evict_cost);
    assert_null(cst_evict_by_name("fifo"));
    assert_null(cst_evict_by_name(""));
}

int main(void) {
    struct CMUnitTest tests[CST_COUNT(rules) + 4] = {
        cmocka_unit_test(few_entries_go_by_recency),
        cmocka_unit_test(arc_resists_a_scan),
        cmocka_unit_test(ghosts_stay_in_their_room),
        cmocka_unit_test(policies_have_names),
    };

    for (size_t i = 0; i < CST_COUNT(rules); i++)
        tests[4 + i] = (struct CMUnitTest){ .name = rules[i].name,
                                            .test_func = equals_the_reference,
                                            .initial_state = (void *)(uintptr_t)&rules[i] };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
