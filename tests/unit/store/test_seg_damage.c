/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Damage that an operator, a device or an attacker does to files of the disk tier: flipped bits,
 * records that are swapped, stale, cut off or from elsewhere; and what must not lie in the files:
 * plain text, and a nonce that comes twice with one key. CST_LONG=n flips n times
 * 100,000 bits, else a tenth of that.
 */
#include "base/crc32c.h"
#include "base/mem.h"
#include "store/seg_core.h"
#include "tests/unit/store/seg_world.h"

#include "tests/lib/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct seg_world *world(uint64_t seed, enum cst_seg_crypt crypt) {
    struct seg_world *w = seg_world_new(seed, crypt);

    seg_world_key(w);
    return w;
}

static uint8_t *segment_bytes(struct seg_world *w, uint32_t id) {
    char name[32];
    uint64_t size;

    (void)snprintf(name, sizeof(name), CST_DISK_SEGMENT_NAME, id);
    return cst_sim_disk_bytes(w->disk, name, &size);
}

/* Where item n lies. */
static uint8_t *record_bytes(struct seg_world *w, uint32_t n, const struct cst_seg_slot **slot) {
    const struct seg_item *item = &w->items[n];

    *slot = cst_seg_find(w->seg, item->ref, NULL);
    assert_non_null(*slot);
    return segment_bytes(w, item->ref.segment) + cst_chunk_offset((*slot)->chunk);
}

/* ---- bits of a record ---- */

static bool opens(struct seg_world *w, uint32_t n, uint8_t *copy, const uint8_t *bytes,
                  const struct cst_seg_slot *slot) {
    const struct seg_item *item = &w->items[n];
    uint64_t length = cst_chunk_offset(slot->n_chunks);

    memcpy(copy, bytes, length);
    return !cst_seg_record_open(&w->seg->segments[item->ref.segment], copy, length, slot->chunk,
                                item->ref.slot, item->key);
}

/* No flipped bit of header, meta or payload passes; bits of the zeros between are nobody's. */
static void flip(struct seg_world *w, uint32_t n, uint32_t bit, uint8_t *copy) {
    const struct cst_seg_slot *slot;
    uint8_t *bytes = record_bytes(w, n, &slot);
    const struct cst_disk_record *head = (const struct cst_disk_record *)bytes;
    uint32_t at = bit / 8, meta = 128 + cst_load32(&head->meta_bytes),
             payload = cst_load32(&head->payload_offset);
    bool counts = at < meta || (at >= payload && at < payload + cst_load64(&head->payload_bytes));

    bytes[at] ^= (uint8_t)(1U << bit % 8);
    if (opens(w, n, copy, bytes, slot) == counts)
        fail_msg("bit %u of item %u", bit, n);
    bytes[at] ^= (uint8_t)(1U << bit % 8);
}

static void test_bits(void **state) {
    unsigned flips = cst_rounds(100000) / 2;
    uint8_t *copy = cst_malloc(256 << 10);

    (void)state;
    assert_non_null(copy);
    for (unsigned c = 0; c < 2; c++) {
        struct seg_world *w = world(11, c ? CST_SEG_CRYPT_AES : CST_SEG_CRYPT_OFF);

        assert_int_equal(seg_world_start(w), 0);
        seg_world_settle(w);
        assert_int_equal(seg_world_put(w, 0, -1, 0, 3000), 0);
        assert_int_equal(seg_world_put(w, 1, 0, 0, 9000), 0);
        for (uint32_t n = 0; n < 2; n++) {
            const struct cst_seg_slot *slot;
            const uint8_t *bytes = record_bytes(w, n, &slot);

            assert_true(opens(w, n, copy, bytes, slot));
            for (uint32_t bit = 0; bit < 8 * sizeof(struct cst_disk_record); bit++)
                flip(w, n, bit, copy);
            for (unsigned i = 0; i < flips / 2; i++)
                flip(w, n,
                     (uint32_t)(cst_seeded_random_next(&w->random) %
                                (8 * cst_chunk_offset(slot->n_chunks))),
                     copy);
        }
        seg_world_free(w);
    }
    cst_free(copy);
}

/* ---- bits of what a start reads ---- */

static void fill(struct seg_world *w, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; i++) {
        int r = seg_world_put(w, i, i % 6 ? (int)i - 1 : -1, i / 6 % 2, 3000 + 50 * i);

        assert_true(!r || r == CST_SEG_E_PARENT);
    }
}

static uint8_t *file_bytes(struct seg_world *w, unsigned which, uint64_t *size) {
    static const char *const names[] = { CST_DISK_CHECKPOINT_NAME, CST_DISK_KEYS_NAME,
                                         CST_DISK_SUPER_NAME };
    char name[32];

    if (which < 3)
        return cst_sim_disk_bytes(w->disk, names[which], size);
    (void)snprintf(name, sizeof(name), CST_DISK_SEGMENT_NAME, which - 3);
    return cst_sim_disk_bytes(w->disk, name, size);
}

/* Whatever a flip does to a start: refused in a sentence, or right bytes and misses. */
static void test_start_bits(void **state) {
    unsigned flips = cst_rounds(3000);
    size_t n_refused = 0, n_missed = 0;

    (void)state;
    for (unsigned i = 0; i < flips; i++) {
        struct seg_world *w = world(i % 10, i & 1 ? CST_SEG_CRYPT_AES : CST_SEG_CRYPT_OFF);
        uint64_t size = 0, at;
        uint8_t *bytes;

        assert_int_equal(seg_world_start(w), 0);
        seg_world_settle(w);
        fill(w, 0, 40);
        seg_world_stop(w, i & 2);
        bytes = file_bytes(w, i % 6, &size);
        if (bytes && size) {
            /* heads of files and footers and indexes rather than payloads */
            at = cst_seeded_random_next(&w->random) % CST_MIN(size, UINT64_C(640));
            if (i % 6 >= 3 && i % 4 >= 2)
                at = size - 1 - cst_seeded_random_next(&w->random) % 20480;
            bytes[at] ^= (uint8_t)(1U << i % 8);
        }
        if (seg_world_start(w)) {
            n_refused++;
            assert_true(strlen(w->message) > 20);
        } else {
            size_t n = seg_world_read_all(w);

            assert_true(n <= 40);
            n_missed += n < 40;
        }
        seg_world_free(w);
    }
    assert_true(n_refused > 0 && n_missed > 0);
}

/* ---- records in the wrong place ---- */

static void test_misplaced(void **state) {
    (void)state;
    for (unsigned c = 0; c < 2; c++) {
        struct seg_world *w = world(12, c ? CST_SEG_CRYPT_AES : CST_SEG_CRYPT_OFF);
        const struct cst_seg_slot *a, *b;
        uint8_t *x, *y, *saved = cst_malloc(256 << 10);

        assert_non_null(saved);
        assert_int_equal(seg_world_start(w), 0);
        seg_world_settle(w);
        for (uint32_t i = 0; i < 6; i++)
            assert_int_equal(seg_world_put(w, i, -1, i % 2, 9000), 0);
        /* swapped, in one space and across two */
        x = record_bytes(w, 0, &a);
        y = record_bytes(w, 2, &b);
        assert_int_equal(a->n_chunks, b->n_chunks);
        memcpy(saved, x, cst_chunk_offset(a->n_chunks));
        memcpy(x, y, cst_chunk_offset(a->n_chunks));
        memcpy(y, saved, cst_chunk_offset(a->n_chunks));
        assert_int_equal(seg_world_read(w, 0), CST_SEG_E_CORRUPT);
        assert_int_equal(seg_world_read(w, 2), CST_SEG_E_CORRUPT);
        /* one's head with another's payload */
        x = record_bytes(w, 1, &a);
        y = record_bytes(w, 3, &b);
        memcpy(x + 4096, y + 4096, cst_chunk_offset(a->n_chunks - 1));
        assert_int_equal(seg_world_read(w, 1), CST_SEG_E_CORRUPT);
        assert_int_equal(seg_world_read(w, 3), 0);
        /* torn: the last sector is what was there before */
        x = record_bytes(w, 4, &a);
        memset(x + cst_chunk_offset(a->n_chunks) - 4096, 0, 512);
        assert_int_equal(seg_world_read(w, 4), CST_SEG_E_CORRUPT);
        assert_int_equal(seg_world_read(w, 5), 0);
        cst_free(saved);
        seg_world_free(w);
    }
}

/* Records of an earlier fill at the place where the next one would be read from; and of another run
 * with the same fill number, as after a power loss that took the header. */
static void test_stale(void **state) {
    (void)state;
    for (unsigned c = 0; c < 2; c++) {
        struct seg_world *w = world(13, c ? CST_SEG_CRYPT_AES : CST_SEG_CRYPT_OFF);
        uint8_t *saved = cst_malloc(8 * (256 << 10)), *now;
        size_t n_stale = 0;

        assert_non_null(saved);
        assert_int_equal(seg_world_start(w), 0);
        seg_world_settle(w);
        for (uint32_t i = 0; i < 60; i++)
            assert_int_equal(seg_world_put(w, i, -1, 0, 3000), 0);
        for (uint32_t id = 0; id < 8; id++)
            if ((now = segment_bytes(w, id)))
                memcpy(saved + id * (256 << 10), now, 256 << 10);
        for (uint32_t i = 60; i < 500; i++)
            assert_int_equal(seg_world_put(w, i, -1, 0, 3000), 0);
        seg_world_stop(w, false);
        for (uint32_t id = 0; id < 8; id++) {
            uint8_t *old = saved + id * (256 << 10);

            now = segment_bytes(w, id);
            if (!now || !cst_load32(old + 4096))
                continue;
            if (!memcmp(now, old, 4096)) { /* not used again: isn't stale */
                memset(now, 0, 4096);
                continue;
            }
            memcpy(now + 8192, old + 8192,
                   (256 << 10) - 8192); /* all but header and first record */
            n_stale++;
        }
        assert_true(n_stale > 0);
        for (uint32_t i = 0; i < 60; i++)
            w->items[i].begun = false; /* finding one of them fails the test */
        assert_int_equal(seg_world_start(w), 0);
        (void)seg_world_read_all(w);
        cst_free(saved);
        seg_world_free(w);
    }
}

static void test_foreign_run(void **state) {
    struct seg_world *w = world(14, CST_SEG_CRYPT_OFF);
    uint8_t header[4096], *now;

    (void)state;
    assert_int_equal(seg_world_start(w), 0);
    seg_world_settle(w);
    assert_int_equal(seg_world_put(w, 0, -1, 0, 3000), 0);
    assert_int_equal(seg_world_put(w, 1, -1, 0, 3000), 0);
    now = segment_bytes(w, w->items[0].ref.segment);
    memcpy(header, now, sizeof(header));
    ((struct cst_disk_segment *)header)->salt[0] ^= 1; /* another start, the same fill */
    cst_seg_crc_set(header, sizeof(struct cst_disk_segment));
    seg_world_stop(w, false);
    memcpy(now, header, sizeof(header));
    assert_int_equal(seg_world_start(w), 0);
    assert_int_equal(w->n_found, 0);
    seg_world_free(w);
}

/* ---- what must not be on disk ---- */

static bool contains(const uint8_t *data, uint64_t n, const void *what, size_t len) {
    return data && memmem(data, n, what, len);
}

static void test_canary(void **state) {
    (void)state;
    for (unsigned c = 0; c < 2; c++) {
        struct seg_world *w = world(15, c ? CST_SEG_CRYPT_AES : CST_SEG_CRYPT_OFF);
        size_t payloads = 0, tokens = 0, keys = 0;

        assert_int_equal(seg_world_start(w), 0);
        seg_world_settle(w);
        fill(w, 0, 60);
        seg_world_stop(w, true);
        for (unsigned which = 0; which < 11; which++) {
            uint64_t size = 0;
            const uint8_t *bytes = file_bytes(w, which, &size);

            payloads += contains(bytes, size, "canary-in-a-coal", 16);
            for (uint32_t i = 0; i < 60; i++) {
                tokens += contains(bytes, size, w->items[i].tokens, 16);
                keys += contains(bytes, size, w->items[i].key, 32);
            }
        }
        if (c)
            assert_int_equal(payloads + tokens + keys, 0);
        else /* the search finds what is there */
            assert_true(payloads && tokens && keys);
        seg_world_free(w);
    }
}

/* ---- nonces ---- */

enum { SEEN_MAX = 1 << 16 };

struct seen {
    uint64_t start, fill, nonce;
    uint32_t segment;
    uint8_t tag[16];
};

struct nonces {
    struct seen *all;
    size_t n;
};

static void see(struct nonces *s, uint64_t start, uint64_t fill, uint32_t segment, uint64_t nonce,
                const uint8_t tag[16]) {
    uint64_t at = (start ^ fill * 0x9e3779b97f4a7c15U ^ segment * 0xc2b2ae3d27d4eb4fU ^
                   nonce * 0x165667b19e3779f9U) *
                      0xff51afd7ed558ccdU >>
                  48;

    for (;; at = (at + 1) % SEEN_MAX) {
        struct seen *it = &s->all[at];

        if (!it->nonce) {
            *it = (struct seen){ start, fill, nonce, segment, { 0 } };
            memcpy(it->tag, tag, 16);
            assert_true(++s->n < SEEN_MAX / 2);
            return;
        }
        if (it->start == start && it->fill == fill && it->segment == segment &&
            it->nonce == nonce) {
            assert_memory_equal(it->tag, tag, 16); /* the same message again is no repeat */
            return;
        }
    }
}

/* Every message that lies in the segments now. */
static void collect(struct seg_world *w, struct nonces *s) {
    for (uint32_t id = 0; id < 8; id++) {
        const uint8_t *bytes = segment_bytes(w, id);

        for (uint32_t chunk = 1; bytes && chunk < 64; chunk++) {
            const uint8_t *at = bytes + cst_chunk_offset(chunk);
            const struct cst_disk_record *r = (const struct cst_disk_record *)at;
            const struct cst_disk_index *x = (const struct cst_disk_index *)at;

            if (cst_load32(at) == CST_DISK_RECORD_MAGIC && cst_seg_crc_is(r, sizeof(*r))) {
                see(s, cst_load64(&r->start), cst_load64(&r->fill), id, cst_load64(&r->meta_nonce),
                    r->meta_tag);
                see(s, cst_load64(&r->start), cst_load64(&r->fill), id,
                    cst_load64(&r->payload_nonce), r->payload_tag);
            } else if (cst_load32(at) == CST_DISK_INDEX_MAGIC && cst_seg_crc_is(x, sizeof(*x))) {
                see(s, cst_load64(&x->start), cst_load64(&x->fill), id, cst_load64(&x->nonce),
                    x->tag);
            }
        }
    }
}

static void run(struct seg_world *w, struct nonces *s, uint32_t from, uint32_t to) {
    assert_int_equal(seg_world_start(w), 0);
    seg_world_settle(w);
    for (uint32_t i = from; i < to; i++) {
        (void)seg_world_put(w, i, -1, i % 3, 1000 + i % 5 * 9000);
        collect(w, s);
    }
    seg_world_stop(w, to & 1);
    collect(w, s);
}

static void test_nonces(void **state) {
    struct seg_world *w = world(16, CST_SEG_CRYPT_AES);
    struct nonces s = { .all = cst_calloc(SEEN_MAX, sizeof(struct seen)) };
    uint8_t *snapshot = cst_malloc(8 * (256 << 10)), *bytes;

    (void)state;
    assert_non_null(s.all);
    assert_non_null(snapshot);
    run(w, &s, 0, 150); /* several fills of each segment */
    for (uint32_t id = 0; id < 8; id++)
        if ((bytes = segment_bytes(w, id)))
            memcpy(snapshot + id * (256 << 10), bytes, 256 << 10);
    run(w, &s, 150, 251);
    for (uint32_t id = 0; id < 8; id++) /* a backup is put back */
        if ((bytes = segment_bytes(w, id)))
            memcpy(bytes, snapshot + id * (256 << 10), 256 << 10);
    run(w, &s, 251, 400);
    assert_true(s.n > 900);
    cst_free(s.all);
    cst_free(snapshot);
    seg_world_free(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits),        cmocka_unit_test(test_start_bits),
        cmocka_unit_test(test_misplaced),   cmocka_unit_test(test_stale),
        cmocka_unit_test(test_foreign_run), cmocka_unit_test(test_canary),
        cmocka_unit_test(test_nonces),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
