/* SPDX-License-Identifier: Apache-2.0 */
/* Growable byte buffer with a cap fixed at init: no input makes it grow past that. */
#pragma once

#include "base/macros.h"

#include <stddef.h>
#include <stdint.h>

enum { CST_BUF_E_FULL = 1 }; /* the cap is reached; the buffer is unchanged */

struct cst_buf {
    uint8_t *data;
    size_t len, cap, max;
};

#define CST_BUF_NULL(limit) ((struct cst_buf){ .max = (limit) })

void cst_buf_deinit(struct cst_buf *b);

/* 0, CST_BUF_E_FULL or -ENOMEM. */
int cst_buf_append(struct cst_buf *b, const void *data, size_t n);
