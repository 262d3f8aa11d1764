/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns nothing; see client_plan.h. Invariants: 1. a plan is made from the limits of the connection
 * that it is used on, under one hold of the lock; 2. only the thread that entered with
 * CST_NEED_LISTS writes the list area of staging, so two requests never share it.
 */
#include "client/client_plan.h"

#include <assert.h>
#include <string.h>

enum { FIXED_BYTES = 256 }; /* header, tags and fields of constant size */

static size_t fit(size_t room, size_t used, size_t each) {
    return room > used ? (room - used) / each : 0;
}

static size_t most_keys(const cistern_client *c, const struct cst_plan *plan) {
    const struct cst_hello *hello = &c->conn.hello;
    size_t n = CST_MIN(plan->n, (size_t)hello->keys_max);

    n = CST_MIN(n, fit(hello->packet_max, FIXED_BYTES, plan->reply_bytes));
    if (plan->in_packet)
        n = CST_MIN(n, fit(hello->packet_max, FIXED_BYTES + plan->other_bytes, plan->key_bytes));
    return n;
}

static bool fits_packet(const cistern_client *c, const struct cst_plan *plan, size_t n) {
    return n * plan->key_bytes + plan->other_bytes + FIXED_BYTES <= c->conn.hello.packet_max;
}

/* Entered. */
static int32_t check_take(cistern_client *c, const struct cst_plan *plan) {
    if (plan->take)
        return CISTERN_OK;
    cst_leave(c, plan->need);
    return cst_client_fail(CISTERN_E_TOO_LARGE, "one key does not fit the daemon's limits");
}

int32_t cst_plan_enter(cistern_client *c, cistern_space *space, struct cst_plan *plan) {
    int32_t status = cst_enter(c, space, plan->need);

    if (status)
        return status;
    plan->take = most_keys(c, plan);
    if (fits_packet(c, plan, plan->take))
        return check_take(c, plan);
    cst_leave(c, plan->need);
    status = cst_enter(c, space, CST_NEED_LISTS);
    if (status)
        return status;
    plan->need = CST_NEED_LISTS;
    plan->take = CST_MIN(most_keys(c, plan),
                         (c->map.staging->size - c->map.staging->lists) / plan->key_bytes);
    return check_take(c, plan);
}

void cst_plan_lay(cistern_client *c, Cistern__V1__ListRef *ref, size_t *used, const void *data,
                  size_t size) {
    struct cst_staging *staging = c->map.staging;

    assert(staging->lists + *used + size <= staging->size);
    cistern__v1__list_ref__init(ref);
    ref->offset = staging->lists + *used;
    ref->length = size;
    memcpy(staging->data + ref->offset, data, size);
    *used += size;
}
