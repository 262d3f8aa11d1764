/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the aio of the disk tier. Invariants: 1. clients are served only after recovery, so that
 * nobody is told of a miss that is a hit a second later; 2. a stop drains after the last client has
 * gone and before the store ends, never longer than stop_timeout. Loop thread.
 */
#include "daemon/disk.h"

#include "base/log.h"
#include "daemon/sd.h"
#include "daemon/server.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LOOK_MS = 100 };

static const char *const io_names[] = { "auto", "io_uring", "threads" };

/* ---- opening ---- */

static void note(void *arg, const char *sentence) {
    cst_log(CST_LOG_NOTICE, "disk: %s", sentence);
}

static void aio_ready(struct cst_io *io, uint32_t events) {
    (void)cst_aio_reap(cst_container_of(io, struct cst_disk, io)->aio);
}

/* The loop only has to wake up: who waits looks between its turns. */
static void look(struct cst_timer *timer) {
}

static int open_aio(struct cst_server *server) {
    struct cst_disk *disk = &server->disk;
    const struct cst_config *c = &server->config;
    const struct cst_aio_options options = { .directory = c->directory,
                                             .kind = (enum cst_aio_kind)c->io,
                                             .buffered = !c->disk_direct };
    char why[200];
    int r = cst_aio_new(&disk->aio, &options, why, sizeof(why));

    if (r == CST_AIO_E_ABSENT)
        cst_log(CST_LOG_ERROR, "there is no directory %s: make it, or change `directory`",
                c->directory);
    else if (r == CST_AIO_E_REFUSED)
        cst_log(CST_LOG_ERROR, "io = %s can't be had: %s; say io = auto", io_names[c->io], why);
    else if (r == -EACCES)
        cst_log(CST_LOG_ERROR, "%s can't be used by uid %u: change its owner or `directory`",
                c->directory, geteuid());
    else if (r == -ENOTDIR)
        cst_log(CST_LOG_ERROR, "%s is no directory: change `directory`", c->directory);
    if (r)
        return r > 0 || r == -EACCES || r == -ENOTDIR ? CST_DISK_E_REFUSED : r;
    if (c->io == CST_AIO_AUTO && *why)
        cst_log(CST_LOG_NOTICE, "disk: using threads instead of io_uring: %s", why);
    return cst_io_start(&server->loop, &disk->io, cst_aio_fd(disk->aio), EPOLLIN);
}

struct places {
    const char *list[4];
    char text[3][CST_SOCKET_PATH_MAX + 32];
};

/* Where a root key may live that is to be gone after a reboot. */
static void key_places(struct places *p) {
    const char *run = getenv("RUNTIME_DIRECTORY"), *user = getenv("XDG_RUNTIME_DIR");
    size_t n = 0;

    memset(p->list, 0, sizeof(p->list));
    if (run && *run)
        (void)snprintf(p->text[n], sizeof(p->text[n]), "%s/disk", run), n++;
    else if (user && *user)
        (void)snprintf(p->text[n], sizeof(p->text[n]), "%s/cistern-disk", user), n++;
    (void)snprintf(p->text[n], sizeof(p->text[n]), "/dev/shm/cistern-%u", geteuid());
    n++;
    for (size_t i = 0; i < n; i++)
        p->list[i] = p->text[i];
}

/* The key file of the configuration, else a credential that systemd passes. */
static const char *key_file(const struct cst_config *c, char *text, size_t cap) {
    const char *credentials = getenv("CREDENTIALS_DIRECTORY");

    if (c->key_file[0])
        return c->key_file;
    if (!credentials)
        return NULL;
    (void)snprintf(text, cap, "%s/cistern.key", credentials);
    return access(text, F_OK) ? NULL : text;
}

static int open_store(struct cst_server *server) {
    const struct cst_config *c = &server->config;
    struct places places;
    char credential[512], message[512] = "";
    struct cst_disk_options options = {
        .seg = { .bytes = c->disk,
                 .segment_bytes = c->segment,
                 .namespace_bytes = c->disk_per_namespace,
                 .write_rate = c->disk_write_rate,
                 .buffer_bytes = c->disk_buffers / 2,
                 .min_hits = (uint32_t)c->disk_min_hits,
                 .errors_max = (uint32_t)c->disk_errors,
                 .crypt = (enum cst_seg_crypt)c->crypt,
                 .key_file = key_file(c, credential, sizeof(credential)),
                 .runtime = places.list },
        .aio = server->disk.aio,
        .read_bytes = c->disk_buffers / 2,
        .ahead_bytes = c->disk_prefetch,
        .note = note,
    };
    int r;

    key_places(&places);
    r = cst_store_disk_open(server->store, &options, message, sizeof(message));
    if (r == CST_STORE_E_REFUSED)
        cst_log(CST_LOG_ERROR, "disk: %s", message);
    return r > 0 ? CST_DISK_E_REFUSED : r;
}

/* ---- recovery ---- */

static void recovered(void *arg, int status) {
    struct cst_disk *disk = arg;

    disk->recovering = false;
    disk->status = status;
}

static void tell_progress(const struct cst_server *server) {
    struct cst_seg_stats s;
    char text[128];

    (void)cst_store_disk_stats(server->store, &s);
    (void)snprintf(text, sizeof(text), "Looking for blocks on disk: segment %u of %u",
                   s.recover_done, s.recover_total);
    cst_sd_status(text);
}

static void describe_found(const struct cst_seg_stats *s, int status, char *out, size_t cap) {
    unsigned long long n = s->found;

    if (status)
        (void)snprintf(out, cap, "recovery ended early, with %llu blocks: %s", n,
                       strerrordesc_np(-status));
    else if (s->recover_total)
        (void)snprintf(out, cap, "%llu blocks found in %llu ms after %s", n,
                       (unsigned long long)(s->recover_ns / CST_NS_PER_MS),
                       s->recovered_clean ? "a clean stop" : "no clean stop");
    else
        (void)snprintf(out, cap, "no blocks yet");
}

static void tell_recovered(const struct cst_server *server) {
    int status = server->disk.status;
    struct cst_seg_stats s;
    char found[128];

    (void)cst_store_disk_stats(server->store, &s);
    describe_found(&s, status, found, sizeof(found));
    cst_log(status ? CST_LOG_ERROR : CST_LOG_INFO, "disk: %s, %s, %llu MiB, %s; %s",
            server->config.directory, cst_aio_name(server->disk.aio),
            (unsigned long long)(s.bytes >> 20), s.encrypted ? "encrypted" : "not encrypted",
            found);
    if (s.cached && server->config.disk_direct)
        cst_log(CST_LOG_NOTICE,
                "disk: the file system of %s can't go past the page cache, so that takes memory, "
                "too: use another one, or say disk_direct = no",
                server->config.directory);
}

static int recover(struct cst_server *server) {
    struct cst_disk *disk = &server->disk;
    int r = 0;

    disk->recovering = true;
    cst_store_disk_recover(server->store, recovered, disk);
    while (disk->recovering && !r) {
        if (!cst_timer_is_set(&disk->timer)) {
            tell_progress(server);
            cst_timer_set(&server->loop, &disk->timer, LOOK_MS * CST_NS_PER_MS);
        }
        cst_disk_kick(disk);
        r = cst_loop_turn(&server->loop);
    }
    cst_timer_stop(&disk->timer);
    if (!r)
        tell_recovered(server);
    return r;
}

int cst_disk_open(struct cst_server *server) {
    struct cst_disk *disk = &server->disk;
    int r;

    disk->io = CST_IO_NULL(aio_ready);
    cst_timer_init(&disk->timer, look);
    if (!server->config.directory[0])
        return 0;
    r = open_aio(server);
    if (!r)
        r = open_store(server);
    return r ? r : recover(server);
}

/* ---- the stop ---- */

static void tell_drain(struct cst_server *server, uint64_t left, uint64_t total) {
    char text[128];

    (void)snprintf(text, sizeof(text), "Writing to disk: %llu of %llu blocks",
                   (unsigned long long)(total - CST_MIN(left, total)), (unsigned long long)total);
    cst_sd_status(text);
}

bool cst_disk_drain(struct cst_server *server) {
    struct cst_disk *disk = &server->disk;
    uint64_t now = cst_now_ns(server->env.clock), total;

    if (!disk->aio || disk->drained)
        return true;
    if (!disk->deadline_ns)
        disk->deadline_ns = now + server->config.stop_timeout;
    disk->left = cst_store_drain(server->store, now < disk->deadline_ns, &total);
    if (!disk->left || now >= disk->deadline_ns) {
        disk->drained = true;
        cst_timer_stop(&disk->timer);
        return true;
    }
    if (!cst_timer_is_set(&disk->timer)) {
        tell_drain(server, disk->left, total);
        cst_timer_set(&server->loop, &disk->timer, LOOK_MS * CST_NS_PER_MS);
    }
    return false;
}

void cst_disk_close(struct cst_server *server) {
    struct cst_disk *disk = &server->disk;
    struct cst_seg_stats s;
    int r;

    if (!disk->aio)
        return;
    r = cst_store_disk_close(server->store);
    if (r)
        cst_log(CST_LOG_ERROR, "disk: no clean end, the next start takes longer: %s",
                strerrordesc_np(-r));
    (void)cst_store_disk_stats(server->store, &s);
    if (disk->left)
        cst_log(CST_LOG_WARNING, "disk: %llu blocks were not written within stop_timeout",
                (unsigned long long)disk->left);
    cst_log(CST_LOG_INFO, "disk: %llu blocks, %llu MiB stay", (unsigned long long)s.records,
            (unsigned long long)(s.record_bytes >> 20));
}

void cst_disk_free(struct cst_server *server) {
    struct cst_disk *disk = &server->disk;

    if (!disk->aio)
        return;
    cst_timer_stop(&disk->timer);
    cst_io_stop(&server->loop, &disk->io);
    disk->aio = cst_aio_free(disk->aio);
}
