/* SPDX-License-Identifier: Apache-2.0 */
/* Side data on their way in and out (req_side.c). Loop thread only. */
#pragma once

#include "daemon/session.h"
#include "proto/record.h"

/* The newest versions of a space, CST_SIDES_MAX at most; returns how many. */
size_t cst_side_records(const struct cst_space *space, struct cst_side_record *out);

/* The end of the session: drops what has come so far; what is being checked ends by itself. */
void cst_upload_drop(struct cst_session *session);
