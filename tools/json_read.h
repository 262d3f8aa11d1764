/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Looks single values up in a JSON text. Made for the small files that describe tensors: no tree is
 * built, each look-up walks the text. The text is not trusted: nothing is read past its end,
 * nesting costs no stack. Any thread.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cst_json_text {
    const char *text;
    size_t len;
};

/* path: names of members, or numbers of elements of arrays, joined by points: "rope.base",
 * "steps.0". Each returns whether there is such a value
 * of that type; *out stays untouched otherwise. Strings with escapes are not found. */
bool cst_json_get_real(struct cst_json_text json, const char *path, double *out);
bool cst_json_get_count(struct cst_json_text json, const char *path, uint32_t *out);
bool cst_json_get_string(struct cst_json_text json, const char *path, char *out, size_t cap);
