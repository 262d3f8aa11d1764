/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How sessions begin and end: limits, processes that die with and without a child that keeps the
 * socket, commits under way, clients that never read, a clean stop.
 */
#include "tests/unit/daemon/serverbox.h"

#include "daemon/session.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
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

/* ---- what is held ---- */

struct held {
    uint64_t sessions, leases, slots, staging, shares, requests;
};

static void count_held(struct cst_server *server, void *arg) {
    *(struct held *)arg = (struct held){ .sessions = server->n_sessions,
                                         .leases = server->total.used[CST_RES_LEASES],
                                         .slots = server->total.used[CST_RES_SLOTS],
                                         .staging = server->total.used[CST_RES_STAGING],
                                         .shares = server->total.used[CST_RES_HOLDS],
                                         .requests = server->total.used[CST_RES_REQUESTS] };
}

static struct held held(void) {
    struct held h;

    cst_box_call(&box, count_held, &h);
    return h;
}

static void check_nothing_held(void) {
    struct held h;

    cst_box_settle(&box);
    h = held();
    assert_memory_equal(&h, &(struct held){ 0 }, sizeof(h));
}

/* ---- workers that wait ---- */

struct gate {
    struct cst_job jobs[2];
    sem_t open, closed;
    int running;
};
static struct gate gate;

static void wait_at_gate(struct cst_job *job) {
    (void)sem_post(&gate.closed);
    while (sem_wait(&gate.open))
        ;
}

static void leave_gate(struct cst_job *job) {
    gate.running--;
}

static void send_to_gate(struct cst_server *server, void *arg) {
    struct cst_jobs *jobs = cst_workers_jobs(server->workers);

    for (size_t i = 0; i < CST_COUNT(gate.jobs); i++) {
        gate.jobs[i] = (struct cst_job){ .run = wait_at_gate, .done = leave_gate };
        gate.running++;
        jobs->submit(jobs, &gate.jobs[i], CST_JOB_FETCH);
    }
}

/* All workers of the box are held: what needs one stays under way. */
static void close_gate(void) {
    (void)sem_init(&gate.open, 0, 0);
    (void)sem_init(&gate.closed, 0, 0);
    cst_box_call(&box, send_to_gate, NULL);
    for (size_t i = 0; i < CST_COUNT(gate.jobs); i++)
        while (sem_wait(&gate.closed))
            ;
}

static void count_gate(struct cst_server *server, void *arg) {
    *(int *)arg = gate.running;
}

static void open_gate(void) {
    int running = 1;

    for (size_t i = 0; i < CST_COUNT(gate.jobs); i++)
        (void)sem_post(&gate.open);
    while (running)
        cst_box_call(&box, count_gate, &running);
}

/* ---- a client with one of everything ---- */

struct owner {
    struct cst_raw raw;
    struct cst_raw_staging staging;
    uint32_t space;
    uint8_t root[32];
    uint64_t slot; /* open */
};

static void own_everything(struct owner *o, uint32_t first) {
    Cistern__V1__Acquire acquire = CISTERN__V1__ACQUIRE__INIT;
    Cistern__V1__Reserve reserve = CISTERN__V1__RESERVE__INIT;
    Cistern__V1__SlabGet get = CISTERN__V1__SLAB_GET__INIT;
    Cistern__V1__Subscribe subscribe = CISTERN__V1__SUBSCRIBE__INIT;
    const struct cst_lease_record *lease;
    struct cst_le32 slab;
    uint8_t keys[2 * 32];
    uint32_t tokens[2 * BOX_TOKENS];
    uint16_t status;

    cst_raw_connect(&o->raw, &box);
    o->space = cst_raw_open(&o->raw, 1, CST_KIND_TOKENS, o->root);
    assert_int_equal(cst_raw_staging(&o->raw, &o->staging), 0);
    assert_int_equal(cst_raw_put(&o->raw, o->space, &o->staging, o->root, first, 1, &status), 0);
    assert_true(status == CST_STATUS_OK || status == CST_STATUS_PRESENT);
    cst_box_chain(o->root, first, 2, keys, tokens);
    acquire.space = reserve.space = subscribe.space = o->space;
    acquire.keys = cst_raw_bytes(keys, 32);
    acquire.lease = 1;
    assert_int_equal(cst_raw_call(&o->raw, CST_MSG_ACQUIRE, &acquire.base), 0);
    lease = (const void *)((const Cistern__V1__AcquireReply *)o->raw.reply)->leases.data;
    assert_int_equal(cst_load16(&lease->status), CST_STATUS_OK);
    slab = lease->slab;
    get.slabs = cst_raw_bytes(&slab, 4);
    assert_int_equal(cst_raw_call(&o->raw, CST_MSG_SLAB_GET, &get.base), 0);
    assert_int_equal(o->raw.n_fds, 1);
    assert_int_equal(cst_raw_call(&o->raw, CST_MSG_SUBSCRIBE, &subscribe.base), 0);
    reserve.parent = cst_raw_bytes(keys, 32);
    reserve.keys = cst_raw_bytes(keys + 32, 32);
    reserve.tokens = cst_raw_bytes(tokens + BOX_TOKENS, 4 * BOX_TOKENS);
    assert_int_equal(cst_raw_call(&o->raw, CST_MSG_RESERVE, &reserve.base), 0);
    memcpy(&o->slot, ((const Cistern__V1__ReserveReply *)o->raw.reply)->slots.data + 8, 8);
    assert_true(o->slot != 0);
}

static void send_commit(struct owner *o) {
    Cistern__V1__Commit commit = CISTERN__V1__COMMIT__INIT;

    commit.slots = cst_raw_bytes(&o->slot, 8);
    cst_raw_send(&o->raw, CST_MSG_COMMIT, &commit.base);
}

static void leave(struct owner *o) {
    cst_raw_staging_unmap(&o->staging);
    cst_raw_close(&o->raw);
}

static void closing_the_socket_gives_all_back(void **state) {
    static struct owner o;
    struct held h;

    own_everything(&o, 1);
    h = held();
    assert_int_equal(h.leases, 1);
    assert_int_equal(h.slots, 1);
    assert_int_equal(h.shares, 1);
    assert_true(h.staging >= o.staging.size);
    leave(&o);
    check_nothing_held();
}

/* ---- processes ---- */

/* Runs fn in a child and returns its pid; the child says when it is ready, then waits. */
static pid_t spawn(void (*fn)(uint32_t first), uint32_t first) {
    int ready[2];
    char byte;
    pid_t pid;

    assert_int_equal(pipe(ready), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (!pid) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        fn(first);
        (void)!write(ready[1], "r", 1);
        for (;;)
            pause();
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    return pid;
}

static void own_in_child(uint32_t first) {
    static struct owner o;

    own_everything(&o, first);
}

static pid_t *heir; /* shared memory: the grandchild that keeps the socket */

static void own_and_fork(uint32_t first) {
    static struct owner o;
    pid_t pid;

    own_everything(&o, first);
    pid = fork();
    if (!pid)
        for (;;)
            pause();
    *heir = pid;
}

static void a_killed_process_holds_nothing(void **state) {
    pid_t pid = spawn(own_in_child, 1);

    assert_int_equal(held().slots, 1);
    assert_int_equal(kill(pid, SIGKILL), 0);
    check_nothing_held(); /* before it is even reaped */
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

/* The socket stays open in the grandchild: only the pidfd tells. */
static void a_forked_child_does_not_inherit_the_leases(void **state) {
    pid_t pid;

    heir = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(heir != MAP_FAILED);
    pid = spawn(own_and_fork, 1);
    assert_int_equal(held().leases, 1);
    assert_int_equal(kill(pid, SIGKILL), 0);
    check_nothing_held();
    assert_true(*heir > 0);
    assert_int_equal(kill(*heir, 0), 0); /* it lives, and so does its socket */
    assert_int_equal(kill(*heir, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    (void)munmap(heir, 4096);
}

/* ---- commits under way ---- */

static void a_commit_outlives_its_client(void **state) {
    Cistern__V1__Lookup lookup = CISTERN__V1__LOOKUP__INIT;
    static struct owner o;
    struct cst_raw reader;
    uint8_t keys[2 * 32];
    uint32_t tokens[2 * BOX_TOKENS];
    struct held h;

    own_everything(&o, 1);
    memset(o.staging.base, 7, o.staging.lists);
    close_gate();
    send_commit(&o);
    cst_box_chain(o.root, 1, 2, keys, tokens);
    leave(&o);
    do
        h = held();
    while (h.leases); /* the session has ended: leases are gone, the slot under way is not */
    assert_int_equal(h.slots, 1);
    assert_true(h.staging > 0);
    open_gate();
    check_nothing_held();
    cst_raw_connect(&reader, &box);
    lookup.space = cst_raw_open(&reader, 1, CST_KIND_TOKENS, NULL);
    lookup.keys = cst_raw_bytes(keys, sizeof(keys));
    assert_int_equal(cst_raw_call(&reader, CST_MSG_LOOKUP, &lookup.base), 0);
    assert_int_equal(((const Cistern__V1__LookupReply *)reader.reply)->present, 2);
    cst_raw_close(&reader);
}

static void few_requests(struct cst_config *config) {
    config->requests = 1;
}

static void unanswered_requests_are_limited(void **state) {
    static struct owner o;

    cst_box_start(&box, few_requests);
    own_everything(&o, 1);
    close_gate();
    send_commit(&o);
    send_commit(&o); /* the first one is not answered yet */
    assert_true(cst_raw_receive(&o.raw));
    assert_int_equal(cst_packet_error(&o.raw.packet, o.raw.text, sizeof(o.raw.text)),
                     CST_STATUS_BUSY);
    assert_int_equal(o.raw.packet.request, o.raw.request);
    open_gate();
    do
        assert_true(cst_raw_receive(&o.raw));
    while (o.raw.packet.flags & CST_PACKET_PUSH);
    assert_int_equal(o.raw.packet.request, o.raw.request - 1);
    assert_int_equal(o.raw.packet.flags, CST_PACKET_REPLY);
    leave(&o);
    check_nothing_held();
    cst_box_stop(&box);
}

/* ---- limits of connections ---- */

static void few_connections(struct cst_config *config) {
    config->connections_per_uid = 3;
}

static void connections_are_limited(void **state) {
    struct cst_raw raw[4];

    cst_box_start(&box, few_connections);
    for (int i = 0; i < 4; i++)
        cst_raw_connect(&raw[i], &box);
    for (int i = 0; i < 3; i++)
        assert_int_equal(cst_raw_hello(&raw[i]), 0);
    assert_int_equal(cst_raw_hello(&raw[3]), CST_STATUS_BUSY);
    assert_string_equal(raw[3].text, "too many connections");
    assert_int_equal(cst_raw_hello(&raw[3]), -1); /* and it ends */
    cst_raw_close(&raw[3]);
    cst_raw_close(&raw[0]);
    for (int status = CST_STATUS_BUSY; status == CST_STATUS_BUSY;) { /* until it was noticed */
        cst_raw_connect(&raw[0], &box);
        status = cst_raw_hello(&raw[0]);
        if (status)
            cst_raw_close(&raw[0]);
    }
    for (int i = 0; i < 3; i++)
        cst_raw_close(&raw[i]);
    check_nothing_held();
    cst_box_stop(&box);
}

static void short_hello(struct cst_config *config) {
    config->hello_timeout = 20 * CST_NS_PER_MS;
}

static void who_never_says_hello_is_disconnected(void **state) {
    struct cst_raw raw;

    cst_box_start(&box, short_hello);
    cst_raw_connect(&raw, &box);
    assert_false(cst_raw_receive(&raw));
    cst_raw_close(&raw);
    check_nothing_held();
    cst_box_stop(&box);
}

static void who_said_hello_may_be_silent(void **state) {
    Cistern__V1__Ping ping = CISTERN__V1__PING__INIT;
    struct cst_raw raw;

    cst_box_start(&box, short_hello);
    cst_raw_connect(&raw, &box);
    assert_int_equal(cst_raw_hello(&raw), 0);
    (void)poll(NULL, 0, 60);
    assert_int_equal(cst_raw_call(&raw, CST_MSG_PING, &ping.base), 0);
    cst_raw_close(&raw);
    check_nothing_held();
    cst_box_stop(&box);
}

/* ---- clients that do not read ---- */

static void short_send(struct cst_config *config) {
    config->send_timeout = 100 * CST_NS_PER_MS;
}

static void largest_output(struct cst_server *server, void *arg) {
    *(uint64_t *)arg = server->total.used[CST_RES_OUTPUT];
}

/* Floods pings of 60 KB and reads nothing; a second client is served all the while. */
static void a_client_that_never_reads_is_ended(void **state) {
    static uint8_t payload[60000];
    Cistern__V1__Ping big = CISTERN__V1__PING__INIT, small = CISTERN__V1__PING__INIT;
    struct cst_raw deaf, other;
    uint64_t queued = 0, most = 0;
    size_t n;
    ssize_t sent;

    cst_box_start(&box, short_send);
    cst_raw_connect(&deaf, &box);
    cst_raw_connect(&other, &box);
    assert_int_equal(cst_raw_hello(&deaf), 0);
    assert_int_equal(cst_raw_hello(&other), 0);
    big.payload = cst_raw_bytes(payload, sizeof(payload));
    n = cst_packet_pack(deaf.out, CST_PACKET_MAX, CST_MSG_PING, 0, 1, &big.base);
    do { /* until the daemon has hung up */
        sent = send(deaf.fd, deaf.out, n, MSG_DONTWAIT | MSG_NOSIGNAL);
        assert_int_equal(cst_raw_call(&other, CST_MSG_PING, &small.base), 0);
        cst_box_call(&box, largest_output, &queued);
        most = CST_MAX(most, queued);
    } while (sent > 0 || errno == EAGAIN);
    assert_true(errno == EPIPE || errno == ECONNRESET);
    assert_true(most > 0 && most <= CST_OUTPUT_MAX);
    assert_int_equal(cst_raw_call(&other, CST_MSG_PING, &small.base), 0);
    cst_raw_close(&deaf);
    cst_raw_close(&other);
    check_nothing_held();
    cst_box_stop(&box);
}

/* What was queued arrives, in order, once the client reads. */
static void a_late_reader_gets_everything(void **state) {
    enum { N = 12 };
    static uint8_t payload[40000];
    Cistern__V1__Ping big = CISTERN__V1__PING__INIT;
    struct cst_raw raw;
    uint32_t sent = 0, seen = 1;

    cst_raw_connect(&raw, &box);
    assert_int_equal(cst_raw_hello(&raw), 0);
    big.payload = cst_raw_bytes(payload, sizeof(payload));
    while (sent < N) { /* reads only when the daemon takes no more */
        size_t n = cst_packet_pack(raw.out, CST_PACKET_MAX, CST_MSG_PING, 0, sent + 2, &big.base);

        if (send(raw.fd, raw.out, n, MSG_DONTWAIT) > 0) {
            sent++;
        } else {
            assert_true(cst_raw_receive(&raw));
            assert_int_equal(raw.packet.request, ++seen);
        }
    }
    while (seen < N + 1) {
        assert_true(cst_raw_receive(&raw));
        assert_int_equal(raw.packet.request, ++seen);
        assert_true(raw.packet.length > sizeof(payload));
    }
    cst_raw_close(&raw);
    check_nothing_held();
}

/* ---- a clean stop ---- */

static void *stop_box(void *arg) {
    cst_box_stop(&box);
    return NULL;
}

/* Goodbye comes at once, the commit under way is answered, then the connection ends. */
static void a_stop_finishes_commits_and_says_goodbye(void **state) {
    Cistern__V1__Stats stats = CISTERN__V1__STATS__INIT;
    static struct owner o;
    pthread_t thread;
    bool goodbye = false, answered = false;
    uint32_t request;

    cst_box_start(&box, NULL);
    own_everything(&o, 1);
    close_gate();
    send_commit(&o);
    request = o.raw.request;
    (void)held(); /* the commit was read */
    assert_int_equal(pthread_create(&thread, NULL, stop_box, NULL), 0);
    while (!goodbye) {
        assert_true(cst_raw_receive(&o.raw));
        goodbye = o.raw.packet.type == CST_MSG_GOODBYE;
    }
    assert_int_equal(cst_raw_call(&o.raw, CST_MSG_STATS, &stats.base), CST_STATUS_DRAINING);
    for (size_t i = 0; i < CST_COUNT(gate.jobs); i++)
        (void)sem_post(&gate.open);
    while (cst_raw_receive(&o.raw))
        answered |= o.raw.packet.request == request && o.raw.packet.flags == CST_PACKET_REPLY;
    assert_true(answered);
    assert_int_equal(pthread_join(thread, NULL), 0);
    leave(&o);
}

static void short_stop(struct cst_config *config) {
    config->stop_timeout = 20 * CST_NS_PER_MS;
}

static void a_stop_does_not_wait_for_ever(void **state) {
    static struct owner o;
    pthread_t thread;

    cst_box_start(&box, short_stop);
    own_everything(&o, 1);
    close_gate();
    send_commit(&o);
    (void)held();
    assert_int_equal(pthread_create(&thread, NULL, stop_box, NULL), 0);
    while (cst_raw_receive(&o.raw)) /* the connection ends although the commit has not */
        ;
    for (size_t i = 0; i < CST_COUNT(gate.jobs); i++)
        (void)sem_post(&gate.open);
    assert_int_equal(pthread_join(thread, NULL), 0);
    leave(&o);
}

int main(void) {
#define T(f) cmocka_unit_test_setup_teardown(f, start, stop)
    const struct CMUnitTest tests[] = {
        T(closing_the_socket_gives_all_back),
        T(a_killed_process_holds_nothing),
        T(a_forked_child_does_not_inherit_the_leases),
        T(a_commit_outlives_its_client),
        cmocka_unit_test(unanswered_requests_are_limited),
        cmocka_unit_test(connections_are_limited),
        cmocka_unit_test(who_never_says_hello_is_disconnected),
        cmocka_unit_test(who_said_hello_may_be_silent),
        cmocka_unit_test(a_client_that_never_reads_is_ended),
        T(a_late_reader_gets_everything),
        cmocka_unit_test(a_stop_finishes_commits_and_says_goodbye),
        cmocka_unit_test(a_stop_does_not_wait_for_ever),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
