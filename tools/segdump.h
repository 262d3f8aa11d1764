/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads the files of a disk tier (docs/disk-format.md) and says what is in them and what fails a
 * check. Shares store/seg_format.h with the engine, and no code. Nothing is trusted, nothing
 * is written, keys are never shown. With the root key, what is sealed is checked, too. One thread.
 */
#pragma once

#include "store/seg_format.h"

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

/* A namespace's key, from the file keys. */
struct cst_dump_key {
    uint8_t name[CST_DISK_NAMESPACE_MAX], length;
    uint8_t key[CST_DISK_KEY];
};

struct cst_dump {
    enum cst_dump_form form;
    bool records; /* a line for each record, too */
    bool has_root;
    uint8_t root[CST_DISK_KEY];
    uint64_t lines, bad;
    uint64_t unchecked, unchecked_bytes; /* sealed records without a key, and their bytes */
    bool wrong_root;                     /* the file keys was made with another one */
    struct cst_dump_key *keys;           /* owned */
    size_t n_keys;
    /* of the superblock, if it was read before */
    bool has_super;
    uint8_t uuid[16];
    uint64_t segment_bytes;
};

/* By its name; another name: nothing. Prints to stdout. The superblock comes first and the keys
 * before the segments, else those are not checked against them. */
/* False: its name is none of the disk tier's; nothing was said. */
bool cst_dump(struct cst_dump *d, const struct cst_dump_file *file);

/* Forgets all keys. */
void cst_dump_deinit(struct cst_dump *d);
