/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which frames are made smaller, and how small: the last way to keep a block before it goes.
 *
 * When memory gets short, frames of slabs that were used long ago are decoded and encoded again, as
 * coarsely as their class's bound still allows: the error that a frame carries in its header and
 * the error of the new step add up to what stands in the new header, and the sum stays within the
 * bound. A step that may add less error than there is already would hardly save anything, so it
 * isn't tried: of the classes' own presets there is nothing to gain, only of finer ones that
 * somebody configured.
 *
 * Invariants: 1. exact spaces and exact frames are never touched; 2. a frame that was tried is not
 * tried again before it is made anew; 3. the old frame stays until the new one is in its place.
 * Loop thread only; the work is an encode (encode.c).
 */
#include "store/choice.h"
#include "store/core.h"

enum { SLABS_A_SLICE = 8, SLOTS_A_SLICE = 256 };
static const float least_gain = .75F;

/* Error that a frame of the block may still add. */
static float allowance(const struct cst_block *b) {
    return cst_class_bound(b->space->klass) - b->error;
}

static bool is_candidate(const struct cst_block *b) {
    return !b->dead && b->visible && b->packed.slab && !b->hot.slab && !b->recoded &&
           !cst_block_is_leased(b) && !cst_block_is_busy(b) && b->error > 0 &&
           allowance(b) >= least_gain * b->error;
}

/* One of the next slots of the slab. NULL: none of them. */
static struct cst_block *candidate_in(struct cst_slab_slots *slab) {
    struct cst_block *found = NULL;

    for (uint32_t n = CST_MIN(slab->n_slots, (uint32_t)SLOTS_A_SLICE); !found && n; n--) {
        struct cst_block *b = slab->owners[slab->recode_at];

        slab->recode_at = (slab->recode_at + 1) % slab->n_slots;
        if (b && is_candidate(b))
            found = b;
    }
    return found;
}

struct cst_block *cst_recode_next(struct cst_store *store) {
    struct cst_list *head = &store->slabs, *it = head->next;
    struct cst_block *found = NULL;

    if (cst_room_has(store, store->options.memory / 8))
        return NULL;
    for (unsigned i = 0; !found && i < SLABS_A_SLICE && it != head; it = it->next) {
        struct cst_slab_slots *slab = cst_container_of(it, struct cst_slab_slots, lru);

        if (!slab->slab.packed || slab->slab.space->klass == CST_CLASS_LOSSLESS)
            continue;
        found = candidate_in(slab);
        i++;
    }
    return found;
}

void cst_recode_choices(struct cst_choices *out, const struct cst_block *b,
                        const struct cst_side *side) {
    float left = allowance(b), bound = cst_class_bound(b->space->klass);

    /* A uniform step of c errs by c / sqrt(12), a Lloyd-Max code of 2, 3, 4 bits by .34, .19, .1 of
     * the deviation. */
    *out = (struct cst_choices){ .n = 0 };
    if (side) {
        struct cst_encode_params p = { .preset = CST_PRESET_DEEP, .step = 3 * left, .side = side };

        out->try[out->n++] = p;
        p.preset = CST_PRESET_KLT;
        out->try[out->n++] = p;
    }
    if (left > .11F) {
        uint8_t bits = left > .2F ? 3 : 4;

        out->try[out->n++] = (struct cst_encode_params){ .preset = CST_PRESET_TURBOQUANT,
                                                         .bits_k = bits,
                                                         .bits_v = bits };
    }
    for (uint32_t i = 0; i < out->n; i++) {
        out->try[i].bound = bound;
        out->try[i].carried = b->error;
    }
}
