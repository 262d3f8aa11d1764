/* SPDX-License-Identifier: Apache-2.0 */
/* What most benchmarks start from: a private daemon on the pinned core, a client, spaces, chains.
 */
#pragma once

#include "bench/bench.h"

#include <cistern/cistern.h>

#include "tests/lib/spawn.h"

struct cst_fixture {
    struct cst_spawned daemon;
    cistern_client *client;
};
#define CST_FIXTURE_NULL ((struct cst_fixture){ .daemon = { .pidfd = -1, .notify = -1 } })

/* Starts `cisternd --memory 1GiB`, pins it and this process, connects. */
int cst_fixture_init(struct cst_fixture *f);
void cst_fixture_deinit(struct cst_fixture *f);

/* Waits until the daemon has used no processor time for a while: background work is done. */
void cst_fixture_settle(const struct cst_fixture *f);

/* A space of opaque blocks. Prints and returns -EIO when libcistern refuses. */
int cst_fixture_space(cistern_space **out, cistern_client *client, uint32_t block_tokens,
                      uint64_t block_bytes);

/* A prompt of n blocks of a space with its keys; tokens from a seed. */
struct cst_prompt {
    uint32_t *tokens;
    uint8_t *keys;
    size_t n_tokens, n;
};
int cst_prompt_init(struct cst_prompt *p, cistern_space *space, size_t blocks, uint64_t seed);
void cst_prompt_deinit(struct cst_prompt *p);

/* Stores blocks first .. first + n - 1 of the prompt (n block_bytes buffers, the same content when
 * blocks is NULL); the blocks before must be stored. */
int cst_prompt_store(cistern_space *space, const struct cst_prompt *p, size_t first, size_t n,
                     const void *const *blocks);

/* 0 for CISTERN_OK, else -EIO after printing the sentence of the failure. */
int cst_ok(int32_t status, const char *what);
