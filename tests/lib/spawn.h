/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A private daemon for a test or a benchmark: its own folder, socket and log; ready when start
 * returns (it speaks sd_notify to us); dead when the program that started it dies. No cmocka in
 * here. One thread per struct.
 */
#pragma once

#include <stdbool.h>
#include <sys/types.h>

struct cst_spawned {
    pid_t pid; /* 0: not running */
    int pidfd, notify;
    char dir[64];    /* removed by cst_spawn_cleanup() */
    char socket[96]; /* what clients connect to */
    char log[96];    /* the daemon's stderr, appended to over restarts */
};
#define CST_SPAWNED_NULL ((struct cst_spawned){ .pidfd = -1, .notify = -1 })

/* Path of the daemon: $CISTERND, else daemon/cisternd in $CST_BUILD_ROOT. NULL if there is none. */
const char *cst_spawn_program(void);

/*
 * Starts `program --socket SOCKET args...` (args: NULL-terminated, or NULL) and waits for its
 * READY=1. The first start makes the folder; a start after a stop or kill keeps it, so that
 * clients find the new daemon under the old path. 0 or a negative errno; -ECHILD when the daemon
 * ended before it was ready (its words are in the log).
 */
int cst_spawn_start(struct cst_spawned *d, const char *program, const char *const args[]);

/* SIGTERM, then waits. Returns the exit status, or 256 + the signal that ended it. */
int cst_spawn_stop(struct cst_spawned *d);

/* SIGKILL, then waits. */
void cst_spawn_kill(struct cst_spawned *d);

/* Kills what runs and removes the folder; safe twice and on CST_SPAWNED_NULL. */
void cst_spawn_cleanup(struct cst_spawned *d);
