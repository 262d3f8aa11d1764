/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the directory and the open files of the backends that use real ones. Invariant: every name
 * is resolved in the directory's descriptor and no symbolic link is followed. Owner's thread; all
 * calls block.
 */
#include "base/err.h"
#include "base/mem.h"
#include "store/io_impl.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static struct cst_aio_posix *posix(struct cst_aio *aio) {
    return cst_container_of(aio, struct cst_aio_posix, aio);
}

int cst_files_init(struct cst_aio_posix *p, const struct cst_aio_options *options) {
    p->buffered = options->buffered;
    p->directory = open(options->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return p->directory < 0 ? cst_aio_errno(errno) : 0;
}

void cst_files_deinit(struct cst_aio_posix *p) {
    p->directory = cst_close(p->directory);
}

static int open_fd(const struct cst_aio_posix *p, const char *name, unsigned flags, bool *direct) {
    int mode = O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, fd;

    mode |= flags & CST_AIO_READ_ONLY ? O_RDONLY : O_RDWR;
    mode |= flags & CST_AIO_CREATE ? O_CREAT : 0;
    mode |= flags & CST_AIO_EXCLUSIVE ? O_EXCL : 0;
    *direct = !p->buffered && !(flags & CST_AIO_BUFFERED);
    fd = openat(p->directory, name, mode | O_CLOEXEC | (*direct ? O_DIRECT : 0), 0600);
    if (fd < 0 && errno == EINVAL && *direct) {
        *direct = false; /* the file may have been made: then it is not another's */
        fd = openat(p->directory, name, (mode & ~O_EXCL) | O_CLOEXEC, 0600);
    }
    return fd;
}

int cst_files_open(struct cst_aio *aio, const char *name, unsigned flags,
                   struct cst_aio_file **out) {
    cst_auto(cst_freep) struct cst_aio_file *file = cst_calloc(1, sizeof(*file));
    cst_auto(cst_closep) int fd = -1;
    struct stat st;
    int mode;

    if (!file)
        return cst_err(-ENOMEM);
    fd = open_fd(posix(aio), name, flags, &file->direct);
    if (fd < 0)
        return cst_aio_errno(errno == ELOOP ? EINVAL : errno);
    if (fstat(fd, &st))
        return cst_err(-errno);
    if (!S_ISREG(st.st_mode))
        return cst_err(-EINVAL);
    mode = fcntl(fd, F_GETFL); /* O_NONBLOCK was for the open of a pipe; io_uring would obey it */
    if (mode < 0 || fcntl(fd, F_SETFL, mode & ~O_NONBLOCK))
        return cst_err(-errno);
    file->slot = -1;
    file->fd = cst_steal_fd(&fd);
    *out = cst_steal(&file);
    return 0;
}

void cst_files_close(struct cst_aio_file *file) {
    cst_close(file->fd);
    cst_free(file);
}

int cst_files_size(struct cst_aio_file *file, uint64_t *out) {
    struct stat st;

    if (fstat(file->fd, &st))
        return cst_err(-errno);
    *out = (uint64_t)st.st_size;
    return 0;
}

int cst_files_resize(struct cst_aio_file *file, uint64_t size) {
    return ftruncate(file->fd, (off_t)size) ? cst_aio_errno(errno) : 0;
}

int cst_files_lock(struct cst_aio_file *file) {
    if (!flock(file->fd, LOCK_EX | LOCK_NB))
        return 0;
    return errno == EWOULDBLOCK ? CST_AIO_E_LOCKED : cst_err(-errno);
}

bool cst_files_undirect(struct cst_aio_file *file) {
    int flags = fcntl(file->fd, F_GETFL);

    if (flags < 0 || fcntl(file->fd, F_SETFL, flags & ~O_DIRECT))
        return false;
    file->direct = false;
    return true;
}

int cst_files_unlink(struct cst_aio *aio, const char *name) {
    return unlinkat(posix(aio)->directory, name, 0) ? cst_aio_errno(errno) : 0;
}

int cst_files_rename(struct cst_aio *aio, const char *from, const char *to) {
    int d = posix(aio)->directory;

    return renameat(d, from, d, to) ? cst_aio_errno(errno) : 0;
}

int cst_files_sync_directory(struct cst_aio *aio) {
    return fsync(posix(aio)->directory) ? cst_err(-errno) : 0;
}

int cst_files_list(struct cst_aio *aio, int (*fn)(void *arg, const char *name), void *arg) {
    int fd = openat(posix(aio)->directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), r = 0;
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *entry;

    if (!dir) {
        r = cst_err(-errno);
        cst_close(fd);
        return r;
    }
    errno = 0;
    while (!r && (entry = readdir(dir)))
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            r = fn(arg, entry->d_name);
    if (!r && errno)
        r = cst_err(-errno);
    (void)closedir(dir);
    return r;
}

int cst_files_space(struct cst_aio *aio, uint64_t *out) {
    struct statvfs st;

    if (fstatvfs(posix(aio)->directory, &st))
        return cst_err(-errno);
    *out = (uint64_t)st.f_bavail * st.f_frsize;
    return 0;
}

int cst_files_fallocate_mode(enum cst_aio_code code) {
    return code == CST_AIO_DISCARD ? FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE : 0;
}
