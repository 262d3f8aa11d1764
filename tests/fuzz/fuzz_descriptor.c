/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The descriptor decoder over any bytes. What it accepts is canonical (encoding gives the same
 * bytes), passes the check, and has every element of every segment inside the block. Aborts on a
 * difference.
 */
#include "tests/fuzz/fuzz.h"

#include "proto/key.h"

#include <string.h>

/* With 128-bit arithmetic, so that no wrap hides what a reader of the block would do. */
static void check_segment(const struct cst_descriptor *d, const struct cst_segment *s) {
    const struct cst_layer *l = &d->layers[s->layer];
    unsigned __int128 end = (unsigned __int128)s->offset + s->length, last = s->offset;

    check(end <= d->block_bytes);
    if (s->tensor == CST_TENSOR_OPAQUE) {
        last += (unsigned __int128)s->token_stride * d->block_tokens;
        check(last <= end);
        return;
    }
    last += (unsigned __int128)s->token_stride * (d->block_tokens - 1);
    last += (unsigned __int128)s->head_stride * (l->kv_heads - 1);
    last += (unsigned __int128)s->dim_stride *
            ((s->tensor == CST_TENSOR_K ? l->head_dim_k : l->head_dim_v) - 1);
    check(last + (s->dtype == CST_DTYPE_F32 ? 4 : 2) <= end);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static uint8_t again[CST_DESCRIPTOR_BYTES_MAX];
    struct cst_descriptor *d = NULL;
    char text[160] = "";
    int r = cst_descriptor_decode(&d, data, size, text, sizeof(text));

    if (r) {
        check(r == CST_DESCRIPTOR_E_INVALID && !d && text[0]);
        return 0;
    }
    check(!text[0] && !cst_descriptor_check(d, text, sizeof(text)));
    check(cst_descriptor_encode(d, again, sizeof(again)) == size);
    check(memcmp(again, data, size) == 0);
    for (uint32_t i = 0; i < d->n_segments; i++)
        check_segment(d, &d->segments[i]);
    (void)cst_descriptor_free(d);
    return 0;
}
