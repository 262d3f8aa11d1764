/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The only file that calls libsystemd. Owns nothing.
 * Invariant: the watchdog is pinged by the loop only, after it has handled its events: a loop that
 * is stuck is noticed.
 */
#include "daemon/sd.h"

#include "base/macros.h"
#include "base/mem.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <systemd/sd-daemon.h>

static void free_names(char **names, int n) {
    for (int i = 0; names && i < n; i++)
        (void)cst_free(names[i]);
    (void)cst_free(names);
}

static int take_socket(struct cst_sd_sockets *out, int fd, const char *name, char *text,
                       size_t cap) {
    int *place = !strcmp(name, "admin") ? &out->admin : &out->main;

    if (sd_is_socket(fd, AF_UNIX, SOCK_SEQPACKET, 1) <= 0) {
        (void)snprintf(text, cap, "socket \"%s\" of systemd does not listen for sequential packets",
                       name);
        return CST_SD_E_SOCKET;
    }
    if (*place >= 0) {
        (void)snprintf(text, cap, "systemd passed two sockets of one kind");
        return CST_SD_E_SOCKET;
    }
    (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    *place = fd;
    return 0;
}

int cst_sd_sockets(struct cst_sd_sockets *out, char *text, size_t cap) {
    char **names = NULL;
    int n = sd_listen_fds_with_names(1, &names), r = 0;

    *out = (struct cst_sd_sockets){ .main = -1, .admin = -1 };
    for (int i = 0; i < n && !r; i++)
        r = take_socket(out, SD_LISTEN_FDS_START + i, names ? names[i] : "main", text, cap);
    free_names(names, n);
    return r;
}

void cst_sd_ready(const char *status) {
    (void)sd_notifyf(0, "READY=1\nSTATUS=%s", status);
}

void cst_sd_reloading(void) {
    (void)sd_notify(0, "RELOADING=1");
}

void cst_sd_stopping(void) {
    (void)sd_notify(0, "STOPPING=1");
}

void cst_sd_status(const char *status) {
    (void)sd_notifyf(0, "STATUS=%s\nEXTEND_TIMEOUT_USEC=30000000", status);
}

static void ping(struct cst_timer *timer) {
    struct cst_watchdog *w = cst_container_of(timer, struct cst_watchdog, timer);

    (void)sd_notify(0, "WATCHDOG=1");
    cst_timer_set(w->loop, timer, w->interval_ns);
}

void cst_watchdog_start(struct cst_watchdog *w, struct cst_loop *loop) {
    uint64_t usec = 0;

    cst_timer_init(&w->timer, ping);
    w->loop = loop;
    if (sd_watchdog_enabled(0, &usec) <= 0 || !usec)
        return;
    w->interval_ns = usec * 1000 / 2;
    ping(&w->timer);
}

void cst_watchdog_stop(struct cst_watchdog *w) {
    cst_timer_stop(&w->timer);
}
