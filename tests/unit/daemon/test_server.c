/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a put and a get through a whole daemon, and what ends with a connection. */
#include "tests/unit/daemon/serverbox.h"

#include "base/crc32c.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct cst_box box;

static int start(void **state) {
    cst_box_start(&box, NULL);
    return 0;
}

static int stop(void **state) {
    cst_box_stop(&box);
    return 0;
}

/* Acquires n keys under lease ids from `lease` on; waits for those that are pending. */
static void acquire(struct cst_raw *raw, uint32_t space, const uint8_t *keys, size_t n,
                    uint64_t lease, struct cst_lease_record *out) {
    Cistern__V1__Acquire acquire = CISTERN__V1__ACQUIRE__INIT;
    const Cistern__V1__AcquireReply *reply;

    acquire.space = space;
    acquire.keys = cst_raw_bytes(keys, n * 32);
    acquire.lease = lease;
    assert_int_equal(cst_raw_call(raw, CST_MSG_ACQUIRE, &acquire.base), 0);
    reply = raw->reply;
    assert_int_equal(reply->leases.len, n * sizeof(*out));
    memcpy(out, reply->leases.data, n * sizeof(*out));
}

static void *map_slab(struct cst_raw *raw, uint32_t id, uint64_t *size) {
    Cistern__V1__SlabGet get = CISTERN__V1__SLAB_GET__INIT;
    const Cistern__V1__SlabGetReply *reply;
    struct cst_slab_record record;
    struct cst_le32 wire;
    void *map;

    cst_store32(&wire, id);
    get.slabs = cst_raw_bytes(&wire, 4);
    assert_int_equal(cst_raw_call(raw, CST_MSG_SLAB_GET, &get.base), 0);
    reply = raw->reply;
    assert_int_equal(reply->slabs.len, sizeof(record));
    memcpy(&record, reply->slabs.data, sizeof(record));
    if (cst_load32(&record.status)) {
        assert_int_equal(raw->n_fds, 0);
        return NULL;
    }
    assert_int_equal(raw->n_fds, 1);
    *size = cst_load64(&record.size);
    assert_true(mmap(NULL, *size, PROT_READ | PROT_WRITE, MAP_SHARED, raw->fds[0], 0) ==
                MAP_FAILED); /* sealed */
    map = mmap(NULL, *size, PROT_READ, MAP_SHARED, raw->fds[0], 0);
    assert_true(map != MAP_FAILED);
    return map;
}

static void check_block(const uint8_t *slab, const struct cst_lease_record *record,
                        const uint8_t key[32]) {
    const uint8_t *data = slab + cst_load64(&record->offset);

    assert_int_equal(cst_load64(&record->length), BOX_BLOCK);
    assert_int_equal(cst_load32(&record->tokens), BOX_TOKENS);
    for (size_t i = 0; i < BOX_BLOCK; i++)
        assert_int_equal(data[i], cst_box_fill(key));
    assert_int_equal(cst_load32(&record->crc32c), cst_crc32c(0, data, BOX_BLOCK));
}

static void second_client_reads_what_the_first_wrote(void **state) {
    enum { N = 5 };
    struct cst_raw writer, reader;
    struct cst_raw_staging staging;
    struct cst_lease_record leases[N + 1];
    uint8_t root[32], keys[(N + 1) * 32];
    uint32_t tokens[(N + 1) * BOX_TOKENS], space;
    uint16_t statuses[N];
    uint64_t size = 0;
    void *slab;

    cst_raw_connect(&writer, &box);
    space = cst_raw_open(&writer, 1, CST_KIND_TOKENS, root);
    assert_int_equal(cst_raw_staging(&writer, &staging), 0);
    assert_int_equal(cst_raw_put(&writer, space, &staging, root, 100, N, statuses), 0);
    for (size_t i = 0; i < N; i++)
        assert_int_equal(statuses[i], CST_STATUS_OK);

    cst_raw_connect(&reader, &box);
    space = cst_raw_open(&reader, 1, CST_KIND_TOKENS, root);
    cst_box_chain(root, 100, N + 1, keys, tokens);
    acquire(&reader, space, keys, N + 1, 7, leases);
    assert_int_equal(cst_load16(&leases[N].status), CST_STATUS_NOT_FOUND);
    slab = map_slab(&reader, cst_load32(&leases[0].slab), &size);
    assert_non_null(slab);
    for (size_t i = 0; i < N; i++) {
        assert_int_equal(cst_load16(&leases[i].status), CST_STATUS_OK);
        assert_int_equal(cst_load64(&leases[i].lease), 7 + i);
        check_block(slab, &leases[i], keys + 32 * i);
    }
    munmap(slab, size);
    cst_raw_staging_unmap(&staging);
    cst_raw_close(&writer);
    cst_raw_close(&reader);
    cst_box_settle(&box);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(second_client_reads_what_the_first_wrote, start, stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
