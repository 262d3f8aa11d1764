/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The I/O backend over io_uring; the only file that knows liburing.
 *
 * Invariants
 *   1. The ring is born disabled, is restricted to the six operations and the two kinds of update
 *      that this file uses, and is enabled only then: whoever takes over the process later can't
 *      use it for anything else. No kernel thread polls (no SQPOLL).
 *   2. The ring holds all depths: an entry is always free for an operation that may start, and the
 *      completion queue can't overflow.
 *   3. Files and regions are registered where the kernel lets us; without a place in the table a
 *      file goes by its descriptor, without the right to pin memory a region goes as plain memory.
 * Owner's thread. Completions signal the aio's event descriptor.
 */
#include "base/err.h"
#include "base/mem.h"
#include "store/io_impl.h"

#include <assert.h>
#include <errno.h>
#include <liburing.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

struct uring {
    struct cst_aio_posix posix;
    struct io_uring ring;
    bool open;
    unsigned n_slots, next_slot;
    bool *slots; /* taken */
};

static struct uring *uring_of(struct cst_aio *aio) {
    return cst_container_of(aio, struct uring, posix.aio);
}

/* ---- operations ---- */

static void prepare(struct uring *u, struct io_uring_sqe *sqe, struct cst_aio_op *op) {
    int fd = op->file->slot >= 0 ? op->file->slot : op->file->fd;
    int region = cst_aio_region_of(&u->posix.aio, op);
    unsigned n = (unsigned)op->length;

    switch (op->code) {
    case CST_AIO_READ:
        if (region >= 0)
            io_uring_prep_read_fixed(sqe, fd, op->data, n, op->offset, region);
        else
            io_uring_prep_read(sqe, fd, op->data, n, op->offset);
        break;
    case CST_AIO_WRITE:
        if (region >= 0)
            io_uring_prep_write_fixed(sqe, fd, op->data, n, op->offset, region);
        else
            io_uring_prep_write(sqe, fd, op->data, n, op->offset);
        break;
    case CST_AIO_SYNC:
        io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);
        break;
    default:
        io_uring_prep_fallocate(sqe, fd, cst_files_fallocate_mode(op->code), (off_t)op->offset,
                                (off_t)op->length);
        break;
    }
    if (op->file->slot >= 0)
        io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data(sqe, op);
}

static void uring_start(struct cst_aio *aio, struct cst_aio_op *op) {
    struct uring *u = uring_of(aio);
    struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);

    assert(sqe); /* invariant 2 */
    prepare(u, sqe, op);
}

/* The kernel is out of memory for requests: what is left in the queue goes with the next turn. */
static void uring_flush(struct cst_aio *aio) {
    struct uring *u = uring_of(aio);

    if (io_uring_submit(&u->ring) < 0 || io_uring_sq_ready(&u->ring))
        cst_aio_signal(aio);
}

static void uring_collect(struct cst_aio *aio) {
    struct uring *u = uring_of(aio);
    struct io_uring_cqe *cqe;

    if (io_uring_sq_ready(&u->ring))
        uring_flush(aio);
    while (!io_uring_peek_cqe(&u->ring, &cqe)) {
        struct cst_aio_op *op = io_uring_cqe_get_data(cqe);
        int res = cqe->res;

        io_uring_cqe_seen(&u->ring, cqe);
        cst_aio_ended(aio, op, res);
    }
}

static bool uring_add_region(struct cst_aio *aio, unsigned i) {
    const struct iovec v = { aio->regions[i].base, aio->regions[i].length };
    const __u64 tag = 0;

    return io_uring_register_buffers_update_tag(&uring_of(aio)->ring, i, &v, &tag, 1) == 1;
}

static void uring_drop_region(struct cst_aio *aio, unsigned i) {
    const struct iovec v = { NULL, 0 };
    const __u64 tag = 0;

    (void)io_uring_register_buffers_update_tag(&uring_of(aio)->ring, i, &v, &tag, 1);
}

/* ---- files ---- */

static int uring_open(struct cst_aio *aio, const char *name, unsigned flags,
                      struct cst_aio_file **out) {
    struct uring *u = uring_of(aio);
    int r = cst_files_open(aio, name, flags, out);

    if (r)
        return r;
    for (unsigned i = 0; i < u->n_slots; i++) {
        unsigned slot = (u->next_slot + i) % u->n_slots;

        if (u->slots[slot])
            continue;
        if (io_uring_register_files_update(&u->ring, slot, &(*out)->fd, 1) == 1) {
            u->slots[slot] = true;
            u->next_slot = slot + 1;
            (*out)->slot = (int)slot;
        }
        break;
    }
    return 0;
}

static void uring_close(struct cst_aio_file *file) {
    struct uring *u = uring_of(file->aio);
    int none = -1;

    if (file->slot >= 0) {
        (void)io_uring_register_files_update(&u->ring, (unsigned)file->slot, &none, 1);
        u->slots[file->slot] = false;
    }
    cst_files_close(file);
}

static void uring_free(struct cst_aio *aio) {
    struct uring *u = uring_of(aio);

    if (u->open)
        io_uring_queue_exit(&u->ring);
    cst_free(u->slots);
    cst_files_deinit(&u->posix);
    cst_aio_deinit(aio);
    cst_free(u);
}

static const struct cst_aio_backend uring_backend = {
    .name = "io_uring",
    .free = uring_free,
    .start = uring_start,
    .flush = uring_flush,
    .collect = uring_collect,
    .add_region = uring_add_region,
    .drop_region = uring_drop_region,
    .open = uring_open,
    .close = uring_close,
    .size = cst_files_size,
    .resize = cst_files_resize,
    .lock = cst_files_lock,
    .undirect = cst_files_undirect,
    .unlink = cst_files_unlink,
    .rename = cst_files_rename,
    .sync_directory = cst_files_sync_directory,
    .list = cst_files_list,
    .space = cst_files_space,
};

/* ---- birth ---- */

/* liburing 2.3 declares the two calls for this and does not export them. */
static int ring_register(struct io_uring *ring, unsigned opcode, void *arg, unsigned n) {
    return syscall(SYS_io_uring_register, ring->ring_fd, opcode, arg, n) < 0 ? -errno : 0;
}

static int restrict_ring(struct io_uring *ring) {
    static const uint8_t ops[] = { IORING_OP_READ,        IORING_OP_WRITE, IORING_OP_READ_FIXED,
                                   IORING_OP_WRITE_FIXED, IORING_OP_FSYNC, IORING_OP_FALLOCATE };
    static const uint8_t updates[] = { IORING_REGISTER_FILES_UPDATE,
                                       IORING_REGISTER_BUFFERS_UPDATE };
    struct io_uring_restriction all[CST_COUNT(ops) + CST_COUNT(updates) + 1];
    unsigned n = 0;

    memset(all, 0, sizeof(all));
    for (size_t i = 0; i < CST_COUNT(ops); i++, n++) {
        all[n].opcode = IORING_RESTRICTION_SQE_OP;
        all[n].sqe_op = ops[i];
    }
    for (size_t i = 0; i < CST_COUNT(updates); i++, n++) {
        all[n].opcode = IORING_RESTRICTION_REGISTER_OP;
        all[n].register_op = updates[i];
    }
    all[n].opcode = IORING_RESTRICTION_SQE_FLAGS_ALLOWED;
    all[n++].sqe_flags = IOSQE_FIXED_FILE;
    return ring_register(ring, IORING_REGISTER_RESTRICTIONS, all, n);
}

/* The table of files can't be larger than the limit of open ones. */
static int make_slots(struct uring *u) {
    struct rlimit limit;
    int r;

    u->n_slots = CST_AIO_FILES_MAX;
    if (!getrlimit(RLIMIT_NOFILE, &limit) && limit.rlim_cur < u->n_slots)
        u->n_slots = (unsigned)limit.rlim_cur;
    u->slots = cst_calloc(u->n_slots, sizeof(u->slots[0]));
    if (!u->slots)
        return -ENOMEM;
    r = io_uring_register_files_sparse(&u->ring, u->n_slots);
    return r < 0 ? r : 0;
}

static int make_ring(struct uring *u) {
    struct cst_aio *aio = &u->posix.aio;
    struct io_uring_params params = { .flags = IORING_SETUP_R_DISABLED | IORING_SETUP_CLAMP |
                                               IORING_SETUP_COOP_TASKRUN };
    int r = io_uring_queue_init_params(cst_aio_depth(aio), &u->ring, &params);

    if (r)
        return r;
    u->open = true;
    r = make_slots(u);
    if (!r)
        r = io_uring_register_buffers_sparse(&u->ring, CST_AIO_REGIONS_MAX);
    if (!r)
        r = io_uring_register_eventfd(&u->ring, aio->event_fd);
    if (!r)
        r = restrict_ring(&u->ring);
    return r ? r : ring_register(&u->ring, IORING_REGISTER_ENABLE_RINGS, NULL, 0);
}

static const char *reason(int error) {
    switch (error) {
    case ENOSYS:
        return "this kernel or a seccomp filter has no io_uring";
    case EPERM:
    case EACCES:
        return "kernel.io_uring_disabled or a seccomp filter forbids it";
    case ENOMEM:
        return "not enough memory, or RLIMIT_MEMLOCK is too small";
    case EINVAL:
        return "this kernel's io_uring is too old, Linux 5.19 is needed";
    default:
        return strerrordesc_np(error);
    }
}

int cst_aio_new_uring(struct cst_aio **out, const struct cst_aio_options *options, char *why,
                      size_t cap) {
    struct uring *u = cst_calloc(1, sizeof(*u));
    int r;

    if (!u)
        return cst_err(-ENOMEM);
    u->posix.directory = -1;
    r = cst_aio_init(&u->posix.aio, &uring_backend, options->read_depth, options->write_depth);
    if (!r)
        r = cst_files_init(&u->posix, options);
    if (!r) {
        int refused = make_ring(u);

        if (refused) {
            (void)snprintf(why, cap, "%s (%s)", reason(-refused), strerrorname_np(-refused));
            r = CST_AIO_E_REFUSED;
        }
    }
    if (r) {
        uring_free(&u->posix.aio);
        return r;
    }
    *out = &u->posix.aio;
    return 0;
}
