/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the socket, trusting its server, and the Hello. */
#include "tests/lib/check.h"
#include "tests/unit/client/fake_daemon.h"

#include "client/client_dial.h"
#include "proto/status.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NOBODY = 65534 };

static int32_t open_with(const cistern_client_options *options) {
    cistern_client *c = NULL;
    int32_t status = cistern_client_open(&c, options);

    assert_true(!c == (status != CISTERN_OK));
    cistern_client_close(c);
    return status;
}

static int32_t open_path(const char *path) {
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;

    options.socket_path = path;
    return open_with(&options);
}

/* ---- where ---- */

static void test_argument_beats_environment(void **state) {
    struct fake_daemon *f = fake_new();

    assert_int_equal(setenv("CISTERN_SOCKET", "/nonexistent/sock", 1), 0);
    assert_int_equal(open_path(f->path), CISTERN_OK);
    assert_int_equal(open_path(NULL), CISTERN_E_DISCONNECTED);
    assert_non_null(strstr(cistern_last_error(), "/nonexistent/sock"));
    assert_int_equal(setenv("CISTERN_SOCKET", f->path, 1), 0);
    assert_int_equal(open_path(NULL), CISTERN_OK);
    assert_int_equal(unsetenv("CISTERN_SOCKET"), 0);
    fake_free(f);
}

static void test_usual_paths(void **state) {
    struct cst_dial d;
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;
    char own[64];

    (void)snprintf(own, sizeof(own), "/tmp/cistern-%u/cistern.sock", (unsigned)geteuid());
    assert_int_equal(setenv("XDG_RUNTIME_DIR", "/run/user/12345", 1), 0);
    assert_int_equal(cst_dial_init(&d, &options), CISTERN_OK);
    assert_int_equal(d.n_paths, 3);
    assert_string_equal(d.paths[0], "/run/cistern/cistern.sock");
    assert_string_equal(d.paths[1], "/run/user/12345/cistern/cistern.sock");
    assert_string_equal(d.paths[2], own);
    assert_true(d.private_dir);
    cst_dial_deinit(&d);
    assert_int_equal(unsetenv("XDG_RUNTIME_DIR"), 0);
    assert_int_equal(cst_dial_init(&d, &options), CISTERN_OK);
    assert_int_equal(d.n_paths, 2);
    assert_string_equal(d.paths[1], own);
    cst_dial_deinit(&d);
    cst_dial_deinit(&d);
}

/* The folder of the last path, as an attacker in /tmp could leave it. */
static void test_second_path_is_used(void **state) {
    struct fake_daemon *f = fake_new();
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    struct cst_dial d = { .paths = { (char *)(uintptr_t) "/nonexistent/a", f->path },
                          .n_paths = 2,
                          .private_dir = true,
                          .name = (char *)(uintptr_t) "test",
                          .server_uid = -1,
                          .timeout_ms = 10000 };
    struct cst_hello hello;

    assert_int_equal(chmod(f->dir, 0720), 0);
    assert_int_equal(cst_dial(&d, fd, &hello), CISTERN_E_DISCONNECTED);
    assert_int_equal(chmod(f->dir, 0700), 0);
    assert_int_equal(cst_dial(&d, fd, &hello), CISTERN_OK);
    assert_string_equal(hello.namespace_name, "uid-test");
    assert_string_equal(hello.daemon_version, "fake");
    assert_int_equal(hello.epoch, 1);
    cst_close(fd);
    fake_free(f);
}

static void test_private_dir(void **state) {
    char dir[] = "/tmp/cistern-dir-XXXXXX", link[64], file[64];
    int fd;

    assert_non_null(mkdtemp(dir));
    (void)snprintf(link, sizeof(link), "%s-link", dir);
    (void)snprintf(file, sizeof(file), "%s/file", dir);
    assert_int_equal(symlink(dir, link), 0);
    fd = open(file, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_true(cst_dial_is_private_dir(dir, geteuid()));
    assert_false(cst_dial_is_private_dir(link, geteuid()));
    assert_false(cst_dial_is_private_dir(file, geteuid()));
    assert_false(cst_dial_is_private_dir("/nonexistent/x", geteuid()));
    assert_false(cst_dial_is_private_dir(dir, geteuid() + 1));
    assert_int_equal(chmod(dir, 0702), 0);
    assert_false(cst_dial_is_private_dir(dir, geteuid()));
    assert_int_equal(chmod(dir, 0755), 0);
    assert_true(cst_dial_is_private_dir(dir, geteuid()));
    cst_close(fd);
    (void)unlink(file);
    (void)unlink(link);
    (void)rmdir(dir);
}

static void test_path_too_long(void **state) {
    char path[200];

    memset(path, 'x', sizeof(path) - 1);
    path[0] = '/';
    path[sizeof(path) - 1] = '\0';
    assert_int_equal(open_path(path), CISTERN_E_BAD_ARGUMENT);
    assert_non_null(strstr(cistern_last_error(), "199 bytes"));
    path[108] = '\0';
    assert_int_equal(open_path(path), CISTERN_E_BAD_ARGUMENT);
    path[107] = '\0'; /* fits: there is just nobody */
    assert_int_equal(open_path(path), CISTERN_E_DISCONNECTED);
    assert_int_equal(open_path(""), CISTERN_E_BAD_ARGUMENT);
}

static void test_options(void **state) {
    struct fake_daemon *f = fake_new();
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;
    cistern_client *c = NULL;

    options.socket_path = f->path;
    options.size = 0;
    assert_int_equal(open_with(&options), CISTERN_E_BAD_ARGUMENT);
    options.size = offsetof(cistern_client_options, server_uid); /* an older program */
    options.server_uid = 4711;
    assert_int_equal(open_with(&options), CISTERN_OK);
    options.size = sizeof(options);
    options.flags = 1u << 30;
    assert_int_equal(open_with(&options), CISTERN_E_BAD_ARGUMENT);
    assert_int_equal(cistern_client_open(NULL, NULL), CISTERN_E_BAD_ARGUMENT);
    options.flags = CISTERN_CLIENT_LAZY;
    options.socket_path = "/nonexistent/sock";
    assert_int_equal(cistern_client_open(&c, &options), CISTERN_OK);
    assert_int_equal(cistern_client_ping(c), CISTERN_E_DISCONNECTED);
    cistern_client_close(c);
    cistern_client_close(NULL);
    fake_free(f);
}

/* ---- who ---- */

static void test_trust(void **state) {
    assert_true(cst_dial_is_trusted(0, -1));
    assert_true(cst_dial_is_trusted(geteuid(), -1));
    assert_false(cst_dial_is_trusted(4711, -1));
    assert_true(cst_dial_is_trusted(4711, 4711));
    assert_false(cst_dial_is_trusted(4712, 4711));
}

/* A server of another uid: refused, unless the caller or the environment names it. */
static void test_foreign_server(void **state) {
    struct fake_daemon *f = fake_new();
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;

    fake_stop(f);
    f->server_uid = NOBODY;
    fake_start(f);
    options.socket_path = f->path;
    assert_int_equal(open_with(&options), CISTERN_E_UNTRUSTED_SERVER);
    assert_non_null(strstr(cistern_last_error(), "65534"));
    fake_lock(f);
    assert_int_equal(f->n_requests[CST_MSG_HELLO], 0); /* not a byte was sent */
    fake_unlock(f);
    options.server_uid = NOBODY;
    assert_int_equal(open_with(&options), CISTERN_OK);
    options.server_uid = -1;
    assert_int_equal(setenv("CISTERN_SERVER_UID", "65534", 1), 0);
    assert_int_equal(open_with(&options), CISTERN_OK);
    assert_int_equal(setenv("CISTERN_SERVER_UID", "65534x", 1), 0);
    assert_int_equal(open_with(&options), CISTERN_E_UNTRUSTED_SERVER);
    assert_int_equal(unsetenv("CISTERN_SERVER_UID"), 0);
    fake_free(f);
}

/* ---- hello ---- */

enum answer { SILENCE, HANG_UP, GARBAGE, OTHER_TYPE, ERROR, REPLY };

struct hello_row {
    const char *name;
    enum answer answer;
    int error;
    uint32_t version, packet_max, keys_max;
    size_t name_length;
    int32_t expected;
};

static const struct hello_row hello_rows[] = {
    { "silence", SILENCE, 0, 0, 0, 0, 0, CISTERN_E_TIMEOUT },
    { "hang up", HANG_UP, 0, 0, 0, 0, 0, CISTERN_E_DISCONNECTED },
    { "garbage", GARBAGE, 0, 0, 0, 0, 0, CISTERN_E_CORRUPT },
    { "another message", OTHER_TYPE, 0, 0, 0, 0, 0, CISTERN_E_CORRUPT },
    { "bad version", ERROR, CST_STATUS_BAD_VERSION, 0, 0, 0, 0, CISTERN_E_BAD_VERSION },
    { "denied", ERROR, CST_STATUS_DENIED, 0, 0, 0, 0, CISTERN_E_DENIED },
    { "busy", ERROR, CST_STATUS_BUSY, 0, 0, 0, 0, CISTERN_E_BUSY },
    { "library's status", ERROR, CST_STATUS_FORKED, 0, 0, 0, 0, CISTERN_E_INTERNAL },
    { "unknown status", ERROR, 999, 0, 0, 0, 0, CISTERN_E_INTERNAL },
    { "version 2", REPLY, 0, 2, 131072, 1000, 4, CISTERN_E_BAD_VERSION },
    { "tiny packets", REPLY, 0, 1, 100, 1000, 4, CISTERN_E_CORRUPT },
    { "no keys", REPLY, 0, 1, 131072, 0, 4, CISTERN_E_CORRUPT },
    { "endless name", REPLY, 0, 1, 131072, 1000, CST_NAMESPACE_MAX, CISTERN_E_CORRUPT },
    { "longest name", REPLY, 0, 1, 131072, 1000, CST_NAMESPACE_MAX - 1, CISTERN_OK },
    { "larger packets than ours", REPLY, 0, 1, 1 << 30, 1000, 4, CISTERN_OK },
};

static void hello_reply(struct fake_daemon *f, struct fake_connection *c,
                        const struct cst_packet *p, const struct hello_row *row) {
    Cistern__V1__HelloReply reply = CISTERN__V1__HELLO_REPLY__INIT;
    char name[CST_NAMESPACE_MAX + 1] = "";

    memset(name, 'n', row->name_length);
    reply.version = row->version;
    reply.packet_max = row->packet_max;
    reply.keys_max = row->keys_max;
    reply.namespace_ = name;
    fake_reply(f, c, p, &reply.base);
}

static bool answer_hello(struct fake_daemon *f, struct fake_connection *c,
                         const struct cst_packet *p) {
    const struct hello_row *row = f->hook_arg;
    struct cst_packet other = *p;

    if (p->type != CST_MSG_HELLO)
        return false;
    other.type = CST_MSG_PING;
    if (row->answer == HANG_UP)
        (void)shutdown(c->fd, SHUT_RDWR);
    else if (row->answer == GARBAGE)
        fake_send(c, "garbage", 7);
    else if (row->answer == OTHER_TYPE)
        fake_answer(f, c, &other);
    else if (row->answer == ERROR)
        fake_error(f, c, p, row->error);
    else if (row->answer == REPLY)
        hello_reply(f, c, p, row);
    return true;
}

static void test_hello(void **state) {
    struct hello_row row = **(struct hello_row **)state;
    struct fake_daemon *f = fake_new();
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;

    fake_set_hook(f, answer_hello, &row);
    options.socket_path = f->path;
    options.timeout_ms = row.answer == SILENCE ? 20 : 0;
    assert_int_equal(open_with(&options), row.expected);
    if (row.expected)
        assert_true(cistern_last_error()[0] != '\0');
    fake_free(f);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_argument_beats_environment),
        cmocka_unit_test(test_usual_paths),
        cmocka_unit_test(test_second_path_is_used),
        cmocka_unit_test(test_private_dir),
        cmocka_unit_test(test_path_too_long),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_trust),
    };
    static const struct CMUnitTest as_root[] = { cmocka_unit_test(test_foreign_server) };
    int failed = cst_run_rows(hello_rows, test_hello) + cmocka_run_group_tests(tests, NULL, NULL);

    if (geteuid() == 0)
        failed += cmocka_run_group_tests(as_root, NULL, NULL);
    return failed;
}
