/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host backend: what a slab is, and every way in which a holder of its descriptor may try to
 * write or resize it - by the owner's uid and by another one, where root is available to switch.
 */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "gpu/gpu.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SIZE = 64 * 1024, OTHER_UID = 65534, MARK = 0x5a };

#ifndef F_SEAL_EXEC
#define F_SEAL_EXEC 0x0020
#endif

/* ---- ways to write: true if the attempt went through ---- */

static bool by_write(int fd) {
    return pwrite(fd, "x", 1, 100) == 1;
}

static bool by_writev(int fd) {
    struct iovec part = { .iov_base = (char[]){ 'x' }, .iov_len = 1 };

    return pwritev(fd, &part, 1, 100) == 1;
}

static bool by_map(int fd) {
    char *p = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (p == MAP_FAILED)
        return false;
    p[100] = 'x';
    (void)munmap(p, SIZE);
    return true;
}

static bool by_mprotect(int fd) {
    char *p = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, fd, 0);
    bool done;

    if (p == MAP_FAILED)
        return false;
    done = mprotect(p, SIZE, PROT_READ | PROT_WRITE) == 0;
    if (done)
        p[100] = 'x';
    (void)munmap(p, SIZE);
    return done;
}

/* A new open file description through /proc, which seals of the old one would not bind. */
static bool by_reopen(int fd) {
    char path[64];
    int again;
    bool done;

    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    again = open(path, O_RDWR | O_CLOEXEC);
    if (again < 0)
        return false;
    done = by_write(again) || by_map(again);
    cst_close(again);
    return done;
}

static bool by_punch(int fd) {
    return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0;
}

/* What a debugger does to memory that is mapped read-only. */
static bool by_proc_mem(int fd) {
    const char *p = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, fd, 0);
    int mem = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    bool done;

    if (p == MAP_FAILED)
        return false;
    done = pwrite(mem, "x", 1, (off_t)(uintptr_t)p + 100) == 1;
    cst_close(mem);
    (void)munmap((void *)(uintptr_t)p, SIZE);
    return done;
}

static bool by_truncating_open(int fd) {
    char path[64];
    int again;

    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    again = open(path, O_RDWR | O_TRUNC | O_CLOEXEC);
    cst_close(again);
    return again >= 0;
}

static bool by_madv_remove(int fd) {
    char *p = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, fd, 0);
    bool done;

    if (p == MAP_FAILED)
        return false;
    done = madvise(p, 4096, MADV_REMOVE) == 0;
    (void)munmap(p, SIZE);
    return done;
}

static bool by_sendfile(int fd) {
    int from = memfd_create("source", MFD_CLOEXEC);
    off_t at = 0;
    bool done = write(from, "x", 1) == 1 && sendfile(fd, from, &at, 1) == 1;

    cst_close(from);
    return done;
}

static bool by_copy_file_range(int fd) {
    int from = memfd_create("source", MFD_CLOEXEC);
    off_t at = 0, to = 100;
    bool done = write(from, "x", 1) == 1 && copy_file_range(from, &at, fd, &to, 1, 0) == 1;

    cst_close(from);
    return done;
}

static bool by_shrink(int fd) {
    return ftruncate(fd, 4096) == 0;
}

static bool by_grow(int fd) {
    return ftruncate(fd, SIZE * 2L) == 0;
}

static bool by_fallocate_grow(int fd) {
    return fallocate(fd, 0, SIZE, 4096) == 0;
}

static bool by_unseal(int fd) {
    int seals = fcntl(fd, F_GET_SEALS);

    return fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) == 0 || fcntl(fd, F_GET_SEALS) != seals;
}

static bool by_chmod_exec(int fd) {
    struct stat st;

    return fchmod(fd, 0700) == 0 && fstat(fd, &st) == 0 && st.st_mode & 0111;
}

/* staging: the client's to write, so writing must work; resizing must not */
static const struct attempt {
    const char *name;
    bool (*try)(int fd);
    bool staging_allows;
} attempts[] = {
    { "write", by_write, true },
    { "writev", by_writev, true },
    { "writable mapping", by_map, true },
    { "mprotect", by_mprotect, true },
    { "reopen through /proc", by_reopen, true },
    { "punch a hole", by_punch, true },
    { "MADV_REMOVE", by_madv_remove, true },
    { "sendfile", by_sendfile, true },
    { "copy_file_range", by_copy_file_range, true },
    { "/proc/self/mem", by_proc_mem, false },
    { "open with O_TRUNC", by_truncating_open, false },
    { "shrink", by_shrink, false },
    { "grow", by_grow, false },
    { "grow by fallocate", by_fallocate_grow, false },
    { "change the seals", by_unseal, false },
};

static void make(struct cst_mem_slab *slab, enum cst_slab_use use) {
    assert_int_equal(cst_mem_host.slab_make(slab, SIZE, use), 0);
    assert_int_equal(slab->size, SIZE);
    memset(slab->base, MARK, SIZE);
}

static bool unchanged(const struct cst_mem_slab *slab) {
    struct stat st;

    if (fstat(slab->fd, &st) != 0 || st.st_size != SIZE)
        return false;
    for (size_t i = 0; i < SIZE; i++)
        if (slab->base[i] != MARK)
            return false;
    return true;
}

static void read_only_refuses(void **state) {
    const struct attempt *a = *state;
    struct cst_mem_slab slab;

    make(&slab, CST_SLAB_READ_ONLY);
    assert_false(a->try(slab.fd));
    assert_true(unchanged(&slab));
    cst_mem_host.slab_drop(&slab);
}

/* mprotect of a mapping is allowed or not as writing is; some calls need their mapping writable. */
static void staging_allows_writes_only(void **state) {
    const struct attempt *a = *state;
    struct cst_mem_slab slab;
    bool done;

    make(&slab, CST_SLAB_STAGING);
    done = a->try(slab.fd);
    if (a->staging_allows)
        assert_true(done);
    else
        assert_true(!done && unchanged(&slab));
    cst_mem_host.slab_drop(&slab);
}

/* In a child of another uid, with the descriptor as a client would have it. */
static void other_uid_refused(void **state) {
    const struct attempt *a = *state;
    struct cst_mem_slab slab;
    int status;
    pid_t pid;

    make(&slab, CST_SLAB_READ_ONLY);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        if (setresgid(OTHER_UID, OTHER_UID, OTHER_UID) < 0 ||
            setresuid(OTHER_UID, OTHER_UID, OTHER_UID) < 0)
            _exit(2);
        _exit(a->try(slab.fd));
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_true(unchanged(&slab));
    cst_mem_host.slab_drop(&slab);
}

/* Reading and mapping for reading is what the descriptor is passed for; and 0600 keeps another uid
 * from reopening even its staging. */
static void other_uid_reads(void **state) {
    struct cst_mem_slab hot, staging;
    int status;
    pid_t pid;

    make(&hot, CST_SLAB_READ_ONLY);
    make(&staging, CST_SLAB_STAGING);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        const char *p;

        if (setresgid(OTHER_UID, OTHER_UID, OTHER_UID) < 0 ||
            setresuid(OTHER_UID, OTHER_UID, OTHER_UID) < 0)
            _exit(2);
        p = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, hot.fd, 0);
        _exit(p == MAP_FAILED || p[SIZE - 1] != MARK || !by_map(staging.fd) ||
              by_reopen(staging.fd) || by_reopen(hot.fd));
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_int_equal(staging.base[100], 'x');
    cst_mem_host.slab_drop(&hot);
    cst_mem_host.slab_drop(&staging);
}

static void seals_and_mode(void **state) {
    const int common = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    struct cst_mem_slab slab;
    struct stat st;

    make(&slab, CST_SLAB_READ_ONLY);
    assert_int_equal(fcntl(slab.fd, F_GET_SEALS) & ~F_SEAL_EXEC, common | F_SEAL_FUTURE_WRITE);
    assert_int_equal(fstat(slab.fd, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0600);
    assert_true(fcntl(slab.fd, F_GETFD) & FD_CLOEXEC);
    if (fcntl(slab.fd, F_GET_SEALS) & F_SEAL_EXEC)
        assert_false(by_chmod_exec(slab.fd));
    cst_mem_host.slab_drop(&slab);
    make(&slab, CST_SLAB_STAGING);
    assert_int_equal(fcntl(slab.fd, F_GET_SEALS) & ~F_SEAL_EXEC, common);
    cst_mem_host.slab_drop(&slab);
}

/* Pages are there before anybody touches them, and are left out of core dumps. */
static void prefaulted_and_not_dumped(void **state) {
    struct cst_mem_slab slab;
    struct stat st;
    char line[512], range[64];
    bool found = false, dont_dump = false;
    FILE *f;

    assert_int_equal(cst_mem_host.slab_make(&slab, SIZE, CST_SLAB_READ_ONLY), 0);
    assert_int_equal(fstat(slab.fd, &st), 0);
    assert_true((uint64_t)st.st_blocks * 512 >= SIZE);
    (void)snprintf(range, sizeof(range), "%lx-", (unsigned long)(uintptr_t)slab.base);
    f = fopen("/proc/self/smaps", "re");
    assert_non_null(f);
    while (fgets(line, sizeof(line), f)) {
        if (strncmp(line, range, strlen(range)) == 0)
            found = true;
        if (found && strncmp(line, "VmFlags:", 8) == 0) {
            dont_dump = strstr(line, " dd") != NULL;
            break;
        }
    }
    (void)fclose(f);
    assert_true(found && dont_dump);
    cst_mem_host.slab_drop(&slab);
}

static void sizes(void **state) {
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    struct cst_mem_slab slab = CST_MEM_SLAB_NULL;

    assert_int_equal(cst_mem_host.slab_make(&slab, 0, CST_SLAB_STAGING), -EINVAL);
    assert_true(cst_mem_host.slab_make(&slab, UINT64_MAX, CST_SLAB_STAGING) < 0);
    assert_true(cst_mem_host.slab_make(&slab, UINT64_C(1) << 62, CST_SLAB_STAGING) < 0);
    assert_int_equal(slab.fd, -1);
    assert_int_equal(cst_mem_host.slab_make(&slab, 1, CST_SLAB_STAGING), 0);
    assert_int_equal(slab.size, page);
    cst_mem_host.slab_drop(&slab);
    assert_null(slab.base);
    assert_int_equal(slab.fd, -1);
    cst_mem_host.slab_drop(&slab); /* twice is fine */
}

/* Each step fails in turn; nothing stays open or mapped. */
static void faults(void **state) {
    struct cst_mem_slab slab = CST_MEM_SLAB_NULL;
    int probe = dup(0), r;
    unsigned failures = 0;

    cst_fault_join();
    for (;;) {
        cst_fault_arm(CST_FAULT_MAP, failures + 1, 1);
        r = cst_mem_host.slab_make(&slab, SIZE, CST_SLAB_READ_ONLY);
        if (r == 0)
            break;
        failures++;
        assert_int_equal(r, -ENOMEM);
        assert_int_equal(slab.fd, -1);
        assert_null(slab.base);
    }
    cst_fault_arm(CST_FAULT_MAP, 0, 0);
    cst_fault_leave();
    assert_int_equal(failures, 3);
    assert_int_equal(slab.fd, probe + 1); /* the lowest free number: none leaked */
    cst_close(probe);
    cst_mem_host.slab_drop(&slab);
}

/* An older kernel, as a filter: no MFD_NOEXEC_SEAL (before 6.3), no MADV_POPULATE_WRITE (5.14). */
static bool become_old_kernel(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 2),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, 0x8 /* MFD_NOEXEC_SEAL */, 4, 3),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 2),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 23 /* MADV_POPULATE_WRITE */, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
    };
    struct sock_fprog program = { .len = CST_COUNT(code), .filter = code };

    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0 &&
           memfd_create("new", 0x8 | MFD_CLOEXEC) < 0 && errno == EINVAL;
}

static int make_on_old_kernel(void) {
    struct cst_mem_slab slab;
    struct stat st;

    if (!become_old_kernel())
        return 2;
    if (cst_mem_host.slab_make(&slab, SIZE, CST_SLAB_READ_ONLY) != 0 || fstat(slab.fd, &st) != 0)
        return 3;
    if ((uint64_t)st.st_blocks * 512 < SIZE || (st.st_mode & 07777) != 0600)
        return 4;
    memset(slab.base, MARK, SIZE);
    for (size_t i = 0; i < CST_COUNT(attempts); i++)
        if (attempts[i].try(slab.fd) || !unchanged(&slab))
            return 5;
    return 0;
}

static void old_kernel(void **state) {
    int status;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0)
        _exit(make_on_old_kernel());
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* A file as large is not allowed: an error, and no descriptor stays open. */
static void no_room(void **state) {
    struct rlimit limit = { .rlim_cur = 1 << 20, .rlim_max = RLIM_INFINITY };
    struct cst_mem_slab slab = CST_MEM_SLAB_NULL;
    int probe = dup(0), status;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        (void)setrlimit(RLIMIT_FSIZE, &limit);
        (void)signal(SIGXFSZ, SIG_IGN);
        _exit(cst_mem_host.slab_make(&slab, 2 << 20, CST_SLAB_STAGING) != -EFBIG || slab.fd != -1 ||
              dup(0) != probe + 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    cst_close(probe);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(old_kernel),     cmocka_unit_test(no_room),
        cmocka_unit_test(seals_and_mode), cmocka_unit_test(prefaulted_and_not_dumped),
        cmocka_unit_test(sizes),          cmocka_unit_test(faults),
    };
    int failed = cst_run_rows(attempts, read_only_refuses) +
                 cst_run_rows(attempts, staging_allows_writes_only) +
                 cmocka_run_group_tests(tests, NULL, NULL);
    const struct CMUnitTest as_other[] = { cmocka_unit_test(other_uid_reads) };

    if (failed || geteuid() != 0)
        return failed ? failed : cst_skip("root, to become another uid");
    return cst_run_rows(attempts, other_uid_refused) + cmocka_run_group_tests(as_other, NULL, NULL);
}
