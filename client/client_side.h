/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Side data that this process needs to decode frames itself: fetched once a version, checked, kept
 * in the space.
 */
#pragma once

#include "codec/side.h"

#include <cistern/cistern.h>

struct cst_client_side;

/* The parsed version that frames with this check refer to; to be given back. Asks the daemon the
 * first time. Lock not held. Sets the thread's error. */
int32_t cst_client_side_get(cistern_space *space, uint32_t version, uint32_t check,
                            struct cst_client_side **out);
const struct cst_side *cst_client_side_parsed(const struct cst_client_side *side);
void cst_client_side_put(cistern_space *space, struct cst_client_side *side); /* NULL ok */

/* The space goes. */
void cst_client_side_free_all(cistern_space *space);
