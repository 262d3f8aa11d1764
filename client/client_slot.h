/* SPDX-License-Identifier: Apache-2.0 */
/* Reserving slots and ending them, for the library's own use; the lock as said. */
#pragma once

#include "client/client.h"

/* Whether so many token ids make n > 0 blocks of the space; error set if not. */
int32_t cst_reserve_check(const cistern_space *space, const uint32_t *tokens, size_t n_tokens,
                          size_t n);

/* As cistern_reserve(), without checks; *busy_ms is the daemon's largest hint when to come again.
 * Takes the lock itself. */
int32_t cst_reserve(cistern_space *space, const uint8_t *parent, const uint8_t *keys,
                    const uint32_t *tokens, size_t n_tokens, size_t n, cistern_slot **slots,
                    int32_t *statuses, uint32_t *busy_ms);

/* Lock held. The slot belongs to the current connection. */
bool cst_slot_is_live(const cistern_slot *slot);

/* Lock held. Ends the handle; the daemon is not told. */
void cst_slot_put(cistern_slot *slot);

/* Lock held. Gives slots back without waiting; n ids of 8 bytes. */
void cst_slot_post_abort(cistern_client *c, uint8_t *ids, size_t n);

/* Lock held. A Reserve that its caller no longer waits for: gives the slots back. */
void cst_slot_late_reply(cistern_client *c, const struct cst_packet *packet);
