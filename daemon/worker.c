/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the worker threads, two queues of jobs and the list of finished ones.
 *
 * Invariants
 *   1. A job is in exactly one place from submit to done: a queue, a worker's hands, the finished
 *      list, the loop's batch.
 *   2. `lock` guards queues, finished, counts and stop; it is never held while a job runs.
 *   3. The eventfd is written when `finished` turns non-empty, so completions that come close
 *      together cost one wake-up.
 */
#include "daemon/worker.h"

#include "base/err.h"
#include "base/macros.h"
#include "base/mem.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

struct cst_workers {
    struct cst_jobs jobs; /* first: what submit() gets */
    struct cst_loop *loop;
    struct cst_io done_io;
    void (*thread_start)(void);
    pthread_mutex_t lock;
    pthread_cond_t wake, wake_long;
    struct cst_list queues[CST_JOB_PRIORITIES];
    struct cst_list finished;
    unsigned n, background, background_max; /* threads; background jobs that run; of them at most */
    bool stop;
    size_t open;         /* jobs from submit to done; loop thread only */
    pthread_t threads[]; /* the last one runs long jobs */
};

/* NULL: nothing that may run now. Called with the lock. */
static struct cst_job *next_job(struct cst_workers *w, bool *background) {
    struct cst_list *first = cst_list_first(&w->queues[CST_JOB_FETCH]);

    *background = false;
    if (!first && w->background < w->background_max) {
        first = cst_list_first(&w->queues[CST_JOB_BACKGROUND]);
        *background = first != NULL;
    }
    if (!first)
        return NULL;
    cst_list_unlink(first);
    w->background += *background;
    return cst_list_entry(first, struct cst_job, link);
}

static void finish(struct cst_workers *w, struct cst_job *job, bool background) {
    bool wake_loop = cst_list_is_empty(&w->finished);
    uint64_t one = 1;

    cst_list_append(&w->finished, &job->link);
    w->background -= background;
    if (background && !cst_list_is_empty(&w->queues[CST_JOB_BACKGROUND]))
        (void)pthread_cond_signal(&w->wake);
    if (wake_loop && write(w->done_io.fd, &one, sizeof(one)) < 0)
        assert(errno == EAGAIN); /* the counter is full: the loop is awake anyway */
}

static void *work(void *arg) {
    struct cst_workers *w = arg;

    (void)prctl(PR_SET_NAME, "cistern-worker");
    if (w->thread_start)
        w->thread_start();
    (void)pthread_mutex_lock(&w->lock);
    for (;;) {
        bool background;
        struct cst_job *job = next_job(w, &background);

        if (job) {
            (void)pthread_mutex_unlock(&w->lock);
            job->run(job);
            (void)pthread_mutex_lock(&w->lock);
            finish(w, job, background);
        } else if (w->stop) {
            break;
        } else {
            (void)pthread_cond_wait(&w->wake, &w->lock);
        }
    }
    (void)pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* Long jobs have a thread of their own, and give way to everything else. */
static void *work_long(void *arg) {
    struct cst_workers *w = arg;
    struct cst_list *first;

    (void)prctl(PR_SET_NAME, "cistern-long");
    (void)setpriority(PRIO_PROCESS, 0, 19); /* of this thread: Linux */
    if (w->thread_start)
        w->thread_start();
    (void)pthread_mutex_lock(&w->lock);
    while ((first = cst_list_first(&w->queues[CST_JOB_LONG])) || !w->stop) {
        struct cst_job *job = first ? cst_list_entry(first, struct cst_job, link) : NULL;

        if (!job) {
            (void)pthread_cond_wait(&w->wake_long, &w->lock);
            continue;
        }
        cst_list_unlink(first);
        (void)pthread_mutex_unlock(&w->lock);
        job->run(job);
        (void)pthread_mutex_lock(&w->lock);
        finish(w, job, false);
    }
    (void)pthread_mutex_unlock(&w->lock);
    return NULL;
}

static void submit(struct cst_jobs *jobs, struct cst_job *job, enum cst_job_priority priority) {
    struct cst_workers *w = cst_container_of(jobs, struct cst_workers, jobs);

    w->open++;
    (void)pthread_mutex_lock(&w->lock);
    cst_list_init(&job->link);
    cst_list_append(&w->queues[priority], &job->link);
    (void)pthread_cond_signal(priority == CST_JOB_LONG ? &w->wake_long : &w->wake);
    (void)pthread_mutex_unlock(&w->lock);
}

static void run_done(struct cst_io *io, uint32_t events) {
    struct cst_workers *w = cst_container_of(io, struct cst_workers, done_io);
    struct cst_list batch, *first;
    uint64_t count;

    if (read(io->fd, &count, sizeof(count)) < 0)
        return;
    cst_list_init(&batch);
    (void)pthread_mutex_lock(&w->lock);
    while ((first = cst_list_first(&w->finished))) {
        cst_list_unlink(first);
        cst_list_append(&batch, first);
    }
    (void)pthread_mutex_unlock(&w->lock);
    while ((first = cst_list_first(&batch))) {
        struct cst_job *job = cst_list_entry(first, struct cst_job, link);

        cst_list_unlink(first);
        w->open--;
        job->done(job);
    }
}

/* Signals belong to the loop thread: workers start with all of them blocked. */
static int start_thread(struct cst_workers *w, void *(*run)(void *)) {
    sigset_t all, old;
    int r;

    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &old);
    r = pthread_create(&w->threads[w->n], NULL, run, w);
    (void)pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (r)
        return cst_err(-r);
    w->n++;
    return 0;
}

int cst_workers_new(struct cst_workers **out, struct cst_loop *loop, unsigned n,
                    void (*thread_start)(void)) {
    struct cst_workers *w = cst_calloc(1, sizeof(*w) + (n + 1UL) * sizeof(w->threads[0]));
    int fd, r;

    assert(n >= 1);
    if (!w)
        return cst_err(-ENOMEM);
    w->jobs.submit = submit;
    w->loop = loop;
    w->done_io = CST_IO_NULL(run_done);
    w->thread_start = thread_start;
    w->background_max = n > 1 ? n - 1 : 1;
    cst_list_init(&w->queues[CST_JOB_FETCH]);
    cst_list_init(&w->queues[CST_JOB_BACKGROUND]);
    cst_list_init(&w->queues[CST_JOB_LONG]);
    cst_list_init(&w->finished);
    (void)pthread_mutex_init(&w->lock, NULL);
    (void)pthread_cond_init(&w->wake, NULL);
    (void)pthread_cond_init(&w->wake_long, NULL);
    fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    r = fd < 0 ? cst_err(-errno) : cst_io_start(loop, &w->done_io, fd, EPOLLIN);
    if (r)
        cst_close(fd);
    for (unsigned i = 0; i < n && !r; i++)
        r = start_thread(w, work);
    if (!r)
        r = start_thread(w, work_long);
    if (r) {
        (void)cst_workers_free(w);
        return r;
    }
    *out = w;
    return 0;
}

struct cst_jobs *cst_workers_jobs(struct cst_workers *workers) {
    return &workers->jobs;
}

size_t cst_workers_open(const struct cst_workers *workers) {
    return workers->open;
}

struct cst_workers *cst_workers_free(struct cst_workers *w) {
    int fd;

    if (!w)
        return NULL;
    (void)pthread_mutex_lock(&w->lock);
    w->stop = true;
    (void)pthread_cond_broadcast(&w->wake);
    (void)pthread_cond_broadcast(&w->wake_long);
    (void)pthread_mutex_unlock(&w->lock);
    for (unsigned i = 0; i < w->n; i++)
        (void)pthread_join(w->threads[i], NULL);
    assert(!w->open);
    fd = w->done_io.fd;
    cst_io_stop(w->loop, &w->done_io);
    cst_close(fd);
    (void)pthread_cond_destroy(&w->wake);
    (void)pthread_cond_destroy(&w->wake_long);
    (void)pthread_mutex_destroy(&w->lock);
    return cst_free(w);
}
