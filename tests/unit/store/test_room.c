/* SPDX-License-Identifier: Apache-2.0 */
/* Where room comes from: a memory of a few slabs, full of one thing when another one comes. */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "base/mem.h"
#include "store/cold.h"
#include "store/prefix_trie.h"
#include "tests/unit/store/store_world.h"

#include <string.h>

enum { SLAB_BLOCKS = WORLD_SLAB / WORLD_BLOCK, INDEX = WORLD_SLAB - 64 };

static const uint8_t root[32] = { 7 };

/* Memory for n slabs, but not for n + 1, and an index that is not the limit. */
static struct world *tight(unsigned n, const char *policy) {
    return world_new(&(struct world_options){
        .seed = 1, .memory = (uint64_t)n * WORLD_SLAB + INDEX, .index = INDEX, .policy = policy });
}

static struct cst_space *space(struct world *w, const char *ns) {
    return world_space(w, ns, 1, CST_KIND_TOKENS, CST_CLASS_LOSSLESS);
}

/* Block i of many roots' children: each one a leaf. */
static int store_leaf(struct world *w, struct cst_space *s, uint32_t i, uint8_t key[32]) {
    uint32_t tokens[WORLD_TOKENS];

    for (unsigned t = 0; t < WORLD_TOKENS; t++)
        tokens[t] = i;
    world_key(key, root, tokens, WORLD_TOKENS);
    return world_store(w, s, root, true, key, tokens, WORLD_TOKENS);
}

static void leaf_key(uint32_t i, uint8_t key[32]) {
    uint32_t tokens[WORLD_TOKENS];

    for (unsigned t = 0; t < WORLD_TOKENS; t++)
        tokens[t] = i;
    world_key(key, root, tokens, WORLD_TOKENS);
}

static bool there(struct cst_space *s, uint32_t i) {
    uint8_t key[32];

    leaf_key(i, key);
    return world_present(s, key, 1);
}

static void end_world(struct world *w) {
    world_settle(w);
    world_check(w);
    world_free(w);
    assert_int_equal(world_slabs, 0);
}

static struct cst_space_stats numbers(struct cst_space *s) {
    struct cst_space_stats stats;

    cst_space_stats(s, &stats);
    return stats;
}

/* Without a tick nothing is packed: two hot slabs, and then the oldest leaf goes for each new one.
 */
static void the_oldest_leaf_goes_first(void **state) {
    struct world *w = tight(2, "lru");
    struct cst_space *s = space(w, "a");
    const uint32_t n = 2 * SLAB_BLOCKS;
    uint8_t key[32];

    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(store_leaf(w, s, i, key), 0);
    assert_int_equal(numbers(s).evicted_blocks, 0);
    leaf_key(0, key);
    assert_int_equal(cst_space_touch(s, key), 0);
    assert_int_equal(store_leaf(w, s, n, key), 0);
    assert_true(there(s, 0) && !there(s, 1) && there(s, 2) && there(s, n));
    assert_int_equal(numbers(s).evicted_blocks, 1);
    world_check(w);
    (void)cst_space_unref(s);
    end_world(w);
}

static void chains_go_from_the_end(void **state) {
    struct world *w = tight(2, "lru");
    struct cst_space *s = space(w, "a");
    const uint32_t n = 2 * SLAB_BLOCKS;
    uint8_t keys[2 * SLAB_BLOCKS * 32], key[32];

    world_store_chain(w, s, root, 100, n, keys);
    for (uint32_t i = 1; i <= n; i++) {
        assert_int_equal(store_leaf(w, s, i, key), 0);
        assert_int_equal(world_present(s, keys, n), n - i);
        world_check(w);
    }
    (void)cst_space_unref(s);
    end_world(w);
}

static void leased_and_pinned_blocks_stay(void **state) {
    struct world *w = tight(2, "arc");
    struct cst_space *s = space(w, "a");
    const uint32_t n = 2 * SLAB_BLOCKS;
    struct world_fetch f[2 * SLAB_BLOCKS];
    uint8_t key[32];

    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(store_leaf(w, s, i, key), 0);
        if (i < 4)
            assert_int_equal(cst_space_pin(s, key, 0), 0);
        else
            world_fetch(w, s, key, CST_FETCH_DECODED, &f[i]);
    }
    assert_int_equal(store_leaf(w, s, n, key), CST_STORE_E_BUSY);
    assert_int_equal(numbers(s).busy, 1);
    assert_int_equal(numbers(s).blocks, n);
    cst_fetch_release(&f[5].fetch);
    assert_int_equal(store_leaf(w, s, n, key), 0);
    for (uint32_t i = 0; i <= n; i++)
        assert_int_equal(there(s, i), i != 5);
    for (uint32_t i = 4; i < n; i++)
        cst_fetch_release(&f[i].fetch);
    world_check(w);
    (void)cst_space_unref(s);
    end_world(w);
}

/* One that was packed loses its hot copy before anything is lost. */
static void packing_makes_room(void **state) {
    struct world *w = tight(4, "lru");
    struct cst_space *s = space(w, "a");
    const uint32_t n =
        2 * SLAB_BLOCKS + 4; /* more than the hot slabs would hold beside packed ones */
    struct world_fetch f;
    uint8_t key[32];

    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(store_leaf(w, s, i, key), 0);
        world_pack(w);
        world_check(w);
    }
    assert_int_equal(numbers(s).evicted_blocks, 0);
    for (uint32_t i = 0; i < n; i++) {
        leaf_key(i, key);
        world_fetch(w, s, key, CST_FETCH_DECODED, &f);
        assert_int_equal(f.status, 0);
        assert_true(world_bytes_are(&f.fetch.loc, key, 1));
        cst_fetch_release(&f.fetch);
        world_check(w);
    }
    assert_true(numbers(s).decodes > 0);
    (void)cst_space_unref(s);
    end_world(w);
}

/* A burst that finds memory full of old packed blocks replaces these, not itself. */
static void a_burst_replaces_what_is_older(void **state) {
    struct world *w = tight(5, "lru");
    struct cst_space *s = space(w, "a");
    const uint32_t old = 60, burst = 2 * SLAB_BLOCKS;
    uint32_t oldest = 0;
    uint8_t key[32];

    for (uint32_t i = 0; i < old; i++) {
        assert_int_equal(store_leaf(w, s, i, key), 0);
        world_pack(w);
    }
    assert_true(numbers(s).evicted_blocks > 0);  /* full */
    for (uint32_t i = old; i < old + burst; i++) /* faster than ticks */
        assert_int_equal(store_leaf(w, s, i, key), 0);
    while (!there(s, oldest))
        oldest++;
    assert_true(oldest < old);
    for (uint32_t i = oldest; i < old + burst; i++)
        assert_true(there(s, i));
    world_check(w);
    (void)cst_space_unref(s);
    end_world(w);
}

/* Packing ahead of need takes nothing from others. */
static void idle_packing_evicts_nobody(void **state) {
    struct world *w = tight(3, "lru");
    struct cst_space *a = space(w, "a"), *b = space(w, "b");
    uint8_t key[32];
    size_t jobs;

    for (uint32_t i = 0; i < 2 * SLAB_BLOCKS; i++)
        assert_int_equal(store_leaf(w, a, i, key), 0);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(store_leaf(w, b, i, key), 0);
    jobs = w->jobs.n_done;
    for (unsigned i = 0; i < 10; i++) {
        cst_store_tick(w->store);
        world_settle(w);
        w->clock.ns += 2 * CST_NS_PER_S;
    }
    assert_int_equal(numbers(a).blocks, 2 * SLAB_BLOCKS);
    assert_int_equal(numbers(b).blocks, 3);
    assert_true(w->jobs.n_done - jobs <= 10 + 6); /* the scrubber's, ever fewer encodes */
    (void)cst_space_unref(a);
    (void)cst_space_unref(b);
    end_world(w);
}

/* A block whose values have fewer bits: it packs into another size class. */
static void store_small(struct world *w, struct cst_space *s, uint32_t i) {
    const uint32_t tokens[WORLD_TOKENS] = { i, 1 };
    struct world_put p = { .put = CST_PUT_NULL(world_put_done) };
    uint8_t key[32];
    uint32_t busy_ms;

    world_key(key, root, tokens, WORLD_TOKENS);
    world_fill(p.bytes, key, 0);
    for (unsigned j = 0; j < WORLD_BLOCK; j += 2) {
        p.bytes[j] &= 0x0f;
        p.bytes[j + 1] &= 0xf8;
    }
    assert_int_equal(cst_put_begin(s, root, true, key, tokens, WORLD_TOKENS, &p.put, &busy_ms), 0);
    cst_put_commit(&p.put, p.bytes, NULL);
    world_settle(w);
    assert_int_equal(p.status, 0);
}

/* A free packed slot of the wrong size is no reason to take somebody's slab, either. */
static void idle_packing_of_another_size_evicts_nobody(void **state) {
    struct world *w = tight(4, "lru");
    struct cst_space *a = space(w, "a"), *b = space(w, "b");
    uint8_t key[32];
    uint32_t klass;

    for (uint32_t i = 0; i < 2 * SLAB_BLOCKS; i++)
        assert_int_equal(store_leaf(w, a, i, key), 0);
    assert_int_equal(store_leaf(w, b, 0, key), 0);
    assert_true(cst_encode_kick(b));
    world_settle(w);
    klass = b->packed_class;
    assert_int_equal(b->packed_copies, 1);
    store_small(w, b, 1);
    assert_true(cst_encode_kick(b)); /* seems worth it */
    world_settle(w);
    assert_int_not_equal(b->packed_class, klass);
    assert_int_equal(b->packed_copies, 1);
    assert_int_equal(numbers(a).blocks, 2 * SLAB_BLOCKS);
    (void)cst_space_unref(a);
    (void)cst_space_unref(b);
    end_world(w);
}

/* When all blocks are of another size, the slabs of the old class must not keep the memory. */
static void an_unused_size_class_gives_way(void **state) {
    struct world *w = tight(4, "lru");
    struct cst_space *s = space(w, "a");
    uint32_t last_class = 0;

    for (uint32_t i = 0; i < 120; i++) {
        uint8_t key[32];

        if (i < 60)
            assert_int_equal(store_leaf(w, s, i, key), 0);
        else
            store_small(w, s, i);
        world_pack(w);
        w->clock.ns += 2 * CST_NS_PER_S;
        if (i == 50)
            last_class = s->packed_class;
    }
    assert_int_not_equal(s->packed_class, last_class);
    assert_true(s->packed_copies > 2 * SLAB_BLOCKS);
    for (const struct cst_list *it = w->store->slabs.next; it != &w->store->slabs; it = it->next) {
        const struct cst_slab_slots *slab = cst_list_entry(it, struct cst_slab_slots, lru);

        assert_true(!slab->slab.packed || slab->klass != last_class);
    }
    world_check(w);
    (void)cst_space_unref(s);
    end_world(w);
}

/* What is not used any more in one space makes room in another, slab by slab. */
static void a_new_space_takes_the_oldest_slab(void **state) {
    struct world *w = tight(3, "lru");
    struct cst_space *a = space(w, "a"), *b = space(w, "b");
    uint8_t key[32];

    for (uint32_t i = 0; i < 3 * SLAB_BLOCKS; i++)
        assert_int_equal(store_leaf(w, a, i, key), 0);
    for (uint32_t i = 0; i < SLAB_BLOCKS; i++) { /* the first slab is used last */
        leaf_key(i, key);
        assert_int_equal(cst_space_touch(a, key), 0);
    }
    assert_int_equal(store_leaf(w, b, 0, key), 0);
    assert_int_equal(numbers(a).evicted_blocks, SLAB_BLOCKS);
    for (uint32_t i = 0; i < 3 * SLAB_BLOCKS; i++)
        assert_int_equal(there(a, i), i / SLAB_BLOCKS != 1);
    assert_int_equal(numbers(b).hot_slab_bytes, WORLD_SLAB);
    world_check(w);
    (void)cst_space_unref(a);
    (void)cst_space_unref(b);
    end_world(w);
}

static void a_leased_slab_is_not_taken(void **state) {
    struct world *w = tight(2, "lru");
    struct cst_space *a = space(w, "a"), *b = space(w, "b");
    struct world_fetch f[2];
    uint8_t key[32];

    for (uint32_t i = 0; i < 2 * SLAB_BLOCKS; i++) {
        assert_int_equal(store_leaf(w, a, i, key), 0);
        if (i % SLAB_BLOCKS == 3)
            world_fetch(w, a, key, CST_FETCH_DECODED, &f[i / SLAB_BLOCKS]);
    }
    assert_int_equal(store_leaf(w, b, 0, key), CST_STORE_E_BUSY);
    assert_int_equal(numbers(a).blocks, 2 * SLAB_BLOCKS); /* nothing was lost in vain */
    cst_fetch_release(&f[1].fetch);
    assert_int_equal(store_leaf(w, b, 0, key), 0);
    cst_fetch_release(&f[0].fetch);
    world_check(w);
    (void)cst_space_unref(a);
    (void)cst_space_unref(b);
    end_world(w);
}

/* The lease is on a block in one slab, its ancestors are in another: both stay. */
static void a_slab_above_a_lease_is_not_taken(void **state) {
    struct world *w = tight(2, "lru");
    struct cst_space *a = space(w, "a"), *b = space(w, "b");
    const uint32_t n = 2 * SLAB_BLOCKS;
    uint8_t keys[2 * SLAB_BLOCKS * 32], key[32];
    struct world_fetch f;

    world_store_chain(w, a, root, 100, n, keys);
    world_fetch(w, a, keys + 32 * (n - 1), CST_FETCH_DECODED, &f);
    assert_int_equal(store_leaf(w, b, 0, key), CST_STORE_E_BUSY);
    assert_int_equal(world_present(a, keys, n), n);
    cst_fetch_release(&f.fetch);
    assert_int_equal(store_leaf(w, b, 0, key), 0);
    assert_int_equal(world_present(a, keys, n), 0); /* the first slab went, with what hung below */
    world_check(w);
    (void)cst_space_unref(a);
    (void)cst_space_unref(b);
    end_world(w);
}

/* A client still maps the slab: it is asked, and the bytes are charged until it answers. */
static void a_held_slab_retires(void **state) {
    struct world *w = tight(2, "lru");
    struct cst_space *a = space(w, "a"), *b = space(w, "b");
    struct cst_store_stats stats;
    struct world_fetch f;
    struct cst_slab *slab;
    uint8_t key[32];
    uint32_t id;

    for (uint32_t i = 0; i < 2 * SLAB_BLOCKS; i++)
        assert_int_equal(store_leaf(w, a, i, key), 0);
    leaf_key(0, key);
    world_fetch(w, a, key, CST_FETCH_DECODED, &f);
    slab = f.fetch.loc.slab;
    id = slab->id;
    cst_slab_hold(slab);
    cst_fetch_release(&f.fetch);
    for (uint32_t i = 1; i < 2 * SLAB_BLOCKS; i++) { /* the first slab becomes the oldest again */
        leaf_key(i, key);
        assert_int_equal(cst_space_touch(a, key), 0);
    }
    assert_int_equal(store_leaf(w, b, 0, key), 0);
    assert_int_equal(w->retired, 1);
    assert_true(slab->retired);
    assert_ptr_equal(cst_store_slab(w->store, id), slab);
    cst_store_stats(w->store, &stats);
    assert_int_equal(stats.held_bytes, WORLD_SLAB);
    assert_int_equal(numbers(a).held_bytes, WORLD_SLAB);
    assert_true(stats.memory_used <= stats.memory_limit);
    assert_int_equal(world_slabs, 3);
    world_check(w);
    cst_slab_unhold(slab);
    world_settle(w);
    assert_null(cst_store_slab(w->store, id));
    cst_store_stats(w->store, &stats);
    assert_int_equal(stats.held_bytes, 0);
    assert_int_equal(world_slabs, 2);
    (void)cst_space_unref(a);
    (void)cst_space_unref(b);
    end_world(w);
}

/* A space that is gone but for a slab that a client holds: freed with it. */
static void a_held_slab_keeps_its_space(void **state) {
    struct world *w = tight(2, "lru");
    struct cst_space *a = space(w, "a");
    struct cst_store_stats stats;
    struct cst_slab *slab;
    struct world_fetch f;
    uint8_t key[32];

    assert_int_equal(store_leaf(w, a, 0, key), 0);
    world_fetch(w, a, key, CST_FETCH_DECODED, &f);
    slab = f.fetch.loc.slab;
    cst_slab_hold(slab);
    (void)cst_space_unref(a); /* the lease goes on */
    assert_int_equal(cst_namespace_purge(cst_space_namespace(a), &(enum cst_purge){ 0 }), 1);
    assert_true(world_bytes_are(&f.fetch.loc, key, 1));
    cst_fetch_release(&f.fetch);
    world_settle(w);
    assert_ptr_equal(slab->space, a);
    assert_true(slab->retired);
    cst_slab_unhold(slab);
    world_settle(w);
    cst_store_stats(w->store, &stats);
    assert_int_equal(stats.spaces, 0);
    end_world(w);
}

/* A chain longer than the memory, all of it reserved first: the first blocks can't be evicted, for
 * puts are open below them, so the later ones answer BUSY and nothing that was stored is lost. */
static void ancestors_of_open_puts_stay(void **state) {
    enum { N = 3 * SLAB_BLOCKS };
    struct world *w = tight(2, "lru");
    struct cst_space *s = space(w, "a");
    static struct world_put puts[N];
    static uint8_t keys[N * 32];
    size_t stored = 0, busy = 0;
    uint32_t busy_ms;

    for (uint32_t i = 0; i < N; i++) {
        uint32_t tokens[WORLD_TOKENS] = { i };

        world_key(keys + 32 * i, i ? keys + 32 * (i - 1) : root, tokens, WORLD_TOKENS);
        puts[i] = (struct world_put){ .put = CST_PUT_NULL(world_put_done) };
        assert_int_equal(cst_put_begin(s, i ? keys + 32 * (i - 1) : root, !i, keys + 32 * i, tokens,
                                       WORLD_TOKENS, &puts[i].put, &busy_ms),
                         0);
    }
    for (uint32_t i = 0; i < N; i++) {
        if (!cst_put_is_open(&puts[i].put))
            continue;
        world_fill(puts[i].bytes, keys + 32 * i, 0);
        cst_put_commit(&puts[i].put, puts[i].bytes, NULL);
        world_settle(w);
        assert_int_equal(puts[i].told, 1);
        stored += puts[i].status == 0;
        busy += puts[i].status == CST_STORE_E_BUSY;
        assert_int_equal(world_present(s, keys, N), stored);
        world_check(w);
    }
    assert_true(stored >= 2 * SLAB_BLOCKS && busy >= 1);
    assert_int_equal(numbers(s).evicted_blocks, 0);
    (void)cst_space_unref(s);
    end_world(w);
}

/* Bytes that wait for a parent that never comes don't keep others out. */
static void hidden_blocks_can_be_evicted(void **state) {
    enum { N = 2 * SLAB_BLOCKS };
    struct world *w = tight(2, "lru");
    struct cst_space *s = space(w, "a");
    struct world_put parent = { .put = CST_PUT_NULL(world_put_done) };
    const uint32_t tokens[WORLD_TOKENS] = { 1 };
    uint8_t key[32], child[32];
    uint32_t busy_ms;

    world_key(key, root, tokens, WORLD_TOKENS);
    assert_int_equal(cst_put_begin(s, root, true, key, tokens, WORLD_TOKENS, &parent.put, &busy_ms),
                     0);
    for (uint32_t i = 0; i < N; i++) {
        const uint32_t ids[WORLD_TOKENS] = { i };

        world_key(child, key, ids, WORLD_TOKENS);
        assert_int_equal(world_store(w, s, key, false, child, ids, WORLD_TOKENS),
                         CST_STORE_E_PENDING);
    }
    for (uint32_t i = 0; i < N; i++)
        assert_int_equal(store_leaf(w, s, 100 + i, child), 0);
    assert_int_equal(numbers(s).evicted_blocks, N);
    cst_put_abort(&parent.put);
    world_check(w);
    (void)cst_space_unref(s);
    end_world(w);
}

/* All hot slots are leased and a decode waits for one: the packed copy that it will read is no
 * spare one, although the block is on disk, too. */
static void a_copy_that_a_decode_waits_to_read_stays(void **state) {
    struct world *w = tight(2, "lru");
    struct cst_space *s = space(w, "a");
    const struct cst_seg_ref ref = { 0, 0, 1 };
    struct world_fetch f[SLAB_BLOCKS + 1];
    struct cst_block *b;
    uint8_t key[32];

    for (uint32_t i = 0; i <= SLAB_BLOCKS; i++) {
        assert_int_equal(store_leaf(w, s, i, key), 0);
        world_pack(w);
        leaf_key(0, key);
        if (!i) /* the first one makes room in the hot slab for the last one */
            world_cool(s, key);
    }
    for (uint32_t i = 1; i <= SLAB_BLOCKS; i++) {
        leaf_key(i, key);
        world_fetch(w, s, key, CST_FETCH_DECODED, &f[i]);
        assert_int_equal(f[i].status, 0);
    }
    leaf_key(0, key);
    b = cst_trie_find(s, key);
    assert_true(b && b->packed.slab && !b->hot.slab);
    cst_cold_set(b, ref, b->packed.length, b->preset, NULL);
    f[0] = (struct world_fetch){ .fetch = CST_FETCH_NULL(world_fetch_ready) };
    assert_int_equal(cst_fetch_start(s, key, CST_FETCH_DECODED, &f[0].fetch), CST_STORE_E_PENDING);
    world_settle(w);
    assert_int_equal(f[0].told, 1);
    assert_int_equal(f[0].status, CST_STORE_E_BUSY);
    assert_true(b->packed.slab && !b->decode);
    b->cold = CST_SEG_REF_NONE; /* there is no disk that could forget it */
    s->stats.cold_blocks = s->stats.cold_bytes = 0;
    cst_fetch_release(&f[1].fetch);
    world_fetch(w, s, key, CST_FETCH_DECODED, &f[0]);
    assert_int_equal(f[0].status, 0);
    assert_true(world_bytes_are(&f[0].fetch.loc, key, 1));
    cst_fetch_release(&f[0].fetch);
    for (uint32_t i = 2; i <= SLAB_BLOCKS; i++)
        cst_fetch_release(&f[i].fetch);
    world_check(w);
    (void)cst_space_unref(s);
    end_world(w);
}

static void set_unpackable(struct cst_space *s, const uint8_t key[32], bool is) {
    struct cst_block *b = cst_trie_find(s, key);

    b->unpackable = is;
    cst_block_settle(b, CST_EVICT_WARM);
}

/* Chains of two, the lower ones packed, the upper ones to be packed next, the youngest first. */
static void store_pairs(struct world *w, struct cst_space *s) {
    uint8_t keys[SLAB_BLOCKS][2 * 32];

    for (uint32_t i = 0; i < SLAB_BLOCKS; i++) {
        world_store_chain(w, s, root, 100 * i, 2, keys[i]);
        set_unpackable(s, keys[i], true);
    }
    while (cst_encode_kick(s))
        world_settle(w);
    assert_int_equal(s->packed_copies, SLAB_BLOCKS);
    for (uint32_t i = SLAB_BLOCKS; i--;)
        set_unpackable(s, keys[i], false);
}

/* How many blocks are packed, of pairs and of what comes then. */
static uint64_t pack_pairs(bool full_disk) {
    struct world *w = tight(3, "lru");
    struct cst_space *s;
    uint8_t key[32];
    uint64_t n;

    if (full_disk) {
        world_disk_open(w, 8192, 1,
                        (struct cst_disk_options){ .seg = { .bytes = 2 << 20,
                                                            .segment_bytes = 256 << 10,
                                                            .crypt = CST_SEG_CRYPT_OFF } });
        world_recover(w);
    }
    s = space(w, "a");
    store_pairs(w, s);
    for (uint32_t i = 0; i < 20; i++) {
        while (!cst_list_is_empty(&s->hot_free)) /* else packing could wait */
            assert_int_equal(store_leaf(w, s, i, key), 0);
        (void)cst_encode_kick(s);
        world_settle(w);
        w->clock.ns += 2 * CST_NS_PER_S;
    }
    assert_int_equal(numbers(s).cold_blocks, 0);
    n = numbers(s).encodes;
    (void)cst_space_unref(s);
    end_world(w);
    return n;
}

/* The packed ones could go to disk after those above them. While the disk has no room they give
 * way, as without one: else nothing would be packed any more. */
static void a_full_disk_lets_blocks_be_packed(void **state) {
    (void)state;
    assert_int_equal(pack_pairs(true), pack_pairs(false));
}

/* The index has its own limit: leaves go, memory for slabs or not. */
static void the_index_is_capped(void **state) {
    enum { CAP = 24 << 10 };
    struct world *w =
        world_new(&(struct world_options){ .seed = 1, .index = CAP, .policy = "arc" });
    struct cst_space *s = space(w, "a");
    struct cst_store_stats stats;
    uint8_t key[32];

    for (uint32_t i = 0; i < 500; i++) {
        assert_int_equal(store_leaf(w, s, i, key), 0);
        cst_store_stats(w->store, &stats);
        assert_true(stats.index_used <= CAP);
        if (i % 16 == 0)
            world_check(w);
    }
    assert_true(numbers(s).evicted_blocks > 400);
    assert_true(there(s, 499));
    (void)cst_space_unref(s);
    end_world(w);
}

static void an_index_full_of_open_puts_is_a_limit(void **state) {
    enum { CAP = 16 << 10, N = 64 };
    struct world *w = world_new(&(struct world_options){ .seed = 1, .index = CAP });
    struct cst_space *s = space(w, "a");
    static struct world_put puts[N];
    uint8_t key[32];
    uint32_t n = 0, busy_ms;
    int r = 0;

    for (; n < N && !r; n += !r) {
        const uint32_t tokens[WORLD_TOKENS] = { n };

        world_key(key, root, tokens, WORLD_TOKENS);
        puts[n] = (struct world_put){ .put = CST_PUT_NULL(world_put_done) };
        r = cst_put_begin(s, root, true, key, tokens, WORLD_TOKENS, &puts[n].put, &busy_ms);
    }
    assert_int_equal(r, CST_STORE_E_LIMIT);
    assert_true(n > 8);
    world_check(w);
    for (uint32_t i = 0; i < n; i++)
        cst_put_abort(&puts[i].put);
    assert_int_equal(store_leaf(w, s, 1, key), 0);
    (void)cst_space_unref(s);
    end_world(w);
}

/* A tiny memory of the real proportions: blocks come and go, and the daemon stays within it. */
static void a_tiny_memory_works(void **state) {
    struct world *w = tight(3, NULL);
    struct cst_space *a = space(w, "a"), *b = space(w, "b");
    struct cst_store_stats stats;
    uint8_t key[32];

    for (uint32_t i = 0; i < 300; i++) {
        assert_int_equal(store_leaf(w, i / 50 % 2 ? b : a, i, key), 0);
        if (i % 3 == 0)
            world_pack(w);
        cst_store_stats(w->store, &stats);
        assert_true(stats.memory_used <= stats.memory_limit);
        assert_true(world_slabs <= 3);
        world_check(w);
    }
    (void)cst_space_unref(a);
    (void)cst_space_unref(b);
    end_world(w);
}

/* The machine has no memory for a slab that is within the limits: that costs nobody else's blocks,
 * for what they would free can't be had either. */
static void a_slab_that_fails_costs_nobody(void **state) {
    struct world *w = tight(3, NULL);
    struct cst_space *a = space(w, "a"), *b = space(w, "b");
    const uint32_t n = 2 * SLAB_BLOCKS;
    uint8_t key[32];

    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(store_leaf(w, a, i, key), 0);
    cst_fault_join();
    cst_fault_arm(CST_FAULT_MAP, 1, 1);
    assert_int_equal(store_leaf(w, b, 0, key), CST_STORE_E_BUSY);
    cst_fault_arm(CST_FAULT_MAP, 0, 0);
    cst_fault_leave();
    assert_int_equal(numbers(a).blocks, n);
    assert_int_equal(store_leaf(w, b, 0, key), CST_STORE_E_BUSY); /* not tried again at once */
    w->clock.ns += 2 * CST_NS_PER_S;
    assert_int_equal(store_leaf(w, b, 0, key), 0);
    assert_int_equal(numbers(a).blocks, n);
    (void)cst_space_unref(a);
    (void)cst_space_unref(b);
    end_world(w);
}

/* Eight of these blocks never fit: their put is refused before anything is evicted for it. */
static void a_slab_that_never_fits_costs_nobody(void **state) {
    struct world *w = tight(3, NULL);
    struct cst_space *a = space(w, "a"), *b;
    struct cst_descriptor *d = world_descriptor(2);
    struct world_put p = { .put = CST_PUT_NULL(world_put_done) };
    struct cst_namespace *ns;
    const uint32_t n = 3 * SLAB_BLOCKS;
    uint8_t key[32], *bytes = cst_calloc(1, WORLD_SLAB), fingerprint[32] = { 2 };
    uint32_t tokens[WORLD_TOKENS] = { 0 }, busy_ms;

    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(store_leaf(w, a, i, key), 0);
    d->block_bytes = WORLD_SLAB;
    assert_int_equal(cst_namespace_get(w->store, "b", &ns), 0);
    assert_int_equal(cst_space_open(&b, ns, &d, world_descriptor_free, fingerprint, CST_KIND_TOKENS,
                                    CST_CLASS_LOSSLESS),
                     0);
    world_key(key, root, tokens, WORLD_TOKENS);
    assert_int_equal(cst_put_begin(b, root, true, key, tokens, WORLD_TOKENS, &p.put, &busy_ms), 0);
    cst_put_commit(&p.put, bytes, NULL);
    world_settle(w);
    assert_int_equal(p.status, CST_STORE_E_BUSY);
    assert_int_equal(numbers(a).blocks, n);
    cst_free(bytes);
    (void)cst_space_unref(a);
    (void)cst_space_unref(b);
    end_world(w);
}

/* Blocks of two segments: opaque, or K and V of one row a token. */
static struct cst_space *large_space(struct world *w, uint64_t segment, bool opaque) {
    struct cst_descriptor *d = world_descriptor(2);
    uint64_t row = segment / WORLD_TOKENS;
    struct cst_namespace *ns;
    struct cst_space *s;
    uint8_t fingerprint[32] = { 2 };

    d->block_bytes = 2 * segment;
    d->layers[0].head_dim_k = d->layers[0].head_dim_v = (uint32_t)row / 2;
    for (unsigned i = 0; i < 2; i++) {
        struct cst_segment *seg = &d->segments[i];

        seg->offset = i * segment;
        seg->length = segment;
        seg->token_stride = seg->head_stride = row;
        if (opaque)
            *seg = (struct cst_segment){ .tensor = CST_TENSOR_OPAQUE,
                                         .offset = seg->offset,
                                         .length = segment };
    }
    assert_int_equal(cst_namespace_get(w->store, "large", &ns), 0);
    assert_int_equal(cst_space_open(&s, ns, &d, world_descriptor_free, fingerprint, CST_KIND_TOKENS,
                                    CST_CLASS_LOSSLESS),
                     0);
    return s;
}

/* The bytes are zero. */
static void store_large(struct world *w, struct cst_space *s, uint32_t token) {
    struct world_put p = { .put = CST_PUT_NULL(world_put_done) };
    uint8_t key[32], *bytes = cst_calloc(1, cst_space_descriptor(s)->block_bytes);
    uint32_t busy_ms;

    world_key(key, root, &token, 1);
    assert_int_equal(cst_put_begin(s, root, true, key, &token, 1, &p.put, &busy_ms), 0);
    cst_put_commit(&p.put, bytes, NULL);
    world_settle(w);
    assert_int_equal(p.status, 0);
    cst_free(bytes);
}

/* What an encode of a large block takes from the heap is part of the memory: it waits for room. */
static void large_encodes_count(void **state) {
    const uint64_t block = UINT64_C(16) << 20;
    struct world *w = world_new(&(struct world_options){
        .seed = 1, .memory = 9 * block, .index = block / 4, .manual_jobs = true });
    struct cst_space *s = large_space(w, block / 2, true);
    struct cst_store_stats stats;

    for (uint32_t i = 0; i < 8; i++)
        store_large(w, s, i);
    cst_store_tick(w->store); /* the slab leaves one block, less than buffer and workspace */
    assert_int_equal(w->store->encodes, 0);
    w->store->options.memory += 10 * block;
    cst_store_tick(w->store);
    assert_int_equal(w->store->encodes, 1);
    cst_store_stats(w->store, &stats);
    assert_true(stats.memory_used > 9 * block && w->store->encode_bytes > block &&
                stats.memory_used <= stats.memory_limit);
    world_check(w);
    world_settle(w);
    cst_store_stats(w->store, &stats);
    assert_int_equal(w->store->encode_bytes, 0);
    assert_int_equal(numbers(s).encodes, 8);
    (void)cst_space_unref(s);
    end_world(w);
}

/* A decode's workspace counts nowhere: blocks whose segments are so large stay hot. */
static void giant_segments_stay_hot(void **state) {
    struct world *w = world_new(
        &(struct world_options){ .seed = 1, .memory = UINT64_C(512) << 20, .manual_jobs = true });
    struct cst_space *s = large_space(w, UINT64_C(8) << 20, false);

    store_large(w, s, 1);
    assert_true(cst_codec_work_size(cst_space_descriptor(s), CST_PRESET_LOSSLESS) > CST_WORK_MAX);
    cst_store_tick(w->store);
    assert_int_equal(w->store->encodes, 0);
    (void)cst_space_unref(s);
    end_world(w);
    w = world_new(
        &(struct world_options){ .seed = 1, .memory = UINT64_C(512) << 20, .manual_jobs = true });
    s = large_space(w, UINT64_C(1) << 20, false);
    store_large(w, s, 1);
    cst_store_tick(w->store);
    assert_int_equal(w->store->encodes, 1);
    (void)cst_space_unref(s);
    end_world(w);
}

/* As many workspaces as there are workers, of the largest preset of any space, while there is one.
 */
static void workspaces_count(void **state) {
    struct world *w = world_new(&(struct world_options){ .seed = 1, .workers = 3 });
    struct cst_space *exact, *lossy;
    uint64_t lossless, most = 0;

    assert_int_equal(w->store->work_bytes, 0);
    exact = world_space(w, "a", 1, CST_KIND_FLAT, CST_CLASS_LOSSLESS);
    lossless = cst_codec_work_size(cst_space_descriptor(exact), CST_PRESET_LOSSLESS);
    assert_int_equal(w->store->work_bytes, 3 * lossless);
    lossy = world_space(w, "a", 1, CST_KIND_FLAT, CST_CLASS_SMALL_LOSS);
    for (uint32_t p = CST_PRESET_KLT; p <= CST_PRESET_DEEP; p++)
        most = CST_MAX(most, cst_codec_work_size(cst_space_descriptor(exact), p));
    assert_int_equal(w->store->work_bytes, 3 * most);
    (void)cst_space_unref(lossy);
    assert_int_equal(w->store->work_bytes, 3 * lossless);
    (void)cst_space_unref(exact);
    assert_int_equal(w->store->work_bytes, 0);
    end_world(w);
}

/* Slot classes: closed form against a search. */
static void packed_classes_are_close(void **state) {
    for (uint32_t c = 0; c + 1 < CST_PACKED_CLASSES; c++) {
        uint64_t n = cst_packed_class_bytes(c), next = cst_packed_class_bytes(c + 1);

        assert_true(n % CST_SLOT_ALIGN == 0 && next > n && next * 8 <= n * 9);
        assert_int_equal(cst_packed_class(n), c);
        assert_int_equal(cst_packed_class(n + 1), c + 1);
        assert_int_equal(cst_packed_class(next - 1), c + 1);
    }
    assert_int_equal(cst_packed_class(1), 0);
    assert_true(cst_packed_class_bytes(CST_PACKED_CLASSES - 1) >= CST_BLOCK_BYTES_MAX);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_oldest_leaf_goes_first),
        cmocka_unit_test(chains_go_from_the_end),
        cmocka_unit_test(leased_and_pinned_blocks_stay),
        cmocka_unit_test(packing_makes_room),
        cmocka_unit_test(a_burst_replaces_what_is_older),
        cmocka_unit_test(idle_packing_evicts_nobody),
        cmocka_unit_test(idle_packing_of_another_size_evicts_nobody),
        cmocka_unit_test(an_unused_size_class_gives_way),
        cmocka_unit_test(a_new_space_takes_the_oldest_slab),
        cmocka_unit_test(a_leased_slab_is_not_taken),
        cmocka_unit_test(a_slab_above_a_lease_is_not_taken),
        cmocka_unit_test(a_held_slab_retires),
        cmocka_unit_test(a_held_slab_keeps_its_space),
        cmocka_unit_test(ancestors_of_open_puts_stay),
        cmocka_unit_test(hidden_blocks_can_be_evicted),
        cmocka_unit_test(a_copy_that_a_decode_waits_to_read_stays),
        cmocka_unit_test(a_full_disk_lets_blocks_be_packed),
        cmocka_unit_test(the_index_is_capped),
        cmocka_unit_test(an_index_full_of_open_puts_is_a_limit),
        cmocka_unit_test(a_tiny_memory_works),
        cmocka_unit_test(a_slab_that_fails_costs_nobody),
        cmocka_unit_test(a_slab_that_never_fits_costs_nobody),
        cmocka_unit_test(large_encodes_count),
        cmocka_unit_test(giant_segments_stay_hot),
        cmocka_unit_test(packed_classes_are_close),
        cmocka_unit_test(workspaces_count),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
