/* SPDX-License-Identifier: Apache-2.0 */
/*
 * codec.rans.*: the integer coder beside zstd -1 on the same symbols: a real cache's values less
 * their channel's mean, over a step of .35 of the layer's deviation, a stream for each segment of
 * a 64-token block. zstd gets them as bytes in the same order, one frame a stream.
 *
 *   decode_over_zstd1  rate of decoding over that of zstd
 *   encode_over_zstd1  the same of encoding
 *
 * An operation is one block; symbols go to a buffer that stays in the cache, encoded streams don't.
 */
#include "bench/benches.h"

#include "base/macros.h"
#include "base/mem.h"
#include "bench/bench.h"
#include "bench/bench_cache.h"
#include "codec/dispatch.h"
#include "codec/dtype.h"
#include "codec/rans.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

enum {
    CHANNELS = BENCH_HEADS * BENCH_DIMS,
    SYMBOLS = BENCH_TOKENS * CHANNELS,
    ROOM = 2 * SYMBOLS, /* of an encoded stream */
};

struct symbols {
    size_t blocks, streams, next; /* streams of a block; next block */
    int32_t *q;                   /* [block][stream][channel][token] */
    uint8_t *bytes, *klass;       /* the same; [stream][channel] */
    uint8_t *coded, *packed;      /* [block][stream], ROOM bytes each */
    size_t *coded_len, *packed_len;
    int32_t *out;
    uint8_t *out_bytes;
    struct cst_rans_work *work;
    ZSTD_CCtx *compress;
    ZSTD_DCtx *decompress;
};

static float value(const struct bench_cache *c, size_t block, size_t stream, size_t token,
                   size_t channel) {
    const uint8_t *segment =
        c->blocks + block * c->desc.block_bytes + c->desc.segments[stream].offset;

    return cst_dtype_load(CST_DTYPE_BF16, segment + token * BENCH_ROW + 2 * channel);
}

/* Mean and deviation of each channel of a stream over all blocks. */
static void find_moments(double mean[CHANNELS], double deviation[CHANNELS],
                         const struct bench_cache *c, size_t stream) {
    double n = (double)(c->n * BENCH_TOKENS);

    memset(mean, 0, CHANNELS * sizeof(*mean));
    memset(deviation, 0, CHANNELS * sizeof(*deviation));
    for (size_t i = 0; i < c->n * BENCH_TOKENS * CHANNELS; i++) {
        double x = (double)value(c, i / SYMBOLS, stream, i / CHANNELS % BENCH_TOKENS, i % CHANNELS);

        mean[i % CHANNELS] += x / n;
        deviation[i % CHANNELS] += x * x / n;
    }
    for (size_t i = 0; i < CHANNELS; i++)
        deviation[i] = sqrt(deviation[i] - mean[i] * mean[i]);
}

static void quantize_stream(struct symbols *s, const struct bench_cache *c, size_t stream) {
    double mean[CHANNELS], deviation[CHANNELS], energy = 0, step;

    find_moments(mean, deviation, c, stream);
    for (size_t i = 0; i < CHANNELS; i++)
        energy += deviation[i] * deviation[i];
    step = .35 * sqrt(energy / CHANNELS);
    for (size_t i = 0; i < CHANNELS; i++)
        s->klass[stream * CHANNELS + i] = cst_rans_class(deviation[i] / step);
    for (size_t i = 0; i < c->n * SYMBOLS; i++) {
        size_t block = i / SYMBOLS, channel = i / BENCH_TOKENS % CHANNELS;
        size_t at = (block * s->streams + stream) * SYMBOLS + i % SYMBOLS;
        double x = (double)value(c, block, stream, i % BENCH_TOKENS, channel);

        s->q[at] = (int32_t)round((x - mean[channel]) / step);
        s->bytes[at] = (uint8_t)CST_MAX(-128, CST_MIN(127, s->q[at]));
    }
}

static struct cst_rans_matrix matrix_of(const struct symbols *s, size_t i, int32_t *q) {
    return (struct cst_rans_matrix){ .q = q,
                                     .stride = BENCH_TOKENS,
                                     .tokens = BENCH_TOKENS,
                                     .channels = CHANNELS,
                                     .klass = s->klass + i % s->streams * CHANNELS };
}

/* A function over the streams of the next blocks, one block an operation. */
static int each_stream(struct symbols *s, unsigned ops, int (*fn)(struct symbols *s, size_t i)) {
    int r = 0;

    for (; ops-- && !r; s->next = (s->next + 1) % s->blocks) {
        s->work = cst_rans_work_init(s->work);
        for (size_t i = 0; i < s->streams && !r; i++)
            r = fn(s, s->next * s->streams + i);
    }
    return r;
}

static int encode(struct symbols *s, size_t i) {
    struct cst_rans_matrix m = matrix_of(s, i, s->q + i * SYMBOLS);

    s->coded_len[i] =
        cst_rans_encode_coefficients(s->coded + i * ROOM, ROOM, &m, s->work, cst_codec_ops());
    return s->coded_len[i] ? 0 : -EINVAL;
}

static int decode(struct symbols *s, size_t i) {
    struct cst_rans_matrix m = matrix_of(s, i, s->out);

    return cst_rans_decode_coefficients(&m, s->coded + i * ROOM, s->coded_len[i], s->work,
                                        cst_codec_ops())
               ? 0
               : -EBADMSG;
}

static int zstd_encode(struct symbols *s, size_t i) {
    s->packed_len[i] = ZSTD_compressCCtx(s->compress, s->packed + i * ROOM, ROOM,
                                         s->bytes + i * SYMBOLS, SYMBOLS, 1);
    return ZSTD_isError(s->packed_len[i]) ? -EINVAL : 0;
}

static int zstd_decode(struct symbols *s, size_t i) {
    return ZSTD_decompressDCtx(s->decompress, s->out_bytes, SYMBOLS, s->packed + i * ROOM,
                               s->packed_len[i]) == SYMBOLS
               ? 0
               : -EBADMSG;
}

static int run_encode(void *arg, unsigned ops) {
    return each_stream(arg, ops, encode);
}

static int run_decode(void *arg, unsigned ops) {
    return each_stream(arg, ops, decode);
}

static int run_zstd_encode(void *arg, unsigned ops) {
    return each_stream(arg, ops, zstd_encode);
}

static int run_zstd_decode(void *arg, unsigned ops) {
    return each_stream(arg, ops, zstd_decode);
}

static int compare(struct symbols *s, cst_side_fn ours, cst_side_fn probe, const char *name,
                   double target) {
    struct cst_figure figure = {
        .name = name, .unit = "ratio", .sense = CST_AT_LEAST, .target = target
    };
    double symbols = (double)s->streams * SYMBOLS, coded = 0, packed = 0;
    struct cst_compared m;
    int r = cst_compare(&m, (struct cst_side){ ours, s }, (struct cst_side){ probe, s });

    if (r)
        return r;
    for (size_t i = 0; i < s->blocks * s->streams; i++) {
        coded += (double)s->coded_len[i];
        packed += (double)s->packed_len[i];
    }
    figure.value = m.b / m.a;
    cst_report(&figure,
               "\"msymbols_s\": %.0f, \"probe_msymbols_s\": %.0f, \"bits\": %.3f, "
               "\"probe_bits\": %.3f, \"pairs\": [%.3f, %.3f]",
               symbols / m.a / 1e6, symbols / m.b / 1e6, 8 * coded / symbols / (double)s->blocks,
               8 * packed / symbols / (double)s->blocks, 1 / m.high, 1 / m.low);
    return 0;
}

static int symbols_init(struct symbols *s, const struct bench_cache *c) {
    size_t n = c->n * c->desc.n_segments;

    *s = (struct symbols){ .blocks = c->n, .streams = c->desc.n_segments };
    s->q = cst_malloc(n * SYMBOLS * sizeof(*s->q));
    s->bytes = cst_malloc(n * SYMBOLS);
    s->klass = cst_malloc(s->streams * CHANNELS);
    s->coded = cst_malloc(n * ROOM);
    s->packed = cst_malloc(n * ROOM);
    s->coded_len = cst_calloc(n, sizeof(*s->coded_len));
    s->packed_len = cst_calloc(n, sizeof(*s->packed_len));
    s->out = cst_malloc(SYMBOLS * sizeof(*s->out));
    s->out_bytes = cst_malloc(SYMBOLS);
    s->work = aligned_alloc(64, cst_align_up(cst_rans_work_size(), 64));
    s->compress = ZSTD_createCCtx();
    s->decompress = ZSTD_createDCtx();
    if (!s->q || !s->bytes || !s->klass || !s->coded || !s->packed || !s->coded_len ||
        !s->packed_len || !s->out || !s->out_bytes || !s->work || !s->compress || !s->decompress)
        return -ENOMEM;
    for (size_t i = 0; i < s->streams; i++)
        quantize_stream(s, c, i);
    return 0;
}

static void symbols_deinit(struct symbols *s) {
    cst_free(s->q);
    cst_free(s->bytes);
    cst_free(s->klass);
    cst_free(s->coded);
    cst_free(s->packed);
    cst_free(s->coded_len);
    cst_free(s->packed_len);
    cst_free(s->out);
    cst_free(s->out_bytes);
    free(s->work);
    (void)ZSTD_freeCCtx(s->compress);
    (void)ZSTD_freeDCtx(s->decompress);
}

int cst_bench_rans(void) {
    struct bench_cache cache = { 0 };
    struct symbols s = { 0 };
    int r = bench_cache_load(&cache);

    if (r == -ENOENT) {
        cst_report_skipped("codec.rans.decode_over_zstd1",
                           "neither CISTERN_DATA nor tests/data is there");
        r = 0;
    } else if (!r) {
        r = symbols_init(&s, &cache);
        if (!r)
            r = cst_pin();
        if (!r)
            r = run_encode(&s, (unsigned)s.blocks);
        if (!r)
            r = run_zstd_encode(&s, (unsigned)s.blocks);
        if (!r)
            r = compare(&s, run_encode, run_zstd_encode, "codec.rans.encode_over_zstd1", 0.5);
        if (!r)
            r = compare(&s, run_decode, run_zstd_decode, "codec.rans.decode_over_zstd1", 1.0);
    }
    symbols_deinit(&s);
    bench_cache_deinit(&cache);
    return r;
}
