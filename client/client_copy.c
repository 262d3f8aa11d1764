/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns nothing: the copying forms, get_into and put_from, made of the calls that lease and reserve.
 *
 * Invariants
 *  1. A get holds at most ROUND_KEYS leases and about ROUND_BYTES; each round gives back the last
 *     one's leases in its own packet.
 *  2. A put keeps no slot when it returns. It fills what it was given, publishes, and asks again
 *     for the rest: a full staging slab and another writer's block only slow it down, for a bounded
 *     number of passes without progress. A block is asked for again only while its status says that
 *     this may help (BUSY, KEY_BUSY).
 *  3. In a token space a block is published only after all before it are stored, so that another
 *     writer's failure never leaves a hole under it. In a flat space blocks don't wait for another.
 */
#include "base/mem.h"
#include "client/client_slot.h"

#include <string.h>
#include <time.h>

enum {
    ROUND_KEYS = 64,
    ROUND_BYTES = 64 << 20,
    IDLE_PASSES = 20,   /* passes of a put in which nothing moved, before it gives up */
    WAIT_MIN_MS = 1,    /* between them */
    WAIT_MAX_MS = 1000, /* whatever the daemon's hint */
};

/* Blocks of one round: at least one. */
static size_t round_keys(const cistern_space *space, size_t n) {
    uint64_t fit = ROUND_BYTES / space->descriptor->block_bytes;

    return (size_t)CST_MIN(CST_MAX(fit, (uint64_t)1), (uint64_t)CST_MIN(n, (size_t)ROUND_KEYS));
}

static int32_t check(const cistern_space *space, bool pointers_ok) {
    if (!space)
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the space is NULL");
    if (!pointers_ok)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "an argument is NULL");
    return cst_check_fork(space->client);
}

/* ---- get ---- */

static void copy_leases(cistern_lease *const *leases, size_t n, void *const *blocks,
                        const size_t *sizes) {
    for (size_t i = 0; i < n; i++)
        if (leases[i])
            memcpy(blocks[i], leases[i]->data, CST_MIN(sizes[i], leases[i]->size));
}

CST_EXPORT int32_t cistern_get_into(cistern_space *space, const uint8_t *keys, size_t n,
                                    void *const *blocks, const size_t *sizes, int32_t *statuses) {
    cistern_lease *leases[2][ROUND_KEYS];
    cistern_acquire_options options = { .size = sizeof(options) };
    int32_t status = check(space, !n || (keys && blocks && sizes && statuses));
    size_t done = 0, take = 0;
    int turn = 0;

    for (; !status && done < n; done += take, turn = !turn) {
        options.release = leases[!turn];
        options.n_release = take;
        take = round_keys(space, n - done);
        status = cistern_acquire(space, keys + done * CISTERN_KEY_SIZE, take, &options,
                                 leases[turn], statuses + done);
        if (status)
            return status;
        copy_leases(leases[turn], take, blocks + done, sizes + done);
    }
    if (!status)
        cistern_release(space->client, leases[!turn], take);
    return status;
}

/* ---- put ---- */

struct put {
    cistern_space *space;
    const uint8_t *parent, *keys;
    const uint32_t *tokens;
    size_t n_tokens, n;
    const void *const *blocks;
    int32_t *statuses;
};

static bool is_open(int32_t status) {
    return status == CISTERN_E_BUSY || status == CISTERN_E_KEY_BUSY;
}

static const uint8_t *parent_of(const struct put *put, size_t i) {
    return i ? put->keys + (i - 1) * CISTERN_KEY_SIZE : put->parent;
}

/* Asks for blocks at .. at + n - 1. */
static int32_t reserve(const struct put *put, size_t at, size_t n, cistern_slot **slots,
                       uint32_t *busy_ms) {
    size_t block = put->space->descriptor->block_tokens;
    bool flat = cst_client_space_is_flat(put->space);

    return cst_reserve(put->space, parent_of(put, at), put->keys + at * CISTERN_KEY_SIZE,
                       flat ? NULL : put->tokens + at * block,
                       flat ? 0 : CST_MIN(n * block, put->n_tokens - at * block), n, slots,
                       put->statuses + at, busy_ms);
}

/* Fills and publishes the first n slots of a round from block `at` on; NULL ones are skipped. The
 * statuses become those of the commit. */
static int32_t publish(const struct put *put, size_t at, size_t n, cistern_slot *const *slots) {
    cistern_slot *filled[ROUND_KEYS];
    int32_t statuses[ROUND_KEYS];
    size_t used = 0;
    int32_t status;

    for (size_t i = 0; i < n; i++) {
        if (!slots[i])
            continue;
        memcpy(slots[i]->data, put->blocks[at + i], slots[i]->size);
        filled[used++] = slots[i];
    }
    if (!used)
        return CISTERN_OK;
    status = cistern_commit(put->space, filled, used, NULL, statuses);
    for (size_t i = 0, k = 0; !status && i < n; i++)
        if (slots[i])
            put->statuses[at + i] = statuses[k++];
    return status;
}

static bool is_stored(int32_t status) {
    return status == CISTERN_OK || status == CISTERN_E_PRESENT || status == CISTERN_E_PENDING;
}

/* Blocks from `at` on that are or can be stored. */
static size_t stored_run(const struct put *put, size_t at, size_t n) {
    size_t i = 0;

    while (i < n && is_stored(put->statuses[at + i]))
        i++;
    return i;
}

/* Blocks from `at` on that are asked for together: open, and no more than a round. */
static size_t open_run(const struct put *put, size_t at) {
    size_t max = round_keys(put->space, put->n - at), n = 0;

    while (n < max && is_open(put->statuses[at + n]))
        n++;
    return n;
}

static void fill(int32_t *statuses, size_t n, int32_t status) {
    for (size_t i = 0; i < n; i++)
        statuses[i] = status;
}

static int32_t put_round(const struct put *put, size_t at, size_t n, uint32_t *busy_ms) {
    cistern_slot *slots[ROUND_KEYS];
    size_t use = n;
    uint32_t hint;
    int32_t status = reserve(put, at, n, slots, &hint);

    if (status)
        return status;
    *busy_ms = CST_MAX(*busy_ms, hint);
    if (!cst_client_space_is_flat(put->space)) {
        use = stored_run(put, at, n);
        cistern_abort(put->space, slots + use, n - use);
        if (use < n)
            fill(put->statuses + at + use + 1, n - use - 1, CISTERN_E_BUSY);
    }
    return publish(put, at, use, slots);
}

/* What follows a block that is not stored, in a token space. True: the pass ends here. */
static bool blocks_rest(const struct put *put, size_t at, size_t n) {
    size_t stored = stored_run(put, at, n);

    if (cst_client_space_is_flat(put->space) || stored == n)
        return false;
    at += stored;
    if (!is_open(put->statuses[at]))
        fill(put->statuses + at + 1, put->n - at - 1, CISTERN_E_PARENT_MISSING);
    return true;
}

/* Asks once for every open block. *moved: a block is no longer open. */
static int32_t put_pass(const struct put *put, bool *moved, uint32_t *busy_ms) {
    for (size_t at = 0, n; at < put->n; at += CST_MAX(n, (size_t)1)) {
        int32_t status;

        n = open_run(put, at);
        if (!n)
            continue;
        status = put_round(put, at, n, busy_ms);
        if (status)
            return status;
        for (size_t i = at; i < at + n; i++)
            *moved |= !is_open(put->statuses[i]);
        if (blocks_rest(put, at, n))
            break;
    }
    return CISTERN_OK;
}

static void wait_ms(uint32_t ms) {
    struct timespec left = { .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L };

    while (nanosleep(&left, &left) < 0)
        continue;
}

static bool any_open(const struct put *put) {
    for (size_t i = 0; i < put->n; i++)
        if (is_open(put->statuses[i]))
            return true;
    return false;
}

CST_EXPORT int32_t cistern_put_from(cistern_space *space, const uint8_t *parent,
                                    const uint8_t *keys, const uint32_t *tokens, size_t n_tokens,
                                    size_t n, const void *const *blocks, int32_t *statuses) {
    struct put put = { .space = space,
                       .parent = parent,
                       .keys = keys,
                       .tokens = tokens,
                       .n_tokens = n_tokens,
                       .n = n,
                       .blocks = blocks,
                       .statuses = statuses };
    int32_t status = check(space, !n || (keys && blocks && statuses));

    if (!status && n)
        status = cst_reserve_check(space, tokens, n_tokens, n);
    if (status)
        return status;
    fill(statuses, n, CISTERN_E_BUSY);
    for (unsigned idle = 0; any_open(&put) && idle < IDLE_PASSES;) {
        uint32_t busy_ms = WAIT_MIN_MS;
        bool moved = false;

        status = put_pass(&put, &moved, &busy_ms);
        if (status)
            return status;
        idle = moved ? 0 : idle + 1;
        if (!moved && idle < IDLE_PASSES)
            wait_ms(CST_MIN(busy_ms, (uint32_t)WAIT_MAX_MS));
    }
    return CISTERN_OK;
}
