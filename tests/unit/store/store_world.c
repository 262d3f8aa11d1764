/* SPDX-License-Identifier: Apache-2.0 */
/* The glass store of the store's tests. Owns what it makes; one thread. */
#include "tests/unit/store/store_world.h"

#include "base/crc32c.h"
#include "base/fault.h"
#include "base/mem.h"
#include "base/sha256.h"
#include "store/prefix_trie.h"
#include "tests/lib/check.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

_Atomic size_t world_slabs;

static int slab_make(struct cst_mem_slab *out, uint64_t size, enum cst_slab_use use) {
    assert_int_equal(use, CST_SLAB_READ_ONLY);
    if (cst_fault_hit(CST_FAULT_MAP))
        return -ENOMEM;
    *out = (struct cst_mem_slab){ .fd = -1, .base = calloc(1, size), .size = size };
    assert_non_null(out->base);
    world_slabs++;
    return 0;
}

static void slab_drop(struct cst_mem_slab *slab) {
    if (slab->base)
        world_slabs--;
    free(slab->base);
    *slab = CST_MEM_SLAB_NULL;
}

const struct cst_mem_ops world_mem = { "heap", slab_make, slab_drop };

static void on_retire(void *arg, struct cst_slab *slab) {
    struct world *w = arg;

    assert_true(slab->retired);
    w->retired++;
}

static void on_event(void *arg, struct cst_space *space, enum cst_event what, const uint8_t key[32],
                     enum cst_tier tier) {
    struct world *w = arg;

    w->events[what]++;
    memcpy(w->last_event_key, key, 32);
    if (w->hook)
        w->hook(w->hook_arg, space, what, key);
}

struct world *world_new(const struct world_options *o) {
    struct world *w = calloc(1, sizeof(*w));
    struct cst_store_options options = {
        .memory = o->memory ? o->memory : UINT64_C(64) << 20,
        .index = o->index,
        .slab_bytes = WORLD_SLAB,
        .max_age_ns = o->max_age_ns,
        .pin_bytes = o->pin_bytes,
        .spaces_max = o->spaces_max,
        .policy = o->policy,
        .side_bytes = o->side_bytes,
        .workers = o->workers,
        .learn_wait_ns = o->learn_wait_ns,
    };

    assert_non_null(w);
    cst_manual_clock_init(&w->clock, 1000);
    cst_seeded_random_init(&w->random, o->seed);
    test_jobs_init(&w->jobs, !o->manual_jobs);
    assert_int_equal(cst_store_new(&w->store, &options,
                                   &(struct cst_store_env){ .clock = &w->clock.clock,
                                                            .random = &w->random.random,
                                                            .jobs = &w->jobs.jobs,
                                                            .mem = &world_mem,
                                                            .slab_retire = on_retire,
                                                            .event = on_event,
                                                            .arg = w }),
                     0);
    return w;
}

struct world *world_with(const struct world_options *options, struct cst_space **s) {
    struct world *w = world_new(options);

    *s = world_space(w, "a", 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
    return w;
}

size_t world_turn(struct world *w) {
    size_t n = 0;

    if (w->aio) {
        cst_aio_kick(w->aio);
        n = cst_aio_reap(w->aio);
    }
    return n + test_jobs_drain(&w->jobs);
}

/* More turns than one without an end: a fault may hold an operation back for some. */
static void settle(struct world *w) {
    for (unsigned idle = 0; idle < (w->aio ? 16 : 1); idle++)
        if (world_turn(w))
            idle = 0;
}

void world_settle(struct world *w) {
    settle(w);
    assert_int_equal(cst_store_jobs(w->store), 0);
}

static uint64_t any(struct cst_seeded_random *order, uint64_t n) {
    return cst_seeded_random_next(order) % n;
}

void world_get_on(struct world *w, struct cst_seeded_random *order, unsigned slowness) {
    if (!any(order, slowness)) {
        cst_aio_kick(w->aio);
        (void)cst_aio_reap(w->aio);
    } else if (any(order, 2)) {
        (void)test_jobs_run(&w->jobs, any(order, 64));
    } else {
        (void)test_jobs_done(&w->jobs, any(order, 64));
    }
}

void world_disk_open(struct world *w, uint64_t capacity, uint64_t seed,
                     struct cst_disk_options options) {
    char message[256];

    assert_int_equal(cst_sim_disk_new(&w->disk, capacity, 1), 0);
    assert_int_equal(cst_aio_new_sim(&w->aio, w->disk), 0);
    assert_int_equal(cst_aio_new_fault(&w->aio, w->aio, seed), 0);
    options.aio = w->aio;
    assert_int_equal(cst_store_disk_open(w->store, &options, message, sizeof(message)), 0);
}

static void recovered(void *arg, int status) {
    *(bool *)arg = !status;
}

void world_recover(struct world *w) {
    bool ready = false;

    cst_store_disk_recover(w->store, recovered, &ready);
    settle(w);
    assert_true(ready);
}

void world_free(struct world *w) {
    size_t slabs = world_slabs;

    cst_store_stop(w->store);
    world_settle(w);
    assert_null(cst_store_free(w->store));
    assert_true(world_slabs <= slabs);
    (void)cst_aio_free(w->aio);
    (void)cst_sim_disk_free(w->disk);
    free(w);
}

void world_end(struct world *w, struct cst_space *s) {
    world_settle(w);
    world_check(w);
    assert_int_equal(w->store->leases + w->store->reserved, 0);
    assert_null(cst_space_unref(s));
    world_free(w);
    assert_int_equal(world_slabs, 0);
}

struct cst_descriptor *world_descriptor(unsigned variant) {
    struct cst_descriptor *d = calloc(1, sizeof(*d));
    uint64_t half = WORLD_BLOCK / 2, row = half / WORLD_TOKENS;

    assert_non_null(d);
    d->content_id[0] = (uint8_t)variant;
    memcpy(d->engine, "test", 5);
    d->block_tokens = WORLD_TOKENS;
    d->tp_size = 1;
    d->block_bytes = WORLD_BLOCK;
    d->n_layers = 1;
    d->n_segments = 2;
    d->layers = calloc(1, sizeof(*d->layers));
    d->segments = calloc(2, sizeof(*d->segments));
    d->layers[0] = (struct cst_layer){ .kv_heads = 1, .head_dim_k = 64, .head_dim_v = 64 };
    for (unsigned i = 0; i < 2; i++)
        d->segments[i] = (struct cst_segment){ .tensor = (uint8_t)i,
                                               .dtype = CST_DTYPE_F16,
                                               .offset = i * half,
                                               .length = half,
                                               .token_stride = row,
                                               .head_stride = row,
                                               .dim_stride = 2 };
    return d;
}

struct cst_descriptor *world_descriptor_free(struct cst_descriptor *d) {
    free(d->layers);
    free(d->segments);
    free(d);
    return NULL;
}

struct cst_space *world_space(struct world *w, const char *ns_name, unsigned variant,
                              enum cst_kind kind, enum cst_class klass) {
    struct cst_descriptor *d = world_descriptor(variant);
    struct cst_namespace *ns;
    struct cst_space *space;
    uint8_t fingerprint[32] = { (uint8_t)variant, (uint8_t)(variant >> 8) };

    assert_int_equal(cst_namespace_get(w->store, ns_name, &ns), 0);
    assert_int_equal(
        cst_space_open(&space, ns, &d, world_descriptor_free, fingerprint, kind, klass), 0);
    assert_null(d);
    return space;
}

void world_key(uint8_t out[32], const uint8_t parent[32], const uint32_t *tokens, uint32_t n) {
    uint8_t bytes[32 + 4 * CST_BLOCK_TOKENS_MAX];

    memcpy(bytes, parent, 32);
    memcpy(bytes + 32, tokens, 4UL * n);
    cst_sha256(bytes, 32 + 4UL * n, out);
}

void world_key_n(uint8_t out[32], uint64_t n) {
    cst_sha256(&n, sizeof(n), out);
}

/* 16-bit floats in [0.5, 1): like real tensors their exponents say little, so they pack. */
void world_fill(uint8_t out[WORLD_BLOCK], const uint8_t key[32], uint32_t generation) {
    struct cst_seeded_random r;
    uint64_t seed;

    memcpy(&seed, key, sizeof(seed));
    cst_seeded_random_init(&r, seed ^ (uint64_t)generation << 32);
    for (size_t i = 0; i < WORLD_BLOCK; i += 8) {
        uint64_t v = (cst_seeded_random_next(&r) & UINT64_C(0x03ff03ff03ff03ff)) |
                     UINT64_C(0x3800380038003800);

        memcpy(out + i, &v, 8);
    }
}

bool world_bytes_are(const struct cst_location *loc, const uint8_t key[32],
                     uint32_t n_generations) {
    const uint8_t *data = loc->slab->mem.base + loc->offset;
    uint8_t want[WORLD_BLOCK];

    if (loc->packed || loc->length != WORLD_BLOCK ||
        cst_crc32c(0, data, loc->length) != loc->crc32c)
        return false;
    for (uint32_t g = 0; g < n_generations; g++) {
        world_fill(want, key, g);
        if (!memcmp(want, data, WORLD_BLOCK))
            return true;
    }
    return false;
}

void world_put_done(struct cst_put *put, int status) {
    struct world_put *p = cst_container_of(put, struct world_put, put);

    assert_false(cst_put_is_open(put));
    p->status = status;
    p->told++;
}

void world_fetch_ready(struct cst_fetch *fetch, int status) {
    struct world_fetch *f = cst_container_of(fetch, struct world_fetch, fetch);

    f->status = status;
    f->told++;
}

int world_store(struct world *w, struct cst_space *space, const uint8_t *parent, bool is_root,
                const uint8_t key[32], const uint32_t *tokens, uint32_t n) {
    struct world_put p = { .put = CST_PUT_NULL(world_put_done), .status = -1 };
    uint32_t busy_ms;
    int r = cst_put_begin(space, parent, is_root, key, tokens, n, &p.put, &busy_ms);

    if (r)
        return r;
    world_fill(p.bytes, key, 0);
    cst_put_commit(&p.put, p.bytes, NULL);
    world_settle(w);
    assert_int_equal(p.told, 1);
    return p.status;
}

void world_store_chain(struct world *w, struct cst_space *space, const uint8_t root[32],
                       uint32_t first_token, size_t n, uint8_t *keys) {
    const uint8_t *parent = root;

    for (size_t i = 0; i < n; i++) {
        uint32_t tokens[WORLD_TOKENS];

        for (unsigned t = 0; t < WORLD_TOKENS; t++)
            tokens[t] = first_token + (uint32_t)i;
        world_key(keys + 32 * i, parent, tokens, WORLD_TOKENS);
        assert_int_equal(world_store(w, space, parent, i == 0, keys + 32 * i, tokens, WORLD_TOKENS),
                         0);
        parent = keys + 32 * i;
    }
}

void world_fetch(struct world *w, struct cst_space *space, const uint8_t key[32],
                 enum cst_fetch_mode mode, struct world_fetch *f) {
    *f = (struct world_fetch){ .fetch = CST_FETCH_NULL(world_fetch_ready) };
    f->status = cst_fetch_start(space, key, mode, &f->fetch);
    if (f->status == CST_STORE_E_PENDING) {
        world_settle(w);
        assert_int_equal(f->told, 1);
    }
}

size_t world_present(struct cst_space *space, const uint8_t *keys, size_t n) {
    struct cst_lookup found;

    cst_space_lookup(space, keys, n, NULL, NULL, 0, NULL, &found);
    return found.present;
}

void world_pack(struct world *w) {
    size_t before;

    do {
        before = w->jobs.n_done;
        cst_store_tick(w->store);
        world_settle(w);
    } while (w->jobs.n_done > before + 1); /* the scrubber always has one */
}

void world_cool(struct cst_space *space, const uint8_t key[32]) {
    struct cst_block *b = cst_trie_find(space, key);

    assert_true(b && b->hot.slab && b->packed.slab);
    cst_block_drop_hot(b);
    cst_block_settle(b, CST_EVICT_WARM);
}
