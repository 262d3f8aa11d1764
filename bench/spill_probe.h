/* SPDX-License-Identifier: Apache-2.0 */
/* A bare io_uring loop over one file: what the disk gives to a program that does nothing else.
 * Registered buffers and file, O_DIRECT where the file system knows it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct spill_probe;

/* 0 or a negative errno: io_uring is refused. */
int spill_probe_allowed(void);
/* Writes the whole file once. */
int spill_probe_new(struct spill_probe **out, const char *dir, size_t block, unsigned read_depth,
                    unsigned write_depth, uint64_t file_bytes);
struct spill_probe *spill_probe_free(struct spill_probe *probe);
/* The next n blocks; reads those that were written last. */
int spill_probe_run(struct spill_probe *probe, bool write, size_t n, double *seconds);
