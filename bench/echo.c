/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the relay thread and the echo process.
 * Invariants: 1. the relay forwards each packet whole, with its descriptors, and keeps none;
 * 2. packets are recorded as request, reply, request, reply: an operation under record gets no
 * pushes; 3. the echo process answers the i-th request with the i-th reply, over and over.
 */
#include "bench/echo.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

enum { FDS_MAX = 16, WAIT_MS = 10000 };

struct cst_tap {
    int listener;
    struct sockaddr_un daemon;
    pthread_t thread;
    _Atomic(struct cst_recording *) to;
};

static int fill_addr(struct sockaddr_un *addr, const char *path) {
    *addr = (struct sockaddr_un){ .sun_family = AF_UNIX };
    if (strlen(path) >= sizeof(addr->sun_path))
        return -ENAMETOOLONG;
    (void)snprintf(addr->sun_path, sizeof(addr->sun_path), "%s", path);
    return 0;
}

static void record(struct cst_recording *to, bool request, const uint8_t *data, size_t len) {
    struct cst_exchange *e = &to->exchanges[CST_MIN(to->n, (size_t)CST_EXCHANGES_MAX - 1)];

    if (request) {
        memcpy(e->request, data, len);
        e->request_len = len;
    } else {
        memcpy(e->reply, data, len);
        e->reply_len = len;
        to->n = CST_MIN(to->n + 1, (size_t)CST_EXCHANGES_MAX);
    }
}

/* One packet from one socket to the other; false at the end of the connection. */
static bool relay(struct cst_tap *tap, int from, int to, bool request) {
    static uint8_t data[CST_PACKET_MAX];
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(FDS_MAX * sizeof(int))];
    } control;
    struct iovec iov = { data, sizeof(data) };
    struct msghdr msg = {
        .msg_iov = &iov,
        .msg_iovlen = 1,
        .msg_control = &control,
        .msg_controllen = sizeof(control),
    };
    struct cst_recording *recording = atomic_load(&tap->to);
    ssize_t n = recvmsg(from, &msg, MSG_CMSG_CLOEXEC);
    bool sent;

    if (n <= 0)
        return false;
    iov.iov_len = (size_t)n;
    if (recording) /* before it is sent: the client may stop the recording when it arrives */
        record(recording, request, data, (size_t)n);
    sent = sendmsg(to, &msg, MSG_NOSIGNAL) == n;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
        size_t fds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

        for (size_t i = 0; i < fds; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
            (void)cst_close(fd);
        }
    }
    return sent;
}

static void *serve_tap(void *arg) {
    struct cst_tap *tap = arg;
    cst_auto(cst_closep) int client = accept4(tap->listener, NULL, NULL, SOCK_CLOEXEC);
    cst_auto(cst_closep) int daemon = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    bool open = client >= 0 && daemon >= 0 &&
                !connect(daemon, (const void *)&tap->daemon, sizeof(tap->daemon));

    while (open) {
        struct pollfd fds[2] = { { client, POLLIN, 0 }, { daemon, POLLIN, 0 } };

        if (poll(fds, 2, -1) < 0)
            continue;
        if (fds[0].revents)
            open = relay(tap, client, daemon, true);
        if (open && fds[1].revents)
            open = relay(tap, daemon, client, false);
    }
    return NULL;
}

int cst_tap_new(struct cst_tap **out, const char *path, const char *daemon) {
    struct cst_tap *tap = calloc(1, sizeof(*tap));
    struct sockaddr_un addr;
    int r = tap ? fill_addr(&addr, path) : -ENOMEM;

    if (!r)
        r = fill_addr(&tap->daemon, daemon);
    if (r) {
        free(tap);
        return r;
    }
    tap->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (tap->listener < 0 || bind(tap->listener, (const void *)&addr, sizeof(addr)) ||
        listen(tap->listener, 1))
        r = -errno;
    if (!r)
        r = -pthread_create(&tap->thread, NULL, serve_tap, tap);
    if (r) {
        (void)cst_close(tap->listener);
        free(tap);
        return r;
    }
    *out = tap;
    return 0;
}

void cst_tap_record(struct cst_tap *tap, struct cst_recording *to) {
    if (to)
        to->n = 0;
    atomic_store(&tap->to, to);
}

struct cst_tap *cst_tap_free(struct cst_tap *tap) {
    if (!tap)
        return NULL;
    (void)shutdown(tap->listener, SHUT_RDWR);
    (void)pthread_join(tap->thread, NULL);
    (void)cst_close(tap->listener);
    free(tap);
    return NULL;
}

static void answer(int fd, const struct cst_recording *recording) {
    static uint8_t data[CST_PACKET_MAX];

    for (size_t i = 0;; i = (i + 1) % recording->n) {
        const struct cst_exchange *e = &recording->exchanges[i];
        struct pollfd p = { fd, POLLIN, 0 };

        if (poll(&p, 1, -1) < 0 || recv(fd, data, sizeof(data), 0) <= 0 ||
            send(fd, e->reply, e->reply_len, MSG_NOSIGNAL) < 0)
            return;
    }
}

int cst_echo_open(struct cst_echo *echo, const struct cst_recording *recording) {
    int fds[2];

    if (!recording->n)
        return -ENODATA;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds))
        return -errno;
    *echo = (struct cst_echo){
        .fd = fds[0],
        .recording = recording,
        .reply = malloc(CST_PACKET_MAX),
        .pid = fork(), /* inherits the core */
    };
    if (!echo->pid) {
        (void)close(fds[0]);
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        answer(fds[1], recording);
        _exit(0);
    }
    (void)close(fds[1]);
    return echo->pid < 0 || !echo->reply ? -ENOMEM : 0;
}

void cst_echo_close(struct cst_echo *echo) {
    echo->fd = cst_close(echo->fd);
    if (echo->pid > 0)
        (void)waitpid(echo->pid, NULL, 0);
    free(echo->reply);
    *echo = (struct cst_echo){ .fd = -1 };
}

int cst_echo_run(void *arg, unsigned ops) {
    struct cst_echo *echo = arg;

    while (ops--) {
        for (size_t i = 0; i < echo->recording->n; i++) {
            const struct cst_exchange *e = &echo->recording->exchanges[i];

            struct pollfd p = { echo->fd, POLLIN, 0 };

            if (send(echo->fd, e->request, e->request_len, MSG_NOSIGNAL) < 0 ||
                (!echo->endless && poll(&p, 1, WAIT_MS) <= 0) ||
                recv(echo->fd, echo->reply, CST_PACKET_MAX, 0) < 0)
                return -errno;
        }
    }
    return 0;
}
