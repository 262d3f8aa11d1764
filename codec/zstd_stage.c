/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stage ZSTD, for bytes that no other stage understands: one frame with its content size, level 3.
 * Contexts live in the caller's workspace (zstd's static API), so nothing is allocated. The bytes
 * are those of the linked zstd version; any version decodes them.
 */
#include "codec/stage.h"

#include "base/macros.h"

#define ZSTD_STATIC_LINKING_ONLY
#include <zstd.h>

enum { LEVEL = 3 };

size_t cst_zstd_work_size(void) {
    size_t c = ZSTD_estimateCCtxSize(LEVEL), d = ZSTD_estimateDCtxSize();

    return CST_MAX(c, d);
}

size_t cst_zstd_encode(uint8_t *dst, const uint8_t *src, size_t n, const struct cst_codec_work *w) {
    ZSTD_CCtx *ctx = ZSTD_initStaticCCtx(w->zstd, w->zstd_size);
    size_t r;

    if (!ctx || n == 0)
        return 0;
    r = ZSTD_compressCCtx(ctx, dst, n - 1, src, n, LEVEL);
    return ZSTD_isError(r) ? 0 : r; /* too small a dst is an error: it didn't shrink */
}

bool cst_zstd_decode(uint8_t *dst, size_t n, const uint8_t *src, size_t len,
                     const struct cst_codec_work *w) {
    ZSTD_DCtx *ctx = ZSTD_initStaticDCtx(w->zstd, w->zstd_size);

    return ctx && ZSTD_decompressDCtx(ctx, dst, n, src, len) == n;
}
