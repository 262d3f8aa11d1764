/* SPDX-License-Identifier: Apache-2.0 */
/* The test double "private daemon" itself, with shell scripts in the daemon's place. */
#include "tests/lib/check.h"

#include "tests/lib/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char script[] = "/tmp/cistern-spawn-XXXXXX";

static void write_script(const char *body) {
    int fd = open(script, O_WRONLY | O_TRUNC | O_CLOEXEC);

    assert_true(fd >= 0);
    assert_true(dprintf(fd, "#!/usr/bin/python3\n%s", body) > 0);
    (void)close(fd);
}

static const char notify[] = "import os, signal, socket, sys\n"
                             "signal.signal(signal.SIGTERM, lambda *a: os._exit(7))\n"
                             "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
                             "s.connect(os.environ['NOTIFY_SOCKET'])\n"
                             "s.send(b'STATUS=starting')\n"
                             "open(sys.argv[2], 'w').write(' '.join(sys.argv[3:]))\n"
                             "s.send(b'STATUS=up\\nREADY=1')\n"
                             "signal.pause()\n";

static int setup(void **state) {
    int fd = mkstemp(script);

    return fd < 0 || fchmod(fd, 0700) || close(fd);
}

static int teardown(void **state) {
    return unlink(script);
}

static void starts_stops_and_restarts(void **state) {
    const char *const args[] = { "--memory", "1MiB", NULL };
    struct cst_spawned d = CST_SPAWNED_NULL;
    char text[64] = "", dir[64];
    FILE *f;

    write_script(notify);
    assert_int_equal(cst_spawn_start(&d, script, args), 0);
    (void)snprintf(dir, sizeof(dir), "%s", d.dir);
    f = fopen(d.socket, "re");
    assert_non_null(f);
    assert_non_null(fgets(text, sizeof(text), f));
    (void)fclose(f);
    assert_string_equal(text, "--memory 1MiB");
    assert_int_equal(cst_spawn_stop(&d), 7);
    assert_int_equal(cst_spawn_stop(&d), 0);
    assert_int_equal(cst_spawn_start(&d, script, NULL), 0);
    assert_string_equal(d.dir, dir);
    assert_int_equal(kill(d.pid, SIGKILL), 0);
    assert_int_equal(cst_spawn_stop(&d), 256 + SIGKILL);
    cst_spawn_cleanup(&d);
    cst_spawn_cleanup(&d);
    assert_int_equal(access(dir, F_OK), -1);
}

static void tells_when_the_daemon_ends_early(void **state) {
    struct cst_spawned d = CST_SPAWNED_NULL;
    char text[64] = "";
    FILE *f;

    write_script("import sys\nsys.exit('no luck')\n");
    assert_int_equal(cst_spawn_start(&d, script, NULL), -ECHILD);
    f = fopen(d.log, "re");
    assert_non_null(f);
    assert_non_null(fgets(text, sizeof(text), f));
    (void)fclose(f);
    assert_string_equal(text, "no luck\n");
    assert_int_equal(cst_spawn_start(&d, "/nonexistent", NULL), -ECHILD);
    cst_spawn_cleanup(&d);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(starts_stops_and_restarts),
        cmocka_unit_test(tells_when_the_daemon_ends_early),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
