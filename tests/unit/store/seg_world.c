/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the glass around a disk tier: see the header.
 * Invariants: 1. an item's payload is a function of its number; 2. what is found is something that
 * was once stored, with the same numbers, and below its parent.
 */
#include "tests/unit/store/seg_world.h"

#include "base/crc32c.h"
#include "base/le.h"
#include "base/mem.h"
#include "base/sha256.h"
#include "tests/lib/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const runtime_none[] = { NULL };

static uint64_t now_s(void) {
    return 1700000000;
}

static void key_of(uint8_t out[32], uint32_t n) {
    uint8_t name[8] = "item";

    cst_store32(name + 4, n);
    cst_sha256(name, sizeof(name), out);
    cst_store32(out, n); /* so that it is found again */
}

void seg_world_payload(uint8_t *out, uint32_t n, uint64_t bytes) {
    struct cst_seeded_random r;

    cst_seeded_random_init(&r, n * 2654435761U + 1);
    assert_int_equal(r.random.fill(&r.random, out, bytes), 0);
    if (bytes >= 16) /* what a canary search looks for */
        memcpy(out, "canary-in-a-coal", 16);
}

/* ---- the user ---- */

static int found(void *arg, const struct cst_seg_record *record, struct cst_seg_ref ref,
                 void **owner) {
    struct seg_world *w = arg;
    uint32_t n = cst_load32(record->key);
    struct seg_item *item;
    struct cst_seg_space_info info;

    assert_true(n < SEG_ITEMS);
    item = &w->items[n];
    assert_true(item->begun);
    if (record->type == CST_SEG_SIDE) {
        assert_int_equal(record->version, 70 + n);
        assert_int_equal(record->kind, 3);
        assert_int_equal(record->part, n % 3);
        assert_int_equal(record->parts, 3);
        assert_int_equal(record->total_bytes, 90000);
        item->live = true;
        item->ref = ref;
        *owner = item;
        return 0;
    }
    assert_memory_equal(record->key, item->key, 32);
    cst_seg_space_info(record->space, &info);
    assert_int_equal(info.klass, item->space);
    assert_int_equal(record->n_tokens, SEG_TOKENS);
    assert_memory_equal(record->tokens, item->tokens, sizeof(item->tokens));
    assert_non_null(record->surprisals);
    assert_memory_equal(record->surprisals, item->surprisals, sizeof(item->surprisals));
    assert_int_equal(record->payload_bytes, item->bytes);
    assert_int_equal(record->has_parent, item->parent >= 0);
    assert_memory_equal(record->parent, item->parent_key, 32);
    assert_int_equal(record->preset, 1);
    assert_int_equal(record->n_side, 1);
    assert_int_equal(record->side[0], n);
    if (w->on_found)
        w->on_found(w, record);
    if (item->live)
        return CST_SEG_E_GONE; /* twice: it was moved */
    if (item->parent >= 0 && !w->items[item->parent].live)
        return CST_SEG_E_PARENT;
    item->live = true;
    item->ref = ref;
    item->pinned_until = record->pinned_until;
    w->n_found++;
    *owner = item;
    return 0;
}

static float value(void *arg, void *owner, bool *has_children) {
    const struct seg_world *w = arg;
    const struct seg_item *item = owner;

    *has_children = false;
    for (unsigned i = 0; i < SEG_ITEMS && !*has_children; i++)
        *has_children = w->items[i].live && w->items[i].parent == (int)item->n;
    return item->value;
}

static void moved(void *arg, void *owner, struct cst_seg_ref ref) {
    struct seg_world *w = arg;

    ((struct seg_item *)owner)->ref = ref;
    w->n_moved++;
}

static void gone(void *arg, void *owner, enum cst_seg_gone why) {
    struct seg_world *w = arg;
    struct seg_item *item = owner;

    (void)why;
    assert_true(item->live);
    item->live = false;
    w->n_gone++;
    for (unsigned i = 0; i < SEG_ITEMS; i++) /* its subtree */
        if (w->items[i].live && w->items[i].parent == (int)item->n) {
            cst_seg_drop(w->seg, w->items[i].ref, false);
            gone(arg, &w->items[i], why);
        }
}

static uint64_t pinned_until(void *arg, void *owner) {
    (void)arg;
    return ((struct seg_item *)owner)->pinned_until;
}

static void note(void *arg, const char *sentence) {
    struct seg_world *w = arg;

    w->n_notes++;
    (void)snprintf(w->notes + strlen(w->notes), sizeof(w->notes) - strlen(w->notes), "%s\n",
                   sentence);
}

static void recovered(void *arg, int status) {
    struct seg_world *w = arg;

    w->recovered = true;
    w->recover_status = status;
}

/* ---- the world ---- */

struct seg_world *seg_world_new(uint64_t seed, enum cst_seg_crypt crypt) {
    struct seg_world *w = cst_calloc(1, sizeof(*w));

    assert_non_null(w);
    w->key_fd = -1;
    assert_int_equal(cst_sim_disk_new(&w->disk, 4 << 20, seed), 0);
    cst_manual_clock_init(&w->clock, 1000 * CST_NS_PER_S);
    cst_seeded_random_init(&w->random, seed + 1);
    test_jobs_init(&w->jobs, true);
    w->options = (struct cst_seg_options){
        .bytes = 8 * (256 << 10),
        .segment_bytes = 256 << 10,
        .buffer_bytes = 512 << 10,
        .errors_max = 1000,
        .lock_ms = 1,
        .crypt = crypt,
        .runtime = runtime_none,
    };
    for (uint32_t i = 0; i < SEG_ITEMS; i++) {
        struct seg_item *item = &w->items[i];

        item->n = i;
        key_of(item->key, i);
        for (uint32_t t = 0; t < SEG_TOKENS; t++) {
            item->tokens[t] = i * 1000 + t;
            item->surprisals[t] = (uint16_t)(i + t);
        }
    }
    return w;
}

void seg_world_key(struct seg_world *w) {
    w->key_fd = memfd_create("key", MFD_CLOEXEC);
    assert_true(w->key_fd >= 0 && !fchmod(w->key_fd, 0600));
    assert_int_equal(write(w->key_fd, "0123456789abcdef0123456789abcdef", 32), 32);
    (void)snprintf(w->key_path, sizeof(w->key_path), "/proc/self/fd/%d", w->key_fd);
    w->options.key_file = w->key_path;
}

int seg_world_start(struct seg_world *w) {
    struct cst_seg_env env = {
        .clock = &w->clock.clock,
        .unix_s = now_s,
        .random = &w->random.random,
        .jobs = w->threads ? &w->threads->jobs : &w->jobs.jobs,
        .user = { .found = found,
                  .value = value,
                  .moved = moved,
                  .gone = gone,
                  .pinned_until = pinned_until,
                  .note = note,
                  .arg = w },
    };
    int r;

    w->recovered = false;
    w->n_found = 0;
    for (unsigned i = 0; i < SEG_ITEMS; i++)
        w->items[i].live = w->items[i].acked = w->items[i].open = false;
    if (!w->aio) {
        assert_int_equal(cst_aio_new_sim(&w->aio, w->disk), 0);
        if (w->with_faults)
            assert_int_equal(cst_aio_new_fault(&w->aio, w->aio, 7), 0);
    }
    env.aio = w->aio;
    r = cst_seg_open(&w->seg, &w->options, &env, w->message, sizeof(w->message));
    if (r) {
        w->seg = NULL;
        return r;
    }
    cst_seg_recover(w->seg, recovered, w);
    seg_world_settle(w);
    assert_true(w->recovered);
    for (unsigned i = 0; i < CST_COUNT(w->spaces); i++) {
        char canonical[40];
        int n = snprintf(canonical, sizeof(canonical), "canonical bytes of model");

        /* the same model in three classes */
        r = cst_seg_space_open(w->seg, "uid-1", CST_KIND_TOKENS, (enum cst_class)i, canonical,
                               (uint32_t)n, &w->spaces[i]);
        if (r)
            return r;
    }
    return 0;
}

static size_t drain(struct seg_world *w) {
    return w->threads ? thread_jobs_drain(w->threads, true) : test_jobs_drain(&w->jobs);
}

void seg_world_turn(struct seg_world *w) {
    cst_aio_kick(w->aio);
    (void)cst_aio_reap(w->aio);
    if (w->threads)
        (void)thread_jobs_drain(w->threads, false);
}

void seg_world_settle(struct seg_world *w) {
    for (unsigned idle = 0; idle < 16; idle++) {
        cst_aio_kick(w->aio);
        if (cst_aio_reap(w->aio) + drain(w))
            idle = 0;
    }
    if (w->seg)
        assert_int_equal(cst_seg_busy(w->seg), 0);
}

void seg_world_stop(struct seg_world *w, bool clean) {
    if (w->seg) {
        seg_world_settle(w);
        if (clean)
            assert_int_equal(cst_seg_close(w->seg), 0);
        for (unsigned i = 0; i < CST_COUNT(w->spaces); i++)
            w->spaces[i] = cst_seg_space_unref(w->spaces[i]);
        w->seg = cst_seg_free(w->seg);
    }
    w->aio = cst_aio_free(w->aio);
}

void seg_world_free(struct seg_world *w) {
    seg_world_stop(w, false);
    (void)cst_sim_disk_free(w->disk);
    (void)cst_close(w->key_fd);
    cst_free(w);
}

/* ---- records ---- */

static void stored(struct cst_seg_store *store, int status) {
    struct seg_item *item = cst_container_of(store, struct seg_item, store);

    item->status = status;
    item->open = false;
    item->payload = cst_free(item->payload);
    item->live = item->acked = !status;
    item->failed = status;
    if (!status)
        item->ref = store->ref;
}

void seg_world_prepare(struct seg_world *w, uint32_t n, int parent, unsigned space,
                       uint64_t bytes) {
    struct seg_item *item = &w->items[n];

    item->parent = parent;
    item->space = space;
    item->bytes = bytes;
    item->side = n;
    memset(item->parent_key, 0x77, sizeof(item->parent_key));
    if (parent >= 0)
        memcpy(item->parent_key, w->items[parent].key, 32);
    item->payload = cst_malloc(bytes);
    assert_non_null(item->payload);
    seg_world_payload(item->payload, n, bytes);
    item->store = (struct cst_seg_store){
        .done = stored,
        .record = { .type = CST_SEG_BLOCK,
                    .space = w->spaces[space],
                    .key = item->key,
                    .payload_bytes = bytes,
                    .payload_crc = cst_crc32c(0, item->payload, bytes),
                    .parent = item->parent_key,
                    .has_parent = parent >= 0,
                    .position = parent < 0 ? 0 : w->items[parent].store.record.position + 1,
                    .n_tokens = SEG_TOKENS,
                    .tokens = item->tokens,
                    .surprisals = item->surprisals,
                    .preset = 1,
                    .error = .25F,
                    .n_side = 1,
                    .side = &item->side },
        .payload = item->payload,
        .owner = item,
    };
    if (parent >= 0)
        item->store.parent = w->items[parent].open ? cst_seg_store_ref(&w->items[parent].store)
                                                   : w->items[parent].ref;
    item->begun = item->open = true;
    item->failed = false;
}

int seg_world_store(struct seg_world *w, uint32_t n, int parent, unsigned space, uint64_t bytes) {
    struct seg_item *item = &w->items[n];
    bool begun = item->begun;
    int r;

    seg_world_prepare(w, n, parent, space, bytes);
    r = cst_seg_store(w->seg, &item->store);
    if (r) {
        item->payload = cst_free(item->payload);
        item->open = false;
        item->begun = begun;
    }
    return r;
}

int seg_world_put(struct seg_world *w, uint32_t n, int parent, unsigned space, uint64_t bytes) {
    int r = seg_world_store(w, n, parent, space, bytes);

    for (unsigned i = 0; r == CST_SEG_E_BUSY && i < 10; i++) {
        seg_world_settle(w);
        r = seg_world_store(w, n, parent, space, bytes);
    }
    if (r)
        return r;
    seg_world_settle(w);
    assert_false(w->items[n].open);
    return w->items[n].status;
}

struct reading {
    struct cst_seg_read read;
    int status;
    bool told;
};

static void read_done(struct cst_seg_read *read, int status) {
    struct reading *r = cst_container_of(read, struct reading, read);

    r->status = status;
    r->told = true;
}

int seg_world_read(struct seg_world *w, uint32_t n) {
    struct seg_item *item = &w->items[n];
    uint64_t bytes = cst_seg_read_bytes(w->seg, item->ref);
    struct reading r = { .read = { .done = read_done, .ref = item->ref, .key = item->key } };
    uint8_t *expected;

    if (bytes && posix_memalign(&r.read.buffer, CST_AIO_ALIGN, bytes))
        fail();
    if (bytes)
        memset(r.read.buffer, 0xee, bytes);
    cst_seg_read(w->seg, &r.read);
    assert_false(r.told);
    seg_world_settle(w);
    assert_true(r.told);
    if (!r.status) {
        assert_int_equal(r.read.payload_bytes, item->bytes);
        expected = cst_malloc(item->bytes);
        assert_non_null(expected);
        seg_world_payload(expected, n, item->bytes);
        assert_memory_equal(r.read.payload, expected, item->bytes);
        cst_free(expected);
    }
    free(r.read.buffer);
    return r.status;
}

size_t seg_world_read_all(struct seg_world *w) {
    size_t n = 0;

    for (uint32_t i = 0; i < SEG_ITEMS; i++)
        n += w->items[i].live && !seg_world_read(w, i);
    return n;
}

size_t seg_world_live(const struct seg_world *w) {
    size_t n = 0;

    for (uint32_t i = 0; i < SEG_ITEMS; i++)
        n += w->items[i].live;
    return n;
}

void seg_world_drop(struct seg_world *w, uint32_t n, bool destroy) {
    cst_seg_drop(w->seg, w->items[n].ref, destroy);
    w->items[n].live = false;
}
