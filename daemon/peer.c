/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns a pidfd per peer.
 *
 * Invariants
 *   1. uid and gid are those of the process that connected (SO_PEERCRED).
 *   2. The pidfd names that process, or init fails. By pid alone this needs a check: the pid may
 *      have been reused, so the process must have the same start time before and after
 *      pidfd_open(), and the peer's uid.
 *   3. The cgroup is read from /proc/PID and believed only if the pidfd still lives afterwards.
 */
#include "daemon/peer.h"

#include "base/err.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

static ssize_t read_proc(pid_t pid, const char *file, char *out, size_t cap) {
    cst_auto(cst_closep) int fd = -1;
    char path[64];
    ssize_t n;

    (void)snprintf(path, sizeof(path), "/proc/%d/%s", (int)pid, file);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    n = read(fd, out, cap - 1);
    if (n < 0)
        return -errno;
    out[n] = '\0';
    return n;
}

/* Field 22 of /proc/PID/stat, ticks since boot; the name in field 2 may hold anything. */
static int start_time(pid_t pid, unsigned long long *out) {
    char text[1024], *at;
    ssize_t n = read_proc(pid, "stat", text, sizeof(text));

    if (n < 0)
        return (int)n;
    at = strrchr(text, ')');
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    if (!at)
        return -ESRCH;
    *out = strtoull(at + 1, NULL, 10);
    return 0;
}

static int credentials(struct cst_peer *peer, int sock) {
    struct ucred cred;
    socklen_t len = sizeof(cred);

    *peer = CST_PEER_NULL;
    if (getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &cred, &len))
        return cst_err(-errno);
    peer->uid = cred.uid;
    peer->gid = cred.gid;
    peer->pid = cred.pid;
    return 0;
}

/* A process that forbids dumps belongs to root in /proc; its stat line stays readable. */
static bool has_uid(pid_t pid, uid_t uid) {
    char path[64];
    struct stat st;

    (void)snprintf(path, sizeof(path), "/proc/%d", (int)pid);
    return !stat(path, &st) && (st.st_uid == uid || st.st_uid == 0);
}

int cst_peer_init_by_pid(struct cst_peer *peer, int sock) {
    unsigned long long before, after;
    int r = credentials(peer, sock);

    if (r)
        return r;
    if (peer->pid <= 0 || start_time(peer->pid, &before))
        return -ESRCH;
    peer->pidfd = (int)syscall(SYS_pidfd_open, peer->pid, 0);
    if (peer->pidfd < 0)
        return errno == ESRCH ? -ESRCH : cst_err(-errno);
    if (start_time(peer->pid, &after) || after != before || !has_uid(peer->pid, peer->uid)) {
        cst_peer_deinit(peer);
        return -ESRCH;
    }
    return 0;
}

int cst_peer_init(struct cst_peer *peer, int sock) {
    int pidfd = -1, r = credentials(peer, sock);
    socklen_t len = sizeof(pidfd);

    if (r)
        return r;
    if (getsockopt(sock, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &len)) {
        if (errno == ENOPROTOOPT || errno == EINVAL)
            return cst_peer_init_by_pid(peer, sock);
        return errno == EMFILE || errno == ENFILE || errno == ENOMEM ? cst_err(-errno) : -ESRCH;
    }
    (void)fcntl(pidfd, F_SETFD, FD_CLOEXEC);
    peer->pidfd = pidfd;
    return 0;
}

void cst_peer_deinit(struct cst_peer *peer) {
    peer->pidfd = cst_close(peer->pidfd);
}

/* ---- namespaces ---- */

static bool is_below(const char *cgroup, const char *ancestor) {
    size_t n = strlen(ancestor);

    if (n > 1 && ancestor[n - 1] == '/')
        n--;
    return !strncmp(cgroup, ancestor, n) &&
           (cgroup[n] == '\0' || cgroup[n] == '/' || (n == 1 && cgroup[0] == '/'));
}

static bool matches(const struct cst_rule *rule, uid_t uid, gid_t gid, const char *cgroup) {
    switch (rule->kind) {
    case CST_RULE_CGROUP:
        return is_below(cgroup, rule->cgroup);
    case CST_RULE_UID:
        return rule->id == uid;
    default:
        return rule->id == gid;
    }
}

int cst_peer_match(const struct cst_config *config, uid_t uid, gid_t gid, const char *cgroup,
                   uid_t overflow, struct cst_namespace_name *name, char *text, size_t cap) {
    for (int kind = CST_RULE_CGROUP; kind <= CST_RULE_GID; kind++) {
        if (kind != CST_RULE_CGROUP && uid == overflow)
            break;
        for (size_t i = 0; i < config->n_rules; i++) {
            const struct cst_rule *rule = &config->rules[i];

            if ((int)rule->kind == kind && matches(rule, uid, gid, cgroup)) {
                (void)snprintf(name->text, sizeof(name->text), "%s", rule->name);
                return 0;
            }
        }
    }
    if (uid == overflow) {
        (void)snprintf(text, cap,
                       "uid %u stands for users of other user namespaces; only a cgroup rule of "
                       "cistern.conf can give such a client a namespace",
                       (unsigned)uid);
        return CST_PEER_E_REFUSED;
    }
    (void)snprintf(name->text, sizeof(name->text), "uid-%u", (unsigned)uid);
    return 0;
}

static bool has_cgroup_rules(const struct cst_config *config) {
    for (size_t i = 0; i < config->n_rules; i++)
        if (config->rules[i].kind == CST_RULE_CGROUP)
            return true;
    return false;
}

/* The unified hierarchy's line "0::/path". "" when unknown. */
static void find_cgroup(const struct cst_peer *peer, char *out, size_t cap) {
    struct pollfd ended = { .fd = peer->pidfd, .events = POLLIN };
    char text[4096];
    const char *at;

    out[0] = '\0';
    if (peer->pid <= 0 || read_proc(peer->pid, "cgroup", text, sizeof(text)) < 0)
        return;
    at = !strncmp(text, "0::", 3) ? text : strstr(text, "\n0::");
    if (!at || poll(&ended, 1, 0) != 0)
        return;
    at = strchr(at, '/');
    if (at && strcspn(at, "\n") < cap)
        (void)snprintf(out, cap, "%.*s", (int)strcspn(at, "\n"), at);
}

static uid_t overflow_uid(void) {
    static uid_t known;
    char text[32] = "";
    cst_auto(cst_closep) int fd = -1;

    if (known)
        return known;
    known = 65534;
    fd = open("/proc/sys/kernel/overflowuid", O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && read(fd, text, sizeof(text) - 1) > 0 && strtoul(text, NULL, 10))
        known = (uid_t)strtoul(text, NULL, 10);
    return known;
}

int cst_peer_namespace(const struct cst_peer *peer, const struct cst_config *config,
                       struct cst_namespace_name *name, char *text, size_t cap) {
    char cgroup[CST_CGROUP_MAX] = "";

    if (has_cgroup_rules(config))
        find_cgroup(peer, cgroup, sizeof(cgroup));
    return cst_peer_match(config, peer->uid, peer->gid, cgroup, overflow_uid(), name, text, cap);
}
