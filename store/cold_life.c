/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the beginning and the end of the disk tier: opening, recovery of blocks and spaces, the
 * drain of a clean stop, purges, its numbers.
 * Invariants: 1. a recovered block hangs below its recovered parent, else the engine is told to ask
 * again; it is visible at once and at rest; 2. what the disk says of a space is checked like what a
 * client says; 3. recovery takes no memory from anybody: where the index has no room for a record,
 * that is dropped. Loop thread only.
 */
#include "base/err.h"
#include "base/mem.h"
#include "codec/codec.h"
#include "proto/key.h"
#include "store/cold.h"
#include "store/prefix_trie.h"
#include "store/side_disk.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

enum { DROP = CST_SEG_E_GONE };

/* ---- spaces ---- */

int cst_cold_open_space(struct cst_space *space) {
    struct cst_cold *c = space->store->cold;
    cst_auto(cst_freep) uint8_t *canonical = NULL;
    size_t n;
    int r;

    if (!c || space->disk)
        return 0;
    canonical = cst_malloc(CST_DESCRIPTOR_BYTES_MAX);
    if (!canonical)
        return cst_err(-ENOMEM);
    n = cst_descriptor_encode(space->desc, canonical, CST_DESCRIPTOR_BYTES_MAX);
    r = n ? cst_seg_space_open(c->seg, space->ns->name, space->kind, space->klass, canonical,
                               (uint32_t)n, &space->disk)
          : 0;
    if (!r && space->disk)
        cst_seg_space_set_user(space->disk, space);
    return cst_fold(r);
}

void cst_cold_forget_space(struct cst_space *space) {
    if (!space->disk)
        return;
    cst_seg_space_set_user(space->disk, NULL);
    space->disk = cst_seg_space_unref(space->disk);
}

/* Finds or makes the space of a record. NULL: it can't be had. */
static struct cst_space *space_of(struct cst_cold *c, struct cst_seg_space *on_disk) {
    struct cst_space *space = cst_seg_space_user(on_disk);
    struct cst_seg_space_info info;
    struct cst_descriptor *desc = NULL;
    struct cst_namespace *ns;
    uint8_t fingerprint[32];
    char text[128];

    if (space)
        return space;
    cst_seg_space_info(on_disk, &info);
    if (info.kind >= CST_KINDS || info.klass >= CST_CLASSES ||
        cst_descriptor_decode(&desc, info.canonical, info.canonical_bytes, text, sizeof(text)))
        return NULL;
    cst_descriptor_fingerprint(info.canonical, info.canonical_bytes, fingerprint);
    if (cst_namespace_get(c->store, info.namespace_name, &ns) ||
        cst_space_open(&space, ns, &desc, cst_descriptor_free, fingerprint, info.kind,
                       info.klass)) {
        (void)cst_descriptor_free(desc);
        return NULL;
    }
    space->refs--; /* it lives by its blocks; cst_store_tick() ends it if there are none */
    return space;
}

/* ---- recovery ---- */

static bool is_plausible(const struct cst_space *space, const struct cst_seg_record *r) {
    const struct cst_descriptor *d = space->desc;

    if (space->kind == CST_KIND_FLAT ? r->n_tokens || r->parent
                                     : !r->n_tokens || r->n_tokens > d->block_tokens || !r->parent)
        return false;
    if (r->n_side > 1)
        return false;
    if (r->preset == CST_PRESET_NONE)
        return r->payload_bytes == d->block_bytes;
    return cst_preset_name(r->preset) && r->payload_bytes <= cst_frame_bound(d);
}

static uint64_t age_ns(const struct cst_cold *c, const struct cst_seg_record *r) {
    uint64_t age = c->start_unix > r->born ? c->start_unix - r->born : 0;

    return CST_MIN(age, UINT64_MAX / CST_NS_PER_S / 2) * CST_NS_PER_S;
}

/* 0 and a parent (NULL in flat spaces); CST_SEG_E_PARENT: not yet; DROP. */
static int parent_of(struct cst_space *space, const struct cst_seg_record *r,
                     struct cst_block **out) {
    *out = NULL;
    if (!r->parent)
        return 0;
    if (r->has_parent) {
        const struct cst_block *last = space->store->cold->last;

        if (last && last->space == space && !memcmp(last->key, r->parent, CST_KEY_SIZE))
            *out = space->store->cold->last;
        else
            *out = cst_trie_find(space, r->parent);
        if (!*out)
            return CST_SEG_E_PARENT;
        return !(*out)->visible || cst_block_is_tail(*out) ? DROP : 0;
    }
    *out = cst_trie_root(space, r->parent);
    return !*out && cst_trie_root_add(out, space, r->parent) ? DROP : 0;
}

static void revive(struct cst_block *b, const struct cst_seg_record *r, struct cst_seg_ref ref,
                   struct cst_side_data *side) {
    struct cst_space *space = b->space;
    const struct cst_cold *c = space->store->cold;

    b->stored = true;
    b->evict.order = ++space->store->uses;
    space->used = b->evict.order;
    /* may lie before the clock's zero: differences are what counts */
    b->born_ns = c->start_ns - age_ns(c, r);
    b->crc = r->block_crc;
    b->error = r->error;
    if (r->surprisals && r->n_tokens)
        cst_block_set_surprisals(b, r->surprisals);
    cst_cold_set(b, ref, r->payload_bytes, r->preset, side);
    space->stats.blocks++;
    cst_block_born(b);
    space->stats.tail_blocks += cst_block_is_tail(b);
    space->stats.recovered_blocks++;
    (void)cst_block_publish(b);
}

/* A table that has to grow gets its last size at once, if the space's share of the records stays
 * what it is. */
static void expect_share(struct cst_space *space, uint32_t n_tokens) {
    const struct cst_cold *c = space->store->cold;
    uint64_t most = cst_room_left(space->store) / cst_block_bytes(n_tokens);

    if (cst_hashmap_growth(&space->map))
        cst_hashmap_expect(&space->map, CST_MIN(space->map.count * c->expected / c->told, most));
}

static void expect_nodes(struct cst_store *store, uint32_t n_tokens) {
    const struct cst_cold *c = store->cold;
    uint64_t left = c->expected > c->told ? c->expected - c->told : 0;

    cst_nodes_ahead(store, left * cst_block_bytes(n_tokens));
}

static int add(struct cst_space *space, const struct cst_seg_record *r, struct cst_seg_ref ref,
               struct cst_block **out) {
    struct cst_store *store = space->store;
    struct cst_side_data *side = NULL;
    struct cst_block *parent;
    int status;

    expect_share(space, r->n_tokens);
    if (cst_trie_need(space, r->n_tokens, true) > cst_room_left(store))
        return DROP;
    status = parent_of(space, r, &parent);
    if (status)
        return status;
    if (r->n_side && !(side = cst_side_load_wanted(space, r->side[0])))
        return DROP;
    if (cst_trie_add(out, space, parent, r->key, r->tokens, r->n_tokens))
        return DROP;
    expect_nodes(store, r->n_tokens);
    revive(*out, r, ref, side);
    cst_block_settle(*out, CST_EVICT_COLD);
    if (parent)
        cst_block_settle(parent, CST_EVICT_COLD);
    return 0;
}

static void pin(struct cst_space *space, const struct cst_seg_record *r) {
    uint64_t now = cst_seg_unix(space->store->cold->seg), until = r->pinned_until;

    if (until > now)
        (void)cst_space_pin(
            space, r->key,
            until == UINT64_MAX || until - now > UINT32_MAX ? 0 : (until - now) * CST_NS_PER_S);
}

static int found(void *arg, const struct cst_seg_record *r, struct cst_seg_ref ref, void **owner) {
    struct cst_cold *c = arg;
    struct cst_space *space = space_of(c, r->space);
    struct cst_block *b = NULL;
    int status;

    c->told++;
    if (space && r->type == CST_SEG_SIDE)
        return cst_side_load_found(space, r, ref, owner);
    if (!space || !is_plausible(space, r) || cst_trie_find(space, r->key))
        return DROP;
    if (c->store->options.max_age_ns && age_ns(c, r) >= c->store->options.max_age_ns)
        return DROP;
    status = add(space, r, ref, &b);
    if (status)
        return status;
    *owner = c->last = b;
    if (r->pinned_until)
        pin(space, r);
    return 0;
}

static void expect(void *arg, uint64_t n_records) {
    struct cst_cold *c = arg;

    c->expected = n_records;
}

static void coming(void *arg, struct cst_seg_space *on_disk, const uint8_t *key, bool soon) {
    const struct cst_space *space = cst_seg_space_user(on_disk);

    if (space)
        cst_trie_expect(space, key, soon);
}

static void note(void *arg, const char *sentence) {
    struct cst_cold *c = arg;

    if (c->note)
        c->note(c->note_arg, sentence);
}

void cst_cold_recovered(struct cst_cold *c, int status) {
    c->recovering = false;
    c->last = NULL;
    cst_nodes_ahead(c->store, 0);
    c->recovered(c->arg, status);
}

static void told(void *arg, int status) {
    if (status)
        cst_cold_recovered(arg, status);
    else
        cst_side_load(arg);
}

void cst_store_disk_recover(struct cst_store *store, void (*done)(void *arg, int status),
                            void *arg) {
    struct cst_cold *c = store->cold;

    c->recovered = done;
    c->arg = arg;
    c->start_unix = cst_seg_unix(c->seg);
    c->start_ns = cst_store_now(store);
    cst_seg_recover(c->seg, told, c);
}

/* ---- opening ---- */

static struct cst_cold *cold_free(struct cst_cold *c) {
    if (c->arena && c->registered)
        cst_aio_unregister(c->aio, c->arena);
    c->arena = cst_unmap(c->arena, c->n_units * CST_COLD_UNIT);
    cst_free(c->units);
    return cst_free(c);
}

static int make_arena(struct cst_cold *c, uint64_t bytes) {
    c->n_units = bytes / CST_COLD_UNIT;
    c->units = cst_calloc(c->n_units, 1);
    if (!c->units)
        return cst_err(-ENOMEM);
    c->arena = cst_map(c->n_units * CST_COLD_UNIT);
    if (!c->arena)
        return cst_err(-ENOMEM);
    c->registered = cst_aio_register(c->aio, c->arena, c->n_units * CST_COLD_UNIT);
    return 0;
}

int cst_store_disk_open(struct cst_store *store, const struct cst_disk_options *options,
                        char *message, size_t cap) {
    struct cst_cold *c = cst_calloc(1, sizeof(*c));
    struct cst_seg_env env = {
        .aio = options->aio,
        .clock = store->env.clock,
        .unix_s = store->env.unix_s,
        .random = store->env.random,
        .jobs = store->env.jobs,
        .user = { .found = found,
                  .expect = expect,
                  .coming = coming,
                  .value = cst_cold_value,
                  .moved = cst_cold_moved,
                  .gone = cst_cold_gone,
                  .room = cst_cold_room,
                  .pinned_until = cst_cold_pinned_until,
                  .note = note,
                  .arg = c },
    };
    int r;

    if (!c)
        return cst_err(-ENOMEM);
    c->store = store;
    c->aio = options->aio;
    c->note = options->note;
    c->note_arg = options->note_arg;
    c->namespace_bytes = options->seg.namespace_bytes;
    c->recovering = true;
    cst_list_init(&c->kept);
    cst_list_init(&c->waiting);
    cst_list_init(&c->wait_reads);
    cst_list_init(&c->wait_ahead);
    c->ahead_max = options->ahead_bytes;
    r = make_arena(c, CST_MAX(options->read_bytes, 2 * CST_COLD_UNIT));
    if (!r)
        r = cst_seg_open(&c->seg, &options->seg, &env, message, cap);
    if (r) {
        (void)cold_free(c);
        return r == CST_SEG_E_REFUSED ? CST_STORE_E_REFUSED : cst_fold(r);
    }
    store->cold = c;
    return 0;
}

/* ---- the end ---- */

uint64_t cst_store_drain(struct cst_store *store, bool go_on, uint64_t *total) {
    struct cst_cold *c = store->cold;
    uint64_t left = 0;

    *total = 0;
    if (!c || c->closing)
        return 0;
    for (const struct cst_list *it = store->spaces.next; it != &store->spaces; it = it->next) {
        const struct cst_space *space = cst_list_entry(it, struct cst_space, link);

        if (space->disk &&
            (space->ns->disk_ops || (!c->drain_over && cst_trie_after(space, space->drained))))
            left += space->stats.blocks - space->stats.cold_blocks;
        if (space->disk && !c->drain_over)
            left += cst_side_disk_missing(space);
    }
    if (!store->draining)
        c->drain_start = left;
    store->draining = true;
    c->drain_over |= !go_on;
    *total = c->drain_start;
    (void)cst_seg_tick(c->seg);
    cst_cold_slice(store);
    return left;
}

/* Its blocks stay on disk when the store ends. */
int cst_store_disk_close(struct cst_store *store) {
    struct cst_cold *c = store->cold;

    if (!c || c->closing)
        return 0;
    c->closing = true;
    return cst_fold(cst_seg_close(c->seg));
}

void cst_cold_free(struct cst_store *store) {
    struct cst_cold *c = store->cold;

    if (!c)
        return;
    c->seg = cst_seg_free(c->seg);
    cst_side_kept_free(c);
    store->cold = cold_free(c);
}

/* ---- purge, numbers ---- */

/* What comes from now on goes to disk under a new key. */
static void reopen_spaces(struct cst_namespace *ns) {
    struct cst_list *it;

    for (it = ns->store->spaces.next; it != &ns->store->spaces; it = it->next) {
        struct cst_space *space = cst_list_entry(it, struct cst_space, link);

        if (space->ns != ns || !space->disk)
            continue;
        cst_cold_forget_space(space);
        (void)cst_cold_open_space(space);
    }
}

/* The key goes at once, so that nothing comes back after a kill. While something is under way,
 * nothing new begins, and the rest comes with cst_store_tick(). */
static enum cst_purge purge_now(struct cst_namespace *ns) {
    enum cst_seg_erasure how = CST_SEG_UNLINKED;
    int r;

    cst_side_kept_drop(ns->store->cold, ns->name, NULL, false);
    r = cst_seg_purge(ns->store->cold->seg, ns->name, &how);
    ns->purging = ns->disk_ops;
    if (!r && !ns->purging)
        reopen_spaces(ns);
    if (r)
        return CST_PURGE_FAILED;
    return how == CST_SEG_ERASED ? CST_PURGE_ERASED : CST_PURGE_UNLINKED;
}

static void purge_later(struct cst_namespace *ns) {
    if (ns->purging && !ns->disk_ops)
        (void)purge_now(ns);
}

void cst_cold_purge_slice(struct cst_store *store) {
    struct cst_list *it, *tmp;

    cst_list_for_each_safe (it, tmp, &store->namespaces)
        purge_later(cst_list_entry(it, struct cst_namespace, link));
}

enum cst_purge cst_cold_purge(struct cst_namespace *ns) {
    return ns->store->cold ? purge_now(ns) : CST_PURGE_ERASED;
}

bool cst_store_disk_stats(const struct cst_store *store, struct cst_seg_stats *out) {
    if (!store->cold)
        return false;
    cst_seg_stats(store->cold->seg, out);
    return true;
}
