/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads side data. Invariants: 1. the directory is in order and its sections fill the bytes
 * exactly, so the same tables have one spelling; 2. shapes are those that the descriptor's model
 * asks for, so no reader of a parsed table checks an index again; 3. every number that is read is
 * finite and within limits that keep decoded values from overflowing. No state; any thread.
 *
 * Matrices are fp16 in the bytes, which halves what a space pays for them, and fp32 in memory,
 * where products read them for each block.
 */
#include "codec/side.h"
#include "codec/dispatch.h"
#include "codec/dtype.h"
#include "codec/rope.h"
#include "codec/side_format.h"
#include "codec/view.h"

#include "base/crc32c.h"
#include "base/macros.h"
#include "base/sha256.h"

#include <math.h>
#include <string.h>

enum { MEMORY_ALIGN = 64 };

/* Of means, deviations and matrix elements: sums of 2^11 products stay far from infinity. */
#define MAGNITUDE_MAX 0x1p60f

/* ---- shapes ---------------------------------------------------------------------------------- */

uint32_t cst_side_model(const struct cst_descriptor *desc) {
    struct {
        struct cst_le32 kv_heads, head_dim_k, head_dim_v, rope;
    } row;
    struct cst_le32 n;
    uint32_t crc;

    cst_store32(&n, desc->n_layers);
    crc = cst_crc32c(0, &n, sizeof(n));
    for (uint32_t l = 0; l < desc->n_layers; l++) {
        const struct cst_layer *layer = &desc->layers[l];
        bool turned = layer->k_rotated && layer->rope != CST_ROPE_NONE;

        cst_store32(&row.kv_heads, layer->kv_heads);
        cst_store32(&row.head_dim_k, layer->head_dim_k);
        cst_store32(&row.head_dim_v, layer->head_dim_v);
        cst_store32(&row.rope, turned ? cst_rope_id(layer) : 0);
        crc = cst_crc32c(crc, &row, sizeof(row));
    }
    return crc;
}

/* Rotated keys that can't be turned back have no channels worth a mean. */
uint32_t cst_side_channels(const struct cst_descriptor *desc, uint32_t layer, uint8_t tensor) {
    const struct cst_layer *l = &desc->layers[layer];
    uint32_t dims = tensor == CST_TENSOR_K ? l->head_dim_k : l->head_dim_v;
    uint64_t channels = (uint64_t)l->kv_heads * dims;

    if (tensor > CST_TENSOR_V || channels > CST_SIDE_CHANNELS_MAX)
        return 0;
    if (tensor == CST_TENSOR_K && l->k_rotated && l->rope != CST_ROPE_NONE &&
        !cst_rope_known(l, dims))
        return 0;
    return (uint32_t)channels;
}

uint32_t cst_side_most(const struct cst_descriptor *desc) {
    uint32_t most = 0;

    for (uint32_t l = 0; l < desc->n_layers; l++) {
        uint32_t k = cst_side_channels(desc, l, CST_TENSOR_K);
        uint32_t v = cst_side_channels(desc, l, CST_TENSOR_V);

        most = CST_MAX(most, CST_MAX(k, v));
    }
    return most;
}

uint32_t cst_side_width(uint32_t heads, uint32_t dims, uint32_t most) {
    if ((uint64_t)heads * dims <= most)
        return heads * dims;
    return dims <= most ? most / dims * dims : most;
}

static uint32_t width_of(const struct cst_descriptor *desc, uint32_t layer, uint8_t tensor,
                         uint32_t most) {
    const struct cst_layer *l = &desc->layers[layer];

    return cst_side_width(l->kv_heads, tensor == CST_TENSOR_K ? l->head_dim_k : l->head_dim_v,
                          most);
}

/* Elements of all basis matrices of a tensor. */
static uint64_t basis_elements(uint32_t channels, uint32_t width) {
    uint64_t n = 0;

    for (uint32_t g = 0; g < cst_side_groups(channels, width); g++) {
        uint64_t w = cst_side_group(channels, width, g).n;

        n += w * w;
    }
    return n;
}

struct shape {
    uint32_t channels, width;
};

/* What predictors of a tensor may read, bit by bit of its sources. */
static void sources_of(struct shape from[CST_SIDE_SOURCES], const struct cst_side_tensor *all,
                       uint32_t layer, uint8_t tensor) {
    for (int i = 0; i < CST_SIDE_SOURCES; i++) {
        const struct cst_side_tensor *t = cst_side_source(all, layer, tensor, i);

        from[i] = t ? (struct shape){ t->channels, t->width } : (struct shape){ 0, 0 };
    }
}

/* Elements of all predictor matrices; 0: a source has no channels, or more groups than allowed. */
static uint64_t predictor_elements(struct shape to, const struct shape from[CST_SIDE_SOURCES],
                                   uint8_t sources, uint32_t rank) {
    uint32_t groups = cst_side_groups(to.channels, to.width);
    uint64_t n = 0;

    for (int i = 0; i < CST_SIDE_SOURCES; i++) {
        if (!(sources >> i & 1))
            continue;
        if (!from[i].channels ||
            (rank && cst_side_groups(from[i].channels, from[i].width) > CST_SIDE_PICK_GROUPS_MAX))
            return 0;
        for (uint32_t g = 0; !rank && g < groups; g++)
            n += (uint64_t)cst_side_group(to.channels, to.width, g).n *
                 cst_side_seen(from[i].channels, from[i].width, to.channels, to.width, g).n;
        n += (uint64_t)CST_MIN(rank, from[i].channels) * to.channels;
    }
    return n;
}

uint32_t cst_side_pick(uint16_t *group, const struct cst_side_tensor *from, uint32_t rank) {
    uint32_t groups = cst_side_groups(from->channels, from->width);
    uint32_t n = CST_MIN(rank, from->channels);
    uint16_t taken[CST_SIDE_PICK_GROUPS_MAX] = { 0 };

    if (groups > CST_SIDE_PICK_GROUPS_MAX)
        return 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t best = groups;
        float most = -1;

        for (uint32_t g = 0; g < groups; g++) {
            struct cst_side_span span = cst_side_group(from->channels, from->width, g);

            if (taken[g] < span.n && from->klt.sigma[span.at + taken[g]] > most) {
                best = g;
                most = from->klt.sigma[span.at + taken[g]];
            }
        }
        group[i] = (uint16_t)best;
        taken[best]++;
    }
    return n;
}

/* ---- how much -------------------------------------------------------------------------------- */

/* What side data of a model take whose groups have a width. */
struct totals {
    uint64_t bases;    /* bytes of sections with bases, directory included */
    uint64_t residual; /* bytes of sections with predictors, but these */
    uint64_t floats;   /* in memory, but predictors */
    uint64_t targets;  /* channels that may be predicted */
    uint64_t reads;    /* elements of predictors that see everything */
    uint32_t most;     /* inputs that anything could have */
};

static void add_tensor(struct totals *t, const struct cst_descriptor *desc, uint32_t layer,
                       uint8_t tensor, uint32_t width) {
    uint32_t channels = cst_side_channels(desc, layer, tensor), inputs = 0, seen = 0;
    uint64_t basis = basis_elements(channels, width_of(desc, layer, tensor, width));

    if (!channels)
        return;
    t->bases += sizeof(struct cst_side_entry) + CST_SIDE_ALIGN + sizeof(struct cst_side_klt) +
                8 * (uint64_t)channels + 2 * basis;
    t->floats += 2 * (uint64_t)channels + basis;
    for (int i = 0; i < CST_SIDE_SOURCES; i++) {
        uint32_t kind = (uint32_t)i % 2, back = (uint32_t)i / 2 + !(tensor && !kind), n;

        n = layer < back ? 0 : cst_side_channels(desc, layer - back, (uint8_t)kind);
        inputs += n;
        seen += CST_MIN(n, CST_SIDE_RANK_MAX);
    }
    if (!inputs)
        return;
    t->residual += sizeof(struct cst_side_entry) + CST_SIDE_ALIGN +
                   sizeof(struct cst_side_predictor) + 4 * (uint64_t)channels + 2 * basis;
    t->floats += 2 * (uint64_t)channels + basis;
    t->targets += channels;
    t->reads += (uint64_t)channels * seen;
    t->most = CST_MAX(t->most, inputs);
}

static struct totals totals_of(const struct cst_descriptor *desc, uint32_t width) {
    struct totals t = { .bases = sizeof(struct cst_side_header) };

    for (uint32_t l = 0; l < desc->n_layers; l++) {
        add_tensor(&t, desc, l, CST_TENSOR_K, width);
        add_tensor(&t, desc, l, CST_TENSOR_V, width);
    }
    return t;
}

/*
 * Bases take twice the width of a group for each channel, predictors as much as they have inputs.
 * Inputs are worth more: at equal bytes, groups of 32 with 192 inputs take 3 % fewer bits than
 * groups of 64 with 128. So the widest groups that leave room for four times as many inputs.
 */
struct cst_side_plan cst_side_plan(const struct cst_descriptor *desc) {
    enum { NARROWEST = 16, INPUTS_MAX = 2 * CST_SIDE_RANK_MAX };

    for (uint32_t width = CST_SIDE_WIDTH_MAX; width >= NARROWEST; width /= 2) {
        struct totals t = totals_of(desc, width);
        uint64_t bytes = t.bases + t.residual;
        uint64_t room = bytes < CST_SIDE_BYTES_MAX ? CST_SIDE_BYTES_MAX - bytes : 0;
        uint64_t inputs = t.targets ? room / (2 * t.targets) : 0;
        uint32_t enough = CST_MIN(4 * width, t.most);

        inputs = CST_MIN(inputs, (uint64_t)CST_MIN((uint32_t)INPUTS_MAX, t.most));
        if (t.targets && inputs >= (width == NARROWEST ? width : enough))
            return (struct cst_side_plan){ width, (uint32_t)inputs,
                                           bytes + 2 * inputs * t.targets };
    }
    for (uint32_t width = CST_SIDE_WIDTH_MAX; width >= NARROWEST; width /= 2) {
        struct totals t = totals_of(desc, width);

        if (t.bases <= CST_SIDE_BYTES_MAX)
            return (struct cst_side_plan){ width, 0, t.bases };
    }
    return (struct cst_side_plan){ 0 };
}

/* Bytes within their maximum hold half as many elements, but offsets, which aren't in them. */
size_t cst_side_memory(const struct cst_descriptor *desc) {
    struct totals most = totals_of(desc, CST_SIDE_WIDTH_MAX);
    uint64_t floats = CST_MIN(most.floats + most.reads, CST_SIDE_BYTES_MAX / 2 + most.targets);
    uint64_t tables = 2 * (uint64_t)desc->n_layers * sizeof(struct cst_side_tensor);

    /* each of up to seven arrays of a tensor starts at a multiple of the alignment */
    return cst_align_up(tables, MEMORY_ALIGN) + floats * sizeof(float) +
           14 * (uint64_t)desc->n_layers * MEMORY_ALIGN;
}

/* ---- reading --------------------------------------------------------------------------------- */

struct reader {
    const struct cst_descriptor *desc;
    const struct cst_codec_ops *ops;
    const uint8_t *bytes;
    struct cst_side_tensor *tensor;
    uint8_t *memory;
    size_t at, cap; /* of memory */
    const uint8_t *p;
    size_t left; /* of the section */
    int error;
};

static bool fail(struct reader *r, int error) {
    if (!r->error)
        r->error = error;
    return false;
}

static const uint8_t *take(struct reader *r, uint64_t n) {
    const uint8_t *p = r->p;

    if (n > r->left) {
        fail(r, CST_SIDE_E_CORRUPT);
        return NULL;
    }
    r->p += n;
    r->left -= n;
    return p;
}

static float *room_for(struct reader *r, uint64_t n) {
    size_t at = cst_align_up(r->at, MEMORY_ALIGN);

    if (at > r->cap || n > (r->cap - at) / sizeof(float)) {
        fail(r, CST_SIDE_E_SMALL);
        return NULL;
    }
    r->at = at + n * sizeof(float);
    return (void *)(r->memory + at);
}

static bool in_limits(const float *x, size_t n, const struct cst_codec_ops *ops) {
    return ops->largest(x, n) <= cst_f32_bits(MAGNITUDE_MAX);
}

static const float *read_floats(struct reader *r, uint32_t n) {
    const uint8_t *src = take(r, 4 * (uint64_t)n);
    float *x = src ? room_for(r, n) : NULL;

    if (!x)
        return NULL;
    for (uint32_t i = 0; i < n; i++)
        x[i] = cst_f32_from_bits(cst_load32(src + 4 * (size_t)i));
    if (!in_limits(x, n, r->ops)) {
        fail(r, CST_SIDE_E_CORRUPT);
        return NULL;
    }
    return x;
}

static const float *read_halves(struct reader *r, uint64_t n, float unit) {
    const uint8_t *src = take(r, 2 * n);
    float *x = src ? room_for(r, n) : NULL;

    if (!x)
        return NULL;
    if (!r->ops->halves(x, src, unit, n) || !in_limits(x, n, r->ops)) {
        fail(r, CST_SIDE_E_CORRUPT);
        return NULL;
    }
    return x;
}

/* Deviations aren't negative. */
static bool read_basis(struct reader *r, struct cst_side_basis *basis, struct shape shape) {
    basis->sigma = read_floats(r, shape.channels);
    for (uint32_t i = 0; basis->sigma && i < shape.channels; i++) {
        if (!(basis->sigma[i] >= 0))
            return fail(r, CST_SIDE_E_CORRUPT);
    }
    if (basis->sigma)
        basis->rows = read_halves(r, basis_elements(shape.channels, shape.width), 1);
    return !r->error;
}

static bool is_positive(float x) {
    return x > 0 && x <= MAGNITUDE_MAX;
}

static bool read_klt(struct reader *r, uint32_t layer, uint8_t tensor) {
    struct cst_side_tensor *t = &r->tensor[2 * layer + tensor];
    struct cst_side_klt head;
    const uint8_t *p = take(r, sizeof(head));
    uint32_t channels = cst_side_channels(r->desc, layer, tensor);

    if (!p)
        return false;
    memcpy(&head, p, sizeof(head));
    t->width = cst_load32(&head.width);
    t->rms = cst_f32_from_bits(cst_load32(&head.rms));
    t->weight = cst_f32_from_bits(cst_load32(&head.weight));
    if (!channels || cst_load32(&head.channels) != channels || !t->width ||
        t->width > CST_SIDE_WIDTH_MAX || t->width > channels || !is_positive(t->rms) ||
        !is_positive(t->weight))
        return fail(r, CST_SIDE_E_CORRUPT);
    t->mean = read_floats(r, channels);
    if (r->error || !read_basis(r, &t->klt, (struct shape){ channels, t->width }))
        return false;
    t->channels = channels;
    return true;
}

/* offset -= (means of the inputs) times the predictor, whose inputs are channels. */
static void subtract_channels(float *offset, const struct reader *r, uint32_t layer,
                              uint8_t tensor) {
    const struct cst_side_tensor *t = &r->tensor[2 * layer + tensor];
    const float *w = t->predictor;

    for (uint32_t g = 0; g < cst_side_groups(t->channels, t->width); g++) {
        struct cst_side_span to = cst_side_group(t->channels, t->width, g);

        for (int i = 0; i < CST_SIDE_SOURCES; i++) {
            const struct cst_side_tensor *from =
                t->sources >> i & 1 ? cst_side_source(r->tensor, layer, tensor, i) : NULL;
            struct cst_side_span seen = { 0, 0 };

            if (from)
                seen = cst_side_seen(from->channels, from->width, t->channels, t->width, g);
            for (uint32_t k = seen.at; k < seen.at + seen.n; k++, w += to.n) {
                for (uint32_t c = 0; c < to.n; c++)
                    offset[to.at + c] -= from->mean[k] * w[c];
            }
        }
    }
}

/* The same of a source's n coordinates of group g, w being a matrix [n][channels]. */
static void subtract_coordinates(float *offset, const struct cst_side_tensor *from, uint32_t g,
                                 uint32_t n, const float *w, uint32_t channels) {
    struct cst_side_span span = cst_side_group(from->channels, from->width, g);
    const float *row = from->klt.rows + (size_t)g * from->width * from->width;

    for (uint32_t i = 0; i < n; i++, row += span.n, w += channels) {
        float mean = 0;

        for (uint32_t k = 0; k < span.n; k++)
            mean += row[k] * from->mean[span.at + k];
        for (uint32_t c = 0; c < channels; c++)
            offset[c] -= mean * w[c];
    }
}

/* Rows as in the bytes, by falling deviation, to w, by group. */
static bool read_picked(struct reader *r, float *w, float *offset,
                        const struct cst_side_tensor *from, const struct cst_side_tensor *t,
                        float scale) {
    uint16_t group[CST_SIDE_RANK_MAX], at[CST_SIDE_PICK_GROUPS_MAX] = { 0 };
    uint32_t n = cst_side_pick(group, from, t->rank), sum = 0;
    uint32_t groups = cst_side_groups(from->channels, from->width);
    const uint8_t *src = take(r, 2 * (uint64_t)n * t->channels);

    if (!src)
        return false;
    for (uint32_t i = 0; i < n; i++)
        at[group[i]]++;
    for (uint32_t g = 0; g < groups; g++) {
        uint32_t count = at[g];

        at[g] = (uint16_t)sum;
        sum += count;
    }
    for (uint32_t i = 0; i < n; i++, src += 2 * (size_t)t->channels) {
        float *row = w + (size_t)at[group[i]]++ * t->channels;

        if (!r->ops->halves(row, src, scale, t->channels) || !in_limits(row, t->channels, r->ops))
            return fail(r, CST_SIDE_E_CORRUPT);
    }
    for (uint32_t g = 0, first = 0; g < groups; first = at[g++])
        subtract_coordinates(offset, from, g, at[g] - first, w + (size_t)first * t->channels,
                             t->channels);
    return true;
}

/* A predictor from coordinates, and its offset. */
static bool read_pooled(struct reader *r, uint32_t layer, uint8_t tensor, uint64_t n, float scale,
                        float *offset) {
    struct cst_side_tensor *t = &r->tensor[2 * layer + tensor];
    float *w = room_for(r, n);

    t->predictor = w;
    for (int i = 0; w && i < CST_SIDE_SOURCES; i++) {
        const struct cst_side_tensor *from = cst_side_source(r->tensor, layer, tensor, i);

        if (!(t->sources >> i & 1))
            continue;
        if (!read_picked(r, w, offset, from, t, scale))
            return false;
        w += (size_t)CST_MIN(t->rank, from->channels) * t->channels;
    }
    return w;
}

/* One spelling: PREDICTOR2 only for what PREDICTOR can't say. */
static bool is_spelled(const struct cst_side_predictor *head, uint8_t kind) {
    bool more = head->sources >> 2 || cst_load16(&head->rank);

    return !(head->sources >> CST_SIDE_SOURCES) && !head->reserved &&
           cst_load16(&head->rank) <= CST_SIDE_RANK_MAX && more == (kind == CST_SIDE_PREDICTOR2);
}

static bool read_predictor(struct reader *r, uint32_t layer, uint8_t tensor, uint8_t kind) {
    struct cst_side_tensor *t = &r->tensor[2 * layer + tensor];
    struct shape to = { t->channels, t->width }, from[CST_SIDE_SOURCES];
    struct cst_side_predictor head;
    const uint8_t *p = take(r, sizeof(head));
    float scale, *offset;
    uint64_t n;

    if (!p)
        return false;
    memcpy(&head, p, sizeof(head));
    scale = cst_f32_from_bits(cst_load32(&head.scale));
    sources_of(from, r->tensor, layer, tensor);
    if (!is_spelled(&head, kind) || t->sources || !is_positive(scale))
        return fail(r, CST_SIDE_E_CORRUPT);
    n = predictor_elements(to, from, head.sources, cst_load16(&head.rank));
    if (!n)
        return fail(r, CST_SIDE_E_CORRUPT);
    if (!read_basis(r, &t->residual, to))
        return false;
    offset = room_for(r, to.channels);
    if (!offset)
        return false;
    memcpy(offset, t->mean, t->channels * sizeof(*offset));
    t->sources = head.sources;
    t->rank = cst_load16(&head.rank);
    if (t->rank) {
        if (!read_pooled(r, layer, tensor, n, scale, offset))
            return false;
    } else {
        t->predictor = read_halves(r, n, scale);
        if (r->error)
            return false;
        subtract_channels(offset, r, layer, tensor);
    }
    t->offset = offset;
    return in_limits(offset, to.channels, r->ops) || fail(r, CST_SIDE_E_CORRUPT);
}

static bool read_section(struct reader *r, const struct cst_side_entry *entry) {
    uint32_t layer = cst_load16(&entry->layer);

    if (layer >= r->desc->n_layers || entry->tensor > CST_TENSOR_V)
        return fail(r, CST_SIDE_E_CORRUPT);
    r->p = r->bytes + cst_load32(&entry->offset);
    r->left = cst_load32(&entry->length);
    switch (entry->kind) {
    case CST_SIDE_KLT:
        return read_klt(r, layer, entry->tensor) && (!r->left || fail(r, CST_SIDE_E_CORRUPT));
    case CST_SIDE_PREDICTOR:
    case CST_SIDE_PREDICTOR2:
        return read_predictor(r, layer, entry->tensor, entry->kind) &&
               (!r->left || fail(r, CST_SIDE_E_CORRUPT));
    case CST_SIDE_EXPONENTS: /* checked by its stage */
        return true;
    default:
        return fail(r, CST_SIDE_E_VERSION);
    }
}

static uint32_t rank_of(const struct cst_side_entry *e) {
    return (uint32_t)cst_load16(&e->layer) << 16 | (uint32_t)e->tensor << 8 | e->kind;
}

/* Sections in order, one after another, the bytes between them zero. */
static int check_directory(const uint8_t *bytes, size_t len, uint32_t n) {
    const struct cst_side_entry *entry = (const void *)(bytes + sizeof(struct cst_side_header));
    uint64_t at = sizeof(struct cst_side_header) + (uint64_t)n * sizeof(*entry);

    if (at > len)
        return CST_SIDE_E_CORRUPT;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t start = cst_align_up(at, CST_SIDE_ALIGN);

        if ((i && rank_of(&entry[i]) <= rank_of(&entry[i - 1])) || start > len ||
            cst_load32(&entry[i].offset) != start || cst_load32(&entry[i].length) > len - start ||
            !cst_is_zero(bytes + at, start - at) ||
            !cst_is_zero(entry[i].reserved, sizeof(entry[i].reserved)))
            return CST_SIDE_E_CORRUPT;
        at = start + cst_load32(&entry[i].length);
    }
    return at == len ? 0 : CST_SIDE_E_CORRUPT;
}

static int check_header(const struct cst_side_header *h, size_t len,
                        const struct cst_descriptor *desc) {
    float step;

    if (len < sizeof(*h) || memcmp(h->magic, CST_SIDE_MAGIC, sizeof(h->magic)))
        return CST_SIDE_E_CORRUPT;
    if (cst_load16(&h->format) != CST_SIDE_FORMAT)
        return CST_SIDE_E_VERSION;
    step = cst_f32_from_bits(cst_load32(&h->step));
    if (cst_load32(&h->bytes) != len || len > CST_SIDE_BYTES_MAX || !cst_load16(&h->version) ||
        !is_positive(step) || !cst_is_zero(h->reserved, sizeof(h->reserved)))
        return CST_SIDE_E_CORRUPT;
    if (desc->n_layers > CST_LAYERS_MAX || cst_load32(&h->model) != cst_side_model(desc))
        return CST_SIDE_E_MISMATCH;
    return check_directory((const void *)h, len, cst_load32(&h->n_sections));
}

int cst_side_parse(struct cst_side *out, const void *bytes, size_t len,
                   const struct cst_descriptor *desc, void *memory, size_t memory_len) {
    const struct cst_side_header *h = bytes;
    const struct cst_side_entry *entry = (const void *)(h + 1);
    struct reader r = { .desc = desc,
                        .ops = cst_codec_ops(),
                        .bytes = bytes,
                        .memory = memory,
                        .tensor = memory,
                        .cap = memory_len };
    int error = check_header(h, len, desc);

    if (error)
        return error;
    r.at = 2 * (size_t)desc->n_layers * sizeof(*r.tensor);
    if (r.at > r.cap || (uintptr_t)memory % MEMORY_ALIGN)
        return CST_SIDE_E_SMALL;
    memset(memory, 0, r.at);
    for (uint32_t i = 0; i < cst_load32(&h->n_sections); i++) {
        if (!read_section(&r, &entry[i]))
            return r.error;
    }
    *out = (struct cst_side){
        .version = cst_load16(&h->version),
        .tokens = cst_load32(&h->tokens),
        .step = cst_f32_from_bits(cst_load32(&h->step)),
        .n_layers = desc->n_layers,
        .tensor = r.tensor,
        .bytes = bytes,
        .len = len,
        .memory_used = r.at,
    };
    cst_sha256(bytes, len, out->hash);
    out->check = cst_load32(out->hash);
    return 0;
}

const struct cst_side_tensor *cst_side_tensor(const struct cst_side *side, uint32_t layer,
                                              uint8_t tensor) {
    if (!side || layer >= side->n_layers || tensor > CST_TENSOR_V ||
        !side->tensor[2 * layer + tensor].channels)
        return NULL;
    return &side->tensor[2 * layer + tensor];
}

const uint8_t *cst_side_section(const struct cst_side *side, enum cst_side_kind kind,
                                uint32_t layer, uint8_t tensor, size_t *len) {
    const struct cst_side_header *h = (const void *)side->bytes;
    const struct cst_side_entry *entry = (const void *)(h + 1);
    uint32_t low = 0, high = cst_load32(&h->n_sections);
    uint32_t wanted = layer << 16 | (uint32_t)tensor << 8 | kind;

    while (low < high) {
        uint32_t mid = low + (high - low) / 2;

        if (rank_of(&entry[mid]) < wanted)
            low = mid + 1;
        else
            high = mid;
    }
    if (low == cst_load32(&h->n_sections) || rank_of(&entry[low]) != wanted)
        return NULL;
    *len = cst_load32(&entry[low].length);
    return side->bytes + cst_load32(&entry[low].offset);
}

int cst_side_set_weights(void *dst, size_t cap, const struct cst_side *side, uint32_t version,
                         const float *k, const float *v) {
    const float *const weights[] = { k, v };
    struct cst_side_header *h = dst;

    if (cap < side->len)
        return CST_SIDE_E_SMALL;
    if (version < 1 || version > CST_SIDE_VERSION_MAX)
        return CST_SIDE_E_VERSION;
    memcpy(dst, side->bytes, side->len);
    cst_store16(&h->version, (uint16_t)version);
    for (uint32_t l = 0; l < side->n_layers; l++) {
        for (uint8_t tensor = 0; tensor < 2; tensor++) {
            size_t len;
            const uint8_t *klt = cst_side_section(side, CST_SIDE_KLT, l, tensor, &len);

            if (!is_positive(weights[tensor][l]))
                return CST_SIDE_E_CORRUPT;
            if (klt)
                cst_store32((uint8_t *)dst + (klt - side->bytes) +
                                offsetof(struct cst_side_klt, weight),
                            cst_f32_bits(weights[tensor][l]));
        }
    }
    return 0;
}
