/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the client object: its birth, its end, and the way into and out of every call.
 *
 * Invariants: 1. cst_enter() answers CISTERN_OK only with the lock held, the connection up and the
 * space open on it, and never for a space that its caller closed: the daemon may have given its
 * handle to another one; 2. nothing of a client is freed before its library thread has ended; 3. in
 * a forked child nothing but memory is touched: no lock that a lost thread may hold, no socket.
 */
#include "client/client.h"

#include "base/mem.h"
#include "client/client_fork.h"

#include <string.h>

enum { TIMEOUT_DEFAULT_MS = 10000, ABI_VERSION = 0 };

CST_EXPORT const char *cistern_version(void) {
    return CST_VERSION;
}

CST_EXPORT uint32_t cistern_abi_version(void) {
    return ABI_VERSION;
}

int32_t cst_options_read(void *known, size_t n, const void *options, const char *what) {
    uint32_t size;

    memset(known, 0, n);
    if (!options)
        return CISTERN_OK;
    memcpy(&size, options, sizeof(size));
    if (size < sizeof(size))
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "%s->size is not set", what);
    memcpy(known, options, CST_MIN(n, (size_t)size));
    return CISTERN_OK;
}

int32_t cst_check_fork(const cistern_client *c) {
    return CST_UNLIKELY(c->forked) ? cst_client_fail_status(CISTERN_E_FORKED) : CISTERN_OK;
}

/* ---- entering and leaving ---- */

static bool is_ready(const cistern_client *c, const cistern_space *space, enum cst_need need) {
    return c->conn.up && (!space || (space->open && space->generation == c->conn.generation)) &&
           (need == CST_NEED_NOTHING || c->map.staging);
}

/* `slow` and lock held. */
static int32_t get_ready(cistern_client *c, cistern_space *space, enum cst_need need) {
    int32_t status;

    if (space && !space->open) /* a submission that the close overtook */
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the space has been closed");
    status = c->conn.up ? CISTERN_OK : cst_conn_connect(c);
    if (!status && space && space->generation != c->conn.generation)
        status = cst_client_space_attach(space);
    if (!status && need != CST_NEED_NOTHING)
        status = cst_staging_fetch(c, space ? space->descriptor->block_bytes : 0);
    if (!status && !is_ready(c, space, need)) /* lost since the last answer */
        status = cst_client_fail(CISTERN_E_DISCONNECTED, "%s", c->conn.lost);
    return status;
}

static int32_t enter_slowly(cistern_client *c, cistern_space *space, enum cst_need need) {
    int32_t status;

    (void)pthread_mutex_lock(&c->slow);
    (void)pthread_mutex_lock(&c->lock);
    status = get_ready(c, space, need);
    if (status)
        (void)pthread_mutex_unlock(&c->lock);
    if (status || need != CST_NEED_LISTS)
        (void)pthread_mutex_unlock(&c->slow);
    return status;
}

int32_t cst_enter(cistern_client *c, cistern_space *space, enum cst_need need) {
    if (cst_check_fork(c))
        return CISTERN_E_FORKED;
    if (need != CST_NEED_LISTS) {
        (void)pthread_mutex_lock(&c->lock);
        if (CST_LIKELY(is_ready(c, space, need)))
            return CISTERN_OK;
        (void)pthread_mutex_unlock(&c->lock);
    }
    return enter_slowly(c, space, need);
}

void cst_leave(cistern_client *c, enum cst_need need) {
    if (!cst_list_is_empty(&c->map.dropped))
        cst_map_flush(c);
    (void)pthread_mutex_unlock(&c->lock);
    if (need == CST_NEED_LISTS)
        (void)pthread_mutex_unlock(&c->slow);
}

/* ---- open and close ---- */

static struct cst_namespace *name_free(struct cst_namespace *name) {
    while (name) {
        struct cst_namespace *next = name->next;

        (void)cst_free(name);
        name = next;
    }
    return NULL;
}

static cistern_client *client_free(cistern_client *c) {
    cst_client_space_free_all(c);
    cst_map_deinit(&c->map);
    cst_pool_deinit(&c->leases);
    cst_pool_deinit(&c->slots);
    cst_conn_deinit(&c->conn);
    cst_dial_deinit(&c->dial);
    c->namespaces = name_free(c->namespaces);
    if (!c->forked) { /* else a thread of the parent may have held them */
        (void)pthread_mutex_destroy(&c->slow);
        (void)pthread_mutex_destroy(&c->lock);
        (void)pthread_cond_destroy(&c->conn.closed);
    }
    return cst_free(c);
}
CST_DEFINE_FREEP(cistern_client, client_free)

static int32_t client_new(cistern_client **out, const cistern_client_options *options) {
    cst_auto(client_freep) cistern_client *c = cst_calloc(1, sizeof(*c));
    int32_t status;

    if (!c)
        return cst_client_fail_status(CISTERN_E_NO_MEMORY);
    c->slow = c->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    c->lazy = options->flags & CISTERN_CLIENT_LAZY;
    c->timeout_ms = options->timeout_ms;
    c->clock = &cst_clock_monotonic;
    c->next_lease = 1;
    cst_list_init(&c->link);
    cst_list_init(&c->spaces);
    cst_map_init(&c->map);
    cst_pool_init(&c->leases, sizeof(struct cistern_lease));
    cst_pool_init(&c->slots, sizeof(struct cistern_slot));
    if (cst_conn_init(&c->conn))
        return cst_client_fail_status(CISTERN_E_NO_MEMORY);
    status = cst_dial_init(&c->dial, options);
    if (!status)
        *out = cst_steal(&c);
    return status;
}

static int32_t read_options(cistern_client_options *known, const cistern_client_options *options) {
    int32_t status = cst_options_read(known, sizeof(*known), options, "options");

    if (status)
        return status;
    if (!options || options->size < offsetof(cistern_client_options, timeout_ms))
        known->server_uid = -1;
    if (!known->timeout_ms)
        known->timeout_ms = TIMEOUT_DEFAULT_MS;
    if (known->flags & ~(CISTERN_CLIENT_ASYNC | CISTERN_CLIENT_LAZY))
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "unknown client flags %#x",
                               (unsigned)known->flags);
    return CISTERN_OK;
}

CST_EXPORT int32_t cistern_client_open(cistern_client **out,
                                       const cistern_client_options *options) {
    cistern_client_options known;
    cistern_client *c = NULL;
    int32_t status = read_options(&known, options);

    if (!status && !out)
        status = cst_client_fail(CISTERN_E_BAD_ARGUMENT, "out is NULL");
    if (!status)
        status = client_new(&c, &known);
    if (status)
        return status;
    status = cst_fork_watch(c);
    if (!status && known.flags & CISTERN_CLIENT_ASYNC)
        status = cst_async_start(c);
    if (!status)
        status = cistern_client_ping(c);
    if (status && !(c->lazy && cst_is_miss(status))) {
        cistern_client_close(c);
        return status;
    }
    *out = c;
    return CISTERN_OK;
}

CST_EXPORT void cistern_client_close(cistern_client *client) {
    if (!client)
        return;
    cst_async_stop(client);
    cst_fork_unwatch(client);
    (void)client_free(client);
}

CST_EXPORT int32_t cistern_client_ping(cistern_client *client) {
    Cistern__V1__Ping message = CISTERN__V1__PING__INIT;
    struct cst_call call = CST_CALL_INIT(NULL);

    if (!client)
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the client is NULL");
    return cst_client_request(client, CST_MSG_PING, &message.base, &call);
}

/* ---- who we are to the daemon ---- */

int32_t cst_client_welcome(cistern_client *c, const struct cst_hello *hello) {
    size_t n = strlen(hello->namespace_name) + 1;
    struct cst_namespace *name;

    if (c->namespaces && !strcmp(c->namespaces->name, hello->namespace_name))
        return CISTERN_OK;
    name = cst_malloc(sizeof(*name) + n);
    if (!name)
        return cst_client_fail_status(CISTERN_E_NO_MEMORY);
    name->next = c->namespaces;
    memcpy(name->name, hello->namespace_name, n);
    c->namespaces = name;
    return CISTERN_OK;
}

CST_EXPORT int32_t cistern_client_info(cistern_client *client, uint64_t *epoch, const char **name) {
    int32_t status;

    if (!client)
        return cst_client_fail(CISTERN_E_BAD_HANDLE, "the client is NULL");
    status = cst_enter(client, NULL, CST_NEED_NOTHING);
    if (status)
        return status;
    if (epoch)
        *epoch = client->conn.hello.epoch;
    if (name)
        *name = client->namespaces->name;
    cst_leave(client, CST_NEED_NOTHING);
    return CISTERN_OK;
}
