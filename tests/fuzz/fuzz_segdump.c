/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cistern-segdump's parser on any bytes. The first byte chooses the file that they are, and
 * whether there is a root key and a key for the segment's namespace "public".
 */
#include "tests/fuzz/fuzz.h"

#include "base/mem.h"
#include "tools/segdump.h"

#include <string.h>

struct bytes {
    const uint8_t *data;
    size_t size;
};

/* Segments say that they are 256 KiB at least: what is missing reads as zeros. */
static bool read_bytes(void *arg, uint64_t offset, void *out, size_t n) {
    const struct bytes *b = arg;
    size_t have = offset < b->size ? b->size - (size_t)offset : 0;

    memset(out, 0, n);
    if (have)
        memcpy(out, b->data + offset, have < n ? have : n);
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const names[] = { "cistern-store", "keys", "checkpoint", "seg-00000001" };
    struct cst_dump d = { .form = CST_DUMP_SILENT, .records = true };
    struct bytes b;
    struct cst_dump_file f = { .read = read_bytes, .arg = &b };

    if (!size)
        return 0;
    if (data[0] & 4) {
        d.has_root = true;
        d.keys = cst_calloc(1, sizeof(*d.keys));
        d.n_keys = d.keys != NULL;
        if (d.keys)
            *d.keys = (struct cst_dump_key){ .name = "public", .length = 6 };
    }
    b = (struct bytes){ data + 1, size - 1 };
    f.name = names[data[0] % 4];
    f.size = data[0] % 4 == 3 ? 256 << 10 : b.size;
    (void)cst_dump(&d, &f);
    cst_dump_deinit(&d);
    return 0;
}
