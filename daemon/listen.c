/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns listening sockets and their lock files.
 *
 * Invariants
 *   1. Who holds the lock on PATH.lock owns PATH: only the holder binds or unlinks it. The lock
 * ends with the process, so a killed daemon leaves a stale socket but never a stale claim.
 *   2. The lock file is removed by its holder only; who then locks the removed file notices
 * (another inode, or none, is at the path) and tries again.
 *   3. The socket has its final mode before anybody can connect.
 */
#include "daemon/listen.h"

#include "base/macros.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { BACKLOG = 128, LOCK_PATH_MAX = CST_SOCKET_PATH_MAX + 8 };

static int refuse(char *text, size_t cap, const char *fmt, ...) CST_PRINTF(3, 4);

static int refuse(char *text, size_t cap, const char *fmt, ...) {
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(text, cap, fmt, ap);
    va_end(ap);
    return CST_LISTEN_E_REFUSED;
}

static const char *words(int err) {
    return strerrordesc_np(err);
}

static void lock_path(char out[LOCK_PATH_MAX], const char *path) {
    (void)snprintf(out, LOCK_PATH_MAX, "%s.lock", path);
}

static bool is_at(const char *path, int fd) {
    struct stat here, there;

    return !fstat(fd, &here) && !stat(path, &there) && here.st_ino == there.st_ino &&
           here.st_dev == there.st_dev;
}

static int take_lock(const char *path, int *out, char *text, size_t cap) {
    char name[LOCK_PATH_MAX];

    lock_path(name, path);
    for (;;) {
        int fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);

        if (fd < 0)
            return refuse(text, cap, "can't make %s: %s", name, words(errno));
        if (flock(fd, LOCK_EX | LOCK_NB)) {
            cst_close(fd);
            return refuse(text, cap, "another cisternd serves %s", path);
        }
        if (is_at(name, fd)) {
            *out = fd;
            return 0;
        }
        cst_close(fd);
    }
}

/* With the lock held: removes a socket that nobody listens on. */
static int remove_stale(const char *path, const struct sockaddr_un *addr, char *text, size_t cap) {
    cst_auto(cst_closep) int probe = -1;
    struct stat st;

    if (lstat(path, &st))
        return errno == ENOENT ? 0 : refuse(text, cap, "can't use %s: %s", path, words(errno));
    if (!S_ISSOCK(st.st_mode))
        return refuse(text, cap, "%s exists and is no socket", path);
    probe = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0)
        return refuse(text, cap, "can't make a socket: %s", words(errno));
    if (!connect(probe, (const struct sockaddr *)addr, sizeof(*addr)) || errno != ECONNREFUSED)
        return refuse(text, cap, "another program listens on %s", path);
    if (unlink(path))
        return refuse(text, cap, "can't remove the stale socket %s: %s", path, words(errno));
    return 0;
}

static bool find_group(const char *group, gid_t *out) {
    const struct group *found = NULL;
    unsigned long long number = 0;
    char *end = NULL;

    errno = 0;
    if (group[0] >= '0' && group[0] <= '9')
        number = strtoull(group, &end, 10);
    if (!end || *end) {
        found = getgrnam(group);
        *out = found ? found->gr_gid : 0;
        return found;
    }
    *out = (gid_t)number;
    return !errno && number < (gid_t)-1; /* which chown() takes for "as it is" */
}

static int set_rights(const char *path, unsigned mode, const char *group, char *text, size_t cap) {
    gid_t gid = (gid_t)-1;

    if (group && *group && !find_group(group, &gid))
        return refuse(text, cap, "there is no group %s", group);
    if (lchown(path, (uid_t)-1, gid) || chmod(path, mode))
        return refuse(text, cap, "can't set the rights of %s: %s", path, words(errno));
    return 0;
}

static int bind_and_listen(int fd, const struct sockaddr_un *addr, unsigned mode, const char *group,
                           char *text, size_t cap) {
    const char *path = addr->sun_path;
    mode_t old = umask(0777); /* until set_rights() nobody connects */
    int r = bind(fd, (const struct sockaddr *)addr, sizeof(*addr)) ? errno : 0;

    (void)umask(old);
    if (r)
        return refuse(text, cap, "can't listen on %s: %s", path, words(r));
    r = listen(fd, BACKLOG) ? refuse(text, cap, "can't listen on %s: %s", path, words(errno))
                            : set_rights(path, mode, group, text, cap);
    if (r)
        (void)unlink(path); /* without rights only root could see that it is stale */
    return r;
}

int cst_listen_open(struct cst_listen *out, const char *path, unsigned mode, const char *group,
                    char *text, size_t cap) {
    struct sockaddr_un addr = { .sun_family = AF_UNIX };
    struct cst_listen l = CST_LISTEN_NULL;
    int r;

    if (strlen(path) >= sizeof(addr.sun_path))
        return refuse(text, cap, "the socket path %.40s... is longer than %zu bytes", path,
                      sizeof(addr.sun_path) - 1);
    memcpy(addr.sun_path, path, strlen(path) + 1);
    memcpy(l.path, path, strlen(path) + 1);
    r = take_lock(path, &l.lock, text, cap);
    if (r)
        return r;
    r = remove_stale(path, &addr, text, cap);
    if (!r) {
        l.fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        r = l.fd < 0 ? refuse(text, cap, "can't make a socket: %s", words(errno))
                     : bind_and_listen(l.fd, &addr, mode, group, text, cap);
    }
    if (r) {
        char name[LOCK_PATH_MAX];

        lock_path(name, path);
        (void)unlink(name);
        cst_close(l.fd);
        cst_close(l.lock);
        return r;
    }
    *out = l;
    return 0;
}

void cst_listen_close(struct cst_listen *l) {
    char name[LOCK_PATH_MAX];

    l->fd = cst_close(l->fd);
    if (l->lock < 0)
        return;
    lock_path(name, l->path);
    (void)unlink(l->path);
    (void)unlink(name);
    l->lock = cst_close(l->lock);
}

/* ---- default paths ---- */

bool cst_listen_folder(const char *path, unsigned mode, char *text, size_t cap) {
    struct stat st;

    if (!mkdir(path, mode))
        return true;
    if (errno != EEXIST) {
        (void)refuse(text, cap, "can't make %s: %s", path, words(errno));
        return false;
    }
    if (lstat(path, &st) || !S_ISDIR(st.st_mode) || (st.st_uid != geteuid() && st.st_uid != 0) ||
        st.st_mode & (S_IWGRP | S_IWOTH)) {
        (void)refuse(text, cap, "%s is not a folder of ours alone", path);
        return false;
    }
    if (access(path, W_OK)) {
        (void)refuse(text, cap, "can't write to %s: %s", path, words(errno));
        return false;
    }
    return true;
}

int cst_listen_open_default(struct cst_listen *out, unsigned mode, const char *group, char *text,
                            size_t cap) {
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    char folders[3][CST_SOCKET_PATH_MAX], path[sizeof(folders[0]) + sizeof("/cistern.sock")];

    (void)snprintf(folders[0], sizeof(folders[0]), "/run/cistern");
    folders[1][0] = '\0';
    if (runtime && runtime[0] == '/')
        (void)snprintf(folders[1], sizeof(folders[1]), "%s/cistern", runtime);
    (void)snprintf(folders[2], sizeof(folders[2]), "/tmp/cistern-%u", (unsigned)geteuid());
    for (size_t i = 0; i < CST_COUNT(folders); i++) {
        if (!folders[i][0] || !cst_listen_folder(folders[i], i ? 0700 : 0755, text, cap))
            continue;
        (void)snprintf(path, sizeof(path), "%.*s/cistern.sock", (int)sizeof(folders[i]),
                       folders[i]);
        return cst_listen_open(out, path, mode, group, text, cap);
    }
    return CST_LISTEN_E_REFUSED;
}
