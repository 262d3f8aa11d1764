/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the folder and the process of a private daemon.
 * Invariants: 1. pid is set exactly while a child runs that was not waited for; 2. the folder
 * exists from the first start until cleanup. Readiness comes from the daemon's own notification,
 * never from a delay; the one time limit ends a hung start.
 */
#include "tests/lib/spawn.h"

#include "base/macros.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { READY_LIMIT_MS = 60000, ARGS_MAX = 32 };

const char *cst_spawn_program(void) {
    static char path[4096];
    const char *given = getenv("CISTERND"), *root = getenv("CST_BUILD_ROOT");

    if (!given && !root)
        return NULL;
    (void)snprintf(path, sizeof(path), "%s%s", given ? given : root,
                   given ? "" : "/daemon/cisternd");
    return access(path, X_OK) ? NULL : path;
}

static int make_folder(struct cst_spawned *d) {
    const char *tmp = getenv("TMPDIR");
    int n = snprintf(d->dir, sizeof(d->dir), "%s/cistern-test-XXXXXX", tmp ? tmp : "/tmp");

    if (n < 0 || (size_t)n >= sizeof(d->dir) || !mkdtemp(d->dir)) {
        d->dir[0] = '\0';
        return -ENAMETOOLONG;
    }
    (void)snprintf(d->socket, sizeof(d->socket), "%s/sock", d->dir);
    (void)snprintf(d->log, sizeof(d->log), "%s/log", d->dir);
    return 0;
}

static int open_notify(struct cst_spawned *d, struct sockaddr_un *addr) {
    *addr = (struct sockaddr_un){ .sun_family = AF_UNIX };
    (void)snprintf(addr->sun_path, sizeof(addr->sun_path), "%s/notify", d->dir);
    (void)unlink(addr->sun_path);
    d->notify = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (d->notify < 0 || bind(d->notify, (const void *)addr, sizeof(*addr)))
        return -errno;
    return 0;
}

/* In the child; returns only when exec fails. */
static void run_child(const struct cst_spawned *d, const char *program, const char *const args[],
                      const char *notify, pid_t parent) {
    const char *argv[ARGS_MAX + 4] = { program, "--socket", d->socket };
    int log = open(d->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);

    for (int i = 0; args && args[i] && i < ARGS_MAX; i++)
        argv[i + 3] = args[i];
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent || log < 0 || dup2(log, STDERR_FILENO) < 0)
        return;
    (void)setenv("NOTIFY_SOCKET", notify, 1);
    (void)unsetenv("LISTEN_FDS");
    (void)execv(program, (char *const *)(uintptr_t)argv);
    (void)dprintf(STDERR_FILENO, "cannot run %s: %s\n", program, strerror(errno));
}

static int wait_ready(struct cst_spawned *d) {
    char text[4096];

    for (;;) {
        struct pollfd fds[2] = { { d->notify, POLLIN, 0 }, { d->pidfd, POLLIN, 0 } };
        ssize_t n;

        if (poll(fds, 2, READY_LIMIT_MS) == 0)
            return -ETIMEDOUT;
        if (!(fds[0].revents & POLLIN)) {
            if (fds[1].revents)
                return -ECHILD;
            continue; /* a signal */
        }
        n = recv(d->notify, text, sizeof(text) - 1, 0);
        text[n > 0 ? n : 0] = '\0';
        if (!strncmp(text, "READY=1", 7) || strstr(text, "\nREADY=1"))
            return 0;
    }
}

static int reap(struct cst_spawned *d) {
    int status = 0;

    while (waitpid(d->pid, &status, 0) < 0 && errno == EINTR)
        ;
    d->pid = 0;
    d->pidfd = cst_close(d->pidfd);
    d->notify = cst_close(d->notify);
    return WIFSIGNALED(status) ? 256 + WTERMSIG(status) : WEXITSTATUS(status);
}

int cst_spawn_start(struct cst_spawned *d, const char *program, const char *const args[]) {
    pid_t parent = getpid();
    struct sockaddr_un addr;
    int r = d->dir[0] ? 0 : make_folder(d);

    if (!r)
        r = open_notify(d, &addr);
    if (r)
        return r;
    d->pid = fork();
    if (d->pid < 0) {
        d->pid = 0;
        return -errno;
    }
    if (!d->pid) {
        run_child(d, program, args, addr.sun_path, parent);
        _exit(127);
    }
    d->pidfd = (int)syscall(SYS_pidfd_open, d->pid, 0);
    r = d->pidfd < 0 ? -errno : wait_ready(d);
    if (r)
        cst_spawn_kill(d);
    return r;
}

int cst_spawn_stop(struct cst_spawned *d) {
    if (!d->pid)
        return 0;
    (void)kill(d->pid, SIGTERM);
    return reap(d);
}

void cst_spawn_kill(struct cst_spawned *d) {
    if (!d->pid)
        return;
    (void)kill(d->pid, SIGKILL);
    (void)reap(d);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
    (void)remove(path);
    return 0;
}

void cst_spawn_cleanup(struct cst_spawned *d) {
    cst_spawn_kill(d);
    if (d->dir[0])
        (void)nftw(d->dir, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    *d = CST_SPAWNED_NULL;
}
