/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads the files of a disk tier (docs/disk-format.md) and says what is in them and what fails a
 * check. Shares store/seg_format.h with the engine, and no code. Nothing is trusted, nothing
 * is written, keys are never shown. One thread.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A file, or bytes in memory. */
struct cst_dump_file {
    const char *name; /* without its folder */
    uint64_t size;
    /* False: these bytes can't be read. Only called within size. */
    bool (*read)(void *arg, uint64_t offset, void *out, size_t n);
    void *arg;
};

enum cst_dump_form { CST_DUMP_TEXT, CST_DUMP_JSON, CST_DUMP_SILENT };

struct cst_dump {
    enum cst_dump_form form;
    bool records; /* a line for each record, too */
    uint64_t lines, bad;
    /* of the superblock, if it was read before */
    bool has_super;
    uint8_t uuid[16];
    uint64_t segment_bytes;
};

/* By its name; another name: nothing. Prints to stdout. */
void cst_dump(struct cst_dump *d, const struct cst_dump_file *file);
