/* SPDX-License-Identifier: Apache-2.0 */
/* Owns two threads and two lists under one lock. */
#include "bench/bench_pool.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { THREADS = 2 };

struct bench_pool {
    struct cst_jobs jobs;
    pthread_t threads[THREADS];
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct cst_list todo, ran;
    int fd, n;
    bool stop;
};

static void *work(void *arg) {
    struct bench_pool *p = arg;
    uint64_t one = 1;

    pthread_mutex_lock(&p->lock);
    while (!p->stop) {
        struct cst_list *it = cst_list_first(&p->todo);
        struct cst_job *job = it ? cst_list_entry(it, struct cst_job, link) : NULL;

        if (!job) {
            pthread_cond_wait(&p->wake, &p->lock);
            continue;
        }
        cst_list_unlink(it);
        pthread_mutex_unlock(&p->lock);
        job->run(job);
        pthread_mutex_lock(&p->lock);
        if (cst_list_is_empty(&p->ran))
            assert(write(p->fd, &one, sizeof(one)) == sizeof(one));
        cst_list_append(&p->ran, it);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static void submit(struct cst_jobs *jobs, struct cst_job *job, enum cst_job_priority priority) {
    struct bench_pool *p = cst_container_of(jobs, struct bench_pool, jobs);

    pthread_mutex_lock(&p->lock);
    cst_list_init(&job->link);
    cst_list_append(&p->todo, &job->link);
    pthread_cond_signal(&p->wake);
    pthread_mutex_unlock(&p->lock);
}

int bench_pool_new(struct bench_pool **out) {
    struct bench_pool *p = calloc(1, sizeof(*p));

    if (!p)
        return -ENOMEM;
    p->jobs.submit = submit;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    cst_list_init(&p->todo);
    cst_list_init(&p->ran);
    p->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    while (p->fd >= 0 && p->n < THREADS && !pthread_create(&p->threads[p->n], NULL, work, p))
        p->n++;
    *out = p;
    return p->n == THREADS ? 0 : -EAGAIN;
}

struct bench_pool *bench_pool_free(struct bench_pool *p) {
    if (!p)
        return NULL;
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->n; i++)
        pthread_join(p->threads[i], NULL);
    cst_close(p->fd);
    free(p);
    return NULL;
}

struct cst_jobs *bench_pool_jobs(struct bench_pool *p) {
    return &p->jobs;
}

int bench_pool_fd(const struct bench_pool *p) {
    return p->fd;
}

void bench_pool_reap(struct bench_pool *p) {
    struct cst_list batch = CST_LIST_INIT(batch), *it;
    uint64_t n;

    if (read(p->fd, &n, sizeof(n)) < 0)
        return;
    pthread_mutex_lock(&p->lock);
    while ((it = cst_list_first(&p->ran))) {
        cst_list_unlink(it);
        cst_list_append(&batch, it);
    }
    pthread_mutex_unlock(&p->lock);
    while ((it = cst_list_first(&batch))) {
        cst_list_unlink(it);
        cst_list_entry(it, struct cst_job, link)->done(cst_list_entry(it, struct cst_job, link));
    }
}
