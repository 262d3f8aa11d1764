/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stage TUCKER of the presets jolt, flashjolt and jolt+ (docs/codec-format.md section 4.7), and
 * what its parts share: the plan of a frame, made before its first stream, and the cells.
 *
 * A cell is the keys or the values of some consecutive layers with one head size. Its factors lie
 * in its first stream, and the core and the residual of each segment in the segment's own.
 *
 * Everything lies in w->dense; one thread a workspace.
 */
#pragma once

#include "codec/stage.h"
#include "codec/tucker_alloc.h"
#include "codec/tucker_basis.h"

enum {
    CST_TUCKER_LAYERS = 6,         /* of a cell, where nothing else is asked for, of blocks ... */
    CST_TUCKER_LONG = 256,         /* ... of so many tokens; 1 of shorter ones */
    CST_TUCKER_CELL_MAX = 5 << 18, /* values of a cell of more than one layer */
    CST_TUCKER_RANK_MIN = 64,      /* token directions are at most so many, or ... */
    CST_TUCKER_RANK_SHARE = 8,     /* ... this part of a block's tokens */
    CST_TUCKER_RATIO = 3,
};

/* What a preset chooses among. */
struct cst_tucker_recipe {
    uint8_t n_bits, bits[7]; /* of the residual */
    bool lloyd;              /* Lloyd-Max levels, else uniform ones */
    bool means;              /* channel means are taken off where they pay */
    bool level;              /* layers of a cell count alike, and cells by their layers */
    bool sketch;             /* randomized token directions, of cells where that is less work */
    double weight_k, weight_v;
};
const struct cst_tucker_recipe *cst_tucker_recipe(uint32_t preset);

/* A segment of a cell. */
struct cst_tucker_member {
    uint64_t offset, length; /* of the segment in the block */
    uint32_t heads;
    size_t sink_bytes, outlier_bytes;
    bool mean;
    int8_t exponent;
    float weight;
    double energy, deviation; /* squares of what is coded; from the channel means */
};

struct cst_tucker_cell {
    uint32_t first, n; /* members */
    uint32_t dims, heads, layer;
    uint8_t tensor;
    bool sketched;
    float missed;   /* by its codes: see cst_tucker_missed() */
    uint8_t *token; /* fp16, of the plan: [most][tokens] */
    uint8_t *dim;   /* fp16, of the plan: [dims][dims] */
    uint8_t *core;  /* fp16, of the plan: part by part, [most][channels], over core_scale */
    uint32_t most;
    float core_scale;
};

/* A cell on the way into its streams. */
struct cst_tucker_open {
    uint32_t cell; /* UINT32_MAX: none */
    struct cst_point choice;
    uint8_t *codes; /* part by part, [tokens][channels] */
    uint8_t *norms; /* fp16, [member][tokens][heads] */
    uint8_t *token; /* fp16, [tokens][rank_t] */
    uint8_t *dim;   /* fp16, [rank_d][dims] */
    uint8_t *core;  /* fp16, [member][heads][rank_t][rank_d] */
    float *scale;   /* [member] of the core */
    float *mean;    /* [member][channels] */
};

/* Factors of the cell that is being decoded, as they lie in its first stream. */
struct cst_tucker_factors {
    const uint8_t *token, *dim; /* NULL: there is none */
    uint32_t tokens, dims, rank_t, rank_d;
};

struct cst_tucker {
    struct cst_tucker_factors factors[2]; /* of keys, of values */
    uint32_t rank_max;                    /* that the scratch holds */
    struct cst_tucker_scratch scratch;    /* y and z also serve decoding */
    float *x, *token, *dim;               /* a cell; directions */
    float *kept, *core;                   /* of a cell by token directions; by both */
    /* The rest only while encoding */
    const struct cst_tucker_recipe *recipe;
    const uint8_t *block;
    uint32_t tokens; /* coded */
    uint32_t n_members, n_cells;
    struct cst_tucker_member *member; /* of one cell after the other */
    struct cst_tucker_cell *cell;
    struct cst_hull *hull;
    uint32_t *choice;
    struct cst_tucker_open open[2];
    struct cst_hull_bins *bins;
    struct cst_tucker_part *part;
    double *captured;
    uint8_t *pool; /* what is left of the room for factors */
    bool keeps_cores;
    uint64_t budget; /* bytes of all streams of cells, each rounded up to where the next starts */
    uint64_t planned;
    bool over_budget;
};

/* Bytes of w->dense. */
size_t cst_tucker_work_size(const struct cst_descriptor *desc);

/* An empty struct cst_tucker with its arrays, at the start of w->dense. */
struct cst_tucker *cst_tucker_init(const struct cst_codec_work *w);

/* Cells, their candidates, and the choice among them. */
void cst_tucker_plan(const uint8_t *block, uint32_t tokens, uint32_t first_position,
                     const struct cst_codec_work *w);

/* A member's values once more, to x [tokens][channels], less their means if the member has them;
 * and these. */
void cst_tucker_load_again(const struct cst_tucker_member *m, float *x, float *mean,
                           const uint8_t *seg, const struct cst_stage_segment *s,
                           const struct cst_codec_work *w);

/* Bytes of the stream of a member, of the first one of a cell with its factors. */
uint64_t cst_tucker_stream_size(const struct cst_tucker *t, const struct cst_tucker_cell *cell,
                                uint32_t member, const struct cst_point *choice);

/* A power of two that brings the largest value to 2^13 to 2^14 when they are divided by it. */
float cst_tucker_scale(const float *x, size_t n, const struct cst_codec_ops *ops);

/* Quantizes a cell and fits factors to what that leaves: t->open[tensor], cell->missed. */
bool cst_tucker_fit(struct cst_tucker *t, uint32_t cell, const struct cst_codec_work *w);

/* Squared error of the codes of another choice, over what they miss of normal values: about 1, and
 * nearly nothing where the cell was coded by this choice before. */
float cst_tucker_missed(struct cst_tucker *t, uint32_t cell, const struct cst_point *choice,
                        const struct cst_codec_work *w);

/* Once all cells are fitted: where some were coded before, looks for the choices by which the
 * others were. true: there are such ones, t->choice has them, and all streams are to be made anew.
 */
bool cst_tucker_again(struct cst_tucker *t, const struct cst_codec_work *w);
