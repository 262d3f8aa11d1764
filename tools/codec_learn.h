/* SPDX-License-Identifier: Apache-2.0 */
/* The command learn, and side data from files. One thread. */
#pragma once

#include "codec/side.h"
#include "tools/codec_tool.h"

struct cst_tool_side {
    struct cst_side side;
    const struct cst_side *use; /* NULL: none */
    uint8_t *bytes, *heap;
};
#define CST_TOOL_SIDE_NULL ((struct cst_tool_side){ 0 })

/* path NULL: none. As the functions of codec_tool.h. */
int cst_tool_side_open(struct cst_tool_side *s, const char *path,
                       const struct cst_descriptor *desc);
void cst_tool_side_close(struct cst_tool_side *s);

int cst_tool_learn(const struct cst_tool_options *options);
