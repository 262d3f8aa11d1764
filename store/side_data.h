/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Side data of a space: versions of the tables that its frames refer to (codec/side.h). A version
 * never changes; it lives while it is the newest one, while a frame in memory or on disk refers to
 * it and while a job uses it. Loop thread only, but where a function says otherwise; what a version
 * holds is constant, so a job that holds a reference may read it.
 */
#pragma once

#include "base/list.h"
#include "codec/side.h"

#include <stddef.h>
#include <stdint.h>

struct cst_side_disk;
struct cst_space;

struct cst_side_data {
    struct cst_list link; /* space->sides, the newest first; unlinked: being made, or forgotten */
    struct cst_space *space;
    uint32_t refs; /* frames, records on disk and jobs */
    struct cst_side side;
    uint8_t *bytes; /* owned, `cap` of them */
    size_t cap;
    uint8_t *memory; /* owned: what is parsed, in so many bytes */
    size_t memory_cap;
    uint64_t counted;
    uint64_t epoch;             /* space->side_epoch when it was begun */
    bool published;             /* it is in space->sides */
    bool found;                 /* it is in space->sides_found */
    struct cst_side_disk *disk; /* side_disk.c; NULL: nothing of it is on disk */
};

/* NULL: none yet, or no such version. */
struct cst_side_data *cst_side_newest(const struct cst_space *space);
struct cst_side_data *cst_side_find(const struct cst_space *space, uint32_t version);

struct cst_side_data *cst_side_ref(struct cst_side_data *side);
/* May free it. NULL ok, returns NULL. */
struct cst_side_data *cst_side_unref(struct cst_side_data *side);

/* Begins a version of at most cap bytes: its memory counts from now on. 0; CST_STORE_E_LIMIT,
 * _BUSY; -ENOMEM. */
int cst_side_new(struct cst_side_data **out, struct cst_space *space, size_t cap);

/* The same for a version that recovery has found. */
int cst_side_reserve(struct cst_side_data *side, size_t cap);

/* Any thread: parses the first len of its bytes. 0 or a condition of codec/side.h. */
int cst_side_fill(struct cst_side_data *side, size_t len);

/* It was filled: it becomes the newest version, or is freed when the newest one is the same. 0 and
 * the version; CST_STORE_E_BAD_SIDE: its version is not above the newest one's; CST_STORE_E_LIMIT;
 * CST_STORE_E_BUSY: what it was made from was forgotten meanwhile. It stays the caller's then. */
int cst_side_publish(struct cst_side_data *side, uint32_t *version);

/* It was read from disk: it takes its place among the versions. 0; CST_STORE_E_BAD_SIDE: there is
 * one of its number; CST_STORE_E_LIMIT. */
int cst_side_restore(struct cst_side_data *side);

/* One that was not published. NULL ok, returns NULL. */
struct cst_side_data *cst_side_free(struct cst_side_data *side);

/* A purge: no version is one of the space's any more, nor becomes one that is being made. Numbers
 * are not given again. */
void cst_side_forget(struct cst_space *space);

/* The space goes: no frame, no job is left. */
void cst_side_free_all(struct cst_space *space);
