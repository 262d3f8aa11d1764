/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the staging slab of a session and the map of its pages.
 *
 * Invariants
 *   1. A page is marked taken exactly while a slot owns it.
 *   2. The charge lives as long as the memory: from the order to make it until it is unmapped.
 *   3. While the job is under way the session is referenced and nothing else touches mem.
 *
 * When several workers of one uid attach, each gets half of what is left at most, so the eighth
 * still gets a slab, only a smaller one.
 */
#include "daemon/staging.h"

#include "base/err.h"
#include "base/macros.h"
#include "base/mem.h"
#include "daemon/session.h"

#include <assert.h>
#include <errno.h>

enum { PAGE = 4096, BLOCKS_MIN = 4 };
#define LISTS ((uint64_t)CST_KEYS_MAX * 32)

static void make(struct cst_job *job) {
    struct cst_staging *st = cst_container_of(job, struct cst_staging, job);

    st->error = st->ops->slab_make(&st->mem, st->size, CST_SLAB_STAGING);
}

static void made(struct cst_job *job) {
    struct cst_staging *st = cst_container_of(job, struct cst_staging, job);
    struct cst_session *session = cst_container_of(st, struct cst_session, staging);

    if (st->error) {
        st->state = CST_STAGING_NONE;
        st->taken = cst_free(st->taken);
        cst_charge_drop(&st->charge);
    } else {
        st->state = CST_STAGING_READY;
    }
    if (!session->ended)
        cst_session_unpark(session);
    (void)cst_session_unref(session);
}

/* How large the slab shall be: what was asked for, within what is left. */
static uint64_t choose_size(const struct cst_session *session, uint64_t bytes,
                            uint64_t block_bytes) {
    uint64_t page_bytes = cst_align_up(block_bytes, PAGE);
    uint64_t least = cst_align_up(BLOCKS_MIN * page_bytes, PAGE) + LISTS;
    uint64_t room = cst_quota_room(&session->payer, CST_RES_STAGING);
    uint64_t want = bytes ? bytes : session->server->config.staging;

    if (want > room / 2)
        want = room / 2;
    return cst_align_up(CST_MAX(want, least), PAGE);
}

int cst_staging_make(struct cst_session *session, uint64_t bytes, uint64_t block_bytes) {
    struct cst_staging *st = &session->staging;
    struct cst_jobs *jobs = cst_workers_jobs(session->server->workers);
    uint64_t size = choose_size(session, bytes, block_bytes);
    int r;

    assert(st->state == CST_STAGING_NONE);
    r = cst_charge_take(&st->charge, &session->payer, CST_RES_STAGING, size);
    if (r)
        return r;
    st->n_pages = (size - LISTS) / PAGE;
    st->taken = cst_calloc((st->n_pages + 63) / 64, sizeof(uint64_t));
    if (!st->taken) {
        cst_charge_drop(&st->charge);
        return cst_err(-ENOMEM);
    }
    st->state = CST_STAGING_MAKING;
    st->size = size;
    st->lists = size - LISTS;
    st->next = 0;
    st->error = 0;
    st->ops = session->server->env.mem;
    st->mem = CST_MEM_SLAB_NULL;
    st->job = (struct cst_job){ .run = make, .done = made };
    (void)cst_session_ref(session);
    jobs->submit(jobs, &st->job, CST_JOB_FETCH);
    return 0;
}

static bool is_taken(const struct cst_staging *st, size_t page) {
    return st->taken[page / 64] >> (page % 64) & 1;
}

static void mark(struct cst_staging *st, size_t first, size_t n, bool taken) {
    for (size_t page = first; page < first + n; page++) {
        uint64_t bit = UINT64_C(1) << (page % 64);

        assert(is_taken(st, page) != taken);
        st->taken[page / 64] ^= bit;
    }
}

/* First fit from `from`; whole words of taken pages are skipped at once. */
static bool find_run(const struct cst_staging *st, size_t from, size_t n, size_t *first) {
    size_t run = 0;

    for (size_t page = from; page < st->n_pages; page++) {
        if (page % 64 == 0 && st->taken[page / 64] == UINT64_MAX) {
            page += 63;
            run = 0;
            continue;
        }
        run = is_taken(st, page) ? 0 : run + 1;
        if (run == n) {
            *first = page + 1 - n;
            return true;
        }
    }
    return false;
}

bool cst_staging_take(struct cst_staging *st, uint64_t n, uint64_t *offset) {
    size_t pages = cst_align_up(n, PAGE) / PAGE, first;

    assert(st->state == CST_STAGING_READY);
    if (!find_run(st, st->next, pages, &first) && !find_run(st, 0, pages, &first))
        return false;
    mark(st, first, pages, true);
    st->next = first + pages;
    *offset = (uint64_t)first * PAGE;
    return true;
}

void cst_staging_give(struct cst_staging *st, uint64_t offset, uint64_t n) {
    mark(st, offset / PAGE, cst_align_up(n, PAGE) / PAGE, false);
    st->next = CST_MIN(st->next, (size_t)(offset / PAGE));
}

/* ---- the end ---- */

static void drop(struct cst_job *job) {
    struct cst_staging *st = cst_container_of(job, struct cst_staging, job);

    st->ops->slab_drop(&st->mem);
}

static void dropped(struct cst_job *job) {
    struct cst_staging *st = cst_container_of(job, struct cst_staging, job);
    struct cst_session *session = cst_container_of(st, struct cst_session, staging);

    st->state = CST_STAGING_NONE;
    st->taken = cst_free(st->taken);
    cst_charge_drop(&st->charge);
    st->drop_done(session);
}

void cst_staging_drop(struct cst_session *session, void (*done)(struct cst_session *session)) {
    struct cst_staging *st = &session->staging;
    struct cst_jobs *jobs = cst_workers_jobs(session->server->workers);

    assert(st->state == CST_STAGING_READY);
    st->drop_done = done;
    st->job = (struct cst_job){ .run = drop, .done = dropped };
    jobs->submit(jobs, &st->job, CST_JOB_BACKGROUND);
}
