/* SPDX-License-Identifier: Apache-2.0 */
/* Reads one file of the fixture. No state. */
#include "tests/unit/codec/kv_fixture.h"

#include "tests/lib/check.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <zstd.h>

struct kv_tensor kv_load(const char *folder, const char *name) {
    struct kv_tensor t = { NULL, 0 };
    char path[PATH_MAX];
    uint8_t *packed;
    long n;
    FILE *f;

    (void)snprintf(path, sizeof(path), "%s/%s.bf16.zst", folder, name);
    f = fopen(path, "rbe");
    if (!f) {
        print_error("%s is missing\n", path);
        fail();
    }
    (void)fseek(f, 0, SEEK_END);
    n = ftell(f);
    rewind(f);
    packed = malloc((size_t)n);
    assert_int_equal(fread(packed, 1, (size_t)n, f), n);
    (void)fclose(f);
    t.size = ZSTD_getFrameContentSize(packed, (size_t)n);
    assert_true(t.size < 64 << 20);
    t.bytes = malloc(t.size);
    assert_int_equal(ZSTD_decompress(t.bytes, t.size, packed, (size_t)n), t.size);
    free(packed);
    return t;
}
