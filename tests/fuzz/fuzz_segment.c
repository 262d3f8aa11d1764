/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a start of the disk tier reads. A directory is made here once by the engine; an input
 * changes bytes of it: the first byte says whether checksums and tags are made right afterwards (so
 * that what lies behind them is reached) and which segment it is about; then come changes {u8
 * place, u16 offset, u8 length, bytes}, place + PLACES meaning 64 KiB further on. The engine starts
 * on that, reads all that it found, and stops.
 */
#include "tests/fuzz/fuzz.h"

#include "base/crc32c.h"
#include "base/macros.h"
#include "store/seg_core.h"
#include "tests/lib/test_jobs.h"

#include <stdio.h>
#include <string.h>

enum { SEGMENT = 256 << 10, SEGMENTS = 4, FILES = SEGMENTS + 2, RECORDS = 60, FOUND_MAX = 256 };
enum place { PLACE_HEADER, PLACE_RECORDS, PLACE_INDEX, PLACE_FOOTER, PLACE_CHECKPOINT, PLACES };

static struct cst_sim_disk *disk;
static struct cst_aio *aio;
static struct cst_seg *seg;
static struct test_jobs jobs;
static struct cst_manual_clock manual;
static struct cst_seeded_random seeded;
static uint8_t *pristine[FILES];
static uint64_t sizes[FILES];
static char owner[1];

static struct finding {
    uint8_t key[32];
    struct cst_seg_ref ref;
} findings[FOUND_MAX];
static size_t n_findings;

static void file_name(unsigned i, char out[32]) {
    if (i < SEGMENTS)
        (void)snprintf(out, 32, CST_DISK_SEGMENT_NAME, i);
    else
        (void)snprintf(out, 32, "%s",
                       i == SEGMENTS ? CST_DISK_CHECKPOINT_NAME : CST_DISK_SUPER_NAME);
}

static uint8_t *file_bytes(unsigned i, uint64_t *size) {
    char name[32];

    file_name(i, name);
    return cst_sim_disk_bytes(disk, name, size);
}

/* ---- the engine ---- */

static volatile uint32_t seen; /* all bytes are read: sanitizers watch */

static int found(void *arg, const struct cst_seg_record *record, struct cst_seg_ref ref,
                 void **out) {
    uint32_t sum = 0;

    (void)arg;
    for (uint32_t i = 0; i < record->n_tokens; i++)
        sum += record->tokens[i] + (record->surprisals ? record->surprisals[i] : 0);
    for (uint32_t i = 0; i < record->n_side; i++)
        sum += (uint32_t)record->side[i];
    if (record->type == CST_SEG_SIDE)
        sum += (uint32_t)(record->version + record->total_bytes) + record->kind + record->part;
    check(record->type != CST_SEG_SIDE || record->part < record->parts);
    seen = sum;
    if (record->has_parent && record->key[0] & 1)
        return CST_SEG_E_PARENT;
    if (n_findings == FOUND_MAX)
        return CST_SEG_E_GONE;
    memcpy(findings[n_findings].key, record->key, 32);
    findings[n_findings++].ref = ref;
    *out = owner;
    return 0;
}

static void gone(void *arg, void *out, enum cst_seg_gone why) {
    (void)arg;
    (void)out;
    (void)why;
}

static void recovered(void *arg, int status) {
    (void)status;
    *(bool *)arg = true;
}

static void settle(void) {
    for (unsigned idle = 0; idle < 3; idle++) {
        cst_aio_kick(aio);
        if (cst_aio_reap(aio) + test_jobs_drain(&jobs))
            idle = 0;
    }
    check(!cst_seg_busy(seg));
}

static bool start(void) {
    const struct cst_seg_options options = { .bytes = SEGMENTS * SEGMENT,
                                             .segment_bytes = SEGMENT,
                                             .buffer_bytes = 256 << 10,
                                             .lock_ms = 1,
                                             .crypt = CST_SEG_CRYPT_OFF };
    struct cst_seg_env env = { .clock = &manual.clock,
                               .random = &seeded.random,
                               .jobs = &jobs.jobs,
                               .user = { .found = found, .gone = gone } };
    char message[200];
    bool done = false;

    n_findings = 0;
    test_jobs_init(&jobs, true);
    check(!cst_aio_new_sim(&aio, disk));
    env.aio = aio;
    if (cst_seg_open(&seg, &options, &env, message, sizeof(message))) {
        seg = NULL;
        return false;
    }
    cst_seg_recover(seg, recovered, &done);
    settle();
    check(done);
    return true;
}

static void stop(void) {
    seg = cst_seg_free(seg);
    aio = cst_aio_free(aio);
}

static void stored(struct cst_seg_store *store, int status) {
    (void)store;
    check(!status);
}

static void put(struct cst_seg_space *space, uint8_t n, struct cst_seg_ref *parent) {
    uint32_t tokens[32] = { n };
    uint16_t surprisals[32] = { n };
    uint64_t side[2] = { n, 2 };
    uint8_t key[32] = { n }, above[32] = { (uint8_t)(n - 1) }, payload[6000];
    struct cst_seg_store store = { .done = stored,
                                   .record = { .type = CST_SEG_BLOCK,
                                               .space = space,
                                               .key = key,
                                               .parent = above,
                                               .has_parent = n % 10 != 0,
                                               .position = n % 10,
                                               .n_tokens = 16 + n % 17,
                                               .tokens = tokens,
                                               .surprisals = n % 3 ? surprisals : NULL,
                                               .n_side = n % 3,
                                               .side = side,
                                               .payload_bytes = 100 + n * 97U },
                                   .payload = payload,
                                   .owner = owner,
                                   .parent = *parent };

    memset(payload, n, sizeof(payload));
    store.record.payload_crc = cst_crc32c(0, payload, store.record.payload_bytes);
    check(!cst_seg_store(seg, &store));
    settle();
    *parent = store.ref;
}

static void put_side(struct cst_seg_space *space, uint32_t part) {
    uint8_t key[32] = { 0xdd }, payload[3000];
    struct cst_seg_store store = { .done = stored,
                                   .record = { .type = CST_SEG_SIDE,
                                               .space = space,
                                               .key = key,
                                               .payload_bytes = sizeof(payload),
                                               .version = 2,
                                               .total_bytes = 3 * sizeof(payload),
                                               .part = part,
                                               .parts = 3 },
                                   .payload = payload,
                                   .owner = owner };

    memset(payload, (int)part, sizeof(payload));
    store.record.payload_crc = cst_crc32c(0, payload, sizeof(payload));
    check(!cst_seg_store(seg, &store));
    settle();
}

/* One segment closed, one not: a kill. */
static void make(void) {
    struct cst_seg_space *space;
    struct cst_seg_ref parent = CST_SEG_REF_NONE;

    cst_manual_clock_init(&manual, 1);
    cst_seeded_random_init(&seeded, 1);
    check(!cst_sim_disk_new(&disk, 4 << 20, 1) && start());
    check(
        !cst_seg_space_open(seg, "uid-1", CST_KIND_TOKENS, CST_CLASS_LOSSLESS, "canon", 5, &space));
    settle();
    for (uint8_t n = 0; n < RECORDS; n++)
        put(space, n, &parent);
    for (uint32_t part = 0; part < 3; part++)
        put_side(space, part);
    cst_seg_checkpoint_slice(seg);
    check(!seg->draft && !seg->stats.errors);
    (void)cst_seg_space_unref(space);
    stop();
    for (unsigned i = 0; i < FILES; i++) {
        const uint8_t *bytes = file_bytes(i, &sizes[i]);

        pristine[i] = bytes ? room(sizes[i]) : NULL;
        if (pristine[i])
            memcpy(pristine[i], bytes, sizes[i]);
    }
    check(pristine[0] && pristine[1]);
}

static void restore(void) {
    for (unsigned i = 0; i < FILES; i++) {
        uint64_t size = 0;
        uint8_t *bytes = file_bytes(i, &size);

        if (bytes && pristine[i])
            memcpy(bytes, pristine[i], CST_MIN(size, sizes[i]));
    }
}

/* ---- changes ---- */

static uint64_t place_offset(const uint8_t *segment, enum place place) {
    const struct cst_disk_footer *f =
        (const struct cst_disk_footer *)(segment + SEGMENT - CST_DISK_CHUNK);

    return place == PLACE_RECORDS  ? CST_DISK_CHUNK
           : place == PLACE_INDEX  ? cst_chunk_offset(cst_load32(&f->index_chunk) % 64)
           : place == PLACE_FOOTER ? SEGMENT - CST_DISK_CHUNK
                                   : 0;
}

static void change(unsigned which, enum place place, uint32_t offset, const uint8_t *data,
                   size_t n) {
    uint64_t size = 0;
    uint8_t *bytes = file_bytes(place == PLACE_CHECKPOINT ? SEGMENTS : which, &size);
    uint64_t at;

    if (!bytes)
        return;
    at = offset + (place == PLACE_CHECKPOINT ? 0 : place_offset(bytes, place));
    if (at < size)
        memcpy(bytes + at, data, CST_MIN(n, size - at));
}

static void fix_record(uint8_t *at, uint64_t left) {
    struct cst_disk_record *head = (struct cst_disk_record *)at;
    const struct cst_seal seal = { .cipher = CST_DISK_CRC32C };
    uint64_t offset = CST_MIN(cst_load32(&head->payload_offset), left),
             n = CST_MIN(cst_load64(&head->payload_bytes), left - offset),
             meta = CST_MIN(cst_load32(&head->meta_bytes), left - sizeof(*head));

    (void)cst_seal(&seal, 0, (struct cst_seal_aad){ head, 80, head + 1, 32 }, at + offset,
                   at + offset, n, head->payload_tag, NULL);
    (void)cst_seal(&seal, 0, (struct cst_seal_aad){ head, 96, NULL, 0 }, head + 1, head + 1, meta,
                   head->meta_tag, NULL);
    cst_seg_crc_set(head, sizeof(*head));
}

static void fix_index(uint8_t *at, uint64_t left) {
    struct cst_disk_index *head = (struct cst_disk_index *)at;
    const struct cst_seal seal = { .cipher = CST_DISK_CRC32C };
    uint64_t n = CST_MIN(cst_load32(&head->body_bytes), left - sizeof(*head));

    (void)cst_seal(&seal, 0, (struct cst_seal_aad){ head, 48, NULL, 0 }, head + 1, head + 1, n,
                   head->tag, NULL);
    cst_seg_crc_set(head, sizeof(*head));
}

static void fix_segment(unsigned which) {
    uint64_t size = 0;
    uint8_t *bytes = file_bytes(which, &size);

    if (!bytes || size < SEGMENT)
        return;
    cst_seg_crc_set(bytes, sizeof(struct cst_disk_segment));
    for (uint64_t at = CST_DISK_CHUNK; at < SEGMENT; at += CST_DISK_CHUNK) {
        if (cst_load32(bytes + at) == CST_DISK_RECORD_MAGIC)
            fix_record(bytes + at, SEGMENT - at);
        else if (cst_load32(bytes + at) == CST_DISK_INDEX_MAGIC)
            fix_index(bytes + at, SEGMENT - at);
    }
    cst_seg_crc_set(bytes + SEGMENT - CST_DISK_CHUNK, sizeof(struct cst_disk_footer));
}

static void fix_checkpoint(void) {
    uint64_t size = 0;
    uint8_t *bytes = file_bytes(SEGMENTS, &size);
    struct cst_disk_checkpoint *head = (struct cst_disk_checkpoint *)bytes;

    if (!bytes || size < sizeof(*head))
        return;
    cst_store64(&head->body_bytes, size - sizeof(*head));
    cst_store32(&head->body_crc, cst_crc32c(0, head + 1, size - sizeof(*head)));
    cst_seg_crc_set(head, sizeof(*head));
}

static void was_read(struct cst_seg_read *read, int status) {
    uint8_t sum = 0;

    for (uint64_t i = 0; !status && i < read->payload_bytes; i++)
        sum ^= read->payload[i];
    seen = sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static uint8_t buffer[SEGMENT] __attribute__((aligned(CST_AIO_ALIGN)));
    unsigned which;

    if (!disk)
        make();
    if (!size)
        return 0;
    restore();
    which = data[0] >> 1 & 1;
    for (size_t at = 1; at + 4 <= size;) {
        size_t n = CST_MIN((size_t)data[at + 3], size - at - 4);

        change(which, (enum place)(data[at] % PLACES),
               cst_load16(data + at + 1) + (uint32_t)(data[at] / PLACES << 16), data + at + 4, n);
        at += 4 + n;
    }
    if (data[0] & 1) {
        fix_segment(which);
        fix_checkpoint();
    }
    if (start()) {
        for (size_t i = 0; i < n_findings; i++) {
            struct cst_seg_read read = {
                .done = was_read, .ref = findings[i].ref, .key = findings[i].key, .buffer = buffer
            };

            check(cst_seg_read_bytes(seg, read.ref) <= sizeof(buffer));
            cst_seg_read(seg, &read);
            settle();
        }
    }
    stop();
    return 0;
}
