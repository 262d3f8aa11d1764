/* SPDX-License-Identifier: Apache-2.0 */
/* The engine of the disk tier on files in memory: stores, reads, restarts, eviction, refusals. */
#include "base/fault.h"
#include "base/mem.h"
#include "store/seg_core.h"
#include "tests/unit/store/seg_world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static const enum cst_seg_crypt crypts[] = { CST_SEG_CRYPT_OFF, CST_SEG_CRYPT_AES };

static void test_round_trip(void **state) {
    (void)state;
    for (unsigned c = 0; c < 2; c++) {
        struct seg_world *w = seg_world_new(1, crypts[c]);
        static const uint64_t sizes[] = { 1, 100, 3000, 4096, 5000, 40000, 130000 };

        assert_int_equal(seg_world_start(w), 0);
        seg_world_settle(w);
        for (uint32_t i = 0; i < CST_COUNT(sizes); i++)
            assert_int_equal(seg_world_put(w, i, (int)i - 1, 0, sizes[i]), 0);
        assert_int_equal(seg_world_read_all(w), CST_COUNT(sizes));
        seg_world_drop(w, 6, false);
        assert_int_equal(seg_world_read(w, 6), CST_SEG_E_GONE);
        seg_world_free(w);
    }
}

/* Chains of both kinds of class, many stores under way at once. */
static void fill(struct seg_world *w, uint32_t n, uint64_t bytes) {
    for (uint32_t i = 0; i < n; i++) {
        int parent = i % 8 ? (int)i - 1 : -1;
        int r = seg_world_store(w, i, parent, i / 8 % 2, bytes + i);

        for (unsigned k = 0; r == CST_SEG_E_BUSY && k < 20; k++) {
            seg_world_settle(w);
            r = seg_world_store(w, i, parent, i / 8 % 2, bytes + i);
        }
        assert_true(!r || r == CST_SEG_E_PARENT);
    }
    seg_world_settle(w);
}

static void test_restart(void **state) {
    (void)state;
    for (unsigned k = 0; k < 2; k++) {
        bool clean = k & 1;
        struct seg_world *w = seg_world_new(2, CST_SEG_CRYPT_OFF);
        struct cst_seg_stats stats;

        assert_int_equal(seg_world_start(w), 0);
        seg_world_settle(w);
        fill(w, 100, 3000);
        assert_int_equal(seg_world_live(w), 100);
        w->items[17].pinned_until = 1800000000;
        seg_world_drop(w, 99, false);
        seg_world_drop(w, 96, true); /* its children are the user's business */
        seg_world_settle(w);
        seg_world_stop(w, clean);
        assert_int_equal(seg_world_start(w), 0);
        cst_seg_stats(w->seg, &stats);
        assert_int_equal(stats.recovered_clean, clean);
        /* without a checkpoint what was only dropped comes back; 96 was destroyed with its chain */
        if (clean) {
            assert_int_equal(w->n_found, 96);
            assert_int_equal(w->items[17].pinned_until, 1800000000);
        }
        assert_true(w->n_found >= 96);
        assert_int_equal(w->items[96].live && seg_world_read(w, 96) == 0, 0);
        assert_true(seg_world_read_all(w) >= 96);
        /* and goes on */
        assert_int_equal(seg_world_put(w, 200, 3, 0, 5000), 0);
        assert_int_equal(seg_world_read(w, 200), 0);
        seg_world_free(w);
    }
}

static void test_eviction(void **state) {
    struct seg_world *w = seg_world_new(3, CST_SEG_CRYPT_OFF);
    struct cst_seg_stats stats;

    (void)state;
    for (uint32_t i = 0; i < SEG_ITEMS; i++)
        w->items[i].value = i % 10 ? 1 : 10; /* roots of chains of 8 and others */
    assert_int_equal(seg_world_start(w), 0);
    seg_world_settle(w);
    fill(w, 400, 9000);
    cst_seg_stats(w->seg, &stats);
    assert_true(w->n_gone > 200);
    assert_true(stats.moved_bytes + stats.overhead_bytes <= stats.stored_bytes / 10 + (256 << 10));
    assert_int_equal(seg_world_read_all(w), seg_world_live(w));
    assert_true(stats.segments <= 8);
    seg_world_stop(w, false);
    assert_int_equal(seg_world_start(w), 0);
    assert_true(w->n_found > 50);
    assert_int_equal(seg_world_read_all(w), seg_world_live(w));
    seg_world_free(w);
}

/* A kill while segments are filled anew: what their older index speaks of is whole or not found. */
static void test_killed_while_refilled(void **state) {
    (void)state;
    for (uint32_t n = 0; n < 200; n++) {
        struct seg_world *w = seg_world_new(5, CST_SEG_CRYPT_OFF);
        struct cst_seg_stats stats;

        assert_int_equal(seg_world_start(w), 0);
        fill(w, 220, 9000); /* full: each segment that is begun now was used before */
        cst_sim_disk_power_off_at(w->disk, 1 + n, CST_SIM_KEEP);
        for (uint32_t i = 220; i < 340 && !cst_sim_disk_is_off(w->disk); i++)
            if (seg_world_store(w, i, -1, 0, 9000) == CST_SEG_E_BUSY)
                seg_world_settle(w);
        seg_world_stop(w, false);
        cst_sim_disk_power_on(w->disk);
        w->options.bytes *= 2; /* or the start would evict just what is to be looked at */
        assert_int_equal(seg_world_start(w), 0);
        assert_int_equal(seg_world_read_all(w), w->n_found);
        cst_seg_stats(w->seg, &stats);
        assert_int_equal(stats.corrupt, 0);
        assert_true(w->n_found > 100);
        seg_world_free(w);
    }
}

static void test_parents_first(void **state) {
    struct seg_world *w = seg_world_new(4, CST_SEG_CRYPT_OFF);

    (void)state;
    assert_int_equal(seg_world_start(w), 0);
    seg_world_settle(w);
    assert_int_equal(seg_world_put(w, 0, -1, 0, 3000), 0);
    seg_world_drop(w, 0, false);
    assert_int_equal(seg_world_store(w, 1, 0, 0, 3000), CST_SEG_E_PARENT);
    assert_int_equal(seg_world_put(w, 6, -1, 0, 60000), 0);
    assert_int_equal(seg_world_store(w, 1, 6, 0, 3000), 0);
    assert_int_equal(seg_world_store(w, 2, 1, 0, 3000), 0); /* while 1 is under way */
    seg_world_settle(w);
    assert_int_equal(w->items[2].status, 0);
    /* the parent goes while its child is on its way */
    assert_int_equal(seg_world_store(w, 3, 2, 0, 3000), 0);
    seg_world_drop(w, 2, false);
    seg_world_settle(w);
    assert_int_equal(w->items[3].status, CST_SEG_E_PARENT);
    /* a payload that isn't what its checksum says leaves a void, and what follows is there */
    assert_int_equal(seg_world_store(w, 4, -1, 0, 50000), 0);
    w->items[4].payload[33] ^= 1;
    assert_int_equal(seg_world_store(w, 5, -1, 0, 50000), 0);
    seg_world_settle(w);
    assert_int_equal(w->items[5].status, 0);
    seg_world_stop(w, false);
    w->items[4].begun = w->items[4].status == CST_SEG_E_CORRUPT ? false : true;
    assert_int_equal(seg_world_start(w), 0);
    assert_int_equal(w->items[5].live, 1);
    assert_int_equal(seg_world_read(w, 5), 0);
    seg_world_free(w);
}

/* Side data: parts of opaque bytes with a version. */
static void test_side_data(void **state) {
    struct seg_world *w = seg_world_new(5, CST_SEG_CRYPT_OFF);

    (void)state;
    assert_int_equal(seg_world_start(w), 0);
    seg_world_settle(w);
    for (uint32_t i = 0; i < 3; i++) {
        struct seg_item *item = &w->items[i];

        seg_world_prepare(w, i, -1, 1, 30000);
        item->store.record.type = CST_SEG_SIDE;
        item->store.record.version = 70 + i;
        item->store.record.kind = 3;
        item->store.record.part = i;
        item->store.record.parts = 3;
        item->store.record.total_bytes = 90000;
        assert_int_equal(cst_seg_store(w->seg, &item->store), 0);
        seg_world_settle(w);
        assert_int_equal(item->status, 0);
    }
    seg_world_stop(w, true);
    assert_int_equal(seg_world_start(w), 0);
    assert_int_equal(seg_world_live(w), 3);
    assert_int_equal(seg_world_read_all(w), 3);
    seg_world_free(w);
}

/* Two namespaces never share a segment, a cap holds, and a purge takes one of them. */
static void test_namespaces(void **state) {
    struct seg_world *w = seg_world_new(6, CST_SEG_CRYPT_OFF);
    struct cst_seg_account one, two;
    struct cst_seg_space *other;
    enum cst_seg_erasure how;

    (void)state;
    w->options.namespace_bytes = 4 * (256 << 10);
    assert_int_equal(seg_world_start(w), 0);
    seg_world_settle(w);
    assert_int_equal(cst_seg_space_open(w->seg, "uid-2", CST_KIND_TOKENS, CST_CLASS_LOSSLESS,
                                        "canonical bytes of model", 24, &other),
                     0);
    for (uint32_t i = 0; i < 200; i++) {
        int r = seg_world_put(w, i, -1, 0, 9000);

        assert_true(!r || r == CST_SEG_E_FULL);
        if (i % 10)
            continue;
        seg_world_prepare(w, 300 + i, -1, 0, 9000);
        w->items[300 + i].store.record.space = other;
        assert_int_equal(cst_seg_store(w->seg, &w->items[300 + i].store), 0);
        seg_world_settle(w);
    }
    cst_seg_account(w->seg, "uid-1", &one);
    cst_seg_account(w->seg, "uid-2", &two);
    assert_true(one.segments <= 4 && one.records > 40);
    assert_int_equal(two.records, 20);
    assert_int_equal(two.segments, 2);
    assert_int_equal(one.records + two.records, seg_world_live(w));
    assert_int_equal(cst_seg_purge(w->seg, "uid-1", &how), 0);
    assert_int_equal(how, CST_SEG_UNLINKED);
    cst_seg_account(w->seg, "uid-1", &one);
    assert_int_equal(one.records + one.segments, 0);
    for (uint32_t i = 0; i < 300; i++)
        w->items[i].live = w->items[i].begun = false; /* finding one fails the test */
    assert_int_equal(seg_world_read_all(w), 20);
    other = cst_seg_space_unref(other);
    seg_world_stop(w, false);
    assert_int_equal(seg_world_start(w), 0);
    assert_int_equal(seg_world_live(w), 20);
    seg_world_free(w);
}

/* Segments that hold nothing have no key, whatever they held. */
static void test_keys_of_empty_segments(void **state) {
    static const uint8_t none[CST_DISK_KEY];
    struct seg_world *w = seg_world_new(11, CST_SEG_CRYPT_AES);
    unsigned n_empty = 0;

    (void)state;
    assert_int_equal(seg_world_start(w), 0);
    seg_world_settle(w);
    fill(w, 100, 9000);
    for (uint32_t i = 0; i < 100; i++)
        seg_world_drop(w, i, false);
    seg_world_settle(w);
    for (uint32_t i = 0; i < w->seg->n_segments; i++) {
        const struct cst_seg_segment *s = &w->seg->segments[i];

        n_empty += s->state == CST_SEG_FREE && s->fill;
        assert_true(s->ns || !memcmp(s->seal.key, none, sizeof(none)));
    }
    assert_true(n_empty > 0);
    seg_world_free(w);
}

/* A purge that the disk refuses says so, and one that goes well later is one. */
static void test_purge_refused(void **state) {
    (void)state;
    for (unsigned encrypted = 0; encrypted < 2; encrypted++) {
        struct seg_world *w = seg_world_new(5, encrypted ? CST_SEG_CRYPT_AES : CST_SEG_CRYPT_OFF);
        enum cst_seg_erasure how;

        w->with_faults = true;
        assert_int_equal(seg_world_start(w), 0);
        seg_world_settle(w);
        for (uint32_t i = 0; i < 20; i++)
            assert_int_equal(seg_world_put(w, i, -1, 0, 3000), 0);
        cst_aio_fault_arm(w->aio, CST_AIO_FAULT_EIO, 1, 1000);
        assert_true(cst_seg_purge(w->seg, "uid-1", &how) < 0);
        assert_int_equal(how, CST_SEG_UNLINKED);
        cst_aio_fault_arm(w->aio, CST_AIO_FAULT_EIO, 0, 0);
        assert_int_equal(cst_seg_purge(w->seg, "uid-1", &how), 0);
        for (uint32_t i = 0; i < 20; i++)
            w->items[i].live = w->items[i].begun = false; /* finding one fails the test */
        seg_world_stop(w, false);
        assert_int_equal(seg_world_start(w), 0);
        assert_int_equal(seg_world_live(w), 0);
        seg_world_free(w);
    }
}

/* A purge while stores and an eviction are under way. */
static void test_purge_busy(void **state) {
    (void)state;
    for (unsigned c = 0; c < 2; c++) {
        struct seg_world *w = seg_world_new(9, crypts[c]);
        struct cst_seg_account account;
        enum cst_seg_erasure how;

        for (uint32_t i = 0; i < SEG_ITEMS; i++)
            w->items[i].value = i % 10 ? 1 : 10;
        assert_int_equal(seg_world_start(w), 0);
        seg_world_settle(w);
        fill(w, 200, 9000);
        for (uint32_t i = 300; i < 310; i++)
            (void)seg_world_store(w, i, -1, 0, 60000); /* fills segments: evicts */
        cst_aio_kick(w->aio);
        assert_int_equal(cst_seg_purge(w->seg, "uid-1", &how), 0);
        assert_int_equal(how, c ? CST_SEG_ERASED : CST_SEG_UNLINKED);
        seg_world_settle(w);
        cst_seg_account(w->seg, "uid-1", &account);
        assert_int_equal(account.records + account.segments, 0);
        for (uint32_t i = 0; i < SEG_ITEMS; i++) {
            assert_true(i < 300 || i >= 310 || !w->items[i].acked);
            w->items[i].live = w->items[i].begun = false; /* finding one fails the test */
        }
        seg_world_stop(w, false);
        assert_int_equal(seg_world_start(w), 0);
        assert_int_equal(seg_world_live(w), 0);
        assert_int_equal(seg_world_put(w, 400, -1, 0, 5000), 0);
        assert_int_equal(seg_world_read(w, 400), 0);
        seg_world_free(w);
    }
}

/* More namespaces than segments: each still gets its turn. */
static void test_many_namespaces(void **state) {
    struct seg_world *w = seg_world_new(10, CST_SEG_CRYPT_OFF);
    struct cst_seg_space *spaces[20];

    (void)state;
    w->options.bytes = 4 * (256 << 10);
    assert_int_equal(seg_world_start(w), 0);
    seg_world_settle(w);
    for (uint32_t i = 0; i < 20; i++) {
        char name[16];

        (void)snprintf(name, sizeof(name), "uid-%u", 100 + i);
        assert_int_equal(cst_seg_space_open(w->seg, name, CST_KIND_TOKENS, CST_CLASS_LOSSLESS,
                                            "canonical bytes of model", 24, &spaces[i]),
                         0);
    }
    for (uint32_t i = 0; i < 60; i++) {
        int r = CST_SEG_E_BUSY;

        for (unsigned k = 0; k < 5 && (r == CST_SEG_E_BUSY || r == CST_SEG_E_FULL); k++) {
            seg_world_prepare(w, i, -1, 0, 9000);
            w->items[i].store.record.space = spaces[i % 20];
            r = cst_seg_store(w->seg, &w->items[i].store);
            if (r)
                w->items[i].payload = cst_free(w->items[i].payload);
            seg_world_settle(w);
        }
        assert_int_equal(r, 0);
        assert_int_equal(w->items[i].status, 0);
        assert_int_equal(seg_world_read(w, i), 0);
    }
    for (uint32_t i = 0; i < 20; i++)
        (void)cst_seg_space_unref(spaces[i]);
    seg_world_free(w);
}

/* As many as a directory takes, all found by name; the next one stays out and is told of once. */
static void test_too_many_namespaces(void **state) {
    enum { MOST = 16384 }; /* of the engine */
    struct seg_world *w = seg_world_new(11, CST_SEG_CRYPT_OFF);
    struct cst_seg_account account;
    struct cst_seg_space *space;
    char name[16];

    (void)state;
    assert_int_equal(seg_world_start(w), 0); /* which has opened spaces of uid-1 */
    for (uint32_t i = 2; i <= MOST + 2; i++) {
        (void)snprintf(name, sizeof(name), "uid-%u", i);
        assert_int_equal(cst_seg_space_open(w->seg, name, CST_KIND_TOKENS, CST_CLASS_LOSSLESS,
                                            "canonical", 9, &space) != 0,
                         i > MOST);
        if (i <= MOST)
            (void)cst_seg_space_unref(space);
    }
    assert_int_equal(w->n_notes, 1);
    assert_non_null(strstr(w->notes, "knows 16384 namespaces"));
    assert_int_equal(seg_world_put(w, 0, -1, 0, 3000), 0);
    cst_seg_account(w->seg, "uid-1", &account);
    assert_int_equal(account.records, 1);
    cst_seg_account(w->seg, "uid-77777", &account);
    assert_int_equal(account.records, 0);
    seg_world_free(w);
}

/* Budget, hits, size, the disk's end, and the breaker. */
static void test_admission(void **state) {
    struct seg_world *w = seg_world_new(7, CST_SEG_CRYPT_OFF);
    struct cst_seg_stats stats;

    (void)state;
    w->options.write_rate = 50000;
    w->options.errors_max = 4;
    w->with_faults = true;
    assert_int_equal(seg_world_start(w), 0);
    seg_world_settle(w);
    assert_int_equal(seg_world_put(w, 0, -1, 0, 60000), 0);
    assert_int_equal(seg_world_put(w, 1, -1, 0, 60000), CST_SEG_E_BUDGET);
    w->clock.ns += CST_NS_PER_S;
    assert_int_equal(seg_world_put(w, 1, -1, 0, 60000), 0);
    assert_int_equal(seg_world_store(w, 2, -1, 0, 256 << 10), CST_SEG_E_TOO_BIG);
    w->clock.ns += 10 * CST_NS_PER_S;
    cst_aio_fault_arm(w->aio, CST_AIO_FAULT_EIO, 1, 1000);
    for (uint32_t i = 3; i < 9; i++) {
        w->clock.ns += CST_NS_PER_S;
        assert_true(seg_world_put(w, i, -1, 0, 3000) != 0);
    }
    cst_seg_stats(w->seg, &stats);
    assert_true(stats.off);
    assert_non_null(strstr(w->notes, "is off after"));
    assert_int_equal(seg_world_read(w, 0), CST_SEG_E_OFF);
    assert_int_equal(seg_world_store(w, 9, -1, 0, 100), CST_SEG_E_OFF);
    seg_world_free(w);

    w = seg_world_new(8, CST_SEG_CRYPT_OFF); /* 4 MiB of disk, 64 MiB of tier */
    w->options.bytes = 64 << 20;
    assert_int_equal(seg_world_start(w), 0);
    seg_world_settle(w);
    for (uint32_t i = 0; i < 400; i++)
        (void)seg_world_put(w, i, -1, 0, 20000);
    cst_seg_stats(w->seg, &stats);
    assert_false(stats.off);
    assert_true(stats.segments >= 10 && stats.segments <= 16);
    assert_non_null(strstr(w->notes, "makes do with"));
    assert_true(stats.stored > 350);
    assert_int_equal(seg_world_read_all(w), seg_world_live(w));
    seg_world_free(w);
}

/* Files that a full disk had no room for, at their beginning, are made when it has. */
static void test_room_that_comes_back_is_used(void **state) {
    uint32_t segments[2];

    for (unsigned full = 0; full < 2; full++) {
        struct seg_world *w = seg_world_new(8, CST_SEG_CRYPT_OFF);
        struct cst_seg_stats stats;

        w->with_faults = true;
        assert_int_equal(seg_world_start(w), 0);
        assert_int_equal(seg_world_put(w, 0, -1, 0, 3000), 0);
        seg_world_settle(w);
        cst_aio_fault_arm(w->aio, CST_AIO_FAULT_FULL, full, 1000);
        for (uint32_t i = 1; i < 100; i++) {
            w->clock.ns += 61 * CST_NS_PER_S;
            (void)seg_world_put(w, i, -1, 0, 20000);
        }
        cst_aio_fault_arm(w->aio, CST_AIO_FAULT_FULL, 0, 0);
        for (uint32_t i = 100; i < 300; i++) {
            w->clock.ns += 61 * CST_NS_PER_S;
            (void)seg_world_put(w, i, -1, 0, 20000);
        }
        cst_seg_stats(w->seg, &stats);
        assert_false(stats.off);
        segments[full] = stats.segments;
        seg_world_free(w);
    }
    assert_int_equal(segments[0], segments[1]);
}

static unsigned n_said(const struct seg_world *w, const char *words) {
    unsigned n = 0;

    for (const char *at = w->notes; (at = strstr(at, words)); at++)
        n++;
    return n;
}

/* Memory fails, at each place in turn, while segments are begun and made: that costs stores, which
 * is said once, and once it is there again all goes on, in as many files. */
static void test_want_of_memory_is_no_defect(void **state) {
    struct seg_world *w = seg_world_new(8, CST_SEG_CRYPT_OFF);
    struct cst_seg_stats stats;
    uint64_t failed = 0;

    (void)state;
    cst_fault_join();
    assert_int_equal(seg_world_start(w), 0);
    for (uint32_t i = 0; i < 200; i++) {
        w->clock.ns += 61 * CST_NS_PER_S;
        cst_fault_arm(CST_FAULT_ALLOC, 2 + i % 8, 1); /* behind the payload */
        (void)seg_world_put(w, i, -1, 0, 20000);
        failed += cst_fault_seen(CST_FAULT_ALLOC) >= 2 + i % 8;
        cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
    }
    cst_fault_leave();
    for (uint32_t i = 200; i < 300; i++)
        (void)seg_world_put(w, i, -1, 0, 20000);
    cst_seg_stats(w->seg, &stats);
    assert_true(failed > 10);
    assert_int_equal(stats.errors, 0);
    assert_int_equal(stats.segments_foreign, 0);
    assert_int_equal(stats.segments, 8);
    assert_int_equal(n_said(w, "gets no memory"), 1);
    assert_int_equal(seg_world_read_all(w), seg_world_live(w));
    seg_world_free(w);
}

/* ... while they are written: that costs the segment, and is said once, too. */
static void test_want_of_memory_costs_a_segment(void **state) {
    struct seg_world *w = seg_world_new(8, CST_SEG_CRYPT_OFF);
    struct cst_seg_stats stats;
    uint32_t n = 0, lost = 0;

    (void)state;
    w->with_faults = true; /* around the disk: their memory fails, which is how a write does */
    assert_int_equal(seg_world_start(w), 0);
    seg_world_settle(w);
    for (; lost < 3 && n < 100; n++) {
        w->clock.ns += 61 * CST_NS_PER_S;
        assert_int_equal(seg_world_store(w, n, -1, 0, 3000), 0);
        cst_fault_join();
        cst_fault_arm(CST_FAULT_ALLOC, 1, 1);
        seg_world_settle(w);
        cst_fault_arm(CST_FAULT_ALLOC, 0, 0);
        cst_fault_leave();
        lost += w->items[n].status == -ENOMEM;
    }
    cst_seg_stats(w->seg, &stats);
    assert_int_equal(lost, 3);
    assert_int_equal(stats.errors, 0);
    assert_int_equal(n_said(w, "lost a segment"), 1);
    seg_world_free(w);
}

/* What the engine answers is nothing that the aio says: a tier whose bytes per second are used up
 * isn't taken for a full disk. */
static void test_no_condition_is_a_shortage(void **state) {
    (void)state;
    assert_true(cst_seg_is_shortage(CST_AIO_E_FULL) && cst_seg_is_shortage(-ENOMEM));
    assert_false(cst_seg_is_shortage(-EIO));
    for (int r = CST_SEG_E_REFUSED; r <= CST_SEG_E_CORRUPT; r++)
        assert_false(cst_seg_is_shortage(r));
}

/* Stores that are refused for want of memory, at every place in a segment, leave no trace: segments
 * are begun one after the other, each with its first fill. */
static void test_refused_leaves_no_trace(void **state) {
    (void)state;
    for (uint64_t bytes = 3000; bytes < 20000; bytes += 1000) {
        struct seg_world *w = seg_world_new(9, CST_SEG_CRYPT_AES);
        char name[32];

        w->options.buffer_bytes = 64 << 10;
        assert_int_equal(seg_world_start(w), 0);
        seg_world_settle(w);
        for (uint32_t i = 0; i < 300 / cst_disk_chunks(bytes + 512); i++) { /* in 5 segments */
            while (seg_world_store(w, i, -1, 0, bytes) == CST_SEG_E_BUSY) {
                for (unsigned k = 0; k < 5; k++)
                    assert_int_equal(seg_world_store(w, i, -1, 0, bytes), CST_SEG_E_BUSY);
                seg_world_settle(w);
            }
        }
        seg_world_settle(w);
        for (unsigned id = 0; id < 4; id++) {
            const struct cst_disk_segment *head;
            uint64_t size;

            (void)snprintf(name, sizeof(name), CST_DISK_SEGMENT_NAME, id);
            head = (const struct cst_disk_segment *)cst_sim_disk_bytes(w->disk, name, &size);
            assert_non_null(head);
            assert_int_equal(cst_load64(&head->fill), 1);
            assert_int_equal(cst_load64(&head->sequence), id + 1);
        }
        seg_world_free(w);
    }
}

/* As many records are on their way at a time where a segment ends as anywhere else: the header and
 * the space of the next one, which wait for all before them, have memory of their own. */
static void test_own_records_take_no_room(void **state) {
    enum { ROOM = 4, RECORD = 16 << 10, WINDOWS = 20 };
    struct seg_world *w = seg_world_new(12, CST_SEG_CRYPT_AES);
    struct cst_seg_stats stats;

    (void)state;
    w->options.buffer_bytes = ROOM * RECORD;
    assert_int_equal(seg_world_start(w), 0);
    seg_world_settle(w);
    for (uint32_t i = 0; i < WINDOWS * ROOM; i++) {
        assert_int_equal(seg_world_store(w, i, -1, 0, RECORD - 1000), 0);
        if (i % ROOM != ROOM - 1)
            continue;
        assert_int_equal(seg_world_store(w, i + 1, -1, 0, RECORD - 1000), CST_SEG_E_BUSY);
        seg_world_settle(w);
    }
    cst_seg_stats(w->seg, &stats);
    assert_int_equal(stats.stored, WINDOWS * ROOM);
    assert_true(stats.segments > WINDOWS * ROOM * RECORD / (256 << 10)); /* which end in windows */
    seg_world_free(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_restart),
        cmocka_unit_test(test_eviction),
        cmocka_unit_test(test_killed_while_refilled),
        cmocka_unit_test(test_parents_first),
        cmocka_unit_test(test_side_data),
        cmocka_unit_test(test_namespaces),
        cmocka_unit_test(test_purge_busy),
        cmocka_unit_test(test_keys_of_empty_segments),
        cmocka_unit_test(test_purge_refused),
        cmocka_unit_test(test_many_namespaces),
        cmocka_unit_test(test_too_many_namespaces),
        cmocka_unit_test(test_admission),
        cmocka_unit_test(test_room_that_comes_back_is_used),
        cmocka_unit_test(test_want_of_memory_is_no_defect),
        cmocka_unit_test(test_want_of_memory_costs_a_segment),
        cmocka_unit_test(test_no_condition_is_a_shortage),
        cmocka_unit_test(test_refused_leaves_no_trace),
        cmocka_unit_test(test_own_records_take_no_room),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
