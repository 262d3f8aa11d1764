/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns purges: a namespace is forgotten.
 * Invariants: 1. its key goes first: what follows only gives room back; 2. `erased` is said only
 * by the file that destroyed the key. Loop thread only; blocks.
 */
#include "base/err.h"
#include "base/mem.h"
#include "store/seg_core.h"

#include <errno.h>

/* No record of it is found again, even where blocks can't be given back. */
static int discard(struct cst_seg_segment *s) {
    void *heap, *zero = cst_seg_aligned(CST_DISK_CHUNK, &heap);
    int r = zero ? 0 : cst_err(-ENOMEM);

    if (!r)
        memset(zero, 0, CST_DISK_CHUNK);
    if (!r)
        r = cst_fold(cst_aio_now(s->file, CST_AIO_WRITE, zero, 0, CST_DISK_CHUNK));
    if (!r)
        r = cst_fold(cst_aio_now(s->file, CST_AIO_DISCARD, NULL, 0, s->seg->segment_bytes));
    cst_free(heap);
    return r;
}

static int forget_segment(struct cst_seg_segment *s) {
    int r;

    for (uint32_t i = 0; i < s->n_slots; i++)
        cst_segment_unlive(s, i);
    if (s->ns->open == s)
        s->ns->open = NULL;
    r = discard(s);
    if (r)
        cst_seg_error(s->seg, r);
    s->allocated = false; /* its blocks are taken again before it is used */
    cst_segment_empty(s);
    return r;
}

/* Empty ones still hold bytes, and a start may find them again. */
static int forget_remains(struct cst_seg *seg, const struct cst_seg_ns *ns) {
    int first = 0;

    for (uint32_t i = 0; i < seg->n_segments; i++) {
        struct cst_seg_segment *s = &seg->segments[i];
        int r;

        if ((s->state != CST_SEG_FREE && s->state != CST_SEG_RETIRED) || !s->fill ||
            (s->was && s->was != ns))
            continue;
        r = discard(s);
        if (r)
            cst_seg_error(seg, r);
        first = first ? first : r;
        if (s->state != CST_SEG_FREE)
            continue;
        cst_list_unlink(&s->link);
        seg->n_free--;
        s->allocated = false;
        s->state = CST_SEG_ABSENT;
    }
    return first;
}

static bool is_busy(const struct cst_seg_ns *ns) {
    const struct cst_list *it;

    for (it = ns->segments.next; it != &ns->segments; it = it->next) {
        const struct cst_seg_segment *s =
            cst_list_entry((struct cst_list *)it, struct cst_seg_segment, link);

        if (s->readers || s->writers || s->chosen)
            return true;
    }
    return !cst_list_is_empty(&ns->writes);
}

int cst_seg_purge(struct cst_seg *seg, const char *namespace_name, enum cst_seg_erasure *how) {
    struct cst_seg_ns *ns = cst_seg_ns_find(seg, namespace_name, strlen(namespace_name));
    struct cst_list *it;
    int r, first;

    *how = seg->options.crypt == CST_SEG_CRYPT_AES && seg->keys.ephemeral ? CST_SEG_ERASED
                                                                          : CST_SEG_UNLINKED;
    if (!ns || seg->read_only)
        return ns ? CST_SEG_E_OFF : 0;
    if (is_busy(ns))
        return CST_SEG_E_BUSY;
    r = ns->has_key ? cst_seg_keys_forget(seg, ns, how) : 0;
    first = r;
    while (!r && (it = cst_list_first(&ns->segments))) {
        int failed = forget_segment(cst_list_entry(it, struct cst_seg_segment, link));

        first = first ? first : failed;
    }
    if (!r)
        r = forget_remains(seg, ns);
    seg->changed = true;
    cst_seg_spare(seg);
    return first ? first : r;
}
