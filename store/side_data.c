/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the side data of spaces: their bytes and what is parsed of them.
 *
 * Invariants
 *   1. space->sides is in falling order of versions; only its first one, or one with references,
 *      stays.
 *   2. Bytes of all versions <= options.side_bytes a space. They and what is parsed of them are
 * part of the store's memory, from cst_side_new() on.
 *   3. Nothing is published that was not parsed against the space's descriptor.
 * Loop thread, but for cst_side_fill() and the jobs.
 */
#include "store/side_data.h"

#include "base/err.h"
#include "base/le.h"
#include "base/macros.h"
#include "base/mem.h"
#include "store/core.h"
#include "store/side_disk.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

enum { ALIGN = 64 };

static struct cst_side_data *at(const struct cst_list *it) {
    return cst_container_of((struct cst_list *)(uintptr_t)it, struct cst_side_data, link);
}

struct cst_side_data *cst_side_newest(const struct cst_space *space) {
    return space->sides.next == &space->sides ? NULL : at(space->sides.next);
}

struct cst_side_data *cst_side_find(const struct cst_space *space, uint32_t version) {
    for (const struct cst_list *it = space->sides.next; it != &space->sides; it = it->next)
        if (at(it)->side.version == version)
            return at(it);
    return NULL;
}

/* ---- life ---- */

static uint64_t bytes_of(const struct cst_side_data *side) {
    return sizeof(*side) + side->cap + side->memory_cap;
}

static void count(struct cst_side_data *side, uint64_t bytes) {
    struct cst_space *space = side->space;

    space->stats.side_bytes += bytes - side->counted;
    space->store->side_bytes += bytes - side->counted;
    side->counted = bytes;
}

/* Tables say something of the prompts that they were learned from. */
static void *wipe(void *p, size_t n) {
    if (p)
        explicit_bzero(p, n);
    return cst_free(p);
}

struct cst_side_data *cst_side_free(struct cst_side_data *side) {
    if (!side)
        return NULL;
    cst_side_disk_free(side);
    cst_list_unlink(&side->link);
    count(side, 0);
    side->bytes = wipe(side->bytes, side->cap); /* a failed parse doesn't say how many it wrote */
    side->memory = wipe(side->memory, side->memory_cap);
    return cst_free(side);
}

struct cst_side_data *cst_side_ref(struct cst_side_data *side) {
    side->refs++;
    return side;
}

struct cst_side_data *cst_side_unref(struct cst_side_data *side) {
    if (!side)
        return NULL;
    assert(side->refs);
    if (!--side->refs && !side->found && side != cst_side_newest(side->space))
        (void)cst_side_free(side);
    return NULL;
}

void cst_side_free_all(struct cst_space *space) {
    struct cst_list *it;

    while ((it = cst_list_first(&space->sides)) || (it = cst_list_first(&space->sides_found))) {
        assert(!at(it)->refs);
        (void)cst_side_free(at(it));
    }
}

void cst_side_forget(struct cst_space *space) {
    struct cst_list *it;

    space->side_epoch++;
    while ((it = cst_list_first(&space->sides))) {
        struct cst_side_data *side = at(it);

        cst_list_unlink(it);
        side->published = false;
        if (!side->refs)
            (void)cst_side_free(side);
    }
}

/* Bytes of all versions that stay when another one comes. */
static uint64_t kept_bytes(const struct cst_space *space) {
    const struct cst_list *it;
    uint64_t n = 0;

    for (it = space->sides.next; it != &space->sides; it = it->next)
        n += at(it)->refs ? at(it)->side.len : 0;
    return n;
}

int cst_side_reserve(struct cst_side_data *side, size_t cap) {
    struct cst_space *space = side->space;
    size_t memory = cst_side_memory(space->desc) + ALIGN;
    int r;

    if (cap > space->store->options.side_bytes)
        return CST_STORE_E_LIMIT;
    r = cst_room_heap(space, sizeof(*side) + cap + memory);
    if (r)
        return r;
    side->cap = cap;
    side->bytes = cst_malloc(cap);
    side->memory_cap = memory;
    side->memory = cst_malloc(memory);
    count(side, bytes_of(side));
    return side->bytes && side->memory ? 0 : cst_err(-ENOMEM);
}

int cst_side_new(struct cst_side_data **out, struct cst_space *space, size_t cap) {
    struct cst_side_data *side = cst_calloc(1, sizeof(*side));
    int r;

    if (!side)
        return cst_err(-ENOMEM);
    cst_list_init(&side->link);
    side->space = space;
    side->epoch = space->side_epoch;
    r = cst_side_reserve(side, cap);
    if (r)
        (void)cst_side_free(side);
    else
        *out = side;
    return r;
}

static int parse(struct cst_side_data *side, size_t len) {
    uint8_t *memory = side->memory + (-(uintptr_t)side->memory & (ALIGN - 1));

    return cst_side_parse(&side->side, side->bytes, len, side->space->desc, memory,
                          side->memory_cap - ALIGN);
}

/* Room was made for the largest that there can be: most take a fraction of it. */
static int shrink(struct cst_side_data *side) {
    size_t less = side->side.memory_used + ALIGN;
    uint8_t *memory = less < side->memory_cap ? cst_malloc(less) : NULL;

    if (!memory)
        return 0;
    (void)wipe(side->memory, less);
    side->memory = memory;
    side->memory_cap = less;
    return parse(side, side->side.len);
}

int cst_side_fill(struct cst_side_data *side, size_t len) {
    uint8_t *less = len < side->cap ? cst_realloc(side->bytes, len) : NULL;
    int r;

    if (less) {
        side->bytes = less;
        side->cap = len;
    }
    r = parse(side, len);
    return r ? r : shrink(side);
}

int cst_side_publish(struct cst_side_data *side, uint32_t *version) {
    struct cst_space *space = side->space;
    struct cst_side_data *old = cst_side_newest(space);

    if (side->epoch != space->side_epoch)
        return CST_STORE_E_BUSY;
    if (old && !memcmp(old->side.hash, side->side.hash, sizeof(old->side.hash))) {
        *version = old->side.version;
        (void)cst_side_free(side);
        return 0;
    }
    if (side->side.version <= space->last_side)
        return CST_STORE_E_BAD_SIDE;
    while (side->side.len + kept_bytes(space) > space->store->options.side_bytes)
        if (!cst_side_disk_give_up(space))
            return CST_STORE_E_LIMIT;
    old = cst_side_newest(space);
    count(side, bytes_of(side));
    space->last_side = *version = side->side.version;
    cst_list_prepend(&space->sides, &side->link);
    side->published = true;
    if (old && !old->refs)
        (void)cst_side_free(old);
    return 0;
}

int cst_side_restore(struct cst_side_data *side) {
    struct cst_space *space = side->space;
    struct cst_side_data *first = cst_side_newest(space);
    struct cst_list *before = &space->sides;

    if (cst_side_find(space, side->side.version))
        return CST_STORE_E_BAD_SIDE;
    if (side->side.len + kept_bytes(space) > space->store->options.side_bytes)
        return CST_STORE_E_LIMIT;
    while (before->next != &space->sides && at(before->next)->side.version > side->side.version)
        before = before->next;
    count(side, bytes_of(side));
    cst_list_prepend(before, &side->link); /* behind it */
    side->published = true;
    if (first && first != cst_side_newest(space) && !first->refs)
        (void)cst_side_free(first);
    return 0;
}

/* ---- what others see ---- */

static void describe(const struct cst_side_data *side, struct cst_side_info *out) {
    *out = (struct cst_side_info){ .version = side->side.version, .size = side->side.len };
    memcpy(out->hash, side->side.hash, sizeof(out->hash));
}

size_t cst_space_sides(const struct cst_space *space, struct cst_side_info *out, size_t max) {
    const struct cst_list *it;
    size_t n = 0;

    for (it = space->sides.next; it != &space->sides && n < max; it = it->next)
        describe(at(it), &out[n++]);
    return n;
}

const uint8_t *cst_space_side_bytes(const struct cst_space *space, uint32_t version,
                                    struct cst_side_info *info) {
    const struct cst_side_data *side =
        version ? cst_side_find(space, version) : cst_side_newest(space);

    if (!side)
        return NULL;
    describe(side, info);
    return side->bytes;
}

/* ---- puts ---- */

/* Weights of K, then of V, one a layer. */
static int fill_weights(struct cst_side_data *made, const struct cst_side *base, uint32_t version,
                        const uint8_t *bytes) {
    uint32_t n = base->n_layers;
    cst_auto(cst_freep) float *weights = cst_malloc(2UL * n * sizeof(*weights));
    int r;

    if (!weights)
        return cst_err(-ENOMEM);
    memcpy(weights, bytes, 2UL * n * sizeof(*weights));
    r = cst_side_set_weights(made->bytes, made->cap, base, version, weights, weights + n);
    return r ? r : cst_side_fill(made, base->len);
}

static void put_run(struct cst_job *job) {
    struct cst_side_put *put = cst_container_of(job, struct cst_side_put, job);

    if (put->kind == CST_SIDE_PUT_WEIGHTS) {
        put->result = fill_weights(put->made, &put->base->side, put->version, put->bytes);
        return;
    }
    memcpy(put->made->bytes, put->bytes, put->size);
    put->result = cst_side_fill(put->made, put->size);
}

static void put_done(struct cst_job *job) {
    struct cst_side_put *put = cst_container_of(job, struct cst_side_put, job);
    struct cst_space *space = put->space;
    int r = put->result > 0 ? CST_STORE_E_BAD_SIDE : put->result;

    cst_store_enter(space);
    put->base = cst_side_unref(put->base);
    if (!r)
        r = cst_side_publish(put->made, &put->version);
    if (r)
        (void)cst_side_free(put->made);
    cst_room_serve(space);
    cst_store_leave(space);
    put->done(put, r);
}

int cst_space_side_put(struct cst_space *space, enum cst_side_put_kind kind, const uint8_t *bytes,
                       size_t size, struct cst_side_put *put) {
    struct cst_side_data *base = cst_side_newest(space);
    int r;

    if (kind == CST_SIDE_PUT_WEIGHTS) {
        if (!base)
            return CST_STORE_E_NOT_FOUND;
        if (size != 2UL * base->side.n_layers * sizeof(float) ||
            space->last_side >= CST_SIDE_VERSION_MAX)
            return CST_STORE_E_BAD_SIDE;
    }
    put->space = space;
    put->kind = (uint8_t)kind;
    put->bytes = bytes;
    put->size = size;
    put->version = space->last_side + 1; /* of weights */
    r = cst_side_new(&put->made, space, kind == CST_SIDE_PUT_WEIGHTS ? base->side.len : size);
    if (r)
        return r;
    put->base = kind == CST_SIDE_PUT_WEIGHTS ? cst_side_ref(base) : NULL;
    put->job = (struct cst_job){ .run = put_run, .done = put_done };
    cst_store_submit(space, &put->job, CST_JOB_BACKGROUND);
    return 0;
}
