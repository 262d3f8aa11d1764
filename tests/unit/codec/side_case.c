/* SPDX-License-Identifier: Apache-2.0 */
/* Learned side data for tests. Buffers have exactly the sizes that the contract names, so that a
 * sanitizer sees one byte too many. */
#include "tests/unit/codec/side_case.h"

#include "tests/lib/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { FACTORS = 5 };

static double normal(struct cst_seeded_random *r) {
    double sum = -6;

    for (int i = 0; i < 12; i++)
        sum += (double)(cst_seeded_random_next(r) >> 11) * 0x1p-53;
    return sum;
}

/* A number of the model: the same for all tokens. */
static double fixed(uint32_t a, uint32_t b, uint32_t c) {
    struct cst_seeded_random r;

    cst_seeded_random_init(&r, ((uint64_t)a << 40) + ((uint64_t)b << 20) + c);
    (void)cst_seeded_random_next(&r);
    /* uniform, of deviation 1 */
    return ((double)(cst_seeded_random_next(&r) >> 11) * 0x1p-53 - 0.5) * sqrt(12);
}

static void fill_token(struct case_block *c, uint32_t t, struct cst_seeded_random *r) {
    double factor[FACTORS], noise = 0.3;

    for (int f = 0; f < FACTORS; f++)
        factor[f] = normal(r);
    for (uint32_t i = 0; i < c->desc.n_segments; i++) {
        const struct cst_layer *layer = &c->desc.layers[c->desc.segments[i].layer];
        uint32_t dims = i % 2 ? layer->head_dim_v : layer->head_dim_k;

        for (uint32_t ch = 0; ch < layer->kv_heads * dims; ch++) {
            double scale = ch % 11 == 7 ? 25 : 1, sum = noise * normal(r);

            for (int f = 0; f < FACTORS; f++)
                sum += fixed(i, ch, (uint32_t)f) * factor[f];
            if (ch % 9 == 8)
                sum = scale = 0;
            case_set_value(c, i, t, ch / dims, ch % dims,
                           (float)(3 * fixed(i, ch, 100) + scale * sum));
        }
    }
}

void side_case_fill(struct case_block *c, uint64_t seed, uint32_t tokens) {
    struct cst_seeded_random r;

    cst_seeded_random_init(&r, seed);
    memset(c->block, 0, c->desc.block_bytes);
    for (uint32_t t = 0; t < tokens; t++)
        fill_token(c, t, &r);
}

int side_case_learn_blocks(struct side_case *s, const struct cst_descriptor *desc,
                           const struct cst_learn_block *blocks, size_t n,
                           const struct cst_learn_params *params) {
    const struct cst_learn_params plain = { .version = 1 };
    size_t cap = cst_learn_bound(desc), work_len;
    uint32_t tokens = 0;
    void *work = NULL;
    int r;

    *s = (struct side_case){ 0 };
    for (size_t i = 0; i < n; i++)
        tokens += blocks[i].tokens;
    work_len = cst_learn_work_size(desc, tokens);
    assert_int_equal(posix_memalign(&work, 64, work_len), 0);
    s->bytes = malloc(cap);
    assert_non_null(s->bytes);
    r = cst_learn(s->bytes, cap, desc, blocks, n, params ? params : &plain, work, work_len, &s->len,
                  &s->report);
    free(work);
    if (!r) {
        s->bytes = realloc(s->bytes, s->len);
        assert_non_null(s->bytes);
    }
    return r;
}

int side_case_parse(struct side_case *s, const struct cst_descriptor *desc) {
    free(s->memory);
    s->memory_len = cst_side_memory(desc);
    assert_int_equal(posix_memalign(&s->memory, 64, s->memory_len), 0);
    return cst_side_parse(&s->side, s->bytes, s->len, desc, s->memory, s->memory_len);
}

void side_case_learn(struct side_case *s, struct case_block *c, uint32_t n,
                     const struct cst_learn_params *params) {
    struct cst_learn_block *blocks = calloc(n, sizeof(*blocks));

    assert_non_null(blocks);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *bytes = malloc(c->desc.block_bytes);

        assert_non_null(bytes);
        side_case_fill(c, 1000 + i, c->desc.block_tokens);
        memcpy(bytes, c->block, c->desc.block_bytes);
        blocks[i] =
            (struct cst_learn_block){ bytes, c->desc.block_tokens, i % 4 * c->desc.block_tokens };
    }
    assert_int_equal(side_case_learn_blocks(s, &c->desc, blocks, n, params), 0);
    assert_int_equal(side_case_parse(s, &c->desc), 0);
    for (uint32_t i = 0; i < n; i++)
        free((void *)blocks[i].bytes);
    free(blocks);
    c->side = &s->side;
}

void side_case_deinit(struct side_case *s) {
    free(s->bytes);
    free(s->memory);
    *s = (struct side_case){ 0 };
}
