/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Leases: the right to read one block until it is given back or the connection ends. Loop thread.
 */
#pragma once

#include "base/hashmap.h"
#include "daemon/handle.h"
#include "daemon/quota.h"
#include "proto/record.h"
#include "store/store.h"

/* Leases key under id (or answers as before when id is held for the same key) and fills the
 * record, whatever the outcome. */
void cst_lease_acquire(struct cst_handle *handle, uint64_t id, const uint8_t key[32],
                       enum cst_fetch_mode mode, struct cst_lease_record *record);

/* Unknown ids are ignored: releasing is idempotent. */
void cst_lease_release(struct cst_session *session, uint64_t id);
void cst_lease_release_all(struct cst_session *session);

/* Pushes Ready for the fetches that ended in this turn: session->ready_flush. */
void cst_lease_flush_ready(struct cst_deferred *deferred);

/* Frees the server's spare lease objects. */
void cst_lease_deinit(struct cst_server *server);
