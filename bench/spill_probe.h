/* SPDX-License-Identifier: Apache-2.0 */
/* A bare io_uring loop over the segment files of a directory: what the disk gives to a program that
 * does nothing else. It writes the same frames as the engine, from where they are, and reads into
 * the same buffers. One ring, registered buffers and files, O_DIRECT where the file system knows
 * it, no sync, a chunk between two frames: as the engine writes, and where it writes. What was
 * there is lost. */
#pragma once

#include "bench/spill_engine.h"

#include <stdbool.h>
#include <stddef.h>

struct spill_probe;

/* 0 or a negative errno: io_uring is refused. */
int spill_probe_allowed(void);
int spill_probe_new(struct spill_probe **out, const char *dir, const struct spill_frames *frames);
/* NULL ok, returns NULL. */
struct spill_probe *spill_probe_free(struct spill_probe *probe);
/* Writes the next SPILL_BATCH frames, or reads those that were written last. */
int spill_probe_run(struct spill_probe *probe, bool write);
