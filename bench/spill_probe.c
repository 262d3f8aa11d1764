/* SPDX-License-Identifier: Apache-2.0 */
/* Owns one ring, one file and a buffer for each operation in flight. */
#include "bench/spill_probe.h"

#include "base/macros.h"
#include "bench/bench.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct spill_probe {
    struct io_uring ring;
    bool has_ring;
    int fd;
    size_t block;
    unsigned depth[2]; /* reads, writes */
    uint64_t blocks, next;
    char *memory;
};

int spill_probe_allowed(void) {
    struct io_uring ring;
    int r = io_uring_queue_init(1, &ring, 0);

    if (!r)
        io_uring_queue_exit(&ring);
    return r;
}

static void start(struct spill_probe *p, bool write, uint64_t block, unsigned buffer) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&p->ring);
    char *data = p->memory + buffer * p->block;
    uint64_t at = block % p->blocks * p->block;

    if (write)
        io_uring_prep_write_fixed(sqe, 0, data, (unsigned)p->block, at, 0);
    else
        io_uring_prep_read_fixed(sqe, 0, data, (unsigned)p->block, at, 0);
    io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data64(sqe, buffer);
}

int spill_probe_run(struct spill_probe *p, bool write, size_t n, double *seconds) {
    uint64_t first = write ? p->next : p->next - n, begun = 0, ended = 0;
    double t = cst_seconds();

    for (; begun < n && begun < p->depth[write]; begun++)
        start(p, write, first + begun, (unsigned)begun);
    while (ended < n) {
        struct io_uring_cqe *cqe;
        int r = io_uring_submit_and_wait(&p->ring, 1);

        if (r < 0 && r != -EINTR)
            return r;
        while (!io_uring_peek_cqe(&p->ring, &cqe)) {
            unsigned buffer = (unsigned)io_uring_cqe_get_data64(cqe);

            if (cqe->res != (int)p->block)
                return cqe->res < 0 ? cqe->res : -EIO;
            io_uring_cqe_seen(&p->ring, cqe);
            ended++;
            if (begun < n)
                start(p, write, first + begun++, buffer);
        }
    }
    *seconds = cst_seconds() - t;
    if (write)
        p->next += n;
    return 0;
}

static int set_up(struct spill_probe *p, const char *dir, uint64_t file_bytes) {
    size_t n = (size_t)CST_MAX(p->depth[0], p->depth[1]) * p->block;
    struct iovec v;
    char name[600];
    double seconds;
    int r;

    (void)snprintf(name, sizeof(name), "%s/probe", dir);
    p->fd = open(name, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
    if (p->fd < 0)
        p->fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (p->fd < 0 || fallocate(p->fd, 0, 0, (off_t)file_bytes))
        return -errno;
    p->memory =
        mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (p->memory == MAP_FAILED)
        return -errno;
    memset(p->memory, 0x5a, n);
    v = (struct iovec){ p->memory, n };
    r = io_uring_queue_init(64, &p->ring, 0);
    p->has_ring = !r;
    if (!r)
        r = io_uring_register_buffers(&p->ring, &v, 1);
    if (!r)
        r = io_uring_register_files(&p->ring, &p->fd, 1);
    return r ? r : spill_probe_run(p, true, p->blocks, &seconds);
}

int spill_probe_new(struct spill_probe **out, const char *dir, size_t block, unsigned read_depth,
                    unsigned write_depth, uint64_t file_bytes) {
    struct spill_probe *p = calloc(1, sizeof(*p));

    if (!p)
        return -ENOMEM;
    *out = p;
    p->fd = -1;
    p->block = block;
    p->depth[0] = read_depth;
    p->depth[1] = write_depth;
    p->blocks = file_bytes / block;
    return set_up(p, dir, file_bytes);
}

struct spill_probe *spill_probe_free(struct spill_probe *p) {
    if (!p)
        return NULL;
    if (p->has_ring)
        io_uring_queue_exit(&p->ring);
    cst_close(p->fd);
    if (p->memory && p->memory != MAP_FAILED)
        (void)munmap(p->memory, (size_t)CST_MAX(p->depth[0], p->depth[1]) * p->block);
    free(p);
    return NULL;
}
