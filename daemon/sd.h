/* SPDX-License-Identifier: Apache-2.0 */
/*
 * systemd: sockets that it passes, and what it wants to be told. Without systemd all of this does
 * nothing. Main thread.
 */
#pragma once

#include "daemon/loop.h"

#include <stddef.h>

/* Sockets passed by systemd: FileDescriptorName main (or any other name) and admin. -1: none. */
struct cst_sd_sockets {
    int main, admin;
};
/* 0 or CST_SD_E_SOCKET and a sentence. Takes the descriptors; clears the environment. */
enum { CST_SD_E_SOCKET = 1 };
int cst_sd_sockets(struct cst_sd_sockets *out, char *text, size_t cap);

void cst_sd_ready(const char *status);
void cst_sd_reloading(void);
void cst_sd_stopping(void);
void cst_sd_status(const char *status); /* and that more time is needed */

/* Pings the watchdog from the loop at half of its interval, if there is one. */
struct cst_watchdog {
    struct cst_timer timer;
    struct cst_loop *loop;
    uint64_t interval_ns;
};
void cst_watchdog_start(struct cst_watchdog *watchdog, struct cst_loop *loop);
void cst_watchdog_stop(struct cst_watchdog *watchdog);
