/* SPDX-License-Identifier: Apache-2.0 */
/* Owns one ring and the open files of a directory. */
#include "bench/spill_probe.h"

#include "base/macros.h"
#include "store/seg_format.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILES_MAX = 64 };

struct spill_probe {
    const struct spill_frames *frames;
    struct io_uring ring;
    bool has_ring;
    int fds[FILES_MAX];
    unsigned n_files;
    uint64_t per_file, next; /* in frames */
};

int spill_probe_allowed(void) {
    struct io_uring ring;
    int r = io_uring_queue_init(1, &ring, 0);

    if (!r)
        io_uring_queue_exit(&ring);
    return r;
}

static void start(struct spill_probe *p, bool write, uint64_t number) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&p->ring);
    size_t i = number % SPILL_BATCH;
    int file = (int)(number / p->per_file % p->n_files);
    uint64_t at = CST_DISK_CHUNK + number % p->per_file * (SPILL_FRAME + CST_DISK_CHUNK);

    if (write)
        io_uring_prep_write_fixed(sqe, file, p->frames->frames + i * SPILL_FRAME, SPILL_FRAME, at,
                                  0);
    else
        io_uring_prep_read_fixed(sqe, file, p->frames->buffers + i * SPILL_BUFFER, SPILL_FRAME, at,
                                 1);
    io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
}

int spill_probe_run(struct spill_probe *p, bool write) {
    uint64_t first = write ? p->next : p->next - SPILL_BATCH, begun = 0, ended = 0;
    unsigned depth = write ? SPILL_WRITE_DEPTH : SPILL_READ_DEPTH;

    while (ended < SPILL_BATCH) {
        struct io_uring_cqe *cqe;
        int r;

        for (; begun < SPILL_BATCH && begun - ended < depth; begun++)
            start(p, write, first + begun);
        r = io_uring_submit_and_wait(&p->ring, 1);
        if (r < 0 && r != -EINTR)
            return r;
        while (!io_uring_peek_cqe(&p->ring, &cqe)) {
            if (cqe->res != (int)SPILL_FRAME)
                return cqe->res < 0 ? cqe->res : -EIO;
            io_uring_cqe_seen(&p->ring, cqe);
            ended++;
        }
    }
    p->next += write ? SPILL_BATCH : 0;
    return 0;
}

static int open_file(const char *dir, unsigned id) {
    char name[600];
    int n = snprintf(name, sizeof(name), "%s/", dir), fd;

    (void)snprintf(name + n, sizeof(name) - (size_t)n, CST_DISK_SEGMENT_NAME, id);
    fd = open(name, O_RDWR | O_DIRECT | O_CLOEXEC);
    return fd < 0 && errno == EINVAL ? open(name, O_RDWR | O_CLOEXEC) : fd;
}

static int open_files(struct spill_probe *p, const char *dir) {
    struct stat st;
    int fd;

    while (p->n_files < FILES_MAX && (fd = open_file(dir, p->n_files)) >= 0)
        p->fds[p->n_files++] = fd;
    if (!p->n_files || fstat(p->fds[0], &st))
        return -ENOENT;
    p->per_file = ((uint64_t)st.st_size - CST_DISK_CHUNK) / (SPILL_FRAME + CST_DISK_CHUNK);
    return p->per_file ? 0 : -EINVAL;
}

static int set_up(struct spill_probe *p, const char *dir) {
    const struct iovec v[2] = { { p->frames->frames, SPILL_BATCH * SPILL_FRAME },
                                { p->frames->buffers, SPILL_BATCH * SPILL_BUFFER } };
    int r = open_files(p, dir);

    if (!r) {
        r = io_uring_queue_init(64, &p->ring, 0);
        p->has_ring = !r;
    }
    if (!r)
        r = io_uring_register_buffers(&p->ring, v, 2);
    return r ? r : io_uring_register_files(&p->ring, p->fds, p->n_files);
}

int spill_probe_new(struct spill_probe **out, const char *dir, const struct spill_frames *frames) {
    struct spill_probe *p = calloc(1, sizeof(*p));
    int r;

    if (!p)
        return -ENOMEM;
    p->frames = frames;
    r = set_up(p, dir);
    if (r)
        p = spill_probe_free(p);
    *out = p;
    return r;
}

struct spill_probe *spill_probe_free(struct spill_probe *p) {
    if (!p)
        return NULL;
    if (p->has_ring)
        io_uring_queue_exit(&p->ring);
    while (p->n_files)
        (void)close(p->fds[--p->n_files]);
    free(p);
    return NULL;
}
