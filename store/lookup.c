/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lookups. Changes counters only. Loop thread.
 * Visibility is closed under prefixes, so the length of the leading run is found by doubling and
 * then halving. A block past max_age may still stand in the trie for a moment; parents are older
 * than their children, so the age of the run's first block decides for all of it.
 */
#include "store/core.h"
#include "store/prefix_trie.h"

#include <string.h>

static struct cst_block *visible(const struct cst_space *space, const uint8_t *key) {
    struct cst_block *b = cst_trie_find(space, key);

    return b && b->visible ? b : NULL;
}

static const uint8_t *key_at(const uint8_t *keys, size_t i) {
    return keys + i * CST_KEY_SIZE;
}

/* Invariant: keys before lo are visible, the key at hi (if hi < n) is not. */
size_t cst_lookup_run(const struct cst_space *space, const uint8_t *keys, size_t n) {
    size_t lo = 0, hi = 1;

    if (!n || !visible(space, keys) || cst_block_is_expired(visible(space, keys)))
        return 0;
    while (hi < n && visible(space, key_at(keys, hi))) {
        lo = hi + 1;
        hi = CST_MIN(n, 2 * hi + 1);
    }
    lo = CST_MAX(lo, 1);
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;

        if (visible(space, key_at(keys, mid)))
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static uint64_t decode_cost(const struct cst_space *space) {
    return space->decode_ns ? space->decode_ns : space->desc->block_bytes; /* a guess: 1 GB/s */
}

static uint64_t block_cost(const struct cst_block *b) {
    enum cst_tier tier = cst_block_tier(b);

    return (tier == CST_TIER_HOT ? 0 : decode_cost(b->space)) +
           (tier == CST_TIER_COLD ? cst_cold_cost(b->space->store, b->cold_bytes) : 0);
}

/* Without tiers: guessed from how common they are. */
static uint64_t guess_cost(const struct cst_space *space, size_t run) {
    const struct cst_space_stats *s = &space->stats;
    uint64_t blocks = CST_MAX(s->blocks, 1);
    uint64_t decoded = run * (blocks - CST_MIN(blocks, space->hot_copies)) / blocks;
    uint64_t read = run * (blocks - CST_MIN(blocks, space->in_memory)) / blocks;
    uint64_t bytes = s->cold_bytes / CST_MAX(s->cold_blocks, 1);

    return decoded * decode_cost(space) + cst_cold_cost(space->store, read * bytes);
}

/* Without tiers: of everything that is stored, which is never better than the run. */
static enum cst_tier worst_tier(const struct cst_space *space, const uint8_t *tiers, size_t run) {
    enum cst_tier worst = run ? CST_TIER_HOT : CST_TIER_NONE;

    for (size_t i = 0; tiers && i < run; i++)
        worst = CST_MAX(worst, (enum cst_tier)tiers[i]);
    if (tiers || !run)
        return worst;
    if (space->in_memory < space->stats.blocks)
        return CST_TIER_COLD;
    return space->hot_copies < space->stats.blocks ? CST_TIER_PACKED : worst;
}

static void match_tail(const struct cst_space *space, const uint8_t *parent_key, bool may_be_root,
                       const uint32_t *tail, uint32_t tail_len, struct cst_lookup *out) {
    const struct cst_block *parent = visible(space, parent_key), *b;
    uint32_t shared;

    if (parent && cst_block_is_expired(parent))
        return;
    if (!parent && may_be_root)
        parent = cst_trie_root(space, parent_key);
    b = parent ? cst_trie_match(parent, tail, tail_len, &shared) : NULL;
    if (!b || cst_block_is_expired(b))
        return;
    out->partial_tokens = shared;
    out->partial_stored = b->n_tokens;
    out->partial_tier = cst_block_tier(b);
    memcpy(out->partial_key, b->key, CST_KEY_SIZE);
    out->cost_ns += block_cost(b);
}

void cst_space_lookup(struct cst_space *space, const uint8_t *keys, size_t n, const uint8_t *parent,
                      const uint32_t *tail, uint32_t tail_len, uint8_t *tiers,
                      struct cst_lookup *out) {
    size_t run = cst_lookup_run(space, keys, n);

    *out = (struct cst_lookup){ .cost_ns = tiers ? 0 : guess_cost(space, run) };
    for (size_t i = 0; tiers && i < run; i++) {
        const struct cst_block *b = visible(space, key_at(keys, i));

        if (!b) {
            run = i; /* these keys are no chain: a client may send anything */
            break;
        }
        tiers[i] = (uint8_t)cst_block_tier(b);
        out->cost_ns += block_cost(b);
    }
    out->present = run;
    out->worst_tier = worst_tier(space, tiers, run);
    if (tail_len && run == n && (n || parent))
        match_tail(space, n ? key_at(keys, n - 1) : parent, !n, tail, tail_len, out);
    space->stats.lookups++;
    space->stats.lookup_keys += n;
    space->stats.hit_keys += run;
}

bool cst_space_has(const struct cst_space *space, const uint8_t key[32]) {
    return visible(space, key) != NULL;
}

size_t cst_space_lookup_each(struct cst_space *space, const uint8_t *keys, size_t n,
                             uint8_t *tiers) {
    size_t present = 0;

    for (size_t i = 0; i < n; i++) {
        const struct cst_block *b = visible(space, key_at(keys, i));

        tiers[i] = (uint8_t)(b && !cst_block_is_expired(b) ? cst_block_tier(b) : CST_TIER_NONE);
        present += tiers[i] != CST_TIER_NONE;
    }
    space->stats.lookups++;
    space->stats.lookup_keys += n;
    space->stats.hit_keys += present;
    return present;
}
