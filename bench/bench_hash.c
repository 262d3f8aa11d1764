/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hash.over_sha256: the key chain of a prompt in the client, against one SHA-256 over the same
 * token bytes. The chain hashes a few bytes more per block (tag, parent, lengths) and pads each
 * block; anything beyond that is ours.
 */
#include "bench/benches.h"

#include "base/sha256.h"
#include "bench/bench_fixture.h"

#include <errno.h>
#include <stdlib.h>

enum { TOKENS = 131072 };

struct chain {
    cistern_space *space;
    struct cst_prompt prompt;
};

static int run_chain(void *arg, unsigned ops) {
    struct chain *c = arg;
    int32_t status = CISTERN_OK;
    size_t n;

    while (ops-- && status == CISTERN_OK)
        status = cistern_key_chain(c->space, NULL, c->prompt.tokens, c->prompt.n_tokens,
                                   c->prompt.keys, c->prompt.n, &n);
    return cst_ok(status, "keys");
}

static int run_sha256(void *arg, unsigned ops) {
    struct chain *c = arg;
    uint8_t digest[CST_SHA256_SIZE];

    while (ops--)
        cst_sha256(c->prompt.tokens, c->prompt.n_tokens * sizeof(*c->prompt.tokens), digest);
    return 0;
}

static int measure(struct cst_fixture *f, const char *name, uint32_t block_tokens, double target) {
    struct chain c = { 0 };
    struct cst_compared m;
    int r = cst_fixture_space(&c.space, f->client, block_tokens, 4096);

    if (!r)
        r = cst_prompt_init(&c.prompt, c.space, TOKENS / block_tokens, 1);
    if (!r)
        r = cst_compare(&m, (struct cst_side){ run_chain, &c },
                        (struct cst_side){ run_sha256, &c });
    if (!r)
        cst_report(&(struct cst_figure){ .name = name,
                                         .value = m.a / m.b,
                                         .unit = "ratio",
                                         .sense = CST_AT_MOST,
                                         .target = target },
                   "\"ours_us\": %.1f, \"sha256_us\": %.1f, \"tokens\": %d, \"block_tokens\": %u, "
                   "\"pairs\": [%.3f, %.3f]",
                   m.a * 1e6, m.b * 1e6, TOKENS, block_tokens, m.low, m.high);
    cst_prompt_deinit(&c.prompt);
    cistern_space_close(c.space);
    return r;
}

int cst_bench_hash(void) {
    struct cst_fixture f = CST_FIXTURE_NULL;
    int r = cst_fixture_init(&f);

    if (!r)
        r = measure(&f, "hash.over_sha256", 64, 1.9);
    if (!r)
        r = measure(&f, "hash.256.over_sha256", 256, 1.2);
    cst_fixture_deinit(&f);
    return r;
}
