/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counts what a child (bench_decode.c) executes, which reads the frame from files in this process's
 * memory. One thread.
 */
#include "bench/bench_instructions.h"

#include "bench/bench.h"
#include "bench/callgrind.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Its descriptor, or negative. */
static int file_of(const uint8_t *bytes, size_t n) {
    int fd = memfd_create("cistern-bench", MFD_CLOEXEC);

    if (fd >= 0 && pwrite(fd, bytes, n, 0) != (ssize_t)n) {
        (void)close(fd);
        return -1;
    }
    return fd;
}

void cst_report_instructions(const char *preset, const struct bench_cache *cache,
                             const uint8_t *frame, size_t len, const uint8_t *side,
                             size_t side_len) {
    int fd = file_of(frame, len), side_fd = side ? file_of(side, side_len) : -1;
    double values = (double)cache->desc.block_bytes / 2, counted;
    char arguments[256], name[64];
    struct cst_figure figure = { .name = name, .unit = "", .sense = CST_NO_TARGET };

    (void)snprintf(name, sizeof(name), "codec.%s.instructions", preset);
    (void)snprintf(arguments, sizeof(arguments), "codec --frame /proc/%d/fd/%d", getpid(), fd);
    if (side)
        (void)snprintf(arguments + strlen(arguments), sizeof(arguments) - strlen(arguments),
                       " --side /proc/%d/fd/%d", getpid(), side_fd);
    counted = cst_callgrind("cst_frame_decode", arguments, NULL, NULL);
    figure.value = counted / values;
    if (counted > 0)
        cst_report(&figure, "\"instructions\": %.0f, \"values\": %.0f", counted, values);
    else
        cst_report_skipped(name, "valgrind is not installed");
    if (fd >= 0)
        (void)close(fd);
    if (side_fd >= 0)
        (void)close(side_fd);
}
