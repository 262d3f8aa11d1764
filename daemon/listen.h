/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Listening sockets in the file system: where, with which rights, and never two daemons on one
 * path. Main thread, before the loop runs.
 */
#pragma once

#include "daemon/config.h"

#include <stdbool.h>

enum { CST_LISTEN_E_REFUSED = 1 }; /* a sentence is in text */

struct cst_listen {
    int fd, lock; /* owned */
    char path[CST_SOCKET_PATH_MAX];
};
#define CST_LISTEN_NULL ((struct cst_listen){ .fd = -1, .lock = -1 })

/* Listens on path; a stale socket of a daemon that is gone is replaced. 0, CST_LISTEN_E_REFUSED. */
int cst_listen_open(struct cst_listen *out, const char *path, unsigned mode, const char *group,
                    char *text, size_t cap);

/* The first default path whose folder exists safely or can be made. */
int cst_listen_open_default(struct cst_listen *out, unsigned mode, const char *group, char *text,
                            size_t cap);

/* Removes socket and lock; closes what was not moved elsewhere. Safe twice. */
void cst_listen_close(struct cst_listen *listen);

/* Makes the folder of a default path with this mode, or checks that nobody else could have: ours or
 * root's, no link, not writable by others. false and a sentence. */
bool cst_listen_folder(const char *path, unsigned mode, char *text, size_t cap);
