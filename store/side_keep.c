/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns records that this life has no use for and the next one may have: frames whose side data
 * couldn't be read or find no room in memory, and those side data. The index has no block of them.
 *
 * Invariants
 *   1. The engine's owner of such a record is its struct's address plus two: blocks have addresses
 *      that are multiples of four, parts of side data odd ones.
 *   2. Kept side data take at most a quarter of the tier, beside what side_disk.c writes. They are
 *      moved when their segment is emptied; kept frames are the first ones to go.
 *   3. An erase or a purge ends them: nobody knows what is in them.
 * Loop thread only.
 */
#include "base/mem.h"
#include "store/cold.h"
#include "store/side_disk.h"

#include <string.h>

enum { TAG = 2, SHARE = 4 };

struct kept {
    struct cst_list link; /* cold->kept */
    struct cst_cold *cold;
    struct cst_seg_space *space; /* lives while it has records */
    struct cst_seg_ref ref;
    uint64_t side_bytes; /* 0: a frame */
};

static struct kept *kept_of(void *owner) {
    return (struct kept *)(void *)((uint8_t *)owner - TAG);
}

static void end(struct kept *k) {
    k->cold->kept_bytes -= k->side_bytes;
    cst_list_unlink(&k->link);
    cst_free(k);
}

void cst_side_keep_begin(struct cst_cold *c, const struct cst_side_disk *d) {
    c->keeping = d && c->kept_bytes + d->total <= cst_seg_bytes(c->seg) / SHARE;
}

void cst_side_keep_end(struct cst_cold *c) {
    c->keeping = false;
}

bool cst_side_keep(struct cst_cold *c, struct cst_seg_space *space, struct cst_seg_ref ref,
                   uint64_t side_bytes) {
    struct kept *k = c->keeping && space ? cst_calloc(1, sizeof(*k)) : NULL;

    if (!k)
        return false;
    *k = (struct kept){ .cold = c, .space = space, .ref = ref, .side_bytes = side_bytes };
    cst_list_append(&c->kept, &k->link);
    c->kept_bytes += side_bytes;
    cst_seg_set_owner(c->seg, ref, (uint8_t *)k + TAG);
    return true;
}

bool cst_side_keeps(const void *owner) {
    return ((uintptr_t)owner & 3) == TAG;
}

float cst_side_kept_value(void *owner, bool *has_children) {
    *has_children = kept_of(owner)->side_bytes > 0;
    return *has_children ? -1 : 0;
}

void cst_side_kept_moved(void *owner, struct cst_seg_ref ref) {
    kept_of(owner)->ref = ref;
}

void cst_side_kept_gone(void *owner) {
    end(kept_of(owner));
}

void cst_side_kept_drop(struct cst_cold *c, const char *ns_name, const struct cst_seg_space *space,
                        bool destroy) {
    struct cst_list *it, *tmp;

    cst_list_for_each_safe (it, tmp, &c->kept) {
        struct kept *k = cst_list_entry(it, struct kept, link);
        struct cst_seg_space_info info;
        struct cst_seg_ref ref = k->ref;

        cst_seg_space_info(k->space, &info);
        if (space ? k->space != space : strcmp(info.namespace_name, ns_name) != 0)
            continue;
        end(k);
        cst_seg_drop(c->seg, ref, destroy);
    }
}

void cst_side_kept_free(struct cst_cold *c) {
    struct cst_list *it;

    while ((it = cst_list_first(&c->kept)))
        end(cst_list_entry(it, struct kept, link));
}
