/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packets and descriptors over a SEQPACKET socket. Owns nothing; any thread.
 *
 * Invariants: 1. a descriptor that arrives is either handed to the caller or closed, on every
 * path; 2. every one is CLOEXEC from birth; 3. one system call a packet; 4. no SIGPIPE.
 *
 * A receiver that expects no descriptors passes cap_fds = 0: then the kernel gets no control
 * buffer, drops what the peer attached before this process ever owns it, and says so (MSG_CTRUNC).
 * Better still where the kernel can: the socket refuses them at the sender, and recv() will do,
 * which is 170 ns cheaper than recvmsg().
 */
#include "base/err.h"
#include "base/fault.h"
#include "base/macros.h"
#include "proto/frame.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83 /* Linux 6.16 */
#endif

enum { SMALL = 1024 }; /* copying so much is cheaper than a second part */

union control {
    struct cmsghdr align;
    uint8_t data[CMSG_SPACE(CST_PACKET_FDS_MAX * sizeof(int))];
};

/* One part and no descriptors go by send(): sendmsg() reads three structs more, which costs 150 ns
 * of the 7 us that a small packet takes there and back. */
static int send_message(int sock, const struct msghdr *message, int flags) {
    const struct iovec *part = message->msg_iov;
    bool plain = message->msg_iovlen == 1 && !message->msg_controllen;
    ssize_t sent;

    if (cst_fault_hit(CST_FAULT_SEND))
        return cst_err(-ENOBUFS);
    flags |= MSG_NOSIGNAL;
    do
        sent = plain ? send(sock, part->iov_base, part->iov_len, flags)
                     : sendmsg(sock, message, flags);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -errno : 0;
}

int cst_packet_send_borrowed_fds(int sock, const void *data, size_t n, const int *borrowed,
                                 size_t n_fds, int flags) {
    struct iovec part = { .iov_base = (void *)(uintptr_t)data, .iov_len = n };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
    union control control;

    assert(n_fds <= CST_PACKET_FDS_MAX);
    if (n_fds) {
        struct cmsghdr *c = &control.align;

        memset(&control, 0, sizeof(control));
        message.msg_control = control.data;
        message.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(c), borrowed, n_fds * sizeof(int));
    }
    return send_message(sock, &message, flags);
}

int cst_packet_send_bulk(int sock, const void *head, size_t n, const void *bulk, size_t bulk_len,
                         int flags) {
    uint8_t whole[SMALL];
    struct iovec parts[2] = { { .iov_base = (void *)(uintptr_t)head, .iov_len = n },
                              { .iov_base = (void *)(uintptr_t)bulk, .iov_len = bulk_len } };
    struct msghdr message = { .msg_iov = parts, .msg_iovlen = bulk_len ? 2 : 1 };

    if (bulk_len && n <= sizeof(whole) && bulk_len <= sizeof(whole) - n) {
        memcpy(whole, head, n);
        memcpy(whole + n, bulk, bulk_len);
        parts[0] = (struct iovec){ .iov_base = whole, .iov_len = n + bulk_len };
        message.msg_iovlen = 1;
    }
    return send_message(sock, &message, flags);
}

/* Takes the descriptors out of a received message: at most cap of them, in order; the others are
 * closed. Returns how many there were. */
static size_t take_fds(struct msghdr *message, int *owned, size_t cap) {
    size_t n = 0;

    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++, n++) {
            int fd;

            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
            if (n < cap)
                owned[n] = fd;
            else
                cst_close(fd);
        }
    }
    return n;
}

static void close_fds(const int *fds, size_t n) {
    for (size_t i = 0; i < n; i++)
        cst_close(fds[i]);
}

bool cst_packet_refuse_fds(int sock) {
    return !setsockopt(sock, SOL_SOCKET, SO_PASSRIGHTS, &(int){ 0 }, sizeof(int));
}

bool cst_packet_refuses_fds(int sock) {
    int passes = 1;
    socklen_t n = sizeof(passes);

    return !getsockopt(sock, SOL_SOCKET, SO_PASSRIGHTS, &passes, &n) && !passes;
}

ssize_t cst_packet_recv(int sock, void *data, size_t cap, int flags) {
    ssize_t n;

    do
        n = recv(sock, data, cap, flags | MSG_TRUNC); /* tells the packet's own length */
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return -errno;
    return (size_t)n > cap ? -EMSGSIZE : n;
}

ssize_t cst_packet_recv_owned_fds(int sock, void *data, size_t cap, int *owned, size_t cap_fds,
                                  size_t *n_fds, int flags) {
    struct iovec part = { .iov_base = data, .iov_len = cap };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
    union control control;
    size_t taken = 0;
    ssize_t n;

    assert(cap_fds <= CST_PACKET_FDS_MAX);
    do {
        if (cap_fds) {
            message.msg_control = control.data;
            message.msg_controllen = sizeof(control.data);
        }
        n = recvmsg(sock, &message, flags | MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    *n_fds = 0;
    if (n < 0)
        return -errno;
    if (message.msg_controllen)
        taken = take_fds(&message, owned, cap_fds);
    if (taken > cap_fds || message.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) {
        close_fds(owned, CST_MIN(taken, cap_fds));
        *n_fds = SIZE_MAX;
        if (message.msg_flags & MSG_TRUNC) {
            *n_fds = 0;
            return -EMSGSIZE;
        }
        return n;
    }
    *n_fds = taken;
    return n;
}
