/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cistern/llama.h: restores and stores the KV of one llama.cpp sequence.
 *
 *   restore   lookup, acquire the blocks (all leases are held, so that the length is known before
 *             the first byte is written), join them into one state blob, give it to llama.cpp in
 * one call, release store     reserve; only if something is missing read the sequence's state, cut
 * it into the slots, commit
 *
 * Invariants
 *   1. After a restore the sequence holds positions 0 .. n_restored - 1 or nothing.
 *   2. n_restored < n_tokens: the logits of the last token are not part of a state.
 *   3. A block is written only from a state whose layout is the one the space was opened with.
 *
 * One blob in one call, not a call per block: llama.cpp appends the cells of each call where it
 * finds room, and another order of cells changes the sums of attention in the last bits.
 *
 * Threads: as llama.cpp, one at a time per context. The blob, key and lease buffers are kept
 * between calls, for a fresh buffer of this size costs more page faults than the copy itself.
 */
#include "base/macros.h"
#include "base/mem.h"
#include "client/llama/llama_api.h"
#include "client/llama/llama_error.h"
#include "client/llama/llama_probe.h"
#include "client/llama/state.h"

#include <assert.h>
#include <cistern/llama.h>
#include <errno.h>
#include <string.h>

enum {
    ACQUIRE_BLOCKS = 64,           /* per packet */
    STORE_BYTES = 32 << 20,        /* per round of reserve and commit */
    STORE_BLOCKS = ACQUIRE_BLOCKS, /* the same */
};

struct cistern_llama {
    struct cst_llama_api api;
    struct llama_context *ctx;
    cistern_client *client;
    cistern_space *space;
    struct cst_state_layout layout;
    uint32_t block_tokens;
    uint64_t block_bytes;
    struct cst_state state; /* of the store in progress */
    uint8_t *blob;
    size_t blob_cap;
    uint8_t *keys; /* of the prompt's blocks */
    cistern_lease **leases;
    cistern_slot **slots;
    int32_t *statuses;
    size_t blocks_cap; /* of the four arrays above */
};

/* ---- opening ---- */

static cistern_llama *free_glue(cistern_llama *g) {
    if (!g)
        return NULL;
    cistern_space_close(g->space);
    cst_state_deinit(&g->state);
    cst_free(g->blob);
    cst_free(g->keys);
    cst_free(g->leases);
    cst_free(g->slots);
    cst_free(g->statuses);
    return cst_free(g);
}

CST_DEFINE_FREEP(cistern_llama, free_glue)

static int32_t open_space(cistern_llama *g, const cistern_llama_facts *facts) {
    cst_auto(cst_freep) struct cst_llama_description *d = cst_malloc(sizeof(*d));
    cst_auto(cst_freep) struct cst_llama_probe *probe = cst_malloc(sizeof(*probe));
    const cistern_space_options options = {
        .size = sizeof(options),
        .kind = CISTERN_KIND_TOKENS,
        .quality_class = facts->quality_class,
        .salt = facts->salt,
        .salt_size = facts->salt_size,
    };
    int32_t r;

    if (!d || !probe)
        return cst_llama_fail_errno(-ENOMEM, "opening the adapter");
    r = cst_llama_probe(&g->api, g->ctx, probe);
    if (r == CISTERN_OK)
        r = cst_llama_describe(&g->api, g->ctx, probe, facts, d);
    if (r == CISTERN_OK)
        r = cistern_space_open(g->client, &d->descriptor, &options, &g->space);
    if (r)
        return r;
    g->layout = probe->layout;
    g->block_tokens = d->descriptor.block_tokens;
    g->block_bytes = d->descriptor.block_bytes;
    return CISTERN_OK;
}

CST_EXPORT int32_t cistern_llama_open(cistern_client *client, struct llama_context *ctx,
                                      const cistern_llama_facts *facts, cistern_llama **out) {
    cst_auto(free_gluep) cistern_llama *g = NULL;
    const char *missing;
    int32_t r;

    if (!client || !ctx || !facts || !out || facts->size < sizeof(*facts))
        return cst_llama_fail(CISTERN_E_BAD_ARGUMENT,
                              "client, context, facts (with their size) and an output are needed");
    g = cst_calloc(1, sizeof(*g));
    if (!g)
        return cst_llama_fail_errno(-ENOMEM, "opening the adapter");
    missing = cst_llama_api_resolve(&g->api, facts->library);
    if (missing)
        return cst_llama_fail(CISTERN_E_ENGINE,
                              "%s is not in this process: load libllama (0.5.0 or compatible) "
                              "globally, or give its handle in the facts",
                              missing);
    g->client = client;
    g->ctx = ctx;
    r = open_space(g, facts);
    if (r)
        return r;
    *out = cst_steal(&g);
    return CISTERN_OK;
}

CST_EXPORT void cistern_llama_close(cistern_llama *glue) {
    (void)free_glue(glue);
}

CST_EXPORT cistern_space *cistern_llama_space(cistern_llama *glue) {
    return glue ? glue->space : NULL;
}

/* ---- buffers ---- */

static bool grow(void *array, size_t n, size_t size) {
    void *old, *grown;

    memcpy(&old, array, sizeof(old));
    grown = cst_realloc(old, n * size);
    if (grown)
        memcpy(array, &grown, sizeof(grown));
    return grown != NULL;
}

static int32_t want_blocks(cistern_llama *g, size_t n) {
    if (n <= g->blocks_cap)
        return CISTERN_OK;
    if (!grow(&g->keys, n, CISTERN_KEY_SIZE) || !grow(&g->leases, n, sizeof(*g->leases)) ||
        !grow(&g->slots, n, sizeof(*g->slots)) || !grow(&g->statuses, n, sizeof(*g->statuses)))
        return cst_llama_fail_errno(-ENOMEM, "listing the blocks of the prompt");
    g->blocks_cap = n;
    return CISTERN_OK;
}

static int32_t want_blob(cistern_llama *g, uint64_t n) {
    if (n <= g->blob_cap)
        return CISTERN_OK;
    g->blob = cst_free(g->blob); /* its contents need no copy */
    g->blob_cap = 0;
    g->blob = cst_malloc(n);
    if (!g->blob)
        return cst_llama_fail_errno(-ENOMEM, "holding the state of the sequence");
    g->blob_cap = n;
    return CISTERN_OK;
}

/* Checks what both directions take, and computes the keys. */
static int32_t prepare(cistern_llama *g, int32_t seq, const int32_t *tokens, size_t n_tokens,
                       size_t *ret_blocks) {
    int32_t r;

    if (seq < 0 || (uint32_t)seq >= g->api.n_seq_max(g->ctx))
        return cst_llama_fail(CISTERN_E_BAD_ARGUMENT, "the context has no sequence %d", seq);
    if (!tokens || n_tokens > CST_STATE_CELLS_MAX)
        return cst_llama_fail(CISTERN_E_BAD_ARGUMENT, "tokens are missing or too many");
    *ret_blocks = (n_tokens + g->block_tokens - 1) / g->block_tokens;
    r = want_blocks(g, *ret_blocks);
    if (r)
        return r;
    return cistern_key_chain(g->space, NULL, (const uint32_t *)tokens, n_tokens, g->keys,
                             g->blocks_cap, ret_blocks);
}

/* ---- restore ---- */

/* Leases of the first n_tokens tokens, the last block perhaps another one that starts with the same
 * tokens (`partial`). Returns the tokens that are leased; fewer when blocks went away. */
static size_t acquire(cistern_llama *g, size_t n_tokens, const uint8_t *partial,
                      size_t *ret_leases) {
    size_t n = (n_tokens + g->block_tokens - 1) / g->block_tokens, got = 0;

    if (partial)
        memcpy(g->keys + (n - 1) * CISTERN_KEY_SIZE, partial, CISTERN_KEY_SIZE);
    for (size_t at = 0; at < n && got == at; at += ACQUIRE_BLOCKS) {
        size_t count = CST_MIN(n - at, (size_t)ACQUIRE_BLOCKS);

        memset(g->leases + at, 0, count * sizeof(*g->leases));
        if (cistern_acquire(g->space, g->keys + at * CISTERN_KEY_SIZE, count, NULL, g->leases + at,
                            g->statuses + at) != CISTERN_OK)
            break;
        *ret_leases = at + count;
        while (got < at + count && g->leases[got])
            got++;
    }
    return got == n ? n_tokens : got * g->block_tokens;
}

/* The blob of n_tokens tokens from the leases. */
static int32_t join(cistern_llama *g, int32_t seq, uint32_t n_tokens) {
    uint64_t size = cst_state_size(&g->layout, n_tokens);
    int32_t r = want_blob(g, size);

    if (r)
        return r;
    cst_state_join_begin(&g->layout, n_tokens, seq, g->blob);
    for (uint32_t first = 0; first < n_tokens; first += g->block_tokens) {
        const cistern_lease *lease = g->leases[first / g->block_tokens];
        const void *block;
        size_t length;

        r = cistern_lease_data(lease, &block, &length, NULL);
        if (r)
            return r;
        if (length != g->block_bytes)
            return cst_llama_fail(CISTERN_E_CORRUPT, "a block of this space has another size");
        cst_state_join_block(&g->layout, n_tokens, first,
                             CST_MIN(n_tokens - first, g->block_tokens), g->block_tokens, block,
                             g->blob);
    }
    if (g->api.state_seq_set_data(g->ctx, g->blob, size, seq) != size)
        return cst_llama_fail(CISTERN_E_ENGINE,
                              "llama.cpp refused a state of %u tokens; is the context full?",
                              n_tokens);
    return CISTERN_OK;
}

static int32_t restore(cistern_llama *g, int32_t seq, const int32_t *tokens, size_t n_tokens,
                       size_t *n_restored) {
    cistern_match match = { .size = sizeof(match) };
    size_t n_blocks, n, n_leases = 0;
    int32_t r = prepare(g, seq, tokens, n_tokens, &n_blocks);

    if (r)
        return r;
    r = cistern_lookup(g->space, (const uint32_t *)tokens, n_tokens, g->keys, &match);
    if (r)
        return r;
    n = CST_MIN(match.tokens, n_tokens - 1);
    if (n == 0)
        return CISTERN_OK;
    n = acquire(g, n, n > (size_t)match.blocks * g->block_tokens ? match.partial_key : NULL,
                &n_leases);
    if (n)
        r = join(g, seq, (uint32_t)n);
    cistern_release(g->client, g->leases, n_leases);
    if (r == CISTERN_OK)
        *n_restored = n;
    return r;
}

CST_EXPORT int32_t cistern_llama_restore(cistern_llama *glue, int32_t seq, const int32_t *tokens,
                                         size_t n_tokens, size_t *n_restored) {
    void *memory;
    int32_t r;

    if (!glue || !n_restored)
        return cst_llama_fail(CISTERN_E_BAD_ARGUMENT, "an open adapter and an output are needed");
    *n_restored = 0;
    memory = glue->api.get_memory(glue->ctx);
    if (seq >= 0 && (uint32_t)seq < glue->api.n_seq_max(glue->ctx))
        (void)glue->api.memory_seq_rm(memory, seq, -1, -1);
    if (n_tokens < 2)
        return CISTERN_OK;
    r = restore(glue, seq, tokens, n_tokens, n_restored);
    if (r == CISTERN_E_ENGINE)
        (void)glue->api.memory_seq_rm(memory, seq, -1, -1);
    return r;
}

/* ---- store ---- */

/* Reads the sequence's state; it must hold n_tokens tokens in the layout of the space. */
static int32_t read_state(cistern_llama *g, int32_t seq, size_t n_tokens) {
    size_t size = g->api.state_seq_get_size(g->ctx, seq);
    int r = want_blob(g, size);

    if (r)
        return r;
    if (size == 0 || g->api.state_seq_get_data(g->ctx, g->blob, size, seq) != size)
        return cst_llama_fail(CISTERN_E_ENGINE, "llama.cpp gave no state of sequence %d", seq);
    r = cst_state_parse(&g->state, g->blob, size);
    if (r < 0)
        return cst_llama_fail_errno(r, "reading the state of the sequence");
    if (r > 0)
        return cst_llama_fail(CISTERN_E_ENGINE, "%s", cst_state_text(r));
    if (g->state.n_cells < n_tokens)
        return cst_llama_fail(CISTERN_E_BAD_ARGUMENT, "the sequence holds %u of %zu tokens",
                              g->state.n_cells, n_tokens);
    if (!cst_state_layout_equal(&g->state.layout, &g->layout))
        return cst_llama_fail(CISTERN_E_ENGINE, "the layout of the context's states has changed");
    return CISTERN_OK;
}

/* One round: blocks [at, at + n). Writes a status for each. */
static int32_t store_round(cistern_llama *g, int32_t seq, const int32_t *tokens, size_t n_tokens,
                           size_t at, size_t n) {
    size_t first = at * g->block_tokens;
    size_t end = CST_MIN(n_tokens, first + n * g->block_tokens);
    int32_t *statuses = g->statuses + at, committed[STORE_BLOCKS], r;
    cistern_slot *filled[STORE_BLOCKS];
    size_t n_filled = 0;

    r = cistern_reserve(g->space, at ? g->keys + (at - 1) * CISTERN_KEY_SIZE : NULL,
                        g->keys + at * CISTERN_KEY_SIZE, (const uint32_t *)tokens + first,
                        end - first, n, g->slots, statuses);
    if (r)
        return r;
    for (size_t i = 0; i < n; i++)
        if (g->slots[i])
            filled[n_filled++] = g->slots[i];
    if (n_filled == 0)
        return CISTERN_OK;
    if (g->state.n_cells == 0)
        r = read_state(g, seq, n_tokens);
    for (size_t i = 0; i < n && r == CISTERN_OK; i++) {
        size_t token = first + i * g->block_tokens, length;
        void *data;

        if (!g->slots[i])
            continue;
        r = cistern_slot_data(g->slots[i], &data, &length);
        if (r == CISTERN_OK && length == g->block_bytes)
            cst_state_cut(&g->state, (uint32_t)token,
                          (uint32_t)CST_MIN(n_tokens - token, g->block_tokens), g->block_tokens,
                          data);
        else if (r == CISTERN_OK)
            r = cst_llama_fail(CISTERN_E_CORRUPT, "a slot of this space has another size");
    }
    if (r) {
        cistern_abort(g->space, filled, n_filled);
        return r;
    }
    r = cistern_commit(g->space, filled, n_filled, NULL, committed);
    for (size_t i = 0, k = 0; i < n && r == CISTERN_OK; i++)
        if (g->slots[i])
            statuses[i] = committed[k++];
    return r;
}

/* Blocks of a round that need no second try: stored, or being stored by somebody. */
static size_t settled(const int32_t *statuses, size_t n) {
    size_t i = 0;

    while (i < n && (statuses[i] == CISTERN_OK || statuses[i] == CISTERN_E_PRESENT ||
                     statuses[i] == CISTERN_E_KEY_BUSY || statuses[i] == CISTERN_E_PENDING))
        i++;
    return i;
}

/* Pending blocks count: only blocks of this call are above them, and those are stored by now.
 * Behind another writer's unfinished block nothing counts. */
static size_t tokens_stored(const cistern_llama *g, size_t n_settled, size_t n_tokens) {
    size_t i = 0;

    while (i < n_settled && g->statuses[i] != CISTERN_E_KEY_BUSY)
        i++;
    return CST_MIN(n_tokens, i * g->block_tokens);
}

static int32_t store(cistern_llama *g, int32_t seq, const int32_t *tokens, size_t n_tokens,
                     size_t *n_stored) {
    size_t per_round, n_blocks, at = 0, moved = 1;
    int32_t r = prepare(g, seq, tokens, n_tokens, &n_blocks);

    per_round = CST_MIN(STORE_BYTES / g->block_bytes, (uint64_t)STORE_BLOCKS);
    per_round = CST_MAX(per_round, 1u);
    while (r == CISTERN_OK && at < n_blocks && moved) {
        size_t n = CST_MIN(per_round, n_blocks - at);

        r = store_round(g, seq, tokens, n_tokens, at, n);
        moved = r ? 0 : settled(g->statuses + at, n);
        at += moved;
    }
    if (r == CISTERN_OK && at < n_blocks)
        r = cst_llama_fail(g->statuses[at], "a block could not be stored: %s",
                           cistern_status_text(g->statuses[at]));
    *n_stored = tokens_stored(g, at, n_tokens);
    return r;
}

CST_EXPORT int32_t cistern_llama_store(cistern_llama *glue, int32_t seq, const int32_t *tokens,
                                       size_t n_tokens, size_t *n_stored) {
    int32_t r;

    if (!glue || !n_stored)
        return cst_llama_fail(CISTERN_E_BAD_ARGUMENT, "an open adapter and an output are needed");
    *n_stored = 0;
    if (n_tokens == 0)
        return CISTERN_OK;
    assert(glue->state.n_cells == 0);
    r = store(glue, seq, tokens, n_tokens, n_stored);
    cst_state_deinit(&glue->state);
    memset(&glue->state, 0, offsetof(struct cst_state, k_at));
    return r;
}
