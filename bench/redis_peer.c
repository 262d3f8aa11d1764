/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns a redis-server process and one hiredis connection to it. The server is free to use another
 * core than the client, which is the better case for it: both copy at the same time.
 */
#include "bench/redis_peer.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

#include <hiredis/hiredis.h>

enum { VALUES_MAX = 256, TRIES = 1000 };

struct cst_redis {
    pid_t pid;
    redisContext *context;
    size_t n, size;
    char names[VALUES_MAX][8];
    const char *argv[VALUES_MAX + 1];
};

static void run_server(const char *dir, const char *socket) {
    int null = open("/dev/null", O_WRONLY | O_CLOEXEC);

    cst_unpin();
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)dup2(null, STDOUT_FILENO);
    (void)execlp("redis-server", "redis-server", "--port", "0", "--unixsocket", socket, "--save",
                 "", "--appendonly", "no", "--dir", dir, (char *)NULL);
    _exit(127);
}

static int wait_connected(struct cst_redis *r, const char *socket) {
    const struct timespec wait = { .tv_nsec = 10 * 1000 * 1000 };

    for (int i = 0; i < TRIES; i++) {
        int status;

        r->context = redisConnectUnix(socket);
        if (r->context && !r->context->err)
            return 0;
        redisFree(r->context);
        r->context = NULL;
        if (waitpid(r->pid, &status, WNOHANG) == r->pid) {
            r->pid = 0;
            return WIFEXITED(status) && WEXITSTATUS(status) == 127 ? -ENOENT : -EIO;
        }
        (void)nanosleep(&wait, NULL);
    }
    return -ETIMEDOUT;
}

static int set_values(struct cst_redis *r, const void *const *values) {
    for (size_t i = 0; i < r->n; i++) {
        redisReply *reply = redisCommand(r->context, "SET %s %b", r->names[i], values[i], r->size);
        bool ok = reply && reply->type == REDIS_REPLY_STATUS;

        freeReplyObject(reply);
        if (!ok)
            return -EIO;
    }
    return 0;
}

int cst_redis_new(struct cst_redis **out, const char *dir, const void *const *values, size_t n,
                  size_t size) {
    struct cst_redis *r = n <= VALUES_MAX ? calloc(1, sizeof(*r)) : NULL;
    char socket[128];
    int e;

    if (!r)
        return -ENOMEM;
    (void)snprintf(socket, sizeof(socket), "%s/redis", dir);
    r->n = n;
    r->size = size;
    r->argv[0] = "MGET";
    for (size_t i = 0; i < n; i++) {
        (void)snprintf(r->names[i], sizeof(r->names[i]), "%zu", i);
        r->argv[i + 1] = r->names[i];
    }
    r->pid = fork();
    if (!r->pid)
        run_server(dir, socket);
    e = r->pid < 0 ? -errno : wait_connected(r, socket);
    if (!e)
        e = set_values(r, values);
    if (e)
        (void)cst_redis_free(r);
    else
        *out = r;
    return e;
}

struct cst_redis *cst_redis_free(struct cst_redis *r) {
    if (!r)
        return NULL;
    if (r->context)
        redisFree(r->context);
    if (r->pid > 0) {
        (void)kill(r->pid, SIGKILL);
        (void)waitpid(r->pid, NULL, 0);
    }
    free(r);
    return NULL;
}

int cst_redis_run(void *arg, unsigned ops) {
    struct cst_redis *r = arg;

    while (ops--) {
        redisReply *reply = redisCommandArgv(r->context, (int)r->n + 1, r->argv, NULL);
        bool ok = reply && reply->type == REDIS_REPLY_ARRAY && reply->elements == r->n &&
                  reply->element[r->n - 1]->len == r->size;

        freeReplyObject(reply);
        if (!ok)
            return -EIO;
    }
    return 0;
}
