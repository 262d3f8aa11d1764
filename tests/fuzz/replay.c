/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replays a corpus through a fuzz target without a fuzzing engine: every file as it is, then cut
 * short, grown and with bits flipped, the same way each time. A crash is the failure; the inputs
 * lie in exact-size heap blocks, so that the address sanitizer sees a read past the end.
 */
#include "tests/fuzz/fuzz.h"

#include "base/random.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>

enum { MUTATIONS = 500, INPUT_MAX = 1 << 20, GROWTH_MAX = 16 };

static void run(const uint8_t *data, size_t size) {
    uint8_t *exact = room(size);

    memcpy(exact, data, size);
    (void)LLVMFuzzerTestOneInput(exact, size);
    free(exact);
}

static void mutate(struct cst_seeded_random *rng, const uint8_t *data, size_t size,
                   uint8_t *scratch) {
    uint64_t v = cst_seeded_random_next(rng);
    unsigned flips = (unsigned)(v % 4);
    size_t n = size;

    memcpy(scratch, data, size);
    memset(scratch + size, (int)(v >> 8), GROWTH_MAX);
    if (v & 0x10000)
        n = (v >> 20) % (size + 1);
    else if (v & 0x20000)
        n = size + (v >> 20) % GROWTH_MAX;
    while (flips-- && n) {
        v = cst_seeded_random_next(rng);
        scratch[v % n] ^= (uint8_t)((v >> 40) ? (v >> 40) : 1);
    }
    run(scratch, n);
}

static int replay_file(const char *path) {
    static uint8_t data[INPUT_MAX], scratch[INPUT_MAX + GROWTH_MAX];
    struct cst_seeded_random rng;
    FILE *f = fopen(path, "re");
    size_t n;

    if (!f) {
        perror(path);
        return 1;
    }
    n = fread(data, 1, sizeof(data), f);
    (void)fclose(f);
    run(data, n);
    cst_seeded_random_init(&rng, n);
    for (int i = 0; i < MUTATIONS; i++)
        mutate(&rng, data, n, scratch);
    return 0;
}

int main(int argc, char **argv) {
    unsigned files = 0;

    for (int i = 1; i < argc; i++) {
        DIR *dir = opendir(argv[i]);
        struct dirent *entry;

        while (dir && (entry = readdir(dir))) {
            char path[4096];

            if (entry->d_name[0] == '.')
                continue;
            (void)snprintf(path, sizeof(path), "%s/%s", argv[i], entry->d_name);
            files++;
            if (replay_file(path))
                return 1;
        }
        if (dir)
            (void)closedir(dir);
    }
    printf("%u files\n", files);
    return files ? 0 : 1; /* an empty corpus tests nothing */
}
