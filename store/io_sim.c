/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns a disk in memory that loses power, and the I/O backend over it; only tests use it.
 *
 * Each file has its bytes as they are and as they are safe; `log` holds what happened in between,
 * in order. Losing power takes the safe bytes and plays those parts of the log that survive. The
 * directory works likewise: `safe` names and a log of creations, renames and unlinks, of which a
 * beginning survives.
 *
 * Invariants: 1. playing a whole log over the safe state gives the present one; 2. while the power
 * is off nothing changes and everything answers -EIO. One thread.
 */
#include "base/err.h"
#include "base/mem.h"
#include "base/random.h"
#include "store/io_impl.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

enum { SECTOR = 512, NAME_MAX_LEN = 63 };

struct image {
    uint8_t *bytes;
    uint64_t size;
};

/* WRITE with data, DISCARD; RESIZE when data is NULL and code is CST_AIO_ALLOCATE: `offset` long */
struct change {
    struct cst_list link;
    uint8_t code;
    uint64_t offset, length;
    uint8_t data[];
};

struct inode {
    struct cst_list link;
    struct image now, safe;
    struct cst_list log;
    bool locked;
};

struct entry {
    struct cst_list link;
    struct inode *inode;
    char name[NAME_MAX_LEN + 1];
};

/* to == "": unlink of from; inode: creation of to */
struct naming {
    struct cst_list link;
    struct inode *inode;
    char from[NAME_MAX_LEN + 1], to[NAME_MAX_LEN + 1];
};

struct cst_sim_disk {
    struct cst_list inodes, names, safe_names, namings;
    uint64_t capacity, writes, off_at;
    enum cst_sim_loss loss;
    struct cst_seeded_random random;
    bool off;
};

struct sim {
    struct cst_aio aio;
    struct cst_sim_disk *disk;
};

struct sim_file {
    struct cst_aio_file file;
    struct inode *inode;
    bool holds_lock;
};

static struct cst_sim_disk *disk_of(struct cst_aio *aio) {
    return cst_container_of(aio, struct sim, aio)->disk;
}

static struct sim_file *sim_file(struct cst_aio_file *file) {
    return cst_container_of(file, struct sim_file, file);
}

/* ---- images ---- */

static int resize(struct image *image, uint64_t size) {
    uint8_t *bytes = size ? cst_realloc(image->bytes, size) : image->bytes;

    if (size && !bytes)
        return cst_err(-ENOMEM);
    if (size > image->size)
        memset(bytes + image->size, 0, size - image->size);
    image->bytes = bytes;
    image->size = size;
    return 0;
}

static int play(struct image *image, const struct change *c, const uint8_t *data, uint64_t offset,
                uint64_t length) {
    uint64_t end = offset + length;
    int r = 0;

    if (c->code == CST_AIO_ALLOCATE)
        return resize(image, c->offset);
    if (c->code == CST_AIO_DISCARD) {
        if (offset < image->size)
            memset(image->bytes + offset, 0, CST_MIN(end, image->size) - offset);
        return 0;
    }
    if (end > image->size)
        r = resize(image, end);
    if (!r)
        memcpy(image->bytes + offset, data, length);
    return r;
}

static int play_whole(struct image *image, const struct change *c) {
    return play(image, c, c->data, c->offset, c->length);
}

static bool coin(struct cst_sim_disk *disk) {
    return cst_seeded_random_next(&disk->random) >> 63;
}

static void play_torn(struct cst_sim_disk *disk, struct image *image, const struct change *c) {
    if (c->code != CST_AIO_WRITE) {
        if (coin(disk))
            (void)play_whole(image, c);
        return;
    }
    for (uint64_t at = 0; at < c->length; at += SECTOR)
        if (coin(disk))
            (void)play(image, c, c->data + at, c->offset + at, CST_MIN(SECTOR, c->length - at));
}

static void clear_log(struct inode *inode) {
    struct cst_list *it;

    while ((it = cst_list_first(&inode->log))) {
        cst_list_unlink(it);
        cst_free(cst_list_entry(it, struct change, link));
    }
}

static int make_safe(struct inode *inode) {
    struct cst_list *it, *tmp;
    int r = 0;

    cst_list_for_each_safe (it, tmp, &inode->log)
        r = r ? r : play_whole(&inode->safe, cst_list_entry(it, struct change, link));
    clear_log(inode);
    return r;
}

/* ---- power ---- */

static bool goes_off(struct cst_sim_disk *disk) {
    disk->writes++;
    if (disk->off_at && !--disk->off_at)
        disk->off = true;
    return disk->off;
}

static void lose_bytes(struct cst_sim_disk *disk, struct inode *inode) {
    struct cst_list *it, *tmp;

    cst_list_for_each_safe (it, tmp, &inode->log) {
        struct change *c = cst_list_entry(it, struct change, link);

        if (disk->loss == CST_SIM_KEEP)
            (void)play_whole(&inode->safe, c);
        else if (disk->loss == CST_SIM_TEAR)
            play_torn(disk, &inode->safe, c);
    }
    clear_log(inode);
    inode->locked = false;
    (void)resize(&inode->now, inode->safe.size);
    if (inode->safe.size)
        memcpy(inode->now.bytes, inode->safe.bytes, inode->safe.size);
}

void cst_sim_disk_power_off_at(struct cst_sim_disk *disk, uint64_t nth, enum cst_sim_loss loss) {
    disk->off_at = nth;
    disk->loss = loss;
}

bool cst_sim_disk_is_off(const struct cst_sim_disk *disk) {
    return disk->off;
}

uint64_t cst_sim_disk_writes(const struct cst_sim_disk *disk) {
    return disk->writes;
}

/* ---- names ---- */

static struct entry *find(struct cst_list *names, const char *name) {
    struct cst_list *it, *tmp;

    cst_list_for_each_safe (it, tmp, names) {
        struct entry *e = cst_list_entry(it, struct entry, link);

        if (!strcmp(e->name, name))
            return e;
    }
    return NULL;
}

static void forget(struct entry *e) {
    if (!e)
        return;
    cst_list_unlink(&e->link);
    cst_free(e);
}

static int name_it(struct cst_list *names, const char *name, struct inode *inode) {
    struct entry *e = cst_calloc(1, sizeof(*e));

    if (!e)
        return cst_err(-ENOMEM);
    memcpy(e->name, name, strlen(name));
    e->inode = inode;
    forget(find(names, name));
    cst_list_append(names, &e->link);
    return 0;
}

static int play_naming(struct cst_list *names, const struct naming *n) {
    struct entry *e = *n->from ? find(names, n->from) : NULL;
    int r = 0;

    if (n->inode)
        return name_it(names, n->to, n->inode);
    if (e && *n->to)
        r = name_it(names, n->to, e->inode);
    if (!r)
        forget(e);
    return r;
}

/* Done and noted, unless the power goes off here: then it is only noted, as the last thing. */
static int rename_it(struct cst_sim_disk *disk, struct inode *inode, const char *from,
                     const char *to) {
    struct naming *n = cst_calloc(1, sizeof(*n));
    bool off;

    if (!n)
        return cst_err(-ENOMEM);
    n->inode = inode;
    memcpy(n->from, from, strlen(from));
    memcpy(n->to, to, strlen(to));
    off = goes_off(disk);
    if (off && disk->loss != CST_SIM_TEAR) {
        cst_free(n);
        return cst_err(-EIO);
    }
    cst_list_append(&disk->namings, &n->link);
    return off ? cst_err(-EIO) : play_naming(&disk->names, n);
}

static void play_namings(struct cst_sim_disk *disk, struct cst_list *names, uint64_t most) {
    struct cst_list *it;

    while ((it = cst_list_first(&disk->namings))) {
        struct naming *n = cst_list_entry(it, struct naming, link);

        if (most && most--)
            (void)play_naming(names, n);
        cst_list_unlink(it);
        cst_free(n);
    }
}

static void forget_all(struct cst_list *names) {
    struct cst_list *it;

    while ((it = cst_list_first(names)))
        forget(cst_list_entry(it, struct entry, link));
}

static void lose_names(struct cst_sim_disk *disk) {
    struct cst_list *it, *tmp;
    uint64_t n = 0;

    cst_list_for_each_safe (it, tmp, &disk->namings)
        n++;
    if (disk->loss == CST_SIM_DROP)
        n = 0;
    else if (disk->loss == CST_SIM_TEAR)
        n = cst_seeded_random_next(&disk->random) % (n + 1);
    play_namings(disk, &disk->safe_names, n);
    forget_all(&disk->names);
    cst_list_for_each_safe (it, tmp, &disk->safe_names) {
        struct entry *e = cst_list_entry(it, struct entry, link);

        (void)name_it(&disk->names, e->name, e->inode);
    }
}

void cst_sim_disk_power_on(struct cst_sim_disk *disk) {
    struct cst_list *it, *tmp;

    if (disk->off) {
        cst_list_for_each_safe (it, tmp, &disk->inodes)
            lose_bytes(disk, cst_list_entry(it, struct inode, link));
        lose_names(disk);
    }
    disk->off = false;
    disk->off_at = 0;
}

/* ---- the disk ---- */

int cst_sim_disk_new(struct cst_sim_disk **out, uint64_t capacity, uint64_t seed) {
    struct cst_sim_disk *disk = cst_calloc(1, sizeof(*disk));

    if (!disk)
        return cst_err(-ENOMEM);
    cst_list_init(&disk->inodes);
    cst_list_init(&disk->names);
    cst_list_init(&disk->safe_names);
    cst_list_init(&disk->namings);
    disk->capacity = capacity;
    cst_seeded_random_init(&disk->random, seed);
    *out = disk;
    return 0;
}

struct cst_sim_disk *cst_sim_disk_free(struct cst_sim_disk *disk) {
    struct cst_list *it;

    if (!disk)
        return NULL;
    play_namings(disk, &disk->safe_names, 0);
    forget_all(&disk->names);
    forget_all(&disk->safe_names);
    while ((it = cst_list_first(&disk->inodes))) {
        struct inode *inode = cst_list_entry(it, struct inode, link);

        cst_list_unlink(it);
        clear_log(inode);
        cst_free(inode->now.bytes);
        cst_free(inode->safe.bytes);
        cst_free(inode);
    }
    return cst_free(disk);
}

uint8_t *cst_sim_disk_bytes(struct cst_sim_disk *disk, const char *name, uint64_t *size) {
    struct entry *e = find(&disk->names, name);

    if (!e || make_safe(e->inode)) /* damage stays: what is there now is what is safe */
        return NULL;
    *size = e->inode->now.size;
    return e->inode->now.bytes;
}

/* ---- operations ---- */

static uint64_t used(const struct cst_sim_disk *disk) {
    uint64_t sum = 0;

    for (const struct cst_list *it = disk->names.next; it != &disk->names; it = it->next)
        sum += cst_list_entry(it, struct entry, link)->inode->now.size;
    return sum;
}

static bool fits(const struct cst_sim_disk *disk, const struct inode *inode, uint64_t end) {
    return end <= inode->now.size || used(disk) + end - inode->now.size <= disk->capacity;
}

/* A change of bytes, noted in the log; with the power going off it is noted only if it may tear. */
static int change(struct cst_sim_disk *disk, struct inode *inode, enum cst_aio_code code,
                  const void *data, uint64_t offset, uint64_t length) {
    uint64_t n = code == CST_AIO_WRITE ? length : 0;
    struct change *c;
    bool off;

    if (!fits(disk, inode,
              code == CST_AIO_ALLOCATE ? offset
              : code == CST_AIO_WRITE  ? offset + n
                                       : 0))
        return -ENOSPC;
    c = cst_malloc(sizeof(*c) + n);
    if (!c)
        return cst_err(-ENOMEM);
    *c = (struct change){ .code = (uint8_t)code, .offset = offset, .length = length };
    if (n)
        memcpy(c->data, data, n);
    off = goes_off(disk);
    if (off && disk->loss != CST_SIM_TEAR) {
        cst_free(c);
        return -EIO;
    }
    cst_list_append(&inode->log, &c->link);
    return off ? -EIO : play_whole(&inode->now, c);
}

static int64_t read_from(const struct image *image, void *out, uint64_t offset, uint64_t length) {
    uint64_t n = offset < image->size ? CST_MIN(length, image->size - offset) : 0;

    if (n)
        memcpy(out, image->bytes + offset, n);
    return (int64_t)n;
}

static int64_t perform(struct cst_sim_disk *disk, struct cst_aio_op *op) {
    struct inode *inode = sim_file(op->file)->inode;
    uint64_t end = op->offset + op->length;
    int r;

    if (disk->off)
        return -EIO;
    switch (op->code) {
    case CST_AIO_READ:
        return read_from(&inode->now, op->data, op->offset, op->length);
    case CST_AIO_WRITE:
        r = change(disk, inode, CST_AIO_WRITE, op->data, op->offset, op->length);
        return r ? r : (int64_t)op->length;
    case CST_AIO_SYNC:
        return goes_off(disk) ? -EIO : make_safe(inode);
    case CST_AIO_ALLOCATE:
        return end <= inode->now.size ? 0 : change(disk, inode, CST_AIO_ALLOCATE, NULL, end, 0);
    default:
        return change(disk, inode, CST_AIO_DISCARD, NULL, op->offset, op->length);
    }
}

static void sim_start(struct cst_aio *aio, struct cst_aio_op *op) {
    cst_aio_ended(aio, op, perform(disk_of(aio), op));
}

/* ---- files ---- */

static int new_inode(struct inode **out, struct cst_sim_disk *disk, const char *name) {
    struct inode *inode = cst_calloc(1, sizeof(*inode));
    int r;

    if (!inode)
        return cst_err(-ENOMEM);
    cst_list_init(&inode->log);
    cst_list_append(&disk->inodes, &inode->link);
    r = rename_it(disk, inode, "", name);
    *out = inode;
    return r;
}

static int sim_open(struct cst_aio *aio, const char *name, unsigned flags,
                    struct cst_aio_file **out) {
    struct cst_sim_disk *disk = disk_of(aio);
    struct entry *e = find(&disk->names, name);
    cst_auto(cst_freep) struct sim_file *f = cst_calloc(1, sizeof(*f));
    int r = 0;

    if (!f)
        return cst_err(-ENOMEM);
    if (disk->off)
        return cst_err(-EIO);
    if (strlen(name) > NAME_MAX_LEN)
        return cst_err(-ENAMETOOLONG);
    if (e && flags & CST_AIO_EXCLUSIVE)
        return CST_AIO_E_EXISTS;
    if (!e && !(flags & CST_AIO_CREATE))
        return CST_AIO_E_ABSENT;
    if (e)
        f->inode = e->inode;
    else
        r = new_inode(&f->inode, disk, name);
    if (r)
        return r;
    f->file.fd = f->file.slot = -1;
    *out = &cst_steal(&f)->file;
    return 0;
}

static void sim_close(struct cst_aio_file *file) {
    struct sim_file *f = sim_file(file);

    if (f->holds_lock)
        f->inode->locked = false;
    cst_free(f);
}

static int sim_size(struct cst_aio_file *file, uint64_t *out) {
    *out = sim_file(file)->inode->now.size;
    return disk_of(file->aio)->off ? cst_err(-EIO) : 0;
}

static int sim_resize(struct cst_aio_file *file, uint64_t size) {
    struct cst_sim_disk *disk = disk_of(file->aio);
    int r = disk->off ? -EIO : change(disk, sim_file(file)->inode, CST_AIO_ALLOCATE, NULL, size, 0);

    return r ? cst_aio_errno(-r) : 0;
}

static int sim_lock(struct cst_aio_file *file) {
    struct sim_file *f = sim_file(file);

    if (f->inode->locked && !f->holds_lock)
        return CST_AIO_E_LOCKED;
    f->holds_lock = f->inode->locked = true;
    return 0;
}

static int sim_unlink(struct cst_aio *aio, const char *name) {
    struct cst_sim_disk *disk = disk_of(aio);

    if (disk->off)
        return cst_err(-EIO);
    return find(&disk->names, name) ? rename_it(disk, NULL, name, "") : CST_AIO_E_ABSENT;
}

static int sim_rename(struct cst_aio *aio, const char *from, const char *to) {
    struct cst_sim_disk *disk = disk_of(aio);

    if (disk->off)
        return cst_err(-EIO);
    if (strlen(to) > NAME_MAX_LEN)
        return cst_err(-ENAMETOOLONG);
    return find(&disk->names, from) ? rename_it(disk, NULL, from, to) : CST_AIO_E_ABSENT;
}

static int sim_sync_directory(struct cst_aio *aio) {
    struct cst_sim_disk *disk = disk_of(aio);

    if (disk->off || goes_off(disk))
        return cst_err(-EIO);
    play_namings(disk, &disk->safe_names, UINT64_MAX);
    return 0;
}

static int sim_list(struct cst_aio *aio, int (*fn)(void *arg, const char *name), void *arg) {
    struct cst_sim_disk *disk = disk_of(aio);
    struct cst_list *it, *tmp;
    int r = disk->off ? cst_err(-EIO) : 0;

    cst_list_for_each_safe (it, tmp, &disk->names)
        r = r ? r : fn(arg, cst_list_entry(it, struct entry, link)->name);
    return r;
}

static int sim_space(struct cst_aio *aio, uint64_t *out) {
    struct cst_sim_disk *disk = disk_of(aio);

    *out = disk->capacity - CST_MIN(used(disk), disk->capacity);
    return disk->off ? cst_err(-EIO) : 0;
}

static void sim_free(struct cst_aio *aio) {
    cst_aio_deinit(aio);
    cst_free(cst_container_of(aio, struct sim, aio));
}

static const struct cst_aio_backend sim_backend = {
    .name = "sim",
    .free = sim_free,
    .start = sim_start,
    .open = sim_open,
    .close = sim_close,
    .size = sim_size,
    .resize = sim_resize,
    .lock = sim_lock,
    .unlink = sim_unlink,
    .rename = sim_rename,
    .sync_directory = sim_sync_directory,
    .list = sim_list,
    .space = sim_space,
};

int cst_aio_new_sim(struct cst_aio **out, struct cst_sim_disk *disk) {
    struct sim *s = cst_calloc(1, sizeof(*s));
    int r;

    if (!s)
        return cst_err(-ENOMEM);
    s->disk = disk;
    r = cst_aio_init(&s->aio, &sim_backend, 0, 0);
    if (r) {
        sim_free(&s->aio);
        return r;
    }
    *out = &s->aio;
    return 0;
}
