/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns purges: a namespace is forgotten.
 * Invariants: 1. its key goes first: what follows only gives room back, and goes on where the key
 * can't go; 2. `erased` is said only by the file that destroyed the key; 3. a segment with
 * something under way is given back when that has ended; 4. completions are told while it blocks:
 * a segment that is given back is nobody's by then, and what is looked at next is looked at afresh.
 * Loop thread only; blocks.
 */
#include "base/err.h"
#include "base/mem.h"
#include "store/seg_core.h"

#include <errno.h>

void cst_segment_discard(struct cst_seg_segment *s) {
    void *heap, *zero = cst_seg_aligned(CST_DISK_CHUNK, &heap);
    int r = zero ? 0 : cst_err(-ENOMEM);

    if (!r)
        memset(zero, 0, CST_DISK_CHUNK);
    if (!r) /* no record of it is found again, even where blocks can't be given back */
        r = cst_fold(cst_aio_now(s->file, CST_AIO_WRITE, zero, 0, CST_DISK_CHUNK));
    if (!r)
        r = cst_fold(cst_aio_now(s->file, CST_AIO_DISCARD, NULL, 0, s->seg->segment_bytes));
    if (r)
        cst_seg_error(s->seg, r);
    cst_free(heap);
    s->forget = false;
    s->kept = r;
    s->allocated = false; /* its blocks are taken again before it is used */
}

/* Now, or when what is under way in it has ended. */
static void forget_segment(struct cst_seg_segment *s) {
    for (uint32_t i = 0; i < s->n_slots; i++)
        cst_segment_unlive(s, i);
    s->forget = true;
    if (s->state == CST_SEG_OPEN && (s->writers || s->readers)) {
        cst_segment_finish(s);
        return;
    }
    if (s->ns->open == s)
        s->ns->open = NULL;
    if (!s->readers && !s->writers && !s->chosen)
        cst_segment_empty(s);
}

static bool is_remains(const struct cst_seg_segment *s) {
    return s->fill && (s->state == CST_SEG_FREE || s->state == CST_SEG_RETIRED ||
                       (s->state == CST_SEG_ABSENT && s->file && s->kept));
}

/* Empty ones still hold bytes, and a start may find them again. */
static void forget_remains(struct cst_seg *seg, const struct cst_seg_ns *ns) {
    for (uint32_t i = 0; i < seg->n_segments; i++) {
        struct cst_seg_segment *s = &seg->segments[i];
        bool was_free;

        if (!is_remains(s) || (s->was && s->was != ns))
            continue;
        was_free = s->state == CST_SEG_FREE;
        if (was_free) {
            cst_list_unlink(&s->link);
            seg->n_free--;
            s->state = CST_SEG_MAKING;
        }
        cst_segment_discard(s);
        if (was_free)
            s->state = CST_SEG_ABSENT;
    }
}

int cst_seg_purge(struct cst_seg *seg, const char *namespace_name, enum cst_seg_erasure *how) {
    struct cst_seg_ns *ns = cst_seg_ns_find(seg, namespace_name, strlen(namespace_name));
    uint64_t errors = seg->stats.errors;
    bool keyed = ns && ns->has_key;
    int r;

    *how = seg->options.crypt == CST_SEG_CRYPT_AES && seg->keys.ephemeral ? CST_SEG_ERASED
                                                                          : CST_SEG_UNLINKED;
    if (!ns || seg->read_only)
        return ns ? CST_SEG_E_OFF : 0;
    r = ns->has_key ? cst_seg_keys_forget(seg, ns, how) : 0;
    for (uint32_t i = 0; i < seg->n_segments; i++)
        if (seg->segments[i].ns == ns)
            forget_segment(&seg->segments[i]);
    forget_remains(seg, ns);
    if (r) /* a full file system may have room now */
        r = cst_seg_keys_forget(seg, ns, how);
    if (!r && !keyed && seg->stats.errors > errors) /* no key went: it is all still there */
        r = cst_err(-EIO);
    seg->changed = true;
    cst_seg_spare(seg);
    return r;
}
