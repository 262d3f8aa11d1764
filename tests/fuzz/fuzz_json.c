/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Look-ups in any bytes. The first byte is the length of the path, then path, then text. A value
 * that is found as a count is found as the same number. Aborts on a difference.
 */
#include "tests/fuzz/fuzz.h"

#include "tools/json_read.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct cst_json_text json;
    char path[256], out[32];
    uint32_t count = 0;
    double real = -1;
    size_t n;

    if (!size)
        return 0;
    n = data[0] < size - 1 ? data[0] : size - 1;
    memcpy(path, data + 1, n);
    path[n] = '\0';
    json = (struct cst_json_text){ (const char *)data + 1 + n, size - 1 - n };
    if (cst_json_get_count(json, path, &count))
        check(cst_json_get_real(json, path, &real) && real == count);
    if (cst_json_get_string(json, path, out, sizeof(out)))
        check(memchr(out, '\0', sizeof(out)));
    return 0;
}
