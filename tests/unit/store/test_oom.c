/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any allocation and any slab may fail: one life of a few blocks is run again and again while the
 * n-th call fails, alone or with all after it, until n is past the last one. Each time nothing
 * crashes or leaks, every put and fetch is answered, the store still agrees with itself, and then
 * the same life runs to its end without a fault.
 */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "store/prefix_trie.h"
#include "tests/unit/store/store_world.h"

#include <errno.h>
#include <string.h>

enum { CHAIN = 4 };

static const uint8_t root[32] = { 7 };

struct life {
    struct world *w;
    struct cst_space *s, *flat;
    uint8_t keys[CHAIN * 32], tail[32], flat_key[32];
    struct world_put puts[CHAIN + 2];
    bool strict;
};

static int expect(const struct life *l, int status) {
    if (l->strict)
        assert_int_equal(status, 0);
    else
        assert_true(status == 0 || status == -ENOMEM || status > 0);
    return status;
}

static struct cst_space *open_space(struct life *l, enum cst_kind kind) {
    static const uint8_t fingerprint[32] = { 1 };
    struct cst_descriptor *d = world_descriptor(1);
    struct cst_namespace *ns = NULL;
    struct cst_space *s = NULL;

    if (!expect(l, cst_namespace_get(l->w->store, "a", &ns)))
        (void)expect(l, cst_space_open(&s, ns, &d, world_descriptor_free, fingerprint, kind,
                                       CST_CLASS_LOSSLESS));
    if (d)
        (void)world_descriptor_free(d);
    return s;
}

static void put(struct life *l, unsigned i, struct cst_space *s, const uint8_t *parent,
                const uint8_t key[32], const uint32_t *tokens, uint32_t n) {
    struct world_put *p = &l->puts[i];
    uint32_t busy_ms;

    *p = (struct world_put){ .put = CST_PUT_NULL(world_put_done) };
    if (!expect(l, cst_put_begin(s, parent, parent == root, key, tokens, n, &p->put, &busy_ms)))
        world_fill(p->bytes, key, 0);
}

static void put_all(struct life *l) {
    uint32_t tokens[WORLD_TOKENS] = { 0 };

    for (uint32_t i = 0; i < CHAIN; i++) {
        const uint8_t *parent = i ? l->keys + 32 * (i - 1) : root;

        tokens[0] = i;
        world_key(l->keys + 32 * i, parent, tokens, WORLD_TOKENS);
        put(l, i, l->s, parent, l->keys + 32 * i, tokens, WORLD_TOKENS);
    }
    world_key(l->tail, l->keys, tokens, 3);
    put(l, CHAIN, l->s, l->keys, l->tail, tokens, 3);
    world_key_n(l->flat_key, 1);
    put(l, CHAIN + 1, l->flat, NULL, l->flat_key, NULL, 0);
    for (unsigned i = CHAIN + 2; i--;) { /* children before parents */
        if (!cst_put_is_open(&l->puts[i].put))
            continue;
        cst_put_commit(&l->puts[i].put, l->puts[i].bytes, NULL);
        world_settle(l->w);
        assert_int_equal(l->puts[i].told, 1);
    }
}

static void get(struct life *l, struct cst_space *s, const uint8_t key[32]) {
    struct world_fetch f;

    world_fetch(l->w, s, key, CST_FETCH_DECODED, &f);
    if (!expect(l, f.status))
        assert_true(world_bytes_are(&f.fetch.loc, key, 1));
    cst_fetch_release(&f.fetch);
}

static void cool_all(struct cst_space *s) {
    struct cst_list *it;

    while ((it = cst_list_first(&s->clean)))
        world_cool(s, cst_list_entry(it, struct cst_block, file)->key);
}

static void live(struct life *l) {
    struct cst_explanation e;
    uint64_t n;

    l->s = open_space(l, CST_KIND_TOKENS);
    l->flat = open_space(l, CST_KIND_FLAT);
    if (!l->s || !l->flat)
        return;
    put_all(l);
    for (unsigned pass = 0; pass < 2; pass++) {
        for (unsigned i = 0; i < CHAIN; i++)
            get(l, l->s, l->keys + 32 * i);
        get(l, l->s, l->tail);
        get(l, l->flat, l->flat_key);
        world_pack(l->w);
        cool_all(l->s);
        cool_all(l->flat);
    }
    world_check(l->w);
    if (l->strict)
        assert_int_equal(world_present(l->s, l->keys, CHAIN), CHAIN);
    cst_space_explain(l->s, root, l->keys, CHAIN, NULL, 0, &e);
    (void)expect(l, cst_space_erase(l->s, l->keys + 32, &n));
}

static void end(struct life *l) {
    for (unsigned i = 0; i < CHAIN + 2; i++)
        cst_put_abort(&l->puts[i].put);
    if (l->s)
        (void)cst_space_clear(l->s);
    if (l->flat)
        (void)cst_space_clear(l->flat);
    world_settle(l->w);
    world_check(l->w);
    l->s = cst_space_unref(l->s);
    l->flat = cst_space_unref(l->flat);
    world_settle(l->w);
    assert_int_equal(l->w->store->slab_bytes, 0);
    assert_int_equal(l->w->store->index_bytes, cst_hashmap_bytes(&l->w->store->slab_map));
    assert_int_equal(world_slabs, 0);
    l->w->clock.ns += 2 * CST_NS_PER_S; /* failed slabs and encodes are tried again after 1 s */
}

static void fails_from(enum cst_fault_point point, uint64_t count) {
    struct life l = { 0 };
    uint64_t seen = UINT64_MAX, n = 0;

    /* no ghosts in the accounts at the end: lru */
    l.w = world_new(&(struct world_options){ .seed = 1, .policy = "lru" });
    cst_fault_join();
    while (seen >= n) {
        n++;
        l.strict = false;
        cst_fault_arm(point, n, count);
        live(&l);
        seen = cst_fault_seen(point);
        cst_fault_arm(point, 0, 0);
        end(&l);
        l.strict = true;
        live(&l);
        end(&l);
    }
    cst_fault_leave();
    assert_true(n > (point == CST_FAULT_ALLOC ? 30 : 3));
    world_free(l.w);
}

static void one_allocation_fails(void **state) {
    fails_from(CST_FAULT_ALLOC, 1);
}

static void all_allocations_fail_from_the_nth(void **state) {
    fails_from(CST_FAULT_ALLOC, UINT32_MAX);
}

static void one_slab_fails(void **state) {
    fails_from(CST_FAULT_MAP, 1);
}

static void all_slabs_fail_from_the_nth(void **state) {
    fails_from(CST_FAULT_MAP, UINT32_MAX);
}

/* The store itself. */
static void a_store_needs_memory(void **state) {
    struct cst_store *store = NULL;

    cst_fault_join();
    cst_fault_arm(CST_FAULT_ALLOC, 1, 1);
    assert_int_equal(cst_store_new(&store, &(struct cst_store_options){ .memory = 1 << 20 },
                                   &(struct cst_store_env){ 0 }),
                     -ENOMEM);
    cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
    cst_fault_leave();
    assert_null(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_allocation_fails), cmocka_unit_test(all_allocations_fail_from_the_nth),
        cmocka_unit_test(one_slab_fails),       cmocka_unit_test(all_slabs_fail_from_the_nth),
        cmocka_unit_test(a_store_needs_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
