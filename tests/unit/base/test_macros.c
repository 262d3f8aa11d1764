/* SPDX-License-Identifier: Apache-2.0 */
/* Cleanup attributes, ownership moves, alignment, descriptors. */
#include "tests/lib/check.h"

#include "base/macros.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

struct thing {
    int *frees;
};

static struct thing *thing_free(struct thing *t) {
    if (t)
        ++*t->frees;
    return NULL;
}
CST_DEFINE_FREEP(struct thing, thing_free)

static void cleanup_runs_unless_stolen(void **state) {
    int frees = 0;
    struct thing t = { &frees }, *kept = NULL;

    {
        cst_auto(thing_freep) struct thing *p = &t;

        (void)p;
    }
    assert_int_equal(frees, 1);
    {
        cst_auto(thing_freep) struct thing *p = &t;

        kept = cst_steal(&p);
        assert_null(p);
    }
    assert_int_equal(frees, 1);
    assert_ptr_equal(kept, &t);
    {
        cst_auto(thing_freep) struct thing *p = NULL;

        (void)p;
    }
    assert_int_equal(frees, 1);
}

static void descriptors_close_once(void **state) {
    int raw;

    {
        cst_auto(cst_closep) int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

        raw = fd;
        assert_true(fd >= 0);
    }
    assert_int_equal(fcntl(raw, F_GETFD), -1);
    assert_int_equal(errno, EBADF);
    {
        cst_auto(cst_closep) int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

        raw = cst_steal_fd(&fd);
        assert_int_equal(fd, -1);
    }
    assert_true(fcntl(raw, F_GETFD) >= 0);
    assert_int_equal(cst_close(raw), -1);
    assert_int_equal(cst_close(-1), -1);
}

static void align_up_rounds_to_the_next_multiple(void **state) {
    for (uint64_t align = 1; align <= 4096; align *= 2)
        for (uint64_t n = 0; n < 9000; n += 13)
            assert_int_equal(cst_align_up(n, align), (n + align - 1) / align * align);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cleanup_runs_unless_stolen),
        cmocka_unit_test(descriptors_close_once),
        cmocka_unit_test(align_up_rounds_to_the_next_multiple),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
