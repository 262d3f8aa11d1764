/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns learning: which blocks a space's side data are learned from, when, and when again.
 *
 *   puts -> enough raw blocks -> LEARN (job: pinned blocks to bytes, parsed) -> the newest version
 *
 * A lossy space learns version 1 from the first CST_LEARN_TOKENS_GOOD tokens that it stores; from
 * fewer when no put has come for a while, or when memory runs short. Version 2 and later ones are
 * learned when frames get larger or worse than they were right after the last version, or when
 * there are many more tokens to learn from. Frames of older versions stay as they are.
 *
 * Invariants
 *   1. One version of a space is being learned at a time, and one of the whole store: its heap is
 *      part of the store's memory while it runs.
 *   2. Only committed bytes are learned from, never what a lossy frame gave back; they are pinned.
 *   3. Who can't learn (nothing to learn in this layout, side data not allowed) never makes an
 *      encode wait.
 *   4. A slice looks at BLOCKS_A_SLICE blocks: passes over a space's blocks, to count tokens and to
 *      gather them, go on where the last slice ended. Nothing is counted again until more came.
 * Loop thread, but for the job, which touches the blocks' bytes, the new version and its workspace.
 */
#include "store/side_learn.h"

#include "base/err.h"
#include "base/mem.h"
#include "codec/learn.h"
#include "store/choice.h"
#include "store/core.h"
#include "store/prefix_trie.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <string.h>

enum {
    ALIGN = 64,
    TOKENS_FEW = 512,      /* no version is learned from less */
    BLOCKS_SCANNED = 4096, /* in one pass */
    BLOCKS_A_SLICE = 64,
    DRIFT_FIRST = 16, /* frames that say how a version does when it is new */
    DRIFT_LEAST = 64, /* frames before it is judged */
    AGAIN_S = 60,     /* after one version, or a failure */
};
static const float drift_bytes = 1.2F, drift_error = 1.2F, drift_missed = .25F;

/* First gathers its blocks, a slice at a time (no job yet, a reference to the space), then runs. */
struct cst_learning {
    struct cst_job job;
    bool gathering;
    struct cst_learn_pass pass;
    uint32_t tokens; /* at most */
    struct cst_space *space;
    struct cst_side_data *made, *before;
    uint8_t *work;
    size_t work_len;
    atomic_bool stop;
    int result;
    uint32_t version, n, room;
    struct cst_block **block; /* n of at most `room` */
    struct cst_learn_block *in;
};

/* ---- what there is ---- */

static bool is_raw(const struct cst_block *b) {
    return b->stored && !b->dead && cst_block_is_original(b);
}

static uint32_t tokens_of(const struct cst_block *b) {
    return b->space->kind == CST_KIND_FLAT ? b->space->desc->block_tokens : b->n_tokens;
}

/* Most tokens whose blocks fit a quarter of the memory: they can't be evicted meanwhile. */
static uint32_t most_tokens(const struct cst_space *space) {
    uint64_t blocks = space->store->options.memory / 4 / space->desc->block_bytes;

    return (uint32_t)CST_MIN(blocks * space->desc->block_tokens, (uint64_t)CST_LEARN_TOKENS_GOOD);
}

static void keep(struct cst_learning *l, struct cst_block *b) {
    l->in[l->n] = (struct cst_learn_block){
        .bytes = cst_slot_data(b->hot.slab, b->hot.slot),
        .tokens = tokens_of(b),
        .first_position = b->depth * l->space->desc->block_tokens,
    };
    l->block[l->n++] = b;
    cst_copy_pin(&b->hot);
    cst_block_settle(b, CST_EVICT_WARM);
}

/* Goes on over at most *left blocks, the oldest first, up to `most` tokens; with l: keeps the raw
 * ones there. Whether the pass is over. */
static bool go_on(struct cst_learn_pass *pass, struct cst_space *space, uint32_t most,
                  struct cst_learning *l, unsigned *left) {
    struct cst_block *b = cst_trie_after(space, pass->after);

    while (b && pass->seen < BLOCKS_SCANNED && pass->tokens < most && !(l && l->n == l->room)) {
        const struct cst_treap_node *next = cst_treap_next(&b->by_age);

        if (!*left)
            return false;
        --*left;
        if (l && is_raw(b) && pass->tokens + tokens_of(b) > most)
            return true; /* there is no memory for them */
        pass->seen++;
        pass->after = b->seq;
        if (is_raw(b)) {
            pass->tokens += tokens_of(b);
            if (l)
                keep(l, b);
        }
        b = next ? cst_container_of(next, struct cst_block, by_age) : NULL;
    }
    return true;
}

static bool is_counted(const struct cst_space *space) {
    return space->learn_count.known && space->learn_count.of == space->stats.stored_blocks;
}

/* Tokens of raw blocks, as last counted, into space->learn_count.tokens; whether that is done. */
static bool count(struct cst_space *space, unsigned *left) {
    struct cst_learn_count *c = &space->learn_count;

    if (is_counted(space))
        return true;
    if (!c->pass.seen) {
        c->known = false;
        c->of = space->stats.stored_blocks;
    }
    if (!go_on(&c->pass, space, most_tokens(space), NULL, left))
        return false;
    c->tokens = c->pass.tokens;
    c->known = true;
    c->pass = (struct cst_learn_pass){ 0 };
    return true;
}

static bool can_learn(const struct cst_space *space) {
    return space->klass != CST_CLASS_LOSSLESS && !space->cannot_learn &&
           cst_store_now(space->store) >= space->learn_after_ns;
}

/* What is there will have to do. */
static bool is_short(const struct cst_store *store) {
    return !cst_room_has(store, store->options.memory / 8);
}

/* Nothing was put for a while. */
static bool is_quiet(const struct cst_space *space) {
    return cst_store_now(space->store) - space->last_put_ns >= space->store->options.learn_wait_ns;
}

/* ---- how well a version does ---- */

static void average(float *to, float x, uint32_t n) {
    *to += (x - *to) / (float)n;
}

void cst_learn_note(struct cst_space *space, const struct cst_frame_info *info, bool missed) {
    struct cst_drift *d = &space->drift;
    const struct cst_side_data *newest = cst_side_newest(space);
    float bytes = (float)info->frame_bytes / (float)info->tokens;

    if (!newest)
        return;
    if (d->version != newest->side.version)
        *d = (struct cst_drift){ .version = newest->side.version };
    d->frames++;
    average(&d->missed, missed, CST_MIN(d->frames, (uint32_t)DRIFT_FIRST));
    if (info->side_version != d->version)
        return;
    if (d->frames <= DRIFT_FIRST) {
        average(&d->bytes_first, bytes, d->frames);
        average(&d->error_first, info->error, d->frames);
        d->bytes = d->bytes_first;
        d->error = d->error_first;
    } else {
        average(&d->bytes, bytes, DRIFT_FIRST);
        average(&d->error, info->error, DRIFT_FIRST);
    }
}

static bool has_drifted(const struct cst_space *space) {
    const struct cst_side_data *newest = cst_side_newest(space);
    const struct cst_drift *d = &space->drift;

    return newest && d->version == newest->side.version && d->frames >= DRIFT_LEAST &&
           (d->bytes > drift_bytes * d->bytes_first || d->error > drift_error * d->error_first ||
            d->missed > drift_missed);
}

/* ---- the job ---- */

static void learn_run(struct cst_job *job) {
    struct cst_learning *l = cst_container_of(job, struct cst_learning, job);
    uint8_t *work = l->work + (-(uintptr_t)l->work & (ALIGN - 1));
    const struct cst_space *space = l->space;
    const struct cst_learn_params params = {
        .version = l->version,
        .step = cst_class_step(space->klass),
        .before = l->before ? &l->before->side : NULL,
        .stop = &l->stop,
    };
    size_t len;

    l->result = cst_learn(l->made->bytes, l->made->cap, space->desc, l->in, l->n, &params, work,
                          l->work_len, &len, NULL);
    if (!l->result && cst_side_fill(l->made, len))
        l->result = CST_LEARN_E_SHAPE; /* what we learned ourselves doesn't parse: never again */
}

/* Gives everything back. */
static void end(struct cst_learning *l) {
    struct cst_space *space = l->space;

    for (uint32_t i = 0; i < l->n; i++) {
        struct cst_block *b = l->block[i];

        cst_copy_unpin(&b->hot);
        if (b->dead)
            cst_block_reap(b);
        else
            cst_block_settle(b, CST_EVICT_WARM);
    }
    (void)cst_side_free(l->made);
    l->before = cst_side_unref(l->before);
    space->store->encode_bytes -= l->work_len + ALIGN;
    space->store->learning = NULL;
    (void)cst_free(l->work);
    (void)cst_free(l->block);
    (void)cst_free(l->in);
    if (l->gathering)
        (void)cst_space_unref(space);
    cst_free(l);
}

static void learn_done(struct cst_job *job) {
    struct cst_learning *l = cst_container_of(job, struct cst_learning, job);
    struct cst_space *space = l->space;
    uint32_t version;

    cst_store_enter(space);
    if (l->result == CST_LEARN_E_SHAPE)
        space->cannot_learn = true;
    if (!l->result && !cst_side_publish(l->made, &version)) {
        l->made = NULL;
        space->stats.sides_learned++;
    }
    space->learn_after_ns = cst_store_now(space->store) + AGAIN_S * CST_NS_PER_S;
    end(l);
    cst_room_serve(space);
    cst_encode_kick_all(space->store);
    cst_store_leave(space);
}

/* A learning with its room: that may have been made at the cost of blocks, so they are gathered
 * afterwards. 0, a condition of the store or -ENOMEM. */
static int begin(struct cst_space *space, uint32_t tokens) {
    size_t bound = cst_learn_bound(space->desc);
    struct cst_learning *l = cst_calloc(1, sizeof(*l));
    int r;

    if (!l)
        return cst_err(-ENOMEM);
    l->space = cst_space_ref(space);
    l->gathering = true;
    l->tokens = tokens;
    l->room = tokens / CST_BLOCK_TOKENS_MIN + 1;
    space->store->learning = l;
    r = cst_side_new(&l->made, space, bound);
    if (!r)
        r = cst_room_heap(space, cst_learn_work_size(space->desc, tokens) + ALIGN);
    if (!r) {
        l->work_len = cst_learn_work_size(space->desc, tokens);
        l->work = cst_malloc(l->work_len + ALIGN);
        l->block = cst_calloc(l->room, sizeof(struct cst_block *));
        l->in = cst_calloc(l->room, sizeof(*l->in));
    }
    space->store->encode_bytes += l->work_len + ALIGN;
    if (!r && (!l->work || !l->block || !l->in))
        r = cst_err(-ENOMEM);
    if (r)
        end(l);
    return r;
}

/* As many of them as can be learned from with half of the memory; 0: not even a few. */
static uint32_t affordable(const struct cst_space *space, uint32_t tokens) {
    uint64_t made = cst_learn_bound(space->desc) + cst_side_memory(space->desc);

    while (tokens >= CST_LEARN_TOKENS_MIN &&
           made + cst_learn_work_size(space->desc, tokens) > space->store->options.memory / 2)
        tokens /= 2;
    return tokens < CST_LEARN_TOKENS_MIN ? 0 : tokens;
}

static void give_up(struct cst_learning *l) {
    struct cst_space *space = l->space;

    space->learn_after_ns = cst_store_now(space->store) + AGAIN_S * CST_NS_PER_S;
    space->learn_count.known = false;
    end(l);
}

/* Goes on gathering; when that is over, learns. */
static void gather(struct cst_learning *l, unsigned *left) {
    struct cst_space *space = l->space;
    struct cst_side_data *newest = cst_side_newest(space);

    if (!go_on(&l->pass, space, l->tokens, l, left))
        return;
    if (l->pass.tokens < CST_LEARN_TOKENS_MIN) {
        give_up(l);
        return;
    }
    space->learn_tokens = l->tokens;
    l->version = space->last_side + 1;
    l->before = newest ? cst_side_ref(newest) : NULL;
    l->job = (struct cst_job){ .run = learn_run, .done = learn_done };
    cst_store_submit(space, &l->job, CST_JOB_LONG);
    l->gathering = false;
    (void)cst_space_unref(space); /* the job keeps it */
}

/* ---- when ---- */

static bool needs_more(const struct cst_space *space) {
    const struct cst_side_data *newest = cst_side_newest(space);

    return !newest || has_drifted(space) || newest->side.tokens < most_tokens(space) / 2;
}

/* Tokens to learn from now; 0: not now. */
static uint32_t wanted(const struct cst_space *space) {
    const struct cst_side_data *newest = cst_side_newest(space);
    uint32_t most = most_tokens(space), few = CST_MIN(most, (uint32_t)TOKENS_FEW);
    uint32_t tokens = space->learn_count.tokens;

    if (newest && !has_drifted(space)) /* never twice from the same */
        return tokens >= most && tokens / 2 >= space->learn_tokens ? tokens : 0;
    return tokens >= most ||
                   (tokens >= few && (newest || is_short(space->store) || is_quiet(space)))
               ? tokens
               : 0;
}

/* Whether it tried to begin. Making room for that may end other spaces, and empty this one. */
static bool kick(struct cst_space *space, unsigned *left) {
    uint32_t tokens;
    int r;

    if (!can_learn(space) || !needs_more(space))
        return false;
    if (!affordable(space, most_tokens(space)) || !cst_learn_bound(space->desc)) {
        space->cannot_learn = true;
        return false;
    }
    if (!count(space, left) || space->store->learning)
        return false;
    tokens = affordable(space, wanted(space));
    if (!tokens)
        return false;
    (void)cst_space_ref(space);
    r = begin(space, tokens);
    space->cannot_learn = r == CST_STORE_E_LIMIT;
    if (r)
        space->learn_after_ns = cst_store_now(space->store) + AGAIN_S * CST_NS_PER_S;
    else
        gather(space->store->learning, left);
    (void)cst_space_unref(space);
    return true;
}

bool cst_learn_waits(const struct cst_space *space) {
    const struct cst_learning *l = space->store->learning;

    return can_learn(space) && !cst_side_newest(space) && !is_short(space->store) &&
           (!is_quiet(space) || !is_counted(space) || (l && l->space == space));
}

void cst_learn_slice(struct cst_store *store) {
    unsigned left = BLOCKS_A_SLICE;
    uint32_t i = 0;

    if (store->learning && store->learning->gathering) {
        gather(store->learning, &left);
        return;
    }
    for (struct cst_list *it = store->spaces.next; it != &store->spaces; it = it->next, i++) {
        if (i < store->learn_turn)
            continue;
        if (!left) {
            store->learn_turn = i;
            return;
        }
        if (kick(cst_list_entry(it, struct cst_space, link), &left))
            break;
    }
    store->learn_turn = 0;
}

void cst_learn_forget(struct cst_space *space) {
    if (space->store->learning && space->store->learning->space == space)
        cst_learn_stop(space->store);
}

void cst_learn_stop(struct cst_store *store) {
    if (!store->learning)
        return;
    if (store->learning->gathering)
        give_up(store->learning);
    else
        atomic_store(&store->learning->stop, true);
}
