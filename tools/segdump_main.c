/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cistern-segdump: what lies in a directory of the disk tier, and whether it is whole. Opens files
 * for reading only; takes no lock, so a daemon may be at work, and what it is just writing may look
 * broken then. One thread.
 */
#include "tools/segdump_crypt.h"

#include "base/macros.h"
#include "base/mem.h"
#include "tools/segdump.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char usage[] =
    "usage: cistern-segdump [--json] [--records] [--key-file FILE] DIRECTORY | FILE...\n"
    "  --json           one object a line\n"
    "  --records        a line for each record, too; without it only for those that fail a check\n"
    "  --key-file FILE  the root key, as the daemon has it: what is encrypted is checked, too\n"
    "Exit status: 0 everything holds, 1 something fails a check, 2 something can't be read.\n";

static bool file_read(void *arg, uint64_t offset, void *out, size_t n) {
    const int *fd = arg;

    for (size_t done = 0; done < n;) {
        ssize_t r = pread(*fd, (char *)out + done, n - done, (off_t)(offset + done));

        if (r < 0 && errno == EINTR)
            continue;
        if (r <= 0)
            return false;
        done += (size_t)r;
    }
    return true;
}

/* folder: of a directory that may hold other files, too; AT_FDCWD: the file was named. */
static int dump_file(struct cst_dump *d, int folder, const char *path) {
    int fd = openat(folder, path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    const char *slash = strrchr(path, '/');
    struct cst_dump_file f = { .name = slash ? slash + 1 : path, .read = file_read, .arg = &fd };
    struct stat st;
    int r = 0;

    if (fd < 0 || fstat(fd, &st) || !S_ISREG(st.st_mode)) {
        (void)fprintf(stderr, "cistern-segdump: %s: %s\n", path,
                      fd < 0 ? strerrordesc_np(errno) : "is no file");
        r = 2;
    } else {
        f.size = (uint64_t)st.st_size;
        if (!cst_dump(d, &f) && folder == AT_FDCWD) {
            (void)fprintf(stderr, "cistern-segdump: %s: is no file of a disk tier, by its name\n",
                          path);
            r = 2;
        }
    }
    if (fd >= 0)
        (void)close(fd);
    return r;
}

static int is_ours(const struct dirent *e) {
    return !strcmp(e->d_name, "cistern-store") || !strcmp(e->d_name, "checkpoint") ||
           !strcmp(e->d_name, "keys") || !strncmp(e->d_name, "seg-", 4);
}

/* The superblock first: the others are compared with it. */
static int in_order(const struct dirent **a, const struct dirent **b) {
    bool first = !strcmp((*a)->d_name, "cistern-store"),
         second = !strcmp((*b)->d_name, "cistern-store");

    return first != second ? second - first : strcmp((*a)->d_name, (*b)->d_name);
}

static int dump_folder(struct cst_dump *d, const char *path) {
    struct dirent **names;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), r = 0;
    int n = fd < 0 ? -1 : scandirat(fd, ".", &names, is_ours, in_order);

    if (n < 0) {
        (void)fprintf(stderr, "cistern-segdump: %s: %s\n", path, strerrordesc_np(errno));
        r = 2;
    }
    for (int i = 0; i < n; i++) {
        int one = d->wrong_root ? 0 : dump_file(d, fd, names[i]->d_name);

        r = CST_MAX(r, one);
        cst_free(names[i]);
    }
    if (n >= 0)
        cst_free(names);
    if (n == 0) {
        (void)fprintf(stderr, "cistern-segdump: %s: holds no disk tier\n", path);
        r = 2;
    }
    if (fd >= 0)
        (void)close(fd);
    return r;
}

static bool read_root(struct cst_dump *d, const char *path) {
    char text[2 * CST_DISK_KEY + 8];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text));

    d->has_root = n > 0 && cst_dump_root(d->root, text, (size_t)n);
    if (n < 0)
        (void)fprintf(stderr, "cistern-segdump: %s: %s\n", path, strerrordesc_np(errno));
    else if (!d->has_root)
        (void)fprintf(stderr,
                      "cistern-segdump: %s must hold 32 bytes or 64 hexadecimal digits: give the "
                      "daemon's key file\n",
                      path);
    cst_dump_cleanse(text, sizeof(text));
    if (fd >= 0)
        (void)close(fd);
    return d->has_root;
}

/* Returns the index of the first path, or < 0: - 1 - the exit status. */
static int read_options(struct cst_dump *d, int argc, char **argv) {
    int i = 1;

    for (; i < argc && argv[i][0] == '-'; i++) {
        if (!strcmp(argv[i], "--json")) {
            d->form = CST_DUMP_JSON;
        } else if (!strcmp(argv[i], "--records")) {
            d->records = true;
        } else if (!strcmp(argv[i], "--key-file") && i + 1 < argc) {
            if (!read_root(d, argv[++i]))
                return -1 - 2;
        } else {
            bool help = !strcmp(argv[i], "--help");

            (void)fputs(usage, help ? stdout : stderr);
            return -1 - (help ? 0 : 2);
        }
    }
    if (i < argc)
        return i;
    (void)fputs(usage, stderr);
    return -1 - 2;
}

static void tell_unchecked(const struct cst_dump *d) {
    if (!d->unchecked || d->form != CST_DUMP_TEXT)
        return;
    (void)printf("%" PRIu64 " encrypted records of %" PRIu64
                 " bytes were checked as far as their headers go: %s\n",
                 d->unchecked, d->unchecked_bytes,
                 d->has_root ? "there is no key for them" : "give the root key with --key-file");
}

int main(int argc, char **argv) {
    struct cst_dump d = { .form = CST_DUMP_TEXT };
    int r = 0, i = read_options(&d, argc, argv);

    for (; i >= 0 && i < argc && !d.wrong_root; i++) {
        struct stat st;
        bool folder = !stat(argv[i], &st) && S_ISDIR(st.st_mode);
        int one = folder ? dump_folder(&d, argv[i]) : dump_file(&d, AT_FDCWD, argv[i]);

        r = CST_MAX(r, one);
    }
    if (d.wrong_root) {
        (void)fprintf(stderr,
                      "cistern-segdump: %s was encrypted with another root key: give that "
                      "one with --key-file\n",
                      argv[i - 1]);
        r = 2;
    }
    tell_unchecked(&d);
    cst_dump_deinit(&d);
    if (fflush(stdout) || ferror(stdout)) {
        (void)fprintf(stderr, "cistern-segdump: standard output: %s\n", strerrordesc_np(errno));
        r = 2;
    }
    return i < 0 ? -1 - i : r ? r : d.bad != 0;
}
