/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns nothing: accounts lie in what they belong to.
 * Invariant: used[r] of an account is the sum of the live charges that name it.
 */
#include "daemon/quota.h"

#include "base/macros.h"

#include <assert.h>
#include <stddef.h>

uint64_t cst_quota_room(const struct cst_payer *payer, enum cst_resource resource) {
    uint64_t room = UINT64_MAX;

    for (int level = 0; level < CST_LEVELS; level++) {
        uint64_t used = payer->accounts[level]->used[resource];
        uint64_t max = payer->limits->max[resource][level];

        room = CST_MIN(room, used < max ? max - used : 0);
    }
    return room;
}

int cst_charge_take(struct cst_charge *charge, struct cst_payer *payer, enum cst_resource resource,
                    uint64_t amount) {
    assert(!charge->payer);
    for (int level = 0; level < CST_LEVELS; level++) {
        uint64_t used = payer->accounts[level]->used[resource];
        uint64_t max = payer->limits->max[resource][level];

        if (used > max || amount > max - used)
            return CST_QUOTA_E_FULL;
    }
    for (int level = 0; level < CST_LEVELS; level++)
        payer->accounts[level]->used[resource] += amount;
    *charge = (struct cst_charge){ .payer = payer, .amount = amount, .resource = resource };
    return 0;
}

void cst_charge_drop(struct cst_charge *charge) {
    struct cst_payer *payer = charge->payer;

    if (!payer)
        return;
    for (int level = 0; level < CST_LEVELS; level++) {
        assert(payer->accounts[level]->used[charge->resource] >= charge->amount);
        payer->accounts[level]->used[charge->resource] -= charge->amount;
    }
    *charge = CST_CHARGE_NULL;
}
