/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One thread-local sentence for both libraries: it lives in libcistern, which exports the one
 * function below for this library alone (version node CISTERN_PRIVATE, no promise to anybody else).
 */
#include "client/llama/llama_error.h"

#include "client/private.h"

#include <cistern/cistern.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int32_t cst_llama_fail(int32_t status, const char *fmt, ...) {
    char sentence[256];
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(sentence, sizeof(sentence), fmt, ap);
    va_end(ap);
    return cistern_private_fail(status, sentence);
}

int32_t cst_llama_fail_errno(int r, const char *what) {
    if (r == -ENOMEM)
        return cst_llama_fail(CISTERN_E_NO_MEMORY, "out of memory: %s", what);
    return cst_llama_fail(CISTERN_E_SYSTEM, "%s: %s", what, strerrordesc_np(-r));
}
