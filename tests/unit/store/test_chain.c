/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A chain of 100,000 blocks: lookups of every kind of run, and that nothing that walks it
 * (publishing, detaching, pinning, expiring) recurses or takes quadratic time. It runs on a small
 * stack, which one frame per block would overflow.
 */
#include "tests/lib/check.h"

#include "store/prefix_trie.h"
#include "tests/unit/store/store_world.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { N = 100000, TINY = 64, STACK = 512 << 10 };

static const uint8_t root[32] = { 7 };

static struct cst_space *tiny_space(struct world *w) {
    struct cst_descriptor *d = world_descriptor(1);
    struct cst_namespace *ns;
    struct cst_space *s;

    d->block_bytes = TINY;
    for (unsigned i = 0; i < 2; i++)
        d->segments[i] = (struct cst_segment){ .tensor = (uint8_t)i,
                                               .dtype = CST_DTYPE_F16,
                                               .offset = i * TINY / 2,
                                               .length = TINY / 2,
                                               .token_stride = 2,
                                               .head_stride = 2,
                                               .dim_stride = 2 };
    d->layers[0] = (struct cst_layer){ .kv_heads = 1, .head_dim_k = 1, .head_dim_v = 1 };
    assert_int_equal(cst_namespace_get(w->store, "a", &ns), 0);
    assert_int_equal(cst_space_open(&s, ns, &d, world_descriptor_free, root, CST_KIND_TOKENS,
                                    CST_CLASS_LOSSLESS),
                     0);
    return s;
}

struct small_put {
    struct cst_put put;
    int status;
};

static void on_done(struct cst_put *put, int status) {
    cst_container_of(put, struct small_put, put)->status = status;
}

static void begin(struct cst_space *s, uint8_t *keys, size_t i, struct small_put *p) {
    const uint32_t tokens[WORLD_TOKENS] = { (uint32_t)i };
    const uint8_t *parent = i ? keys + 32 * (i - 1) : root;
    uint32_t busy_ms;

    world_key(keys + 32 * i, parent, tokens, WORLD_TOKENS);
    *p = (struct small_put){ .put = CST_PUT_NULL(on_done), .status = -1 };
    assert_int_equal(
        cst_put_begin(s, parent, i == 0, keys + 32 * i, tokens, WORLD_TOKENS, &p->put, &busy_ms),
        0);
}

/* A chain that shares its first `run` keys with the stored one has no other key in common. */
static void check_run(struct cst_space *s, uint8_t *keys, size_t n, size_t run) {
    for (size_t i = run; i < n; i++)
        keys[32 * i] ^= 1;
    assert_int_equal(world_present(s, keys, n), run);
    for (size_t i = run; i < n; i++)
        keys[32 * i] ^= 1;
}

static void *life(void *arg) {
    static const uint64_t source[TINY / 8] = { 1, 2, 3 };
    struct world *w = world_new(
        &(struct world_options){ .seed = 1, .memory = UINT64_C(512) << 20, .pin_bytes = TINY * N });
    struct cst_space *s = tiny_space(w);
    struct small_put *puts = calloc(N, sizeof(*puts));
    uint8_t *keys = malloc(32UL * N);
    uint64_t erased;

    assert_true(puts && keys);
    for (size_t i = 0; i < N; i++)
        begin(s, keys, i, &puts[i]);
    for (size_t i = N; i-- > 1;) { /* all hidden until the first one comes */
        cst_put_commit(&puts[i].put, source, NULL);
        world_settle(w);
        assert_int_equal(puts[i].status, CST_STORE_E_PENDING);
    }
    assert_int_equal(world_present(s, keys, N), 0);
    cst_put_commit(&puts[0].put, source, NULL);
    world_settle(w);
    assert_int_equal(puts[0].status, 0);
    assert_int_equal(w->events[CST_EVENT_STORED], N);
    for (size_t n = 1; n <= N; n = n * 3 + 1)
        for (size_t run = 0; run <= n; run += 1 + run / 2)
            check_run(s, keys, n, run);
    check_run(s, keys, N, N);
    check_run(s, keys, N, N - 1);
    assert_int_equal(cst_space_pin(s, keys + 32UL * (N - 1), 1), 0);
    assert_int_equal(s->stats.pinned_blocks, N);
    assert_int_equal(cst_space_unpin(s, keys + 32UL * (N - 1)), 0);
    assert_int_equal(cst_space_erase(s, keys + 32UL * (N / 2), &erased), 0);
    assert_int_equal(erased, N / 2);
    assert_int_equal(world_present(s, keys, N), N / 2);
    world_check(w);
    assert_int_equal(cst_space_clear(s), N / 2);
    assert_int_equal(s->map.count + s->roots.count, 0);
    (void)cst_space_unref(s);
    world_free(w);
    free(keys);
    free(puts);
    return arg;
}

static void a_long_chain_is_handled_without_recursion(void **state) {
    pthread_attr_t attr;
    pthread_t thread;
    void *done = NULL;

    assert_int_equal(pthread_attr_init(&attr), 0);
    assert_int_equal(pthread_attr_setstacksize(&attr, STACK), 0);
    assert_int_equal(pthread_create(&thread, &attr, life, state), 0);
    assert_int_equal(pthread_join(thread, &done), 0);
    assert_ptr_equal(done, state);
    (void)pthread_attr_destroy(&attr);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_long_chain_is_handled_without_recursion),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
