/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of the configuration and what is made from it. No state but inih's switches.
 * Invariant: a config always holds values inside their bounds: defaults first, then only checked
 * ones.
 */
#include "daemon/config.h"

#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"
#include "base/macros.h"
#include "base/mem.h"
#include "codec/side.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <ini.h>
#include <string.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)
#define TIB (UINT64_C(1) << 40)
#define DAY (24 * 3600 * CST_NS_PER_S)

static const char *const policies[] = { "cost", "s3fifo", "arc", "lru", NULL };
static const char *const classes[] = { "lossless", "near-lossless", "small-loss", "cold", NULL };
static const char *const crypts[] = { "aes", "off", NULL };
static const char *const ios[] = { "auto", "io_uring", "threads", NULL };
static const char *const levels[] = { "error", "warning", "notice", "info", "debug", NULL };

#define AT(member) offsetof(struct cst_config, member)
#define SIZEOF(member) sizeof(((struct cst_config *)NULL)->member)
#define BYTES(key, lo, hi, def, help)                                                              \
    { #key, CST_CONFIG_BYTES, AT(key), lo, hi, def, 0, NULL, help }
#define COUNT(key, lo, hi, def, live, help)                                                        \
    { #key, CST_CONFIG_COUNT, AT(key), lo, hi, def, live, NULL, help }
#define TIME(key, lo, hi, def, live, help)                                                         \
    { #key, CST_CONFIG_DURATION, AT(key), lo, hi, def, live, NULL, help }
#define TEXT(key, def, help)                                                                       \
    { #key, CST_CONFIG_TEXT, AT(key), 0, SIZEOF(key) - 1, def, 0, NULL, help }
#define PRESET(key, help)                                                                          \
    { #key, CST_CONFIG_PRESET, AT(key), 0, SIZEOF(key) - 1, "auto", 1, NULL, help }
#define UIDS(key, def, live, help)                                                                 \
    { #key, CST_CONFIG_UIDS, AT(key), 0, 0, def, live, NULL, help }

/* clang-format off */
const struct cst_config_row cst_config_rows[] = {
    TEXT(socket, "", "Path of the socket. Empty: the one that systemd passes, else the first of "
        "/run/cistern/cistern.sock, $XDG_RUNTIME_DIR/cistern/cistern.sock and "
        "/tmp/cistern-UID/cistern.sock that can be made."),
    TEXT(admin_socket, "", "Path of the socket for administrators (mode 0600). Empty: admin.sock "
        "beside a socket that was chosen by default, else none; administrators are also served "
        "on the main socket."),
    { "socket_mode", CST_CONFIG_MODE, AT(socket_mode), 0, 0777, "0660", false, NULL,
        "Permissions of the socket: who may connect at all." },
    TEXT(socket_group, "", "Group of the socket, by name or number. Empty: the daemon's."),
    UIDS(admin_uids, "", true, "Uids that may send admin requests, beside root and the daemon's "
        "own."),
    BYTES(memory, 16 * MIB, 1024 * TIB, "1GiB", "Memory for blocks, index and staging together."),
    BYTES(index, 0, 1024 * TIB, "0", "How much of it the index may take. 0: a quarter."),
    BYTES(slab, MIB, TIB, "64MiB", "Size of a slab of decoded blocks, at least 8 blocks, at most a quarter of their memory."),
    BYTES(pin, 0, 1024 * TIB, "0", "Pinned bytes per namespace. 0: a quarter of the blocks' "
        "memory."),
    TIME(max_age, 0, 36500 * DAY, "0", false, "Blocks older than this are dropped. 0: never."),
    COUNT(spaces, 1, 65536, "256", false, "Spaces per namespace."),
    { "policy", CST_CONFIG_CHOICE, AT(policy), 0, 0, "cost", false, policies,
        "Eviction policy: cost, s3fifo, arc or lru." },
    { "class", CST_CONFIG_CHOICE, AT(quality_class), 0, 0, "lossless", true, classes,
        "The laxest quality class a client may ask for: lossless, near-lossless, small-loss or "
        "cold." },
    PRESET(preset_near_lossless, "What blocks of class near-lossless are encoded as: a preset "
        "with its parameters, such as turboquant:6, or auto, the smallest one that is safe. A "
        "block that misses its class's error bound gets a safer one, in the end lossless."),
    PRESET(preset_small_loss, "The same for class small-loss."),
    PRESET(preset_cold, "The same for class cold."),
    BYTES(side_data, 0, CST_SIDE_BYTES_MAX, "64MiB", "How large the learned tables of one space may "
        "get, part of memory. 0: nothing is learned."),
    TIME(learn_wait, 0, DAY, "10s", false, "A lossy space whose tables are not learned yet encodes "
        "nothing before no block has come for this long, unless memory is short: more blocks are "
        "more to learn from."),
    UIDS(side_data_uids, "", true, "Uids that may put side data. Empty: in a namespace uid-N, N."),
    COUNT(workers, 0, 256, "0", false, "Worker threads. 0: one per core."),
    BYTES(staging, MIB, TIB, "64MiB", "Staging memory of one connection, at least 4 blocks; less "
        "when little is left."),
    BYTES(staging_per_uid, 0, 1024 * TIB, "0", "Staging memory of one uid. 0: three quarters of "
        "staging_total."),
    BYTES(staging_total, 0, 1024 * TIB, "0", "Staging memory of all clients, part of memory. 0: a "
        "quarter of memory."),
    BYTES(held_per_uid, 0, 1024 * TIB, "0", "Retired slab memory that the clients of one uid may "
        "go on mapping before those that owe an answer are disconnected. 0: a quarter of memory."),
    COUNT(connections, 1, 65536, "1024", true, "Connections in all."),
    COUNT(connections_per_uid, 1, 65536, "256", true, "Connections of one uid."),
    COUNT(requests, 1, 4096, "64", true, "Unanswered requests of one connection."),
    COUNT(requests_per_uid, 1, 65536, "512", true, "Unanswered requests of one uid."),
    COUNT(requests_total, 1, 65536, "1024", true, "Unanswered requests in all."),
    COUNT(leases, 1, 1048576, "32768", true, "Leases of one connection."),
    COUNT(leases_per_uid, 1, 1048576, "49152", true, "Leases of one uid."),
    COUNT(leases_total, 1, 1048576, "65536", true, "Leases in all."),
    TIME(hello_timeout, CST_NS_PER_MS, DAY, "10s", true, "A new connection says Hello within this "
        "time."),
    TIME(send_timeout, CST_NS_PER_MS, DAY, "10s", true, "A client that does not read its replies "
        "for this long is disconnected."),
    TIME(retire_timeout, CST_NS_PER_MS, DAY, "60s", true, "A client over held_per_uid has this "
        "long to answer before it is disconnected."),
    TIME(stop_timeout, 0, DAY, "10s", true, "A clean stop waits this long for commits under way, and "
        "then for blocks to be written to disk."),
    { "log_level", CST_CONFIG_CHOICE, AT(log_level), 0, 0, "info", true, levels,
        "error, warning, notice, info or debug." },
    { "dumpable", CST_CONFIG_BOOL, AT(dumpable), 0, 0, "no", false, NULL,
        "Allow core dumps and debuggers; both show what clients have stored." },
    TEXT(directory, "", "Where blocks go that memory has no room for, and where they are found "
        "again after a restart; a directory that is the daemon's alone. Empty: nowhere."),
    BYTES(disk, 16 * MIB, 1024 * TIB, "16GiB", "How much of the disk they may take."),
    BYTES(segment, 0, 4096 * MIB, "0", "Size of the files in a new directory. 0: 64 MiB, more for "
        "large disks, less for small ones."),
    { "crypt", CST_CONFIG_CHOICE, AT(crypt), 0, 0, "aes", false, crypts,
        "aes: what is on disk is encrypted and authenticated. off: it is only checked for errors." },
    TEXT(key_file, "", "The root key of the encryption: a file of 32 bytes or 64 hexadecimal "
        "digits. Empty: the credential cistern.key that systemd passes, else a random key that is "
        "kept in memory, so that blocks outlive the daemon but not the system."),
    { "io", CST_CONFIG_CHOICE, AT(io), 0, 0, "auto", false, ios,
        "io_uring, threads, or auto: io_uring where it is allowed." },
    { "disk_direct", CST_CONFIG_BOOL, AT(disk_direct), 0, 0, "yes", false, NULL,
        "Go past the page cache where the file system can." },
    COUNT(disk_min_hits, 0, 1000000, "0", false, "Write only blocks that were asked for so often, "
        "and what is above them."),
    BYTES(disk_write_rate, 0, TIB, "0", "Write at most so many bytes a second. 0: no limit."),
    BYTES(disk_per_namespace, 0, 1024 * TIB, "0", "How much of the disk one namespace may take. "
        "0: all of it."),
    COUNT(disk_errors, 1, 1000000, "16", false, "After so many I/O errors the disk is left alone "
        "until the next start."),
    BYTES(disk_buffers, 8 * MIB, TIB, "32MiB", "Memory for what is on its way to and from the "
        "disk, part of memory."),
    BYTES(disk_prefetch, 0, TIB, "0", "A Lookup begins to read what it finds on disk, so that the "
        "fetch that follows finds it in memory: at most so many bytes at a time, behind all "
        "fetches, and only into memory that nothing else uses. 0: a Lookup reads nothing."),
    UIDS(public_writers, "", true, "Uids that may fill the public namespace. Empty: there is no "
        "public namespace."),
    { NULL, 0, 0, 0, 0, NULL, 0, NULL, NULL },
};
/* clang-format on */

static void *member_of(struct cst_config *config, const struct cst_config_row *row) {
    return (char *)config + row->offset;
}

static size_t member_size(const struct cst_config_row *row) {
    if (row->type == CST_CONFIG_TEXT || row->type == CST_CONFIG_PRESET)
        return row->max + 1;
    return row->type == CST_CONFIG_UIDS ? sizeof(struct cst_uids) : sizeof(uint64_t);
}

void cst_config_defaults(struct cst_config *config) {
    char text[128];

    memset(config, 0, sizeof(*config));
    for (const struct cst_config_row *row = cst_config_rows; row->key; row++) {
        int r = cst_config_value(row, member_of(config, row), row->standard, text, sizeof(text));

        assert(!r); /* a default out of its bounds: a test sets each of them */
    }
}

static bool same_key(const char *a, const char *b) {
    for (; *a && *b; a++, b++)
        if (*a != *b && !(*a == '_' && *b == '-'))
            return false;
    return !*a && !*b;
}

const struct cst_config_row *cst_config_find(const char *key) {
    for (const struct cst_config_row *row = cst_config_rows; row->key; row++)
        if (same_key(row->key, key))
            return row;
    return NULL;
}

int cst_config_set(struct cst_config *config, const char *key, const char *value, char *text,
                   size_t cap) {
    const struct cst_config_row *row = cst_config_find(key);

    if (!row) {
        (void)snprintf(text, cap, "there is no setting \"%.60s\"", key);
        return CST_CONFIG_E_INVALID;
    }
    return cst_config_value(row, member_of(config, row), value, text, cap);
}

/* ---- files ---- */

enum { SECTION_MAX = 48 }; /* inih keeps 49 characters and does not tell whether there were more */

struct parse {
    struct cst_config *config;
    const char *at;
    unsigned line;
    int r;
    char text[256];
};

/* fgets() over a string; counts lines and notices those that inih would cut in two. */
static char *read_line(char *out, int cap, void *arg) {
    struct parse *p = arg;
    size_t n = strcspn(p->at, "\n");

    if (!*p->at || p->r)
        return NULL;
    p->line++;
    if (n + 2 > (size_t)cap) {
        p->r = CST_CONFIG_E_INVALID;
        (void)snprintf(p->text, sizeof(p->text), "the line is longer than %d characters", cap - 2);
        return NULL;
    }
    memcpy(out, p->at, n);
    out[n] = '\0';
    p->at += n + (p->at[n] == '\n');
    return out;
}

static int take_pair(void *arg, const char *section, const char *key, const char *value) {
    static const char prefix[] = "namespace ";
    struct parse *p = arg;

    if (strlen(section) > SECTION_MAX) { /* inih cuts names: two could become one namespace */
        p->r = CST_CONFIG_E_INVALID;
        (void)snprintf(p->text, sizeof(p->text), "the name in [] is longer than %d characters",
                       SECTION_MAX);
    } else if (!strcmp(section, "daemon")) {
        p->r = cst_config_set(p->config, key, value, p->text, sizeof(p->text));
    } else if (!strncmp(section, prefix, sizeof(prefix) - 1)) {
        p->r = cst_config_rule(p->config, section + sizeof(prefix) - 1, key, value, p->text,
                               sizeof(p->text));
    } else {
        p->r = CST_CONFIG_E_INVALID;
        (void)snprintf(p->text, sizeof(p->text),
                       "settings stand in [daemon] or [namespace NAME], not in [%.60s]", section);
    }
    return !p->r;
}

int cst_config_parse(struct cst_config *config, const char *ini, const char *name, char *text,
                     size_t cap) {
    struct cst_config fresh = *config;
    struct parse p = { .config = &fresh, .at = ini };
    int r;

    ini_allow_multiline = false;
    fresh.n_rules = 0;
    r = ini_parse_stream(read_line, &p, take_pair, &p);
    if (!r && !p.r) {
        *config = fresh;
        return 0;
    }
    (void)snprintf(text, cap, "%s, line %u: %s", name, p.r ? p.line : (unsigned)r,
                   p.r ? p.text : "neither a section nor a setting");
    return CST_CONFIG_E_INVALID;
}

static ssize_t read_file(const char *path, char *out, size_t cap) {
    cst_auto(cst_closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t n = 0;

    if (fd < 0)
        return -errno;
    while (n < cap) {
        ssize_t got = read(fd, out + n, cap - n);

        if (got < 0)
            return -errno;
        if (!got)
            break;
        n += (size_t)got;
    }
    return n < cap ? (ssize_t)n : -EFBIG;
}

int cst_config_load(struct cst_config *config, const char *path, char *text, size_t cap) {
    cst_auto(cst_freep) char *ini = cst_malloc(CST_CONFIG_FILE_MAX);
    ssize_t n;

    if (!ini)
        return cst_err(-ENOMEM);
    n = read_file(path, ini, CST_CONFIG_FILE_MAX);
    if (n < 0)
        return (int)n;
    ini[n] = '\0';
    if (memchr(ini, '\0', (size_t)n)) {
        (void)snprintf(text, cap, "%s holds a zero byte", path);
        return CST_CONFIG_E_INVALID;
    }
    return cst_config_parse(config, ini, path, text, cap);
}

const char *cst_config_reload(struct cst_config *config, const struct cst_config *fresh) {
    const char *first = NULL;

    for (const struct cst_config_row *row = cst_config_rows; row->key; row++) {
        const char *now = (const char *)fresh + row->offset;
        char *old = member_of(config, row);

        if (!memcmp(old, now, member_size(row)))
            continue;
        if (row->reloadable)
            memcpy(old, now, member_size(row));
        else if (!first)
            first = row->key;
    }
    config->n_rules = fresh->n_rules;
    memcpy(config->rules, fresh->rules, sizeof(config->rules));
    return first;
}

void cst_config_resolve(struct cst_config *config) {
    if (!config->workers)
        config->workers = (uint64_t)CST_MAX(1, CST_MIN(get_nprocs(), 256));
    if (!config->staging_total)
        config->staging_total = config->memory / 4;
    if (config->staging_total > config->memory / 2)
        config->staging_total = config->memory / 2;
    if (!config->index)
        config->index = config->memory / 4;
    config->disk_buffers = CST_MIN(config->disk_buffers, config->memory / 8);
    config->slab = CST_MIN(config->slab, (config->memory - config->staging_total) / 4);
    if (!config->staging_per_uid)
        config->staging_per_uid = config->staging_total / 4 * 3;
    if (!config->held_per_uid)
        config->held_per_uid = config->memory / 4;
}

/* ---- texts ---- */

/* help, wrapped at 80 columns, each line after indent. */
static void print_wrapped(FILE *out, const char *indent, const char *help) {
    size_t width = 80 - strlen(indent);

    while (*help) {
        size_t n = strlen(help);

        if (n > width) {
            n = width;
            while (n && help[n] != ' ')
                n--;
        }
        (void)fprintf(out, "%s%.*s\n", indent, (int)n, help);
        help += n;
        help += strspn(help, " ");
    }
}

void cst_config_print_sample(FILE *out) {
    (void)fputs("# Configuration of cisternd: cistern.conf(5). Every value below is the default.\n"
                "# Settings marked (live) change with SIGHUP, the others with a restart.\n\n"
                "[daemon]\n",
                out);
    for (const struct cst_config_row *row = cst_config_rows; row->key; row++) {
        (void)fputs("\n", out);
        print_wrapped(out, "# ", row->help);
        (void)fprintf(out, "#%s =%s%s%s\n", row->key, *row->standard ? " " : "", row->standard,
                      row->reloadable ? "    ; (live)" : "");
    }
    (void)fputs(
        "\n# Clients that match one of these rules share the namespace \"team\" instead of\n"
        "# having one per uid. The first match counts: cgroup, then uid, then gid.\n"
        "#[namespace team]\n"
        "#cgroup = /system.slice/inference.service\n"
        "#uid = 1001, 1002\n"
        "#gid = 2000\n",
        out);
}

void cst_config_print_help(FILE *out) {
    for (const struct cst_config_row *row = cst_config_rows; row->key; row++) {
        (void)fputs("  --", out);
        for (const char *c = row->key; *c; c++)
            (void)fputc(*c == '_' ? '-' : *c, out);
        (void)fprintf(out, " VALUE%s%s\n", *row->standard ? "    default: " : "", row->standard);
        print_wrapped(out, "        ", row->help);
    }
}
