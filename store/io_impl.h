/* SPDX-License-Identifier: Apache-2.0 */
/* What the I/O backends share with io.c; nobody else includes this. Threads and errors: io.h. */
#pragma once

#include "store/io.h"

struct cst_aio_region {
    char *base;
    size_t length;
    bool registered;
};

/* Operations that wait for each other's places only. */
enum cst_aio_lane { CST_AIO_READS, CST_AIO_WRITES, CST_AIO_SHORT_WRITES, CST_AIO_LANES };

/* A backend's object starts with this. */
struct cst_aio {
    const struct cst_aio_backend *backend;
    struct cst_list queue[CST_AIO_LANES]; /* submitted, not started */
    unsigned in_flight[CST_AIO_LANES], depth[CST_AIO_LANES];
    struct cst_list ended;  /* res is what the backend says */
    struct cst_list judged; /* res is what done() is told; not in flight any more */
    int event_fd;
    unsigned files;
    struct cst_aio_region regions[CST_AIO_REGIONS_MAX];
    struct cst_aio_stats stats;
};

struct cst_aio_file {
    struct cst_aio *aio;
    int fd;       /* real files */
    int slot;     /* io_uring's table of files; -1: none */
    bool aligned; /* offsets, lengths and addresses are */
    bool direct;
};

struct cst_aio_backend {
    const char *name;
    void (*free)(struct cst_aio *aio);

    /* Begins op; cst_aio_ended() follows, from here, from flush or from collect, on the owner's
     * thread. */
    void (*start)(struct cst_aio *aio, struct cst_aio_op *op);
    void (*flush)(struct cst_aio *aio);   /* after some starts; NULL: nothing to do */
    void (*collect)(struct cst_aio *aio); /* calls cst_aio_ended() for what has; NULL likewise */
    bool (*add_region)(struct cst_aio *aio, unsigned i); /* NULL: regions are of no use */
    void (*drop_region)(struct cst_aio *aio, unsigned i);

    /* as in io.h; aio is what struct cst_aio_file says */
    int (*open)(struct cst_aio *aio, const char *name, unsigned flags, struct cst_aio_file **out);
    void (*close)(struct cst_aio_file *file);
    int (*size)(struct cst_aio_file *file, uint64_t *out);
    int (*resize)(struct cst_aio_file *file, uint64_t size);
    int (*lock)(struct cst_aio_file *file);
    bool (*undirect)(struct cst_aio_file *file); /* no O_DIRECT from now on; NULL: there is none */
    int (*unlink)(struct cst_aio *aio, const char *name);
    int (*rename)(struct cst_aio *aio, const char *from, const char *to);
    int (*sync_directory)(struct cst_aio *aio);
    int (*list)(struct cst_aio *aio, int (*fn)(void *arg, const char *name), void *arg);
    int (*space)(struct cst_aio *aio, uint64_t *out);
};

static inline enum cst_aio_lane cst_aio_lane(const struct cst_aio_op *op) {
    if (op->code == CST_AIO_READ)
        return CST_AIO_READS;
    return op->code == CST_AIO_WRITE && op->length <= CST_AIO_SHORT ? CST_AIO_SHORT_WRITES
                                                                    : CST_AIO_WRITES;
}

/* The most that can be in flight. */
static inline unsigned cst_aio_depth(const struct cst_aio *aio) {
    return aio->depth[CST_AIO_READS] + aio->depth[CST_AIO_WRITES] +
           aio->depth[CST_AIO_SHORT_WRITES];
}

int cst_aio_init(struct cst_aio *aio, const struct cst_aio_backend *backend, unsigned read_depth,
                 unsigned write_depth);
void cst_aio_deinit(struct cst_aio *aio);
/* res: bytes transferred, 0 for what transfers nothing, or negative. Owner's thread. */
void cst_aio_ended(struct cst_aio *aio, struct cst_aio_op *op, int64_t res);
/* Something ended, or collect has work. Any thread. */
void cst_aio_signal(const struct cst_aio *aio);
/* The region that holds all of the op's data, or -1. */
int cst_aio_region_of(const struct cst_aio *aio, const struct cst_aio_op *op);
/* ENOSPC and its kin become CST_AIO_E_FULL, ENOENT ABSENT, EEXIST EXISTS; others are raised. */
int cst_aio_errno(int error);

/* ---- real files (io_files.c), for io_uring and threads; their objects start with this ---- */

struct cst_aio_posix {
    struct cst_aio aio;
    int directory;
    bool buffered;
};

int cst_files_init(struct cst_aio_posix *p, const struct cst_aio_options *options);
void cst_files_deinit(struct cst_aio_posix *p);
int cst_files_open(struct cst_aio *aio, const char *name, unsigned flags,
                   struct cst_aio_file **out);
void cst_files_close(struct cst_aio_file *file);
int cst_files_size(struct cst_aio_file *file, uint64_t *out);
int cst_files_resize(struct cst_aio_file *file, uint64_t size);
int cst_files_lock(struct cst_aio_file *file);
bool cst_files_undirect(struct cst_aio_file *file);
int cst_files_unlink(struct cst_aio *aio, const char *name);
int cst_files_rename(struct cst_aio *aio, const char *from, const char *to);
int cst_files_sync_directory(struct cst_aio *aio);
int cst_files_list(struct cst_aio *aio, int (*fn)(void *arg, const char *name), void *arg);
int cst_files_space(struct cst_aio *aio, uint64_t *out);

/* Flags for fallocate() of CST_AIO_ALLOCATE and CST_AIO_DISCARD. */
int cst_files_fallocate_mode(enum cst_aio_code code);

/* 0; CST_AIO_E_ABSENT; CST_AIO_E_REFUSED with `why` filled; negative. */
int cst_aio_new_uring(struct cst_aio **out, const struct cst_aio_options *options, char *why,
                      size_t cap);
int cst_aio_new_threads(struct cst_aio **out, const struct cst_aio_options *options);
