/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns one share per passed slab and one hold per (slab, session).
 *
 * Invariants
 *   1. A hold exists from the moment a descriptor was sent until the client says SlabDropped or its
 *      session ends; it counts as one holder of the slab (cst_slab_hold).
 *   2. A share exists while it has holds. `retired` holds owe an answer since owed_ns.
 *   3. Only connections that owe answers are ended, only while their user's held bytes exceed the
 *      quota, and never before retire_timeout.
 */
#include "daemon/share.h"

#include "base/err.h"
#include "base/mem.h"
#include "daemon/call.h"

#include <errno.h>

struct share {
    struct cst_hnode node; /* server->shares, by slab id */
    struct cst_slab *slab;
    struct cst_list holds;
    bool retired;
};

struct hold {
    struct cst_list in_share, in_session;
    struct share *share;
    struct cst_session *session;
    struct cst_charge charge;
    uint64_t owed_ns; /* when SlabRetire was pushed */
};

/* ---- numbers ---- */

enum { ROUNDS = 4 };

static uint32_t round_of(const struct cst_server *server, unsigned round, uint32_t half) {
    return cst_hash_u64(server->seed, (uint64_t)(round + 1) << 16 | half) & 0xffff;
}

/* A Feistel network: any round function gives a permutation. */
static uint32_t scatter(const struct cst_server *server, uint32_t n) {
    for (unsigned i = 0; i < ROUNDS; i++)
        n = n << 16 | ((n >> 16) ^ round_of(server, i, n & 0xffff));
    return n;
}

static uint32_t gather(const struct cst_server *server, uint32_t n) {
    for (unsigned i = ROUNDS; i--;)
        n = ((n & 0xffff) ^ round_of(server, i, n >> 16)) << 16 | n >> 16;
    return n;
}

/* Whatever would get 0 gets what 0 would get. */
uint32_t cst_share_number(struct cst_server *server, uint32_t slab_id) {
    struct cst_slab_number *last = &server->last_number;

    if (last->slab_id != slab_id) {
        uint32_t number = scatter(server, slab_id);

        *last = (struct cst_slab_number){ .slab_id = slab_id,
                                          .number = number ? number : scatter(server, 0) };
    }
    return last->number;
}

uint32_t cst_share_slab_id(const struct cst_server *server, uint32_t number) {
    uint32_t id = gather(server, number);

    return id ? id : gather(server, 0);
}

/* ---- shares and holds ---- */

static bool has_id(const struct cst_hnode *node, const void *key) {
    return cst_container_of((void *)(uintptr_t)node, struct share, node)->slab->id ==
           *(const uint32_t *)key;
}

static struct share *find_share(struct cst_server *server, uint32_t id) {
    struct cst_hnode *node =
        cst_hashmap_find(&server->shares, cst_hash_u64(server->seed, id), has_id, &id);

    return node ? cst_container_of(node, struct share, node) : NULL;
}

/* Through the slab, which few clients hold: one client may hold thousands of slabs. */
static struct hold *find_hold(const struct cst_session *s, uint32_t slab_id) {
    const struct share *share = find_share(s->server, slab_id);
    const struct cst_list *it;

    for (it = share ? share->holds.next : NULL; it && it != &share->holds; it = it->next) {
        struct hold *hold = cst_list_entry(it, struct hold, in_share);

        if (hold->session == s)
            return hold;
    }
    return NULL;
}

static int get_share(struct share **out, struct cst_server *server, struct cst_slab *slab) {
    struct share *share = find_share(server, slab->id);
    int r;

    if (!share) {
        share = cst_calloc(1, sizeof(*share));
        if (!share)
            return cst_err(-ENOMEM);
        share->slab = slab;
        cst_list_init(&share->holds);
        r = cst_hashmap_insert(&server->shares, &share->node, cst_hash_u64(server->seed, slab->id));
        if (r) {
            (void)cst_free(share);
            return r;
        }
    }
    *out = share;
    return 0;
}

static void free_if_empty(struct cst_server *server, struct share *share) {
    if (!cst_list_is_empty(&share->holds))
        return;
    cst_hashmap_remove(&server->shares, &share->node);
    (void)cst_free(share);
}

int cst_share_hold(struct cst_session *s, struct cst_slab *slab) {
    struct share *share = NULL;
    struct hold *hold;
    int r;

    if (find_hold(s, slab->id))
        return 0;
    hold = cst_calloc(1, sizeof(*hold));
    if (!hold)
        return cst_err(-ENOMEM);
    r = cst_charge_take(&hold->charge, &s->payer, CST_RES_HOLDS, 1);
    if (!r)
        r = get_share(&share, s->server, slab);
    if (r) {
        cst_charge_drop(&hold->charge);
        (void)cst_free(hold);
        return r;
    }
    hold->share = share;
    hold->session = s;
    cst_list_append(&share->holds, &hold->in_share);
    cst_list_append(&s->holds, &hold->in_session);
    cst_slab_hold(slab);
    return 0;
}

static void free_hold(struct hold *hold) {
    struct cst_server *server = hold->session->server;
    struct share *share = hold->share;
    struct cst_slab *slab = share->slab;

    cst_list_unlink(&hold->in_share);
    cst_list_unlink(&hold->in_session);
    cst_charge_drop(&hold->charge);
    (void)cst_free(hold);
    free_if_empty(server, share);
    cst_slab_unhold(slab);
}

void cst_share_drop(struct cst_session *s, uint32_t slab_id) {
    struct hold *hold = find_hold(s, slab_id);

    if (hold)
        free_hold(hold);
}

void cst_share_drop_all(struct cst_session *s) {
    struct cst_list *first;

    while ((first = cst_list_first(&s->holds)))
        free_hold(cst_list_entry(first, struct hold, in_session));
}

void cst_share_retire(struct cst_server *server, struct cst_slab *slab) {
    Cistern__V1__SlabRetire push = CISTERN__V1__SLAB_RETIRE__INIT;
    struct share *share = find_share(server, slab->id);
    uint64_t now = cst_now_ns(server->env.clock);
    struct cst_list *it, *tmp;

    if (!share || share->retired)
        return;
    share->retired = true;
    push.slab = cst_share_number(server, slab->id);
    cst_list_for_each_safe (it, tmp, &share->holds) {
        struct hold *hold = cst_list_entry(it, struct hold, in_share);

        hold->owed_ns = now;
        cst_push(hold->session, CST_MSG_SLAB_RETIRE, &push.base);
    }
    if (!cst_timer_is_set(&server->retire_timer))
        cst_timer_set(&server->loop, &server->retire_timer, server->config.retire_timeout);
}

/* ---- users who keep too much ---- */

struct survey {
    const struct cst_tenant *user; /* NULL: everybody */
    uint64_t bytes;
    uint64_t due_ns; /* holds owed since then or earlier count */
    struct hold *oldest;
    size_t retired;
};

static void survey_share(struct cst_hnode *node, void *arg) {
    struct share *share = cst_container_of(node, struct share, node);
    struct survey *survey = arg;
    struct cst_list *it, *tmp;
    bool counted = false;

    if (!share->retired)
        return;
    survey->retired++;
    cst_list_for_each_safe (it, tmp, &share->holds) {
        struct hold *hold = cst_list_entry(it, struct hold, in_share);

        if ((survey->user && hold->session->user != survey->user) || hold->session->doomed)
            continue;
        survey->bytes += counted ? 0 : share->slab->mem.size;
        counted = true;
        if (hold->owed_ns <= survey->due_ns &&
            (!survey->oldest || hold->owed_ns < survey->oldest->owed_ns))
            survey->oldest = hold;
    }
}

static struct survey survey_user(struct cst_server *server, const struct cst_tenant *user,
                                 uint64_t due_ns) {
    struct survey survey = { .user = user, .due_ns = due_ns };

    cst_hashmap_for_each(&server->shares, survey_share, &survey);
    return survey;
}

uint64_t cst_share_held_bytes(struct cst_server *server, const struct cst_tenant *user) {
    return survey_user(server, user, 0).bytes;
}

static void end_debtors(struct cst_server *server, const struct cst_tenant *user, uint64_t due_ns) {
    for (;;) {
        struct survey survey = survey_user(server, user, due_ns);

        if (survey.bytes <= server->config.held_per_uid || !survey.oldest)
            return;
        cst_session_doom(survey.oldest->session, "it does not give back retired memory");
    }
}

void cst_share_check(struct cst_timer *timer) {
    struct cst_server *server = cst_container_of(timer, struct cst_server, retire_timer);
    uint64_t now = cst_now_ns(server->env.clock), wait = server->config.retire_timeout;
    uint64_t due = now > wait ? now - wait : 0;
    struct cst_list *it, *tmp;

    cst_list_for_each_safe (it, tmp, &server->users)
        end_debtors(server, cst_list_entry(it, struct cst_tenant, link), due);
    if (survey_user(server, NULL, 0).retired)
        cst_timer_set(&server->loop, timer, wait / 4 + 1);
}
