/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A cursor over the text. Invariant: p never passes end; a cursor that met something unexpected has
 * p == NULL and stays there, so only the last step of a look-up is checked.
 */
#include "tools/json_read.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct cursor {
    const char *p, *end;
};

static void blanks(struct cursor *c) {
    while (c->p && c->p < c->end && strchr(" \t\r\n", *c->p) && *c->p)
        c->p++;
}

static char peek(struct cursor *c) {
    blanks(c);
    return c->p && c->p < c->end ? *c->p : '\0';
}

static bool take(struct cursor *c, char what) {
    if (peek(c) != what)
        return false;
    c->p++;
    return true;
}

/* Takes a string; its bytes between the quotation marks, escapes as they are. */
static struct cst_json_text take_string(struct cursor *c) {
    struct cst_json_text s = { 0 };

    if (!take(c, '"')) {
        c->p = NULL;
        return s;
    }
    s.text = c->p;
    while (c->p < c->end && *c->p != '"')
        c->p += *c->p == '\\' && c->end - c->p > 1 ? 2 : 1;
    s.len = (size_t)(c->p - s.text);
    c->p = c->p < c->end ? c->p + 1 : NULL;
    return s;
}

/* Skips a number or a word; at least one byte, so that a walk always ends. */
static void skip_word(struct cursor *c) {
    const char *start = c->p;

    while (c->p && c->p < c->end && !strchr("\",:{}[] \t\r\n", *c->p))
        c->p++;
    if (c->p == start)
        c->p = NULL;
}

static void skip_value(struct cursor *c) {
    size_t depth = 0;

    do {
        char next = peek(c);

        if (!next) {
            c->p = NULL;
        } else if (next == '{' || next == '[') {
            depth++;
            c->p++;
        } else if (next == '}' || next == ']') {
            if (!depth)
                c->p = NULL;
            else
                depth--, c->p++;
        } else if (next == '"') {
            (void)take_string(c);
        } else if (next == ',' || next == ':') {
            c->p = depth ? c->p + 1 : NULL;
        } else {
            skip_word(c);
        }
    } while (c->p && depth);
}

/* To the value of the member `name` of the object at c. */
static void enter(struct cursor *c, const char *name, size_t n) {
    if (!take(c, '{')) {
        c->p = NULL;
        return;
    }
    while (c->p) {
        struct cst_json_text key = take_string(c);

        if (!c->p || !take(c, ':'))
            break;
        if (key.len == n && !memcmp(key.text, name, n))
            return;
        skip_value(c);
        if (!take(c, ','))
            break;
    }
    c->p = NULL;
}

/* To element `name`, a number, of the array at c. */
static void enter_array(struct cursor *c, const char *name, size_t n) {
    unsigned long index = 0;

    for (size_t i = 0; i < n && c->p; i++) {
        if (name[i] < '0' || name[i] > '9' || i > 8)
            c->p = NULL;
        else
            index = 10 * index + (unsigned long)(name[i] - '0');
    }
    if (!c->p || !take(c, '['))
        c->p = NULL;
    for (; c->p && index; index--) {
        skip_value(c);
        if (!take(c, ','))
            c->p = NULL;
    }
}

static struct cursor find(struct cst_json_text json, const char *path) {
    struct cursor c = { json.text, json.text + json.len };

    for (const char *name = path; c.p && *name;) {
        size_t n = strcspn(name, ".");

        if (peek(&c) == '[')
            enter_array(&c, name, n);
        else
            enter(&c, name, n);
        name += n + (name[n] == '.');
    }
    blanks(&c);
    return c;
}

bool cst_json_get_real(struct cst_json_text json, const char *path, double *out) {
    struct cursor c = find(json, path);
    const char *start = c.p;
    char number[64], *end;
    double v;

    skip_word(&c);
    if (!c.p || (size_t)(c.p - start) >= sizeof(number))
        return false;
    memcpy(number, start, (size_t)(c.p - start));
    number[c.p - start] = '\0';
    v = strtod(number, &end);
    if (*end)
        return false;
    *out = v;
    return true;
}

bool cst_json_get_count(struct cst_json_text json, const char *path, uint32_t *out) {
    double v;

    if (!cst_json_get_real(json, path, &v) || !(v >= 0) || v > UINT32_MAX || v != (uint32_t)v)
        return false;
    *out = (uint32_t)v;
    return true;
}

bool cst_json_get_string(struct cst_json_text json, const char *path, char *out, size_t cap) {
    struct cursor c = find(json, path);
    struct cst_json_text s;

    assert(cap > 0);
    if (!c.p || peek(&c) != '"')
        return false;
    s = take_string(&c);
    if (!c.p || s.len >= cap || memchr(s.text, '\\', s.len))
        return false;
    memcpy(out, s.text, s.len);
    out[s.len] = '\0';
    return true;
}
