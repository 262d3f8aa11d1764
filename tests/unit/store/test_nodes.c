/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of nodes that is made ahead: how much, when, and that it goes back. */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "tests/unit/store/store_world.h"

static const uint64_t MUCH = UINT64_C(1) << 30, PIECE = 32 << 20;

static struct world *glass(uint64_t memory) {
    return world_new(&(struct world_options){
        .seed = 1, .memory = memory, .index = memory, .manual_jobs = true });
}

static size_t ahead(const struct world *w) {
    return cst_pool_ahead(&w->store->nodes);
}

static void two_pieces_at_most(void **state) {
    struct world *w = glass(2 * MUCH);

    cst_nodes_ahead(w->store, MUCH);
    cst_nodes_ahead(w->store, MUCH); /* under way */
    assert_int_equal(cst_store_jobs(w->store), 1);
    for (unsigned i = 1; i <= 4; i++) {
        cst_nodes_ahead(w->store, MUCH);
        world_settle(w);
        assert_int_equal(cst_store_jobs(w->store), 0);
        assert_int_equal(ahead(w), CST_MIN(i, 2) * PIECE);
    }
    cst_nodes_ahead(w->store, 0);
    assert_int_equal(ahead(w), 0);
    world_free(w);
}

static void nodes_come_from_it(void **state) {
    struct world *w = glass(2 * MUCH);
    struct cst_space *s = world_space(w, "a", 1, CST_KIND_FLAT, CST_CLASS_LOSSLESS);
    uint8_t key[32] = { 1 };

    cst_nodes_ahead(w->store, MUCH);
    world_settle(w);
    assert_int_equal(world_store(w, s, NULL, false, key, NULL, 0), 0);
    assert_in_range(ahead(w), PIECE - CST_POOL_PAGE, PIECE - 1);
    cst_nodes_ahead(w->store, 0);
    assert_in_range(ahead(w), 1, CST_POOL_PAGE - 1); /* what lies beside the node */
    assert_true(world_present(s, key, 1));
    world_end(w, s);
}

/* Memory that arrives when nobody waits for it any more. */
static void what_comes_late_goes_back(void **state) {
    struct world *w = glass(2 * MUCH);

    cst_nodes_ahead(w->store, MUCH);
    cst_nodes_ahead(w->store, 0);
    world_settle(w);
    assert_int_equal(ahead(w), 0);
    world_free(w);
}

static void few_nodes_and_little_memory_make_none(void **state) {
    struct world *w = glass(2 * MUCH);

    cst_nodes_ahead(w->store, PIECE - 1);
    assert_int_equal(cst_store_jobs(w->store), 0);
    world_free(w);
    w = glass(PIECE / 2);
    cst_nodes_ahead(w->store, MUCH);
    assert_int_equal(cst_store_jobs(w->store), 0);
    world_free(w);
}

static void without_memory_there_is_none(void **state) {
    struct world *w = glass(2 * MUCH);

    cst_nodes_ahead(w->store, MUCH);
    cst_fault_join();
    cst_fault_arm(CST_FAULT_ALLOC, 1, 1);
    world_settle(w);
    cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
    cst_fault_leave();
    assert_int_equal(ahead(w), 0);
    cst_nodes_ahead(w->store, MUCH); /* once more */
    world_settle(w);
    assert_int_equal(ahead(w), PIECE);
    world_free(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_pieces_at_most),
        cmocka_unit_test(nodes_come_from_it),
        cmocka_unit_test(what_comes_late_goes_back),
        cmocka_unit_test(few_nodes_and_little_memory_make_none),
        cmocka_unit_test(without_memory_there_is_none),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
