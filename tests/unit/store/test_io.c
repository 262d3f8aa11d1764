/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One suite for every I/O backend: each test below runs on io_uring, threads, both without
 * O_DIRECT, files in memory, and an unarmed fault wrapper. The oracle of contents is a plain array.
 */
#include "tests/lib/check.h"

#include "base/mem.h"
#include "base/random.h"
#include "store/io.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PAGE = CST_AIO_ALIGN, PAGES = 64, OPS = 400, MOST = 8 };

struct box {
    struct cst_aio *aio;
    struct cst_sim_disk *disk;
    char dir[64];
    uint8_t *memory; /* OPS x MOST pages */
};

enum how { URING, THREADS, SIM, FAULT };

struct how_row {
    const char *name;
    enum how how;
    bool buffered;
};

static const struct how_row hows[] = {
    { "io_uring", URING, false },  { "io_uring buffered", URING, true },
    { "threads", THREADS, false }, { "threads buffered", THREADS, true },
    { "sim", SIM, false },         { "fault", FAULT, false },
};

static size_t arena(void) {
    return (size_t)OPS * MOST * PAGE;
}

/* Only of flat folders that a test made. */
static void remove_dir(const char *path) {
    DIR *dir = opendir(path);
    struct dirent *e;
    char name[512];

    while (dir && (e = readdir(dir))) {
        (void)snprintf(name, sizeof(name), "%s/%s", path, e->d_name);
        (void)unlink(name);
    }
    if (dir)
        (void)closedir(dir);
    (void)rmdir(path);
}

static bool box_open(struct box *b, const struct how_row *how) {
    struct cst_aio_options options = { .directory = b->dir, .buffered = how->buffered };
    char why[160];
    int r;

    *b = (struct box){ .dir = "/tmp/cst-io-XXXXXX" };
    assert_non_null(mkdtemp(b->dir));
    b->memory = mmap(NULL, arena(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(b->memory != MAP_FAILED);
    options.kind = how->how == URING ? CST_AIO_URING : CST_AIO_THREADS;
    if (how->how == SIM) {
        assert_int_equal(cst_sim_disk_new(&b->disk, 64 << 20, 1), 0);
        r = cst_aio_new_sim(&b->aio, b->disk);
    } else {
        r = cst_aio_new(&b->aio, &options, why, sizeof(why));
    }
    if (r == CST_AIO_E_REFUSED) {
        print_message("%s is not tested: %s\n", how->name, why);
        assert_true(*why);
    } else {
        assert_int_equal(r, 0);
    }
    if (!r && how->how == FAULT) {
        struct cst_aio *inner = b->aio;

        assert_int_equal(cst_aio_new_fault(&b->aio, inner, 1), 0);
    }
    return !r;
}

static void box_close(struct box *b) {
    (void)cst_aio_free(b->aio);
    (void)cst_sim_disk_free(b->disk);
    (void)munmap(b->memory, arena());
    remove_dir(b->dir);
}

/* ---- contents ---- */

struct one {
    struct cst_aio_op op;
    int res;
    unsigned told;
};

static size_t told, in_flight_most;

static void one_done(struct cst_aio_op *op, int res) {
    struct one *o = cst_container_of(op, struct one, op);

    o->res = res;
    o->told++;
    told++;
}

static struct one *new_ops(struct box *b, struct cst_aio_file *file) {
    struct one *ops = cst_calloc(OPS, sizeof(*ops));

    assert_non_null(ops);
    for (size_t i = 0; i < OPS; i++)
        ops[i].op = (struct cst_aio_op){ .done = one_done,
                                         .file = file,
                                         .data = b->memory + i * MOST * PAGE };
    return ops;
}

/* Rounds of operations on disjoint ranges, so that any order gives the same; then all is read. */
static void random_work(struct box *b, struct cst_aio_file *file, uint8_t *model) {
    struct one *ops = new_ops(b, file);
    struct cst_seeded_random random;
    size_t n = 0;

    cst_seeded_random_init(&random, 7);
    assert_int_equal(cst_aio_now(file, CST_AIO_ALLOCATE, NULL, 0, PAGES * PAGE), 0);
    told = in_flight_most = 0;
    for (size_t round = 0; n + PAGES <= OPS; round++) {
        for (uint64_t at = 0; at < PAGES;) {
            uint64_t len = 1 + cst_seeded_random_next(&random) % MOST, kind = len % 3;
            struct cst_aio_op *op = &ops[n++].op;

            len = CST_MIN(len, PAGES - at);
            op->code = kind ? kind == 1 ? CST_AIO_WRITE : CST_AIO_READ : CST_AIO_DISCARD;
            op->offset = at * PAGE;
            op->length = len * PAGE;
            if (op->code == CST_AIO_WRITE) {
                memset(op->data, (int)cst_seeded_random_next(&random), op->length);
                memcpy(model + op->offset, op->data, op->length);
            } else if (op->code == CST_AIO_DISCARD) {
                memset(model + op->offset, 0, op->length);
            }
            cst_aio_submit(b->aio, op);
            at += len;
        }
        for (struct cst_aio_stats s; cst_aio_stats(b->aio, &s), s.queued + s.in_flight;) {
            in_flight_most = CST_MAX(in_flight_most, s.in_flight);
            (void)cst_aio_wait(b->aio, -1);
        }
    }
    assert_int_equal(told, n);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(ops[i].told, 1);
        assert_int_equal(ops[i].res, 0);
    }
    cst_free(ops);
}

static void check_contents(struct box *b) {
    uint8_t *model = cst_calloc(PAGES, PAGE);
    struct cst_aio_file *file;
    struct cst_aio_stats s;
    uint64_t size = 0;

    assert_non_null(model);
    assert_int_equal(cst_aio_open(b->aio, "f", CST_AIO_CREATE, &file), 0);
    random_work(b, file, model);
    assert_int_equal(cst_aio_size(file, &size), 0);
    assert_int_equal(size, PAGES * PAGE);
    assert_int_equal(cst_aio_now(file, CST_AIO_READ, b->memory, 0, PAGES * PAGE), 0);
    assert_memory_equal(b->memory, model, PAGES * PAGE);
    assert_int_equal(cst_aio_now(file, CST_AIO_SYNC, NULL, 0, 0), 0);
    cst_aio_stats(b->aio, &s);
    assert_true(s.in_flight == 0 && s.queued == 0 && s.errors == 0);
    assert_true(in_flight_most <= 16 + 4 + 4);
    (void)cst_aio_close(file);
    cst_free(model);
}

/* Reads, long writes and short ones don't take each other's places. */
static void check_lanes(struct box *b) {
    static const struct {
        enum cst_aio_code code;
        uint64_t length;
        unsigned places;
    } lanes[] = { { CST_AIO_WRITE, CST_AIO_SHORT + PAGE, 4 },
                  { CST_AIO_WRITE, CST_AIO_SHORT, 4 },
                  { CST_AIO_READ, PAGE, 16 } };
    enum { EACH = 20 };
    struct cst_aio_file *file;
    struct cst_aio_stats s;
    struct one *ops;
    unsigned places = 0;

    assert_int_equal(cst_aio_open(b->aio, "l", CST_AIO_CREATE, &file), 0);
    assert_int_equal(cst_aio_now(file, CST_AIO_ALLOCATE, NULL, 0, PAGES * PAGE), 0);
    ops = new_ops(b, file);
    told = 0;
    for (size_t i = 0; i < CST_COUNT(lanes) * EACH; i++) {
        ops[i].op.code = lanes[i / EACH].code;
        ops[i].op.length = lanes[i / EACH].length;
        cst_aio_submit(b->aio, &ops[i].op);
    }
    for (size_t i = 0; i < CST_COUNT(lanes); i++)
        places += lanes[i].places;
    cst_aio_kick(b->aio);
    cst_aio_stats(b->aio, &s);
    assert_int_equal(s.in_flight, places);
    assert_int_equal(s.queued, CST_COUNT(lanes) * EACH - places);
    cst_aio_drain(b->aio);
    assert_int_equal(told, CST_COUNT(lanes) * EACH);
    (void)cst_aio_close(file);
    cst_free(ops);
}

static void check_regions(struct box *b) {
    struct cst_aio_file *file;
    bool registered = cst_aio_register(b->aio, b->memory, arena());

    assert_int_equal(cst_aio_open(b->aio, "r", CST_AIO_CREATE, &file), 0);
    memset(b->memory, 42, 4 * PAGE);
    assert_int_equal(cst_aio_now(file, CST_AIO_WRITE, b->memory, 0, 4 * PAGE), 0);
    assert_int_equal(cst_aio_now(file, CST_AIO_READ, b->memory + arena() - 4 * PAGE, 0, 4 * PAGE),
                     0);
    assert_memory_equal(b->memory + arena() - 4 * PAGE, b->memory, 4 * PAGE);
    if (registered)
        cst_aio_unregister(b->aio, b->memory);
    assert_int_equal(cst_aio_now(file, CST_AIO_READ, b->memory + 8 * PAGE, 0, 4 * PAGE), 0);
    assert_memory_equal(b->memory + 8 * PAGE, b->memory, 4 * PAGE);
    (void)cst_aio_close(file);
}

/* More than there may be in flight end while one is waited for: they are told later. */
static void check_now(struct box *b) {
    struct one *ops;
    struct cst_aio_file *file;

    assert_int_equal(cst_aio_open(b->aio, "n", CST_AIO_CREATE, &file), 0);
    ops = new_ops(b, file);
    told = 0;
    for (size_t i = 0; i < PAGES; i++) {
        ops[i].op.code = CST_AIO_WRITE;
        ops[i].op.offset = i * PAGE;
        ops[i].op.length = PAGE;
        cst_aio_submit(b->aio, &ops[i].op);
    }
    assert_int_equal(cst_aio_now(file, CST_AIO_WRITE, b->memory, PAGES * PAGE, PAGE), 0);
    assert_int_equal(cst_aio_now(file, CST_AIO_READ, b->memory, PAGES * PAGE, PAGE), 0);
    assert_int_equal(told, 0);
    cst_aio_drain(b->aio);
    assert_int_equal(told, PAGES);
    for (size_t i = 0; i < PAGES; i++)
        assert_true(ops[i].told == 1 && !ops[i].res);
    (void)cst_aio_close(file);
    cst_free(ops);
}

/* ---- edges ---- */

static void check_short(struct box *b) {
    struct cst_aio_file *file;

    assert_int_equal(cst_aio_open(b->aio, "s", CST_AIO_CREATE, &file), 0);
    assert_int_equal(cst_aio_now(file, CST_AIO_WRITE, b->memory, 0, 2 * PAGE), 0);
    assert_int_equal(cst_aio_now(file, CST_AIO_READ, b->memory, PAGE, PAGE), 0);
    assert_true(cst_aio_now(file, CST_AIO_READ, b->memory, PAGE, 2 * PAGE) < 0);
    assert_true(cst_aio_now(file, CST_AIO_READ, b->memory, 8 * PAGE, PAGE) < 0);
    assert_int_equal(cst_aio_resize(file, PAGE), 0);
    assert_true(cst_aio_now(file, CST_AIO_READ, b->memory, PAGE, PAGE) < 0);
    (void)cst_aio_close(file);
}

static void check_small(struct box *b) {
    static char text[] = "not a multiple of anything", back[sizeof(text)];
    struct cst_aio_file *file;
    uint64_t size;

    assert_int_equal(
        cst_aio_open(b->aio, "t", CST_AIO_CREATE | CST_AIO_EXCLUSIVE | CST_AIO_BUFFERED, &file), 0);
    assert_false(cst_aio_is_direct(file));
    assert_int_equal(cst_aio_now(file, CST_AIO_WRITE, text, 3, sizeof(text)), 0);
    assert_int_equal(cst_aio_now(file, CST_AIO_READ, back, 3, sizeof(text)), 0);
    assert_memory_equal(text, back, sizeof(text));
    assert_int_equal(cst_aio_size(file, &size), 0);
    assert_int_equal(size, 3 + sizeof(text));
    (void)cst_aio_close(file);
}

static int collect_name(void *arg, const char *name) {
    char *all = arg;

    (void)snprintf(all + strlen(all), 64, "%s ", name);
    return 0;
}

static void check_names(struct box *b) {
    struct cst_aio_file *file, *again;
    char names[256] = "";
    uint64_t space;

    assert_int_equal(cst_aio_open(b->aio, "none", 0, &file), CST_AIO_E_ABSENT);
    assert_true(cst_aio_open(b->aio, "../none", CST_AIO_CREATE, &file) < 0);
    assert_int_equal(cst_aio_open(b->aio, "a", CST_AIO_CREATE | CST_AIO_EXCLUSIVE, &file), 0);
    assert_int_equal(cst_aio_open(b->aio, "a", CST_AIO_CREATE | CST_AIO_EXCLUSIVE, &again),
                     CST_AIO_E_EXISTS);
    assert_int_equal(cst_aio_open(b->aio, "a", CST_AIO_READ_ONLY, &again), 0);
    assert_int_equal(cst_aio_lock(file), 0);
    assert_int_equal(cst_aio_lock(again), CST_AIO_E_LOCKED);
    (void)cst_aio_close(file);
    assert_int_equal(cst_aio_lock(again), 0);
    (void)cst_aio_close(again);
    assert_int_equal(cst_aio_rename(b->aio, "a", "b"), 0);
    assert_int_equal(cst_aio_rename(b->aio, "a", "b"), CST_AIO_E_ABSENT);
    assert_int_equal(cst_aio_sync_directory(b->aio), 0);
    assert_int_equal(cst_aio_list(b->aio, collect_name, names), 0);
    assert_string_equal(names, "b ");
    assert_int_equal(cst_aio_unlink(b->aio, "b"), 0);
    assert_int_equal(cst_aio_unlink(b->aio, "b"), CST_AIO_E_ABSENT);
    assert_int_equal(cst_aio_space(b->aio, &space), 0);
    assert_true(space > 0);
}

/* Submitting from done(), which must not be called from submit. */
static struct box *chained;
static unsigned links;

static void chain_done(struct cst_aio_op *op, int res) {
    assert_int_equal(res, 0);
    if (++links < 50)
        cst_aio_submit(chained->aio, op);
}

static void check_chain(struct box *b) {
    struct cst_aio_op op = { .done = chain_done, .code = CST_AIO_WRITE, .data = b->memory };

    chained = b;
    links = 0;
    op.length = PAGE;
    assert_int_equal(cst_aio_open(b->aio, "c", CST_AIO_CREATE, &op.file), 0);
    cst_aio_submit(b->aio, &op);
    assert_int_equal(links, 0);
    cst_aio_drain(b->aio);
    assert_int_equal(links, 50);
    assert_int_equal(cst_aio_wait(b->aio, -1), 0); /* nothing is in flight: it doesn't sleep */
    (void)cst_aio_close(op.file);
}

static void check_full(struct box *b) {
    struct rlimit old, less = { .rlim_cur = 2 * PAGE };
    struct cst_aio_file *file;

    if (b->disk) /* its own test */
        return;
    assert_int_equal(cst_aio_open(b->aio, "l", CST_AIO_CREATE, &file), 0);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    less.rlim_max = old.rlim_max;
    (void)signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &less), 0);
    assert_int_equal(cst_aio_now(file, CST_AIO_WRITE, b->memory, 0, 4 * PAGE), CST_AIO_E_FULL);
    assert_int_equal(cst_aio_now(file, CST_AIO_ALLOCATE, NULL, 0, 4 * PAGE), CST_AIO_E_FULL);
    assert_int_equal(cst_aio_now(file, CST_AIO_WRITE, b->memory, 0, PAGE), 0);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    (void)cst_aio_close(file);
}

static void check_strangers(struct box *b) {
    struct cst_aio_file *file;
    char name[128];

    if (b->disk)
        return;
    (void)snprintf(name, sizeof(name), "%s/link", b->dir);
    assert_int_equal(symlink("/etc/passwd", name), 0);
    assert_true(cst_aio_open(b->aio, "link", CST_AIO_READ_ONLY, &file) < 0);
    (void)snprintf(name, sizeof(name), "%s/pipe", b->dir);
    assert_int_equal(mkfifo(name, 0600), 0);
    assert_true(cst_aio_open(b->aio, "pipe", CST_AIO_READ_ONLY | CST_AIO_BUFFERED, &file) < 0);
}

/* ---- the grid ---- */

struct grid_row {
    const char *name;
    void (*check)(struct box *b);
    const struct how_row *how;
};

static void run(void **state) {
    const struct grid_row *row = *state;
    struct box b;

    if (box_open(&b, row->how))
        row->check(&b);
    box_close(&b);
}

/* All backends did the same work: the files hold the same bytes. */
static void same_bytes(void **state) {
    uint8_t *model = cst_calloc(PAGES, PAGE), *got = cst_calloc(PAGES, PAGE);

    (void)state;
    for (size_t i = 0; i < CST_COUNT(hows); i++) {
        struct cst_aio_file *file;
        struct box b;
        char name[128];
        int fd;

        if (hows[i].how == SIM || !box_open(&b, &hows[i])) {
            if (hows[i].how != SIM)
                box_close(&b);
            continue;
        }
        assert_int_equal(cst_aio_open(b.aio, "f", CST_AIO_CREATE, &file), 0);
        memset(model, 0, (size_t)PAGES * PAGE);
        random_work(&b, file, model);
        (void)cst_aio_close(file);
        (void)snprintf(name, sizeof(name), "%s/f", b.dir);
        fd = open(name, O_RDONLY);
        assert_int_equal(read(fd, got, (size_t)PAGES * PAGE), PAGES * PAGE);
        (void)close(fd);
        assert_memory_equal(got, model, (size_t)PAGES * PAGE);
        box_close(&b);
    }
    cst_free(model);
    cst_free(got);
}

int main(void) {
    static const struct grid_row checks[] = {
        { "contents", check_contents },   { "now", check_now },     { "lanes", check_lanes },
        { "regions", check_regions },     { "short", check_short }, { "small files", check_small },
        { "names", check_names },         { "chain", check_chain }, { "full", check_full },
        { "strangers", check_strangers },
    };
    static const struct CMUnitTest whole[] = { cmocka_unit_test(same_bytes) };
    int failed = 0;

    for (size_t i = 0; i < CST_COUNT(hows); i++) {
        struct grid_row rows[CST_COUNT(checks)];

        for (size_t k = 0; k < CST_COUNT(checks); k++) {
            rows[k] = checks[k];
            rows[k].how = &hows[i];
        }
        failed += cst_check_rows(hows[i].name, rows, sizeof(rows[0]), CST_COUNT(rows), run);
    }
    return failed + cmocka_run_group_tests(whole, NULL, NULL);
}
