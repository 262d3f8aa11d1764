/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store as a whole: options, the job gate, telling what finished, periodic care.
 *
 * How the parts hang together
 *   prefix_trie.c  which blocks there are        block.c   what one is worth, its end
 *   slab.c         memory and its slots          room.c    where room comes from
 *   put.c          bytes come in                 fetch.c   bytes are read
 *   encode.c, decode.c, scrub.c  jobs between tiers        evict*.c  who goes first
 *   choice.c       presets of a class            side_*.c  tables that frames refer to
 *   space.c        namespaces, spaces, accounts  care.c    pins, erasing, ages
 *   lookup.c, explain.c          questions without side effects
 *   nodes.c        memory of a start's blocks, made ahead
 *   cold.c, cold_life.c, cold_ahead.c  the way to disk and back; what Lookups begin to read
 *
 * Invariants of the whole (each file has its own)
 *   1. What store.h promises holds whenever control leaves the store.
 *   2. Callbacks to owners of puts and fetches run only from leave() and tick(), when no function
 *      of ours is half way: they may call anything in store.h.
 *   3. Work waits only in objects that callers embed (puts, fetches) or that a bounded number of
 *      jobs own; nothing else queues, so nothing is unbounded.
 *   4. Jobs touch pinned copies, slots given to them, constants of the space and block, no lists.
 *
 * Threads: everything runs on the loop thread but for the run() part of jobs.
 */
#include "store/store.h"

#include "base/err.h"
#include "base/mem.h"
#include "store/cold.h"

#include <assert.h>
#include <errno.h>

/* ---- jobs ---- */

void cst_store_submit(struct cst_space *space, struct cst_job *job,
                      enum cst_job_priority priority) {
    space->n_jobs++;
    space->store->jobs++;
    space->store->env.jobs->submit(space->store->env.jobs, job, priority);
}

size_t cst_store_jobs(const struct cst_store *store) {
    return store->jobs + (store->cold ? cst_seg_busy(store->cold->seg) : 0);
}

/* What finishes while this runs is told by the next call. */
static void tell(struct cst_store *store) {
    struct cst_list puts = CST_LIST_INIT(puts), fetches = CST_LIST_INIT(fetches), *it;

    while ((it = cst_list_first(&store->finished_puts))) {
        cst_list_unlink(it);
        cst_list_append(&puts, it);
    }
    while ((it = cst_list_first(&store->finished_fetches))) {
        cst_list_unlink(it);
        cst_list_append(&fetches, it);
    }
    while ((it = cst_list_first(&puts)))
        cst_put_tell(cst_list_entry(it, struct cst_put, queue));
    while ((it = cst_list_first(&fetches)))
        cst_fetch_tell(cst_list_entry(it, struct cst_fetch, link));
}

static void nothing(struct cst_job *job) {
}

static void kick_done(struct cst_job *job) {
    struct cst_store *store = cst_container_of(job, struct cst_store, kick);

    store->kicking = false;
    store->jobs--;
    tell(store);
    cst_cold_serve(store);
}

void cst_store_kick(struct cst_store *store) {
    if (store->kicking)
        return;
    store->kicking = true;
    store->jobs++;
    store->kick = (struct cst_job){ .run = nothing, .done = kick_done };
    store->env.jobs->submit(store->env.jobs, &store->kick, CST_JOB_FETCH);
}

void cst_store_finish(struct cst_store *store) {
    if (!store->entered)
        cst_store_kick(store);
}

void cst_store_enter(struct cst_space *space) {
    assert(!space->store->entered);
    space->store->entered++;
}

void cst_store_leave(struct cst_space *space) {
    struct cst_store *store = space->store;

    store->entered--;
    tell(store);
    store->jobs--;
    space->n_jobs--;
    cst_space_reap(space);
}

void cst_store_event(struct cst_space *space, enum cst_event what, const struct cst_block *b,
                     enum cst_tier tier) {
    struct cst_store_env *env = &space->store->env;

    if (env->event)
        env->event(env->arg, space, what, b->key, tier);
}

/* ---- the store ---- */

static void fill_options(struct cst_store_options *o) {
    if (!o->index)
        o->index = o->memory / 4;
    o->index = CST_MIN(o->index, o->memory);
    if (!o->slab_bytes)
        o->slab_bytes = CST_MIN(UINT64_C(64) << 20, o->memory / 16);
    if (!o->pin_bytes)
        o->pin_bytes = o->memory / 4;
    if (!o->busy_ns)
        o->busy_ns = 5 * CST_NS_PER_S;
    if (!o->spaces_max)
        o->spaces_max = 256;
    if (!o->side_bytes)
        o->side_bytes = UINT64_C(64) << 20;
    if (!o->policy)
        o->policy = "cost";
}

int cst_store_new(struct cst_store **out, const struct cst_store_options *options,
                  const struct cst_store_env *env) {
    struct cst_store_options filled = *options;
    const struct cst_evict_ops *policy;
    cst_auto(cst_freep) struct cst_store *s = NULL;
    int r;

    fill_options(&filled);
    policy = cst_evict_by_name(filled.policy);
    if (!policy)
        return CST_STORE_E_POLICY;
    s = cst_calloc(1, sizeof(*s));
    if (!s)
        return cst_err(-ENOMEM);
    s->options = filled;
    s->env = *env;
    s->policy = policy;
    r = env->random->fill(env->random, s->seed, sizeof(s->seed));
    if (r)
        return r;
    cst_pool_init(&s->nodes);
    cst_list_init(&s->namespaces);
    cst_list_init(&s->spaces);
    cst_list_init(&s->slabs);
    cst_list_init(&s->retired);
    cst_list_init(&s->empty);
    cst_list_init(&s->showing);
    cst_list_init(&s->dirty_spaces);
    cst_list_init(&s->finished_puts);
    cst_list_init(&s->finished_fetches);
    *out = cst_steal(&s);
    return 0;
}

void cst_store_set_preset(struct cst_store *store, enum cst_class klass,
                          const struct cst_encode_params *params) {
    struct cst_list *it;

    store->preset_is_set[klass] = params;
    if (params)
        store->presets[klass] = *params;
    for (it = store->spaces.next; it != &store->spaces; it = it->next)
        cst_list_entry(it, struct cst_space, link)->work_bytes = 0;
    cst_space_count_work(store);
}

void cst_store_stop(struct cst_store *store) {
    cst_learn_stop(store);
}

static void free_slabs(struct cst_list *slabs) {
    struct cst_list *it;

    while ((it = cst_list_first(slabs)))
        cst_slab_free(cst_list_entry(it, struct cst_slab_slots, lru));
}

struct cst_store *cst_store_free(struct cst_store *store) {
    struct cst_list *it, *tmp;

    if (!store)
        return NULL;
    assert(!store->jobs && !store->leases && !store->reserved && !store->learning);
    if (store->cold)
        store->cold->closing = true; /* its records stay */
    cst_list_for_each_safe (it, tmp, &store->spaces)
        cst_space_remove_all(cst_list_entry(it, struct cst_space, link), CST_GONE_EVICTED);
    free_slabs(&store->slabs);
    free_slabs(&store->retired);
    cst_list_for_each_safe (it, tmp, &store->spaces)
        cst_space_free(cst_list_entry(it, struct cst_space, link));
    cst_list_for_each_safe (it, tmp, &store->namespaces)
        cst_free(cst_list_entry(it, struct cst_namespace, link));
    cst_cold_free(store);
    cst_hashmap_deinit(&store->slab_map);
    cst_pool_deinit(&store->nodes);
    return cst_free(store);
}

bool cst_store_tick(struct cst_store *store) {
    bool more = store->cold && cst_seg_tick(store->cold->seg);

    assert(!store->entered);
    store->entered++;
    store->now_s = (uint32_t)(cst_store_now(store) / CST_NS_PER_S);
    more |= cst_care_slice(store);
    cst_learn_slice(store);
    cst_encode_kick_all(store);
    cst_scrub_slice(store);
    cst_cold_slice(store);
    cst_cold_purge_slice(store);
    store->entered--;
    tell(store);
    return more;
}

void cst_store_stats(const struct cst_store *store, struct cst_store_stats *out) {
    *out = (struct cst_store_stats){
        .memory_limit = store->options.memory,
        .memory_used = store->slab_bytes + store->index_bytes + store->encode_bytes +
                       store->side_bytes + store->work_bytes,
        .index_limit = store->options.index,
        .index_used = store->index_bytes,
        .held_bytes = store->held_bytes,
        .slabs = store->slab_map.count,
        .leases = store->leases,
        .reserved = store->reserved,
        .policy = store->policy->name,
    };
    for (const struct cst_list *it = store->spaces.next; it != &store->spaces; it = it->next)
        out->spaces++;
}
