/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_uring where it is forbidden, in children: by a seccomp filter that answers EPERM or ENOSYS the
 * threads take over and say why; without the right to pin memory the ring goes on without. And what
 * the ring itself refuses once it is enabled.
 */
#include "tests/lib/check.h"

#include "store/io.h"

#include <dirent.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = CST_AIO_ALIGN, MANY = 64 << 20 };

static char dir[] = "/tmp/cst-io-refused-XXXXXX";

static int deny(int error) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = { .len = CST_COUNT(code), .filter = code };

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        return -1;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

/* In a child: 0 well, else the line that isn't. */
#define MUST(x)                                                                                    \
    do {                                                                                           \
        if (!(x))                                                                                  \
            _exit(__LINE__ & 255 ? __LINE__ & 255 : 1);                                            \
    } while (0)

static void transfer(struct cst_aio *aio, void *memory) {
    struct cst_aio_file *file;

    MUST(!cst_aio_open(aio, "f", CST_AIO_CREATE, &file));
    memset(memory, 7, PAGE);
    MUST(!cst_aio_now(file, CST_AIO_WRITE, memory, 0, PAGE));
    memset(memory, 0, PAGE);
    MUST(!cst_aio_now(file, CST_AIO_READ, memory, 0, PAGE));
    MUST(*(char *)memory == 7);
    (void)cst_aio_close(file);
}

static void *map_many(void) {
    void *p = mmap(NULL, MANY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    MUST(p != MAP_FAILED);
    return p;
}

static void denied(int error, const char *word) {
    struct cst_aio_options options = { .directory = dir, .kind = CST_AIO_URING };
    struct cst_aio *aio;
    char why[160];

    MUST(!deny(error));
    MUST(cst_aio_new(&aio, &options, why, sizeof(why)) == CST_AIO_E_REFUSED);
    MUST(strstr(why, word));
    options.kind = CST_AIO_AUTO;
    MUST(!cst_aio_new(&aio, &options, why, sizeof(why)));
    MUST(!strcmp(cst_aio_name(aio), "threads"));
    MUST(*why);
    MUST(!cst_aio_register(aio, map_many(), MANY));
    transfer(aio, map_many());
    (void)cst_aio_free(aio);
    _exit(0);
}

static void run_eperm(void) {
    denied(EPERM, "EPERM");
}

static void run_enosys(void) {
    denied(ENOSYS, "ENOSYS");
}

/* Root may pin without bounds: another uid it is, with RLIMIT_MEMLOCK as the unit's default. */
static void run_memlock(void) {
    struct cst_aio_options options = { .directory = dir, .kind = CST_AIO_URING };
    struct rlimit little = { 64 << 10, 64 << 10 };
    struct cst_aio *aio;
    char why[160];
    void *memory = map_many();

    MUST(!chown(dir, 65534, 65534));
    MUST(!setrlimit(RLIMIT_MEMLOCK, &little));
    MUST(!setresgid(65534, 65534, 65534) && !setresuid(65534, 65534, 65534));
    MUST(!cst_aio_new(&aio, &options, why, sizeof(why)));
    MUST(!cst_aio_register(aio, memory, MANY));
    transfer(aio, memory);
    (void)cst_aio_free(aio);
    _exit(0);
}

static int find_ring(void) {
    DIR *fds = opendir("/proc/self/fd");
    struct dirent *e;
    int found = -1;

    MUST(fds);
    while ((e = readdir(fds))) {
        char path[300], target[64] = "";

        (void)snprintf(path, sizeof(path), "/proc/self/fd/%s", e->d_name);
        if (readlink(path, target, sizeof(target) - 1) > 0 && strstr(target, "io_uring"))
            found = (int)strtol(e->d_name, NULL, 10);
    }
    (void)closedir(fds);
    return found;
}

/* Neither other registrations nor, through a raw entry, other operations. */
static void run_restricted(void) {
    struct cst_aio_options options = { .directory = dir, .kind = CST_AIO_URING };
    struct cst_aio *aio;
    char why[160];
    int ring;

    MUST(!cst_aio_new(&aio, &options, why, sizeof(why)));
    ring = find_ring();
    MUST(ring >= 0);
    MUST(syscall(SYS_io_uring_register, ring, IORING_REGISTER_PERSONALITY, NULL, 0) < 0);
    MUST(errno == EACCES);
    MUST(syscall(SYS_io_uring_register, ring, IORING_REGISTER_RESTRICTIONS, NULL, 0) < 0);
    (void)cst_aio_free(aio);
    _exit(0);
}

struct row {
    const char *name;
    void (*run)(void);
};

static void check_row(void **state) {
    const struct row *row = *state;
    char file[64];
    int status;
    pid_t pid;

    memcpy(dir + sizeof(dir) - 7, "XXXXXX", 6);
    assert_non_null(mkdtemp(dir));
    (void)fflush(NULL);
    pid = fork();
    if (!pid)
        row->run();
    assert_int_equal(waitpid(pid, &status, 0), pid);
    (void)snprintf(file, sizeof(file), "%s/f", dir);
    (void)unlink(file);
    (void)rmdir(dir);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void) {
    static const struct row rows[] = { { "EPERM", run_eperm }, { "ENOSYS", run_enosys } };
    static const struct row ring[] = { { "memlock", run_memlock },
                                       { "restricted", run_restricted } };
    struct cst_aio_options options = { .directory = "/tmp", .kind = CST_AIO_URING };
    struct cst_aio *aio;
    char why[160];
    int failed = cst_run_rows(rows, check_row);

    if (cst_aio_new(&aio, &options, why, sizeof(why))) {
        if (failed)
            return failed;
        return cst_skip("two tests of io_uring itself: %s", why);
    }
    (void)cst_aio_free(aio);
    return geteuid() ? failed : failed + cst_run_rows(ring, check_row);
}
