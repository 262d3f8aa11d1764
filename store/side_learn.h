/* SPDX-License-Identifier: Apache-2.0 */
/* When a space learns its side data, and from what. Loop thread only. */
#pragma once

#include "codec/codec.h"

#include <stdbool.h>
#include <stdint.h>

struct cst_space;
struct cst_store;

/* How well the newest version fits what comes in: moving averages over frames made with it. */
struct cst_drift {
    uint32_t version, frames;
    float bytes_first, bytes, error_first, error, missed;
};

/* How far a look at a space's blocks has come, from the oldest on. */
struct cst_learn_pass {
    uint64_t after; /* seq of the last one */
    uint32_t seen, tokens;
};

/* Tokens of raw blocks when `of` blocks had been stored, if known. */
struct cst_learn_count {
    struct cst_learn_pass pass;
    uint64_t of;
    uint32_t tokens;
    bool known;
};

/* A frame was made from `from` bytes with this preset's outcome; missed: its bound was missed
 * before a safer preset was taken. */
void cst_learn_note(struct cst_space *space, const struct cst_frame_info *info, bool missed);

/* Encoding may wait: there will soon be side data, or more to learn them from. */
bool cst_learn_waits(const struct cst_space *space);

/* Starts learning where there is enough to learn from, or a reason to learn again. Looks at a few
 * blocks a call. */
void cst_learn_slice(struct cst_store *store);

/* A purge: what is being learned from the space's blocks is given up. May end the space. */
void cst_learn_forget(struct cst_space *space);

/* The store ends: what is being learned is given up soon. */
void cst_learn_stop(struct cst_store *store);
