/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the loop, the workers, the store, the listeners, the accounts and the stop.
 *
 * Invariants
 *   1. Everything but the jobs of the workers runs on the loop thread, so nothing here has a lock.
 *   2. The store's care runs every 100 ms while something happens and ever more rarely when
 *      nothing does: an idle daemon sleeps.
 *   3. A stop ends in this order: listeners, a Goodbye to each client, commits under way, sessions
 *      (leases, slots, slab holds), jobs, store. It never waits for a client.
 */
#include "daemon/server.h"

#include "base/err.h"
#include "base/log.h"
#include "base/mem.h"
#include "codec/codec.h"
#include "daemon/call.h"
#include "daemon/event.h"
#include "daemon/lease.h"
#include "daemon/session.h"
#include "daemon/share.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- parts ---- */

static int make_scratch(struct cst_scratch *scratch) {
    const size_t sizes[] = { CST_PACKET_MAX,     CST_PACKET_MAX,
                             CST_PACKET_MAX,     (size_t)CST_KEYS_MAX * 32,
                             CST_TOKENS_MAX * 4, CST_KEYS_MAX,
                             CST_UNPACK_BUDGET };
    uint8_t *parts[CST_COUNT(sizes)];
    size_t total = 0;

    for (size_t i = 0; i < CST_COUNT(sizes); i++)
        total += sizes[i];
    scratch->memory = cst_malloc(total);
    if (!scratch->memory)
        return cst_err(-ENOMEM);
    parts[0] = scratch->memory;
    for (size_t i = 1; i < CST_COUNT(sizes); i++)
        parts[i] = parts[i - 1] + sizes[i - 1];
    scratch->in = parts[0];
    scratch->out = parts[1];
    scratch->records = parts[2];
    scratch->keys = parts[3];
    scratch->tokens = (void *)parts[4];
    scratch->tiers = parts[5];
    cst_arena_init(&scratch->arena, parts[6], sizes[6]);
    return 0;
}

static void slab_retired(void *arg, struct cst_slab *slab) {
    cst_share_retire(arg, slab);
}

static void something_happened(void *arg, struct cst_space *space, enum cst_event what,
                               const uint8_t key[32], enum cst_tier tier) {
    cst_event_notify(arg, space, what, key, tier);
}

static void slab_failed(void *arg, int status) {
    struct cst_server *server = arg;

    if (status == server->slab_error) /* said once */
        return;
    server->slab_error = status;
    cst_log(CST_LOG_WARNING, "can't make a slab, so clients are told BUSY: %s%s",
            strerrordesc_np(-status),
            status == -EMFILE ? "; raise the limit (LimitNOFILE of the unit, ulimit -n)" : "");
}

static int make_store(struct cst_server *server) {
    static const char *const policies[] = { "cost", "s3fifo", "arc", "lru" };
    const struct cst_config *c = &server->config;
    const struct cst_store_options options = {
        .memory = c->memory - c->staging_total - (c->directory[0] ? c->disk_buffers : 0),
        .index = c->index,
        .slab_bytes = c->slab,
        .max_age_ns = c->max_age,
        .pin_bytes = c->pin,
        .spaces_max = (uint32_t)c->spaces,
        .side_bytes = CST_MAX(c->side_data, UINT64_C(1)),
        .learn_wait_ns = c->learn_wait,
        .workers = (uint32_t)c->workers,
        .policy = policies[c->policy],
    };
    const struct cst_store_env env = {
        .clock = server->env.clock,
        .random = server->env.random,
        .jobs = cst_workers_jobs(server->workers),
        .mem = server->env.mem,
        .slab_retire = slab_retired,
        .slab_failed = slab_failed,
        .event = something_happened,
        .arg = server,
    };

    return cst_fold(cst_store_new(&server->store, &options, &env));
}

static void set_preset(struct cst_server *server, enum cst_class klass, const char *text) {
    struct cst_encode_params params;

    cst_store_set_preset(server->store, klass, cst_preset_parse(&params, text) ? NULL : &params);
}

static void set_presets(struct cst_server *server) {
    set_preset(server, CST_CLASS_NEAR_LOSSLESS, server->config.preset_near_lossless);
    set_preset(server, CST_CLASS_SMALL_LOSS, server->config.preset_small_loss);
    set_preset(server, CST_CLASS_COLD, server->config.preset_cold);
}

static void set_limits(struct cst_server *server) {
    const struct cst_config *c = &server->config;
    const uint64_t none = UINT64_MAX;
    /* per connection, uid, namespace, in all */
    const uint64_t max[CST_RESOURCES][CST_LEVELS] = {
        [CST_RES_CONNECTIONS] = { 1, c->connections_per_uid, none, c->connections },
        [CST_RES_SPACES] = { CST_SPACES_OPEN_MAX, 4 * CST_SPACES_OPEN_MAX, none,
                             16 * CST_SPACES_OPEN_MAX },
        [CST_RES_LEASES] = { c->leases, c->leases_per_uid, none, c->leases_total },
        [CST_RES_SLOTS] = { 8192, 8192, none, 16384 },
        [CST_RES_STAGING] = { c->staging_per_uid, c->staging_per_uid, none, c->staging_total },
        [CST_RES_REQUESTS] = { c->requests, c->requests_per_uid, none, c->requests_total },
        [CST_RES_OUTPUT] = { CST_OUTPUT_MAX, CST_OUTPUT_TOTAL / 4, none, CST_OUTPUT_TOTAL },
        [CST_RES_HOLDS] = { 4096, 8192, none, 16384 },
        [CST_RES_SUBSCRIPTIONS] = { 16, 256, none, 1024 },
    };

    memcpy(server->limits.max, max, sizeof(max));
    _Static_assert(sizeof(max) == sizeof(server->limits.max), "one row a resource");
}

/* ---- periodic care ---- */

static void tick(struct cst_timer *timer) {
    struct cst_server *server = cst_container_of(timer, struct cst_server, tick);
    bool jobs = cst_store_jobs(server->store), more = cst_store_tick(server->store);
    bool idle = server->requests == server->tick_requests && !jobs && !more;

    server->tick_requests = server->requests;
    server->tick_ns = idle ? CST_MIN(server->tick_ns * 2, CST_TICK_IDLE_MS * CST_NS_PER_MS)
                           : CST_TICK_MS * CST_NS_PER_MS;
    cst_timer_set(&server->loop, timer, server->tick_ns);
}

void cst_server_tick_now(struct cst_server *server) {
    server->tick_ns = CST_TICK_MS * CST_NS_PER_MS;
    cst_timer_set(&server->loop, &server->tick, server->tick_ns);
}

/* ---- accounts ---- */

static int new_tenant(struct cst_tenant **out, struct cst_list *list) {
    struct cst_tenant *tenant = cst_calloc(1, sizeof(*tenant));

    if (!tenant)
        return cst_err(-ENOMEM);
    cst_list_append(list, &tenant->link);
    tenant->refs = 1;
    *out = tenant;
    return 0;
}

int cst_server_user_ref(struct cst_server *server, uid_t uid, struct cst_tenant **out) {
    struct cst_list *it, *tmp;
    int r;

    cst_list_for_each_safe (it, tmp, &server->users) {
        struct cst_tenant *tenant = cst_list_entry(it, struct cst_tenant, link);

        if (tenant->uid == uid) {
            tenant->refs++;
            *out = tenant;
            return 0;
        }
    }
    r = new_tenant(out, &server->users);
    if (!r)
        (*out)->uid = uid;
    return r;
}

int cst_server_namespace_ref(struct cst_server *server, const char *name, struct cst_tenant **out) {
    struct cst_namespace *ns = NULL;
    struct cst_list *it, *tmp;
    int r = cst_fold(cst_namespace_get(server->store, name, &ns));

    if (r)
        return r;
    cst_list_for_each_safe (it, tmp, &server->namespaces) {
        struct cst_tenant *tenant = cst_list_entry(it, struct cst_tenant, link);

        if (tenant->ns == ns) {
            tenant->refs++;
            *out = tenant;
            return 0;
        }
    }
    r = new_tenant(out, &server->namespaces);
    if (!r)
        (*out)->ns = ns;
    return r;
}

struct cst_tenant *cst_tenant_unref(struct cst_tenant *tenant) {
    if (!tenant || --tenant->refs)
        return NULL;
    cst_list_unlink(&tenant->link);
    return cst_free(tenant);
}

bool cst_server_is_admin(const struct cst_server *server, uid_t uid) {
    return uid == 0 || uid == geteuid() || cst_uids_have(&server->config.admin_uids, uid);
}

/* ---- listeners ---- */

int cst_server_accept_consume_fd(struct cst_server *server, int fd, bool admin) {
    struct cst_session *session;

    return cst_session_new_consume_fd(&session, server, fd, admin);
}

static void listen_again(struct cst_timer *timer) {
    struct cst_listener *listener = cst_container_of(timer, struct cst_listener, retry);

    cst_io_set(&listener->server->loop, &listener->io, EPOLLIN);
}

static void accept_one(struct cst_io *io, uint32_t events) {
    struct cst_listener *listener = cst_container_of(io, struct cst_listener, io);
    struct cst_server *server = listener->server;
    int fd = accept4(io->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK), r;

    if (fd < 0) {
        if (errno == EAGAIN || errno == ECONNABORTED || errno == EINTR)
            return;
        cst_log(CST_LOG_ERROR, "can't accept a connection: %s", strerrordesc_np(errno));
        cst_io_set(&server->loop, io, 0);
        cst_timer_set(&server->loop, &listener->retry, CST_TICK_MS * CST_NS_PER_MS);
        return;
    }
    r = cst_server_accept_consume_fd(server, fd, listener->admin);
    if (r) {
        cst_close(fd);
        if (r != -ESRCH)
            cst_log(CST_LOG_WARNING, "refused a connection: %s", strerrordesc_np(-r));
    }
}

int cst_server_listen_consume_fd(struct cst_server *server, int fd, bool admin) {
    struct cst_listener *listener = &server->listeners[server->n_listeners];
    int r;

    assert(server->n_listeners < CST_COUNT(server->listeners));
    *listener =
        (struct cst_listener){ .io = CST_IO_NULL(accept_one), .server = server, .admin = admin };
    cst_timer_init(&listener->retry, listen_again);
    (void)cst_packet_refuse_fds(fd); /* else each session looks for them */
    r = cst_io_start(&server->loop, &listener->io, fd, EPOLLIN);
    if (!r)
        server->n_listeners++;
    return r;
}

static void close_listeners(struct cst_server *server) {
    for (size_t i = 0; i < server->n_listeners; i++) {
        struct cst_listener *listener = &server->listeners[i];
        int fd = listener->io.fd;

        cst_timer_stop(&listener->retry);
        cst_io_stop(&server->loop, &listener->io);
        cst_close(fd);
    }
    server->n_listeners = 0;
}

/* ---- life ---- */

static void end_sessions(struct cst_server *server) {
    struct cst_list *first;

    while ((first = cst_list_first(&server->sessions)))
        cst_session_end(cst_list_entry(first, struct cst_session, link));
}

static void stop_timeout(struct cst_timer *timer) {
    struct cst_server *server = cst_container_of(timer, struct cst_server, stop_timer);

    cst_log(CST_LOG_WARNING, "%u commits are not finished; ending their connections",
            server->open_commits);
    end_sessions(server);
}

static void init_fields(struct cst_server *server, const struct cst_config *config,
                        const struct cst_server_env *env) {
    server->config = *config;
    cst_config_resolve(&server->config);
    server->env = *env;
    cst_list_init(&server->users);
    cst_list_init(&server->namespaces);
    cst_list_init(&server->sessions);
    cst_list_init(&server->subscriptions);
    cst_list_init(&server->free_leases);
    cst_timer_init(&server->retire_timer, cst_share_check);
    cst_timer_init(&server->tick, tick);
    cst_timer_init(&server->stop_timer, stop_timeout);
    server->started_ns = cst_now_ns(env->clock);
    set_limits(server);
}

int cst_server_new(struct cst_server **out, const struct cst_config *config,
                   const struct cst_server_env *env) {
    struct cst_server *server = cst_calloc(1, sizeof(*server));
    uint64_t random[2] = { 0 };
    int r;

    if (!server)
        return cst_err(-ENOMEM);
    init_fields(server, config, env);
    r = cst_loop_init(&server->loop);
    if (!r)
        r = env->random->fill(env->random, random, sizeof(random));
    if (!r)
        r = make_scratch(&server->scratch);
    if (!r)
        r = cst_workers_new(&server->workers, &server->loop, (unsigned)server->config.workers,
                            env->worker_start);
    if (!r)
        r = make_store(server);
    if (r) {
        (void)cst_server_free(server);
        return r;
    }
    set_presets(server);
    r = cst_disk_open(server);
    if (r) {
        (void)cst_server_free(server);
        return r == CST_DISK_E_REFUSED ? CST_SERVER_E_REFUSED : r;
    }
    server->epoch = random[0] | 1;
    server->seed = random[1];
    cst_server_tick_now(server);
    *out = server;
    return 0;
}

static bool is_finished(const struct cst_server *server) {
    return !server->n_sessions && !cst_store_jobs(server->store) &&
           !cst_workers_open(server->workers);
}

static int turn(struct cst_server *server) {
    cst_disk_kick(&server->disk);
    return cst_loop_turn(&server->loop);
}

/* Lets jobs of ended sessions and of the store finish. */
static void drain_jobs(struct cst_server *server) {
    while (server->store && !is_finished(server) && !turn(server))
        ;
}

struct cst_server *cst_server_free(struct cst_server *server) {
    if (!server)
        return NULL;
    close_listeners(server);
    cst_timer_stop(&server->tick);
    end_sessions(server);
    if (server->store)
        cst_store_stop(server->store);
    drain_jobs(server);
    cst_timer_stop(&server->retire_timer);
    cst_timer_stop(&server->stop_timer);
    server->store = cst_store_free(server->store);
    cst_disk_free(server);
    server->workers = cst_workers_free(server->workers);
    cst_lease_deinit(server);
    cst_hashmap_deinit(&server->shares);
    cst_loop_deinit(&server->loop);
    (void)cst_free(server->scratch.memory);
    return cst_free(server);
}

int cst_server_run(struct cst_server *server) {
    int r = 0;

    while (!r) {
        r = turn(server);
        if (!server->draining)
            continue;
        if (!server->open_commits && !cst_list_is_empty(&server->sessions))
            end_sessions(server);
        if (!server->n_sessions && cst_disk_drain(server) && is_finished(server))
            break;
    }
    if (!r)
        cst_disk_close(server);
    return r;
}

void cst_server_stop(struct cst_server *server) {
    Cistern__V1__Goodbye push = CISTERN__V1__GOODBYE__INIT;
    struct cst_list *it, *tmp;

    if (server->draining)
        return;
    server->draining = true;
    cst_store_stop(server->store);
    close_listeners(server);
    cst_timer_stop(&server->tick);
    push.status = CST_STATUS_DRAINING;
    push.text = (char *)(uintptr_t)cst_status_text(CST_STATUS_DRAINING);
    cst_list_for_each_safe (it, tmp, &server->sessions)
        cst_push(cst_list_entry(it, struct cst_session, link), CST_MSG_GOODBYE, &push.base);
    cst_timer_set(&server->loop, &server->stop_timer, server->config.stop_timeout);
}

const char *cst_server_reload(struct cst_server *server, const struct cst_config *fresh) {
    struct cst_config resolved = *fresh;
    const char *first;

    cst_config_resolve(&resolved);
    first = cst_config_reload(&server->config, &resolved);
    set_limits(server);
    set_presets(server);
    return first;
}
