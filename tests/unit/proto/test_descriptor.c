/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a descriptor may not be: one row per rule, each a valid descriptor with one thing wrong, and
 * the words that its sentence must contain. Then hostile bytes: cut at every length, one byte
 * changed anywhere, counts beyond what follows.
 */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "proto/key.h"

#include <errno.h>
#include <math.h>
#include <string.h>

enum { TOKENS = 16, HEADS = 2, DIM = 4, SEGMENT = TOKENS * HEADS * DIM * 2 };

/* A valid descriptor that a row may damage. */
struct sample {
    struct cst_descriptor d;
    struct cst_layer layers[2];
    struct cst_segment segments[5];
};

static void sample_init(struct sample *s) {
    const struct cst_layer layer = { .kv_heads = HEADS,
                                     .head_dim_k = DIM,
                                     .head_dim_v = DIM,
                                     .rope = CST_ROPE_NEOX,
                                     .k_rotated = 1,
                                     .rope_scaling = CST_SCALING_LLAMA3,
                                     .rope_dims = DIM,
                                     .rope_theta = 10000,
                                     .scaling = { 8, 1, 4 },
                                     .scaling_original_context = 8192 };
    const uint64_t row = HEADS * DIM * 2;

    *s = (struct sample){ .d = { .content_id = { 1 },
                                 .engine = "example",
                                 .options = "a=1;b=2",
                                 .block_tokens = TOKENS,
                                 .tp_size = 1,
                                 .block_bytes = 4 * SEGMENT + 100,
                                 .n_layers = 2,
                                 .n_segments = 5 },
                          .layers = { layer, layer } };
    s->segments[0] =
        (struct cst_segment){ 0, CST_TENSOR_K, CST_DTYPE_F16, 0, SEGMENT, row, DIM * 2, 2 };
    s->segments[1] = (struct cst_segment){ 0, CST_TENSOR_V,     CST_DTYPE_F16, SEGMENT, SEGMENT,
                                           2, DIM * TOKENS * 2, TOKENS * 2 };
    s->segments[2] = (struct cst_segment){ 1,       CST_TENSOR_K, CST_DTYPE_BF16, 2 * SEGMENT,
                                           SEGMENT, row,          DIM * 2,        2 };
    s->segments[3] =
        (struct cst_segment){ 1, CST_TENSOR_V,     CST_DTYPE_BF16, 3 * SEGMENT, SEGMENT,
                              2, DIM * TOKENS * 2, TOKENS * 2 };
    s->segments[4] = (struct cst_segment){ .layer = 1,
                                           .tensor = CST_TENSOR_OPAQUE,
                                           .dtype = CST_DTYPE_OPAQUE,
                                           .offset = 4 * SEGMENT,
                                           .length = 100,
                                           .token_stride = 6 };
    s->d.layers = s->layers;
    s->d.segments = s->segments;
}

struct row {
    const char *name;
    void (*damage)(struct sample *s);
    const char *words;
};

#define DAMAGE(NAME, code)                                                                         \
    static void NAME(struct sample *s) {                                                           \
        code;                                                                                      \
    }
DAMAGE(no_content, s->d.content_id[0] = 0)
DAMAGE(no_engine, s->d.engine[0] = '\0')
DAMAGE(engine_unterminated, memset(s->d.engine, 'e', sizeof(s->d.engine)))
DAMAGE(engine_control, s->d.engine[2] = '\033')
DAMAGE(options_high, s->d.options[1] = (char)0xe9)
DAMAGE(options_unterminated, memset(s->d.options, 'o', sizeof(s->d.options)))
DAMAGE(few_tokens, s->d.block_tokens = 15)
DAMAGE(many_tokens, s->d.block_tokens = 1025)
DAMAGE(no_tp, s->d.tp_size = 0)
DAMAGE(tp_rank, s->d.tp_rank = 1)
DAMAGE(no_bytes, s->d.block_bytes = 0)
DAMAGE(many_bytes, s->d.block_bytes = CST_BLOCK_BYTES_MAX + 1)
DAMAGE(no_layers, s->d.n_layers = 0)
DAMAGE(many_layers, s->d.n_layers = CST_LAYERS_MAX + 1)
DAMAGE(no_segments, s->d.n_segments = 0)
DAMAGE(many_segments, s->d.n_segments = CST_SEGMENTS_MAX + 1)
DAMAGE(many_heads, s->layers[1].kv_heads = 4097)
DAMAGE(large_head, s->layers[1].head_dim_v = 65537)
DAMAGE(bad_rope, s->layers[0].rope = CST_ROPES)
DAMAGE(bad_rotated, s->layers[0].k_rotated = 2)
DAMAGE(theta_nan, s->layers[0].rope_theta = NAN)
DAMAGE(theta_infinite, s->layers[0].rope_theta = INFINITY)
DAMAGE(theta_minus_zero, s->layers[0].rope_theta = -0.0F)
DAMAGE(theta_zero, s->layers[0].rope_theta = 0)
DAMAGE(rope_odd, s->layers[0].rope_dims = 3)
DAMAGE(rope_wide, s->layers[0].rope_dims = DIM + 2)
DAMAGE(rope_none_dims, s->layers[0].rope = CST_ROPE_NONE)
DAMAGE(bad_scaling, s->layers[0].rope_scaling = CST_SCALINGS)
DAMAGE(scaling_nan, s->layers[0].scaling[2] = NAN)
DAMAGE(scaling_negative, s->layers[0].scaling[1] = -1)
DAMAGE(scaling_unused, s->layers[0].scaling[3] = 1)
DAMAGE(scaling_context, s->layers[0].rope_scaling = 0;
       memset(s->layers[0].scaling, 0, sizeof(s->layers[0].scaling)))
DAMAGE(bad_layer, s->segments[2].layer = 2)
DAMAGE(bad_tensor, s->segments[2].tensor = CST_TENSORS)
DAMAGE(bad_dtype, s->segments[2].dtype = CST_DTYPES)
DAMAGE(opaque_k, s->segments[2].dtype = CST_DTYPE_OPAQUE)
DAMAGE(float_opaque, s->segments[4].dtype = CST_DTYPE_F16)
DAMAGE(empty, s->segments[2].length = 0)
DAMAGE(overrun, s->d.block_bytes--)
DAMAGE(overrun_wraps, s->segments[4].offset = UINT64_MAX - 10)
DAMAGE(length_huge, s->segments[4].length = UINT64_MAX)
DAMAGE(overlap, s->segments[2].offset -= 2)
DAMAGE(unsorted, s->segments[2].offset = 0)
DAMAGE(odd_offset, s->segments[3].offset++; s->segments[3].length--)
DAMAGE(zero_stride, s->segments[0].token_stride = 0)
DAMAGE(zero_dim_stride, s->segments[0].dim_stride = 0)
DAMAGE(odd_stride, s->segments[0].head_stride = 7)
DAMAGE(huge_stride, s->segments[0].head_stride = UINT64_MAX - 1)
DAMAGE(past_end, s->segments[0].token_stride += 2)
DAMAGE(elements_overlap, s->segments[0].head_stride = 2)
DAMAGE(tokens_overlap, s->segments[1].dim_stride = TOKENS * 2 - 2)
DAMAGE(no_heads, s->layers[0].kv_heads = 0)
DAMAGE(no_head_dim, s->layers[0].head_dim_v = 0)
DAMAGE(second_k, s->segments[2].layer = 0)
DAMAGE(opaque_head_stride, s->segments[4].head_stride = 2)
DAMAGE(opaque_dim_stride, s->segments[4].dim_stride = 2)
DAMAGE(opaque_token_stride, s->segments[4].token_stride = 7)
DAMAGE(opaque_token_huge, s->segments[4].token_stride = UINT64_MAX / 8)

static const struct row rows[] = {
    { "content id of zeros", no_content, "content_id" },
    { "no engine", no_engine, "engine is empty" },
    { "engine without end", engine_unterminated, "engine is too long" },
    { "control character", engine_control, "engine has a byte that is not printable" },
    { "byte above 126", options_high, "options has a byte that is not printable" },
    { "options without end", options_unterminated, "options is too long" },
    { "15 tokens", few_tokens, "block_tokens is 15: 16 to 1024" },
    { "1025 tokens", many_tokens, "block_tokens is 1025" },
    { "tp_size 0", no_tp, "tp_size is 0" },
    { "tp_rank = tp_size", tp_rank, "tp_rank is 1: it must be below tp_size, 1" },
    { "no bytes", no_bytes, "block_bytes is 0" },
    { "more than 256 MiB", many_bytes, "block_bytes is 268435457" },
    { "no layers", no_layers, "layers counts 0" },
    { "513 layers", many_layers, "layers counts 513" },
    { "no segments", no_segments, "segments counts 0" },
    { "1025 segments", many_segments, "segments counts 1025" },
    { "4097 heads", many_heads, "layer 1: kv_heads is 4097" },
    { "large head", large_head, "head_dim_v" },
    { "unknown rope", bad_rope, "layer 0: rope is 4" },
    { "k_rotated 2", bad_rotated, "k_rotated is 2" },
    { "theta NaN", theta_nan, "rope_theta is not a finite" },
    { "theta infinite", theta_infinite, "rope_theta is not a finite" },
    { "theta -0", theta_minus_zero, "rope_theta is not a finite" },
    { "theta 0 with rope", theta_zero, "rope_theta is 0" },
    { "odd rope_dims", rope_odd, "rope_dims is 3" },
    { "rope_dims over head_dim", rope_wide, "rope_dims is 6" },
    { "rope none with the rest", rope_none_dims, "rope is none" },
    { "unknown scaling", bad_scaling, "rope_scaling is 4" },
    { "scaling NaN", scaling_nan, "scaling[2] is not a finite" },
    { "scaling negative", scaling_negative, "scaling[1] is not a finite number of at least 0" },
    { "scaling without meaning", scaling_unused, "scaling[3] has no meaning" },
    { "context without scaling", scaling_context, "scaling_original_context has no meaning" },
    { "layer out of range", bad_layer, "segment 2: layer is 2" },
    { "unknown tensor", bad_tensor, "segment 2: tensor is 3" },
    { "unknown dtype", bad_dtype, "segment 2: dtype is 4" },
    { "opaque dtype of K", opaque_k, "segment 2: dtype opaque and tensor opaque go together" },
    { "float dtype of opaque", float_opaque, "segment 4: dtype opaque and tensor opaque" },
    { "empty segment", empty, "segment 2: length is 0" },
    { "segment overruns the block", overrun, "segment 4: offset 1024 + length 100 exceed" },
    { "offset wraps", overrun_wraps, "segment 4: offset 18446744073709551605" },
    { "length beyond everything", length_huge, "segment 4: offset 1024 + length" },
    { "overlap by one element", overlap, "segment 2 overlaps segment 1" },
    { "unsorted", unsorted, "segment 2 starts before segment 1: sort" },
    { "odd offset", odd_offset, "segment 3: offset is 769" },
    { "token stride 0", zero_stride, "segment 0: token_stride is 0" },
    { "dim stride 0", zero_dim_stride, "segment 0: dim_stride is 0" },
    { "odd stride", odd_stride, "segment 0: head_stride is 7" },
    { "stride beyond any block", huge_stride, "segment 0: head_stride" },
    { "last element past the end", past_end, "segment 0: its last element ends at byte 286" },
    { "heads overlap dims", elements_overlap, "else elements overlap" },
    { "dims overlap tokens", tokens_overlap,
      "segment 1: dim_stride is 30: it must be at least 32" },
    { "K of a layer without heads", no_heads, "segment 0: layer 0 has no K heads" },
    { "V of a layer without V dims", no_head_dim, "segment 1: layer 0 has no V heads" },
    { "K twice", second_k, "segment 2: layer 0 has this tensor already" },
    { "opaque with head stride", opaque_head_stride, "head_stride and dim_stride have no meaning" },
    { "opaque with dim stride", opaque_dim_stride, "head_stride and dim_stride have no meaning" },
    { "opaque tokens overrun", opaque_token_stride, "segment 4: token_stride is 7: 16 tokens" },
    { "opaque stride wraps", opaque_token_huge, "segment 4: token_stride" },
};

static void refused(void **state) {
    const struct row *row = *state;
    struct sample s;
    char text[200] = "";
    const char *said;

    sample_init(&s);
    row->damage(&s);
    said = cst_descriptor_check(&s.d, text, sizeof(text));
    assert_non_null(said);
    if (!strstr(said, row->words))
        fail_msg("\"%s\" does not contain \"%s\"", said, row->words);
}

/* What a check refuses, decode refuses too: rows whose damage can be encoded. */
static void refused_as_bytes(void **state) {
    for (size_t i = 0; i < CST_COUNT(rows); i++) {
        struct sample s;
        struct cst_descriptor *d = NULL;
        uint8_t bytes[2048];
        char text[200] = "";
        size_t n;

        sample_init(&s);
        rows[i].damage(&s);
        if (s.d.n_layers > 2 || s.d.n_segments > 5 || s.d.engine[CST_ENGINE_MAX] ||
            s.d.options[CST_OPTIONS_MAX])
            continue;
        n = cst_descriptor_encode(&s.d, bytes, sizeof(bytes));
        assert_true(n > 0);
        assert_int_equal(cst_descriptor_decode(&d, bytes, n, text, sizeof(text)),
                         CST_DESCRIPTOR_E_INVALID);
        assert_null(d);
        assert_non_null(strstr(text, rows[i].words));
    }
}

static size_t valid_bytes(uint8_t *bytes, size_t cap) {
    struct sample s;
    char text[200] = "";
    size_t n;

    sample_init(&s);
    assert_null(cst_descriptor_check(&s.d, text, sizeof(text)));
    n = cst_descriptor_encode(&s.d, bytes, cap);
    assert_true(n > 0);
    return n;
}

static void cut_at_every_length(void **state) {
    static const struct {
        size_t at;
        const char *field;
    } cuts[] = {
        { 20, "content_id" },
        { 83, "adapter_id" },
        { 87, "engine" },
        { 94, "engine" },
        { 96, "options" },
        { 107, "engine_abi" },
        { 117, "block_tokens" },
        { 135, "layers" },
        { 137, "layers" },
        { 137 + 93, "layers" },
        { 137 + 94 + 3, "segments" },
        { 137 + 94 + 100, "segments" },
    };
    uint8_t bytes[2048];
    size_t n = valid_bytes(bytes, sizeof(bytes));
    struct cst_descriptor *d = NULL;

    for (size_t cut = 0; cut < n; cut++) {
        char text[200] = "";

        assert_int_equal(cst_descriptor_decode(&d, bytes, cut, text, sizeof(text)),
                         CST_DESCRIPTOR_E_INVALID);
        assert_null(d);
        assert_true(text[0]);
        if (cut >= 20) /* the tag */
            assert_non_null(strstr(text, "the descriptor ends inside "));
    }
    for (size_t i = 0; i < CST_COUNT(cuts); i++) {
        char text[200] = "";

        (void)cst_descriptor_decode(&d, bytes, cuts[i].at, text, sizeof(text));
        assert_non_null(strstr(text, cuts[i].field));
    }
}

static void trailing_bytes(void **state) {
    uint8_t bytes[2048];
    size_t n = valid_bytes(bytes, sizeof(bytes));
    struct cst_descriptor *d = NULL;
    char text[200] = "";

    bytes[n] = 0;
    assert_int_equal(cst_descriptor_decode(&d, bytes, n + 1, text, sizeof(text)),
                     CST_DESCRIPTOR_E_INVALID);
    assert_string_equal(text, "1 bytes follow the last segment: send none");
}

/* Any single byte changed: either refused or another descriptor with exactly these bytes. */
static void only_the_canonical_form(void **state) {
    uint8_t bytes[2048], again[2048];
    size_t n = valid_bytes(bytes, sizeof(bytes)), accepted = 0;

    for (size_t at = 0; at < n; at++)
        for (unsigned flip = 1; flip < 256; flip++) {
            struct cst_descriptor *d = NULL;
            char text[200] = "";

            bytes[at] ^= (uint8_t)flip;
            if (cst_descriptor_decode(&d, bytes, n, text, sizeof(text)) == 0) {
                assert_int_equal(cst_descriptor_encode(d, again, sizeof(again)), n);
                assert_memory_equal(again, bytes, n);
                assert_null(cst_descriptor_free(d));
                accepted++;
            }
            bytes[at] ^= (uint8_t)flip;
        }
    assert_true(accepted > 1000); /* other content ids, engines, numbers */
}

/* A count that the bytes can't hold must not become memory. */
static void counts_are_checked_first(void **state) {
    uint8_t bytes[2048];
    size_t n = valid_bytes(bytes, sizeof(bytes)), layers = n - 5 * 46 - 4 - 2 * 47 - 4;
    struct cst_descriptor *d = NULL;
    char text[200] = "";

    assert_int_equal(bytes[layers], 2);
    bytes[layers] = 7;
    cst_fault_join();
    cst_fault_arm(CST_FAULT_ALLOC, UINT64_MAX, 1);
    assert_int_equal(cst_descriptor_decode(&d, bytes, n, text, sizeof(text)),
                     CST_DESCRIPTOR_E_INVALID);
    assert_int_equal(cst_fault_seen(CST_FAULT_ALLOC), 1); /* the descriptor itself */
    cst_fault_leave();
    assert_string_equal(text, "the descriptor ends inside layers: send all of it");
}

static void out_of_memory(void **state) {
    uint8_t bytes[2048];
    size_t n = valid_bytes(bytes, sizeof(bytes));
    struct cst_descriptor *d = NULL;
    char text[200] = "";
    unsigned failures = 0;
    int r;

    cst_fault_join();
    for (;;) {
        cst_fault_arm(CST_FAULT_ALLOC, failures + 1, 1);
        r = cst_descriptor_decode(&d, bytes, n, text, sizeof(text));
        if (r == 0)
            break;
        assert_int_equal(r, -ENOMEM);
        assert_null(d);
        failures++;
    }
    cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
    cst_fault_leave();
    assert_int_equal(failures, 3);
    assert_null(cst_descriptor_free(d));
    assert_null(cst_descriptor_free(NULL));
}

/* A tensor-parallel shard with one head and padded rows; a layer without KV beside it. */
static void unusual_but_valid(void **state) {
    struct sample s;
    char text[200] = "";

    sample_init(&s);
    s.layers[0] = (struct cst_layer){ .kv_heads = 1, .head_dim_k = DIM };
    s.layers[1] = (struct cst_layer){ 0 };
    s.d.n_segments = 1;
    s.segments[0].token_stride = 16;
    s.segments[0].head_stride = 2; /* of the only head: without effect */
    assert_null(cst_descriptor_check(&s.d, text, sizeof(text)));
    assert_string_equal(text, "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refused_as_bytes),         cmocka_unit_test(cut_at_every_length),
        cmocka_unit_test(trailing_bytes),           cmocka_unit_test(only_the_canonical_form),
        cmocka_unit_test(counts_are_checked_first), cmocka_unit_test(out_of_memory),
        cmocka_unit_test(unusual_but_valid),
    };

    return cst_run_rows(rows, refused) + cmocka_run_group_tests(tests, NULL, NULL);
}
