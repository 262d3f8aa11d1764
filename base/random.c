/* SPDX-License-Identifier: Apache-2.0 */
/* getrandom(2) and a seeded generator behind one seam; see random.h. */
#include "base/random.h"

#include "base/err.h"
#include "base/macros.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

static int system_fill(struct cst_random *random, void *out, size_t n) {
    uint8_t *p = out;

    (void)random;
    while (n) {
        ssize_t got = getrandom(p, n, 0);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return cst_err(-errno);
        p += got;
        n -= (size_t)got;
    }
    return 0;
}

struct cst_random cst_random_system = { .fill = system_fill };

uint64_t cst_seeded_random_next(struct cst_seeded_random *s) {
    uint64_t z = s->state += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static int seeded_fill(struct cst_random *random, void *out, size_t n) {
    struct cst_seeded_random *s = cst_container_of(random, struct cst_seeded_random, random);
    uint8_t *p = out;

    for (size_t i = 0; i < n; i += sizeof(uint64_t)) {
        uint64_t v = cst_seeded_random_next(s);

        memcpy(p + i, &v, CST_MIN(n - i, sizeof(v)));
    }
    return 0;
}

void cst_seeded_random_init(struct cst_seeded_random *s, uint64_t seed) {
    s->random.fill = seeded_fill;
    s->state = seed;
}
