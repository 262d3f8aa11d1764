/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The seam to OpenBLAS: which triangle, which side, rows or columns. Against sums in double, closed
 * forms, and what defines each result. And that threads may call at the same time.
 */
#include "tests/lib/check.h"

#include "codec/linalg.h"

#include "base/random.h"
#include "base/restart.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { M = 37, N = 19, K = 23, LDA = 41 };

static float *numbers(size_t n, uint64_t seed) {
    float *x = calloc(n, sizeof(*x));
    struct cst_seeded_random random;

    assert_non_null(x);
    cst_seeded_random_init(&random, seed);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)((double)(cst_seeded_random_next(&random) >> 11) * 0x1p-52 - 1);
    return x;
}

static void products(void **state) {
    float *a = numbers((size_t)LDA * LDA, 1), *b = numbers((size_t)LDA * LDA, 2);
    float *c = numbers((size_t)LDA * LDA, 3), *was = numbers((size_t)LDA * LDA, 3);

    for (int ta = 0; ta < 2; ta++) {
        for (int tb = 0; tb < 2; tb++) {
            memcpy(c, was, (size_t)LDA * LDA * sizeof(*c));
            cst_gemm(ta, tb, M, N, K, 0.5f, a, LDA, b, LDA, 2, c, LDA);
            for (int i = 0; i < M; i++) {
                for (int j = 0; j < LDA; j++) {
                    double sum = 2 * (double)was[i * LDA + j];

                    for (int k = 0; j < N && k < K; k++)
                        sum += 0.5 * (double)a[ta ? k * LDA + i : i * LDA + k] *
                               (double)b[tb ? j * LDA + k : k * LDA + j];
                    assert_true(fabs((double)c[i * LDA + j] - (j < N ? sum : sum / 2)) < 1e-4);
                }
            }
        }
    }
    free(a);
    free(b);
    free(c);
    free(was);
}

static void grams(void **state) {
    float *a = numbers((size_t)M * LDA, 4), *c = numbers((size_t)N * LDA, 5);
    float *was = numbers((size_t)N * LDA, 5);

    cst_gram(M, N, 3, a, LDA, 1, c, LDA);
    for (int i = 0; i < N; i++) {
        for (int j = 0; j < N; j++) {
            double sum = (double)was[i * LDA + j];

            for (int k = 0; j >= i && k < M; k++)
                sum += 3 * (double)a[k * LDA + i] * (double)a[k * LDA + j];
            assert_true(fabs((double)c[i * LDA + j] - sum) < 1e-4);
        }
    }
    cst_symmetrize(N, c, LDA);
    for (int i = 0; i < N; i++) {
        for (int j = 0; j < N; j++)
            assert_true(c[i * LDA + j] == c[j * LDA + i]);
    }
    free(a);
    free(c);
    free(was);
}

/* The second difference: eigenvalues 2 - 2 cos(pi k / (n + 1)), vectors sin(pi k i / (n + 1)). */
static void eigenvectors(void **state) {
    float a[N * LDA] = { 0 }, values[N], *work = numbers(cst_eigen_work(N), 6);
    const double pi = acos(-1);

    for (int i = 0; i < N; i++) {
        a[i * LDA + i] = 2;
        if (i + 1 < N)
            a[i * LDA + i + 1] = -1;
    }
    assert_int_equal(cst_eigen(N, a, LDA, values, work), 0);
    for (int k = 0; k < N; k++) {
        double step = pi * (k + 1) / (N + 1), sign = a[k * LDA] > 0 ? 1 : -1;

        assert_true(fabs((double)values[k] - (2 - 2 * cos(step))) < 1e-5);
        for (int i = 0; i < N; i++)
            assert_true(fabs(sign * (double)a[k * LDA + i] -
                             sqrt(2.0 / (N + 1)) * sin(step * (i + 1))) < 1e-5);
    }
    free(work);
}

static void orthonormal_rows(void **state) {
    float *a = numbers((size_t)N * LDA, 7), *was = numbers((size_t)N * LDA, 7);
    float *work = numbers(cst_orthonormalize_work(N), 8);

    memcpy(a + 5 * LDA, a + 2 * LDA, M * sizeof(*a)); /* dependent on an earlier one */
    assert_int_equal(cst_orthonormalize(M, N, a, LDA, work), 0);
    for (int i = 0; i < N; i++) {
        double left = 0;

        for (int j = 0; j < N; j++) {
            double dot = 0;

            for (int k = 0; k < M; k++)
                dot += (double)a[i * LDA + k] * (double)a[j * LDA + k];
            assert_true(fabs(dot - (i == j)) < 1e-5);
        }
        /* what was row i is in the span of the first i + 1 */
        for (int k = 0; k < M && i != 5; k++)
            left += (double)was[i * LDA + k] * (double)was[i * LDA + k];
        for (int j = 0; j <= i && i != 5; j++) {
            double dot = 0;

            for (int k = 0; k < M; k++)
                dot += (double)was[i * LDA + k] * (double)a[j * LDA + k];
            left -= dot * dot;
        }
        assert_true(fabs(left) < 1e-4);
    }
    free(a);
    free(was);
    free(work);
}

static void solutions(void **state) {
    enum { C = 5 };
    float *f = numbers((size_t)M * N, 9), *g = numbers((size_t)N * C, 10);
    double a[N * LDA] = { 0 }, full[N][N], b[N * C];

    for (int i = 0; i < N; i++) {
        for (int j = 0; j < N; j++) {
            full[i][j] = i == j;
            for (int k = 0; k < M; k++)
                full[i][j] += (double)f[k * N + i] * (double)f[k * N + j];
            a[i * LDA + j] = j >= i ? full[i][j] : NAN;
        }
        for (int c = 0; c < C; c++)
            b[i * C + c] = (double)g[i * C + c];
    }
    assert_int_equal(cst_solve(N, C, a, LDA, b, C), 0);
    for (int i = 0; i < N; i++) {
        for (int c = 0; c < C; c++) {
            double sum = 0;

            for (int j = 0; j < N; j++)
                sum += full[i][j] * b[j * C + c];
            assert_true(fabs(sum - (double)g[i * C + c]) < 1e-10);
        }
    }
    memset(a, 0, sizeof(a));
    assert_int_equal(cst_solve(N, C, a, LDA, b, C), CST_LINALG_E_SINGULAR);
    free(f);
    free(g);
}

enum { THREADS = 4, SIDE = 200, ROUNDS = 20 };

static void *multiply(void *arg) {
    const float *x = arg;
    float *first = numbers((size_t)SIDE * SIDE, 12), *again = numbers((size_t)SIDE * SIDE, 12);
    bool same = true;

    cst_gemm(false, true, SIDE, SIDE, SIDE, 1, x, SIDE, x, SIDE, 0, first, SIDE);
    for (int i = 0; i < ROUNDS; i++) {
        memset(again, 0, (size_t)SIDE * SIDE * sizeof(*again));
        cst_gemm(false, true, SIDE, SIDE, SIDE, 1, x, SIDE, x, SIDE, 0, again, SIDE);
        same &= memcmp(first, again, (size_t)SIDE * SIDE * sizeof(*again)) == 0;
    }
    free(again);
    if (same)
        return first;
    free(first);
    return NULL;
}

static void threads_at_once(void **state) {
    float *x = numbers((size_t)SIDE * SIDE, 11), *first = multiply(x);
    pthread_t thread[THREADS];

    assert_non_null(first);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, multiply, x), 0);
    for (int i = 0; i < THREADS; i++) {
        void *got = NULL;

        pthread_join(thread[i], &got);
        assert_non_null(got);
        assert_memory_equal(got, first, (size_t)SIDE * SIDE * sizeof(*first));
        free(got);
    }
    free(first);
    free(x);
}

/* Since main() asked for it. */
static void kernels_fit_the_processor(void **state) {
    assert_null(cst_linalg_core_type());
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products),
        cmocka_unit_test(grams),
        cmocka_unit_test(eigenvectors),
        cmocka_unit_test(orthonormal_rows),
        cmocka_unit_test(solutions),
        cmocka_unit_test(threads_at_once),
        cmocka_unit_test(kernels_fit_the_processor),
    };

    cst_restart_with(argv, CST_LINALG_VARIABLE, cst_linalg_core_type());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
