/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the state of the JSON that is being written (there is one standard output). Invariant: what
 * comes from a peer reaches the terminal without control characters, in JSON escaped.
 */
#include "client/ctl/ctl_out.h"

#include "base/macros.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LABEL_WIDTH = 22 };

static unsigned depth;
static bool started; /* the innermost bracket has a member */

/* ---- JSON ---- */

static void put_text(const char *s) {
    putchar('"');
    for (; *s; s++) {
        if (*s == '"' || *s == '\\')
            printf("\\%c", *s);
        else if ((unsigned char)*s < ' ' || *s == 0x7f)
            printf("\\u%04x", (unsigned char)*s);
        else
            putchar(*s);
    }
    putchar('"');
}

static void begin(const char *key) {
    if (depth)
        printf("%s\n%*s", started ? "," : "", (int)(2 * depth), "");
    started = true;
    if (key) {
        put_text(key);
        fputs(": ", stdout);
    }
}

void cst_json_open(const char *key, char bracket) {
    begin(key);
    putchar(bracket);
    depth++;
    started = false;
}

void cst_json_close(char bracket) {
    assert(depth);
    depth--;
    if (started)
        printf("\n%*s", (int)(2 * depth), "");
    putchar(bracket);
    started = true;
    if (!depth)
        putchar('\n');
}

void cst_json_text(const char *key, const char *value) {
    begin(key);
    put_text(value);
}

void cst_json_number(const char *key, uint64_t value) {
    begin(key);
    printf("%" PRIu64, value);
}

void cst_json_real(const char *key, double value) {
    begin(key);
    if (isfinite(value))
        printf("%.9g", value);
    else
        fputs("null", stdout);
}

void cst_json_hex(const char *key, const void *data, size_t n) {
    const uint8_t *p = data;

    begin(key);
    putchar('"');
    for (size_t i = 0; i < n; i++)
        printf("%02x", p[i]);
    putchar('"');
}

/* ---- fields of messages ---- */

static uint64_t number_of(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f) {
    const uint8_t *at = (const uint8_t *)m + f->offset;
    uint64_t wide;
    uint32_t narrow;

    if (f->type == PROTOBUF_C_TYPE_UINT64) {
        memcpy(&wide, at, sizeof(wide));
        return wide;
    }
    memcpy(&narrow, at, sizeof(narrow));
    return narrow;
}

static const char *text_of(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f) {
    const char *text;

    memcpy(&text, (const uint8_t *)m + f->offset, sizeof(text));
    return text;
}

void cst_json_message(const ProtobufCMessage *m) {
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];
        char hex[17];

        if (f->type == PROTOBUF_C_TYPE_STRING) {
            cst_json_text(f->name, text_of(m, f));
        } else if (!strcmp(f->name, "epoch")) { /* 64 random bits: JSON readers round numbers */
            (void)snprintf(hex, sizeof(hex), "%016" PRIx64, number_of(m, f));
            cst_json_text(f->name, hex);
        } else {
            assert(f->type == PROTOBUF_C_TYPE_UINT64 || f->type == PROTOBUF_C_TYPE_UINT32);
            cst_json_number(f->name, number_of(m, f));
        }
    }
}

/* ---- text ---- */

const char *cst_text_bytes(uint64_t n, char out[CST_AMOUNT_MAX]) {
    static const char *const units[] = { "KiB", "MiB", "GiB", "TiB" };
    double v = (double)n / 1024;
    size_t unit = 0;

    if (n < 1024) {
        (void)snprintf(out, CST_AMOUNT_MAX, "%" PRIu64 " B", n);
        return out;
    }
    for (; v >= 1023.95 && unit + 1 < CST_COUNT(units); unit++)
        v /= 1024;
    (void)snprintf(out, CST_AMOUNT_MAX, "%.1f %s", v, units[unit]);
    return out;
}

const char *cst_text_duration(uint64_t ms, char out[CST_AMOUNT_MAX]) {
    uint64_t s = ms / 1000;

    if (s < 60)
        (void)snprintf(out, CST_AMOUNT_MAX, "%.1f s", (double)ms / 1000);
    else if (s < 3600)
        (void)snprintf(out, CST_AMOUNT_MAX, "%" PRIu64 " min %" PRIu64 " s", s / 60, s % 60);
    else if (s < 86400)
        (void)snprintf(out, CST_AMOUNT_MAX, "%" PRIu64 " h %" PRIu64 " min", s / 3600, s / 60 % 60);
    else
        (void)snprintf(out, CST_AMOUNT_MAX, "%" PRIu64 " d %" PRIu64 " h", s / 86400,
                       s / 3600 % 24);
    return out;
}

void cst_text_hex(const void *data, size_t n, char *out) {
    const uint8_t *p = data;

    for (size_t i = 0; i < n; i++)
        (void)snprintf(out + 2 * i, 3, "%02x", p[i]);
    out[2 * n] = '\0';
}

void cst_text_field(const char *field, size_t n, char *out, size_t cap) {
    size_t len = strnlen(field, CST_MIN(n, cap - 1));

    for (size_t i = 0; i < len; i++)
        out[i] = (unsigned char)field[i] < ' ' || field[i] == 0x7f ? '?' : field[i];
    out[len] = '\0';
}

void cst_text_line(const char *label, const char *value) {
    char clean[256];

    cst_text_field(value, strlen(value), clean, sizeof(clean));
    printf("  %-*s%s\n", LABEL_WIDTH, label, clean);
}

void cst_text_heading(bool color, const char *text) {
    printf(color ? "\033[1m%s\033[0m\n" : "%s\n", text);
}

void cst_text_message(const ProtobufCMessage *m, const struct cst_field *fields, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const ProtobufCFieldDescriptor *f;
        char amount[CST_AMOUNT_MAX];

        if (!fields[i].field) {
            putchar('\n');
            continue;
        }
        f = protobuf_c_message_descriptor_get_field_by_name(m->descriptor, fields[i].field);
        assert(f);
        switch (fields[i].format) {
        case CST_FORMAT_COUNT:
            (void)snprintf(amount, sizeof(amount), "%" PRIu64, number_of(m, f));
            break;
        case CST_FORMAT_BYTES:
            (void)cst_text_bytes(number_of(m, f), amount);
            break;
        case CST_FORMAT_MS:
            (void)cst_text_duration(number_of(m, f), amount);
            break;
        case CST_FORMAT_TEXT:
            cst_text_line(fields[i].label, text_of(m, f));
            continue;
        }
        cst_text_line(fields[i].label, amount);
    }
}
