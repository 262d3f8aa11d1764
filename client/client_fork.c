/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the process's list of open clients.
 *
 * Invariants: 1. the list changes under registry_lock only, which comes before every client's
 * lock; 2. fork() happens with all these locks held, so the child finds each socket's number
 * either valid or -1, never half-closed; 3. in the child nobody uses a forked client's socket.
 */
#include "client/client_fork.h"

#include "client/client.h"

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct cst_list clients = { &clients, &clients };
static int registered;

static cistern_client *client_at(struct cst_list *link) {
    return cst_list_entry(link, cistern_client, link);
}

static void before_fork(void) {
    (void)pthread_mutex_lock(&registry_lock);
    for (struct cst_list *it = clients.next; it != &clients; it = it->next)
        (void)pthread_mutex_lock(&client_at(it)->lock);
}

static void unlock_all(void) {
    for (struct cst_list *it = clients.next; it != &clients; it = it->next)
        (void)pthread_mutex_unlock(&client_at(it)->lock);
    (void)pthread_mutex_unlock(&registry_lock);
}

static void in_child(void) {
    for (struct cst_list *it = clients.next; it != &clients; it = it->next) {
        cistern_client *c = client_at(it);

        c->forked = true;
        c->conn.fd = cst_close(c->conn.fd);
        c->conn.dial_fd = cst_close(c->conn.dial_fd);
    }
    unlock_all();
}

static void register_handlers(void) {
    registered = !pthread_atfork(before_fork, unlock_all, in_child);
}

int32_t cst_fork_watch(cistern_client *c) {
    (void)pthread_once(&once, register_handlers);
    if (!registered)
        return cst_client_fail_status(CISTERN_E_NO_MEMORY);
    (void)pthread_mutex_lock(&registry_lock);
    cst_list_append(&clients, &c->link);
    (void)pthread_mutex_unlock(&registry_lock);
    return CISTERN_OK;
}

void cst_fork_unwatch(cistern_client *c) {
    (void)pthread_mutex_lock(&registry_lock);
    cst_list_unlink(&c->link);
    (void)pthread_mutex_unlock(&registry_lock);
}
