/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Eviction policies against references that keep plain arrays and move everything by hand, on
 * random traces; and what arc is for: a scan must not push out what is used again.
 */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "base/random.h"
#include "store/evict.h"

#include <string.h>

enum { KEYS = 64, STEPS = 60000 };

/* ---- the reference: hashes in arrays, oldest first ---- */

struct array {
    uint64_t at[KEYS];
    size_t n;
};

struct reference {
    bool arc;
    struct array lists[2], ghosts[2]; /* arc: once, again; lru: the first only */
    size_t target;
    bool frequent[KEYS];
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

static void ref_insert(struct reference *r, uint64_t key, enum cst_evict_how how) {
    struct array *list;

    if (how == CST_EVICT_NEW) {
        size_t b1 = r->ghosts[0].n, b2 = r->ghosts[1].n, c = r->lists[0].n + r->lists[1].n + 1;

        r->frequent[key] = false;
        if (take(&r->ghosts[0], key)) {
            size_t step = b2 / b1 > 1 ? b2 / b1 : 1;

            r->target = r->target + step < c ? r->target + step : c;
            r->frequent[key] = true;
        } else if (take(&r->ghosts[1], key)) {
            size_t step = b1 / b2 > 1 ? b1 / b2 : 1;

            r->target = r->target > step ? r->target - step : 0;
            r->frequent[key] = true;
        }
    } else if (how == CST_EVICT_USED) {
        r->frequent[key] = true;
    }
    list = &r->lists[r->arc && r->frequent[key]];
    put_at(list, how == CST_EVICT_COLD ? 0 : list->n, key);
}

static void ref_remove(struct reference *r, uint64_t key, bool evicted) {
    size_t all = r->lists[0].n + r->lists[1].n;
    int list = take(&r->lists[0], key) ? 0 : 1;

    if (list)
        assert_true(take(&r->lists[1], key));
    if (!evicted || !r->arc)
        return;
    (void)(take(&r->ghosts[0], key) || take(&r->ghosts[1], key)); /* one ghost a key */
    while (r->ghosts[0].n + r->ghosts[1].n >= all) {
        struct array *longer = &r->ghosts[r->ghosts[0].n < r->ghosts[1].n];

        if (!longer->n)
            return;
        (void)take(longer, longer->at[0]);
    }
    put_at(&r->ghosts[list], r->ghosts[list].n, key);
}

/* The i-th best victim; KEYS: none. */
static uint64_t ref_victim(const struct reference *r, size_t i) {
    int first = !(r->lists[0].n && (r->lists[0].n > r->target || !r->lists[1].n));

    if (i < r->lists[first].n)
        return r->lists[first].at[i];
    i -= r->lists[first].n;
    return i < r->lists[!first].n ? r->lists[!first].at[i] : KEYS;
}

/* ---- the trace ---- */

struct trace {
    struct cst_evict e;
    struct reference ref;
    struct cst_evict_entry entries[KEYS];
    struct cst_seeded_random rng;
};

static uint64_t key_of(const struct trace *t, const struct cst_evict_entry *entry) {
    return entry ? (uint64_t)(entry - t->entries) : KEYS;
}

static void check_order(struct trace *t) {
    struct cst_evict_entry *v = NULL;

    for (size_t i = 0;; i++) {
        v = t->e.ops->victim(&t->e, v);
        assert_int_equal(key_of(t, v), ref_victim(&t->ref, i));
        if (!v)
            break;
    }
    assert_int_equal(t->e.n[0] + t->e.n[1], t->ref.lists[0].n + t->ref.lists[1].n);
}

static void step(struct trace *t) {
    uint64_t r = cst_seeded_random_next(&t->rng), key = r % KEYS;
    struct cst_evict_entry *entry = &t->entries[key];
    unsigned what = (unsigned)(r >> 32) % 8;

    if (!entry->in) {
        enum cst_evict_how how = what < 5   ? CST_EVICT_NEW
                                 : what < 6 ? CST_EVICT_WARM
                                            : CST_EVICT_COLD;

        entry->hash = key;
        t->e.ops->insert(&t->e, entry, how);
        ref_insert(&t->ref, key, how);
    } else if (what < 4) {
        t->e.ops->remove(&t->e, entry, false);
        t->e.ops->insert(&t->e, entry, CST_EVICT_USED);
        ref_remove(&t->ref, key, false);
        ref_insert(&t->ref, key, CST_EVICT_USED);
    } else if (what < 7) {
        struct cst_evict_entry *v = t->e.ops->victim(&t->e, NULL);

        key = key_of(t, v);
        t->e.ops->remove(&t->e, v, true);
        ref_remove(&t->ref, key, true);
    } else {
        t->e.ops->remove(&t->e, entry, false);
        ref_remove(&t->ref, key, false);
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

static void equals_the_reference(const char *policy) {
    struct trace t = { .ref.arc = !strcmp(policy, "arc") };

    cst_seeded_random_init(&t.rng, 11);
    cst_evict_init(&t.e, cst_evict_by_name(policy));
    t.e.room = SIZE_MAX;
    for (unsigned i = 0; i < STEPS; i++) {
        step(&t);
        check_order(&t);
        assert_int_equal(t.e.target, t.ref.target);
        assert_int_equal(t.e.n_ghosts[0], t.ref.ghosts[0].n);
        assert_int_equal(t.e.n_ghosts[1], t.ref.ghosts[1].n);
    }
    finish(&t.e, t.entries, KEYS);
}

static void lru_equals_the_reference(void **state) {
    equals_the_reference("lru");
}

static void arc_equals_the_reference(void **state) {
    equals_the_reference("arc");
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
    assert_true(e.ops->forget(&e));
    assert_false(e.ops->forget(&e));
    finish(&e, entries, KEYS);
}

static void policies_have_names(void **state) {
    assert_ptr_equal(cst_evict_by_name("lru"), &cst_evict_lru);
    assert_ptr_equal(cst_evict_by_name("arc"), &cst_evict_arc);
    assert_null(cst_evict_by_name("fifo"));
    assert_null(cst_evict_by_name(""));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lru_equals_the_reference), cmocka_unit_test(arc_equals_the_reference),
        cmocka_unit_test(arc_resists_a_scan),       cmocka_unit_test(ghosts_stay_in_their_room),
        cmocka_unit_test(policies_have_names),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
