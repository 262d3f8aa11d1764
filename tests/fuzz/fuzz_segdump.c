/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cistern-segdump's parser on any bytes. The first byte chooses the file that they are; a segment
 * may be preceded by the superblock's knowledge.
 */
#include "tools/segdump.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

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
    b = (struct bytes){ data + 1, size - 1 };
    f.name = names[data[0] % 4];
    f.size = data[0] % 4 == 3 ? 256 << 10 : b.size;
    cst_dump(&d, &f);
    return 0;
}
