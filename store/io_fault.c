/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The I/O backend that fails on request: a wrapper around another aio; only tests use it.
 *
 * An operation that is armed suffers its fault on every try, but for the two that say "once". It
 * runs as an operation of the inner aio (struct twin) with other arguments or another result.
 * Invariants: 1. a twin lives from start to cst_aio_ended(); 2. `late` holds twins whose result is
 * known but kept back: delayed ones end when the inner aio is idle, reordered ones after one other.
 * One thread.
 */
#include "base/err.h"
#include "base/mem.h"
#include "base/random.h"
#include "store/io_impl.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

struct fault {
    struct cst_aio aio;
    struct cst_aio *inner;
    struct cst_seeded_random random;
    enum cst_aio_fault armed;
    uint64_t nth, count, seen;
    struct cst_list late;
    size_t twins;
    struct cst_aio_op *faulted; /* the one whose next try is faulted again */
};

struct twin {
    struct cst_aio_op op; /* the inner aio's */
    struct cst_list late;
    struct fault *fault;
    struct cst_aio_op *outer;
    enum cst_aio_fault kind;
    void *copy;
    int res;
};

struct fault_file {
    struct cst_aio_file file;
    struct cst_aio_file *inner;
};

static struct fault *fault_of(struct cst_aio *aio) {
    return cst_container_of(aio, struct fault, aio);
}

static struct cst_aio_file *inner_file(struct cst_aio_file *file) {
    return cst_container_of(file, struct fault_file, file)->inner;
}

static enum cst_aio_fault next_fault(struct fault *f) {
    f->seen++;
    return f->nth && f->seen >= f->nth && f->seen - f->nth < f->count ? f->armed
                                                                      : CST_AIO_FAULT_NONE;
}

/* ---- results ---- */

static void flip_a_bit(struct fault *f, void *data, uint64_t length) {
    uint64_t at = cst_seeded_random_next(&f->random) % (8 * length);

    ((uint8_t *)data)[at / 8] ^= (uint8_t)(1 << at % 8);
}

static int64_t result(struct twin *t) {
    const struct cst_aio_op *op = t->outer;
    bool moves = op->code == CST_AIO_READ || op->code == CST_AIO_WRITE;

    if (t->res)
        return t->res == CST_AIO_E_FULL ? -ENOSPC : t->res;
    switch (t->kind) {
    case CST_AIO_FAULT_LATE_EIO:
        return -EIO;
    case CST_AIO_FAULT_SHORT:
    case CST_AIO_FAULT_SHORT_ONCE:
        return moves ? (int64_t)t->op.length : 0;
    case CST_AIO_FAULT_CORRUPT:
        if (op->code == CST_AIO_READ)
            flip_a_bit(t->fault, op->data, op->length);
        break;
    default:
        break;
    }
    return moves ? (int64_t)op->length : 0;
}

static void end(struct twin *t) {
    struct fault *f = t->fault;

    cst_list_unlink(&t->late);
    f->twins--;
    cst_aio_ended(&f->aio, t->outer, result(t));
    cst_free(t->copy);
    cst_free(t);
}

static void end_late(struct fault *f, enum cst_aio_fault kind) {
    struct cst_list *it, *tmp;

    cst_list_for_each_safe (it, tmp, &f->late) {
        struct twin *t = cst_list_entry(it, struct twin, late);

        if (t->kind == kind)
            end(t);
    }
}

static size_t n_late(const struct fault *f) {
    size_t n = 0;

    for (const struct cst_list *it = f->late.next; it != &f->late; it = it->next)
        n++;
    return n;
}

static void twin_done(struct cst_aio_op *op, int res) {
    struct twin *t = cst_container_of(op, struct twin, op);
    struct fault *f = t->fault;

    t->res = res;
    if (t->kind == CST_AIO_FAULT_DELAY || t->kind == CST_AIO_FAULT_REORDER) {
        cst_list_append(&f->late, &t->late);
    } else {
        end(t);
        end_late(f, CST_AIO_FAULT_REORDER);
    }
    if (f->twins == n_late(f)) { /* nothing else is under way */
        end_late(f, CST_AIO_FAULT_REORDER);
        end_late(f, CST_AIO_FAULT_DELAY);
    }
}

/* ---- operations ---- */

/* Faults that need no inner operation. */
static bool ends_at_once(const struct cst_aio_op *op, enum cst_aio_fault kind, int64_t *res) {
    bool moves = op->code == CST_AIO_READ || op->code == CST_AIO_WRITE;

    switch (kind) {
    case CST_AIO_FAULT_EIO:
        *res = -EIO;
        return true;
    case CST_AIO_FAULT_FULL:
        *res = op->code == CST_AIO_READ ? -EIO : -ENOSPC;
        return true;
    case CST_AIO_FAULT_CANCEL:
        *res = -ECANCELED;
        return true;
    case CST_AIO_FAULT_EAGAIN:
        *res = -EAGAIN;
        return true;
    case CST_AIO_FAULT_LOSE:
        *res = moves ? (int64_t)op->length : 0;
        return true;
    case CST_AIO_FAULT_SHORT:
    case CST_AIO_FAULT_SHORT_ONCE:
        *res = 0;
        return moves && op->length <= CST_AIO_ALIGN;
    default:
        return false;
    }
}

static int distort(struct fault *f, struct twin *t) {
    struct cst_aio_op *op = &t->op;

    switch (t->kind) {
    case CST_AIO_FAULT_SHORT:
    case CST_AIO_FAULT_SHORT_ONCE:
        op->length = cst_align_up(op->length / 2, CST_AIO_ALIGN);
        break;
    case CST_AIO_FAULT_MISPLACE:
        op->offset += CST_AIO_ALIGN;
        break;
    case CST_AIO_FAULT_CORRUPT:
        if (op->code != CST_AIO_WRITE)
            break;
        t->copy = cst_malloc(op->length + CST_AIO_ALIGN);
        if (!t->copy)
            return cst_err(-ENOMEM);
        op->data = (uint8_t *)t->copy + (-(uintptr_t)t->copy & (CST_AIO_ALIGN - 1));
        memcpy(op->data, t->outer->data, op->length);
        flip_a_bit(f, op->data, op->length);
        break;
    default:
        break;
    }
    return 0;
}

static bool is_once(enum cst_aio_fault kind) {
    return kind == CST_AIO_FAULT_SHORT_ONCE || kind == CST_AIO_FAULT_EAGAIN;
}

static enum cst_aio_fault fault_for(struct fault *f, struct cst_aio_op *op) {
    enum cst_aio_fault kind = CST_AIO_FAULT_NONE;

    if (op->tries == 1)
        kind = next_fault(f);
    else if (f->faulted == op)
        kind = f->armed;
    f->faulted = kind && !is_once(kind) ? op : f->faulted == op ? NULL : f->faulted;
    return kind;
}

static void fault_start(struct cst_aio *aio, struct cst_aio_op *op) {
    struct fault *f = fault_of(aio);
    enum cst_aio_fault kind = fault_for(f, op);
    struct twin *t;
    int64_t res;

    if (ends_at_once(op, kind, &res)) {
        cst_aio_ended(aio, op, res);
        return;
    }
    t = cst_calloc(1, sizeof(*t));
    if (!t) {
        cst_aio_ended(aio, op, -ENOMEM);
        return;
    }
    t->fault = f;
    t->outer = op;
    t->kind = kind;
    cst_list_init(&t->late);
    t->op = (struct cst_aio_op){ .done = twin_done,
                                 .file = inner_file(op->file),
                                 .code = op->code,
                                 .data = op->data,
                                 .offset = op->offset,
                                 .length = op->length };
    f->twins++;
    if (distort(f, t)) {
        t->res = -ENOMEM;
        end(t);
        return;
    }
    cst_aio_submit(f->inner, &t->op);
}

static void fault_flush(struct cst_aio *aio) {
    cst_aio_kick(fault_of(aio)->inner);
}

/* The outer descriptor must wake the owner: it is the inner one's event descriptor. */
static void fault_collect(struct cst_aio *aio) {
    (void)cst_aio_reap(fault_of(aio)->inner);
}

void cst_aio_fault_arm(struct cst_aio *aio, enum cst_aio_fault fault, uint64_t nth,
                       uint64_t count) {
    struct fault *f = fault_of(aio);

    f->armed = fault;
    f->nth = nth;
    f->count = count;
    f->seen = 0;
    f->faulted = NULL;
}

uint64_t cst_aio_fault_seen(const struct cst_aio *aio) {
    return cst_container_of(aio, struct fault, aio)->seen;
}

/* ---- files ---- */

static int fail_call(struct cst_aio *aio) {
    enum cst_aio_fault kind = next_fault(fault_of(aio));

    if (kind == CST_AIO_FAULT_EIO)
        return cst_err(-EIO);
    return kind == CST_AIO_FAULT_FULL ? CST_AIO_E_FULL : 0;
}

static int fault_open(struct cst_aio *aio, const char *name, unsigned flags,
                      struct cst_aio_file **out) {
    cst_auto(cst_freep) struct fault_file *file = cst_calloc(1, sizeof(*file));
    int r;

    if (!file)
        return cst_err(-ENOMEM);
    r = fail_call(aio);
    if (!r)
        r = cst_aio_open(fault_of(aio)->inner, name, flags, &file->inner);
    if (r)
        return r;
    file->file.fd = file->file.slot = -1;
    file->file.direct = file->inner->direct;
    *out = &cst_steal(&file)->file;
    return 0;
}

static void fault_close(struct cst_aio_file *file) {
    struct fault_file *f = cst_container_of(file, struct fault_file, file);

    (void)cst_aio_close(f->inner);
    cst_free(f);
}

static int fault_size(struct cst_aio_file *file, uint64_t *out) {
    int r = fail_call(file->aio);

    return r ? r : cst_aio_size(inner_file(file), out);
}

static int fault_resize(struct cst_aio_file *file, uint64_t size) {
    int r = fail_call(file->aio);

    return r ? r : cst_aio_resize(inner_file(file), size);
}

static int fault_lock(struct cst_aio_file *file) {
    int r = fail_call(file->aio);

    return r ? r : cst_aio_lock(inner_file(file));
}

static int fault_unlink(struct cst_aio *aio, const char *name) {
    int r = fail_call(aio);

    return r ? r : cst_aio_unlink(fault_of(aio)->inner, name);
}

static int fault_rename(struct cst_aio *aio, const char *from, const char *to) {
    int r = fail_call(aio);

    return r ? r : cst_aio_rename(fault_of(aio)->inner, from, to);
}

static int fault_sync_directory(struct cst_aio *aio) {
    int r = fail_call(aio);

    return r ? r : cst_aio_sync_directory(fault_of(aio)->inner);
}

static int fault_list(struct cst_aio *aio, int (*fn)(void *arg, const char *name), void *arg) {
    int r = fail_call(aio);

    return r ? r : cst_aio_list(fault_of(aio)->inner, fn, arg);
}

static int fault_space(struct cst_aio *aio, uint64_t *out) {
    int r = fail_call(aio);

    return r ? r : cst_aio_space(fault_of(aio)->inner, out);
}

static void fault_free(struct cst_aio *aio) {
    struct fault *f = fault_of(aio);

    assert(!f->twins);
    (void)cst_aio_free(f->inner);
    cst_free(f); /* the event descriptor was the inner one's */
}

static bool fault_add_region(struct cst_aio *aio, unsigned i) {
    return cst_aio_register(fault_of(aio)->inner, aio->regions[i].base, aio->regions[i].length);
}

static void fault_drop_region(struct cst_aio *aio, unsigned i) {
    cst_aio_unregister(fault_of(aio)->inner, aio->regions[i].base);
}

static const struct cst_aio_backend fault_backend = {
    .name = "fault",
    .free = fault_free,
    .start = fault_start,
    .flush = fault_flush,
    .collect = fault_collect,
    .add_region = fault_add_region,
    .drop_region = fault_drop_region,
    .open = fault_open,
    .close = fault_close,
    .size = fault_size,
    .resize = fault_resize,
    .lock = fault_lock,
    .unlink = fault_unlink,
    .rename = fault_rename,
    .sync_directory = fault_sync_directory,
    .list = fault_list,
    .space = fault_space,
};

int cst_aio_new_fault(struct cst_aio **out, struct cst_aio *inner, uint64_t seed) {
    struct fault *f = cst_calloc(1, sizeof(*f));
    int r;

    if (!f)
        return cst_err(-ENOMEM);
    r = cst_aio_init(&f->aio, &fault_backend, inner->depth[CST_AIO_READS],
                     inner->depth[CST_AIO_WRITES]);
    if (r) {
        cst_free(f);
        return r;
    }
    cst_aio_deinit(&f->aio);
    f->aio.event_fd = inner->event_fd;
    f->inner = inner;
    cst_list_init(&f->late);
    cst_seeded_random_init(&f->random, seed);
    *out = &f->aio;
    return 0;
}
