/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes sequence states from the format's description, cell by cell and byte by byte, with nothing
 * of the code under test: the oracle of its tests and the maker of its fuzz seeds.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct sample {
    uint32_t n_stream, stream; /* the stream that holds the cells */
    uint32_t n_cells, n_layers;
    bool v_trans, no_v;
    int32_t type_k, type_v;
    uint32_t k_row, v_row; /* bytes per token of layer 0; layer i has 8 * (i % 3) more */
    uint32_t element;      /* of V when transposed */
    const uint32_t *pos;   /* of each cell; NULL: 0, 1, 2, ... */
    int32_t seq;
};

/* The byte that tensor (layer, v) has at byte b of the row of token pos. */
static inline uint8_t sample_byte(uint32_t layer, bool v, uint32_t pos, uint32_t b) {
    return (uint8_t)(1 + (layer * 131 + v * 71 + pos * 29 + b * 7 + (pos * b) / 5) % 255);
}

static inline uint32_t sample_row(const struct sample *s, bool v, uint32_t layer) {
    return (v ? s->v_row : s->k_row) + 8 * (layer % 3);
}

static inline size_t sample_put(uint8_t *to, size_t at, uint64_t v, size_t n) {
    memcpy(to + at, &v, n);
    return at + n;
}

/* Returns the size. */
static inline size_t sample_write(const struct sample *s, uint8_t *to) {
    size_t at = 0;

    at = sample_put(to, at, 0xaf143cd8, 4);
    at = sample_put(to, at, (uint32_t)s->seq, 4);
    at = sample_put(to, at, s->n_stream, 4);
    for (uint32_t stream = 0; stream < s->n_stream; stream++) {
        uint32_t n = stream == s->stream ? s->n_cells : 0;

        at = sample_put(to, at, n, 4);
        if (n == 0)
            continue;
        for (uint32_t c = 0; c < n; c++) {
            at = sample_put(to, at, s->pos ? s->pos[c] : c, 4);
            at = sample_put(to, at, 1, 4);
            at = sample_put(to, at, (uint32_t)s->seq, 4);
        }
        at = sample_put(to, at, s->v_trans, 4);
        at = sample_put(to, at, s->n_layers, 4);
        for (uint32_t l = 0; l < s->n_layers; l++) {
            uint32_t row = sample_row(s, false, l);

            at = sample_put(to, at, (uint32_t)s->type_k, 4);
            at = sample_put(to, at, row, 8);
            for (uint32_t c = 0; c < n; c++)
                for (uint32_t b = 0; b < row; b++)
                    to[at++] = sample_byte(l, false, s->pos ? s->pos[c] : c, b);
        }
        for (uint32_t l = 0; l < s->n_layers && !s->no_v; l++) {
            uint32_t row = sample_row(s, true, l);

            at = sample_put(to, at, (uint32_t)s->type_v, 4);
            if (s->v_trans) {
                at = sample_put(to, at, s->element, 4);
                at = sample_put(to, at, row / s->element, 4);
                for (uint32_t w = 0; w < row / s->element; w++)
                    for (uint32_t c = 0; c < n; c++)
                        for (uint32_t b = 0; b < s->element; b++)
                            to[at++] =
                                sample_byte(l, true, s->pos ? s->pos[c] : c, w * s->element + b);
            } else {
                at = sample_put(to, at, row, 8);
                for (uint32_t c = 0; c < n; c++)
                    for (uint32_t b = 0; b < row; b++)
                        to[at++] = sample_byte(l, true, s->pos ? s->pos[c] : c, b);
            }
        }
    }
    return at;
}
