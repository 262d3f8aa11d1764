/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Subscriptions: what happens to the blocks of a space, pushed to those who asked. Loop thread.
 */
#pragma once

#include "daemon/handle.h"
#include "store/store.h"

/* Safe twice. 0, CST_QUOTA_E_FULL or -ENOMEM. */
int cst_event_subscribe(struct cst_handle *handle);
void cst_event_unsubscribe(struct cst_handle *handle);
void cst_event_unsubscribe_all(struct cst_session *session);

void cst_event_notify(struct cst_server *server, const struct cst_space *space, enum cst_event what,
                      const uint8_t key[32], enum cst_tier tier);
