/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The I/O table: files of one directory and asynchronous operations on them.
 *
 * One thread owns an aio (the loop thread; in a test the test). An operation is submitted with
 * cst_aio_submit(), started by cst_aio_kick() as far as the depths allow, and ends with exactly one
 * done() from inside cst_aio_reap() or cst_aio_wait(), never from submit or kick. done() may submit
 * again. Operations start in the order of their submission, reads, short writes and the others
 * apart; they end in any order. Nothing orders a read after a write of the same range but waiting
 * for its done().
 *
 * All or nothing: res 0 means that every byte was transferred. A short transfer, EINTR and EAGAIN
 * are tried again here, always as the whole range, CST_AIO_TRIES times in all; then it is an error,
 * for a write that stays short CST_AIO_E_FULL: files take less where space or a limit ends. After
 * an error the content of a written range is unknown. A read beyond the end of the file is an
 * error. No operation implies that data survives a power loss; CST_AIO_SYNC does.
 *
 * Backends: io_uring (io_uring.c), a pool of threads with pread/pwrite (io_threads.c), and for
 * tests faults around another aio (io_fault.c) and files in memory that lose power (io_sim.c).
 * All leave the same bytes in the files.
 *
 * Errors: negative errno = fatal for the call or operation; positive = a condition from the list.
 */
#pragma once

#include "base/list.h"
#include "base/macros.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    CST_AIO_E_ABSENT = 1, /* no such file */
    CST_AIO_E_EXISTS,     /* CST_AIO_EXCLUSIVE, and there is one */
    CST_AIO_E_LOCKED,     /* another process holds the lock */
    CST_AIO_E_FULL,       /* no space, quota or file size limit: also as the res of an operation */
    CST_AIO_E_REFUSED,    /* the backend that was asked for is not allowed here; see why */
    CST_AIO_E_END,        /* none: where the numbers end */
};

enum {
    CST_AIO_ALIGN = 4096,     /* of offset, length and data of files without CST_AIO_BUFFERED */
    CST_AIO_SHORT = 64 << 10, /* longest short write */
    CST_AIO_TRIES = 3,
    CST_AIO_FILES_MAX = 4096, /* open at a time, at least */
    CST_AIO_REGIONS_MAX = 16,
    CST_AIO_LENGTH_MAX = 1 << 30, /* of one read or write */
};

enum cst_aio_code {
    CST_AIO_READ,
    CST_AIO_WRITE,
    CST_AIO_SYNC,     /* fdatasync of the whole file; offset, length, data unused */
    CST_AIO_ALLOCATE, /* real blocks for [offset, offset + length), the file grows, reads as 0.
                         A file system that can't only gives the size */
    CST_AIO_DISCARD,  /* gives the blocks of the range back; the size stays, it reads as 0. May do
                         nothing on a file system that can't: then the bytes stay */
};

struct cst_aio;
struct cst_aio_file;

/* Embedded by the caller; must not move or be touched from submit to done. */
struct cst_aio_op {
    void (*done)(struct cst_aio_op *op, int res); /* 0, CST_AIO_E_FULL or negative */
    struct cst_aio_file *file;
    uint8_t code;
    void *data; /* read into, written from; a registered region is noticed by address */
    uint64_t offset, length;
    /* the table's */
    struct cst_list link;
    int64_t res;
    uint8_t tries;
};

enum cst_aio_kind { CST_AIO_AUTO, CST_AIO_URING, CST_AIO_THREADS };

struct cst_aio_options {
    const char *directory; /* exists */
    enum cst_aio_kind
        kind; /* AUTO: io_uring, or threads where that is refused or a sanitizer runs */
    /* In flight at most; 0: 16 and 4. Short writes have write_depth places of their own: headers
     * don't take those of payloads. Operations that transfer nothing count as long writes. */
    unsigned read_depth, write_depth;
    unsigned threads; /* of the pool; 0: 8 */
    bool buffered;    /* never O_DIRECT */
};

/* 0; CST_AIO_E_ABSENT (no directory); CST_AIO_E_REFUSED (kind URING only; `why` then says it in a
 * sentence); negative errno. why (cap > 0) else tells why io_uring isn't used, "" when it is. */
int cst_aio_new(struct cst_aio **out, const struct cst_aio_options *options, char *why, size_t cap);
/* Nothing in flight, all files closed. NULL ok, returns NULL. */
struct cst_aio *cst_aio_free(struct cst_aio *aio);
CST_DEFINE_FREEP(struct cst_aio, cst_aio_free)

const char *cst_aio_name(const struct cst_aio *aio); /* "io_uring", "threads", "fault", "sim" */

/*
 * Transfers from and to [base, base + length) become cheaper (its pages are pinned for the kernel).
 * Page-aligned; stays mapped until unregister or free. At most CST_AIO_REGIONS_MAX. True when it
 * helped; false is no error: io_uring without the right to pin memory (RLIMIT_MEMLOCK), other
 * backends. Unregister a region only while no operation uses it.
 */
bool cst_aio_register(struct cst_aio *aio, void *base, size_t length);
void cst_aio_unregister(struct cst_aio *aio, void *base);

/* ---- files: these calls block ---- */

enum {
    CST_AIO_CREATE = 1,    /* mode 0600 */
    CST_AIO_EXCLUSIVE = 2, /* with CREATE: it must be new */
    CST_AIO_READ_ONLY = 4,
    CST_AIO_BUFFERED = 8, /* small files of any length: no alignment, no O_DIRECT */
};

/* Symbolic links and anything but regular files are refused (-EINVAL). Names hold no '/'. */
int cst_aio_open(struct cst_aio *aio, const char *name, unsigned flags, struct cst_aio_file **out);
/* No operation in flight. NULL ok, returns NULL. */
struct cst_aio_file *cst_aio_close(struct cst_aio_file *file);
/* False: the page cache is used, since the file system knows no O_DIRECT. */
bool cst_aio_is_direct(const struct cst_aio_file *file);
int cst_aio_size(struct cst_aio_file *file, uint64_t *out);
int cst_aio_resize(struct cst_aio_file *file, uint64_t size);
/* Held until close; against other processes and other opens. CST_AIO_E_LOCKED. */
int cst_aio_lock(struct cst_aio_file *file);

int cst_aio_unlink(struct cst_aio *aio, const char *name);
/* Replaces `to` atomically. */
int cst_aio_rename(struct cst_aio *aio, const char *from, const char *to);
/* Makes creations, renames and unlinks so far survive a power loss. */
int cst_aio_sync_directory(struct cst_aio *aio);
/* Every name but "." and ".."; fn returns 0 or ends the walk with its value. fn opens no files. */
int cst_aio_list(struct cst_aio *aio, int (*fn)(void *arg, const char *name), void *arg);
/* Bytes that may still be allocated. */
int cst_aio_space(struct cst_aio *aio, uint64_t *out);

/* One whole transfer, waiting for it. Others that end meanwhile are told by the next
 * cst_aio_reap(): no done() is called from here. As done's res. */
int cst_aio_now(struct cst_aio_file *file, enum cst_aio_code code, void *data, uint64_t offset,
                uint64_t length);

/* ---- operations ---- */

void cst_aio_submit(struct cst_aio *aio, struct cst_aio_op *op);
void cst_aio_kick(struct cst_aio *aio);
/* Readable while something has ended; level-triggered. */
int cst_aio_fd(const struct cst_aio *aio);
/* Tells what has ended, starts what may now start. Returns how many done() it called. */
size_t cst_aio_reap(struct cst_aio *aio);
/* Kicks, sleeps until something ends, then reaps; 0 when nothing is in flight or the time is up.
 * timeout_ms < 0: for ever. */
size_t cst_aio_wait(struct cst_aio *aio, int timeout_ms);
/* Waits until nothing is submitted or in flight. */
void cst_aio_drain(struct cst_aio *aio);

struct cst_aio_stats {
    uint64_t reads, writes, read_bytes, write_bytes; /* that ended well */
    uint64_t errors, retries;
    size_t queued, in_flight;
};
void cst_aio_stats(const struct cst_aio *aio, struct cst_aio_stats *out);

/* ---- for tests: files in memory that lose power (io_sim.c) ---- */

struct cst_sim_disk;

enum cst_sim_loss {
    CST_SIM_KEEP, /* every completed write survives */
    CST_SIM_DROP, /* what was not synced is gone */
    CST_SIM_TEAR, /* of each write that was not synced any of its 512-byte sectors survive */
};

/* Outlives the aios that use it. capacity: bytes of all files together, then CST_AIO_E_FULL. */
int cst_sim_disk_new(struct cst_sim_disk **out, uint64_t capacity, uint64_t seed);
struct cst_sim_disk *cst_sim_disk_free(struct cst_sim_disk *disk);
CST_DEFINE_FREEP(struct cst_sim_disk, cst_sim_disk_free)
/* Power is lost at the nth write, allocate, discard, sync, create, rename, unlink or resize from
 * now (1 = the next; it may or may not reach the disk, as the loss goes); 0: never. After that
 * everything answers -EIO until cst_sim_disk_power_on(), which leaves what survived. Creations,
 * renames and unlinks that were not synced survive up to some point in their order. */
void cst_sim_disk_power_off_at(struct cst_sim_disk *disk, uint64_t nth, enum cst_sim_loss loss);
void cst_sim_disk_power_on(struct cst_sim_disk *disk);
bool cst_sim_disk_is_off(const struct cst_sim_disk *disk);
uint64_t cst_sim_disk_writes(const struct cst_sim_disk *disk); /* counted as for power_off_at */
/* A file's bytes as they are now, to look at or to damage; valid until its next change of size. */
uint8_t *cst_sim_disk_bytes(struct cst_sim_disk *disk, const char *name, uint64_t *size);
int cst_aio_new_sim(struct cst_aio **out, struct cst_sim_disk *disk);

/* ---- for tests: faults around another aio (io_fault.c) ---- */

enum cst_aio_fault {
    CST_AIO_FAULT_NONE,
    CST_AIO_FAULT_EIO,        /* fails before anything happens */
    CST_AIO_FAULT_LATE_EIO,   /* happens, then fails */
    CST_AIO_FAULT_FULL,       /* ENOSPC; of reads EIO */
    CST_AIO_FAULT_SHORT,      /* every try transfers less */
    CST_AIO_FAULT_SHORT_ONCE, /* one try transfers less, the next all */
    CST_AIO_FAULT_EAGAIN,     /* once */
    CST_AIO_FAULT_CANCEL,     /* ECANCELED */
    CST_AIO_FAULT_DELAY,      /* ends last: after everything else that is in flight */
    CST_AIO_FAULT_REORDER,    /* ends after the next one that ends */
    CST_AIO_FAULT_CORRUPT,    /* one bit flipped on the way, told as success */
    CST_AIO_FAULT_LOSE,       /* not done, told as success (a read leaves its buffer as it was) */
    CST_AIO_FAULT_MISPLACE,   /* 4,096 bytes further on (a read likewise), told as success */
    CST_AIO_FAULTS,
};

/* Takes inner on 0; freed with it. */
int cst_aio_new_fault(struct cst_aio **out, struct cst_aio *inner, uint64_t seed);
/* The nth operation or file call from now (1 = the next) and the count - 1 after it suffer it; nth
 * 0 disarms. File calls know EIO, FULL only; the others leave them alone. Resets the counter. */
void cst_aio_fault_arm(struct cst_aio *aio, enum cst_aio_fault fault, uint64_t nth, uint64_t count);
uint64_t cst_aio_fault_seen(const struct cst_aio *aio);
