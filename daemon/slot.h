/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slots: places in staging that a client fills, each an open put of the store, and the commits
 * that publish them. Loop thread.
 */
#pragma once

#include "daemon/handle.h"
#include "proto/record.h"
#include "store/store.h"

struct cst_slot_request {
    const uint8_t *parent; /* NULL in flat spaces */
    bool is_root;
    const uint8_t *key;
    const uint32_t *tokens;
    uint32_t n_tokens;
};

/* Opens a put and fills the record. Returns its status. The staging slab is there. */
int cst_slot_reserve(struct cst_handle *handle, const struct cst_slot_request *request,
                     struct cst_slot_record *record);

/* Commits n slots (u64le ids); surprisals: f16 of all their tokens in order, or NULL. Answers
 * request `id` of the session when the last one is done. CST_STATUS_OK, or the status with which
 * the caller fails the whole request. */
int cst_slot_commit(struct cst_session *session, uint32_t request, const uint8_t *ids, size_t n,
                    const uint16_t *surprisals);
/* Tokens of a slot; 0 for an unknown one. */
uint32_t cst_slot_tokens(const struct cst_session *session, uint64_t id);

/* Slots whose commit is under way are left alone; unknown ids are ignored. */
void cst_slot_abort(struct cst_session *session, uint64_t id);
void cst_slot_abort_all(struct cst_session *session);
