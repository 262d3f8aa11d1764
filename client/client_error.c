/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns each thread's last error sentence, and the way from wire statuses to those of cistern.h.
 * Invariants: 1. a sentence is only written by its own thread: a thread that receives another
 * thread's answer hands the text over in the call; 2. a code that cistern.h does not list never
 * leaves the library.
 */
#include "client/client_error.h"

#include "client/private.h"

#include "proto/status.h"

#include <cistern/cistern.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

enum { LIBRARY_ONLY = 80 }; /* statuses from here on never come from a daemon */

static _Thread_local char last_error[CST_ERROR_TEXT];

int32_t cst_client_fail(int32_t status, const char *fmt, ...) {
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(last_error, sizeof(last_error), fmt, ap);
    va_end(ap);
    return status;
}

int32_t cst_client_fail_status(int32_t status) {
    return cst_client_fail(status, "%s", cst_status_text(-status));
}

static bool is_listed(uint32_t wire) {
    switch (wire) {
#define X(NAME, number, text) case number:
#include "proto/status.def"
#undef X
        return true;
    default:
        return false;
    }
}

int32_t cst_status_to_api(uint32_t wire) {
    switch (wire) {
    case CST_STATUS_BAD_TYPE:
        return CISTERN_E_UNSUPPORTED;
    case CST_STATUS_BAD_MAGIC: /* this library's packets were wrong, or the daemon thinks so */
    case CST_STATUS_BAD_LENGTH:
    case CST_STATUS_BAD_MESSAGE:
    case CST_STATUS_BAD_FDS:
        return CISTERN_E_INTERNAL;
    default:
        return is_listed(wire) && wire < LIBRARY_ONLY ? -(int32_t)wire : CISTERN_E_INTERNAL;
    }
}

CST_EXPORT const char *cistern_last_error(void) {
    return last_error;
}

CST_EXPORT const char *cistern_status_text(int32_t status) {
    return cst_status_text(status <= 0 && status > -1000 ? -status : -1);
}

CST_EXPORT int32_t cistern_private_fail(int32_t status, const char *sentence) {
    return cst_client_fail(status, "%s", sentence);
}
