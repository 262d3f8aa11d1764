/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Partial Tucker decomposition of a cell, X of heads x tokens x dims: bases of the dimensions and
 * of the tokens, the head mode untouched (Krishnan and Schulz, "A JoLT for the KV Cache"; ST-HOSVD,
 * the dimensions first), through Gram matrices. And what of the energy any pair of ranks captures:
 * bases are nested, so all pairs come from one decomposition.
 *
 * A cell is stored part by part (the segment of one layer is one), each tokens x (heads x dims).
 * Pure; any thread.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CST_TUCKER_OVERSAMPLE = 10 }; /* columns of a sketch beyond those that it is for */

struct cst_tucker_part {
    uint32_t heads;
    float weight; /* > 0, that its values are multiplied by while bases are looked for */
};

struct cst_tucker_shape {
    uint32_t tokens, dims;
    uint32_t heads; /* of all parts */
    uint32_t n_parts;
    const struct cst_tucker_part *part;
};

/* Values of a cell, all parts. */
static inline size_t cst_tucker_size(const struct cst_tucker_shape *s) {
    return (size_t)s->tokens * s->heads * s->dims;
}

struct cst_tucker_basis {
    uint32_t rank;    /* of the tokens, that were looked for */
    double energy;    /* of the weighted cell; the caller's, as what is captured relates to it */
    float *dim;       /* [dims][dims]: row j is the j-th direction of the dimensions */
    float *token;     /* [rank][tokens]: row i is the i-th direction of the tokens */
    float *core;      /* part by part, [rank][channels]: what the directions have of the cell */
    double *captured; /* [rank + 1][dims + 1]: energy in the first i and j directions */
};

/* Floats that basis_make needs besides: gram, values, eigen for max(tokens, dims), or for a sketch
 * of rank + CST_TUCKER_OVERSAMPLE rows and so many rows of tokens; y and z for the cell. */
struct cst_tucker_scratch {
    float *gram, *values, *eigen, *y, *z;
};

/*
 * Fills the basis, whose arrays have room for `rank` rows of tokens, 1 <= rank <= tokens and <=
 * heads x dims. sketch: 0 for the whole spectrum of the tokens; else a randomized one (Halko,
 * Martinsson and Tropp 2011, algorithm 4.4: 10 columns more than `rank`, a power iteration, a fixed
 * seed), the same one for cells that are nearly the same, with token directions that are only
 * nearly orthogonal, and directions of the dimensions of long cells from every second row; it may
 * find fewer than `rank`; as energies are relative to the whole cell's, what the sketch misses
 * counts as not captured. flat: nearly all dimensions matter alike: more of them in the sketch. 0,
 * or a condition of linalg.h.
 */
int cst_tucker_basis_make(struct cst_tucker_basis *b, const struct cst_tucker_shape *s,
                          const float *x, uint32_t sketch, bool flat,
                          const struct cst_tucker_scratch *w);

/* Reverses the order of n rows. */
void cst_tucker_flip(float *rows, uint32_t n, uint32_t columns);

/* out (rows x tokens) = sum over parts, by their squared weights, of a's part (rows x its channels)
 * times that of x, transposed; parts of a lie one after the other, as those of x. */
void cst_tucker_onto_tokens(float *out, const float *a, uint32_t rows,
                            const struct cst_tucker_shape *s, const float *x);
/* out, part by part: token (rows x tokens) times the part of x. */
void cst_tucker_across_tokens(float *out, const float *token, uint32_t rows,
                              const struct cst_tucker_shape *s, const float *x);
