/* SPDX-License-Identifier: Apache-2.0 */
/* Counts system calls of this process and the daemon around an operation, through strace. */
#pragma once

#include "bench/bench.h"

struct cst_syscalls {
    double wanted;   /* send, receive and poll calls of one operation, both processes */
    double other;    /* all others */
    char names[256]; /* of the others: "futex 1.00, ..." */
};

/* `other` is rounded to a tenth: a timer that fires a few times a second shows in `names`, but is
 * no part of the operation (strace makes it a hundred times slower). -ENOENT: no strace; -EPERM:
 * not allowed to trace. */
int cst_count_syscalls(struct cst_syscalls *out, pid_t daemon, cst_side_fn run, void *arg);
