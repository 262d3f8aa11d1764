/* SPDX-License-Identifier: Apache-2.0 */
/* The configuration: each type of value, its bounds, files with their mistakes, reloading. */
#include "tests/lib/check.h"

#include "base/macros.h"
#include "daemon/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct cst_config config, other;

static int defaults(void **state) {
    cst_config_defaults(&config);
    cst_config_defaults(&other);
    return 0;
}

/* ---- values ---- */

struct value_row {
    const char *name, *key, *value;
    size_t offset;
    uint64_t expect; /* UINT64_MAX: refused */
};
#define AT(member) offsetof(struct cst_config, member)
#define REFUSED UINT64_MAX

static const struct value_row value_rows[] = {
    { "plain bytes", "memory", "33554432", AT(memory), 33554432 },
    { "KiB", "memory", "65536KiB", AT(memory), 65536 * 1024 },
    { "K", "memory", "65536K", AT(memory), 65536 * 1024 },
    { "MiB with a blank", "memory", "64 MiB", AT(memory), 64 << 20 },
    { "G", "memory", "3G", AT(memory), UINT64_C(3) << 30 },
    { "TiB", "memory", "2TiB", AT(memory), UINT64_C(2) << 40 },
    { "the least memory", "memory", "16MiB", AT(memory), 16 << 20 },
    { "below the least memory", "memory", "16777215", AT(memory), REFUSED },
    { "too much memory", "memory", "1025TiB", AT(memory), REFUSED },
    { "overflow", "memory", "16777216TiB", AT(memory), REFUSED },
    { "more digits than 64 bits", "memory", "99999999999999999999", AT(memory), REFUSED },
    { "negative", "memory", "-1", AT(memory), REFUSED },
    { "empty", "memory", "", AT(memory), REFUSED },
    { "unknown unit", "memory", "64MB", AT(memory), REFUSED },
    { "hexadecimal", "memory", "0x4000000", AT(memory), REFUSED },
    { "a dash for an underscore", "leases-per-uid", "77", AT(leases_per_uid), 77 },
    { "a count has no unit", "leases", "1K", AT(leases), REFUSED },
    { "a count's bounds", "leases", "0", AT(leases), REFUSED },
    { "seconds", "max_age", "7s", AT(max_age), UINT64_C(7000000000) },
    { "seconds are the default", "max_age", "7", AT(max_age), UINT64_C(7000000000) },
    { "milliseconds", "send_timeout", "250ms", AT(send_timeout), 250000000 },
    { "minutes", "max_age", "2min", AT(max_age), UINT64_C(120000000000) },
    { "days", "max_age", "1d", AT(max_age), UINT64_C(86400000000000) },
    { "yes", "dumpable", "yes", AT(dumpable), 1 },
    { "no", "dumpable", "no", AT(dumpable), 0 },
    { "true is no bool", "dumpable", "true", AT(dumpable), REFUSED },
    { "first choice", "policy", "cost", AT(policy), 0 },
    { "second choice", "policy", "s3fifo", AT(policy), 1 },
    { "no choice", "policy", "fifo", AT(policy), REFUSED },
    { "a class", "class", "small-loss", AT(quality_class), 2 },
    { "octal", "socket_mode", "0666", AT(socket_mode), 0666 },
    { "octal without zero", "socket-mode", "600", AT(socket_mode), 0600 },
    { "no octal digit", "socket_mode", "0680", AT(socket_mode), REFUSED },
    { "a mode's bounds", "socket_mode", "01777", AT(socket_mode), REFUSED },
    { "no such key", "memori", "64MiB", AT(memory), REFUSED },
    { "a prefix of a key", "lease", "7", AT(leases), REFUSED },
};

static void check_value(void **state) {
    const struct value_row *row = *state;
    uint64_t before, after;
    char text[256] = "";
    int r;

    cst_config_defaults(&config);
    memcpy(&before, (char *)&config + row->offset, 8);
    r = cst_config_set(&config, row->key, row->value, text, sizeof(text));
    memcpy(&after, (char *)&config + row->offset, 8);
    if (row->expect == REFUSED) {
        assert_int_equal(r, CST_CONFIG_E_INVALID);
        assert_true(strlen(text) > 10);
        assert_true(after == before);
    } else {
        assert_int_equal(r, 0);
        assert_true(after == row->expect);
    }
}

static void paths_have_the_size_of_an_address(void **state) {
    char path[200], text[256];

    memset(path, 'x', sizeof(path));
    path[0] = '/';
    path[107] = '\0';
    assert_int_equal(cst_config_set(&config, "socket", path, text, sizeof(text)), 0);
    assert_string_equal(config.socket, path);
    path[107] = 'x';
    path[108] = '\0';
    assert_int_equal(cst_config_set(&config, "socket", path, text, sizeof(text)),
                     CST_CONFIG_E_INVALID);
    assert_non_null(strstr(text, "108 characters"));
}

static void presets_have_names_and_parameters(void **state) {
    static const struct {
        const char *value;
        bool fine;
    } rows[] = { { "auto", true },
                 { "int8", true },
                 { "turboquant", true },
                 { "turboquant:4", true },
                 { "turboquant:4,3", true },
                 { "turboquant:4+qjl", true },
                 { "turboquant:4,2+qjl", true },
                 { "turboquant:4,1+qjl", false },
                 { "turboquant:4+", false },
                 { "turboquant:4+qjl2", false },
                 { "turboquant:+qjl", false },
                 { "int8:+qjl", false },
                 { "turboquant:9", false },
                 { "turboquant:", false },
                 { "turboquant:4,", false },
                 { "turboquant:44", false },
                 { "int8:4", false },
                 { "klt:.35", true },
                 { "deep:1", true },
                 { "klt:0.4", true },
                 { "klt:", false },
                 { "klt:.", false },
                 { "klt:-1", false },
                 { "klt:0", false },
                 { "klt:9", false },
                 { "klt:1e1", false },
                 { "klt:.4x", false },
                 { "INT8", false },
                 { "", false },
                 { "a-name-that-is-longer-than-its-place", false } };
    char text[256];

    for (size_t i = 0; i < CST_COUNT(rows); i++) {
        int r = cst_config_set(&config, "preset_small_loss", rows[i].value, text, sizeof(text));

        assert_int_equal(r, rows[i].fine ? 0 : CST_CONFIG_E_INVALID);
        if (rows[i].fine)
            assert_string_equal(config.preset_small_loss, rows[i].value);
    }
}

static void uids_are_lists_of_numbers(void **state) {
    char text[256], many[1024] = "";

    assert_int_equal(cst_config_set(&config, "admin_uids", "5, 1000 7", text, sizeof(text)), 0);
    assert_int_equal(config.admin_uids.n, 3);
    assert_true(cst_uids_have(&config.admin_uids, 1000));
    assert_false(cst_uids_have(&config.admin_uids, 0));
    assert_int_equal(cst_config_set(&config, "admin_uids", "", text, sizeof(text)), 0);
    assert_int_equal(config.admin_uids.n, 0);
    assert_int_equal(cst_config_set(&config, "admin_uids", "root", text, sizeof(text)),
                     CST_CONFIG_E_INVALID);
    assert_int_equal(cst_config_set(&config, "admin_uids", "4294967295", text, sizeof(text)),
                     CST_CONFIG_E_INVALID); /* (uid_t)-1 names nobody */
    for (int i = 0; i <= CST_UIDS_MAX; i++)
        (void)snprintf(many + strlen(many), sizeof(many) - strlen(many), "%d,", i);
    assert_int_equal(cst_config_set(&config, "admin_uids", many, text, sizeof(text)),
                     CST_CONFIG_E_INVALID);
}

/* ---- files ---- */

struct file_row {
    const char *name, *ini;
    const char *complaint; /* part of the sentence; NULL: fine */
};

#define NAME_38 "an-inference-team-with-a-rather-long-n"

static const struct file_row file_rows[] = {
    { "empty", "", NULL },
    { "comments", "# one\n; two\n\n[daemon]\n  # three\n", NULL },
    { "a setting", "[daemon]\nmemory = 64MiB ; small\n", NULL },
    { "no newline at the end", "[daemon]\nmemory=64MiB", NULL },
    { "outside of a section", "memory = 64MiB\n", "line 1: settings stand in" },
    { "foreign section", "[demon]\nmemory = 64MiB\n", "line 2: settings stand in" },
    { "unknown key", "[daemon]\n\n# x\nmemroy = 64MiB\n",
      "line 4: there is no setting \"memroy\"" },
    { "bad value", "[daemon]\nmemory = much\n", "line 2: memory wants a size" },
    { "no setting at all", "[daemon]\nwhat is this\n", "line 2: neither" },
    { "an indented line is no continuation", "[daemon]\nsocket = /a\n  /b\n", "line 3: neither" },
    { "rules", "[namespace team]\nuid = 7, 8\ngid = 9\ncgroup = /a.slice\n", NULL },
    { "namespace without a name", "[namespace ]\nuid = 7\n", "can't name a namespace" },
    { "a name of ours", "[namespace uid-7]\nuid = 7\n", "can't name a namespace" },
    { "the public name", "[namespace public]\nuid = 7\n", "can't name a namespace" },
    { "a name with a slash", "[namespace a/b]\nuid = 7\n", "can't name a namespace" },
    { "a name of 38 characters", "[namespace " NAME_38 "]\nuid = 7\n", NULL },
    { "a name that would be cut", "[namespace " NAME_38 "x]\nuid = 7\n", "longer than 48" },
    { "a long name that would be cut", "[namespace " NAME_38 NAME_38 "]\nuid = 7\n",
      "longer than 48" },
    { "unknown rule", "[namespace a]\nuser = 7\n", "uid, gid and cgroup" },
    { "a uid by name", "[namespace a]\nuid = root\n", "\"root\" is no uid" },
    { "a relative cgroup", "[namespace a]\ncgroup = a.slice\n", "\"a.slice\" is no cgroup" },
};

static void check_file(void **state) {
    const struct file_row *row = *state;
    char text[256] = "";
    int r;

    cst_config_defaults(&config);
    cst_config_defaults(&other);
    r = cst_config_parse(&config, row->ini, "x.conf", text, sizeof(text));
    assert_int_equal(r, row->complaint ? CST_CONFIG_E_INVALID : 0);
    if (!row->complaint)
        return;
    assert_non_null(strstr(text, "x.conf"));
    assert_non_null(strstr(text, row->complaint));
    assert_memory_equal(&config, &other, sizeof(config)); /* nothing half-taken */
}

static void a_long_line_is_one_mistake(void **state) {
    char ini[1024], text[256];

    (void)snprintf(ini, sizeof(ini), "[daemon]\n#%0500d\n", 0);
    assert_int_equal(cst_config_parse(&config, ini, "x", text, sizeof(text)), CST_CONFIG_E_INVALID);
    assert_non_null(strstr(text, "line 2"));
    assert_non_null(strstr(text, "longer"));
}

static void too_many_rules_are_refused(void **state) {
    char text[256], *ini = calloc(1, 8192);

    assert_non_null(ini);
    (void)snprintf(ini, 8192, "[namespace a]\n");
    for (int i = 0; i <= CST_RULES_MAX; i++)
        (void)snprintf(ini + strlen(ini), 8192 - strlen(ini), "uid = %d\n", i);
    assert_int_equal(cst_config_parse(&config, ini, "x", text, sizeof(text)), CST_CONFIG_E_INVALID);
    assert_non_null(strstr(text, "namespace rules"));
    free(ini);
}

/* The sample, with every setting's comment mark taken off, is the defaults. */
static void the_sample_holds_the_defaults(void **state) {
    char *sample = NULL, *ini = calloc(1, CST_CONFIG_FILE_MAX), text[256];
    size_t n = 0, used = 0;
    FILE *out = open_memstream(&sample, &n);

    assert_non_null(out);
    assert_non_null(ini);
    cst_config_print_sample(out);
    assert_int_equal(fclose(out), 0);
    for (const char *line = sample; *line; line = strchr(line, '\n') + 1) {
        size_t len = (size_t)(strchr(line, '\n') + 1 - line);
        bool setting = line[0] == '#' && line[1] != ' ';

        if (strstr(line, "namespace team") == line + 2)
            break;
        memcpy(ini + used, line + setting, len - setting);
        used += len - setting;
    }
    assert_int_equal(cst_config_parse(&config, ini, "sample", text, sizeof(text)), 0);
    assert_memory_equal(&config, &other, sizeof(config));
    for (const struct cst_config_row *row = cst_config_rows; row->key; row++) {
        char name[80];

        (void)snprintf(name, sizeof(name), "\n%s =", row->key);
        assert_non_null(strstr(ini, name)); /* each row stands in it, uncommented */
    }
    free(sample);
    free(ini);
}

/* ---- reload and resolve ---- */

static void reload_takes_what_may_change(void **state) {
    other.leases = 5;
    other.admin_uids = (struct cst_uids){ .n = 1, .uid = { 9 } };
    assert_null(cst_config_reload(&config, &other));
    assert_int_equal(config.leases, 5);
    assert_true(cst_uids_have(&config.admin_uids, 9));

    other.memory = 64 << 20;
    other.leases = 6;
    assert_string_equal(cst_config_reload(&config, &other), "memory");
    assert_int_equal(config.leases, 6);
    assert_int_equal(config.memory, 1 << 30);
}

static void shares_of_memory_are_filled_in(void **state) {
    config.memory = UINT64_C(400) << 20;
    cst_config_resolve(&config);
    assert_int_equal(config.staging_total, 100 << 20);
    assert_int_equal(config.staging_per_uid, 75 << 20);
    assert_int_equal(config.held_per_uid, 100 << 20);
    assert_int_equal(config.index, 100 << 20);
    assert_int_equal(config.slab, 64 << 20); /* below a quarter of the 300 MiB that are left */
    assert_true(config.workers >= 1);

    cst_config_defaults(&config);
    config.memory = 16 << 20;
    config.workers = 3;
    cst_config_resolve(&config);
    assert_int_equal(config.slab, 3 << 20);
    assert_int_equal(config.workers, 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(paths_have_the_size_of_an_address, defaults),
        cmocka_unit_test_setup(presets_have_names_and_parameters, defaults),
        cmocka_unit_test_setup(uids_are_lists_of_numbers, defaults),
        cmocka_unit_test_setup(a_long_line_is_one_mistake, defaults),
        cmocka_unit_test_setup(too_many_rules_are_refused, defaults),
        cmocka_unit_test_setup(the_sample_holds_the_defaults, defaults),
        cmocka_unit_test_setup(reload_takes_what_may_change, defaults),
        cmocka_unit_test_setup(shares_of_memory_are_filled_in, defaults),
    };
    int failed = cst_run_rows(value_rows, check_value) + cst_run_rows(file_rows, check_file);

    return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
