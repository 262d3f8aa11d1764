/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns what the engine knows of namespaces and spaces.
 * Invariants: 1. one space for each identity; it lives while the user or a segment refers to it;
 * 2. namespaces live as long as the engine: there is one for each name that has a key or a segment,
 * or was used since, so that a purge finds it; at most CST_SEG_NAMESPACES_MAX, what comes then
 * stays in memory. Loop thread only.
 */
#include "base/err.h"
#include "base/mem.h"
#include "base/sha256.h"
#include "store/seg_core.h"

#include <assert.h>
#include <errno.h>
#include <openssl/crypto.h>

void cst_seg_identity(uint8_t out[32], const uint8_t fingerprint[32], enum cst_kind kind,
                      enum cst_class klass, const char *namespace_name) {
    static const char label[] = "cistern.space.1";
    uint8_t numbers[6] = { (uint8_t)kind, (uint8_t)klass };
    struct cst_sha256 h;

    cst_store32(numbers + 2, (uint32_t)strlen(namespace_name));
    cst_sha256_init(&h);
    cst_sha256_update(&h, label, sizeof(label) - 1);
    cst_sha256_update(&h, fingerprint, 32);
    cst_sha256_update(&h, numbers, sizeof(numbers));
    cst_sha256_update(&h, namespace_name, strlen(namespace_name));
    cst_sha256_final(&h, out);
}

struct name {
    const char *text;
    size_t n;
};

static uint64_t name_hash(const char *text, size_t n) {
    uint8_t hash[32];

    cst_sha256(text, n, hash); /* clients may choose it */
    return cst_load64(hash);
}

static bool name_is(const struct cst_hnode *node, const void *key) {
    const struct cst_seg_ns *ns = cst_container_of(node, struct cst_seg_ns, by_name);
    const struct name *name = key;

    return strlen(ns->name) == name->n && !memcmp(ns->name, name->text, name->n);
}

struct cst_seg_ns *cst_seg_ns_find(const struct cst_seg *seg, const char *name, size_t n) {
    struct cst_hnode *node =
        cst_hashmap_find(&seg->ns_map, name_hash(name, n), name_is, &(struct name){ name, n });

    return node ? cst_container_of(node, struct cst_seg_ns, by_name) : NULL;
}

static bool is_full(struct cst_seg *seg) {
    if (seg->ns_map.count < CST_SEG_NAMESPACES_MAX)
        return false;
    if (!seg->told_full)
        cst_seg_note(seg,
                     "the disk tier knows %u namespaces, and takes no more: purge those that are "
                     "not used any more and restart the daemon",
                     CST_SEG_NAMESPACES_MAX);
    seg->told_full = true;
    return true;
}

struct cst_seg_ns *cst_seg_ns_get(struct cst_seg *seg, const char *name, size_t n) {
    struct cst_seg_ns *ns = cst_seg_ns_find(seg, name, n);

    if (ns || !n || n > CST_DISK_NAMESPACE_MAX || memchr(name, 0, n) || is_full(seg))
        return ns;
    ns = cst_calloc(1, sizeof(*ns));
    if (!ns || cst_hashmap_insert(&seg->ns_map, &ns->by_name, name_hash(name, n)))
        return cst_free(ns);
    ns->seg = seg;
    memcpy(ns->name, name, n);
    cst_list_init(&ns->segments);
    cst_list_init(&ns->writes);
    cst_list_append(&seg->namespaces, &ns->link);
    return ns;
}

static uint64_t identity_hash(const uint8_t identity[32]) {
    return cst_load64(identity);
}

static bool identity_is(const struct cst_hnode *node, const void *key) {
    const struct cst_seg_space *space = cst_container_of(node, struct cst_seg_space, by_identity);

    return !memcmp(space->identity, key, 32);
}

struct cst_seg_space *cst_seg_space_find(const struct cst_seg *seg, const uint8_t identity[32]) {
    struct cst_hnode *node =
        cst_hashmap_find(&seg->space_map, identity_hash(identity), identity_is, identity);

    return node ? cst_container_of(node, struct cst_seg_space, by_identity) : NULL;
}

int cst_seg_space_get(struct cst_seg_ns *ns, const uint8_t identity[32], uint32_t kind,
                      uint32_t klass, const void *canonical, uint32_t n,
                      struct cst_seg_space **out) {
    struct cst_seg *seg = ns->seg;
    struct cst_seg_space *space = cst_seg_space_find(seg, identity);

    if (space) {
        space->refs++;
        *out = space;
        return 0;
    }
    if (kind >= CST_KINDS || klass >= CST_CLASSES || !n || n > CST_DISK_CANONICAL_MAX ||
        seg->n_spaces >= CST_SEG_SPACES_MAX)
        return cst_err(-EINVAL);
    space = cst_calloc(1, sizeof(*space) + n);
    if (!space ||
        cst_hashmap_insert(&seg->space_map, &space->by_identity, identity_hash(identity))) {
        cst_free(space);
        return cst_err(-ENOMEM);
    }
    space->ns = ns;
    space->refs = 1;
    space->kind = (uint8_t)kind;
    space->klass = (uint8_t)klass;
    memcpy(space->identity, identity, 32);
    memcpy(space->canonical, canonical, n);
    space->canonical_bytes = n;
    cst_list_append(&seg->spaces, &space->link);
    seg->n_spaces++;
    *out = space;
    return 0;
}

struct cst_seg_space *cst_seg_space_unref(struct cst_seg_space *space) {
    if (!space || --space->refs)
        return NULL;
    space->ns->seg->n_spaces--;
    cst_hashmap_remove(&space->ns->seg->space_map, &space->by_identity);
    cst_list_unlink(&space->link);
    cst_free(space);
    return NULL;
}

void cst_seg_spaces_free(struct cst_seg *seg) {
    struct cst_list *it, *tmp;

    cst_list_for_each_safe (it, tmp, &seg->spaces) {
        cst_list_unlink(it);
        cst_free(cst_list_entry(it, struct cst_seg_space, link));
    }
    cst_hashmap_deinit(&seg->space_map);
    cst_hashmap_deinit(&seg->ns_map);
    cst_list_for_each_safe (it, tmp, &seg->namespaces) {
        struct cst_seg_ns *ns = cst_list_entry(it, struct cst_seg_ns, link);

        assert(cst_list_is_empty(&ns->writes));
        cst_list_unlink(it);
        OPENSSL_cleanse(ns->key, sizeof(ns->key));
        cst_free(ns);
    }
}

int cst_seg_space_open(struct cst_seg *seg, const char *namespace_name, enum cst_kind kind,
                       enum cst_class klass, const void *canonical, uint32_t n,
                       struct cst_seg_space **out) {
    uint8_t fingerprint[32], identity[32];
    struct cst_seg_ns *ns;
    int r;

    cst_sha256(canonical, n, fingerprint);
    cst_seg_identity(identity, fingerprint, kind, klass, namespace_name);
    ns = cst_seg_ns_get(seg, namespace_name, strlen(namespace_name));
    if (!ns)
        return cst_err(-ENOMEM);
    if (!ns->has_key && seg->options.crypt == CST_SEG_CRYPT_AES && !seg->read_only) {
        r = cst_seg_keys_add(seg, ns);
        if (r)
            return r;
    }
    return cst_seg_space_get(ns, identity, kind, klass, canonical, n, out);
}

void cst_seg_space_info(const struct cst_seg_space *space, struct cst_seg_space_info *out) {
    *out = (struct cst_seg_space_info){
        .namespace_name = space->ns->name,
        .identity = space->identity,
        .canonical = space->canonical,
        .canonical_bytes = space->canonical_bytes,
        .kind = space->kind,
        .klass = space->klass,
    };
}

void cst_seg_space_set_user(struct cst_seg_space *space, void *user) {
    space->user = user;
}

void *cst_seg_space_user(const struct cst_seg_space *space) {
    return space->user;
}

void cst_seg_account(const struct cst_seg *seg, const char *namespace_name,
                     struct cst_seg_account *out) {
    const struct cst_seg_ns *ns = cst_seg_ns_find(seg, namespace_name, strlen(namespace_name));

    *out = (struct cst_seg_account){ 0 };
    if (!ns)
        return;
    out->records = ns->records;
    out->record_bytes = ns->chunks * CST_DISK_CHUNK;
    out->segments = ns->n_segments;
    out->segment_bytes = ns->n_segments * seg->segment_bytes;
}
