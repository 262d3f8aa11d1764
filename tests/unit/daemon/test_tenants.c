/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who shares with whom: namespaces from credentials, the public namespace, administrators; slabs
 * that have to be given back; events for those who asked.
 */
#include "tests/unit/daemon/serverbox.h"

#include "daemon/peer.h"
#include "daemon/share.h"

#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static struct cst_box box;

static int start(void **state) {
    cst_box_start(&box, NULL);
    return 0;
}

static int stop(void **state) {
    cst_box_settle(&box);
    cst_box_stop(&box);
    return 0;
}

/* ---- rules ---- */

struct rule_row {
    const char *name;
    uid_t uid;
    gid_t gid;
    const char *cgroup;
    const char *expect; /* NULL: refused */
};

static const char rules[] = "[namespace web]\n"
                            "cgroup = /system.slice/web.service\n"
                            "[namespace team]\n"
                            "uid = 1001, 1002\n"
                            "gid = 500\n"
                            "[namespace other]\n"
                            "uid = 1002\n"
                            "gid = 600\n"
                            "cgroup = /user.slice/\n";

static const struct rule_row rule_rows[] = {
    { "no rule: one per uid", 7, 7, "", "uid-7" },
    { "root is a uid like others", 0, 0, "", "uid-0" },
    { "uid rule", 1001, 7, "", "team" },
    { "the first of two uid rules", 1002, 7, "", "team" },
    { "gid rule", 7, 600, "", "other" },
    { "uid before gid", 1001, 600, "", "team" },
    { "cgroup before uid", 1001, 7, "/system.slice/web.service", "web" },
    { "a cgroup below", 7, 7, "/system.slice/web.service/worker", "web" },
    { "not a longer name", 7, 7, "/system.slice/web.service2", "uid-7" },
    { "not an ancestor", 7, 7, "/system.slice", "uid-7" },
    { "a rule that ends with a slash", 7, 7, "/user.slice/a", "other" },
    { "unknown cgroup", 7, 7, "", "uid-7" },
    { "the overflow uid", 65534, 65534, "", NULL },
    { "the overflow uid with a gid rule", 65534, 500, "", NULL },
    { "the overflow uid in a known cgroup", 65534, 65534, "/user.slice/x", "other" },
};

static void check_rule(void **state) {
    const struct rule_row *row = *state;
    static struct cst_config config;
    struct cst_namespace_name name;
    char text[256];
    int r;

    cst_config_defaults(&config);
    assert_int_equal(cst_config_parse(&config, rules, "x", text, sizeof(text)), 0);
    r = cst_peer_match(&config, row->uid, row->gid, row->cgroup, 65534, &name, text, sizeof(text));
    assert_int_equal(r, row->expect ? 0 : CST_PEER_E_REFUSED);
    if (row->expect)
        assert_string_equal(name.text, row->expect);
    else
        assert_non_null(strstr(text, "65534"));
}

static void overflow_rule_without_config(void **state) {
    static struct cst_config config;
    struct cst_namespace_name name;
    char text[256];

    cst_config_defaults(&config);
    assert_int_equal(cst_peer_match(&config, 65534, 65534, "/a", 65534, &name, text, sizeof(text)),
                     CST_PEER_E_REFUSED);
}

/* ---- peers ---- */

static void check_peer(int (*init)(struct cst_peer *peer, int sock)) {
    struct cst_peer peer;
    int pair[2];
    struct pollfd ended;
    pid_t pid;

    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    assert_int_equal(init(&peer, pair[0]), 0);
    assert_int_equal(peer.uid, getuid());
    assert_int_equal(peer.gid, getgid());
    assert_int_equal(peer.pid, getpid());
    ended = (struct pollfd){ .fd = peer.pidfd, .events = POLLIN };
    assert_int_equal(poll(&ended, 1, 0), 0); /* this process lives */
    cst_peer_deinit(&peer);
    cst_peer_deinit(&peer);
    close(pair[0]);
    close(pair[1]);

    /* A socket whose maker has died, passed on by its living child's parent: us. */
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
    pid = fork();
    if (!pid) {
        int inner[2];

        if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, inner))
            _exit(1);
        (void)cst_packet_send_borrowed_fds(pair[1], "x", 1, inner, 1, 0);
        _exit(0);
    }
    {
        int fd;
        size_t n_fds;
        char byte;
        int r;

        assert_int_equal(cst_packet_recv_owned_fds(pair[0], &byte, 1, &fd, 1, &n_fds, 0), 1);
        assert_int_equal(n_fds, 1);
        assert_int_equal(waitpid(pid, NULL, 0), pid);
        r = init(&peer, fd);
        if (!r) { /* newer kernels give a pidfd of a dead process: readable */
            ended = (struct pollfd){ .fd = peer.pidfd, .events = POLLIN };
            assert_int_equal(poll(&ended, 1, 0), 1);
            cst_peer_deinit(&peer);
        } else {
            assert_true(r < 0);
        }
        close(fd);
    }
    close(pair[0]);
    close(pair[1]);
}

static void peers_are_known_by_the_kernel(void **state) {
    check_peer(cst_peer_init);
}

static void peers_are_known_by_pid_and_start_time(void **state) {
    check_peer(cst_peer_init_by_pid);
}

/* ---- two users ---- */

enum { OTHER_UID = 54321, THIRD_UID = 54322 };

/* Runs fn as another uid in a child; its return value is the exit status. */
static int as_uid(uid_t uid, int (*fn)(void)) {
    int status;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (!pid) {
        if (setgid(uid) || setuid(uid))
            _exit(99);
        _exit(fn());
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static uint32_t found(struct cst_raw *raw, uint32_t space, const uint8_t *keys, size_t n) {
    Cistern__V1__Lookup lookup = CISTERN__V1__LOOKUP__INIT;

    lookup.space = space;
    lookup.keys = cst_raw_bytes(keys, 32 * n);
    if (cst_raw_call(raw, CST_MSG_LOOKUP, &lookup.base))
        return UINT32_MAX;
    return ((const Cistern__V1__LookupReply *)raw->reply)->present;
}

static uint32_t known_slab; /* of the first user */

/* Sees nothing of the other user's blocks, slabs, spaces and counters; may not administer. */
static int see_nothing(void) {
    Cistern__V1__SlabGet get = CISTERN__V1__SLAB_GET__INIT;
    Cistern__V1__Spaces spaces = CISTERN__V1__SPACES__INIT;
    Cistern__V1__Stats stats = CISTERN__V1__STATS__INIT;
    Cistern__V1__Status status = CISTERN__V1__STATUS__INIT;
    Cistern__V1__Purge purge = CISTERN__V1__PURGE__INIT;
    struct cst_raw raw;
    uint8_t root[32], keys[2 * 32];
    uint32_t tokens[2 * BOX_TOKENS], space;

    cst_raw_connect(&raw, &box);
    space = cst_raw_open(&raw, 1, CST_KIND_TOKENS, root);
    cst_box_chain(root, 1, 2, keys, tokens);
    if (found(&raw, space, keys, 2) != 0)
        return 1;
    get.slabs = cst_raw_bytes(&known_slab, 4);
    if (cst_raw_call(&raw, CST_MSG_SLAB_GET, &get.base) || raw.n_fds)
        return 2;
    if (cst_raw_call(&raw, CST_MSG_SPACES, &spaces.base) ||
        ((const Cistern__V1__SpacesReply *)raw.reply)->spaces.len !=
            sizeof(struct cst_space_record))
        return 3;
    if (cst_raw_call(&raw, CST_MSG_STATS, &stats.base) ||
        ((const Cistern__V1__StatsReply *)raw.reply)->blocks)
        return 4;
    if (cst_raw_call(&raw, CST_MSG_STATUS, &status.base) != CST_STATUS_DENIED)
        return 5;
    purge.namespace_ = (char *)(uintptr_t) "uid-0";
    if (cst_raw_call(&raw, CST_MSG_PURGE, &purge.base) != CST_STATUS_DENIED)
        return 6;
    cst_raw_close(&raw);
    return 0;
}

static void users_do_not_see_each_other(void **state) {
    Cistern__V1__Acquire acquire = CISTERN__V1__ACQUIRE__INIT;
    struct cst_raw raw;
    struct cst_raw_staging staging;
    const struct cst_lease_record *lease;
    uint8_t root[32], keys[2 * 32];
    uint32_t tokens[2 * BOX_TOKENS], space;
    uint16_t statuses[2];

    cst_raw_connect(&raw, &box);
    space = cst_raw_open(&raw, 1, CST_KIND_TOKENS, root);
    assert_int_equal(cst_raw_staging(&raw, &staging), 0);
    assert_int_equal(cst_raw_put(&raw, space, &staging, root, 1, 2, statuses), 0);
    cst_box_chain(root, 1, 2, keys, tokens);
    acquire.space = space;
    acquire.keys = cst_raw_bytes(keys, 32);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_ACQUIRE, &acquire.base), 0);
    lease = (const void *)((const Cistern__V1__AcquireReply *)raw.reply)->leases.data;
    known_slab = cst_load32(&lease->slab);
    assert_true(known_slab != 0);
    assert_int_equal(as_uid(OTHER_UID, see_nothing), 0);
    assert_int_equal(found(&raw, space, keys, 2), 2);
    cst_raw_staging_unmap(&staging);
    cst_raw_close(&raw);
}

/* ---- numbers that clients see ---- */

/* Another user stores a few blocks, in a new slab. */
static int write_some(void) {
    struct cst_raw raw;
    struct cst_raw_staging staging;
    uint8_t root[32];
    uint16_t statuses[3];
    uint32_t space;

    cst_raw_connect(&raw, &box);
    space = cst_raw_open(&raw, 1, CST_KIND_TOKENS, root);
    if (cst_raw_staging(&raw, &staging) ||
        cst_raw_put(&raw, space, &staging, root, 1000, 3, statuses))
        return 1;
    cst_raw_close(&raw);
    return 0;
}

/* Reserves a block and leaves it open; the slot's id. */
static uint64_t reserve_one(struct cst_raw *raw, uint32_t space, const uint8_t root[32],
                            uint32_t first) {
    Cistern__V1__Reserve reserve = CISTERN__V1__RESERVE__INIT;
    const struct cst_slot_record *slot;
    uint8_t key[32];
    uint32_t tokens[BOX_TOKENS];

    cst_box_chain(root, first, 1, key, tokens);
    reserve.space = space;
    reserve.parent = cst_raw_bytes(root, 32);
    reserve.keys = cst_raw_bytes(key, 32);
    reserve.tokens = cst_raw_bytes(tokens, sizeof(tokens));
    assert_int_equal(cst_raw_call(raw, CST_MSG_RESERVE, &reserve.base), 0);
    slot = (const void *)((const Cistern__V1__ReserveReply *)raw->reply)->slots.data;
    assert_int_equal(cst_load16(&slot->status), 0);
    return cst_load64(&slot->slot);
}

/* The cursor behind the first block after `cursor`. */
static uint64_t cursor_after(struct cst_raw *raw, uint32_t space, uint64_t cursor) {
    Cistern__V1__Blocks blocks = CISTERN__V1__BLOCKS__INIT;

    blocks.space = space;
    blocks.cursor = cursor;
    blocks.max = 1;
    assert_int_equal(cst_raw_call(raw, CST_MSG_BLOCKS, &blocks.base), 0);
    return ((const Cistern__V1__BlocksReply *)raw->reply)->next;
}

/* What a user is told is the same whether others store something in between or not. */
static void numbers_do_not_count_what_others_do(void **state) {
    struct cst_raw raw;
    struct cst_raw_staging staging;
    uint8_t root[32];
    uint16_t statuses[3];
    uint64_t slots[3], cursors[5];
    uint32_t space;

    cst_raw_connect(&raw, &box);
    space = cst_raw_open(&raw, 9, CST_KIND_TOKENS, root);
    assert_int_equal(cst_raw_staging(&raw, &staging), 0);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(cst_raw_put(&raw, space, &staging, root, 100 * i, 1, statuses), 0);
        slots[i] = reserve_one(&raw, space, root, 5000 + 100 * i);
        if (i == 1)
            assert_int_equal(as_uid(OTHER_UID, write_some), 0);
    }
    assert_int_equal(slots[2] - slots[1], slots[1] - slots[0]);
    for (size_t i = 0; i < CST_COUNT(cursors); i++) /* two blocks were made a round */
        cursors[i] = cursor_after(&raw, space, i ? cursors[i - 1] : 0);
    for (size_t i = 2; i < CST_COUNT(cursors); i++)
        assert_int_equal(cursors[i] - cursors[i - 1], cursors[1] - cursors[0]);
    cst_raw_staging_unmap(&staging);
    cst_raw_close(&raw);
}

static void slab_numbers_are_scattered(void **state) {
    uint32_t near = 0;

    for (uint32_t id = 1; id < 5000; id++) {
        uint32_t number = cst_share_number(box.server, id);
        uint32_t step = cst_share_number(box.server, id + 1) - number;

        assert_int_not_equal(number, 0);
        assert_int_equal(cst_share_slab_id(box.server, number), id);
        near += step + 5000 < 10000;
    }
    assert_in_range(near, 0, 10); /* of numbers drawn at random 0.01 are expected */
    for (uint32_t id = UINT32_MAX; id > UINT32_MAX - 5000; id--)
        assert_int_equal(cst_share_slab_id(box.server, cst_share_number(box.server, id)), id);
}

static int is_refused(void) {
    struct cst_raw raw;

    cst_raw_connect(&raw, &box);
    return cst_raw_hello(&raw) != CST_STATUS_DENIED || !strstr(raw.text, "cgroup rule");
}

static void the_overflow_uid_is_refused(void **state) {
    assert_int_equal(as_uid(65534, is_refused), 0);
}

/* An administrator watches another namespace's space, and may erase it, but reads nothing. */
static int put_one(void) {
    struct cst_raw raw;
    struct cst_raw_staging staging;
    uint8_t root[32];
    uint16_t status;
    uint32_t space;

    cst_raw_connect(&raw, &box);
    space = cst_raw_open(&raw, 1, CST_KIND_TOKENS, root);
    return cst_raw_staging(&raw, &staging) ||
           cst_raw_put(&raw, space, &staging, root, 1, 1, &status) || status;
}

static void administrators_watch_and_erase(void **state) {
    Cistern__V1__Spaces spaces = CISTERN__V1__SPACES__INIT;
    Cistern__V1__Stats stats = CISTERN__V1__STATS__INIT;
    Cistern__V1__Purge purge = CISTERN__V1__PURGE__INIT;
    struct cst_space_record record;
    struct cst_raw raw;
    uint8_t root[32] = { 0 };

    assert_int_equal(as_uid(OTHER_UID, put_one), 0);
    cst_raw_connect(&raw, &box);
    assert_int_equal(cst_raw_hello(&raw), 0);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_SPACES, &spaces.base), 0);
    assert_int_equal(((const Cistern__V1__SpacesReply *)raw.reply)->spaces.len, sizeof(record));
    memcpy(&record, ((const Cistern__V1__SpacesReply *)raw.reply)->spaces.data, sizeof(record));
    assert_string_equal(record.namespace_name, "uid-54321");
    stats.space = cst_load32(&record.space);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_STATS, &stats.base), 0);
    assert_int_equal(((const Cistern__V1__StatsReply *)raw.reply)->blocks, 1);
    {
        Cistern__V1__Acquire acquire = CISTERN__V1__ACQUIRE__INIT;
        Cistern__V1__Lookup lookup = CISTERN__V1__LOOKUP__INIT;

        acquire.space = lookup.space = stats.space;
        acquire.keys = cst_raw_bytes(root, 32);
        assert_int_equal(cst_raw_call(&raw, CST_MSG_ACQUIRE, &acquire.base), CST_STATUS_DENIED);
        assert_int_equal(cst_raw_call(&raw, CST_MSG_LOOKUP, &lookup.base), CST_STATUS_DENIED);
    }
    purge.namespace_ = (char *)(uintptr_t) "uid-54321";
    assert_int_equal(cst_raw_call(&raw, CST_MSG_PURGE, &purge.base), 0);
    assert_int_equal(((const Cistern__V1__PurgeReply *)raw.reply)->blocks, 1);
    assert_string_equal(((const Cistern__V1__PurgeReply *)raw.reply)->result, "erased");
    purge.namespace_ = (char *)(uintptr_t) "nobody-has-this";
    assert_int_equal(cst_raw_call(&raw, CST_MSG_PURGE, &purge.base), 0);
    assert_int_equal(((const Cistern__V1__PurgeReply *)raw.reply)->blocks, 0);
    cst_raw_close(&raw);
}

/* ---- the public namespace ---- */

static void with_public(struct cst_config *config) {
    config->public_writers = (struct cst_uids){ .n = 1, .uid = { OTHER_UID } };
}

static uint32_t open_public(struct cst_raw *raw, uint8_t root[32]) {
    Cistern__V1__SpaceOpen open = CISTERN__V1__SPACE_OPEN__INIT;
    uint8_t descriptor[1024];

    (void)cst_raw_open(raw, 1, CST_KIND_TOKENS, root); /* the root does not depend on the scope */
    open.descriptor =
        cst_raw_bytes(descriptor, cst_box_descriptor(descriptor, sizeof(descriptor), 1));
    open.scope = 1;
    assert_int_equal(cst_raw_call(raw, CST_MSG_SPACE_OPEN, &open.base), 0);
    return ((const Cistern__V1__SpaceOpenReply *)raw->reply)->space;
}

static int put_public(void) {
    struct cst_raw raw;
    struct cst_raw_staging staging;
    uint8_t root[32];
    uint16_t statuses[2] = { 0 };
    uint32_t space;
    int status;

    cst_raw_connect(&raw, &box);
    space = open_public(&raw, root);
    status = cst_raw_staging(&raw, &staging);
    if (!status)
        status = cst_raw_put(&raw, space, &staging, root, 1, 2, statuses);
    return status;
}

static int read_public(void) {
    Cistern__V1__Erase erase = CISTERN__V1__ERASE__INIT;
    struct cst_raw raw;
    uint8_t root[32], keys[2 * 32];
    uint32_t tokens[2 * BOX_TOKENS], space;

    cst_raw_connect(&raw, &box);
    space = open_public(&raw, root);
    cst_box_chain(root, 1, 2, keys, tokens);
    if (found(&raw, space, keys, 2) != 2)
        return 1;
    if (found(&raw, 1, keys, 2) != 0) /* the own namespace has nothing of it */
        return 2;
    erase.space = space;
    erase.all = 1;
    return cst_raw_call(&raw, CST_MSG_ERASE, &erase.base) != CST_STATUS_DENIED;
}

static void the_public_namespace_is_read_by_all_and_filled_by_few(void **state) {
    cst_box_start(&box, with_public);
    assert_int_equal(as_uid(THIRD_UID, put_public), CST_STATUS_DENIED);
    assert_int_equal(as_uid(OTHER_UID, put_public), 0);
    assert_int_equal(as_uid(THIRD_UID, read_public), 0);
    (void)stop(NULL);
}

static void with_few_public_spaces(struct cst_config *config) {
    with_public(config);
    config->spaces = 4;
}

static int open_model(struct cst_raw *raw, uint8_t model) {
    Cistern__V1__SpaceOpen open = CISTERN__V1__SPACE_OPEN__INIT;
    uint8_t descriptor[1024];

    open.descriptor =
        cst_raw_bytes(descriptor, cst_box_descriptor(descriptor, sizeof(descriptor), model));
    open.scope = 1;
    return cst_raw_call(raw, CST_MSG_SPACE_OPEN, &open.base);
}

static int open_as_writer(void) {
    struct cst_raw raw;
    int status = 0;

    cst_raw_connect(&raw, &box);
    if (cst_raw_hello(&raw))
        return 99;
    for (uint8_t model = 10; model < 12 && !status; model++)
        status = open_model(&raw, model);
    return status;
}

/* Whoever may only read can't take the places of those who fill it. */
static void readers_leave_public_spaces_to_writers(void **state) {
    struct cst_raw reader;

    cst_box_start(&box, with_few_public_spaces);
    cst_raw_connect(&reader, &box);
    assert_int_equal(cst_raw_hello(&reader), 0);
    assert_int_equal(open_model(&reader, 1), 0);
    assert_int_equal(open_model(&reader, 2), 0);
    assert_int_equal(open_model(&reader, 3), CST_STATUS_QUOTA);
    assert_int_equal(open_model(&reader, 1), 0); /* it is there */
    assert_int_equal(as_uid(OTHER_UID, open_as_writer), 0);
    cst_raw_close(&reader);
    (void)stop(NULL);
}

/* ---- retired slabs ---- */

struct holder {
    struct cst_raw raw;
    uint32_t space, slab;
    uint8_t root[32];
    volatile const uint8_t *map; /* the slab's first page */
};

/* A client that has the descriptor of the slab of the block at token `first`, and no lease. */
static void hold_slab(struct holder *h, uint32_t first) {
    Cistern__V1__Acquire acquire = CISTERN__V1__ACQUIRE__INIT;
    Cistern__V1__Release release = CISTERN__V1__RELEASE__INIT;
    Cistern__V1__SlabGet get = CISTERN__V1__SLAB_GET__INIT;
    const struct cst_lease_record *lease;
    uint64_t id = 1;
    uint8_t key[32];
    uint32_t tokens[BOX_TOKENS];

    cst_raw_connect(&h->raw, &box);
    h->space = cst_raw_open(&h->raw, 1, CST_KIND_TOKENS, h->root);
    cst_box_chain(h->root, first, 1, key, tokens);
    acquire.space = h->space;
    acquire.keys = cst_raw_bytes(key, 32);
    acquire.lease = id;
    assert_int_equal(cst_raw_call(&h->raw, CST_MSG_ACQUIRE, &acquire.base), 0);
    lease = (const void *)((const Cistern__V1__AcquireReply *)h->raw.reply)->leases.data;
    assert_int_equal(cst_load16(&lease->status), 0);
    h->slab = cst_load32(&lease->slab);
    get.slabs = cst_raw_bytes(&h->slab, 4);
    assert_int_equal(cst_raw_call(&h->raw, CST_MSG_SLAB_GET, &get.base), 0);
    assert_int_equal(h->raw.n_fds, 1);
    h->map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, h->raw.fds[0], 0);
    assert_true(h->map != MAP_FAILED);
    release.leases = cst_raw_bytes(&id, 8);
    assert_int_equal(cst_raw_call(&h->raw, CST_MSG_RELEASE, &release.base), 0);
}

static void retire_all(struct cst_server *server, void *arg) {
    uint32_t id = cst_share_slab_id(server, *(uint32_t *)arg);

    cst_share_retire(server, cst_store_slab(server->store, id));
}

static uint64_t held_bytes(void) {
    Cistern__V1__Status status = CISTERN__V1__STATUS__INIT;
    struct cst_raw raw;
    uint64_t n;

    cst_raw_connect(&raw, &box);
    assert_int_equal(cst_raw_hello(&raw), 0);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_STATUS, &status.base), 0);
    n = ((const Cistern__V1__StatusReply *)raw.reply)->held_bytes;
    cst_raw_close(&raw);
    return n;
}

static void drop_slab(struct holder *h) {
    Cistern__V1__SlabDropped dropped = CISTERN__V1__SLAB_DROPPED__INIT;

    dropped.slabs = cst_raw_bytes(&h->slab, 4);
    assert_int_equal(cst_raw_call(&h->raw, CST_MSG_SLAB_DROPPED, &dropped.base), 0);
}

static bool is_alive(struct cst_raw *raw) {
    Cistern__V1__Ping ping = CISTERN__V1__PING__INIT;

    return cst_raw_call(raw, CST_MSG_PING, &ping.base) == CST_STATUS_OK;
}

static void write_one(void) {
    struct cst_raw raw;
    struct cst_raw_staging staging;
    uint8_t root[32];
    uint16_t status;
    uint32_t space;

    cst_raw_connect(&raw, &box);
    space = cst_raw_open(&raw, 1, CST_KIND_TOKENS, root);
    assert_int_equal(cst_raw_staging(&raw, &staging), 0);
    assert_int_equal(cst_raw_put(&raw, space, &staging, root, 1, 1, &status), 0);
    cst_raw_staging_unmap(&staging);
    cst_raw_close(&raw);
}

static void no_patience(struct cst_config *config) {
    config->held_per_uid = 1;
    config->retire_timeout = 30 * CST_NS_PER_MS;
}

/* All holders are asked; who answers stays, who does not and is over quota is ended. */
static void debtors_over_quota_are_ended(void **state) {
    struct holder debtor, honest;
    uint64_t held;

    cst_box_start(&box, no_patience);
    write_one();
    hold_slab(&debtor, 1);
    hold_slab(&honest, 1);
    cst_box_call(&box, retire_all, &debtor.slab);
    (void)cst_raw_wait_push(&debtor.raw);
    (void)cst_raw_wait_push(&honest.raw);
    assert_int_equal(debtor.raw.pushes[0], CST_MSG_SLAB_RETIRE);
    held = held_bytes();
    assert_int_equal(held, 1 << 20); /* the slab once, not once a holder */
    drop_slab(&honest);
    drop_slab(&honest); /* twice is harmless */
    assert_int_equal(held_bytes(), held);
    assert_false(cst_raw_receive(&debtor.raw)); /* ended after the timeout */
    assert_true(is_alive(&honest.raw));
    cst_raw_close(&debtor.raw);
    assert_int_equal(held_bytes(), 0);
    cst_raw_close(&honest.raw);
    (void)stop(NULL);
}

static void impatient_but_rich(struct cst_config *config) {
    config->retire_timeout = 10 * CST_NS_PER_MS;
}

static void debtors_within_quota_stay(void **state) {
    struct holder debtor;

    cst_box_start(&box, impatient_but_rich);
    write_one();
    hold_slab(&debtor, 1);
    cst_box_call(&box, retire_all, &debtor.slab);
    (void)cst_raw_wait_push(&debtor.raw);
    (void)poll(NULL, 0, 60);
    assert_true(is_alive(&debtor.raw));
    cst_raw_close(&debtor.raw);
    (void)stop(NULL);
}

/* The store itself retires the slabs of what is erased; the descriptor stays readable. */
static void erased_slabs_are_asked_for(void **state) {
    Cistern__V1__SlabGet get = CISTERN__V1__SLAB_GET__INIT;
    Cistern__V1__Purge purge = CISTERN__V1__PURGE__INIT;
    const struct cst_slab_record *record;
    struct holder reader;
    uint8_t before;

    write_one();
    hold_slab(&reader, 1);
    assert_int_equal(cst_raw_call(&reader.raw, CST_MSG_PURGE, &purge.base), 0);
    assert_int_equal(((const Cistern__V1__PurgeReply *)reader.raw.reply)->blocks, 1);
    assert_string_equal(((const Cistern__V1__PurgeReply *)reader.raw.reply)->result, "unlinked");
    if (!reader.raw.n_pushes)
        (void)cst_raw_wait_push(&reader.raw);
    assert_int_equal(reader.raw.pushes[0], CST_MSG_SLAB_RETIRE);
    assert_int_equal(held_bytes(), 1 << 20);
    get.slabs = cst_raw_bytes(&reader.slab, 4); /* nobody would be asked to drop it again */
    assert_int_equal(cst_raw_call(&reader.raw, CST_MSG_SLAB_GET, &get.base), 0);
    assert_int_equal(reader.raw.n_fds, 0);
    record = (const void *)((const Cistern__V1__SlabGetReply *)reader.raw.reply)->slabs.data;
    assert_int_equal(cst_load32(&record->status), CST_STATUS_NOT_FOUND);
    before = reader.map[0];
    assert_int_equal(reader.map[4095], before); /* readable still; the block was uniform */
    drop_slab(&reader);
    assert_int_equal(held_bytes(), 0);
    assert_int_equal(cst_raw_call(&reader.raw, CST_MSG_PURGE, &purge.base), 0);
    assert_string_equal(((const Cistern__V1__PurgeReply *)reader.raw.reply)->result, "erased");
    cst_raw_close(&reader.raw);
}

/* ---- events ---- */

static const Cistern__V1__Event *event_of(struct cst_raw *raw, size_t i) {
    const ProtobufCMessage *message;

    assert_int_equal(raw->pushes[i], CST_MSG_EVENT);
    cst_arena_reset(&raw->arena);
    message = cst_message_unpack(&cistern__v1__event__descriptor, raw->push_data[i],
                                 raw->push_len[i], &raw->arena);
    assert_non_null(message);
    return (const void *)message;
}

static void subscribers_see_what_happens_in_order(void **state) {
    Cistern__V1__Subscribe subscribe = CISTERN__V1__SUBSCRIBE__INIT;
    Cistern__V1__Erase erase = CISTERN__V1__ERASE__INIT;
    struct cst_raw raw, writer;
    struct cst_raw_staging staging;
    uint8_t root[32], keys[3 * 32];
    uint32_t tokens[3 * BOX_TOKENS];
    uint16_t statuses[3];
    size_t stored = 0, erased = 0;

    cst_raw_connect(&raw, &box);
    subscribe.space = cst_raw_open(&raw, 1, CST_KIND_TOKENS, root);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_SUBSCRIBE, &subscribe.base), 0);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_SUBSCRIBE, &subscribe.base),
                     0); /* once is enough */
    cst_box_chain(root, 1, 3, keys, tokens);
    cst_raw_connect(&writer, &box);
    erase.space = cst_raw_open(&writer, 1, CST_KIND_TOKENS, root);
    assert_int_equal(cst_raw_staging(&writer, &staging), 0);
    assert_int_equal(cst_raw_put(&writer, erase.space, &staging, root, 1, 3, statuses), 0);
    while (stored < 3) {
        const Cistern__V1__Event *event = event_of(&raw, cst_raw_wait_push(&raw));

        if (event->what == CST_EVENT_STORED) {
            assert_memory_equal(event->keys.data, keys + 32 * stored, event->keys.len);
            stored += event->keys.len / 32;
        }
        assert_int_equal(event->space, subscribe.space);
        assert_int_equal(event->lost, 0);
    }
    erase.keys = cst_raw_bytes(keys, 32); /* takes its subtree along */
    assert_int_equal(cst_raw_call(&writer, CST_MSG_ERASE, &erase.base), 0);
    assert_int_equal(((const Cistern__V1__KeysReply *)writer.reply)->blocks, 3);
    while (erased < 3) {
        const Cistern__V1__Event *event = event_of(&raw, cst_raw_wait_push(&raw));

        if (event->what == CST_EVENT_ERASED || event->what == CST_EVENT_DETACHED)
            erased += event->keys.len / 32;
    }
    cst_raw_staging_unmap(&staging);
    cst_raw_close(&raw);
    cst_raw_close(&writer);
}

int main(void) {
#define T(f) cmocka_unit_test_setup_teardown(f, start, stop)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(overflow_rule_without_config),
        cmocka_unit_test(peers_are_known_by_the_kernel),
        cmocka_unit_test(peers_are_known_by_pid_and_start_time),
        T(numbers_do_not_count_what_others_do),
        T(slab_numbers_are_scattered),
        cmocka_unit_test(debtors_over_quota_are_ended),
        cmocka_unit_test(debtors_within_quota_stay),
        T(erased_slabs_are_asked_for),
        T(subscribers_see_what_happens_in_order),
    };
    const struct CMUnitTest users[] = {
        T(users_do_not_see_each_other),
        T(the_overflow_uid_is_refused),
        T(administrators_watch_and_erase),
        cmocka_unit_test(the_public_namespace_is_read_by_all_and_filled_by_few),
        cmocka_unit_test(readers_leave_public_spaces_to_writers),
    };
    int failed = cst_run_rows(rule_rows, check_rule) + cmocka_run_group_tests(tests, NULL, NULL);

    if (failed || !geteuid())
        return failed + cmocka_run_group_tests(users, NULL, NULL);
    return cst_skip("tests with several users need root; the others passed");
}
