/* SPDX-License-Identifier: Apache-2.0 */
/* What cisternctl prints: one JSON value, or text for people. Standard output only. */
#pragma once

#include <protobuf-c/protobuf-c.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- JSON: open what you close; key is NULL inside an array and at the top ---- */

void cst_json_open(const char *key, char bracket); /* '{' or '[' */
void cst_json_close(char bracket);                 /* '}' or ']'; the last one ends the line */
void cst_json_text(const char *key, const char *value);
void cst_json_number(const char *key, uint64_t value);
void cst_json_real(const char *key, double value);
void cst_json_hex(const char *key, const void *data, size_t n);

/* Every field of a message under its own name; u64 fields named "epoch" as hex text. */
void cst_json_message(const ProtobufCMessage *message);

/* ---- text ---- */

enum cst_format {
    CST_FORMAT_COUNT,
    CST_FORMAT_BYTES, /* "64.0 MiB" */
    CST_FORMAT_MS,    /* "2 d 3 h" */
    CST_FORMAT_TEXT,
};

struct cst_field {
    const char *label, *field; /* field of the message; NULL: an empty line */
    enum cst_format format;
};

/* One line a field, values in one column. */
void cst_text_message(const ProtobufCMessage *message, const struct cst_field *fields, size_t n);
void cst_text_line(const char *label, const char *value);

/* A heading, bold on a terminal. */
void cst_text_heading(bool color, const char *text);

enum { CST_AMOUNT_MAX = 32 };
const char *cst_text_bytes(uint64_t n, char out[CST_AMOUNT_MAX]);
const char *cst_text_duration(uint64_t ms, char out[CST_AMOUNT_MAX]);
void cst_text_hex(const void *data, size_t n, char *out); /* 2 n digits and an end */

/* Copies a field that may lack its end, without control characters. */
void cst_text_field(const char *field, size_t n, char *out, size_t cap);
