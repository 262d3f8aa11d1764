/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the daemon's socket, checking who serves it, and the Hello. Any thread; no shared state.
 */
#pragma once

#include <cistern/cistern.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { CST_DIAL_PATHS = 3, CST_NAMESPACE_MAX = 128, CST_VERSION_MAX = 64 };

/* Where and as whom to connect, resolved once. */
struct cst_dial {
    char *paths[CST_DIAL_PATHS]; /* owned; tried in order */
    size_t n_paths;
    bool private_dir;   /* the last path's folder must be ours alone (it is in /tmp) */
    char *name;         /* owned */
    int64_t server_uid; /* accepted too; -1: none */
    uint32_t timeout_ms;
};

struct cst_hello {
    uint64_t epoch, staging_bytes, features;
    uint32_t packet_max, keys_max, requests_max;
    char namespace_name[CST_NAMESPACE_MAX];
    char daemon_version[CST_VERSION_MAX];
};

/* Reads argument and environment. CISTERN_OK, BAD_ARGUMENT (path too long) or NO_MEMORY, with the
 * thread's error set. deinit is safe after a failure and twice. */
int32_t cst_dial_init(struct cst_dial *d, const cistern_client_options *options);
void cst_dial_deinit(struct cst_dial *d);

/* Connects fd, a fresh SEQPACKET socket, checks the server's uid and says Hello; waits at most
 * timeout_ms a step. On failure the caller closes fd. */
int32_t cst_dial(const struct cst_dial *d, int fd, struct cst_hello *out);

/* True for a real folder (no symbolic link) that uid owns and nobody else can write. */
bool cst_dial_is_private_dir(const char *path, uid_t uid);

/* Whether a server of that uid may serve us: root, ourselves, user "cistern", or `extra`. */
bool cst_dial_is_trusted(uid_t uid, int64_t extra);
