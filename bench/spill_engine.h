/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The disk tier's engine as spill.* drives it: frames are written one after the other into a tier
 * that wraps around, and the last ones are read back. The oldest frames go first and none is moved.
 *
 * Functions return 0 or a negative errno. One thread, beside the workers of bench/bench_pool.h.
 */
#pragma once

#include "store/seg.h"

enum {
    SPILL_BATCH = 128, /* frames: what it takes to begin and to end is a small part */
    SPILL_READ_DEPTH = 16,
    SPILL_WRITE_DEPTH = 4,
};
#define SPILL_FRAME ((size_t)3 << 19)
#define SPILL_BUFFER (2 * SPILL_FRAME) /* of a read: a frame, its header, up to a whole chunk */
#define SPILL_TIER ((uint64_t)1 << 30)

/* Memory that engines share; what they read goes to the same place. */
struct spill_frames {
    uint8_t *frames, *buffers; /* SPILL_BATCH of SPILL_FRAME, SPILL_BUFFER bytes */
    uint32_t crc[SPILL_BATCH];
};
#define SPILL_FRAMES_NULL ((struct spill_frames){ .frames = NULL })

int spill_frames_init(struct spill_frames *frames);
void spill_frames_deinit(struct spill_frames *frames);

struct spill_engine;

/* In a directory of its own, in $CISTERN_BENCH_DIR, else in the current one. Two with the same
 * cipher that write the same frames make the same files. frames outlive it. */
int spill_engine_new(struct spill_engine **out, const struct spill_frames *frames,
                     enum cst_aio_kind kind, enum cst_seg_crypt crypt);
/* Removes the directory. NULL ok, returns NULL. */
struct spill_engine *spill_engine_free(struct spill_engine *engine);

const char *spill_engine_dir(const struct spill_engine *engine);
/* n more frames, until all of them exist. */
int spill_engine_write(struct spill_engine *engine, size_t n);
/* Until nothing is under way: indexes of closed segments, new ones. */
void spill_engine_settle(struct spill_engine *engine);
/* The last SPILL_BATCH frames, all asked for at once. */
int spill_engine_read(struct spill_engine *engine);
