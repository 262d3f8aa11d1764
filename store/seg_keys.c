/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the root key and the keys file: section 7 of docs/disk-format.md.
 *
 * The root key is the content of a key file (or credential), or one that is made here and kept in
 * a file of a tmpfs, so that it survives the daemon but not the machine; without such a place it
 * lives in memory only.
 *
 * Invariants: 1. a namespace's key is saved before anything is sealed with it; 2. the keys file is
 * replaced as a whole, with a new salt, so no wrapping key and nonce come twice; 3. a key file that
 * is wrong or missing, or a keys file that can't be read, refuses and changes nothing; 4. an
 * ephemeral key that is gone makes the old keys worthless: they are replaced, and recovery finds
 * segments without a key; 5. `erased` is said only when the old root was overwritten where it was.
 * Loop thread only; blocks.
 */
#include "base/err.h"
#include "base/mem.h"
#include "store/seg_core.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/vfs.h>

enum { KEY = CST_DISK_KEY, NAMESPACES_MAX = 65536 };
enum { ROOT_ABSENT = 1, ROOT_BAD }; /* conditions of this file */

/* ---- the root key ---- */

static int hex(char c) {
    return c >= '0' && c <= '9'                 ? c - '0'
           : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                : -1;
}

static bool parse_key(const char *text, size_t n, uint8_t out[KEY]) {
    if (n == KEY) {
        memcpy(out, text, KEY);
        return true;
    }
    while (n && (text[n - 1] == '\n' || text[n - 1] == '\r' || text[n - 1] == ' '))
        n--;
    if (n != 2 * KEY)
        return false;
    for (size_t i = 0; i < KEY; i++) {
        int high = hex(text[2 * i]), low = hex(text[2 * i + 1]);

        if (high < 0 || low < 0)
            return false;
        out[i] = (uint8_t)(16 * high + low);
    }
    return true;
}

static int key_file_read(const char *path, uint8_t out[KEY], char *message, size_t cap) {
    cst_auto(cst_closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* no pipe waits */
    char text[2 * KEY + 8];
    struct stat st;
    ssize_t n;
    bool right;

    if (fd < 0)
        return cst_seg_refuse(message, cap,
                              "the disk tier's key file %s: give the daemon the right one",
                              errno == ENOENT ? "doesn't exist" : "can't be read");
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_mode & 07)
        return cst_seg_refuse(
            message, cap,
            "the disk tier's key file isn't a file that only its owner and group can "
            "read: chmod 0600 it");
    n = read(fd, text, sizeof(text));
    right = n > 0 && parse_key(text, (size_t)n, out);
    OPENSSL_cleanse(text, sizeof(text));
    return right ? 0
                 : cst_seg_refuse(
                       message, cap,
                       "the disk tier's key file must hold 32 bytes or 64 hexadecimal digits");
}

/* A directory on a tmpfs that nobody else can write to. */
static int runtime_open(const char *path) {
    struct statfs fs;
    struct stat st;
    int fd;

    (void)mkdir(path, 0700);
    fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return -1;
    if (fstatfs(fd, &fs) || fs.f_type != TMPFS_MAGIC || fstat(fd, &st) || st.st_uid != geteuid() ||
        st.st_mode & 022)
        return cst_close(fd);
    return fd;
}

/* The path of the ephemeral key; "" if there is no place for one. */
static void root_path(struct cst_seg *seg) {
    struct cst_seg_keys *keys = &seg->keys;
    const char *const *dir = seg->options.runtime;

    keys->path[0] = 0;
    for (; dir && *dir && !keys->path[0]; dir++) {
        int fd = runtime_open(*dir), n;

        if (fd < 0)
            continue;
        (void)cst_close(fd);
        n = snprintf(keys->path, sizeof(keys->path) - 8, "%s/root-", *dir);
        if (n < 0 || (size_t)n + 2 * sizeof(seg->uuid) + 8 >= sizeof(keys->path)) {
            keys->path[0] = 0;
            continue;
        }
        for (size_t i = 0; i < sizeof(seg->uuid); i++)
            (void)snprintf(keys->path + n + 2 * i, 3, "%02x", seg->uuid[i]);
    }
}

static int root_load(const char *path, uint8_t out[KEY]) {
    cst_auto(cst_closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    struct stat st;

    if (fd < 0)
        return ROOT_ABSENT;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_uid != geteuid() || st.st_mode & 077 ||
        st.st_size != KEY || read(fd, out, KEY) != KEY)
        return ROOT_BAD;
    return 0;
}

static int root_save(const char *path, const uint8_t key[KEY]) {
    cst_auto(cst_closep) int fd =
        open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);

    if (fd < 0 || fchmod(fd, 0600) || write(fd, key, KEY) != KEY)
        return cst_err(errno ? -errno : -EIO);
    return 0;
}

/* Overwrites the key where it lies, then puts the new file in its place. */
static int root_overwrite(const char *path, const char *by) {
    static const uint8_t zero[KEY];
    int fd = open(path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW);

    if (fd >= 0 && write(fd, zero, KEY) != KEY) {
        (void)cst_close(fd);
        return cst_err(-EIO);
    }
    (void)cst_close(fd);
    return rename(by, path) ? cst_err(-errno) : 0;
}

static void root_new_path(const struct cst_seg *seg, char out[520]) {
    (void)snprintf(out, 520, "%s.new", seg->keys.path);
}

static int root_make(struct cst_seg *seg) {
    struct cst_seg_keys *keys = &seg->keys;
    int r = seg->env.random->fill(seg->env.random, keys->root, KEY);

    keys->ephemeral = true;
    keys->in_memory = !keys->path[0];
    if (!r && !keys->in_memory && root_save(keys->path, keys->root)) {
        keys->path[0] = 0;
        keys->in_memory = true;
    }
    if (keys->in_memory)
        cst_seg_note(seg, "there is no tmpfs of our own for the disk tier's key: it is kept in "
                          "memory, and the tier will be cold after the next start");
    return r;
}

/* ---- the keys file ---- */

static int derive(const uint8_t root[KEY], const uint8_t *salt, const char *info, uint8_t *out,
                  size_t n) {
    return cst_hkdf_sha256(out, n, root, KEY, salt, CST_DISK_SALT, info, strlen(info));
}

static void boot_id(uint8_t out[16]) {
    cst_auto(cst_closep) int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    char text[40] = "";
    size_t n = 0;

    memset(out, 0, 16);
    if (fd < 0 || read(fd, text, sizeof(text) - 1) <= 0)
        return;
    for (size_t i = 0; text[i] && n < 32; i++) {
        int digit = hex(text[i]);

        if (digit >= 0) {
            out[n / 2] = (uint8_t)(out[n / 2] << 4 | digit);
            n++;
        }
    }
}

static struct cst_seal_aad wrap_aad(const struct cst_disk_wrapped *w) {
    return (struct cst_seal_aad){ w, offsetof(struct cst_disk_wrapped, key), NULL, 0 };
}

static int wrap_all(struct cst_seg *seg, struct cst_disk_wrapped *w, const struct cst_seal *seal) {
    struct cst_list *it;
    uint64_t n = 0;
    int r = 0;

    for (it = seg->namespaces.next; it != &seg->namespaces && !r; it = it->next) {
        struct cst_seg_ns *ns = cst_list_entry(it, struct cst_seg_ns, link);

        if (!ns->has_key)
            continue;
        w->namespace_length = (uint8_t)strlen(ns->name);
        memcpy(w->namespace_name, ns->name, strlen(ns->name));
        r = cst_seal(seal, n++, wrap_aad(w), ns->key, w->key, KEY, w->tag, NULL);
        w++;
    }
    return r;
}

/* All but its CRC. */
static int fill_head(struct cst_seg *seg, struct cst_disk_keys *head, uint32_t n) {
    int r;

    memcpy(head->magic, CST_DISK_KEYS_MAGIC, sizeof(head->magic));
    cst_seg_version_set(&head->version);
    memcpy(head->uuid, seg->uuid, sizeof(head->uuid));
    boot_id(head->boot);
    cst_store32(&head->root,
                seg->keys.ephemeral ? CST_DISK_ROOT_EPHEMERAL : CST_DISK_ROOT_EXTERNAL);
    cst_store32(&head->n_entries, n);
    r = seg->env.random->fill(seg->env.random, head->salt, sizeof(head->salt));
    return r ? r
             : derive(seg->keys.root, head->salt, CST_DISK_CHECK_INFO, head->check,
                      sizeof(head->check));
}

static int keys_save(struct cst_seg *seg) {
    cst_auto(cst_freep) uint8_t *data = NULL;
    struct cst_seal seal = { .cipher = CST_DISK_AES_GCM };
    struct cst_disk_keys *head;
    struct cst_list *it;
    size_t n = 0, bytes;
    int r;

    for (it = seg->namespaces.next; it != &seg->namespaces; it = it->next)
        n += cst_list_entry(it, struct cst_seg_ns, link)->has_key;
    bytes = sizeof(*head) + n * sizeof(struct cst_disk_wrapped) + 4;
    data = cst_calloc(1, bytes);
    if (!data)
        return cst_err(-ENOMEM);
    head = (struct cst_disk_keys *)data;
    r = fill_head(seg, head, (uint32_t)n);
    if (!r)
        r = derive(seg->keys.root, head->salt, CST_DISK_WRAP_INFO, seal.key, KEY);
    cst_seg_crc_set(head, sizeof(*head));
    if (!r)
        r = wrap_all(seg, (struct cst_disk_wrapped *)(head + 1), &seal);
    cst_seg_crc_set(data, bytes);
    OPENSSL_cleanse(&seal, sizeof(seal));
    return r ? r : cst_seg_replace(seg, CST_DISK_KEYS_NAME, data, bytes, true);
}

static bool root_fits(const struct cst_disk_keys *head, const uint8_t root[KEY]) {
    uint8_t check[CST_DISK_TAG];

    return !derive(root, head->salt, CST_DISK_CHECK_INFO, check, sizeof(check)) &&
           !CRYPTO_memcmp(check, head->check, sizeof(check));
}

static int unwrap_all(struct cst_seg *seg, struct cst_disk_keys *head) {
    struct cst_disk_wrapped *w = (struct cst_disk_wrapped *)(head + 1);
    struct cst_seal seal = { .cipher = CST_DISK_AES_GCM };
    uint32_t n = cst_load32(&head->n_entries);
    int r = derive(seg->keys.root, head->salt, CST_DISK_WRAP_INFO, seal.key, KEY);

    for (uint32_t i = 0; i < n && !r; i++, w++) {
        struct cst_seg_ns *ns;

        r = cst_unseal(&seal, i, wrap_aad(w), w->key, KEY, w->tag);
        if (r > 0) {
            r = 0; /* that namespace is cold */
            continue;
        }
        ns = cst_seg_ns_get(seg, (const char *)w->namespace_name, w->namespace_length);
        if (!r && ns) {
            memcpy(ns->key, w->key, KEY);
            ns->has_key = true;
        }
        OPENSSL_cleanse(w->key, KEY);
    }
    OPENSSL_cleanse(&seal, sizeof(seal));
    return r;
}

/* ---- opening ---- */

static bool is_sound(const struct cst_seg *seg, const uint8_t *data, size_t n) {
    const struct cst_disk_keys *head = (const struct cst_disk_keys *)data;

    return n >= sizeof(*head) + 4 && cst_seg_crc_is(head, sizeof(*head)) &&
           cst_seg_crc_is(data, n) && !memcmp(head->uuid, seg->uuid, sizeof(head->uuid)) &&
           cst_load32(&head->n_entries) <= NAMESPACES_MAX &&
           n == sizeof(*head) + 4 + cst_load32(&head->n_entries) * sizeof(struct cst_disk_wrapped);
}

/* Does any segment hold encrypted records? */
static bool has_encrypted(struct cst_seg *seg) {
    void *heap;
    struct cst_disk_segment *head = cst_seg_aligned(CST_DISK_CHUNK, &heap);
    bool any = !head; /* who can't look takes it for granted */

    for (uint32_t i = 0; i < seg->n_segments && !any; i++)
        any = seg->segments[i].state == CST_SEG_CLOSED &&
              !cst_aio_now(seg->segments[i].file, CST_AIO_READ, head, 0, CST_DISK_CHUNK) &&
              !memcmp(head->magic, CST_DISK_SEGMENT_MAGIC, sizeof(head->magic)) &&
              head->cipher == CST_DISK_AES_GCM;
    cst_free(heap);
    return any;
}

static int keys_start(struct cst_seg *seg) {
    int r = 0;

    if (seg->keys.ephemeral)
        r = root_make(seg);
    return r ? r : keys_save(seg);
}

/* The file was made with an ephemeral key: finds it. */
static int find_ephemeral(struct cst_seg *seg, const struct cst_disk_keys *head, uint8_t out[KEY]) {
    char new[520];

    if (!seg->keys.path[0])
        return ROOT_ABSENT;
    if (!root_load(seg->keys.path, out) && root_fits(head, out))
        return 0;
    root_new_path(seg, new); /* a purge was interrupted */
    if (!root_load(new, out) && root_fits(head, out))
        return root_overwrite(seg->keys.path, new);
    return ROOT_ABSENT;
}

/* The keys were wrapped with an ephemeral root; from now on the key file's is the root. */
static int rewrap(struct cst_seg *seg, struct cst_disk_keys *head, const uint8_t root[KEY]) {
    uint8_t external[KEY];
    int r;

    memcpy(external, seg->keys.root, KEY);
    memcpy(seg->keys.root, root, KEY);
    r = unwrap_all(seg, head);
    memcpy(seg->keys.root, external, KEY);
    OPENSSL_cleanse(external, sizeof(external));
    return r ? r : keys_save(seg);
}

static int open_ephemeral(struct cst_seg *seg, struct cst_disk_keys *head) {
    uint8_t root[KEY];
    int r = find_ephemeral(seg, head, root);

    if (r > 0) {
        cst_seg_note(seg, "the disk tier's ephemeral key is gone (a reboot?): what was on disk "
                          "can't be read any more and is free");
        r = keys_start(seg);
    } else if (!r && seg->keys.ephemeral) {
        memcpy(seg->keys.root, root, KEY);
        r = unwrap_all(seg, head);
    } else if (!r) {
        r = rewrap(seg, head, root);
    }
    OPENSSL_cleanse(root, sizeof(root));
    return r;
}

/* Is it a keys file of this directory, in a format that is known? */
static int check_file(const struct cst_seg *seg, const struct cst_disk_keys *head, size_t n,
                      char *message, size_t cap) {
    bool is_keys =
             n >= sizeof(*head) && !memcmp(head->magic, CST_DISK_KEYS_MAGIC, sizeof(head->magic)),
         write;

    if (is_keys && !cst_seg_version_is_known(&head->version, &write))
        return cst_seg_refuse(
            message, cap,
            "the disk tier's file keys is of format %u, this daemon knows format %u: "
            "start the daemon that wrote it, or give another directory",
            cst_load32(&head->version.version), CST_DISK_VERSION);
    if (!is_keys || !is_sound(seg, (const uint8_t *)head, n))
        return cst_seg_refuse(
            message, cap,
            "the disk tier's file keys is damaged or of another directory: restore it, "
            "or empty the directory");
    return 0;
}

static int open_known(struct cst_seg *seg, struct cst_disk_keys *head, size_t n, char *message,
                      size_t cap) {
    int r = check_file(seg, head, n, message, cap);

    if (r)
        return r;
    if (cst_load32(&head->root) == CST_DISK_ROOT_EPHEMERAL)
        return open_ephemeral(seg, head);
    if (seg->keys.ephemeral)
        return cst_seg_refuse(
            message, cap,
            "the disk tier was encrypted with a key file: give the daemon that file, or "
            "empty the directory");
    if (!root_fits(head, seg->keys.root))
        return cst_seg_refuse(
            message, cap,
            "the disk tier was encrypted with another key file: give the daemon that one, "
            "or empty the directory");
    return unwrap_all(seg, head);
}

int cst_seg_keys_open(struct cst_seg *seg, bool has_segments, char *message, size_t cap) {
    cst_auto(cst_freep) uint8_t *data = NULL;
    size_t n = 0;
    int r = 0;

    root_path(seg);
    seg->keys.ephemeral = !seg->options.key_file;
    if (seg->options.key_file)
        r = key_file_read(seg->options.key_file, seg->keys.root, message, cap);
    if (r)
        return r;
    r = cst_seg_slurp(seg, CST_DISK_KEYS_NAME, 16 << 20, &data, &n);
    if (r == CST_AIO_E_ABSENT && has_segments && !seg->keys.ephemeral && has_encrypted(seg))
        return cst_seg_refuse(
            message, cap,
            "the disk tier's file keys is missing: restore it, or empty the directory");
    if (r == CST_AIO_E_ABSENT)
        return keys_start(seg);
    return r ? r : open_known(seg, (struct cst_disk_keys *)data, n, message, cap);
}

/* ---- namespaces ---- */

int cst_seg_keys_add(struct cst_seg *seg, struct cst_seg_ns *ns) {
    int r = seg->env.random->fill(seg->env.random, ns->key, KEY);

    if (r)
        return r;
    ns->has_key = true;
    r = keys_save(seg);
    if (r)
        ns->has_key = false;
    return r;
}

static int forget_ephemeral(struct cst_seg *seg) {
    uint8_t old[KEY];
    char new[520];
    int r;

    memcpy(old, seg->keys.root, KEY);
    r = seg->env.random->fill(seg->env.random, seg->keys.root, KEY);
    root_new_path(seg, new);
    if (!r && !seg->keys.in_memory)
        r = root_save(new, seg->keys.root);
    if (!r)
        r = keys_save(seg);
    if (r)
        memcpy(seg->keys.root, old, KEY); /* nothing has changed */
    else if (!seg->keys.in_memory)
        r = root_overwrite(seg->keys.path, new);
    OPENSSL_cleanse(old, sizeof(old));
    return r;
}

int cst_seg_keys_forget(struct cst_seg *seg, struct cst_seg_ns *ns, enum cst_seg_erasure *how) {
    bool had = ns->has_key;
    int r;

    *how = CST_SEG_UNLINKED;
    if (!had)
        return 0;
    ns->has_key = false;
    r = seg->keys.ephemeral ? forget_ephemeral(seg) : keys_save(seg);
    if (r) {
        ns->has_key = had;
        return r;
    }
    OPENSSL_cleanse(ns->key, sizeof(ns->key));
    if (seg->keys.ephemeral)
        *how = CST_SEG_ERASED;
    return 0;
}
