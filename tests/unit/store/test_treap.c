/* SPDX-License-Identifier: Apache-2.0 */
/* The treap against a sorted array, and its depth under the order that ruins plain trees. */
#include "tests/lib/check.h"

#include "base/random.h"
#include "store/treap.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { MANY = 100000 };

struct item {
    struct cst_treap_node node;
    uint32_t key;
    bool in;
};

static int cmp(const struct cst_treap_node *node, const void *key) {
    uint32_t a = cst_container_of(node, struct item, node)->key, b = *(const uint32_t *)key;

    return a < b ? -1 : a > b;
}

static struct item *item(const struct cst_treap_node *node) {
    return node ? cst_container_of(node, struct item, node) : NULL;
}

static size_t depth(const struct cst_treap_node *n) {
    size_t d = 0;

    for (; n; n = n->up)
        d++;
    return d;
}

/* The model: a flag per key. */
static void check_all(const struct cst_treap *t, struct item *items, uint32_t n) {
    const struct cst_treap_node *node = cst_treap_first(t), *last = NULL;

    for (uint32_t i = 0; i < n; i++) {
        if (!items[i].in)
            continue;
        assert_ptr_equal(item(node), &items[i]);
        assert_ptr_equal(cst_treap_prev(node), last);
        assert_true(!node->up || node->up->priority >= node->priority);
        last = node;
        node = cst_treap_next(node);
    }
    assert_null(node);
}

static void check_bounds(const struct cst_treap *t, struct item *items, uint32_t n, uint32_t key) {
    struct item *floor = NULL, *ceil = NULL;

    for (uint32_t i = 0; i < n; i++) {
        if (items[i].in && items[i].key <= key)
            floor = &items[i];
        if (items[i].in && items[i].key >= key && !ceil)
            ceil = &items[i];
    }
    assert_ptr_equal(item(cst_treap_floor(t, cmp, &key)), floor);
    assert_ptr_equal(item(cst_treap_ceil(t, cmp, &key)), ceil);
}

static void equals_a_sorted_array(void **state) {
    enum { N = 200, STEPS = 20000 };
    struct item items[N] = { 0 };
    struct cst_treap t = { 0 };
    struct cst_seeded_random rng;

    cst_seeded_random_init(&rng, 3);
    for (uint32_t i = 0; i < N; i++)
        items[i].key = 2 * i + 1; /* even keys fall between */
    for (unsigned step = 0; step < STEPS; step++) {
        struct item *it = &items[cst_seeded_random_next(&rng) % N];

        if (it->in)
            cst_treap_remove(&t, &it->node);
        else
            cst_treap_insert(&t, &it->node, cst_seeded_random_next(&rng), cmp, &it->key);
        it->in = !it->in;
        check_bounds(&t, items, N, (uint32_t)(cst_seeded_random_next(&rng) % (2 * N + 2)));
        if (step % 16 == 0)
            check_all(&t, items, N);
    }
}

static void equal_priorities_still_work(void **state) {
    struct item items[64] = { 0 };
    struct cst_treap t = { 0 };

    for (uint32_t i = 0; i < 64; i++) {
        items[i].key = i;
        items[i].in = true;
        cst_treap_insert(&t, &items[i].node, 7, cmp, &items[i].key);
    }
    check_all(&t, items, 64);
    for (uint32_t i = 0; i < 64; i += 2) {
        cst_treap_remove(&t, &items[i].node);
        items[i].in = false;
    }
    check_all(&t, items, 64);
}

/* Ascending inserts; the expected depth of a node is about 2 ln n = 23. */
static void stays_flat(void **state) {
    struct item *items = calloc(MANY, sizeof(*items));
    struct cst_treap t = { 0 };
    struct cst_seeded_random rng;
    size_t sum = 0, most = 0;

    assert_non_null(items);
    cst_seeded_random_init(&rng, 9);
    for (uint32_t i = 0; i < MANY; i++) {
        items[i].key = i;
        cst_treap_insert(&t, &items[i].node, cst_seeded_random_next(&rng), cmp, &i);
    }
    for (uint32_t i = 0; i < MANY; i++) {
        size_t d = depth(&items[i].node);

        sum += d;
        most = CST_MAX(most, d);
    }
    assert_true(sum / MANY <= 30);
    assert_true(most <= 80);
    free(items);
}

static void an_empty_treap_has_nothing(void **state) {
    struct cst_treap t = { 0 };
    uint32_t key = 1;

    assert_null(cst_treap_first(&t));
    assert_null(cst_treap_floor(&t, cmp, &key));
    assert_null(cst_treap_ceil(&t, cmp, &key));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_a_sorted_array),
        cmocka_unit_test(equal_priorities_still_work),
        cmocka_unit_test(stays_flat),
        cmocka_unit_test(an_empty_treap_has_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
