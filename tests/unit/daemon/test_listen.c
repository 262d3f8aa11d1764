/* SPDX-License-Identifier: Apache-2.0 */
/* Listening sockets: one daemon a path, stale sockets, foreign files, rights, default folders. */
#include "tests/lib/check.h"

#include "daemon/listen.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static char dir[64], path[96], text[512];

static int setup(void **state) {
    (void)snprintf(dir, sizeof(dir), "/tmp/cistern-listen-XXXXXX");
    assert_non_null(mkdtemp(dir));
    (void)snprintf(path, sizeof(path), "%s/sock", dir);
    return 0;
}

static int count_files(void) {
    DIR *d = opendir(dir);
    int n = 0;

    for (struct dirent *e = readdir(d); e; e = readdir(d))
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static int teardown(void **state) {
    char name[128];

    (void)unlink(path);
    (void)snprintf(name, sizeof(name), "%s.lock", path);
    (void)unlink(name);
    return rmdir(dir);
}

static int try_connect(void) {
    struct sockaddr_un addr = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), r;

    (void)snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
    r = connect(fd, (const void *)&addr, sizeof(addr));
    close(fd);
    return r;
}

static void listens_with_the_rights_asked_for(void **state) {
    struct cst_listen l = CST_LISTEN_NULL;
    struct stat st;
    mode_t before = umask(022);

    assert_int_equal(cst_listen_open(&l, path, 0640, "0", text, sizeof(text)), 0);
    assert_int_equal(umask(before), 022); /* left as it was */
    assert_int_equal(stat(path, &st), 0);
    assert_true(S_ISSOCK(st.st_mode));
    assert_int_equal(st.st_mode & 0777, 0640);
    assert_int_equal(try_connect(), 0);
    cst_listen_close(&l);
    cst_listen_close(&l);
    assert_int_equal(count_files(), 0);
}

static void a_group_is_a_name_or_a_number_that_exists(void **state) {
    static const char *const none[] = {
        "-1", "4294967295", "4294967296", "no-such-group", "99999999999999999999999999", "0x0", "-0"
    };
    struct cst_listen l = CST_LISTEN_NULL;

    for (size_t i = 0; i < CST_COUNT(none); i++) {
        assert_int_equal(cst_listen_open(&l, path, 0660, none[i], text, sizeof(text)),
                         CST_LISTEN_E_REFUSED);
        assert_non_null(strstr(text, none[i]));
        assert_int_equal(count_files(), 0);
    }
    assert_int_equal(cst_listen_open(&l, path, 0660, "root", text, sizeof(text)), 0);
    cst_listen_close(&l);
}

static void a_second_daemon_is_refused(void **state) {
    struct cst_listen first = CST_LISTEN_NULL, second = CST_LISTEN_NULL;

    assert_int_equal(cst_listen_open(&first, path, 0600, NULL, text, sizeof(text)), 0);
    assert_int_equal(cst_listen_open(&second, path, 0600, NULL, text, sizeof(text)),
                     CST_LISTEN_E_REFUSED);
    assert_non_null(strstr(text, "another cisternd serves"));
    assert_int_equal(second.fd, -1);
    cst_listen_close(&second);
    assert_int_equal(try_connect(), 0); /* the first one is untouched */
    cst_listen_close(&first);
}

/* A killed daemon leaves socket and lock file, but neither listens nor locks. */
static void a_stale_socket_is_replaced(void **state) {
    struct cst_listen l = CST_LISTEN_NULL;

    assert_int_equal(cst_listen_open(&l, path, 0600, NULL, text, sizeof(text)), 0);
    close(l.fd);
    close(l.lock);
    assert_int_equal(count_files(), 2);
    assert_int_equal(try_connect(), -1);
    l = CST_LISTEN_NULL;
    assert_int_equal(cst_listen_open(&l, path, 0600, NULL, text, sizeof(text)), 0);
    assert_int_equal(try_connect(), 0);
    cst_listen_close(&l);
}

static void a_foreign_listener_is_left_alone(void **state) {
    struct sockaddr_un addr = { .sun_family = AF_UNIX };
    struct cst_listen l = CST_LISTEN_NULL;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    (void)snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
    assert_int_equal(bind(fd, (const void *)&addr, sizeof(addr)), 0);
    assert_int_equal(listen(fd, 4), 0);
    assert_int_equal(cst_listen_open(&l, path, 0600, NULL, text, sizeof(text)),
                     CST_LISTEN_E_REFUSED);
    assert_non_null(strstr(text, "another program listens"));
    assert_int_equal(try_connect(), 0);
    close(fd);
}

static void a_file_is_left_alone(void **state) {
    struct cst_listen l = CST_LISTEN_NULL;
    int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);

    assert_int_equal(write(fd, "precious", 8), 8);
    close(fd);
    assert_int_equal(cst_listen_open(&l, path, 0600, NULL, text, sizeof(text)),
                     CST_LISTEN_E_REFUSED);
    assert_non_null(strstr(text, "no socket"));
    assert_int_equal(count_files(), 1);
}

static void impossible_paths_have_a_sentence(void **state) {
    struct cst_listen l = CST_LISTEN_NULL;
    char name[300];

    (void)snprintf(name, sizeof(name), "%s/none/sock", dir);
    assert_int_equal(cst_listen_open(&l, name, 0600, NULL, text, sizeof(text)),
                     CST_LISTEN_E_REFUSED);
    assert_non_null(strstr(text, "No such file"));
    memset(name, 'x', sizeof(name) - 1);
    name[sizeof(name) - 1] = '\0';
    assert_int_equal(cst_listen_open(&l, name, 0600, NULL, text, sizeof(text)),
                     CST_LISTEN_E_REFUSED);
    assert_non_null(strstr(text, "longer than 107"));
    assert_int_equal(cst_listen_open(&l, path, 0600, "no-such-group", text, sizeof(text)),
                     CST_LISTEN_E_REFUSED);
    assert_non_null(strstr(text, "no group"));
    (void)unlink(path);
}

/* ---- folders ---- */

static void a_folder_is_made_private(void **state) {
    char name[96];
    struct stat st;

    (void)snprintf(name, sizeof(name), "%s/d", dir);
    assert_true(cst_listen_folder(name, 0700, text, sizeof(text)));
    assert_int_equal(stat(name, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
    assert_true(cst_listen_folder(name, 0700, text, sizeof(text))); /* ours already */
    assert_int_equal(chmod(name, 0777), 0);
    assert_false(cst_listen_folder(name, 0700, text, sizeof(text)));
    assert_non_null(strstr(text, "not a folder of ours"));
    assert_int_equal(rmdir(name), 0);
}

static void a_link_is_no_folder(void **state) {
    char name[96];

    (void)snprintf(name, sizeof(name), "%s/d", dir);
    assert_int_equal(symlink("/tmp", name), 0);
    assert_false(cst_listen_folder(name, 0700, text, sizeof(text)));
    assert_int_equal(unlink(name), 0);
}

static void a_folder_of_somebody_else_is_not_ours(void **state) {
    char name[96];

    if (geteuid())
        return; /* only root can make one */
    (void)snprintf(name, sizeof(name), "%s/d", dir);
    assert_int_equal(mkdir(name, 0700), 0);
    assert_int_equal(chown(name, 54321, 54321), 0);
    assert_false(cst_listen_folder(name, 0700, text, sizeof(text)));
    assert_int_equal(rmdir(name), 0);
}

int main(void) {
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(listens_with_the_rights_asked_for),
        T(a_group_is_a_name_or_a_number_that_exists),
        T(a_second_daemon_is_refused),
        T(a_stale_socket_is_replaced),
        T(a_foreign_listener_is_left_alone),
        T(a_file_is_left_alone),
        T(impossible_paths_have_a_sentence),
        T(a_folder_is_made_private),
        T(a_link_is_no_folder),
        T(a_folder_of_somebody_else_is_not_ours),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
