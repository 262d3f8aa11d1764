/* SPDX-License-Identifier: Apache-2.0 */
/* Charges: taken at every level or at none, given back exactly once. */
#include "tests/lib/check.h"

#include "daemon/quota.h"

#include <string.h>

static struct cst_limits limits;
static struct cst_account accounts[CST_LEVELS];
static struct cst_payer payer;

static int setup(void **state) {
    memset(accounts, 0, sizeof(accounts));
    payer.limits = &limits;
    for (int level = 0; level < CST_LEVELS; level++) {
        payer.accounts[level] = &accounts[level];
        for (int r = 0; r < CST_RESOURCES; r++)
            limits.max[r][level] = 100;
    }
    return 0;
}

/* Whichever level is the tightest decides, and a refusal leaves no trace. */
static void the_tightest_level_decides(void **state) {
    for (int level = 0; level < CST_LEVELS; level++) {
        struct cst_charge a = CST_CHARGE_NULL, b = CST_CHARGE_NULL;

        (void)setup(NULL);
        limits.max[CST_RES_LEASES][level] = 10;
        assert_int_equal(cst_quota_room(&payer, CST_RES_LEASES), 10);
        assert_int_equal(cst_charge_take(&a, &payer, CST_RES_LEASES, 7), 0);
        assert_int_equal(cst_charge_take(&b, &payer, CST_RES_LEASES, 4), CST_QUOTA_E_FULL);
        for (int i = 0; i < CST_LEVELS; i++)
            assert_int_equal(accounts[i].used[CST_RES_LEASES], 7);
        assert_int_equal(cst_charge_take(&b, &payer, CST_RES_LEASES, 3), 0);
        assert_int_equal(cst_quota_room(&payer, CST_RES_LEASES), 0);
        assert_int_equal(cst_quota_room(&payer, CST_RES_SLOTS), 100);
        cst_charge_drop(&a);
        cst_charge_drop(&a);
        assert_int_equal(accounts[level].used[CST_RES_LEASES], 3);
        cst_charge_drop(&b);
        for (int i = 0; i < CST_LEVELS; i++)
            assert_int_equal(accounts[i].used[CST_RES_LEASES], 0);
    }
}

static void amounts_do_not_overflow(void **state) {
    struct cst_charge a = CST_CHARGE_NULL, b = CST_CHARGE_NULL;

    assert_int_equal(cst_charge_take(&a, &payer, CST_RES_STAGING, 60), 0);
    assert_int_equal(cst_charge_take(&b, &payer, CST_RES_STAGING, UINT64_MAX), CST_QUOTA_E_FULL);
    assert_int_equal(cst_charge_take(&b, &payer, CST_RES_STAGING, UINT64_MAX - 30),
                     CST_QUOTA_E_FULL);
    assert_int_equal(accounts[0].used[CST_RES_STAGING], 60);
}

/* A reload may lower a limit below what is used: nothing more goes in until enough came back. */
static void a_lowered_limit_holds(void **state) {
    struct cst_charge a = CST_CHARGE_NULL, b = CST_CHARGE_NULL;

    assert_int_equal(cst_charge_take(&a, &payer, CST_RES_REQUESTS, 50), 0);
    limits.max[CST_RES_REQUESTS][CST_LEVEL_USER] = 20;
    assert_int_equal(cst_quota_room(&payer, CST_RES_REQUESTS), 0);
    assert_int_equal(cst_charge_take(&b, &payer, CST_RES_REQUESTS, 1), CST_QUOTA_E_FULL);
    cst_charge_drop(&a);
    assert_int_equal(cst_charge_take(&b, &payer, CST_RES_REQUESTS, 20), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(the_tightest_level_decides, setup),
        cmocka_unit_test_setup(amounts_do_not_overflow, setup),
        cmocka_unit_test_setup(a_lowered_limit_holds, setup),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
