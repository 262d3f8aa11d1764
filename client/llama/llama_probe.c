/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decides whether a context's KV can be cached and reads its state layout and version.
 *
 * Three gates, so that nothing is ever cached wrongly: the model's own words (recurrent, hybrid,
 * window, rope, encoder), then the exact format of a state (state_parse.c refuses what it doesn't
 * use up), then llama.cpp itself, which refuses a joined state of another type or size.
 *
 * Models with sliding windows are refused even with the full-size cache option: llama.cpp leaves
 * masked cells out of a sequence's state, so there are no whole blocks to cut.
 */
#include "client/llama/llama_probe.h"

#include "base/macros.h"
#include "base/mem.h"
#include "client/llama/llama_error.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define SEQ_FILE_MAGIC UINT32_C(0x67677371) /* LLAMA_STATE_SEQ_MAGIC, "ggsq" */

/* enum llama_rope_type */
enum { ROPE_MROPE = 8, ROPE_IMROPE = 40, ROPE_VISION = 24 };

static int32_t check_model(const struct cst_llama_api *api, const struct llama_context *ctx) {
    const struct llama_model *model = api->get_model(ctx);
    int32_t rope;

    if (!api->get_memory(ctx))
        return cst_llama_fail(CISTERN_E_UNSUPPORTED, "this context keeps no KV cache");
    if (api->model_is_recurrent(model))
        return cst_llama_fail(CISTERN_E_UNSUPPORTED,
                              "recurrent models keep no KV per token, so blocks can't be cached");
    if (api->model_is_hybrid(model))
        return cst_llama_fail(CISTERN_E_UNSUPPORTED,
                              "hybrid models keep recurrent state, so blocks can't be cached");
    if (api->model_has_encoder(model))
        return cst_llama_fail(CISTERN_E_UNSUPPORTED,
                              "models with an encoder depend on more than their tokens");
    if (api->model_n_swa(model) > 0)
        return cst_llama_fail(CISTERN_E_UNSUPPORTED,
                              "this model has sliding-window attention (%d tokens): llama.cpp "
                              "leaves tokens out of its saved states",
                              api->model_n_swa(model));
    rope = api->model_rope_type(model);
    if (rope == ROPE_MROPE || rope == ROPE_IMROPE || rope == ROPE_VISION)
        return cst_llama_fail(CISTERN_E_UNSUPPORTED,
                              "this model has multi-dimensional positions (M-RoPE), which token "
                              "ids don't determine");
    return CISTERN_OK;
}

/* The layout out of the state of a sequence that holds something. */
static int32_t read_layout(const struct cst_llama_api *api, struct llama_context *ctx, int32_t seq,
                           struct cst_state_layout *out) {
    size_t size = api->state_seq_get_size(ctx, seq);
    cst_auto(cst_freep) uint8_t *blob = cst_malloc(size ? size : 1);
    cst_auto(cst_freep) struct cst_state *state = cst_calloc(1, sizeof(*state));
    int r;

    if (!blob || !state)
        return cst_llama_fail_errno(-ENOMEM, "reading the state of a sequence");
    if (size == 0 || api->state_seq_get_data(ctx, blob, size, seq) != size)
        return cst_llama_fail(CISTERN_E_ENGINE, "llama.cpp gave no state of sequence %d", seq);
    r = cst_state_parse(state, blob, size);
    if (r == 0 && state->n_cells == 0)
        r = CST_STATE_E_FOREIGN;
    if (r == 0)
        *out = state->layout;
    cst_state_deinit(state);
    if (r < 0)
        return cst_llama_fail_errno(r, "reading the state of a sequence");
    return r ? cst_llama_fail(CISTERN_E_UNSUPPORTED, "%s", cst_state_text(r)) : CISTERN_OK;
}

/* The state version stands only in files, so a file in memory is written. */
static int32_t read_version(const struct cst_llama_api *api, struct llama_context *ctx, int32_t seq,
                            uint32_t *out) {
    cst_auto(cst_closep) int fd = memfd_create("cistern-llama-state", MFD_CLOEXEC);
    struct {
        uint32_t magic, version;
    } head;
    char path[64];
    int32_t token = 0;

    if (fd < 0)
        return cst_llama_fail_errno(-errno, "making a file in memory");
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (api->state_seq_save_file(ctx, path, seq, &token, 0) == 0 ||
        pread(fd, &head, sizeof(head), 0) != (ssize_t)sizeof(head) || head.magic != SEQ_FILE_MAGIC)
        return cst_llama_fail(CISTERN_E_ENGINE, "llama.cpp did not tell its state version");
    *out = head.version;
    return CISTERN_OK;
}

static int32_t read_sequence(const struct cst_llama_api *api, struct llama_context *ctx,
                             int32_t seq, struct cst_llama_probe *out) {
    int32_t r = read_layout(api, ctx, seq, &out->layout);

    return r ? r : read_version(api, ctx, seq, &out->state_version);
}

static int32_t decode_one(const struct cst_llama_api *api, struct llama_context *ctx, int32_t seq) {
    int32_t token = 0, pos = 0, n_seq = 1, *ids = &seq;
    int8_t logits = 0;
    struct cst_llama_batch batch = { 1, &token, NULL, &pos, &n_seq, &ids, &logits };

    if (api->decode(ctx, batch) != 0)
        return cst_llama_fail(CISTERN_E_ENGINE, "llama.cpp failed to decode one token");
    return CISTERN_OK;
}

int32_t cst_llama_probe(const struct cst_llama_api *api, struct llama_context *ctx,
                        struct cst_llama_probe *out) {
    int32_t r = check_model(api, ctx), n_seq, unused = -1;
    void *memory;

    if (r)
        return r;
    memory = api->get_memory(ctx);
    n_seq = (int32_t)api->n_seq_max(ctx);
    r = CISTERN_E_ENGINE;
    for (int32_t seq = 0; seq < n_seq && r; seq++) {
        if (api->memory_seq_pos_max(memory, seq) >= 0)
            r = read_sequence(api, ctx, seq, out);
        else if (unused < 0)
            unused = seq;
    }
    if (r == CISTERN_OK || unused < 0)
        return r;
    r = decode_one(api, ctx, unused);
    if (r == CISTERN_OK)
        r = read_sequence(api, ctx, unused, out);
    (void)api->memory_seq_rm(memory, unused, -1, -1);
    return r;
}
