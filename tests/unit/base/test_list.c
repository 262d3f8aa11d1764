/* SPDX-License-Identifier: Apache-2.0 */
/* The list against an array that is edited by hand. */
#include "tests/lib/check.h"

#include "base/list.h"
#include "base/random.h"

#include <string.h>

enum { ITEMS = 16 };

struct item {
    struct cst_list link;
    int id;
};

static void check_order(const struct cst_list *head, const int *ids, size_t n) {
    struct cst_list *it, *tmp;
    size_t at = 0;

    cst_list_for_each_safe (it, tmp, head) {
        assert_true(at < n);
        assert_int_equal(cst_list_entry(it, struct item, link)->id, ids[at++]);
        assert_ptr_equal(it->next->prev, it);
    }
    assert_int_equal(at, n);
    assert_int_equal(cst_list_is_empty(head), n == 0);
    assert_ptr_equal(cst_list_first(head), n ? head->next : NULL);
}

static size_t array_drop(int *ids, size_t n, int id) {
    size_t i = 0;

    while (i < n && ids[i] != id)
        i++;
    if (i == n)
        return n;
    memmove(ids + i, ids + i + 1, (n - i - 1) * sizeof(*ids));
    return n - 1;
}

static void equals_an_array(void **state) {
    struct cst_list head = CST_LIST_INIT(head);
    struct item items[ITEMS];
    struct cst_seeded_random rng;
    int ids[ITEMS];
    size_t n = 0;

    cst_seeded_random_init(&rng, 9);
    for (int i = 0; i < ITEMS; i++) {
        items[i].id = i;
        cst_list_init(&items[i].link);
    }
    for (int step = 0; step < 5000; step++) {
        int id = (int)(cst_seeded_random_next(&rng) % ITEMS);
        uint64_t what = cst_seeded_random_next(&rng) % 3;

        cst_list_unlink(&items[id].link); /* also when it is in no list */
        n = array_drop(ids, n, id);
        if (what == 1) {
            cst_list_append(&head, &items[id].link);
            ids[n++] = id;
        } else if (what == 2) {
            cst_list_prepend(&head, &items[id].link);
            memmove(ids + 1, ids, n++ * sizeof(*ids));
            ids[0] = id;
        }
        check_order(&head, ids, n);
    }
}

static void the_loop_body_may_unlink(void **state) {
    struct cst_list head = CST_LIST_INIT(head), *it, *tmp;
    struct item items[ITEMS];
    const int left[] = { 1, 3, 5, 7, 9, 11, 13, 15 };

    for (int i = 0; i < ITEMS; i++) {
        items[i].id = i;
        cst_list_append(&head, &items[i].link);
    }
    cst_list_for_each_safe (it, tmp, &head) {
        if (cst_list_entry(it, struct item, link)->id % 2 == 0)
            cst_list_unlink(it);
    }
    check_order(&head, left, CST_COUNT(left));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_an_array),
        cmocka_unit_test(the_loop_body_may_unlink),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
