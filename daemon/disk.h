/* SPDX-License-Identifier: Apache-2.0 */
/* The disk tier's place in the daemon: its I/O on the loop, recovery before the first client, the
 * drain of a clean stop. Loop thread. */
#pragma once

#include "daemon/loop.h"
#include "store/io.h"

struct cst_server;

struct cst_disk {
    struct cst_aio *aio; /* NULL: there is no disk tier */
    struct cst_io io;
    struct cst_timer timer; /* of recovery and drain: the next look */
    uint64_t deadline_ns;   /* of the drain; 0: it has not begun */
    uint64_t left;          /* blocks that were not written in time */
    bool recovering, drained;
    int status; /* of the recovery */
};

/* After the store was made. Returns when the blocks of earlier runs are found. CST_DISK_E_REFUSED:
 * the reason is in the log. */
enum { CST_DISK_E_REFUSED = 1 };
int cst_disk_open(struct cst_server *server);
/* Between two turns: no more puts will come. True: all is on disk, or the time is up. */
bool cst_disk_drain(struct cst_server *server);
/* With nothing under way: what is on disk is found faster by the next run. */
void cst_disk_close(struct cst_server *server);
/* After the store was freed. Safe twice. */
void cst_disk_free(struct cst_server *server);

/* What is written or read from now on begins: at the end of each turn. */
static inline void cst_disk_kick(struct cst_disk *disk) {
    if (disk->aio)
        cst_aio_kick(disk->aio);
}
