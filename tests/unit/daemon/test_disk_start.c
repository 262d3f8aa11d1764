/* SPDX-License-Identifier: Apache-2.0 */
/* What a start says of the disk when it couldn't look for blocks. */
#include "tests/unit/daemon/serverbox.h"

#include "base/fault.h"
#include "base/log.h"
#include "base/random.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static char directory[] = "/tmp/cst-disk-start-XXXXXX";
static int saved_stderr, file;

static int setup(void **state) {
    cst_log_set_level(CST_LOG_INFO);
    saved_stderr = dup(STDERR_FILENO);
    file = memfd_create("log", MFD_CLOEXEC);
    return !mkdtemp(directory) || file < 0 || dup2(file, STDERR_FILENO) < 0;
}

static int teardown(void **state) {
    struct dirent *entry;
    DIR *all = opendir(directory);

    (void)dup2(saved_stderr, STDERR_FILENO);
    (void)close(saved_stderr);
    (void)close(file);
    while (all && (entry = readdir(all)))
        (void)unlinkat(dirfd(all), entry->d_name, 0);
    (void)closedir(all);
    return rmdir(directory);
}

/* Starts a daemon whose nth allocation fails; its log. False: there was no nth. */
static bool start(uint64_t nth, char *log, size_t cap) {
    const struct cst_server_env env = { .clock = &cst_clock_monotonic,
                                        .random = &cst_random_system,
                                        .mem = &cst_mem_host };
    struct cst_server *server = NULL;
    static struct cst_config config;
    bool seen;
    ssize_t n;

    cst_config_defaults(&config);
    config.workers = 1;
    config.disk = 4 << 20;
    (void)snprintf(config.directory, sizeof(config.directory), "%s", directory);
    cst_fault_arm(CST_FAULT_ALLOC, nth, 1);
    if (cst_server_new(&server, &config, &env))
        server = NULL;
    seen = cst_fault_seen(CST_FAULT_ALLOC) >= nth;
    cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
    (void)cst_server_free(server);
    n = pread(file, log, cap - 1, 0);
    assert_true(n >= 0 && !ftruncate(file, 0) && !lseek(file, 0, SEEK_SET));
    log[n] = '\0';
    return seen;
}

static void who_could_not_look_does_not_say_what_there_is(void **state) {
    char log[8192];
    unsigned early = 0;

    cst_fault_join();
    for (uint64_t nth = 1; start(nth, log, sizeof(log)); nth++) {
        if (!strstr(log, "ended early"))
            continue;
        early++;
        assert_null(strstr(log, "no blocks yet"));
        assert_null(strstr(log, " ms after "));
    }
    cst_fault_leave();
    assert_true(early > 0);
    assert_non_null(strstr(log, "no blocks yet")); /* the last one went well */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(who_could_not_look_does_not_say_what_there_is, setup,
                                        teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
