/* SPDX-License-Identifier: Apache-2.0 */
/* Sequence states: every byte of a cut and of a join against a writer of the format's description;
 * everything that is not such a state is refused. */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "base/random.h"
#include "client/llama/state.h"
#include "tests/unit/client_llama/sample_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 16, CAP = 1 << 16 };

static const uint32_t reversed[] = { 4, 3, 2, 1, 0 };
static const uint32_t wrapped[] = { 30, 31, 32, 33, 0,  1,  2,  3,  4,  5,  6,  7,
                                    8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19,
                                    20, 21, 22, 23, 24, 25, 26, 27, 28, 29 };

#define SAMPLE(streams, cells, layers, k, v, k_bytes, v_bytes, v_element)                          \
    .n_stream = streams, .n_cells = cells, .n_layers = layers, .type_k = k, .type_v = v,           \
    .k_row = k_bytes, .v_row = v_bytes, .element = v_element
#define PLAIN SAMPLE(1, 37, 3, 1, 1, 24, 32, 2)

static const struct good_row {
    const char *name;
    struct sample sample;
} good[] = {
    { "plain", { PLAIN } },
    { "one cell", { SAMPLE(1, 1, 3, 1, 1, 24, 32, 2) } },
    { "exactly two blocks", { SAMPLE(1, 32, 3, 1, 1, 24, 32, 2) } },
    { "from another sequence", { PLAIN, .seq = 7 } },
    { "one layer", { SAMPLE(1, 37, 1, 1, 1, 24, 32, 2) } },
    { "512 layers", { SAMPLE(1, 2, 512, 1, 1, 8, 8, 2) } },
    { "transposed f16", { PLAIN, .v_trans = true } },
    { "transposed f32", { SAMPLE(1, 37, 3, 1, 0, 24, 32, 4), .v_trans = true } },
    { "transposed bf16", { SAMPLE(1, 37, 3, 1, 30, 24, 32, 2), .v_trans = true } },
    { "quantised rows", { SAMPLE(1, 37, 3, 8, 2, 34, 18, 0) } },
    { "no V", { PLAIN, .no_v = true } },
    { "four streams, first", { SAMPLE(4, 37, 3, 1, 1, 24, 32, 2) } },
    { "four streams, last", { SAMPLE(4, 37, 3, 1, 1, 24, 32, 2), .stream = 3 } },
    { "four streams, no V", { SAMPLE(4, 37, 3, 1, 1, 24, 32, 2), .stream = 1, .no_v = true } },
    { "reversed cells", { SAMPLE(1, 5, 3, 1, 1, 24, 32, 2), .pos = reversed } },
    { "wrapped cells", { SAMPLE(1, 34, 3, 1, 1, 24, 32, 2), .pos = wrapped } },
    { "wrapped, transposed",
      { SAMPLE(1, 34, 3, 1, 1, 24, 32, 2), .pos = wrapped, .v_trans = true } },
};

static void *alloc(size_t n) {
    void *p = malloc(n ? n : 1);

    assert_non_null(p);
    return p;
}

/* A heap block of exactly the state's size, so that sanitizers see a read past its end. */
static uint8_t *write_sample(const struct sample *s, size_t *ret_size) {
    uint8_t *big = alloc(CAP), *exact;

    *ret_size = sample_write(s, big);
    assert_true(*ret_size <= CAP);
    exact = alloc(*ret_size);
    memcpy(exact, big, *ret_size);
    free(big);
    return exact;
}

static uint8_t expected(const struct sample *s, uint32_t layer, bool v, uint32_t pos, uint32_t n,
                        uint32_t first, uint32_t b) {
    return pos - first < n ? sample_byte(layer, v, pos, b) : 0;
}

/* Each byte of the block that holds tokens [first, first + n), located by the segment table. */
static void check_block(const struct sample *s, const struct cst_state_layout *l, uint32_t first,
                        uint32_t n, const uint8_t *block) {
    uint64_t seen = 0;

    for (uint32_t layer = 0; layer < s->n_layers; layer++) {
        const uint8_t *k = block + cst_state_k_offset(l, layer, BLOCK);
        const uint8_t *v = block + cst_state_v_offset(l, layer, BLOCK);
        uint32_t k_row = sample_row(s, false, layer);
        uint32_t v_row = s->no_v ? 0 : sample_row(s, true, layer);
        uint32_t el = s->element;

        assert_ptr_equal(k, block + seen);
        for (uint32_t t = 0; t < BLOCK; t++) {
            for (uint32_t b = 0; b < k_row; b++)
                assert_int_equal(k[t * k_row + b],
                                 expected(s, layer, false, first + t, n, first, b));
            for (uint32_t b = 0; b < v_row; b++) {
                uint32_t at = s->v_trans ? (b / el * BLOCK + t) * el + b % el : t * v_row + b;

                assert_int_equal(v[at], expected(s, layer, true, first + t, n, first, b));
            }
        }
        seen += (uint64_t)(k_row + v_row) * BLOCK;
    }
    assert_int_equal(seen, cst_state_block_size(l, BLOCK));
}

/* Cuts all blocks, then joins their first n_tokens tokens for sequence `seq`. */
static void check_round_trip(const struct sample *s, const struct cst_state *state,
                             uint32_t n_tokens, int32_t seq) {
    const struct cst_state_layout *l = &state->layout;
    struct sample wanted = *s;
    uint8_t *block = alloc(cst_state_block_size(l, BLOCK)), *blob, *want;
    size_t want_size;

    wanted.n_cells = n_tokens;
    wanted.pos = NULL;
    wanted.stream = 0;
    wanted.seq = seq;
    want = write_sample(&wanted, &want_size);
    assert_int_equal(cst_state_size(l, n_tokens), want_size);
    blob = alloc(want_size);
    memset(blob, 0xee, want_size);
    cst_state_join_begin(l, n_tokens, seq, blob);
    for (uint32_t first = 0; first < s->n_cells; first += BLOCK) {
        uint32_t n = CST_MIN(BLOCK, s->n_cells - first);

        memset(block, 0xdd, cst_state_block_size(l, BLOCK));
        cst_state_cut(state, first, n, BLOCK, block);
        check_block(s, l, first, n, block);
        if (first < n_tokens)
            cst_state_join_block(l, n_tokens, first, CST_MIN(n, n_tokens - first), BLOCK, block,
                                 blob);
    }
    assert_memory_equal(blob, want, want_size);
    free(blob);
    free(want);
    free(block);
}

static void check_good(void **row) {
    const struct good_row *r = *row;
    struct cst_state state;
    size_t size;
    uint8_t *blob = write_sample(&r->sample, &size);

    assert_int_equal(cst_state_parse(&state, blob, size), 0);
    assert_int_equal(state.n_cells, r->sample.n_cells);
    assert_int_equal(state.layout.n_layers, r->sample.n_layers);
    assert_int_equal(state.layout.n_stream, r->sample.n_stream);
    assert_int_equal(state.layout.v_trans, r->sample.v_trans);
    assert_int_equal(state.layout.has_v, !r->sample.no_v);
    check_round_trip(&r->sample, &state, r->sample.n_cells, r->sample.seq);
    check_round_trip(&r->sample, &state, 1, 3);
    if (r->sample.n_cells > BLOCK)
        check_round_trip(&r->sample, &state, r->sample.n_cells - 3, 3);
    cst_state_deinit(&state);
    cst_state_deinit(&state);
    free(blob);
}

/* Offsets of fields in a state of one stream and `PLAIN`. */
enum {
    AT_MAGIC = 0,
    AT_STREAMS = 8,
    AT_CELLS = 12,
    AT_CELL = 16,
    AT_TRANS = 16 + 37 * 12,
    AT_LAYERS = AT_TRANS + 4,
    AT_K = AT_LAYERS + 4,
    AT_V = AT_K + 3 * 12 + 37 * (24 + 32 + 40),
};

static const struct bad_row {
    const char *name;
    size_t at; /* a u32 there is replaced */
    uint32_t value;
    int expected;
    bool v_trans;
} bad[] = {
    { "wrong magic", AT_MAGIC, 0xaf143cd9, CST_STATE_E_FOREIGN },
    { "no stream", AT_STREAMS, 0, CST_STATE_E_FOREIGN },
    { "one stream more than there is", AT_STREAMS, 2, CST_STATE_E_TRUNCATED },
    { "too many streams", AT_STREAMS, CST_STATE_STREAMS_MAX + 1, CST_STATE_E_LIMIT },
    { "too many cells", AT_CELLS, CST_STATE_CELLS_MAX + 1, CST_STATE_E_LIMIT },
    { "more cells than bytes", AT_CELLS, CST_STATE_CELLS_MAX, CST_STATE_E_TRUNCATED },
    { "first position missing", AT_CELL, 37, CST_STATE_E_HOLE },
    { "a hole", AT_CELL + 36 * 12, 37, CST_STATE_E_HOLE },
    { "a position twice", AT_CELL + 5 * 12, 4, CST_STATE_E_HOLE },
    { "a negative position", AT_CELL + 5 * 12, UINT32_MAX, CST_STATE_E_HOLE },
    { "a cell of two sequences", AT_CELL + 5 * 12 + 4, 2, CST_STATE_E_FOREIGN },
    { "a cell of no sequence", AT_CELL + 5 * 12 + 4, 0, CST_STATE_E_FOREIGN },
    { "unknown transposition", AT_TRANS, 2, CST_STATE_E_FOREIGN },
    { "no layer", AT_LAYERS, 0, CST_STATE_E_FOREIGN },
    { "too many layers", AT_LAYERS, CST_LAYERS_MAX + 1, CST_STATE_E_LIMIT },
    { "K types differ", AT_K + 12 + 24 * 37, 8, CST_STATE_E_MIXED },
    { "K row empty", AT_K + 4, 0, CST_STATE_E_LIMIT },
    { "K row huge", AT_K + 8, 1, CST_STATE_E_LIMIT },
    { "K row longer than the state", AT_K + 4, CST_STATE_ROW_MAX, CST_STATE_E_TRUNCATED },
    { "V types differ", AT_V + 12 + 32 * 37, 8, CST_STATE_E_MIXED },
    { "V row empty", AT_V + 4, 0, CST_STATE_E_LIMIT },
    { "V element empty", AT_V + 4, 0, CST_STATE_E_MIXED, true },
    { "V element of another size", AT_V + 4, 4, CST_STATE_E_MIXED, true },
    { "V transposed in groups", AT_V, 8, CST_STATE_E_MIXED, true },
    { "V without width", AT_V + 8, 0, CST_STATE_E_LIMIT, true },
    { "V too wide", AT_V + 8, UINT32_MAX, CST_STATE_E_LIMIT, true },
};

static void check_bad(void **row) {
    const struct bad_row *r = *row;
    struct sample sample = { PLAIN, .v_trans = r->v_trans };
    struct cst_state state;
    size_t size;
    uint8_t *blob = write_sample(&sample, &size);

    memcpy(blob + r->at, &r->value, sizeof(r->value));
    assert_int_equal(cst_state_parse(&state, blob, size), r->expected);
    assert_true(strlen(cst_state_text(r->expected)) > 20);
    cst_state_deinit(&state);
    free(blob);
}

/* Every proper prefix is truncated, but for one: K alone is a state of a model without V. */
static void every_prefix_is_refused(void **unused) {
    struct sample sample = { SAMPLE(1, 3, 3, 1, 1, 24, 32, 2) };
    struct cst_state state;
    size_t size, without_v;
    uint8_t *blob = write_sample(&sample, &size);
    struct sample k_only = sample;
    uint8_t *shorter;

    (void)unused;
    k_only.no_v = true;
    shorter = write_sample(&k_only, &without_v);
    for (size_t n = 0; n < size; n++) {
        uint8_t *exact = alloc(n);
        int r;

        memcpy(exact, blob, n);
        r = cst_state_parse(&state, exact, n);
        if (n == without_v)
            assert_int_equal(r, 0);
        else
            assert_int_equal(r, CST_STATE_E_TRUNCATED);
        cst_state_deinit(&state);
        free(exact);
    }
    free(shorter);
    free(blob);
}

static void trailing_bytes_are_refused(void **unused) {
    struct sample sample = { PLAIN };
    struct cst_state state;
    uint8_t *big = alloc(CAP);
    size_t size = sample_write(&sample, big);

    (void)unused;
    memset(big + size, 0, 12);
    assert_int_equal(cst_state_parse(&state, big, size + 12), CST_STATE_E_FOREIGN);
    cst_state_deinit(&state);
    /* A second cache behind the first (sliding windows, indexers). */
    memcpy(big + size, big + 8, size - 8);
    assert_int_equal(cst_state_parse(&state, big, size + size - 8), CST_STATE_E_FOREIGN);
    cst_state_deinit(&state);
    free(big);
}

static void two_streams_with_cells_are_refused(void **unused) {
    struct sample sample = { SAMPLE(2, 37, 3, 1, 1, 24, 32, 2) };
    struct cst_state state;
    uint8_t *big = alloc(CAP);
    size_t size = sample_write(&sample, big);

    (void)unused;
    memcpy(big + size - 4, big + 12, size - 4 - 12);
    assert_int_equal(cst_state_parse(&state, big, size - 4 + size - 4 - 12), CST_STATE_E_FOREIGN);
    cst_state_deinit(&state);
    free(big);
}

static void an_empty_sequence_tells_its_streams(void **unused) {
    struct sample sample = { .n_stream = 3 };
    struct cst_state state;
    size_t size;
    uint8_t *blob = write_sample(&sample, &size);

    (void)unused;
    assert_int_equal(cst_state_parse(&state, blob, size), 0);
    assert_int_equal(state.n_cells, 0);
    assert_int_equal(state.layout.n_layers, 0);
    assert_int_equal(state.layout.n_stream, 3);
    cst_state_deinit(&state);
    free(blob);
}

static void layouts_differ_by_each_field(void **unused) {
    struct sample base = { PLAIN }, variants[] = { base, base, base, base, base, base, base, base };
    struct cst_state a, b;
    size_t size;
    uint8_t *blob = write_sample(&base, &size), *other;

    (void)unused;
    variants[0].n_stream = 2;
    variants[1].n_layers = 2;
    variants[2].v_trans = true;
    variants[3].no_v = true;
    variants[4].type_k = 30;
    variants[5].type_v = 30;
    variants[6].k_row += 8;
    variants[7].v_row += 8;
    assert_int_equal(cst_state_parse(&a, blob, size), 0);
    for (size_t i = 0; i < CST_COUNT(variants); i++) {
        size_t other_size;

        other = write_sample(&variants[i], &other_size);
        assert_int_equal(cst_state_parse(&b, other, other_size), 0);
        assert_false(cst_state_layout_equal(&a.layout, &b.layout));
        assert_true(cst_state_layout_equal(&b.layout, &b.layout));
        cst_state_deinit(&b);
        free(other);
    }
    cst_state_deinit(&a);
    free(blob);
}

static void out_of_memory_is_an_error(void **unused) {
    struct sample sample = { PLAIN };
    struct cst_state state;
    size_t size;
    uint8_t *blob = write_sample(&sample, &size);

    (void)unused;
    cst_fault_join();
    cst_fault_arm(CST_FAULT_ALLOC, 1, 1);
    assert_int_equal(cst_state_parse(&state, blob, size), -ENOMEM);
    cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
    cst_fault_leave();
    cst_state_deinit(&state);
    free(blob);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_prefix_is_refused),
        cmocka_unit_test(trailing_bytes_are_refused),
        cmocka_unit_test(two_streams_with_cells_are_refused),
        cmocka_unit_test(an_empty_sequence_tells_its_streams),
        cmocka_unit_test(layouts_differ_by_each_field),
        cmocka_unit_test(out_of_memory_is_an_error),
    };

    return cst_run_rows(good, check_good) + cst_run_rows(bad, check_bad) +
           cmocka_run_group_tests(tests, NULL, NULL);
}
