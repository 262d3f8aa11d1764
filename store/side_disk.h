/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Side data on disk: a version is written in parts before the first frame that needs it, stays
 * there as long as a frame on disk needs it, and is read again after recovery. Writing:
 * side_disk.c; a start: side_load.c. Loop thread only.
 */
#pragma once

#include "store/seg.h"

#include <stdbool.h>
#include <stdint.h>

struct cst_cold;
struct cst_side_data;
struct cst_space;
struct cst_store;

enum { CST_SIDE_PART = 128 << 10 }; /* half of the smallest segment */

struct cst_side_part {
    struct cst_side_data *side;
    struct cst_seg_ref ref; /* none: CST_SEG_REF_NONE */
};

/* What is on disk of a version. */
struct cst_side_disk {
    struct cst_seg_store store; /* under way if `writing` */
    bool writing;
    bool counted; /* in cold->side_bytes */
    bool waiting; /* for a part of the tier */
    bool refused; /* never again: it doesn't fit, or was lost too often */
    bool noted;   /* the operator was told */
    uint32_t n_parts, n_stored;
    uint32_t n_lost;            /* parts, ever */
    uint64_t total, generation; /* the latter of the youngest record that was found */
    uint8_t hash[32];
    struct cst_side_part part[];
};

/* NULL: no memory. */
struct cst_side_disk *cst_side_disk_new(struct cst_side_data *side, uint64_t total,
                                        const uint8_t hash[32]);
uint64_t cst_side_part_bytes(const struct cst_side_disk *d, uint32_t part);
static inline uint32_t cst_side_parts(uint64_t total) {
    return (uint32_t)((total + CST_SIDE_PART - 1) / CST_SIDE_PART);
}
/* It takes its part of the tier. */
void cst_side_disk_count(struct cst_cold *c, struct cst_side_disk *d);
/* The version ends, or what is on disk isn't it: its records go. */
void cst_side_disk_free(struct cst_side_data *side);

/* 0: the whole version is stored. Else a condition of cst_seg_store(): CST_SEG_E_BUSY when it is
 * being written (one of space->spills then), CST_SEG_E_TOO_BIG when the tier has no place for it.
 */
int cst_side_disk_ready(struct cst_side_data *side);
/* The tier has no place for it: frames that need it stay in memory. */
bool cst_side_disk_is_out(const struct cst_side_data *side);
uint64_t cst_side_disk_n_out(const struct cst_space *space); /* versions that are */
/* Writes what is missing of versions that are on disk. 0 or the last condition. */
int cst_side_disk_slice(struct cst_store *store);
/* Parts that the space's versions on disk lack. */
uint64_t cst_side_disk_missing(const struct cst_space *space);
/* Of the space's versions on disk the oldest is given up with its frames there, so that there is
 * room for others. Never the newest of all. False: there is none. */
bool cst_side_disk_give_up(struct cst_space *space);
/* The version can't be had any more: what is on disk needs it in vain. */
void cst_side_disk_drop_frames(struct cst_side_data *side, bool damaged);
/* A record that needs it is of use: all of it is on disk, or what is missing will be. */
bool cst_side_disk_holds(const struct cst_side_data *side);

/* Recovery: a record of side data; as cst_seg_user.found(). */
int cst_side_load_found(struct cst_space *space, const struct cst_seg_record *r,
                        struct cst_seg_ref ref, void **owner);
/* Recovery: the version that a block needs, whose records may still come. NULL: there is no room
 * for it, or the number can't be. */
struct cst_side_data *cst_side_load_wanted(struct cst_space *space, uint64_t version);
/* All records are told: reads what was found, then calls cst_cold_recovered(). Blocks whose side
 * data are missing or wrong are gone then. */
void cst_side_load(struct cst_cold *c);

/* ---- side_keep.c ---- */

/* Until cst_side_keep_end(): records of frames and side data that are given up stay on disk for the
 * next start, if there is a place for these side data (NULL: there isn't). */
void cst_side_keep_begin(struct cst_cold *c, const struct cst_side_disk *d);
void cst_side_keep_end(struct cst_cold *c);
/* side_bytes: of the version's part, 0 of a frame. False: it isn't kept, drop it. */
bool cst_side_keep(struct cst_cold *c, struct cst_seg_space *space, struct cst_seg_ref ref,
                   uint64_t side_bytes);
/* What is kept goes: of the space, or (NULL) of the namespace. */
void cst_side_kept_drop(struct cst_cold *c, const char *ns_name, const struct cst_seg_space *space,
                        bool destroy);
void cst_side_kept_free(struct cst_cold *c);
bool cst_side_keeps(const void *owner); /* an owner of this kind; then as below */
float cst_side_kept_value(void *owner, bool *has_children);
void cst_side_kept_moved(void *owner, struct cst_seg_ref ref);
void cst_side_kept_gone(void *owner);

/* Owners of records: blocks, parts of side data, or what is kept. */
void *cst_side_owner(struct cst_side_part *part);
bool cst_side_owns(const void *owner);
float cst_side_value(void *owner, bool *has_children);
void cst_side_moved(void *owner, struct cst_seg_ref ref);
void cst_side_gone(void *owner);
