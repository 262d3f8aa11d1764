/* SPDX-License-Identifier: Apache-2.0 */
/* Status numbers, names and sentences from status.def. No state, any thread. */
#include "proto/status.h"

#include <errno.h>

const char *cst_status_text(int status) {
    switch (status) {
#define X(NAME, number, text)                                                                      \
    case number:                                                                                   \
        return text;
#include "proto/status.def"
#undef X
    default:
        return "unknown status";
    }
}

const char *cst_status_name(int status) {
    switch (status) {
#define X(NAME, number, text)                                                                      \
    case number:                                                                                   \
        return #NAME;
#include "proto/status.def"
#undef X
    default:
        return "UNKNOWN";
    }
}

int cst_status_from_errno(int r) {
    switch (r) {
    case 0:
        return CST_STATUS_OK;
    case -ENOMEM:
        return CST_STATUS_NO_MEMORY;
    case -EMFILE:
    case -ENFILE:
        return CST_STATUS_BUSY;
    case -EMSGSIZE:
        return CST_STATUS_TOO_LARGE;
    default:
        return CST_STATUS_INTERNAL;
    }
}
