/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Texts of the configuration to typed, bounded values. No state, any thread.
 * Invariant: on failure the member is unchanged and text holds one sentence.
 */
#include "daemon/config.h"

#include "base/clock.h"
#include "base/macros.h"
#include "codec/codec.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

struct unit {
    const char *name;
    uint64_t factor;
};

static const struct unit byte_units[] = {
    { "", 1 },
    { "KiB", UINT64_C(1) << 10 },
    { "K", UINT64_C(1) << 10 },
    { "MiB", UINT64_C(1) << 20 },
    { "M", UINT64_C(1) << 20 },
    { "GiB", UINT64_C(1) << 30 },
    { "G", UINT64_C(1) << 30 },
    { "TiB", UINT64_C(1) << 40 },
    { "T", UINT64_C(1) << 40 },
    { NULL, 0 },
};
static const struct unit time_units[] = {
    { "s", CST_NS_PER_S },
    { "ms", CST_NS_PER_MS },
    { "min", 60 * CST_NS_PER_S },
    { "h", 3600 * CST_NS_PER_S },
    { "d", 24 * 3600 * CST_NS_PER_S },
    { "", CST_NS_PER_S },
    { NULL, 0 },
};
static const struct unit no_units[] = { { "", 1 }, { NULL, 0 } };

static int invalid(char *text, size_t cap, const char *fmt, ...) CST_PRINTF(3, 4);

static int invalid(char *text, size_t cap, const char *fmt, ...) {
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(text, cap, fmt, ap);
    va_end(ap);
    return CST_CONFIG_E_INVALID;
}

/* Digits and a unit; false on anything else and on overflow. */
static bool parse_number(const char *value, int base, const struct unit *units, uint64_t *out) {
    char *end;
    unsigned long long n;

    if (!isdigit((unsigned char)value[0]))
        return false;
    errno = 0;
    n = strtoull(value, &end, base);
    if (errno)
        return false;
    while (*end == ' ')
        end++;
    for (; units->name; units++)
        if (!strcmp(end, units->name))
            return !__builtin_mul_overflow((uint64_t)n, units->factor, out);
    return false;
}

/* v in the largest unit that divides it; of units of one size the first. */
static const char *print_number(const struct cst_config_row *row, uint64_t v, char *out,
                                size_t cap) {
    const struct unit *units = row->type == CST_CONFIG_BYTES      ? byte_units
                               : row->type == CST_CONFIG_DURATION ? time_units
                                                                  : no_units;
    const struct unit *best = &no_units[0];

    for (; v && units->name; units++)
        if (units->factor > best->factor && v % units->factor == 0)
            best = units;
    (void)snprintf(out, cap, row->type == CST_CONFIG_MODE ? "%#" PRIo64 "%s" : "%" PRIu64 "%s",
                   v / best->factor, best->name);
    return out;
}

static bool parse_choice(const char *const *choices, const char *value, uint64_t *out) {
    for (uint64_t i = 0; choices[i]; i++) {
        if (!strcmp(choices[i], value)) {
            *out = i;
            return true;
        }
    }
    return false;
}

static const char *const no_yes[] = { "no", "yes", NULL };

static bool parse_scalar(const struct cst_config_row *row, const char *value, uint64_t *out) {
    switch (row->type) {
    case CST_CONFIG_BYTES:
        return parse_number(value, 10, byte_units, out);
    case CST_CONFIG_DURATION:
        return parse_number(value, 10, time_units, out);
    case CST_CONFIG_MODE:
        return parse_number(value, 8, no_units, out);
    case CST_CONFIG_BOOL:
        return parse_choice(no_yes, value, out);
    case CST_CONFIG_CHOICE:
        return parse_choice(row->choices, value, out);
    default:
        return parse_number(value, 10, no_units, out);
    }
}

/* The next element of a list separated by commas and blanks; false at the end. */
static bool next_element(const char **at, char *out, size_t cap, bool *fits) {
    size_t n;

    *at += strspn(*at, ", ");
    n = strcspn(*at, ", ");
    *fits = n < cap;
    if (*fits) {
        memcpy(out, *at, n);
        out[n] = '\0';
    }
    *at += n;
    return n > 0;
}

static bool parse_id(const char *value, uint32_t *out) {
    uint64_t v;

    if (!parse_number(value, 10, no_units, &v) || v >= UINT32_MAX)
        return false;
    *out = (uint32_t)v;
    return true;
}

static int parse_uids(const char *value, struct cst_uids *out, const char *key, char *text,
                      size_t cap) {
    struct cst_uids uids = { 0 };
    char element[32];
    bool fits;

    while (next_element(&value, element, sizeof(element), &fits)) {
        if (uids.n == CST_UIDS_MAX)
            return invalid(text, cap, "%s has more than %d uids", key, CST_UIDS_MAX);
        if (!fits || !parse_id(element, &uids.uid[uids.n]))
            return invalid(text, cap, "%s wants numeric uids, not \"%.40s\"", key, element);
        uids.n++;
    }
    *out = uids;
    return 0;
}

static int parse_text(const struct cst_config_row *row, char *out, const char *value, char *text,
                      size_t cap) {
    size_t n = strlen(value);

    if (n > row->max)
        return invalid(text, cap, "%s is %zu characters long; at most %zu are possible", row->key,
                       n, (size_t)row->max);
    memset(out, 0, row->max + 1); /* values are compared as memory */
    memcpy(out, value, n);
    return 0;
}

static int parse_preset(const struct cst_config_row *row, char *out, const char *value, char *text,
                        size_t cap) {
    struct cst_encode_params params;

    if (strcmp(value, "auto") && cst_preset_parse(&params, value))
        return invalid(text, cap, "%s wants %s, not \"%.60s\"", row->key,
                       cst_config_type_name(row->type), value);
    return parse_text(row, out, value, text, cap);
}

int cst_config_value(const struct cst_config_row *row, void *member, const char *value, char *text,
                     size_t cap) {
    char min[32], max[32];
    uint64_t v;

    if (row->type == CST_CONFIG_TEXT)
        return parse_text(row, member, value, text, cap);
    if (row->type == CST_CONFIG_PRESET)
        return parse_preset(row, member, value, text, cap);
    if (row->type == CST_CONFIG_UIDS)
        return parse_uids(value, member, row->key, text, cap);
    if (!parse_scalar(row, value, &v))
        return invalid(text, cap, "%s wants %s, not \"%.60s\"", row->key,
                       cst_config_type_name(row->type), value);
    if (row->type != CST_CONFIG_CHOICE && row->type != CST_CONFIG_BOOL &&
        (v < row->min || v > row->max))
        return invalid(text, cap, "%s = %.60s is out of range: %s to %s", row->key, value,
                       print_number(row, row->min, min, sizeof(min)),
                       print_number(row, row->max, max, sizeof(max)));
    memcpy(member, &v, sizeof(v));
    return 0;
}

const char *cst_config_type_name(enum cst_config_type type) {
    static const char *const names[] = {
        [CST_CONFIG_BYTES] = "a size such as 64MiB",
        [CST_CONFIG_COUNT] = "a number",
        [CST_CONFIG_DURATION] = "a time such as 10s",
        [CST_CONFIG_BOOL] = "yes or no",
        [CST_CONFIG_CHOICE] = "one of its choices",
        [CST_CONFIG_MODE] = "an octal mode such as 0660",
        [CST_CONFIG_TEXT] = "a text",
        [CST_CONFIG_UIDS] = "a list of numeric uids",
        [CST_CONFIG_PRESET] = "auto or a preset such as turboquant:4",
    };

    return names[type];
}

bool cst_uids_have(const struct cst_uids *uids, uid_t uid) {
    for (size_t i = 0; i < uids->n; i++)
        if (uids->uid[i] == uid)
            return true;
    return false;
}

/* Names go into logs, metrics and file names: letters, digits, '.', '_' and '-'. The daemon's own
 * names ("uid-N", "public") can't be given away by a rule. */
static bool is_namespace_name(const char *name) {
    size_t n = strlen(name);

    if (!n || n > CST_NAMESPACE_NAME_MAX || !strncmp(name, "uid-", 4) || !strcmp(name, "public") ||
        name[0] == '.')
        return false;
    for (size_t i = 0; i < n; i++)
        if (!isalnum((unsigned char)name[i]) && !strchr("._-", name[i]))
            return false;
    return true;
}

static bool parse_rule(struct cst_rule *rule, const char *value) {
    if (rule->kind != CST_RULE_CGROUP)
        return parse_id(value, &rule->id);
    (void)snprintf(rule->cgroup, sizeof(rule->cgroup), "%s", value);
    return value[0] == '/';
}

int cst_config_rule(struct cst_config *config, const char *namespace_name, const char *key,
                    const char *value, char *text, size_t cap) {
    static const char *const kinds[] = { "cgroup", "uid", "gid", NULL };
    char element[CST_CGROUP_MAX];
    uint64_t kind;
    bool fits;

    if (!is_namespace_name(namespace_name))
        return invalid(text, cap, "\"%.80s\" can't name a namespace", namespace_name);
    if (!parse_choice(kinds, key, &kind))
        return invalid(text, cap, "a namespace has rules uid, gid and cgroup, not \"%.60s\"", key);
    while (next_element(&value, element, sizeof(element), &fits)) {
        struct cst_rule *rule = &config->rules[config->n_rules];

        if (config->n_rules == CST_RULES_MAX)
            return invalid(text, cap, "more than %d namespace rules", CST_RULES_MAX);
        *rule = (struct cst_rule){ .kind = (enum cst_rule_kind)kind };
        if (!fits || !parse_rule(rule, element))
            return invalid(text, cap, "\"%.60s\" is no %s", fits ? element : "the name", key);
        (void)snprintf(rule->name, sizeof(rule->name), "%s", namespace_name);
        config->n_rules++;
    }
    return 0;
}
