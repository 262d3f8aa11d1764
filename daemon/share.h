/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which clients hold the descriptor of which slab. A mapping can't be taken back: when the store
 * retires a slab its holders are asked (SlabRetire), and until they answer the memory is theirs.
 * Loop thread.
 */
#pragma once

#include "daemon/session.h"
#include "store/store.h"

/* The session gets the slab's descriptor now. Safe twice. 0, CST_QUOTA_E_FULL, -ENOMEM. */
int cst_share_hold(struct cst_session *session, struct cst_slab *slab);

/* The client has unmapped it. Unknown ids are ignored. */
void cst_share_drop(struct cst_session *session, uint32_t slab_id);
void cst_share_drop_all(struct cst_session *session);

/* Clients know slabs by other numbers than the store, which counts them through: a count would tell
 * a user how much the others store. One to one, keyed by server->seed; never 0. */
uint32_t cst_share_number(struct cst_server *server, uint32_t slab_id);
uint32_t cst_share_slab_id(const struct cst_server *server, uint32_t number);

/* The store wants the slab's memory back. */
void cst_share_retire(struct cst_server *server, struct cst_slab *slab);

/* server->retire_timer: ends the connections of users over held_per_uid that owe answers for
 * longer than retire_timeout, oldest first. */
void cst_share_check(struct cst_timer *timer);

/* Retired bytes that clients of this user hold. */
uint64_t cst_share_held_bytes(struct cst_server *server, const struct cst_tenant *user);
