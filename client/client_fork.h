/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every open client, so that fork() can be seen: the child's copies are marked forked and their
 * sockets closed there, so that the daemon sees the end of the parent. Mappings are left alone.
 * Any thread.
 */
#pragma once

#include <cistern/cistern.h>

/* CISTERN_OK, or NO_MEMORY with the error set: the handlers could not be registered. */
int32_t cst_fork_watch(cistern_client *c);
void cst_fork_unwatch(cistern_client *c);
