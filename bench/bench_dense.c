/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns what the learned presets need in a benchmark: side data, and matrices for the probe, whose
 * products have the shapes of a decoder's (codec/klt.c). One thread.
 */
#include "bench/bench_dense.h"

#include "base/macros.h"
#include "base/mem.h"
#include "codec/learn.h"
#include "codec/linalg.h"
#include "codec/side.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 64, TOKENS_WANTED = 7168 };

struct cst_dense {
    uint32_t tokens, layers;
    struct cst_side side;
    uint8_t *bytes;
    size_t len; /* of bytes */
    void *memory;
    float *coefficients, *last, *values; /* tokens x the widest tensor each */
};

static void *aligned(size_t n) {
    return aligned_alloc(ALIGN, cst_align_up(n, ALIGN));
}

static int learn(struct cst_dense *d, const struct cst_descriptor *desc, const uint8_t *blocks,
                 const uint32_t *position, size_t n) {
    size_t times = TOKENS_WANTED / (n * desc->block_tokens) + 1, cap = cst_learn_bound(desc);
    size_t work_len = cst_learn_work_size(desc, (uint32_t)(times * n * desc->block_tokens));
    struct cst_learn_block *list = cst_calloc(times * n, sizeof(*list));
    const struct cst_learn_params params = { .version = 1 };
    size_t memory_len = cst_side_memory(desc);
    void *work = aligned(work_len);
    int r = -ENOMEM;

    d->bytes = cst_malloc(cap);
    d->memory = aligned(memory_len);
    if (list && work && d->bytes && d->memory) {
        for (size_t i = 0; i < times * n; i++)
            list[i] = (struct cst_learn_block){ blocks + i % n * desc->block_bytes,
                                                desc->block_tokens, position[i % n] };
        r = cst_learn(d->bytes, cap, desc, list, times * n, &params, work, work_len, &d->len,
                      NULL) ||
                    cst_side_parse(&d->side, d->bytes, d->len, desc, d->memory, memory_len)
                ? -EINVAL
                : 0;
    }
    free(work);
    cst_free(list);
    return r;
}

static int make_matrices(struct cst_dense *d) {
    size_t most = 0, n;

    for (uint32_t i = 0; i < 2 * d->layers; i++) {
        const struct cst_side_tensor *t = cst_side_tensor(&d->side, i / 2, (uint8_t)(i % 2));

        most = t && t->channels > most ? t->channels : most;
    }
    n = d->tokens * most;
    d->coefficients = aligned(n * sizeof(float));
    d->last = aligned(n * sizeof(float));
    d->values = aligned(n * sizeof(float));
    if (!d->coefficients || !d->last || !d->values)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++) {
        d->coefficients[i] = (float)(i % 7) - 3;
        d->last[i] = (float)(i % 5) - 2;
        d->values[i] = 0;
    }
    return 0;
}

const uint8_t *cst_dense_bytes(const struct cst_dense *d, size_t *len) {
    *len = d ? d->len : 0;
    return d ? d->bytes : NULL;
}

int cst_dense_new(struct cst_dense **out, const struct cst_descriptor *desc, const uint8_t *blocks,
                  const uint32_t *position, size_t n) {
    struct cst_dense *d = cst_calloc(1, sizeof(*d));
    int r;

    if (!d)
        return -ENOMEM;
    d->tokens = desc->block_tokens;
    d->layers = desc->n_layers;
    r = learn(d, desc, blocks, position, n);
    if (!r)
        r = make_matrices(d);
    if (r)
        d = cst_dense_free(d);
    *out = d;
    return r;
}

struct cst_dense *cst_dense_free(struct cst_dense *d) {
    if (d) {
        free(d->memory);
        free(d->coefficients);
        free(d->last);
        free(d->values);
        cst_free(d->bytes);
        cst_free(d);
    }
    return NULL;
}

void cst_dense_encode_params(const struct cst_dense *d, struct cst_encode_params *p) {
    p->side = d ? &d->side : NULL;
}

void cst_dense_decode_params(const struct cst_dense *d, struct cst_decode_params *p) {
    p->side = d ? &d->side : NULL;
}

static void multiply(const struct cst_dense *d, const struct cst_side_tensor *t, bool deep) {
    uint32_t n = t->channels, m = d->tokens;
    bool predicted = deep && t->sources;
    const float *rows = predicted ? t->residual.rows : t->klt.rows, *matrix = t->predictor;

    for (int i = 0; predicted && i < CST_SIDE_SOURCES; i++) {
        if (!(t->sources >> i & 1))
            continue;
        cst_gemm(false, false, m, n, n, 1, d->last, n, matrix, n, 1, d->values, n);
        matrix += (size_t)n * n;
    }
    cst_gemm(true, false, m, n, n, 1, d->coefficients, m, rows, n, 0, d->values, n);
}

/* The caches that are measured have one group a tensor and the same width everywhere. */
int cst_dense_run(void *arg, unsigned ops) {
    const struct cst_dense_probe *probe = arg;

    for (; ops--;) {
        for (uint32_t i = 0; i < 2 * probe->dense->layers; i++) {
            const struct cst_side_tensor *t =
                cst_side_tensor(&probe->dense->side, i / 2, (uint8_t)(i % 2));

            if (t)
                multiply(probe->dense, t, probe->deep);
        }
    }
    return 0;
}
