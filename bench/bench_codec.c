/* SPDX-License-Identifier: Apache-2.0 */
/*
 * codec.PRESET.*: frames of a real model's cache, as an engine lays it out, in 64-token blocks.
 *
 *   ratio              bytes of the blocks over bytes of their frames; of learned presets in sample
 *   nmse_k, nmse_v     squared error of keys and of values over their energy, mean over the layers
 *   encode_over_memcpy rate of encoding over rate of memcpy of the blocks
 *   decode_over_memcpy rate of decoding over rate of memcpy of the decoded bytes
 *   decode_over_limit  time of the least of it over time of decoding: as many 4-bit codes apart,
 *                      transformed and rounded; klt, deep: of the dense products alone
 *   decode_over_zstd1  the same over zstd -1 decoding the blocks' bytes as they are
 *   instructions       of decoding, a value, where valgrind is there (bench_instructions.c)
 *
 * An operation is one block of a working set of 256 MiB or more, so neither side finds its input
 * or output in a cache. Decoding includes its checksum; zstd and memcpy check nothing. The cache is
 * $CISTERN_DATA/kv, or the excerpt in tests/data; its keys are rotated, as engines keep them.
 */
#include "bench/benches.h"

#include "base/mem.h"
#include "bench/bench.h"
#include "bench/bench_cache.h"
#include "bench/bench_dense.h"
#include "bench/bench_instructions.h"
#include "codec/codec.h"
#include "codec/dispatch.h"
#include "codec/preset.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

static const size_t WORKING_SET = (size_t)256 << 20;

/* A side of a comparison: encoded blocks that go, one an operation, to their places in `out`. */
struct set {
    const struct bench_cache *cache;
    size_t n, next, room, bytes; /* blocks; next one; bytes of a place; of all encoded blocks */
    uint8_t *encoded, *out;
    size_t *length;
    uint32_t preset;
    void *work;
    size_t work_len;
    ZSTD_DCtx *zstd;
};

static int set_init(struct set *s, const struct bench_cache *cache, uint8_t *out, size_t n,
                    size_t room) {
    *s = (struct set){ .cache = cache, .n = n, .room = room, .out = out };
    s->work_len = cst_codec_work_size_max(&cache->desc);
    s->encoded = cst_malloc(n * room);
    s->length = cst_calloc(n, sizeof(*s->length));
    s->work = aligned_alloc(64, cst_align_up(s->work_len, 64));
    s->zstd = ZSTD_createDCtx();
    if (!s->encoded || !s->length || !s->work || !s->zstd)
        return -ENOMEM;
    memset(s->encoded, 1, n * room); /* its pages are there */
    return 0;
}

static void set_deinit(struct set *s) {
    cst_free(s->encoded);
    cst_free(s->length);
    free(s->work);
    (void)ZSTD_freeDCtx(s->zstd);
    *s = (struct set){ 0 };
}

static const uint8_t *block_of(const struct set *s, size_t i) {
    return s->cache->blocks + i % s->cache->n * s->cache->desc.block_bytes;
}

static int encode_frame(struct set *s, size_t i, struct cst_frame_info *info) {
    struct cst_encode_params p = { s->preset, BENCH_TOKENS, bench_cache_position(s->cache, i), 1 };

    cst_dense_encode_params(s->cache->dense, &p);
    return cst_frame_encode(s->encoded + i * s->room, s->room, block_of(s, i), &s->cache->desc, &p,
                            s->work, s->work_len, &s->length[i], info)
               ? -EINVAL
               : 0;
}

static int fill_frames(struct set *s, float *error) {
    for (size_t i = 0; i < s->n; i++) {
        struct cst_frame_info info;
        int r = encode_frame(s, i, &info);

        if (r)
            return r;
        s->bytes += s->length[i];
        *error = CST_MAX(*error, info.error);
    }
    return 0;
}

static int fill_zstd(struct set *s) {
    uint64_t n = s->cache->desc.block_bytes;

    for (size_t i = 0; i < s->n; i++) {
        s->length[i] = ZSTD_compress(s->encoded + i * s->room, s->room, block_of(s, i), n, 1);
        if (ZSTD_isError(s->length[i]))
            return -EINVAL;
        s->bytes += s->length[i];
    }
    return 0;
}

static void fill_copies(struct set *s) {
    for (size_t i = 0; i < s->n; i++)
        memcpy(s->encoded + i * s->room, block_of(s, i), s->cache->desc.block_bytes);
}

static int run_encode(void *arg, unsigned ops) {
    struct set *s = arg;
    struct cst_frame_info info;
    int r = 0;

    for (; ops-- && !r; s->next = (s->next + 1) % s->n)
        r = encode_frame(s, s->next, &info);
    return r;
}

static int run_decode(void *arg, unsigned ops) {
    struct set *s = arg;
    const struct cst_descriptor *desc = &s->cache->desc;
    struct cst_decode_params p = CST_DECODE_ALL;

    cst_dense_decode_params(s->cache->dense, &p);
    for (; ops--; s->next = (s->next + 1) % s->n) {
        if (cst_frame_decode(s->out + s->next * desc->block_bytes, desc->block_bytes,
                             s->encoded + s->next * s->room, s->length[s->next], desc, &p, s->work,
                             s->work_len))
            return -EBADMSG;
    }
    return 0;
}

static int run_zstd(void *arg, unsigned ops) {
    struct set *s = arg;
    uint64_t n = s->cache->desc.block_bytes;

    for (; ops--; s->next = (s->next + 1) % s->n) {
        if (ZSTD_decompressDCtx(s->zstd, s->out + s->next * n, n, s->encoded + s->next * s->room,
                                s->length[s->next]) != n)
            return -EBADMSG;
    }
    return 0;
}

static int run_memcpy(void *arg, unsigned ops) {
    struct set *s = arg;
    uint64_t n = s->cache->desc.block_bytes;

    for (; ops--; s->next = (s->next + 1) % s->n)
        memcpy(s->out + s->next * n, s->encoded + s->next * s->room, n);
    return 0;
}

/* What decoding 4-bit codes of transformed heads takes at least: apart, level, transform, to 16
 * bits, to the block's place. The codes are a block's first bytes, whatever they mean. */
static int run_limit(void *arg, unsigned ops) {
    static const float level[16] = { -2.7f, -2.1f, -1.6f, -1.3f, -.9f, -.7f, -.4f, -.1f,
                                     .1f,   .4f,   .7f,   .9f,   1.3f, 1.6f, 2.1f, 2.7f };
    static const float scale[BENCH_HEADS] = { 1, 2, 3 };
    const struct cst_codec_ops *codec = cst_codec_ops();
    struct set *s = arg;
    uint64_t n = s->cache->desc.block_bytes;
    float x[BENCH_ROW / 2];
    uint8_t codes[BENCH_ROW / 2];

    for (; ops--; s->next = (s->next + 1) % s->n) {
        const uint8_t *packed = s->encoded + s->next * s->room;
        uint8_t *out = s->out + s->next * n;

        for (uint64_t at = 0; at < n; at += BENCH_ROW, packed += BENCH_ROW / 4) {
            codec->hadamard_row(x, codes, packed, level, 4, scale, NULL, BENCH_DIMS, BENCH_HEADS);
            codec->from_f32[CST_DTYPE_BF16](out + at, x, BENCH_ROW / 2);
        }
    }
    return 0;
}

static int compare(cst_side_fn run, struct set *ours, const char *figure, struct cst_side probe,
                   struct cst_figure target) {
    double bytes = (double)ours->cache->desc.block_bytes;
    struct cst_compared m;
    char name[64];
    int r = cst_compare(&m, (struct cst_side){ run, ours }, probe);

    if (r)
        return r;
    (void)snprintf(name, sizeof(name), "codec.%s.%s", cst_preset_name(ours->preset), figure);
    target.name = name;
    target.value = m.b / m.a;
    target.unit = "ratio";
    cst_report(&target,
               "\"gb_s\": %.2f, \"probe_gb_s\": %.2f, \"working_set_mib\": %zu, "
               "\"pairs\": [%.3f, %.3f]",
               bytes / m.a / 1e9, bytes / m.b / 1e9,
               ours->n * (size_t)ours->cache->desc.block_bytes >> 20, 1 / m.high, 1 / m.low);
    return 0;
}

static void report_ratio(const struct set *ours, const struct set *zstd, float error) {
    double bytes = (double)ours->cache->desc.block_bytes;
    struct cst_figure ratio = { .unit = "ratio", .sense = CST_NO_TARGET };
    char name[64];

    (void)snprintf(name, sizeof(name), "codec.%s.ratio", cst_preset_name(ours->preset));
    ratio.name = name;
    ratio.value = bytes * (double)ours->n / (double)ours->bytes;
    if (ours->preset == CST_PRESET_LOSSLESS)
        ratio.sense = CST_AT_LEAST, ratio.target = 1.5;
    cst_report(&ratio, "\"error\": %.4f, \"zstd1_ratio\": %.3f, \"in_sample\": %s", (double)error,
               bytes * (double)zstd->n / (double)zstd->bytes,
               cst_preset_needs_side(ours->preset) ? "true" : "false");
}

/* Squared errors and energies of segment i, added up over all different blocks. */
static double segment_nmse(const struct set *s, uint32_t i) {
    const struct cst_descriptor *desc = &s->cache->desc;
    struct bench_error e = { 0 };

    for (size_t b = 0; b < s->cache->n; b++) {
        const uint8_t *x = block_of(s, b) + desc->segments[i].offset;
        const uint8_t *y = s->out + b * desc->block_bytes + desc->segments[i].offset;

        bench_error_add(&e, x, y, BENCH_PART);
    }
    return e.errors / e.energy;
}

static int report_errors(struct set *ours) {
    const struct cst_descriptor *desc = &ours->cache->desc;
    int r;

    ours->next = 0;
    r = run_decode(ours, (unsigned)ours->cache->n);
    for (uint32_t tensor = 0; tensor < 2 && !r; tensor++) {
        struct cst_figure figure = { .unit = "ratio", .sense = CST_NO_TARGET };
        double least = 1e300, most = 0;
        char name[64];

        for (uint32_t i = tensor; i < desc->n_segments; i += 2) {
            double nmse = segment_nmse(ours, i);

            figure.value += nmse / desc->n_layers;
            least = CST_MIN(least, nmse);
            most = CST_MAX(most, nmse);
        }
        (void)snprintf(name, sizeof(name), "codec.%s.nmse_%s", cst_preset_name(ours->preset),
                       tensor ? "v" : "k");
        figure.name = name;
        cst_report(&figure, "\"least\": %.3g, \"most\": %.3g", least, most);
    }
    return r;
}

/* Not pinned: nothing is timed, and callgrind is slow. */
static int count_instructions(const struct set *s) {
    size_t i = 1, side_len; /* without sinks, as most blocks are */
    const uint8_t *side = cst_dense_bytes(s->cache->dense, &side_len);

    cst_unpin();
    cst_report_instructions(cst_preset_name(s->preset), s->cache, s->encoded + i * s->room,
                            s->length[i], side, side_len);
    return cst_pin();
}

static struct cst_figure decode_target(uint32_t preset) {
    if (preset == CST_PRESET_INT8 || preset == CST_PRESET_INT4 || preset == CST_PRESET_TURBOQUANT)
        return (struct cst_figure){ .sense = CST_AT_LEAST, .target = 0.3 };
    return (struct cst_figure){ .sense = CST_NO_TARGET };
}

static int bench_preset(const struct bench_cache *cache, uint32_t preset, struct set *copies,
                        struct set *zstd) {
    const struct cst_figure any = { .sense = CST_NO_TARGET };
    const struct cst_figure at_least_1 = { .sense = CST_AT_LEAST, .target = 1.0 };
    const struct cst_figure at_least_half = { .sense = CST_AT_LEAST, .target = 0.5 };
    const struct cst_side copy = { run_memcpy, copies };
    float error = 0;
    struct set ours;
    int r = set_init(&ours, cache, copies->out, copies->n, cst_frame_bound(&cache->desc));

    ours.preset = preset;
    if (!r)
        r = fill_frames(&ours, &error);
    if (!r) {
        report_ratio(&ours, zstd, error);
        if (preset >= CST_PRESET_INT8)
            r = report_errors(&ours);
    }
    if (!r)
        r = compare(run_encode, &ours, "encode_over_memcpy", copy, any);
    if (!r)
        r = compare(run_decode, &ours, "decode_over_memcpy", copy, decode_target(preset));
    if (!r && decode_target(preset).sense == CST_AT_LEAST)
        r = compare(run_decode, &ours, "decode_over_limit", (struct cst_side){ run_limit, copies },
                    at_least_half);
    if (!r && preset == CST_PRESET_LOSSLESS)
        r = compare(run_decode, &ours, "decode_over_zstd1", (struct cst_side){ run_zstd, zstd },
                    at_least_1);
    if (!r && cst_preset_needs_side(preset)) {
        struct cst_dense_probe probe = { cache->dense, preset == CST_PRESET_DEEP };
        const struct cst_figure limit = { .sense = CST_AT_LEAST, .target = 0.7 };

        r = compare(run_decode, &ours, "decode_over_limit",
                    (struct cst_side){ cst_dense_run, &probe }, limit);
    }
    if (!r)
        r = count_instructions(&ours);
    set_deinit(&ours);
    return r;
}

static int learn(struct bench_cache *cache) {
    uint32_t *position = cst_calloc(cache->n, sizeof(*position));
    int r = position ? 0 : -ENOMEM;

    for (size_t i = 0; !r && i < cache->n; i++)
        position[i] = bench_cache_position(cache, i);
    if (!r)
        r = cst_dense_new(&cache->dense, &cache->desc, cache->blocks, position, cache->n);
    cst_free(position);
    return r;
}

int cst_bench_codec(void) {
    struct bench_cache cache = { 0 };
    struct set copies = { 0 }, zstd = { 0 };
    uint8_t *out = NULL;
    size_t n = 0, block = 0;
    int r = bench_cache_load(&cache);

    if (r == -ENOENT) {
        cst_report_skipped("codec.lossless.ratio", "neither CISTERN_DATA nor tests/data is there");
        r = 0;
    } else if (!r) {
        block = cache.desc.block_bytes;
        n = WORKING_SET / block + 1;
        out = cst_malloc(n * block);
        r = out ? set_init(&copies, &cache, out, n, block) : -ENOMEM;
        if (!r)
            r = set_init(&zstd, &cache, out, n, ZSTD_compressBound(block));
        if (!r)
            r = cst_pin();
        if (!r)
            r = fill_zstd(&zstd);
        if (!r) {
            fill_copies(&copies);
            memset(out, 1, n * block); /* its pages are there */
        }
        for (uint32_t preset = 0; !r && preset < CST_PRESETS; preset++) {
            if (cst_preset_needs_side(preset) && !cache.dense)
                r = learn(&cache);
            if (!r && cst_preset_name(preset))
                r = bench_preset(&cache, preset, &copies, &zstd);
        }
    }
    set_deinit(&copies);
    set_deinit(&zstd);
    cst_free(out);
    cst_dense_free(cache.dense);
    bench_cache_deinit(&cache);
    if (!r)
        r = cst_bench_rans();
    return r ? r : cst_bench_tucker();
}
