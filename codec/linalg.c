/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The calls to OpenBLAS and LAPACK, by their Fortran names, which need no headers and take
 * workspace from the caller. Any thread, one call at a time.
 *
 * Fortran's matrices are column-major: the same bytes are the transpose there. So products swap
 * their factors, the upper triangle is called lower, and eigenvectors come out as rows.
 *
 * The serial OpenBLAS is linked: it starts no threads when it is loaded into a worker's process.
 * But callers at the same time can get the same buffer from it (0.3.21; some threads for some
 * seconds show it), so calls take turns. It has no other state that a call leaves behind.
 */
#include "codec/linalg.h"

#include "base/macros.h"

#include <assert.h>
#include <pthread.h>
#include <string.h>

typedef int32_t blas_int;

/* Lengths of character arguments follow at the end, by the convention of gfortran. */
void sgemm_(const char *ta, const char *tb, const blas_int *m, const blas_int *n, const blas_int *k,
            const float *alpha, const float *a, const blas_int *lda, const float *b,
            const blas_int *ldb, const float *beta, float *c, const blas_int *ldc, size_t, size_t);
void ssyrk_(const char *uplo, const char *trans, const blas_int *n, const blas_int *k,
            const float *alpha, const float *a, const blas_int *lda, const float *beta, float *c,
            const blas_int *ldc, size_t, size_t);
void ssyevd_(const char *jobz, const char *uplo, const blas_int *n, float *a, const blas_int *lda,
             float *w, float *work, const blas_int *lwork, blas_int *iwork, const blas_int *liwork,
             blas_int *info, size_t, size_t);
void sgeqrf_(const blas_int *m, const blas_int *n, float *a, const blas_int *lda, float *tau,
             float *work, const blas_int *lwork, blas_int *info);
void sorgqr_(const blas_int *m, const blas_int *n, const blas_int *k, float *a, const blas_int *lda,
             const float *tau, float *work, const blas_int *lwork, blas_int *info);
void dpotrf_(const char *uplo, const blas_int *n, double *a, const blas_int *lda, blas_int *info,
             size_t);
void dtrsm_(const char *side, const char *uplo, const char *trans, const char *diag,
            const blas_int *m, const blas_int *n, const double *alpha, const double *a,
            const blas_int *lda, double *b, const blas_int *ldb, size_t, size_t, size_t, size_t);

const char *openblas_get_corename(void);

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

static void begin(void) {
    (void)pthread_mutex_lock(&turn);
}

static void end(void) {
    (void)pthread_mutex_unlock(&turn);
}

const char *cst_linalg_core_type(void) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        !strcmp(openblas_get_corename(), "Prescott"))
        return "Haswell";
#endif
    return NULL;
}

void cst_gemm(bool transpose_a, bool transpose_b, uint32_t m, uint32_t n, uint32_t k, float alpha,
              const float *a, uint32_t lda, const float *b, uint32_t ldb, float beta, float *c,
              uint32_t ldc) {
    const blas_int fm = (blas_int)m, fn = (blas_int)n, fk = (blas_int)k;
    const blas_int fa = (blas_int)lda, fb = (blas_int)ldb, fc = (blas_int)ldc;

    if (!m || !n)
        return;
    begin();
    sgemm_(transpose_b ? "T" : "N", transpose_a ? "T" : "N", &fn, &fm, &fk, &alpha, b, &fb, a, &fa,
           &beta, c, &fc, 1, 1);
    end();
}

void cst_gram(uint32_t m, uint32_t n, float alpha, const float *a, uint32_t lda, float beta,
              float *c, uint32_t ldc) {
    const blas_int fm = (blas_int)m, fn = (blas_int)n, fa = (blas_int)lda, fc = (blas_int)ldc;

    if (!n)
        return;
    begin();
    ssyrk_("L", "N", &fn, &fm, &alpha, a, &fa, &beta, c, &fc, 1, 1);
    end();
}

void cst_gram_rows(uint32_t m, uint32_t n, float alpha, const float *a, uint32_t lda, float beta,
                   float *c, uint32_t ldc) {
    const blas_int fm = (blas_int)m, fn = (blas_int)n, fa = (blas_int)lda, fc = (blas_int)ldc;

    if (!m)
        return;
    begin();
    ssyrk_("L", "T", &fm, &fn, &alpha, a, &fa, &beta, c, &fc, 1, 1);
    end();
}

void cst_symmetrize(uint32_t n, float *a, uint32_t lda) {
    for (uint32_t i = 1; i < n; i++) {
        for (uint32_t j = 0; j < i; j++)
            a[(size_t)i * lda + j] = a[(size_t)j * lda + i];
    }
}

/* LAPACK's own minimum: 1 + 6 n + 2 n^2 floats, 3 + 5 n integers. */
static size_t eigen_floats(uint32_t n) {
    return cst_align_up(1 + 6 * (size_t)n + 2 * (size_t)n * n, 16);
}

size_t cst_eigen_work(uint32_t n) {
    return eigen_floats(n) + 3 + 5 * (size_t)n;
}

int cst_eigen(uint32_t n, float *a, uint32_t lda, float *values, float *work) {
    const blas_int fn = (blas_int)n, fa = (blas_int)lda, lwork = (blas_int)eigen_floats(n);
    const blas_int liwork = (blas_int)(3 + 5 * n);
    blas_int *iwork = (void *)(work + eigen_floats(n)), info = 0;

    _Static_assert(sizeof(blas_int) == sizeof(float), "the workspace is counted in floats");
    begin();
    if (n)
        ssyevd_("V", "L", &fn, a, &fa, values, work, &lwork, iwork, &liwork, &info, 1, 1);
    end();
    assert(info >= 0);
    return info ? CST_LINALG_E_STUCK : 0;
}

enum { QR_BLOCK = 32 }; /* LAPACK's block of columns */

size_t cst_orthonormalize_work(uint32_t n) {
    return n + (size_t)n * QR_BLOCK;
}

int cst_orthonormalize(uint32_t m, uint32_t n, float *a, uint32_t lda, float *work) {
    const blas_int fm = (blas_int)m, fn = (blas_int)n, fa = (blas_int)lda;
    const blas_int lwork = (blas_int)(n * QR_BLOCK);
    blas_int info = 0;

    assert(m >= n);
    if (!n)
        return 0;
    begin();
    sgeqrf_(&fm, &fn, a, &fa, work, work + n, &lwork, &info);
    if (!info)
        sorgqr_(&fm, &fn, &fn, a, &fa, work, work + n, &lwork, &info);
    end();
    assert(info >= 0);
    return info ? CST_LINALG_E_STUCK : 0;
}

/* B is the transpose of Fortran's, so the triangles of A = L L^T are divided out from the right. */
int cst_solve(uint32_t n, uint32_t columns, double *a, uint32_t lda, double *b, uint32_t ldb) {
    const blas_int fn = (blas_int)n, fc = (blas_int)columns, fa = (blas_int)lda, fb = (blas_int)ldb;
    const double one = 1;
    blas_int info = 0;

    if (!n)
        return 0;
    begin();
    dpotrf_("L", &fn, a, &fa, &info, 1);
    if (!info) {
        dtrsm_("R", "L", "T", "N", &fc, &fn, &one, a, &fa, b, &fb, 1, 1, 1, 1);
        dtrsm_("R", "L", "N", "N", &fc, &fn, &one, a, &fa, b, &fb, 1, 1, 1, 1);
    }
    end();
    assert(info >= 0);
    return info ? CST_LINALG_E_SINGULAR : 0;
}
