/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Why a prompt missed, in one sentence: the first key that is not there, and the nearest space of
 * the namespace (most of these keys, then fewest fields that differ) with the first field that
 * keeps them apart. Owns nothing, changes nothing. Loop thread only.
 */
#include "store/core.h"
#include "store/prefix_trie.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct field {
    const char *name;
    size_t offset, size;
};

#define FIELD(type, f)                                                                             \
    { #f, offsetof(struct type, f), sizeof(((struct type *)NULL)->f) }

/* In the order of the canonical bytes. */
static const struct field fields[] = {
    FIELD(cst_descriptor, content_id),   FIELD(cst_descriptor, adapter_id),
    FIELD(cst_descriptor, engine),       FIELD(cst_descriptor, options),
    FIELD(cst_descriptor, engine_abi),   FIELD(cst_descriptor, state_version),
    FIELD(cst_descriptor, block_tokens), FIELD(cst_descriptor, tp_rank),
    FIELD(cst_descriptor, tp_size),      FIELD(cst_descriptor, block_bytes),
    FIELD(cst_descriptor, n_layers),     FIELD(cst_descriptor, n_segments),
};

static const struct field layer_fields[] = {
    FIELD(cst_layer, kv_heads),
    FIELD(cst_layer, head_dim_k),
    FIELD(cst_layer, head_dim_v),
    FIELD(cst_layer, window),
    FIELD(cst_layer, rope),
    FIELD(cst_layer, k_rotated),
    FIELD(cst_layer, rope_scaling),
    FIELD(cst_layer, rope_dims),
    FIELD(cst_layer, rope_theta),
    FIELD(cst_layer, scaling),
    FIELD(cst_layer, scaling_original_context),
};

static const struct field segment_fields[] = {
    FIELD(cst_segment, layer),       FIELD(cst_segment, tensor),
    FIELD(cst_segment, dtype),       FIELD(cst_segment, offset),
    FIELD(cst_segment, length),      FIELD(cst_segment, token_stride),
    FIELD(cst_segment, head_stride), FIELD(cst_segment, dim_stride),
};

struct difference {
    unsigned n;
    char first[64];
};

static void differs(struct difference *d, const char *list, size_t i, const char *name) {
    if (d->n++)
        return;
    if (list)
        (void)snprintf(d->first, sizeof(d->first), "%s[%zu].%s", list, i, name);
    else
        (void)snprintf(d->first, sizeof(d->first), "%s", name);
}

static bool is_same(const struct field *f, const void *a, const void *b) {
    const char *x = (const char *)a + f->offset, *y = (const char *)b + f->offset;

    if (f->offset == offsetof(struct cst_descriptor, engine) && f->size == CST_ENGINE_MAX + 1)
        return !strncmp(x, y, f->size);
    if (f->size == CST_OPTIONS_MAX + 1)
        return !strncmp(x, y, f->size);
    return !memcmp(x, y, f->size);
}

static void compare(struct difference *d, const char *list, size_t i, const struct field *f,
                    size_t n, const void *a, const void *b) {
    for (size_t k = 0; k < n; k++)
        if (!is_same(&f[k], a, b))
            differs(d, list, i, f[k].name);
}

static struct difference difference(const struct cst_space *a, const struct cst_space *b) {
    const struct cst_descriptor *x = a->desc, *y = b->desc;
    struct difference d = { .n = 0 };

    if (memcmp(a->fingerprint, b->fingerprint, sizeof(a->fingerprint))) {
        compare(&d, NULL, 0, fields, CST_COUNT(fields), x, y);
        for (size_t i = 0; i < CST_MIN(x->n_layers, y->n_layers); i++)
            compare(&d, "layers", i, layer_fields, CST_COUNT(layer_fields), &x->layers[i],
                    &y->layers[i]);
        for (size_t i = 0; i < CST_MIN(x->n_segments, y->n_segments); i++)
            compare(&d, "segments", i, segment_fields, CST_COUNT(segment_fields), &x->segments[i],
                    &y->segments[i]);
    }
    if (a->kind != b->kind)
        differs(&d, NULL, 0, "kind");
    if (a->klass != b->klass)
        differs(&d, NULL, 0, "class");
    return d;
}

static void find_nearest(struct cst_space *space, const uint8_t *keys, size_t n,
                         struct cst_explanation *out) {
    struct cst_list *head = &space->store->spaces, *it;
    struct difference best = { .n = 0 };

    for (it = head->next; it != head; it = it->next) {
        struct cst_space *s = cst_list_entry(it, struct cst_space, link);
        struct difference d;
        size_t present;

        if (s == space || s->ns != space->ns || !s->stats.blocks)
            continue;
        present = cst_lookup_run(s, keys, n);
        d = difference(space, s);
        if (out->has_nearest &&
            (present < out->nearest_present || (present == out->nearest_present && d.n >= best.n)))
            continue;
        best = d;
        out->has_nearest = true;
        out->nearest_present = present;
        memcpy(out->nearest, s->fingerprint, sizeof(out->nearest));
    }
    memcpy(out->field, best.first, sizeof(out->field));
}

static const char *why_absent(const struct cst_space *space, const uint8_t *keys, size_t present) {
    const struct cst_block *b = cst_trie_find(space, keys + present * CST_KEY_SIZE);
    const struct cst_block *parent =
        present ? cst_trie_find(space, keys + (present - 1) * CST_KEY_SIZE) : NULL;

    if (b && !b->visible)
        return "is being stored";
    if (b)
        return "has expired";
    if (!space->stats.blocks)
        return "is not there: nothing is stored in this space";
    if (space->kind == CST_KIND_TOKENS && parent && parent->n_children)
        return "is not there: other tokens follow the same prefix";
    return "is not there: it was never stored, or it was evicted or erased";
}

static void say_tail(const struct cst_block *parent, const uint32_t *tail, uint32_t tail_len,
                     char *out, size_t cap) {
    uint32_t shared = 0;

    if (parent && tail_len)
        (void)cst_trie_match(parent, tail, tail_len, &shared);
    if (tail_len)
        (void)snprintf(out, cap, "; %" PRIu32 " of the %" PRIu32 " tokens after them are, too",
                       shared, tail_len);
}

void cst_space_explain(struct cst_space *space, const uint8_t root[32], const uint8_t *keys,
                       size_t n, const uint32_t *tail, uint32_t tail_len,
                       struct cst_explanation *out) {
    size_t present = cst_lookup_run(space, keys, n);
    char more[128] = "";

    *out = (struct cst_explanation){ .present = present };
    find_nearest(space, keys, n, out);
    if (present == n) {
        say_tail(n ? cst_trie_find(space, keys + (n - 1) * CST_KEY_SIZE)
                   : cst_trie_root(space, root),
                 tail, tail_len, more, sizeof(more));
        (void)snprintf(out->reason, sizeof(out->reason), "all %zu blocks are stored%s", n, more);
        return;
    }
    /* Other fingerprints mean other keys: a space that differs in more than its class never has
     * these, and is still what the asker wants to hear about. */
    if (out->has_nearest && out->nearest_present > present)
        (void)snprintf(more, sizeof(more), "; %zu are in a space with another %s",
                       out->nearest_present, out->field);
    else if (out->has_nearest && !space->stats.blocks)
        (void)snprintf(more, sizeof(more), "; the nearest space that holds blocks has another %s",
                       out->field);
    (void)snprintf(out->reason, sizeof(out->reason), "%zu of %zu blocks are stored; block %zu %s%s",
                   present, n, present, why_absent(space, keys, present), more);
}
