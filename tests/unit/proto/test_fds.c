/* SPDX-License-Identifier: Apache-2.0 */
/* Packets with descriptors over a socket pair: order, ownership, limits, and that no path leaks. */
#include "tests/lib/check.h"

#include "base/fault.h"
#include "proto/frame.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static int socks[2];
static int files[CST_PACKET_FDS_MAX + 1];

static size_t open_fds(void) {
    DIR *dir = opendir("/proc/self/fd");
    size_t n = 0;

    assert_non_null(dir);
    while (readdir(dir))
        n++;
    (void)closedir(dir);
    return n;
}

static ino_t inode(int fd) {
    struct stat st;

    assert_int_equal(fstat(fd, &st), 0);
    return st.st_ino;
}

static int setup(void **state) {
    for (size_t i = 0; i < CST_COUNT(files); i++) {
        files[i] = memfd_create("test", MFD_CLOEXEC);
        if (files[i] < 0)
            return -1;
    }
    return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, socks);
}

static int teardown(void **state) {
    for (size_t i = 0; i < CST_COUNT(files); i++)
        files[i] = cst_close(files[i]);
    socks[0] = cst_close(socks[0]);
    socks[1] = cst_close(socks[1]);
    return 0;
}

static void plain_packet(void **state) {
    char got[16];
    size_t n_fds = 99;

    assert_int_equal(cst_packet_send_borrowed_fds(socks[0], "hello", 5, NULL, 0, 0), 0);
    assert_int_equal(cst_packet_recv_owned_fds(socks[1], got, sizeof(got), NULL, 0, &n_fds, 0), 5);
    assert_memory_equal(got, "hello", 5);
    assert_int_equal(n_fds, 0);
}

static void descriptors_in_order(void **state) {
    int got[CST_PACKET_FDS_MAX];
    size_t n_fds, before = open_fds();
    char data[16];

    assert_int_equal(cst_packet_send_borrowed_fds(socks[0], "fds", 3, files, CST_PACKET_FDS_MAX, 0),
                     0);
    assert_int_equal(
        cst_packet_recv_owned_fds(socks[1], data, sizeof(data), got, CST_PACKET_FDS_MAX, &n_fds, 0),
        3);
    assert_int_equal(n_fds, CST_PACKET_FDS_MAX);
    for (size_t i = 0; i < n_fds; i++) {
        assert_int_equal(inode(got[i]), inode(files[i])); /* and ours is still open */
        assert_true(fcntl(got[i], F_GETFD) & FD_CLOEXEC);
        got[i] = cst_close(got[i]);
    }
    assert_int_equal(open_fds(), before);
}

/* More than asked for, or any when none was: all closed, the bytes still come. */
static void too_many(void **state) {
    for (size_t cap = 0; cap <= CST_PACKET_FDS_MAX; cap++) {
        int got[CST_PACKET_FDS_MAX];
        size_t n_fds = 0, before = open_fds();
        char data[16];

        if (cap < CST_PACKET_FDS_MAX) {
            assert_int_equal(cst_packet_send_borrowed_fds(socks[0], "fds", 3, files, cap + 1, 0),
                             0);
        } else { /* one more than any packet may carry, by hand */
            union {
                struct cmsghdr align;
                char data[CMSG_SPACE(sizeof(files))];
            } control = { .align = { .cmsg_len = CMSG_LEN(sizeof(files)),
                                     .cmsg_level = SOL_SOCKET,
                                     .cmsg_type = SCM_RIGHTS } };
            struct iovec part = { .iov_base = (char[]){ 'f', 'd', 's' }, .iov_len = 3 };
            struct msghdr m = { .msg_iov = &part,
                                .msg_iovlen = 1,
                                .msg_control = &control,
                                .msg_controllen = sizeof(control.data) };

            memcpy(CMSG_DATA(&control.align), files, sizeof(files));
            assert_int_equal(sendmsg(socks[0], &m, 0), 3);
        }
        assert_int_equal(
            cst_packet_recv_owned_fds(socks[1], data, sizeof(data), got, cap, &n_fds, 0), 3);
        assert_true(n_fds == SIZE_MAX);
        assert_memory_equal(data, "fds", 3);
        assert_int_equal(open_fds(), before);
    }
}

static void packet_over_cap(void **state) {
    int got[2];
    size_t n_fds = 99, before = open_fds();
    char data[4];

    assert_int_equal(cst_packet_send_borrowed_fds(socks[0], "12345", 5, files, 2, 0), 0);
    assert_int_equal(cst_packet_recv_owned_fds(socks[1], data, 4, got, 2, &n_fds, 0), -EMSGSIZE);
    assert_int_equal(n_fds, 0);
    assert_int_equal(open_fds(), before);
    assert_int_equal(cst_packet_send_borrowed_fds(socks[0], "1234", 4, NULL, 0, 0), 0);
    assert_int_equal(cst_packet_recv_owned_fds(socks[1], data, 4, got, 2, &n_fds, 0), 4);
}

static void head_and_bulk(void **state) {
    char data[16];
    size_t n_fds;

    assert_int_equal(cst_packet_send_bulk(socks[0], "head", 4, "bulk!", 5, 0), 0);
    assert_int_equal(cst_packet_send_bulk(socks[0], "head", 4, NULL, 0, 0), 0);
    assert_int_equal(cst_packet_recv_owned_fds(socks[1], data, sizeof(data), NULL, 0, &n_fds, 0),
                     9);
    assert_memory_equal(data, "headbulk!", 9);
    assert_int_equal(cst_packet_recv_owned_fds(socks[1], data, sizeof(data), NULL, 0, &n_fds, 0),
                     4);
}

/* Small ones are joined before they are sent, large ones in the kernel: nobody can tell. */
static void bulk_of_every_size(void **state) {
    static uint8_t all[4096], got[4096];
    size_t n_fds;

    for (size_t i = 0; i < sizeof(all); i++)
        all[i] = (uint8_t)(i * 7 >> 2);
    for (size_t head = 16; head < 1100; head += 83)
        for (size_t n = head; n < 1100; n += 13) {
            assert_int_equal(cst_packet_send_bulk(socks[0], all, head, all + head, n - head, 0), 0);
            memset(got, 0, sizeof(got));
            assert_int_equal(
                cst_packet_recv_owned_fds(socks[1], got, sizeof(got), NULL, 0, &n_fds, 0), n);
            assert_memory_equal(got, all, n);
        }
}

static void nothing_to_read(void **state) {
    size_t n_fds = 99;
    char data[4];

    assert_int_equal(cst_packet_recv_owned_fds(socks[1], data, 4, NULL, 0, &n_fds, 0), -EAGAIN);
    assert_int_equal(n_fds, 0);
}

static void full_socket(void **state) {
    static char large[CST_PACKET_MAX];
    int r = 0;

    for (int i = 0; i < 1000 && r == 0; i++)
        r = cst_packet_send_borrowed_fds(socks[0], large, sizeof(large), NULL, 0, 0);
    assert_int_equal(r, -EAGAIN);
}

/* The peer is gone: an error and no signal, then the end. */
static void closed_peer(void **state) {
    size_t n_fds;
    char data[4];

    assert_int_equal(cst_packet_send_borrowed_fds(socks[0], "last", 4, NULL, 0, 0), 0);
    socks[0] = cst_close(socks[0]);
    assert_int_equal(cst_packet_recv_owned_fds(socks[1], data, 4, NULL, 0, &n_fds, 0), 4);
    assert_int_equal(cst_packet_recv_owned_fds(socks[1], data, 4, NULL, 0, &n_fds, 0), 0);
    assert_int_equal(cst_packet_send_borrowed_fds(socks[1], "x", 1, NULL, 0, 0), -EPIPE);
}

static void failing_send(void **state) {
    cst_fault_join();
    cst_fault_arm(CST_FAULT_SEND, 2, 1);
    assert_int_equal(cst_packet_send_borrowed_fds(socks[0], "a", 1, NULL, 0, 0), 0);
    assert_int_equal(cst_packet_send_borrowed_fds(socks[0], "b", 1, NULL, 0, 0), -ENOBUFS);
    assert_int_equal(cst_packet_send_bulk(socks[0], "c", 1, "d", 1, 0), 0);
    cst_fault_arm(CST_FAULT_SEND, 0, 0);
    cst_fault_leave();
}

int main(void) {
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(plain_packet),  T(descriptors_in_order), T(too_many),        T(packet_over_cap),
        T(head_and_bulk), T(bulk_of_every_size),   T(nothing_to_read), T(full_socket),
        T(closed_peer),   T(failing_send),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
