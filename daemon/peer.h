/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who is at the other end of a socket, and which namespace that is. The kernel's word, taken when
 * the peer connected, never the peer's. Loop thread.
 */
#pragma once

#include "base/macros.h"
#include "daemon/config.h"

#include <stdbool.h>
#include <sys/types.h>

struct cst_peer {
    uid_t uid;
    gid_t gid;
    pid_t pid; /* 0 when the peer lives in a pid namespace that we don't see */
    int pidfd; /* owned; readable when the process has ended */
};
#define CST_PEER_NULL ((struct cst_peer){ .pidfd = -1 })

/* 0; -ESRCH when the peer's process is gone already; another negative errno. */
int cst_peer_init(struct cst_peer *peer, int sock);
/* As init, by pidfd_open() and start times: for kernels without SO_PEERPIDFD. */
int cst_peer_init_by_pid(struct cst_peer *peer, int sock);
void cst_peer_deinit(struct cst_peer *peer); /* safe twice */

/* The namespace's name into name, or CST_PEER_E_REFUSED and a sentence. */
enum { CST_PEER_E_REFUSED = 1 };
struct cst_namespace_name {
    char text[CST_NAMESPACE_NAME_MAX + 1];
};
int cst_peer_namespace(const struct cst_peer *peer, const struct cst_config *config,
                       struct cst_namespace_name *name, char *text, size_t cap);

/* The rules alone: cgroup is the peer's path or "". overflow: the uid that stands for users from
 * elsewhere. */
int cst_peer_match(const struct cst_config *config, uid_t uid, gid_t gid, const char *cgroup,
                   uid_t overflow, struct cst_namespace_name *name, char *text, size_t cap);
