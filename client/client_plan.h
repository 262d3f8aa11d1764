/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many keys one request carries, and where: in the packet when they fit, else in the staging
 * slab with a ListRef. The daemon copies a list before it answers, so its place is free again after
 * the call.
 */
#pragma once

#include "client/client.h"
#include "proto/frame.h"

struct cst_plan {
    /* asked */
    size_t n;           /* keys that remain; > 0 */
    size_t key_bytes;   /* of lists in the request, a key */
    size_t reply_bytes; /* of the answer, a key */
    size_t other_bytes; /* of all other fields that grow */
    enum cst_need need; /* at least; CST_NEED_LISTS in the answer: lay the lists */
    bool in_packet;     /* never in staging */
    /* answered */
    size_t take; /* keys of this request, > 0 */
};

/* cst_enter() and the plan; leave with plan->need. */
int32_t cst_plan_enter(cistern_client *c, cistern_space *space, struct cst_plan *plan);

/* Copies a list behind the `*used` bytes of this request's lists and fills ref. */
void cst_plan_lay(cistern_client *c, Cistern__V1__ListRef *ref, size_t *used, const void *data,
                  size_t size);
