/* SPDX-License-Identifier: Apache-2.0 */
/* See fake_cistern.h. One thread; blocks are found by scanning. */
#include "tests/unit/client_llama/fake_cistern.h"

#include "base/macros.h"
#include "base/sha256.h"
#include "client/private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 64, TOKENS_MAX = 1024 };

struct cistern_space {
    cistern_descriptor descriptor;
    char options[1024];
    cistern_layer *layers;
    cistern_segment *segments;
};
struct cistern_lease {
    size_t block;
};
struct cistern_slot {
    size_t block;
};

static struct {
    uint8_t key[32], parent[32];
    uint32_t tokens[TOKENS_MAX], n;
    uint8_t *data;
    int visible;
} blocks[BLOCKS];
static size_t n_blocks;
static char last_error[256];
static cistern_descriptor last_descriptor;
static char last_options[1024];
static cistern_layer last_layers[4];
static cistern_segment last_segments[8];
struct fake_store fake_store;
struct cistern_client fake_client;

void fake_store_reset(void) {
    for (size_t i = 0; i < n_blocks; i++)
        free(blocks[i].data);
    memset(blocks, 0, sizeof(blocks));
    n_blocks = 0;
    memset(&fake_store, 0, sizeof(fake_store));
}

size_t fake_store_blocks(void) {
    size_t n = 0;

    for (size_t i = 0; i < n_blocks; i++)
        n += blocks[i].visible != 0;
    return n;
}

int32_t cistern_private_fail(int32_t status, const char *sentence) {
    (void)snprintf(last_error, sizeof(last_error), "%s", sentence);
    return status;
}

const char *cistern_last_error(void) {
    return last_error;
}

const char *cistern_status_text(int32_t status) {
    return status == CISTERN_E_BUSY ? "the daemon is full" : "another status";
}

int32_t cistern_space_open(cistern_client *client, const cistern_descriptor *descriptor,
                           const cistern_space_options *options, cistern_space **out) {
    cistern_space *s;

    (void)client;
    if (fake_store.fail_open)
        return cistern_private_fail(fake_store.fail_open, "no daemon");
    s = calloc(1, sizeof(*s));
    if (!s)
        abort();
    s->descriptor = *descriptor;
    last_descriptor = *descriptor;
    (void)snprintf(last_options, sizeof(last_options), "%s", descriptor->engine_options);
    memcpy(last_layers, descriptor->layers,
           CST_MIN(descriptor->n_layers, CST_COUNT(last_layers)) * sizeof(last_layers[0]));
    memcpy(last_segments, descriptor->segments,
           CST_MIN(descriptor->n_segments, CST_COUNT(last_segments)) * sizeof(last_segments[0]));
    last_descriptor.engine_options = last_options;
    last_descriptor.layers = last_layers;
    last_descriptor.segments = last_segments;
    fake_store.descriptor = &last_descriptor;
    fake_store.options = *options;
    fake_store.spaces++;
    *out = s;
    return CISTERN_OK;
}

void cistern_space_close(cistern_space *space) {
    if (space)
        fake_store.spaces--;
    free(space);
}

static void link_key(const uint8_t *parent, const uint32_t *tokens, uint32_t n, uint8_t out[32]) {
    struct cst_sha256 h;

    cst_sha256_init(&h);
    cst_sha256_update(&h, parent, 32);
    cst_sha256_update(&h, tokens, n * sizeof(*tokens));
    cst_sha256_final(&h, out);
}

int32_t cistern_key_chain(const cistern_space *space, const uint8_t *parent, const uint32_t *tokens,
                          size_t n_tokens, uint8_t *keys, size_t cap, size_t *n_keys) {
    static const uint8_t root[32];
    uint32_t step = space->descriptor.block_tokens;
    size_t n = 0;

    for (size_t at = 0; at < n_tokens; at += step, n++) {
        if (n >= cap)
            return CISTERN_E_BAD_ARGUMENT;
        link_key(n        ? keys + 32 * (n - 1)
                 : parent ? parent
                          : root,
                 tokens + at, (uint32_t)CST_MIN(step, n_tokens - at), keys + 32 * n);
    }
    *n_keys = n;
    return CISTERN_OK;
}

static size_t find(const uint8_t *key) {
    for (size_t i = 0; i < n_blocks; i++)
        if (blocks[i].visible && memcmp(blocks[i].key, key, 32) == 0)
            return i;
    return BLOCKS;
}

static void match_inside(const uint8_t *parent, const uint32_t *tokens, size_t n,
                         cistern_match *out) {
    for (size_t i = 0; i < n_blocks; i++) {
        uint32_t common = 0;

        if (!blocks[i].visible || memcmp(blocks[i].parent, parent, 32) != 0)
            continue;
        while (common < n && common < blocks[i].n && blocks[i].tokens[common] == tokens[common])
            common++;
        if (common > out->partial_tokens) {
            out->partial_tokens = common;
            out->partial_stored = blocks[i].n;
            memcpy(out->partial_key, blocks[i].key, 32);
        }
    }
}

int32_t cistern_lookup(cistern_space *space, const uint32_t *tokens, size_t n_tokens,
                       const uint8_t *keys, cistern_match *out) {
    static const uint8_t root[32];
    uint32_t step = space->descriptor.block_tokens;

    if (fake_store.fail_lookup)
        return cistern_private_fail(fake_store.fail_lookup, "no answer");
    if (out->size != sizeof(*out))
        abort();
    memset(out, 0, sizeof(*out));
    out->size = sizeof(*out);
    while ((out->blocks + 1) * step <= n_tokens && find(keys + 32 * out->blocks) < BLOCKS)
        out->blocks++;
    match_inside(out->blocks ? keys + 32 * (out->blocks - 1) : root, tokens + out->blocks * step,
                 n_tokens - out->blocks * step, out);
    out->tokens = (uint64_t)out->blocks * step + out->partial_tokens;
    return CISTERN_OK;
}

int32_t cistern_acquire(cistern_space *space, const uint8_t *keys, size_t n,
                        const cistern_acquire_options *options, cistern_lease **leases,
                        int32_t *statuses) {
    (void)space;
    (void)options;
    fake_store.acquires++;
    if (fake_store.fail_acquire)
        return cistern_private_fail(fake_store.fail_acquire, "no answer");
    for (size_t i = 0; i < n; i++) {
        size_t block = find(keys + 32 * i);

        leases[i] = NULL;
        statuses[i] = CISTERN_E_NOT_FOUND;
        if (block == BLOCKS || (fake_store.lost_from && i >= fake_store.lost_from))
            continue;
        leases[i] = calloc(1, sizeof(*leases[i]));
        if (!leases[i])
            abort();
        leases[i]->block = block;
        statuses[i] = CISTERN_OK;
        fake_store.leases++;
    }
    return CISTERN_OK;
}

int32_t cistern_lease_data(const cistern_lease *lease, const void **data, size_t *size,
                           cistern_lease_info *info) {
    (void)info;
    *data = blocks[lease->block].data;
    *size = last_descriptor.block_bytes - fake_store.wrong_size;
    return CISTERN_OK;
}

void cistern_release(cistern_client *client, cistern_lease *const *leases, size_t n) {
    (void)client;
    for (size_t i = 0; i < n; i++) {
        fake_store.leases -= leases[i] != NULL;
        free(leases[i]);
    }
}

static int32_t reserve_one(const cistern_space *space, const uint8_t *parent, const uint8_t *key,
                           const uint32_t *tokens, uint32_t n, cistern_slot **slot) {
    uint8_t computed[32];

    link_key(parent, tokens, n, computed);
    if (memcmp(computed, key, 32) != 0)
        return CISTERN_E_KEY_MISMATCH;
    if (find(key) < BLOCKS)
        return CISTERN_E_PRESENT;
    *slot = calloc(1, sizeof(**slot));
    if (!*slot || n_blocks == BLOCKS || n > TOKENS_MAX)
        abort();
    (*slot)->block = n_blocks;
    memcpy(blocks[n_blocks].key, key, 32);
    memcpy(blocks[n_blocks].parent, parent, 32);
    memcpy(blocks[n_blocks].tokens, tokens, n * sizeof(*tokens));
    blocks[n_blocks].n = n;
    blocks[n_blocks].data = malloc(space->descriptor.block_bytes);
    memset(blocks[n_blocks].data, 0xa5, space->descriptor.block_bytes);
    n_blocks++;
    fake_store.slots++;
    return CISTERN_OK;
}

int32_t cistern_reserve(cistern_space *space, const uint8_t *parent, const uint8_t *keys,
                        const uint32_t *tokens, size_t n_tokens, size_t n, cistern_slot **slots,
                        int32_t *statuses) {
    static const uint8_t root[32];
    uint32_t step = space->descriptor.block_tokens;
    size_t given = 0;

    fake_store.reserves++;
    if (fake_store.fail_reserve)
        return cistern_private_fail(fake_store.fail_reserve, "no answer");
    for (size_t i = 0; i < n; i++) {
        slots[i] = NULL;
        if (fake_store.slots_max && given >= fake_store.slots_max)
            statuses[i] = CISTERN_E_BUSY;
        else if (fake_store.busy_key && i == fake_store.busy_key)
            statuses[i] = CISTERN_E_KEY_BUSY;
        else
            statuses[i] = reserve_one(space,
                                      i        ? keys + 32 * (i - 1)
                                      : parent ? parent
                                               : root,
                                      keys + 32 * i, tokens + i * step,
                                      (uint32_t)CST_MIN(step, n_tokens - i * step), &slots[i]);
        given += slots[i] != NULL;
    }
    return CISTERN_OK;
}

int32_t cistern_slot_data(cistern_slot *slot, void **data, size_t *size) {
    *data = blocks[slot->block].data;
    *size = last_descriptor.block_bytes - fake_store.wrong_size;
    return CISTERN_OK;
}

int32_t cistern_commit(cistern_space *space, cistern_slot *const *slots, size_t n,
                       const cistern_commit_options *options, int32_t *statuses) {
    (void)space;
    (void)options;
    fake_store.commits++;
    for (size_t i = 0; i < n; i++) {
        if (!fake_store.fail_commit)
            blocks[slots[i]->block].visible = 1;
        statuses[i] =
            fake_store.pending_key && i == fake_store.pending_key ? CISTERN_E_PENDING : CISTERN_OK;
        fake_store.slots--;
        free(slots[i]);
    }
    return fake_store.fail_commit ? cistern_private_fail(fake_store.fail_commit, "no answer")
                                  : CISTERN_OK;
}

void cistern_abort(cistern_space *space, cistern_slot *const *slots, size_t n) {
    (void)space;
    for (size_t i = 0; i < n; i++) {
        fake_store.slots--;
        free(slots[i]);
    }
}
