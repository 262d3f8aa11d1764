/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine of the disk tier: opening, closing, and what its files share. In parts:
 *
 *   seg_open     the directory: superblock, lock, which files there are
 *   seg_keys     root key and keys of namespaces      seg_crypt   sealed messages, HKDF
 *   seg_space    namespaces, spaces                    seg_meta    bytes of metas, checks of heads
 *   seg_write    records on their way to the disk      seg_segment the life of a segment
 *   seg_read     records on their way back             seg_evict   victims, moves
 *   seg_recover  what a start finds                    seg_checkpoint  marks that segments can't
 * hold
 *
 *   free -> open -> (finish) closing -> closed -> (evict) evicting -> free
 *            '-- a write failed: closed without a chance of being used again in this run
 *
 * This file owns the superblock and the table of segments.
 * Invariants: 1. nothing in the directory is written before the superblock is locked and
 * understood;
 * 2. a file of a segment is opened once, and closed with the engine; 3. files that weren't
 * understood are never written or removed. Loop thread only.
 */
#include "base/err.h"
#include "base/mem.h"
#include "store/seg_core.h"

#include <assert.h>
#include <errno.h>
#include <openssl/crypto.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum {
    LOCK_MS = 3000,
    ERRORS_S = 600 /* without an error: it counts from 0 again */,
    FILES_MAX = CST_AIO_FILES_MAX - 16
};
#define DEFAULT_SEGMENT (UINT64_C(64) << 20)

uint64_t cst_seg_unix(const struct cst_seg *seg) {
    return seg->env.unix_s ? seg->env.unix_s() : (uint64_t)time(NULL);
}

void cst_seg_note(struct cst_seg *seg, const char *format, ...) {
    char text[400];
    va_list ap;

    if (!seg->env.user.note)
        return;
    va_start(ap, format);
    (void)vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    seg->env.user.note(seg->env.user.arg, text);
}

int cst_seg_refuse(char *message, size_t cap, const char *format, ...) {
    va_list ap;

    va_start(ap, format);
    (void)vsnprintf(message, cap, format, ap);
    va_end(ap);
    return CST_SEG_E_REFUSED;
}

static void note_full(struct cst_seg *seg) {
    if (!seg->noted_full)
        cst_seg_note(seg, "the disk tier's file system is full: the tier makes do with %u segments",
                     seg->n_files);
    seg->noted_full = true;
}

static const char *what_is_short(int r) {
    return r == -ENOMEM ? "memory" : "file descriptors";
}

static void note_short(struct cst_seg *seg, int r) {
    bool *noted = &seg->noted_short[r == -ENOMEM];

    if (!*noted)
        cst_seg_note(seg, "the disk tier gets no %s from the system: it does less until there is",
                     what_is_short(r));
    *noted = true;
}

static void note_lost(struct cst_seg *seg, int r) {
    if (!seg->noted_lost)
        cst_seg_note(seg,
                     "the disk tier lost a segment, to be used again after a restart: a write "
                     "got no %s from the system",
                     what_is_short(r));
    seg->noted_lost = true;
}

static void count_error(struct cst_seg *seg) {
    uint32_t most = seg->options.errors_max ? seg->options.errors_max : 16;

    seg->stats.errors++;
    if (cst_seg_now(seg) - seg->error_ns > ERRORS_S * CST_NS_PER_S)
        seg->n_errors = 0;
    seg->error_ns = cst_seg_now(seg);
    if (++seg->n_errors >= most && !seg->off) {
        seg->off = true;
        cst_seg_note(seg,
                     "the disk tier is off after %llu errors: check the device, then restart the "
                     "daemon",
                     (unsigned long long)seg->n_errors);
    }
}

static bool is_full(int r) {
    return r == CST_AIO_E_FULL || r == -ENOSPC;
}

void cst_seg_error(struct cst_seg *seg, int r) {
    assert(r < CST_AIO_E_END);
    if (is_full(r))
        note_full(seg);
    else if (cst_seg_is_shortage(r))
        note_short(seg, r);
    else
        count_error(seg);
}

void cst_seg_write_error(struct cst_seg *seg, int r) {
    if (cst_seg_is_shortage(r) && !is_full(r)) {
        note_lost(seg, r);
        return;
    }
    cst_seg_error(seg, r);
    if (is_full(r))
        count_error(seg);
}

void cst_seg_room(struct cst_seg *seg) {
    bool awaited = seg->awaited;

    seg->awaited = false;
    if (awaited && seg->env.user.room)
        seg->env.user.room(seg->env.user.arg);
}

void cst_seg_version_set(struct cst_disk_version *v) {
    *v = (struct cst_disk_version){ 0 };
    cst_store32(&v->version, CST_DISK_VERSION);
}

bool cst_seg_version_is_known(const struct cst_disk_version *v, bool *write) {
    *write = !(cst_load32(&v->ro_compat) & ~(uint32_t)CST_DISK_RO_COMPAT);
    return cst_load32(&v->version) == CST_DISK_VERSION &&
           !(cst_load32(&v->incompat) & ~(uint32_t)CST_DISK_INCOMPAT);
}

/* ---- small files ---- */

static int write_small(struct cst_seg *seg, const char *name, const void *data, size_t n,
                       bool sync) {
    struct cst_aio_file *file;
    int r = cst_aio_open(seg->env.aio, name, CST_AIO_CREATE | CST_AIO_BUFFERED, &file);

    if (r)
        return r;
    r = cst_aio_resize(file, 0);
    if (!r)
        r = cst_aio_now(file, CST_AIO_WRITE, (void *)(uintptr_t)data, 0, n);
    if (!r && sync)
        r = cst_aio_now(file, CST_AIO_SYNC, NULL, 0, 0);
    (void)cst_aio_close(file);
    return r;
}

int cst_seg_replace(struct cst_seg *seg, const char *name, const void *data, size_t n, bool sync) {
    char new[64];
    int r;

    (void)snprintf(new, sizeof(new), "%s%s", name, CST_DISK_NEW_SUFFIX);
    r = write_small(seg, new, data, n, sync);
    if (!r)
        r = cst_aio_rename(seg->env.aio, new, name);
    if (!r && sync)
        r = cst_aio_sync_directory(seg->env.aio);
    if (r)
        (void)cst_aio_unlink(seg->env.aio, new); /* where it takes the room that there is not */
    return r == CST_AIO_E_FULL ? cst_err(-ENOSPC) : cst_fold(r);
}

int cst_seg_slurp(struct cst_seg *seg, const char *name, size_t cap, uint8_t **out, size_t *n) {
    cst_auto(cst_freep) uint8_t *data = NULL;
    struct cst_aio_file *file;
    uint64_t size = 0;
    int r = cst_aio_open(seg->env.aio, name, CST_AIO_BUFFERED | CST_AIO_READ_ONLY, &file);

    if (r)
        return r == CST_AIO_E_ABSENT ? r : cst_fold(r);
    r = cst_aio_size(file, &size);
    if (!r && size > cap)
        r = cst_err(-EFBIG);
    data = cst_malloc(size + 8);
    if (!r && !data)
        r = cst_err(-ENOMEM);
    if (!r && size)
        r = cst_aio_now(file, CST_AIO_READ, data, 0, size);
    (void)cst_aio_close(file);
    if (r)
        return cst_fold(r);
    *out = cst_steal(&data);
    *n = size;
    return 0;
}

/* ---- which files there are ---- */

struct listing {
    uint32_t *ids;
    size_t n, cap;
    bool ours, others; /* keys or a checkpoint; anything else */
};

static bool is_name(const char *name, const char *of) {
    size_t n = strlen(of);

    return !strncmp(name, of, n) && (!name[n] || !strcmp(name + n, CST_DISK_NEW_SUFFIX));
}

/* The id of a segment's file, or -1. */
static int64_t segment_id(const char *name) {
    char again[32], *end;
    unsigned long id;

    if (strncmp(name, "seg-", 4))
        return -1;
    id = strtoul(name + 4, &end, 16);
    if (*end || id > UINT32_MAX)
        return -1;
    (void)snprintf(again, sizeof(again), CST_DISK_SEGMENT_NAME, (unsigned)id);
    return strcmp(again, name) ? -1 : (int64_t)id;
}

static int list_one(void *arg, const char *name) {
    struct listing *l = arg;
    int64_t id = segment_id(name);

    if (id >= 0) {
        int r = cst_grow(&l->ids, &l->cap, l->n + 1, sizeof(*l->ids));

        if (r)
            return r;
        l->ids[l->n++] = (uint32_t)id;
    } else if (is_name(name, CST_DISK_KEYS_NAME) || is_name(name, CST_DISK_CHECKPOINT_NAME)) {
        l->ours = true;
    } else if (name[0] != '.' && strcmp(name, CST_DISK_SUPER_NAME) && strcmp(name, "lost+found")) {
        l->others = true;
    }
    return 0;
}

/* ---- superblock ---- */

static uint64_t default_segment_bytes(uint64_t bytes) {
    uint64_t n = DEFAULT_SEGMENT;

    while (n < CST_DISK_SEGMENT_BYTES_MAX && bytes / n > CST_SEG_FILES_DEFAULT)
        n *= 2;
    while (n > CST_DISK_SEGMENT_BYTES_MIN && bytes / n < 8)
        n /= 2;
    return n;
}

static int refuse_full(char *message, size_t cap) {
    return cst_seg_refuse(message, cap, "the disk tier's file system is full: make room on it");
}

/* Whether it may become ours. */
static int check_listing(const struct listing *l, char *message, size_t cap) {
    if (l->n || l->ours)
        return cst_seg_refuse(message, cap,
                              "the disk tier's directory has segments but no valid file "
                              "%s (half copied?): copy all of it again, or empty it",
                              CST_DISK_SUPER_NAME);
    if (l->others)
        return cst_seg_refuse(
            message, cap, "the disk tier's directory holds other files: give it one of its own");
    return 0;
}

static bool segment_bytes_are_right(uint64_t bytes) {
    return bytes % CST_DISK_CHUNK == 0 && bytes >= CST_DISK_SEGMENT_BYTES_MIN &&
           bytes <= CST_DISK_SEGMENT_BYTES_MAX;
}

static int super_write(struct cst_seg *seg, const struct cst_disk_super *super, char *message,
                       size_t cap) {
    int r = cst_aio_now(seg->super, CST_AIO_WRITE, (void *)(uintptr_t)super, 0, sizeof(*super));

    if (!r)
        r = cst_aio_now(seg->super, CST_AIO_SYNC, NULL, 0, 0);
    if (!r)
        r = cst_aio_sync_directory(seg->env.aio);
    return r == CST_AIO_E_FULL ? refuse_full(message, cap) : cst_fold(r);
}

static int super_new(struct cst_seg *seg, const struct listing *l, char *message, size_t cap) {
    struct cst_disk_super super = { 0 };
    uint64_t bytes = seg->options.segment_bytes ? seg->options.segment_bytes
                                                : default_segment_bytes(seg->options.bytes);
    int r = check_listing(l, message, cap);

    if (r) {
        if (seg->super_is_new) /* what we don't use keeps no file of ours */
            (void)cst_aio_unlink(seg->env.aio, CST_DISK_SUPER_NAME);
        return r;
    }
    if (!segment_bytes_are_right(bytes))
        return cst_seg_refuse(
            message, cap,
            "segments of the disk tier are multiples of 4096 bytes from 256 KiB to 4 GiB, "
            "not %llu bytes",
            (unsigned long long)bytes);
    memcpy(super.magic, CST_DISK_SUPER_MAGIC, sizeof(super.magic));
    cst_seg_version_set(&super.version);
    r = seg->env.random->fill(seg->env.random, super.uuid, sizeof(super.uuid));
    if (r)
        return r;
    cst_store64(&super.segment_bytes, bytes);
    cst_store64(&super.created, cst_seg_unix(seg));
    cst_seg_crc_set(&super, sizeof(super));
    r = super_write(seg, &super, message, cap);
    if (r)
        return r;
    memcpy(seg->uuid, super.uuid, sizeof(seg->uuid));
    seg->segment_bytes = bytes;
    return 0;
}

/* Nothing was ever written to it: its directory was new when the machine stopped. */
static bool is_blank(const struct cst_disk_super *super, uint64_t size) {
    static const struct cst_disk_super zero;

    return !size || (size <= sizeof(*super) && !memcmp(super, &zero, size));
}

/* Is it whole, and in a format that is known? *write: which may be written, too. */
static int check_super(const struct cst_disk_super *super, uint64_t size, bool *write,
                       char *message, size_t cap) {
    bool is_super =
        size >= sizeof(*super) && !memcmp(super->magic, CST_DISK_SUPER_MAGIC, sizeof(super->magic));

    if (is_super && !cst_seg_version_is_known(&super->version, write))
        return cst_seg_refuse(
            message, cap,
            "the disk tier was written in format %u (features %#x), this daemon knows "
            "format %u: start the daemon that wrote it, or give another directory",
            cst_load32(&super->version.version), cst_load32(&super->version.incompat),
            CST_DISK_VERSION);
    if (!is_super || !cst_seg_crc_is(super, sizeof(*super)) ||
        !segment_bytes_are_right(cst_load64(&super->segment_bytes)))
        return cst_seg_refuse(
            message, cap,
            "the file %s of the disk tier is damaged: restore it, or empty the directory",
            CST_DISK_SUPER_NAME);
    return 0;
}

static int super_read(struct cst_seg *seg, const struct listing *l, char *message, size_t cap) {
    struct cst_disk_super super = { 0 };
    uint64_t size = 0;
    bool write = false;
    int r = cst_aio_size(seg->super, &size);

    if (!r && size)
        r = cst_aio_now(seg->super, CST_AIO_READ, &super, 0, CST_MIN(size, sizeof(super)));
    if (r)
        return cst_fold(r);
    if (is_blank(&super, size))
        return super_new(seg, l, message, cap);
    r = check_super(&super, size, &write, message, cap);
    if (r)
        return r;
    seg->segment_bytes = cst_load64(&super.segment_bytes);
    memcpy(seg->uuid, super.uuid, sizeof(seg->uuid));
    if (!write) {
        seg->read_only = true;
        cst_seg_note(seg, "the disk tier was written by a newer daemon: it is only read");
    }
    return 0;
}

/* The kernel may take a moment to end the I/O of a daemon that was killed, and only then drops its
 * locks: they are waited for. */
static int lock(struct cst_seg *seg, struct cst_aio_file *file) {
    static const struct timespec pause = { .tv_nsec = 10 * 1000 * 1000 };
    uint32_t ms = seg->options.lock_ms ? seg->options.lock_ms : LOCK_MS;
    int r;

    for (uint32_t waited = 0; (r = cst_aio_lock(file)) == CST_AIO_E_LOCKED && waited < ms;
         waited += 10)
        (void)nanosleep(&pause, NULL);
    return r;
}

static int super_open(struct cst_seg *seg, char *message, size_t cap) {
    int r = cst_aio_open(seg->env.aio, CST_DISK_SUPER_NAME,
                         CST_AIO_CREATE | CST_AIO_EXCLUSIVE | CST_AIO_BUFFERED, &seg->super);

    seg->super_is_new = !r;
    if (r == CST_AIO_E_EXISTS)
        r = cst_aio_open(seg->env.aio, CST_DISK_SUPER_NAME, CST_AIO_CREATE | CST_AIO_BUFFERED,
                         &seg->super);
    if (r == -EACCES || r == -EPERM || r == -EROFS)
        return cst_seg_refuse(
            message, cap,
            "the disk tier's directory isn't writable for the daemon: give it to the "
            "daemon's user, or name another one");
    if (r == CST_AIO_E_ABSENT || r == -ENOENT || r == -ENOTDIR)
        return cst_seg_refuse(message, cap, "the disk tier's directory doesn't exist: create it");
    if (r == CST_AIO_E_FULL || r == -ENOSPC)
        return refuse_full(message, cap);
    if (r)
        return cst_fold(r);
    r = lock(seg, seg->super);
    if (r == CST_AIO_E_LOCKED)
        return cst_seg_refuse(
            message, cap,
            "another daemon uses the disk tier's directory: stop it, or name another one");
    return cst_fold(r);
}

/* ---- segments ---- */

static int segment_open(struct cst_seg *seg, uint32_t id, char *message, size_t cap) {
    struct cst_seg_segment *s = &seg->segments[id];
    char name[32];
    uint64_t size = 0;
    int r;

    (void)snprintf(name, sizeof(name), CST_DISK_SEGMENT_NAME, id);
    r = cst_aio_open(seg->env.aio, name, 0, &s->file);
    if (r) {
        s->state = CST_SEG_FOREIGN;
        seg->stats.segments_foreign++;
        cst_seg_note(seg, "the disk tier can't use its file %s: it is left alone", name);
        return 0;
    }
    r = lock(seg, s->file);
    if (r == CST_AIO_E_LOCKED)
        return cst_seg_refuse(
            message, cap,
            "another process holds the disk tier's file %s: wait for its end, or stop it", name);
    if (!r)
        r = cst_aio_size(s->file, &size);
    s->state = CST_SEG_CLOSED;
    s->allocated = size >= seg->segment_bytes;
    s->odd = size && size != seg->segment_bytes;
    seg->n_files++;
    return cst_fold(r);
}

static int segments_open(struct cst_seg *seg, const struct listing *l, char *message, size_t cap) {
    uint32_t n = seg->n_allowed;
    int r = 0;

    for (size_t i = 0; i < l->n; i++)
        n = CST_MAX(n, l->ids[i] < FILES_MAX ? l->ids[i] + 1 : 0);
    seg->segments = cst_calloc(n, sizeof(*seg->segments));
    if (!seg->segments)
        return cst_err(-ENOMEM);
    seg->n_segments = n;
    for (uint32_t id = 0; id < n; id++) {
        struct cst_seg_segment *s = &seg->segments[id];

        s->seg = seg;
        s->id = id;
        cst_list_init(&s->link);
    }
    for (size_t i = 0; i < l->n && !r; i++)
        if (l->ids[i] < n)
            r = segment_open(seg, l->ids[i], message, cap);
    return r;
}

static int check_options(struct cst_seg *seg, char *message, size_t cap) {
    uint64_t n = seg->options.bytes / seg->segment_bytes;

    if (n < 2)
        return cst_seg_refuse(
            message, cap,
            "the disk tier has segments of %llu bytes and needs two at least: give it more "
            "than %llu bytes",
            (unsigned long long)seg->segment_bytes, (unsigned long long)seg->options.bytes);
    if (seg->options.segment_bytes && seg->options.segment_bytes != seg->segment_bytes)
        cst_seg_note(seg, "the disk tier keeps its segments of %llu bytes",
                     (unsigned long long)seg->segment_bytes);
    if (n > FILES_MAX) {
        n = FILES_MAX;
        cst_seg_note(seg, "the disk tier takes %u segments of %llu bytes at most",
                     (unsigned)FILES_MAX, (unsigned long long)seg->segment_bytes);
    }
    seg->n_allowed = (uint32_t)n;
    seg->chunks = (uint32_t)(seg->segment_bytes / CST_DISK_CHUNK);
    return 0;
}

/* A file that was being written when the last run ended is worth nothing. */
static void remove_new(struct cst_seg *seg) {
    static const char *const names[] = { CST_DISK_KEYS_NAME CST_DISK_NEW_SUFFIX,
                                         CST_DISK_CHECKPOINT_NAME CST_DISK_NEW_SUFFIX };

    for (size_t i = 0; !seg->read_only && i < CST_COUNT(names); i++)
        (void)cst_aio_unlink(seg->env.aio, names[i]); /* most of the time there is none */
}

static int open_all(struct cst_seg *seg, char *message, size_t cap) {
    struct listing l = { 0 };
    int r = super_open(seg, message, cap);

    if (!r)
        r = cst_fold(cst_aio_list(seg->env.aio, list_one, &l));
    if (!r)
        r = super_read(seg, &l, message, cap);
    if (!r)
        r = check_options(seg, message, cap);
    if (!r)
        r = segments_open(seg, &l, message, cap);
    if (!r)
        remove_new(seg);
    if (!r && seg->options.crypt == CST_SEG_CRYPT_AES)
        r = cst_seg_keys_open(seg, l.n, message, cap);
    cst_free(l.ids);
    return r;
}

int cst_seg_open(struct cst_seg **out, const struct cst_seg_options *options,
                 const struct cst_seg_env *env, char *message, size_t cap) {
    cst_auto(cst_seg_freep) struct cst_seg *seg = cst_calloc(1, sizeof(*seg));
    int r;

    if (!seg)
        return cst_err(-ENOMEM);
    if (cap)
        message[0] = 0;
    seg->options = *options;
    seg->env = *env;
    cst_list_init(&seg->free);
    cst_list_init(&seg->namespaces);
    cst_list_init(&seg->spaces);
    cst_list_init(&seg->ring.parts);
    cst_list_init(&seg->heads.parts);
    cst_list_init(&seg->reading);
    r = open_all(seg, message, cap);
    if (!r)
        r = env->random->fill(env->random, seg->salt, sizeof(seg->salt));
    if (!r)
        r = cst_seg_ring_init(seg, options->buffer_bytes);
    if (r)
        return r;
    seg->rate_at_ns = cst_seg_now(seg);
    seg->rate_left = 2 * options->write_rate;
    *out = cst_steal(&seg);
    return 0;
}

static void segment_deinit(struct cst_seg_segment *s) {
    assert(!s->readers && !s->writers);
    s->file = cst_aio_close(s->file);
    s->slots = cst_free(s->slots);
    s->body = cst_free(s->body);
    s->spaces = cst_free(s->spaces);
    OPENSSL_cleanse(&s->seal, sizeof(s->seal));
}

struct cst_seg *cst_seg_free(struct cst_seg *seg) {
    if (!seg)
        return NULL;
    assert(!seg->busy);
    cst_seg_evict_free(seg);
    seg->draft = cst_seg_draft_free(seg->draft);
    for (uint32_t i = 0; i < seg->n_segments; i++)
        segment_deinit(&seg->segments[i]);
    cst_free(seg->segments);
    cst_seg_spaces_free(seg);
    cst_seg_ring_deinit(seg);
    seg->super = cst_aio_close(seg->super);
    OPENSSL_cleanse(&seg->keys, sizeof(seg->keys));
    return cst_free(seg);
}

int cst_seg_close(struct cst_seg *seg) {
    struct cst_list *it;
    int r = 0;

    assert(!seg->busy);
    if (seg->off || seg->read_only || !seg->recovered)
        return 0;
    for (it = seg->namespaces.next; it != &seg->namespaces && !r; it = it->next) {
        struct cst_seg_ns *ns = cst_list_entry(it, struct cst_seg_ns, link);

        if (ns->open)
            r = cst_segment_close_now(ns->open);
    }
    for (uint32_t i = 0; i < seg->n_segments && !r; i++)
        if (seg->segments[i].unsynced && seg->segments[i].file)
            r = cst_fold(cst_aio_now(seg->segments[i].file, CST_AIO_SYNC, NULL, 0, 0));
    if (!r)
        r = cst_seg_checkpoint_clean(seg);
    seg->off = true;
    return r;
}

size_t cst_seg_busy(const struct cst_seg *seg) {
    return seg->busy;
}

bool cst_seg_tick(struct cst_seg *seg) {
    uint64_t now = cst_seg_now(seg), since = now - seg->checkpoint_ns;

    if (seg->off || seg->read_only || !seg->recovered)
        return false;
    cst_seg_spare(seg);
    if (seg->draft || (seg->changed && since >= CST_SEG_CHECKPOINT_S * CST_NS_PER_S) ||
        (seg->hurry && since >= CST_NS_PER_S)) {
        seg->checkpoint_ns = now;
        cst_seg_checkpoint_slice(seg);
    }
    return seg->draft;
}

struct cst_seg_slot *cst_seg_find(const struct cst_seg *seg, struct cst_seg_ref ref,
                                  struct cst_seg_segment **segment) {
    struct cst_seg_segment *s;

    if (ref.segment >= seg->n_segments)
        return NULL;
    s = &seg->segments[ref.segment];
    if ((uint32_t)s->fill != ref.fill || ref.slot >= s->n_slots || !s->slots[ref.slot].owner)
        return NULL;
    if (segment)
        *segment = s;
    return &s->slots[ref.slot];
}

void cst_seg_set_owner(struct cst_seg *seg, struct cst_seg_ref ref, void *owner) {
    struct cst_seg_slot *slot = cst_seg_find(seg, ref, NULL);

    assert(owner);
    if (slot)
        slot->owner = owner;
}

bool cst_seg_is_off(const struct cst_seg *seg) {
    return seg->off;
}

bool cst_seg_takes(const struct cst_seg *seg) {
    return !seg->off && !seg->read_only;
}

uint64_t cst_seg_bytes(const struct cst_seg *seg) {
    return seg->n_allowed * seg->segment_bytes;
}

void cst_seg_stats(const struct cst_seg *seg, struct cst_seg_stats *out) {
    *out = seg->stats;
    out->off = seg->off;
    out->read_only = seg->read_only;
    out->encrypted = seg->options.crypt == CST_SEG_CRYPT_AES;
    out->bytes = cst_seg_bytes(seg);
    out->segment_bytes = seg->segment_bytes;
    out->segments = seg->n_files;
    for (uint32_t i = 0; i < seg->n_segments; i++)
        out->cached |= seg->segments[i].file && !cst_aio_is_direct(seg->segments[i].file);
    for (const struct cst_list *it = seg->namespaces.next; it != &seg->namespaces; it = it->next) {
        const struct cst_seg_ns *ns =
            cst_list_entry((struct cst_list *)it, struct cst_seg_ns, link);

        out->records += ns->records;
        out->record_bytes += ns->chunks * CST_DISK_CHUNK;
    }
}
