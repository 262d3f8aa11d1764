/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spill.*: the disk tier's engine beside a bare io_uring probe.
 *   write_over_probe    the engine's GB/s over the probe's: frames of 1.5 MiB, one after the other
 *   read_over_probe     the same for the frames that were written last, all asked for at once
 *   threads_over_uring  the engine over pread/pwrite threads, over the engine over io_uring: the
 *                       worse of writing and reading
 *   cores_per_gbs       processor seconds of the whole process for a GB, less what the checksum or
 *                       the cipher alone takes for it: the worse of writing and reading
 * Figures with _aes encrypt.
 *
 * What is compared: all sides use the same file sizes, block size, depths (4 writes, 16 reads) and
 * O_DIRECT, and overwrite blocks that were written before; the probe writes to the very files of
 * the engine over io_uring. Nobody syncs within a measurement: an engine that stores a frame
 * doesn't wait for the disk's own cache either. The engine also copies (or encrypts) each frame,
 * checks it, and writes its header once the payload is on disk; reading, it checks or decrypts
 * each. Sides take turns in rounds, in another order each round; a value is the median of the
 * ratios of ROUNDS rounds, after WARM_UP rounds that don't count; low and high are the 10 and 90 %
 * quantiles. The checksum or cipher alone is timed in the same rounds; check_gbs is what all
 * processors reach that do nothing else: no engine that needs it writes faster. Before that both
 * engines write the same frames, and their files must be the same to the byte.
 *
 * Directories are made in $CISTERN_BENCH_DIR, else in the current one: /tmp may be memory.
 */
#include "base/crc32c.h"
#include "base/mem.h"
#include "bench/bench.h"
#include "bench/benches.h"
#include "bench/spill_engine.h"
#include "bench/spill_probe.h"
#include "store/seg_format.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 40, WARM_UP = 4, CHECKED = 16 /* frames of the check alone, a round */ };
enum side { URING, THREADS, PROBE, SIDES };

struct spill {
    enum cst_seg_crypt crypt;
    struct spill_frames frames;
    struct spill_engine *engines[2]; /* by side */
    struct spill_probe *probe;
    uint8_t *scratch; /* of a frame */
    EVP_CIPHER_CTX *cipher;
    size_t checked; /* frames of the check alone so far */
};

/* What a round says: reading [0] and writing [1]. */
struct round {
    double seconds[SIDES][2], cpu[SIDES][2];
    double check_cpu[2]; /* of the checksum or cipher for as much */
};

static const double GB = (double)(SPILL_BATCH * SPILL_FRAME) * 1e-9; /* of a round, each way */

static double cpu_seconds(void) {
    struct timespec t;

    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- the sides ---- */

static int run_side(struct spill *s, enum side side, bool write) {
    if (side == PROBE)
        return spill_probe_run(s->probe, write);
    return write ? spill_engine_write(s->engines[side], SPILL_BATCH)
                 : spill_engine_read(s->engines[side]);
}

/* Once over a frame with what can't be saved. */
static int check_frame(struct spill *s, size_t i, bool encrypt) {
    const uint8_t *frame = s->frames.frames + i * SPILL_FRAME;
    uint8_t key[32] = { 1 }, iv[12] = { 2 };
    int n;

    if (s->crypt == CST_SEG_CRYPT_OFF)
        return cst_crc32c(0, frame, SPILL_FRAME) == s->frames.crc[i] ? 0 : -EIO;
    return EVP_CipherInit_ex(s->cipher, EVP_aes_256_gcm(), NULL, key, iv, encrypt) == 1 &&
                   EVP_CipherUpdate(s->cipher, s->scratch, &n, frame, SPILL_FRAME) == 1
               ? 0
               : -EIO;
}

/* Core seconds for as many bytes as a round has; of other frames each time, which come from memory
 * as they do for the engine. */
static int check_cost(struct spill *s, bool encrypt, double *out) {
    double start = cpu_seconds();
    int r = 0;

    for (size_t i = 0; i < CHECKED && !r; i++)
        r = check_frame(s, s->checked++ % SPILL_BATCH, encrypt);
    *out = (cpu_seconds() - start) * SPILL_BATCH / CHECKED;
    return r;
}

static int run_round(struct spill *s, unsigned number, struct round *out) {
    int r = check_cost(s, false, &out->check_cpu[0]);

    if (!r)
        r = check_cost(s, true, &out->check_cpu[1]);
    for (unsigned i = 0; i < 2 * SIDES && !r; i++) {
        unsigned side = (number + i / 2) % SIDES, write = !(i % 2);
        double start = cst_seconds(), cpu = cpu_seconds();

        r = run_side(s, side, write);
        out->seconds[side][write] = cst_seconds() - start;
        out->cpu[side][write] = cpu_seconds() - cpu;
    }
    return r;
}

/* ---- the same bytes ---- */

static int open_segment(const struct spill_engine *e, unsigned id) {
    char name[600];
    int n = snprintf(name, sizeof(name), "%s/", spill_engine_dir(e));

    (void)snprintf(name + n, sizeof(name) - (size_t)n, CST_DISK_SEGMENT_NAME, id);
    return open(name, O_RDONLY | O_DIRECT | O_CLOEXEC);
}

static int same_bytes(struct spill *s, int a, int b) {
    uint8_t *x = s->frames.buffers, *y = x + SPILL_FRAME;
    ssize_t n = 1;

    for (off_t at = 0; n > 0; at += n) {
        n = pread(a, x, SPILL_FRAME, at);
        if (n < 0 || pread(b, y, SPILL_FRAME, at) != n || memcmp(x, y, (size_t)n))
            return -EBADMSG;
    }
    return 0;
}

static int same_files(struct spill *s) {
    unsigned id = 0;
    int r = 0;

    spill_engine_settle(s->engines[URING]);
    spill_engine_settle(s->engines[THREADS]);
    for (; !r; id++) {
        int a = open_segment(s->engines[URING], id), b = open_segment(s->engines[THREADS], id);

        if (a < 0 && b < 0)
            break;
        r = a >= 0 && b >= 0 ? same_bytes(s, a, b) : -EBADMSG;
        cst_close(a);
        cst_close(b);
    }
    return r ? r : id ? 0 : -ENOENT;
}

/* ---- set-up ---- */

static int engine_open(struct spill *s, enum side side) {
    return spill_engine_new(&s->engines[side], &s->frames,
                            side == URING ? CST_AIO_URING : CST_AIO_THREADS, s->crypt);
}

/* Both tiers are full afterwards. */
static int fill(struct spill *s) {
    size_t all = SPILL_TIER / SPILL_FRAME, half = all / 2;
    int r = spill_engine_write(s->engines[URING], half);

    if (!r)
        r = spill_engine_write(s->engines[THREADS], half);
    if (!r)
        r = same_files(s);
    if (r == -EBADMSG)
        (void)fprintf(stderr, "spill: the backends' files differ\n");
    if (!r)
        r = spill_engine_write(s->engines[URING], all);
    return r ? r : spill_engine_write(s->engines[THREADS], all);
}

static int spill_open(struct spill *s) {
    int r = spill_frames_init(&s->frames);

    s->scratch = cst_map(SPILL_FRAME);
    s->cipher = EVP_CIPHER_CTX_new();
    if (!r && (!s->scratch || !s->cipher))
        r = -ENOMEM;
    if (!r)
        r = engine_open(s, URING);
    if (!r)
        r = engine_open(s, THREADS);
    if (!r)
        r = fill(s);
    if (!r)
        r = spill_probe_new(&s->probe, spill_engine_dir(s->engines[URING]), &s->frames);
    return r ? r : spill_probe_run(s->probe, true);
}

static void spill_close(struct spill *s) {
    s->probe = spill_probe_free(s->probe);
    s->engines[URING] = spill_engine_free(s->engines[URING]);
    s->engines[THREADS] = spill_engine_free(s->engines[THREADS]);
    EVP_CIPHER_CTX_free(s->cipher);
    s->scratch = cst_unmap(s->scratch, SPILL_FRAME);
    spill_frames_deinit(&s->frames);
}

/* ---- figures ---- */

struct summary {
    double median, low, high;
};

static struct summary summarize(double values[ROUNDS]) {
    return (struct summary){ .median = cst_quantile(values, ROUNDS, 0.5),
                             .low = cst_quantile(values, ROUNDS, 0.1),
                             .high = cst_quantile(values, ROUNDS, 0.9) };
}

/* The rate of one side over that of another one in the same round. */
static struct summary ratio(const struct round rounds[ROUNDS], enum side a, enum side b,
                            bool write) {
    double values[ROUNDS];

    for (size_t i = 0; i < ROUNDS; i++)
        values[i] = rounds[i].seconds[b][write] / rounds[i].seconds[a][write];
    return summarize(values);
}

static double rate(const struct round rounds[ROUNDS], enum side side, bool write) {
    double values[ROUNDS];

    for (size_t i = 0; i < ROUNDS; i++)
        values[i] = GB / rounds[i].seconds[side][write];
    return cst_quantile(values, ROUNDS, 0.5);
}

/* Core seconds for a GB: of a side, or of the check alone. */
static double cost(const struct round rounds[ROUNDS], enum side side, bool write) {
    double sum = 0;

    for (size_t i = 0; i < ROUNDS; i++)
        sum += side == SIDES ? rounds[i].check_cpu[write] : rounds[i].cpu[side][write];
    return sum / ROUNDS / GB;
}

static void report_ratio(const char *what, const char *suffix, const struct round rounds[ROUNDS],
                         enum side a, enum side b, bool write, double target) {
    struct summary v = ratio(rounds, a, b, write);
    char name[64];

    (void)snprintf(name, sizeof(name), "spill.%s%s", what, suffix);
    cst_report(&(struct cst_figure){ .name = name,
                                     .value = v.median,
                                     .unit = "ratio",
                                     .sense = CST_AT_LEAST,
                                     .target = target },
               "\"what\": \"%s\", \"low\": %.3f, \"high\": %.3f, \"gbs\": %.2f, \"of_gbs\": %.2f, "
               "\"cpu_s_per_gb\": %.3f, \"of_cpu_s_per_gb\": %.3f",
               write ? "write" : "read", v.low, v.high, rate(rounds, a, write),
               rate(rounds, b, write), cost(rounds, a, write), cost(rounds, b, write));
}

static void report_cores(const char *suffix, const struct round rounds[ROUNDS]) {
    double read = cost(rounds, URING, false), write = cost(rounds, URING, true),
           check_read = cost(rounds, SIDES, false), check_write = cost(rounds, SIDES, true);
    char name[64];

    (void)snprintf(name, sizeof(name), "spill.cores_per_gbs%s", suffix);
    cst_report(&(struct cst_figure){ .name = name,
                                     .value = CST_MAX(read - check_read, write - check_write),
                                     .unit = "cores",
                                     .sense = CST_AT_MOST,
                                     .target = 0.15 },
               "\"read\": %.3f, \"read_check\": %.3f, \"write\": %.3f, \"write_check\": %.3f, "
               "\"check_gbs\": %.1f",
               read, check_read, write, check_write,
               (double)sysconf(_SC_NPROCESSORS_ONLN) / check_write);
}

static void report(const char *suffix, const struct round rounds[ROUNDS]) {
    bool worse =
        ratio(rounds, THREADS, URING, true).median < ratio(rounds, THREADS, URING, false).median;

    report_ratio("write_over_probe", suffix, rounds, URING, PROBE, true, 0.9);
    report_ratio("read_over_probe", suffix, rounds, URING, PROBE, false, 0.9);
    report_ratio("threads_over_uring", suffix, rounds, THREADS, URING, worse, 0.7);
    report_cores(suffix, rounds);
}

static int one_crypt(enum cst_seg_crypt crypt, const char *suffix) {
    struct spill s = { .crypt = crypt };
    struct round rounds[ROUNDS], dropped;
    int r = spill_open(&s);

    for (unsigned i = 0; i < WARM_UP && !r; i++)
        r = run_round(&s, i, &dropped);
    for (unsigned i = 0; i < ROUNDS && !r; i++)
        r = run_round(&s, i, &rounds[i]);
    spill_close(&s);
    if (!r)
        report(suffix, rounds);
    return r;
}

int cst_bench_spill(void) {
    int r = spill_probe_allowed();

    if (r) {
        cst_report_skipped("spill", "io_uring is refused here, so there is no probe");
        return 0;
    }
    cst_unpin();
    r = one_crypt(CST_SEG_CRYPT_OFF, "");
    return r ? r : one_crypt(CST_SEG_CRYPT_AES, "_aes");
}
