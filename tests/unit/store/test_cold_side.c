/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames that need side data, and the side data, on a disk in memory: over restarts, power cuts at
 * every write, damage, eviction, a tier that is too small, purges. Every block that is found
 * decodes to what it decoded to when it was stored; anything else is a miss.
 */
#include "tests/unit/store/side_lab.h"

/* ---- tests ---- */

static void a_restart_keeps_frames_and_versions(void **state) {
    struct lab l = lab_new(16 << 20);
    struct cst_side_info before[CST_SIDES_MAX], after[CST_SIDES_MAX];

    (void)state;
    assert_int_equal(start(&l), 0);
    fill_lab(&l);
    assert_int_equal(cst_space_sides(l.space, before, CST_SIDES_MAX), 2);
    for (unsigned i = 0; i < 2; i++) {
        stop(&l, true);
        assert_int_equal(start(&l), 0);
        l.space = open_space(&l, "a", CST_CLASS_COLD);
        assert_int_equal(l.space->stats.cold_blocks, BLOCKS);
        assert_int_equal(cst_space_sides(l.space, after, CST_SIDES_MAX), 2);
        for (unsigned k = 0; k < 2; k++) {
            assert_int_equal(after[k].version, before[k].version);
            assert_memory_equal(after[k].hash, before[k].hash, 32);
        }
        assert_int_equal(check_blocks(&l, 0, BLOCKS), BLOCKS);
    }
    lab_end(&l);
}

/* The same with jobs on threads of their own, and reads and writes at once. */
static void jobs_have_threads(void **state) {
    struct thread_jobs threads;
    struct lab l = lab_new(16 << 20);

    (void)state;
    thread_jobs_start(&threads);
    l.threads = &threads;
    assert_int_equal(start(&l), 0);
    fill_lab(&l);
    l = restarted(&l);
    assert_int_equal(l.space->stats.cold_blocks, BLOCKS);
    cst_space_prefetch(l.space, keys, BLOCKS_OLD);
    assert_int_equal(check_blocks(&l, 0, BLOCKS), BLOCKS);
    assert_int_equal(put_weights(&l, l.space, .3F), 0);
    for (unsigned i = 0; i < 10; i++)
        tick(&l, 1);
    lab_end(&l);
    thread_jobs_stop(&threads);
}

/* What a Lookup has read ahead is a frame like others: its side data stay with it. */
static void frames_are_read_ahead(void **state) {
    struct lab l = lab_new(16 << 20);
    unsigned n = 0;

    (void)state;
    assert_int_equal(start(&l), 0);
    fill_lab(&l);
    l = restarted(&l);
    cst_space_prefetch(l.space, keys, BLOCKS_OLD);
    for (unsigned i = 0; i < 5; i++)
        tick(&l, 1);
    for (unsigned i = 0; i < BLOCKS_OLD; i++) {
        const struct cst_block *b = block(&l, i);

        assert_true(!b->packed.slab == !b->side);
        n += b->packed.slab != NULL;
    }
    assert_true(n > 4);
    assert_int_equal(check_blocks(&l, 0, BLOCKS), BLOCKS);
    lab_end(&l);
}

/* A version goes from memory and from disk with the last frame that needs it. */
static void a_version_goes_with_its_last_frame(void **state) {
    struct lab l = lab_new(16 << 20);
    struct cst_side_info info[CST_SIDES_MAX];
    struct cst_seg_stats stats;
    uint64_t n, records;

    (void)state;
    assert_int_equal(start(&l), 0);
    fill_lab(&l);
    l = restarted(&l);
    assert_true(cst_store_disk_stats(l.store, &stats));
    records = stats.records;
    assert_int_equal(cst_space_erase(l.space, keys, &n), 0); /* with all below it */
    assert_int_equal(n, BLOCKS_OLD);
    settle(&l);
    assert_int_equal(cst_space_sides(l.space, info, CST_SIDES_MAX), 1);
    assert_int_equal(info[0].version, 2);
    assert_true(cst_store_disk_stats(l.store, &stats));
    assert_int_equal(stats.records,
                     records - BLOCKS_OLD - cst_side_parts(cst_side_newest(l.space)->side.len));
    assert_int_equal(check_blocks(&l, BLOCKS_OLD, BLOCKS_NEW), BLOCKS_NEW);
    lab_end(&l);
}

/* Power is lost at every write of a clean stop: of side data, of frames, of what closes it. */
static void power_is_lost_at_every_write(void **state) {
    unsigned step = cst_long() ? 1 : 5, most = 0, least = BLOCKS;

    (void)state;
    for (unsigned n = 1;; n += step) {
        struct lab l = lab_new(16 << 20);
        bool off;
        unsigned found;

        l.jobs_first = n & 1;
        assert_int_equal(start(&l), 0);
        fill_lab(&l);
        cst_sim_disk_power_off_at(l.disk, n, (enum cst_sim_loss)(n / step % 3));
        stop(&l, true);
        off = cst_sim_disk_is_off(l.disk);
        cst_sim_disk_power_on(l.disk);
        assert_int_equal(start(&l), 0);
        l.space = open_space(&l, "a", CST_CLASS_COLD);
        found = check_blocks(&l, 0, BLOCKS);
        most = CST_MAX(most, found);
        least = CST_MIN(least, found);
        assert_true(l.space->stats.corrupt_blocks == 0 || off);
        lab_end(&l);
        if (!off)
            break;
    }
    assert_int_equal(most, BLOCKS);
    assert_int_equal(least, 0);
}

/* Turns a byte over in each record of side data with this version; returns how many there were. */
static unsigned spoil(struct lab *l, uint64_t version, unsigned place) {
    unsigned n = 0;

    for (unsigned id = 0; id < l->disk_bytes / SEGMENT; id++) {
        char name[32];
        uint64_t size;
        uint8_t *bytes;

        (void)snprintf(name, sizeof(name), CST_DISK_SEGMENT_NAME, id);
        bytes = cst_sim_disk_bytes(l->disk, name, &size);
        for (uint64_t at = CST_DISK_CHUNK; bytes && at < size; at += CST_DISK_CHUNK) {
            struct cst_disk_record *head = (struct cst_disk_record *)(void *)(bytes + at);
            struct cst_disk_side *side = (struct cst_disk_side *)(void *)(head + 1);

            if (cst_load32(&head->magic) != CST_DISK_RECORD_MAGIC || head->type != CST_DISK_SIDE ||
                cst_load64(&side->version) != version)
                continue;
            bytes[at + (place ? cst_load32(&head->payload_offset) + place : 0)] ^= 1;
            n++;
        }
    }
    return n;
}

static void damaged_side_data_are_misses(void **state) {
    static const unsigned places[] = { 1, 1000, 0 };

    (void)state;
    for (size_t i = 0; i < CST_COUNT(places); i++) {
        struct lab l = lab_new(16 << 20);
        struct cst_side_info info[CST_SIDES_MAX];

        assert_int_equal(start(&l), 0);
        fill_lab(&l);
        stop(&l, true);
        assert_true(spoil(&l, 1, places[i]) > 1);
        assert_int_equal(start(&l), 0);
        l.space = open_space(&l, "a", CST_CLASS_COLD);
        assert_int_equal(check_blocks(&l, 0, BLOCKS_OLD), 0);
        assert_int_equal(check_blocks(&l, BLOCKS_OLD, BLOCKS_NEW), BLOCKS_NEW);
        assert_int_equal(cst_space_sides(l.space, info, CST_SIDES_MAX), 1);
        store_chain(&l, l.space, 100, BLOCKS_OLD, keys); /* anew, beside what is left of it */
        for (unsigned k = 0; k < 10; k++)
            tick(&l, 1);
        l = restarted(&l);
        assert_int_equal(l.space->stats.cold_blocks, BLOCKS);
        lab_end(&l);
    }
}

/* The newest one is lost: its number isn't given to another one. */
static void a_lost_number_is_not_given_again(void **state) {
    struct lab l = lab_new(16 << 20);

    (void)state;
    assert_int_equal(start(&l), 0);
    fill_lab(&l);
    stop(&l, true);
    assert_true(spoil(&l, 2, 1000) > 1);
    assert_int_equal(start(&l), 0);
    l.space = open_space(&l, "a", CST_CLASS_COLD);
    assert_int_equal(cst_side_newest(l.space)->side.version, 1);
    assert_int_equal(put_weights(&l, l.space, .25F), 0);
    assert_int_equal(cst_side_newest(l.space)->side.version, 3);
    assert_int_equal(check_blocks(&l, 0, BLOCKS), BLOCKS_OLD);
    lab_end(&l);
}

/* ---- eviction ---- */

/* n blocks of another space, from the id `first` on. */
static void crowd(struct lab *l, uint32_t first, unsigned n) {
    struct cst_space *exact = open_space(l, "a", CST_CLASS_LOSSLESS);
    uint8_t key[32];

    for (unsigned i = 0; i < n; i++) {
        store_block(l, exact, root, true, first + i, key);
        tick(l, 0);
    }
    (void)cst_space_unref(exact);
}

static void check_nothing_is_lost(const struct lab *l) {
    for (const struct cst_list *it = l->space->sides.next; it != &l->space->sides; it = it->next) {
        const struct cst_side_disk *d =
            cst_container_of((struct cst_list *)(uintptr_t)it, struct cst_side_data, link)->disk;

        assert_true(d && d->n_lost == 0 && d->n_stored == d->n_parts);
    }
}

/* Of a segment that is emptied they are moved, beyond the budget of moves, too. */
static void side_data_are_moved(void **state) {
    struct lab l = lab_new(16 << 20);
    struct cst_seg_stats stats;
    unsigned left;

    (void)state;
    assert_int_equal(start(&l), 0);
    fill_lab(&l);
    l = restarted(&l);
    for (uint32_t id = 0; id < 3; id++) /* with all that the two versions have */
        empty_segment(&l, id);
    assert_true(cst_store_disk_stats(l.store, &stats));
    assert_true(stats.moved >= 3 && stats.evicted > 0);
    check_nothing_is_lost(&l);
    left = (unsigned)l.space->stats.cold_blocks;
    assert_true(left < BLOCKS);
    stop(&l, false); /* as after a kill */
    assert_int_equal(start(&l), 0);
    l.space = open_space(&l, "a", CST_CLASS_COLD);
    assert_true(check_blocks(&l, 0, BLOCKS) >= left);
    lab_end(&l);
}

/* Decoded blocks whose records went serve on as they are: nothing makes a frame of them again. */
static void what_a_lossy_frame_gave_back_is_not_encoded(void **state) {
    struct lab l = lab_new(16 << 20);
    unsigned left;

    (void)state;
    assert_int_equal(start(&l), 0);
    fill_lab(&l);
    l = restarted(&l);
    assert_int_equal(check_blocks(&l, 0, BLOCKS), BLOCKS);
    for (uint32_t id = 0; id < 3; id++)
        empty_segment(&l, id);
    left = (unsigned)l.space->stats.cold_blocks;
    assert_true(left < BLOCKS);
    for (unsigned i = 0; i < 20; i++)
        tick(&l, 1);
    assert_int_equal(l.space->stats.encodes, 0);
    assert_int_equal(check_blocks(&l, 0, BLOCKS), BLOCKS);
    for (unsigned i = 0; i < BLOCKS; i++)
        assert_false(cst_cold_wants_frame(block(&l, i)));
    l = restarted(&l);
    assert_int_equal(check_blocks(&l, 0, BLOCKS), left);
    lab_end(&l);
}

/* Other blocks go through the tier several times: side data are not lost while frames need them. */
static void side_data_outlive_their_segments(void **state) {
    struct lab l = lab_new(4 << 20);
    struct cst_seg_stats stats;
    unsigned found;

    (void)state;
    assert_int_equal(start(&l), 0);
    fill_lab(&l);
    l.memory = 16 << 20;
    l = restarted(&l);
    assert_int_equal(l.space->stats.cold_blocks, BLOCKS);
    for (unsigned round = 0; round < 6; round++) {
        crowd(&l, 10000 + 400 * round, 400);
        (void)check_blocks(&l, 0, 2); /* in use; the others go */
        check_nothing_is_lost(&l);
    }
    assert_true(cst_store_disk_stats(l.store, &stats));
    assert_true(stats.evicted > 100);
    found = (unsigned)l.space->stats.cold_blocks;
    l = restarted(&l);
    assert_true(l.space->stats.cold_blocks >= found && found > 0);
    assert_true(check_blocks(&l, 0, BLOCKS) >= found);
    lab_end(&l);
}

/* Frames whose side data would take more than their share aren't written; others are. */
static void a_tier_that_is_too_small_takes_neither(void **state) {
    struct lab l = lab_new(1 << 20);
    struct cst_space_stats stats;
    struct cst_space *exact;
    uint8_t key[32];

    (void)state;
    assert_int_equal(start(&l), 0);
    fill_lab(&l);
    exact = open_space(&l, "a", CST_CLASS_LOSSLESS);
    store_block(&l, exact, root, true, 1, key);
    (void)cst_space_unref(exact);
    for (unsigned i = 0; i < BLOCKS; i++) { /* nothing of them but the frames */
        struct cst_block *b = block(&l, i);

        if (b->hot.slab) {
            cst_block_drop_hot(b);
            cst_block_settle(b, CST_EVICT_WARM);
        }
    }
    for (unsigned i = 0; i < BLOCKS; i++)
        assert_false(cst_cold_spill(block(&l, i)));
    cst_space_stats(l.space, &stats);
    assert_int_equal(stats.sides_off_disk, 2);
    assert_int_equal(l.n_notes, 2);
    assert_non_null(strstr(l.note, "too small"));
    assert_int_equal(check_blocks(&l, 0, BLOCKS), BLOCKS); /* in memory they are */
    l = restarted(&l);
    assert_int_equal(l.space->stats.cold_blocks, 0);
    exact = open_space(&l, "a", CST_CLASS_LOSSLESS);
    assert_int_equal(exact->stats.cold_blocks, 1);
    (void)cst_space_unref(exact);
    lab_end(&l);
}

/* Version after version: old ones give way with their frames, so that the newest has a place. */
static void old_versions_give_way(void **state) {
    struct lab l = lab_new(4 << 20);

    (void)state;
    assert_int_equal(start(&l), 0);
    fill_lab(&l);
    for (unsigned v = 0; v < 6; v++) {
        uint8_t chain[4 * 32];

        assert_int_equal(put_weights(&l, l.space, .4F + .01F * (float)v), 0);
        store_chain(&l, l.space, 5000 + 10 * v, 4, chain);
        for (unsigned i = 0; i < 5; i++)
            tick(&l, 1);
        assert_int_equal(cst_trie_find(l.space, chain)->side->side.version, 3 + v);
        for (unsigned i = 0; i < 4; i++) {
            for (unsigned k = 0; k < 20 && cst_cold_spill(cst_trie_find(l.space, chain + 32 * i));
                 k++)
                tick(&l, 1);
        }
        for (unsigned k = 0; k < 3 && !cst_block_is_cold(cst_trie_find(l.space, chain + 96)); k++) {
            (void)cst_cold_spill(cst_trie_find(l.space, chain + 96));
            tick(&l, 1);
        }
        assert_true(cst_block_is_cold(cst_trie_find(l.space, chain + 96)));
        assert_true(l.store->cold->side_bytes <= (4 << 20) / 4);
    }
    lab_end(&l);
}

/* ---- frames ---- */

static void a_frame_that_was_never_in_memory_has_its_error(void **state) {
    struct lab l = lab_new(16 << 20);
    struct cst_frame frame = { .length = 1000, .preset = CST_PRESET_TURBOQUANT, .error = .125F };
    struct cst_block *b;
    uint8_t key[32];

    (void)state;
    assert_int_equal(start(&l), 0);
    l.space = open_space(&l, "a", CST_CLASS_COLD);
    store_chain(&l, l.space, 100, 1, key);
    b = cst_trie_find(l.space, key);
    frame.data = cst_calloc(frame.length, 1);
    frame.crc = cst_crc32c(0, frame.data, frame.length);
    assert_int_equal(cst_cold_spill_frame(b, &frame), 0);
    settle(&l);
    assert_true(cst_block_is_cold(b) && !b->packed.slab);
    assert_true(b->error == .125F);
    lab_end(&l);
}

static void nothing(struct cst_seg_store *store, int status) {
    assert_int_equal(status, 0);
}

/* Records that say of their frames what no frame can be: they are as none. */
static void frames_that_can_not_be_are_not_found(void **state) {
    static const struct {
        uint64_t bytes;
        uint8_t preset;
        bool found;
    } rows[] = {
        { 1000, CST_PRESET_TURBOQUANT, true },
        { BLOCK, CST_PRESET_NONE, true },
        { 1000, CST_PRESETS, false },
        { BLOCK - 1, CST_PRESET_NONE, false },
        { BLOCK + 4096, CST_PRESET_TURBOQUANT, false },
    };
    static const uint8_t bytes[BLOCK + 4096];
    struct lab l = lab_new(16 << 20);
    uint32_t tokens[TOKENS] = { 1 };
    uint8_t own[32], key[CST_COUNT(rows)][32];

    (void)state;
    assert_int_equal(start(&l), 0);
    l.space = open_space(&l, "a", CST_CLASS_COLD);
    store_chain(&l, l.space, 100, 1, own);
    for (uint32_t i = 0; i < CST_COUNT(rows); i++) {
        struct cst_seg_store s = {
            .done = nothing,
            .payload = bytes,
            .owner = cst_trie_find(l.space, own),
            .record = { .type = CST_SEG_BLOCK,
                        .space = l.space->disk,
                        .key = key[i],
                        .parent = root,
                        .n_tokens = TOKENS,
                        .tokens = tokens,
                        .payload_bytes = rows[i].bytes,
                        .payload_crc = cst_crc32c(0, bytes, rows[i].bytes),
                        .preset = rows[i].preset },
        };

        memset(key[i], (int)i + 1, sizeof(key[i]));
        assert_int_equal(cst_seg_store(l.store->cold->seg, &s), 0);
        settle(&l);
    }
    stop(&l, false);
    assert_int_equal(start(&l), 0);
    l.space = open_space(&l, "a", CST_CLASS_COLD);
    for (uint32_t i = 0; i < CST_COUNT(rows); i++)
        assert_int_equal(cst_trie_find(l.space, key[i]) != NULL, rows[i].found);
    lab_end(&l);
}

/* ---- purges ---- */

static bool disk_has(struct lab *l, const uint8_t *needle, size_t n) {
    for (unsigned id = 0; id < l->disk_bytes / SEGMENT; id++) {
        char name[32];
        uint64_t size;
        const uint8_t *bytes;

        (void)snprintf(name, sizeof(name), CST_DISK_SEGMENT_NAME, id);
        bytes = cst_sim_disk_bytes(l->disk, name, &size);
        if (bytes && memmem(bytes, size, needle, n))
            return true;
    }
    return false;
}

static void a_purge_forgets_what_was_learned(void **state) {
    struct lab l = lab_new(16 << 20);
    struct cst_side_info info[CST_SIDES_MAX];
    uint8_t canary[64], chain[BLOCKS_OLD * 32];
    enum cst_purge result;

    (void)state;
    assert_int_equal(start(&l), 0);
    fill_lab(&l);
    l = restarted(&l);
    memcpy(canary, cst_side_newest(l.space)->bytes + 4096, sizeof(canary));
    assert_true(disk_has(&l, canary, sizeof(canary)));
    assert_int_equal(cst_namespace_purge(cst_space_namespace(l.space), &result), BLOCKS);
    settle(&l);
    tick(&l, 1);
    assert_int_equal(cst_space_sides(l.space, info, CST_SIDES_MAX), 0);
    assert_int_equal(l.space->stats.side_bytes, 0);
    assert_int_equal(l.store->cold->side_bytes, 0);
    assert_false(disk_has(&l, canary, sizeof(canary)));
    store_chain(&l, l.space, 200, BLOCKS_OLD, chain); /* other prompts */
    for (unsigned i = 0; i < 100 && !cst_side_newest(l.space); i++)
        tick(&l, 10);
    assert_int_equal(cst_side_newest(l.space)->side.version, 3); /* no number comes twice */
    stop(&l, false);
    assert_int_equal(start(&l), 0);
    l.space = open_space(&l, "a", CST_CLASS_COLD);
    assert_int_equal(check_blocks(&l, 0, BLOCKS), 0);
    lab_end(&l);
}

/* What is being learned, or weighed, when the purge comes is forgotten, too; and so is what is on
 * its way to disk. */
static void a_purge_forgets_what_is_being_made(void **state) {
    struct lab l = lab_new(16 << 20);
    struct one_side p = { .put.done = side_told, .status = -1 };
    const float weights[2] = { .5F, .5F };
    struct cst_side_info info[CST_SIDES_MAX];
    enum cst_purge result;

    (void)state;
    assert_int_equal(start(&l), 0);
    l.space = open_space(&l, "a", CST_CLASS_COLD);
    for (unsigned ticks = 1; ticks < 5; ticks++) { /* gathering, or it has run and isn't done */
        l.clock.ns += 120 * CST_NS_PER_S;
        store_chain(&l, l.space, 100, BLOCKS_OLD, keys);
        for (unsigned i = 0; i < ticks; i++)
            (void)cst_store_tick(l.store);
        assert_non_null(l.store->learning);
        (void)cst_namespace_purge(cst_space_namespace(l.space), &result);
        settle(&l);
        assert_null(l.store->learning);
        assert_int_equal(cst_space_sides(l.space, info, CST_SIDES_MAX), 0);
    }
    assert_int_equal(l.space->stats.sides_learned, 0);
    l.clock.ns += 120 * CST_NS_PER_S;
    fill_lab(&l);
    assert_int_equal(cst_space_side_put(l.space, CST_SIDE_PUT_WEIGHTS, (const uint8_t *)weights,
                                        sizeof(weights), &p.put),
                     0);
    for (unsigned i = 0; i < BLOCKS; i++)
        (void)cst_cold_spill(block(&l, i));
    assert_true(l.space->spills > 0);
    (void)cst_namespace_purge(cst_space_namespace(l.space), &result);
    settle(&l);
    assert_int_equal(p.status, CST_STORE_E_BUSY);
    for (unsigned i = 0; i < 3; i++)
        tick(&l, 1);
    assert_int_equal(cst_space_sides(l.space, info, CST_SIDES_MAX), 0);
    assert_int_equal(l.space->stats.side_bytes, 0);
    assert_int_equal(l.space->stats.cold_blocks, 0);
    stop(&l, false);
    assert_int_equal(start(&l), 0);
    l.space = open_space(&l, "a", CST_CLASS_COLD);
    assert_int_equal(check_blocks(&l, 0, BLOCKS), 0);
    lab_end(&l);
}

/* Memory that fails during recovery costs hits. */
static void memory_fails_in_recovery(void **state) {
    (void)state;
    for (uint64_t n = 1, last = 0; !last; n += cst_long() ? 1 : 23) {
        struct lab l = lab_new(16 << 20);

        assert_int_equal(start(&l), 0);
        fill_lab(&l);
        stop(&l, true);
        l.fail_at = n;
        (void)start(&l);
        last = l.n_allocated < n;
        l.space = open_space(&l, "a", CST_CLASS_COLD);
        assert_true(check_blocks(&l, 0, BLOCKS) == BLOCKS || !last);
        lab_end(&l);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_restart_keeps_frames_and_versions),
        cmocka_unit_test(jobs_have_threads),
        cmocka_unit_test(frames_are_read_ahead),
        cmocka_unit_test(a_version_goes_with_its_last_frame),
        cmocka_unit_test(damaged_side_data_are_misses),
        cmocka_unit_test(a_lost_number_is_not_given_again),
        cmocka_unit_test(side_data_are_moved),
        cmocka_unit_test(what_a_lossy_frame_gave_back_is_not_encoded),
        cmocka_unit_test(side_data_outlive_their_segments),
        cmocka_unit_test(a_tier_that_is_too_small_takes_neither),
        cmocka_unit_test(old_versions_give_way),
        cmocka_unit_test(a_frame_that_was_never_in_memory_has_its_error),
        cmocka_unit_test(frames_that_can_not_be_are_not_found),
        cmocka_unit_test(a_purge_forgets_what_was_learned),
        cmocka_unit_test(a_purge_forgets_what_is_being_made),
        cmocka_unit_test(power_is_lost_at_every_write),
        cmocka_unit_test(memory_fails_in_recovery),
    };

    reference();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
