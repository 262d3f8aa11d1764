/* SPDX-License-Identifier: Apache-2.0 */
/* What the commands of cistern-codec share. Functions return 0 or a negative errno and have said on
 * standard error what went wrong. One thread. */
#pragma once

#include "codec/codec.h"
#include "tools/tensor_file.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cst_tool_options {
    struct cst_encode_params params; /* tokens and first_position are set per block */
    uint32_t block_tokens;
    enum cst_keys keys;
    const char *folder, *out; /* out: NULL where the command doesn't write */
    const char *side;         /* file of side data; NULL: none */
    const char *steps;        /* learn: file with step weights; NULL: all are 1 */
    uint32_t text_tokens;     /* learn: of each text at most; 0: all */
    uint32_t rounds;          /* compare: in which what was decoded is coded again */
    bool no_predictors;       /* learn */
    char **names;             /* texts of the folder */
    size_t n_names;
};

int cst_tool_encode(const struct cst_tool_options *options);
int cst_tool_decode(const struct cst_tool_options *options);
int cst_tool_compare(const struct cst_tool_options *options);
int cst_tool_learn(const struct cst_tool_options *options); /* writes the file `out` */
/* names: files */
int cst_tool_inspect(const struct cst_tool_options *options);
