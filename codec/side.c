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

/* What predictors of a tensor read: [0] as CST_SIDE_FROM_K, [1] as CST_SIDE_FROM_V. */
static void sources_of(struct shape from[2], const struct shape *all, uint32_t layer,
                       uint8_t tensor) {
    const struct shape none = { 0, 0 };

    from[0] = tensor == CST_TENSOR_V ? all[2 * layer] : layer ? all[2 * layer - 2] : none;
    from[1] = layer ? all[2 * layer - 1] : none;
}

/* Elements of all predictor matrices; 0: a source has no channels. */
static uint64_t predictor_elements(struct shape to, const struct shape from[2], uint8_t sources) {
    uint64_t n = 0;

    for (uint32_t g = 0; g < cst_side_groups(to.channels, to.width); g++) {
        uint32_t w = cst_side_group(to.channels, to.width, g).n;

        for (int i = 0; i < 2; i++) {
            if (sources >> i & 1 && !from[i].channels)
                return 0;
            if (sources >> i & 1)
                n += (uint64_t)w *
                     cst_side_seen(from[i].channels, from[i].width, to.channels, to.width, g).n;
        }
    }
    return n;
}

/* ---- how much -------------------------------------------------------------------------------- */

struct totals {
    uint64_t floats; /* in memory */
    uint64_t bytes;  /* of sections, directory included */
};

static void add_tensor(struct totals *t, const struct shape *all, uint32_t layer, uint8_t tensor,
                       uint8_t sources) {
    struct shape to = all[2 * layer + tensor], from[2];
    uint64_t basis = basis_elements(to.channels, to.width), predictor;

    if (!to.channels)
        return;
    t->floats += 2 * (uint64_t)to.channels + basis;
    t->bytes += sizeof(struct cst_side_entry) + CST_SIDE_ALIGN + sizeof(struct cst_side_klt) +
                8 * (uint64_t)to.channels + 2 * basis;
    sources_of(from, all, layer, tensor);
    for (int i = 0; i < 2; i++) {
        if (!from[i].channels)
            sources &= (uint8_t) ~(1 << i);
    }
    if (!sources)
        return;
    predictor = predictor_elements(to, from, sources);
    t->floats += 2 * (uint64_t)to.channels + basis + predictor;
    t->bytes += sizeof(struct cst_side_entry) + CST_SIDE_ALIGN + sizeof(struct cst_side_predictor) +
                4 * (uint64_t)to.channels + 2 * (basis + predictor);
}

static struct totals totals_of(const struct cst_descriptor *desc, uint32_t width, uint8_t sources) {
    struct totals t = { 0, sizeof(struct cst_side_header) };
    struct shape all[2 * CST_LAYERS_MAX];

    for (uint32_t l = 0; l < desc->n_layers; l++) {
        for (uint8_t tensor = 0; tensor < 2; tensor++)
            all[2 * l + tensor] = (struct shape){ cst_side_channels(desc, l, tensor),
                                                  width_of(desc, l, tensor, width) };
        add_tensor(&t, all, l, CST_TENSOR_K, sources);
        add_tensor(&t, all, l, CST_TENSOR_V, sources);
    }
    return t;
}

struct cst_side_plan cst_side_plan(const struct cst_descriptor *desc) {
    static const uint8_t sources[] = { CST_SIDE_FROM_K | CST_SIDE_FROM_V, CST_SIDE_FROM_K, 0 };

    for (uint32_t width = CST_SIDE_WIDTH_MAX; width >= 16; width /= 2) {
        for (size_t i = 0; i < CST_COUNT(sources); i++) {
            uint64_t bytes = totals_of(desc, width, sources[i]).bytes;

            /* narrower groups with predictors before wide ones without */
            if (bytes <= CST_SIDE_BYTES_MAX && (sources[i] || width == 16))
                return (struct cst_side_plan){ width, sources[i], bytes };
        }
    }
    return (struct cst_side_plan){ 0 };
}

/* Bytes within their maximum hold half as many elements, and a tensor has some numbers more. */
size_t cst_side_memory(const struct cst_descriptor *desc) {
    struct totals most = totals_of(desc, CST_SIDE_WIDTH_MAX, CST_SIDE_FROM_K | CST_SIDE_FROM_V);
    uint64_t floats = CST_MIN(most.floats, CST_SIDE_BYTES_MAX);
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

/* mean - (means of the inputs) times the predictor */
static void find_offset(float *offset, const struct reader *r, uint32_t layer, uint8_t tensor) {
    const struct cst_side_tensor *t = &r->tensor[2 * layer + tensor];
    const float *w = t->predictor;

    memcpy(offset, t->mean, t->channels * sizeof(*offset));
    for (uint32_t g = 0; g < cst_side_groups(t->channels, t->width); g++) {
        struct cst_side_span to = cst_side_group(t->channels, t->width, g);

        for (int i = 0; i < 2; i++) {
            const struct cst_side_tensor *from =
                t->sources >> i & 1 ? cst_side_source(r->tensor, layer, tensor, 1 << i) : NULL;
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

static bool read_predictor(struct reader *r, uint32_t layer, uint8_t tensor) {
    struct cst_side_tensor *t = &r->tensor[2 * layer + tensor];
    const struct cst_side_tensor *k = tensor == CST_TENSOR_V ? t - 1 : layer ? t - 2 : NULL;
    const struct cst_side_tensor *v = layer ? &r->tensor[2 * layer - 1] : NULL;
    struct shape from[2] = { { k ? k->channels : 0, k ? k->width : 0 },
                             { v ? v->channels : 0, v ? v->width : 0 } };
    struct shape to = { t->channels, t->width };
    struct cst_side_predictor head;
    const uint8_t *p = take(r, sizeof(head));
    float scale, *offset;
    uint64_t n;

    if (!p)
        return false;
    memcpy(&head, p, sizeof(head));
    scale = cst_f32_from_bits(cst_load32(&head.scale));
    n = predictor_elements(to, from, head.sources);
    if (!n || head.sources & ~(CST_SIDE_FROM_K | CST_SIDE_FROM_V) || !is_positive(scale) ||
        !cst_is_zero(head.reserved, sizeof(head.reserved)))
        return fail(r, CST_SIDE_E_CORRUPT);
    if (!read_basis(r, &t->residual, to))
        return false;
    t->predictor = read_halves(r, n, scale);
    offset = r->error ? NULL : room_for(r, to.channels);
    if (!offset)
        return false;
    t->sources = head.sources;
    find_offset(offset, r, layer, tensor);
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
        return read_predictor(r, layer, entry->tensor) && (!r->left || fail(r, CST_SIDE_E_CORRUPT));
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
