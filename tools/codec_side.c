/* SPDX-License-Identifier: Apache-2.0 */
/* Owns bytes and memory of side data; the parsed side points into both. */
#include "tools/codec_side.h"

#include "base/macros.h"
#include "base/mem.h"
#include "tools/tensor_file.h"

#include <errno.h>
#include <stdio.h>

enum { MEMORY_ALIGN = 64 };

static const char *condition_text(int condition) {
    switch (condition) {
    case CST_SIDE_E_VERSION:
        return "side data of another version";
    case CST_SIDE_E_MISMATCH:
        return "side data of a model of another shape";
    default:
        return "no side data, or damaged ones";
    }
}

/* Of out->bytes. */
static int parse(struct cst_codec_side *out, const char *path, size_t len,
                 const struct cst_descriptor *desc) {
    size_t need = cst_side_memory(desc);
    int r;

    out->memory = cst_malloc(need + MEMORY_ALIGN);
    if (!out->memory)
        return -ENOMEM;
    r = cst_side_parse(&out->side, out->bytes, len, desc,
                       out->memory + (-(uintptr_t)out->memory & (MEMORY_ALIGN - 1)), need);
    if (r) {
        (void)fprintf(stderr, "cistern-codec: %s: %s\n", path, condition_text(r));
        return -EINVAL;
    }
    return 0;
}

int cst_codec_side_parse(struct cst_codec_side *out, const void *bytes, size_t len,
                         const struct cst_descriptor *desc) {
    out->bytes = cst_memdup(bytes, len);
    return out->bytes ? parse(out, "what was learned", len, desc) : -ENOMEM;
}

int cst_codec_side_read(struct cst_codec_side *out, const char *path,
                        const struct cst_descriptor *desc) {
    size_t len = 0;
    int r = cst_file_read(path, CST_SIDE_BYTES_MAX, &out->bytes, &len);

    return r ? r : parse(out, path, len, desc);
}

void cst_codec_side_deinit(struct cst_codec_side *s) {
    s->bytes = cst_free(s->bytes);
    s->memory = cst_free(s->memory);
}
