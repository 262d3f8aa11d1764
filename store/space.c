/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns namespaces and spaces: their identity, references, accounts and numbers.
 * Invariants: 1. one space for each (namespace, fingerprint, kind, class); 2. a space lives while
 * it has references, blocks (dead ones too), jobs, open puts or slabs (retired ones too);
 * 3. index bytes of a space are its share of store->index_bytes, to the byte; 4. counters of spaces
 * that are gone stay in their namespace. Loop thread only.
 */
#include "base/err.h"
#include "base/mem.h"
#include "store/choice.h"
#include "store/core.h"
#include "store/prefix_trie.h"
#include "store/side_disk.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

/* ---- accounts ---- */

void cst_space_index_add(struct cst_space *space, int64_t delta) {
    space->stats.index_bytes += (uint64_t)delta;
    space->store->index_bytes += (uint64_t)delta;
}

int cst_map_insert(struct cst_space *space, struct cst_hashmap *map, struct cst_hnode *node,
                   uint64_t hash) {
    size_t before = cst_hashmap_bytes(map);
    int r = cst_hashmap_insert(map, node, hash);
    int64_t delta = (int64_t)cst_hashmap_bytes(map) - (int64_t)before;

    if (map == &space->store->slab_map)
        space->store->index_bytes += (uint64_t)delta;
    else
        cst_space_index_add(space, delta);
    return r;
}

void cst_space_index_ghosts(struct cst_space *space) {
    size_t bytes = cst_evict_bytes(&space->evict);

    cst_space_index_add(space, (int64_t)bytes - (int64_t)space->evict_bytes);
    space->evict_bytes = bytes;
}

static size_t own_bytes(const struct cst_space *space) {
    return sizeof(*space) + sizeof(*space->desc) +
           space->desc->n_layers * sizeof(struct cst_layer) +
           space->desc->n_segments * sizeof(struct cst_segment);
}

/* ---- namespaces ---- */

int cst_namespace_get(struct cst_store *store, const char *name, struct cst_namespace **out) {
    size_t n = strlen(name) + 1;
    struct cst_list *it;
    struct cst_namespace *ns;

    for (it = store->namespaces.next; it != &store->namespaces; it = it->next) {
        ns = cst_list_entry(it, struct cst_namespace, link);
        if (!strcmp(ns->name, name)) {
            *out = ns;
            return 0;
        }
    }
    ns = cst_calloc(1, sizeof(*ns) + n);
    if (!ns)
        return cst_err(-ENOMEM);
    ns->store = store;
    memcpy(ns->name, name, n);
    cst_list_init(&ns->pinned);
    cst_list_append(&store->namespaces, &ns->link);
    *out = ns;
    return 0;
}

const char *cst_namespace_name(const struct cst_namespace *ns) {
    return ns->name;
}

/* ---- spaces ---- */

static struct cst_space *find_space(const struct cst_namespace *ns, const uint8_t fingerprint[32],
                                    enum cst_kind kind, enum cst_class klass) {
    struct cst_list *head = &ns->store->spaces, *it;

    for (it = head->next; it != head; it = it->next) {
        struct cst_space *s = cst_list_entry(it, struct cst_space, link);

        if (s->ns == ns && s->kind == kind && s->klass == klass &&
            !memcmp(s->fingerprint, fingerprint, sizeof(s->fingerprint)))
            return s;
    }
    return NULL;
}

/* Buffer and workspace of one encode, as far as they count. */
static uint64_t encode_bytes(const struct cst_descriptor *desc) {
    uint64_t work = cst_codec_work_size(desc, CST_PRESET_LOSSLESS),
             all = work + cst_frame_bound(desc);

    if (work > CST_WORK_MAX)
        return UINT64_MAX;
    return all > CST_ENCODE_FREE ? all : 0;
}

static uint64_t work_of(const struct cst_space *s) {
    static const struct cst_side some;
    struct cst_choices choices;
    uint64_t most = 0;

    cst_choices(&choices, s->klass, cst_store_preset(s->store, s->klass), &some);
    for (uint32_t i = 0; i < choices.n; i++) {
        uint64_t work = cst_codec_work_size(s->desc, choices.try[i].preset);

        if (work <= CST_DENSE_MAX)
            most = CST_MAX(most, work);
    }
    return most;
}

void cst_space_count_work(struct cst_store *store) {
    uint64_t most = 0;

    for (const struct cst_list *it = store->spaces.next; it != &store->spaces; it = it->next) {
        struct cst_space *s =
            cst_container_of((struct cst_list *)(uintptr_t)it, struct cst_space, link);

        if (!s->work_bytes)
            s->work_bytes = work_of(s);
        most = CST_MAX(most, s->work_bytes);
    }
    store->work_bytes = CST_MIN(most * store->options.workers, store->options.memory / 8);
}

static struct cst_space *space_new(struct cst_namespace *ns, struct cst_descriptor *desc,
                                   const uint8_t fingerprint[32]) {
    struct cst_space *s = cst_calloc(1, sizeof(*s));

    if (!s)
        return NULL;
    s->store = ns->store;
    s->ns = ns;
    s->desc = desc;
    s->encode_bytes = encode_bytes(desc);
    memcpy(s->fingerprint, fingerprint, sizeof(s->fingerprint));
    cst_evict_init(&s->evict, ns->store->policy);
    cst_list_init(&s->clean);
    cst_list_init(&s->dirty);
    cst_list_init(&s->cold);
    cst_list_init(&s->dirty_link);
    cst_list_init(&s->dead);
    cst_list_init(&s->hot_free);
    for (unsigned i = 0; i < CST_PACKED_CLASSES; i++)
        cst_list_init(&s->packed_free[i]);
    cst_list_init(&s->wait_decodes);
    cst_list_init(&s->disk_link);
    cst_list_init(&s->wait_puts);
    cst_list_init(&s->wait_encodes);
    cst_list_init(&s->wait_keeps);
    cst_list_init(&s->sides);
    cst_list_init(&s->sides_found);
    cst_list_append(&ns->store->spaces, &s->link);
    ns->n_spaces++;
    cst_space_index_add(s, (int64_t)own_bytes(s));
    return s;
}

static struct cst_descriptor *keep(struct cst_descriptor *desc) {
    return desc;
}

int cst_space_open(struct cst_space **out, struct cst_namespace *ns, struct cst_descriptor **desc,
                   struct cst_descriptor *(*desc_free)(struct cst_descriptor *),
                   const uint8_t fingerprint[32], enum cst_kind kind, enum cst_class klass) {
    struct cst_space *s = find_space(ns, fingerprint, kind, klass);
    int r;

    if (s) {
        *out = cst_space_ref(s);
        (void)desc_free(cst_steal(desc));
        return 0;
    }
    if (ns->n_spaces >= ns->store->options.spaces_max)
        return CST_STORE_E_LIMIT;
    s = space_new(ns, *desc, fingerprint);
    if (!s)
        return cst_err(-ENOMEM);
    s->desc_free = desc_free;
    s->kind = kind;
    s->klass = klass;
    cst_space_count_work(s->store);
    r = cst_room_index(s, 0);
    if (r) { /* desc stays the caller's */
        s->desc_free = keep;
        cst_space_free(s);
        return r;
    }
    *desc = NULL;
    *out = cst_space_ref(s);
    (void)cst_cold_open_space(s); /* without: its blocks stay in memory */
    return 0;
}

static void add_counters(struct cst_space_stats *to, const struct cst_space_stats *from) {
    to->lookups += from->lookups;
    to->lookup_keys += from->lookup_keys;
    to->hit_keys += from->hit_keys;
    to->acquires += from->acquires;
    to->served_blocks += from->served_blocks;
    to->served_bytes += from->served_bytes;
    to->served_tokens += from->served_tokens;
    to->stored_blocks += from->stored_blocks;
    to->stored_bytes += from->stored_bytes;
    to->evicted_blocks += from->evicted_blocks;
    to->detached_blocks += from->detached_blocks;
    to->corrupt_blocks += from->corrupt_blocks;
    to->expired_blocks += from->expired_blocks;
    to->decodes += from->decodes;
    to->encodes += from->encodes;
    to->fallbacks += from->fallbacks;
    to->recodes += from->recodes;
    to->sides_learned += from->sides_learned;
    to->spilled_blocks += from->spilled_blocks;
    to->spilled_bytes += from->spilled_bytes;
    to->cold_reads += from->cold_reads;
    to->prefetched_blocks += from->prefetched_blocks;
    to->prefetch_used += from->prefetch_used;
    to->cooled_blocks += from->cooled_blocks;
    to->recovered_blocks += from->recovered_blocks;
    to->merged_fetches += from->merged_fetches;
    to->busy += from->busy;
}

void cst_space_free(struct cst_space *s) {
    struct cst_store *store = s->store;

    cst_side_free_all(s);
    cst_cold_forget_space(s);
    add_counters(&s->ns->past, &s->stats);
    cst_evict_deinit(&s->evict);
    cst_space_index_ghosts(s);
    cst_space_index_add(s, -(int64_t)(cst_hashmap_bytes(&s->map) + cst_hashmap_bytes(&s->roots)));
    cst_hashmap_deinit(&s->map);
    cst_hashmap_deinit(&s->roots);
    cst_space_index_add(s, -(int64_t)own_bytes(s));
    assert(!s->stats.index_bytes);
    cst_list_unlink(&s->link);
    cst_list_unlink(&s->dirty_link);
    cst_list_unlink(&s->disk_link);
    s->ns->n_spaces--;
    (void)s->desc_free(s->desc);
    cst_free(s);
    cst_space_count_work(store);
}

void cst_space_reap(struct cst_space *s) {
    if (s->refs || s->map.count || s->n_dead || s->n_jobs || s->stats.reserved)
        return;
    cst_room_give_back(s);
    if (!s->n_slabs)
        cst_space_free(s);
}

struct cst_space *cst_space_ref(struct cst_space *space) {
    space->refs++;
    return space;
}

struct cst_space *cst_space_unref(struct cst_space *space) {
    if (!space)
        return NULL;
    assert(space->refs);
    space->refs--;
    cst_space_reap(space);
    return NULL;
}

struct cst_namespace *cst_space_namespace(const struct cst_space *space) {
    return space->ns;
}

const struct cst_descriptor *cst_space_descriptor(const struct cst_space *space) {
    return space->desc;
}

const uint8_t *cst_space_fingerprint(const struct cst_space *space) {
    return space->fingerprint;
}

enum cst_kind cst_space_kind(const struct cst_space *space) {
    return space->kind;
}

enum cst_class cst_space_class(const struct cst_space *space) {
    return space->klass;
}

uint32_t cst_space_presets(const struct cst_space *space) {
    uint32_t exact = 1u << CST_PRESET_RAW | 1u << CST_PRESET_LOSSLESS;

    return space->klass == CST_CLASS_LOSSLESS ? exact : (1u << CST_PRESETS) - 1;
}

void cst_store_for_each_space(struct cst_store *store, struct cst_namespace *ns,
                              void (*fn)(struct cst_space *space, void *arg), void *arg) {
    struct cst_list *it, *tmp;

    cst_list_for_each_safe (it, tmp, &store->spaces) {
        struct cst_space *s = cst_list_entry(it, struct cst_space, link);

        if (!ns || s->ns == ns)
            fn(s, arg);
    }
}

uint64_t cst_namespace_purge(struct cst_namespace *ns, enum cst_purge *result) {
    struct cst_list *it, *tmp;
    uint64_t n = 0;

    ns->purging = ns->store->cold != NULL;

    cst_list_for_each_safe (it, tmp, &ns->store->spaces) {
        struct cst_space *s = cst_list_entry(it, struct cst_space, link);

        if (s->ns != ns)
            continue;
        (void)cst_space_ref(s);
        n += cst_space_clear(s);
        cst_learn_forget(s);
        cst_side_forget(s);
        (void)cst_space_unref(s);
    }
    *result = cst_cold_purge(ns);
    return n;
}

/* ---- numbers ---- */

void cst_space_stats(const struct cst_space *space, struct cst_space_stats *out) {
    *out = space->stats;
    out->hot_bytes = space->hot_copies * space->desc->block_bytes;
    out->packed_decoded_bytes = space->packed_copies * space->desc->block_bytes;
    out->sides_off_disk = cst_side_disk_n_out(space);
}

static void add_levels(struct cst_space_stats *to, const struct cst_space_stats *from) {
    to->blocks += from->blocks;
    to->tail_blocks += from->tail_blocks;
    to->hot_bytes += from->hot_bytes;
    to->packed_bytes += from->packed_bytes;
    to->packed_decoded_bytes += from->packed_decoded_bytes;
    to->index_bytes += from->index_bytes;
    to->hot_slab_bytes += from->hot_slab_bytes;
    to->packed_slab_bytes += from->packed_slab_bytes;
    to->held_bytes += from->held_bytes;
    to->leases += from->leases;
    to->reserved += from->reserved;
    to->pinned_blocks += from->pinned_blocks;
    to->side_bytes += from->side_bytes;
    to->sides_off_disk += from->sides_off_disk;
    to->cold_blocks += from->cold_blocks;
    to->cold_bytes += from->cold_bytes;
}

void cst_namespace_stats(const struct cst_namespace *ns, struct cst_space_stats *out) {
    const struct cst_list *head = &ns->store->spaces, *it;

    *out = ns->past;
    for (it = head->next; it != head; it = it->next) {
        const struct cst_space *s = cst_list_entry(it, struct cst_space, link);
        struct cst_space_stats one;

        if (s->ns != ns)
            continue;
        cst_space_stats(s, &one);
        add_counters(out, &one);
        add_levels(out, &one);
    }
}

static void describe(const struct cst_block *b, struct cst_block_info *out) {
    *out = (struct cst_block_info){
        .packed_bytes = b->packed.length,
        .tokens = b->n_tokens,
        .depth = b->depth,
        .tier = cst_block_tier(b),
        .preset = b->preset,
        .leases = (uint16_t)CST_MIN(b->hot.leases + b->packed.leases, UINT16_MAX),
        .error = b->error,
        .surprisal = b->surprisal,
    };
    memcpy(out->key, b->key, CST_KEY_SIZE);
    if (b->parent)
        memcpy(out->parent, b->parent->key, CST_KEY_SIZE);
}

/* The cursor is the last sequence number seen: blocks that come later have larger ones. Blocks that
 * are not visible are passed over, a bounded number of them in one call. */
size_t cst_space_blocks(struct cst_space *space, uint64_t cursor, struct cst_block_info *out,
                        size_t max, uint64_t *next) {
    const struct cst_block *b = cst_trie_after(space, cursor);
    size_t n = 0, hidden = 0;

    while (b && n < max && hidden < max) {
        const struct cst_treap_node *node = cst_treap_next(&b->by_age);

        if (b->visible && !cst_block_is_expired(b))
            describe(b, &out[n++]);
        else
            hidden++;
        cursor = b->seq;
        b = node ? cst_container_of(node, struct cst_block, by_age) : NULL;
    }
    *next = b ? cursor : 0;
    return n;
}
