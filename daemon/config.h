/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The configuration: one typed table of rows drives the file parser, the command line, --help and
 * the sample file (--print-config); a test compares cistern.conf(5) with it. Plain memory, no heap:
 * a config is copied by assignment. Loop thread (before it: the main thread).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

enum {
    CST_SOCKET_PATH_MAX = 108, /* sizeof(sun_path) */
    CST_UIDS_MAX = 64,
    CST_RULES_MAX = 128,
    CST_NAMESPACE_NAME_MAX = 64, /* bytes, without terminator */
    CST_CGROUP_MAX = 256,
    CST_CONFIG_FILE_MAX = 256 * 1024,
};

struct cst_uids {
    size_t n;
    uid_t uid[CST_UIDS_MAX];
};

enum cst_rule_kind { CST_RULE_CGROUP, CST_RULE_UID, CST_RULE_GID };

/* Peers that match belong to namespace `name`. Cgroup rules count before uid rules before gid
 * rules; among rules of one kind the first one in the file counts. */
struct cst_rule {
    enum cst_rule_kind kind;
    uint32_t id;                 /* uid or gid */
    char cgroup[CST_CGROUP_MAX]; /* the peer's cgroup or an ancestor of it */
    char name[CST_NAMESPACE_NAME_MAX + 1];
};

/* Numbers, booleans and choices are uint64_t so that one table reaches them; durations are ns. */
struct cst_config {
    char socket[CST_SOCKET_PATH_MAX], admin_socket[CST_SOCKET_PATH_MAX], socket_group[64];
    uint64_t socket_mode;
    uint64_t memory, index, slab, pin, max_age, spaces, policy, quality_class, workers;
    uint64_t staging, staging_per_uid, staging_total, held_per_uid;
    uint64_t connections, connections_per_uid;
    uint64_t requests, requests_per_uid, requests_total;
    uint64_t leases, leases_per_uid, leases_total;
    uint64_t hello_timeout, send_timeout, retire_timeout, stop_timeout;
    uint64_t log_level, dumpable;
    uint64_t side_data, learn_wait;
    struct cst_uids side_data_uids;
    char directory[256], key_file[256];
    uint64_t disk, segment, crypt, io, disk_direct, disk_min_hits, disk_write_rate;
    uint64_t disk_per_namespace, disk_errors, disk_buffers, disk_prefetch;
    char preset_near_lossless[32], preset_small_loss[32], preset_cold[32];
    struct cst_uids admin_uids, public_writers;
    size_t n_rules;
    struct cst_rule rules[CST_RULES_MAX];
};

enum cst_config_type {
    CST_CONFIG_BYTES,
    CST_CONFIG_COUNT,
    CST_CONFIG_DURATION,
    CST_CONFIG_BOOL,
    CST_CONFIG_CHOICE, /* index into choices */
    CST_CONFIG_MODE,   /* octal */
    CST_CONFIG_TEXT,   /* char[max + 1] */
    CST_CONFIG_UIDS,
    CST_CONFIG_PRESET, /* char[max + 1]: "auto" or as cst_preset_parse() takes it */
};

struct cst_config_row {
    const char *key;
    enum cst_config_type type;
    size_t offset;
    uint64_t min, max;
    const char *standard; /* the default, as it would stand in the file */
    bool reloadable;
    const char *const *choices; /* NULL-terminated */
    const char *help;
};

/* Ends with a row whose key is NULL. */
extern const struct cst_config_row cst_config_rows[];

enum { CST_CONFIG_E_INVALID = 1 }; /* a sentence is in text */

void cst_config_defaults(struct cst_config *config);

/* key as in the file; '-' counts as '_'. 0 or CST_CONFIG_E_INVALID. */
int cst_config_set(struct cst_config *config, const char *key, const char *value, char *text,
                   size_t cap);
/* Whether the table has this key (command line: with '-'). */
const struct cst_config_row *cst_config_find(const char *key);

/* Reads INI text into config. The sentence names the line. */
int cst_config_parse(struct cst_config *config, const char *ini, const char *name, char *text,
                     size_t cap);
/* 0, CST_CONFIG_E_INVALID, or a negative errno when the file can't be read. */
int cst_config_load(struct cst_config *config, const char *path, char *text, size_t cap);

/* Takes over the reloadable rows of fresh. Returns the first key that differs but needs a restart,
 * or NULL. */
const char *cst_config_reload(struct cst_config *config, const struct cst_config *fresh);

/* Fills values that depend on others (0 = a share of memory, workers = cores). */
void cst_config_resolve(struct cst_config *config);

void cst_config_print_sample(FILE *out);
void cst_config_print_help(FILE *out);

/* ---- values (config_value.c) ---- */

int cst_config_value(const struct cst_config_row *row, void *member, const char *value, char *text,
                     size_t cap);
const char *cst_config_type_name(enum cst_config_type type);
bool cst_uids_have(const struct cst_uids *uids, uid_t uid);
int cst_config_rule(struct cst_config *config, const char *namespace_name, const char *key,
                    const char *value, char *text, size_t cap);
