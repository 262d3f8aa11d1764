/* SPDX-License-Identifier: Apache-2.0 */
/* The randomness seam. The system source is getrandom(2); tests pass a seeded one. */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct cst_random {
    /* Fills all n bytes or returns a negative errno. */
    int (*fill)(struct cst_random *random, void *out, size_t n);
};

extern struct cst_random cst_random_system;

struct cst_seeded_random {
    struct cst_random random; /* first: pass &s.random */
    uint64_t state;
};

/* splitmix64, Steele, Lea and Flood 2014: deterministic, never for secrets. */
void cst_seeded_random_init(struct cst_seeded_random *s, uint64_t seed);
uint64_t cst_seeded_random_next(struct cst_seeded_random *s);
