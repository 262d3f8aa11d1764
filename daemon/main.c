/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cisternd: options, start, signals, stop.
 *
 * Owns the process: its listening sockets, its signals, its exit status (0: asked to stop; 1: could
 * not start or failed; 2: wrong usage). Invariant: the configuration is made in this order, at
 * start and at each SIGHUP: defaults, file, command line.
 */
#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"
#include "base/macros.h"
#include "base/restart.h"
#include "codec/linalg.h"
#include "daemon/config.h"
#include "daemon/listen.h"
#include "daemon/sd.h"
#include "daemon/server.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

static const char standard_config[] = "/etc/cistern/cistern.conf";

struct options {
    int argc;
    char **argv;
    const char *config_path; /* NULL: the standard one, which need not exist */
};

struct daemon {
    struct options options;
    struct cst_config config;
    struct cst_server *server;
    struct cst_listen main, admin;
    struct cst_io signals;
    struct cst_watchdog watchdog;
    unsigned stops;
};

static void print_usage(FILE *out) {
    (void)fputs(
        "usage: cisternd [OPTION VALUE]...\n"
        "Shares the KV caches of this host's inference workers. Runs with no option at all.\n"
        "\n"
        "  --config FILE    default: /etc/cistern/cistern.conf, if it exists\n"
        "  --print-config   print a commented configuration file and exit\n"
        "  --version        print the version and exit\n"
        "  --help           print this and exit\n"
        "\n"
        "Each setting of cistern.conf(5), which these override:\n",
        out);
    cst_config_print_help(out);
}

/* ---- configuration ---- */

static bool is_option(const char *arg, const char *name) {
    return !strncmp(arg, "--", 2) && !strcmp(arg + 2, name);
}

/* One "--key VALUE" or "--key=VALUE" at argv[*i]; moves *i past it. */
static int take_option(struct cst_config *config, struct options *o, int *i, char *text,
                       size_t cap) {
    const char *arg = o->argv[*i], *value;
    char key[64];

    if (strncmp(arg, "--", 2)) {
        (void)snprintf(text, cap, "\"%.60s\" is no option", arg);
        return CST_CONFIG_E_INVALID;
    }
    value = strchr(arg, '=');
    (void)snprintf(key, sizeof(key), "%.*s",
                   (int)(value ? (size_t)(value - arg - 2) : strlen(arg + 2)), arg + 2);
    if (value) {
        value++;
    } else if (++*i < o->argc) {
        value = o->argv[*i];
    } else if (strcmp(key, "config") && !cst_config_find(key)) {
        (void)snprintf(text, cap, "there is no option --%s", key);
        return CST_CONFIG_E_INVALID;
    } else {
        (void)snprintf(text, cap, "--%s wants a value", key);
        return CST_CONFIG_E_INVALID;
    }
    ++*i;
    if (!strcmp(key, "config")) {
        o->config_path = value;
        return 0;
    }
    return cst_config_set(config, key, value, text, cap);
}

static int take_options(struct cst_config *config, struct options *o, char *text, size_t cap) {
    int r = 0;

    for (int i = 1; i < o->argc && !r;)
        r = take_option(config, o, &i, text, cap);
    return r;
}

static int load_config(struct cst_config *config, struct options *o, char *text, size_t cap) {
    const char *path;
    int r;

    cst_config_defaults(config);
    r = take_options(config, o, text, cap); /* finds --config and complains about the rest */
    if (r)
        return r;
    path = o->config_path ? o->config_path : standard_config;
    cst_config_defaults(config);
    r = cst_config_load(config, path, text, cap);
    if (r == -ENOENT && !o->config_path)
        r = 0;
    if (r < 0) {
        (void)snprintf(text, cap, "can't read %s: %s", path, strerrordesc_np(-r));
        return CST_CONFIG_E_INVALID;
    }
    return r ? r : take_options(config, o, text, cap);
}

static void apply_log_level(const struct cst_config *config) {
    cst_log_set_level((enum cst_log_level)(CST_LOG_ERROR + config->log_level));
}

static void reload(struct daemon *d) {
    static struct cst_config fresh;
    char text[512];
    const char *key;

    cst_sd_reloading();
    if (load_config(&fresh, &d->options, text, sizeof(text))) {
        cst_log(CST_LOG_ERROR, "keeping the configuration: %s", text);
    } else {
        key = cst_server_reload(d->server, &fresh);
        apply_log_level(&fresh);
        cst_log(CST_LOG_NOTICE, "configuration reloaded");
        if (key)
            cst_log(CST_LOG_WARNING, "%s changes with a restart only", key);
    }
    cst_sd_ready("Serving");
}

/* ---- signals ---- */

static void stop(struct daemon *d, const char *signal_name) {
    if (d->stops++) {
        cst_log(CST_LOG_WARNING, "%s again: stopping at once", signal_name);
        cst_listen_close(&d->main);
        cst_listen_close(&d->admin);
        _exit(1);
    }
    cst_log(CST_LOG_NOTICE, "%s: stopping", signal_name);
    cst_sd_stopping();
    cst_server_stop(d->server);
}

static void on_signal(struct cst_io *io, uint32_t events) {
    struct daemon *d = cst_container_of(io, struct daemon, signals);
    struct signalfd_siginfo info;

    if (read(io->fd, &info, sizeof(info)) != sizeof(info))
        return;
    if (info.ssi_signo == SIGHUP)
        reload(d);
    else
        stop(d, info.ssi_signo == SIGTERM ? "SIGTERM" : "SIGINT");
}

/* A closed standard descriptor would become a socket or a slab, and the log would be written into
 * it; so all three exist. And a log that nobody reads any more is no reason to end. */
static int guard_output(void) {
    const struct sigaction ignore = { .sa_handler = SIG_IGN };
    int fd;

    (void)sigaction(SIGPIPE, &ignore, NULL);
    do {
        fd = open("/dev/null", O_RDWR | O_CLOEXEC); /* the lowest one that is free */
        if (fd < 0)
            return -errno;
    } while (fd <= STDERR_FILENO);
    cst_close(fd);
    return 0;
}

/* Before any thread starts, so that all of them have these signals blocked. */
static int block_signals(void) {
    sigset_t set;
    int fd;

    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGTERM);
    (void)sigaddset(&set, SIGINT);
    (void)sigaddset(&set, SIGHUP);
    (void)sigprocmask(SIG_BLOCK, &set, NULL);
    fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return fd < 0 ? -errno : fd;
}

/* ---- process ---- */

/* Stored blocks are what users wrote: no dumps, no debuggers, unless asked for. */
static void harden(const struct cst_config *config) {
    struct rlimit files, none = { 0 };

    if (!getrlimit(RLIMIT_NOFILE, &files) && files.rlim_cur < files.rlim_max) {
        files.rlim_cur = files.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &files);
    }
    if (config->dumpable)
        return;
    (void)setrlimit(RLIMIT_CORE, &none);
#ifndef __SANITIZE_ADDRESS__ /* the leak check of the sanitizer attaches as a debugger */
    (void)prctl(PR_SET_DUMPABLE, 0);
#endif
}

/* ---- sockets ---- */

static int open_admin(struct daemon *d, bool by_default, char *text, size_t cap) {
    char path[CST_SOCKET_PATH_MAX + 16];
    const char *end = strrchr(d->main.path, '/');

    if (d->config.admin_socket[0])
        return cst_listen_open(&d->admin, d->config.admin_socket, 0600, NULL, text, cap);
    if (!by_default || !end)
        return 0;
    (void)snprintf(path, sizeof(path), "%.*s/admin.sock", (int)(end - d->main.path), d->main.path);
    return cst_listen_open(&d->admin, path, 0600, NULL, text, cap);
}

static int open_sockets(struct daemon *d, char *text, size_t cap) {
    const struct cst_config *c = &d->config;
    bool by_default = !c->socket[0];
    struct cst_sd_sockets passed;
    int r = cst_sd_sockets(&passed, text, cap);

    if (r)
        return r;
    if (by_default && passed.main >= 0) {
        d->main.fd = passed.main;
        d->admin.fd = passed.admin;
        return 0;
    }
    r = by_default ? cst_listen_open_default(&d->main, (unsigned)c->socket_mode, c->socket_group,
                                             text, cap)
                   : cst_listen_open(&d->main, c->socket, (unsigned)c->socket_mode, c->socket_group,
                                     text, cap);
    return r ? r : open_admin(d, by_default, text, cap);
}

static int start_listening(struct daemon *d) {
    int r = cst_server_listen_consume_fd(d->server, cst_steal_fd(&d->main.fd), false);

    if (!r && d->admin.fd >= 0)
        r = cst_server_listen_consume_fd(d->server, cst_steal_fd(&d->admin.fd), true);
    return r;
}

/* ---- main ---- */

static int fail(const char *what, int r) {
    char trace[512];
    size_t n = cst_err_trace(trace, sizeof(trace));

    cst_log(CST_LOG_ERROR, "%s: %s%s%s%s", what, strerrordesc_np(-r), n ? " (" : "", n ? trace : "",
            n ? ")" : "");
    return 1;
}

static int serve(struct daemon *d, int signals) {
    const struct cst_server_env env = { .clock = &cst_clock_monotonic,
                                        .random = &cst_random_system,
                                        .mem = &cst_mem_host };
    int r = cst_server_new(&d->server, &d->config, &env);

    if (!r)
        r = start_listening(d);
    if (!r)
        r = cst_io_start(&d->server->loop, &d->signals, signals, EPOLLIN);
    if (!r) {
        cst_watchdog_start(&d->watchdog, &d->server->loop);
        cst_log(CST_LOG_INFO, "cisternd " CST_DAEMON_VERSION " serves %s, %llu MiB, %llu workers",
                d->main.path[0] ? d->main.path : "the socket of systemd",
                (unsigned long long)(d->server->config.memory >> 20),
                (unsigned long long)d->server->config.workers);
        cst_sd_ready("Serving");
        r = cst_server_run(d->server);
        cst_watchdog_stop(&d->watchdog);
        cst_io_stop(&d->server->loop, &d->signals);
    }
    d->server = cst_server_free(d->server);
    if (r == CST_SERVER_E_REFUSED) /* it is in the log */
        return 1;
    return r ? fail("can't serve", r) : 0;
}

/* Options that end the program at once; -1: none. */
static int short_answer(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (is_option(argv[i], "help"))
            print_usage(stdout);
        else if (is_option(argv[i], "version"))
            (void)puts("cisternd " CST_DAEMON_VERSION);
        else if (is_option(argv[i], "print-config"))
            cst_config_print_sample(stdout);
        else
            continue;
        return fflush(stdout) ? 1 : 0;
    }
    return -1;
}

int main(int argc, char **argv) {
    static struct daemon d;
    char text[512];
    int r, signals;

    cst_restart_with(argv, CST_LINALG_VARIABLE, cst_linalg_core_type());
    r = guard_output();
    if (r)
        return 1; /* nowhere to say it */
    r = short_answer(argc, argv);
    if (r >= 0)
        return r;
    d = (struct daemon){ .options = { .argc = argc, .argv = argv },
                         .main = CST_LISTEN_NULL,
                         .admin = CST_LISTEN_NULL,
                         .signals = CST_IO_NULL(on_signal) };
    if (load_config(&d.config, &d.options, text, sizeof(text))) {
        cst_log(CST_LOG_ERROR, "%s", text);
        return 2;
    }
    apply_log_level(&d.config);
    harden(&d.config);
    signals = block_signals();
    if (signals < 0)
        return fail("can't receive signals", signals);
    if (open_sockets(&d, text, sizeof(text))) {
        cst_log(CST_LOG_ERROR, "%s", text);
        r = 1;
    } else {
        r = serve(&d, signals);
    }
    cst_listen_close(&d.main);
    cst_listen_close(&d.admin);
    cst_close(signals);
    return r;
}
