/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quotas. Whatever a client makes the daemon keep is a charge against four accounts at once: its
 * connection, its uid, its namespace and the whole daemon. A charge that does not fit everywhere is
 * refused and changes nothing. Loop thread only.
 */
#pragma once

#include <stdint.h>

enum { CST_QUOTA_E_FULL = 1 };

enum cst_resource {
    CST_RES_CONNECTIONS,
    CST_RES_SPACES, /* open handles */
    CST_RES_LEASES,
    CST_RES_SLOTS,
    CST_RES_STAGING,  /* bytes */
    CST_RES_REQUESTS, /* unanswered */
    CST_RES_OUTPUT,   /* bytes of queued replies and pushes */
    CST_RES_HOLDS,    /* descriptors of slabs that were passed on */
    CST_RES_SUBSCRIPTIONS,
    CST_RESOURCES
};

enum cst_level {
    CST_LEVEL_CONNECTION,
    CST_LEVEL_USER,
    CST_LEVEL_NAMESPACE,
    CST_LEVEL_TOTAL,
    CST_LEVELS
};

struct cst_limits {
    uint64_t max[CST_RESOURCES][CST_LEVELS]; /* what one charge looks at shares a cache line */
};

struct cst_account {
    uint64_t used[CST_RESOURCES];
};

struct cst_payer {
    const struct cst_limits *limits; /* may change at run time: only new charges see it */
    struct cst_account *accounts[CST_LEVELS];
};

/* Embedded in the thing that is charged for. */
struct cst_charge {
    struct cst_payer *payer; /* NULL: nothing charged */
    uint64_t amount;
    enum cst_resource resource;
};
#define CST_CHARGE_NULL ((struct cst_charge){ .payer = NULL })

/* The charge must be empty; the payer outlives it. 0 or CST_QUOTA_E_FULL. */
int cst_charge_take(struct cst_charge *charge, struct cst_payer *payer, enum cst_resource resource,
                    uint64_t amount);
void cst_charge_drop(struct cst_charge *charge); /* safe twice */

/* How much could be charged now. */
uint64_t cst_quota_room(const struct cst_payer *payer, enum cst_resource resource);
