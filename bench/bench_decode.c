/* SPDX-License-Identifier: Apache-2.0 */
/*
 * codec --frame FILE [--side FILE]: what callgrind runs to count the instructions of decoding
 * (bench_instructions.c). Makes the layout anew, decodes once, is silent. One thread.
 */
#include "bench/bench_cache.h"
#include "bench/benches.h"

#include "base/macros.h"
#include "base/mem.h"
#include "codec/codec.h"
#include "codec/side.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static uint8_t *read_all(const char *path, size_t *len) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    uint8_t *bytes = NULL;
    struct stat st;

    if (fd >= 0 && !fstat(fd, &st) && (bytes = cst_malloc((size_t)st.st_size))) {
        *len = (size_t)st.st_size;
        if (pread(fd, bytes, *len, 0) != st.st_size)
            bytes = cst_free(bytes);
    }
    if (fd >= 0)
        (void)close(fd);
    return bytes;
}

static int decode(const struct cst_descriptor *desc, const uint8_t *frame, size_t len,
                  const uint8_t *side_bytes, size_t side_len) {
    size_t work_len = cst_codec_work_size_max(desc), memory_len = cst_side_memory(desc);
    void *work = aligned_alloc(64, cst_align_up(work_len, 64));
    void *memory = aligned_alloc(64, cst_align_up(memory_len, 64));
    uint8_t *block = cst_malloc(desc->block_bytes);
    struct cst_decode_params p = CST_DECODE_ALL;
    struct cst_side side;
    int r = -ENOMEM;

    if (work && memory && block) {
        if (side_bytes)
            p.side = &side;
        r = (side_bytes && cst_side_parse(&side, side_bytes, side_len, desc, memory, memory_len)) ||
                    cst_frame_decode(block, desc->block_bytes, frame, len, desc, &p, work, work_len)
                ? -EBADMSG
                : 0;
    }
    free(work);
    free(memory);
    cst_free(block);
    return r;
}

int cst_bench_decode_frame(int argc, char **argv) {
    struct bench_cache cache = { 0 };
    size_t len = 0, side_len = 0;
    uint8_t *frame = argc > 1 ? read_all(argv[1], &len) : NULL;
    uint8_t *side = argc > 3 ? read_all(argv[3], &side_len) : NULL;
    int r = frame && (side || argc == 2) ? bench_cache_layout(&cache) : -EINVAL;

    if (!r)
        r = decode(&cache.desc, frame, len, side, side_len);
    bench_cache_deinit(&cache);
    cst_free(frame);
    cst_free(side);
    return r != 0;
}
