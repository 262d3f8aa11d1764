/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A space as one session opened it. Ids are of the session: no id reaches another client's space.
 * A closed handle lives while leases or slots of it do. Loop thread only.
 */
#pragma once

#include "daemon/quota.h"
#include "daemon/session.h"

struct cst_handle {
    struct cst_session *session;
    uint32_t id;
    struct cst_space *space; /* a reference */
    uint8_t root[32];        /* parent of every first block, from fingerprint and salt */
    bool view;               /* another namespace's: an administrator watches */
    bool writable;           /* false in the public namespace for those who may not fill it */
    bool closed;
    unsigned users; /* leases and slots */
    struct cst_charge charge;
};

/* Takes the caller's reference to the space on 0. CST_QUOTA_E_FULL, -ENOMEM. */
int cst_handle_new_consume(struct cst_handle **out, struct cst_session *session,
                           struct cst_space *space, const void *salt, uint32_t salt_len);
struct cst_handle *cst_handle_find(struct cst_session *session, uint32_t id); /* NULL: no such */
void cst_handle_close(struct cst_handle *handle);

void cst_handle_use(struct cst_handle *handle);
void cst_handle_unuse(struct cst_handle *handle); /* may free it */

/* Whether the session may map slabs of this space. */
bool cst_handle_reads(const struct cst_session *session, const struct cst_space *space);

/* The end of the session: closes all. */
void cst_handle_close_all(struct cst_session *session);
