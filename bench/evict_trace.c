/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns a trace in memory. The reader walks the text once and takes the members that it knows
 * wherever they stand, so it needs no tree; an object ends a request when it had hash_ids.
 * Invariants: 1. a block is in blocks[] only as part of a request; 2. every request's blocks are a
 * chain from its first block. One thread.
 */
#include "bench/evict_trace.h"

#include "base/macros.h"
#include "base/mem.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

enum { TEXT_MAX = 1 << 28, ID_MAX = 1 << 26, MOONCAKE_BLOCK = 512 };

struct reader {
    const char *at, *end;
    struct cst_trace *out;
    size_t touches_max, requests_max;
    double time_s;
    uint64_t tokens;
    uint32_t *number; /* of each id; n_ids of them */
    size_t n_ids;
};

static void skip_space(struct reader *r) {
    while (r->at < r->end && strchr(" \t\r\n", *r->at) && *r->at)
        r->at++;
}

static bool take(struct reader *r, char c) {
    skip_space(r);
    if (r->at == r->end || *r->at != c)
        return false;
    r->at++;
    return true;
}

/* The text ends in a NUL behind r->end, so strtod() stops there. */
static bool number(struct reader *r, double *out) {
    char *end;

    skip_space(r);
    *out = strtod(r->at, &end);
    if (end == r->at || end > r->end || !(*out >= 0) || *out > 1e15)
        return false;
    r->at = end;
    return true;
}

static int renumber(struct reader *r, double id, uint32_t *out) {
    size_t had = r->n_ids, i = (size_t)id;
    int e;

    if (id >= ID_MAX)
        return -EINVAL;
    e = cst_grow(&r->number, &r->n_ids, i + 1, sizeof(*r->number));
    if (e)
        return e;
    if (r->n_ids > had)
        memset(&r->number[had], 0xff, (r->n_ids - had) * sizeof(*r->number));
    if (r->number[i] == CST_TRACE_NO_BLOCK)
        r->number[i] = r->out->n_blocks++;
    *out = r->number[i];
    return 0;
}

static int read_ids(struct reader *r) {
    struct cst_trace *t = r->out;
    struct cst_trace_request *q;
    size_t full;
    int e = cst_grow(&t->requests, &r->requests_max, t->n_requests + 1, sizeof(*t->requests));

    if (e)
        return e;
    q = &t->requests[t->n_requests++];
    *q = (struct cst_trace_request){ .time_s = (uint32_t)r->time_s, .first = t->n_touches };
    full = r->tokens / t->block_tokens;
    if (!take(r, '['))
        return -EINVAL;
    while (!take(r, ']')) {
        double id;

        if (!number(r, &id))
            return -EINVAL;
        (void)take(r, ',');
        if (q->n_blocks == full)
            continue; /* the last one is not full */
        e = cst_grow(&t->blocks, &r->touches_max, t->n_touches + 1, sizeof(*t->blocks));
        if (!e)
            e = renumber(r, id, &t->blocks[t->n_touches]);
        if (e)
            return e;
        t->n_touches++;
        q->n_blocks++;
    }
    return 0;
}

static int read_member(struct reader *r, const char *key, size_t len) {
    static const struct {
        const char *key;
        enum { MS, S, TOKENS, BLOCK, IDS } what;
    } members[] = { { "timestamp", MS },        { "t", S },
                    { "input_length", TOKENS }, { "in", TOKENS },
                    { "block_size", BLOCK },    { "hash_ids", IDS } };
    double v;

    for (size_t i = 0; i < CST_COUNT(members); i++) {
        if (strlen(members[i].key) != len || memcmp(members[i].key, key, len) != 0)
            continue;
        if (members[i].what == IDS)
            return read_ids(r);
        if (!number(r, &v))
            return -EINVAL;
        if (members[i].what == MS || members[i].what == S)
            r->time_s = members[i].what == MS ? v / 1000 : v;
        else if (members[i].what == TOKENS)
            r->tokens = (uint64_t)v;
        else if (v < 1 || v > 1 << 20)
            return -EINVAL;
        else
            r->out->block_tokens = (uint32_t)v;
    }
    return 0;
}

static int read_all(struct reader *r) {
    while (r->at < r->end) {
        const char *key = memchr(r->at, '"', (size_t)(r->end - r->at)), *end;
        int e;

        if (!key)
            break;
        end = memchr(key + 1, '"', (size_t)(r->end - key - 1));
        if (!end)
            return -EINVAL;
        r->at = end + 1;
        e = take(r, ':') ? read_member(r, key + 1, (size_t)(end - key - 1)) : 0;
        if (e)
            return e;
    }
    return r->out->n_touches ? 0 : -EINVAL;
}

int cst_trace_parse(struct cst_trace *out, const char *text, size_t len) {
    struct cst_trace t = { .block_tokens = MOONCAKE_BLOCK };
    char *copy = len < TEXT_MAX ? cst_malloc(len + 1) : NULL;
    struct reader r = { .at = copy, .end = copy + len, .out = &t };
    int e;

    if (!copy)
        return -ENOMEM;
    memcpy(copy, text, len);
    copy[len] = '\0';
    e = read_all(&r);
    cst_free(copy);
    cst_free(r.number);
    if (e)
        cst_trace_deinit(&t);
    else
        *out = t;
    return e;
}

void cst_trace_deinit(struct cst_trace *t) {
    t->requests = cst_free(t->requests);
    t->blocks = cst_free(t->blocks);
}

static int read_file(const char *path, char **out, size_t *len) {
    FILE *f = fopen(path, "re");
    size_t max = 0;
    char *text = NULL;
    int r = 0;

    if (!f)
        return -errno;
    *len = 0;
    do {
        r = *len < TEXT_MAX ? cst_grow(&text, &max, *len + 65536, 1) : -EFBIG;
        if (!r)
            *len += fread(text + *len, 1, 65536, f);
    } while (!r && !feof(f) && !ferror(f));
    if (!r && ferror(f))
        r = -EIO;
    (void)fclose(f);
    if (r)
        text = cst_free(text);
    *out = text;
    return r;
}

static int unpack(const char *data, size_t len, char **out, size_t *out_len) {
    ZSTD_inBuffer in = { data, len, 0 };
    ZSTD_DStream *z = ZSTD_createDStream();
    size_t max = 0, left = 1;
    char *text = NULL;
    int r = z ? 0 : -ENOMEM;

    *out_len = 0;
    while (!r && left) {
        ZSTD_outBuffer to;

        r = *out_len < TEXT_MAX ? cst_grow(&text, &max, *out_len + 65536, 1) : -EFBIG;
        if (r)
            break;
        to = (ZSTD_outBuffer){ text, max, *out_len };
        left = ZSTD_decompressStream(z, &to, &in);
        if (ZSTD_isError(left) || (left && in.pos == len && to.pos < to.size))
            r = -EINVAL;
        *out_len = to.pos;
    }
    (void)ZSTD_freeDStream(z);
    if (r)
        text = cst_free(text);
    *out = text;
    return r;
}

int cst_trace_load(struct cst_trace *out, const char *path) {
    char *data = NULL, *text = NULL;
    size_t len = 0, text_len = 0;
    int r = read_file(path, &data, &len);

    if (r)
        return r;
    if (len >= 4 && !memcmp(data, "\x28\xb5\x2f\xfd", 4)) {
        r = unpack(data, len, &text, &text_len);
        if (!r)
            r = cst_trace_parse(out, text, text_len);
        cst_free(text);
    } else {
        r = cst_trace_parse(out, data, len);
    }
    cst_free(data);
    return r;
}
