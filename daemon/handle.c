/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the handles of a session and, through each, one reference to a space.
 * Invariants: 1. handles[id - 1] is NULL or the handle with that id; 2. a handle is freed exactly
 * when it is closed and has no users.
 */
#include "daemon/handle.h"

#include "base/err.h"
#include "base/mem.h"
#include "proto/key.h"

#include <assert.h>
#include <errno.h>

enum { GROW = 8 };

static int find_place(struct cst_session *session, size_t *out) {
    struct cst_handle **grown;

    for (size_t i = 0; i < session->n_handles; i++) {
        if (!session->handles[i]) {
            *out = i;
            return 0;
        }
    }
    grown =
        cst_realloc(session->handles, (session->n_handles + GROW) * sizeof(struct cst_handle *));
    if (!grown)
        return cst_err(-ENOMEM);
    session->handles = grown;
    for (size_t i = 0; i < GROW; i++)
        grown[session->n_handles + i] = NULL;
    *out = session->n_handles;
    session->n_handles += GROW;
    return 0;
}

int cst_handle_new_consume(struct cst_handle **out, struct cst_session *session,
                           struct cst_space *space, const void *salt, uint32_t salt_len) {
    cst_auto(cst_freep) struct cst_handle *h = cst_calloc(1, sizeof(*h));
    size_t place = 0;
    int r;

    if (!h)
        return cst_err(-ENOMEM);
    r = find_place(session, &place);
    if (!r)
        r = cst_charge_take(&h->charge, &session->payer, CST_RES_SPACES, 1);
    if (r)
        return r;
    h->session = session;
    h->id = (uint32_t)place + 1;
    h->space = space;
    h->writable = true;
    cst_key_root(cst_space_fingerprint(space), salt, salt_len, h->root);
    session->handles[place] = h;
    *out = cst_steal(&h);
    return 0;
}

struct cst_handle *cst_handle_find(struct cst_session *session, uint32_t id) {
    struct cst_handle *h = id && id <= session->n_handles ? session->handles[id - 1] : NULL;

    return h && !h->closed ? h : NULL;
}

static void free_if_unused(struct cst_handle *h) {
    if (!h->closed || h->users)
        return;
    h->session->handles[h->id - 1] = NULL;
    cst_charge_drop(&h->charge);
    (void)cst_space_unref(h->space);
    (void)cst_free(h);
}

void cst_handle_close(struct cst_handle *handle) {
    handle->closed = true;
    free_if_unused(handle);
}

void cst_handle_use(struct cst_handle *handle) {
    handle->users++;
}

void cst_handle_unuse(struct cst_handle *handle) {
    assert(handle->users);
    handle->users--;
    free_if_unused(handle);
}

bool cst_handle_reads(const struct cst_session *session, const struct cst_space *space) {
    for (size_t i = 0; i < session->n_handles; i++)
        if (session->handles[i] && session->handles[i]->space == space &&
            !session->handles[i]->view)
            return true;
    return false;
}

void cst_handle_close_all(struct cst_session *session) {
    for (size_t i = 0; i < session->n_handles; i++)
        if (session->handles[i])
            cst_handle_close(session->handles[i]);
}
